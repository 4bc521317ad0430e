"""An order of nodes: insert, move, remove and take the first, each O(log n) whatever is in it.

Sorted chunks (`sortedcontainers`) of plain ranks. A heap that is refreshed or rebuilt would make
one unlucky eviction pay for all touches since the last (79 ms at 10⁵ leaves, measured), and a
linked list can keep only one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedList

if TYPE_CHECKING:
    from tiered_cache.tree.node import Node

Rank = Callable[["Node"], Any]


class Order:
    """Nodes sorted by `rank`, which must differ for any two nodes.

    A node stays where its rank was when it was last inserted or moved, so a rank may change before
    `move` is called.
    """

    __slots__ = ("_nodes", "_rank", "_rank_of", "_ranks")

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._ranks: SortedList[Any] = SortedList()
        self._nodes: dict[Any, Node] = {}
        self._rank_of: dict[Node, Any] = {}

    def insert(self, node: Node) -> None:
        rank = self._rank(node)
        self._rank_of[node] = rank
        self._nodes[rank] = node
        self._ranks.add(rank)

    def remove(self, node: Node) -> None:
        rank = self._rank_of.pop(node)
        del self._nodes[rank]
        self._ranks.remove(rank)

    def move(self, node: Node) -> None:
        """Put a node where its rank belongs now."""
        if self._rank(node) != self._rank_of[node]:
            self.remove(node)
            self.insert(node)

    def first(self) -> Node | None:
        return self._nodes[self._ranks[0]] if self._ranks else None

    def is_in_place(self, node: Node) -> bool:
        """Whether the node stands under the rank that it has now (for the checker)."""
        return bool(self._rank_of[node] == self._rank(node))

    def __iter__(self) -> Iterator[Node]:
        return (self._nodes[rank] for rank in self._ranks)

    def __contains__(self, node: Node) -> bool:
        return node in self._rank_of

    def __len__(self) -> int:
        return len(self._rank_of)
