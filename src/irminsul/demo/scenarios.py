"""The demo's agent conversations: five ways in which a prompt keeps its text and loses its prefix.

The texts lie in ``data`` as scripts. A script is a sequence of sections, each headed by a line that says what it is::

    === system | user | assistant      a message
    === call NAME ID                   a tool call of the assistant message before it; the body is its arguments
    === tool ID                        the result of that call
    === part NAME                      text that is no message by itself: a document, a question, another role
    === request N                      request N of the scenario ends here (no body)

The scenarios share no text with each other.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import Any

from irminsul.trace.delta import Message, Tool


@dataclass(frozen=True)
class DemoRequest:
    """One chat request; treat messages and tools as read-only."""

    scenario: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None = None


@dataclass(frozen=True)
class Script:
    """A conversation as it was written."""

    messages: tuple[Message, ...]
    parts: Mapping[str, str]
    """Name of each part to its text."""
    ends: tuple[int, ...]
    """For each request, the number of messages it holds."""


@dataclass
class _Draft:
    """A script while it is read."""

    messages: list[Message] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    def add(self, header: str, body: str) -> None:
        kind, *words = header.split()
        if kind == "call":
            self._call(*words, arguments=body)
        elif kind == "tool":
            self.messages.append({"role": "tool", "tool_call_id": words[0], "content": body})
        elif kind == "part":
            self.parts[" ".join(words)] = body
        elif kind == "request":
            self.ends.append(len(self.messages))
        else:
            assert kind in ("system", "user", "assistant"), header
            self.messages.append({"role": kind, "content": body})

    def _call(self, name: str, call_id: str, *, arguments: str) -> None:
        if self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)


def parse_script(text: str) -> Script:
    """Read a script; see the module's description for its form."""
    draft = _Draft()
    for section in f"\n{text}".split("\n=== ")[1:]:
        header, _, body = section.partition("\n")
        draft.add(header, body.strip("\n"))
    return Script(tuple(draft.messages), draft.parts, tuple(draft.ends))


def demo_requests() -> list[DemoRequest]:
    """Return the requests of all scenarios, scenario by scenario, in the order they are sent."""
    return [
        DemoRequest(scenario, messages, tools) for scenario, play in SCENARIOS.items() for messages, tools in play()
    ]


_Played = Iterator[tuple[tuple[Message, ...], tuple[Tool, ...] | None]]


def _changed_metadata() -> _Played:
    """The first line of the system prompt carries a request id, the time and the user; the conversation goes on."""
    script, tools = _script("operations"), _tools("operations")
    metadata = (
        {"request_id": "req-7c1e90b4", "time": "2026-03-14T02:16:02Z", "engineer": "Pavel Norrgard"},
        {"request_id": "req-0fa3d815", "time": "2026-03-14T02:18:31Z", "engineer": "Pavel Norrgard"},
        {"request_id": "req-e24b6697", "time": "2026-03-14T06:00:47Z", "engineer": "Ruth Abelard"},
    )
    system, *turns = script.messages
    for end, values in zip(script.ends, metadata, strict=True):
        yield ({**system, "content": Template(system["content"]).substitute(values)}, *turns[: end - 1]), tools


def _swapped_role() -> _Played:
    """Three agents with different role prompts read the same file of a change."""
    script = _script("review")
    for role in ("planner", "reviewer", "summariser"):
        yield ({"role": "system", "content": script.parts[role]}, *script.messages), None


def _edited_history() -> _Played:
    """Old tool results are cleared, then summarised, while the turns after them stay."""
    script, tools = _script("travel"), _tools("travel")
    cleared = {"t1": script.parts["cleared trains"]}
    edits: tuple[dict[str, str], ...] = ({}, cleared, cleared | {"t2": script.parts["summary"]})
    for end, edit in zip(script.ends, edits, strict=True):
        yield tuple(_with_results(message, edit) for message in script.messages[:end]), tools


def _with_results(message: Message, edit: Mapping[str, str]) -> Message:
    """Exchange the content of a tool message whose call the edit names."""
    new = edit.get(message.get("tool_call_id", ""))
    return message if new is None else {**message, "content": new}


def _reordered_documents() -> _Played:
    """A ranker puts the same documents before each question in another order; one of them is exchanged."""
    script = _script("documents")
    rankings = (
        ("survey", "storms", "nursery", "water", "fishers", "permit", "budget"),
        ("nursery", "budget", "survey", "permit", "storms", "fishers", "water"),
        ("storms", "survey", "water", "permit", "nursery", "school", "fishers"),
    )
    for number, ranking in enumerate(rankings, start=1):
        texts = [script.parts[name] for name in (*ranking, f"question {number}")]
        yield (*script.messages, {"role": "user", "content": "\n\n".join(texts)}), None


def _changed_tools() -> _Played:
    """Tool schemas are added, dropped, moved and edited before one conversation with different last questions."""
    script = _script("facilities")
    tools = {tool["function"]["name"]: tool for tool in _tools("facilities")}
    choices = (
        ("lookup_asset", "ticket_history", "find_technician", "check_stock", "find_space", "create_order"),
        ("lookup_asset", "notify_occupants", "ticket_history", "find_technician", "check_stock", "find_space"),
        ("lookup_asset", "ticket_history", "check_stock", "find_technician", "find_space", "create_order"),
    )
    for number, names in enumerate(choices, start=1):
        chosen = {name: tools[name] for name in names}
        if number == len(choices):
            chosen["find_technician"] = _with_week(tools["find_technician"])
        question = {"role": "user", "content": script.parts[f"question {number}"]}
        yield (*script.messages, question), tuple(chosen.values())


def _with_week(tool: Tool) -> Tool:
    """Let the tool look further than today, as a later version of it does."""
    edited: Tool = json.loads(json.dumps(tool))
    function = edited["function"]
    function["description"] = "Show which technicians of a trade are free this week or next, and when the warden is."
    function["parameters"]["properties"]["week"] = {"type": "string", "enum": ["this", "next"]}
    return edited


SCENARIOS: Mapping[str, Callable[[], _Played]] = {
    "changed_metadata": _changed_metadata,
    "swapped_role": _swapped_role,
    "edited_history": _edited_history,
    "reordered_documents": _reordered_documents,
    "changed_tools": _changed_tools,
}


def _script(name: str) -> Script:
    return parse_script(_read(f"{name}.txt"))


def _tools(name: str) -> tuple[Tool, ...]:
    tools: list[dict[str, Any]] = json.loads(_read(f"{name}_tools.json"))
    return tuple(tools)


def _read(file_name: str) -> str:
    return (files("irminsul.demo") / "data" / file_name).read_text(encoding="utf-8")
