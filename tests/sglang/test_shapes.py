"""The attention of each supported model class, in tiny models that SGLang builds on a CPU; which models are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

HERE = Path(__file__).parent
YARN, PLAIN = "DeepseekScalingRotaryEmbedding", "RotaryEmbedding"
EXPECTED = {
    "deepseek-v2-lite": (YARN, [512, 64, 128, 128]),
    "deepseek-v2": (YARN, [512, 64, 128, 128]),
    "deepseek-v3": (YARN, [512, 64, 128, 128]),
    "kimi-k2": (YARN, [512, 64, 128, 128]),
    "moonlight": (PLAIN, [512, 64, 128, 128]),
    "glm-4.7-flash": (YARN, [512, 64, 192, 256]),
    "joyai-flash": (PLAIN, [512, 64, 128, 128]),
    "longcat-flash": (YARN, [512, 64, 128, 128]),
    "mistral-large-3": (YARN, [512, 64, 128, 128]),
    "mistral-small-4": (YARN, [256, 64, 64, 128]),
}
DSA = "sparse attention (DSA) is not supported: its index keys cannot be turned in place"
REFUSED = {
    "DeepSeek-V3.2": [
        "DeepSeek-V3.2 (DeepseekV32ForCausalLM) is not supported: DSA index keys cannot be turned in place",
        DSA,
    ],
    "DeepSeek-V4": [
        "DeepSeek-V4 (DeepseekV4ForCausalLM) is not supported: its rows are compressed over positions",
        DSA,
    ],
    "Kimi-Linear": [
        "Kimi-Linear (KimiLinearForCausalLM) is not supported: hybrid: a recurrent state cannot be moved",
        "NoPE models are not supported: their keys are not turned",
    ],
    "GLM-5": ["GLM-5 (GlmMoeDsaForCausalLM) is not supported: DSA index keys cannot be turned in place", DSA],
    "MiniCPM3": [
        "MiniCPM3 (MiniCPM3ForCausalLM) is not supported: longrope changes its frequencies with the length",
        "rope type 'longrope' is not supported: its frequencies change with the length of the sequence",
    ],
}


@pytest.fixture(scope="module")
def found():
    """What the plugin found in each model; those that are supported have passed the self-test."""
    done = subprocess.run(
        [sys.executable, str(HERE / "shapes.py")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE / "host"), *sys.path]), "OMP_NUM_THREADS": "1"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 0, (lines[-1:], done.stderr[-4000:])
    return {line.pop("name"): line for line in lines}


@pytest.mark.parametrize("shape", EXPECTED)
def test_the_self_test_passes(found, shape):
    rotary, sizes = EXPECTED[shape]
    assert found[shape] == {
        "problems": [],
        "rotary": rotary,
        "pairing": "interleaved",
        "sizes": sizes,
        "pool_layers": 2 if shape == "longcat-flash" else 1,
    }


@pytest.mark.parametrize("model", REFUSED)
def test_a_model_whose_rows_cannot_be_moved_is_refused_by_name(found, model):
    assert found[model] == {"problems": REFUSED[model]}


def test_no_shape_was_left_out(found):
    assert list(found) == [*EXPECTED, *REFUSED]
