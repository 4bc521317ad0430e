"""Recurrent state: one slot describes one exact depth of a prefix, and nothing else will do.

A prefix may end only where a state stands (semantics §3.4), a split leaves it where it is, at its
depth, and a lock holds that one slot.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from tiered_cache.tree.components.sparse import GAP, SparseComponent, are_gaps, behind_gaps
from tiered_cache.types import DEVICE, NO_PAGE, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tiered_cache.tree.components.base import Flags
    from tiered_cache.tree.node import ComponentData, Node
    from tiered_cache.types import InsertParams, InsertResult, PageIds


STATES_PER_PATH: Final = 4

SURPLUS: Final = 1 << 62
"""Taken from the stamp of a state that its path can do without: so it is older than all that are
not, and the oldest of such is still the first to go. An access dates it as any other."""


class MambaComponent(SparseComponent):
    """State of linear-attention layers: one slot at the end of a node, or none.

    Args:
        component_id: `mamba`, usually.
        grid: G, in tokens: states are kept at its multiples.
        states_per_path: of those on one path that are not special, how many are given up by age
            alone; more than that go before (semantics §9.10).

    In a page array its slot stands at the page that the depth ends, and −1 everywhere else.
    """

    is_per_page: ClassVar[bool] = False

    def __init__(
        self, component_id: str, grid: int = 1, states_per_path: int = STATES_PER_PATH
    ) -> None:
        super().__init__(component_id)
        if grid < 1:
            raise ValueError(f"a grid has at least 1 token, not {grid}")
        if states_per_path < 0:
            raise ValueError(f"a path cannot keep {states_per_path} states")
        self._grid = grid
        self._states_per_path = states_per_path

    # --- match ------------------------------------------------------------------------------------

    def deepest_boundary(
        self, path: Sequence[Node], count: int, depth: int, device_only: bool
    ) -> int:
        while count:
            node = path[count - 1]
            if node.end == depth and self.has(node, device_only):
                break
            count, depth = count - 1, node.start
        return count

    def collect(self, path: Sequence[Node], start: int, stop: int) -> PageIds:
        """The state at the end alone: no other is of use to whoever goes on from there."""
        num_pages = max(0, stop - start) // self.page_size
        value = path[-1].data[self.index].value if path and path[-1].end == stop else None
        if value is None or not num_pages:
            return behind_gaps(num_pages, ())
        return behind_gaps(num_pages - 1, (value,))

    def touch(self, path: Sequence[Node], stamp: int) -> None:
        if path:
            data = path[-1].data[self.index]
            if data.stamp != stamp:  # else the insert has just made it
                data.stamp = stamp
                if data.value is not None or data.host_value is not None:
                    self.orders.note(path[-1], data)

    # --- insert -----------------------------------------------------------------------------------

    def update_component_on_insert_overlap(
        self, node: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        # Of the states that the insert has for `(start, end]`, the one at the end of the node, if
        # it has none there (semantics §5.7); the others are left.
        size = self.page_size
        if start < params.prev_prefix_len:
            start = params.prev_prefix_len
        ids = params.pages[self.index][start // size : node.end // size]
        if are_gaps(ids):
            return None
        value = node.data[self.index].value
        if value is None and ids[-1] != NO_PAGE:
            self._gain(node, DEVICE, ids[-1:])
            result.mamba_exist = False
            ids = ids[:-1]
            if are_gaps(ids):
                return None
        left: PageIds = ids[ids != NO_PAGE]
        if value is not None:
            left = left[left != value[0]]
        if not len(left):
            return None
        result.first_changed = min(result.first_changed, start)
        return left

    def commit_insert_component_data(
        self, leaf: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        last = leaf.end // self.page_size  # there is none before: the leaf was cut at each
        state = params.pages[self.index][last - 1 : last].tobytes()
        if state != GAP:
            self._gain_fresh(leaf, state)
            self._age_surplus(leaf)
            result.mamba_exist = False
        return None

    def leaf_cuts(self, start: int, stop: int, params: InsertParams) -> Iterable[int]:
        size = self.page_size
        inside = params.pages[self.index][start // size : stop // size - 1]
        if are_gaps(inside):
            return ()
        return [start + (int(at) + 1) * size for at in np.flatnonzero(inside != NO_PAGE)]

    def allows_boundary(self, depth: int, params: InsertParams) -> bool:
        """Nobody could use one without a state."""
        return depth > 0 and bool(params.pages[self.index][depth // self.page_size - 1] != NO_PAGE)

    # --- request ----------------------------------------------------------------------------------

    @property
    def grid(self) -> int:
        return math.lcm(self.page_size, self._grid)

    def footprint(self, num_pages: int) -> int:
        return 1  # the state that a request works with

    def needed_from(self, depth: int) -> int:
        return depth

    def restorable(self, there: Flags) -> Flags:
        return there

    # --- split ------------------------------------------------------------------------------------

    def redistribute_on_node_split(self, parent: Node, child: Node, num_pages: int) -> None:
        """The state stays at its depth, and so do its locks: with the child (semantics §4)."""

    # --- what a path keeps ------------------------------------------------------------------------
    #
    # A long prompt, or a conversation, leaves a state at the end of every chunk. Of use to others
    # are the first (what many prompts begin with), those where paths fork, and the last (it goes
    # on). Where the next fork will be nobody knows, so the others that are kept are spread: whoever
    # forks finds one not far above. The rest would only push states of other paths out.

    def _gain(self, node: Node, tier: Tier, ids: PageIds) -> None:
        data = node.data[self.index]
        is_new = data.value is None and data.host_value is None
        if is_new and data.stamp < 0:
            data.stamp += SURPLUS  # of one that stood here before
        super()._gain(node, tier, ids)
        if is_new:
            self._age_surplus(node)

    def _age_surplus(self, last: Node) -> None:
        """A state has come to stand at `last`: those above it that the path can do without become
        the oldest. Roughly: who is to go is looked at again (`_can_spare`), and most states come
        to go with their path."""
        index, num_states, above = self.index, 0, last.parent
        assert above is not None, "the root has no state"
        while above.parent is not None:  # every state comes by here, and most paths have few
            data = above.data[index]
            if data.value is not None or data.host_value is not None:
                num_states += 1
            above = above.parent
        if num_states <= 1 + self._states_per_path:
            return
        kept, others = [last], list[int]()
        for node in self._above(last):
            if node.data[index].stamp >= 0 and self.has(node, False):
                if len(node.children) == 1:
                    others.append(len(kept))
                kept.append(node)
        if others and others[-1] == len(kept) - 1:
            others.pop()  # the first
        while len(others) > self._states_per_path:
            # The one whose neighbours are nearest to each other; of several the shallowest.
            gaps = [kept[at - 1].end - kept[at + 1].end for at in others]
            at = others[len(gaps) - 1 - gaps[::-1].index(min(gaps))]
            node = kept.pop(at)
            node.data[index].stamp -= SURPLUS
            self.orders.note(node, node.data[index])
            others = [other - (other > at) for other in others if other != at]

    def _can_spare(self, node: Node) -> bool:
        """Whether the path of one that was found to be surplus still can do without it: states may
        have gone, and forks may have come to be. Where paths fork below it, the newest says."""
        index, num_others = self.index, 0
        is_between, found = True, False  # up to the next state there is no fork, and there is one
        is_other = False
        for above in self._above(node):
            if len(above.children) > 1:
                is_between = False
            if self.has(above, False):
                num_others += is_other
                data, found = above.data[index], True
                is_other = is_between and data.stamp >= 0 and not _is_held(data)
                is_between = True
        if not found:
            return False
        is_between, is_other, found = True, False, False
        below = node
        while below.children:
            if len(below.children) > 1:
                if not found:
                    return False  # there is none between it and the fork
                is_between = False
            below = next(reversed(below.children.values()))
            if self.has(below, False):
                num_others += is_other and is_between
                data, found = below.data[index], True
                is_other, is_between = data.stamp >= 0 and not _is_held(data), True
        return found and num_others >= self._states_per_path

    def _above(self, node: Node) -> Iterator[Node]:
        above = node.parent
        while above is not None and above.parent is not None:
            yield above
            above = above.parent

    def _oldest(self, tier: Tier) -> Node | None:
        orders, index = self.orders, self.index
        node = orders.first(tier)
        while node is not None and node.data[index].stamp < 0 and not self._can_spare(node):
            node.data[index].stamp += SURPLUS
            orders.note(node, node.data[index])
            node = orders.first(tier)
        return node

    # --- locks ------------------------------------------------------------------------------------

    def acquire_component_lock(self, path: Sequence[Node], tier: Tier, start: int) -> int:
        if path and path[0].end > start:
            self._hold(path[0], tier)
        return start

    def held_from(self, depth: int, part: int) -> int:
        return depth - self.page_size

    def held(self, node: Node, tier: Tier, part: int) -> tuple[Node, ...]:
        return (node,) if node.parent is not None and node.end > part else ()

    def would_protect(self, path: Sequence[Node], depth: int) -> int:
        for node in path:
            if node.end == depth:
                data = node.data[self.index]
                return int(data.value is not None and not data.lock_ref)
        return 0

    # --- transfer ---------------------------------------------------------------------------------

    def needed(self, path: Sequence[Node], target: Tier) -> Sequence[Node]:
        return path[-1:] if target is DEVICE else path


def _is_held(data: ComponentData) -> bool:
    return bool(data.lock_ref or data.host_lock_ref)
