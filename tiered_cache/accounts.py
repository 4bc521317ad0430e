"""Who may take how many pages: the account that everything rests on (semantics §11.5).

Per component, at any time: `free + evictable ≥ Σ pages promised and not taken yet`. So taking what
was promised is one synchronous step that cannot fail, and making room never waits for anybody.

Owns: what is promised, and what a reset has left in other hands. The allocators hold the ids, the
tree decides who is evicted; only here do ids move between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiered_cache.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiered_cache.pools.allocator import PageAllocator
    from tiered_cache.stats import Counters
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import PageIds


class PageAccounts:
    """The device pages of all components, in dense component order.

    `promised`: per component, pages that admitted leases may still take. `smallest`: the capacity
    of the component with the fewest pages.
    """

    __slots__ = ("_counters", "_stale_refs", "_tree", "allocators", "promised", "smallest")

    def __init__(
        self, tree: RadixTree, allocators: Sequence[PageAllocator], counters: Counters
    ) -> None:
        self._tree = tree
        self._counters = counters
        self.allocators = tuple(allocators)
        self.smallest = min(allocator.capacity for allocator in self.allocators)
        self.promised = [0] * len(self.allocators)
        self._stale_refs: list[PageIds | None] = [None] * len(self.allocators)

    def spare(self, index: int) -> int:
        """Pages of a component that are neither held nor promised."""
        evictable = self._tree.components[index].device.evictable
        return self.allocators[index].num_free + evictable - self.promised[index]

    def room_beside(self, num_pages: int) -> list[int]:
        """Per component, evictable pages that may be protected when so many are taken besides."""
        return [self.spare(index) - num_pages for index in range(len(self.promised))]

    def promise(self, num_pages: int) -> None:
        """Promise so many pages of every component (or take the promise back, if negative)."""
        for index in range(len(self.promised)):
            self.promised[index] += num_pages

    def take(self, num_pages: int) -> list[PageIds]:
        """Ids of every component, making room by victims in policy order.

        The caller has the right to them: they are promised to it, or spare.
        """
        return [self._take(index, num_pages) for index in range(len(self.allocators))]

    def _take(self, index: int, num_pages: int) -> PageIds:
        allocator = self.allocators[index]
        short = num_pages - allocator.num_free
        if short > 0:
            self._make_room(index, short)
        ids = allocator.allocate(num_pages)
        if ids is None:
            there = allocator.num_free
            raise IntegrityError(f"{num_pages} pages were promised or spare, {there} are there")
        return ids

    def _make_room(self, index: int, num_pages: int) -> None:
        need = [0] * len(self.allocators)
        need[index] = num_pages
        evicted = self._tree.evict(need)
        self.give_back(evicted.device)
        self._counters.pages_evicted += sum(map(len, evicted.device))
        self._counters.tokens_dropped += evicted.dropped_tokens

    def give_back(self, pages: Sequence[PageIds]) -> None:
        """Ids of each component that nobody touches any more go home."""
        for allocator, ids in zip(self.allocators, pages, strict=True):
            allocator.free(ids)

    # --- across a reset ---------------------------------------------------------------------------

    def reset(self, held: Iterable[Sequence[PageIds]]) -> None:
        """The tree has forgotten everything: all pages are free, but those that are `held`.

        They are quarantined until each of their holders has given them back (`give_back_stale`).
        """
        self._stale_refs = [
            np.zeros(allocator.capacity, dtype=np.int32) if refs is None else refs
            for allocator, refs in zip(self.allocators, self._stale_refs, strict=True)
        ]
        for pages in held:
            for refs, ids in zip(self._stale_refs, pages, strict=True):
                assert refs is not None, "made above"
                refs[ids] += 1
        for index, allocator in enumerate(self.allocators):
            refs = self._stale_refs[index]
            assert refs is not None, "made above"
            allocator.reset(np.flatnonzero(refs).astype(np.int32))
            self.promised[index] = 0
        self._forget_settled()

    def give_back_stale(self, pages: Sequence[PageIds]) -> None:
        """A holder from before a reset has ended: what nobody else holds is free."""
        for allocator, refs, ids in zip(self.allocators, self._stale_refs, pages, strict=True):
            if refs is not None and len(ids):
                refs[ids] -= 1
                allocator.free(ids[refs[ids] == 0])
        self._forget_settled()

    def _forget_settled(self) -> None:
        self._stale_refs = [
            refs if refs is not None and refs.any() else None for refs in self._stale_refs
        ]

    def stale(self, index: int) -> PageIds:
        """Pages of a component that somebody still holds from before a reset."""
        refs = self._stale_refs[index]
        return np.flatnonzero(refs if refs is not None else ()).astype(np.int32)
