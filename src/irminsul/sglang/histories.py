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

import numpy as np
import xxhash
from numpy.typing import NDArray

from irminsul.namespace import Namespace

MARK = 1 << 30
"""Added to a token id; above any vocabulary, below 2^31."""
MAX_ANCHORS = 65_536
MAX_CANDIDATES = 8
"""Anchors of one prompt that are looked up, deepest first."""


def mark_tokens(token_ids: "array[int]", start: int) -> "array[int]":
    """Return a copy of int64 token ids whose ids from ``start`` on are marked."""
    marked = np.array(token_ids, dtype=np.int64)
    marked[start:] += MARK
    return array("q", marked.tobytes())


class Histories:
    """Anchors of derived rows, by namespace, position and prefix; the least recently used are forgotten.

    Args:
        capacity: anchors remembered. A forgotten one costs its session a recomputation, nothing else.
    """

    def __init__(self, capacity: int = MAX_ANCHORS) -> None:
        self._capacity = capacity
        self._anchors: OrderedDict[tuple[Namespace, int, bytes], None] = OrderedDict()
        self._positions: defaultdict[Namespace, dict[int, int]] = defaultdict(dict)

    def __len__(self) -> int:
        """Return the number of anchors remembered."""
        return len(self._anchors)

    def add(self, namespace: Namespace, tokens: NDArray[np.int64], anchor: int) -> None:
        """Remember that rows derived from position ``anchor`` on continue ``tokens[:anchor]``."""
        key = (namespace, anchor, xxhash.xxh3_128_digest(tokens[:anchor].data))
        if key not in self._anchors:
            positions = self._positions[namespace]
            positions[anchor] = positions.get(anchor, 0) + 1
            self._anchors[key] = None
            if len(self._anchors) > self._capacity:
                self._forget(next(iter(self._anchors)))
        self._anchors.move_to_end(key)

    def discard(self, namespace: Namespace, tokens: NDArray[np.int64], anchor: int) -> None:
        """Forget an anchor below which the tree holds nothing any more."""
        key = (namespace, anchor, xxhash.xxh3_128_digest(tokens[:anchor].data))
        if key in self._anchors:
            self._forget(key)

    def candidates(self, namespace: Namespace, tokens: NDArray[np.int64], exact: int) -> Iterator[int]:
        """Yield anchors of histories that may continue ``tokens[:exact]``, which the tree holds; deepest first."""
        positions = sorted(at for at in self._positions.get(namespace, ()) if at <= exact)
        if not positions:
            return
        digest = xxhash.xxh3_128()
        done = 0
        held = []
        for position in positions:
            digest.update(tokens[done:position].data)
            done = position
            if (namespace, position, digest.digest()) in self._anchors:
                held.append(position)
        yield from held[: -MAX_CANDIDATES - 1 : -1]

    def clear(self) -> None:
        """Forget everything."""
        self._anchors.clear()
        self._positions.clear()

    def _forget(self, key: tuple[Namespace, int, bytes]) -> None:
        del self._anchors[key]
        namespace, anchor, _ = key
        positions = self._positions[namespace]
        positions[anchor] -= 1
        if not positions[anchor]:
            del positions[anchor]
        if not positions:
            del self._positions[namespace]
