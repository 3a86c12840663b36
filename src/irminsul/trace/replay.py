"""Replaying a log through the cache and the matchers that the engines use.

Calls are served in order, each against what the calls before it left: exact prefix first, then the matcher on the rest,
then the prompt (and its reply, where the log shows it) enters the cache. Slots are numbers here; no rows exist. One
pass is made for each matcher, so that memory holds one index at a time.

To compare matchers, every row is as good as any other (``replay_matcher``). The engines know better: rows behind a
copied one are approximate, and nobody copies them again (``replay_live``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from irminsul.compiled import compiled
from irminsul.errors import InputError
from irminsul.matching.cdc import splitmix64
from irminsul.matching.fingerprint_index import FingerprintIndex, index_get, index_put
from irminsul.matching.slot_store import SlotStore, following_slot, tokens_end_at
from irminsul.matching.winnow import kgram_hashes
from irminsul.namespace import Namespace
from irminsul.plan import ReusePlan, ReusePolicy, Run, SegmentKind, make_plan
from irminsul.radix_cache import CacheListener, PrefixMatch, RadixCache
from irminsul.registry import Registry
from irminsul.slot_pool import SlotPool
from irminsul.trace.cost import computed_pairs
from irminsul.trace.records import TokenisedCall, TokenLog, Tokens

Progress = Callable[[int], None]
"""Called with the prompt tokens of each call served."""


def no_progress(_: int) -> None:
    """Show nothing."""


COMPARED = ReusePolicy(carve_out=32, min_run=32, max_runs=1_000_000, gap_cost=0, min_known=0)
"""For comparing matchers with the oracle: every run of 32 tokens counts, whatever it costs."""

SHIPPED = ReusePolicy()
"""What the engines do by default."""

ORACLE_LENGTHS = (32, 64, 128)
NO_DONOR = -1
_REPEAT_BLOCK = 2**16


@dataclass(frozen=True)
class ReplayConfig:
    """What is cached, and what for."""

    cache_tokens: int | None = None
    """Rows the cache holds, least recently used out first; None: no bound."""
    replies: bool = True
    """Whether replies that the log shows are cached behind their prompts, as servers do that keep decoded rows."""
    seed: int = 0
    """Of the fingerprints. Fixed, so that the same log gives the same report."""

    def __post_init__(self) -> None:
        if self.cache_tokens is not None and self.cache_tokens < 1:
            raise InputError(f"cache_tokens must be >= 1, got {self.cache_tokens!r}")


@dataclass(frozen=True, eq=False)
class PrefixReplay:
    """What the prefix cache alone does, for each call."""

    prompt: NDArray[np.int64]
    """Prompt tokens, shape [calls]."""
    prefix: NDArray[np.int64]
    """Of these, held by the lossless prefix; the last token of a prompt never is."""
    donor: NDArray[np.int64]
    """The call that cached the last token of the prefix, or NO_DONOR; shape [calls]. It shares the whole prefix."""
    inserted_tokens: int
    evicted_tokens: int

    @property
    def tail(self) -> NDArray[np.int64]:
        """Tokens that prefix caching computes, shape [calls]."""
        return self.prompt - self.prefix


@dataclass(frozen=True, eq=False)
class MatcherReplay:
    """What one matcher adds under one policy, for each call."""

    recovered: NDArray[np.int64]
    """Tokens in shifted hits, shape [calls]."""
    computed: NDArray[np.int64]
    """Tokens neither cached nor copied, shape [calls]."""
    approximate: NDArray[np.int64]
    """Prompt tokens whose rows are approximate: copied ones, and all that are computed behind them; shape [calls].
    Where every row may be a donor, of the call's own copies alone."""
    gaps: NDArray[np.int64]
    """Stretches to compute, shape [calls]."""
    computed_pairs: NDArray[np.int64]
    """Positions that the computed tokens see together (attention's work), shape [calls]."""
    run_lengths: NDArray[np.int64]
    """Of every run used, shape [runs]."""
    deltas: NDArray[np.int64]
    """How far each run moved, shape [runs]."""
    plans: dict[int, ReusePlan] = field(default_factory=dict)
    """Plans of the calls that were asked for."""


@dataclass(frozen=True, eq=False)
class OracleReplay:
    """Ceilings: tokens of each tail that any run of at least L tokens, seen before, covers."""

    covered: dict[int, NDArray[np.int64]]
    """L -> shape [calls]."""
    repeats: NDArray[np.int64]
    """Tokens of each tail that only an earlier copy in the same tail covers, for the least L; shape [calls]."""


def replay_prefix(log: TokenLog, config: ReplayConfig, progress: Progress = no_progress) -> PrefixReplay:
    """Serve a log with prefix caching alone."""
    cache = _ReplayCache(config)
    prompts = np.zeros(len(log), dtype=np.int64)
    prefixes = np.zeros(len(log), dtype=np.int64)
    donors = np.full(len(log), NO_DONOR, dtype=np.int64)
    cached_by = np.empty(0, dtype=np.int64)
    for i, call in enumerate(log):
        held = cache.prefix_slots(call)
        prompts[i], prefixes[i] = len(call.tokens), len(held)
        if len(held):
            donors[i] = cached_by[held[-1]]
        new = cache.insert(call)
        if cache.capacity > len(cached_by):
            more = np.full(cache.capacity - len(cached_by), NO_DONOR, dtype=np.int64)
            cached_by = np.concatenate([cached_by, more])
        cached_by[new] = i
        progress(len(call.tokens))
    return PrefixReplay(prompts, prefixes, donors, cache.inserted_tokens, cache.evicted_tokens)


def replay_matcher(
    log: TokenLog,
    name: str,
    prefix: PrefixReplay,
    config: ReplayConfig,
    progress: Progress = no_progress,
    *,
    policy: ReusePolicy = COMPARED,
    keep_plans: frozenset[int] = frozenset(),
) -> MatcherReplay:
    """Serve a log with prefix caching and one matcher.

    Args:
        log: the calls.
        name: the matcher, see registry.MATCHERS.
        prefix: the same log served without it, under the same config.
        config: see ReplayConfig.
        progress: called for each call.
        policy: how runs are turned into plans.
        keep_plans: calls whose plans are wanted.
    """
    registry = Registry(
        _capacity(prefix, config), matcher=name, seed=config.seed, special_tokens=log.special_ids.tolist()
    )
    cache = _ReplayCache(config, registry)

    def serve(i: int, call: TokenisedCall) -> ReusePlan:
        held = cache.prefix(call)
        assert held == prefix.prefix[i], "two replays of one log disagree"
        runs = registry.find(call.info.namespace, call.tokens, held)
        plan = make_plan(len(call.tokens), prefix=held, runs=runs, policy=policy)
        cache.insert(call)
        return plan

    return _replayed(log, serve, progress, keep_plans)


def replay_live(
    log: TokenLog,
    name: str,
    prefix: PrefixReplay,
    config: ReplayConfig,
    progress: Progress = no_progress,
    *,
    policy: ReusePolicy = SHIPPED,
    keep_plans: frozenset[int] = frozenset(),
) -> MatcherReplay:
    """Serve a log as the engines do in mode live: derived rows continue their own text, and are never donors.

    Without a bound the cache has a quarter more room than prefix caching takes, since a text may be held twice, exact
    and derived. Arguments: see ``replay_matcher``.
    """
    cache = _LiveCache(config.cache_tokens or max(1, prefix.inserted_tokens * 5 // 4), name, log, config)
    return _replayed(log, lambda _, call: cache.serve(call, policy), progress, keep_plans)


def _replayed(
    log: TokenLog, serve: Callable[[int, TokenisedCall], ReusePlan], progress: Progress, keep_plans: frozenset[int]
) -> MatcherReplay:
    """Serve a log, each call by its place, and sum up the plans that come of it."""
    recovered, computed, approximate, gaps, pairs = (np.zeros(len(log), dtype=np.int64) for _ in range(5))
    lengths: list[int] = []
    deltas: list[int] = []
    plans: dict[int, ReusePlan] = {}
    for i, call in enumerate(log):
        plan = serve(i, call)
        recovered[i] = plan.tokens(SegmentKind.SHIFTED)
        computed[i] = plan.tokens(SegmentKind.GAP)
        approximate[i] = plan.n_tokens - plan.exact_end
        gaps[i] = len(plan.gaps)
        pairs[i] = sum(computed_pairs(gap.start, gap.end) for gap in plan.gaps)
        lengths += [run.length for run in plan.runs]
        deltas += [run.delta for run in plan.runs]
        if i in keep_plans:
            plans[i] = plan
        progress(len(call.tokens))
    run_lengths, moved = (np.array(values, dtype=np.int64) for values in (lengths, deltas))
    return MatcherReplay(recovered, computed, approximate, gaps, pairs, run_lengths, moved, plans)


def replay_oracle(
    log: TokenLog,
    prefix: PrefixReplay,
    config: ReplayConfig,
    progress: Progress = no_progress,
    lengths: tuple[int, ...] = ORACLE_LENGTHS,
) -> OracleReplay:
    """Measure the ceilings: every L-gram of the cache is indexed, and every L-gram of the tail looked up."""
    covered = {}
    repeats = np.zeros(len(log), dtype=np.int64)
    for length in lengths:
        oracle = LengthOracle(_capacity(prefix, config), length)
        cache = _ReplayCache(config, oracle)
        counts = np.zeros(len(log), dtype=np.int64)
        for i, call in enumerate(log):
            start = max(cache.prefix(call), COMPARED.carve_out)
            mask = oracle.covered(call.info.namespace, call.tokens[:-1], start)
            counts[i] = mask.sum()
            if length == min(lengths):
                repeats[i] = (repeated(call.tokens[:-1], start, length) & ~mask).sum()
            cache.insert(call)
            progress(len(call.tokens))
        covered[length] = counts
    return OracleReplay(covered, repeats)


class LengthOracle:
    """Says which tokens lie in a run of at least ``length`` tokens that live rows hold.

    It is a cache listener with an entry for every live L-gram; tokens decide here, too. A bounded cache may drop the
    newest copies of a run while older ones live; the few newest copies are kept for each, so a ceiling under eviction
    can be slightly low, never high.
    """

    def __init__(self, capacity: int, length: int, seed: int = 1) -> None:
        self.length = length
        self._store = SlotStore(capacity)
        self._index = FingerprintIndex(capacity, candidates=4, spacing=1)
        self._base = np.uint64(0x9E3779B97F4A7C15)
        self._seed = seed

    def add(self, namespace: Namespace, tokens: Tokens, slots: NDArray[np.int32], start: int) -> None:
        """Index every L-gram that ends in the new rows."""
        number = self._store.add(namespace, tokens, slots, start)
        first = max(0, start - self.length + 1)
        hashes = kgram_hashes(tokens[first:], self.length, self._base, self._salt(number))
        _index_all(self._index.arrays, slots[first + self.length - 1 :], hashes)

    def drop(self, slots: NDArray[np.int32]) -> None:
        """Forget freed rows."""
        self._index.drop(slots)
        self._store.drop(slots)

    def covered(self, namespace: Namespace, tokens: Tokens, start: int) -> NDArray[np.bool_]:
        """Say for each token from ``start`` whether a run covers it, shape [len(tokens) - start]."""
        number = self._store.namespace_id(namespace)
        if number is None or start >= len(tokens):
            return np.zeros(max(0, len(tokens) - start), dtype=np.bool_)
        hashes = kgram_hashes(tokens[start:], self.length, self._base, self._salt(number))
        mask: NDArray[np.bool_] = _covered(
            self._store.arrays, self._index.arrays, tokens, start, self.length, hashes, number
        )
        return mask

    def _salt(self, number: int) -> np.uint64:
        # Mixed: numbers that differ in a few bits would make grams that differ in a few tokens meet.
        return np.uint64(splitmix64(self._seed + number))


def repeated(tokens: Tokens, start: int, length: int) -> NDArray[np.bool_]:
    """Say for each token from ``start`` whether its L-gram has an earlier, disjoint copy there."""
    tail = tokens[start:]
    hashes = kgram_hashes(tail, length, np.uint64(0x9E3779B97F4A7C15), np.uint64(0))
    mask = np.zeros(len(tail), dtype=np.bool_)
    if not len(hashes):
        return mask
    order = np.argsort(hashes, kind="stable")
    begins_group = np.concatenate([[True], np.diff(hashes[order]) != 0])
    first = order[np.maximum.accumulate(np.where(begins_group, np.arange(len(order)), 0))]
    far = order >= first + length
    at, source = order[far], first[far]
    grams = np.lib.stride_tricks.sliding_window_view(tail, length)
    # One gram is (length) tokens: in blocks, so that a long prompt that repeats itself needs little memory.
    for block in range(0, len(at), _REPEAT_BLOCK):
        chosen = slice(block, block + _REPEAT_BLOCK)
        equal = (grams[at[chosen]] == grams[source[chosen]]).all(axis=1)
        for i in at[chosen][equal].tolist():
            mask[i : i + length] = True
    return mask


class _PromptFirst:
    """Announces a prompt before its reply, as a server does; the tree takes both at once, which is faster.

    Cut as one text, the last chunk of a prompt would run into the reply, and no later prompt would find it.
    """

    def __init__(self, listener: CacheListener) -> None:
        self._listener = listener
        self.prompt_end = 0

    def add(self, namespace: Namespace, tokens: Tokens, slots: NDArray[np.int32], start: int) -> None:
        """See CacheListener."""
        end = self.prompt_end
        if start < end < len(slots):
            self._listener.add(namespace, tokens[:end], slots[:end], start)
            start = end
        self._listener.add(namespace, tokens, slots, start)

    def drop(self, slots: NDArray[np.int32]) -> None:
        """See CacheListener."""
        self._listener.drop(slots)


class _ReplayCache:
    """The radix cache over slots that hold nothing."""

    def __init__(self, config: ReplayConfig, listener: CacheListener | None = None) -> None:
        self._config = config
        bound = config.cache_tokens
        self._listener = None if listener is None else _PromptFirst(listener)
        self._tree = RadixCache(bound or 0, listener=self._listener)
        self._pool = SlotPool(bound) if bound else None
        self.inserted_tokens = 0

    @property
    def capacity(self) -> int:
        """Slot numbers are below this."""
        return self._tree.capacity

    @property
    def evicted_tokens(self) -> int:
        return self._tree.evicted_slots

    def prefix(self, call: TokenisedCall) -> int:
        """Return the length of a call's prefix hit; its last token is always computed."""
        return len(self.prefix_slots(call))

    def prefix_slots(self, call: TokenisedCall) -> NDArray[np.int32]:
        """Return the slots of a call's prefix hit."""
        return self._tree.match(call.info.namespace, call.tokens[:-1]).slots

    def insert(self, call: TokenisedCall) -> NDArray[np.int32]:
        """Cache the prompt, and the reply if it is known and wanted; what a bounded cache cannot hold is left out.

        Returns:
            The slots of the rows that were not cached before.
        """
        namespace, tokens = call.info.namespace, call.tokens
        if self._config.replies and call.reply is not None:
            tokens = np.concatenate([tokens, call.reply])
        if self._config.cache_tokens is not None:
            tokens = tokens[: self._config.cache_tokens]
        match = self._tree.match(namespace, tokens)
        self._tree.lock(match.node)
        new = len(tokens) - len(match.slots)
        slots = np.concatenate([match.slots, self._allocate(new)])
        if self._listener is not None:
            self._listener.prompt_end = len(call.tokens)
        insertion = self._tree.insert(namespace, tokens, slots, exact_end=len(tokens))
        assert (insertion.slots == slots).all(), "a replayed row was cached already"
        self._tree.unlock(match.node)
        self.inserted_tokens += new
        return slots[len(match.slots) :]

    def _allocate(self, count: int) -> NDArray[np.int32]:
        if self._pool is None:
            first = self.inserted_tokens
            if first + count >= 2**31:
                raise InputError("the log holds more than 2**31 distinct tokens; give a bound with --cache-tokens")
            if first + count > self._tree.capacity:
                self._tree.grow(2 * (first + count))
            return np.arange(first, first + count, dtype=np.int32)
        if count > self._pool.free_slots:
            self._pool.free(self._tree.evict(count - self._pool.free_slots))
        slots = self._pool.allocate(count)
        assert slots is not None, "a prompt that fits the cache found no room"
        return slots


class _LiveCache:
    """The radix cache with derived rows, and the index of the exact ones, over slots that hold nothing."""

    def __init__(self, capacity: int, name: str, log: TokenLog, config: ReplayConfig) -> None:
        self._registry = Registry(capacity, matcher=name, seed=config.seed, special_tokens=log.special_ids.tolist())
        self._listener = _PromptFirst(self._registry)
        self._tree = RadixCache(capacity, listener=self._listener)
        self._pool = SlotPool(capacity)
        self._capacity = capacity
        self._replies = config.replies

    def serve(self, call: TokenisedCall, policy: ReusePolicy) -> ReusePlan:
        """Plan a call and publish its rows, and those of its reply; what the cache cannot hold is left out."""
        namespace, prompt = call.info.namespace, call.tokens
        match = self._match(call, policy)
        self._tree.lock(match.node)
        held = np.concatenate([match.slots, match.derived_slots])
        planned = partial(
            make_plan,
            len(prompt),
            prefix=len(match.slots),
            approximate_prefix=len(match.derived_slots),
            policy=policy,
        )
        plan = planned(runs=self._registry.find(namespace, prompt, len(held)))
        prompt_rows = min(len(prompt), self._capacity)
        own = self._allocate(prompt_rows - len(held), plan.runs)
        if own is None:
            # As the engines: a request that needs its donors' room gets it, and copies nothing.
            plan = planned()
            own = self._allocate(prompt_rows - len(held), [])
        tokens = prompt if call.reply is None or not self._replies else np.concatenate([prompt, call.reply])
        tokens = tokens[: self._capacity]
        decoded = self._allocate(len(tokens) - prompt_rows, [])
        assert own is not None, "a prompt that fits the cache found no room"
        assert decoded is not None, "a reply that fits the cache found no room"
        own = np.concatenate([own, decoded])
        slots = np.concatenate([held, own])
        # A reply is as exact as its prompt.
        exact_end = plan.exact_end if plan.exact_end < len(prompt) else len(tokens)
        self._listener.prompt_end = len(prompt)
        insertion = self._tree.insert(namespace, tokens, slots, exact_end=exact_end)
        self._tree.unlock(match.node)
        taken = insertion.slots == slots
        self._pool.free(own[~taken[len(held) :]])
        return plan

    def _match(self, call: TokenisedCall, policy: ReusePolicy) -> PrefixMatch:
        namespace, prompt = call.info.namespace, call.tokens
        match = self._tree.match(namespace, prompt[:-1], derived=policy.approximate_prefix)
        exact, derived = len(match.slots), len(match.derived_slots)
        search = partial(self._registry.find, namespace, prompt, exact + derived)
        if policy.keeps_history(len(prompt), exact, derived, search):
            return match
        return self._tree.match(namespace, prompt[:-1])

    def _allocate(self, count: int, runs: Sequence[Run]) -> NDArray[np.int32] | None:
        """Find room for new rows while the donors of runs are locked."""
        donors = [run.slots for run in runs]
        with self._tree.lock_rows(np.concatenate(donors) if donors else np.empty(0, dtype=np.int32)):
            if count > self._pool.free_slots:
                self._pool.free(self._tree.evict(count - self._pool.free_slots))
            return self._pool.allocate(count)


def _capacity(prefix: PrefixReplay, config: ReplayConfig) -> int:
    return config.cache_tokens or max(1, prefix.inserted_tokens)


@compiled
def _index_all(index, slots, hashes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    for i in range(len(hashes)):
        index_put(index, slots[i], hashes[i], 4)


@compiled
def _covered(store, index, tokens, start, length, hashes, number):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    mask = np.zeros(len(tokens) - start, dtype=np.bool_)
    found = np.empty(4, dtype=np.int32)
    slot = np.int32(-1)
    for i in range(len(hashes)):
        end = start + i + length
        # A run that goes on needs one step, not a new look-up; the tokens before it are verified already.
        if slot >= 0:
            slot = following_slot(store, slot, tokens[end - 1])
            if slot >= 0 and store.namespace[slot] != number:
                slot = np.int32(-1)
        if slot < 0:
            for c in range(index_get(index, hashes[i], found)):
                if tokens_end_at(store, found[c], tokens, end, length, number):
                    slot = found[c]
                    break
        if slot >= 0:
            mask[i] = True
    # mask[i] says that the L-gram which begins at i is known: spread it over its tokens.
    reach = -1
    for i in range(len(mask)):
        if i < len(hashes) and mask[i]:
            reach = i + length
        mask[i] = i < reach
    return mask
