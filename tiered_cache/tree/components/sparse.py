"""Components that may lack what the base has: where one does, the node is a tombstone of it.

Sliding windows and recurrent states need only a part of a prefix, so the rest of theirs can go on
its own. Here is what all such components have in common: how a residency is gained and lost, the
orders in which they are given up (the oldest first), and what eviction does. What a prefix needs of
one, and what a lock keeps, is its own matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy import frombuffer

from tiered_cache.observe import EventKind
from tiered_cache.tree.components.base import INT32, Eviction, TreeComponent, join, own, owns_memory
from tiered_cache.tree.leaves import MAX_UNSETTLED
from tiered_cache.tree.node import BASE
from tiered_cache.tree.order import MirrorOrder
from tiered_cache.tree.policies import DEPTH_BITS, SortedPolicy, recency_of
from tiered_cache.types import DEVICE, NO_PAGE, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiered_cache.observe import Observers
    from tiered_cache.tree.leaves import LeafSets
    from tiered_cache.tree.node import ComponentData, Node
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import PageIds


class SparseOrders:
    """Which node's part of one component goes next: on the device, on the host, and of the mirrors
    (semantics §2.5, §8.3). Held ones stand in none, so that no eviction walks over them.

    As with the leaf sets, changes are noted, and settled a little later.
    """

    __slots__ = ("_index", "_unsettled", "device", "host", "mirrors", "mirrors_are_spare")

    def __init__(self, index: int, *, mirrors_are_spare: bool) -> None:
        rank = recency_of(index)
        self._index = index
        self._unsettled: list[Node] = []
        self.device = SortedPolicy("lru", rank, index)
        self.host = SortedPolicy("lru", rank, index)
        self.mirrors = MirrorOrder(rank, index)
        self.mirrors_are_spare = mirrors_are_spare

    def note(self, node: Node, data: ComponentData) -> None:
        """A node's part, its locks or its age have changed. `data`: that part."""
        if not data.unsettled:
            data.unsettled = True
            unsettled = self._unsettled
            unsettled.append(node)
            if len(unsettled) == MAX_UNSETTLED:
                self.settle()

    def forget(self, node: Node, data: ComponentData) -> None:
        """A part is on no tier any more: most go with their node, and there is nothing to wait
        for."""
        if data.mirror_rank != -1:
            self.mirrors.remove(node)
        listed: Any = data.listed
        if listed is not None:
            listed.take_out(data)
            data.listed = None

    def settle(self) -> None:
        """Bring the orders up to date."""
        index, device = self._index, self.device
        for node in self._unsettled:
            data = node.data[index]
            data.unsettled = False
            if data.value is not None:  # `wanted`, spelt out: every request comes by here
                wanted = None if data.lock_ref else device
            else:
                wanted = self.wanted(data)
            listed: Any = data.listed  # one of these orders
            if wanted is not None:
                rank = data.stamp << DEPTH_BITS | node.end
                if listed is None:
                    wanted.put(node, data, rank)
                    data.listed = wanted
                elif rank != data.rank or wanted is not listed:
                    listed.take_out(data)
                    wanted.put(node, data, rank)
                    data.listed = wanted
            elif listed is not None:
                listed.take_out(data)
                data.listed = None
            if data.host_value is not None or data.mirror_rank != -1:
                self._settle_mirror(node, data)
        self._unsettled.clear()

    def wanted(self, data: ComponentData) -> SortedPolicy | None:
        """The order that a part belongs in, if any."""
        if data.value is not None:
            return None if data.lock_ref else self.device
        if data.host_value is not None and not data.host_lock_ref:
            return self.host
        return None

    def is_spare_mirror(self, data: ComponentData) -> bool:
        """Whether a part's host copy can be given up without losing anything."""
        return (
            data.value is not None
            and data.host_value is not None
            and not data.host_lock_ref
            and data.pending is None
            and (data.stored or self.mirrors_are_spare)
        )

    def _settle_mirror(self, node: Node, data: ComponentData) -> None:
        is_listed = data.mirror_rank != -1
        if self.is_spare_mirror(data):
            (self.mirrors.move if is_listed else self.mirrors.insert)(node)
        elif is_listed:
            self.mirrors.remove(node)

    def first(self, tier: Tier) -> Node | None:
        """The oldest that nobody holds, or None."""
        if self._unsettled:
            self.settle()
        return (self.device if tier is DEVICE else self.host).first()

    def first_mirror(self) -> Node | None:
        """The host copy to give up next, of those that can be spared."""
        if self._unsettled:
            self.settle()
        return self.mirrors.first()


class SparseComponent(TreeComponent):
    """Base of components with tombstones."""

    has_tombstones: ClassVar[bool] = True
    orders: SparseOrders

    def bind(self, index: int, page_size: int, leaves: LeafSets, observers: Observers) -> None:
        super().bind(index, page_size, leaves, observers)
        self.orders = SparseOrders(index, mirrors_are_spare=leaves.mirrors_are_spare)

    def note_change(self, node: Node) -> None:
        self.orders.note(node, node.data[self.index])

    def has(self, node: Node, device_only: bool) -> bool:
        """Whether its part of `node` is where a match looks for it."""
        data = node.data[self.index]
        return data.value is not None or (not device_only and data.host_value is not None)

    # --- eviction ---------------------------------------------------------------------------------

    def evict_component(self, node: Node, tier: Tier, eviction: Eviction) -> None:
        data = node.data[self.index]
        self._give_up(data, tier, eviction)
        if data.value is None and data.host_value is None:
            self.orders.forget(node, data)
        else:
            self.orders.note(node, data)
        if self.observers.listening:
            self.tell(EventKind.REMOVED, tier, node)

    def drive_eviction(self, tree: RadixTree, need: int, eviction: Eviction) -> None:
        counts, index = eviction.counts, self.index
        while counts[index] < need:
            node = self._oldest(DEVICE)
            if node is None:
                return
            tree.evict_device_part(node, self, eviction)

    def drive_host_eviction(self, tree: RadixTree, need: int, eviction: Eviction) -> None:
        while eviction.counts[self.index] < need:
            node = self.orders.first_mirror() or self._oldest(Tier.HOST)
            if node is None:
                return
            self.evict_component(node, Tier.HOST, eviction)

    def _oldest(self, tier: Tier) -> Node | None:
        """The next victim, of those that nobody holds."""
        return self.orders.first(tier)

    # --- locks ------------------------------------------------------------------------------------

    def release_component_lock(self, node: Node, tier: Tier, part: Any) -> None:
        for held in self.held(node, tier, part):
            self._unhold(held, tier)

    def would_release(self, parts: Sequence[tuple[Node, Any]]) -> int:
        left: dict[Node, int] = {}
        for node, part in parts:
            for held in self.held(node, DEVICE, part):
                left[held] = left.get(held, held.data[self.index].lock_ref) - 1
        values = [node.data[self.index].value for node, locks in left.items() if not locks]
        return sum(len(value) for value in values if value is not None)

    def _hold(self, node: Node, tier: Tier) -> None:
        data = node.data[self.index]
        if tier is DEVICE:
            data.lock_ref += 1
            if data.lock_ref > 1:
                return
            if data.value is not None:
                self.device.protect(len(data.value))
        else:
            data.host_lock_ref += 1
            if data.host_lock_ref == 1 and data.host_value is not None:
                self.host.protect(len(data.host_value))
        self.orders.note(node, data)

    def _unhold(self, node: Node, tier: Tier) -> None:
        data = node.data[self.index]
        if tier is DEVICE:
            data.lock_ref -= 1
            if data.lock_ref:
                return
            if data.value is not None:
                self.device.protect(-len(data.value))
        else:
            data.host_lock_ref -= 1
            if data.host_lock_ref == 0 and data.host_value is not None:
                self.host.protect(-len(data.host_value))
        self.orders.note(node, data)

    # --- what `evict_component` takes away, given -------------------------------------------------

    def _gain(self, node: Node, tier: Tier, ids: PageIds) -> None:
        data = node.data[self.index]
        if not data.stamp:  # a split has made the node: it is as old as its base
            data.stamp = node.data[BASE].stamp
        if tier is DEVICE:
            data.value = own(ids)
            self.device.credit(len(ids), data.lock_ref)
        else:
            data.host_value = own(ids)
            self.host.credit(len(ids), data.host_lock_ref)
        self.orders.note(node, data)
        if self.observers.listening:
            self.tell(EventKind.STORED, tier, node)

    def _gain_fresh(self, leaf: Node, ids: bytes) -> None:
        """`_gain`, on the device, of a node that an insert has just made: nobody holds it."""
        data = leaf.data[self.index]
        data.value = frombuffer(ids, INT32)
        self.device.evictable += len(data.value)
        self.orders.note(leaf, data)
        if self.observers.listening:
            self.tell(EventKind.STORED, DEVICE, leaf)

    # --- transfer ---------------------------------------------------------------------------------

    def commit_hicache_transfer(self, nodes: Sequence[Node], tier: Tier, ids: PageIds) -> PageIds:
        unused, at = [], 0
        for node in nodes:
            num_ids = self.num_ids(node)
            mine = ids[at : at + num_ids]
            at += num_ids
            data, base = node.data[self.index], node.data[BASE]
            has_base = base.value is not None or (
                tier is not DEVICE and base.host_value is not None
            )
            is_there = (data.value if tier is DEVICE else data.host_value) is not None
            if is_there or not has_base:  # or its base has gone, or has not come
                unused.append(mine)
            else:
                self._gain(node, tier, mine)
        return join(unused)

    # --- proof ------------------------------------------------------------------------------------

    def check(self, node: Node, fail: Callable[[str], None]) -> None:
        data, base = node.data[self.index], node.data[BASE]
        for name, value in (("value", data.value), ("host_value", data.host_value)):
            if value is None:
                continue
            if len(value) != self.num_ids(node):
                fail(f"{name} of {self.id} has {len(value)} ids, not {self.num_ids(node)}")
            if not owns_memory(value):
                fail(f"{name} of {self.id} is writable, or a view of something larger")
            if (np.asarray(value) == NO_PAGE).any():
                fail(f"{name} of {self.id} names no page")
        if data.value is not None and base.value is None:
            fail(f"has {self.id} on the device without the base (semantics §2.2)")
        if data.host_value is not None and base.value is None and base.host_value is None:
            fail(f"has {self.id} on the host without the base (semantics §2.2)")
        if data.lock_ref > base.lock_ref:
            fail(f"is locked more by {self.id} than by the base (semantics §2.3)")

    def check_orders(self, nodes: Sequence[Node], fail: Callable[[str], None]) -> None:
        orders = self.orders
        orders.settle()
        for name, order, belongs in (
            ("device", orders.device, lambda data: orders.wanted(data) is orders.device),
            ("host", orders.host, lambda data: orders.wanted(data) is orders.host),
            ("mirrors", orders.mirrors, orders.is_spare_mirror),
        ):
            wanted = {node for node in nodes if belongs(node.data[self.index])}
            listed = list(order)
            if set(listed) != wanted or len(listed) != len(order):
                fail(f"{self.id} {name} are {listed}, they should be {wanted}")
            if not all(map(order.is_in_place, listed)):
                fail(f"{self.id} {name}: some stand under an old rank")


GAP: Final = NO_PAGE.to_bytes(4, "little", signed=True)
"""An entry without a page, in an array's memory. No page id has its bytes, nor do two beside each
other: the highest byte of an id is less than 128."""


def has_gaps(ids: PageIds) -> bool:
    """Whether there is an entry without a page. A tenth of the time of numpy's comparison."""
    return GAP in ids.tobytes()


def are_gaps(ids: PageIds) -> bool:
    """Whether all entries are without a page: none at all, too."""
    return ids.tobytes() == GAP * len(ids)


def behind_gaps(num_gaps: int, parts: Sequence[bytes | PageIds]) -> PageIds:
    """So many entries without a page, and then these."""
    ids: PageIds = frombuffer(b"".join((GAP * num_gaps, *parts)), INT32)  # type: ignore[arg-type]
    return ids
