"""The slot store against a dictionary model, whatever is added and dropped in whatever order."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from irminsul.matching.slot_store import MAX_SIBLINGS, SlotStore, donor_slots, following_slot, tokens_end_at
from irminsul.namespace import Namespace

CAPACITY = 60
NAMESPACES = [Namespace(), Namespace(tenant="a"), Namespace(cache_salt="a")]
SCOPE = NAMESPACES[0]


class SlotStoreMachine(RuleBasedStateMachine):
    """Each live slot is a row of the model: namespace, token, position, previous slot; children newest first."""

    def __init__(self):
        super().__init__()
        self.store = SlotStore(CAPACITY)
        self.rows = {}
        self.children = {}

    def free(self):
        return [slot for slot in range(CAPACITY) if slot not in self.rows]

    def path(self, slot):
        """Return the slots from position 0 to ``slot``, or None where a freed row is missing."""
        path = []
        while slot is not None:
            path.append(slot)
            slot = self.rows[slot][3]
        return path[::-1] if self.rows[path[-1]][2] == 0 else None

    @precondition(lambda self: self.free())
    @rule(
        data=st.data(),
        namespace=st.sampled_from(NAMESPACES),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    )
    def add(self, data, namespace, tokens):
        ends = [slot for slot in self.rows if self.rows[slot][0] == namespace and self.path(slot)]
        parent = data.draw(st.sampled_from([None, *ends]))
        path = self.path(parent) if parent is not None else []
        new = data.draw(st.permutations(self.free()))[: len(tokens)]
        held = [self.rows[slot][1] for slot in path]
        for offset, slot in enumerate(new):
            previous = new[offset - 1] if offset else parent
            self.rows[slot] = (namespace, tokens[offset], len(path) + offset, previous)
            self.children[slot] = []
            if previous is not None:
                self.children[previous].insert(0, slot)
        number = self.store.add(
            namespace,
            np.array(held + tokens[: len(new)], dtype=np.int32),
            np.array(path + new, dtype=np.int32),
            len(path),
        )
        assert number == self.store.namespace_id(namespace)

    @rule(slots=st.sets(st.integers(0, CAPACITY - 1), max_size=20), backwards=st.booleans())
    def drop(self, slots, backwards):
        order = sorted(slots, reverse=backwards)
        self.store.drop(np.array(order, dtype=np.int32))
        for slot in slots & set(self.rows):
            _, _, _, previous = self.rows.pop(slot)
            if previous is not None and previous in self.rows:
                self.children[previous].remove(slot)
            for child in self.children.pop(slot):
                if child in self.rows:
                    self.rows[child] = (*self.rows[child][:3], None)

    @rule(tail=st.integers(1, 6))
    def drop_the_end_of_a_text(self, tail):
        leaves = [slot for slot in self.rows if not self.children[slot]]
        if leaves:
            path = self.path(leaves[-1]) or leaves[-1:]
            ends = [slot for slot in path[-tail:] if len(self.children[slot]) <= 1]
            self.drop(set(ends), backwards=False)

    @invariant()
    def columns_agree(self):
        arrays = self.store.arrays
        assert set(np.flatnonzero(arrays.namespace >= 0).tolist()) == set(self.rows)
        assert self.store.live == len(self.rows)
        for slot, (namespace, token, position, previous) in self.rows.items():
            assert arrays.namespace[slot] == self.store.namespace_id(namespace)
            assert (arrays.token[slot], arrays.position[slot]) == (token, position)
            assert arrays.previous[slot] == (-1 if previous is None else previous)
            chain = []
            child = int(arrays.child[slot])
            while child >= 0:
                chain.append(child)
                child = int(arrays.sibling[child])
            assert chain == self.children[slot]

    @invariant()
    def namespaces_live_as_long_as_their_rows(self):
        populated = {row[0] for row in self.rows.values()}
        numbers = [self.store.namespace_id(namespace) for namespace in populated]
        assert self.store.namespaces == len(populated)
        assert None not in numbers
        assert len(set(numbers)) == len(numbers)
        assert all(self.store.namespace_id(namespace) is None for namespace in set(NAMESPACES) - populated)

    @invariant()
    def walks_agree(self):
        arrays = self.store.arrays
        for slot, (namespace, *_rest) in self.rows.items():
            for token in range(3):
                near = self.children[slot][:MAX_SIBLINGS]
                expected = next((child for child in near if self.rows[child][1] == token), -1)
                assert following_slot(arrays, slot, token) == expected
            back = [slot]
            while self.rows[back[-1]][3] is not None:
                back.append(self.rows[back[-1]][3])
            path = back[::-1]
            tokens = np.array([self.rows[step][1] for step in path], dtype=np.int32)
            number = self.store.namespace_id(namespace)
            length = len(path)
            assert donor_slots(arrays, slot, length).tolist() == path
            assert tokens_end_at(arrays, slot, tokens, length, length, number)
            assert not tokens_end_at(arrays, slot, tokens, length, length, number + 1)
            longer = np.concatenate([[0], tokens]).astype(np.int32)
            assert not tokens_end_at(arrays, slot, longer, length + 1, length + 1, number)
            tokens[0] += 1
            assert not tokens_end_at(arrays, slot, tokens, length, length, number)


SlotStoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestSlotStore = SlotStoreMachine.TestCase


def tokens_of(*ids):
    return np.array(ids, dtype=np.int32)


def test_a_dead_slot_ends_every_walk():
    store = SlotStore(8)
    number = store.add(SCOPE, tokens_of(5, 6, 7), tokens_of(0, 1, 2), 0)
    store.drop(tokens_of(2))
    assert following_slot(store.arrays, 1, 7) == -1
    assert not tokens_end_at(store.arrays, 2, tokens_of(5, 6, 7), 3, 3, number)


def test_a_continuation_behind_many_newer_ones_is_not_looked_for():
    """The bound on the work at a popular branching point is a limit, and a stated one."""
    store = SlotStore(40)
    store.add(SCOPE, tokens_of(1, 100), tokens_of(0, 1), 0)
    for i in range(MAX_SIBLINGS - 1):
        store.add(SCOPE, tokens_of(1, 200 + i), tokens_of(0, 2 + i), 1)
    assert following_slot(store.arrays, 0, 100) == 1
    store.add(SCOPE, tokens_of(1, 300), tokens_of(0, 30), 1)
    assert following_slot(store.arrays, 0, 100) == -1


def test_the_newest_of_equal_continuations_is_taken():
    store = SlotStore(8)
    store.add(SCOPE, tokens_of(1, 2), tokens_of(0, 1), 0)
    store.add(SCOPE, tokens_of(1, 2), tokens_of(0, 5), 1)
    assert following_slot(store.arrays, 0, 2) == 5
    store.drop(tokens_of(5))
    assert following_slot(store.arrays, 0, 2) == 1


@pytest.mark.parametrize("slot", [-1, 8])
def test_a_slot_that_does_not_exist_is_refused(slot):
    """Compiled code would write outside the columns (seen as a crash at exit)."""
    store = SlotStore(8)
    with pytest.raises(AssertionError):
        store.add(SCOPE, tokens_of(1, 2), tokens_of(0, slot), 0)
    assert (store.live, store.namespaces) == (0, 0)


def test_memory_is_told():
    assert SlotStore(1000).nbytes == 7 * 4 * 1000
