"""Eviction policies: objects that own the order in which the leaves of one tier are given up
(semantics §7.6).

All of today's are a sorted order by a rank; one with an index of its own (learned from ages and
past hits) implements `EvictionPolicy` and stands beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from tiered_cache.tree.node import BASE, Node
from tiered_cache.tree.order import Order, Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


DEPTH_BITS: Final = 40
"""Room for a depth below a stamp: (stamp, depth) as one int compares twice as fast as a tuple."""

RECENCY_BITS: Final = 104
"""Room for a recency (64 bits of stamp, a depth) below what ranks before it."""

SLRU_THRESHOLD: Final = 2
"""Hits from which segmented LRU calls a leaf protected."""


class EvictionPolicy(Protocol):
    """The order of one tier's leaves. Every operation is O(log n) in the worst case, however many
    are locked.

    The tree calls `insert` when a node becomes a leaf, `remove` when it is none any more, `touch`
    when its age, hits or priority may have changed (several changes may be told as one), and takes
    victims with `first`. Iteration goes from the first victim to the last. `is_in_place` is for the
    checker: whether the node stands where it should.
    """

    name: str

    def insert(self, node: Node) -> None: ...
    def remove(self, node: Node) -> None: ...
    def touch(self, node: Node) -> None: ...
    def first(self) -> Node | None: ...
    def is_in_place(self, node: Node) -> bool: ...
    def __iter__(self) -> Iterator[Node]: ...
    def __contains__(self, node: Node) -> bool: ...
    def __len__(self) -> int: ...


class SortedPolicy(Order):
    """A policy that is a rank: the lowest goes first."""

    __slots__ = ("name",)

    def __init__(self, name: str, rank: Rank, index: int = BASE) -> None:
        super().__init__(rank, index)
        self.name = name

    touch = Order.move


def make_policy(policy: str | Callable[[], EvictionPolicy]) -> EvictionPolicy:
    """A fresh policy, by name or from its maker.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(policy, str):
        return policy()
    if policy not in RANKS:
        raise ValueError(
            f"unknown eviction policy {policy!r}; choose one of {', '.join(sorted(RANKS))}"
        )
    return SortedPolicy(policy, RANKS[policy])


def recency(node: Node) -> int:
    """(access stamp, depth) as one int: unique, because a stamp belongs to the nodes of one
    path."""
    return node.base.stamp << DEPTH_BITS | node.end


def recency_of(index: int) -> Rank:
    """The same by the accesses of one component."""
    return lambda node: node.data[index].stamp << DEPTH_BITS | node.end


def age(node: Node) -> int:
    """(creation stamp, depth): unique for the same reason."""
    return node.created << DEPTH_BITS | node.end


RANKS: Final[dict[str, Rank]] = {
    "lru": recency,
    "mru": lambda node: -recency(node),
    "fifo": age,
    "filo": lambda node: -age(node),
    "lfu": lambda node: (node.hit_count << RECENCY_BITS) + recency(node),
    "priority": lambda node: (node.priority << RECENCY_BITS) + recency(node),
    "slru": lambda node: ((node.hit_count >= SLRU_THRESHOLD) << RECENCY_BITS) + recency(node),
}
