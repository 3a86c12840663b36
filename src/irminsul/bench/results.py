"""The files of a benchmark: ``blocks.jsonl``, one JSON object a block, and ``requests.jsonl.gz``, one a request.

A line is written when its block has ended and stays. What an interrupted write left is dropped: a line without an end,
requests without their block. The fields of a block are in docs/bench.md.
"""

import fcntl
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from irminsul.bench.client import Measured
from irminsul.errors import InputError
from irminsul.output_files import require_folder
from irminsul.trace.lines import LineError, parse_object

FORMAT = 1
BLOCKS, REQUESTS = "blocks.jsonl", "requests.jsonl.gz"

Block: TypeAlias = dict[str, Any]
"""A measured block, as it stands in the file."""


class ResultFiles:
    """Results of one folder; made if it is missing.

    Raises:
        InputError: the folder cannot be written to, or holds a file of these names that is something else.
    """

    def __init__(self, folder: Path) -> None:
        require_folder(folder, BLOCKS, REQUESTS)
        self.folder = folder
        path = folder / BLOCKS
        if path.exists():
            _cut_unfinished_line(path)
        self.blocks = read_blocks(folder) if path.exists() else []
        if (folder / REQUESTS).exists():
            _cut_unfinished_requests(folder / REQUESTS, {block["id"] for block in self.blocks})

    def append(self, block: Block, requests: Sequence[Measured] | None) -> None:
        """Keep a block and, if given, its requests; InputError if the disk will not."""
        try:
            if requests is not None:
                lines = (json.dumps({"block": block["id"], **one.as_json()}) for one in requests)
                # Each block is a member of its own: gzip files may be joined.
                _append(self.folder / REQUESTS, gzip.compress("".join(f"{line}\n" for line in lines).encode()))
            _append(self.folder / BLOCKS, f"{json.dumps(block)}\n".encode())
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
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    # An unfinished last line is of a block that is being written, or that was never finished.
    return [_block(path, number, line) for number, line in enumerate(lines, start=1) if line.endswith("\n")]


def _block(path: Path, number: int, line: str) -> Block:
    try:
        block = parse_object(line)
    except LineError as reason:
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
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


_LARGEST = 1e15
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


def _cut_unfinished_requests(path: Path, blocks: Container[str]) -> None:
    """Drop requests at the end that were not written whole, or whose block was not."""
    try:
        with path.open("rb+") as file:
            content = file.read()
            members = list(_members(content))
            while members and members[-1][1] not in blocks:
                members.pop()
            file.truncate(members[-1][0] if members else 0)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (zlib.error, ValueError, LookupError, TypeError) as error:
        raise InputError(f"cannot read {path}, move it away: {error}") from error


def _members(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield where each whole member of a gzip file ends, and the block whose requests it holds."""
    end = 0
    while end < len(content):
        reader = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        text = reader.decompress(memoryview(content)[end:])
        if not reader.eof:
            return
        end = len(content) - len(reader.unused_data)
        yield end, json.loads(text[: text.index(b"\n")])["block"]


def _cut_unfinished_line(path: Path) -> None:
    try:
        with path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
