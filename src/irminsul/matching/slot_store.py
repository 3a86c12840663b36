"""What text the live rows hold: a token trie whose nodes are cache slots.

Every exact row in the cache is a slot with a token, a position and the slot of the token before it. That is all a
matcher needs: walking ``previous`` from a slot reads the donor backwards (there is one way), walking ``child`` and
``sibling`` reads it forwards (the newest continuation first). Donors need no objects of their own, a match may run
on from one request's rows into those of the request that continued it, and **an entry dies with its slot**: whatever
still names a freed slot finds it dead, or finds another token, because the tokens in the store decide every hit.

All arrays are indexed by slot; -1 means none. The functions at the end are compiled (numba) and release the GIL.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from irminsul.compiled import compiled
from irminsul.namespace import Namespace

MAX_SIBLINGS = 8
"""Continuations of one row that are looked at before giving up; bounds the work at a popular branching point."""


class SlotArrays(NamedTuple):
    """The store's columns, each of shape [capacity]."""

    token: NDArray[np.int32]
    position: NDArray[np.int32]
    previous: NDArray[np.int32]
    child: NDArray[np.int32]
    """The newest continuation."""
    sibling: NDArray[np.int32]
    """The next older continuation of ``previous``."""
    newer_sibling: NDArray[np.int32]
    namespace: NDArray[np.int32]
    """-1: the slot is dead."""


class SlotStore:
    """Tokens and order of the live exact rows of ``capacity`` slots."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.live = 0
        none = [np.full(capacity, -1, dtype=np.int32) for _ in range(5)]
        zeros = [np.zeros(capacity, dtype=np.int32) for _ in range(2)]
        self.arrays = SlotArrays(zeros[0], zeros[1], *none)
        self._ids: dict[Namespace, int] = {}
        self._names: dict[int, Namespace] = {}
        self._population: dict[int, int] = {}
        self._free_ids: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes held by the columns."""
        return sum(column.nbytes for column in self.arrays)

    @property
    def namespaces(self) -> int:
        """Namespaces with at least one live slot."""
        return len(self._ids)

    def namespace_id(self, namespace: Namespace) -> int | None:
        """Return the small number that stands for a namespace in the columns; None if it has no live slot."""
        return self._ids.get(namespace)

    def add(self, namespace: Namespace, tokens: NDArray[np.int32], slots: NDArray[np.int32], start: int) -> int:
        """Make the slots of positions [start, n) live; return the namespace's number.

        Args:
            namespace: scope of the sequence.
            tokens: token ids of the whole sequence from position 0, shape [n].
            slots: slot of each of its tokens, shape [n]; those below ``start`` are live already.
            start: first new position.
        """
        # Compiled code checks no bounds: a slot that does not exist would overwrite other memory.
        assert slots.min() >= 0, slots.min()
        assert slots.max() < self.capacity, (slots.max(), self.capacity)
        number = self._intern(namespace)
        self._population[number] += len(slots) - start
        self.live += len(slots) - start
        _link(self.arrays, tokens, slots, start, number)
        return number

    def drop(self, slots: NDArray[np.int32]) -> None:
        """Declare slots dead; slots that are not live are passed over."""
        numbers, counts = np.unique(self.arrays.namespace[slots], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number >= 0:
                self.live -= count
                self._release(number, count)
        _unlink(self.arrays, slots)

    def _intern(self, namespace: Namespace) -> int:
        number = self._ids.get(namespace)
        if number is None:
            number = self._free_ids.pop() if self._free_ids else len(self._ids)
            self._ids[namespace] = number
            self._names[number] = namespace
            self._population[number] = 0
        return number

    def _release(self, number: int, count: int) -> None:
        self._population[number] -= count
        assert self._population[number] >= 0, number
        if self._population[number] == 0:
            del self._population[number]
            del self._ids[self._names.pop(number)]
            self._free_ids.append(number)


@compiled
def _link(arrays, tokens, slots, start, number):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    before = slots[start - 1] if start > 0 else np.int32(-1)
    for i in range(start, len(slots)):
        slot = slots[i]
        arrays.token[slot] = tokens[i]
        arrays.position[slot] = i
        arrays.previous[slot] = before
        arrays.child[slot] = -1
        arrays.newer_sibling[slot] = -1
        arrays.sibling[slot] = -1
        arrays.namespace[slot] = number
        if before >= 0:
            older = arrays.child[before]
            arrays.sibling[slot] = older
            if older >= 0:
                arrays.newer_sibling[older] = slot
            arrays.child[before] = slot
        before = slot


@compiled
def _unlink(arrays, slots):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    for i in range(len(slots) - 1, -1, -1):
        slot = slots[i]
        if arrays.namespace[slot] < 0:
            continue
        before = arrays.previous[slot]
        older = arrays.sibling[slot]
        newer = arrays.newer_sibling[slot]
        if older >= 0:
            arrays.newer_sibling[older] = newer
        if newer >= 0:
            arrays.sibling[newer] = older
        elif before >= 0:
            arrays.child[before] = older
        # A cache that frees a row before its continuations leaves them as donors of their own.
        orphan = arrays.child[slot]
        while orphan >= 0:
            following = arrays.sibling[orphan]
            arrays.previous[orphan] = -1
            arrays.sibling[orphan] = -1
            arrays.newer_sibling[orphan] = -1
            orphan = following
        arrays.namespace[slot] = -1
        arrays.previous[slot] = -1
        arrays.child[slot] = -1
        arrays.sibling[slot] = -1
        arrays.newer_sibling[slot] = -1


@compiled
def following_slot(arrays, slot, token):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Return a live continuation of ``slot`` that holds ``token``, newest first; -1 if none is found."""
    child = arrays.child[slot]
    tries = 0
    while child >= 0 and tries < MAX_SIBLINGS:
        if arrays.token[child] == token:
            return child
        child = arrays.sibling[child]
        tries += 1
    return np.int32(-1)


@compiled
def tokens_end_at(arrays, slot, tokens, end, length, number):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Say whether the ``length`` donor tokens that end at ``slot`` are ``tokens[end - length : end]``."""
    for i in range(length):
        if slot < 0 or arrays.namespace[slot] != number or arrays.token[slot] != tokens[end - 1 - i]:
            return False
        slot = arrays.previous[slot]
    return True


def donor_slots(arrays: SlotArrays, last: int, length: int) -> NDArray[np.int32]:
    """Return the ``length`` donor slots that end at slot ``last``, in token order."""
    slots = np.empty(length, dtype=np.int32)
    _walk_back(arrays.previous, last, slots)
    return slots


@compiled
def _walk_back(previous, last, slots):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    slot = last
    for i in range(len(slots) - 1, -1, -1):
        slots[i] = slot
        slot = previous[slot]


@compiled
def walk_to_root(arrays, last, slots):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Fill ``slots`` with the donor's slots from position 0 to ``last``.

    Returns False, with part of them filled, if the chain breaks: a row before ``last`` is dead, or positions do not
    count down to 0.
    """
    slot = last
    for position in range(len(slots) - 1, -1, -1):
        if slot < 0 or slot >= len(arrays.position):
            return False
        if arrays.namespace[slot] < 0 or arrays.position[slot] != position:
            return False
        slots[position] = slot
        slot = arrays.previous[slot]
    return True
