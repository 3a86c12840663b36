"""Matchers that find whole chunks again: the paper's, two that do not care where the prefix ended, fixed blocks.

============  ==================================================================  ======================
name          chunks                                                              start of the first one
============  ==================================================================  ======================
fixed128      blocks of 128 tokens, whole ones only                               multiple of 128
cdc           content-defined chunks of the tail (the paper)                      where the tail starts
anchored      content-defined chunks of the prompt, cut in front of every         position 0
              special token
cdc_s1        cdc, and where a chunk is missing its windows (the paper's S1)      where the tail starts
anchored_s1   anchored, and where a chunk is missing its windows                  position 0
============  ==================================================================  ======================

*tail*: the positions from ``start`` on, which a prefix does not hold. *straddling chunk*: one that begins before the
tail and ends inside it; fixed128 and anchored have it. It is looked up and verified as a whole, and then gives its
part in the tail. *window*: 128 tokens at a multiple of 128 from a chunk's start, whole ones only; registered for every
chunk, looked up where the chunk itself is missing.

A piece (chunk, block or window) is indexed at the slot of its last token, chunks and windows each in an index of their
own. The last chunk of a sequence is indexed too, although the end of the text cut it: what comes next often begins
with a special token, which would have cut there as well. A piece is compared with its donor token by token. If the
donor of the piece before it also holds it, the run goes on there; otherwise the newest donor is taken. Runs consist of
whole pieces (and the tail's part of a straddling one): extending them is the winnowing matcher's business.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from irminsul.compiled import compiled
from irminsul.errors import InputError
from irminsul.matching.cdc import chunk_ids, cut_points, forced_cut_table, splitmix64
from irminsul.matching.fingerprint_index import FingerprintIndex, index_get, index_put
from irminsul.matching.slot_store import SlotStore, donor_slots, following_slot, tokens_end_at
from irminsul.plan import Run

CHUNK_MATCHERS = ("fixed128", "cdc", "cdc_s1", "anchored", "anchored_s1")
WINDOW = 128
"""Tokens in a window, and in a block of fixed128."""
CANDIDATES = 4

Chunker: TypeAlias = Callable[[NDArray[np.int32], int], NDArray[np.int64]]
"""(tokens, start) -> cuts [chunks + 1]: chunk i is [cuts[i], cuts[i + 1]), and all end behind ``start``."""


class _Pieces(NamedTuple):
    """Chunks in order, each followed by its windows; columns of shape [pieces]."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    is_window: NDArray[np.bool_]


class _Found(NamedTuple):
    """Runs in columns: target [start, end) and the donor slot of the last token."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    last_slot: NDArray[np.int32]


def make_chunk_matcher(name: str, capacity: int, seed: int, special_tokens: Iterable[int] = ()) -> "ChunkMatcher":
    """Build one of CHUNK_MATCHERS.

    Args:
        name: which.
        capacity: slots of the store.
        seed: key of the fingerprints.
        special_tokens: ids in front of which anchored chunks are cut; the other matchers have no use for them.

    Raises:
        InputError: the name is unknown, or an anchored matcher has no special tokens.
    """
    if name not in CHUNK_MATCHERS:
        raise InputError(f"unknown chunk matcher {name!r}; valid chunk matchers: {', '.join(CHUNK_MATCHERS)}")
    kind = name.removesuffix("_s1")
    forced = forced_cut_table(special_tokens)
    if kind == "anchored" and len(forced) == 0:
        raise InputError(f"matcher {name!r} needs the special token ids of the chat template, and got none")
    chunkers: dict[str, Chunker] = {
        "fixed128": fixed_blocks,
        "cdc": tail_chunks,
        "anchored": partial(anchored_chunks, forced),
    }
    return ChunkMatcher(capacity, chunkers[kind], seed, windows=name.endswith("_s1"))


def fixed_blocks(tokens: NDArray[np.int32], start: int) -> NDArray[np.int64]:
    """Cut at multiples of 128; what is left at the end is no block."""
    return WINDOW * np.arange(start // WINDOW, max(start, len(tokens)) // WINDOW + 1, dtype=np.int64)


def tail_chunks(tokens: NDArray[np.int32], start: int) -> NDArray[np.int64]:
    """Cut the tail, as if it were all there is."""
    return start + cut_points(tokens[start:])


def anchored_chunks(forced: NDArray[np.bool_], tokens: NDArray[np.int32], start: int) -> NDArray[np.int64]:
    """Cut the prompt from position 0 with forced cuts; return the cuts from the one at or before ``start`` on.

    Nothing in front of a forced cut has a bearing on what follows, so cutting begins at the last one before the tail.
    """
    anchor = int(_last_forced_cut(forced, tokens, start))
    cuts = anchor + cut_points(tokens[anchor:], forced)
    return cuts[np.searchsorted(cuts, start, side="right") - 1 :]


class ChunkMatcher:
    """Chunks of the rows in a slot store, by fingerprint (xxHash64 with a secret seed).

    Args:
        capacity: slots of the store.
        chunker: cuts a sequence.
        seed: key of the hash. Fingerprints of one process mean nothing in another, but xxHash64 is not made to
            withstand prepared collisions, whatever its seed. They cost comparisons; a piece has four donors at most.
        windows: whether windows are registered and looked up (S1).
    """

    def __init__(self, capacity: int, chunker: Chunker, seed: int, *, windows: bool = False) -> None:
        self._chunker = chunker
        self._seed = seed
        self._chunks = FingerprintIndex(capacity, candidates=CANDIDATES, spacing=WINDOW // 2)
        self._windows = FingerprintIndex(capacity, candidates=CANDIDATES, spacing=WINDOW) if windows else None

    def __len__(self) -> int:
        return sum(len(index) for index in self._indexes)

    @property
    def nbytes(self) -> int:
        """Bytes held by the indexes."""
        return sum(index.nbytes for index in self._indexes)

    def add(
        self, store: SlotStore, number: int, tokens: NDArray[np.int32], slots: NDArray[np.int32], start: int
    ) -> None:
        """Index the pieces that end in ``tokens[start:]``; earlier positions are read as part of straddling ones."""
        del store
        pieces, prints = self._pieces(tokens, number, start)
        chunks, windows = self._arrays
        _register(chunks, windows, pieces, prints, slots, start, CANDIDATES)

    def drop(self, slots: NDArray[np.int32]) -> None:
        """Forget freed slots."""
        for index in self._indexes:
            index.drop(slots)

    def find(self, store: SlotStore, number: int, tokens: NDArray[np.int32], start: int) -> list[Run]:
        """Return disjoint runs of ``tokens[start:]`` found in live rows of a namespace, ascending."""
        pieces, prints = self._pieces(tokens, number, start)
        chunks, windows = self._arrays
        count, found = _search(store.arrays, chunks, windows, tokens, pieces, prints, start, number, CANDIDATES)
        runs = []
        for i in range(count):
            length = int(found.end[i] - found.start[i])
            slots = donor_slots(store.arrays, int(found.last_slot[i]), length)
            runs.append(Run(int(found.start[i]), int(store.arrays.position[slots[0]]), slots))
        return runs

    @property
    def _indexes(self) -> list[FingerprintIndex]:
        return [index for index in (self._chunks, self._windows) if index is not None]

    @property
    def _arrays(self) -> tuple[NamedTuple, NamedTuple]:
        """The columns of both indexes; without windows the second is never read."""
        return self._indexes[0].arrays, self._indexes[-1].arrays

    def _pieces(self, tokens: NDArray[np.int32], number: int, start: int) -> tuple[_Pieces, NDArray[np.uint64]]:
        pieces = _cut_windows(self._chunker(tokens, start), self._windows is not None)
        ids = chunk_ids(tokens, pieces.start, pieces.end, splitmix64(self._seed ^ (number + 1)))
        # 0 means "not indexed" in the index.
        return pieces, np.maximum(ids, np.uint64(1))


@compiled
def _last_forced_cut(forced, tokens, start):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return the last position in [1, start] whose token forces a cut, else 0."""
    for i in range(min(start, len(tokens) - 1), 0, -1):
        if 0 <= tokens[i] < len(forced) and forced[tokens[i]]:
            return i
    return 0


@compiled
def _cut_windows(cuts, windows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    size = len(cuts) - 1
    if windows:
        size += (cuts[-1] - cuts[0]) // WINDOW
    start = np.empty(size, dtype=np.int64)
    end = np.empty(size, dtype=np.int64)
    is_window = np.zeros(size, dtype=np.bool_)
    count = 0
    for i in range(len(cuts) - 1):
        start[count] = cuts[i]
        end[count] = cuts[i + 1]
        count += 1
        if windows:
            for window in range(cuts[i], cuts[i + 1] - WINDOW + 1, WINDOW):
                start[count] = window
                end[count] = window + WINDOW
                is_window[count] = True
                count += 1
    return _Pieces(start[:count], end[:count], is_window[:count])


@compiled
def _register(chunks, windows, pieces, prints, slots, start, candidates):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    for i in range(len(prints)):
        last = pieces.end[i] - 1
        if last >= start:
            index_put(windows if pieces.is_window[i] else chunks, slots[last], prints[i], candidates)


@compiled
def _search(store, chunks, windows, tokens, pieces, prints, start, number, candidates):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    run_start = np.empty(len(prints), dtype=np.int64)
    run_end = np.empty(len(prints), dtype=np.int64)
    run_last = np.empty(len(prints), dtype=np.int32)
    runs = 0
    covered = start
    slots = np.empty(candidates, dtype=np.int32)
    for i in range(len(prints)):
        begin = pieces.start[i]
        end = pieces.end[i]
        if end <= covered:
            continue
        before = run_last[runs - 1] if runs > 0 and run_end[runs - 1] == begin else np.int32(-1)
        nominated = index_get(windows if pieces.is_window[i] else chunks, prints[i], slots)
        last = np.int32(-1)
        if nominated > 0 and before >= 0:
            last = _continuation(store, before, tokens, begin, end)
        continues = last >= 0
        if not continues:
            last = _newest(store, slots[:nominated], tokens, begin, end, number)
            continues = last >= 0 and before >= 0 and _step_back(store.previous, last, end - begin) == before
        if last < 0:
            continue
        if not continues:
            run_start[runs] = max(begin, start)
            runs += 1
        run_end[runs - 1] = end
        run_last[runs - 1] = last
        covered = end
    return runs, _Found(run_start, run_end, run_last)


@compiled
def _continuation(store, slot, tokens, begin, end):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return the last slot of ``tokens[begin:end]`` if they follow ``slot``, else -1."""
    for i in range(begin, end):
        slot = following_slot(store, slot, tokens[i])
        if slot < 0:
            return np.int32(-1)
    return slot


@compiled
def _newest(store, nominated, tokens, begin, end, number):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return the first of the nominated slots at which ``tokens[begin:end]`` end, else -1."""
    for slot in nominated:
        if tokens_end_at(store, slot, tokens, end, end - begin, number):
            return slot
    return np.int32(-1)


@compiled
def _step_back(previous, slot, steps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    for _ in range(steps):
        slot = previous[slot]
    return slot
