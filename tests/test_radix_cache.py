"""The prefix cache against a model that is nothing but a dictionary of slots."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from irminsul.errors import InputError
from irminsul.namespace import Namespace
from irminsul.radix_cache import Insertion, Node, RadixCache
from irminsul.registry import Registry
from irminsul.slot_pool import SlotPool

NS = Namespace(tenant="a")
OTHER = Namespace(tenant="b")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def fill(
    cache: RadixCache, tokens: np.ndarray, first_slot: int, exact_end: int | None = None, ns: Namespace = NS
) -> Insertion:
    slots = np.arange(first_slot, first_slot + len(tokens), dtype=np.int32)
    return cache.insert(ns, tokens, slots, exact_end=len(tokens) if exact_end is None else exact_end)


def test_the_longest_prefix_is_found_and_nothing_more() -> None:
    cache = RadixCache(100)
    fill(cache, ids(1, 2, 3, 4, 5), 0)
    assert cache.match(NS, ids(1, 2, 3, 9)).slots.tolist() == [0, 1, 2]
    assert cache.match(NS, ids(1, 2, 3, 4, 5, 6)).slots.tolist() == [0, 1, 2, 3, 4]
    assert cache.match(NS, ids(2, 3)).slots.tolist() == []
    assert cache.match(OTHER, ids(1, 2, 3)).slots.tolist() == []


def test_the_tree_keeps_its_own_rows_for_tokens_it_has() -> None:
    cache = RadixCache(100)
    fill(cache, ids(1, 2, 3), 0)
    insertion = fill(cache, ids(1, 2, 7, 8), 10)
    assert insertion.slots.tolist() == [0, 1, 12, 13]
    assert cache.match(NS, ids(1, 2, 7, 8)).slots.tolist() == [0, 1, 12, 13]


def test_pages_cut_matches_and_insertions_down() -> None:
    cache = RadixCache(100, page_size=4)
    insertion = fill(cache, ids(*range(10)), 0)
    assert insertion.slots.tolist() == list(range(8))
    assert len(cache.match(NS, ids(*range(7))).slots) == 4
    fill(cache, ids(0, 1, 2, 3, 4, 5, 99, 99), 20)
    assert cache.match(NS, ids(0, 1, 2, 3, 4, 5, 99, 99)).slots.tolist() == [0, 1, 2, 3, 24, 25, 26, 27]


def test_derived_rows_are_met_only_when_asked_for() -> None:
    registry = Registry(1000, seed=1)
    cache = RadixCache(1000, listener=registry)
    tokens = ids(*range(200))
    fill(cache, tokens, 0, exact_end=120)
    plain, asked = cache.match(NS, tokens), cache.match(NS, tokens, derived=True)
    assert len(plain.slots) == 120
    assert len(plain.derived_slots) == 0
    assert (len(asked.slots), asked.derived_slots.tolist()) == (120, list(range(120, 200)))
    assert registry.store.live == 120, "derived rows are no donors"


def test_exact_rows_win_over_derived_ones_of_the_same_text() -> None:
    cache = RadixCache(1000)
    tokens = ids(*range(100))
    fill(cache, tokens, 0, exact_end=40)
    fill(cache, tokens, 200)
    match = cache.match(NS, tokens, derived=True)
    assert match.slots.tolist() == [*range(40), *range(240, 300)]
    assert match.derived_slots.tolist() == []


def test_a_match_lies_on_one_path_so_that_its_lock_keeps_all_of_it() -> None:
    cache = RadixCache(1000)
    tokens = ids(*range(100))
    fill(cache, tokens, 0, exact_end=40)
    fill(cache, tokens[:70], 200)
    match = cache.match(NS, tokens, derived=True)
    assert match.slots.tolist() == list(range(40)), "the exact rows 40..70 lie on another branch than what follows"
    assert match.derived_slots.tolist() == list(range(40, 100))
    cache.lock(match.node)
    assert cache.locked_slots == 100
    assert sorted(cache.evict(1000).tolist()) == list(range(240, 270))
    cache.unlock(match.node)


def test_a_session_grows_behind_its_derived_rows() -> None:
    cache = RadixCache(1000)
    tokens = ids(*range(90))
    fill(cache, tokens[:50], 0, exact_end=20)
    match = cache.match(NS, tokens, derived=True)
    slots = np.concatenate([match.slots, match.derived_slots, np.arange(300, 340, dtype=np.int32)])
    insertion = cache.insert(NS, tokens, slots, exact_end=20)
    assert insertion.slots.tolist() == [*range(50), *range(300, 340)]
    again = cache.match(NS, tokens, derived=True)
    assert (len(again.slots), len(again.derived_slots)) == (20, 70)
    assert cache.derived_slots == 70


def test_least_recently_used_text_goes_first_and_from_its_end() -> None:
    cache = RadixCache(100)
    fill(cache, ids(1, 2, 3, 4), 0)
    fill(cache, ids(5, 6, 7, 8), 10)
    cache.match(NS, ids(1, 2, 3, 4))
    assert cache.evict(2).tolist() == [12, 13]
    assert cache.evict(3).tolist() == [10, 11, 3]
    assert cache.match(NS, ids(1, 2, 3, 4)).slots.tolist() == [0, 1, 2]


def test_locked_rows_stay() -> None:
    cache = RadixCache(100)
    fill(cache, ids(1, 2, 3, 4), 0)
    match = cache.match(NS, ids(1, 2))
    cache.lock(match.node)
    assert cache.evict(100).tolist() == [2, 3]
    assert cache.evict(100).tolist() == []
    cache.unlock(match.node)
    assert cache.evict(100).tolist() == [0, 1]
    assert cache.owned().tolist() == []


def test_donors_stay_while_their_rows_are_read() -> None:
    cache = RadixCache(100)
    fill(cache, ids(1, 2, 3, 4), 0)
    fill(cache, ids(5, 6, 7, 8), 10)
    with cache.lock_rows(ids(11, 12)):
        assert sorted(cache.evict(100).tolist()) == [0, 1, 2, 3]
    assert cache.evict(100).tolist() == [10, 11, 12, 13]


def test_donors_on_several_branches_stay_and_a_path_is_locked_once_however_it_is_cut() -> None:
    cache = RadixCache(100)
    fill(cache, ids(1, 2, 3, 4, 5, 6), 0)
    for slot, end in ((10, 1), (20, 2), (30, 4)):  # cuts the path into nodes
        fill(cache, ids(*range(1, end + 1), 90 + slot), slot)
    top = cache.match(NS, ids(1)).node
    assert top is not None
    branch = int(cache.match(NS, ids(1, 2, 3, 4, 120)).slots[-1])
    with cache.lock_rows(ids(0, 1, 2, 3, 4, 5, branch)):
        assert top.locks == 2, "one for each lowest node"
        left = cache.evict(100).tolist()
        assert sorted(cache.owned().tolist()) == sorted([0, 1, 2, 3, 4, 5, branch])
        assert not {0, 1, 2, 3, 4, 5, branch} & set(left)
    assert top.locks == 0
    cache.evict(100)
    assert cache.owned().tolist() == []


def test_being_a_donor_counts_as_use() -> None:
    cache = RadixCache(100)
    fill(cache, ids(1, 2), 0)
    fill(cache, ids(5, 6), 10)
    with cache.lock_rows(ids(0)):
        pass
    assert cache.evict(2).tolist() == [10, 11]


def test_unlocking_twice_is_an_error() -> None:
    cache = RadixCache(100)
    fill(cache, ids(1, 2), 0)
    match = cache.match(NS, ids(1, 2))
    cache.lock(match.node)
    cache.unlock(match.node)
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(match.node)


def test_inserting_a_slot_twice_is_an_error() -> None:
    cache = RadixCache(100)
    fill(cache, ids(1, 2), 0)
    with pytest.raises(AssertionError, match="again"):
        fill(cache, ids(7, 8), 0)


def test_many_matches_do_not_grow_the_eviction_heap_without_bound() -> None:
    cache = RadixCache(100)
    fill(cache, ids(1, 2, 3), 0)
    for _ in range(20_000):
        cache.match(NS, ids(1, 2, 3))
    assert len(cache._leaves) < 3000


@pytest.mark.parametrize(("capacity", "page"), [(0, 1), (10, 4), (8, 0), (3, 4)])
def test_a_pool_that_does_not_divide_into_pages_is_refused(capacity: int, page: int) -> None:
    with pytest.raises(InputError, match="multiple"):
        SlotPool(capacity, page)


def test_pool_pages_come_back_whole() -> None:
    pool = SlotPool(12, 4)
    slots = pool.allocate(5)
    assert slots is not None
    assert len(slots) == 8
    assert pool.free_slots == 4
    assert pool.allocate(5) is None
    with pytest.raises(AssertionError, match="part of a page"):
        pool.free(slots[:5])
    pool.free(slots)
    assert sorted(pool.free_list().tolist()) == list(range(12))
    with pytest.raises(AssertionError, match="more pages"):
        pool.free(slots)


class CacheMachine(RuleBasedStateMachine):
    """Random requests over a small pool. After every step each slot has exactly one owner and holds what it should."""

    @initialize(page=st.sampled_from([1, 1, 3]))
    def start(self, page: int) -> None:
        self.page = page
        self.pool = SlotPool(60, page)
        self.registry = Registry(60, matcher="winnow32", seed=1)
        self.cache = RadixCache(60, page_size=page, listener=self.registry)
        self.rows: dict[int, tuple[Namespace, tuple[int, ...], bool]] = {}
        self.locked: list[tuple[Node, list[int]]] = []

    def take(self, count: int) -> np.ndarray | None:
        needed = self.pool.pages(count) * self.page
        if needed > self.pool.free_slots:
            self.give(self.cache.evict(needed - self.pool.free_slots))
        return self.pool.allocate(count)

    def give(self, slots: np.ndarray) -> None:
        held = {slot for _, kept in self.locked for slot in kept}
        assert not held & set(slots.tolist()), "a locked row was evicted"
        for slot in slots.tolist():
            self.rows.pop(slot, None)
        self.pool.free(slots)

    @rule(
        ns=st.sampled_from([NS, OTHER]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        derived=st.booleans(),
        shifted_at=st.none() | st.integers(0, 30),
        keep=st.booleans(),
    )
    def serve(self, ns: Namespace, tokens: list[int], derived: bool, shifted_at: int | None, keep: bool) -> None:
        array = ids(*tokens)
        match = self.cache.match(ns, array[:-1], derived=derived)
        held = np.concatenate([match.slots, match.derived_slots])
        for i, slot in enumerate(held.tolist()):
            assert self.rows[slot] == (ns, tuple(tokens[: i + 1]), i >= len(match.slots))
        self.cache.lock(match.node)
        new = self.take(len(tokens) - len(held))
        if new is None:
            self.cache.unlock(match.node)
            return
        slots = np.concatenate([held, new])
        exact = len(tokens) if shifted_at is None else max(shifted_at, len(held))
        exact = len(match.slots) if len(match.derived_slots) else exact
        insertion = self.cache.insert(ns, array, slots[: len(tokens)], exact_end=exact)
        self.cache.lock(insertion.node)
        self.cache.unlock(match.node)
        whole, whole_exact = len(insertion.slots), exact // self.page * self.page
        taken = np.zeros(len(slots), dtype=np.bool_)
        taken[:whole] = insertion.slots == slots[:whole]
        for i, slot in enumerate(insertion.slots.tolist()):
            row = (ns, tuple(tokens[: i + 1]), i >= whole_exact)
            assert self.rows.setdefault(slot, row) == row, "the tree holds another row than it says"
        self.pool.free(slots[(np.arange(len(slots)) >= len(held)) & ~taken])
        if keep:
            self.locked.append((insertion.node, insertion.slots.tolist()))
        else:
            self.cache.unlock(insertion.node)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        node, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.unlock(node)

    @rule(count=st.integers(1, 20))
    def evict(self, count: int) -> None:
        room = self.cache.cached_slots - self.cache.locked_slots
        freed = self.cache.evict(count)
        assert len(freed) >= min(count, room)
        self.give(freed)

    @rule()
    def flush(self) -> None:
        self.give(self.cache.flush())

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        owned = self.cache.owned()
        assert set(owned.tolist()) == set(self.rows)
        both = np.concatenate([owned, self.pool.free_list()])
        assert sorted(both.tolist()) == list(range(60))
        assert self.registry.store.live == sum(not derived for _, _, derived in self.rows.values())


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
