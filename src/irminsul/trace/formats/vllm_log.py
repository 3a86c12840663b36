r"""vLLM's request log: the lines that ``--enable-log-requests`` writes between others.

Two wordings are read (``vllm/entrypoints/logger.py``, later ``vllm/entrypoints/serve/utils/request_logger.py``)::

    INFO 07-01 12:00:00 [logger.py:40] Received request id-1: prompt: '<text>', params: ..., prompt_token_ids: [1], ...
    DEBUG 07-01 12:00:00 [request_logger.py:44] Request id-1 details: prompt: '<text>', prompt_token_ids: None, ...

Newer versions write the prompt at level DEBUG only (``VLLM_LOGGING_LEVEL=DEBUG``). Token ids are taken before the text,
because they are what the server cached. With ``--enable-log-outputs``, ``Generated response`` lines give replies. A
logger that writes JSON is read if the line's ``message`` (or ``msg``) is such a text. All other lines are passed over.

The log's times have no year: they are counted from the year 2000, and the year after once the months start again.
A log says nothing of sessions or salts; ``lora_request`` is part of the namespace. ``--max-log-len`` cuts prompts
without a trace; if several prompts share the greatest length, a note says that they may be cut.
"""

import ast
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from irminsul.trace.fields import call_info
from irminsul.trace.formats.log_file import LogFile
from irminsul.trace.formats.plain import token_ids
from irminsul.trace.lines import LineError, parse_json, parse_object
from irminsul.trace.records import LoggedCall, Tokens

_STRING = r"""(?:'(?:[^'\\]++|\\.)*+'|"(?:[^"\\]++|\\.)*+")"""
_PROMPT = re.compile(rf"(?:Received request (\S+)|Request (\S+) details): prompt: (None|{_STRING})")
_BROKEN_PROMPT = re.compile(r"Received request \S+: prompt: |Request \S+ details: prompt: ")
_RESPONSE = re.compile(
    rf"Generated response (\S+)(?: \([^)]*\))?: output: ({_STRING}), output_token_ids: (None|\[[\d, ]*\])"
)
_IDS = re.compile(r", prompt_token_ids: (None|\[[\d, ]*\])")
_LORA = re.compile(r"lora_name='([^']*)'")
_TIME = re.compile(r"\b(?:(\d{4})-)?(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_BEGINNINGS = ("Received request ", "Request ", "Generated response ")
_MAX_OPEN = 4096
_FIRST_YEAR = 2000
_PARTIAL = "(streaming delta)"
_NO_PROMPT = re.compile(r"Received request \S+: params: ")


@dataclass
class _State:
    """What one file has told so far."""

    running: OrderedDict[str, LoggedCall] = field(default_factory=OrderedDict)
    year: int = _FIRST_YEAR
    month: int = 1
    longest: int = 0
    how_many_longest: int = 0
    without_prompt: int | None = None
    """The first line that tells of a request and not its prompt."""


class VLLMFormat:
    """Reads the request lines of a vLLM server's log."""

    name = "vllm"

    def recognises(self, text: str, record: dict[str, Any] | None) -> bool:
        """See Format."""
        try:
            message = _message(text) if record is not None else text
            return _PROMPT.search(message) is not None or _NO_PROMPT.search(message) is not None
        except LineError:
            return False

    def read(self, file: LogFile) -> Iterator[LoggedCall]:
        """See Format. A call is yielded when its reply is seen, so not in the order of arrival; its time says that."""
        state = _State()
        for line in file.lines:
            if not any(beginning in line.text for beginning in _BEGINNINGS):
                continue
            try:
                yield from _follow(line.text, state, file, line.number)
            except LineError as reason:
                file.bad(line.number, str(reason))
        yield from state.running.values()
        if state.without_prompt is not None and not state.longest:
            file.bad(state.without_prompt, "the log holds no prompts; set VLLM_LOGGING_LEVEL=DEBUG where vLLM runs")
        if state.how_many_longest > 1:
            file.notes.add(
                f"{file.name}: {state.how_many_longest} prompts have the greatest length, {state.longest}; if vLLM ran "
                "with --max-log-len, they are cut"
            )


def _follow(text: str, state: _State, file: LogFile, line: int) -> Iterator[LoggedCall]:
    """Take one line; yield the calls that are complete now."""
    message = _message(text)
    if found := _PROMPT.search(message):
        request_id = found[1] or found[2]
        call = _call(message, found, _fields(text, message, state), file, line)
        _watch_length(state, len(call.prompt) if isinstance(call.prompt, str) else call.prompt.size)  # type: ignore[union-attr]
        if request_id in state.running:
            # The server was started again and counts anew: the earlier call has no end.
            yield state.running.pop(request_id)
        state.running[request_id] = call
        if len(state.running) > _MAX_OPEN:
            yield state.running.popitem(last=False)[1]
    elif (found := _RESPONSE.search(message)) and _PARTIAL not in found[0] and found[1] in state.running:
        call = state.running.pop(found[1])
        yield replace(call, reply=_ids(found[3]) if not isinstance(call.prompt, str) else _string(found[2]))
    elif _NO_PROMPT.search(message):
        state.without_prompt = state.without_prompt or line
    elif _BROKEN_PROMPT.search(message):
        raise LineError("the prompt is not written as vLLM writes it, or the line is cut")


def _message(text: str) -> str:
    """Return the message of a line: itself, or what a JSON logger put it in."""
    if not text.startswith("{"):
        return text
    record = parse_object(text)
    return next((record[name] for name in ("message", "msg") if isinstance(record.get(name), str)), "")


def _call(message: str, found: re.Match[str], fields: dict[str, Any], file: LogFile, line: int) -> LoggedCall:
    ids = _IDS.search(message, found.end())
    prompt = _ids(ids[1]) if ids else None
    if prompt is not None and prompt.size:
        return LoggedCall(call_info(file.name, line, [fields]), prompt)
    if found[3] == "None" or not (text := _string(found[3])):
        raise LineError("holds neither the prompt's text nor its token ids")
    return LoggedCall(call_info(file.name, line, [fields]), text)


def _fields(text: str, message: str, state: _State) -> dict[str, Any]:
    lora = _LORA.search(message)
    fields: dict[str, Any] = {"lora": lora[1]} if lora else {}
    if text.startswith("{"):
        record = parse_object(text)
        return {name: record[name] for name in ("ts", "timestamp", "@timestamp") if name in record} | fields
    return fields | {"ts": _time(text.partition("eceived request")[0].partition("Request ")[0], state)}


def _time(head: str, state: _State) -> float | None:
    found = _TIME.search(head)
    if found is None:
        return None
    month, day, hour, minute, second = (int(part) for part in found.groups()[1:])
    if found[1] is None and month < state.month:
        state.year += 1
    state.month = month
    year = int(found[1]) if found[1] else state.year
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:
        raise LineError(f"{found[0]!r} is no time") from None


def _watch_length(state: _State, length: int) -> None:
    if length > state.longest:
        state.longest, state.how_many_longest = length, 0
    state.how_many_longest += length == state.longest


def _ids(text: str) -> Tokens | None:
    return None if text == "None" else token_ids(parse_json(text), "prompt_token_ids")


def _string(literal: str) -> str:
    """Read a string as Python's ``repr`` wrote it."""
    try:
        text = ast.literal_eval(literal)
        text.encode()
    except (ValueError, SyntaxError, MemoryError):
        raise LineError("the prompt is not written as Python writes a string") from None
    assert isinstance(text, str), type(text)
    return text
