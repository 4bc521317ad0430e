"""The seven eviction policies against simple references, and what they have in common (semantics
§7.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tree.helpers import Rig, order_of, seq
from tiered_cache.tree.node import Node
from tiered_cache.tree.policies import RANKS, SortedPolicy, make_policy
from tiered_cache.types import Tier

NAMES: Final = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")

Leaf = dict[str, Any]

REFERENCE: Final[dict[str, Callable[[list[Leaf]], Leaf]]] = {
    "lru": lambda leaves: min(leaves, key=lambda leaf: leaf["used"]),
    "mru": lambda leaves: max(leaves, key=lambda leaf: leaf["used"]),
    "fifo": lambda leaves: min(leaves, key=lambda leaf: leaf["made"]),
    "filo": lambda leaves: max(leaves, key=lambda leaf: leaf["made"]),
    "lfu": lambda leaves: min(leaves, key=lambda leaf: (leaf["hits"], leaf["used"])),
    "priority": lambda leaves: min(leaves, key=lambda leaf: (leaf["priority"], leaf["used"])),
    "slru": lambda leaves: min(leaves, key=lambda leaf: (leaf["hits"] >= 2, leaf["used"])),
}
"""The victim among one-node sequences, from what happened to them; `used` and `made` are times."""


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("policy", NAMES)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["publish", "match", "lease", "evict", "lock", "unlock"]),
            st.integers(0, 7),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_victims_equal_the_reference(
    policy: str, tier: Tier, steps: list[tuple[str, int, int]]
) -> None:
    """§7.6: publish, match, lease, lock and evict at random; every victim is the one that a minimum
    over plain records gives, on either tier."""
    rig = Rig(page_size=1, pages=32, host_pages=32, policy=policy, host_policy=policy)
    cached: dict[int, Leaf] = {}
    locks: dict[int, list[Any]] = {}
    for now, (step, which, priority) in enumerate(steps):
        key = seq("A", which * 10 + 3, which * 10)
        leaf = cached.get(which)
        if step == "publish" and (tier is Tier.DEVICE or leaf is None):
            rig.publish(key, priority=priority)
            if leaf is None:
                leaf = cached[which] = {"made": now, "hits": 0, "priority": 0, "which": which}
            leaf.update(used=now, hits=leaf["hits"] + 1)
            leaf["priority"] = max(leaf["priority"], priority)
            if tier is Tier.HOST:
                rig.backup(key)
                rig.evict(3)
        elif step == "match" and leaf is not None:
            rig.match(key)
            leaf["used"] = now
        elif step in {"lease", "lock"} and leaf is not None:
            receipt = rig.tree.inc_lock_ref(rig.match(key).best_boundary)
            rig.tree.count_hits(receipt)
            leaf.update(used=now, hits=leaf["hits"] + 1)
            if step == "lock":
                locks.setdefault(which, []).append(receipt)
            else:
                rig.tree.dec_lock_ref(receipt)
        elif step == "unlock" and locks.get(which):
            rig.tree.dec_lock_ref(locks[which].pop())
        elif step == "evict":
            free = [leaf for leaf in cached.values() if not locks.get(leaf["which"])]
            wanted = REFERENCE[policy](free)["which"] if free else None
            before = set(rig.tree.root.children.values())
            (rig.evict if tier is Tier.DEVICE else rig.evict_host)(1)
            gone = before - set(rig.tree.root.children.values())
            assert [which_of(node) for node in gone] == ([] if wanted is None else [wanted])
            cached.pop(wanted, None)  # type: ignore[arg-type]
    rig.check()


def which_of(node: Node) -> int:
    """The number of the sequence that a node is."""
    return (int.from_bytes(node.key[:8], "little") % 100_000) // 10


@pytest.mark.parametrize("policy", NAMES)
def test_locked_leaves_leave_the_order_and_come_back(policy: str) -> None:
    """§7.6: a locked leaf costs an eviction nothing, for it is not in the order."""
    rig = Rig(policy=policy)
    receipts = [rig.publish_and_lock(seq(name, 16), 16) for name in "ABCDE"]
    assert order_of(rig.tree) == []
    rig.tree.dec_lock_ref(receipts[2])
    assert [node.end for node in order_of(rig.tree)] == [16]
    for receipt in receipts[:2] + receipts[3:]:
        rig.tree.dec_lock_ref(receipt)
    assert len(order_of(rig.tree)) == 5
    rig.check()


@pytest.mark.parametrize("policy", NAMES)
def test_the_order_follows_every_change(policy: str) -> None:
    """Uses, hits and priorities that change while a leaf is in the order move it there."""
    rig = Rig(policy=policy, pages=200)
    for number in range(40):
        rig.publish(seq("A", number * 16 + 16, number * 16), priority=number % 3)
        order_of(rig.tree)
    for number in range(0, 40, 3):
        rig.publish(seq("A", number * 16 + 16, number * 16), priority=5)
        rig.match(seq("A", number * 16 + 16, number * 16))
        rig.check()
    leaves = order_of(rig.tree)
    assert leaves == sorted(leaves, key=RANKS[policy])
    rig.check()


def test_an_unknown_policy_names_the_known_ones() -> None:
    """The message says what to write instead."""
    with pytest.raises(ValueError, match="'lry'; choose one of fifo, filo, lfu, lru, mru,"):
        make_policy("lry")


def test_b13_b103_names_are_those_of_the_semantics() -> None:
    """§7.6: all seven, and each name makes a policy that knows it."""
    assert set(RANKS) == set(NAMES)
    assert [make_policy(name).name for name in NAMES] == list(NAMES)


def test_a_policy_of_ones_own_stands_beside_them() -> None:
    """§7.6: an object that owns the order; here the longest leaf goes first."""

    class LongestFirst(SortedPolicy):
        def __init__(self) -> None:
            super().__init__("longest", lambda node: ((node.start - node.end) << 40) + node.created)

    rig = Rig(policy=LongestFirst)
    for name, length in (("A", 32), ("B", 64), ("C", 16)):
        rig.publish(seq(name, length))
    assert [rig.evict(1).count(0) for _ in range(3)] == [4, 2, 1]
    rig.check()


def test_slru_protects_what_was_used_twice() -> None:
    """§7.6: the threshold is two hits; a scan does not push such a leaf out."""
    rig = Rig(policy="slru")
    rig.publish(seq("A", 16))
    rig.publish(seq("A", 16))
    for number in range(20):
        rig.publish(seq("B", number * 16 + 16, number * 16))
        rig.evict(16)
    assert rig.hit(seq("A", 16)) == (16, 0)
    rig.check()
