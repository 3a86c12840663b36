"""Several processes measure what one measures, and end with a sentence if they cannot."""

import io
import json
import multiprocessing
import os
import signal
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from irminsul.cli import app
from irminsul.errors import InputError, IrminsulError
from irminsul.fidelity import workers
from irminsul.fidelity.command import fidelity_command
from irminsul.fidelity.paths import PATHS
from irminsul.fidelity.report import markdown, read_json
from irminsul.fidelity.workers import Setup, Work, threads_of_each

OPTIONS = {"tasks": "needle-1k,continuation", "paths": "naive", "n": 2}


@pytest.fixture
def one_thread(monkeypatch):
    """As in a shell with OMP_NUM_THREADS=1: workers and this process then add in the same order."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def setup(checkpoint) -> Setup:
    return Setup(checkpoint, "cpu", "float32", "winnow64", (PATHS["naive"],))


def messages_of_a_worker(setup, *work):
    """Run a worker in this process until it ends, and return what it said."""
    parent, child = multiprocessing.Pipe()
    for each in work:
        parent.send(each)
    workers._worker(child, setup, torch.get_num_threads())
    child.close()
    messages = []
    while parent.poll():
        try:
            messages.append(parent.recv())
        except EOFError:
            break
    return messages


def run(checkpoint, *, progress=None, **options):
    return fidelity_command(
        checkpoint=checkpoint,
        console=Console(file=io.StringIO()),
        progress=Console(file=progress or io.StringIO()),
        **options,
    )


class Signalling(io.StringIO):
    """Whenever a case is reported, workers get the Ctrl-C that is meant for their parent."""

    def write(self, text: str) -> int:
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGINT)
        return super().write(text)


class Interrupting(io.StringIO):
    """Ctrl-C as soon as the first case is reported."""

    def write(self, text: str) -> int:
        del text
        raise KeyboardInterrupt


class Killing(io.StringIO):
    """Every worker is killed when the first case is reported."""

    def write(self, text: str) -> int:
        for process in multiprocessing.active_children():
            process.kill()
        return len(text)


@pytest.mark.usefixtures("one_thread")
def test_two_processes_report_what_one_reports(checkpoint, tmp_path):
    one, two = (tmp_path / f"{jobs}.json" for jobs in (1, 2))
    progress = Signalling()
    run(checkpoint, **OPTIONS, jobs=1, json_path=one)
    run(checkpoint, **OPTIONS, jobs=2, json_path=two, progress=progress)
    reports = [json.loads(path.read_text()) for path in (one, two)]
    assert [report["run"].pop("jobs") for report in reports] == [1, 2]
    assert all(report["run"].pop("seconds") > 0 for report in reports)
    assert reports[0] == reports[1]
    assert progress.getvalue().count("KL naive") == 4
    assert " s in 2 processes. " in markdown(read_json(two))
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_finished_cases_survive_an_interruption_which_ends_all_workers(checkpoint, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint, **OPTIONS, jobs=2, json_path=tmp_path / "report.json", progress=Interrupting())
    assert multiprocessing.active_children() == []
    written = read_json(tmp_path / "report.incomplete.json")
    assert (len(written["cases"]), written["run"]["complete"]) == (1, False)


def test_finished_cases_survive_a_worker_that_dies(checkpoint, tmp_path):
    path = tmp_path / "report.json"
    with pytest.raises(IrminsulError, match="a worker process died with exit status -9; try fewer --jobs"):
        run(checkpoint, tasks="continuation", paths="naive", n=4, jobs=2, json_path=path, progress=Killing())
    assert multiprocessing.active_children() == []
    assert not read_json(tmp_path / "report.incomplete.json")["run"]["complete"]
    assert not path.exists()


def test_a_fault_in_a_worker_becomes_one_sentence(setup):
    ready, error = messages_of_a_worker(setup, Work("qa", 0, None, 24))
    assert ready is None
    assert type(error) is IrminsulError
    assert str(error).startswith("a worker process failed with AttributeError: 'NoneType' object has no attribute")
    assert str(error).endswith("and --jobs 1 to see where it failed")


def test_what_a_worker_refuses_is_refused_with_its_sentence(setup):
    (error,) = messages_of_a_worker(replace(setup, device="tpu"))
    assert type(error) is InputError
    assert str(error) == "unknown device 'tpu'; valid devices: cpu, cuda"


@pytest.mark.parametrize("jobs", ["0", "-3"])
def test_fewer_than_one_job_is_refused(checkpoint, jobs):
    result = CliRunner().invoke(app, ["fidelity", str(checkpoint), "--jobs", jobs])
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == f"--jobs must be at least 1, not {jobs}"


def test_threads_are_shared_out_unless_they_were_set(monkeypatch):
    monkeypatch.setattr(workers.torch, "get_num_threads", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_of_each(jobs) for jobs in (1, 3, 20)] == [16, 5, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert threads_of_each(3) == 16
