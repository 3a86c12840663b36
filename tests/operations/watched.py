"""The cache and the registry, watched: whatever they are told and whatever they answer is checked with the ledger."""

from collections import Counter
from contextlib import contextmanager

import numpy as np
from ledger import Kind

from irminsul.radix_cache import RadixCache
from irminsul.registry import Registry


class WatchedRegistry(Registry):
    """A registry whose every answer is checked."""

    def __init__(self, ledger, capacity, **arguments):
        super().__init__(capacity, **arguments)
        self._ledger = ledger

    def find(self, namespace, tokens, start):
        """Search; runs must be live exact rows of the namespace, ascending and disjoint."""
        runs = super().find(namespace, tokens, start)
        cursor = start
        for run in runs:
            assert cursor <= run.start < run.end <= len(tokens), "runs overlap or leave the prompt"
            cursor = run.end
            self._ledger.check_run(run, tokens, self._ledger.scope_of(namespace))
        return runs

    def check(self):
        """Exactly the exact rows of the tree are live, as what they are, and nothing else is indexed."""
        ledger, arrays = self._ledger, self.store.arrays
        exact = ledger.kind == Kind.EXACT
        assert np.array_equal(arrays.namespace >= 0, exact), "the registry has a dead row, or lacks a live one"
        assert np.array_equal(arrays.token[exact], ledger.shadow.token[exact]), "the registry has another token"
        assert np.array_equal(arrays.position[exact], ledger.shadow.position[exact]), "... another position"
        names = self.store._names
        scopes = {number: ledger.scope_of(namespace) for number, namespace in names.items()}
        numbers = arrays.namespace[exact]
        table = np.full(max(names, default=0) + 1, -1)
        table[list(scopes)] = list(scopes.values())
        assert np.array_equal(table[numbers], ledger.shadow.scope[exact]), "the registry has another namespace"
        for index in self._indexes():
            assert exact[index.arrays.fingerprint != 0].all(), "a fingerprint of a dead row is left"

    def _indexes(self):
        return getattr(self.matcher, "_indexes", None) or [self.matcher._index]


class WatchedCache(RadixCache):
    """A prefix cache that publishes in the ledger, and knows independently what is locked by whom."""

    def __init__(self, ledger, counts, capacity, *, page_size, listener):
        super().__init__(capacity, page_size=page_size, listener=listener)
        self.held = []
        self.open_donors = {}
        self._ledger = ledger
        self._counts = counts

    def match(self, namespace, tokens, *, derived=False):
        """Match; the rows must be those of the tokens, the exact ones computed behind exactly them."""
        match = super().match(namespace, tokens, derived=derived)
        ledger, exact = self._ledger, len(match.slots)
        slots = np.concatenate([match.slots, match.derived_slots])
        scope = ledger.scope_of(namespace)
        rows = ledger.rows(slots)
        ledger.expect(rows, tokens[: len(slots)], scope, slice(None), "a match gives")
        assert (ledger.kind[slots[:exact]] == Kind.EXACT).all(), "a lossless match gives a derived row"
        assert (ledger.kind[slots[exact:]] == Kind.DERIVED).all(), "exact rows are given as derived ones"
        assert derived or len(match.derived_slots) == 0, "derived rows are given to one who did not ask for them"
        return match

    def insert(self, namespace, tokens, slots, *, exact_end):
        """Insert and publish."""
        insertion = super().insert(namespace, tokens, slots, exact_end=exact_end)
        exact_end = exact_end // self.page_size * self.page_size
        scope = self._ledger.scope_of(namespace)
        self._ledger.publish(insertion.slots, tokens[: len(insertion.slots)], scope, exact_end)
        self._counts["publications"] += 1
        return insertion

    def lock(self, node):
        """Lock, and remember what must stay."""
        super().lock(node)
        if node is not None:
            path = [above.slots for above in self._upward(node)]
            self.held.append((node, np.concatenate(path)))

    def unlock(self, node):
        """Undo one lock."""
        super().unlock(node)
        if node is not None:
            at = next(i for i, (held, _) in enumerate(self.held) if held is node)
            del self.held[at]

    @contextmanager
    def lock_rows(self, slots):
        """Lock donors, and remember that they must stay."""
        with super().lock_rows(slots):
            shared = any(np.isin(slots, others).any() for others in self.open_donors.values())
            self._counts["open plans with a donor in common"] += shared
            key = object()
            self.open_donors[key] = slots
            try:
                yield
            finally:
                del self.open_donors[key]

    def evict(self, n_slots):
        """Evict; nothing that anybody holds or copies from may go."""
        freed = super().evict(n_slots)
        self._ledger.forget(freed)
        gone = np.zeros(self.capacity, dtype=np.bool_)
        gone[freed] = True
        assert not any(gone[slots].any() for _, slots in self.held), "a locked row was evicted"
        assert not any(gone[slots].any() for slots in self.open_donors.values()), "a donor of an open plan was evicted"
        self._counts["evictions"] += len(freed) > 0
        self._counts["slots evicted"] += len(freed)
        open_plan = any(len(slots) for slots in self.open_donors.values())
        self._counts["evictions with an open plan"] += len(freed) > 0 and open_plan
        return freed

    def owned(self):
        """Check everything the tree and the registry say; see RadixCache.owned."""
        slots = super().owned()
        held = Counter(above.node_id for node, _ in self.held for above in self._upward(node))
        for node in self._nodes.values():
            assert node.locks == held[node.node_id], f"{node.locks} locks on a node that {held[node.node_id]} hold"
        self._check_rows([node for node in self._nodes.values() if node.parent is not None])
        if self._listener is not None:
            self._listener.check()
        return slots

    def _check_rows(self, nodes):
        if not nodes:
            return
        scope_of = self._ledger.scope_of
        lengths = np.array([len(node.slots) for node in nodes])
        ends = np.array([node.end for node in nodes])
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self._ledger.check_cached(
            np.concatenate([node.slots for node in nodes]),
            np.concatenate([node.tokens for node in nodes]),
            np.repeat(ends - lengths, lengths) + within,
            np.repeat([scope_of(node.namespace) for node in nodes], lengths),
            np.repeat([Kind.DERIVED if node.derived else Kind.EXACT for node in nodes], lengths),
        )

    def _split(self, node, at):
        self._counts["splits"] += 1
        self._counts["splits of a locked node"] += node.locks > 0
        return super()._split(node, at)
