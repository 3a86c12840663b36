"""The paper's chunker: where a content-defined chunk ends, and what it is called.

*chunk*: a content-defined run of tokens. *cut*: the boundary between two chunks, named by the position behind the
chunk it ends. *gear*: one fixed 64-bit number for each token id. *forced cut*: one in front of a given token id, made
for the special tokens of a chat template.

This is a format. ``VERSION`` names the rule below; another rule would be another version, and golden tests hold it:

1. ``gear(t) = splitmix64(VERSION * 2**32 + (t mod 2**32))``, for any token id, the same in every process.
2. Along a chunk, starting from h = 0, ``h = 2 * h + gear(t) mod 2**64``.
3. A chunk ends behind the token after which ``h mod 128 == 0`` (the low 7 bits), if it then has at least 32 tokens;
   behind its 512th token in any case; in front of a forced cut, however short it is; and where the tokens end.
4. A chunk's id is the xxHash64 of its token ids, each written as a little-endian int32.

The low 7 bits of h depend on the last 7 tokens only: the doubling has moved every older one out. That is what makes the
cuts re-synchronise behind a change; a state that never forgets (say h = odd * h + gear) never does. It also means
that a chunk's start cannot be felt at its 32nd token, so the compiled function does not hash the tokens before that.

Ids nominate, they do not prove: whoever finds one compares the tokens.
"""

from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from irminsul.compiled import compiled
from irminsul.errors import InputError

VERSION = 1
MASK = 0x7F
MIN_CHUNK = 32
MAX_CHUNK = 512
MEMORY = 7
"""Tokens that the masked bits of the hash depend on."""

_WORD = (1 << 64) - 1
NO_FORCED_CUTS: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)


def splitmix64(value: int) -> int:
    """Mix 64 bits (Steele, Lea, Flood, OOPSLA 2014); one to one, the same everywhere."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def gear(token: int) -> int:
    """Return the 64-bit gear of a token id (rule 1)."""
    return splitmix64((VERSION << 32) | (token & 0xFFFFFFFF))


def gear_step(h: int, token: int) -> int:
    """Return the hash after one more token (rule 2)."""
    return ((h << 1) + gear(token)) & _WORD


def forced_cut_table(token_ids: Iterable[int]) -> NDArray[np.bool_]:
    """Return a table, shape [largest id + 1], that is true where a chunk ends in front of the token id.

    Raises:
        InputError: an id is negative.
    """
    ids = sorted(set(token_ids))
    if ids and ids[0] < 0:
        raise InputError(f"special token ids must be >= 0, got {ids[0]}")
    table = np.zeros(ids[-1] + 1 if ids else 0, dtype=np.bool_)
    table[ids] = True
    return table


def cut_points(tokens: NDArray[np.int32], forced: NDArray[np.bool_] = NO_FORCED_CUTS) -> NDArray[np.int64]:
    """Cut tokens into chunks.

    Args:
        tokens: token ids, shape [n].
        forced: table of forced cuts from ``forced_cut_table``.

    Returns:
        The cuts with 0 in front, shape [chunks + 1], ascending from 0 to n: chunk i is [cuts[i], cuts[i + 1]).
    """
    cuts: NDArray[np.int64] = _cut_points(tokens, forced)
    return cuts


def cut_points_reference(
    tokens: Sequence[int],
    forced: Container[int] = frozenset(),
    step: Callable[[int, int], int] = gear_step,
) -> list[int]:
    """Cut as ``cut_points`` does, rule by rule; ``step`` may be another rolling hash."""
    cuts = [0]
    h = 0
    for i, token in enumerate(tokens):
        if token in forced and i > cuts[-1]:
            cuts.append(i)
            h = 0
        h = step(h, token)
        length = i + 1 - cuts[-1]
        if length == MAX_CHUNK or (length >= MIN_CHUNK and h & MASK == 0):
            cuts.append(i + 1)
            h = 0
    if cuts[-1] < len(tokens):
        cuts.append(len(tokens))
    return cuts


def chunk_ids(
    tokens: NDArray[np.int32], starts: NDArray[np.int64], ends: NDArray[np.int64], seed: int = 0
) -> NDArray[np.uint64]:
    """Return the xxHash64 of each chunk ``tokens[start:end]``, shape [chunks].

    Args:
        tokens: token ids, shape [n].
        starts: first position of each chunk, shape [chunks].
        ends: position behind each chunk, shape [chunks].
        seed: 64-bit seed of the hash; the format's own ids have seed 0.
    """
    digest = xxhash.xxh64_intdigest
    data = memoryview(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    spans = zip((4 * starts).tolist(), (4 * ends).tolist(), strict=True)
    return np.array([digest(data[start:end], seed) for start, end in spans], dtype=np.uint64)


@compiled
def _gear(token):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    value = np.uint64(VERSION << 32) | np.uint64(np.uint32(token))
    value += np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@compiled
def _cut_points(tokens, forced):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    n = len(tokens)
    cuts = np.empty(n + 1, dtype=np.int64)
    cuts[0] = 0
    count = 1
    start = 0
    while start < n:
        start = _chunk_end(tokens, start, forced)
        cuts[count] = start
        count += 1
    return cuts[:count].copy()


@compiled
def _chunk_end(tokens, start, forced):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    end = min(start + MAX_CHUNK, len(tokens))
    if len(forced) > 0:
        for i in range(start + 1, end):
            if 0 <= tokens[i] < len(forced) and forced[tokens[i]]:
                end = i
                break
    h = np.uint64(0)
    # What the hash forgets before the first permitted cut need not be hashed.
    for i in range(start + MIN_CHUNK - MEMORY, end):
        h = (h << np.uint64(1)) + _gear(tokens[i])
        if i >= start + MIN_CHUNK - 1 and h & np.uint64(MASK) == 0:
            return i + 1
    return end
