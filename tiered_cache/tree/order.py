"""An order of nodes: insert, move, remove and take the first, each O(log n) whatever is in it.

Sorted chunks of ranks, with the nodes in chunks beside them. A heap that is refreshed or rebuilt
would make one unlucky eviction pay for all touches since the last (79 ms at 10⁵ leaves, measured),
a linked list can keep only one order, and a dict over all nodes stalls whoever makes it grow (9 ms
at 10⁵ entries, 95 at 10⁶). So nothing here is longer than a chunk but the list of chunks, and a
node's own data remembers the rank under which it stands.

Chunks that have run empty are used again, as many are kept spare as are in use, the oldest is taken
first, and ranks are ints: all because of the garbage collector. A young container is walked by the
next young collection, with a cache miss per node, and when every leaf has been touched since the
last one that would be all of them (28 ms at 10⁵, measured).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final, TypeVar

from tiered_cache.tree.node import BASE, ComponentData, Node

T = TypeVar("T")

Rank = Callable[[Node], int]

CHUNK: Final = 512
"""Entries of a fresh chunk."""

MOST: Final = 2 * CHUNK
FEWEST: Final = CHUNK // 4
"""A chunk with more is split, one with fewer joins its neighbour."""


class Order:
    """Nodes sorted by `rank`, which must differ for any two nodes.

    A node stays where its rank was when it was last inserted or moved, so a rank may change before
    `move` is called. The rank under which it stands is kept in its data of the component `index`
    (`rank`), so it is in one order of each component at most, and in one of mirrors besides.
    """

    __slots__ = ("_index", "_lasts", "_nodes", "_rank", "_ranks", "_spare")

    def __init__(self, rank: Rank, index: int = BASE) -> None:
        self._rank = rank
        self._index = index
        self._ranks: list[list[int]] = []
        self._nodes: list[list[Node]] = []
        self._lasts: list[int] = []  # the highest rank of each chunk
        self._spare: deque[tuple[list[int], list[Node]]] = deque()

    def insert(self, node: Node) -> None:
        self.put(node, node.data[self._index], self._rank(node))

    def remove(self, node: Node) -> None:
        self.take_out(node.data[self._index])

    def move(self, node: Node) -> None:
        """Put a node where its rank belongs now."""
        data, rank = node.data[self._index], self._rank(node)
        if rank != data.rank:
            self.take_out(data)
            self.put(node, data, rank)

    def put(self, node: Node, data: ComponentData, rank: int) -> None:
        """`insert` for who has a node's data and rank at hand."""
        data.rank = rank
        lasts = self._lasts
        if not lasts:
            self._open(0, rank)
        if rank >= lasts[-1]:  # what was used just now is the youngest, in most orders
            at = -1
            lasts[-1] = rank
            ranks = self._ranks[-1]
            ranks.append(rank)
            self._nodes[-1].append(node)
        else:
            at = bisect_left(lasts, rank)
            ranks = self._ranks[at]
            place = bisect_left(ranks, rank)
            ranks.insert(place, rank)
            self._nodes[at].insert(place, node)
        if len(ranks) > MOST:
            self._split(at % len(lasts))

    def take_out(self, data: ComponentData) -> None:
        """`remove` for who has a node's data at hand."""
        rank, lasts = data.rank, self._lasts
        at = bisect_left(lasts, rank)
        ranks = self._ranks[at]
        place = bisect_left(ranks, rank)
        del ranks[place], self._nodes[at][place]
        num_left = len(ranks)
        if num_left < FEWEST:
            self._join(at)
        elif place == num_left:
            lasts[at] = ranks[-1]

    def first(self) -> Node | None:
        return self._nodes[0][0] if self._nodes else None

    def first_with(self, node: Node) -> Node:
        """What would be first if `node`, which is not in the order, were."""
        if self._ranks and self._ranks[0][0] < self._rank(node):
            return self._nodes[0][0]
        return node

    def is_in_place(self, node: Node) -> bool:
        """Whether the node stands under the rank that it has now (for the checker)."""
        return Order.__contains__(self, node) and node.data[self._index].rank == self._rank(node)

    def _find(self, node: Node) -> tuple[int, int]:
        """Chunk and place of a node that is in the order."""
        rank = node.data[self._index].rank
        at = bisect_left(self._lasts, rank)
        return at, bisect_left(self._ranks[at], rank)

    def _open(self, at: int, last: int) -> None:
        """An empty chunk at this place."""
        spare = self._spare
        while len(spare) <= len(self._ranks):
            spare.append(([], []))
        ranks, nodes = spare.popleft()
        self._ranks.insert(at, ranks)
        self._nodes.insert(at, nodes)
        self._lasts.insert(at, last)

    def _drop(self, at: int) -> None:
        ranks, nodes = self._ranks.pop(at), self._nodes.pop(at)
        del self._lasts[at]
        ranks.clear()
        nodes.clear()
        if len(self._spare) <= len(self._ranks):
            self._spare.append((ranks, nodes))

    def _split(self, at: int) -> None:
        self._open(at + 1, self._lasts[at])
        ranks, nodes = self._ranks[at], self._nodes[at]
        self._ranks[at + 1] += ranks[CHUNK:]
        self._nodes[at + 1] += nodes[CHUNK:]
        del ranks[CHUNK:], nodes[CHUNK:]
        self._lasts[at] = ranks[-1]

    def _join(self, at: int) -> None:
        """A short chunk goes into its neighbour, so that there are never many."""
        if len(self._ranks) > 1:
            at = max(0, at - 1)
            self._ranks[at] += self._ranks[at + 1]
            self._nodes[at] += self._nodes[at + 1]
            self._drop(at + 1)
        if not self._ranks[at]:
            self._drop(at)
            return
        self._lasts[at] = self._ranks[at][-1]
        if len(self._ranks[at]) > MOST:
            self._split(at)

    def __iter__(self) -> Iterator[Node]:
        return chain.from_iterable(self._nodes)

    def __contains__(self, node: Node) -> bool:
        rank = node.data[self._index].rank
        if not self._lasts or rank > self._lasts[-1]:
            return False
        at, place = self._find(node)
        return place < len(self._nodes[at]) and self._nodes[at][place] is node

    def __len__(self) -> int:
        return sum(map(len, self._ranks))


def _by_mirror_rank(method: Callable[[Any, Node], T]) -> Any:
    """A method of `Order` for which a node stands where its `mirror_rank` says.

    So that the order of the leaves, which every request changes, pays nothing for there being two.
    """

    def swapped(order: Any, node: Node) -> T:
        data = node.data[order._index]
        data.rank, data.mirror_rank = data.mirror_rank, data.rank
        try:
            return method(order, node)
        finally:
            data.rank, data.mirror_rank = data.mirror_rank, data.rank

    return swapped


class MirrorOrder(Order):
    """The order of nodes that are on both tiers; they may stand in that of the leaves besides."""

    __slots__ = ()

    insert = _by_mirror_rank(Order.insert)
    move = _by_mirror_rank(Order.move)
    is_in_place = _by_mirror_rank(Order.is_in_place)
    __contains__ = _by_mirror_rank(Order.__contains__)
    _remove = _by_mirror_rank(Order.remove)

    def remove(self, node: Node) -> None:
        self._remove(node)
        node.data[self._index].mirror_rank = -1
