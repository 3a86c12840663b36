"""The whole analysis of a log: every replay, and the figures that the reports show.

::

    TokenLog -> prefix -> shipped -> causes -> ceilings (32, 64, 128) -> one replay a matcher -> Analysis

Shares and percentiles are derived here, once; the reports only print them. Equal logs and configs give equal results.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from irminsul.errors import InputError
from irminsul.namespace import Namespace
from irminsul.plan import ReusePlan
from irminsul.registry import MATCHERS
from irminsul.trace.causes import CauseReport, find_causes, first_variations
from irminsul.trace.cost import CostModel, ModelCost, computed_pairs
from irminsul.trace.records import TokenLog
from irminsul.trace.replay import (
    ORACLE_LENGTHS,
    SHIPPED,
    MatcherReplay,
    OracleReplay,
    PrefixReplay,
    Progress,
    ReplayConfig,
    replay_live,
    replay_matcher,
    replay_oracle,
    replay_prefix,
)

COMPARED_MATCHERS = ("fixed128", "cdc", "cdc_s1", "anchored", "winnow32", "winnow64", "winnow128")
SHIPPED_MATCHER = "winnow64"
PERCENTILES = (5, 25, 50, 75, 95)
RUN_PERCENTILES = (50, 90, 99)
RUN_EDGES = (32, 64, 128, 256, 512, 1024, 4096)
DELTA_EDGES = (0, 1, 128, 1024, 8192, 32768)
SHARE_EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

# The verdict. Prompt tokens saved are what the fleet's prefill shrinks by; the share of the tail is what is left of it.
WORTH_PROMPT, MAYBE_PROMPT = 0.05, 0.01
WORTH_TAIL, MAYBE_TAIL = 0.2, 0.1
HARDLY = 0.02
"""A smaller share of all TTFT is nothing that anybody would notice."""


class Stages(Protocol):
    """Shows how far an analysis is."""

    def __call__(self, name: str) -> AbstractContextManager[Progress]:
        """Begin a pass over the log; what it gives takes the prompt tokens served."""


@dataclass(frozen=True)
class AnalysisConfig:
    """What to analyse, and for whom."""

    replay: ReplayConfig = field(default_factory=ReplayConfig)
    matchers: tuple[str, ...] = COMPARED_MATCHERS
    strips: int = 240
    """Calls whose plans are kept, sampled evenly."""

    def __post_init__(self) -> None:
        for name in self.matchers:
            if name not in MATCHERS:
                raise InputError(f"unknown matcher {name!r}; valid matchers: {', '.join(MATCHERS)}")
        if len(set(self.matchers)) < len(self.matchers):
            raise InputError(f"a matcher is named twice: {', '.join(self.matchers)}")

    @property
    def passes(self) -> int:
        """How often the whole log is served."""
        return 3 + len(ORACLE_LENGTHS) + len(self.matchers)


@dataclass(frozen=True)
class Totals:
    """Sums over calls."""

    calls: int
    threads: int
    prompt_tokens: int
    prefix_tokens: int
    inserted_tokens: int
    evicted_tokens: int

    @property
    def tail_tokens(self) -> int:
        """Prompt tokens that prefix caching computes."""
        return self.prompt_tokens - self.prefix_tokens


@dataclass(frozen=True)
class Bucket:
    """Values in [low, high); ``high`` is None in the last."""

    low: float
    high: float | None
    count: int
    """Calls or runs."""
    tokens: int
    """Their tokens."""


@dataclass(frozen=True)
class MatcherSummary:
    """What a matcher recovers under one policy."""

    name: str
    recovered_tokens: int
    calls_with_hits: int
    gaps_median: float
    """Over calls with hits, 0 if there are none; so for the next."""
    gaps_p95: float
    runs: int
    run_length_percentiles: tuple[float, ...]
    """RUN_PERCENTILES; 0 where there are no runs."""
    run_lengths: tuple[Bucket, ...]
    deltas: tuple[Bucket, ...]
    """Of absolute values."""


@dataclass(frozen=True)
class NamespaceTotals:
    """One sharing scope."""

    name: str
    calls: int
    prompt_tokens: int
    prefix_tokens: int
    recovered_tokens: int
    """By the shipped setting."""


@dataclass(frozen=True)
class ComputeSavings:
    """Prefill work with prefix caching alone, and with irminsul's shipped setting."""

    tokens_now: int
    tokens_then: int
    model: str | None
    flops_now: int | None
    """None without a model; so for the next."""
    flops_then: int | None


@dataclass(frozen=True)
class TtftEstimate:
    """Estimated from measured points, one request at a time, the gaps of a request in one forward."""

    model: str
    source: str
    now_median_ms: float
    then_median_ms: float
    now_p95_ms: float
    then_p95_ms: float
    now_total_s: float
    then_total_s: float
    calls_outside: int
    """Calls beyond the measured points, now or then; they are given the nearest edge."""


class Worth(StrEnum):
    """The verdict."""

    YES = "worth it"
    MAYBE = "borderline"
    NO = "not worth it"


@dataclass(frozen=True, eq=False)
class Strip:
    """One sampled call under the shipped setting."""

    place: str
    namespace: str
    plan: ReusePlan


@dataclass(frozen=True, eq=False)
class Analysis:
    """All that the reports show."""

    totals: Totals
    replies: bool
    cache_tokens: int | None
    calls_with_replies: int
    prompt_lengths: tuple[float, ...]
    """PERCENTILES of tokens."""
    tail_lengths: tuple[float, ...]
    first_variation: tuple[float, ...]
    """PERCENTILES of prefix length / prompt length over calls that are not the first of their thread; empty if all are
    first ones."""
    first_variation_histogram: tuple[Bucket, ...]
    cardinality: tuple[float, ...]
    """PERCENTILES of the number of distinct values at a variation point; empty if nothing varies."""
    oracle: dict[int, int]
    """Ceiling of recovered tokens by least run length."""
    repeat_tokens: int
    """Tail tokens that only an earlier copy in the same tail covers; no matcher counts them."""
    matchers: tuple[MatcherSummary, ...]
    shipped: MatcherSummary
    """As the engines do it, so derived rows are no donors; for ``matchers`` all rows are."""
    approximate_calls: int
    """Calls that would be answered on some approximate rows: copied ones, or computed behind copied ones."""
    approximate_tokens: int
    """Prompt tokens of these rows."""
    namespaces: tuple[NamespaceTotals, ...]
    """If there are several."""
    causes: CauseReport
    compute: ComputeSavings
    ttft: TtftEstimate
    strips: tuple[Strip, ...]
    notes: tuple[str, ...]

    @property
    def prefix_share(self) -> float:
        """Of prompt tokens."""
        return _share(self.totals.prefix_tokens, self.totals.prompt_tokens)

    @property
    def saved_tokens(self) -> int:
        """Tokens that irminsul would save on top; in a bounded cache there can be more to compute, not less."""
        return self.compute.tokens_now - self.compute.tokens_then

    @property
    def saved_share(self) -> float:
        """The same, of prompt tokens."""
        return _share(self.saved_tokens, self.totals.prompt_tokens)

    @property
    def saved_tail_share(self) -> float:
        """The same, of what prefix caching computes."""
        return _share(self.saved_tokens, self.totals.tail_tokens)

    @property
    def worth(self) -> Worth:
        """Whether prefill alone is a reason to turn irminsul on."""
        if self.saved_share >= WORTH_PROMPT and self.saved_tail_share >= WORTH_TAIL:
            return Worth.YES
        if self.saved_share >= MAYBE_PROMPT and self.saved_tail_share >= MAYBE_TAIL:
            return Worth.MAYBE
        return Worth.NO

    @property
    def verdict(self) -> str:
        """What it comes to, in words."""
        consequence = {
            Worth.YES: "worth turning on, if your own quality tests pass",
            Worth.MAYBE: "measure TTFT and quality on your own traffic before turning it on",
            Worth.NO: "not worth turning on for prefill alone",
        }[self.worth]
        if self.worth is not Worth.NO and self.ttft.then_total_s > (1 - HARDLY) * self.ttft.now_total_s:
            consequence += "; one request at a time, TTFT would hardly change: what is saved is throughput, if anything"
        change = "save another" if self.saved_tokens >= 0 else "add"
        return (
            f"Exact prefix already serves {self.prefix_share:.1%} of prompt tokens; irminsul would {change} "
            f"{abs(self.saved_share):.1%} ({abs(self.saved_tail_share):.1%} of what is computed now), and answer "
            f"{_share(self.approximate_calls, self.totals.calls):.0%} of calls on approximate rows: {consequence}."
        )


def analyse(
    log: TokenLog, config: AnalysisConfig, cost: CostModel, model: ModelCost | None, stages: Stages
) -> Analysis:
    """Replay a log in every way and sum up.

    Args:
        log: at least one call.
        config: what to replay.
        cost: for TTFT.
        model: for FLOPs; None leaves them out.
        stages: told of each pass.

    Raises:
        InputError: the log is empty.
    """
    if not len(log):
        raise InputError("the log holds no calls")
    with stages("exact prefix") as progress:
        prefix = replay_prefix(log, config.replay, progress)
    kept = _sample(len(log), config.strips)
    with stages("irminsul as shipped") as progress:
        shipped = replay_live(
            log, SHIPPED_MATCHER, prefix, config.replay, progress, policy=SHIPPED, keep_plans=frozenset(kept)
        )
    with stages("causes") as progress:
        causes = find_causes(log, prefix, shipped, replies=config.replay.replies, progress=progress)
    ceilings = _ceilings(log, prefix, config, stages)
    matchers = []
    for name in config.matchers:
        with stages(f"matcher {name}") as progress:
            matchers.append(summarise(name, replay_matcher(log, name, prefix, config.replay, progress)))
    return _analysis(log, config, prefix, shipped, causes, ceilings, tuple(matchers), cost, model, kept)


def summarise(name: str, replay: MatcherReplay) -> MatcherSummary:
    """Sum up what a matcher recovered."""
    gaps = replay.gaps[replay.recovered > 0]
    moved = np.abs(replay.deltas)
    return MatcherSummary(
        name=name,
        recovered_tokens=int(replay.recovered.sum()),
        calls_with_hits=len(gaps),
        gaps_median=_percentiles(gaps, (50,))[0],
        gaps_p95=_percentiles(gaps, (95,))[0],
        runs=len(replay.run_lengths),
        run_length_percentiles=_percentiles(replay.run_lengths, RUN_PERCENTILES),
        run_lengths=histogram(replay.run_lengths, replay.run_lengths, RUN_EDGES),
        deltas=histogram(moved, replay.run_lengths, DELTA_EDGES),
    )


def histogram(
    values: NDArray[np.int64] | NDArray[np.float64], tokens: NDArray[np.int64], edges: Sequence[float]
) -> tuple[Bucket, ...]:
    """Count values, and their tokens, between ascending edges; the first and last buckets take what lies beyond."""
    place = np.clip(np.searchsorted(np.asarray(edges), values, side="right") - 1, 0, len(edges) - 1)
    counts = np.bincount(place, minlength=len(edges))
    sums = np.zeros(len(edges), dtype=np.int64)
    np.add.at(sums, place, tokens)
    bounds: list[tuple[float, float | None]] = [*pairwise(edges), (edges[-1], None)]
    return tuple(
        Bucket(low, high, int(count), int(total))
        for (low, high), count, total in zip(bounds, counts, sums, strict=True)
    )


def _ceilings(log: TokenLog, prefix: PrefixReplay, config: AnalysisConfig, stages: Stages) -> OracleReplay:
    covered: dict[int, NDArray[np.int64]] = {}
    repeats = np.zeros(len(log), dtype=np.int64)
    for length in ORACLE_LENGTHS:
        with stages(f"ceiling {length}") as progress:
            one = replay_oracle(log, prefix, config.replay, progress, lengths=(length,))
        covered |= one.covered
        if length == min(ORACLE_LENGTHS):
            repeats = one.repeats
    return OracleReplay(covered, repeats)


def _analysis(
    log: TokenLog,
    config: AnalysisConfig,
    prefix: PrefixReplay,
    shipped: MatcherReplay,
    causes: CauseReport,
    ceilings: OracleReplay,
    matchers: tuple[MatcherSummary, ...],
    cost: CostModel,
    model: ModelCost | None,
    kept: Sequence[int],
) -> Analysis:
    variations = np.array(first_variations(log, prefix), dtype=np.float64)
    names, threads, replies = _columns(log)
    return Analysis(
        totals=Totals(
            len(log),
            threads,
            int(prefix.prompt.sum()),
            int(prefix.prefix.sum()),
            prefix.inserted_tokens,
            prefix.evicted_tokens,
        ),
        replies=config.replay.replies,
        cache_tokens=config.replay.cache_tokens,
        calls_with_replies=replies,
        prompt_lengths=_percentiles(prefix.prompt, PERCENTILES),
        tail_lengths=_percentiles(prefix.tail, PERCENTILES),
        first_variation=_percentiles(variations, PERCENTILES) if len(variations) else (),
        first_variation_histogram=histogram(variations, np.zeros(len(variations), dtype=np.int64), SHARE_EDGES),
        cardinality=_percentiles(np.array(causes.cardinalities), PERCENTILES) if causes.causes else (),
        oracle={length: int(counts.sum()) for length, counts in ceilings.covered.items()},
        repeat_tokens=int(ceilings.repeats.sum()),
        matchers=matchers,
        shipped=summarise(SHIPPED_MATCHER, shipped),
        approximate_calls=int((shipped.approximate > 0).sum()),
        approximate_tokens=int(shipped.approximate.sum()),
        namespaces=_namespaces(names, prefix, shipped),
        causes=causes,
        compute=_compute(prefix, shipped, model),
        ttft=_ttft(prefix, shipped, cost),
        strips=tuple(Strip(log[i].info.place, names[i], shipped.plans[i]) for i in kept),
        notes=log.notes,
    )


def _columns(log: TokenLog) -> tuple[list[str], int, int]:
    """Return the namespace name of each call, the number of threads, and of calls with a known reply."""
    names, threads, replies = [], set(), 0
    for call in log:
        names.append(namespace_name(call.info.namespace))
        threads.add(call.thread)
        replies += call.reply is not None
    return names, len(threads), replies


def namespace_name(namespace: Namespace) -> str:
    """Write a namespace's fields that are not empty; ``default`` if all are."""
    fields = [f"{name}={value}" for name, value in vars(namespace).items() if value]
    return ", ".join(fields) or "default"


def _namespaces(names: Sequence[str], prefix: PrefixReplay, shipped: MatcherReplay) -> tuple[NamespaceTotals, ...]:
    distinct, number = np.unique(np.array(names), return_inverse=True)
    if len(distinct) < 2:
        return ()
    sums = [
        np.bincount(number, weights=column).astype(np.int64).tolist()
        for column in (np.ones(len(names)), prefix.prompt, prefix.prefix, shipped.recovered)
    ]
    rows = zip(distinct.tolist(), *sums, strict=True)
    return tuple(sorted((NamespaceTotals(*row) for row in rows), key=lambda row: (-row.prompt_tokens, row.name)))


def _compute(prefix: PrefixReplay, shipped: MatcherReplay, model: ModelCost | None) -> ComputeSavings:
    now, then = int(prefix.tail.sum()), int(shipped.computed.sum())
    if model is None:
        return ComputeSavings(now, then, None, None, None)
    pairs = sum(map(computed_pairs, prefix.prefix.tolist(), prefix.prompt.tolist()))
    return ComputeSavings(
        now, then, model.name, model.flops(now, pairs), model.flops(then, int(shipped.computed_pairs.sum()))
    )


def _ttft(prefix: PrefixReplay, shipped: MatcherReplay, cost: CostModel) -> TtftEstimate:
    totals, tails, left = prefix.prompt.tolist(), prefix.tail.tolist(), shipped.computed.tolist()
    estimates = [
        (cost.estimate(tail, total), cost.estimate(rest, total))
        for total, tail, rest in zip(totals, tails, left, strict=True)
    ]
    now, then = (np.array([pair[side].ms for pair in estimates]) for side in (0, 1))
    return TtftEstimate(
        model=cost.name,
        source=cost.source,
        now_median_ms=_percentiles(now, (50,))[0],
        then_median_ms=_percentiles(then, (50,))[0],
        now_p95_ms=_percentiles(now, (95,))[0],
        then_p95_ms=_percentiles(then, (95,))[0],
        now_total_s=float(now.sum()) / 1000,
        then_total_s=float(then.sum()) / 1000,
        calls_outside=sum(not (first.inside and second.inside) for first, second in estimates),
    )


def _sample(calls: int, wanted: int) -> list[int]:
    """Return at most ``wanted`` places, spread evenly over all calls."""
    return [i * calls // min(calls, wanted) for i in range(min(calls, wanted))]


def _percentiles(values: NDArray[np.int64] | NDArray[np.float64], wanted: Sequence[int]) -> tuple[float, ...]:
    if not len(values):
        return (0.0,) * len(wanted)
    return tuple(float(value) for value in np.percentile(values, wanted))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
