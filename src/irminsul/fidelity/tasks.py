"""The tasks: prompts whose text an earlier prompt held, in another place or behind other text.

Every task draws a *donor* prompt, which is computed first and cached, and the *prompt* that is measured. Between the
two the preamble changes, and its length is drawn for each: some passages begin before position 32, some move by
hundreds of positions, in both directions. A third variant, the *middle* prompt, stands between donor and prompt where
a path shifts rows twice.

Conversations use system, user and assistant turns only, which every chat template has; tool results are user turns.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from irminsul.errors import InputError
from irminsul.fidelity import texts
from irminsul.fidelity.texts import Fact
from irminsul.server.chat import PromptEncoder
from irminsul.server.detokenize import Tokenizer
from irminsul.server.protocol import ChatMessage

Turn = tuple[str, str]
"""Role and content."""

_PREAMBLE_TOKENS = (0, 64, 192)
"""Lengths that a preamble may have, about; 0 is one line of a few tokens."""
_ROOM = 384
"""Tokens that a prompt keeps for its preamble, its question, the marks of the template and the answer."""
_READ = ("assistant", "I have read it.")


@dataclass(frozen=True)
class Case:
    """One prompt to measure, and the prompts that were served before it."""

    donors: tuple[tuple[int, ...], ...]
    """Token ids of the prompts whose exact rows are cached, in the order they came."""
    prompt: tuple[int, ...]
    session_end: int
    """The session's earlier turn held the prompt's tokens below this position."""
    middle: tuple[int, ...]
    """Token ids of a prompt that holds what donor and prompt share, behind a third preamble."""
    answer: str | None
    """What a right continuation contains; None: there is no right one."""
    note: str
    """What is particular about this case."""


class Draft:
    """Makes token ids, through the chat template if the tokenizer has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self.count = lru_cache(maxsize=2**14)(self._count)

    @property
    def form(self) -> str:
        """How conversations are written."""
        return "chat template" if self._tokenizer.chat_template else "plain text"

    def conversation(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Encode turns up to where the assistant's next one begins; with no template as ``role: content`` lines."""
        if self._tokenizer.chat_template:
            return self._encoder.chat([ChatMessage(role=role, content=text) for role, text in turns], None, None)  # type: ignore[arg-type]
        return self.text("\n\n".join([*(f"{role}: {text}" for role, text in turns), "assistant:"]))

    def text(self, text: str) -> tuple[int, ...]:
        """Encode plain text without special tokens."""
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def preamble(self, rng: random.Random) -> str:
        """Draw a system prompt of one of three lengths."""
        return texts.preamble(rng, self.count, rng.choice(_PREAMBLE_TOKENS))

    def _count(self, text: str) -> int:
        return len(self.text(text))


@dataclass(frozen=True)
class Task:
    """A kind of prompt. Sizes are in tokens and include the answer."""

    name: str
    about: str
    size: int
    max_tokens: int
    """Longest continuation that is compared."""
    build: Callable[[Draft, random.Random, int], Case]
    """(draft, random, size) -> a case of at most that size."""
    quick_size: int | None = None
    """Size under ``--quick``; None: the same."""

    def sized(self, *, quick: bool) -> int:
        """Return the size to build."""
        return self.quick_size if quick and self.quick_size is not None else self.size

    def cases(self, draft: Draft, n: int, seed: int, *, quick: bool) -> list[Case]:
        """Build ``n`` cases; the first ones of a longer list are the same.

        Raises:
            InputError: a case does not fit the task's size with this tokenizer.
        """
        size = self.sized(quick=quick)
        built = [self.build(draft, random.Random(f"{seed}/{self.name}/{at}"), size) for at in range(n)]  # noqa: S311
        longest = max(len(tokens) for case in built for tokens in (*case.donors, case.prompt, case.middle))
        if longest + self.max_tokens > size:
            raise InputError(
                f"task {self.name} has room for {size} tokens, and with this tokenizer a prompt takes "
                f"{longest + self.max_tokens}; leave it out with --tasks"
            )
        return built


def _needle(draft: Draft, rng: random.Random, size: int) -> Case:
    """A fact somewhere in pages that are reused as a whole; the question comes behind them."""
    wanted, other = (texts.pass_code(place, rng) for place in texts.places(rng, 2))
    leaves = texts.pages(rng, draft.count, size - _ROOM)
    leaves.insert(rng.randint(0, len(leaves)), wanted.statement)
    pages = ("user", "Read these pages.\n\n" + "\n\n".join(leaves))
    note = f"needle at {draft.count(pages[1].partition(wanted.statement)[0]) / draft.count(pages[1]):.0%} of the pages"
    return _asked_behind(draft, rng, [pages, _READ], other, wanted, note)


def _qa(draft: Draft, rng: random.Random, size: int) -> Case:
    """Short documents, which a ranker puts in another order for each request; one is exchanged."""
    documents: list[tuple[str, Fact]] = []
    room = size - _ROOM
    for place in texts.places(rng, 12):
        facts = texts.facts_about(place, rng)[: rng.randint(2, 6)]
        document = texts.record(place, facts, rng, draft.count, rng.choice((48, 96, 160, 320)))
        if draft.count(document) + 2 <= room or not documents:
            documents.append((document, rng.choice(facts)))
            room -= draft.count(document) + 2
    *kept, spare = documents if len(documents) > 2 else [*documents, documents[0]]
    wanted = rng.choice(kept)
    orders = [[*rng.sample(kept, len(kept)), spare], *([*rng.sample(kept, len(kept))] for _ in range(2))]
    donor, middle, prompt = (
        [("user", "Read these records.\n\n" + "\n\n".join(text for text, _ in order)), _READ] for order in orders
    )
    note = f"{len(kept)} documents, the one asked for is number {orders[2].index(wanted) + 1}"
    return Case(
        donors=(draft.conversation([_system(draft, rng), *donor, ("user", spare[1].question)]),),
        prompt=draft.conversation(whole := [_system(draft, rng), *prompt, ("user", wanted[1].question)]),
        session_end=_session_end(draft, whole),
        middle=draft.conversation([_system(draft, rng), *middle, ("user", spare[1].question)]),
        answer=wanted[1].answer,
        note=note,
    )


def _agent(draft: Draft, rng: random.Random, size: int) -> Case:
    """An agent's turns; the oldest tool result was cleared or cut since, and everything behind it moved."""
    system = ("system", texts.preamble(rng, draft.count, 64))
    results: list[tuple[str, str, Fact]] = []
    room = size - _ROOM
    for place in texts.places(rng, 16):
        listing, fact = texts.stock_list(place, rng, rng.randint(3, 9))
        turn_tokens = draft.count("".join(text for _, text in _tool_turn(place, listing))) + 24
        if turn_tokens > room and len(results) > 1:
            break
        results.append((place, listing, fact))
        room -= turn_tokens
    lines = results[0][1].splitlines()
    kept_lines = rng.randint(0, max(0, len(lines) - 2))
    edited = "\n".join([*lines[:kept_lines], "(the rest of this result was removed)"])
    shorter = "(this old result was removed)"
    donor, prompt, middle = (
        [system, *(turn for place, listing, _ in _with_first(results, first) for turn in _tool_turn(place, listing))]
        for first in (results[0][1], edited, shorter)
    )
    asked = rng.randrange(1, len(results))
    other, wanted = rng.choice(results)[2], results[asked][2]
    whole = [*prompt, ("user", wanted.question)]
    return Case(
        donors=(draft.conversation([*donor, ("user", other.question)]),),
        prompt=draft.conversation(whole),
        session_end=_session_end(draft, whole),
        middle=draft.conversation([*middle, ("user", other.question)]),
        answer=wanted.answer,
        note=f"{len(lines) - kept_lines} lines of result 1 of {len(results)} removed, asked for number {asked + 1}",
    )


def _continuation(draft: Draft, rng: random.Random, size: int) -> Case:
    """Plain text that goes on behind a passage; there is no question and no right answer."""
    passage = draft.text("\n\n".join(texts.pages(rng, draft.count, size - _ROOM)))
    # Where a page ends the model has to change the subject; a drawn end is mostly inside one.
    end = rng.randint(len(passage) * 3 // 4, len(passage))
    donor, prompt, middle = (draft.text(draft.preamble(rng) + "\n\n") for _ in range(3))
    whole = (*prompt, *passage[:end])
    return Case(
        donors=((*donor, *passage),),
        prompt=whole,
        session_end=len(prompt) + end * 3 // 4,
        middle=(*middle, *passage),
        answer=None,
        note=f"continues after {end} tokens of the passage",
    )


def _self_copy(draft: Draft, rng: random.Random, size: int) -> Case:
    """A passage that stands in the prompt already: its second copy is reused from the first, an exact prefix."""
    wanted, other = (texts.pass_code(place, rng) for place in texts.places(rng, 2))
    leaves = texts.pages(rng, draft.count, (size - _ROOM) * 2 // 5)
    leaves.insert(rng.randint(0, len(leaves)), wanted.statement)
    passage = "\n\n".join(leaves)
    between = "\n\n".join(texts.pages(rng, draft.count, (size - _ROOM) // 5)) or other.statement
    first = [("user", f"Read these pages.\n\n{passage}"), _READ, ("user", f"And these.\n\n{between}"), _READ]
    start = [_system(draft, rng), *first]
    whole = [*start, ("user", f"Here they are again.\n\n{passage}"), _READ, ("user", wanted.question)]
    prompt = draft.conversation(whole)
    # What the earlier turn of this session had computed, the first copy with it.
    head = prompt[: _common(prompt, draft.conversation(start))]
    return Case(
        donors=(head,),
        prompt=prompt,
        session_end=_session_end(draft, whole),
        middle=draft.conversation([_system(draft, rng), *first[:2], ("user", other.question)]),
        answer=wanted.answer,
        note=f"a passage of {draft.count(passage)} tokens, {draft.count(between)} tokens between its copies",
    )


def _asked_behind(draft: Draft, rng: random.Random, shared: list[Turn], other: Fact, wanted: Fact, note: str) -> Case:
    """Put the same turns behind three preambles; the donor and the middle prompt ask for something else."""
    whole = [_system(draft, rng), *shared, ("user", wanted.question)]
    return Case(
        donors=(draft.conversation([_system(draft, rng), *shared, ("user", other.question)]),),
        prompt=draft.conversation(whole),
        session_end=_session_end(draft, whole),
        middle=draft.conversation([_system(draft, rng), *shared, ("user", other.question)]),
        answer=wanted.answer,
        note=note,
    )


def _system(draft: Draft, rng: random.Random) -> Turn:
    return ("system", draft.preamble(rng))


def _tool_turn(place: str, listing: str) -> list[Turn]:
    return [
        ("user", f"List the stock of {place}."),
        ("assistant", f"I call list_stock for {place}."),
        ("user", f"Result of list_stock:\n{listing}"),
        ("assistant", f"These are the shelves of {place}."),
    ]


def _with_first(results: Sequence[tuple[str, str, Fact]], listing: str) -> list[tuple[str, str, Fact]]:
    """Exchange the listing of the first result."""
    place, _, fact = results[0]
    return [(place, listing, fact), *results[1:]]


def _session_end(draft: Draft, turns: Sequence[Turn]) -> int:
    """Return how much of a conversation its earlier request held: all but what its last turn added."""
    return _common(draft.conversation(turns), draft.conversation(turns[:-1]))


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), min(len(tokens), len(others))
    )


_NEEDLE = "a pass code somewhere in pages of text behind another preamble"

TASKS = {
    task.name: task
    for task in (
        Task("needle-1k", _NEEDLE, 1024, 16, _needle),
        Task("needle-2k", _NEEDLE, 2048, 16, _needle),
        Task("needle-4k", _NEEDLE, 4096, 16, _needle),
        Task("needle-8k", _NEEDLE, 8192, 16, _needle),
        Task("qa", "documents in another order behind another preamble", 1536, 24, _qa, quick_size=1024),
        Task("agent", "turns behind a tool result that was edited since", 1536, 24, _agent, quick_size=1024),
        Task("continuation", "text that goes on behind a passage", 1280, 48, _continuation, quick_size=1024),
        Task(
            "self-copy",
            "a passage reused from its first copy in the same prompt",
            2048,
            24,
            _self_copy,
            quick_size=1280,
        ),
    )
}
"""By name, in the order of the tables."""

QUICK_TASKS = ("needle-1k", "qa", "agent", "continuation", "self-copy")
"""What ``--quick`` measures unless told otherwise."""
