"""Which page holds which tokens of one sequence: a table per component, as kernels take it.

Owns: the entries and their number. Refuses to know: whose the pages are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_cache.types import NO_PAGE, PageIds

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


INT32: Final = np.dtype(np.int32)

NO_ENTRIES: Final[PageIds] = np.empty(0, INT32)
"""What a table starts with; it is replaced, never written to."""


class PageTable:
    """Page `i` of the sequence is page `ids[component][i]` of the component's pools (−1: none yet).

    Entries change in place, so a view stays true, until a longer sequence needs a longer array; a
    worker thread that reads the entries of its own chunk is undisturbed by either. `version` rises
    with every change. `num_pages`: entries in use, the same for all components.
    """

    __slots__ = ("_page_size", "ids", "num_pages", "version")

    def __init__(self, num_components: int, page_size: int) -> None:
        self._page_size = page_size
        self.ids = [NO_ENTRIES] * num_components
        self.num_pages = 0
        self.version = 0

    def write(self, first: int, pages: Sequence[PageIds]) -> None:
        """Entries from `first` on, per component; the table grows if they end beyond it."""
        stop = first + len(pages[0])
        if stop > len(self.ids[0]):
            self.make_room(stop)
        for index, fresh in enumerate(pages):
            self.ids[index][first:stop] = fresh
        if stop > self.num_pages:
            self.num_pages = stop
        self.version += 1

    def cut(self, num_pages: int) -> list[PageIds]:
        """Drop the entries from `num_pages` on; returns what they were, per component."""
        dropped = [ids[num_pages : self.num_pages].copy() for ids in self.ids]
        for ids in self.ids:
            ids[num_pages : self.num_pages] = NO_PAGE
        self.num_pages = min(self.num_pages, num_pages)
        self.version += 1
        return dropped

    def make_room(self, num_pages: int) -> None:
        """Have entries for that many pages (amortised)."""
        for index, ids in enumerate(self.ids):
            used = len(ids)
            if num_pages > used:
                longer = np.empty(max(num_pages, used * 3 // 2), INT32)
                if used:
                    longer[:used] = ids
                    longer[used:] = NO_PAGE
                else:
                    longer.fill(NO_PAGE)  # every lease comes here: a third of `np.full`
                self.ids[index] = longer

    def view(self, index: int, num_pages: int) -> PageIds:
        """The first entries of a component, read-only."""
        if num_pages > len(self.ids[index]):
            self.make_room(num_pages)
        view = self.ids[index][:num_pages]
        view.flags.writeable = False
        return view

    def slots(self, index: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Device slots of the tokens `[start, stop)`: `page id × page_size + offset`.

        Raises:
            ValueError: tokens that have no page yet.
        """
        size = self._page_size
        if not 0 <= start <= stop or stop > self.num_pages * size:
            end = self.num_pages * size
            raise ValueError(f"tokens [{start}, {stop}) have no slots: pages are taken up to {end}")
        pages = self.ids[index][start // size : -(-stop // size)].astype(np.int64)
        slots = (pages[:, None] * size + np.arange(size)).reshape(-1)
        offset = start % size
        return slots[offset : offset + stop - start]
