"""The directory of a build: whether it is whole, what may be replaced by it, and how it comes into its place.

Beside a checkpoint's files lies `MANIFEST`, a JSON object: ``provenance`` says what was built, and ``files`` has the
``size`` in bytes and the ``sha256`` of each other file by its name.

A build is written to a hidden directory beside its place, `.NAME-` and a random word, and renamed when complete. That
directory holds a file which is locked as long as the builder lives: whoever can lock it may remove the directory.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from safetensors import SafetensorError

from irminsul.errors import InputError

MANIFEST = "irminsul-build.json"
_CONFIG = "config.json"
WRITTEN = {
    MANIFEST,
    _CONFIG,
    "chat_template.jinja",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
"""All files that builds write."""
_LOCK = "irminsul-build.lock"

Provenance = Mapping[str, str | int]
"""What was built and from what; ``name`` is the model's. Two builds of equal provenance hold the same."""


def write_manifest(folder: Path, provenance: Provenance) -> None:
    """Record what was built and every file of it."""
    files = {path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())}
    manifest = {"provenance": dict(provenance), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def find_fault(folder: Path, provenance: Provenance) -> str | None:
    """Say why a directory is not a whole build of this provenance; None if it is.

    Args:
        folder: need not exist.
        provenance: of the build that is wanted.
    """
    try:
        if not (folder / MANIFEST).is_file():
            return f"{MANIFEST} is missing"
        if _provenance_in(folder / MANIFEST) != provenance:
            return "it was not built by this version of irminsul"
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        for name, recorded in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != recorded["size"] or file_sha256(path) != recorded["sha256"]:
                return f"{name} is damaged"
    except (OSError, AttributeError, LookupError, TypeError) as error:
        return f"it cannot be compared with its {MANIFEST}: {error}"
    return None


def refuse_to_replace(target: Path, name: str) -> None:
    """Raise InputError unless a build of ``name`` may take this place.

    It may where nothing is, and where an empty directory or an older build of ``name`` is, which hold nothing of
    somebody else's. The current directory and mount points cannot be renamed over.
    """
    if not os.path.lexists(target):
        return
    try:
        is_current = target.samefile(".")
        entries = sorted(target.iterdir())
    except OSError as error:
        raise InputError(f"cannot replace {target}: {error}") from error
    if is_current:
        raise InputError(f"cannot replace {target}: it is the current directory; choose another directory")
    if target.is_mount():
        raise InputError(f"cannot replace {target}: it is a mount point; choose a directory in it")
    if not entries:
        return
    if not any(_is_named(_provenance_in(target / file), name) for file in (MANIFEST, _CONFIG)):
        raise InputError(f"{target} exists and is not a build of {name}; remove it or choose another directory")
    for path in entries:
        if path.name not in WRITTEN or not path.is_file():
            raise InputError(f"{path} is not part of a build of {name}; move it or choose another directory")


@contextmanager
def replacing(target: Path, provenance: Provenance) -> Iterator[Path]:
    """Yield an empty directory to write a build to; it becomes ``target`` when the block ends.

    If the block raises, or the process is told to terminate, nothing is left and ``target`` is as it was. What killed
    builds of the same place have left is removed.

    Raises:
        InputError: it cannot be written, or ``target`` holds what must not be replaced.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        with (
            _exit_on_terminate(),
            tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch,
            _locked(Path(scratch)),
        ):
            staged = Path(scratch) / "new"
            staged.mkdir()
            yield staged
            _move(staged, target, Path(scratch) / "old", provenance)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {target}: {error}") from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _provenance_in(path: Path) -> object:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value.get("provenance") if isinstance(value, dict) else None


def _is_named(provenance: object, name: str) -> bool:
    return isinstance(provenance, dict) and provenance.get("name") == name


def _move(staged: Path, target: Path, aside: Path, provenance: Provenance) -> None:
    """Move ``staged`` to ``target`` in one step; an older build is moved to ``aside`` first, and back if that fails."""
    # Again, for somebody may have put a file there in the meantime.
    refuse_to_replace(target, str(provenance["name"]))
    if target.exists():
        target.rename(aside)
    try:
        staged.rename(target)
    except OSError:
        # Somebody else may have finished the same build in between; theirs is as good.
        if find_fault(target, provenance) is None:
            return
        if aside.exists():
            aside.rename(target)
        raise


@contextmanager
def _locked(scratch: Path) -> Iterator[None]:
    new = scratch / "lock"
    with new.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Only now, so that nobody else finds it before it is locked.
        new.rename(scratch / _LOCK)
        yield


def _remove_abandoned(target: Path) -> None:
    for scratch in sorted(target.parent.iterdir()):
        if scratch.name.startswith(f".{target.name}-"):
            try:
                with (scratch / _LOCK).open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(scratch)
            except OSError:
                continue  # it is not ours, or its builder lives


@contextmanager
def _exit_on_terminate() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that the blocks around the work clean up; a handler of the caller's is kept."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    may_set = threading.current_thread() is threading.main_thread()
    if not may_set or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
