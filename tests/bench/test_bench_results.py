"""The files of a benchmark: what is written can be read, and only what an interrupted write leaves is dropped."""

import gzip
import json

import pytest
from measured_blocks import block

from irminsul.bench.client import Measured
from irminsul.bench.results import BLOCKS, REQUESTS, ResultFiles, only_writer, read_blocks, read_requests
from irminsul.errors import InputError


def measured(place="log:1", retry_after_s=0.0):
    return Measured(place, 0, 0.0, 0.5, 0.1, (0.01,), 1000, 3, None, 200, None, "", retry_after_s)


def line(name):
    return json.dumps(block() | {"id": name}).encode() + b"\n"


def member(name, count=2):
    return gzip.compress(b"".join(json.dumps({"block": name, "n": n}).encode() + b"\n" for n in range(count)))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path):
    """Make a folder of these blocks and requests."""

    def make(blocks, requests):
        (tmp_path / BLOCKS).write_bytes(blocks)
        (tmp_path / REQUESTS).write_bytes(requests)
        return tmp_path

    return make


A, B, C = (line(name) for name in "abc")
REQUESTS_A, REQUESTS_B, REQUESTS_C = (member(name) for name in "abc")
ALL = REQUESTS_A + REQUESTS_B + REQUESTS_C


@pytest.mark.parametrize(
    ("blocks", "requests", "kept_blocks", "kept_requests"),
    [
        (A + B, REQUESTS_A + REQUESTS_B, A + B, REQUESTS_A + REQUESTS_B),
        (A + B[:1], REQUESTS_A, A, REQUESTS_A),
        (A + B[:-2], REQUESTS_A, A, REQUESTS_A),
        # Only the end of the line is missing.
        (A + B[:-1], REQUESTS_A + REQUESTS_B, A + B, REQUESTS_A + REQUESTS_B),
        (A, REQUESTS_A + REQUESTS_B[:9], A, REQUESTS_A),
        (A, REQUESTS_A + REQUESTS_B, A, REQUESTS_A),
        (A + B[:30], REQUESTS_A + REQUESTS_B, A, REQUESTS_A),
        (b"", REQUESTS_A, b"", b""),
        # Blocks whose requests were not kept.
        (A + B + C, REQUESTS_B, A + B + C, REQUESTS_B),
    ],
)
def test_what_an_interrupted_write_leaves_is_dropped(folder, blocks, requests, kept_blocks, kept_requests):
    path = folder(blocks, requests)
    before = list(read_requests(path))
    files = ResultFiles(path)
    assert contents(path) == {BLOCKS: kept_blocks, REQUESTS: kept_requests}
    assert files.blocks == read_blocks(path)
    assert before == list(read_requests(path)), "readers leave out what is dropped"
    assert files.with_requests == {request["block"] for request in before}


@pytest.mark.parametrize(
    ("blocks", "requests", "sentence"),
    [
        (b"", ALL, "2 of them before its last one"),
        (A, ALL, "1 of them before its last one"),
        (A + C, ALL, "1 of them before its last one"),
        # Two writes would have to be interrupted.
        (A, REQUESTS_A + REQUESTS_B + REQUESTS_C[:9], "1 of them before its last one"),
        (A + b"a note", REQUESTS_A, "line 2: not JSON.*not the beginning of a block either, move the file away"),
        (A + B[:-2].replace(b'"format": 1', b'"format": 2'), REQUESTS_A, "line 2.*move the file away"),
        (b'{"ids": [1, 2', b"", "line 1.*move the file away"),
        (A + b"\xff", b"", "line 2.*move the file away"),
        (A + b"\xff\n", b"", "line 2: 'utf-8' codec"),
        (A, REQUESTS_A + b"a note", "move it away: .*header"),
        (A, REQUESTS_A[:-8] + bytes(8), "move it away: .*check"),
        (A, gzip.compress(b"[]\n"), "move it away: the line must be an object"),
        (A, gzip.compress(b'{"block": ["a"]}\n'), "move it away: a request names no block"),
        (A, gzip.compress(b"\xff\n"), "move it away: 'utf-8' codec"),
        (A, REQUESTS_A + gzip.compress(b""), "move it away: a part of it holds no request"),
    ],
)
def test_anything_else_is_refused_and_stays(folder, blocks, requests, sentence):
    path = folder(blocks, requests)
    with pytest.raises(InputError, match=sentence):
        ResultFiles(path)
    assert contents(path) == {BLOCKS: blocks, REQUESTS: requests}


def test_requests_of_blocks_that_are_gone_are_refused_while_the_folder_is_locked(tmp_path):
    (tmp_path / REQUESTS).write_bytes(ALL)
    with only_writer(tmp_path), pytest.raises(InputError, match=r"put blocks\.jsonl back, or move .* away"):
        ResultFiles(tmp_path)
    assert (tmp_path / REQUESTS).read_bytes() == ALL


def test_a_line_ends_where_it_was_ended(tmp_path):
    # Another program may write characters as they are; some of them end a line for str.splitlines.
    foreign = json.dumps(block(command="a\u2028b"), ensure_ascii=False)
    (tmp_path / BLOCKS).write_text(f"{foreign}\n", encoding="utf-8")
    assert [one["command"] for one in read_blocks(tmp_path)] == ["a\u2028b"]


def test_requests_are_read_as_they_were_kept(tmp_path):
    assert list(read_requests(tmp_path)) == []
    files = ResultFiles(tmp_path)
    kept = {name: [measured(f"{name}:{n}") for n in range(3)] for name in "ab"}
    for name, requests in kept.items():
        files.append(block() | {"id": name}, requests)
    files.append(block() | {"id": "without"}, None)
    assert files.with_requests == {"a", "b"} == ResultFiles(tmp_path).with_requests
    expected = [{"block": name, **one.as_json()} for name, requests in kept.items() for one in requests]
    assert list(read_requests(tmp_path)) == json.loads(json.dumps(expected))
    damaged = (tmp_path / REQUESTS).read_bytes()
    (tmp_path / REQUESTS).write_bytes(damaged[:-8] + bytes(8))
    with pytest.raises(InputError, match=r"requests\.jsonl\.gz, move it away"):
        list(read_requests(tmp_path))


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_members_are_found_wherever_the_file_is_cut_into_buffers(folder, monkeypatch, size):
    monkeypatch.setattr("irminsul.bench.results._BUFFER_BYTES", size)
    path = folder(A + B + C, ALL)
    assert [request["block"] for request in read_requests(path)] == ["a", "a", "b", "b", "c", "c"]
    (path / BLOCKS).write_bytes(A + B)
    ResultFiles(path)
    assert (path / REQUESTS).read_bytes() == REQUESTS_A + REQUESTS_B


@pytest.mark.parametrize(
    ("change", "requests", "sentence"),
    [
        ({"in_flight": float("nan")}, [], "not JSON compliant"),
        ({"pool": {"slots": 1e15}}, [], "line 2: pool must be an object of numbers"),
        ({"command": "\udcff"}, [], "line 2: holds half of a surrogate pair"),
        ({"started": None}, [], "line 2: started must be a string"),
        ({}, [measured(retry_after_s=float("inf"))], "not JSON compliant"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, change, requests, sentence):
    files = ResultFiles(tmp_path)
    files.append(block() | {"id": "a"}, [measured()])
    before = contents(tmp_path)
    with pytest.raises(InputError, match=sentence):
        files.append(block() | {"id": "b"} | change, requests)
    assert contents(tmp_path) == before
    assert [one["id"] for one in files.blocks] == ["a"]
