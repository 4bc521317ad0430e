"""Which nodes may be given up next, per tier: the leaf predicates of semantics §8.1 and their
orders.

A leaf goes whole, so only leaves are candidates; an internal node becomes one when the last child
below it has gone. Both predicates are O(1) (a node counts its children), and `refresh` is called
wherever one of their inputs changes.

Changes of an order are noted and settled a little later: at the latest when `MAX_UNSETTLED` nodes
wait, or when somebody looks. A request touches, locks, extends and unlocks the same leaf within
microseconds; settled together that is one change of the order, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered_cache.tree.order import MirrorOrder, Order
from tiered_cache.tree.policies import recency
from tiered_cache.types import DEVICE, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered_cache.tree.node import ComponentData, Node
    from tiered_cache.tree.policies import EvictionPolicy


MAX_UNSETTLED: Final = 16
"""Nodes whose place may be out of date: what bounds the longest call (50 µs here), however many
were touched."""


class LeafSets:
    """The leaves of the device and of the host, each in its policy's order, and the mirrors: host
    copies that can be given up without losing anything (semantics §8.3).

    `mirrors_are_spare`: the device copy is enough, because it is copied again before it goes (the
    write_back policy); otherwise a mirror is spare only when storage is believed to have it.
    """

    __slots__ = ("_root", "_unsettled", "device", "host", "mirrors", "mirrors_are_spare")

    def __init__(
        self,
        device: EvictionPolicy,
        host: EvictionPolicy,
        root: Node,
        *,
        mirrors_are_spare: bool = False,
    ) -> None:
        self.device = device
        self.host = host
        self.mirrors = MirrorOrder(recency)
        self.mirrors_are_spare = mirrors_are_spare
        self._root = root
        self._unsettled: list[Node] = []

    def refresh(self, node: Node) -> None:
        """Bring a node's place in line with the predicates."""
        data = node.base
        wanted = None
        if data.lock_ref == 0 and node is not self._root:
            if data.value is not None:
                if node.device_children == 0:
                    wanted = self.device
            elif (
                data.host_value is not None and data.host_lock_ref == 0 and node.live_children == 0
            ):
                wanted = self.host
        if data.queue is not wanted:
            data.queue = wanted
            self.touch(node)
        elif data.host_value is not None or data.mirror_rank >= 0:
            # It may have become a mirror, or ceased to be one.
            self.touch(node)

    def touch(self, node: Node) -> None:
        """A node's place, or what its rank is made of, has changed."""
        data = node.base
        if not data.unsettled:
            data.unsettled = True
            unsettled = self._unsettled
            unsettled.append(node)
            if len(unsettled) == MAX_UNSETTLED:
                self.settle()

    def forget(self, node: Node, data: ComponentData) -> None:
        """A node is on no tier any more: most go for good, and there is nothing to wait for."""
        data.queue = None
        if data.mirror_rank >= 0:
            self.mirrors.remove(node)
        if data.listed is not None:
            data.listed.remove(node)
            data.listed = None

    def settle(self) -> None:
        """Bring the orders up to date."""
        for node in self._unsettled:
            data = node.base
            data.unsettled = False
            if data.host_value is not None or data.mirror_rank >= 0:
                self._settle_mirror(node)
            queue, listed = data.queue, data.listed
            if queue is listed:
                if listed is not None:
                    listed.touch(node)
                continue
            if listed is not None:
                listed.remove(node)
            if queue is not None:
                queue.insert(node)
            data.listed = queue
        self._unsettled.clear()

    def is_spare_mirror(self, node: Node) -> bool:
        """Whether the node's host copy can be given up without losing anything."""
        data = node.base
        return (
            data.value is not None
            and data.host_value is not None
            and data.host_lock_ref == 0
            and data.pending is None
            and node.host_children == 0
            and (data.stored or self.mirrors_are_spare)
        )

    def _settle_mirror(self, node: Node) -> None:
        is_listed = node.base.mirror_rank >= 0
        if self.is_spare_mirror(node):
            (self.mirrors.move if is_listed else self.mirrors.insert)(node)
        elif is_listed:
            self.mirrors.remove(node)

    def first_mirror(self) -> Node | None:
        """The host copy to give up next, of those that can be spared."""
        if self._unsettled:
            self.settle()
        return self.mirrors.first()

    def first(self, tier: Tier) -> Node | None:
        """The next victim, or None."""
        order, unsettled = self.device if tier is DEVICE else self.host, self._unsettled
        if len(unsettled) == 1 and isinstance(order, Order):
            # What the last victim has left a leaf goes next, as often as not: not worth a place.
            data = unsettled[0].base
            if data.queue is order and data.listed is None:
                return order.first_with(unsettled[0])
        if unsettled:
            self.settle()
        return order.first()

    def in_order(self, tier: Tier) -> Iterator[Node]:
        """All leaves of a tier, the next victim first."""
        self.settle()
        return iter(self.device if tier is Tier.DEVICE else self.host)
