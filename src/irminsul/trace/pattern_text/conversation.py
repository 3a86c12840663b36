"""A coding agent's conversation about the standard library: questions, tool calls, what the tools returned, answers.

Tool results are real text of the library. Answers say what the source says: arguments, the first paragraph of the
docstring, the exceptions raised.
"""

import json
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from irminsul.trace.messages import tool_call
from irminsul.trace.pattern_text.library import Function, Library, Module
from irminsul.trace.records import Message

_QUESTIONS = (
    "What does {name} in {path} do when {argument} is left out?",
    "I want to call {name} from a worker thread. Does anything in {path} speak against it?",
    "Is {argument} of {name} ({path}) used anywhere in its body, or only handed on?",
    "Somebody reported that {name} raises the wrong error. Which ones can come out of it, and where in {path}?",
    "Before I rename {argument} in {name}: who relies on the name? Begin with {path}.",
    "Explain {name} in {path} to me as if I had to write a test for it.",
    "How much of {name} could be removed from {path} if {argument} always had its default?",
    "The docstring of {name} in {path} looks out of date to me. Compare it with the code.",
    "Where does {path} validate {argument} before {name} uses it?",
    "A user passes a subclass of str as {argument} to {name}. Walk through {path} and tell me what happens.",
    "Can {name} in {path} return None? I need to know before I annotate it.",
    "Which lines of {name} would an input of ten million items make slow? It is in {path}.",
)
_OPENINGS = (
    "I will look at the definition first.",
    "Let me read it.",
    "The source decides that; opening it.",
    "",
    "I start with the file that you named.",
    "One moment, I am reading the function and what surrounds it.",
)
_NEXT = (
    "That is the definition. Now who else uses the name.",
    "The answer depends on the callers, so I look for them.",
    "",
    "To be sure I also check what the documentation promises.",
)
_WINDOW = (40, 180)
_MATCHES = 40
_LONGEST_RESULT = 9_000
# Less room than this (characters) is left empty: most turns would not fit.
_SHORTEST_TURN = 2_500


class _Lookup(NamedTuple):
    """A tool call and what came back."""

    tool: str
    arguments: dict[str, object]
    result: str


def question(library: Library, rng: random.Random) -> str:
    """Ask something about a function of the library."""
    return _question(*library.random_function(rng), rng)


def turn(library: Library, rng: random.Random, number: int, longest: int) -> tuple[Message, ...]:
    """Make one turn: a user message, one to three tool calls each with its result, and the answer.

    Args:
        library: what it is about.
        rng: draws everything.
        number: of the turn in its conversation; the ids of the tool calls begin with it.
        longest: most characters of a tool result.
    """
    module, function = library.random_function(rng)
    messages: list[Message] = [{"role": "user", "content": _question(module, function, rng)}]
    lookups = _lookups(library, module, function, rng)
    for index, lookup in enumerate(lookups[: rng.choice((1, 1, 2, 3))]):
        messages += _called(lookup, rng.choice(_NEXT if index else _OPENINGS), f"call_{number}_{index}", longest)
    return (*messages, {"role": "assistant", "content": _answer(module, function)})


def conversation(library: Library, rng: random.Random, chars: int) -> tuple[Message, ...]:
    """Make whole turns of at most that many characters together, and not much less: the last have short results."""
    messages: list[Message] = []
    number, room = 0, chars
    while room > _SHORTEST_TURN:
        made = turn(library, rng, number, longest=min(_LONGEST_RESULT, room // 3))
        if text_chars(made) <= room:
            messages += made
            number, room = number + 1, room - text_chars(made)
    return tuple(messages)


def text_chars(messages: Sequence[Message]) -> int:
    """Return the characters of texts and tool calls."""
    called = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    return sum(len(message["content"] or "") for message in messages) + sum(map(len, called))


def _question(module: Module, function: Function, rng: random.Random) -> str:
    argument = rng.choice(function.arguments or ("the instance",))
    return rng.choice(_QUESTIONS).format(name=function.name, path=module.path, argument=argument)


def _lookups(library: Library, module: Module, function: Function, rng: random.Random) -> list[_Lookup]:
    lookups = [_read(module, function, rng), _search(library, function, rng)]
    return [*lookups, _documentation(module, rng.choice(module.functions))]


def _read(module: Module, function: Function, rng: random.Random) -> _Lookup:
    offset = max(1, function.first_line - rng.randint(0, 30))
    limit = rng.randint(*_WINDOW)
    lines = module.lines[offset - 1 : offset - 1 + limit]
    head = f"{module.path}, lines {offset} to {offset + len(lines) - 1} of {len(module.lines)}"
    arguments: dict[str, object] = {"path": module.path, "offset": offset, "limit": limit}
    return _Lookup("read_file", arguments, "\n".join([head, *lines]))


def _search(library: Library, function: Function, rng: random.Random) -> _Lookup:
    word = function.name.rpartition(".")[2]
    pattern = re.compile(rf"\b{re.escape(word)}\b")
    found = [
        f"{path}:{number}: {line}"
        for path in sorted(rng.sample(library.paths, 8))
        for number, line in enumerate(library.module(path).lines, start=1)
        # The pattern is slow and most lines do not hold the word.
        if word in line and pattern.search(line)
    ]
    more = [f"({len(found) - _MATCHES} more)"] if len(found) > _MATCHES else []
    text = "\n".join([*found[:_MATCHES], *more]) or f"no match for {word}"
    return _Lookup("search_text", {"word": word, "directory": "lib", "limit": _MATCHES}, text)


def _documentation(module: Module, function: Function) -> _Lookup:
    text = f"{function.name}({', '.join(function.arguments)})\n\n{function.doc}"
    return _Lookup("show_documentation", {"path": module.path, "name": function.name}, text)


def _called(lookup: _Lookup, opening: str, call_id: str, longest: int) -> list[Message]:
    result = lookup.result
    if len(result) > longest:
        whole_lines = result[:longest].rpartition("\n")[0]
        result = f"{whole_lines or result[:longest]}\n(cut here)"
    call = tool_call(lookup.tool, json.dumps(lookup.arguments), call_id)
    return [
        {"role": "assistant", "content": opening or None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]


def _answer(module: Module, function: Function) -> str:
    where = f"`{function.name}` ({module.path}, lines {function.first_line} to {function.last_line})"
    takes = ", ".join(f"`{name}`" for name in function.arguments) or "no argument of its own"
    raises = " and ".join(f"`{name}`" for name in module.raised_by(function))
    fails = f"It raises {raises} itself." if raises else "It raises nothing by itself; errors come from what it calls."
    promise = function.doc.split("\n\n")[0]
    return f"{where} takes {takes}. {fails} Its docstring promises:\n\n{promise}"
