"""A component of one's own stands in the tree beside the base: ids, hooks, joint boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.tree.helpers import seq
from tiered_cache.errors import IntegrityError
from tiered_cache.keys import RadixKey
from tiered_cache.tree.components.base import NO_PAGES, Eviction, Sizes, TreeComponent, own
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.node import Node
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import (
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    PageIds,
    Tier,
)


class EndMarks(TreeComponent):
    """One id at the end of each inserted path, on the device only: a boundary is legal where a mark
    stands. A third party's component, in a few lines."""

    cut: int | None = None

    def deepest_boundary(
        self, path: Sequence[Node], count: int, depth: int, device_only: bool
    ) -> int:
        while count:
            node = path[count - 1]
            if node.data[self.index].value is not None and depth == node.end:
                break
            count, depth = count - 1, node.start
        return count

    def collect(self, path: Sequence[Node], start: int, stop: int) -> PageIds:
        pages = np.full((stop - start) // self.page_size, -1, np.int32)
        for node in path:
            value = node.data[self.index].value
            if value is not None and start < node.end <= stop:
                pages[(node.end - start) // self.page_size - 1] = value[0]
        return pages

    def touch(self, path: Sequence[Node], stamp: int) -> None:
        if path:
            path[-1].data[self.index].stamp = stamp

    def _take(self, node: Node, params: InsertParams, result: InsertResult) -> PageIds | None:
        page = params.pages[self.index][node.end // self.page_size - 1 :][:1]
        if page[0] < 0:
            return None
        if node.data[self.index].value is None:
            node.data[self.index].value = own(page)
            self.device.credit(1, node.data[self.index].lock_ref)
            return None
        result.first_changed = min(result.first_changed, node.end - self.page_size)
        return page

    def update_component_on_insert_overlap(
        self, node: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        return self._take(node, params, result)

    def commit_insert_component_data(
        self, leaf: Node, start: int, params: InsertParams, result: InsertResult
    ) -> None:
        assert self._take(leaf, params, result) is None

    def leaf_cuts(self, start: int, stop: int, params: InsertParams) -> Iterable[int]:
        return () if self.cut is None else (self.cut,)

    def allows_boundary(self, depth: int, params: InsertParams) -> bool:
        return depth >= 32

    def redistribute_on_node_split(self, parent: Node, child: Node, num_pages: int) -> None:
        pass  # a mark stays at its depth: with the child

    def evict_component(self, node: Node, tier: Tier, eviction: Eviction) -> None:
        value = node.data[self.index].value
        assert value is not None
        node.data[self.index].value = None
        self.device.credit(-1, node.data[self.index].lock_ref)
        eviction.device[self.index].append(value)
        eviction.counts[self.index] += 1

    def drive_eviction(self, tree: RadixTree, need: int, eviction: Eviction) -> None:
        marked = [node for node in tree.nodes() if node.data[self.index].value is not None]
        for node in sorted(marked, key=lambda node: node.data[self.index].stamp):
            if eviction.counts[self.index] < need and not node.data[self.index].lock_ref:
                self.evict_component(node, Tier.DEVICE, eviction)

    def drive_host_eviction(self, tree: RadixTree, need: int, eviction: Eviction) -> None:
        pass

    def acquire_component_lock(self, path: Sequence[Node], tier: Tier, start: int) -> Any:
        if not path or tier is Tier.HOST:
            return None
        data = path[0].data[self.index]
        data.lock_ref += 1
        if data.lock_ref == 1 and data.value is not None:
            self.device.protect(1)
        return True

    def release_component_lock(self, node: Node, tier: Tier, part: Any) -> None:
        data = node.data[self.index]
        data.lock_ref -= 1
        if data.lock_ref == 0 and data.value is not None:
            self.device.protect(-1)

    def would_protect(self, path: Sequence[Node], depth: int) -> int:
        return sum(
            node.end == depth
            and not node.data[self.index].lock_ref
            and node.data[self.index].value is not None
            for node in path
        )

    def held(self, node: Node, tier: Tier, part: Any) -> Sequence[Node]:
        return [node]

    def would_release(self, parts: Sequence[tuple[Node, Any]]) -> int:
        nodes = [node for node, _ in parts]
        return sum(
            node.data[self.index].lock_ref == nodes.count(node)
            and node.data[self.index].value is not None
            for node in set(nodes)
        )

    def commit_hicache_transfer(self, nodes: Sequence[Node], tier: Tier, ids: PageIds) -> PageIds:
        return ids

    def check(self, node: Node, fail: Callable[[str], None]) -> None:
        value = node.data[self.index].value
        if value is not None and len(value) != 1:
            fail("has more than one mark")


def make_tree() -> tuple[RadixTree, EndMarks]:
    marks = EndMarks("acme.marks")
    return RadixTree([FullComponent("full"), marks], 16), marks


def insert(tree: RadixTree, tokens: list[int], first: int, mark: int, **rest: Any) -> Any:
    """Insert with ids `first`, `first + 1`, … and one mark at the end (−1: none)."""
    num_pages = len(tokens) // 16
    full = np.arange(first, first + num_pages, dtype=np.int32)
    marked = np.full(num_pages, -1, np.int32)
    marked[-1] = mark
    return tree.insert(InsertParams(RadixKey(tokens), (full, marked), **rest))


def match(tree: RadixTree, tokens: list[int]) -> MatchResult:
    return tree.match_prefix(MatchPrefixParams(RadixKey(tokens)))


def test_ids_and_dense_indexes() -> None:
    """§1.2: components are instances with an id of their own; the tree gives the index."""
    tree, marks = make_tree()
    assert [(component.id, component.index) for component in tree.components] == [
        ("full", 0),
        ("acme.marks", 1),
    ]
    assert marks.page_size == 16
    with pytest.raises(ValueError, match="an id of its own"):
        RadixTree([FullComponent("full"), FullComponent("full")], 16)
    with pytest.raises(ValueError, match="at least one component"):
        RadixTree([], 16)
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        RadixTree([FullComponent("full")], 0)


def test_a_boundary_is_where_every_component_agrees() -> None:
    """§3.3: the deepest one; a refusal higher up does not end the walk."""
    tree, _ = make_tree()
    insert(tree, seq("A", 32), 0, mark=-1)
    insert(tree, seq("A", 64), 0, mark=7, prev_prefix_len=32)
    insert(tree, seq("A", 96), 0, mark=-1, prev_prefix_len=64)
    tree.check_integrity()
    for length, wanted in ((32, 0), (64, 64), (63, 0), (96, 64)):
        found = match(tree, seq("A", length))
        assert found.device_length == found.best_length == wanted
        assert found.full_hit_length == length // 16 * 16
    full, marks = match(tree, seq("A", 96)).pages
    assert full.tolist() == [0, 1, 2, 3]
    assert marks.tolist() == [-1, -1, -1, 7]


def test_duplicates_are_told_per_component() -> None:
    """§5.4, §5.7: each component judges its own ids."""
    tree, _ = make_tree()
    insert(tree, seq("A", 64), 0, mark=7)
    result = insert(tree, seq("A", 64), 10, mark=8)
    assert [ids.tolist() for ids in result.duplicates] == [[10, 11, 12, 13], [8]]
    result = insert(tree, seq("A", 32), 20, mark=9)
    assert [ids.tolist() for ids in result.duplicates] == [[20, 21], []]
    assert match(tree, seq("A", 40)).device_length == 32
    tree.check_integrity()


def test_a_component_wants_cuts_and_may_refuse_the_prompts_end() -> None:
    """§5.6, §5.9: leaf cuts are made, and a boundary at the prompt's end needs everyone."""
    tree, marks = make_tree()
    insert(tree, seq("A", 64), 0, mark=-1, prompt_len=20)
    assert [node.end for node in tree.nodes()] == [64]
    insert(tree, seq("B", 64), 10, mark=-1, prompt_len=40)
    assert sorted(node.end for node in tree.nodes()) == [32, 64, 64]
    marks.cut = 48
    insert(tree, seq("C", 64), 20, mark=-1, prompt_len=40)
    assert sorted(node.end for node in tree.nodes()) == [32, 32, 48, 64, 64, 64]
    tree.check_integrity()


def test_locks_and_eviction_go_through_the_hooks() -> None:
    """§6.1, §7.1: targets per component; what one holds the other may lose; receipts have a part
    for each."""
    tree, _ = make_tree()
    insert(tree, seq("A", 64), 0, mark=7)
    insert(tree, seq("B", 64), 10, mark=8)
    boundary = match(tree, seq("A", 64)).device_boundary
    assert tree.would_protect(boundary) == [4, 1]
    receipt = tree.inc_lock_ref(boundary)
    assert [tree.protected_size(component) for component in (0, 1)] == [4, 1]
    assert tree.would_release([receipt]) == [4, 1]
    tree.check_integrity()
    gone = tree.evict((0, 5))
    assert [gone.count(component) for component in (0, 1)] == [0, 1]
    assert gone.device[1].tolist() == [8]
    tree.release(receipt, 1)
    assert [tree.protected_size(component) for component in (0, 1)] == [4, 0]
    tree.check_integrity()
    gone = tree.evict((5, 1))
    assert [gone.count(component) for component in (0, 1)] == [4, 1]
    assert match(tree, seq("A", 64)).full_hit_length == 64
    tree.dec_lock_ref(receipt)
    assert [tree.protected_size(component) for component in (0, 1)] == [0, 0]
    tree.check_integrity()


def test_a_leaf_that_goes_takes_every_component_along() -> None:
    """§1.2, §7.2: a leaf goes whole."""
    tree, _ = make_tree()
    insert(tree, seq("A", 64), 0, mark=7)
    gone = tree.evict((1, 0))
    assert [ids.tolist() for ids in gone.device] == [[0, 1, 2, 3], [7]]
    assert tree.num_nodes == 0
    tree.check_integrity()


def test_the_check_asks_the_component() -> None:
    """Invariants of its own are proven with the tree's."""
    tree, marks = make_tree()
    node = insert(tree, seq("A", 32), 0, mark=7).node
    node.data[1].value = own(np.array([7, 8], np.int32))
    marks.device.credit(1, 0)
    with pytest.raises(IntegrityError, match="has more than one mark"):
        tree.check_integrity()


def test_reset_binds_the_components_anew() -> None:
    """§12.1: sizes start from nothing, in the same dense order."""
    tree, marks = make_tree()
    insert(tree, seq("A", 32), 0, mark=7)
    tree.reset()
    assert (marks.device.evictable, marks.device.protected, marks.index) == (0, 0, 1)
    assert isinstance(marks.device, Sizes)
    insert(tree, seq("A", 32), 0, mark=7)
    tree.check_integrity()
    assert match(tree, seq("A", 32)).pages[1].tolist() == [-1, 7]
    assert NO_PAGES.tolist() == []
