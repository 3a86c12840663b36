"""What the doctor learns from SGLang itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

HOST = Path(__file__).parent / "host"
SOURCE = Path(__file__).parents[2] / "src"


def doctor(model, *flags):
    """Sentences by check and verdict; the command's standard output must be JSON and nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "irminsul", "doctor", str(model), "--json", "--", *flags],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HOST), *sys.path, str(SOURCE)])},
    )
    report = json.loads(done.stdout)
    assert report["works"] == (done.returncode == 0)
    found = {}
    for check in report["checks"]:
        found.setdefault((check["name"], check["verdict"]), []).append(check["sentence"])
    return found


def test_a_supported_server(tiny_checkpoint):
    found = doctor(tiny_checkpoint, "--attention-backend", "fa3", "--tp", "2")
    for name in ("sglang", "entry point", "settings", "surface", "flags", "model"):
        assert (name, "ok") in found, found


def test_all_that_is_refused_is_told_at_once(tiny_checkpoint):
    flags = ["--nnodes", "2", "--attn-dp-size", "2", "--enable-hierarchical-cache", "--disable-radix-cache"]
    overrides = ["--json-model-override-args", '{"architectures": ["LlamaForCausalLM"]}']
    found = doctor(tiny_checkpoint, *flags, *overrides)
    refused = [sentence.split()[0] for sentence in found["flags", "refused"]]
    assert sorted(refused) == ["--attn-dp-size", "--disable-radix-cache", "--enable-hierarchical-cache", "--nnodes"]
    assert "chooses one at start" in found["flags", "not checked"][0]
    assert found["model", "refused"][0].startswith("model class LlamaForCausalLM")


def test_flags_that_sglang_does_not_know(tiny_checkpoint):
    found = doctor(tiny_checkpoint, "--bogus")
    assert found["flags", "refused"] == ["sglang serve: error: unrecognized arguments: --bogus"]
    assert ("model", "ok") in found


def test_a_model_that_is_not_there(tmp_path):
    found = doctor(tmp_path / "none", "--radix-cache-backend", "flexkv")
    assert found["flags", "refused"] == ["--radix-cache-backend flexkv leaves irminsul out; it must be irminsul"]
    why = f"SGLang cannot read the config of {tmp_path / 'none'}: there is no such directory"
    assert found["model", "refused"] == [why]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "nvfp4"])
def test_packed_rows_are_refused_by_name(dtype, tiny_checkpoint):
    found = doctor(tiny_checkpoint, "--kv-cache-dtype", dtype)
    sentence = f"--kv-cache-dtype '{dtype}' is not supported: packed rows (fp8, fp4) are not moved; supported: "
    assert found["flags", "refused"] == [sentence + "auto, bf16, bfloat16"]
    assert ("model", "ok") in found
