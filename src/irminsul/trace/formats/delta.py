"""The delta form: each call written as a change to the call before it.

A line is a JSON object, lines are in time order::

    {"session": "s1", "agent": "main", "turn": 3, "ts": 1760000000, "keep": 5, "append": [...], "tools": "="}

The messages of a call are the first ``keep`` messages of the previous call of the same (session, agent), then
``append``. ``tools`` is a list of schemas, null for none, or ``"="`` for those of that previous call; on the first call
of a thread there is nothing to repeat, so ``"="`` means none. ``agent`` names a thread inside the session and may be
missing. Time, tenant, salt, model and the like are read under their usual names; other keys (``turn``, ``usage``) are
not used.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from irminsul.trace.fields import call_info
from irminsul.trace.formats.log_file import LogFile, each_record
from irminsul.trace.lines import LineError, kind_of
from irminsul.trace.messages import as_object, field, openai_messages
from irminsul.trace.records import Chat, LoggedCall, Message, Tool


@dataclass(frozen=True)
class _Thread:
    """The previous call of one (session, agent)."""

    logged: tuple[list[Message], ...] = ()
    """For each logged message, the messages it became; ``keep`` counts logged messages."""
    tools: tuple[Tool, ...] | None = None


class DeltaFormat:
    """Reads the delta form. The last call of every thread stays in memory."""

    name = "delta"

    def recognises(self, text: str, record: dict[str, Any] | None) -> bool:
        """See Format."""
        del text
        return record is not None and {"session", "keep", "append"} <= record.keys()

    def read(self, file: LogFile) -> Iterator[LoggedCall]:
        """See Format."""
        threads: dict[tuple[str, str], _Thread] = {}

        def parse(record: dict[str, Any], line: int) -> Iterator[LoggedCall]:
            yield _resolve(record, threads, file, line)

        return each_record(file, parse)


def _resolve(record: dict[str, Any], threads: dict[tuple[str, str], _Thread], file: LogFile, line: int) -> LoggedCall:
    """Turn one line into its call and remember it as its thread's latest."""
    session, agent = field(record, "session", str), field({"agent": "", **record}, "agent", str)
    before = threads.get((session, agent), _Thread())
    keep = field(record, "keep", int)
    if not 0 <= keep <= len(before.logged):
        raise LineError(
            f"keep is {keep}, but the call before it of session {session!r}, agent {agent!r} has "
            f"{len(before.logged)} messages"
        )
    appended = tuple(openai_messages(message, file.notes) for message in field(record, "append", list))
    tools = _tools(record, before)
    info = call_info(file.name, line, [record])
    logged = before.logged[:keep] + appended
    threads[session, agent] = _Thread(logged, tools)
    return LoggedCall(info, Chat(tuple(message for group in logged for message in group), tools))


def _tools(record: dict[str, Any], before: _Thread) -> tuple[Tool, ...] | None:
    tools = record.get("tools")
    if tools is None:
        return None
    if tools == "=":
        return before.tools
    if not isinstance(tools, list):
        raise LineError(f"'tools' must be a list, null or \"=\", got {kind_of(tools)}")
    return tuple(as_object(tool, "a tool") for tool in tools)
