"""benchmarks/on_gpu.py: every step is a command line that its program takes, as far as one can tell without a GPU."""

import argparse
import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import on_gpu


@pytest.mark.parametrize("step", on_gpu.STEPS, ids=lambda step: step.name)
def test_a_step_is_a_command_line(step, tmp_path):
    given = argparse.Namespace(out=tmp_path / "a folder", checkpoint=tmp_path / "model", texts=tmp_path / "texts.jsonl")
    words = shlex.split(on_gpu.command_of(step, given))
    assert words[:2] == ["exec", sys.executable]
    assert not any(f"{{{name}}}" in word for name in vars(given) for word in words)
    if words[2] != "-m":
        assert str(given.out / f"{step.name}.json") in words
        program = (on_gpu.HERE.parent / words[2]).read_text()
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in program, option
    if "--flags" in words:
        assert json.loads(words[words.index("--flags") + 1])
