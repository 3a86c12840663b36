"""The paper's five patterns as request logs: prompts that keep their text and lose their prefix.

The paper (arXiv 2605.05696, section 7.4) names agent_meta, sysvar, compact, rerank and tool_variants and gives neither
templates nor lengths. **These definitions are ours**; docs/patterns.md gives them in full. Sizes are set in characters
(about 4.1 to a token of source text and prose), so the text does not depend on a tokenizer. With a marker, the paper's
S2: a line of 64 tokens in front of and behind each region that prompts share.

Everything is drawn from the seed; the same seed, options and version of Python give the same bytes.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from itertools import takewhile
from typing import Any, TypeAlias
from uuid import UUID

import numpy as np

from irminsul import __version__
from irminsul.errors import InputError
from irminsul.matching.markers import generate_marker
from irminsul.trace.pattern_text.conversation import conversation, question, text_chars, turn
from irminsul.trace.pattern_text.library import (
    LIBRARY_VERSION,
    Document,
    Library,
    library_tool,
    reference,
    reference_documents,
    standard_library,
)
from irminsul.trace.pieces import Part, Piece
from irminsul.trace.records import Message, SpanKind, Tool
from irminsul.trace.tokenise import Tokeniser

CHARS_PER_TOKEN = 4.1
"""Of the texts used here, in DeepSeek's vocabulary; turns the sizes below into characters."""
CLEARED = "[Earlier tool result removed to save space]"

_FEW_TOOLS = 8
_CONVERSATION_TOKENS = (1_000, 15_000)
_BUDGET_TOKENS, _CLEAR_ABOVE, _SUMMARY_EVERY, _KEPT_RESULTS = 24_000, 0.75, 10, 4
_LONGEST_RESULT = 8_000
_DOCUMENT_TOKENS, _DOCUMENTS, _ZIPF = (400, 1_600), (8, 20), 0.8
_LONGEST_DOCUMENT = _DOCUMENT_TOKENS[1] * CHARS_PER_TOKEN
_EDITS = (1, 3)
# Characters for conversation or documents in a prompt of a given length.
_LEAST_ROOM = 5_000
_START = datetime(2026, 1, 12, 9, tzinfo=UTC)

# With the eight of coding_tools.json these are 22.
_LIBRARY_TOOLS = (
    *("io.open", "logging.basicConfig", "os.walk", "doctest.testfile", "json.dump", "shutil.copytree"),
    *("urllib.request.urlopen", "difflib.unified_diff", "py_compile.compile", "statistics.linear_regression"),
    *("subprocess.run", "tarfile.open", "compileall.compile_dir", "heapq.merge"),
)
_SPARE_TOOLS = ("difflib.ndiff", "doctest.testmod", "pickle.dump", "random.sample", "shutil.move", "tokenize.tokenize")
_ROLES = ("planner", "reviewer", "tester", "release manager", "investigator", "documentation writer")
_NAMES = (
    *("Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hana", "Ines"),
    *("Jonas", "Kofi", "Lena", "Mateo", "Nadia", "Otto", "Priya", "Quentin", "Rosa"),
)
_PLACES = ("/srv/checkouts/lib", "/home/dev/stdlib", "/build/agents/7/src", "/data/worktrees/review", "/var/ci/job/src")
_BRANCHES = ("main", "release/next", "fix/threading-shutdown", "docs/argparse", "feature/tar-filters", "wip/json-speed")
_APPENDICES = (
    " Answers may be up to a minute old.",
    " Not available in read-only checkouts.",
    " At most ten calls a minute; a call above that waits.",
    " Results are logged for the audit of this quarter.",
    " The argument names follow the interpreter of this checkout.",
)

Rng: TypeAlias = random.Random


@dataclass(frozen=True, eq=False)
class PatternCall:
    """One request. Calls share message and tool objects: treat them as read-only."""

    session: str
    """Names the body: what the calls of one body have in common is the point of a pattern."""
    agent: str
    ts: float
    """Seconds since the epoch."""
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None
    note: str
    """What sets this call apart from the others of its body."""


class Marker:
    """Puts the boundary line around shared regions, or nothing if there is none."""

    def __init__(self, line: str | None) -> None:
        self._before = "" if line is None else f"{line}\n"
        self._behind = "" if line is None else f"\n{line}"

    def around(self, text: str) -> str:
        """Frame a region."""
        return f"{self._before}{text}{self._behind}"

    def before(self, text: str) -> str:
        """Mark where a region begins, or where the one before it ends."""
        return f"{self._before}{text}"


@dataclass(frozen=True)
class _Order:
    """What one log is made of."""

    calls: int
    bodies: int
    rng: Rng
    marker: Marker
    library: Library
    prompt_tokens: int | None
    """About how long every prompt is to be; None for the pattern's own lengths."""

    def tools(self) -> tuple[Tool, ...]:
        """Return all tools; of prompts of a given length, at most half is system prompt and tools."""
        few = self.prompt_tokens is not None and 2 * _frame_chars(_tools()) > self.prompt_tokens * CHARS_PER_TOKEN
        return _tools()[:_FEW_TOOLS] if few else _tools()

    def tools_of(self, body: int) -> tuple[Tool, ...]:
        """Offer every other body all tools, the rest those of our own writing; to prompts of one length the same."""
        return self.tools() if self.prompt_tokens is not None or not body % 2 else _tools()[:_FEW_TOOLS]

    def room(self, prompt_tokens: int, frame_chars: int) -> float:
        """Return the characters that a prompt of given length has beside what frames it.

        Raises:
            InputError: there is hardly any.
        """
        room = prompt_tokens * CHARS_PER_TOKEN - frame_chars
        if room < _LEAST_ROOM:
            least = -(-int(frame_chars + _LEAST_ROOM) // int(1_000 * CHARS_PER_TOKEN))
            raise InputError(f"prompts of this pattern can be of {least}K tokens or more, got {prompt_tokens}")
        return room

    def conversations(self) -> list[tuple[Message, ...]]:
        """Make a conversation for each body, from the shortest to the longest."""
        if self.prompt_tokens is not None:
            room = int(self.room(self.prompt_tokens, _frame_chars(self.tools())))
            return [conversation(self.library, self.rng, room) for _ in range(self.bodies)]
        shortest, longest = (tokens * CHARS_PER_TOKEN for tokens in _CONVERSATION_TOKENS)
        step = (longest - shortest) / max(1, self.bodies - 1)
        return [conversation(self.library, self.rng, int(shortest + i * step)) for i in range(self.bodies)]

    def shuffled_bodies(self) -> list[int]:
        """Return the body of each call: every body as often as the others, in random order."""
        bodies = [number % self.bodies for number in range(self.calls)]
        self.rng.shuffle(bodies)
        return bodies

    def asked(self, number: int) -> Message:
        """Ask what no other call asks; the region that calls share ends in front of it."""
        return {"role": "user", "content": self.marker.before(f"({number}) {question(self.library, self.rng)}")}


@dataclass(frozen=True)
class Pattern:
    """A pattern, its default size and its maker."""

    summary: str
    calls: int
    bodies: int
    bodies_are: str
    make: Callable[[_Order], Iterator[PatternCall]]


def generate(
    name: str,
    *,
    calls: int | None = None,
    bodies: int | None = None,
    seed: int = 0,
    marker: str | None = None,
    prompt_tokens: int | None = None,
) -> Iterator[PatternCall]:
    """Make the calls of a pattern, in time order.

    Args:
        name: one of PATTERNS.
        calls: how many; the pattern's own number by default.
        bodies: how many different shared texts there are (conversations; for rerank, documents).
        seed: another seed, another log.
        marker: the line to put around shared regions, see ``marker_line``; None for none.
        prompt_tokens: make every prompt about so long (in DeepSeek's vocabulary, without markers); the prompts of
            compact are held at that length or somewhat below. None for the pattern's own lengths.

    Raises:
        InputError: an unknown pattern, an impossible size, or a Python without its library's sources.
    """
    if name not in PATTERNS:
        raise InputError(f"unknown pattern {name!r}; valid patterns: {', '.join(PATTERNS)}")
    pattern = PATTERNS[name]
    calls = pattern.calls if calls is None else calls
    bodies = _enough_bodies(pattern, prompt_tokens) if bodies is None else bodies
    if calls < 1 or bodies < 1:
        raise InputError(f"calls and bodies must be >= 1, got {calls} and {bodies}")
    # A string seed is hashed with SHA-512, the same in every process.
    rng = random.Random(f"{name} {seed}")  # noqa: S311
    return pattern.make(_Order(calls, bodies, rng, Marker(marker), standard_library(), prompt_tokens))


def _enough_bodies(pattern: Pattern, prompt_tokens: int | None) -> int:
    """Return the pattern's own number; long prompts of documents need more of them."""
    if pattern.bodies_are != "documents" or prompt_tokens is None:
        return pattern.bodies
    return max(pattern.bodies, int(1.2 * prompt_tokens / (sum(_DOCUMENT_TOKENS) / 2)))


def marker_line(tokeniser: Tokeniser, seed: int = 0) -> str:
    """Return the S2 marker for a tokenizer: a line of 64 tokens that always holds a chunk boundary.

    Raises:
        InputError: there is none for this tokenizer, see ``generate_marker``.
    """

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokeniser.encode([Piece((Part(text, SpanKind.TEXT),))])[0].tokens.tolist()
        return tokens

    def decode(tokens: list[int]) -> str:
        return tokeniser.decode(np.array(tokens, dtype=np.int32))

    return generate_marker(encode, decode, seed)


def delta_lines(calls: Iterable[PatternCall]) -> Iterator[str]:
    """Write calls in the delta form (see ``formats/delta.py``), one line each, without line ends."""
    latest: dict[tuple[str, str], PatternCall] = {}
    for call in calls:
        before = latest.get((call.session, call.agent))
        latest[call.session, call.agent] = call
        known = before.messages if before else ()
        keep = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, call.messages, strict=False)))
        repeats = before is not None and call.tools is not None and before.tools == call.tools
        yield _json(
            {
                "session": call.session,
                "agent": call.agent,
                "ts": call.ts,
                "note": call.note,
                "made_by": _made_by(),
                "keep": keep,
                "append": call.messages[keep:],
                "tools": "=" if repeats else call.tools,
            }
        )


def openai_lines(calls: Iterable[PatternCall]) -> Iterator[str]:
    """Write calls as bodies of OpenAI chat-completion requests, one line each, without line ends."""
    for call in calls:
        metadata = {
            "session": call.session,
            "agent": call.agent,
            "ts": datetime.fromtimestamp(call.ts, UTC).isoformat(),
            "note": call.note,
            "made_by": _made_by(),
        }
        tools = {} if call.tools is None else {"tools": call.tools}
        yield _json({"model": "any", "metadata": metadata, "messages": call.messages, **tools})


FORMS: dict[str, Callable[[Iterable[PatternCall]], Iterator[str]]] = {"delta": delta_lines, "openai-chat": openai_lines}
"""What a log can be written as, under the names that the readers have for it."""


def pattern_lines(calls: Iterable[PatternCall], form: str) -> Iterator[str]:
    """Write calls in a form of FORMS; InputError lists them."""
    if form not in FORMS:
        raise InputError(f"unknown form {form!r}; valid forms: {', '.join(FORMS)}")
    return FORMS[form](calls)


# -- agent_meta and sysvar: the same body behind something small that differs --


def _agent_meta(order: _Order) -> Iterator[PatternCall]:
    system = order.marker.before(_system_prompt(_environment(_START, _PLACES[0], _BRANCHES[0])))
    conversations, clock = order.conversations(), _clock(order.rng)
    for number, body in enumerate(order.shuffled_bodies()):
        header = _header(order.rng, now := next(clock))
        messages = (_system(f"{header}\n\n{system}"), *conversations[body], order.asked(number))
        yield _one_of(body, number, now, messages, order.tools_of(body), f"header of {len(header)} characters")


def _sysvar(order: _Order) -> Iterator[PatternCall]:
    before, after = _system_parts()
    before, after = order.marker.around(before), order.marker.before(after)
    conversations, clock = order.conversations(), _clock(order.rng)
    for number, body in enumerate(order.shuffled_bodies()):
        now, place, branch = next(clock), order.rng.choice(_PLACES), order.rng.choice(_BRANCHES)
        system = _system(f"{before}\n\n{_environment(now, place, branch)}\n\n{after}")
        messages = (system, *conversations[body], order.asked(number))
        yield _one_of(body, number, now, messages, order.tools_of(body), f"{place} on {branch}")


def _header(rng: Rng, now: datetime) -> str:
    """Name the agent: always name, id and role, sometimes when it was started and by whom."""
    lines = [f"Agent: {rng.choice(_NAMES)}", f"Id: {UUID(int=rng.getrandbits(128))}", f"Role: {rng.choice(_ROLES)}"]
    if rng.random() < 1 / 2:
        lines.append(f"Started: {now.isoformat(sep=' ')}, by {rng.choice(_NAMES)}")
    return "\n".join(lines)


# -- compact: a conversation that is edited to stay within a budget --


def _compact(order: _Order) -> Iterator[PatternCall]:
    clock = _clock(order.rng)
    windows = [_Window(order) for _ in range(order.bodies)]
    for number in range(order.calls):
        place, body = divmod(number, order.bodies)
        window = windows[body]
        if not place:
            window.begin()
        note = window.fit(place)
        coming = window.next_turn()
        messages = (*window.messages(), coming[0])
        yield PatternCall(f"body-{body}", "main", next(clock).timestamp(), messages, order.tools(), note)
        window.append(coming)


def _marked_turn(order: _Order, number: int, longest: int) -> tuple[Message, ...]:
    first, *rest = turn(order.library, order.rng, number, longest=longest)
    return (first | {"content": order.marker.before(first["content"])}, *rest)


class _Window:
    """A conversation that forgets: first old tool results, then whole turns."""

    def __init__(self, order: _Order) -> None:
        self._order = order
        self._system = _system(_system_prompt(_environment(_START, _PLACES[0], _BRANCHES[0])))
        self._turns: list[tuple[Message, ...]] = []
        self._made = 0
        self._fixed = text_chars([self._system]) + len(_json(order.tools()))
        self._summary: list[str] = []
        if order.prompt_tokens is None:
            self._budget, self._longest_result = _BUDGET_TOKENS * CHARS_PER_TOKEN, _LONGEST_RESULT
            self._clear_above = _CLEAR_ABOVE * self._budget
        else:
            room = order.room(order.prompt_tokens, self._fixed)
            self._budget, self._longest_result = self._fixed + room, min(_LONGEST_RESULT, int(room / 8))
            self._clear_above = self._fixed + _CLEAR_ABOVE * room

    def begin(self) -> None:
        """Make the first turn; prompts of a given length begin with as many as there is room for."""
        self.append(self.next_turn())
        while self._order.prompt_tokens is not None and self._chars() < self._clear_above:
            self.append(self.next_turn())

    def next_turn(self) -> tuple[Message, ...]:
        """Make another turn."""
        self._made += 1
        return _marked_turn(self._order, self._made - 1, self._longest_result)

    def append(self, made: tuple[Message, ...]) -> None:
        """Add a turn."""
        self._turns.append(made)

    def messages(self) -> tuple[Message, ...]:
        """Return the conversation as it is now."""
        return (self._system, *(message for one in self._turns for message in one))

    def fit(self, place: int) -> str:
        """Forget what has to be forgotten before the call at a place of the conversation; say what it was."""
        if place and place % _SUMMARY_EVERY == 0:
            return self._summarise()
        cleared = self._clear_oldest(self._clear_above)
        note = f"{cleared} results cleared"
        return f"{note}, {self._summarise()}" if self._chars() > self._budget else note

    def _chars(self) -> int:
        return self._fixed + sum(text_chars(one) for one in self._turns)

    def _clear_oldest(self, goal: float) -> int:
        """Clear tool results from the oldest on until the prompt is short enough; the newest ones stay."""
        places = [
            (i, j)
            for i, one in enumerate(self._turns)
            for j, message in enumerate(one)
            if message["role"] == "tool" and message["content"] != CLEARED
        ]
        cleared = 0
        for i, j in places[:-_KEPT_RESULTS]:
            if self._chars() <= goal:
                break
            one = list(self._turns[i])
            one[j] = one[j] | {"content": CLEARED}
            self._turns[i] = tuple(one)
            cleared += 1
        return cleared

    def _summarise(self) -> str:
        """Replace the older half of the turns by a line for each of them, behind the summary that stands there."""
        begin = 1 if self._summary else 0
        half = len(self._turns[begin:]) // 2
        for one in self._turns[begin : begin + half]:
            # A question has one line, in front of which a marker may stand.
            asked, answered = one[0]["content"].splitlines()[-1], one[-1]["content"].splitlines()[0]
            self._summary.append(f"- {asked}\n  {answered}")
        text = "\n".join(["Summary of what came before:", *self._summary])
        self._turns[: begin + half] = [({"role": "user", "content": text},)]
        return f"{half} turns summarised"


# -- rerank: the same documents in another order --


def _rerank(order: _Order) -> Iterator[PatternCall]:
    system = _system(_text("archive.txt"))
    documents, clock = _documents(order), _clock(order.rng)
    weights = [1 / rank**_ZIPF for rank in range(1, len(documents) + 1)]
    room = None if order.prompt_tokens is None else order.room(order.prompt_tokens, len(system["content"]))
    for number in range(order.calls):
        count = None if room is not None else min(order.rng.randint(*_DOCUMENTS), len(documents))
        drawn = _by_weight(order.rng, documents, weights)
        picked = drawn[:count] if room is None else _that_fit(drawn, room)
        order.rng.shuffle(picked)
        scores = sorted((order.rng.randint(300, 990) for _ in picked), reverse=True)
        shown = [
            f"[{place}] {document.title} (score 0.{score})\n{order.marker.around(document.text)}"
            for place, (document, score) in enumerate(zip(picked, scores, strict=True), start=1)
        ]
        asked = f"({number}) {question(order.library, order.rng)}"
        messages = (system, {"role": "user", "content": "\n\n".join([*shown, asked])})
        ts = next(clock).timestamp()
        yield PatternCall("archive", f"request-{number:04}", ts, messages, None, f"{len(picked)} documents")


def _documents(order: _Order) -> list[Document]:
    """Return as many documents as were asked for, the most popular first."""
    shortest, longest = (int(tokens * CHARS_PER_TOKEN) for tokens in _DOCUMENT_TOKENS)
    documents = reference_documents(order.rng, shortest, longest)
    if order.bodies > len(documents):
        raise InputError(f"the language reference makes {len(documents)} documents, {order.bodies} were asked for")
    return order.rng.sample(documents, order.bodies)


def _by_weight(rng: Rng, documents: Sequence[Document], weights: Sequence[float]) -> list[Document]:
    """Draw all documents without replacement, by weight."""
    # Efraimidis and Spirakis: the largest u ** (1 / weight) are a weighted sample without replacement.
    keys = [rng.random() ** (1 / weight) for weight in weights]
    return [documents[i] for i in sorted(range(len(documents)), key=lambda i: -keys[i])]


def _that_fit(documents: Sequence[Document], room: float) -> list[Document]:
    """Return the first documents, up to the one that comes nearest to so many characters."""
    lengths = np.cumsum([len(document.text) for document in documents])
    if lengths[-1] < room - _LONGEST_DOCUMENT:
        raise InputError(f"{len(documents)} documents have {lengths[-1]:,} characters, a prompt needs {room:,.0f}")
    return list(documents[: int(np.argmin(np.abs(lengths - room))) + 1])


# -- tool_variants: the same conversation with other tools in front of it --


def _tool_variants(order: _Order) -> Iterator[PatternCall]:
    # The tools stand between system prompt and conversation, and a framework cannot put a line between two of them.
    system = _system(order.marker.around(_system_prompt(_environment(_START, _PLACES[0], _BRANCHES[0]))))
    conversations, clock = order.conversations(), _clock(order.rng)
    for number, body in enumerate(order.shuffled_bodies()):
        tools, edits = _edited(order.rng, order.tools())
        first, *rest = conversations[body]
        first = first | {"content": order.marker.before(first["content"])}
        messages = (system, first, *rest, order.asked(number))
        yield _one_of(body, number, next(clock), messages, tools, "; ".join(edits))


def _edited(rng: Rng, offered: Sequence[Tool]) -> tuple[tuple[Tool, ...], list[str]]:
    """Make one to three edits of the tools; also say which."""
    tools = list(offered)
    spare = [library_tool(name) for name in rng.sample(_SPARE_TOOLS, _EDITS[1])]
    edits = []
    for _ in range(rng.randint(*_EDITS)):
        i, edit = rng.randrange(len(tools)), rng.choice((_drop, _describe, _add, _move))
        edits.append(edit(rng, tools, i, spare))
    return tuple(tools), edits


def _drop(rng: Rng, tools: list[Tool], i: int, spare: list[Tool]) -> str:
    del rng, spare
    return f"drop {tools.pop(i)['function']['name']}"


def _describe(rng: Rng, tools: list[Tool], i: int, spare: list[Tool]) -> str:
    del spare
    function = tools[i]["function"]
    description = function["description"] + rng.choice(_APPENDICES)
    tools[i] = tools[i] | {"function": function | {"description": description}}
    return f"describe {function['name']}"


def _add(rng: Rng, tools: list[Tool], i: int, spare: list[Tool]) -> str:
    del rng
    tools.insert(i, spare.pop())
    return f"add {tools[i]['function']['name']}"


def _move(rng: Rng, tools: list[Tool], i: int, spare: list[Tool]) -> str:
    del spare
    tool = tools.pop(i)
    # Anywhere but where it was.
    tools.insert(rng.choice([place for place in range(len(tools) + 1) if place != i]), tool)
    return f"move {tool['function']['name']}"


# -- what they share --


def _one_of(
    body: int, number: int, now: datetime, messages: tuple[Message, ...], tools: tuple[Tool, ...], note: str
) -> PatternCall:
    """Make a call of an agent that makes no other one."""
    return PatternCall(f"body-{body}", f"agent-{number:04}", now.timestamp(), messages, tools, note)


def _frame_chars(tools: Sequence[Tool]) -> int:
    """Return the characters of the coding agent's system prompt and its tools."""
    return len(_system_prompt(_environment(_START, _PLACES[0], _BRANCHES[0]))) + len(_json(tools))


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _text(name: str) -> str:
    return files("irminsul.trace.pattern_text").joinpath(name).read_text(encoding="utf-8").strip()


def _system_parts() -> tuple[str, str]:
    """Return the coding agent's system prompt in front of the environment and behind it."""
    before = [_text("coding_agent_before.txt"), reference("exceptions", "with", "global")]
    after = [_text("coding_agent_after.txt"), reference("context-managers", "assert", "raise")]
    return "\n\n".join(before), "\n\n".join(after)


def _system_prompt(environment: str) -> str:
    before, after = _system_parts()
    return f"{before}\n\n{environment}\n\n{after}"


def _environment(now: datetime, place: str, branch: str) -> str:
    return (
        f"<environment>\nWorking directory: {place}\nBranch: {branch}\n"
        f"Date and time: {now.isoformat(sep=' ')}\n</environment>"
    )


@cache
def _tools() -> tuple[Tool, ...]:
    own: list[Tool] = json.loads(_text("coding_tools.json"))
    assert len(own) == _FEW_TOOLS, len(own)
    return (*own, *(library_tool(name) for name in _LIBRARY_TOOLS))


def _clock(rng: Rng) -> Iterator[datetime]:
    now = _START
    while True:
        yield now
        now += timedelta(seconds=rng.randint(3, 90))


def _json(value: Any) -> str:  # noqa: ANN401
    return json.dumps(value, ensure_ascii=False)


def _made_by() -> str:
    return f"irminsul {__version__} patterns, {LIBRARY_VERSION}"


PATTERNS: dict[str, Pattern] = {
    "agent_meta": Pattern(
        "a header names another agent in front of the same system prompt, tools and conversation",
        160,
        8,
        "conversations",
        _agent_meta,
    ),
    "sysvar": Pattern(
        "directory, branch and time change inside the same system prompt", 160, 8, "conversations", _sysvar
    ),
    "compact": Pattern("a conversation is edited to stay within a budget", 80, 4, "conversations", _compact),
    "rerank": Pattern("retrieved documents come in another order", 120, 48, "documents", _rerank),
    "tool_variants": Pattern(
        "one to three tools differ in front of the same conversation", 120, 6, "conversations", _tool_variants
    ),
}
"""The patterns by name."""
