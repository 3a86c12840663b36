"""The registry beside a tree whose slots live on a GPU.

SGLang keeps slot numbers in device tensors, the registry reads them on the host. Waiting for a copy at every change
would hold up the scheduler, so changes are queued: each is copied to pinned memory behind the work that made it, and
applied, in order, by a later search.

With overlap scheduling a search runs while the GPU is busy with the last batch, and what was announced since that was
launched is copied behind it (SGLang lets its schedule stream wait for the forward's reads). Waiting for those would
undo the overlap, so they are left for the next step. Which changes those are follows from counts of launched and
processed batches, never from time: tensor-parallel ranks must see the same index.

So the registry lags behind the tree. It nominates donors; whether the tree still holds them, and in which slots, the
tree says when they are locked.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from irminsul.errors import InputError
from irminsul.matching.slot_store import walk_to_root
from irminsul.namespace import Namespace
from irminsul.plan import Run
from irminsul.registry import Registry

MAX_QUEUED = 4096
"""Changes; beyond this the oldest are waited for."""


@dataclass(frozen=True, eq=False)
class DonorPath:
    """Tokens of a donor's sequence, from position 0, and the slots they had when they were indexed."""

    tokens: NDArray[np.int64]
    slots: NDArray[np.int32]

    def covers(self, other: "DonorPath") -> bool:
        """Say whether another path is the beginning of this one: a slot belongs to one row, and a row to one path."""
        length = len(other.slots)
        return length <= len(self.slots) and bool(self.slots[length - 1] == other.slots[-1])


@dataclass(frozen=True, eq=False)
class _Change:
    """Slots on their way to the host, and what is to be done with them."""

    step: int
    """Batches that had been launched when it was announced."""
    slots: Tensor
    copied: Any
    """Event behind the copy; None on a CPU."""
    apply: Callable[[NDArray[np.int32]], None]


class DonorIndex:
    """A registry that hears of device slots.

    Args:
        capacity: slot numbers are below it.
        page_size: slots of a page; the tree holds whole pages.
        matcher: name of the matcher.
        seed: of the fingerprints; all ranks of a tensor-parallel group need the same, and it should not be guessable.
        max_bytes: largest index allowed.

    Raises:
        InputError: an unknown matcher, or an index larger than allowed.
    """

    def __init__(self, capacity: int, *, page_size: int, matcher: str, seed: int, max_bytes: int) -> None:
        self._make: Callable[[], Registry] = lambda: Registry(capacity, matcher=matcher, seed=seed)
        self.registry = self._make()
        if self.registry.nbytes > max_bytes:
            raise InputError(
                f"the index of {capacity:,} slots takes {self.registry.nbytes / 2**20:,.0f} MiB, more than "
                f"max_index_mib = {max_bytes // 2**20:,}"
            )
        self.registry.warm_up()
        self.page_size = page_size
        self.epoch = 0
        """Grows with every change that is applied; a search made at the same epoch gives the same runs."""
        self._queue: deque[_Change] = deque()
        self._dropped: list[Tensor] = []
        """Freed slots, not yet on their way: an eviction frees many small nodes."""
        self._launched = 0
        self._in_flight = 0

    def launched(self) -> None:
        """A batch is about to be launched."""
        self._send_dropped()
        self._launched += 1
        self._in_flight += 1

    def processed(self) -> None:
        """The result of a batch has reached the host."""
        self._in_flight -= 1

    def add(self, namespace: Namespace, tokens: NDArray[np.int64], slots: Tensor) -> None:
        """Announce exact rows in the tree.

        Args:
            namespace: scope.
            tokens: token ids from position 0, shape [n].
            slots: the tree's slot of each, shape [n], integers on any device.
        """
        if len(tokens):
            copied = tokens.astype(np.int32)
            self._send_dropped()
            self._enqueue(slots, lambda host: self._add(namespace, copied, host))

    def drop(self, slots: Tensor) -> None:
        """Announce rows that left the tree; slots that it never held are passed over."""
        if slots.numel():
            self._dropped.append(slots)

    def clear(self) -> None:
        """The tree was emptied."""
        self._queue.clear()
        self._dropped.clear()
        self.registry = self._make()
        self.epoch += 1

    def find(self, namespace: Namespace, tokens: NDArray[np.int32], start: int) -> list[Run]:
        """Search what has been applied (see `settle`); see `Registry.find`."""
        return self.registry.find(namespace, tokens, start)

    def settle(self, *, wait: bool = True) -> None:
        """Apply queued changes, in order, that do not have to wait for a batch in flight.

        Args:
            wait: False: only those whose slots have reached the host. A search settles with True before, so that
                what it sees does not depend on time.
        """
        if wait and not self._in_flight:
            self._send_dropped()
        while self._queue:
            change = self._queue[0]
            if self._in_flight and change.step == self._launched:
                return
            if change.copied is not None:
                if not wait and not change.copied.query():
                    return
                change.copied.synchronize()
            self._apply_first()

    def path_to(self, run: Run) -> DonorPath | None:
        """Return the sequence that a run's rows belong to, up to the end of the page of its last row.

        None if its beginning has left the tree, or if the run is not one stretch of it.
        """
        arrays = self.registry.store.arrays
        last = int(run.slots[-1])
        end = run.source_start + run.length
        # The tree holds whole pages, and a page is consecutive slots: what stands behind the run in its page is there.
        last += -end % self.page_size
        end += -end % self.page_size
        slots = np.empty(end, dtype=np.int32)
        if not walk_to_root(arrays, last, slots):
            return None
        if not np.array_equal(slots[run.source_start : run.source_start + run.length], run.slots):
            return None
        return DonorPath(arrays.token[slots].astype(np.int64), slots)

    def _add(self, namespace: Namespace, tokens: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        live = self.registry.store.arrays.namespace[slots] >= 0
        # A path through the tree is live up to some row and new behind it.
        start = len(slots) if live.all() else int(np.argmin(live))
        new = live[start:]
        if new.any():
            start_of_old = start + int(np.argmax(new))
            tokens, slots = tokens[:start_of_old], slots[:start_of_old]
        self.registry.add(namespace, tokens, slots, start)

    def _send_dropped(self) -> None:
        if self._dropped:
            slots = torch.cat([part.reshape(-1) for part in self._dropped])
            self._dropped.clear()
            # A slot may have been freed, given to rows that are not indexed, and freed again.
            self._enqueue(slots, lambda host: self.registry.drop(np.unique(host)))

    def _enqueue(self, slots: Tensor, apply: Callable[[NDArray[np.int32]], None]) -> None:
        narrow = slots.to(torch.int32)
        if narrow.device.type == "cpu":
            # A copy: the caller's tensor may be part of a table that changes.
            host, copied = narrow.clone(), None
        else:
            host = torch.empty(narrow.shape, dtype=torch.int32, pin_memory=True)
            host.copy_(narrow, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._queue.append(_Change(self._launched, host, copied, apply))
        while len(self._queue) > MAX_QUEUED:
            if copied is not None:
                self._queue[0].copied.synchronize()
            self._apply_first()

    def _apply_first(self) -> None:
        change = self._queue.popleft()
        change.apply(change.slots.numpy())
        self.epoch += 1
