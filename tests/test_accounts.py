"""Who may take how many pages of a tier: promises, room, and what a reset leaves (§11.5, §12.1)."""

from __future__ import annotations

import numpy as np
import pytest

from tiered_cache.accounts import HostPages, PageAccounts
from tiered_cache.errors import IntegrityError
from tiered_cache.keys import RadixKey
from tiered_cache.pools.allocator import PageAllocator, RunAllocator
from tiered_cache.stats import Counters
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import Boundary, InsertParams, PageIds, Tier

P = 4


class Bench:
    """A tree, both tiers' accounts, and prompts of whole pages."""

    def __init__(self, pages: int = 8, rows: int = 8) -> None:
        self.tree = RadixTree([FullComponent("full")], P)
        self.counters = Counters()
        self.host = HostPages(self.tree, [RunAllocator(rows, check=True)], self.counters)
        device = [PageAllocator(pages, check=True)]
        self.device = PageAccounts(self.tree, device, self.counters, self.host)

    def insert(self, name: str, pages: int) -> Boundary:
        base = 1000 * ord(name)
        key = RadixKey(list(range(base, base + pages * P)))
        ids = self.device.take_of(0, pages)
        return self.tree.insert(InsertParams(key, (ids,))).boundary

    def store(self, boundary: Boundary, pages: int) -> None:
        rows = self.host.take_up_to(0, pages)
        self.tree.commit_transfer(boundary, 0, Tier.HOST, rows)

    @property
    def free(self) -> int:
        return self.device.allocators[0].num_free


def ids(*pages: int) -> list[PageIds]:
    return [np.array(pages, np.int32)]


def test_what_is_promised_is_not_spare() -> None:
    """Free and evictable pages, less what others were promised."""
    b = Bench()
    held = b.insert("A", 2)
    b.insert("B", 3)
    assert b.device.spare(0) == 8
    b.tree.inc_lock_ref(held)
    b.device.promise(4)
    assert (b.device.spare(0), b.device.room_beside(1), b.device.short(1)) == (2, [1], 2)
    b.device.promise(-4)
    assert b.device.spare(0) == 6


def test_taking_makes_room_by_victims() -> None:
    """One synchronous step: oldest leaf first, nothing beyond what is short."""
    b = Bench()
    b.insert("A", 3)
    b.insert("B", 3)
    assert len(b.device.take_of(0, 4)) == 4
    assert (b.counters.pages_evicted, b.counters.tokens_dropped, b.free) == (3, 12, 1)


def test_taking_more_than_there_is_is_a_bug() -> None:
    """Whoever takes has the right to; if not, the accounts were wrong."""
    b = Bench()
    b.tree.inc_lock_ref(b.insert("A", 6))
    with pytest.raises(IntegrityError, match="3 pages were promised or spare, 2 are there"):
        b.device.take_of(0, 3)


def test_a_backed_victim_is_demoted_not_dropped() -> None:
    """Its pages are free, its tokens live on."""
    b = Bench()
    b.store(b.insert("A", 4), 4)
    evicted = b.device.evict([4])
    assert (evicted.dropped_tokens, b.free, b.counters.tokens_dropped) == (0, 8, 0)
    assert b.tree.evictable_size(0, Tier.HOST) == 4


def test_what_only_the_host_has_below_a_victim_goes_home_too() -> None:
    """An unbacked leaf that is dropped takes its host-only subtree: rows are not lost."""
    b = Bench()
    upper = b.insert("A", 4)
    lower = b.tree.cut(Boundary(upper.node, 2 * P))
    end = Boundary(upper.node, 4 * P)
    rows = b.host.take_up_to(0, 2)
    b.tree.commit_transfer(end, 0, Tier.HOST, rows)
    b.device.evict([2])
    assert lower.data[0].value is not None
    b.device.evict([2])
    assert b.host.allocators[0].num_free == 8
    assert b.tree.num_nodes == 0


def test_the_host_gives_what_it_has() -> None:
    """Nothing is promised there: fewer rows than asked for, never an error."""
    b = Bench(rows=4)
    boundary = b.insert("A", 3)
    b.store(boundary, 3)
    b.tree.inc_host_lock_ref(boundary)
    assert len(b.host.take_up_to(0, 3)) == 1
    assert len(b.host.take_up_to(0, 3)) == 0
    assert b.counters.pages_evicted_host == 0


def test_the_host_makes_room_by_its_leaves() -> None:
    """Host-only leaves go, in policy order; a mirror that is not spare stays."""
    b = Bench(rows=6)
    b.store(b.insert("A", 3), 3)
    b.device.evict([3])
    b.store(b.insert("B", 3), 3)
    assert len(b.host.take_up_to(0, 5)) == 3
    assert (b.counters.pages_evicted_host, b.counters.tokens_dropped) == (3, 12)


def test_a_mirror_that_storage_has_is_spare() -> None:
    """§8.3: given up before any leaf, for nothing is lost."""
    b = Bench(rows=6)
    b.store(b.insert("A", 3), 3)
    b.device.evict([3])
    mirror = b.insert("B", 3)
    b.store(mirror, 3)
    b.tree.believe_stored(mirror.node, 0, True)
    assert len(b.host.take_up_to(0, 3)) == 3
    assert mirror.node.data[0].host_value is None
    assert b.counters.tokens_dropped == 0


def test_a_reset_quarantines_what_is_held() -> None:
    """All else is free at once; a page with two holders comes home with the second."""
    b = Bench()
    taken = b.device.take(4)
    b.device.promise(3)
    first, second = [taken[0][:3]], [taken[0][1:]]
    b.device.reset([first, second])
    assert (b.free, b.device.promised, len(b.device.quarantined(0))) == (4, [0], 4)
    b.device.give_back_stale(first)
    assert (b.free, set(b.device.quarantined(0))) == (5, set(taken[0][1:]))
    b.device.give_back_stale(second)
    assert (b.free, len(b.device.quarantined(0))) == (8, 0)


def test_holders_from_several_resets() -> None:
    """Quarantine outlives the next reset, and adds up."""
    b = Bench()
    old = b.device.take(2)
    b.device.reset([old])
    young = b.device.take(3)
    b.device.reset([young])
    assert (b.free, len(b.device.quarantined(0))) == (3, 5)
    b.device.give_back_stale(young)
    assert b.free == 6
    b.device.give_back_stale(old)
    assert b.free == 8


def test_giving_back_after_a_reset_without_holders_is_nothing() -> None:
    """What was free at the reset is not freed again."""
    b = Bench()
    b.device.take(2)
    b.device.reset([])
    assert b.free == 8
    b.device.give_back_stale(ids())
    assert b.free == 8
