"""Cases that one tree can have, host values as data included: each is how such a cache has really
failed for its users, with the value that is right here. The numbers are the project's."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

from tests.tree.helpers import Rig, order_of, path_to, seq, spans
from tiered_cache.errors import LockError, StaleError
from tiered_cache.keys import RadixKey
from tiered_cache.tree.locks import Receipt
from tiered_cache.tree.node import Node
from tiered_cache.types import InsertParams, Tier


def room_for(rig: Rig, num_tokens: int) -> None:
    """Evict what a request of that many tokens needs, as a cache does."""
    short = num_tokens - rig.device.num_free * rig.page_size
    if short > 0:
        rig.evict(short)


# --- match, insert, split -------------------------------------------------------------------------


def test_b01_keys_shorter_than_a_page() -> None:
    """B01: they match and cache nothing, whatever is there, and nothing of them stays."""
    rig = Rig(page_size=16, pages=10)
    assert rig.hit(seq("A", 10)) == (0, 0)
    short = RadixKey(seq("A", 10))
    tail = rig.device.allocate(1)  # the page that the 10 tokens are in: the request's own
    assert tail is not None
    result = rig.tree.insert(InsertParams(short, (tail,)))
    assert (result.length, len(result.duplicates[0])) == (0, 0)
    rig.device.free(tail)
    assert rig.device.num_free == 10
    rig.publish(seq("A", 40))
    assert rig.tree.evictable_size() == 2
    assert rig.hit(seq("A", 32) + seq("X", 5)) == (32, 0)
    assert rig.hit(seq("A", 24)) == (16, 0)
    rig.check()
    rig.evict(1000)
    assert rig.device.num_free == rig.device.capacity
    rig.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_b02_every_child_hangs_under_the_key_of_its_own_tokens(page_size: int) -> None:
    """B02: after nested splits every eviction, one leaf at a time, finds its parent; in the end
    there is nothing."""
    rig = Rig(page_size=page_size)
    rig.publish(seq("A", 16))
    rig.publish(seq("A", 8) + seq("B", 8))
    rig.publish(seq("A", 4) + seq("C", 4))
    assert spans(rig.tree) == [(0, 4), (4, 8), (4, 8), (8, 16), (8, 16)]
    rig.check()  # proves the child keys
    for left in (4, 3, 2, 1, 0):
        assert rig.evict(1).count(0) > 0
        assert rig.tree.num_nodes == left
        rig.check()
    assert rig.device.num_free == rig.device.capacity


def test_b03_a_split_does_not_make_the_unmatched_suffix_recent() -> None:
    """B03: the cold rest of a partly used sequence goes first, then what is older than its used
    front."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.publish(seq("B", 64))
    receipt = rig.lock(seq("A", 16) + seq("X", 4))
    rig.tree.count_hits(receipt)
    rig.tree.dec_lock_ref(receipt)
    assert rig.evict(48).count(0) == 3
    assert [(node.start, node.end) for node in order_of(rig.tree)] == [(0, 64), (0, 16)]
    assert rig.evict(64).count(0) == 4
    assert rig.hit(seq("B", 64)) == (0, 0)
    assert rig.hit(seq("A", 64)) == (16, 0)
    rig.check()


def test_b03_neither_does_a_probe_or_an_insert() -> None:
    """B03, others of its kind: a partial match without a lease, and a request that publishes its
    own branch."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.publish(seq("B", 64))
    rig.match(seq("A", 32))
    rig.publish(seq("A", 16) + seq("X", 16))
    assert [(node.start, node.end) for node in order_of(rig.tree)][:2] == [(16, 64), (0, 64)]
    rig.check()


def test_b04_a_request_may_end_in_the_middle_of_an_evicted_node() -> None:
    """B04: the host's part of a partly matched node is a hit, comes back with the right bytes, and
    the rest stays."""
    rig = Rig()
    rig.host_only(seq("A", 64))
    tokens = seq("A", 40) + seq("X", 4)
    assert rig.hit(tokens) == (0, 32)
    rig.spoil_free_pages()
    assert rig.load_back(tokens) == 32
    assert rig.hit(tokens) == (32, 0)
    assert rig.hit(seq("A", 64)) == (32, 32)
    rig.check()


def test_b06_a_finished_request_does_not_free_what_the_tree_has_adopted() -> None:
    """B06: A was only on the host; a request that computed it anew gives its pages to the tree."""
    rig = Rig()
    rig.host_only(seq("A", 64))
    rig.publish_own(seq("A", 64))
    assert rig.device.num_free == rig.device.capacity - 4
    rig.spoil_free_pages()
    assert rig.hit(seq("A", 64)) == (64, 0)
    rig.check()


class Request:
    """A request that publishes its prompt chunk by chunk, as an engine that owns its pages does."""

    def __init__(self, rig: Rig, length: int) -> None:
        self.rig, self.tree, self.length = rig, rig.tree, length
        self.key = RadixKey(seq("A", length))
        num_pages = -(-length // rig.page_size)
        pages = rig.device.allocate(num_pages)
        assert pages is not None
        self.pages = pages
        self.done = 0
        self.receipt: Receipt | None = None

    def insert(self, length: int) -> None:
        params = InsertParams(
            self.key,
            (self.pages,),
            length=length,
            prev_prefix_len=self.done,
            inserted_len=self.done,
        )
        result = self.tree.insert(params)
        receipt = self.tree.inc_lock_ref(result.boundary)
        if self.receipt is not None:
            self.tree.dec_lock_ref(self.receipt)
        self.receipt = receipt
        self.rig.device.free(result.duplicates[0])
        first = result.first_changed // self.rig.page_size
        self.pages[first : result.length // self.rig.page_size] = self.tree.pages(
            result.boundary, result.first_changed
        )[0]
        self.done = result.length

    def finish(self) -> int:
        """Publish everything; how many pages went home at once."""
        self.insert(self.length)
        tail = self.pages[self.done // self.rig.page_size :]
        self.rig.device.free(tail)
        assert self.receipt is not None
        self.tree.dec_lock_ref(self.receipt)
        return len(tail)


def test_b07_one_request_inserted_at_20_40_and_50() -> None:
    """B07: 48 tokens cached, the tail's page goes home, and after eviction everything has."""
    rig = Rig()
    request = Request(rig, 50)
    request.insert(20)
    request.insert(40)
    assert request.finish() == 1
    assert rig.tree.evictable_size() == 3
    assert rig.device.num_free == rig.device.capacity - 3
    rig.evict(1000)
    assert rig.device.num_free == rig.device.capacity
    rig.check()


def test_b07_no_length_and_no_chunk_leaks() -> None:
    """B07, the property: every length from 1 to 200 in chunks of 1 to 70; alone, and again over
    what the one before has left."""
    rig = Rig(pages=40)
    for length in range(1, 201):
        for chunk in range(1, 71):
            request = Request(rig, length)
            for stop in range(chunk, length, chunk):
                request.insert(stop)
            assert request.finish() == (1 if length % 16 else 0)
            assert rig.device.num_free == 40 - rig.tree.evictable_size()
            if chunk % 3 == 0:
                rig.evict(1000)
                assert rig.device.num_free == 40
        rig.tree.check_integrity()


def test_b08_a_full_hit_leaves_the_last_token() -> None:
    """B08: the limit is cut before flooring, so that no page too many is lost."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.publish(seq("A", 80))
    assert rig.hit(seq("A", 64), limit=63) == (48, 0)
    assert rig.hit(seq("A", 65), limit=64) == (64, 0)
    assert rig.hit(seq("A", 80), limit=79) == (64, 0)
    assert rig.hit(seq("A", 80), limit=0) == (0, 0)


# --- eviction and locks ---------------------------------------------------------------------------


def test_b11_sizes_stay_true_through_a_split_under_a_lock() -> None:
    """B11: a held path is not evicted, a split of it changes no size, and a second release is an
    error that changes none either."""
    rig = Rig()
    rig.publish(seq("A", 48))
    receipt = rig.lock(seq("A", 48))
    assert rig.evict(10**6).count(0) == 0
    rig.publish(seq("A", 16) + seq("B", 32))
    assert (rig.tree.evictable_size(), rig.tree.protected_size()) == (2, 3)
    rig.tree.dec_lock_ref(receipt)
    assert (rig.tree.evictable_size(), rig.tree.protected_size()) == (5, 0)
    with pytest.raises(LockError):
        rig.tree.dec_lock_ref(receipt)
    assert (rig.tree.evictable_size(), rig.tree.protected_size()) == (5, 0)
    rig.check()


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_b12_eviction_takes_the_amount_that_is_asked(tier: Tier) -> None:
    """B12: ten leaves of a page; 16 tokens are one of them, 20 are two, on either tier."""
    rig = Rig()
    for number in range(10):
        key = seq("A", number * 16 + 16, number * 16)
        rig.publish(key)
        if tier is Tier.HOST:
            rig.backup(key)
            rig.evict(16)
    evict = rig.evict if tier is Tier.DEVICE else rig.evict_host
    assert evict(16).count(0, tier) == 1
    assert rig.tree.evictable_size(0, tier) == 9
    assert evict(20).count(0, tier) == 2
    assert rig.tree.evictable_size(0, tier) == 7
    rig.check()


def test_b13_what_is_used_often_survives_a_scan() -> None:
    """B13: a sequence leased ten times outlives twenty that were used once, under LFU."""
    rig = Rig(pages=16, policy="lfu")
    for _ in range(10):
        rig.publish(seq("A", 32))
    for number in range(20):
        room_for(rig, 32)
        rig.publish(seq("B", number * 32 + 32, number * 32))
    assert rig.hit(seq("A", 32)) == (32, 0)
    rig.check()


def test_b13_after_a_split_only_the_matched_half_is_counted() -> None:
    """B13: uses of a prefix are no uses of what follows it."""
    rig = Rig(policy="lfu")
    rig.publish(seq("A", 64))
    for _ in range(3):
        receipt = rig.lock(seq("A", 32))
        rig.tree.count_hits(receipt)
        rig.tree.dec_lock_ref(receipt)
    assert [node.hit_count for node in path_to(rig.match(seq("A", 64)).best_node)] == [4, 1]
    rig.check()


def test_b13_a_prompt_in_chunks_counts_once() -> None:
    """B13: as a whole one would, or long prompts would look popular."""
    rig = Rig()
    request = Request(rig, 96)
    for stop in (32, 64):
        request.insert(stop)
    request.finish()
    assert [node.hit_count for node in path_to(rig.match(seq("A", 96)).best_node)] == [1, 1, 1]


def test_b16_eviction_passes_over_what_a_reader_holds() -> None:
    """B16: the oldest of eight is held; four are asked, the next four go, and the held one keeps
    its bytes."""
    rig = Rig(host_pages=8)
    for number in range(8):
        rig.host_only(seq("A", number * 16 + 16, number * 16))
    held = rig.tree.inc_host_lock_ref(rig.match(seq("A", 16)).best_boundary)
    kept = rig.match(seq("A", 16)).best_node.data[0].host_value
    assert rig.evict_host(64).count(0, Tier.HOST) == 4
    rig.spoil_free_pages()
    assert [rig.hit(seq("A", n * 16 + 16, n * 16))[1] for n in range(8)] == [16, 0, 0, 0, 0] + [
        16
    ] * 3
    assert rig.match(seq("A", 16)).best_node.data[0].host_value is kept
    assert rig.host.capacity - rig.host.num_free == 4
    rig.check()
    assert rig.load_back(seq("A", 16)) == 16
    rig.tree.dec_host_lock_ref(held)
    rig.check()


def test_b32_nothing_keeps_an_evicted_node_alive() -> None:
    """B32: without the garbage collector, thousands of insert and evict rounds leave a constant
    number of nodes, and no memory behind."""
    rounds(500)
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        alive = rounds(6_000)
        blocks = sys.getallocatedblocks() - before
    finally:
        gc.enable()
    assert alive <= 80
    assert blocks < 6_000


@pytest.mark.soak
def test_b32_the_same_for_a_hundred_thousand_rounds() -> None:
    """B32, at its own length."""
    gc.collect()
    gc.disable()
    try:
        assert rounds(100_000) <= 80
    finally:
        gc.enable()


def rounds(count: int) -> int:
    """Insert three nodes and evict two leaves, over and over; how many nodes are alive."""
    rig = Rig(page_size=1, pages=64)
    tree, pages = rig.tree, rig.device
    alive: weakref.WeakSet[Node] = weakref.WeakSet()
    for number in range(count):
        for tokens in ([number + 1, 2, 3], [number + 1, 2, 4]):
            if pages.num_free < 3:
                pages.free(tree.evict((6,)).device[0])
            ids = pages.allocate(3)
            assert ids is not None
            result = tree.insert(InsertParams(RadixKey(tokens), (ids,)))
            pages.free(result.duplicates[0])
            alive.add(result.node)
    assert tree.num_nodes < 80
    return len(alive)


# --- between a match and its use ------------------------------------------------------------------


def test_b50_what_was_matched_is_gone_before_the_load() -> None:
    """B50: the boundary says so when it is used; a new match gives what is left."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.publish(seq("A", 128))
    rig.backup(seq("A", 128))
    rig.evict(1000)
    found = rig.match(seq("A", 128))
    assert found.host_hit_length == 128
    rig.evict_host(64)
    for use in (rig.tree.inc_host_lock_ref, rig.tree.inc_lock_ref, rig.tree.cut):
        with pytest.raises(StaleError, match="match again"):
            use(found.best_boundary)
    with pytest.raises(StaleError, match="match again"):
        rig.tree.commit_transfer(found.best_boundary, 0, Tier.DEVICE, np.arange(8, dtype=np.int32))
    rig.check()
    assert rig.load_back(seq("A", 128)) == 64
    assert rig.hit(seq("A", 128)) == (64, 0)
    rig.check()


def test_b50_what_is_pinned_stays() -> None:
    """B50, the other way: a host lock keeps the match true until the load."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.publish(seq("A", 128))
    rig.backup(seq("A", 128))
    rig.evict(1000)
    receipt = rig.tree.inc_host_lock_ref(rig.match(seq("A", 128)).best_boundary)
    assert rig.evict_host(64).count(0, Tier.HOST) == 0
    assert rig.load_back(seq("A", 128)) == 128
    rig.tree.dec_host_lock_ref(receipt)
    rig.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_b94_two_holds_of_one_request_are_two_holds(order: tuple[int, ...]) -> None:
    """B94: matched twice, released in any order, one never used, each released twice: counts end
    at 0 and no one releases another's."""
    rig = Rig()
    rig.publish(seq("A", 64))
    other = rig.lock(seq("A", 32))
    receipts = [rig.lock(seq("A", 64)), rig.lock(seq("A", 64)), rig.lock(seq("A", 48))]
    rig.tree.count_hits(receipts[0])
    for which in order:
        rig.tree.dec_lock_ref(receipts[which])
        rig.check()
        with pytest.raises(LockError):
            rig.tree.dec_lock_ref(receipts[which])
        assert rig.tree.protected_size() >= 2
        rig.check()
    assert rig.evict(1000).count(0) == 2
    assert rig.hit(seq("A", 64)) == (32, 0)
    rig.tree.dec_lock_ref(other)
    assert rig.tree.protected_size() == 0
    rig.check()


# --- how cost grows -------------------------------------------------------------------------------

FEW: Final = 500
MANY: Final = 30_000


@pytest.mark.parametrize("locked", [0.0, 0.9], ids=["none locked", "90 % locked"])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_b103_the_cost_of_an_eviction_does_not_grow_with_the_leaves(
    policy: str, locked: float
) -> None:
    """B103: evict one, insert one, a few hundred times: the calls made, of Python and of C, are as
    many at 30,000 leaves as at 500, and the time of the same run is of the same order (a walk over
    the leaves would be 60 times as long)."""
    calls, seconds = {}, {}
    for leaves in (FEW, MANY):
        step = pool_full_of(leaves, policy, locked)
        for _ in range(30):
            step()
        calls[leaves] = statistics.median(calls_made(step) for _ in range(150))
        seconds[leaves] = statistics.median(time_of(step) for _ in range(300))
    assert calls[MANY] <= 1.5 * calls[FEW]
    assert seconds[MANY] <= 10 * seconds[FEW]


def pool_full_of(leaves: int, policy: str, locked: float) -> Callable[[], None]:
    """A full tree of one-page leaves; one step of evicting one and inserting another."""
    rig = Rig(page_size=1, pages=leaves, policy=policy)
    tree, pages = rig.tree, rig.device
    pages._is_free = None  # the bitmap's check is not what is measured
    chance = random.Random(0)
    number = 0

    def insert() -> None:
        nonlocal number
        number += 1
        ids = pages.allocate(1)
        assert ids is not None
        result = tree.insert(InsertParams(RadixKey([number]), (ids,)))
        if number <= leaves and chance.random() < locked:
            tree.inc_lock_ref(result.boundary)

    for _ in range(leaves):
        insert()

    def step() -> None:
        pages.free(tree.evict((1,)).device[0])
        insert()

    return step


def calls_made(work: Callable[[], None]) -> int:
    """Calls of Python and C functions."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def time_of(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
