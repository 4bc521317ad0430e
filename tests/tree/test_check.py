"""The checker sees every kind of corruption (semantics §2): each is made by hand, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

from tests.tree.helpers import Rig, host_value, path_to, seq
from tiered_cache.errors import IntegrityError
from tiered_cache.keys import RadixKey
from tiered_cache.tree.node import Node
from tiered_cache.types import Tier


class Subject:
    """A tree with a locked path of three nodes, a branch, a mirror, a host-only leaf and a second
    namespace."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.tree = self.rig.tree
        self.rig.host_only(seq("H", 32))
        for end in (32, 64, 96):
            self.rig.publish(seq("A", end))
        self.rig.publish(seq("A", 32) + seq("B", 32))
        self.rig.backup(seq("A", 64))
        self.rig.publish(seq("S", 32), cache_salt="s")
        self.receipt = self.rig.lock(seq("A", 96))
        self.host_receipt = self.tree.inc_host_lock_ref(
            self.rig.match(seq("A", 64)).device_boundary, start=32
        )
        self.top, self.middle, self.bottom = path_to(self.rig.match(seq("A", 96)).best_node)
        self.branch = self.rig.match(seq("A", 32) + seq("B", 32)).best_node
        self.host_leaf = self.rig.match(seq("H", 32)).best_node
        self.salted = self.rig.match(seq("S", 32), cache_salt="s").best_node
        self.rig.check()


def own(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.frombuffer(np.array(ids, np.int32).tobytes(), np.int32)


def move(subject: Subject, node: Node, child_key: bytes) -> None:
    parent = node.parent
    assert parent is not None
    del parent.children[node.child_key]
    parent.children[child_key] = node
    node.child_key = child_key


def hang_elsewhere(subject: Subject) -> None:
    parent = subject.branch.parent
    assert parent is not None
    parent.children[b"other"] = parent.children.pop(subject.branch.child_key)


def stale_child_key(subject: Subject) -> None:
    move(subject, subject.branch, b"\x00" * 128)


def wrong_namespace_below_the_root(subject: Subject) -> None:
    move(subject, subject.salted, subject.salted.key)


def short_edge(subject: Subject) -> None:
    subject.bottom.key = subject.bottom.key[:-8]


def other_namespace_than_the_parent(subject: Subject) -> None:
    subject.bottom.namespace = subject.salted.namespace


def unaligned_end(subject: Subject) -> None:
    subject.branch.end += 8


def lost_node(subject: Subject) -> None:
    subject.tree.num_nodes += 1


def root_with_a_key(subject: Subject) -> None:
    subject.tree.root.key = b"\x00" * 8


def hole_on_the_device(subject: Subject) -> None:
    subject.middle.data[0].value = None


def host_copy_below_nothing(subject: Subject) -> None:
    subject.host_leaf.data[0].host_value = None
    child = Node(
        subject.bottom.key,
        subject.bottom.child_key,
        64,
        subject.host_leaf,
        subject.bottom.namespace,
        subject.tree._new_data(0),
    )
    child.data[0].host_value = own(40, 41)
    subject.host_leaf.children[child.child_key] = child
    subject.host_leaf.live_children = 1


def two_owners(subject: Subject) -> None:
    subject.branch.data[0].value = subject.salted.data[0].value


def two_owners_on_the_host(subject: Subject) -> None:
    subject.host_leaf.data[0].host_value = host_value(subject.top)


def too_few_pages(subject: Subject) -> None:
    subject.branch.data[0].value = own(60)


def writable_value(subject: Subject) -> None:
    subject.branch.data[0].value = np.array([60, 61], np.int32)


def view_of_something_larger(subject: Subject) -> None:
    subject.branch.data[0].value = own(59, 60, 61)[1:]


def wrong_evictable(subject: Subject) -> None:
    subject.tree.components[0].device.evictable += 1


def wrong_protected_on_the_host(subject: Subject) -> None:
    subject.tree.components[0].host.protected -= 1


def wrong_device_children(subject: Subject) -> None:
    subject.top.device_children -= 1


def wrong_live_children(subject: Subject) -> None:
    subject.top.live_children += 1


def missing_leaf(subject: Subject) -> None:
    subject.branch.data[0].queue = None
    subject.tree.leaves.touch(subject.branch)


def inner_node_among_the_leaves(subject: Subject) -> None:
    subject.tree.leaves.device.insert(subject.top)


def locked_leaf_among_the_leaves(subject: Subject) -> None:
    subject.bottom.data[0].queue = subject.tree.leaves.device
    subject.tree.leaves.touch(subject.bottom)


def missing_host_leaf(subject: Subject) -> None:
    subject.host_leaf.data[0].queue = None
    subject.tree.leaves.touch(subject.host_leaf)


def old_rank(subject: Subject) -> None:
    subject.tree.leaves.settle()
    subject.branch.data[0].stamp += 1000


def lock_too_many(subject: Subject) -> None:
    for node in (subject.top, subject.middle, subject.bottom):
        node.data[0].lock_ref += 1


def lock_too_few(subject: Subject) -> None:
    subject.tree.receipts.redeem(subject.receipt, Tier.DEVICE)


def lock_below_an_unlocked_node(subject: Subject) -> None:
    subject.bottom.data[0].lock_ref = 5


def negative_lock(subject: Subject) -> None:
    subject.branch.data[0].lock_ref = -1


def host_lock_too_many(subject: Subject) -> None:
    subject.top.data[0].host_lock_ref += 1
    sizes = subject.tree.components[0].host
    sizes.protect(2)


def host_lock_too_few(subject: Subject) -> None:
    subject.tree.receipts.redeem(subject.host_receipt, Tier.HOST)


def node_for_nothing(subject: Subject) -> None:
    node = Node(
        subject.bottom.key,
        subject.bottom.child_key,
        64,
        subject.branch,
        subject.branch.namespace,
        subject.tree._new_data(0),
    )
    subject.branch.children[node.child_key] = node
    subject.tree.num_nodes += 1


def wrong_number_of_page_keys(subject: Subject) -> None:
    subject.tree.page_keys(subject.branch)
    subject.branch.page_keys = (subject.branch.page_keys or [])[:1]


def wrong_page_keys(subject: Subject) -> None:
    subject.branch.page_keys = RadixKey(seq("X", 32)).page_keys(16)


FAULTS: Final[list[tuple[Callable[[Subject], None], str]]] = [
    (hang_elsewhere, "does not hang under its own child key"),
    (stale_child_key, "hangs under another key than its first page gives"),
    (wrong_namespace_below_the_root, "by another key than its namespace"),
    (short_edge, "has an edge of"),
    (other_namespace_than_the_parent, "hangs under another key"),
    (unaligned_end, "does not end at a page"),
    (lost_node, "num_nodes is"),
    (root_with_a_key, "the root has"),
    (hole_on_the_device, "on the device below a node that is not"),
    (host_copy_below_nothing, "on the host below a node that is nowhere"),
    (two_owners, "on the device has two owners"),
    (two_owners_on_the_host, "on the host has two owners"),
    (too_few_pages, "value has 1 pages, the edge has 2"),
    (writable_value, "value is writable"),
    (view_of_something_larger, "a view of something larger"),
    (wrong_evictable, "on the device counts"),
    (wrong_protected_on_the_host, "on the host counts"),
    (wrong_device_children, "children on the device"),
    (wrong_live_children, "live children"),
    (missing_leaf, "the device leaves are"),
    (inner_node_among_the_leaves, "the device leaves are"),
    (locked_leaf_among_the_leaves, "the device leaves are"),
    (missing_host_leaf, "the host leaves are"),
    (old_rank, "under an old rank"),
    (lock_too_many, "device locks of full, the receipts"),
    (lock_too_few, "device locks of full, the receipts"),
    (lock_below_an_unlocked_node, "more locks"),
    (negative_lock, "negative lock count"),
    (host_lock_too_many, "host locks of full, the receipts"),
    (host_lock_too_few, "host locks of full, the receipts"),
    (node_for_nothing, "stands for nothing"),
    (wrong_number_of_page_keys, "page keys"),
    (wrong_page_keys, "page keys"),
]


@pytest.mark.parametrize(
    ("corrupt", "message"), FAULTS, ids=lambda part: getattr(part, "__name__", "")
)
def test_each_corruption_is_seen_and_named(
    corrupt: Callable[[Subject], None], message: str
) -> None:
    """§2: the proof is worth as much as what it notices."""
    subject = Subject()
    corrupt(subject)
    with pytest.raises(IntegrityError, match=message):
        subject.tree.check_integrity()


def test_every_violation_is_listed() -> None:
    """One report for all of them, for the first is seldom the cause."""
    subject = Subject()
    wrong_evictable(subject)
    lost_node(subject)
    with pytest.raises(IntegrityError) as raised:
        subject.tree.check_integrity()
    assert len(str(raised.value).splitlines()) == 2


def test_checking_changes_nothing() -> None:
    """It may run after every step."""
    subject = Subject()
    before = subject.tree.pretty_print()
    subject.tree.check_integrity()
    assert subject.tree.pretty_print() == before


def test_pretty_print_shows_where_everything_is() -> None:
    """A line per node: depths, tiers, locks, hits, age; no token."""
    subject = Subject()
    text = subject.tree.pretty_print()
    assert text.splitlines()[0] == "root, 6 nodes"
    assert "  [0:32) full DH locks 1/0, hits 4, priority 0, used" in text
    assert "    [32:64) full DH locks 1/1, hits" in text
    assert "      [64:96) full D- locks 1/0, hits 1" in text
    assert "  [0:32) full -H, hits 1" in text
    assert str(seq("A", 1)[0]) not in text
