"""The lines of a log: plain, gzip or zstd, a file or the standard input.

The compression is told by the first bytes, not by the name. A file is never held whole: it is decompressed as it is
read, and a line longer than ``MAX_LINE_BYTES`` is skipped in pieces, so a small file that unpacks to a huge one costs
time and no memory.
"""

import gzip
import importlib
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias, cast

from irminsul.errors import InputError
from irminsul.trace.records import BadLine

MAX_LINE_BYTES = 64 * 2**20
STDIN = "-"

_GZIP_MAGIC, _ZSTD_MAGIC, _ZIP_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_BUFFER_BYTES = 2**20
_ZSTD_BYTES = 2**10
"""Compressed bytes that are unpacked at once: to 32 MiB at most, for four bytes can stand for a block of 128 KiB."""

OnBad: TypeAlias = Callable[[BadLine], None]
"""Takes a line that cannot be used: ``refuse_bad_lines``, or a ``BadLines`` that counts."""
Progress: TypeAlias = Callable[[int], None]
"""Takes the number of bytes just read, as they stand in the file."""


class LineError(Exception):
    """The reason why a line cannot be used; the reader adds file and line number."""


@dataclass(frozen=True)
class Line:
    """One line that is not empty."""

    number: int
    """From 1."""
    text: str


def refuse_bad_lines(line: BadLine) -> NoReturn:
    """Refuse the log (InputError) because of one line."""
    raise InputError(str(line))


@dataclass
class BadLines:
    """Counts bad lines and keeps the first few."""

    keep: int = 5
    count: int = 0
    first: list[BadLine] = field(default_factory=list)

    def __call__(self, line: BadLine) -> None:
        """Count a line."""
        self.count += 1
        if len(self.first) < self.keep:
            self.first.append(line)

    def notes(self) -> list[str]:
        """Say in sentences what was skipped."""
        if not self.count:
            return []
        more = self.count - len(self.first)
        listed = "; ".join(str(line) for line in self.first) + (f"; and {more} more" if more else "")
        return [f"{self.count} bad line{'s' if self.count > 1 else ''} skipped: {listed}"]


class Notes:
    """What a reader of the results should know, each thing once and counted."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, text: str) -> None:
        """Note something once more."""
        self._counts[text] = self._counts.get(text, 0) + 1

    def sentences(self) -> list[str]:
        """Return the notes in the order they first came up."""
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._counts.items()]


def read_lines(path: Path | str, on_bad: OnBad = refuse_bad_lines, progress: Progress | None = None) -> Iterator[Line]:
    """Yield the lines of a log that are not empty.

    Args:
        path: a file, or ``-`` for the standard input.
        on_bad: takes lines that are no text, and the place where a compressed file breaks off; the file ends there.
        progress: takes the bytes of the file (compressed ones, if it is) as they are read.

    Raises:
        InputError: the file cannot be opened, or zstandard is missing; or ``on_bad`` raises it.
    """
    name = str(path)
    number = 0
    try:
        with _open(name, progress) as (file, damage):
            try:
                while raw := file.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    try:
                        text = _text(raw, number)
                    except LineError as reason:
                        # Told before the rest of it is read, which may be long.
                        on_bad(BadLine(name, number, str(reason)))
                        _skip_rest(file, raw)
                        continue
                    if text and not text.isspace():
                        yield Line(number, text)
            except damage as error:
                on_bad(BadLine(name, number + 1, f"the compressed data is damaged or breaks off here ({error})"))
    except OSError as error:
        raise InputError(f"cannot read {name} after line {number}: {error.strerror or error}") from error


def parse_object(text: str) -> dict[str, Any]:
    """Read a line as a JSON object.

    Raises:
        LineError: it is none, or holds what no log of text has: NaN, half of a surrogate pair, bottomless nesting.
    """
    record = parse_json(text)
    if not isinstance(record, dict):
        raise LineError(f"the line must be an object, got {kind_of(record)}")
    return record


def parse_json(text: str) -> Any:  # noqa: ANN401
    """Read JSON; LineError gives the reason why it is none."""
    if "\0" in text:
        raise LineError("holds a NUL byte (is this UTF-16, or a damaged file?)")
    try:
        value = json.loads(text, parse_constant=_no_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise LineError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise LineError("JSON nested too deeply") from None
    except UnicodeEncodeError:
        raise LineError("holds half of a surrogate pair, which is not text") from None
    except ValueError as error:
        # Python refuses to read integers of thousands of digits.
        raise LineError(f"a number is out of range ({str(error).partition(':')[0]})") from None
    return value


def json_text(value: object) -> str:
    """Write JSON as models and templates do: keys in their order, all characters as they are.

    Raises:
        LineError: a number is out of range, or the nesting too deep.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise LineError("a number is out of range") from None
    except RecursionError:
        raise LineError("JSON nested too deeply") from None


def kind_of(value: object) -> str:
    """Name the type of a JSON value as a sentence needs it."""
    return "null" if value is None else type(value).__name__


def _no_constant(name: str) -> NoReturn:
    raise LineError(f"not JSON: {name} is no number")


def _text(raw: bytes, number: int) -> str:
    if len(raw) > MAX_LINE_BYTES:
        raise LineError(f"longer than {MAX_LINE_BYTES // 2**20} MiB")
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 ({error.reason} at byte {error.start})") from None


def _skip_rest(file: BinaryIO, raw: bytes) -> None:
    """Read on to the end of a line of which ``raw`` has been read."""
    while raw and not raw.endswith(b"\n"):
        raw = file.readline(_BUFFER_BYTES)


class _Counted(io.RawIOBase):
    """Passes reads on and reports their sizes."""

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self._file = file
        self._progress = progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 -- any writable buffer
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._progress(len(data))
        return len(data)


class _ZstdFrames(io.RawIOBase):
    """Decompresses frame after frame; EOFError if the last one breaks off, which zstandard's own reader does not tell.

    Args:
        file: the frames.
        new_frame: makes a ``zstandard.ZstdDecompressionObj``.
    """

    def __init__(self, file: BinaryIO, new_frame: Callable[[], Any]) -> None:
        self._file = file
        self._new_frame = new_frame
        self._frame: Any = None
        """The one that is being read; None between two."""
        self._unread = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 -- any writable buffer
        while not self._ready:
            data = self._unread or self._file.read(_ZSTD_BYTES)
            if not data:
                if self._frame is not None:
                    raise EOFError("in the middle of a frame")
                return 0
            self._frame = self._frame or self._new_frame()
            self._ready = memoryview(self._frame.decompress(data))
            self._unread = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


@contextmanager
def _open(name: str, progress: Progress | None) -> Iterator[tuple[BinaryIO, tuple[type[Exception], ...]]]:
    """Open a log; also return the exceptions that mean damaged compressed data."""
    if name == STDIN and sys.stdin is None:
        raise InputError("cannot read the standard input: it is closed")
    with ExitStack() as stack:
        raw: BinaryIO = sys.stdin.buffer if name == STDIN else stack.enter_context(Path(name).open("rb"))
        counted = raw if progress is None else cast("BinaryIO", _Counted(raw, progress))
        file = io.BufferedReader(cast("io.RawIOBase", counted), _BUFFER_BYTES)
        # A BufferedReader closes what it wraps when it is dropped; the standard input is not ours to close.
        stack.callback(file.detach)
        magic = file.peek(4)[:4]
        if magic.startswith(_GZIP_MAGIC):
            yield cast("BinaryIO", gzip.GzipFile(fileobj=file)), (gzip.BadGzipFile, EOFError, zlib.error)
        elif magic == _ZSTD_MAGIC:
            zstandard = _zstandard(name)
            frames = _ZstdFrames(file, zstandard.ZstdDecompressor().decompressobj)
            yield cast("BinaryIO", io.BufferedReader(frames, _BUFFER_BYTES)), (zstandard.ZstdError, EOFError)
        elif magic == _ZIP_MAGIC:
            raise InputError(f"{name} is a zip archive; unpack it first")
        else:
            yield cast("BinaryIO", file), ()


def _zstandard(name: str) -> Any:  # noqa: ANN401
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise InputError(
            f"{name} is compressed with zstd, which needs the zstandard package: pip install 'irminsul-kv[analyze]'"
        ) from None
