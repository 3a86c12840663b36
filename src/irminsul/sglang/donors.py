"""The registry beside a tree whose slots live on a GPU.

SGLang keeps slot numbers in device tensors, the registry reads them on the host. Waiting for a copy at every change
would hold up the scheduler, so changes are queued: each is copied to pinned memory behind the work that made it, and
applied, in order, the next time anything is looked up. By then the copies have long ended.
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
"""Changes; beyond this they are applied at once."""


@dataclass(frozen=True, eq=False)
class DonorPath:
    """Tokens and slots of a donor's sequence, from position 0."""

    tokens: NDArray[np.int64]
    slots: NDArray[np.int32]


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
        """Grows with every change; a search made at the same epoch gives the same runs."""
        self._queue: deque[tuple[Tensor, Any, Callable[[NDArray[np.int32]], None]]] = deque()

    def add(self, namespace: Namespace, tokens: NDArray[np.int64], slots: Tensor) -> None:
        """Announce exact rows in the tree.

        Args:
            namespace: scope.
            tokens: token ids from position 0, shape [n].
            slots: the tree's slot of each, shape [n], integers on any device.
        """
        if len(tokens):
            copied = tokens.astype(np.int32)
            self._enqueue(slots, lambda host: self._add(namespace, copied, host))

    def drop(self, slots: Tensor) -> None:
        """Announce rows that left the tree; slots that it never held are passed over."""
        if slots.numel():
            self._enqueue(slots, self.registry.drop)

    def clear(self) -> None:
        """The tree was emptied."""
        self._queue.clear()
        self.registry = self._make()
        self.epoch += 1

    def find(self, namespace: Namespace, tokens: NDArray[np.int32], start: int) -> list[Run]:
        """Apply what is queued, then search; see `Registry.find`."""
        self.settle()
        return self.registry.find(namespace, tokens, start)

    def settle(self, *, wait: bool = True) -> None:
        """Apply queued changes in order: all of them, or those whose slots have reached the host."""
        while self._queue:
            host, copied, apply = self._queue[0]
            if copied is not None:
                if not wait and not copied.query():
                    return
                copied.synchronize()
            self._queue.popleft()
            apply(host.numpy())

    def path_to(self, run: Run) -> DonorPath | None:
        """Return the sequence that a run's rows belong to, up to the end of the page of its last row.

        None if its beginning has left the tree, or if the run is not one stretch of it.
        """
        self.settle()
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

    def _enqueue(self, slots: Tensor, apply: Callable[[NDArray[np.int32]], None]) -> None:
        self.epoch += 1
        narrow = slots.to(torch.int32)
        if narrow.device.type == "cpu":
            # A copy: the caller's tensor may be part of a table that changes.
            self._queue.append((narrow.clone(), None, apply))
        else:
            host = torch.empty(narrow.shape, dtype=torch.int32, pin_memory=True)
            host.copy_(narrow, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._queue.append((host, copied, apply))
        if len(self._queue) > MAX_QUEUED:
            self.settle()
