"""What changed between two texts: the values at their first difference, and their class.

A class of values (a timestamp, an id, ...) is told only if both texts have such a value across the difference and go on
alike behind it: then one value stands in place of another. Everything else is told from where the difference stands.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class ChangeClass(StrEnum):
    """What changed."""

    TIMESTAMP = "timestamp"
    DATE = "date"
    TIME = "time of day"
    ID = "id"
    PATH = "path"
    NUMBER = "number"
    LIST_ORDER = "order"
    TOOLS = "tool list"
    MESSAGE_DROPPED = "message dropped"
    HISTORY = "history edited"
    REPLY = "reply re-rendered"
    SYSTEM = "system prompt text"
    EVICTED = "evicted"
    CONVERSATION = "another conversation"
    OTHER = "other"


VALUES = frozenset(
    {
        ChangeClass.TIMESTAMP,
        ChangeClass.DATE,
        ChangeClass.TIME,
        ChangeClass.ID,
        ChangeClass.PATH,
        ChangeClass.NUMBER,
        ChangeClass.OTHER,
    }
)
"""Changes of one value inside a text; moving it helps only if what stands behind it stays."""

FIXES: dict[ChangeClass, str] = {
    ChangeClass.TIMESTAMP: "Move the timestamp behind the stable text (into the last user message), or drop it.",
    ChangeClass.DATE: "Move the date behind the stable text (into the last user message), or drop it.",
    ChangeClass.TIME: "Move the time behind the stable text (into the last user message), or round it to the day.",
    ChangeClass.ID: "Send the id as request metadata, or place it behind the stable text.",
    ChangeClass.PATH: "Use one fixed path (a symbolic link or a mount), or place the path behind the stable text.",
    ChangeClass.NUMBER: "Move the counter behind the stable text, or drop it.",
    ChangeClass.LIST_ORDER: "Give the parts a fixed order, for example sorted by name, or append what is new.",
    ChangeClass.TOOLS: "Send one fixed tool list in a fixed order, and restrict the choice by tool_choice.",
    ChangeClass.MESSAGE_DROPPED: "Drop old messages rarely and many at once, so that most calls only append.",
    ChangeClass.HISTORY: "Append instead of rewriting; if history must shrink, rewrite it rarely and much at once.",
    ChangeClass.REPLY: "Send the model's replies back word for word, reasoning and spacing included.",
    ChangeClass.SYSTEM: "Keep one system prompt for all calls, and put what varies behind the stable text.",
    ChangeClass.EVICTED: "Give the cache more room, or send the calls of a conversation closer together.",
    ChangeClass.CONVERSATION: "Nothing: another conversation has another text. Longer shared instructions come first.",
    ChangeClass.OTHER: "Put what varies behind what stays.",
}
"""One sentence for the author of the prompt."""

_DATE = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_WORDED = rf"(?:[A-Z][a-z]+,? )?(?:{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}|\d{{1,2}} {_MONTH},? \d{{4}})"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2})\b)?"
_EPOCH = r"(?<![\w.])1[0-9]{9}(?:\d{3}|\d{6}|\d{9}|\.\d+)?(?!\w)"

# In this order: a timestamp holds a date, a date holds numbers.
_VALUES: tuple[tuple[ChangeClass, re.Pattern[str]], ...] = (
    (ChangeClass.TIMESTAMP, re.compile(rf"(?:{_DATE}|{_WORDED})(?:T|,? (?:at )?){_TIME}|{_EPOCH}")),
    (ChangeClass.ID, re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")),
    (ChangeClass.DATE, re.compile(rf"{_DATE}|{_WORDED}")),
    (ChangeClass.TIME, re.compile(_TIME)),
    (ChangeClass.PATH, re.compile(r"(?:[A-Za-z]:\\|~?/|\.{1,2}/)?[\w.@+-]+(?:[/\\][\w.@+-]+)+/?|~?/[\w.@+-]+/?")),
    (
        ChangeClass.ID,
        re.compile(r"(?<![\w-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])(?:[A-Za-z]+[-_])?[0-9A-Za-z]{8,}(?![\w-])"),
    ),
    (ChangeClass.NUMBER, re.compile(r"(?<![\w.])[-+]?\d[\d,_]*(?:\.\d+)*(?![\w])")),
)
_SAME_BEHIND = 4
_MAX_VALUE = 160


@dataclass(frozen=True)
class ValueChange:
    """One value in place of another."""

    kind: ChangeClass
    old: str
    new: str
    before: str
    """The text of the line before the value."""


def value_change(old: str, new: str) -> ValueChange | None:
    """Tell which value changed at the first difference of two texts.

    Args:
        old: text with some context before the difference and behind it.
        new: the same of the other prompt.

    Returns:
        The change, or None if no known kind of value stands there in both.
    """
    at = common_length(old, new)
    for kind, pattern in _VALUES:
        olds, news = _across(pattern, old, at), _across(pattern, new, at)
        for left in olds:
            for right in news:
                if (
                    left.start() == right.start()
                    and left[0] != right[0]
                    and _alike(old[left.end() :], new[right.end() :])
                ):
                    line = old[: left.start()].rpartition("\n")[2]
                    return ValueChange(kind, left[0][:_MAX_VALUE], right[0][:_MAX_VALUE], line)
    return None


def common_length(left: str, right: str) -> int:
    """Return how many characters two texts share at their beginnings."""
    for i, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return i
    return min(len(left), len(right))


def _across(pattern: re.Pattern[str], text: str, at: int) -> list[re.Match[str]]:
    """Return the matches that hold the position, or end at it."""
    return [match for match in pattern.finditer(text) if match.start() <= at <= match.end()]


def _alike(old: str, new: str) -> bool:
    return old[:_SAME_BEHIND] == new[:_SAME_BEHIND]
