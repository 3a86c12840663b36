"""Claude Code's session files (``~/.claude/projects/<project>/<session>.jsonl``).

A line is a node of a tree: ``uuid``, ``parentUuid``, ``sessionId``, ``type``, ``timestamp`` and, for nodes of type
``user`` or ``assistant``, an Anthropic ``message``. The pieces of one response (one content block a line) share
``message.id`` and ``requestId``.

One call is rebuilt for each response. Its prompt is the path from the root to the first piece's parent, with two
repairs: a response stands there with all its pieces, although the path passes through one of them only, and the results
of its tool calls follow it, although parallel ones hang on different pieces. Both only as far as the file had them when
the response began. A compaction starts a new root, so the prompt begins with its summary.

* ``isSidechain`` marks a subagent: a thread of its own in the session (``agentId``, or the root of its chain).
* Nodes without a message (``system``, ``progress``, ``attachment``, ...) are links of the path and have no text.
* Messages that Claude Code made up itself (``isApiErrorMessage``, model ``<synthetic>``) were not sent.
* A response that was copied into a second file (a resumed or forked session) is one call, the first.

The files hold neither the system prompt nor the tools. A note says so: real prompts are longer, by a prefix that rarely
changes. A file is held in memory as a whole, because any later line may continue any earlier one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from irminsul.trace.fields import call_info
from irminsul.trace.formats.log_file import LogFile
from irminsul.trace.lines import LineError, Notes, parse_object
from irminsul.trace.messages import as_object, openai_messages
from irminsul.trace.records import Chat, LoggedCall, Message

NOTE = (
    "Claude Code's files hold neither the system prompt nor the tools: real prompts begin with some ten thousand "
    "tokens more, nearly always an exact prefix"
)
_MISSING_PARENT = "nodes of Claude Code sessions whose parent is not in the file; their prompts begin there"
_TYPES = (
    "user",
    "assistant",
    "summary",
    "system",
    "progress",
    "attachment",
    "file-history-snapshot",
    "queue-operation",
)


@dataclass
class _Node:
    line: int
    parent: str | None
    record: dict[str, Any]
    role: str | None
    """user, assistant, or None for a node without a message."""
    blocks: list[dict[str, Any]]
    response: str | None = None
    """Names the response that the node is a piece of."""


@dataclass
class _Session:
    """The nodes of one file."""

    nodes: dict[str, _Node] = field(default_factory=dict)
    pieces: dict[str, list[str]] = field(default_factory=dict)
    """Per response, the uuids of its pieces in the order of the file."""
    results: dict[str, list[str]] = field(default_factory=dict)
    """Per tool_use id, the uuids of the nodes that hold its result."""
    messages: dict[tuple[str, ...], list[Message]] = field(default_factory=dict)
    """Messages of runs of nodes, so that calls share them."""


class ClaudeCodeFormat:
    """Reads Claude Code session files."""

    name = "claude-code"

    def __init__(self) -> None:
        self._seen: set[str] = set()
        """Responses of earlier files."""

    def recognises(self, text: str, record: dict[str, Any] | None) -> bool:
        """See Format."""
        del text
        if record is None or record.get("type") not in _TYPES:
            return False
        return "parentUuid" in record or "leafUuid" in record or "sessionId" in record or "snapshot" in record

    def read(self, file: LogFile) -> Iterator[LoggedCall]:
        """See Format."""
        session = _Session()
        for line in file.lines:
            try:
                _add(session, parse_object(line.text), line.number)
            except LineError as reason:
                file.bad(line.number, str(reason))
        file.notes.add(NOTE)
        for response, pieces in session.pieces.items():
            if response in self._seen:
                continue
            self._seen.add(response)
            first = session.nodes[pieces[0]]
            try:
                yield _call(session, first, pieces, file)
            except LineError as reason:
                file.bad(first.line, str(reason))


def _add(session: _Session, record: dict[str, Any], line: int) -> None:
    uuid = record.get("uuid")
    if not isinstance(uuid, str) or uuid in session.nodes:
        # Summaries, snapshots and settings are no part of a conversation.
        return
    parent = record.get("parentUuid")
    if not isinstance(parent, str | None):
        raise LineError("'parentUuid' must be a string or null")
    role, blocks = _blocks(record)
    node = _Node(line, parent, record, role, blocks)
    session.nodes[uuid] = node
    if role == "assistant":
        node.response = _response_name(record, uuid)
        session.pieces.setdefault(node.response, []).append(uuid)
    for block in blocks if role == "user" else ():
        if block.get("type") == "tool_result":
            session.results.setdefault(str(block.get("tool_use_id")), []).append(uuid)


def _blocks(record: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the role and the content blocks of a node that was sent or received; no role if it was neither."""
    if record.get("type") not in ("user", "assistant") or record.get("isApiErrorMessage"):
        return None, []
    message = as_object(record.get("message"), "'message'")
    if message.get("model") == "<synthetic>":
        return None, []
    content = message.get("content")
    if isinstance(content, str):
        return record["type"], [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise LineError("the content of 'message' must be a string or a list of blocks")
    return record["type"], [as_object(block, "a content block") for block in content]


def _response_name(record: dict[str, Any], uuid: str) -> str:
    names = [record["message"].get("id"), record.get("requestId")]
    return "/".join(str(name) for name in names if name is not None) or uuid


def _call(session: _Session, first: _Node, pieces: Sequence[str], file: LogFile) -> LoggedCall:
    chain = _chain(session, first, file.notes)
    messages = _messages(session, _sent(session, chain, first.line), file.notes)
    if not messages:
        raise LineError("a response without a prompt before it")
    record = first.record
    fields = {
        "session": record.get("sessionId"),
        "agent": _thread(record, chain),
        "ts": record.get("timestamp"),
        "model": record["message"].get("model"),
    }
    replies = _messages(session, pieces, file.notes)
    # A response that speaks again after its tool calls is several messages; its reply is left to the next call.
    reply = replies[0] if len(replies) == 1 else None
    return LoggedCall(call_info(file.name, first.line, [fields]), Chat(tuple(messages)), reply)


def _chain(session: _Session, first: _Node, notes: Notes) -> list[str]:
    """Return the uuids from the root to the parent of ``first``."""
    chain: list[str] = []
    seen: set[str] = set()
    uuid = first.parent
    while uuid is not None:
        if uuid in seen:
            raise LineError("its parents form a circle")
        seen.add(uuid)
        node = session.nodes.get(uuid)
        if node is None:
            notes.add(_MISSING_PARENT)
            break
        chain.append(uuid)
        uuid = node.parent
    return chain[::-1]


def _sent(session: _Session, chain: Sequence[str], before: int) -> list[str]:
    """Complete a chain with the pieces and results beside it that the file had before a line."""
    sent: dict[str, None] = {}
    for uuid in chain:
        response = session.nodes[uuid].response
        members = [uuid] if response is None else _with_results(session, session.pieces[response])
        sent |= dict.fromkeys(member for member in members if session.nodes[member].line < before)
    return list(sent)


def _with_results(session: _Session, pieces: Sequence[str]) -> list[str]:
    called = [str(block.get("id")) for piece in pieces for block in session.nodes[piece].blocks]
    return [*pieces, *(result for call in called for result in session.results.get(call, ()))]


def _thread(record: dict[str, Any], chain: Sequence[str]) -> str | None:
    if not record.get("isSidechain"):
        return None
    return record.get("agentId") or next(iter(chain), None)


def _messages(session: _Session, uuids: Sequence[str], notes: Notes) -> list[Message]:
    """Turn nodes into messages; consecutive pieces of one response are one message."""
    messages: list[Message] = []
    for _, run in groupby(uuids, key=lambda uuid: session.nodes[uuid].response or uuid):
        messages += _run_messages(session, tuple(run), notes)
    return messages


def _run_messages(session: _Session, run: tuple[str, ...], notes: Notes) -> list[Message]:
    if run not in session.messages:
        blocks = [block for uuid in run for block in session.nodes[uuid].blocks]
        role = session.nodes[run[0]].role
        session.messages[run] = openai_messages({"role": role, "content": blocks}, notes) if blocks else []
    return session.messages[run]
