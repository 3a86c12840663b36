"""Request logs to calls: the form of each file is told, or found out from its first lines."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from irminsul.errors import InputError
from irminsul.trace.formats.anthropic_messages import AnthropicFormat
from irminsul.trace.formats.claude_code import ClaudeCodeFormat
from irminsul.trace.formats.delta import DeltaFormat
from irminsul.trace.formats.log_file import Format, LogFile
from irminsul.trace.formats.openai_chat import OpenAIChatFormat
from irminsul.trace.formats.openai_responses import OpenAIResponsesFormat
from irminsul.trace.formats.plain import PlainFormat
from irminsul.trace.formats.sglang_log import SGLangFormat
from irminsul.trace.formats.vllm_log import VLLMFormat
from irminsul.trace.lines import Line, LineError, Notes, OnBad, Progress, parse_object, read_lines, refuse_bad_lines
from irminsul.trace.records import LoggedCall

AUTO = "auto"
READER_VERSION = 1
"""Goes up when a reader makes other calls of the same file; cached tokens of older versions are not used."""

# Where a line could be of two forms, the one that says more stands first. The last two say least: a body with messages
# may turn out to be Anthropic's by a later line, and a line with a "prompt" by anything.
_FORMATS = (
    SGLangFormat,
    VLLMFormat,
    DeltaFormat,
    ClaudeCodeFormat,
    AnthropicFormat,
    OpenAIResponsesFormat,
    OpenAIChatFormat,
    PlainFormat,
)
_UNSURE = (OpenAIChatFormat.name, PlainFormat.name)
FORMATS = tuple(form.name for form in _FORMATS)
"""Names of the known forms."""

# A server's log may begin with some hundred lines about its start.
_MAX_HEAD_LINES, _MAX_HEAD_CHARS = 2000, 16 * 2**20


def read_calls(
    paths: Sequence[Path | str],
    form: str = AUTO,
    *,
    on_bad: OnBad = refuse_bad_lines,
    notes: Notes | None = None,
    progress: Progress | None = None,
) -> Iterator[LoggedCall]:
    """Read the calls of logs, file after file.

    Args:
        paths: files, plain, gzip or zstd; ``-`` is the standard input.
        form: one of FORMATS, or ``auto``: told from the first lines, file by file.
        on_bad: takes lines that cannot be used. The default refuses the log.
        notes: takes what a reader of the results should know.
        progress: takes the bytes of the files as they are read.

    Yields:
        The calls, in the order the file gives them up: a log that tells requests and responses apart gives a call up
        when it has seen both.

    Raises:
        InputError: an unknown form, a file that cannot be read or whose form cannot be told; or what ``on_bad`` raises.
    """
    known: dict[str, Format] = {make.name: make() for make in _FORMATS}
    if form != AUTO and form not in known:
        raise InputError(f"unknown log format {form!r}; valid formats: {', '.join((AUTO, *FORMATS))}")
    notes = Notes() if notes is None else notes
    return _read_files(paths, form, known, on_bad, notes, progress)


def _read_files(
    paths: Sequence[Path | str],
    form: str,
    known: dict[str, Format],
    on_bad: OnBad,
    notes: Notes,
    progress: Progress | None,
) -> Iterator[LoggedCall]:
    for path in paths:
        lines = read_lines(path, on_bad, progress)
        name, lines = (form, lines) if form != AUTO else _told(str(path), lines, known)
        yield from known[name].read(LogFile(str(path), lines, on_bad, notes))


def _told(path: str, lines: Iterator[Line], known: dict[str, Format]) -> tuple[str, Iterator[Line]]:
    """Return the form of a file and its lines, those that were looked at included."""
    head: list[Line] = []
    chars, unsure = 0, None
    for line in lines:
        head.append(line)
        chars += len(line.text)
        found = _form_of(line.text, known)
        if found is not None and found not in _UNSURE:
            return found, chain(head, lines)
        unsure = unsure or found
        if len(head) >= _MAX_HEAD_LINES or chars >= _MAX_HEAD_CHARS:
            break
    if unsure is None and head:
        raise InputError(
            f"{path}: cannot tell the format from its first {len(head)} lines; name it with --format, one of "
            f"{', '.join(FORMATS)}"
        )
    # A file without lines has no calls, whatever its form.
    return unsure or PlainFormat.name, chain(head, lines)


def _form_of(text: str, known: dict[str, Format]) -> str | None:
    try:
        record: dict[str, Any] | None = parse_object(text)
    except LineError:
        record = None
    return next((name for name, form in known.items() if form.recognises(text, record)), None)
