"""What to do with each token of a prompt: the reuse plan, as a pure function.

A plan tiles the prompt with segments, in order::

    |-- prefix --|-- approximate prefix --|-- gap --|-- shifted --|-- gap --|-- shifted --|-- gap --|
     lossless      this session's own       computed   copied and            always at least one
                   derived rows                        rotated               computed token at the end

Prefix hits are lossless. Everything else that is not a gap is approximate: the latent of a shifted row was
computed behind other text. Rules, in the order they are applied to the runs a matcher found:

0. Behind exact rows none is used unless ``min_known`` of the text that is not cached is known.
1. Positions below ``carve_out`` are computed unless the prefix holds them (attention sinks; paper, section 7.1).
2. A run keeps at least ``min_run`` tokens or is dropped.
3. The longest ``max_runs`` runs are kept; none, if they hold less than rule 0 asks for.
4. A run that splits one gap into two must save more than ``gap_cost`` tokens.
5. The first ``recompute`` tokens of each run are computed (the quality knob of EPIC and CacheBlend).
6. If all runs together save fewer than ``min_recovered`` tokens, none is used.
7. Where a batch has no room for all gaps, the stretches that save least are dropped; all of them, if what is left is
   less than rules 0 and 6 ask for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from irminsul.errors import InputError


class Mode(StrEnum):
    """What a server does with plans."""

    OFF = "off"
    """Exact prefix only; nothing is matched. (A server that runs in this mode indexes nothing either; the exact rows of
    a request that asks for it may be donors of others.)"""
    OBSERVE = "observe"
    """Plan and count, but compute as if the mode were ``off``."""
    LIVE = "live"
    """Reuse shifted rows."""


@dataclass(frozen=True, eq=False)
class Run:
    """A stretch of the prompt whose tokens were found in cached rows, all moved by the same distance."""

    start: int
    """First target position."""
    source_start: int
    """Position of the first donor row in its own sequence."""
    slots: NDArray[np.int32]
    """Donor slot of each token, shape [length]."""

    @property
    def length(self) -> int:
        """Tokens in the run."""
        return len(self.slots)

    @property
    def end(self) -> int:
        """One past the last target position."""
        return self.start + len(self.slots)

    @property
    def delta(self) -> int:
        """Target position minus source position; the distance each row moves."""
        return self.start - self.source_start

    def slice(self, start: int, end: int) -> "Run":
        """Return the part of this run at target positions [start, end), which must lie inside it."""
        offset = start - self.start
        return Run(start, self.source_start + offset, self.slots[offset : offset + end - start])


class SegmentKind(StrEnum):
    """How the rows of a segment come about."""

    PREFIX = "prefix"
    APPROXIMATE_PREFIX = "approximate_prefix"
    SHIFTED = "shifted"
    GAP = "gap"


@dataclass(frozen=True, eq=False)
class Segment:
    """Target positions [start, end) of one kind; ``run`` is set for shifted segments only."""

    kind: SegmentKind
    start: int
    end: int
    run: Run | None = None

    @property
    def length(self) -> int:
        """Tokens in the segment."""
        return self.end - self.start


@dataclass(frozen=True)
class ReusePolicy:
    """The knobs of a plan; lengths and costs are in tokens."""

    carve_out: int = 64
    """The paper has 32. 64 costs next to nothing on real logs and was closer to full computation; docs/measured.md."""
    min_run: int = 64
    max_runs: int = 64
    """Prompts put together from many documents have more known passages than others; docs/measured.md."""
    gap_cost: float = 16.0
    recompute: int = 0
    """32 cuts the divergence by a third where many short documents change their order; see docs/measured.md."""
    min_recovered: int = 0
    min_known: float = 0.5
    """Behind exact rows nothing is copied unless this share of the text that is not cached is known, in runs to copy.

    Rows behind a copied one are derived and never donors, so new text behind a little known text would have to be
    computed each time it comes. Computed in full once, it is known; docs/measured.md, Half or nothing. A session's own
    derived rows count as known, and are given up with the rest.
    """
    approximate_prefix: bool = True
    """Whether a session may continue from its own derived rows."""

    def __post_init__(self) -> None:
        for name in ("carve_out", "max_runs", "gap_cost", "recompute", "min_recovered"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InputError(f"{name} must be a number >= 0, got {value!r}")
        if not 0 <= self.min_known <= 1:
            raise InputError(f"min_known must be a number from 0 to 1, got {self.min_known!r}")
        if self.min_run < 1:
            raise InputError(f"min_run must be >= 1, got {self.min_run!r}")

    def known(self, runs: Sequence[Run], start: int) -> int:
        """Count tokens from ``start`` on that runs hold; too short ones are found by luck, and do not count."""
        lengths = (run.end - max(run.start, start) for run in runs)
        return sum(length for length in lengths if length >= self.min_run)

    def keeps_history(
        self, n_tokens: int, prefix: int, approximate_prefix: int, search: Callable[[], Sequence[Run]]
    ) -> bool:
        """Say whether a session goes on from its derived rows, or has its text computed again, exact.

        Args:
            n_tokens: prompt length.
            prefix: tokens held by the lossless prefix.
            approximate_prefix: further tokens held by derived rows.
            search: finds runs behind both; called only if it decides.
        """
        needed = self.min_known * (n_tokens - prefix) - approximate_prefix
        return approximate_prefix == 0 or needed <= 0 or self.known(search(), prefix + approximate_prefix) >= needed


@dataclass(frozen=True, eq=False)
class ReusePlan:
    """The ordered segments of one request; they tile [0, n_tokens)."""

    n_tokens: int
    segments: tuple[Segment, ...]

    def tokens(self, kind: SegmentKind) -> int:
        """Tokens in all segments of a kind."""
        return sum(segment.length for segment in self.segments if segment.kind is kind)

    @property
    def gaps(self) -> list[Segment]:
        """The segments to compute."""
        return [segment for segment in self.segments if segment.kind is SegmentKind.GAP]

    @property
    def runs(self) -> list[Run]:
        """The shifted runs to copy."""
        return [segment.run for segment in self.segments if segment.run is not None]

    @property
    def exact_end(self) -> int:
        """Rows below this position are exact once computed; later ones are derived from approximate rows."""
        for segment in self.segments:
            if segment.kind in (SegmentKind.APPROXIMATE_PREFIX, SegmentKind.SHIFTED):
                return segment.start
        return self.n_tokens

    def computed_positions(self) -> NDArray[np.int64]:
        """Positions of all gap tokens, ascending."""
        return np.concatenate([np.arange(gap.start, gap.end, dtype=np.int64) for gap in self.gaps])


def make_plan(
    n_tokens: int,
    *,
    prefix: int,
    approximate_prefix: int = 0,
    runs: Sequence[Run] = (),
    policy: ReusePolicy,
    reuse_limit: int | None = None,
    max_gaps: int | None = None,
) -> ReusePlan:
    """Tile a prompt of ``n_tokens`` with segments.

    Args:
        n_tokens: prompt length, at least 1.
        prefix: tokens held by the lossless prefix.
        approximate_prefix: further tokens held by derived rows of the same session.
        runs: candidate runs, ascending and not overlapping, beyond both prefixes.
        policy: the knobs.
        reuse_limit: no token at or beyond this position may be reused (an engine that must return log
            probabilities of prompt tokens sets it); the last token is always computed.
        max_gaps: most stretches to compute, at least 1; None: any number.

    Returns:
        A plan whose segments tile [0, n_tokens) and end in a gap.
    """
    assert n_tokens >= 1, n_tokens
    assert max_gaps is None or max_gaps >= 1, max_gaps
    assert prefix >= 0, prefix
    assert approximate_prefix >= 0, approximate_prefix
    limit = n_tokens - 1 if reuse_limit is None else max(0, min(n_tokens - 1, reuse_limit))
    prefix = min(prefix, limit)
    tail = min(prefix + approximate_prefix, limit)
    # Behind approximate rows all is derived, whatever is done.
    least = policy.min_known * (n_tokens - tail) if tail == prefix else 0.0
    if policy.known(runs, tail) < least:
        runs = ()
    kept = _usable_runs(runs, tail, limit, policy, least)
    if max_gaps is not None:
        kept = _enough(_within_gaps(kept, tail, max_gaps), kept, max(least, policy.min_recovered))
    segments = [Segment(SegmentKind.PREFIX, 0, prefix)] if prefix else []
    if tail > prefix:
        segments.append(Segment(SegmentKind.APPROXIMATE_PREFIX, prefix, tail))
    cursor = tail
    for run in kept:
        if run.start > cursor:
            segments.append(Segment(SegmentKind.GAP, cursor, run.start))
        segments.append(Segment(SegmentKind.SHIFTED, run.start, run.end, run))
        cursor = run.end
    segments.append(Segment(SegmentKind.GAP, cursor, n_tokens))
    return ReusePlan(n_tokens, tuple(segments))


def _usable_runs(runs: Sequence[Run], tail: int, limit: int, policy: ReusePolicy, least: float) -> list[Run]:
    first = max(tail, policy.carve_out)
    cut = [
        run.slice(max(run.start, first), min(run.end, limit)) for run in runs if run.end > first and run.start < limit
    ]
    kept = [run for run in cut if run.length >= policy.min_run]
    if len(kept) > policy.max_runs:
        longest = sorted(kept, key=lambda run: (-run.length, run.start))[: policy.max_runs]
        kept = _enough(sorted(longest, key=lambda run: run.start), kept, least)
    kept = _drop_costly(kept, tail, policy.gap_cost)
    kept = _without_heads(kept, policy.recompute)
    return kept if sum(run.length for run in kept) >= policy.min_recovered else []


def _enough(left: list[Run], of: list[Run], least: float) -> list[Run]:
    """Return what is left of runs; nothing if some are gone and the others hold fewer than ``least`` tokens."""
    return left if len(left) == len(of) or sum(run.length for run in left) >= least else []


def _drop_costly(runs: list[Run], tail: int, gap_cost: float) -> list[Run]:
    """Drop, worst first, runs that save no more tokens than the extra gap they make costs."""
    runs = list(runs)
    while runs:
        ends = [tail, *(run.end for run in runs)]
        # Behind the last run there is always a gap: the last token is computed.
        starts = [*(run.start for run in runs[1:]), None]
        worth = [
            run.length - gap_cost * (run.start > before and run.end != after)
            for run, before, after in zip(runs, ends, starts, strict=False)
        ]
        worst = int(np.argmin(worth))
        if worth[worst] > 0:
            break
        del runs[worst]
    return runs


def _within_gaps(runs: list[Run], tail: int, max_gaps: int) -> list[Run]:
    """Keep the longest stretches of adjoining runs, so many that there are at most ``max_gaps`` gaps."""
    stretches: list[list[Run]] = []
    for run in runs:
        if stretches and stretches[-1][-1].end == run.start:
            stretches[-1].append(run)
        else:
            stretches.append([run])
    # Each stretch has a gap before it, but for one that adjoins the prefix; the last gap holds the last token.
    adjoining = stretches[:1] if stretches and stretches[0][0].start == tail else []
    others = sorted(stretches[len(adjoining) :], key=lambda runs: -sum(run.length for run in runs))
    kept = chain.from_iterable([*adjoining, *others[: max_gaps - 1]])
    return sorted(kept, key=lambda run: run.start)


def _without_heads(runs: list[Run], recompute: int) -> list[Run]:
    """Cut the first ``recompute`` tokens off each run, unless it continues the run before it by the same delta."""
    if recompute == 0:
        return runs
    kept: list[Run] = []
    previous: Run | None = None
    for run in runs:
        continues = previous is not None and previous.end == run.start and previous.delta == run.delta
        head = 0 if continues else recompute
        if run.length > head:
            kept.append(run.slice(run.start + head, run.end))
        previous = run
    return kept
