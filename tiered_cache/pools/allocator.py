"""Which page ids of a component's pools on one tier are free.

A numpy stack: taking and giving back are one slice each, however many. Ids come out in rising runs,
and what is given back as a run goes out as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiered_cache.errors import IntegrityError

if TYPE_CHECKING:
    from tiered_cache.types import PageIds


class PageAllocator:
    """Ids `0 .. capacity − 1`.

    Args:
        capacity: pages (or state slots) that there are.
        check: keep a bitmap and refuse double frees and foreign ids. Costs more than the allocation
            itself, so it is for tests and for hunting a bug.
    """

    __slots__ = ("_is_free", "_num_free", "_stack", "capacity")

    def __init__(self, capacity: int, *, check: bool = False) -> None:
        if capacity < 1:
            raise ValueError(f"a pool needs at least one page, not {capacity}")
        self.capacity = capacity
        self._stack = np.empty(capacity, dtype=np.int32)
        self._is_free = np.ones(capacity, dtype=bool) if check else None
        self._num_free = capacity
        self.reset()

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, num_pages: int) -> PageIds | None:
        """`num_pages` ids, or None when there are not as many: all or nothing."""
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > self._num_free:
            return None
        rest: int = self._num_free - num_pages
        ids = self._stack[rest : self._num_free][::-1].copy()
        self._num_free = rest
        if self._is_free is not None:
            self._is_free[ids] = False
        return ids

    def free(self, ids: PageIds) -> None:
        """Take ids back.

        Raises:
            IntegrityError: more than there are; in check mode also an id that is free already or
                none of ours.
        """
        num_pages = len(ids)
        if not num_pages:
            return
        if self._num_free + num_pages > self.capacity:
            raise IntegrityError(
                f"{num_pages} pages given back to a pool of {self.capacity} "
                f"that has {self._num_free} free already"
            )
        if self._is_free is not None:
            self._check_owned(ids)
            self._is_free[ids] = True
        self._stack[self._num_free : self._num_free + num_pages] = ids[::-1]
        self._num_free += num_pages

    def free_ids(self) -> PageIds:
        """A copy of the free ids (for checks)."""
        return self._stack[: self._num_free].copy()

    def reset(self, taken: PageIds | None = None) -> None:
        """All ids are free again, but those `taken`."""
        is_free = np.ones(self.capacity, dtype=bool)
        if taken is not None:
            is_free[taken] = False
        ids = np.flatnonzero(is_free)
        self._num_free = len(ids)
        self._stack[: len(ids)] = ids[::-1]
        if self._is_free is not None:
            self._is_free = is_free

    def _check_owned(self, ids: PageIds) -> None:
        assert self._is_free is not None
        for page in ids.tolist():
            if not 0 <= page < self.capacity:
                raise IntegrityError(f"page {page} is not in a pool of {self.capacity}")
        taken, counts = np.unique(ids, return_counts=True)
        twice = taken[(counts > 1) | self._is_free[taken]]
        if len(twice):
            raise IntegrityError(f"pages {twice.tolist()} are given back twice")

    def __repr__(self) -> str:
        return f"<PageAllocator {self._num_free} of {self.capacity} free>"
