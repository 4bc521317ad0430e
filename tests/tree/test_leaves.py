"""Leaf sets and orders: the predicates of semantics §8.1 and how changes are settled."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.tree.helpers import Rig, order_of, path_to, seq
from tiered_cache.keys import DEFAULT_NAMESPACE, RadixKey
from tiered_cache.tree import leaves
from tiered_cache.tree import order as order_module
from tiered_cache.tree.leaves import MAX_UNSETTLED
from tiered_cache.tree.node import ComponentData, Node
from tiered_cache.tree.order import Order
from tiered_cache.types import Tier


def test_a_device_leaf_has_no_child_on_the_device() -> None:
    """§8.1: children that only the host has do not count."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 64))
    top, bottom = path_to(rig.match(seq("A", 64)).best_node)
    assert order_of(rig.tree) == [bottom]
    rig.backup(seq("A", 64))
    rig.evict(32)
    assert order_of(rig.tree) == [top]
    assert order_of(rig.tree, Tier.HOST) == [bottom]
    rig.load_back(seq("A", 64))
    assert order_of(rig.tree) == [bottom]
    assert order_of(rig.tree, Tier.HOST) == []
    rig.check()


def test_a_host_leaf_has_no_child_on_any_tier_and_no_lock_on_either() -> None:
    """§8.1: all four conditions, one by one."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 64))
    rig.backup(seq("A", 64))
    rig.evict(64)
    found = rig.match(seq("A", 64))
    top, bottom = path_to(found.best_node)
    assert order_of(rig.tree, Tier.HOST) == [bottom]
    host = rig.tree.inc_host_lock_ref(found.best_boundary, start=32)
    assert order_of(rig.tree, Tier.HOST) == []
    rig.tree.dec_host_lock_ref(host)
    device = rig.tree.inc_lock_ref(found.best_boundary)
    assert order_of(rig.tree, Tier.HOST) == []
    rig.tree.dec_lock_ref(device)
    assert order_of(rig.tree, Tier.HOST) == [bottom]
    rig.evict_host(32)
    assert order_of(rig.tree, Tier.HOST) == [top]
    rig.check()


def test_the_root_is_never_a_leaf() -> None:
    """§2.1: always present, always held."""
    rig = Rig()
    assert order_of(rig.tree) == order_of(rig.tree, Tier.HOST) == []
    rig.publish(seq("A", 16))
    rig.evict(16)
    assert order_of(rig.tree) == []
    assert rig.evict(16).count(0) == 0


def test_many_changes_of_one_leaf_are_settled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Touched, locked and unlocked within a request is one change of the order, or none."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.tree.leaves.settle()
    changes: list[str] = []
    for name in ("insert", "remove", "move"):
        method = getattr(Order, name)

        def counting(order: Order, node: Node, name: str = name, method: Any = method) -> None:
            changes.append(name)
            method(order, node)

        monkeypatch.setattr(Order, name, counting)
        if name == "move":
            monkeypatch.setattr(type(rig.tree.leaves.device), "touch", counting)
    for _ in range(5):
        rig.tree.dec_lock_ref(rig.lock(seq("A", 32)))
    assert changes == []
    rig.tree.leaves.settle()
    assert changes.count("move") == 1
    rig.check()


def test_no_more_than_a_few_changes_wait() -> None:
    """What bounds the longest call: never is there more to settle than `MAX_UNSETTLED`."""
    rig = Rig(page_size=1, pages=500)
    for leaf in range(300):
        rig.publish([leaf + 1])
        assert len(rig.tree.leaves._unsettled) < MAX_UNSETTLED
    for leaf in range(300):
        rig.match([leaf + 1])
        assert len(rig.tree.leaves._unsettled) < MAX_UNSETTLED
    rig.check()


def test_what_a_victim_has_left_a_leaf_waits_for_its_turn() -> None:
    """§7.1: a call that takes a leaf goes on with what is older than the leaf's parent."""
    rig = Rig()
    for name, length in (("A", 32), ("A", 64), ("B", 32)):
        rig.publish(seq(name, length))
    rig.match(seq("A", 32))
    rig.evict(64)
    assert (rig.hit(seq("A", 64)), rig.hit(seq("B", 32))) == ((32, 0), (0, 0))
    rig.check()


@pytest.mark.parametrize("chunk", [4, 16, order_module.CHUNK])
def test_an_order_equals_a_sorted_list_through_random_changes(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Insert, move, remove and first, some thousand times, against `sorted`; it grows to all nodes
    and shrinks to none, in chunks of several sizes."""
    monkeypatch.setattr(order_module, "CHUNK", chunk)
    chance = random.Random(0)
    nodes = [
        Node(b"", b"", end, None, DEFAULT_NAMESPACE, (ComponentData(),)) for end in range(1, 3000)
    ]
    order = Order(rank)
    members: dict[Node, int] = {}  # and the rank that each was last put under
    for growth in (0.8, 0.5, 0.1, 0.6, 0.0):
        for _ in range(4000):
            node = chance.choice(nodes)
            if node not in members:
                if chance.random() < growth:
                    node.priority = chance.randrange(20)
                    order.insert(node)
                    members[node] = rank(node)
            elif chance.random() < 1 - growth:
                order.remove(node)
                del members[node]
            else:
                node.priority = chance.randrange(20)
                assert order.is_in_place(node) == (members[node] == rank(node))
                order.move(node)
                members[node] = rank(node)
            assert (node in order) == (node in members)
        assert list(order) == sorted(members, key=rank)
        assert order.first() is (min(members, key=rank) if members else None)
        assert len(order) == len(members)
    while first := order.first():
        assert first is min(members, key=rank)
        order.remove(first)
        del members[first]
    assert not members
    assert len(order) == len(list(order)) == 0


def rank(node: Node) -> int:
    return (node.priority << 40) + node.end


def test_host_leaves_of_one_depth_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """§2.5: what comes to the host has a stamp of its own from its first moment, also when the
    order is settled in that moment; with that of the last match it would be taken for a leaf of the
    same depth, and one of both be lost from the order."""
    monkeypatch.setattr(leaves, "MAX_UNSETTLED", 1)
    rig = Rig()
    rig.host_only(seq("A", 32))
    rig.hit(seq("A", 32))
    ids = rig.host.allocate(2)
    assert ids is not None
    rig.tree.insert_host(RadixKey(seq("B", 32)), 0, 0, ids)
    assert len(set(order_of(rig.tree, Tier.HOST))) == 2
    rig.tree.check_integrity()
