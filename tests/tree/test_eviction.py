"""Eviction on the device and on the host: who goes, how much, and what stays (semantics §7, §8)."""

from __future__ import annotations

import pytest

from tests.tree.helpers import Rig, order_of, path_to, seq, spans
from tiered_cache.tree.components.base import Eviction
from tiered_cache.types import Boundary, MatchResult, Tier


def test_a_leaf_goes_whole_and_the_oldest_first() -> None:
    """§7.2: lowest policy key among the device leaves."""
    rig = Rig()
    for name in "ABC":
        rig.publish(seq(name, 32))
    result = rig.evict(16)
    assert result.count(0) == 2
    assert result.dropped_tokens == 32
    assert [rig.hit(seq(name, 32)) for name in "ABC"] == [(0, 0), (32, 0), (32, 0)]
    rig.check()


@pytest.mark.parametrize("need", [1, 2, 3, 4, 5, 6, 7, 12, 1000])
def test_at_most_one_victim_more_than_needed(need: int) -> None:
    """§7.1: the target is checked after every victim."""
    rig = Rig()
    for name in "ABCDEF":
        rig.publish(seq(name, 32))
    assert rig.evict(16 * need).count(0) == min(12, need + need % 2)
    rig.check()


@pytest.mark.parametrize("need", [0, -3])
def test_nothing_asked_is_nothing_evicted(need: int) -> None:
    """A pool that is already large enough asks for nothing or less."""
    rig = Rig()
    rig.publish(seq("A", 32))
    assert rig.tree.evict((need,)).count(0) == rig.tree.evict_host((need,)).count(0) == 0
    rig.check()


def test_inner_nodes_become_leaves_and_go_too() -> None:
    """§7.2, §8.1: from the tips to the root; in the end nothing is left."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 32) + seq("B", 32))
    rig.publish(seq("A", 32) + seq("C", 32))
    assert rig.evict(64).count(0) == 4
    assert spans(rig.tree) == [(0, 32)]
    rig.check()
    assert rig.evict(1).count(0) == 2
    assert rig.tree.num_nodes == 0
    assert rig.device.num_free == rig.device.capacity
    rig.check()


def test_locked_leaves_are_passed_over() -> None:
    """§7.2: a locked value is never taken, however old."""
    rig = Rig()
    receipt = rig.publish_and_lock(seq("A", 32), 32)
    rig.publish(seq("A", 64))
    rig.publish(seq("B", 32))
    assert rig.evict(1000).count(0) == 4
    assert rig.hit(seq("A", 64)) == (32, 0)
    assert rig.evict(1000).count(0) == 0
    rig.tree.dec_lock_ref(receipt)
    assert rig.evict(1000).count(0) == 2
    rig.check()


def test_a_backed_leaf_is_demoted_not_dropped() -> None:
    """§7.3: it stays, on the host only, and its tokens are not counted as dropped."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.backup(seq("A", 64))
    result = rig.evict(64)
    assert (result.count(0), result.count(0, Tier.HOST), result.dropped_tokens) == (4, 0, 0)
    assert rig.hit(seq("A", 64)) == (0, 64)
    rig.check()


def test_stored_tokens_are_not_counted_as_dropped() -> None:
    """§7.3, §8.4: storage is believed to have them."""
    rig = Rig()
    rig.publish(seq("A", 64)).node.data[0].stored = True
    assert rig.evict(64).dropped_tokens == 0
    rig.check()


def top_without_host(rig: Rig, path: list[int], top: int, *ends: int) -> MatchResult:
    """A path whose first `top` tokens are on the device only, and the rest on the host only."""
    for end in (top, *ends):
        rig.publish(path[:end])
    rig.backup(path)
    rig.evict(ends[-1] - top)
    found = rig.match(path)
    rig.lose_on_host(path_to(found.best_node)[0])
    rig.host.free(rig.host_gap())
    return found


def test_an_unbacked_leaf_takes_what_only_the_host_has_below_it() -> None:
    """§7.3, §2.2: nothing on the host may hang below a node that is nowhere."""
    rig = Rig()
    path = seq("A", 32) + seq("B", 32) + seq("C", 32)
    top_without_host(rig, path, 32, 64, 96)
    rig.check()
    result = rig.evict(1)
    assert (result.count(0), result.count(0, Tier.HOST)) == (2, 4)
    assert result.dropped_tokens == 96
    assert rig.tree.num_nodes == 0
    rig.check()


@pytest.mark.parametrize("held", [64, 96])
def test_an_unbacked_leaf_goes_alone_while_something_below_it_is_held(held: int) -> None:
    """§7.3, §11.5: what is held on the host stays; the device's pages were promised to others."""
    rig = Rig()
    path = seq("A", 32) + seq("B", 32) + seq("C", 32)
    found = top_without_host(rig, path, 32, 64, 96)
    receipt = rig.tree.inc_host_lock_ref(Boundary(found.best_node, held), start=held - 32)
    assert rig.tree.evictable_size() == 2
    result = rig.evict(1)
    assert (result.count(0), result.count(0, Tier.HOST)) == (2, 0)
    rig.check()
    assert rig.hit(path) == (0, 0)
    rig.publish(path[:32])
    assert rig.hit(path) == (32, 64)
    rig.tree.dec_host_lock_ref(receipt)
    assert rig.evict(1000).count(0) == 2
    assert rig.tree.num_nodes == 0
    rig.check()


def test_a_host_leaf_stays_while_something_below_it_is_held() -> None:
    """§8.1, §6.4: top (host) - middle (storage only) - bottom (host, held): other leaves go
    instead, and the top waits in the order."""
    rig = Rig()
    path = seq("A", 32) + seq("B", 32) + seq("C", 32)
    for end in (32, 64, 96):
        rig.publish(path[:end])
    rig.backup(path)
    middle = path_to(rig.match(path).best_node)[1]
    rig.tree.believe_stored(middle, 0, True)
    bottom = rig.match(path).best_boundary
    rig.evict(1000)
    receipt = rig.tree.inc_host_lock_ref(bottom, start=64)
    rig.lose_on_host(middle)
    rig.host.free(rig.host_gap())
    for name in "DE":
        rig.host_only(seq(name, 32))
    assert rig.evict_host(1).count(0, Tier.HOST) == 2
    assert rig.evict_host(1000).count(0, Tier.HOST) == 2
    assert rig.evict_host(1000).count(0, Tier.HOST) == 0
    assert rig.hit(path) == (0, 32)
    rig.check()
    rig.tree.dec_host_lock_ref(receipt)
    assert rig.evict_host(1000).count(0, Tier.HOST) == 4
    assert rig.tree.num_nodes == 0
    rig.check()


@pytest.mark.parametrize("held", [32, 64, 96])
def test_a_leaf_that_is_held_on_the_host_itself_goes_alone(held: int) -> None:
    """§6.4, §11.5: a host lock keeps no page of the device, which others were promised; it leaves a
    dead node, above what it does keep. That is out of reach until the gap is filled, and may go
    when it is not held any more."""
    rig = Rig()
    path = seq("A", 32) + seq("B", 32) + seq("C", 32)
    found = top_without_host(rig, path, 32, 64, 96)
    receipt = rig.tree.inc_host_lock_ref(Boundary(found.best_node, held))
    before = rig.tree.evictable_size()
    assert before == 2
    result = rig.evict(32)
    assert (result.count(0), result.count(0, Tier.HOST)) == (2, 0 if held > 32 else 4)
    rig.check()
    assert rig.hit(path) == (0, 0)
    if held > 32:
        assert result.dropped_tokens == 32
        assert rig.evict_host(1000).count(0, Tier.HOST) == (2 if held == 64 else 0)
        rig.publish(path[:32])
        rig.check()
        assert rig.hit(path) == (32, held - 32)
    rig.tree.dec_host_lock_ref(receipt)
    rig.check()
    rig.evict(1000)
    rig.evict_host(1000)
    rig.check()
    assert rig.tree.num_nodes == 0


def test_a_gap_is_one_until_it_is_filled() -> None:
    """§2.2: after that, host copies below nothing are a fault again; of a gap that is split, both
    parts are gaps."""
    rig = Rig()
    path = seq("A", 64) + seq("B", 32)
    found = top_without_host(rig, path, 64, 96)
    top = path_to(found.best_node)[0]
    receipt = rig.tree.inc_host_lock_ref(found.best_boundary)
    assert rig.evict(64).count(0) == 4
    assert top.is_gap
    rig.publish(path[:32] + seq("C", 32))  # splits it, and fills the front
    rig.check()
    assert rig.tree.num_nodes == 4
    rig.publish(path)
    rig.check()
    assert [node.is_gap for node in rig.tree.nodes()] == [False] * 4
    rig.tree.dec_host_lock_ref(receipt)


def test_what_only_storage_has_between_does_not_hide_what_the_host_has_below() -> None:
    """§2.2, §7.3: top (device) - middle (storage only) - bottom (host): when the top goes and is
    not stored itself, the bottom must go with it."""
    rig = Rig()
    path = seq("A", 32) + seq("B", 32) + seq("C", 32)
    for end in (32, 64, 96):
        rig.publish(path[:end])
    rig.backup(path)
    top, middle, _ = path_to(rig.match(path).best_node)
    rig.tree.believe_stored(middle, 0, True)
    for node in (middle, top):
        rig.lose_on_host(node)
    rig.host.free(rig.host_gap())
    assert rig.evict(64).count(0) == 4  # the bottom is demoted, the middle only stored now
    rig.check()
    assert rig.hit(path) == (32, 0)
    result = rig.evict(32)
    assert (result.count(0), result.count(0, Tier.HOST)) == (2, 2)
    rig.check()
    assert rig.tree.num_nodes == 0


def test_host_eviction_above_what_only_storage_has() -> None:
    """§2.2, §8.2: the same on the host: top (host) - middle (storage only) - bottom (host)."""
    rig = Rig()
    path = seq("A", 32) + seq("B", 32) + seq("C", 32)
    for end in (32, 64, 96):
        rig.publish(path[:end])
    rig.backup(path)
    top, middle, bottom = path_to(rig.match(path).best_node)
    rig.tree.believe_stored(middle, 0, True)
    rig.lose_on_host(middle)
    rig.host.free(rig.host_gap())
    rig.evict(1000)
    rig.check()
    while rig.evict_host(1).count(0, Tier.HOST):
        rig.check()
    assert rig.tree.num_nodes == 0
    assert rig.host.num_free == rig.host.capacity
    del top, middle, bottom


def test_after_a_deletion_ancestors_that_stand_for_nothing_go_too() -> None:
    """§7.5: a dead node goes with its last child; one that the host still has stays."""
    rig = Rig()
    path = seq("A", 32) + seq("B", 32) + seq("C", 32)
    for end in (32, 64, 96):
        rig.publish(path[:end])
    rig.backup(path)
    rig.evict(1000)
    top, middle, _ = path_to(rig.match(path).best_node)
    top.data[0].stored = middle.data[0].stored = True
    rig.lose_on_host(middle)
    rig.host.free(rig.host_gap())
    receipt = rig.tree.inc_host_lock_ref(Boundary(top, 32))
    rig.check()
    assert rig.evict_host(1000).count(0, Tier.HOST) == 2
    assert spans(rig.tree) == [(0, 32)]
    rig.check()
    rig.tree.dec_host_lock_ref(receipt)
    assert rig.evict_host(1000).count(0, Tier.HOST) == 2
    assert rig.tree.num_nodes == 0
    rig.check()


def test_host_eviction_takes_host_only_leaves_and_no_mirror() -> None:
    """§8.2: a copy beside a device value is no host leaf."""
    rig = Rig()
    rig.host_only(seq("A", 32))
    rig.publish(seq("B", 32))
    rig.backup(seq("B", 32))
    result = rig.evict_host(1000)
    assert (result.count(0, Tier.HOST), result.count(0)) == (2, 0)
    assert rig.hit(seq("B", 32)) == (32, 0)
    assert rig.tree.evictable_size(0, Tier.HOST) == 2
    rig.check()


def test_a_mirror_above_a_leaf_that_has_gone_goes_next() -> None:
    """§8.2-3, seed 20261230018111: what a leaf that went had made a mirror was not looked at any
    more, and less was given up than was asked."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 64))
    rig.backup(seq("A", 64))
    for node in path_to(rig.match(seq("A", 64)).best_node):
        rig.tree.believe_stored(node, 0, True)
    rig.evict(32)
    assert rig.evict_host(64).count(0, Tier.HOST) == 4
    assert rig.hit(seq("A", 64)) == (32, 0)
    rig.check()


def test_counts_are_of_the_tier_that_was_asked() -> None:
    """§7.1: host pages that go with a device leaf do not count towards a device target."""
    eviction = Eviction(Tier.DEVICE, 1)
    rig = Rig()
    node = rig.publish(seq("A", 32)).node
    rig.backup(seq("A", 32))
    component = rig.tree.components[0]
    component.evict_component(node, Tier.HOST, eviction)
    assert eviction.counts == [0]
    component.evict_component(node, Tier.DEVICE, eviction)
    assert eviction.counts == [2]
    assert [len(ids) for ids in (*eviction.result().device, *eviction.result().host)] == [2, 2]


def test_a_wide_tree_is_evicted_in_order_of_use() -> None:
    """§7.2: 200 leaves under one parent, touched in another order than made."""
    rig = Rig(page_size=1, pages=500)
    for leaf in range(200):
        rig.publish([1, 2, 1000 + leaf])
    order = [(leaf * 77) % 200 for leaf in range(200)]
    for leaf in order:
        rig.match([1, 2, 1000 + leaf])
    gone = []
    for _ in range(200):
        before = order_of(rig.tree)[0]
        assert rig.evict(1).count(0) == 1
        gone.append(before.key)
    wanted = [int(leaf) + 1000 for leaf in order]
    assert [int.from_bytes(key[-8:], "little") for key in gone] == wanted
    rig.check()
