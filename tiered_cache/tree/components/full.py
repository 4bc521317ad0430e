"""Full attention: every page of the prefix is needed, from the root on.

The base component: its value is what makes a node exist (semantics §1), so it also keeps the counts
of children by which the leaf sets know a leaf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiered_cache.errors import StaleError, stale_prefix
from tiered_cache.observe import EventKind
from tiered_cache.tree.components.base import (
    NO_PAGES,
    Eviction,
    TreeComponent,
    join,
    own,
    owns_memory,
)
from tiered_cache.types import DEVICE, PageIds, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiered_cache.tree.components.base import Flags
    from tiered_cache.tree.node import Node
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import InsertParams, InsertResult


class FullComponent(TreeComponent):
    """KV of full attention: one page id per page, a hold on a path holds all of it."""

    # --- match ------------------------------------------------------------------------------------

    def deepest_boundary(
        self, path: Sequence[Node], count: int, depth: int, device_only: bool
    ) -> int:
        if device_only:  # dev(F) is prefix closed: the deepest node that has it is the boundary
            while count and path[count - 1].base.value is None:
                count -= 1
        return count  # the walk has stopped in front of the first dead node

    def collect(self, path: Sequence[Node], start: int, stop: int) -> PageIds:
        if start >= stop:
            return NO_PAGES
        if start:
            path = [node for node in path if node.end > start]
        parts = [node.base.value for node in path]
        if parts[-1] is None:
            raise StaleError("the pages of this boundary have left the device: match again")
        end = path[-1].end
        if end > stop:
            parts[-1] = parts[-1][: (stop - end) // self.page_size]
        ids = join(parts)  # type: ignore[arg-type]
        return ids[len(ids) - (stop - start) // self.page_size :] if start else ids

    def touch(self, path: Sequence[Node], stamp: int) -> None:
        has_mirrors = self.host.evictable  # each of them is counted there
        for node in path:
            data = node.base
            if data.queue is None and not (has_mirrors and data.mirror_rank >= 0):
                data.stamp = stamp
            elif data.stamp != stamp:  # else the insert has just made it
                data.stamp = stamp
                self.leaves.touch(node)

    # --- insert -----------------------------------------------------------------------------------

    def update_component_on_insert_overlap(
        self, node: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        page_size, owned = self.page_size, params.prev_prefix_len
        value = node.base.value
        if value is None:
            if start < owned:
                raise stale_prefix(owned, start)
            result.prefix_len = min(result.prefix_len, start)
            ids = params.pages[self.index][start // page_size : node.end // page_size]
            self._gain(node, DEVICE, own(ids))
            return None
        if start < owned:
            if node.end <= owned:
                return None
            value = value[(owned - start) // page_size :]
            start = owned
        ids = params.pages[self.index][start // page_size : node.end // page_size]
        # The very page that is there is nobody's duplicate; and a copy, for the caller's table is
        # about to be overwritten with the canonical ids.
        duplicates: PageIds = ids[ids != value]
        if not len(duplicates):
            return None
        if start < result.first_changed:
            result.first_changed = start
        return duplicates

    def commit_insert_component_data(
        self, leaf: Node, start: int, params: InsertParams, result: InsertResult
    ) -> None:
        # `_gain`, for a node of which all is known: no lock, no child, on no other tier. Every
        # request does this once, so it is spelt out.
        size, index, leaves, parent = self.page_size, self.index, self.leaves, leaf.parent
        assert parent is not None, "a leaf hangs somewhere"
        ids = own(params.pages[index][start // size : leaf.end // size])
        data, above = leaf.base, parent.base
        data.value = ids
        if leaf.end == result.length:  # else the next one hangs below it at once
            data.queue = leaves.device
            leaves.touch(leaf)
        self.device.evictable += len(ids)
        parent.device_children += 1
        parent.live_children += 1
        if above.queue is not None:
            above.queue = None
            leaves.touch(parent)
        if self.observers.listening:
            self.tell(EventKind.STORED, DEVICE, leaf)

    # --- request ----------------------------------------------------------------------------------

    def restorable(self, there: Flags) -> Flags:
        return np.logical_and.accumulate(there)

    # --- split ------------------------------------------------------------------------------------

    def redistribute_on_node_split(self, parent: Node, child: Node, num_pages: int) -> None:
        upper, lower = parent.base, child.base
        upper.lock_ref, upper.host_lock_ref = lower.lock_ref, lower.host_lock_ref
        upper.stamp, upper.stored = lower.stamp, lower.stored
        upper.pending = lower.pending
        if lower.value is not None:
            upper.value, lower.value = own(lower.value[:num_pages]), own(lower.value[num_pages:])
            parent.device_children = 1
        if lower.host_value is not None:
            upper.host_value, lower.host_value = (
                own(lower.host_value[:num_pages]),
                own(lower.host_value[num_pages:]),
            )
            parent.host_children = 1
        parent.live_children = int(lower.value is not None or lower.host_value is not None)

    # --- eviction ---------------------------------------------------------------------------------

    def evict_component(self, node: Node, tier: Tier, eviction: Eviction) -> None:
        data, parent = node.base, node.parent
        assert parent is not None, "the root holds nothing"
        self._give_up(data, tier, eviction)
        if tier is DEVICE:
            parent.device_children -= 1
        else:
            parent.host_children -= 1
        if data.value is None and data.host_value is None:
            parent.live_children -= 1
            self.leaves.forget(node, data)
        else:
            self.leaves.refresh(node)
        if parent.device_children == 0 or (parent.host_children == 0 and tier is not DEVICE):
            self.leaves.refresh(parent)  # it is a leaf now, or a mirror
        if self.observers.listening:
            self.tell(EventKind.REMOVED, tier, node)

    def drive_eviction(self, tree: RadixTree, need: int, eviction: Eviction) -> None:
        self._drive(tree.evict_device_leaf, DEVICE, need, eviction)

    def drive_host_eviction(self, tree: RadixTree, need: int, eviction: Eviction) -> None:
        counts, index = eviction.counts, self.index
        while (num_given_up := counts[index]) < need:
            node = self.leaves.first_mirror()  # also of what was above a leaf that has gone
            if node is not None:
                self.evict_component(node, Tier.HOST, eviction)
                continue
            self._drive(tree.evict_host_leaf, Tier.HOST, num_given_up + 1, eviction)
            if counts[index] == num_given_up:
                return

    def _drive(
        self, evict: Callable[[Node, Eviction], bool], tier: Tier, need: int, eviction: Eviction
    ) -> None:
        counts, index, leaves = eviction.counts, self.index, self.leaves
        while counts[index] < need:
            node = leaves.first(tier)
            if node is None:
                return
            # A leaf that cannot go (something below it is held) hides none of the others.
            if not evict(node, eviction) and not any(
                evict(other, eviction) for other in leaves.in_order(tier)
            ):
                return

    # --- locks ------------------------------------------------------------------------------------

    def acquire_component_lock(self, path: Sequence[Node], tier: Tier, start: int) -> int:
        if tier is not DEVICE:
            return self._acquire_host(path, start)
        top = None
        for node in path:
            data = node.base
            if not data.lock_ref:
                top = node
            data.lock_ref += 1
        if top is None:
            return start  # others hold all of it
        for node in path:
            data = node.base
            if data.queue is not None:
                data.queue = None
                self.leaves.touch(node)
            if data.value is not None:  # so have all above, and none of them is a leaf (2.2)
                self.device.protect((node.end - top.start) // self.page_size)
                break
            if node is top:
                break
        return start

    def release_component_lock(self, node: Node, tier: Tier, part: int) -> None:
        if tier is not DEVICE:
            self._release_host(node, part)
            return
        end, top, parent = node, node, node.parent
        while parent is not None:
            data = node.base
            data.lock_ref -= 1
            if not data.lock_ref:
                top = parent
            node, parent = parent, parent.parent
        # From `end` to below `top` nobody holds anything any more.
        while end is not top:
            if end.device_children == 0:
                self.leaves.refresh(end)
            if end.base.value is not None:  # so have all above, and none of them is a leaf (2.2)
                self.device.protect((top.end - end.end) // self.page_size)
                return
            assert end.parent is not None, "`top` is above"
            end = end.parent

    def advance_component_lock(
        self, node: Node, part: int, path: Sequence[Node], below: Sequence[Node]
    ) -> int:
        return self.acquire_component_lock(below, DEVICE, 0)  # what is above is held already

    def would_protect(self, path: Sequence[Node], depth: int) -> int:
        num_pages = 0
        for node in path:
            data = node.base
            if data.lock_ref:
                break  # and so is everything above
            if data.value is not None and node.start < depth:
                num_pages += (min(node.end, depth) - node.start) // self.page_size
        return num_pages

    def would_release(self, parts: Sequence[tuple[Node, int]]) -> int:
        num_pages = 0
        left: dict[Node, int] = {}
        for end, part in parts:
            for node in self.held(end, DEVICE, part):
                data = node.base
                left[node] = left.get(node, data.lock_ref) - 1
                if left[node] == 0 and data.value is not None:
                    num_pages += len(data.value)
        return num_pages

    def held(self, node: Node, tier: Tier, part: int) -> Iterator[Node]:
        for current in _ancestors(node):
            if tier is not DEVICE and current.end <= part:
                return
            yield current

    def _acquire_host(self, path: Sequence[Node], start: int) -> int:
        """Hold what overlaps `[start, end)`; where the topmost held node starts, for a later split
        may cut it at `start`, and both its parts are to be released."""
        top = start
        for node in path:
            if node.end <= start:
                break
            top = node.start
            data = node.base
            data.host_lock_ref += 1
            if data.host_lock_ref == 1:
                if data.host_value is not None:
                    self.host.protect(len(data.host_value))
                self.leaves.refresh(node)
        return top

    def _release_host(self, node: Node, start: int) -> None:
        current: Node | None = node
        while current is not None and current.parent is not None and current.end > start:
            data = current.base
            data.host_lock_ref -= 1
            if data.host_lock_ref == 0:
                if data.host_value is not None:
                    self.host.protect(-len(data.host_value))
                self.leaves.refresh(current)
            current = current.parent

    # --- transfer ---------------------------------------------------------------------------------

    def commit_hicache_transfer(self, nodes: Sequence[Node], tier: Tier, ids: PageIds) -> PageIds:
        unused, at = [], 0
        for node in nodes:
            num_pages = (node.end - node.start) // self.page_size
            mine = ids[at : at + num_pages]
            at += num_pages
            data = node.base
            if (data.value if tier is DEVICE else data.host_value) is not None:
                unused.append(mine)
            else:
                self._gain(node, tier, own(mine))
        return join(unused)

    # --- what `evict_component` takes away, given -------------------------------------------------

    def _gain(self, node: Node, tier: Tier, ids: PageIds) -> None:
        data, parent = node.base, node.parent
        assert parent is not None, "the root holds nothing"
        if data.value is None and data.host_value is None:
            parent.live_children += 1
            node.is_gap = False
        if tier is DEVICE:
            data.value = ids
            parent.device_children += 1
            self.device.credit(len(ids), data.lock_ref)
        else:
            data.host_value = ids
            parent.host_children += 1
            self.host.credit(len(ids), data.host_lock_ref)
        self.leaves.refresh(node)
        if parent.base.queue is not None or tier is not DEVICE:
            self.leaves.refresh(parent)
        if self.observers.listening:
            self.tell(EventKind.STORED, tier, node)

    # --- proof ------------------------------------------------------------------------------------

    def check(self, node: Node, fail: Callable[[str], None]) -> None:
        data = node.base
        num_pages = (node.end - node.start) // self.page_size
        for name, value in (("value", data.value), ("host_value", data.host_value)):
            if value is not None and len(value) != num_pages:
                fail(f"{name} has {len(value)} pages, the edge has {num_pages}")
            if value is not None and not owns_memory(value):
                fail(f"{name} is writable, or a view of something larger")
        parent = node.parent
        if parent is not None and parent.parent is not None:
            above = parent.base
            if data.value is not None and above.value is None:
                fail("is on the device below a node that is not (semantics §2.2)")
            if data.host_value is not None and any(map(_is_nowhere, _ancestors(parent))):
                fail("is on the host below a node that is nowhere (semantics §2.2)")
            if above.lock_ref < data.lock_ref:
                fail(f"has more locks ({data.lock_ref}) than its parent ({above.lock_ref})")


def _ancestors(node: Node) -> Iterator[Node]:
    """`node` and what is above it, without the root."""
    current: Node | None = node
    while current is not None and current.parent is not None:
        yield current
        current = current.parent


def _is_nowhere(node: Node) -> bool:
    """No tier has it, nor is storage believed to; and that is a fault."""
    data = node.base
    is_dead = data.value is None and data.host_value is None
    return is_dead and not (data.stored or node.is_gap)
