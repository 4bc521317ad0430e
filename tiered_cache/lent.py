"""Pages that an engine has allocated by hand and not published: the counterpart of a lease's own.

Owns: which pages these are, so that the accounts add up, nothing is freed twice, and an engine
cannot publish what it does not have. Refuses to know: what they are for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tiered_cache.tree.components.base import NO_PAGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered_cache.accounts import PageAccounts
    from tiered_cache.types import InsertParams, PageIds

Flags = npt.NDArray[np.bool_]


class LentPages:
    """Per component, a flag for each page of the device. Made at the first use: most caches have no
    engine."""

    __slots__ = ("_accounts", "_flags", "_num_ids", "_page_size", "_stale", "since")

    def __init__(self, accounts: PageAccounts, page_size: int) -> None:
        self._accounts = accounts
        self._page_size = page_size
        self._flags: list[Flags] = []
        self._stale: list[Flags] = []  # lent before a reset, and not given back yet
        self._num_ids = 0  # of this epoch, over all components
        self.since = 0.0  # on the loop's clock, when there were none last

    def add(self, pages: Sequence[PageIds], now: float) -> None:
        """These were taken from the accounts."""
        if not self._num_ids:
            self.since = now
        self._num_ids += sum(map(len, pages))
        if not self._flags:
            sizes = [allocator.capacity for allocator in self._accounts.allocators]
            self._flags = [np.zeros(size, bool) for size in sizes]
            self._stale = [np.zeros(size, bool) for size in sizes]
        for flags, ids in zip(self._flags, pages, strict=True):
            flags[ids] = True

    def remove(self, pages: Sequence[PageIds]) -> None:
        """These are somebody else's now.

        Raises:
            ValueError: pages that are not lent; nothing changes.
        """
        self._check(pages, self._flags)
        for flags, ids in zip(self._flags, pages, strict=True):
            flags[ids] = False
        self._num_ids -= sum(map(len, pages))

    def give_back(self, pages: Sequence[PageIds]) -> None:
        """These go home.

        Raises:
            ValueError: pages that are not lent, or twice the same; nothing changes.
        """
        known = [now | stale for now, stale in zip(self._flags, self._stale, strict=True)]
        self._check(pages, known)
        if not self._flags:
            return
        stale = [ids[flags[ids]] for flags, ids in zip(self._stale, pages, strict=True)]
        current = [ids[flags[ids]] for flags, ids in zip(self._flags, pages, strict=True)]
        for flags, ids in zip(self._stale, stale, strict=True):
            flags[ids] = False
        self._accounts.give_back_stale(stale)
        self.remove(current)
        self._accounts.give_back(current)

    def check(self, params: InsertParams) -> None:
        """Refuse an insert of pages that are not lent, beyond what the tree owns already."""
        first = params.prev_prefix_len // self._page_size
        length = params.length if params.length is not None else len(params.key)
        self._check([ids[first : length // self._page_size] for ids in params.pages], self._flags)

    def adopted(self, canonical: Sequence[PageIds], params: InsertParams) -> None:
        """An insert has ended: what the tree names now is not lent any more."""
        first = params.prev_prefix_len // self._page_size
        for flags, theirs, ours in zip(self._flags, canonical, params.pages, strict=True):
            ids = theirs[first:]
            taken = ids[ids == ours[first : first + len(ids)]]
            flags[taken] = False
            self._num_ids -= len(taken)

    def pages(self, index: int) -> PageIds:
        """All of a component that are lent."""
        if not self._flags:
            return NO_PAGES
        return np.flatnonzero(self._flags[index]).astype(np.int32)

    def held(self) -> list[PageIds]:
        """All of them, per component."""
        return [self.pages(index) for index in range(len(self._accounts.allocators))]

    def reset(self) -> None:
        """The accounts have quarantined them until they are given back."""
        self._stale = [now | stale for now, stale in zip(self._flags, self._stale, strict=True)]
        self._flags = [np.zeros_like(flags) for flags in self._flags]
        self._num_ids = 0

    def __len__(self) -> int:
        return self._num_ids

    def _check(self, pages: Sequence[PageIds], known: Sequence[Flags]) -> None:
        for index, ids in enumerate(pages):
            if not len(ids):
                continue
            flags = known[index] if known else np.zeros(0, bool)
            legal = (ids >= 0) & (ids < len(flags))
            if not legal.all() or not flags[ids].all() or len(np.unique(ids)) < len(ids):
                raise ValueError(
                    f"pages {ids[:8].tolist()} are not (all) lent to the engine, or named twice: "
                    "pages come from `allocate`, and go back once"
                )
