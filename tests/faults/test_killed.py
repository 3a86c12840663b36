"""kill -9 while files are written: no half file is taken for a whole one, and the same command works again."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from disk import contents
from fuzzing import irminsul
from sample_results import block, requests
from scripted_server import ScriptedServer, chat_events

from irminsul.bench.results import BLOCKS, REQUESTS, ResultFiles
from irminsul.checkpoints.smollm2 import find_gguf
from irminsul.errors import InputError

PLENTY = 100
# Half of what is written to a file arrives, then the process is gone.
DIES_IN_WRITE = """
import os, pathlib, signal
whole = pathlib.Path.write_bytes
def half(path, content):
    whole(path, content[:len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.write_bytes = half
"""
COMMAND = "from irminsul.cli import main; main()"


def start(*arguments, program=COMMAND, **environment):
    """Start a command as a process of its own."""
    path = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )


def kill_when(process, condition):
    """Kill a process as soon as something holds; AssertionError if the process ends before."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)
    process.kill()
    assert process.wait(20) == -signal.SIGKILL


def is_part(name):
    """Say whether a file is what a killed writer left, which nothing reads."""
    return name.startswith(".") and name.endswith(".part")


def test_a_log_that_was_being_generated(fault, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    process = start("patterns", "rerank", "--calls", "100000", "--out", out)
    kill_when(process, lambda: any(is_part(path.name) and path.stat().st_size for path in tmp_path.iterdir()))
    assert out.read_text() == "old\n"
    assert irminsul("patterns", "rerank", "--calls", "3", "--out", out, seconds=PLENTY).status == 0
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 3
    fault(
        "kill -9 of `irminsul patterns --out FILE` in the middle", "the old file stays; the same command writes it anew"
    )


@pytest.mark.parametrize("output", ["--json", pytest.param("--html", marks=pytest.mark.slow)])
def test_an_analysis_that_was_being_written(fault, tmp_path, small_log, output):
    out = tmp_path / "out"
    out.write_text("old\n")
    process = start("analyze", *small_log, output, out, program=DIES_IN_WRITE + COMMAND)
    assert process.wait(120) == -signal.SIGKILL
    left = contents(tmp_path)
    assert left.pop("out") == b"old\n"
    assert [is_part(name) and len(content) > 0 for name, content in left.items()] == [True]
    assert irminsul("analyze", *small_log, output, out, seconds=PLENTY).status == 0
    assert out.read_text() != "old\n"
    fault(
        f"kill -9 of `irminsul analyze {output} FILE` in the middle of writing",
        "the old file stays; the same command works",
    )


@pytest.mark.slow
@pytest.mark.parametrize("write", ["experiment", "case_results", "demo_report"])
def test_results_of_long_runs_that_were_being_written(fault, tmp_path, write):
    names = ["sink.json", "sink.md", "sink.png"] if write == "experiment" else ["out.json"]
    for name in names:
        (tmp_path / name).write_text("old\n")
    program = f"import pathlib, sys; from sample_results import {write}; {write}(pathlib.Path(sys.argv[1]))"
    assert start(tmp_path, program=DIES_IN_WRITE + program).wait(120) == -signal.SIGKILL
    left = contents(tmp_path)
    assert [left.pop(name) for name in names] == [b"old\n"] * len(names)
    assert [is_part(name) for name in left] == [True]
    command = {"experiment": "reproduce", "case_results": "fidelity --json", "demo_report": "demo --json"}[write]
    fault(f"kill -9 of `irminsul {command}` in the middle of writing", "the old files stay, all of them")


@pytest.mark.slow
def test_a_benchmark_that_is_killed_goes_on(fault, tmp_path):
    log, out = tmp_path / "log.jsonl", tmp_path / "out"
    log.write_text('{"model": "m", "messages": [{"role": "user", "content": "hello"}]}\n' * 4)

    def slowly(body, number):
        return [0.05, *chat_events()]

    with ScriptedServer(slowly) as server:
        arguments = ["bench", "serve", "--server", f"a={server.url}", "--load", log, "--out", out]
        arguments += ["--repeats", "6", "--warm-up", "0", "--keep-requests"]
        process = start(*arguments)
        kill_when(process, lambda: (out / BLOCKS).exists() and (out / BLOCKS).read_bytes().count(b"\n") >= 2)
        kept = (out / BLOCKS).read_bytes()
        assert irminsul(*arguments, seconds=PLENTY).status == 0
    content = (out / BLOCKS).read_bytes()
    assert content.startswith(kept[: kept.rindex(b"\n") + 1])
    identities = [json.loads(line)["id"] for line in content.splitlines()]
    assert len(set(identities)) == len(identities) == 6
    lines = gzip.decompress((out / REQUESTS).read_bytes()).splitlines()
    assert [json.loads(line)["block"] for line in lines] == [one for one in identities for _ in range(4)]
    fault(
        "kill -9 of `irminsul bench serve` in the middle",
        "the same command keeps the blocks that had ended and measures the rest; each request is there once",
        "the block that was being measured",
    )


def test_a_benchmark_may_be_cut_at_any_byte(fault, tmp_path):
    files = ResultFiles(tmp_path)
    files.append(block("a"), requests(3))
    first = contents(tmp_path)
    files.append(block("b"), requests(3))
    second = contents(tmp_path)
    # Requests are written first: any part of them without the block, then all of them with any part of the block.
    torn = [(first[BLOCKS], second[REQUESTS][:end]) for end in range(len(first[REQUESTS]), len(second[REQUESTS]) + 1)]
    torn += [(second[BLOCKS][:end], second[REQUESTS]) for end in range(len(first[BLOCKS]), len(second[BLOCKS]), 29)]
    for blocks, packed in torn:
        (tmp_path / BLOCKS).write_bytes(blocks)
        (tmp_path / REQUESTS).write_bytes(packed)
        ResultFiles(tmp_path)
        assert contents(tmp_path) == first
    (tmp_path / BLOCKS).write_bytes(second[BLOCKS])
    (tmp_path / REQUESTS).write_bytes(second[REQUESTS])
    assert [one["id"] for one in ResultFiles(tmp_path).blocks] == ["a", "b"]
    assert contents(tmp_path) == second
    fault(
        f"files of `irminsul bench serve --keep-requests` cut at each of {len(torn)} places of the last block",
        "the half block is dropped, the blocks before it stay byte for byte",
    )


def test_requests_that_are_no_such_file_are_left_alone(fault, tmp_path):
    files = ResultFiles(tmp_path)
    files.append(block("a"), requests(3))
    (tmp_path / REQUESTS).write_bytes(b"something else")
    with pytest.raises(InputError, match=r"cannot read .*requests\.jsonl\.gz, move it away: ") as told:
        ResultFiles(tmp_path)
    assert (tmp_path / REQUESTS).read_bytes() == b"something else"
    fault(
        "requests.jsonl.gz of `irminsul bench serve` is something else",
        f"exit status 1: {told.value}; it is not touched",
    )


@pytest.mark.checkpoint
@pytest.mark.slow
def test_a_build_that_is_killed_or_ended(fault, tmp_path, monkeypatch):
    try:
        find_gguf()
    except InputError as error:
        pytest.skip(str(error))
    home = tmp_path / "home"
    monkeypatch.setenv("IRMINSUL_HOME", str(home))

    process = start("model", "build")
    kill_when(process, lambda: list(home.glob(".smollm2-mla-*/new")))
    (left,) = home.iterdir()
    told = irminsul("serve", seconds=PLENTY)
    assert told.sentence == "smollm2-mla has not been built; run: irminsul model build smollm2-mla"
    again = start("model", "build")
    try:
        deadline = time.monotonic() + 120
        while left.exists() or not list(home.iterdir()):
            assert again.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        again.terminate()
        assert again.wait(60) == 128 + signal.SIGTERM
    finally:
        again.kill()
    assert list(home.iterdir()) == []
    fault(
        "kill -9 of `irminsul model build` in the middle",
        f"what is half-built has another name and is never loaded ({told.sentence}); the next build removes it",
    )
    fault("SIGTERM to `irminsul model build`", "exit status 143; nothing half-built stays")
