"""How a build comes into its place: what is refused, and what a killed build leaves."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from safetensors import SafetensorError

from irminsul.checkpoints.build_directory import find_fault, refuse_to_replace, replacing, write_manifest
from irminsul.errors import InputError

PROVENANCE = {"name": "tiny", "recipe": 1}
SLOW_BUILD = """
import sys, time
from pathlib import Path
from irminsul.checkpoints.build_directory import replacing
with replacing(Path(sys.argv[1]), {"name": "tiny", "recipe": 1}) as staged:
    (staged / "model.safetensors").write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


def make(target, provenance=PROVENANCE, config="{}"):
    with replacing(target, provenance) as staged:
        (staged / "config.json").write_text(config)
        write_manifest(staged, provenance)
    return target


def slow_build(target):
    process = subprocess.Popen([sys.executable, "-c", SLOW_BUILD, str(target)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"writing\n"
    process.stdout.close()
    return process


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_build_is_whole_and_alone(tmp_path):
    assert find_fault(make(tmp_path / "m"), PROVENANCE) is None
    assert names(tmp_path) == ["m"]


def test_an_older_build_is_replaced(tmp_path):
    make(tmp_path / "m", {"name": "tiny", "recipe": 0}, config="[]")
    make(tmp_path / "m")
    assert (tmp_path / "m" / "config.json").read_text() == "{}"
    assert names(tmp_path) == ["m"]


def test_a_build_without_a_manifest_is_known_by_its_config(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"provenance": {"name": "tiny"}}')
    refuse_to_replace(tmp_path / "m", "tiny")
    with pytest.raises(InputError, match="is not a build of other"):
        refuse_to_replace(tmp_path / "m", "other")


@pytest.mark.parametrize("content", ["", "[" * 200_000, "[1]", '{"provenance": "tiny"}'])
def test_what_says_nothing_of_its_origin_is_not_replaced(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match="exists and is not a build of tiny"):
        refuse_to_replace(tmp_path, "tiny")


def test_a_directory_with_a_name_of_ours_is_not_replaced(tmp_path):
    (make(tmp_path / "m") / "model.safetensors").mkdir()
    with pytest.raises(InputError, match=r"model\.safetensors is not part of a build"):
        refuse_to_replace(tmp_path / "m", "tiny")


def test_what_cannot_be_renamed_over_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match=r"cannot replace .*/file: .*Not a directory"):
        refuse_to_replace(tmp_path / "file", "tiny")
    with pytest.raises(InputError, match=r"cannot replace .*/loop: .*Too many levels of symbolic links"):
        refuse_to_replace(tmp_path / "loop", "tiny")
    with pytest.raises(InputError, match="it is a mount point"):
        refuse_to_replace(type(tmp_path)("/"), "tiny")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="it is the current directory"):
        refuse_to_replace(tmp_path / "here", "tiny")


@pytest.mark.parametrize("parent", ["file", "/proc"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, parent):
    (tmp_path / "file").touch()
    begun = False
    with pytest.raises(InputError, match="cannot write"), replacing(tmp_path / parent / "x" / "m", PROVENANCE):
        begun = True
    assert not begun


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left")])
def test_a_write_that_fails_is_told_and_leaves_the_older_build(tmp_path, error):
    make(tmp_path / "m", {"name": "tiny", "recipe": 0})
    before = (tmp_path / "m" / "irminsul-build.json").read_bytes()
    with pytest.raises(InputError, match=r"cannot write .*/m: .*No space left"), replacing(tmp_path / "m", PROVENANCE):
        raise error
    assert (tmp_path / "m" / "irminsul-build.json").read_bytes() == before
    assert names(tmp_path) == ["m"]


def test_a_failed_rename_puts_the_older_build_back(tmp_path, monkeypatch):
    target = make(tmp_path / "m", {"name": "tiny", "recipe": 0}, config="[]")
    rename = type(tmp_path).rename

    def fail_for_new(self, to):
        if self.name == "new":
            raise OSError("busy")
        return rename(self, to)

    monkeypatch.setattr(type(tmp_path), "rename", fail_for_new)
    with pytest.raises(InputError, match="busy"):
        make(target)
    assert (target / "config.json").read_text() == "[]"


def test_a_file_that_appears_during_a_build_is_not_lost(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(InputError, match="exists and is not a build of tiny"), replacing(tmp_path / "m", PROVENANCE):
        (tmp_path / "m" / "notes.txt").write_text("mine")
    assert (tmp_path / "m" / "notes.txt").read_text() == "mine"


def test_two_builds_of_one_place_may_meet(tmp_path):
    with replacing(tmp_path / "m", PROVENANCE) as staged:
        (staged / "config.json").write_text("{}")
        write_manifest(staged, PROVENANCE)
        make(tmp_path / "m")
    assert find_fault(tmp_path / "m", PROVENANCE) is None
    assert names(tmp_path) == ["m"]


def test_a_build_that_is_told_to_terminate_leaves_nothing(tmp_path):
    process = slow_build(tmp_path / "m")
    process.terminate()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert names(tmp_path) == []


def test_what_a_killed_build_left_is_removed_by_the_next_one(tmp_path):
    process = slow_build(tmp_path / "m")
    make(tmp_path / "m")
    assert len(names(tmp_path)) == 2, "what is in use stays"
    process.kill()
    process.wait(timeout=30)
    assert len(names(tmp_path)) == 2
    make(tmp_path / "m")
    assert names(tmp_path) == ["m"]


def test_hidden_directories_of_somebody_else_are_kept(tmp_path):
    (tmp_path / ".m-notes").mkdir()
    (tmp_path / ".m-empty").mkdir()
    (tmp_path / ".m-notes" / "notes.txt").write_text("mine")
    make(tmp_path / "m")
    assert names(tmp_path) == [".m-empty", ".m-notes", "m"]


def test_a_handler_of_the_callers_is_kept(tmp_path):
    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with replacing(tmp_path / "m", PROVENANCE):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, mine)
    thread = threading.Thread(target=make, args=(tmp_path / "n",))
    thread.start()
    thread.join()
    assert (tmp_path / "n").is_dir()
    assert signal.getsignal(signal.SIGTERM) is mine


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_entered_is_refused(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(InputError, match="cannot write"):
        make(tmp_path / "closed" / "m")
