"""The files of a benchmark: ``blocks.jsonl``, one JSON object a block, and ``requests.jsonl.gz``, one a request.

A line is written when its block has ended and stays; a line that an interrupted write left unfinished is dropped. The
fields of a block are in docs/bench.md.
"""

import gzip
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from irminsul.bench.client import Measured
from irminsul.errors import InputError
from irminsul.output_files import require_folder

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
        block = json.loads(line)
        is_ours = block["format"] == FORMAT
    except (ValueError, TypeError, LookupError):
        is_ours = False
    if not is_ours:
        raise InputError(f"{path}, line {number}: no block of format {FORMAT}")
    assert isinstance(block, dict), block
    return block


def digest(value: object) -> str:
    """Return a short name for a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _cut_unfinished_line(path: Path) -> None:
    try:
        with path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
