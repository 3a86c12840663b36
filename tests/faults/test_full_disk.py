"""No room for a file: one sentence, exit status 1, and what was there before is there."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from disk import contents, full_disk
from fuzzing import irminsul
from sample_results import block, case_results, demo_report, experiment, requests

from irminsul.bench.results import BLOCKS, REQUESTS, ResultFiles
from irminsul.errors import InputError

PLENTY = 100
"""Seconds of processor time."""


def old_files(folder, *names):
    for name in names:
        (folder / name).write_text("old\n")
    return contents(folder)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["patterns", "rerank", "--calls", "3", "--out"], "out.jsonl"),
        (["analyze", "--json"], "out.json"),
        (["analyze", "--html"], "out.html"),
        (["bench", "report", "--html"], "out.html"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_command_leaves_the_old_file(fault, tmp_path, small_log, command, name):
    arguments = [*command, tmp_path / name]
    if "analyze" in command:
        arguments += small_log
        irminsul(*arguments[:1], *small_log, seconds=PLENTY)  # searches are compiled to files of their own
    if "report" in command:
        ResultFiles(tmp_path).append(block("b"), None)
        arguments += [tmp_path]
    before = old_files(tmp_path, name)
    with full_disk():
        told = irminsul(*arguments, seconds=PLENTY)
    assert (told.status, told.sentence) == (1, f"cannot write {tmp_path / name}: File too large")
    assert contents(tmp_path) == before
    fault(f"disk full under `irminsul {' '.join(command)} FILE`", f"exit status 1: {told.sentence}; the old file stays")


@pytest.mark.parametrize(
    ("kind", "write", "names"),
    [
        ("reproduce", experiment, ("sink.json", "sink.md", "sink.png")),
        ("fidelity --json", case_results, ("out.json",)),
        ("demo --json", demo_report, ("out.json",)),
    ],
)
def test_results_that_took_long_are_replaced_whole_or_stay(fault, tmp_path, kind, write, names):
    before = old_files(tmp_path, *names)
    with full_disk(), pytest.raises(InputError, match=r"cannot write .*: File too large") as told:
        write(tmp_path)
    assert contents(tmp_path) == before
    write(tmp_path)
    assert all(after != before[name] for name, after in contents(tmp_path).items())
    fault(f"disk full while `irminsul {kind}` writes its results", f"exit status 1: {told.value}; the old files stay")


def test_cached_tokens_that_do_not_fit_are_not_there(fault, tmp_path, small_log):
    irminsul("analyze", *small_log, seconds=PLENTY)
    with full_disk():
        told = irminsul("analyze", *small_log, "--token-cache", tmp_path / "cache", seconds=PLENTY)
    assert (told.status, told.sentence) == (1, f"cannot store tokens in {tmp_path / 'cache'}: File too large")
    assert contents(tmp_path / "cache") == {}
    fault("disk full under `irminsul analyze --token-cache`", f"exit status 1: {told.sentence}; no half entry")


@pytest.mark.parametrize("full", [BLOCKS, REQUESTS])
def test_a_benchmark_keeps_its_blocks_and_goes_on(fault, tmp_path, full):
    files = ResultFiles(tmp_path)
    files.append(block("a"), requests(20))
    before = contents(tmp_path)
    # The file that is written first is full, or the one after it.
    room = len(before[REQUESTS]) + 20 if full == REQUESTS else len(before[BLOCKS]) + 20
    with full_disk(room), pytest.raises(InputError, match=r"cannot write to .*: File too large") as told:
        files.append(block("b"), requests(20))
    assert contents(tmp_path) != before, "nothing was half-written"
    again = ResultFiles(tmp_path)
    assert contents(tmp_path) == before
    assert [one["id"] for one in again.blocks] == ["a"]
    again.append(block("b"), requests(20))
    lines = gzip.decompress((tmp_path / REQUESTS).read_bytes()).splitlines()
    assert [json.loads(line)["block"] for line in lines] == ["a"] * 20 + ["b"] * 20
    fault(
        f"disk full while `irminsul bench serve --keep-requests` writes {full}",
        f"exit status 1: {told.value}; the same command drops the half block, keeps the others and measures it again",
    )


def test_a_build_that_does_not_fit_leaves_nothing(fault, tmp_path):
    from irminsul.checkpoints.build_directory import replacing

    target = tmp_path / "smollm2-mla"
    with (
        full_disk(),
        pytest.raises(InputError, match=r"cannot write .*: .*File too large") as told,
        replacing(target, {"name": target.name}) as staged,
    ):
        (staged / "model.safetensors").write_bytes(bytes(1000))
    assert list(tmp_path.iterdir()) == []
    fault("disk full under `irminsul model build`", f"exit status 1: {told.value}; nothing half-built stays")


@pytest.mark.parametrize(
    "command",
    [["patterns", "rerank", "--calls", "2"], ["patterns", "--help"], pytest.param(["analyze"], marks=pytest.mark.slow)],
)
def test_standard_output_that_takes_nothing_is_a_sentence(fault, small_log, command):
    arguments = command + [str(one) for one in small_log if command == ["analyze"]]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "irminsul", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb"},
            check=False,
        )
    sentence = "irminsul: cannot write: No space left on device\n"
    # Bars of progress may stand before it.
    assert (ended.returncode, ended.stderr[-len(sentence) :]) == (1, sentence)
    assert "Traceback" not in ended.stderr
    fault(f"`irminsul {' '.join(command)} > /dev/full`", f"exit status 1: {sentence.removeprefix('irminsul: ')}")
