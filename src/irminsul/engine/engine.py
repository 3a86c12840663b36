"""The embedded engine: requests in, tokens out, one forward a step.

The loop is ``step``: admit one request if the one before it is through its prefill, build one batch of everything
that can run, run it, draw tokens, publish rows. A request's life::

    submit -> waiting -> prefilling -> decoding -> published and gone
                 |  match prefix, lock, plan, allocate, copy shifted rows

One prompt is in prefill at a time, in chunks, beside all decodes. Requests that arrive together are therefore planned
one after the other, each against the rows of those before it.

A request is admitted only when its whole length (prompt and max_tokens) fits into what is free, evictable and not
promised to others; so a running request never lacks a slot, and nothing is preempted. Until then it waits.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from irminsul.engine.batch import ForwardBatch, Span
from irminsul.engine.model import MlaModel
from irminsul.engine.sampler import Sampler, SamplingState
from irminsul.engine.sequence import Sequence
from irminsul.engine.types import FinishReason, Request, StepOutput
from irminsul.errors import InputError, OverloadedError
from irminsul.kernels.rows import move_rows
from irminsul.namespace import Namespace
from irminsul.plan import Mode, ReusePlan, ReusePolicy, Run, make_plan
from irminsul.radix_cache import PrefixMatch, RadixCache
from irminsul.registry import Registry
from irminsul.slot_pool import SlotPool

_MODE_RANK = {Mode.OFF: 0, Mode.OBSERVE: 1, Mode.LIVE: 2}


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs; lengths are in tokens."""

    mode: Mode = Mode.LIVE
    pool_slots: int = 16384
    page_size: int = 1
    prefill_chunk: int = 1024
    """Prompt tokens computed in one step; reused tokens do not count."""
    max_running: int = 64
    max_waiting: int = 256
    matcher: str = "winnow64"
    special_tokens: tuple[int, ...] = ()
    """The chat template's special token ids; the anchored matchers cut there and need them."""
    policy: ReusePolicy = field(default_factory=ReusePolicy)

    def __post_init__(self) -> None:
        for name in ("prefill_chunk", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 1, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class EngineStats:
    """Gauges and counters of one moment; slots are token rows."""

    running: int
    waiting: int
    pool_slots: int
    free_slots: int
    cached_slots: int
    """Slots in the prefix cache, derived ones included."""
    derived_slots: int
    locked_slots: int
    """Slots in the prefix cache that running requests read, which keeps them there."""
    registry_entries: int
    registry_bytes: int
    evicted_slots: int
    """Counter since start."""
    declined_plans: int
    """Counter: plans not carried out because their donors and the request did not fit the pool together."""


class Engine:
    """A model, its row pool, the caches and the schedule. Not thread-safe: one thread calls everything.

    Args:
        model: the model; its device and dtype are the pool's.
        config: sizes, mode and policy.
        identity: name of model, revision and tokenizer, part of every namespace.
    """

    def __init__(self, model: MlaModel, config: EngineConfig, *, identity: str = "") -> None:
        self.config = config
        self.mode = config.mode
        self.max_prompt_tokens = min(config.pool_slots, model.config.max_position_embeddings)
        self.eos_token_ids = frozenset(model.config.eos_token_ids)
        self.on_first_logits: Callable[[str, torch.Tensor], None] | None = None
        self._model = model
        self._layout = model.layout
        self._identity = identity
        self._pool = SlotPool(config.pool_slots, config.page_size)
        self._rows_LSW = model.new_pool(config.pool_slots)
        self._registry = None
        if config.mode is not Mode.OFF:
            self._registry = Registry(config.pool_slots, matcher=config.matcher, special_tokens=config.special_tokens)
        self._cache = RadixCache(config.pool_slots, page_size=config.page_size, listener=self._registry)
        if self._registry is not None:
            self._registry.warm_up()
        self._sampler = Sampler()
        self._waiting: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None
        self._decoding: list[Sequence] = []
        self._declined_plans = 0

    # -- what callers use ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InputError: the prompt is empty, too long with its max_tokens, holds a token id the model does not have,
                asks for a mode above the server's, or its request_id is in use.
            OverloadedError: the queue is full.
        """
        self._check(request)
        if len(self._waiting) >= self.config.max_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests are waiting already; try again later")
        namespace = Namespace(
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            model=self._identity,
            row_format=self._layout.fingerprint,
            rope=self._model.config.rope.fingerprint,
        )
        mode = self.mode if request.mode is None else request.mode
        self._waiting.append(Sequence(request, namespace, mode, SamplingState(request.sampling)))

    def abort(self, request_id: str) -> None:
        """Drop a request, wherever it is; its slots come back. An unknown id is fine (it may just have ended)."""
        for sequence in list(self._running()):
            if sequence.request.request_id == request_id:
                self._release(sequence)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.request.request_id != request_id)

    def stop(self, request_id: str) -> None:
        """End a decoding request as if it had finished by itself (a stop string was met outside)."""
        for sequence in list(self._decoding):
            if sequence.request.request_id == request_id:
                self._finish(sequence)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._waiting or self._running())

    def step(self) -> list[StepOutput]:
        """Run one forward for everything that can run; return the tokens drawn."""
        self._admit()
        sequences = list(self._decoding)
        parts = [self._decode_part(sequence) for sequence in sequences]
        if self._prefilling is not None:
            parts.append(self._prefill_part(self._prefilling))
            if len(self._prefilling.pending) == 0:
                sequences.append(self._prefilling)
        if not parts:
            return []
        logits_BV = self._model.forward(_join(parts, n_logits=len(sequences)), self._rows_LSW)
        if self._prefilling is not None and len(self._prefilling.pending) == 0:
            self._end_prefill(self._prefilling, logits_BV[-1])
        drawn = self._sampler.draw(logits_BV, [sequence.sampling for sequence in sequences])
        outputs = []
        for sequence, draw in zip(sequences, drawn, strict=True):
            sequence.output.append(draw.token_id)
            reason = self._finish_reason(sequence)
            usage = sequence.usage(_planned(sequence)) if len(sequence.output) == 1 else None
            outputs.append(
                StepOutput(sequence.request.request_id, draw.token_id, draw.logprob, draw.top_logprobs, usage, reason)
            )
            if reason is not None:
                self._finish(sequence)
        return outputs

    def flush(self) -> None:
        """Empty the cache of everything that no running request holds."""
        self._pool.free(self._cache.flush())

    def stats(self) -> EngineStats:
        """Count what there is now."""
        return EngineStats(
            running=len(self._running()),
            waiting=len(self._waiting),
            pool_slots=self._pool.capacity,
            free_slots=self._pool.free_slots,
            cached_slots=self._cache.cached_slots,
            derived_slots=self._cache.derived_slots,
            locked_slots=self._cache.locked_slots,
            registry_entries=0 if self._registry is None else len(self._registry),
            registry_bytes=0 if self._registry is None else self._registry.nbytes,
            evicted_slots=self._cache.evicted_slots,
            declined_plans=self._declined_plans,
        )

    def check_ownership(self) -> None:
        """Prove that every slot is free, owned by one request, or owned by the cache; AssertionError otherwise."""
        parts = [self._pool.free_list(), self._cache.owned()]
        parts += [sequence.slots[sequence.owned] for sequence in self._running()]
        slots = np.concatenate(parts)
        counts = np.bincount(slots, minlength=self._pool.capacity)
        assert len(counts) == self._pool.capacity, "a slot beyond the pool"
        assert (counts == 1).all(), (
            f"slots with no owner: {np.flatnonzero(counts == 0)}, two: {np.flatnonzero(counts > 1)}"
        )
        if self._registry is not None:
            exact = self._cache.cached_slots - self._cache.derived_slots
            assert self._registry.store.live == exact, (self._registry.store.live, exact)
        assert self._room() >= self._promised(), "more slots are promised than there can be"

    # -- admission -------------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        n_tokens, vocabulary = len(request.token_ids), self._model.config.vocab_size
        if n_tokens == 0:
            raise InputError("the prompt is empty; it needs at least one token")
        if not all(0 <= token < vocabulary for token in request.token_ids):
            raise InputError(f"the prompt holds a token id outside [0, {vocabulary})")
        if n_tokens + request.sampling.max_tokens > self.max_prompt_tokens:
            raise InputError(
                f"the prompt has {n_tokens} tokens and asks for up to {request.sampling.max_tokens} more, but this "
                f"server's context is {self.max_prompt_tokens} tokens"
            )
        if request.mode is not None and _MODE_RANK[request.mode] > _MODE_RANK[self.mode]:
            raise InputError(
                f"irminsul mode {request.mode.value!r} was asked for, but the server runs in {self.mode.value!r}"
            )
        if any(request.request_id == other.request.request_id for other in (*self._waiting, *self._running())):
            raise InputError(f"request id {request.request_id!r} is in use")

    def _admit(self) -> None:
        busy = self._prefilling is not None or len(self._decoding) >= self.config.max_running
        if self._waiting and not busy and self._begin(self._waiting[0]):
            self._prefilling = self._waiting.popleft()

    def _begin(self, sequence: Sequence) -> bool:
        """Match, plan, allocate and copy; False if there is no room for the request yet."""
        match = self._match(sequence)
        self._cache.lock(match.node)
        sequence.node = match.node
        sequence.hold(np.concatenate([match.slots, match.derived_slots]))
        if self._missing(sequence) > self._room() - self._promised():
            self._cache.unlock(match.node)
            sequence.node = None
            sequence.hold(match.slots[:0])
            return False
        sequence.scheduled = time.perf_counter()
        prefix, approximate = len(match.slots), len(match.derived_slots)
        runs = self._search(sequence, prefix + approximate)
        plan = self._plan(sequence, prefix, approximate, runs)
        sequence.planned_shifted = sum(run.length for run in plan.runs)
        sequence.match_seconds = time.perf_counter() - sequence.scheduled
        if sequence.mode is not Mode.LIVE or not self._carry_out(sequence, plan):
            plan = self._plan(sequence, prefix, approximate, [])
            carried_out = self._carry_out(sequence, plan)
            assert carried_out, "room was checked, but a request without donors does not fit"
        sequence.plan = plan
        sequence.pending = plan.computed_positions()
        return True

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """Return what the tree holds of a prompt, with derived rows where the session goes on from them."""
        policy, prompt = self.config.policy, sequence.prompt
        derived = sequence.mode is Mode.LIVE and policy.approximate_prefix
        # The last token is computed whatever is cached: its logits are wanted.
        match = self._cache.match(sequence.namespace, prompt[:-1], derived=derived)
        held, more = len(match.slots), len(match.derived_slots)
        if policy.keeps_history(len(prompt), held, more, partial(self._search, sequence, held + more)):
            return match
        return self._cache.match(sequence.namespace, prompt[:-1])

    def _search(self, sequence: Sequence, start: int) -> list[Run]:
        if self._registry is None or sequence.mode is Mode.OFF:
            return []
        return self._registry.find(sequence.namespace, sequence.prompt, start)

    def _plan(self, sequence: Sequence, prefix: int, approximate: int, runs: list[Run]) -> ReusePlan:
        return make_plan(
            len(sequence.prompt),
            prefix=prefix,
            approximate_prefix=approximate,
            runs=runs,
            policy=self.config.policy,
        )

    def _carry_out(self, sequence: Sequence, plan: ReusePlan) -> bool:
        """Allocate the prompt's slots and copy the plan's rows into them, donors locked; False if both do not fit."""
        donors = [run.slots for run in plan.runs]
        donor_slots = np.concatenate(donors) if donors else np.empty(0, dtype=np.int32)
        with self._cache.lock_rows(donor_slots):
            slots = self._allocate(len(sequence.prompt) - len(sequence.slots))
            if slots is None:
                self._declined_plans += 1
                return False
            sequence.take(slots)
            if plan.runs:
                self._copy(sequence, plan.runs, donor_slots)
        return True

    def _copy(self, sequence: Sequence, runs: list[Run], donor_slots: NDArray[np.int32]) -> None:
        targets = np.concatenate([np.arange(run.start, run.end) for run in runs])
        deltas = np.concatenate([np.full(run.length, run.delta) for run in runs])
        move_rows(
            self._rows_LSW,
            self._layout,
            self._model.config.rope,
            _int64(donor_slots),
            _int64(sequence.slots[targets]),
            _int64(targets - deltas),
            _int64(targets),
        )

    # -- slots -----------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Slots that are free or could be evicted."""
        return self._pool.free_slots + self._cache.cached_slots - self._cache.locked_slots

    def _promised(self) -> int:
        """Slots that running requests may still take."""
        return sum(self._missing(sequence) for sequence in self._running())

    def _missing(self, sequence: Sequence) -> int:
        return self._pool.pages(sequence.total) * self._pool.page_size - len(sequence.slots)

    def _allocate(self, n_slots: int) -> NDArray[np.int32] | None:
        needed = self._pool.pages(n_slots) * self._pool.page_size
        if needed > self._pool.free_slots:
            self._pool.free(self._cache.evict(needed - self._pool.free_slots))
        return self._pool.allocate(n_slots)

    # -- one step --------------------------------------------------------------------------------------------------

    def _running(self) -> list[Sequence]:
        return self._decoding if self._prefilling is None else [*self._decoding, self._prefilling]

    def _decode_part(self, sequence: Sequence) -> "_Part":
        position = sequence.n_rows
        if position == len(sequence.slots):
            slots = self._allocate(1)
            assert slots is not None, "a running request lacks a slot that was promised to it"
            sequence.take(slots)
        return _Part(np.array([position]), np.array([sequence.output[-1]]), sequence.slots, wants_logits=True)

    def _prefill_part(self, sequence: Sequence) -> "_Part":
        positions = sequence.pending[: self.config.prefill_chunk]
        sequence.pending = sequence.pending[len(positions) :]
        return _Part(positions, sequence.prompt[positions], sequence.slots, wants_logits=len(sequence.pending) == 0)

    def _end_prefill(self, sequence: Sequence, logits_V: torch.Tensor) -> None:
        # Published before the first token: the request planned next finds these rows.
        self._publish(sequence, len(sequence.prompt))
        self._prefilling = None
        self._decoding.append(sequence)
        if self.on_first_logits is not None:
            self.on_first_logits(sequence.request.request_id, logits_V)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        sampling = sequence.request.sampling
        if sequence.output[-1] in self.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.output) >= sampling.max_tokens else None

    def _publish(self, sequence: Sequence, n_rows: int) -> None:
        """Hand the first ``n_rows`` rows to the tree: exact ones as exact, those behind approximate rows as derived."""
        tokens, slots = sequence.tokens[:n_rows], sequence.slots[:n_rows]
        insertion = self._cache.insert(sequence.namespace, tokens, slots, exact_end=sequence.exact_end)
        self._cache.lock(insertion.node)
        self._cache.unlock(sequence.node)
        sequence.node = insertion.node
        # Where the tree held a row of the same token already, the sequence goes on with that one: what it holds never
        # exceeds what it was admitted for.
        self._pool.free(sequence.exchange(insertion.slots))

    def _finish(self, sequence: Sequence) -> None:
        self._publish(sequence, sequence.n_rows)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back what a sequence holds and forget it."""
        self._pool.free(sequence.slots[sequence.owned])
        self._cache.unlock(sequence.node)
        if sequence is self._prefilling:
            self._prefilling = None
        else:
            self._decoding.remove(sequence)


@dataclass(frozen=True, eq=False)
class _Part:
    """What one request contributes to a batch."""

    positions: NDArray[np.int64]
    tokens: NDArray[np.int32]
    slots: NDArray[np.int32]
    wants_logits: bool


def _join(parts: list[_Part], *, n_logits: int) -> ForwardBatch:
    spans, logit_rows, cursor = [], [], 0
    for part in parts:
        end = cursor + len(part.positions)
        spans.append(Span(cursor, end, _int64(part.slots[: int(part.positions[-1]) + 1])))
        if part.wants_logits:
            logit_rows.append(end - 1)
        cursor = end
    assert len(logit_rows) == n_logits, (logit_rows, n_logits)
    return ForwardBatch(
        token_ids_T=_int64(np.concatenate([part.tokens for part in parts])),
        positions_T=_int64(np.concatenate([part.positions for part in parts])),
        out_slots_T=_int64(np.concatenate([part.slots[part.positions] for part in parts])),
        spans=tuple(spans),
        logit_rows_N=torch.tensor(logit_rows, dtype=torch.int64),
    )


def _int64(values: NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _planned(sequence: Sequence) -> ReusePlan:
    assert sequence.plan is not None
    return sequence.plan
