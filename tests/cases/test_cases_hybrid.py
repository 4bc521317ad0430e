"""Cases that a tree with windows and states can have: each is how such a cache has really failed
for its users, with the value that is right here. The numbers are the project's."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

from tests.tree.helpers import seq
from tests.tree.hybrid import HybridRig
from tiered_cache.keys import RadixKey
from tiered_cache.pools.allocator import PageAllocator
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.swa import SWAComponent
from tiered_cache.tree.locks import Receipt
from tiered_cache.tree.node import Node
from tiered_cache.types import NO_PAGE, Boundary, InsertParams, Tier

PART: Final = 1
"""The index of the component beside the base."""


def with_window(window: int = 32, page_size: int = 16, **rest: int) -> HybridRig:
    return HybridRig([FullComponent("full"), SWAComponent("swa", window)], page_size, **rest)


def with_states(page_size: int = 16, **rest: int) -> HybridRig:
    return HybridRig([FullComponent("full"), MambaComponent("mamba")], page_size, **rest)


def lock(rig: HybridRig, tokens: list[int]) -> Receipt:
    return rig.tree.inc_lock_ref(Boundary(rig.path(tokens)[-1], len(tokens)))


def back_up(rig: HybridRig, tokens: list[int]) -> None:
    for index in range(len(rig.components)):
        rig.move(Boundary(rig.node(tokens), len(tokens)), index, Tier.HOST)


# --- splits and amounts ---------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_b02_states_go_before_the_leaves_below_them(page_size: int) -> None:
    """B02: after nested splits, inner nodes without a state: every eviction, one leaf at a time,
    finds its parent; in the end there is nothing."""
    rig = with_states(page_size)
    prompts = [seq("A", 16), seq("A", 8) + seq("B", 8), seq("A", 4) + seq("C", 4)]
    rig.publish(prompts[0], states=[4, 8, 16])
    rig.publish(prompts[1], states=[16])
    rig.publish(prompts[2], states=[8])
    for prompt in prompts:
        assert rig.hit(RadixKey(prompt))[0] == len(prompt)
    rig.check()  # proves the child keys
    assert rig.evict(PART, 2).count(PART) == 2
    assert rig.parts(seq("A", 16), PART) == [(8, 16)]
    assert rig.tree.num_nodes == 5
    rig.check()
    for left in (4, 3, 2, 1, 0):
        assert rig.evict(0, 1).count(0) > 0
        assert rig.tree.num_nodes == left
        rig.check()
    for pool in rig.pools[Tier.DEVICE]:
        assert pool.num_free == pool.capacity


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("make", [lambda: with_window(16), with_states], ids=["S", "M"])
def test_b12_no_more_windows_or_states_go_than_asked(
    tier: Tier, make: Callable[[], HybridRig]
) -> None:
    """B12: ten of a page or a state; one is one, two are two, on either tier, at leaves and
    above."""
    for is_chain in (False, True):
        rig = make()
        for number in range(10):
            tokens = seq("A", number * 16 + 16, 0 if is_chain else number * 16)
            rig.publish(tokens, states=[len(tokens)])
            if tier is Tier.HOST:
                back_up(rig, tokens)
        if tier is Tier.HOST:
            rig.evict(0, 1000)
        assert rig.evict(PART, 1, tier).count(PART, tier) == 1
        assert rig.tree.evictable_size(PART, tier) == 9
        assert rig.evict(PART, 2, tier).count(PART, tier) == 2
        assert rig.tree.evictable_size(PART, tier) == 7
        rig.check()


@pytest.mark.parametrize("make", [with_window, with_states], ids=["S", "M"])
def test_b15_a_locked_base_does_not_go_with_its_window_or_state(
    make: Callable[[], HybridRig],
) -> None:
    """B15: only that goes, and the bytes of the base stay; where nothing can go, nothing does."""
    rig = make()
    for name in "AB":
        rig.publish(seq(name, 32), states=[32])
    receipt = lock(rig, seq("A", 32))
    rig.tree.release(receipt, PART)  # the oldest, and free to go
    before = rig.tree.pages(Boundary(rig.node(seq("A", 32)), 32))[0].tolist()
    gone = rig.evict(PART, 1)
    assert gone.count(0) == 0
    assert gone.count(PART) > 0
    assert rig.parts(seq("A", 32), PART) == []
    assert rig.tree.pages(Boundary(rig.node(seq("A", 32)), 32))[0].tolist() == before
    rig.check()
    other = lock(rig, seq("B", 32))
    gone = rig.evict(PART, 1)
    assert [gone.count(index) for index in (0, PART)] == [0, 0]
    assert rig.evict(0, 1).count(0) == 0
    rig.check()
    for held in (receipt, other):
        rig.tree.dec_lock_ref(held)
    rig.check()


# --- windows --------------------------------------------------------------------------------------


def test_b17_a_hole_in_the_window_is_no_hit() -> None:
    """B17: seven pages, the third and the sixth without their window: 80 tokens, not 112."""
    rig = with_window(32)
    for stop in range(16, 113, 16):
        rig.publish(seq("A", stop))
    for stop in (48, 96):
        rig.drop(seq("A", stop), PART)
    assert rig.hit(RadixKey(seq("A", 112)))[0] == 80
    rig.check()


@pytest.mark.parametrize("seed", range(8))
def test_b17_any_holes_against_the_rule_by_tokens(seed: int) -> None:
    """B17, the property: random nodes, holes, sizes and windows; a prefix may end where each of its
    last W tokens has its page."""
    chance = random.Random(seed)
    for _ in range(40):
        size, window = chance.choice([1, 2, 4]), chance.randrange(1, 20)
        rig = with_window(window, size)
        tokens, live = seq("A", size * chance.randrange(1, 16)), [True] * 64
        for stop in sorted(chance.sample(range(size, len(tokens) + 1, size), len(tokens) // size)):
            if stop == len(tokens) or chance.random() < 0.5:
                rig.publish(tokens[:stop])
        for node in rig.path(tokens):
            if chance.random() < 0.3:
                live[node.start : node.end] = [False] * (node.end - node.start)
                rig.drop(tokens[: node.end], PART)
        for limit in range(len(tokens) + 1):
            found = rig.match(RadixKey(tokens), limit).device_length
            depths = range(0, limit + 1, size)
            assert found == max(at for at in depths if all(live[max(0, at - window) : at]))


def publish_in_chunks(rig: HybridRig, length: int, chunk: int, *, at_once: bool) -> None:
    """A request that gives up window pages as soon as no later token needs them: those that it has
    published by unlocking, its own by giving them back. `at_once`: it publishes at the end only."""
    size, component = rig.page_size, rig.components[PART]
    assert isinstance(component, SWAComponent)
    key, pools = RadixKey(seq("A", length)), rig.pools[Tier.DEVICE]
    pages = tuple(np.full(length // size, NO_PAGE, np.int32) for _ in rig.components)
    receipt = rig.tree.inc_lock_ref(Boundary(rig.tree.root, 0))
    published = given_up = 0
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        for at in range(-(-start // size), -(-stop // size)):
            for index, pool in enumerate(pools):
                ids = pool.allocate(1)
                assert ids is not None
                pages[index][at] = ids[0]
                content = rig.wanted(key, index, at)
                rig.content[Tier.DEVICE, index, int(ids[0])] = content
        if not at_once or stop == length:
            params = InsertParams(
                key,
                pages,
                length=stop,
                prev_prefix_len=published,
                inserted_len=published,
                swa_evicted_seqlen=given_up,
            )
            result = rig.tree.insert_below(receipt, params)
            assert [len(ids) for ids in result.duplicates] == [0, 0]
            published = result.length
        given_up = max(given_up, (stop - component.window) // size * size)
        for at in range(published // size, given_up // size):
            if pages[PART][at] != NO_PAGE:
                pools[PART].free(pages[PART][at : at + 1].copy())
                pages[PART][at] = NO_PAGE
    rig.tree.dec_lock_ref(receipt)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("chunk", [1, 50, 64, 128])
@pytest.mark.parametrize("window", [1, 32, 63, 64, 65])
def test_b19_a_window_smaller_than_a_page(window: int, chunk: int, at_once: bool) -> None:
    """B19: pages that leave the window go at once, and the last page keeps its own: all of the
    prompt is a hit, and what is used is what was kept."""
    rig = with_window(window, 64)
    publish_in_chunks(rig, 128, chunk, at_once=at_once)
    rig.check()
    assert rig.hit(RadixKey(seq("A", 128) + seq("X", 1))) == (128, 128)
    assert rig.parts(seq("A", 128), PART)[-1][1] == 128
    before = 127 // chunk * chunk  # what was computed when the request had its last chunk to go
    given_up = max(0, before - window) // 64 if at_once else 0
    kept = sum(end - start for start, end in rig.parts(seq("A", 128), PART)) // 64
    assert kept == rig.kept()[PART] == 2 - given_up
    while rig.evict(PART, 1).count(0) == 0:  # what is behind the window, until the leaf itself goes
        rig.check()
    assert rig.kept()[PART] == 0
    rig.check()


def test_b21_a_window_is_released_over_the_range_that_was_locked() -> None:
    """B21: whatever is split, released early, given up and computed again meanwhile."""
    rig = with_window(32)
    rig.publish(seq("A", 96))
    receipt = lock(rig, seq("A", 96))
    rig.publish(seq("A", 80) + seq("X", 16))
    assert rig.locks(seq("A", 96), PART) == [0, 1, 1]
    rig.check()
    rig.tree.release(receipt, PART)
    assert rig.locks(seq("A", 96), PART) == [0, 0, 0]
    rig.drop(seq("A", 96), PART)
    pages = rig.compute(RadixKey(seq("A", 96)), 0)
    assert pages is not None
    rig.insert(RadixKey(seq("A", 96)), pages)
    assert rig.hit(RadixKey(seq("A", 96)))[0] == 96
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    assert rig.held() == [0, 0]
    assert rig.locks(seq("A", 96), PART) == [0, 0, 0]
    rig.check()


def test_b21_the_same_for_what_is_held_on_the_host() -> None:
    """B21: a span that a backup holds, through the same."""
    rig = with_window(32)
    rig.publish(seq("A", 96))
    back_up(rig, seq("A", 96))
    receipt = rig.tree.inc_host_lock_ref(Boundary(rig.node(seq("A", 96)), 96), 64)
    rig.publish(seq("A", 80) + seq("X", 16))
    assert rig.held(Tier.HOST) == [2, 2]
    assert rig.evict(PART, 10, Tier.HOST).count(PART, Tier.HOST) == 0
    rig.drop(seq("A", 96), PART)
    rig.check()
    assert rig.move(Boundary(rig.node(seq("A", 96)), 96), PART, Tier.DEVICE)
    rig.check()
    rig.tree.dec_host_lock_ref(receipt)
    assert rig.held(Tier.HOST) == [0, 0]
    rig.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_b21_nested_locks_and_two_splits(order: tuple[int, ...]) -> None:
    """B21: three holders, two cuts between their locks, any order of release."""
    rig = with_window(40)
    rig.publish(seq("A", 128))
    back_up(rig, seq("A", 128))
    held = [lock(rig, seq("A", 128))]
    rig.publish(seq("A", 112) + seq("X", 16))
    held += [lock(rig, seq("A", 112)), lock(rig, seq("A", 128))]
    kept = [
        rig.tree.inc_host_lock_ref(Boundary(rig.node(seq("A", 128)), 128), at) for at in (0, 80)
    ]
    rig.publish(seq("A", 96) + seq("Y", 16))
    assert rig.locks(seq("A", 128), PART) == [1, 3, 3, 2]
    rig.check()
    for at in order:
        rig.tree.dec_lock_ref(held[at])
        rig.check()
    for receipt in kept:
        rig.tree.dec_host_lock_ref(receipt)
        rig.check()
    assert rig.held() == rig.held(Tier.HOST) == [0, 0]


# --- states ---------------------------------------------------------------------------------------


def test_b26_a_look_up_does_not_spoil_a_state() -> None:
    """B26: nothing is found in front of it, and it says how much of the rest is there; the state is
    where it was, and no page beyond one is a hit."""
    rig = with_states()
    rig.publish(seq("A", 64), states=[64])
    for _ in range(3):
        found = rig.match(RadixKey(seq("A", 64)), 63)
        assert (found.device_length, found.full_hit_length) == (0, 48)
        assert rig.hit(RadixKey(seq("A", 64) + seq("X", 1))) == (64, 64)
        assert rig.tree.num_nodes == 1
    # Nor does a request that takes what it found, which is nothing, or cuts in front of it.
    rig.publish(seq("A", 48) + seq("X", 16), states=[64])
    assert rig.hit(RadixKey(seq("A", 64) + seq("X", 1))) == (64, 64)
    rig.publish(seq("A", 64) + seq("Y", 32))
    assert rig.hit(RadixKey(seq("A", 64) + seq("Y", 32))) == (64, 64)
    rig.check()


def test_b35_a_state_where_prompts_part_serves_the_next_one() -> None:
    """B35: the first prompt's state is in what only it has; the second learns where they part, and
    leaves one on the grid in front of it; the third finds that."""
    rig = with_states(pages=200)
    shared, grid = seq("A", 560), 64
    rig.publish(shared + seq("B", 140), states=[640])
    prompt = RadixKey(shared + seq("C", 140))
    found = rig.match(prompt)
    assert (found.device_length, found.full_hit_length) == (0, 560)
    branch = found.full_hit_length // grid * grid
    pages = rig.compute(prompt, 0, states=[branch, 640])
    assert pages is not None
    first = rig.tree.insert(InsertParams(prompt, pages, length=branch))  # a chunk ends there
    assert not first.mamba_exist
    rest = InsertParams(prompt, pages, prev_prefix_len=branch, inserted_len=branch)
    second = rig.tree.insert(rest)
    for result in (first, second):
        for pool, ids in zip(rig.pools[Tier.DEVICE], result.duplicates, strict=True):
            pool.free(ids)
    rig.check()
    assert rig.hit(RadixKey(shared + seq("D", 140))) == (512, 512)
    assert rig.hit(RadixKey(shared + seq("B", 140))) == (640, 640)
    assert rig.hit(RadixKey(shared + seq("C", 140))) == (640, 640)


def test_b35_the_states_of_the_newest_prompts_stay() -> None:
    """B35: 48 slots, three chains of sixteen states: a fork of any at a quarter is a hit. A fourth
    chain pushes out what the oldest can do without, and not the shallow ones of all."""
    rig = with_states(pages=48)
    pools = rig.pools[Tier.DEVICE]
    pools[0] = PageAllocator(1000, check=True)
    for name in "ABCD":
        for stop in range(64, 16 * 64 + 1, 64):
            if not pools[PART].num_free:
                rig.evict(PART, 1)
            assert rig.publish(seq(name, stop), states=[stop])
    fork = 4 * 64
    found = [rig.hit(RadixKey(seq(name, fork) + seq("X", 16)))[0] for name in "ABCD"]
    assert min(found) > 0
    assert found[2:] == [fork, fork]
    rig.check()


# --- memory ---------------------------------------------------------------------------------------


def rounds(count: int) -> int:
    """Insert three nodes with windows and states, back one up, and evict parts, leaves and copies,
    over and over; how many nodes are alive."""
    components = [FullComponent("full"), SWAComponent("swa", 2), MambaComponent("mamba")]
    rig = HybridRig(components, 1, pages=48, host_pages=24)
    alive: weakref.WeakSet[Node] = weakref.WeakSet()
    rig.wanted = lambda key, index, page: b""  # type: ignore[method-assign]  # not about bytes
    for number in range(count):
        for last in (3, 4):
            tokens = [number + 1, 2, last]
            for index, pool in enumerate(rig.pools[Tier.DEVICE]):
                if pool.num_free < 3:
                    rig.evict(index, 6)
            for index, pool in enumerate(rig.pools[Tier.HOST]):
                if pool.num_free < 3:
                    rig.evict(index, 6, Tier.HOST)
            rig.publish(tokens, states=[1, 3])
            alive.update(rig.path(tokens))
            if last == 3:
                back_up(rig, tokens)
    assert rig.tree.num_nodes < 150
    return len(alive)


def test_b32_no_order_of_windows_or_states_keeps_a_node_alive() -> None:
    """B32: without the garbage collector, thousands of rounds leave a constant number of nodes, and
    no memory behind."""
    rounds(200)
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        alive = rounds(700)
        blocks = sys.getallocatedblocks() - before
    finally:
        gc.enable()
    assert alive <= 150
    assert blocks < 5_000
