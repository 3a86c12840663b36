"""Logs in delta form for the demo; the form itself is described in ``formats/delta.py``."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from irminsul.trace.readers import read_calls
from irminsul.trace.records import Chat, Message, Tool

__all__ = ["Message", "Tool", "TraceCall", "read_trace"]


@dataclass(frozen=True)
class TraceCall:
    """One LLM call with its whole prompt.

    Calls of one thread share their message objects; treat them as read-only.
    """

    session: str
    agent: str
    """Names a thread inside the session."""
    ts: float | None
    """Seconds since the epoch, or None where the log has no clock."""
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None


def read_trace(path: Path | str) -> Iterator[TraceCall]:
    """Read the calls of a log in delta form, one at a time.

    Args:
        path: a JSONL file, plain, gzip or zstd (which needs the ``zstandard`` package).

    Yields:
        The calls in the order of the file; empty lines are skipped. The last call of every thread stays in memory
        until the end.

    Raises:
        InputError: the file cannot be read or a line is not in delta form; says file, line number and reason.
    """
    for call in read_calls([path], form="delta"):
        assert isinstance(call.prompt, Chat), call.info.place
        assert call.info.session is not None, call.info.place
        yield TraceCall(call.info.session, call.info.thread, call.info.ts, call.prompt.messages, call.prompt.tools)
