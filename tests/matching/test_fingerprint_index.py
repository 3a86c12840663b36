"""The fingerprint index against a dictionary model."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from irminsul.matching.fingerprint_index import MAX_CHAIN, FingerprintIndex

CAPACITY = 30
# The index of 30 slots has 16 buckets: 1, 17 and 33 meet in one of them, and so do 2 and 2**63 + 2.
PRINTS = [1, 17, 33, 2, 2**63 + 2, 2**64 - 1]


class FingerprintIndexMachine(RuleBasedStateMachine):
    """The model: slots of each fingerprint, newest first."""

    @initialize(candidates=st.integers(1, 4))
    def start(self, candidates):
        self.index = FingerprintIndex(CAPACITY, candidates=candidates, spacing=30)
        self.slots = {fingerprint: [] for fingerprint in PRINTS}
        assert len(self.index.arrays.head) == 16

    @rule(slot=st.integers(0, CAPACITY - 1), fingerprint=st.sampled_from(PRINTS))
    def put(self, slot, fingerprint):
        self.index.put(slot, fingerprint)
        if all(slot not in slots for slots in self.slots.values()):
            self.slots[fingerprint] = [slot, *self.slots[fingerprint]][: self.index.candidates]

    @rule(slots=st.sets(st.integers(0, CAPACITY - 1), max_size=10))
    def drop(self, slots):
        self.index.drop(np.array(sorted(slots), dtype=np.int32))
        for fingerprint, held in self.slots.items():
            self.slots[fingerprint] = [slot for slot in held if slot not in slots]

    @invariant()
    def agrees(self):
        assert len(self.index) == sum(map(len, self.slots.values()))
        for fingerprint, slots in self.slots.items():
            assert self.index.get(fingerprint).tolist() == slots
        assert self.index.get(49).tolist() == []  # the bucket of 1, 17 and 33

    @invariant()
    def chains_are_whole(self):
        arrays = self.index.arrays
        chained = []
        for head in arrays.head.tolist():
            newer, slot = -1, head
            while slot >= 0:
                assert arrays.newer[slot] == newer
                chained.append(slot)
                newer, slot = slot, int(arrays.older[slot])
        assert sorted(chained) == np.flatnonzero(arrays.fingerprint).tolist()


FingerprintIndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFingerprintIndex = FingerprintIndexMachine.TestCase


@given(st.dictionaries(st.integers(0, 999), st.integers(1, 2**64 - 1), max_size=60))
def test_distinct_fingerprints_do_not_disturb_each_other(prints):
    index = FingerprintIndex(1000, spacing=8)
    for slot, fingerprint in prints.items():
        index.put(slot, fingerprint)
    for slot, fingerprint in prints.items():
        same = [other for other in reversed(prints) if prints[other] == fingerprint][: index.candidates]
        assert index.get(fingerprint).tolist() == same
        assert slot in same or len(same) == index.candidates


def test_the_newest_candidates_stay():
    index = FingerprintIndex(10, candidates=3)
    for slot in range(6):
        index.put(slot, 77)
    assert index.get(77).tolist() == [5, 4, 3]
    assert len(index) == 3
    index.drop(np.array([4], dtype=np.int32))
    assert index.get(77).tolist() == [5, 3]


def test_an_indexed_slot_keeps_its_entry():
    index = FingerprintIndex(4)
    index.put(2, 5)
    index.put(2, 6)
    assert index.get(5).tolist() == [2]
    assert index.get(6).tolist() == []


def test_a_crowded_bucket_is_searched_so_far_and_loses_nothing_else():
    """The bound on the work in one bucket is a limit, and a stated one; what lies behind it can still be dropped."""
    index = FingerprintIndex(200, spacing=200)
    buckets = len(index.arrays.head)
    prints = [1 + buckets * i for i in range(MAX_CHAIN + 10)]
    for slot, fingerprint in enumerate(prints):
        index.put(slot, fingerprint)
    assert index.get(prints[10]).tolist() == [10]
    assert index.get(prints[9]).tolist() == []
    index.drop(np.arange(200, dtype=np.int32))
    assert len(index) == 0
    assert (index.arrays.head == -1).all()


def test_memory_is_told():
    index = FingerprintIndex(1000, spacing=16)
    assert index.nbytes == 128 * 4 + 1000 * (8 + 4 + 4) + 8
