"""Why calls miss the prefix cache: what stands at the first difference from an earlier call.

A call is compared with the one before it in its thread if that one shares all that the cache held, else with the
cached call that shares most (PrefixReplay.donor). A call that continues where the other's prompt ended only grew, and
growth is no variation. Variations are grouped by where they stand, what changed and the text before it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from irminsul.trace.changes import FIXES, VALUES, ChangeClass, ValueChange, value_change
from irminsul.trace.records import Span, SpanKind, TokenisedCall, TokenLog, Tokens
from irminsul.trace.replay import NO_DONOR, MatcherReplay, PrefixReplay, Progress

_CONTEXT = 48
"""Tokens decoded on either side of a difference."""
_KEY = 16
"""Tokens that are found again are the same text."""
_NEAR, _FAR = 64, 4096
"""Tokens behind a difference in which prompts are looked at for equal text: after a value, after a moved part."""
_BORDER = 4
_LABEL = 40
_MAX_EXAMPLE = 160
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Cause:
    """Calls that miss for one reason."""

    kind: ChangeClass
    where: SpanKind
    line: int | None
    """Most frequent line number inside the message (from 1)."""
    message: int | None
    """Most frequent index of the message (from 0); None in tools and template."""
    before: str
    """The text of the line before the value, digits as ``#``; empty where no single value changed."""
    calls: int
    tokens_behind: int
    """Prompt tokens behind the difference, which prefix caching computes."""
    distinct_values: int
    example_old: str
    example_new: str
    example_place: str
    """``file:line`` of the example's call."""
    fix_recovers: int
    """Tokens that a fixed prompt would find in the prefix: those behind the change that equal the compared call's,
    to the next difference."""
    irminsul_recovers: int
    """Tokens that the shipped setting copies for these calls."""

    @property
    def fix(self) -> str:
        """What the author of the prompt could do."""
        if self.fix_recovers == 0 and self.kind in VALUES:
            return "Nothing in the prompt: what stands behind the change differs as well."
        return FIXES[self.kind]


@dataclass(frozen=True)
class CauseReport:
    """All variations of a log."""

    causes: tuple[Cause, ...]
    """By tokens behind, most first."""
    compared_calls: int
    grown_calls: int
    """Of these, the ones that only grew."""
    grown_tokens: int
    """Tokens that these compute: what they appended."""

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """Distinct values at each variation point (each cause is one), ascending."""
        return tuple(sorted(cause.distinct_values for cause in self.causes))


@dataclass(frozen=True)
class _Variation:
    """What one call shows."""

    kind: ChangeClass
    span: Span
    line: int
    before: str
    old: str
    new: str
    fix_recovers: int

    @property
    def key(self) -> tuple[ChangeClass, SpanKind, int, str]:
        fixed = self.span.kind in (SpanKind.SYSTEM, SpanKind.TOOLS) and self.before
        return self.kind, self.span.kind, self.line if fixed else 0, self.before


@dataclass
class _Group:
    """Sums over the calls of a cause."""

    first: _Variation
    place: str
    calls: int = 0
    tokens_behind: int = 0
    fix_recovers: int = 0
    irminsul_recovers: int = 0
    values: set[str] = field(default_factory=set)
    lines: Counter[int] = field(default_factory=Counter)
    messages: Counter[int | None] = field(default_factory=Counter)


def find_causes(
    log: TokenLog, prefix: PrefixReplay, shipped: MatcherReplay, *, replies: bool, progress: Progress
) -> CauseReport:
    """Compare every call with an earlier one and group the first differences.

    Args:
        log: the calls.
        prefix: the log served with prefix caching alone.
        shipped: the log served with the shipped setting.
        replies: whether replies were cached.
        progress: called for each call.
    """
    last_of_thread: dict[int, int] = {}
    groups: dict[tuple[ChangeClass, SpanKind, int, str], _Group] = {}
    compared = grown = appended = 0
    for i, call in enumerate(log):
        previous = last_of_thread.get(call.thread)
        last_of_thread[call.thread] = i
        variation = None
        other = _compared_call(log, call, previous, int(prefix.prefix[i]), int(prefix.donor[i]))
        if other is not None:
            compared += 1
            variation = _variation(log, call, other, int(prefix.prefix[i]), replies=replies)
            if variation is None:
                grown += 1
                appended += int(prefix.tail[i])
        if variation is not None:
            group = groups.setdefault(variation.key, _Group(variation, call.info.place))
            _count(group, variation, int(prefix.tail[i]), int(shipped.recovered[i]))
        progress(len(call.tokens))
    causes = sorted((_cause(group) for group in groups.values()), key=lambda c: (-c.tokens_behind, c.kind, c.before))
    return CauseReport(tuple(causes), compared, grown, appended)


def common_tokens(left: Tokens, right: Tokens) -> int:
    """Return how many tokens two sequences share at their beginnings."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(np.argmax(differs)) if length else 0
    return first if length and differs[first] else length


def first_variations(log: TokenLog, prefix: PrefixReplay) -> list[float]:
    """Return prefix length / prompt length of every call that is not the first of its thread."""
    seen: set[int] = set()
    shares = []
    for i, call in enumerate(log):
        if call.thread in seen:
            shares.append(float(prefix.prefix[i] / prefix.prompt[i]))
        seen.add(call.thread)
    return shares


def _compared_call(
    log: TokenLog, call: TokenisedCall, previous: int | None, held: int, donor: int
) -> TokenisedCall | None:
    if previous is not None:
        other = log[previous]
        same_scope = other.info.namespace == call.info.namespace
        if same_scope and (donor == NO_DONOR or common_tokens(_cached(other, replies=True), call.tokens) >= held):
            return other
    return None if donor == NO_DONOR else log[donor]


def _cached(call: TokenisedCall, *, replies: bool) -> Tokens:
    if call.reply is None or not replies:
        return call.tokens
    return np.concatenate([call.tokens, call.reply])


def _variation(
    log: TokenLog, call: TokenisedCall, other: TokenisedCall, held: int, *, replies: bool
) -> _Variation | None:
    """Return what differs, or None if the call only grew."""
    cached = _cached(other, replies=replies)
    at = common_tokens(cached, call.tokens)
    if held < min(at, len(call.tokens) - 1):
        return _Variation(ChangeClass.EVICTED, call.span_at(held), 0, "", "", "", at - held)
    if at >= len(call.tokens) - 1 or _only_grew(log, call, other, at):
        if len(other.tokens) <= at < min(len(cached), len(call.tokens) - 1) and other.thread == call.thread:
            return _plain_variation(log, call, other, cached, at, ChangeClass.REPLY)
        return None
    window = slice(max(0, at - _CONTEXT), at + _CONTEXT)
    change = value_change(log.decode(cached[window]), log.decode(call.tokens[window]))
    if change is not None:
        return _value_variation(log, call, cached, at, change)
    return _plain_variation(log, call, other, cached, at, _structural_class(log, call, other, at))


def _only_grew(log: TokenLog, call: TokenisedCall, other: TokenisedCall, at: int) -> bool:
    """Say whether a prompt goes on where another's text ended.

    Text that goes on inside a message may share its last characters with a token of what follows, so a difference in
    the last few tokens is decided by their text.
    """
    end = _end_of_text(other)
    if at >= end:
        return True
    if end - at > _BORDER:
        return False
    return log.decode(call.tokens[at : at + 2 * _BORDER]).startswith(log.decode(other.tokens[at:end]))


def _end_of_text(call: TokenisedCall) -> int:
    """Return where the text of a prompt ends and its generation prompt begins."""
    end = len(call.tokens)
    for span in reversed(call.spans):
        if span.kind is not SpanKind.TEMPLATE:
            break
        end = span.start
    return end


def _value_variation(log: TokenLog, call: TokenisedCall, cached: Tokens, at: int, change: ValueChange) -> _Variation:
    span = call.span_at(at)
    label = _DIGITS.sub("#", change.before.strip())[-_LABEL:]
    line = _line(log, call, span, at)
    return _Variation(change.kind, span, line, label, change.old, change.new, _equal_behind(cached, call.tokens, at))


def _plain_variation(
    log: TokenLog, call: TokenisedCall, other: TokenisedCall, cached: Tokens, at: int, kind: ChangeClass
) -> _Variation:
    span = call.span_at(at)
    texts = [log.decode(tokens[at : at + _CONTEXT])[:_MAX_EXAMPLE] for tokens in (cached, call.tokens)]
    recovers = _equal_behind(cached, call.tokens, at) if other.thread == call.thread else 0
    return _Variation(kind, span, _line(log, call, span, at), "", texts[0], texts[1], recovers)


def _line(log: TokenLog, call: TokenisedCall, span: Span, at: int) -> int:
    return log.decode(call.tokens[span.start : at]).count("\n") + 1


def _equal_behind(old: Tokens, new: Tokens, at: int) -> int:
    """Return how many tokens go on alike behind the change at ``at``, to the next difference."""
    near = old[at : at + _NEAR + _KEY]
    for skipped in range(_NEAR):
        key = new[at + skipped : at + skipped + _KEY]
        if len(key) < _KEY:
            return 0
        found = _find(near, key)
        if found is not None:
            return common_tokens(old[at + found :], new[at + skipped :])
    return 0


def _find(text: Tokens, key: Tokens) -> int | None:
    """Return where ``key`` stands in ``text``."""
    haystack, needle = text.tobytes(), key.tobytes()
    at = haystack.find(needle)
    while at >= 0 and at % text.itemsize:
        at = haystack.find(needle, at + 1)
    return None if at < 0 else at // text.itemsize


def _structural_class(log: TokenLog, call: TokenisedCall, other: TokenisedCall, at: int) -> ChangeClass:
    """Tell what changed from where it stands; no single value did."""
    old_span = other.span_at(at)
    kinds = {call.span_at(at).kind, old_span.kind}
    old, new = other.tokens[at:], call.tokens[at:]
    if SpanKind.TOOLS in kinds:
        lines = [sorted(_tools_text(log, one).splitlines()) for one in (other, call)]
        return ChangeClass.LIST_ORDER if lines[0] == lines[1] else ChangeClass.TOOLS
    new_in_old = _find(old[:_FAR], new[:_KEY]) is not None if len(new) >= _KEY else False
    old_in_new = _find(new[:_FAR], old[:_KEY]) is not None if len(old) >= _KEY else False
    if new_in_old and old_in_new:
        return ChangeClass.LIST_ORDER
    if SpanKind.SYSTEM in kinds:
        return ChangeClass.SYSTEM
    if other.thread != call.thread or _begins_otherwise(call, old_span, at):
        return ChangeClass.CONVERSATION
    if new_in_old:
        return ChangeClass.MESSAGE_DROPPED
    return ChangeClass.OTHER if kinds == {SpanKind.TEXT} else ChangeClass.HISTORY


def _begins_otherwise(call: TokenisedCall, old_span: Span, at: int) -> bool:
    """Say whether the difference is in the first half of the first message behind the system prompt."""
    spoken = (span for span in call.spans if span.kind not in (SpanKind.SYSTEM, SpanKind.TOOLS, SpanKind.TEMPLATE))
    first = next(spoken, None)
    return first is not None and at < first.end and 2 * (at - old_span.start) < old_span.end - old_span.start


def _tools_text(log: TokenLog, call: TokenisedCall) -> str:
    spans: Sequence[Span] = [span for span in call.spans if span.kind is SpanKind.TOOLS]
    return "".join(log.decode(call.tokens[span.start : span.end]) for span in spans)


def _count(group: _Group, variation: _Variation, behind: int, recovered: int) -> None:
    group.calls += 1
    group.tokens_behind += behind
    group.fix_recovers += min(variation.fix_recovers, behind)
    group.irminsul_recovers += recovered
    group.values |= {variation.old, variation.new}
    group.lines[variation.line] += 1
    group.messages[variation.span.message] += 1


def _cause(group: _Group) -> Cause:
    first = group.first
    line = max(group.lines.items(), key=lambda item: (item[1], -item[0]))[0]
    message = max(group.messages.items(), key=lambda item: (item[1], -1 if item[0] is None else -item[0]))[0]
    return Cause(
        kind=first.kind,
        where=first.span.kind,
        line=line or None,
        message=message,
        before=first.before,
        calls=group.calls,
        tokens_behind=group.tokens_behind,
        distinct_values=len(group.values),
        example_old=first.old,
        example_new=first.new,
        example_place=group.place,
        fix_recovers=group.fix_recovers,
        irminsul_recovers=group.irminsul_recovers,
    )
