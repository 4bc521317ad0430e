"""A sliding window: of a prefix only the last `window` tokens are needed.

So a prefix may end where the window behind it is there, and what is further up can go: a tombstone
costs nothing but the boundaries for a window's length below it (semantics §3.4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_cache.tree.components.base import own
from tiered_cache.tree.components.sparse import GAP, SparseComponent, behind_gaps, has_gaps
from tiered_cache.types import NO_PAGE, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tiered_cache.tree.components.base import Flags
    from tiered_cache.tree.node import Node
    from tiered_cache.types import InsertParams, InsertResult, PageIds

DEVICE: Final = Tier.DEVICE

CHUNK_TOKENS: Final = 2048
"""Of a chunk that a request is sure to have pages for; more is given where there is room."""


class SWAComponent(SparseComponent):
    """KV of layers that see the last `window` tokens, the current one included: one page id per
    page, for all pages of a node or for none.

    Args:
        component_id: `swa`, or `swa.4096` where a model has several windows.
        window: W, in tokens.
    """

    def __init__(self, component_id: str, window: int) -> None:
        super().__init__(component_id)
        if window < 1:
            raise ValueError(f"a window has at least 1 token, not {window}")
        self.window = window

    def _floor(self, depth: int) -> int:
        return depth - depth % self.page_size

    def _ceil(self, depth: int) -> int:
        return self._floor(depth + self.page_size - 1)

    def _in_window(self, path: Sequence[Node], depth: int, window: int) -> Iterator[Node]:
        """The nodes of `path` (end first) that reach into the last `window` tokens before
        `depth`."""
        top = depth - window
        for node in path:
            yield node
            if node.start <= top:
                return

    # --- match ------------------------------------------------------------------------------------

    def deepest_boundary(
        self, path: Sequence[Node], count: int, depth: int, device_only: bool
    ) -> int:
        end, index = depth, self.index
        for at in range(count - 1, -1, -1):
            node = path[at]
            data = node.data[index]
            if data.value is None and (device_only or data.host_value is None):
                count, end = at, node.start  # and nothing ends right below, where it runs short
            elif end - node.start >= self.window:
                return count
        return count  # up to the root without a tombstone: a short path is a whole window

    def collect(self, path: Sequence[Node], start: int, stop: int) -> PageIds:
        """Of the window alone: what is further up may go at any time."""
        size, index = self.page_size, self.index
        top, first = max(start, stop - self.window), stop
        parts: list[bytes | PageIds] = []
        for node in reversed(path):
            if first <= top:
                break
            end, value = min(node.end, stop), node.data[index].value
            first = max(start, node.start)
            if value is None:
                parts.append(GAP * ((end - first) // size))
            elif first > node.start or end < node.end:
                parts.append(value[(first - node.start) // size : (end - node.start) // size])
            else:
                parts.append(value)
        return behind_gaps((first - start) // size, parts[::-1])

    def touch(self, path: Sequence[Node], stamp: int) -> None:
        if not path:
            return
        index, top = self.index, path[-1].end - self.window - self.page_size
        for node in reversed(path):
            data = node.data[index]
            if data.stamp != stamp:
                data.stamp = stamp
                if data.value is not None or data.host_value is not None:
                    self.orders.note(node)
            if node.start <= top:
                return

    # --- insert -----------------------------------------------------------------------------------

    def _first_page(self, start: int, params: InsertParams) -> int:
        """The depth from which on an insert that passes `start` may bring pages of a window."""
        return max(start, self._ceil(params.swa_evicted_seqlen), params.prev_prefix_len)

    def _changes(self, start: int, stop: int, params: InsertParams) -> list[int]:
        """Depths inside `[start, stop)` at which an insert begins or ceases to bring pages."""
        size = self.page_size
        first = min(self._first_page(start, params), stop)
        if first == start and not has_gaps(params.pages[self.index][start // size : stop // size]):
            return []
        there = params.pages[self.index][start // size : stop // size] != NO_PAGE
        there[: (first - start) // size] = False
        return [start + (int(at) + 1) * size for at in np.flatnonzero(there[1:] != there[:-1])]

    def _brings(self, start: int, params: InsertParams) -> bool:
        """Whether an insert has pages for what begins at `start`, up to where that changes."""
        has_page = params.pages[self.index][start // self.page_size] != NO_PAGE
        return bool(has_page) and self._first_page(start, params) == start

    def overlap_cut(self, node: Node, start: int, params: InsertParams) -> int | None:
        if node.data[self.index].value is not None or node.end <= params.prev_prefix_len:
            return None
        changes = self._changes(start, node.end, params)
        return changes[0] if changes else None

    def update_component_on_insert_overlap(
        self, node: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        size = self.page_size
        value = node.data[self.index].value
        if value is None:
            if self._brings(start, params):
                ids = params.pages[self.index][start // size : node.end // size]
                self._gain(node, DEVICE, ids)
            return None
        first = self._first_page(start, params)
        if first >= node.end:
            return None
        ids = params.pages[self.index][first // size : node.end // size]
        duplicates: PageIds = ids[(ids != NO_PAGE) & (ids != value[(first - start) // size :])]
        if not len(duplicates):
            return None
        result.first_changed = min(result.first_changed, first)
        return duplicates

    def commit_insert_component_data(
        self, leaf: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        size = self.page_size
        ids = params.pages[self.index][start // size : leaf.end // size]
        if self._brings(start, params):
            self._gain(leaf, DEVICE, ids)
            return None
        # What the request says it has given up, and names all the same.
        left: PageIds = ids[ids != NO_PAGE]
        if not len(left):
            return None
        result.first_changed = min(result.first_changed, start)
        return left

    def leaf_cuts(self, start: int, stop: int, params: InsertParams) -> Iterable[int]:
        return (*self._changes(start, stop, params), stop - self._ceil(self.window))

    # --- request ----------------------------------------------------------------------------------

    def footprint(self, num_pages: int) -> int:
        window = self._ceil(self.window) // self.page_size + 1
        # What the tree holds for it, what it has computed since, and the chunk that comes.
        return min(num_pages, 2 * window + self._ceil(CHUNK_TOKENS) // self.page_size + 1)

    def needed_from(self, depth: int) -> int:
        return max(0, self._floor(depth - self.window))

    def pages_to_go_on(self, depth: int) -> range:
        return range(self.needed_from(depth) // self.page_size, -(-depth // self.page_size))

    def restorable(self, there: Flags) -> Flags:
        size = self.page_size
        gone = np.concatenate(([0], np.cumsum(~there)))  # before each page end
        ends = np.arange(size, (len(there) + 1) * size, size)
        tops = np.maximum(0, ends - self.window) // size  # as `needed_from`
        legal: Flags = gone[1:] == gone[tops]
        return legal

    # --- split ------------------------------------------------------------------------------------

    def redistribute_on_node_split(self, parent: Node, child: Node, num_pages: int) -> None:
        upper, lower = parent.data[self.index], child.data[self.index]
        upper.lock_ref, upper.host_lock_ref = lower.lock_ref, lower.host_lock_ref
        upper.stamp, upper.stored, upper.pending = lower.stamp, lower.stored, lower.pending
        if lower.value is not None:
            upper.value, lower.value = own(lower.value[:num_pages]), own(lower.value[num_pages:])
        if lower.host_value is not None:
            upper.host_value, lower.host_value = (
                own(lower.host_value[:num_pages]),
                own(lower.host_value[num_pages:]),
            )
        self.orders.note(parent)

    # --- locks ------------------------------------------------------------------------------------

    def acquire_component_lock(self, path: Sequence[Node], tier: Tier, start: int) -> int:
        """Returns the depth at which the topmost held node begins: release walks up to there, so
        that no split in between can make it stop early (semantics §6.1–2)."""
        if not path:
            return start
        if tier is DEVICE:
            start = max(start, path[0].end - self.window)
        top = path[0].end
        for node in path:
            if node.end <= start:
                break
            self._hold(node, tier)
            top = node.start
        return top

    def held_from(self, depth: int, part: int) -> int:
        return part

    def held(self, node: Node, tier: Tier, part: int) -> Iterator[Node]:
        current: Node | None = node
        while current is not None and current.parent is not None and current.end > part:
            yield current
            current = current.parent

    def would_protect(self, path: Sequence[Node], depth: int) -> int:
        return sum(
            num_pages
            for node, num_pages in self._would_hold(path, depth)
            if not node.data[self.index].lock_ref
        )

    def would_hold(self, path: Sequence[Node], depth: int) -> int:
        return sum(num_pages for _, num_pages in self._would_hold(path, depth))

    def _would_hold(self, path: Sequence[Node], depth: int) -> Iterator[tuple[Node, int]]:
        """The nodes with a value that a lock would hold, and how many pages of each."""
        within = [node for node in path if node.start < depth]
        for node in self._in_window(within, depth, self.window):
            if node.data[self.index].value is not None:
                yield node, (min(node.end, depth) - node.start) // self.page_size

    # --- transfer ---------------------------------------------------------------------------------

    def needed(self, path: Sequence[Node], target: Tier) -> Sequence[Node]:
        if target is not DEVICE or not path:
            return path
        return list(self._in_window(path[::-1], path[-1].end, self.window))[::-1]
