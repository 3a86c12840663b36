import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from irminsul.errors import InputError, UnsupportedModelError
from irminsul.layout import ITEM_SIZES, RowLayout


def test_deepseek_v2_lite_row():
    layout = RowLayout(512, 64, "bfloat16")
    assert layout.width == 576
    assert layout.bytes_per_token(27) == 31_104


@given(st.integers(1, 64), st.integers(1, 16), st.sampled_from(sorted(ITEM_SIZES)), st.integers(0, 5))
def test_bytes_are_those_of_a_tensor(latent_dim, pairs, dtype, layers):
    layout = RowLayout(latent_dim, 2 * pairs, dtype)
    rows = torch.zeros(layers, layout.width, dtype=getattr(torch, dtype))
    assert layout.bytes_per_token(layers) == rows.numel() * rows.element_size()


def test_split_returns_views_of_any_leading_shape():
    layout = RowLayout(3, 2, "float32")
    rows = torch.zeros(4, 6, 5)
    latent, rope = layout.split(rows)
    latent.fill_(1.0)
    rope.fill_(2.0)
    assert rows[2, 3].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_split_refuses_rows_of_another_width():
    with pytest.raises(AssertionError):
        RowLayout(3, 2, "float32").split(torch.zeros(4, 6))


def test_fingerprint_is_frozen_and_tells_formats_apart():
    assert RowLayout(512, 64, "bfloat16").fingerprint == "mla-512-64-bfloat16"
    others = [RowLayout(576, 64, "bfloat16"), RowLayout(512, 32, "bfloat16"), RowLayout(512, 64, "float16")]
    assert len({layout.fingerprint for layout in others}) == 3


def test_nope_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="NoPE"):
        RowLayout(512, 0, "bfloat16")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "torch.bfloat16", "float64", ""])
def test_an_unknown_dtype_is_refused_with_the_choices(dtype):
    with pytest.raises(UnsupportedModelError, match="supported: float32, bfloat16, float16"):
        RowLayout(512, 64, dtype)


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(0, 64), (-1, 64), (512, 63), (512, -2)])
def test_impossible_sizes_are_refused(latent_dim, rope_dim):
    with pytest.raises(InputError, match="must be"):
        RowLayout(latent_dim, rope_dim, "float32")


def test_importing_layout_does_not_import_torch():
    code = "import sys, irminsul.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
