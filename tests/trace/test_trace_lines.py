"""Lines of logs: compression, limits, damage."""

import gzip
import io
import json
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul.errors import InputError
from irminsul.trace import lines
from irminsul.trace.lines import BadLines, Line, LineError, Notes, json_text, parse_json, parse_object, read_lines


def test_lines_are_numbered_and_empty_ones_skipped(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"\xef\xbb\xbfone\n\n  \r\ntwo\nthree")
    assert list(read_lines(path)) == [Line(1, "one\n"), Line(4, "two\n"), Line(5, "three")]


@pytest.mark.parametrize("name", ["log", "log.txt", "log.jsonl.gz"])
def test_compression_is_told_by_the_first_bytes(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n"))
    assert [line.text for line in read_lines(path)] == ["one\n", "two\n"]
    path.write_bytes(b"plain\n")
    assert [line.text for line in read_lines(path)] == ["plain\n"]


def test_zstd_is_read_frame_after_frame(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "log"
    path.write_bytes(zstandard.compress(b"one\n") + zstandard.compress(b"two\n"))
    assert [line.text for line in read_lines(path)] == ["one\n", "two\n"]
    path.write_bytes(zstandard.compress(b"one\ntwo\n" * 1000)[:-9] + b"\xff" * 30)
    with pytest.raises(InputError, match="damaged or breaks off"):
        list(read_lines(path))


def test_zstd_without_zstandard_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "log"
    path.write_bytes(b"\x28\xb5\x2f\xfd....")
    with pytest.raises(InputError, match=r"needs the zstandard package: pip install 'irminsul-kv\[analyze\]'"):
        list(read_lines(path))


def test_the_standard_input_is_read_and_left_open(monkeypatch):
    stdin = io.BytesIO(gzip.compress(b"one\n"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(stdin)))
    assert [line.text for line in read_lines("-")] == ["one\n"]
    assert not stdin.closed


def test_progress_counts_the_bytes_of_the_file(tmp_path):
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b"some text\n" * 10_000))
    seen = []
    list(read_lines(path, progress=seen.append))
    assert sum(seen) == path.stat().st_size


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-12], lambda data: data[:2] + b"plain", lambda data: data[:10] + b"\xff" * 20]
)
def test_damaged_gzip_is_named_with_its_place(tmp_path, damage):
    path = tmp_path / "log"
    path.write_bytes(damage(gzip.compress(b"one\n" * 50)))
    with pytest.raises(InputError, match=r"log, line \d+: the compressed data is damaged or breaks off here"):
        list(read_lines(path))


def test_a_broken_off_file_gives_what_it_has_if_bad_lines_are_skipped(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % number for number in range(100_000)))[:-2000])
    bad = BadLines()
    read = list(read_lines(path, bad))
    assert 0 < len(read) < 100_000
    assert (bad.count, bad.first[0].line) == (1, read[-1].number + 1)


@pytest.mark.parametrize(("name", "reason"), [("absent", "No such file"), (".", "Is a directory")])
def test_what_cannot_be_opened_is_an_input_error(tmp_path, name, reason):
    with pytest.raises(InputError, match=rf"cannot read .* after line 0: {reason}"):
        list(read_lines(tmp_path / name))


def test_a_line_that_is_no_text_is_bad_and_the_rest_is_read(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\n\xff\ntwo\n")
    bad = BadLines()
    assert [line.number for line in read_lines(path, bad)] == [1, 3]
    assert str(bad.first[0]) == f"{path}, line 2: not UTF-8 (invalid start byte at byte 0)"


def test_a_line_that_is_too_long_is_skipped_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 2**20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"0" * 2**26 + b"\nshort\n"))
    assert path.stat().st_size < 2**18
    bad = BadLines()
    tracemalloc.start()
    read = list(read_lines(path, bad))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line.text for line in read] == ["short\n"]
    assert str(bad.first[0]).endswith("line 1: longer than 1 MiB")
    assert peak < 2**24


def test_a_line_of_just_the_limit_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    path = tmp_path / "log"
    path.write_bytes(b"123456789\n1234567890\n12345678901\nx\n")
    bad = BadLines()
    # The end of a line counts: what is too long is what does not fit into the buffer.
    assert [line.number for line in read_lines(path, bad)] == [1, 4]
    assert [line.line for line in bad.first] == [2, 3]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": "\0"}', "holds a NUL byte"),
        ('{"a": NaN}', "not JSON: NaN is no number"),
        ('{"a": -Infinity}', "not JSON: -Infinity is no number"),
        ('{"a": ' + "9" * 5000 + "}", "a number is out of range"),
        ("[" * 100_000, "JSON nested too deeply"),
        ('{"a": "\\ud83d"}', "holds half of a surrogate pair"),
        ('{"a": "\\uD83D x"}', "holds half of a surrogate pair"),
        ('{"a": 1', "not JSON: Expecting ',' delimiter at column 8"),
        ("[1]", "the line must be an object, got list"),
        ("null", "the line must be an object, got null"),
    ],
)
def test_what_is_no_json_object_has_a_reason(text, reason):
    with pytest.raises(LineError, match=reason.replace("(", r"\(")):
        parse_object(text)


def test_whole_surrogate_pairs_are_text():
    assert parse_json('"\\ud83d\\ude00 \\\\ud83d"') == "\N{GRINNING FACE} \\ud83d"


@pytest.mark.parametrize("value", [1e999, json.loads("[" * 900 + "]" * 900)])
def test_json_that_cannot_be_written_is_a_line_error(value):
    for _ in range(200):
        value = [value]
    with pytest.raises(LineError):
        json_text(value)


# A zip archive is refused as a whole.
@given(st.binary(max_size=200).filter(lambda data: not data.startswith(b"PK\x03\x04")))
def test_any_bytes_are_lines_or_bad_lines(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "log"
    path.write_bytes(data)
    bad = BadLines(keep=1000)
    read = list(read_lines(path, bad))
    numbers = [line.number for line in read] + [line.line for line in bad.first]
    assert len(numbers) == len(set(numbers))


@given(st.binary(max_size=300), st.integers(0, 60), st.integers(1, 255))
def test_any_damage_to_a_gzip_file_is_reported_or_harmless(tmp_path_factory, data, place, flip):
    path = tmp_path_factory.mktemp("fuzz") / "log.gz"
    packed = bytearray(gzip.compress(data))
    packed[place % len(packed)] ^= flip
    path.write_bytes(packed)
    list(read_lines(path, BadLines()))


def test_bad_lines_and_notes_are_counted():
    from irminsul.trace.records import BadLine

    bad, notes = BadLines(keep=1), Notes()
    assert bad.notes() == notes.sentences() == []
    bad(BadLine("f", 1, "no"))
    assert bad.notes() == ["1 bad line skipped: f, line 1: no"]
    bad(BadLine("f", 2, "no"))
    assert bad.notes() == ["2 bad lines skipped: f, line 1: no; and 1 more"]
    for text in ("b", "a", "b"):
        notes.add(text)
    assert notes.sentences() == ["b (2 times)", "a"]
