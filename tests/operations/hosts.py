"""Two owners of the caches for random operations: one that uses the core as freely as it allows, and the engine.

Both serve requests in small steps, hang up at any moment, and check after each operation that every slot has one owner
and every row is what its reader expects. ``CoreHost`` keeps plans open while other requests allocate and evict, runs
any number of prefills beside each other and publishes in the middle of them, none of which the engine does.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import torch
from ledger import END, LAYOUT, POSITIONS, ROPE, VOCABULARY, Ledger
from watched import WatchedCache, WatchedRegistry

from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.sampler import SamplingState
from irminsul.engine.sequence import Sequence
from irminsul.engine.types import Request, SamplingParams
from irminsul.errors import InputError, OverloadedError
from irminsul.kernels.rows import move_rows
from irminsul.matching.winnow import WinnowConfig, WinnowMatcher
from irminsul.namespace import Namespace
from irminsul.plan import Mode, ReusePolicy, SegmentKind, make_plan
from irminsul.slot_pool import SlotPool

MODES = (Mode.OFF, Mode.OBSERVE, Mode.LIVE)
SHIPPED = ("winnow32", "winnow64", "fixed128", "cdc_s1", "anchored_s1")
"""Matchers as they are shipped; their runs are long, and so all texts have to be."""


@dataclass(frozen=True)
class Settings:
    """What a host is started with."""

    unit: int
    """About a tenth of a passage's tokens."""
    slots: int
    page_size: int
    matcher: str
    winnow: WinnowConfig | None
    """A matcher of runs of a few tokens in place of ``matcher``."""
    mode: Mode
    scopes: tuple[Namespace, ...]
    """Whose requests there are."""
    seed: int

    @classmethod
    def draw(cls, rng, scopes):
        """Draw settings: mostly tiny ones, for many matches in little time."""
        tiny = rng.random() < 0.95
        unit = 1 if tiny else 12
        page_size = rng.choice([1, 1, 1, 2, 2, 3, 4, 8, 16])
        return cls(
            unit=unit,
            slots=rng.choice([80, 120, 180, 250, 400]) * unit // page_size * page_size,
            page_size=page_size,
            matcher="winnow32" if tiny else rng.choice(SHIPPED),
            winnow=WinnowConfig(*rng.choice([(2, 2), (3, 2), (3, 4), (5, 3)])) if tiny else None,
            mode=rng.choice([*MODES, *[Mode.LIVE] * 5]),
            scopes=tuple(rng.sample(scopes, rng.choice([1, 1, 2, 3]))),
            seed=rng.randrange(2**32),
        )

    @property
    def longest(self):
        """Tokens of a prompt: half of the smallest pool."""
        return 40 * self.unit

    def make_registry(self, ledger):
        """Make a watched registry."""
        registry = WatchedRegistry(ledger, self.slots, matcher=self.matcher, seed=self.seed, special_tokens=(END + 1,))
        if self.winnow is not None:
            registry.matcher = WinnowMatcher(self.slots, self.winnow, self.seed)
        return registry

    def draw_policy(self, rng):
        """Draw the knobs of plans."""
        return ReusePolicy(
            carve_out=self.unit * rng.choice([0, 0, 0, 4]),
            min_run=1 + self.unit * rng.randrange(4),
            max_runs=rng.choice([1, 2, 16, 64]),
            gap_cost=self.unit * rng.choice([0.0, 0.0, 1.0, 3.0]),
            recompute=self.unit * rng.choice([0, 0, 0, 1, 2]),
            min_recovered=self.unit * rng.choice([0, 0, 0, 5]),
            approximate_prefix=rng.random() < 0.8,
            min_known=rng.choice([0.0, 0.0, 0.0, 0.5]),
        )


class Host:
    """What both owners share: the ledger, who holds matches, counting and checking."""

    scopes: tuple[Namespace, ...]

    def __init__(self, rng, counts):
        self.counts = counts
        self._number = 0
        self.restart(rng)

    # -- what differs ----------------------------------------------------------------------------------------------

    def start(self, rng):
        """Make pool, cache and registry by ``self.settings``."""
        raise NotImplementedError

    def running(self):
        """Return the sequences that hold slots."""
        raise NotImplementedError

    # -- operations ------------------------------------------------------------------------------------------------

    def restart(self, rng):
        """Start afresh, with other settings."""
        self.settings = Settings.draw(rng, self.scopes)
        self.holds = []
        self.donors_of = {}
        self.start(rng)
        self.counts[f"starts: page size {self.settings.page_size}"] += 1
        self.counts[f"starts: {self.settings.winnow or self.settings.matcher}"] += 1
        self.counts[f"starts: mode {self.settings.mode}"] += 1

    def new_request(self, scope, tokens, rng):
        """Make a request."""
        self._number += 1
        return Request(
            str(self._number),
            tokens,
            SamplingParams(temperature=0, max_tokens=rng.choice([1, 2, 4, 8])),
            tenant=scope.tenant,
            cache_salt=scope.cache_salt,
            mode=rng.choice([*MODES, *[None] * 7]),
        )

    def evict(self, rng):
        """Evict some slots, whoever else is at work."""
        self.pool.free(self.cache.evict(rng.choice([1, 4, 12]) * self.settings.unit))

    def flush(self, rng):
        """Evict all that is not locked."""
        self.pool.free(self.cache.flush())

    def hold(self, rng, scope, tokens):
        """Lock a match, as somebody would who reads rows for a while."""
        match = self.cache.match(self.namespace(scope), np.asarray(tokens, dtype=np.int32), derived=rng.random() < 0.5)
        if match.node is None:
            return
        self.cache.lock(match.node)
        if len(self.holds) < 3 and self.may_hold():
            self.holds.append(match.node)
            self.counts["locks held"] += 1
        else:
            self.cache.unlock(match.node)

    def namespace(self, scope):
        """Return the namespace of a scope's requests."""
        return scope

    def may_hold(self):
        """Whether what was just locked may stay locked."""
        return True

    def let_go(self, rng):
        """Release one such lock."""
        if self.holds:
            self.cache.unlock(self.holds.pop(rng.randrange(len(self.holds))))

    # -- counting and checking -------------------------------------------------------------------------------------

    def count_plan(self, sequence):
        """Count what a request that was just planned reuses."""
        counts, plan = self.counts, sequence.plan
        for segment_kind in SegmentKind:
            counts[f"tokens: {segment_kind}"] += plan.tokens(segment_kind)
        exact, shifted = plan.tokens(SegmentKind.PREFIX), plan.tokens(SegmentKind.SHIFTED)
        kind = {(0, 0): "neither", (1, 0): "prefix only", (0, 1): "shifted only", (1, 1): "both"}
        counts[f"plans: {kind[exact > 0, shifted > 0]}"] += 1
        counts["plans: approximate prefix"] += plan.tokens(SegmentKind.APPROXIMATE_PREFIX) > 0
        if not plan.runs:
            return
        donors = np.concatenate([run.slots for run in plan.runs])
        counts["plans: shifted, by a matcher as it is shipped"] += self.settings.winnow is None
        counts["plans: several runs"] += len(plan.runs) > 1
        counts["plans: a donor row twice"] += len(np.unique(donors)) < len(donors)
        counts["plans: a donor in the request's own prefix"] += bool(np.isin(donors, sequence.slots[:exact]).any())
        counts["plans: source and target positions overlap"] += any(abs(run.delta) < run.length for run in plan.runs)
        counts["plans: a run moved backwards"] += any(run.delta < 0 for run in plan.runs)
        counts["plans: a run that stays where it was"] += any(run.delta == 0 for run in plan.runs)
        others = [slots for slots in self.donors_of.values() if np.isin(slots, donors).any()]
        counts["plans: a donor that another request copies from"] += len(others) > 0
        self.donors_of[sequence.request.request_id] = donors

    def check(self):
        """Check everything after an operation."""
        sequences = self.running()
        for sequence in sequences:
            n = min(sequence.n_rows, len(sequence.slots))
            valid = np.ones(n, dtype=np.bool_)
            valid[sequence.pending] = False
            self.ledger.check_reader(
                sequence.request.request_id,
                sequence.slots[:n],
                sequence.tokens[:n],
                valid,
                self.ledger.scope_of(sequence.namespace),
            )
        names = [sequence.request.request_id for sequence in sequences]
        self.ledger.keep_readers(names)
        self.donors_of = {name: donors for name, donors in self.donors_of.items() if name in names}

    def check_empty(self):
        """Check that nothing is left once nobody is served and all was flushed."""
        while self.holds:
            self.cache.unlock(self.holds.pop())
        self.flush(None)
        self.check()
        assert self.pool.free_slots == self.pool.capacity, "slots are lost"
        assert not self.cache.held, "locks are left"
        assert self.registry is None or len(self.registry) == self.registry.store.namespaces == 0


@dataclass(eq=False)
class OpenRequest:
    """A request of the core host."""

    sequence: Sequence
    donors: ExitStack = field(default_factory=ExitStack)
    """The lock on its donors, until their rows are copied."""
    carried_out: bool = False


class CoreHost(Host):
    """Requests in every state beside each other, over the core alone."""

    scopes = (
        Namespace(),
        Namespace(tenant="a"),
        Namespace(cache_salt="a"),
        Namespace(tenant="a", cache_salt="a"),
        Namespace(extra_key="a"),
        Namespace(lora="a"),
    )
    most_open = 5

    def start(self, rng):
        settings = self.settings
        self.ledger = Ledger(settings.slots)
        self.pool = SlotPool(settings.slots, settings.page_size)
        self.registry = settings.make_registry(self.ledger)
        self.cache = WatchedCache(
            self.ledger, self.counts, settings.slots, page_size=settings.page_size, listener=self.registry
        )
        self.mode = settings.mode
        self.policy = settings.draw_policy(rng)
        self.open = []

    def running(self):
        return [request.sequence for request in self.open]

    def submit(self, rng, scope, tokens):
        """Match, search and plan; locks stay, nothing is allocated yet."""
        if len(self.open) >= self.most_open:
            return
        request = self.new_request(scope, tokens, rng)
        sequence = Sequence(request, scope, request.mode or self.mode, SamplingState(request.sampling))
        derived = sequence.mode is Mode.LIVE and self.policy.approximate_prefix
        match = self.cache.match(scope, sequence.prompt[:-1], derived=derived)
        self.cache.lock(match.node)
        sequence.node = match.node
        prefix, approximate = len(match.slots), len(match.derived_slots)
        searches = sequence.mode is not Mode.OFF
        runs = self.registry.find(scope, sequence.prompt, prefix + approximate) if searches else []
        sequence.plan = make_plan(
            len(sequence.prompt),
            prefix=prefix,
            approximate_prefix=approximate,
            runs=runs if sequence.mode is Mode.LIVE else [],
            policy=self.policy,
            # Log probabilities of the prompt are wanted: an engine with pages of one row can cut a match anywhere.
            reuse_limit=rng.randrange(len(tokens) + 1) if self.pool.page_size == 1 and rng.random() < 0.1 else None,
        )
        tail = sequence.plan.tokens(SegmentKind.PREFIX) + sequence.plan.tokens(SegmentKind.APPROXIMATE_PREFIX)
        sequence.hold(np.concatenate([match.slots, match.derived_slots])[:tail])
        opened = OpenRequest(sequence)
        donors = [run.slots for run in sequence.plan.runs]
        opened.donors.enter_context(self.cache.lock_rows(np.concatenate([match.slots[:0], *donors])))
        self.count_plan(sequence)
        self.open.append(opened)

    def advance(self, rng):
        """Bring one request a step further; return its text when it ends."""
        if not self.open:
            return None
        request = rng.choice(self.open)
        sequence = request.sequence
        if not request.carried_out:
            self._carry_out(request)
        elif len(sequence.pending):
            self._compute(sequence, rng.choice([1, 3, 50]) * self.settings.unit)
        else:
            return self._decode(request)
        return None

    def finish(self, rng):
        """End a decoding request early, as a stop string does."""
        decoding = [request for request in self.open if request.sequence.output]
        if not decoding:
            return None
        self.counts["stopped"] += 1
        return self._finish(rng.choice(decoding))

    def publish(self, rng):
        """Publish a request's rows while it is at work, in the middle of its prefill or behind it."""
        request = rng.choice(self.open) if self.open else None
        if request is None or not request.carried_out:
            return
        pending = request.sequence.pending
        self._publish(request.sequence, int(pending[0]) if len(pending) else request.sequence.n_rows)
        self.counts["publications in the middle of a prefill"] += len(pending) > 0

    def hang_up(self, rng):
        """A client goes away."""
        if not self.open:
            return
        request = rng.choice(self.open)
        sequence = request.sequence
        state = "a decode" if sequence.output else "a prefill" if request.carried_out else "an open plan"
        self.counts[f"hang-ups in {state}"] += 1
        self._release(request)

    def change_mode(self, rng):
        """Later requests run in another mode."""
        self.mode = rng.choice([*MODES, Mode.LIVE])

    def reload(self, rng):
        """Later plans follow another policy."""
        self.policy = self.settings.draw_policy(rng)

    def drain(self, rng):
        """Serve everybody to the end."""
        while self.open:
            self.advance(rng)

    def close(self):
        """Everybody hangs up."""
        while self.open:
            self._release(self.open[0])
        self.check_empty()

    def check(self):
        parts = [self.pool.free_list(), self.cache.owned()]
        parts += [sequence.slots[sequence.owned] for sequence in self.running()]
        counts = np.bincount(np.concatenate(parts), minlength=self.pool.capacity)
        assert (counts == 1).all(), "a slot has no owner or two"
        super().check()

    def _carry_out(self, request):
        sequence = request.sequence
        plan = sequence.plan
        slots = self._allocate(len(sequence.prompt) - len(sequence.slots))
        if slots is None and plan.runs:
            self._decline(request)
            return
        if slots is None:
            self.counts["requests without room"] += 1
            self._release(request)
            return
        sequence.take(slots)
        for run in plan.runs:
            at = torch.arange(run.start, run.end)
            move_rows(
                self.ledger.pool_LSW,
                LAYOUT,
                ROPE,
                torch.from_numpy(run.slots),
                torch.from_numpy(sequence.slots[run.start : run.end]),
                at - run.delta,
                at,
            )
            self.ledger.check_copy(sequence.slots, run)
        request.donors.close()
        request.carried_out = True
        sequence.pending = plan.computed_positions()

    def _decline(self, request):
        """Let go of donors that do not fit beside the request."""
        plan = request.sequence.plan
        self.counts["plans declined"] += 1
        request.donors.close()
        request.sequence.plan = make_plan(
            plan.n_tokens,
            prefix=plan.tokens(SegmentKind.PREFIX),
            approximate_prefix=plan.tokens(SegmentKind.APPROXIMATE_PREFIX),
            policy=self.policy,
        )

    def _compute(self, sequence, count):
        positions, sequence.pending = sequence.pending[:count], sequence.pending[count:]
        self.ledger.compute(sequence.slots, sequence.prompt, positions, self.ledger.scope_of(sequence.namespace))
        if len(sequence.pending) == 0:
            self._publish(sequence, len(sequence.prompt))
            sequence.output.append(self.ledger.next_token(sequence.slots[len(sequence.prompt) - 1]))

    def _decode(self, request):
        sequence = request.sequence
        if sequence.output[-1] == END or len(sequence.output) >= sequence.request.sampling.max_tokens:
            self.counts["requests served"] += 1
            return self._finish(request)
        position = sequence.n_rows
        if position == len(sequence.slots):
            slots = self._allocate(1)
            if slots is None:
                self.counts["requests without room"] += 1
                return self._finish(request)
            sequence.take(slots)
        scope = self.ledger.scope_of(sequence.namespace)
        self.ledger.compute(sequence.slots, sequence.tokens, np.array([position]), scope)
        sequence.output.append(self.ledger.next_token(sequence.slots[position]))
        return None

    def _allocate(self, count):
        needed = self.pool.pages(count) * self.pool.page_size
        if needed > self.pool.free_slots:
            self.pool.free(self.cache.evict(needed - self.pool.free_slots))
        return self.pool.allocate(count)

    def _publish(self, sequence, n_rows):
        tokens, slots = sequence.tokens[:n_rows], sequence.slots[:n_rows]
        insertion = self.cache.insert(sequence.namespace, tokens, slots, exact_end=sequence.exact_end)
        self.cache.lock(insertion.node)
        self.cache.unlock(sequence.node)
        sequence.node = insertion.node
        self.pool.free(sequence.exchange(insertion.slots))

    def _finish(self, request):
        sequence = request.sequence
        self._publish(sequence, sequence.n_rows)
        self._release(request)
        return sequence.namespace, sequence.tokens.tolist()

    def _release(self, request):
        request.donors.close()
        self.pool.free(request.sequence.slots[request.sequence.owned])
        self.cache.unlock(request.sequence.node)
        self.open.remove(request)


class LedgerModel:
    """Stands in for the model of an engine: it has its pool in a ledger, and its logits name one token."""

    layout = LAYOUT
    config = SimpleNamespace(max_position_embeddings=POSITIONS, eos_token_ids=(END,), vocab_size=VOCABULARY, rope=ROPE)

    def __init__(self, host):
        self._host = host
        self.computed = Counter()

    def new_pool(self, n_slots):
        """Return an empty pool."""
        self.ledger = Ledger(n_slots)
        return self.ledger.pool_LSW

    def forward(self, batch, pool_LSW):
        """Compute a batch; each span must be what its sequence wants to be computed, into slots of its own."""
        sequences = self._host.running()
        self._host.before_forward()
        slots, positions = batch.out_slots_T.numpy(), batch.positions_T.numpy()
        for span, sequence in zip(batch.spans, sequences, strict=True):
            part = slice(span.start, span.end)
            here, keys = positions[part], span.key_slots_S.numpy()
            assert (keys == sequence.slots[: len(keys)]).all(), "a span reads the slots of another request"
            assert (slots[part] == keys[here]).all(), "a row is written where nobody reads it"
            assert sequence.owned[here].all(), "a row is written to a slot that is not the request's own"
            assert (batch.token_ids_T.numpy()[part] == sequence.tokens[here]).all(), "a token of another request"
            scope = self.ledger.scope(sequence.request.tenant, sequence.request.cache_salt, "", "")
            self.ledger.compute(keys, sequence.tokens, here, scope)
            self.computed[sequence.request.request_id] += len(here)
        logits = torch.zeros(len(batch.logit_rows_N), VOCABULARY)
        for i, row in enumerate(batch.logit_rows_N.tolist()):
            logits[i, self.ledger.next_token(slots[row])] = 1.0
        return logits


class EngineHost(Host):
    """The embedded engine with a ledger for a model."""

    scopes = CoreHost.scopes[:4]

    def start(self, rng):
        settings = self.settings
        config = EngineConfig(
            mode=settings.mode,
            pool_slots=settings.slots,
            page_size=settings.page_size,
            matcher=settings.matcher,
            special_tokens=(END + 1,),
        )
        self._model = LedgerModel(self)
        self.engine = Engine(self._model, config)
        self.ledger = self._model.ledger
        self.registry = None if settings.mode is Mode.OFF else settings.make_registry(self.ledger)
        self.cache = WatchedCache(
            self.ledger, self.counts, settings.slots, page_size=settings.page_size, listener=self.registry
        )
        self.engine._registry, self.engine._cache = self.registry, self.cache
        self.pool = self.engine._pool
        self._requests = {}
        self._planned = None
        self.reload(rng)

    def running(self):
        return self.engine._running()

    def submit(self, rng, scope, tokens):
        """Queue a request, or be refused."""
        request = self.new_request(scope, tokens, rng)
        try:
            self.engine.submit(request)
        except OverloadedError:
            self.counts["refused: the queue is full"] += 1
        except InputError:
            self.counts["refused: mode above the server's"] += 1
        else:
            self._requests[request.request_id] = (scope, request, [])

    def advance(self, rng):
        """Run one step; return the text of a request that ended."""
        ended = None
        for output in self.engine.step():
            scope, request, tokens = self._requests[output.request_id]
            tokens.append(output.token_id)
            if output.usage is not None:
                self._check_usage(output.request_id, output.usage)
            if output.finish_reason is not None:
                self.counts["requests served"] += 1
                ended = scope, [*request.token_ids, *tokens]
                del self._requests[output.request_id]
        return ended

    def finish(self, rng):
        """A stop string was met in a decoding request."""
        decoding = self.engine._decoding
        if not decoding:
            return None
        name = rng.choice(decoding).request.request_id
        self.engine.stop(name)
        self.counts["stopped"] += 1
        scope, request, tokens = self._requests.pop(name)
        return scope, [*request.token_ids, *tokens]

    def publish(self, rng):
        """Publish a decoding request's rows before it ends."""
        if self.engine._decoding:
            sequence = rng.choice(self.engine._decoding)
            self.engine._publish(sequence, sequence.n_rows)

    def hang_up(self, rng):
        """A client goes away."""
        if not self._requests:
            return
        name = rng.choice(list(self._requests))
        prefilling = self.engine._prefilling
        if prefilling is not None and prefilling.request.request_id == name:
            state = "a prefill"
        else:
            state = "a decode" if any(name == one.request.request_id for one in self.running()) else "the queue"
        self.counts[f"hang-ups in {state}"] += 1
        self.engine.abort(name)
        del self._requests[name]

    def flush(self, rng):
        self.engine.flush()

    def namespace(self, scope):
        return replace(scope, row_format=LAYOUT.fingerprint, rope=ROPE.fingerprint)

    def may_hold(self):
        # As the engine's own admission: what is promised to running requests must stay evictable.
        return self.engine._room() >= self.engine._promised()

    def change_mode(self, rng):
        """Later requests run in another mode; an engine started in ``off`` has no registry and stays so."""
        if self.registry is not None:
            self.engine.mode = rng.choice([*MODES, Mode.LIVE])

    def reload(self, rng):
        """Everything of the configuration that sizes no memory changes."""
        self.engine.config = replace(
            self.engine.config,
            policy=self.settings.draw_policy(rng),
            prefill_chunk=rng.choice([1, 3, 7, 50]) * self.settings.unit,
            max_running=rng.randrange(1, 5),
            max_waiting=rng.randrange(2, 6),
        )

    def drain(self, rng):
        """Serve everybody to the end."""
        while self.holds:
            self.let_go(rng)
        for _ in range(10_000):
            if not self.engine.has_work:
                return
            self.advance(rng)
        raise AssertionError("a request is stuck")

    def close(self):
        """Everybody hangs up."""
        for name in list(self._requests):
            self.engine.abort(name)
        self._requests.clear()
        assert not self.engine.has_work
        self.check_empty()

    def before_forward(self):
        """Look at a plan that was just carried out: the rows it copied, before anything else is written."""
        sequence = self.engine._prefilling
        if sequence is None or sequence is self._planned:
            return
        self._planned = sequence
        self.count_plan(sequence)
        for run in sequence.plan.runs:
            self.ledger.check_copy(sequence.slots, run)

    def check(self):
        self.engine.check_ownership()
        super().check()
        self.counts["plans declined"] += self.engine._declined_plans
        self.engine._declined_plans = 0

    def _check_usage(self, name, usage):
        parts = usage.prefix + usage.approximate_prefix + usage.shifted + usage.computed
        assert parts == usage.prompt_tokens, "the token classes do not add up"
        assert self._model.computed.pop(name) == usage.computed, "other tokens were computed than are reported"
