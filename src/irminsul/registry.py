"""What the cache holds, by content: namespace, slot store and matcher behind one door.

The registry owns no row. Whoever owns the rows (our radix cache, or SGLang's tree) says which slots became exact and
which were freed; between the two a slot can be found by content. A run that was found names slots, so its donor must
be locked from the search until its rows are copied (RadixCache.lock_rows).
"""

import secrets
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from irminsul.errors import InputError
from irminsul.matching.chunks import CHUNK_MATCHERS, make_chunk_matcher
from irminsul.matching.slot_store import SlotStore
from irminsul.matching.winnow import WinnowConfig, WinnowMatcher
from irminsul.namespace import Namespace
from irminsul.plan import Run


class Matcher(Protocol):
    """Finds runs of a prompt in the rows of a slot store."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def add(
        self, store: SlotStore, number: int, tokens: NDArray[np.int32], slots: NDArray[np.int32], start: int
    ) -> None:
        """Index a sequence whose positions from ``start`` are new; all its slots are live in the store."""
        ...

    def drop(self, slots: NDArray[np.int32]) -> None:
        """Forget freed slots."""
        ...

    def find(self, store: SlotStore, number: int, tokens: NDArray[np.int32], start: int) -> list[Run]:
        """Return disjoint, verified runs of ``tokens[start:]``, ascending."""
        ...


class Registry:
    """Content index of live exact rows.

    Args:
        capacity: slots; memory is about 40 bytes for each, whatever they hold.
        matcher: a matcher name from MATCHERS.
        seed: key of the fingerprints; random if None.
        special_tokens: special token ids of the chat template; the anchored matchers need them, the others have no use
            for them.
    """

    def __init__(
        self,
        capacity: int,
        *,
        matcher: str = "winnow64",
        seed: int | None = None,
        special_tokens: Sequence[int] = (),
    ) -> None:
        self.name = matcher
        self._special_tokens = special_tokens
        self.store = SlotStore(capacity)
        self.matcher = make_matcher(matcher, capacity, secrets.randbits(63) if seed is None else seed, special_tokens)

    def __len__(self) -> int:
        """Return the number of fingerprints held."""
        return len(self.matcher)

    def warm_up(self) -> None:
        """Have the compiled parts compiled now, not under the first request (seconds once, then read from disk)."""
        scratch = Registry(256, matcher=self.name, seed=0, special_tokens=self._special_tokens)
        tokens = np.arange(256, dtype=np.int32)
        scratch.add(Namespace(), tokens, tokens, 0)
        scratch.find(Namespace(), tokens, 0)
        scratch.drop(tokens)

    @property
    def nbytes(self) -> int:
        """Bytes held by the store and the index."""
        return self.store.nbytes + self.matcher.nbytes

    def add(self, namespace: Namespace, tokens: NDArray[np.int32], slots: NDArray[np.int32], start: int) -> None:
        """Announce exact rows: positions [start, n) of a sequence are new, shape [n] each, int32."""
        if start < len(slots):
            number = self.store.add(namespace, tokens, slots, start)
            self.matcher.add(self.store, number, tokens, slots, start)

    def drop(self, slots: NDArray[np.int32]) -> None:
        """Announce freed rows: their entries die now."""
        self.matcher.drop(slots)
        self.store.drop(slots)

    def find(self, namespace: Namespace, tokens: NDArray[np.int32], start: int) -> list[Run]:
        """Return runs of ``tokens[start:]`` held by live rows of the same namespace, ascending and disjoint."""
        number = self.store.namespace_id(namespace)
        return [] if number is None else self.matcher.find(self.store, number, tokens, start)


def make_matcher(name: str, capacity: int, seed: int, special_tokens: Sequence[int] = ()) -> Matcher:
    """Build a matcher by name; InputError lists the valid names.

    Args:
        name: one of MATCHERS.
        capacity: slots of the store.
        seed: key of the fingerprints.
        special_tokens: needed by the anchored matchers.
    """
    if name not in MATCHERS:
        raise InputError(f"unknown matcher {name!r}; valid matchers: {', '.join(MATCHERS)}")
    if name in CHUNK_MATCHERS:
        return make_chunk_matcher(name, capacity, seed, special_tokens)
    guarantee = int(name.removeprefix("winnow"))
    return WinnowMatcher(capacity, WinnowConfig.for_guarantee(guarantee), seed)


MATCHERS = (*CHUNK_MATCHERS, "winnow32", "winnow64", "winnow128")
