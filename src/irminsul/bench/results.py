"""The files of a benchmark: ``blocks.jsonl``, one JSON object a block, and ``requests.jsonl.gz``, one a request.

A line is written when its block has ended and stays; its requests are written before it. So an interrupted write leaves
at most the beginning of a last line, and requests of one last block, whole or not, whose line is missing. These are
dropped; anything else is no trace of ours, and refused. The fields of a block are in docs/bench.md.
"""

import fcntl
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from irminsul.bench.client import LARGEST, Measured
from irminsul.errors import InputError
from irminsul.output_files import require_folder
from irminsul.trace.lines import LineError, parse_object

FORMAT = 1
BLOCKS, REQUESTS = "blocks.jsonl", "requests.jsonl.gz"
_BEGINNING = f'{{"format": {FORMAT}, "id": "'.encode()
"""Of every line of blocks."""
_BUFFER_BYTES = 2**20

Block: TypeAlias = dict[str, Any]
"""A measured block, as it stands in the file."""


class ResultFiles:
    """Results of one folder; made if it is missing.

    Raises:
        InputError: the folder cannot be written to, or its files hold what no interrupted write leaves. Nothing is
            changed then.
    """

    def __init__(self, folder: Path) -> None:
        require_folder(folder, BLOCKS, REQUESTS)
        self.folder = folder
        blocks, requests = folder / BLOCKS, folder / REQUESTS
        content = _read(blocks) if blocks.exists() else b""
        self.blocks, end = _parse_blocks(blocks, content)
        members = [(member.start, _block_of(requests, member)) for member in _members(requests)]
        known = {block["id"] for block in self.blocks}
        self.with_requests = known & {block for _, block in members}
        """Blocks whose requests are kept, by ``id``."""
        strays = sum(block not in known for _, block in members[:-1])
        if strays:
            raise InputError(
                f"{requests} has requests of blocks that are not in {BLOCKS}: {strays} of them before its last one, "
                f"which no interrupted write leaves; put {BLOCKS} back, or move {requests} away"
            )
        try:
            if members and members[-1][1] not in known:
                os.truncate(requests, members[-1][0])
            if end < len(content):
                os.truncate(blocks, end)
            elif content and not content.endswith(b"\n"):
                _append(blocks, b"\n")
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error

    def append(self, block: Block, requests: Sequence[Measured] | None) -> None:
        """Keep a block and, if given, its requests.

        Raises:
            InputError: the block could not be read again, and nothing is written; or the disk will not.
        """
        path = self.folder / BLOCKS
        try:
            line = json.dumps(block, allow_nan=False).encode()
            lines = [json.dumps({"block": block["id"], **one.as_json()}, allow_nan=False) for one in requests or ()]
        except (ValueError, RecursionError) as error:
            raise InputError(f"cannot write to {self.folder}: {error}") from error
        _block(path, len(self.blocks) + 1, line)
        try:
            if requests is not None:
                # Each block is a member of its own: gzip files may be joined.
                _append(self.folder / REQUESTS, gzip.compress("".join(f"{one}\n" for one in lines).encode()))
                self.with_requests.add(block["id"])
            _append(path, line + b"\n")
        except OSError as error:
            raise InputError(f"cannot write to {self.folder}: {error.strerror or error}") from error
        self.blocks.append(block)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for the same from a folder, which is made if it is missing.

    Raises:
        InputError: another process has it, or it cannot be written to.
    """
    require_folder(folder, BLOCKS, REQUESTS)
    with (folder / BLOCKS).open("ab") as file:
        try:
            # The kernel gives it up when the process ends, however it ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another irminsul bench serve is writing to {folder}") from None
        except OSError as error:
            raise InputError(f"cannot lock {folder / BLOCKS}: {error.strerror or error}") from error
        yield


def read_blocks(folder: Path) -> list[Block]:
    """Read the blocks of a folder, in the order they were measured.

    Raises:
        InputError: there is no such file, or a line is no block of this format.
    """
    path = folder / BLOCKS
    return _parse_blocks(path, _read(path))[0]


def read_requests(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of a folder's blocks; nothing if they were not kept.

    Requests that are being written, or whose block was never finished, are left out.

    Raises:
        InputError: a file is damaged or cannot be read.
    """
    path = folder / REQUESTS
    if not path.exists():
        return
    known = {block["id"] for block in read_blocks(folder)}
    for member in _members(path):
        for request in _requests(path, member):
            if request["block"] in known:
                yield request


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _parse_blocks(path: Path, content: bytes) -> tuple[list[Block], int]:
    """Return the blocks and where the last one ends; behind it stands at most the beginning of a block's line."""
    *lines, rest = content.split(b"\n")
    blocks = [_block(path, number, line) for number, line in enumerate(lines, start=1)]
    if not rest:
        return blocks, len(content)
    try:
        return [*blocks, _block(path, len(lines) + 1, rest)], len(content)
    except InputError as reason:
        if not rest.startswith(_BEGINNING[: len(rest)]):
            raise InputError(f"{reason}; it is not the beginning of a block either, move the file away") from None
        return blocks, len(content) - len(rest)


def _block(path: Path, number: int, line: bytes) -> Block:
    try:
        block = parse_object(line.decode())
    except (LineError, UnicodeDecodeError) as reason:
        raise InputError(f"{path}, line {number}: {reason}") from None
    if block.get("format") != FORMAT:
        raise InputError(f"{path}, line {number}: no block of format {FORMAT}")
    for what, holds, names in _CHECKS:
        for name in names.split():
            if not holds(_at(block, name)):
                raise InputError(f"{path}, line {number}: {name} must be {what}")
    return block


def _at(block: Block, name: str) -> object:
    """Return what stands at ``outer.inner``; None if nothing does."""
    value: object = block
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


_CHECKS: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    (
        "a string",
        lambda value: isinstance(value, str),
        (
            "id comparison started server.name server.kind server.model server.cache_at_start load.name settings.pace "
            "settings.protocol settings.think_time client.irminsul client.processor"
        ),
    ),
    (
        "a whole number >= 0",
        _is_count,
        (
            "repeat requests succeeded load.calls load.sessions load.left_out settings.max_tokens settings.warm_up "
            "settings.seed client.cores"
        ),
    ),
    ("an object", lambda value: isinstance(value, dict), "server.facts errors"),
    ("true or false", lambda value: isinstance(value, bool), "server.ignore_eos"),
    ("a number", _is_number, "client_cpu_share"),
    (
        "a number, or left out",
        lambda value: value is None or _is_number(value),
        "requests_per_s in_flight output_tokens_per_s",
    ),
    (
        "an object of numbers, or left out",
        lambda value: (
            value is None or (isinstance(value, dict) and all(one is None or _is_number(one) for one in value.values()))
        ),
        "ttft_s itl_s end_to_end_s prompt_tokens tokens pool",
    ),
    (
        "a list of strings, or left out",
        lambda value: value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value)),
        "load.notes client.gpus",
    ),
)
"""Of the fields that reports show: what they must be, how that is told, and which. Numbers are finite."""


def digest(value: object) -> str:
    """Return a short name for a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class _Member(NamedTuple):
    """A member of a gzip file, which holds the requests of one block."""

    start: int
    text: bytes | None
    """None if it is not whole; then it is the last one."""


def _members(path: Path) -> Iterator[_Member]:
    """Yield the members of a gzip file, one in memory at a time; none if there is no such file."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            data = file.read(_BUFFER_BYTES)
            while data:
                start = file.tell() - len(data)
                reader = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
                text = bytearray()
                while data and not reader.eof:
                    text += reader.decompress(data)
                    data = reader.unused_data or file.read(_BUFFER_BYTES)
                yield _Member(start, bytes(text) if reader.eof else None)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except zlib.error as error:
        raise InputError(f"cannot read {path}, move it away: {error}") from error


def _requests(path: Path, member: _Member) -> Iterator[dict[str, Any]]:
    """Yield the requests of a member; none of one that is not whole."""
    for line in (member.text or b"").splitlines():
        try:
            request = parse_object(line.decode())
        except (LineError, UnicodeDecodeError) as reason:
            raise InputError(f"cannot read {path}, move it away: {reason}") from None
        if not isinstance(request.get("block"), str):
            raise InputError(f"cannot read {path}, move it away: a request names no block")
        yield request


def _block_of(path: Path, member: _Member) -> str | None:
    """Return the block whose requests a member holds; None if it is not whole."""
    if member.text is None:
        return None
    first = next(_requests(path, member), None)
    if first is None:
        raise InputError(f"cannot read {path}, move it away: a part of it holds no request")
    return str(first["block"])
