"""The suite for components can fail: each mistake is found, by the test that is there for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pytest

from tiered_cache.testing.components import ComponentTests
from tiered_cache.tree.components.base import Eviction, TreeComponent
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.swa import SWAComponent
from tiered_cache.tree.node import Node
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import InsertParams, InsertResult, PageIds, Tier


class Window(SWAComponent):
    """What most of the mistakes are made in."""

    def __init__(self) -> None:
        super().__init__("mistaken", 9)


class State(MambaComponent):
    def __init__(self) -> None:
        super().__init__("mistaken")


class EndsAtTombstones(Window):
    def deepest_boundary(
        self, path: Sequence[Node], count: int, depth: int, device_only: bool
    ) -> int:
        return count


class EndsNowhereBelowTombstones(Window):
    def deepest_boundary(
        self, path: Sequence[Node], count: int, depth: int, device_only: bool
    ) -> int:
        whole = [self.has(node, device_only) for node in path[:count]]
        return [*whole, False].index(False)


class SeesTheDeviceOnly(State):
    def has(self, node: Node, device_only: bool) -> bool:
        return super().has(node, device_only=True)


class KeepsDuplicates(State):
    """Does not give back the caller's slot."""

    def update_component_on_insert_overlap(
        self, node: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        super().update_component_on_insert_overlap(node, start, params, result)
        return None


class AdoptsGaps(Window):
    def _brings(self, start: int, stop: int, params: InsertParams) -> bool:
        return True


class SaysNothingOfChanges(Window):
    def update_component_on_insert_overlap(
        self, node: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        told = result.first_changed
        left = super().update_component_on_insert_overlap(node, start, params, result)
        result.first_changed = told
        return left


class MovesTheStateUp(State):
    def redistribute_on_node_split(self, parent: Node, child: Node, num_pages: int) -> None:
        upper, lower = parent.data[self.index], child.data[self.index]
        upper.value, lower.value = lower.value, None
        self.note_change(parent)
        self.note_change(child)


class KeepsTooLittle(Window):
    def pages_to_go_on(self, depth: int) -> range:
        return range(self.needed_from(depth) // self.page_size + 1, depth // self.page_size)


class KeepsLocksBelow(Window):
    """A split does not copy them."""

    def redistribute_on_node_split(self, parent: Node, child: Node, num_pages: int) -> None:
        super().redistribute_on_node_split(parent, child, num_pages)
        parent.data[self.index].lock_ref = 0


class SharesMemory(Window):
    """The parts of a split are views of what was cut."""

    def redistribute_on_node_split(self, parent: Node, child: Node, num_pages: int) -> None:
        whole = child.data[self.index].value
        super().redistribute_on_node_split(parent, child, num_pages)
        if whole is not None:
            parent.data[self.index].value = whole[:num_pages]


class HoldsTooLittle(Window):
    def acquire_component_lock(self, path: Sequence[Node], tier: Tier, start: int) -> int:
        return super().acquire_component_lock(path[:1], tier, start)


class HoldsNoSpan(State):
    """On the host nothing is held."""

    def _hold(self, node: Node, tier: Tier) -> None:
        if tier is Tier.DEVICE:
            super()._hold(node, tier)

    def _unhold(self, node: Node, tier: Tier) -> None:
        if tier is Tier.DEVICE:
            super()._unhold(node, tier)


class PromisesTooLittle(Window):
    def would_protect(self, path: Sequence[Node], depth: int) -> int:
        return max(0, super().would_protect(path, depth) - 1)


class PromisesTooMuch(State):
    def would_release(self, parts: Sequence[tuple[Node, Any]]) -> int:
        return len({node for node, _ in parts})


class CountsAllAsEvictable(State):
    def _gain(self, node: Node, tier: Tier, ids: PageIds) -> None:
        super()._gain(node, tier, ids)
        data = node.data[self.index]
        if tier is Tier.DEVICE and data.lock_ref:
            self.device.protect(-len(ids))


class GivesUpEverything(State):
    def drive_eviction(self, tree: RadixTree, need: int, eviction: Eviction) -> None:
        super().drive_eviction(tree, need + 5, eviction)


class GivesUpNothing(State):
    def drive_host_eviction(self, tree: RadixTree, need: int, eviction: Eviction) -> None:
        pass


class DatesNothing(Window):
    def touch(self, path: Sequence[Node], stamp: int) -> None:
        pass


class TakesWithoutABase(State):
    def commit_hicache_transfer(self, nodes: Sequence[Node], tier: Tier, ids: PageIds) -> PageIds:
        node = nodes[-1]
        data = node.data[self.index]
        if (data.value if tier is Tier.DEVICE else data.host_value) is not None:
            return ids
        self._gain(node, tier, ids)
        return ids[:0]


class TakesTwice(Window):
    def commit_hicache_transfer(self, nodes: Sequence[Node], tier: Tier, ids: PageIds) -> PageIds:
        super().commit_hicache_transfer(nodes, tier, ids)
        return ids[:0]


class SaysNothing(State):
    """To observers, when something goes."""

    def tell(self, kind: Any, tier: Tier, node: Node) -> None:
        if kind.value == "stored":
            super().tell(kind, tier, node)


class ProvesNothing(State):
    def check(self, node: Node, fail: Callable[[str], None]) -> None:
        pass


class RemembersNodes(State):
    nodes: ClassVar[list[Node]] = []

    def _gain(self, node: Node, tier: Tier, ids: PageIds) -> None:
        super()._gain(node, tier, ids)
        self.nodes.append(node)


@dataclass(frozen=True)
class Mistake:
    component: type[TreeComponent]
    test: str


MISTAKES: Final = [
    Mistake(EndsAtTombstones, "test_a_prefix_ends_where_what_it_needs_is"),
    Mistake(EndsNowhereBelowTombstones, "test_a_prefix_ends_where_what_it_needs_is"),
    Mistake(SeesTheDeviceOnly, "test_it_goes_to_the_host_and_back"),
    Mistake(KeepsDuplicates, "test_ids_have_one_owner"),
    Mistake(AdoptsGaps, "test_a_gap_is_nobodys_page"),
    Mistake(SaysNothingOfChanges, "test_a_change_is_told_from_where_it_begins"),
    Mistake(MovesTheStateUp, "test_a_split_loses_nothing"),
    Mistake(KeepsTooLittle, "test_what_a_request_keeps_to_go_on"),
    Mistake(KeepsLocksBelow, "test_locks_are_symmetrical_through_splits"),
    Mistake(SharesMemory, "test_a_split_loses_nothing"),
    Mistake(HoldsTooLittle, "test_a_lock_keeps_what_a_prefix_needs"),
    Mistake(HoldsNoSpan, "test_host_locks_are_spans_through_splits"),
    Mistake(PromisesTooLittle, "test_would_protect_and_would_release_tell_the_truth"),
    Mistake(PromisesTooMuch, "test_a_lock_goes_down_with_its_request"),
    Mistake(CountsAllAsEvictable, "test_what_appears_under_a_lock_is_protected"),
    Mistake(GivesUpEverything, "test_eviction_gives_what_was_asked"),
    Mistake(GivesUpNothing, "test_eviction_gives_what_was_asked"),
    Mistake(DatesNothing, "test_what_is_used_goes_last"),
    Mistake(TakesWithoutABase, "test_a_commit_keeps_what_is_there"),
    Mistake(TakesTwice, "test_it_comes_from_storage"),
    Mistake(SaysNothing, "test_every_residency_is_told"),
    Mistake(ProvesNothing, "test_its_check_finds_a_planted_fault"),
    Mistake(RemembersNodes, "test_nothing_is_left"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda of: of.component.__name__)
def test_a_mistake_is_found(mistake: Mistake) -> None:
    suite = suite_of(mistake.component)
    with pytest.raises((Exception, pytest.fail.Exception)):
        getattr(suite, mistake.test)()


@pytest.mark.parametrize("name", sorted({mistake.test for mistake in MISTAKES}))
@pytest.mark.parametrize("sound", [Window, State])
def test_what_is_sound_passes(sound: type[TreeComponent], name: str) -> None:
    """Control: the tests find the mistakes, and not what they were made in."""
    getattr(suite_of(sound), name)()


def test_the_walks_find_half_of_them_too() -> None:
    """By random steps alone: nobody knows all mistakes beforehand."""
    found = []
    for mistake in MISTAKES:
        try:
            suite_of(mistake.component).test_random_walks()
        except Exception:
            found.append(mistake.component.__name__)
    assert len(found) >= 12, found


def suite_of(component: Any) -> ComponentTests:
    class Suite(ComponentTests):
        def make(self) -> TreeComponent:
            made: TreeComponent = component()
            return made

        def stack(self) -> list[TreeComponent]:
            return [FullComponent("full"), self.make()]

    return Suite()
