"""Results are replaced whole or not at all."""

import os
from pathlib import Path

import pytest

from irminsul.errors import InputError
from irminsul.output_files import replace_files, require_folder, require_writable


def test_files_are_written_and_nothing_else_is_left(tmp_path):
    replace_files({tmp_path / "a": b"1", tmp_path / "b": b"2"})
    replace_files({tmp_path / "a": b"3"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"3", "b": b"2"}


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "b"
    replace_files({first: b"old", second: b"old"})
    real = Path.write_bytes

    def full_disk(path, content):
        if ".b." in path.name:
            real(path, content[:1])
            raise OSError(28, "No space left on device")
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(InputError, match=r"cannot write .*b: No space left on device"):
        replace_files({first: b"new", second: b"new"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old", "b": b"old"}


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    require_writable(tmp_path / "link")
    replace_files({tmp_path / "link": b"1"})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"1"


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path):
    (tmp_path / "old").write_text("old")
    require_writable(tmp_path / "old", tmp_path / "new")
    require_folder(tmp_path / "made" / "here", "a.json")
    assert {path.name for path in tmp_path.iterdir()} == {"old", "made"}
    assert list((tmp_path / "made" / "here").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is a directory"),
        ("/dev/full", "not a regular file"),
        ("absent/file", "there is no directory"),
        ("file/below", "there is no directory"),
        ("/proc/new", "cannot write /proc/new"),
        ("f" * 400, "name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, name, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"(?i){message}"):
        require_writable(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_file_or_directory_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch(mode=0o400)
    with pytest.raises(InputError, match="read-only"):
        require_writable(file)
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission denied"):
        require_writable(tmp_path / "new")
    tmp_path.chmod(0o700)


def test_a_folder_in_whose_way_a_file_stands_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: it is not a directory"):
        require_folder(tmp_path / "file", "a.json")
    with pytest.raises(InputError, match="Not a directory"):
        require_folder(tmp_path / "file" / "folder", "a.json")
    (tmp_path / "a.json").mkdir()
    with pytest.raises(InputError, match="is a directory"):
        require_folder(tmp_path, "a.json")


def test_an_input_is_not_written_over(tmp_path):
    log = tmp_path / "log"
    log.write_text("kept")
    (tmp_path / "symlink").symlink_to(log)
    (tmp_path / "hardlink").hardlink_to(log)
    for name in ("log", "symlink", "hardlink"):
        with pytest.raises(InputError, match=f"cannot write .*{name}: it is an input of this command"):
            require_writable(tmp_path / name, inputs=[str(log)])
    with pytest.raises(InputError, match="an input"):
        require_writable(tmp_path / "absent", inputs=[tmp_path / "." / "absent"])
    require_writable(tmp_path / "other", inputs=[log, "-", "f" * 400])
    assert log.read_text() == "kept"


def test_two_outputs_are_two_files(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for one, other in [("new", "new"), ("new", "link"), ("link", "new")]:
        with pytest.raises(InputError, match=f"{other}: it is the same file as .*{one}, another output"):
            require_writable(tmp_path / one, tmp_path / other)


def test_a_loop_of_links_and_a_dash_are_refused(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for refused in (lambda: require_writable(loop), lambda: replace_files({loop: b""})):
        with pytest.raises(InputError, match=r"cannot write .*loop: Too many levels of symbolic links"):
            refused()
    assert loop.is_symlink()
    require_writable(tmp_path / "new", inputs=[loop])
    with pytest.raises(InputError, match="cannot write -: the standard output holds the tables"):
        require_writable(Path("-"))
