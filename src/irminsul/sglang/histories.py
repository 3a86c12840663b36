"""Where derived rows hang in the host's tree, and how they are kept from being met as exact.

Rows computed behind a shifted hit are approximate. They go into SGLang's own tree, below the exact rows that they
continue, but under *marked* tokens: ids that no request can hold. So a lookup of plain tokens never walks onto them;
a lookup that marks the tokens from the right position on finds them::

    root -- 11 12 13 14 -- 15 16             exact
                        `- 15' 16' 17'       derived, from position 4

The position from which a history is derived is its *anchor*. A session's next turn does not know its anchor, so they
are remembered here by position and hash of the tokens before; the tree's tokens decide, a hash only nominates.
"""

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from irminsul.namespace import Namespace

MARK = 1 << 30
"""Added to a token id; above any vocabulary, below 2^31."""
MAX_ANCHORS = 16_384
ENDING_TOKENS = 4
MAX_CANDIDATES = 8
"""Anchors of one prompt that are looked up, deepest first."""

_Anchor: TypeAlias = tuple[Namespace, int, bytes, bytes]


def mark_tokens(token_ids: "array[int]", start: int) -> "array[int]":
    """Return a copy of int64 token ids whose ids from ``start`` on are marked."""
    marked = np.array(token_ids, dtype=np.int64)
    marked[start:] += MARK
    return array("q", marked.tobytes())


def holds_marks(token_ids: "array[int]") -> bool:
    """Say whether token ids of a client reach into those that mark derived rows."""
    # A negative id, marked, would be below the marks.
    ids = np.array(token_ids, dtype=np.int64)
    return bool(((ids >= MARK) | (ids < 0)).any())


class Histories:
    """Anchors of derived rows, by namespace, position and prefix; the least recently used are forgotten.

    Args:
        capacity: anchors remembered. A forgotten one costs its session a recomputation, nothing else.
    """

    def __init__(self, capacity: int = MAX_ANCHORS) -> None:
        self._capacity = capacity
        self._anchors: OrderedDict[_Anchor, None] = OrderedDict()
        self._endings: defaultdict[Namespace, dict[tuple[int, bytes], int]] = defaultdict(dict)
        """Position and last tokens of each anchor, and how many there are: most are ruled out by these alone."""

    def __len__(self) -> int:
        """Return the number of anchors remembered."""
        return len(self._anchors)

    def add(self, namespace: Namespace, tokens: NDArray[np.int64], anchor: int) -> None:
        """Remember that rows derived from position ``anchor`` on continue ``tokens[:anchor]``."""
        key = (namespace, anchor, _ending(tokens, anchor), xxhash.xxh3_128_digest(tokens[:anchor].data))
        if key not in self._anchors:
            endings = self._endings[namespace]
            endings[key[1:3]] = endings.get(key[1:3], 0) + 1
            self._anchors[key] = None
            if len(self._anchors) > self._capacity:
                self._forget(next(iter(self._anchors)))
        self._anchors.move_to_end(key)

    def candidates(self, namespace: Namespace, tokens: NDArray[np.int64], exact: int) -> Iterator[int]:
        """Yield anchors of histories that may continue ``tokens[:exact]``, which the tree holds; deepest first."""
        possible = sorted(
            position
            for position, ending in self._endings.get(namespace, ())
            if position <= exact and ending == _ending(tokens, position)
        )
        digest = xxhash.xxh3_128()
        done = 0
        held = []
        for position in possible:
            digest.update(tokens[done:position].data)
            done = position
            if (namespace, position, _ending(tokens, position), digest.digest()) in self._anchors:
                held.append(position)
        yield from held[: -MAX_CANDIDATES - 1 : -1]

    def clear(self) -> None:
        """Forget everything."""
        self._anchors.clear()
        self._endings.clear()

    def _forget(self, key: _Anchor) -> None:
        del self._anchors[key]
        endings = self._endings[key[0]]
        endings[key[1:3]] -= 1
        if not endings[key[1:3]]:
            del endings[key[1:3]]
        if not endings:
            del self._endings[key[0]]


def _ending(tokens: NDArray[np.int64], position: int) -> bytes:
    return tokens[max(0, position - ENDING_TOKENS) : position].tobytes()
