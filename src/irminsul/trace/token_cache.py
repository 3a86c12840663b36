"""Logs to tokens in one call, and the tokens on disk for the next time.

An entry is one file of plain numpy arrays (``.npz``, never pickled), named after everything its content depends on: the
bytes and names of the logs, the form asked for, how bad lines are met, the tokenizer and its template, the versions of
readers and cache. So an entry is never stale; it may be damaged, which its digest tells. It is written under another
name and renamed, so a reader meets a whole one or none.
"""

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from irminsul.errors import InputError
from irminsul.namespace import Namespace
from irminsul.trace.lines import STDIN, BadLines, Notes, Progress, refuse_bad_lines
from irminsul.trace.readers import AUTO, READER_VERSION, read_calls
from irminsul.trace.token_log import CallTable, Names, PieceLog, PieceTable
from irminsul.trace.token_log_builder import build_token_log
from irminsul.trace.tokenise import Tokeniser

_CACHE_VERSION = 1
_HASH_BLOCK = 2**20
_DAMAGED = (ValueError, KeyError, TypeError, OSError, EOFError, MemoryError, NotImplementedError, zipfile.BadZipFile)


def read_token_log(
    paths: Sequence[Path | str],
    tokeniser: Tokeniser,
    *,
    form: str = AUTO,
    skip_bad: bool = False,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> PieceLog:
    """Read logs and tokenise them, or take the tokens from a cache.

    Args:
        paths: see ``read_calls``. The standard input is never cached.
        tokeniser: renders and encodes.
        form: see ``read_calls``.
        skip_bad: count bad lines and go on; a note names the first of them. Else the first one is an error.
        cache: a directory, made if it is missing; None keeps nothing.
        progress: takes the bytes of the files as they are read; an entry of the cache takes them all at once.

    Raises:
        InputError: a file, a line, the form or the cache's directory cannot be used.
    """
    if cache is None or STDIN in map(str, paths):
        return _read(paths, tokeniser, form, skip_bad=skip_bad, progress=progress)
    entry = _entry(paths, tokeniser, form, skip_bad=skip_bad, cache=cache)
    if entry.exists():
        log = _load(entry, tokeniser)
        if log is not None:
            if progress is not None:
                progress(sum(Path(path).stat().st_size for path in paths))
            return log
    damaged = entry.exists()
    log = _read(paths, tokeniser, form, skip_bad=skip_bad, progress=progress)
    _store(entry, log)
    if damaged:
        log.notes = (*log.notes, f"the cached tokens in {entry} were damaged and have been made again")
    return log


def _read(
    paths: Sequence[Path | str], tokeniser: Tokeniser, form: str, *, skip_bad: bool, progress: Progress | None
) -> PieceLog:
    bad, notes = BadLines(), Notes()
    on_bad = bad if skip_bad else refuse_bad_lines
    calls = read_calls(paths, form, on_bad=on_bad, notes=notes, progress=progress)
    log = build_token_log(calls, tokeniser, on_bad=on_bad, notes=notes)
    log.notes = (*bad.notes(), *log.notes)
    return log


def _entry(paths: Sequence[Path | str], tokeniser: Tokeniser, form: str, *, skip_bad: bool, cache: Path) -> Path:
    """Return the file that holds the tokens of these logs, if they were made before."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot use {cache} for cached tokens: {error.strerror or error}") from error
    depends_on = [
        _CACHE_VERSION,
        READER_VERSION,
        tokeniser.fingerprint,
        form,
        skip_bad,
        [(str(path), _digest_of_file(path)) for path in paths],
    ]
    name = hashlib.blake2b(json.dumps(depends_on).encode(), digest_size=16).hexdigest()
    return cache / f"{name}.npz"


def _digest_of_file(path: Path | str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with Path(path).open("rb") as file:
            while block := file.read(_HASH_BLOCK):
                digest.update(block)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def _store(entry: Path, log: PieceLog) -> None:
    arrays: dict[str, NDArray[Any]] = {
        **{f"pieces.{name}": column for name, column in log.pieces._asdict().items()},
        **{f"calls.{name}": column for name, column in log.calls._asdict().items()},
        "names": np.frombuffer(json.dumps([asdict(log.names), log.notes]).encode(), dtype=np.uint8),
    }
    arrays["digest"] = _digest(arrays)
    try:
        with tempfile.NamedTemporaryFile(dir=entry.parent, suffix=".part", delete=False) as file:
            try:
                np.savez(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(entry)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise InputError(f"cannot store tokens in {entry.parent}: {error.strerror or error}") from error


def _load(entry: Path, tokeniser: Tokeniser) -> PieceLog | None:
    """Return a stored log; None if the entry is damaged."""
    try:
        # Opened here: numpy leaves a file open that turns out to be none of its own.
        with entry.open("rb") as file:
            # Written without compression: what unpacks to more than it is, is none of ours.
            if sum(member.file_size for member in zipfile.ZipFile(file).infolist()) > entry.stat().st_size:
                return None
            file.seek(0)
            with np.load(file, allow_pickle=False) as stored:
                arrays = dict(stored)
        if not np.array_equal(arrays.pop("digest"), _digest(arrays)):
            return None
        names, notes = json.loads(arrays["names"].tobytes())
        return PieceLog(
            PieceTable(*(arrays[f"pieces.{name}"] for name in PieceTable._fields)),
            CallTable(*(arrays[f"calls.{name}"] for name in CallTable._fields)),
            _names(names),
            notes,
            tokeniser,
        )
    except _DAMAGED:
        return None


def _names(stored: dict[str, Any]) -> Names:
    namespaces = tuple(Namespace(**namespace) for namespace in stored["namespaces"])
    return Names(tuple(stored["files"]), tuple(stored["sessions"]), tuple(stored["agents"]), namespaces)


def _digest(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data)
    return np.frombuffer(digest.digest(), dtype=np.uint8)
