"""Where there is no GPU, the Triton kernels run in Triton's interpreter.

It is chosen by a variable that Triton reads when a kernel is defined, and again when the first one runs.
"""

import numpy as np
import pytest
import torch

INTERPRETED = not torch.cuda.is_available()

with pytest.MonkeyPatch.context() as patch:
    if INTERPRETED:
        patch.setenv("TRITON_INTERPRET", "1")
    from irminsul.kernels import rows_triton  # noqa: F401


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the kernel is compiled for a GPU here")),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")],
        ),
    ],
    scope="session",
)
def device(request):
    return request.param


@pytest.fixture(scope="package", autouse=True)
def interpreter():
    """Keep the variable set, and let torch convert bfloat16.

    The interpreter cuts bits off and takes subnormals for others; a GPU rounds to nearest even and keeps subnormals,
    as torch does.
    """
    if not INTERPRETED:
        yield
        return
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def as_on_a_gpu(values, source, target, rounding):
        if (source, target) == (float32, bfloat16):
            return torch.from_numpy(np.array(values)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (bfloat16, float32):
            return (values.astype(np.uint32) << 16).view(np.float32)
        return convert(values, source, target, rounding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(interpreter, "_convert_float", as_on_a_gpu)
        yield
