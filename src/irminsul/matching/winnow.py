"""The default matcher: winnowed k-gram fingerprints nominate, tokens verify, runs extend both ways.

*k-gram*: k consecutive tokens. *window*: w consecutive k-grams. In each window the k-gram with the least hash is
*selected* (the rightmost of equals; Schleimer, Wilkerson, Aiken, SIGMOD 2003). A run shared by prompt and donor of at
least k + w - 1 tokens contains a whole window of both, both select the same k-gram there, and so the run has a seed:
by construction, wherever it stands, without markers, and independent of where the prefix ended. The seed leads to the
donor unless more than ``candidates`` newer rows hold the same k-gram (boilerplate inside the run), or the text is
periodic there, of which the index keeps one place.

Each seed is verified token by token and extended left and right along the donor to the maximal run. Runs of one
prompt end up disjoint, the longer one keeping an overlap. The work is bounded: a seed that lies more than a window
inside what is already covered is passed over, and once ``MAX_WORK`` comparisons per prompt token are spent, runs are no
longer extended into what is covered, which makes the rest linear whatever the text.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from irminsul.compiled import compiled
from irminsul.errors import InputError
from irminsul.matching.cdc import splitmix64
from irminsul.matching.fingerprint_index import FingerprintIndex, index_get, index_put
from irminsul.matching.slot_store import SlotStore, donor_slots, following_slot, tokens_end_at
from irminsul.plan import Run

MAX_WORK = 8


@dataclass(frozen=True)
class WinnowConfig:
    """k-gram length, window length, and candidates kept and tried for each fingerprint."""

    k: int = 24
    w: int = 41
    candidates: int = 4

    def __post_init__(self) -> None:
        if self.k < 2 or self.w < 1 or self.candidates < 1:
            raise InputError(f"winnow needs k >= 2, w >= 1 and candidates >= 1, got {self}")

    @property
    def guarantee(self) -> int:
        """Every shared run of at least this many tokens has a seed."""
        return self.k + self.w - 1

    @classmethod
    def for_guarantee(cls, tokens: int) -> "WinnowConfig":
        """Return the setting for a guarantee of 32, 64 or 128 tokens (docs/design.md says how they were chosen)."""
        settings = {32: cls(16, 17), 64: cls(24, 41), 128: cls(32, 97)}
        if tokens not in settings:
            raise InputError(f"no winnow setting guarantees {tokens} tokens; valid guarantees: 32, 64, 128")
        return settings[tokens]


class _Found(NamedTuple):
    """Runs in columns: target [start, end) and the donor slot of the last token."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    last_slot: NDArray[np.int32]


class WinnowMatcher:
    """Winnowed fingerprints of the rows in a slot store.

    Args:
        capacity: slots of the store.
        config: k, w and candidates.
        seed: key of the hash. Fingerprints of one process mean nothing in another, so collisions cannot be prepared.
    """

    def __init__(self, capacity: int, config: WinnowConfig, seed: int) -> None:
        self.config = config
        self._index = FingerprintIndex(capacity, candidates=config.candidates, spacing=max(1, config.w // 2))
        # 3 modulo 8: differences of its powers have few factors of two. Of a base like 1 + 2**20 they have many, and
        # texts made of two alternating tokens would collide modulo 2**64.
        self._base = np.uint64(splitmix64(seed) & ~7 | 3)
        self._seed = seed

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes held by the index."""
        return self._index.nbytes

    def add(
        self, store: SlotStore, number: int, tokens: NDArray[np.int32], slots: NDArray[np.int32], start: int
    ) -> None:
        """Index the sequence's positions from ``start``; earlier ones are read as left context only."""
        del store
        # The first window that holds a new k-gram begins k + w - 2 tokens before the first new token.
        context = max(0, start - (self.config.guarantee - 1))
        _register(
            self._index.arrays,
            tokens[context:],
            slots[context:],
            self.config.k,
            self.config.w,
            self._base,
            self._salt(number),
            self.config.candidates,
        )

    def drop(self, slots: NDArray[np.int32]) -> None:
        """Forget freed slots."""
        self._index.drop(slots)

    def find(self, store: SlotStore, number: int, tokens: NDArray[np.int32], start: int) -> list[Run]:
        """Return disjoint runs of ``tokens[start:]`` found in live rows of a namespace, ascending, none below k."""
        config = self.config
        count, found = _search(
            store.arrays,
            self._index.arrays,
            tokens,
            start,
            config.k,
            config.w,
            self._base,
            self._salt(number),
            number,
            config.candidates,
        )
        runs = []
        for i in range(count):
            length = int(found.end[i] - found.start[i])
            # What a longer run left of its neighbour may be next to nothing.
            if length < config.k:
                continue
            slots = donor_slots(store.arrays, int(found.last_slot[i]), length)
            runs.append(Run(int(found.start[i]), int(store.arrays.position[slots[0]]), slots))
        return runs

    def _salt(self, number: int) -> np.uint64:
        return np.uint64(splitmix64(self._seed ^ (number + 1)))


@compiled
def kgram_hashes(tokens, k, base, salt):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Hash every k-gram: polynomial in ``base`` modulo 2**64 over keyed tokens, then mixed; shape [n - k + 1].

    A token stands for a 64-bit value that only ``salt`` tells. With the ids themselves as coefficients, differences of
    prepared texts are multiples of polynomials like (x - 1)^9 (x + 1)^14, which vanish for one odd base in five.
    """
    n = len(tokens) - k + 1
    hashes = np.empty(max(n, 0), dtype=np.uint64)
    if n <= 0:
        return hashes
    leaving = np.uint64(1)
    for _ in range(k):
        leaving *= base
    rolling = np.uint64(0)
    values = np.empty(len(tokens), dtype=np.uint64)
    for i in range(len(tokens)):
        values[i] = _mix(np.uint64(tokens[i] + 1) ^ salt)
        rolling = rolling * base + values[i]
        if i >= k:
            rolling -= leaving * values[i - k]
        if i >= k - 1:
            # 0 means "not indexed" in the index.
            hashes[i - k + 1] = max(_mix(rolling), np.uint64(1))
    return hashes


@compiled
def _mix(value):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """MurmurHash3's finaliser: a bijection in which every bit of the value moves every bit of the result."""
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@compiled
def select(hashes, w):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Return the ascending indices of the k-grams that some window of ``w`` selects."""
    n = len(hashes)
    selected = np.empty(max(n, 0), dtype=np.int64)
    count = 0
    least = -1
    for right in range(w - 1, n):
        left = right - w + 1
        if least < left:
            least = left
            for i in range(left + 1, right + 1):
                if hashes[i] <= hashes[least]:
                    least = i
        elif hashes[right] <= hashes[least]:
            least = right
        else:
            continue
        selected[count] = least
        count += 1
    return selected[:count]


@compiled
def _register(index, tokens, slots, k, w, base, salt, candidates):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    hashes = kgram_hashes(tokens, k, base, salt)
    previous = np.uint64(0)
    previous_at = -w - 1
    for at in select(hashes, w):
        # In text of a period below w every window selects the same k-gram again. Only the first of such a stretch is
        # kept: from there a match runs on to the end of the stretch, and the newest copies do not push it out.
        if hashes[at] != previous or at - previous_at > w:
            index_put(index, slots[at + k - 1], hashes[at], candidates)
        previous = hashes[at]
        previous_at = at


@compiled
def _search(store, index, tokens, start, k, w, base, salt, number, candidates):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    n = len(tokens)
    # Windows that begin before the tail select in it, too: short tails have no whole window of their own.
    first = max(0, start - (k + w - 2))
    hashes = kgram_hashes(tokens[first:], k, base, salt)
    seeds = select(hashes, w)
    run_start = np.empty(len(seeds), dtype=np.int64)
    run_end = np.empty(len(seeds), dtype=np.int64)
    run_last = np.empty(len(seeds), dtype=np.int32)
    runs = 0
    covered = start
    work = 0
    slots = np.empty(candidates, dtype=np.int32)
    for seed in seeds:
        end = first + seed + k
        # A run that reaches beyond what is covered may have its last seed up to a window before that.
        if end <= start or end + w <= covered:
            continue
        best_end = covered
        best_start = n
        best_last = np.int32(-1)
        leftmost = start if work < MAX_WORK * (n - start) else covered
        for c in range(index_get(index, hashes[seed], slots)):
            slot = slots[c]
            if not tokens_end_at(store, slot, tokens, end, k, number):
                continue
            last, right = _extend_right(store, slot, tokens, end, number)
            work += right - end
            if right <= covered or right < best_end:
                continue
            left = _extend_left(store, slot, tokens, end, leftmost, number)
            work += end - left
            if right > best_end or left < best_start:
                best_end = right
                best_start = left
                best_last = last
        if best_end > covered:
            runs = _push(run_start, run_end, run_last, runs, best_start, best_end, best_last, store.previous)
            covered = best_end
    return runs, _Found(run_start, run_end, run_last)


@compiled
def _extend_right(store, slot, tokens, end, number):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    while end < len(tokens):
        following = following_slot(store, slot, tokens[end])
        if following < 0 or store.namespace[following] != number:
            break
        slot = following
        end += 1
    return slot, end


@compiled
def _extend_left(store, slot, tokens, end, leftmost, number):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    begin = end
    while begin > leftmost and slot >= 0 and store.token[slot] == tokens[begin - 1] and store.namespace[slot] == number:
        slot = store.previous[slot]
        begin -= 1
    return begin


@compiled
def _push(run_start, run_end, run_last, runs, begin, end, last, previous):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Append a run that ends behind all others; of two that overlap the longer keeps the overlap."""
    while runs > 0 and run_start[runs - 1] >= begin:
        runs -= 1
    if runs > 0 and run_end[runs - 1] > begin:
        if run_end[runs - 1] - run_start[runs - 1] >= end - begin:
            begin = run_end[runs - 1]
        else:
            # Shorten the earlier run from its end; its donor is read backwards from the last slot.
            for _ in range(run_end[runs - 1] - begin):
                run_last[runs - 1] = previous[run_last[runs - 1]]
            run_end[runs - 1] = begin
    run_start[runs] = begin
    run_end[runs] = end
    run_last[runs] = last
    return runs + 1
