"""What the tasks are made of: made-up places with facts about them, preambles, and pages of the language reference.

Everything is drawn from a ``random.Random``; the same seed gives the same text. The pages are those that every Python
ships (see ``irminsul.trace.pattern_text.library``), so they differ a little between its versions.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from irminsul.trace.pattern_text.library import reference_documents

Count = Callable[[str], int]
"""Tokens of a text."""

_SMALLEST_ROOM = 64
"""Tokens below which no further page is looked for."""

_PEOPLE_FIRST = ("Mira", "Pavel", "Ruth", "Tomas", "Ines", "Olek", "Hanna", "Yusuf", "Greta", "Anders", "Lidia", "Kofi")
_PEOPLE_LAST = ("Okafor", "Norrgard", "Abelard", "Lindqvist", "Marsh", "Petrov", "Sandoval", "Weiss", "Tanaka", "Boyle")
_WHICH = ("north", "lower", "old", "red", "east", "upper", "stone", "little", "outer", "new", "west", "round")
_PLACES = (
    *("gate", "tide station", "archive", "workshop", "pump house", "observatory", "ferry landing", "boat shed"),
    *("signal tower", "seed store", "mill", "customs house", "greenhouse", "bakery", "weather mast", "dry dock"),
)
_COLOURS = ("green", "white", "yellow", "blue", "orange", "brown", "grey", "purple", "black")
_ROOMS = ("kitchen", "cellar", "attic", "chapel", "stable", "laundry", "library", "guard room", "pantry", "boiler room")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_SEASONS = ("spring", "summer", "autumn", "winter")
_ITEMS = (
    *("brass valves", "oak planks", "rope coils", "lamp wicks", "copper nails", "paint tins", "glass panes"),
    *("roof tiles", "canvas sails", "iron hinges", "chart rolls", "wool blankets", "spare oars", "pump seals"),
)
_REMARKS = (
    "Visitors asked {number} times about {place} in the {season} of {year}, and {person} answered most of them.",
    "After the storm of {year} the wall beside it was rebuilt with stones from {place}.",
    "A list of {number} {item} was found in a drawer, signed by {person} and never paid.",
    "{person} remembers that the floor was {colour} before it was covered in {year}.",
    "On a {day} in {season} the water stood {number} centimetres high and reached the {room}.",
    "The insurance of {year} covers {number} {item}, but not those that are kept in the {room}.",
    "Children from {place} paint the fence each {season}; {person} lends them the brushes.",
    "The council spent {number} crowns on it and asked {person} for a report by {day}.",
)
_PREAMBLES = (
    "You answer questions about records that a small harbour town keeps.",
    "The town clerk on duty is {person}, who can be reached in the {room} until {day}.",
    "Answer in one short sentence and repeat the words of the record.",
    "Records about {place} were moved in {year} and may have gaps; say so if you meet one.",
    "Do not mention {person} unless you are asked about {item}.",
    "Numbers below {number} are counts, numbers above it are codes.",
    "In {season} the office closes at noon, so keep requests that need {person} for the next {day}.",
    "Write the names of places as the record writes them, without a capital letter.",
    "Prices from before {year} are in old crowns; leave them as they are.",
)


@dataclass(frozen=True)
class Fact:
    """A sentence, what to ask, and the word or number that a right answer contains."""

    statement: str
    question: str
    answer: str


def places(rng: random.Random, count: int) -> list[str]:
    """Draw different places, like ``the old mill``."""
    every = [f"the {which} {place}" for which in _WHICH for place in _PLACES]
    return rng.sample(every, count)


def pass_code(place: str, rng: random.Random) -> Fact:
    """Make the needle: a code of five digits."""
    return _fact("pass code", place, _code(rng))


def facts_about(place: str, rng: random.Random) -> list[Fact]:
    """Make up one fact of each kind about a place, in a drawn order."""
    kinds = (
        ("keeper", _person(rng)),
        ("door colour", rng.choice(_COLOURS)),
        ("building year", str(rng.randint(1820, 1990))),
        ("key room", f"the {rng.choice(_ROOMS)}"),
        ("inspection day", rng.choice(_DAYS)),
        ("telephone number", str(rng.randint(100, 999))),
    )
    facts = [_fact(kind, place, value) for kind, value in kinds]
    rng.shuffle(facts)
    return facts


def record(place: str, facts: Sequence[Fact], rng: random.Random, count: Count, n_tokens: int) -> str:
    """Write a document that states the facts, among remarks that fill it up to about ``n_tokens`` tokens."""
    sentences = [fact.statement for fact in facts]
    title = f"Record of {place}."
    used = count(title) + sum(count(sentence) for sentence in sentences)
    while used < n_tokens:
        remark = _filled(rng.choice(_REMARKS), rng)
        sentences.insert(rng.randint(0, len(sentences)), remark)
        used += count(remark)
    return " ".join([title, *sentences])


def stock_list(place: str, rng: random.Random, n_lines: int) -> tuple[str, Fact]:
    """Write a tool result of ``n_lines`` lines; return it with a fact that one of its lines states."""
    items = rng.sample(_ITEMS, min(n_lines, len(_ITEMS)))
    facts = [_fact(f"ticket for {item}", place, _code(rng)) for item in items]
    lines = [
        f"shelf {rng.choice('ABCDEFGH')}{rng.randint(1, 30)}: {rng.randint(2, 400)} {item}, ordered by {_person(rng)}. "
        f"{fact.statement}"
        for item, fact in zip(items, facts, strict=True)
    ]
    return "\n".join(lines), rng.choice(facts)


def preamble(rng: random.Random, count: Count, n_tokens: int) -> str:
    """Write a system prompt that begins with a request's own data; at least that, at most about ``n_tokens`` tokens."""
    text = f"Request {rng.randint(100, 999)}."
    order = rng.sample(_PREAMBLES, len(_PREAMBLES))
    for sentence in (_filled(template, rng) for template in order):
        if count(text) + count(sentence) > n_tokens:
            break
        text = f"{text} {sentence}"
    return text


def pages(rng: random.Random, count: Count, n_tokens: int) -> list[str]:
    """Draw different stretches of the language reference that hold at most ``n_tokens`` tokens together."""
    documents = reference_documents(rng, 400, 1200)
    rng.shuffle(documents)
    drawn: list[str] = []
    room = n_tokens
    for document in documents:
        if room < _SMALLEST_ROOM:
            break
        # Joined by an empty line, a token or two.
        size = count(document.text) + 2
        if size <= room:
            drawn.append(document.text)
            room -= size
    return drawn


def _filled(template: str, rng: random.Random) -> str:
    return template.format(
        person=_person(rng),
        place=places(rng, 1)[0],
        colour=rng.choice(_COLOURS),
        room=rng.choice(_ROOMS),
        day=rng.choice(_DAYS),
        season=rng.choice(_SEASONS),
        item=rng.choice(_ITEMS),
        year=rng.randint(1820, 1990),
        number=rng.randint(2, 900),
    )


def _fact(kind: str, place: str, value: str) -> Fact:
    return Fact(f"The {kind} of {place} is {value}.", f"What is the {kind} of {place}?", value)


def _code(rng: random.Random) -> str:
    return str(rng.randint(10_000, 99_999))


def _person(rng: random.Random) -> str:
    return f"{rng.choice(_PEOPLE_FIRST)} {rng.choice(_PEOPLE_LAST)}"
