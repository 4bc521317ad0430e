"""Splits: a new parent takes the front, the child keeps its identity (semantics §4)."""

from __future__ import annotations

import pytest

from tests.tree.helpers import Rig, device_value, host_value, order_of, seq, spans
from tiered_cache.keys import RadixKey
from tiered_cache.tree.node import Node
from tiered_cache.types import Boundary, Tier


def split(rig: Rig, node: Node, depth: int) -> Node:
    """Cut a node at a depth; the new parent."""
    return rig.tree.cut(Boundary(node, depth))


def test_the_child_keeps_its_identity_and_the_parent_is_new() -> None:
    """§1.5, §4: whoever holds the node holds the end of the path still."""
    rig = Rig()
    node = rig.publish(seq("A", 64)).node
    upper = split(rig, node, 32)
    assert (node.start, node.end) == (32, 64)
    assert (upper.start, upper.end) == (0, 32)
    assert node.parent is upper
    assert upper.parent is rig.tree.root
    rig.check()


def test_values_host_values_and_page_keys_are_cut() -> None:
    """§4: each half has its own pages, in memory of its own."""
    rig = Rig()
    key = RadixKey(seq("A", 64))
    node = rig.publish(key).node
    rig.backup(key)
    device, host = device_value(node).tolist(), host_value(node).tolist()
    assert rig.tree.page_keys(node) == key.page_keys(16)
    upper = split(rig, node, 48)
    for part, begin, end in ((upper, 0, 3), (node, 3, 4)):
        assert device_value(part).tolist() == device[begin:end]
        assert host_value(part).tolist() == host[begin:end]
        assert part.page_keys == key.page_keys(16)[begin:end]
        for value in (device_value(part), host_value(part)):
            memory: object = value.base
            assert isinstance(memory, bytes)
            assert len(memory) == value.nbytes
    rig.check()


def test_the_parent_copies_priority_hits_creation_and_locks() -> None:
    """§4: what was true of the whole is true of both halves."""
    rig = Rig()
    node = rig.publish(seq("A", 64), priority=3).node
    rig.backup(seq("A", 64))
    receipts = [rig.lock(seq("A", 64)) for _ in range(2)]
    rig.tree.count_hits(receipts[0])
    host = rig.tree.inc_host_lock_ref(Boundary(node, 64))
    upper = split(rig, node, 16)
    for name in ("priority", "hit_count", "created"):
        assert getattr(upper, name) == getattr(node, name)
    assert upper.priority == 3
    assert upper.hit_count == 2
    assert upper.data[0].lock_ref == node.data[0].lock_ref == 2
    assert upper.data[0].host_lock_ref == node.data[0].host_lock_ref == 1
    rig.check()
    for receipt in receipts:
        rig.tree.dec_lock_ref(receipt)
    rig.tree.dec_host_lock_ref(host)
    rig.check()
    assert rig.tree.protected_size() == rig.tree.protected_size(0, Tier.HOST) == 0


def test_the_parent_takes_the_older_side_of_the_childs_place() -> None:
    """§3.7: a split is not an access; with the same age the parent comes first in the order."""
    rig = Rig()
    node = rig.publish(seq("A", 64)).node
    rig.publish(seq("B", 16))
    before = node.data[0].stamp
    upper = split(rig, node, 16)
    assert upper.data[0].stamp == node.data[0].stamp == before
    assert [leaf.end for leaf in order_of(rig.tree)] == [64, 16]
    rig.evict(48)
    assert order_of(rig.tree)[0] is upper
    assert rig.hit(seq("A", 64)) == (16, 0)
    rig.check()


def test_leaf_sets_and_sizes_after_a_split_under_a_lock() -> None:
    """§4: both halves are judged anew, and no page changes sides."""
    rig = Rig()
    node = rig.publish(seq("A", 64)).node
    receipt = rig.lock(seq("A", 64))
    split(rig, node, 32)
    rig.check()
    assert (rig.tree.evictable_size(), rig.tree.protected_size()) == (0, 4)
    assert order_of(rig.tree) == []
    rig.tree.dec_lock_ref(receipt)
    rig.check()
    assert order_of(rig.tree) == [node]
    assert rig.tree.evictable_size() == 4


def test_a_host_only_node_splits_into_a_host_leaf_and_its_parent() -> None:
    """§3.2: partial matches of evicted nodes split them too, once somebody wants the boundary."""
    rig = Rig()
    node = rig.host_only(seq("A", 64)).node
    upper = split(rig, node, 32)
    rig.check()
    assert order_of(rig.tree, Tier.HOST) == [node]
    rig.evict_host(32)
    assert order_of(rig.tree, Tier.HOST) == [upper]
    rig.check()


def test_beliefs_of_storage_are_copied() -> None:
    """§8.4: what storage is believed to have of a node, it has of both halves."""
    rig = Rig()
    node = rig.publish(seq("A", 64)).node
    rig.tree.believe_stored(node, 0, True)
    assert split(rig, node, 32).data[0].stored


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_split_point_keeps_every_prefix_matchable(page_size: int) -> None:
    """Cut at every page in turn, in one tree: all prefixes still match, with the right bytes."""
    rig = Rig(page_size=page_size)
    tokens = seq("A", 10 * page_size)
    node = rig.publish(tokens).node
    for page in (5, 2, 8, 1, 3, 4, 6, 7, 9):
        split(rig, node, page * page_size)
        rig.check()
    assert len(spans(rig.tree)) == 10
    for depth in range(len(tokens) + 1):
        assert rig.hit(tokens[:depth]) == (rig.floor(depth), 0)


@pytest.mark.parametrize("depth", [-16, 8, 40, 80])
def test_there_is_no_boundary_inside_a_page_or_beyond_the_node(depth: int) -> None:
    """A depth that no page of the path ends at is refused, before anything changes."""
    rig = Rig()
    node = rig.publish(seq("A", 64)).node
    with pytest.raises(ValueError, match=f"no boundary at depth {depth}"):
        rig.tree.cut(Boundary(node, depth))
    assert spans(rig.tree) == [(0, 64)]
