"""A component of one's own: layers that always see the first page of a prompt (an attention sink).

    python examples/custom_component.py

Their pages beyond the first one are not cached at all, so a prefix needs one page of them, whatever
its length. `tests/tree/test_components_conformance.py` proves it, in four lines.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from tiered_cache.keys import RadixKey
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.sparse import SparseComponent
from tiered_cache.tree.node import Node
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import NO_PAGE, InsertParams, InsertResult, MatchPrefixParams, PageIds, Tier


class SinkComponent(SparseComponent):
    """One id at the node that is the first page. `SparseComponent` gains, loses, counts, orders."""

    # --- where a prefix may end

    def deepest_boundary(
        self, path: Sequence[Node], count: int, depth: int, device_only: bool
    ) -> int:
        return count if path and self.has(path[0], device_only) else 0

    def collect(self, path: Sequence[Node], start: int, stop: int) -> PageIds:
        pages = np.full((stop - start) // self.page_size, NO_PAGE, np.int32)
        if path and not start and (value := path[0].data[self.index].value) is not None:
            pages[0] = value[0]
        return pages

    def touch(self, path: Sequence[Node], stamp: int) -> None:
        if path and self.has(path[0], device_only=False):
            path[0].data[self.index].stamp = stamp
            self.note_change(path[0])

    # --- what an insert brings, and a split leaves

    def leaf_cuts(self, start: int, stop: int, params: InsertParams) -> Iterable[int]:
        return () if start else (self.page_size,)

    def overlap_cut(self, node: Node, start: int, params: InsertParams) -> int | None:
        return None if start or node.end == self.page_size else self.page_size

    def update_component_on_insert_overlap(
        self, node: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        first = max(start, params.prev_prefix_len)
        ids, value = params.pages[self.index], node.data[self.index].value
        if not first and value is None and ids[0] != NO_PAGE:
            self._gain(node, Tier.DEVICE, ids[:1])
            first = self.page_size
        left: PageIds = ids[first // self.page_size : node.end // self.page_size]
        left = left[left != NO_PAGE]
        if not first and value is not None:
            left = left[left != value[0]]
        if not len(left):
            return None
        result.first_changed = min(result.first_changed, first)
        return left

    def commit_insert_component_data(
        self, leaf: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        return self.update_component_on_insert_overlap(leaf, start, params, result)

    def redistribute_on_node_split(self, parent: Node, child: Node, num_pages: int) -> None:
        if not parent.start:  # it is the first page from now on: a page is not cut, so no id moves
            upper, lower = parent.data[self.index], child.data[self.index]
            upper.lock_ref, lower.lock_ref = lower.lock_ref, 0
            upper.host_lock_ref, lower.host_lock_ref = lower.host_lock_ref, 0

    # --- what a lock holds: the first page, by whoever holds anything

    def _first(self, node: Node) -> Node:
        while node.parent is not None and node.start:
            node = node.parent
        return node

    def acquire_component_lock(self, path: Sequence[Node], tier: Tier, start: int) -> bool:
        holds = bool(path) and path[-1].end > start
        if holds:
            self._hold(path[-1], tier)
        return holds

    def held(self, node: Node, tier: Tier, part: bool) -> Iterable[Node]:
        return [self._first(node)] if part else []

    def would_protect(self, path: Sequence[Node], depth: int) -> int:
        data = path[-1].data[self.index] if path else None
        return int(data is not None and data.value is not None and not data.lock_ref)

    # --- what storage must have, and what a transfer is for

    def pages_needed(self, depth: int) -> range:
        return range(1)

    def needed(self, path: Sequence[Node], target: Tier) -> Sequence[Node]:
        return path[:1]


def main() -> None:
    tree = RadixTree([FullComponent("full"), SinkComponent("acme.sinks")], page_size=16)
    key = RadixKey(range(100))
    full, sinks = np.arange(6, dtype=np.int32), np.array([7, *[NO_PAGE] * 5], np.int32)
    tree.insert(InsertParams(key, (full, sinks)))
    for what in ("with", "without"):
        found = tree.match_prefix(MatchPrefixParams(key))
        print(f"{what} the sink: {found.device_length} of {found.full_hit_length} tokens")
        tree.evict((0, 1))  # a page of the sink's, and nothing else
    tree.check_integrity()


if __name__ == "__main__":
    main()
