"""Who may take how many pages of a tier: the accounts that everything rests on (semantics §11.5).

On the device, per component, at any time: `free + evictable ≥ Σ pages promised and not taken yet`.
So taking what was promised is one synchronous step that cannot fail, and making room never waits
for anybody. Who holds a window lets go of it behind himself and needs as much again, while others
may hold on to it: so there each holder but one counts like a promise. On the host nothing is
promised: a transfer takes what there is.

Owns: what is promised, and what a reset has left in other hands. The allocators hold the ids, the
tree decides who is evicted; only here do ids move between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiered_cache.errors import IntegrityError
from tiered_cache.tree.components.base import NO_PAGES, join
from tiered_cache.tree.node import BASE
from tiered_cache.types import NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiered_cache.pools.allocator import PageAllocator
    from tiered_cache.stats import Counters
    from tiered_cache.tree.components.base import Flags
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import EvictResult, PageIds


class TierPages:
    """The pages of all components on one tier, in dense component order."""

    __slots__ = ("_counters", "_has_gaps", "_stale_refs", "_tree", "allocators")

    def __init__(
        self, tree: RadixTree, allocators: Sequence[PageAllocator], counters: Counters
    ) -> None:
        self._tree = tree
        self._counters = counters
        self.allocators = tuple(allocators)
        self._has_gaps = any(component.has_tombstones for component in tree.components)
        self._stale_refs: list[PageIds | None] = [None] * len(self.allocators)

    def give_back(self, pages: Sequence[PageIds]) -> None:
        """Ids of each component that nobody touches any more go home (−1: none there)."""
        for allocator, ids in zip(self.allocators, pages, strict=True):
            allocator.free(ids[ids != NO_PAGE] if self._has_gaps else ids)

    def only(self, index: int, ids: PageIds) -> list[PageIds]:
        """Ids of one component, and of the others none: by component."""
        by_component: list[PageIds] = [NO_PAGES] * len(self.allocators)
        by_component[index] = ids
        return by_component

    def evict(self, need: Sequence[int]) -> EvictResult:
        """Give up so many pages of each component, or what can go."""
        raise NotImplementedError

    def _evict_of(self, index: int, num_pages: int) -> None:
        """`evict` of one component."""
        need = [0] * len(self.allocators)
        need[index] = num_pages
        self.evict(need)

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
                refs[ids[ids != NO_PAGE]] += 1
        for allocator, refs in zip(self.allocators, self._stale_refs, strict=True):
            assert refs is not None, "made above"
            allocator.reset(np.flatnonzero(refs).astype(np.int32))
        self._forget_settled()

    def give_back_stale(self, pages: Sequence[PageIds]) -> None:
        """A holder from before a reset has ended: what nobody else holds is free."""
        for allocator, refs, ids in zip(self.allocators, self._stale_refs, pages, strict=True):
            if refs is not None and len(ids):
                ids = ids[ids != NO_PAGE]
                refs[ids] -= 1
                allocator.free(ids[refs[ids] == 0])
        self._forget_settled()

    def _forget_settled(self) -> None:
        self._stale_refs = [
            refs if refs is not None and refs.any() else None for refs in self._stale_refs
        ]

    def quarantined(self, index: int) -> PageIds:
        """Pages of a component that somebody still holds, and the tree does not."""
        refs = self._stale_refs[index]
        return np.flatnonzero(refs if refs is not None else ()).astype(np.int32)


class HostPages(TierPages):
    """The host's pages: rows of the arenas.

    Storage reads the rows that it is to keep until its call has really ended. A host lock holds
    them, but no page of the device: a node whose base has only that one goes when the device needs
    it, and what of a window or a state is on the host goes with it. Rows that are `lent` then are
    nobody's, until they are not.
    """

    __slots__ = ("_lent", "_orphans")

    def __init__(
        self, tree: RadixTree, allocators: Sequence[PageAllocator], counters: Counters
    ) -> None:
        super().__init__(tree, allocators, counters)
        # By component: how often each row is lent, if any is; whether the tree has given it up.
        self._lent: list[PageIds | None] = [None] * len(self.allocators)
        self._orphans: list[Flags | None] = [None] * len(self.allocators)

    def lend(self, index: int, ids: PageIds) -> None:
        """Somebody reads these rows of a component, which are the tree's, until `returned`, or a
        reset."""
        lent = self._lent[index]
        if lent is None:
            self._lent[index] = lent = np.zeros(self.allocators[index].capacity, np.int32)
            self._orphans[index] = np.zeros(len(lent), np.bool_)
        lent[ids] += 1

    def returned(self, index: int, ids: PageIds) -> None:
        """Nobody touches them any more on behalf of that loan."""
        lent, orphans = self._lent[index], self._orphans[index]
        assert lent is not None, "they were lent"
        assert orphans is not None, "likewise"
        lent[ids] -= 1
        free = ids[orphans[ids] & (lent[ids] == 0)]
        orphans[free] = False
        self.allocators[index].free(free)
        if not lent.any():
            self._lent[index] = self._orphans[index] = None

    def give_back(self, pages: Sequence[PageIds]) -> None:
        """Likewise; of what is lent, when it has been returned."""
        if any(lent is not None for lent in self._lent):
            pages = [self._not_lent(index, ids) for index, ids in enumerate(pages)]
        super().give_back(pages)

    def _not_lent(self, index: int, ids: PageIds) -> PageIds:
        lent, orphans = self._lent[index], self._orphans[index]
        if lent is None or orphans is None or not len(ids):
            return ids
        is_lent = (ids != NO_PAGE) & (lent[ids] > 0)
        orphans[ids[is_lent]] = True
        free: PageIds = ids[~is_lent]
        return free

    def reset(self, held: Iterable[Sequence[PageIds]]) -> None:
        """Likewise; what is lent is held."""
        self._lent = [None] * len(self.allocators)
        self._orphans = [None] * len(self.allocators)
        super().reset(held)

    def quarantined(self, index: int) -> PageIds:
        """Likewise, with what is lent."""
        stale, orphans = super().quarantined(index), self._orphans[index]
        if orphans is not None:
            stale = join([stale, np.flatnonzero(orphans).astype(np.int32)])
        return stale

    def take_up_to(self, index: int, num_pages: int) -> PageIds:
        """Ids of one component, as many as there can be made room for: mirrors go first, then
        leaves in policy order (semantics §8)."""
        allocator = self.allocators[index]
        short = num_pages - allocator.num_free
        if short > 0:
            self._evict_of(index, short)
        ids = allocator.allocate(min(num_pages, allocator.num_free))
        assert ids is not None, "no more than are free"
        return ids

    def evict(self, need: Sequence[int]) -> EvictResult:
        """Give up so many pages of each component, or what can go."""
        evicted = self._tree.evict_host(need)
        self.take_back(evicted)
        return evicted

    def take_back(self, given_up: EvictResult) -> None:
        """What the tree has given up on the host goes home, and is counted."""
        self.give_back(given_up.host)
        self._counters.pages_evicted_host += sum(map(len, given_up.host))
        self._counters.tokens_dropped += given_up.dropped_tokens


class PageAccounts(TierPages):
    """The device's pages.

    `promised`: per component, ids that admitted leases may still take. `capacity`: pages of the
    first component.
    """

    __slots__ = ("_host", "_is_window", "_per_page", "capacity", "promised")

    def __init__(
        self,
        tree: RadixTree,
        allocators: Sequence[PageAllocator],
        counters: Counters,
        host: HostPages | None = None,
    ) -> None:
        super().__init__(tree, allocators, counters)
        self._host = host
        self.promised = [0] * len(self.allocators)
        self.capacity = self.allocators[BASE].capacity
        self._per_page = [component.is_per_page for component in tree.components]
        self._is_window = [component.is_window for component in tree.components]

    def spare(self, index: int) -> int:
        """Pages of a component that are neither held nor promised."""
        device = self._tree.components[index].device
        spare = self.allocators[index].num_free + device.evictable - self.promised[index]
        return spare - self.shared(index) if self._is_window[index] else spare

    def shared(self, index: int) -> int:
        """Pages of a window that there is room for besides, as several hold the same ones."""
        device = self._tree.components[index].device
        return device.held - device.protected if self._is_window[index] else 0

    def room_beside(self, num_pages: int) -> list[int]:
        """Per component, evictable pages that may be protected when so many are taken besides (of
        those that have an id per page)."""
        return [
            self.spare(index) - (num_pages if per_page else 0)
            for index, per_page in enumerate(self._per_page)
        ]

    def short(self, num_pages: int) -> int:
        """Pages that must be evicted, of the component that is shortest of free ones, before so
        many more than what is promised can be taken."""
        return max(
            (num_pages if per_page else 0) + promised - allocator.num_free
            for allocator, promised, per_page in zip(
                self.allocators, self.promised, self._per_page, strict=True
            )
        )

    def missing(self, need: Sequence[int]) -> list[int]:
        """Per component, pages to evict before so many are free besides what is promised."""
        return [
            max(0, pages + promised - allocator.num_free) if pages else 0
            for pages, promised, allocator in zip(need, self.promised, self.allocators, strict=True)
        ]

    def promise(self, num_ids: int, index: int = BASE) -> None:
        """Promise so many more ids of a component (or take the promise back, if negative)."""
        self.promised[index] += num_ids

    def take(self, num_pages: int) -> list[PageIds]:
        """Ids for so many pages, of every component (−1 where it has none per page), making room by
        victims in policy order.

        The caller has the right to them: they are promised to it, or spare.
        """
        return [
            self.take_of(index, num_pages) if per_page else np.full(num_pages, NO_PAGE, np.int32)
            for index, per_page in enumerate(self._per_page)
        ]

    def take_of(self, index: int, num_pages: int) -> PageIds:
        """`take` of one component."""
        allocator = self.allocators[index]
        short = num_pages - allocator.num_free
        if short > 0:
            self._evict_of(index, short)
        ids = allocator.allocate(num_pages)
        if ids is None:
            there = allocator.num_free
            raise IntegrityError(f"{num_pages} pages were promised or spare, {there} are there")
        return ids

    def evict(self, need: Sequence[int]) -> EvictResult:
        """Give up so many pages of each component, or what can go."""
        evicted = self._tree.evict(need)
        self.give_back(evicted.device)
        if self._host is not None:  # what hung below a victim that only the host had
            self._host.give_back(evicted.host)
        counters = self._counters
        counters.pages_evicted += sum(map(len, evicted.device))
        counters.tokens_dropped += evicted.dropped_tokens
        return evicted

    def reset(self, held: Iterable[Sequence[PageIds]]) -> None:
        super().reset(held)
        self.promised = [0] * len(self.allocators)
