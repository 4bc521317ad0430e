"""A sliding window: of a prefix only the last `window` tokens are needed.

So a prefix may end where the window behind it is there, and what is further up can go: a tombstone
costs nothing but the boundaries for a window's length below it (semantics §3.4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from tiered_cache.tree.components.base import own
from tiered_cache.tree.components.sparse import GAP, SparseComponent, behind_gaps, has_gaps
from tiered_cache.types import DEVICE, NO_PAGE, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tiered_cache.observe import Observers
    from tiered_cache.tree.components.base import Flags
    from tiered_cache.tree.leaves import LeafSets
    from tiered_cache.tree.node import Node
    from tiered_cache.types import InsertParams, InsertResult, PageIds


CHUNK_TOKENS: Final = 2048
"""Of a chunk that a request is sure to have pages for; more is given where there is room."""


class SWAComponent(SparseComponent):
    """KV of layers that see the last `window` tokens, the current one included: one page id per
    page, for all pages of a node or for none.

    Args:
        component_id: `swa`, or `swa.4096` where a model has several windows.
        window: W, in tokens.
    """

    is_window: ClassVar[bool] = True

    def __init__(self, component_id: str, window: int) -> None:
        super().__init__(component_id)
        if window < 1:
            raise ValueError(f"a window has at least 1 token, not {window}")
        self.window = window
        self._whole_window = 0
        self._dated = 0

    def bind(self, index: int, page_size: int, leaves: LeafSets, observers: Observers) -> None:
        super().bind(index, page_size, leaves, observers)
        self._whole_window = self._ceil(self.window)
        self._dated = self.window + page_size

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
            value, above = node.data[index].value, node.start
            if value is not None and above >= start and node.end <= stop:
                parts.append(value)
                first = above
                continue
            end, first = min(node.end, stop), max(start, above)
            if value is None:
                parts.append(GAP * ((end - first) // size))
            else:
                parts.append(value[(first - above) // size : (end - above) // size])
        return behind_gaps((first - start) // size, parts[::-1])

    def touch(self, path: Sequence[Node], stamp: int) -> None:
        if not path:
            return
        index, top = self.index, path[-1].end - self._dated
        for node in reversed(path):
            if node.end <= top:
                return
            data = node.data[index]
            if data.stamp != stamp:
                data.stamp = stamp
                if data.value is not None or data.host_value is not None:
                    self.orders.note(node, data)

    # --- insert -----------------------------------------------------------------------------------

    def _first_page(self, start: int, params: InsertParams) -> int:
        """The depth from which on an insert that passes `start` may bring pages of a window."""
        return max(start, self._ceil(params.swa_evicted_seqlen), params.prev_prefix_len)

    def _changes(self, start: int, stop: int, params: InsertParams) -> list[int]:
        """Depths inside `[start, stop)` at which an insert begins or ceases to bring pages."""
        size = self.page_size
        ids = params.pages[self.index][start // size : stop // size]
        first = min(self._first_page(start, params), stop)
        if first == start and not has_gaps(ids):
            return []
        there = ids != NO_PAGE
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
        if start >= params.swa_evicted_seqlen and start >= params.prev_prefix_len:
            pages = ids.tobytes()
            if not pages.startswith(GAP):  # the leaf was cut where that changes
                self._gain_fresh(leaf, pages)
                return None
        # What the request says it has given up, and names all the same.
        left: PageIds = ids[ids != NO_PAGE]
        if not len(left):
            return None
        result.first_changed = min(result.first_changed, start)
        return left

    def leaf_cuts(self, start: int, stop: int, params: InsertParams) -> Iterable[int]:
        tail = stop - self._whole_window
        if start >= params.swa_evicted_seqlen and start >= params.prev_prefix_len:
            size = self.page_size
            if not has_gaps(params.pages[self.index][start // size : stop // size]):
                return (tail,)  # as nearly all are
        return (*self._changes(start, stop, params), tail)

    # --- request ----------------------------------------------------------------------------------

    def footprint(self, num_pages: int) -> int:
        window = self._ceil(self.window) // self.page_size + 1
        # What the tree holds for it, what it has computed since, and the chunk that comes.
        return min(num_pages, 2 * window + self.chunk_pages)

    @property
    def chunk_pages(self) -> int:
        return self._ceil(CHUNK_TOKENS) // self.page_size + 1  # it may begin inside of a page

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
        self.orders.note(parent, upper)

    # --- locks ------------------------------------------------------------------------------------

    def acquire_component_lock(self, path: Sequence[Node], tier: Tier, start: int) -> int:
        """Returns the depth at which the topmost held node begins: release walks up to there, so
        that no split in between can make it stop early (semantics §6.1–2)."""
        if not path:
            return start
        if tier is DEVICE:
            start = max(start, path[0].end - self.window)
        last: Node | None = None
        for node in path:
            if node.end <= start:
                break
            self._hold(node, tier)
            last = node
        top = path[0].end if last is None else last.start
        if tier is DEVICE:
            self.device.held += (path[0].end - top) // self.page_size
        return top

    def advance_component_lock(
        self, node: Node, part: int, path: Sequence[Node], below: Sequence[Node]
    ) -> int:
        """Likewise, but of what was not held before nothing above a place where nothing is, and
        nothing comes: who has published what is below it has left that behind. To hold the place
        takes room for what others put there, and its page may not be home yet (a fence)."""
        start = path[0].end - self.window if path else 0
        for other in below:
            data = other.data[self.index]
            if other.end <= start:
                break
            if data.value is None and data.pending is None:
                start = other.end
                break
        fresh = self.acquire_component_lock(path, DEVICE, max(0, start))
        self.release_component_lock(node, DEVICE, part)
        return fresh

    def release_component_lock(self, node: Node, tier: Tier, part: int) -> None:
        for held in self.held(node, tier, part):
            self._unhold(held, tier)
        if tier is DEVICE:
            self.device.held -= (node.end - part) // self.page_size

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

    def would_need(self, path: Sequence[Node], depth: int) -> int:
        """Tombstones, too: what comes there is held by all who hold the place."""
        within = [node for node in path if node.start < depth]
        top = depth
        for node in self._in_window(within, depth, self.window):
            top = node.start
        return (depth - top) // self.page_size

    def would_spare(self, parts: Sequence[tuple[Node, int]]) -> int:
        return sum(node.end - top for node, top in parts) // self.page_size

    def lock_cut(self, path: Sequence[Node]) -> int:
        """Where it would be more than the window and a page: so much `footprint` has room for, and
        nobody knows how much is computed before the request holds something else."""
        window, top, end = self._ceil(self.window), 0, path[0].end if path else 0
        for node in self._in_window(path, end, self.window):
            top = node.start
        return end - window if end - top > window + self.page_size else 0

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

    # --- proof ------------------------------------------------------------------------------------

    def check_orders(self, nodes: Sequence[Node], fail: Callable[[str], None]) -> None:
        super().check_orders(nodes, fail)
        held = sum(self.num_ids(node) * node.data[self.index].lock_ref for node in nodes)
        if self.device.held != held:
            fail(f"{self.id} counts {self.device.held} pages as held, the locks hold {held}")
