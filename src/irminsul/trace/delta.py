"""Request logs in delta form: one LLM call a line, each written as a change to the call before it.

A line is a JSON object, lines are in time order::

    {"session": "s1", "agent": "main", "turn": 3, "ts": 1760000000, "keep": 5, "append": [...], "tools": "="}

The messages of a call are the first ``keep`` messages of the previous call of the same (session, agent), then
``append``. ``tools`` is a list of schemas, null for none, or ``"="`` for those of that previous call; on the first call
of a thread there is nothing to repeat, so ``"="`` means none. Other keys (``usage``, ``note``) are ignored.

``content`` is a string, null, or a list of blocks: ``text``, ``tool_use``, ``tool_result``. Blocks become OpenAI-style
messages, in the order they stand in, so one logged message may become several:

* ``text``: a string if it is one plain block, else a list of text parts as they stood in the log;
* ``tool_use``: an entry of the assistant message's ``tool_calls``, its ``input`` as JSON text; text that follows a
  ``tool_use`` starts another assistant message, because a message says its text first and calls its tools after;
* ``tool_result``: a message of role ``tool``.

Keys that the form does not name (a block's ``is_error``, say) are kept on what the block becomes.
"""

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from irminsul.errors import InputError

Message: TypeAlias = dict[str, Any]
"""One message of a chat, as the OpenAI API writes it."""
Tool: TypeAlias = dict[str, Any]
"""One tool schema, as the OpenAI API writes it."""

T = TypeVar("T")

_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class TraceCall:
    """One LLM call with its whole prompt.

    Calls of one thread share their message objects; treat them as read-only.
    """

    session: str
    agent: str
    """Names a thread inside the session."""
    turn: int
    """Number of the call, as the log counts."""
    ts: float | None
    """Seconds since the epoch, or None where the log has no clock."""
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None


@dataclass(frozen=True)
class _Thread:
    """The previous call of one (session, agent)."""

    logged: tuple[list[Message], ...] = ()
    """For each logged message, the messages it became; ``keep`` counts logged messages."""
    tools: tuple[Tool, ...] | None = None


class _LineError(Exception):
    """The reason why a line cannot be used; the reader adds file and line number."""


def read_trace(path: Path | str) -> Iterator[TraceCall]:
    """Read the calls of a log, one at a time.

    Args:
        path: a ``.jsonl`` file, plain, ``.gz`` (gzip) or ``.zst`` (needs the ``zstandard`` package).

    Yields:
        The calls in the order of the file; empty lines are skipped. The last call of every thread stays in memory
        until the end.

    Raises:
        InputError: the file cannot be read or a line is not in delta form; says file, line number and reason.
    """
    path = Path(path)
    threads: dict[tuple[str, str], _Thread] = {}
    for number, line in _numbered_lines(path):
        try:
            call = _resolve(line, threads)
        except _LineError as reason:
            raise InputError(f"{path}, line {number}: {reason}") from None
        yield call


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of each line that is not empty."""
    number = 0
    try:
        with _open(path) as file:
            for raw in file:
                number += 1
                text = raw.decode()
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path} after line {number}: {error}") from error


@contextmanager
def _open(path: Path) -> Iterator[Iterable[bytes]]:
    """Open a log for reading, by the ending of its name."""
    if path.name.endswith(".jsonl"):
        with path.open("rb") as file:
            yield file
    elif path.name.endswith(".jsonl.gz"):
        with gzip.open(path, "rb") as file:
            yield file
    elif path.name.endswith(".jsonl.zst"):
        with _open_zstandard(path) as lines:
            yield lines
    else:
        raise InputError(f"{path}: the name of a trace must end in .jsonl, .jsonl.gz or .jsonl.zst")


@contextmanager
def _open_zstandard(path: Path) -> Iterator[Iterable[bytes]]:
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise InputError(
            f"{path}: reading .zst needs the zstandard package; run `pip install zstandard` or decompress the file"
        ) from None
    try:
        with path.open("rb") as file:
            yield io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error


def _resolve(line: str, threads: dict[tuple[str, str], _Thread]) -> TraceCall:
    """Turn one line into its call and remember it as its thread's latest."""
    record = _parse(line)
    session, agent = _field(record, "session", str), _field(record, "agent", str)
    before = threads.get((session, agent), _Thread())
    keep = _field(record, "keep", int)
    if not 0 <= keep <= len(before.logged):
        raise _LineError(
            f"keep is {keep}, but the call before it of session {session!r}, agent {agent!r} has "
            f"{len(before.logged)} messages"
        )
    logged = before.logged[:keep] + tuple(_openai_messages(message) for message in _field(record, "append", list))
    tools = _tools(record, before)
    turn = _field(record, "turn", int)
    ts = _timestamp(record)
    threads[session, agent] = _Thread(logged, tools)
    return TraceCall(session, agent, turn, ts, tuple(message for group in logged for message in group), tools)


def _parse(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _LineError(f"not JSON: {error.msg} at column {error.colno}") from None
    return _object(record, "the line")


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _LineError(f"{what} must be an object, got {_kind(value)}")
    return value


def _field(record: dict[str, Any], key: str, kind: type[T]) -> T:
    """Return a required field of exactly this type."""
    if key not in record:
        raise _LineError(f"{key!r} is missing")
    value = record[key]
    # bool is an int in Python, and no number in a log.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _LineError(f"{key!r} must be of type {kind.__name__}, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _timestamp(record: dict[str, Any]) -> float | None:
    ts = record.get("ts")
    if ts is not None and (isinstance(ts, bool) or not isinstance(ts, int | float)):
        raise _LineError(f"'ts' must be a number or null, got {_kind(ts)}")
    return ts


def _tools(record: dict[str, Any], before: _Thread) -> tuple[Tool, ...] | None:
    tools = record.get("tools")
    if tools is None:
        return None
    if tools == "=":
        return before.tools
    if not isinstance(tools, list):
        raise _LineError(f"'tools' must be a list, null or \"=\", got {_kind(tools)}")
    return tuple(_object(tool, "a tool") for tool in tools)


def _openai_messages(value: object) -> list[Message]:
    """Turn one logged message into the messages that say the same in OpenAI's form."""
    message = _object(value, "a message")
    role = _field(message, "role", str)
    if role not in _ROLES:
        raise _LineError(f"unknown role {role!r}; known roles: {', '.join(_ROLES)}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [message]
    if not isinstance(content, list):
        raise _LineError(f"'content' must be a string, null or a list of blocks, got {_kind(content)}")
    return _from_blocks(message, [_object(block, "a content block") for block in content])


def _from_blocks(message: Message, blocks: list[dict[str, Any]]) -> list[Message]:
    """Split a message where its blocks stop fitting into one OpenAI message, keeping their order."""
    kinds = [_field(block, "type", str) for block in blocks]
    unknown = set(kinds) - {"text", "tool_use", "tool_result"}
    if unknown:
        raise _LineError(f"unknown content block {min(unknown)!r}; known blocks: text, tool_use, tool_result")
    if set(kinds) <= {"text"}:
        return [message | {"content": _plain(blocks) or ""}]
    _check_blocks_fit(message, kinds)
    messages: list[Message] = []
    for kind, block in zip(kinds, blocks, strict=True):
        if kind == "tool_result":
            messages.append(_tool_message(block))
            continue
        last = messages[-1] if messages and messages[-1]["role"] != "tool" else None
        if last is None or (kind == "text" and "tool_calls" in last):
            last = message | {"content": []}
            messages.append(last)
        if kind == "text":
            last["content"].append(block)
        else:
            last.setdefault("tool_calls", []).append(_tool_call(block))
    return [split | {"content": _plain(split["content"])} for split in messages]


def _check_blocks_fit(message: Message, kinds: list[str]) -> None:
    """Refuse blocks that their message cannot hold."""
    role = message["role"]
    if "tool_use" in kinds and role != "assistant":
        raise _LineError(f"a tool_use block stands in a message of role {role!r}, not 'assistant'")
    if "tool_result" in kinds and role != "user":
        raise _LineError(f"a tool_result block stands in a message of role {role!r}, not 'user'")
    if "tool_calls" in message:
        raise _LineError("a message has both tool_calls and tool_use blocks")


def _plain(content: object) -> object:
    """Write blocks of text as a string where that loses nothing: one block without further keys, or none."""
    if not isinstance(content, list):
        return content
    for block in content:
        if _field(_object(block, "a content block"), "type", str) != "text":
            raise _LineError(f"a tool_result may hold text only, got a block of type {block['type']!r}")
        _field(block, "text", str)
    if len(content) == 1 and content[0].keys() == {"type", "text"}:
        return content[0]["text"]
    return content or None


def _tool_call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(_field(block, "input", dict), ensure_ascii=False)
    call = {
        "id": _field(block, "id", str),
        "type": "function",
        "function": {"name": _field(block, "name", str), "arguments": arguments},
    }
    return _extra(block, "type", "id", "name", "input") | call


def _tool_message(block: dict[str, Any]) -> Message:
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise _LineError(
            f"the content of a tool_result must be a string, null or a list of blocks, got {_kind(content)}"
        )
    message = {"role": "tool", "tool_call_id": _field(block, "tool_use_id", str), "content": _plain(content) or ""}
    return _extra(block, "type", "tool_use_id", "content") | message


def _extra(block: dict[str, Any], *known: str) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in known}
