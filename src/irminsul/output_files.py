"""Files that hold results: looked at before the work begins, replaced only when the new content is complete.

A failed write leaves what was there before: the content goes to a file beside it, which is renamed at the end. What a
killed process leaves is that other file, `.NAME.PROCESS.part`, which nothing reads.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from irminsul.errors import InputError


def require_writable(*paths: Path, inputs: Iterable[Path | str] = ()) -> None:
    """Refuse what a command cannot write, or must not.

    Args:
        paths: what the command writes.
        inputs: files that it reads.

    Raises:
        InputError: a path names no regular file that can be written, nor none in a directory that can; or an input or
            another of the paths, be it through links.
    """
    taken = {_identity(path): "it is an input of this command" for path in inputs}
    for path in paths:
        if str(path) == "-":
            raise InputError("cannot write -: the standard output holds the tables; name a file")
        with _as_input_error(path):
            if path.is_dir():
                raise InputError(f"cannot write {path}: it is a directory")
            if path.exists() and not path.is_file():
                raise InputError(f"cannot write {path}: it is not a regular file")
            if not path.parent.is_dir():
                raise InputError(f"cannot write {path}: there is no directory {path.parent}")
            if path.exists() and not os.access(path, os.W_OK):
                raise InputError(f"cannot write {path}: it is read-only")
            with suppress(FileNotFoundError):
                # A loop of links: an OSError here, whereas Path.resolve raises it or not by the version of Python.
                path.stat()
            if _identity(path) in taken:
                raise InputError(f"cannot write {path}: {taken[_identity(path)]}")
            taken[_identity(path)] = f"it is the same file as {path}, another output of this command"
            probe = _beside(path)
            probe.touch()
            probe.unlink()


def require_folder(folder: Path, *names: str) -> None:
    """Make a directory if there is none; raise InputError unless files of these names can be written to it."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot write to {folder}: it is not a directory")
    with _as_input_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    require_writable(*(folder / name for name in names))


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Write files, all or none: none is replaced before all are written.

    Raises InputError if one cannot be written; what was there before stays.
    """
    with _staged(contents) as staged:
        for path, content in contents.items():
            with _as_input_error(path):
                staged[path].write_bytes(content)


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file of lines, which come without their ends, as they are made; InputError as above."""
    with _staged([path]) as staged, _as_input_error(path), staged[path].open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


@contextmanager
def _staged(paths: Iterable[Path]) -> Iterator[dict[Path, Path]]:
    """Yield a file to write for each path; all take their places if the block ends well, or are removed."""
    paths = list(paths)
    # A device or a pipe must not be renamed over.
    require_writable(*paths)
    staged = {path: _beside(path) for path in paths}
    try:
        yield staged
        for path, complete in staged.items():
            with _as_input_error(path):
                # A link stays a link, to a new file.
                complete.replace(path.resolve())
    finally:
        for complete in staged.values():
            complete.unlink(missing_ok=True)


def _identity(path: Path | str) -> object:
    """Return what is equal for two names of one file, which need not exist."""
    try:
        status = Path(path).stat()
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def _beside(path: Path) -> Path:
    target = path.resolve()
    return target.with_name(f".{target.name}.{os.getpid()}.part")


@contextmanager
def _as_input_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
