"""Fingerprint -> slots: a chained hash table whose entries are the slots themselves.

A fingerprint only nominates; the tokens in the slot store decide. A slot carries at most one fingerprint (that of the
text which ends there), so entries need no memory of their own, and removing a freed slot is O(1). At most
``candidates`` slots are kept for one fingerprint, the newest ones: keep-first loses its donors under eviction,
and an unbounded list is what an attacker or a boilerplate line would fill.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from irminsul.compiled import compiled

MAX_CHAIN = 64
"""Steps along one bucket; longer chains do not occur by chance at the load used here."""


class IndexArrays(NamedTuple):
    """Columns of the index; -1 means none, fingerprint 0 means not indexed."""

    head: NDArray[np.int32]
    """Newest slot of each bucket, shape [buckets], a power of two."""
    fingerprint: NDArray[np.uint64]
    older: NDArray[np.int32]
    newer: NDArray[np.int32]
    size: NDArray[np.int64]
    """Shape [1]: indexed slots."""


class FingerprintIndex:
    """Fingerprints of text that ends at a slot.

    Args:
        capacity: number of slots.
        candidates: slots kept for one fingerprint, newest first.
        spacing: expected tokens between indexed slots; sizes the buckets.
    """

    def __init__(self, capacity: int, *, candidates: int = 4, spacing: int = 16) -> None:
        buckets = 1 << max(4, int(np.ceil(np.log2(2 * capacity / spacing + 1))))
        self.candidates = candidates
        self.arrays = IndexArrays(
            head=np.full(buckets, -1, dtype=np.int32),
            fingerprint=np.zeros(capacity, dtype=np.uint64),
            older=np.full(capacity, -1, dtype=np.int32),
            newer=np.full(capacity, -1, dtype=np.int32),
            size=np.zeros(1, dtype=np.int64),
        )

    def __len__(self) -> int:
        return int(self.arrays.size[0])

    @property
    def nbytes(self) -> int:
        """Bytes held by the columns."""
        return sum(column.nbytes for column in self.arrays)

    def put(self, slot: int, fingerprint: int) -> None:
        """Index one slot under a fingerprint (not 0); a slot that is indexed already keeps its entry."""
        index_put(self.arrays, slot, np.uint64(fingerprint), self.candidates)

    def get(self, fingerprint: int) -> NDArray[np.int32]:
        """Return the slots under a fingerprint, newest first."""
        found = np.empty(self.candidates, dtype=np.int32)
        return found[: index_get(self.arrays, np.uint64(fingerprint), found)]

    def drop(self, slots: NDArray[np.int32]) -> None:
        """Forget slots; those that are not indexed are passed over."""
        _index_drop(self.arrays, slots)


@compiled
def index_put(arrays, slot, fingerprint, candidates):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Index ``slot``; the oldest of more than ``candidates`` equal fingerprints gives way."""
    if arrays.fingerprint[slot] != 0:
        return
    bucket = fingerprint & np.uint64(len(arrays.head) - 1)
    other = arrays.head[bucket]
    equal = 0
    steps = 0
    oldest = np.int32(-1)
    while other >= 0 and steps < MAX_CHAIN:
        if arrays.fingerprint[other] == fingerprint:
            equal += 1
            oldest = other
        other = arrays.older[other]
        steps += 1
    if equal >= candidates:
        _remove(arrays, oldest)
    head = arrays.head[bucket]
    arrays.fingerprint[slot] = fingerprint
    arrays.older[slot] = head
    arrays.newer[slot] = -1
    if head >= 0:
        arrays.newer[head] = slot
    arrays.head[bucket] = slot
    arrays.size[0] += 1


@compiled
def index_get(arrays, fingerprint, found):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Fill ``found`` with slots under ``fingerprint``, newest first; return how many there are."""
    slot = arrays.head[fingerprint & np.uint64(len(arrays.head) - 1)]
    steps = 0
    n = 0
    while slot >= 0 and steps < MAX_CHAIN and n < len(found):
        if arrays.fingerprint[slot] == fingerprint:
            found[n] = slot
            n += 1
        slot = arrays.older[slot]
        steps += 1
    return n


@compiled
def _remove(arrays, slot):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    bucket = arrays.fingerprint[slot] & np.uint64(len(arrays.head) - 1)
    older = arrays.older[slot]
    newer = arrays.newer[slot]
    if newer >= 0:
        arrays.older[newer] = older
    else:
        arrays.head[bucket] = older
    if older >= 0:
        arrays.newer[older] = newer
    arrays.fingerprint[slot] = 0
    arrays.older[slot] = -1
    arrays.newer[slot] = -1
    arrays.size[0] -= 1


@compiled
def _index_drop(arrays, slots):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    for slot in slots:
        if arrays.fingerprint[slot] != 0:
            _remove(arrays, slot)
