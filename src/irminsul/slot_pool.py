"""Who may write which rows: slots handed out in pages.

A *slot* is the place of one token's rows in all layers; a *page* is ``page_size`` consecutive slots. Requests get
whole pages, the radix cache takes and gives back whole pages.
"""

import numpy as np
from numpy.typing import NDArray

from irminsul.errors import InputError


class SlotPool:
    """The free list.

    Args:
        capacity: slots, a multiple of ``page_size``.
        page_size: slots in a page.
    """

    def __init__(self, capacity: int, page_size: int = 1) -> None:
        if page_size < 1 or capacity < page_size or capacity % page_size:
            raise InputError(
                f"pool capacity must be a positive multiple of the page size, got {capacity} and {page_size}"
            )
        self.capacity = capacity
        self.page_size = page_size
        # The end of the list is handed out first: a freed page is reused soon, while it is warm.
        self._free_pages = np.arange(capacity // page_size - 1, -1, -1, dtype=np.int32)
        self._n_free = len(self._free_pages)

    @property
    def free_slots(self) -> int:
        """Slots in free pages."""
        return self._n_free * self.page_size

    def pages(self, n_slots: int) -> int:
        """Pages needed for ``n_slots`` slots."""
        return -(-n_slots // self.page_size)

    def allocate(self, n_slots: int) -> NDArray[np.int32] | None:
        """Take pages for ``n_slots`` slots and return all their slots in order, or None if there are too few."""
        n_pages = self.pages(n_slots)
        if n_pages > self._n_free:
            return None
        pages = self._free_pages[self._n_free - n_pages : self._n_free][::-1]
        self._n_free -= n_pages
        return self._slots(pages)

    def free(self, slots: NDArray[np.int32]) -> None:
        """Give whole pages back; ``slots`` holds all slots of each page, in any order of pages."""
        pages = slots[slots % self.page_size == 0] // self.page_size
        assert len(pages) * self.page_size == len(slots), "a part of a page is freed"
        assert self._n_free + len(pages) <= len(self._free_pages), "more pages are freed than exist"
        self._free_pages[self._n_free : self._n_free + len(pages)] = pages
        self._n_free += len(pages)

    def free_list(self) -> NDArray[np.int32]:
        """Return every free slot (for the ownership check)."""
        return self._slots(self._free_pages[: self._n_free])

    def _slots(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        offsets = np.arange(self.page_size, dtype=np.int32)
        slots: NDArray[np.int32] = (pages[:, np.newaxis] * np.int32(self.page_size) + offsets).reshape(-1)
        return slots
