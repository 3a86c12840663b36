"""Steps: every command line is one that its program takes, as far as one can tell without a GPU; and how they run."""

import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import on_gpu
import soak
import steps
from steps import Place, Step

GIVEN = {"checkpoint": Path("/a model"), "texts": Path("/texts.jsonl"), "loads": Path("/loads")}


@pytest.mark.parametrize("step", [*on_gpu.STEPS, *soak.STEPS], ids=lambda step: step.name)
def test_a_step_is_a_command_line(step, tmp_path):
    out = tmp_path / "a folder"
    words = shlex.split(steps.command_of(step, out, GIVEN, Place()))
    assert words[0] == sys.executable
    assert not any(f"{{{name}}}" in word for name in (*GIVEN, "out", "folder") for word in words)
    if words[1] == "-m":
        assert all((steps.ROOT / word).exists() for word in words if word.startswith("tests/"))
    else:
        program = (steps.ROOT / words[1]).read_text()
        # Of {checkpoint}, {texts} and {loads} those that are options of the program; options of a loop have no text.
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in program, option
    if "--flags" in words:
        assert json.loads(words[words.index("--flags") + 1])


def test_steps_tell_how_they_ended(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run = [
        Step("well", "-c 'print(1)'", 60),
        Step("failed", "-c 'raise SystemExit(3)'", 60),
        Step("slow", "-c 'import time; time.sleep(60)'", 1),
        Step("no-gpus", "-c 'print(1)'", 60, gpus=2),
        Step("not-given", "-c 'print(1)' {loads}", 60),
        Step(
            "variable", "-c 'import os; print(os.environ[\"OF_THE_STEP\"])'", 60, environment={"OF_THE_STEP": "there"}
        ),
    ]
    assert steps.run_steps(run, tmp_path, {}, 60, [Place(), Place()]) == 1
    told = {one["step"]: one["ended"] for one in json.loads((tmp_path / "steps.json").read_text())}
    assert told == {
        "well": "well",
        "failed": "with status 3",
        "slow": "at its time limit",
        "no-gpus": "not run: needs 2 GPUs",
        "not-given": "not run: needs --loads",
        "variable": "well",
    }
    assert (tmp_path / "well.log").read_text() == "1\n"
    assert (tmp_path / "variable.log").read_text() == "there\n"
    assert len(capsys.readouterr().out.splitlines()) == len(run)


def test_a_step_can_end_what_it_started_elsewhere(tmp_path):
    # benchmarks/serve_on_gpu.py has servers in sessions of their own, which nobody else could end.
    program = tmp_path / "step.py"
    program.write_text(
        "import signal, subprocess, sys, time\n"
        "server = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print(server.pid, flush=True)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        "try:\n    time.sleep(60)\nfinally:\n    server.kill()\n    server.wait()\n"
    )
    assert steps.run_steps([Step("serves", f"{program}", 3)], tmp_path, {}, 60, [Place()]) == 1
    server = int((tmp_path / "serves.log").read_text())
    assert not Path(f"/proc/{server}").exists()


def test_nothing_runs_when_the_time_is_over(tmp_path):
    assert steps.run_steps([Step("late", "-c 'print(1)'", 60)], tmp_path, {}, 0, [Place()]) == 1
    assert not (tmp_path / "late.log").exists()


def test_a_place_is_a_gpu_with_cores_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(steps.os, "sched_getaffinity", lambda _: range(8))
    assert steps.places_of_gpus() == [Place((0,), [0, 1, 2, 3]), Place((1,), [4, 5, 6, 7])]
    command = steps.command_of(Step("one", "-c 1", 60), Path(), {}, steps.places_of_gpus()[1])
    assert command.startswith("taskset --cpu-list 4,5,6,7 ")
