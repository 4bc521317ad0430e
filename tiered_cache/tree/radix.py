"""The radix tree: one index over all tiers and all kinds of state.

It decides and does not wait: every method is a plain function and leaves the tree consistent, so on
one event loop each is atomic. It owns nodes, edges, locks, ages and leaf sets. It never touches a
buffer and never allocates: it is given page ids and gives page ids back, for the caller to return
to the allocators.

Rules are numbered in the project's semantics; the numbers in comments are theirs.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from tiered_cache.errors import IntegrityError, StaleError, stale_prefix
from tiered_cache.keys import DEFAULT_NAMESPACE, TOKEN_BYTES, RadixKey, hash_pages, namespace_seed
from tiered_cache.observe import Event, EventKind, Observers
from tiered_cache.tree import check
from tiered_cache.tree.components.base import (
    INT32,
    NO_PAGES,
    Eviction,
    TreeComponent,
    empty_lists,
    join_each,
)
from tiered_cache.tree.leaves import LeafSets
from tiered_cache.tree.locks import Receipt, ReceiptBook
from tiered_cache.tree.node import BASE, Node, new_data_for
from tiered_cache.tree.plans import Pinned, RoomPlan, Unhashed
from tiered_cache.tree.policies import EvictionPolicy, make_policy
from tiered_cache.types import (
    DEVICE,
    Boundary,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    PageIds,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiered_cache.observe import Observer
    from tiered_cache.tree.components.base import Flags
    from tiered_cache.tree.plans import Piece


PIECE_TOKENS: Final = 4096
"""A longer edge is compared in pieces of this size (32 KiB): one that differs late is read once,
not twice."""


MAX_ROUNDS: Final = 8
"""Walks over all nodes that `forget_all_stored` makes at most; each finds less."""


class RadixTree:
    """A prefix index in whole pages of `page_size` tokens.

    Args:
        components: kinds of state, in eviction order (the first is the base: where it is on no
            tier, nothing is).
        page_size: P, tokens per page.
        policy, host_policy: which leaf goes first, on the device and on the host: a name (lru, lfu,
            fifo, mru, filo, priority, slru), or what makes an `EvictionPolicy` of your own.
        observers: told of every residency gained or lost.
        mirrors_are_spare: a host copy beside a device copy may go at any time, because the device's
            is copied again before it goes (the write_back policy, 8.3).
    """

    def __init__(
        self,
        components: Sequence[TreeComponent],
        page_size: int,
        policy: str | Callable[[], EvictionPolicy] = "lru",
        host_policy: str | Callable[[], EvictionPolicy] = "lru",
        observers: Sequence[Observer] = (),
        *,
        mirrors_are_spare: bool = False,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        if len({component.id for component in components}) != len(components) or not components:
            raise ValueError("a tree needs at least one component, each with an id of its own")
        self.page_size = page_size
        self.components = tuple(components)
        # One component has nobody to disagree with.
        self._deepest = self._agree if len(components) > 1 else components[0].deepest_boundary
        self._upwards = self.components[::-1]
        self._cutting = [
            component
            for component in self.components
            if type(component).leaf_cuts is not TreeComponent.leaf_cuts
        ]
        self._cutting_overlaps = [
            component
            for component in self.components
            if type(component).overlap_cut is not TreeComponent.overlap_cut
        ]
        self._windows = [component for component in self.components if component.is_window]
        self.observers = Observers(observers)
        self.receipts = ReceiptBook()
        self._page_bytes = page_size * TOKEN_BYTES
        self._nothing = (NO_PAGES,) * len(self.components)
        self._new_data = new_data_for(len(self.components))
        self._stamp = 0
        self.growth = 0
        """Rises whenever there may be more to match on the device than before."""
        self._policies = (policy, host_policy)
        self._mirrors_are_spare = mirrors_are_spare
        self._has_priorities = False
        """Whether any node may have another than 0."""
        self._debris: list[Node] = []
        self._plant()

    def _plant(self) -> None:
        self.root = Node(b"", b"", 0, None, DEFAULT_NAMESPACE, self._new_data(0))
        self.num_nodes = 0
        self._way_to: Node = self.root
        self._way: list[Node] = []
        """The path to `_way_to`, root first: a prefix that was matched is read, held and extended
        next, and each of these walks up to the root."""
        device, host = (make_policy(policy) for policy in self._policies)
        self.leaves = LeafSets(device, host, self.root, mirrors_are_spare=self._mirrors_are_spare)
        for index, component in enumerate(self.components):
            component.bind(index, self.page_size, self.leaves, self.observers)

    @property
    def epoch(self) -> int:
        """Counts resets: what is from an earlier one is stale."""
        return self.receipts.epoch

    # --- match ------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest reusable prefix per tier. Changes ages and nothing else.

        Raises:
            ValueError: a negative limit.
        """
        key, limit = params.key, params.limit
        data = key.data
        length = (len(data) - key.overlap) // TOKEN_BYTES
        if limit is not None:
            if limit < 0:
                raise ValueError(f"limit must not be negative, not {limit}")
            if limit < length:
                length = limit
        path, depth = self._walk(self.root, key, data, length - length % self.page_size)
        if not path:
            return MatchResult(self.root, 0, self.root, 0, 0, self)
        count, device, best = len(path), path[-1], path[-1]
        device_length = best_length = depth
        agreed = self._deepest(path, count, depth, True)
        if agreed < count:
            device, device_length = best, best_length = self._end(path, agreed)
            if self._has_host_state():
                agreed = self._deepest(path, count, depth, False)
                best, best_length = self._end(path, agreed) if agreed < count else (path[-1], depth)
            path = path[:agreed]
        self._way_to, self._way = best, path
        # 3.6: the path to the best boundary is used; a node that matched in part only is left as it
        # is.
        stamp = self._stamp = self._stamp + 1
        if best.end == best_length:
            key.place, used = best, path
        else:
            used = path[:-1]
        if used:
            for component in self.components:
                component.touch(used, stamp)
        return MatchResult(device, device_length, best, best_length, depth, self)

    def _has_host_state(self) -> bool:
        """Whether there is anything on the host at all."""
        for component in self.components:
            host = component.host
            if host.evictable or host.protected:
                return True
        return False

    def match_deeper(
        self, receipt: Receipt, key: RadixKey, limit: int, *, device_only: bool = True
    ) -> Boundary | None:
        """The deepest boundary of `key[:limit]` below a held one, or None: what others have
        published since, or what a load could bring.

        Dates nothing: whoever takes it calls `count_hits`.
        """
        if not receipt.node.children:
            return None
        path, depth = self._walk(receipt.node, key, key.data, limit - limit % self.page_size)
        if not path:
            return None
        path = self._path_to(receipt.node)[::-1] + path
        agreed = self._deepest(path, len(path), depth, device_only)
        node, depth = (path[-1], depth) if agreed == len(path) else self._end(path, agreed)
        return Boundary(node, depth) if depth > receipt.depth else None

    def known_below(self, receipt: Receipt, key: RadixKey, limit: int) -> int:
        """How far the tree knows `key[:limit]` below a held boundary, whatever a component lacks:
        who publishes that holds it, and keeps what he has of his own."""
        return self._walk(receipt.node, key, key.data, limit - limit % self.page_size)[1]

    def _walk(self, node: Node, key: RadixKey, data: bytes, length: int) -> tuple[list[Node], int]:
        """The nodes below `node` that `key[:length]` passes, and the depth it reaches; the last may
        match in part. `data`: the key's, which its holder has just read."""
        overlap = key.overlap
        step = self._page_bytes + overlap
        path: list[Node] = []
        depth = node.end
        while depth < length:
            at = depth * TOKEN_BYTES
            page = data[at : at + step]
            child = node.children.get(page if depth else key.root_prefix + page)
            if child is None:
                break
            base = child.base
            if base.value is None and base.host_value is None:
                break  # dead: known to the tree, but only storage may have it
            path.append(child)
            edge, end = child.key, child.end
            if end > length or end - depth > PIECE_TOKENS or not data.startswith(edge, at):
                reached = self._common_depth(edge, data, depth, min(end, length), overlap)
                if reached < end:
                    return path, reached
            node, depth, only = child, end, child.only
            # As above, with half of the memory looked at.
            while (
                only is not None
                and only.end <= length
                and data.startswith(only.key, depth * TOKEN_BYTES)
            ):
                base = only.base
                if base.value is None and base.host_value is None:
                    return path, depth
                path.append(only)
                node, depth = only, only.end
                only = node.only
        return path, depth

    def _common_depth(self, edge: bytes, data: bytes, start: int, stop: int, overlap: int) -> int:
        """The page end ≤ `stop` up to which an edge that begins at `start` is what `data` has
        there."""
        shared = common_bytes(
            edge, data, start * TOKEN_BYTES, (stop - start) * TOKEN_BYTES + overlap
        )
        return start + (shared - overlap) // self._page_bytes * self.page_size

    def _agree(self, path: Sequence[Node], count: int, depth: int, device_only: bool) -> int:
        """The largest n ≤ `count` such that every component lets a prefix end behind `path[:n]`
        (3.3); `depth` is where `path[:count]` ends."""
        while count:
            agreed = count
            for component in self.components:
                agreed = component.deepest_boundary(path, agreed, depth, device_only)
                if agreed < count:
                    depth = path[agreed - 1].end if agreed else 0
            if agreed == count:
                break
            count = agreed
        return count

    def _end(self, path: Sequence[Node], count: int) -> tuple[Node, int]:
        """The node and the depth at which `path[:count]` ends."""
        node = path[count - 1] if count else self.root
        return node, node.end

    # --- insert -----------------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Publish what a request has computed. Adopts what the tree lacks, reports the rest as
        duplicates.

        Raises:
            ValueError: lengths or page arrays that do not fit the key.
            TypeError: page ids that are not int32.
            StaleError: `prev_prefix_len` is more than the tree holds. Nothing was adopted or
                counted.
        """
        return self._insert(params, [], self.root)

    def insert_below(self, receipt: Receipt, params: InsertParams) -> InsertResult:
        """`insert` of a key whose beginning `receipt` holds, which from then on holds all of it.

        What is held need not be looked for again, and what is inserted is never unheld (5.10).

        Raises:
            As `insert`; LockError, StaleError: the receipt does not hold anything now.
            ValueError: less than what is held. Nothing changes in any case.
        """
        self.receipts.check(receipt, DEVICE)
        length = params.length
        if length is None or length - length % self.page_size < receipt.depth:
            raise ValueError(f"{receipt!r} holds more than the {length} tokens to insert")
        held = self._path_to(receipt.node)[::-1]
        path = held.copy()
        result = self._insert(params, path, receipt.node)
        if len(path) > len(held):
            self._move_lock(receipt, path[::-1], path[: len(held) - 1 if held else None : -1])
        return result

    def _insert(self, params: InsertParams, path: list[Node], node: Node) -> InsertResult:
        """`path` leads from the root to `node`, whose tokens the key is known to begin with; it is
        lengthened to where the insert ends."""
        key, owned = params.key, params.prev_prefix_len
        data, overlap, page_size = key.data, key.overlap, self.page_size
        num_pages = self._num_insert_pages(params, (len(data) - overlap) // TOKEN_BYTES)
        length = num_pages * page_size
        result = InsertResult(self.root, length, length, length, self._nothing)
        refused: list[list[PageIds]] | None = None
        if owned and key.place is not None and not path:
            node = self._go_on(key.place, min(owned, length), path)
        depth = node.end
        step = self._page_bytes + overlap
        while node.children and depth < length:
            at = depth * TOKEN_BYTES
            page = data[at : at + step]
            child = node.children.get(page if depth else key.root_prefix + page)
            if child is None:
                break
            edge, end = child.key, child.end
            if end > length or end - depth > PIECE_TOKENS or not data.startswith(edge, at):
                reached = self._common_depth(edge, data, depth, min(end, length), overlap)
                if reached < end:
                    child, end = self._split_node(child, reached), reached
            if end > owned or child.base.value is None:
                for component in self._cutting_overlaps:
                    cut = component.overlap_cut(child, depth, params)
                    if cut is not None:
                        child, end = self._split_node(child, cut), cut
                for component in self.components:
                    ids = component.update_component_on_insert_overlap(child, depth, params, result)
                    if ids is not None:
                        if refused is None:
                            refused = empty_lists(len(self.components))
                        refused[component.index].append(ids)
            node, depth = child, end
            path.append(node)
        if depth < owned and depth < length:
            raise stale_prefix(owned, depth)
        self._count_uses(path, params.inserted_len, params.priority)
        stamp = self._stamp = self._stamp + 1
        self.growth += 1
        if depth < length:
            if depth < result.prefix_len:
                result.prefix_len = depth
            left = self._add_leaf(path, depth, length, params, result)
            if left is not None:
                refused = left if refused is None else list(map(add, refused, left))
        for component in self.components:
            component.touch(path, stamp)
        if path:
            result.node = key.place = path[-1]
        if refused is not None:
            result.duplicates = join_each(refused)
        return result

    def _go_on(self, node: Any, length: int, path: list[Node]) -> Node:
        """The deepest node of no more than `length` tokens that is known to be on a key's path:
        `node`, which was found to be, or above it. `path` is lengthened to there.

        A node that has hung here once spells the same tokens for as long as it does (4: a split
        puts its new node above). Where it is on the device, all above it is (2.2).
        """
        while node.end > length and node.parent is not None:
            node = node.parent
        if node.parent is None or node.data[BASE].value is None:
            return self.root
        found = self._path_to(node)
        if found[-1].parent is not self.root:
            return self.root  # it hung in another tree, or before a `reset()`
        path.extend(reversed(found))
        return cast("Node", node)

    def insert_host(
        self,
        key: RadixKey,
        start: int,
        component: int,
        ids: PageIds,
        page_keys: Sequence[bytes] = (),
    ) -> tuple[Boundary | None, PageIds]:
        """`ids` are rows on the host that now hold a component's pages of `key` from `start` on
        (5.11). The boundary at their end, and the ids that were not taken.

        The boundary is None, and nothing was taken, when the path above `start` (and of another
        component than the base, all of it) is not complete on device and host (any more).
        `page_keys`: of all pages up to the end, where they are known.
        """
        size = self.page_size
        stop = start + len(ids) * size
        complete = start if component == BASE else stop
        path, depth = self._known(key, stop)
        for node in path:
            base = node.base
            if node.start < complete and base.value is None and base.host_value is None:
                return None, ids
        if depth < complete:
            return None, ids
        self._stamp += 1  # before there is a new node: no two of one depth have the same
        node = path[-1] if path else self.root
        if node.end > depth:
            node = path[-1] = self._split_node(node, depth)
        if depth < stop:
            path.append(self._hang(node, key, depth, stop))
        unused = self.commit_transfer(Boundary(path[-1], stop), component, Tier.HOST, ids)
        path = self._path_to(path[-1])[::-1]
        for other in self.components:
            other.touch(path, self._stamp)
        for node in path:
            if node.page_keys is None and page_keys:
                node.page_keys = list(page_keys[node.start // size : node.end // size])
        return Boundary(path[-1], stop), unused

    def _known(self, key: RadixKey, length: int) -> tuple[list[Node], int]:
        """As `_walk` from the root, through nodes that are dead, too."""
        data, overlap = key.data, key.overlap
        step = self._page_bytes + overlap
        path: list[Node] = []
        depth = 0
        while depth < length:
            at = depth * TOKEN_BYTES
            page = data[at : at + step]
            above = path[-1] if path else self.root
            child = above.children.get(page if depth else key.root_prefix + page)
            if child is None:
                break
            path.append(child)
            reached = self._common_depth(child.key, data, depth, min(child.end, length), overlap)
            if reached < child.end:
                return path, reached
            depth = reached
        return path, depth

    def _num_insert_pages(self, params: InsertParams, units: int) -> int:
        """Whole pages to insert, of a key of that many units."""
        length, page_size, owned = params.length, self.page_size, params.prev_prefix_len
        units = units if units > 0 else 0  # no pair in a single token
        if length is None:
            length = units
        elif not 0 <= length <= units:
            raise ValueError(f"cannot insert {length} tokens of a key of {units}")
        num_pages = length // page_size
        if len(params.pages) != len(self.components):
            given, wanted = len(params.pages), len(self.components)
            raise ValueError(f"{given} page arrays for {wanted} components")
        for pages in params.pages:
            if len(pages) < num_pages:
                raise ValueError(f"{len(pages)} page ids for {num_pages} pages of tokens")
            if pages.dtype is not INT32 and pages.dtype != INT32:
                raise TypeError(f"page ids must be int32, not {pages.dtype}")
        if owned and (owned < 0 or owned % page_size):
            raise ValueError(f"prev_prefix_len {owned} is not whole pages of {page_size}")
        return num_pages

    def _add_leaf(
        self, path: list[Node], start: int, stop: int, params: InsertParams, result: InsertResult
    ) -> list[list[PageIds]] | None:
        """Hang `[start, stop)` below `path`, cut where a component or the prompt's end wants a
        boundary. By component, the ids that none took; None: all were."""
        key, inserted_len, priority = params.key, params.inserted_len, params.priority
        parent = path[-1] if path else self.root
        ends: Sequence[int] = (stop,)
        if params.prompt_len is not None or self._cutting:
            ends = self._leaf_ends(start, stop, params)
        left: list[list[PageIds]] | None = None
        for end in ends:
            num_hits = 1 if end > inserted_len else 0
            leaf = self._hang(parent, key, start, end, priority, num_hits)
            for component in self.components:
                ids = component.commit_insert_component_data(leaf, start, params, result)
                if ids is not None:
                    if left is None:
                        left = empty_lists(len(self.components))
                    left[component.index].append(ids)
            path.append(leaf)
            parent, start = leaf, end
        return left

    def _hang(
        self,
        parent: Node,
        key: RadixKey,
        start: int,
        stop: int,
        priority: int = 0,
        num_hits: int = 0,
    ) -> Node:
        """A new node `[start, stop)` below `parent`, which is nowhere yet."""
        data, stamp = key.data, self._stamp
        at = start * TOKEN_BYTES
        child_key = data[at : at + self._page_bytes + key.overlap]
        if not start:
            child_key = key.root_prefix + child_key
        is_only = start and not parent.children and stop - start <= PIECE_TOKENS
        edge = data[at : stop * TOKEN_BYTES + key.overlap]
        fresh = self._new_data(stamp)
        leaf = Node(edge, child_key, stop, parent, key.namespace, fresh, stamp, priority, num_hits)
        parent.children[child_key] = leaf
        parent.only = leaf if is_only else None
        self.num_nodes += 1
        return leaf

    def _leaf_ends(self, start: int, stop: int, params: InsertParams) -> Sequence[int]:
        ends = [stop]
        for component in self._cutting:
            for cut in component.leaf_cuts(start, stop, params):
                if start < cut < stop and cut not in ends:
                    ends.append(cut)
        if params.prompt_len is not None:
            cut = params.prompt_len - params.prompt_len % self.page_size
            if (
                start < cut < stop
                and cut not in ends
                and all(component.allows_boundary(cut, params) for component in self.components)
            ):
                ends.append(cut)
        ends.sort()
        return ends

    def _split_node(self, child: Node, depth: int) -> Node:
        """Cut `child` at `depth`: a new parent takes the front, the child keeps its identity
        (4)."""
        parent = child.parent
        assert parent is not None, "the root has no edge"
        cut = depth - parent.end
        overlap = TOKEN_BYTES if child.namespace.is_bigram else 0
        edge = child.key[: cut * TOKEN_BYTES + overlap]
        data = self._new_data(0)
        upper = Node(
            edge,
            child.child_key,
            depth,
            parent,
            child.namespace,
            data,
            child.created,
            child.priority,
            child.hit_count,
        )
        upper.is_gap = child.is_gap
        child.key = child.key[cut * TOKEN_BYTES :]
        child.child_key = child.key[: self._page_bytes + overlap]
        child.parent = upper
        upper.children[child.child_key] = child
        parent.children[upper.child_key] = upper
        if child.end - depth <= PIECE_TOKENS:
            upper.only = child
        if parent.only is child:
            parent.only = upper
        num_pages = cut // self.page_size
        if child.page_keys is not None:
            upper.page_keys, child.page_keys = (
                child.page_keys[:num_pages],
                child.page_keys[num_pages:],
            )
        self.num_nodes += 1
        self._way_to, self._way = self.root, []
        for component in self.components:
            component.redistribute_on_node_split(upper, child, num_pages)
        return upper

    # --- locks ------------------------------------------------------------------------------------

    def inc_lock_ref(self, boundary: Boundary) -> Receipt:
        """Hold the device state of a prefix, cutting its last node where the prefix ends (3.2, 6).

        Raises:
            StaleError: the boundary's node is gone.
        """
        return self._acquire(boundary, DEVICE, 0)

    def try_hold(
        self, boundary: Boundary, room: Sequence[int], priority: int = 0
    ) -> tuple[Receipt, tuple[PageIds, ...]] | None:
        """The grant of a lease: hold a prefix, count the use, read its pages. `priority`: of who
        uses it.

        None, and nothing changes, when that would protect more than `room` evictable pages of a
        component. One walk for what `would_protect`, `inc_lock_ref` and `pages` would do in three.

        Raises:
            StaleError: the boundary's node is gone.
        """
        node, depth = boundary
        path = self._path_to(node)
        for component in self.components:
            if component.would_protect(path, depth) > room[component.index]:
                return None
        if node.end != depth or (path[-1].parent if path else node) is not self.root:
            node = self.cut(boundary)
            path = self._path_to(node)
        if self._windows:
            self._cut_windows(path)
        parts = [component.acquire_component_lock(path, DEVICE, 0) for component in self.components]
        receipt = self.receipts.issue(node, DEVICE, parts)
        path.reverse()
        self._count_hits(path, 0, priority)
        return receipt, tuple([component.collect(path, 0, depth) for component in self.components])

    def advance(self, receipt: Receipt, boundary: Boundary) -> None:
        """The holder of a device lock holds a deeper prefix of the same path from now on.

        What both have in common is never unheld in between, and costs nothing.

        Raises:
            StaleError, LockError: as the acquisition and the release; nothing changes.
            ValueError: the boundary is not below what is held.
        """
        self.receipts.check(receipt, DEVICE)
        node = self.cut(boundary)
        path = self._path_to(node)
        below = [other for other in path if other.end > receipt.depth]
        if (below[-1].parent if below else node) is not receipt.node:
            raise ValueError(f"{boundary} is not below what {receipt!r} holds")
        self._move_lock(receipt, path, below)

    def take_out(self, receipt: Receipt, component: int) -> PageIds:
        """The holder of a device lock gets, for its own, what a component has at the end of what it
        holds; a tombstone is left. A host copy stays.

        Raises:
            LockError, StaleError: as the release. IntegrityError: others hold it, too.
        """
        self.receipts.check(receipt, DEVICE)
        node, owner = receipt.node, self.components[component]
        if node.data[component].lock_ref != 1:
            raise IntegrityError(f"{owner.id} of {node!r} is not {receipt!r}'s alone")
        taken = Eviction(DEVICE, len(self.components))
        owner.evict_component(node, DEVICE, taken)
        return taken.device[component][0]

    def _move_lock(self, receipt: Receipt, path: list[Node], below: Sequence[Node]) -> None:
        """`path` and `below` as in `advance_component_lock`."""
        if self._windows and self._cut_windows(path):
            below = [node for node in path if node.end > receipt.depth]
        for component in self.components:
            part = receipt.parts[component.index]
            if part is not None:
                receipt.parts[component.index] = component.advance_component_lock(
                    receipt.node, part, path, below
                )
        if path:
            receipt.node, receipt.depth = path[0], path[0].end

    def _cut_windows(self, path: list[Node]) -> bool:
        """Cut `path` (end first) where a request would hold much more than a window; whether it
        would."""
        is_cut = False
        for component in self._windows:
            depth = component.lock_cut(path)
            if not depth:
                continue
            for at, node in enumerate(path):
                if node.start <= depth:
                    if node.start < depth:
                        path.insert(at + 1, self._split_node(node, depth))
                        is_cut = True
                    break
        return is_cut

    def dec_lock_ref(self, receipt: Receipt) -> None:
        """Give a device lock back.

        Raises:
            LockError: released before, or foreign: nothing changes. StaleError: from before a
                `reset()`.
        """
        self._release(receipt, DEVICE)

    def inc_host_lock_ref(self, boundary: Boundary, start: int = 0) -> Receipt:
        """Hold the host state of `[start, boundary)`: a span, through splits (6.4)."""
        return self._acquire(boundary, Tier.HOST, start)

    def hold_each(self, boundary: Boundary, tier: Tier, starts: Sequence[int | None]) -> Receipt:
        """Hold of each component what it has of `[start, boundary)` on a tier; None: nothing."""
        node = self.cut(boundary)
        path = self._path_to(node)
        parts = [
            None if start is None else component.acquire_component_lock(path, tier, start)
            for component, start in zip(self.components, starts, strict=True)
        ]
        return self.receipts.issue(node, tier, parts)

    def dec_host_lock_ref(self, receipt: Receipt) -> None:
        """Give a host lock back; errors as `dec_lock_ref`."""
        self._release(receipt, Tier.HOST)

    def let_go(self, receipt: Receipt) -> None:
        """Give a lock of either tier back, once; nothing, when a `reset()` has voided it.

        Raises:
            LockError: released before, or foreign: nothing changes.
        """
        if receipt.epoch == self.epoch:
            self._release(receipt, receipt.tier)

    def release(self, receipt: Receipt, component: int) -> None:
        """Give one component's part of a lock up early; the full release skips it (6.1)."""
        self.receipts.check(receipt, receipt.tier)
        if receipt.parts[component] is not None:
            self.components[component].release_component_lock(
                receipt.node, receipt.tier, receipt.parts[component]
            )
            receipt.parts[component] = None
            if receipt.node.base.value is None:
                self._prune(receipt.node)

    def _acquire(self, boundary: Boundary, tier: Tier, start: int) -> Receipt:
        node, depth = boundary
        path = self._path_to(node)
        if node.end != depth or (path[-1].parent if path else node) is not self.root:
            node = self.cut(boundary)
            path = self._path_to(node)
        parts = [
            component.acquire_component_lock(path, tier, start) for component in self.components
        ]
        return self.receipts.issue(node, tier, parts)

    def _release(self, receipt: Receipt, tier: Tier) -> None:
        self.receipts.redeem(receipt, tier)
        for component in self.components:
            part = receipt.parts[component.index]
            if part is not None:
                component.release_component_lock(receipt.node, tier, part)
        if receipt.node.base.value is None:
            self._prune(receipt.node)  # what nobody has any more may have stood for its locks only

    def cut(self, boundary: Boundary) -> Node:
        """The node that ends at the boundary, split off if need be.

        Raises:
            StaleError: the boundary's node is gone. ValueError: a depth that no page ends at.
        """
        node, depth = boundary
        if depth < 0 or depth % self.page_size or depth > node.end:
            raise ValueError(f"no boundary at depth {depth} of {node!r}")
        while node.parent is not None and node.parent.end >= depth:
            node = node.parent
        if node.parent is None:
            if node is not self.root:
                raise StaleError("the node of this boundary is gone: match again")
            return node
        top = node.parent
        while top.parent is not None:
            top = top.parent
        if top is not self.root:
            raise StaleError("the node of this boundary is gone: match again")
        return node if node.end == depth else self._split_node(node, depth)

    def _path_to(self, node: Node) -> list[Node]:
        """`node` and its ancestors, without the root."""
        if node is self._way_to:
            return self._way[::-1]
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def count_hits(self, receipt: Receipt, above: int = 0, priority: int = 0) -> None:
        """A lease was granted this prefix: date it, and count a use of its nodes that end beyond
        `above` (3.8, 5.8). Their priority is that of any who uses them, at least (5.2)."""
        self.receipts.check(receipt, DEVICE)
        self._count_hits(self._path_to(receipt.node)[::-1], above, priority)

    def _count_hits(self, path: Sequence[Node], above: int, priority: int) -> None:
        self._count_uses(path, above, priority)
        self._stamp += 1
        for component in self.components:
            component.touch(path, self._stamp)

    def _count_uses(self, path: Sequence[Node], above: int, priority: int) -> None:
        """A request uses `path`; what ends up to `above` it has used before (5.8)."""
        if priority:
            self._has_priorities = True
        if above or self._has_priorities:
            for node in path:
                if node.end > above:
                    node.hit_count += 1
                if priority > node.priority:
                    node.priority = priority
        else:  # as nearly always: one step for each node
            for node in path:
                node.hit_count += 1

    def would_protect(self, boundary: Boundary) -> list[int]:
        """Per component, evictable pages that a lock on this boundary would take out of reach."""
        path = self._path_to(boundary.node)
        return [component.would_protect(path, boundary.depth) for component in self.components]

    def would_need(self, boundary: Boundary) -> list[int]:
        """Per component, pages that there must be room for before this boundary is held once
        more."""
        path = self._path_to(boundary.node)
        return [component.would_need(path, boundary.depth) for component in self.components]

    def would_hold(self, boundary: Boundary) -> list[int]:
        """Of that, what a request counts among the ids that it needs at a time: of windows."""
        if not self._windows:
            return [0] * len(self.components)
        path = self._path_to(boundary.node)
        return [
            component.would_need(path, boundary.depth) if component.is_window else 0
            for component in self.components
        ]

    def would_release(self, receipts: Sequence[Receipt]) -> list[int]:
        """Per component, pages that would become evictable if these receipts were released
        together."""
        return [
            component.would_release(_parts_of(receipts, component.index))
            for component in self.components
        ]

    def would_spare(self, receipts: Sequence[Receipt]) -> list[int]:
        """Per component, pages that there would be room for then."""
        return [
            component.would_spare(_parts_of(receipts, component.index))
            for component in self.components
        ]

    # --- eviction ---------------------------------------------------------------------------------

    def evict(self, need: Sequence[int]) -> EvictResult:
        """Give up device state until `need[i]` pages of each component are given up or nothing more
        can go (7.1)."""
        return self._drive(need, DEVICE)

    def evict_host(self, need: Sequence[int]) -> EvictResult:
        """The same on the host (8.2)."""
        return self._drive(need, Tier.HOST)

    def _drive(self, need: Sequence[int], tier: Tier) -> EvictResult:
        eviction = Eviction(tier, len(self.components))
        for component in self.components:
            num_ids = need[component.index]
            if num_ids <= 0:
                continue
            if tier is DEVICE:
                component.drive_eviction(self, num_ids, eviction)
            else:
                component.drive_host_eviction(self, num_ids, eviction)
        return eviction.result()

    def plan_room(self, component: int, num_pages: int) -> RoomPlan:
        """Victims that must be copied to the host before so many pages of a component can be given
        up without losing anything, in policy order (7.3). Changes nothing.

        Only leaves are looked at: what becomes one when they have gone is the next round's.
        """
        plan = RoomPlan([], [], 0)
        for node in self.leaves.in_order(DEVICE):
            if plan.num_pages >= num_pages:
                break
            data = node.data[component]
            if data.value is None:
                continue
            is_backed = node.data[BASE].host_value is not None
            (plan.backed if is_backed else plan.victims).append(Boundary(node, node.end))
            plan.num_pages += len(data.value)
        return plan

    def evict_device_leaf(self, node: Node, eviction: Eviction) -> bool:
        """Demote a device leaf that the host backs; drop another (7.3).

        False, and nothing changes, when it cannot go.
        """
        if node.base.host_value is None:
            return self.evict_host_leaf(node, eviction)
        for component in self._upwards:
            if node.data[component.index].value is not None:
                component.evict_component(node, DEVICE, eviction)
        return True

    def evict_device_part(self, node: Node, owner: TreeComponent, eviction: Eviction) -> None:
        """Give up what `owner` has of a node on the device: with the whole node where that is a
        leaf, else with the components below it in eviction order, and a tombstone is left (1.2,
        7.2)."""
        if node.base.queue is self.leaves.device and self.evict_device_leaf(node, eviction):
            return
        for component in self._upwards:
            if component.index < owner.index:
                return
            data = node.data[component.index]
            if data.value is not None and not data.lock_ref:
                component.evict_component(node, DEVICE, eviction)

    def evict_host_leaf(self, node: Node, eviction: Eviction) -> bool:
        """Drop a leaf, with what only the host has below it: nothing may hang below a node that is
        nowhere (2.2).

        When something below it is held, it is not dropped with it. If it is held itself, or is on
        the device, it goes alone (6.4): a host lock keeps no page of the device, on which others
        count. What is below is out of reach until it is filled. Else False, and nothing changes.
        """
        if node.children and not node.base.stored:
            below = list(self._subtree(node))
            if any(map(_is_held_host_copy, below)):
                base = node.base
                if base.value is None and not base.host_lock_ref:
                    return False
                node.is_gap = True
                below = []
            for other in reversed(below):
                self._drop(other, eviction)
        self._drop(node, eviction)
        return True

    def _drop(self, node: Node, eviction: Eviction) -> None:
        base = node.base
        if not base.stored and (base.value is not None or base.host_value is not None):
            eviction.dropped_tokens += node.end - node.start
        for component in self._upwards:
            data = node.data[component.index]
            if data.value is not None:
                component.evict_component(node, DEVICE, eviction)
            if data.host_value is not None:
                component.evict_component(node, Tier.HOST, eviction)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Take out a node that stands for nothing, and its ancestors that only stood for it
        (7.5)."""
        while not node.children and (parent := node.parent) is not None:
            base = node.base
            if (
                base.value is not None
                or base.host_value is not None
                or base.lock_ref
                or base.host_lock_ref
            ):
                return
            if node is self._way_to:
                self._way_to, self._way = self.root, []
            del parent.children[node.child_key]
            parent.only = None
            node.parent = None
            self.num_nodes -= 1
            node = parent

    def _subtree(self, node: Node) -> Iterator[Node]:
        """All nodes below `node`, parents first."""
        stack = list(node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # --- transfers --------------------------------------------------------------------------------

    def plan_transfer(
        self,
        boundary: Boundary,
        component: int,
        target: Tier,
        start: int = 0,
        *,
        unless_stored: bool = False,
    ) -> list[Piece]:
        """What the path to `boundary` lacks on `target` from `start` on and can be brought, root
        first; cuts the path where the boundary is, and for the device where more than a window
        would come. `unless_stored`: and storage lacks it, too.

        Raises:
            StaleError: the boundary's node is gone.
        """
        path = self._path_to(self.cut(boundary))
        if target is DEVICE and self._windows:
            self._cut_windows(path)
        path.reverse()
        return self.components[component].build_hicache_transfers(
            path, start, target, unless_stored=unless_stored
        )

    def pin_transfer(
        self, boundary: Boundary, start: int, component: int, target: Tier, transfer: object
    ) -> Pinned:
        """Hold what `transfer` names: its path on the device, its source on either tier; and have
        its nodes say that it is pending (9.2). Of windows and states no more than that source is
        held: whoever holds a window needs room for all of it."""
        holds = (BASE,) if target is DEVICE else (BASE, component)
        starts = [start if index in holds else None for index in range(len(self.components))]
        receipt = self.hold_each(boundary, DEVICE, starts)
        source = self.inc_host_lock_ref(boundary, start) if target is DEVICE else None
        pinned = Pinned(component, start, receipt, source)
        self._mark(pinned, transfer)
        return pinned

    def unpin_transfer(self, pinned: Pinned) -> None:
        """The transfer has ended; what it brought was committed before."""
        self._mark(pinned, None)
        if pinned.source is not None:
            self.dec_host_lock_ref(pinned.source)
        self.dec_lock_ref(pinned.receipt)

    def _mark(self, pinned: Pinned, transfer: object | None) -> None:
        node: Node | None = pinned.receipt.node
        while node is not None and node.parent is not None and node.end > pinned.start:
            node.data[pinned.component].pending = transfer
            self.components[pinned.component].note_change(node)
            node = node.parent

    def believe_stored(
        self, node: Node, component: int, is_stored: bool, *, tells: bool = True
    ) -> None:
        """Note whether storage has a component's pages of a node (8.4)."""
        data = node.data[component]
        if data.stored is not is_stored:
            data.stored = is_stored
            self.components[component].note_change(node)
            if tells and self.observers.listening:
                kind = EventKind.STORED if is_stored else EventKind.REMOVED
                self.components[component].tell(kind, Tier.STORAGE, node)

    def believe_span_stored(self, node: Node, start: int, component: int) -> None:
        """Storage has a component's pages from `start`, where a node begins, to the end of
        `node`; of one with states the state there."""
        if not self.components[component].is_per_page:
            self.believe_stored(node, component, True)
            return
        current: Node | None = node
        while current is not None and current.parent is not None and current.start >= start:
            self.believe_stored(current, component, True)
            current = current.parent

    def forget_stored(self, key: RadixKey, depth: int) -> EvictResult:
        """Storage lacks what it was believed to have of `key` from `depth` on (8.4).

        Host copies below a node that is nowhere now cannot be reached: they are given up, unless
        somebody holds one (6.4).
        """
        path, _ = self._known(key, len(key) - len(key) % self.page_size)
        return self._forget_path(path[::-1], depth)

    def forget_path_stored(self, boundary: Boundary, depth: int) -> EvictResult:
        """The same of the path to `boundary`."""
        return self._forget_path(self._path_to(self.cut(boundary)), depth)

    def disbelieve(self, key: RadixKey, component: int, pages: Sequence[int]) -> None:
        """Storage lacks these pages of `key`, by number, of another component than the base: there
        is a tombstone, and nothing else is lost."""
        path, _ = self._known(key, len(key) - len(key) % self.page_size)
        lost, size = np.asarray(pages), self.page_size
        for node in path:
            if node.data[component].stored:
                first, last = self.components[component].part_start(node) // size, node.end // size
                if ((first <= lost) & (lost < last)).any():
                    self.believe_stored(node, component, False)

    def believed_length(self, key: RadixKey) -> int:
        """Tokens of `key` that some tier has, storage by belief."""
        path, depth = self._known(key, len(key) - len(key) % self.page_size)
        for node in path:
            data = node.data[BASE]
            if data.value is None and data.host_value is None and not data.stored:
                return node.start
        return depth

    def forget_all_stored(self, max_nodes: int) -> Iterator[EvictResult]:
        """`forget_stored` of everything, `max_nodes` nodes at a time: storage is another one, or
        empty. What is believed meanwhile is believed of the new one.

        Observers are told once, at first: what it had of nodes that are gone has no event.
        """
        self.observers.on_event(Event(EventKind.FORGOTTEN, tier=Tier.STORAGE))
        found = True
        for _ in range(MAX_ROUNDS):  # what was split between two steps is met in another round
            if not found:
                return
            found = False
            eviction = Eviction(Tier.HOST, len(self.components))
            for count, node in enumerate(self.nodes(), 1):
                if node.parent is not None and any(data.stored for data in node.data):
                    self._forget_stored(node, eviction, tells=False)
                    found = found or not any(data.stored for data in node.data)
                if count % max_nodes == 0:
                    yield eviction.result()
                    eviction = Eviction(Tier.HOST, len(self.components))
            yield eviction.result()

    def _forget_path(self, path: Sequence[Node], depth: int) -> EvictResult:
        """`path`: the deepest node first."""
        eviction = Eviction(Tier.HOST, len(self.components))
        for node in [node for node in path if node.end > depth]:
            self._forget_stored(node, eviction)
        return eviction.result()

    def _forget_stored(self, node: Node, eviction: Eviction, *, tells: bool = True) -> None:
        base = node.base
        if base.value is None and base.host_value is None and node.children:
            below = list(self._subtree(node))
            if any(_is_held_host_copy(other) for other in below):
                node.is_gap = True
                below = []
            for other in reversed(below):
                self._drop(other, eviction)
        for index in range(len(self.components)):
            self.believe_stored(node, index, False, tells=tells)
        self._prune(node)

    # --- page keys --------------------------------------------------------------------------------

    def unhashed(self, boundary: Boundary) -> Unhashed | None:
        """What must be hashed before the page keys of the path to `boundary` are all known; None
        when they are."""
        path = self._path_to(self.cut(boundary))[::-1]
        for at, node in enumerate(path):
            if node.page_keys is None:
                above = path[at - 1].page_keys if at else None
                seed = namespace_seed(node.namespace)
                # Edges of a bigram key overlap by a token.
                overlap = TOKEN_BYTES if node.namespace.is_bigram else 0
                parts = [other.key[: len(other.key) - overlap] for other in path[at:]]
                tail = path[-1].key[len(path[-1].key) - overlap :]
                return Unhashed(
                    node.start,
                    b"".join((*parts, tail)),
                    above[-1] if above else seed,
                    node.namespace.is_bigram,
                )
        return None

    def remember_page_keys(self, boundary: Boundary, start: int, keys: Sequence[bytes]) -> None:
        """`keys` are those of the pages of `[start, boundary)`."""
        size = self.page_size
        for node in self._path_to(self.cut(boundary)):
            if node.page_keys is None and node.start >= start:
                first = (node.start - start) // size
                node.page_keys = list(keys[first : first + (node.end - node.start) // size])

    def keys_of(self, boundary: Boundary, start: int) -> list[bytes]:
        """The page keys of `[start, boundary)`, all of which are known."""
        path = self._path_to(self.cut(boundary))[::-1]
        keys: list[bytes] = []
        for node in path:
            if node.end > start:
                assert node.page_keys is not None, "the caller has hashed them"
                keys += node.page_keys[max(0, start - node.start) // self.page_size :]
        return keys

    def base_boundary(self, key: RadixKey, length: int) -> Boundary:
        """How far device and host have the base of `key[:length]`, whatever other components say.
        Dates nothing."""
        path, depth = self._walk(self.root, key, key.data, length - length % self.page_size)
        return Boundary(path[-1], depth) if path else Boundary(self.root, 0)

    def known_boundary(self, key: RadixKey, length: int) -> Boundary:
        """The same of what the tree knows of `key[:length]`, be it that only storage has it: below
        that there may be host copies, which a lock of this boundary keeps, too."""
        path, depth = self._known(key, length - length % self.page_size)
        return Boundary(path[-1], depth) if path else Boundary(self.root, 0)

    def presence(self, key: RadixKey, length: int) -> list[Flags]:
        """Per component, which pages of `key[:length]` are on device or host, be they in reach or
        not (a state: at the page that it ends)."""
        size = self.page_size
        there = [np.zeros(length // size, np.bool_) for _ in self.components]
        path, depth = self._known(key, length - length % size)
        for node in path:
            stop = min(node.end, depth)
            for component in self.components:
                data, flags = node.data[component.index], there[component.index]
                if data.value is None and data.host_value is None:
                    continue
                if component.is_per_page:
                    flags[node.start // size : stop // size] = True
                elif stop == node.end:
                    flags[stop // size - 1] = True
        return there

    def is_on_device(self, node: Node, depth: int) -> bool:
        """Whether the path to `node` is on the device up to `depth`, where one of its nodes
        ends."""
        current: Node | None = node
        while current is not None and current.end > depth:
            current = current.parent
        assert current is not None, "the root ends at 0"
        return current is self.root or current.data[BASE].value is not None

    def stored_length(self, key: RadixKey, start: int) -> int:
        """Tokens of `key` that storage is believed to have, going on from `start`."""
        path, depth = self._known(key, len(key) - len(key) % self.page_size)
        for node in path:
            if node.end > start and not node.data[BASE].stored:
                return max(start, node.start)
        return max(start, depth)

    def commit_transfer(
        self, boundary: Boundary, component: int, tier: Tier, ids: PageIds
    ) -> PageIds:
        """`ids` now hold a component's state of the last pages up to `boundary` on `tier`; return
        those not taken.

        A span (1.5): the pages are counted back from the boundary, through whatever splits have
        happened since.

        Raises:
            ValueError, TypeError: ids that do not fit. StaleError: the boundary's node is gone.
                Nothing was taken.
        """
        owner = self.components[component]
        start = owner.span_start(boundary.depth, len(ids))
        if start < 0:
            raise ValueError(f"{len(ids)} pages do not fit into a path of {boundary.depth} tokens")
        if ids.dtype != INT32:
            raise TypeError(f"page ids must be int32, not {ids.dtype}")
        path = self._path_to(self.cut(boundary))[::-1]
        nodes = [node for node in path if node.end > start]
        if nodes and nodes[0].start < start and owner.is_per_page:
            self._split_node(nodes[0], start)
        self.growth += 1
        return owner.commit_hicache_transfer(nodes, tier, ids)

    # --- life cycle -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything. Receipts become stale; the caller takes all page ids back."""
        self._debris.extend(self.root.children.values())
        self.root.children = {}
        self.receipts.void_all()
        self._plant()
        self.observers.on_event(Event(EventKind.CLEARED))

    def sweep(self, max_nodes: int) -> bool:
        """Take up to `max_nodes` forgotten nodes apart, so that they need no garbage collector;
        True when more are left."""
        for _ in range(max_nodes):
            if not self._debris:
                return False
            node = self._debris.pop()
            self._debris.extend(node.children.values())
            node.children = {}
            node.parent = node.only = None
            for data in node.data:
                data.queue = data.listed = None
        return bool(self._debris)

    # --- looking ----------------------------------------------------------------------------------

    def evictable_size(self, component: int = BASE, tier: Tier = Tier.DEVICE) -> int:
        """Pages of a component that nobody holds."""
        owner = self.components[component]
        return (owner.device if tier is Tier.DEVICE else owner.host).evictable

    def protected_size(self, component: int = BASE, tier: Tier = Tier.DEVICE) -> int:
        """Pages of a component that locks keep."""
        owner = self.components[component]
        return (owner.device if tier is Tier.DEVICE else owner.host).protected

    def pages(self, boundary: Boundary, start: int = 0) -> tuple[PageIds, ...]:
        """Per component, the device page ids of `[start, boundary)`, one per page (−1: none
        there)."""
        node, depth = boundary
        if node is self.root:
            return self._nothing
        path = self._path_to(node)
        if not path or path[-1].parent is not self.root:
            raise StaleError("the node of this boundary is gone: match again")
        path.reverse()
        if node.end > depth:
            path = [node for node in path if node.start < depth]
        return tuple([component.collect(path, start, depth) for component in self.components])

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        return self._subtree(self.root)

    def page_keys(self, node: Node) -> list[bytes]:
        """The page keys of a node's own pages (10.1), computed along its path and remembered."""
        missing = []
        current = node
        while current.parent is not None and current.page_keys is None:
            missing.append(current)
            current = current.parent
        previous = current.page_keys[-1] if current.page_keys else namespace_seed(node.namespace)
        for current in reversed(missing):
            tokens = np.frombuffer(current.key, dtype=np.int64)
            current.page_keys = hash_pages(
                tokens, self.page_size, previous, is_bigram=node.namespace.is_bigram
            )
            previous = current.page_keys[-1]
        return node.page_keys or []

    def check_integrity(self) -> None:
        """Prove the invariants (2).

        Raises:
            IntegrityError: naming every one that does not hold.
        """
        check.check_integrity(self)

    def pretty_print(self) -> str:
        """The tree as text, a line per node: depths, where each component is, locks, hits, age."""
        lines = [f"root, {self.num_nodes} nodes"]
        stack = [(node, 1) for node in reversed(self.root.children.values())]
        while stack:
            node, level = stack.pop()
            parts = []
            for component, data in zip(self.components, node.data, strict=True):
                tiers = ("D" if data.value is not None else "-") + (
                    "H" if data.host_value is not None else "-"
                )
                held = (
                    f" locks {data.lock_ref}/{data.host_lock_ref}"
                    if data.lock_ref or data.host_lock_ref
                    else ""
                )
                parts.append(f"{component.id} {tiers}{held}")
            lines.append(
                f"{'  ' * level}[{node.start}:{node.end}) {', '.join(parts)}, "
                f"hits {node.hit_count}, priority {node.priority}, used {node.data[BASE].stamp}"
            )
            stack.extend((child, level + 1) for child in reversed(node.children.values()))
        return "\n".join(lines)


def _parts_of(receipts: Sequence[Receipt], component: int) -> list[tuple[Node, Any]]:
    """What these receipts hold of a component: where it ends, and what its release needs."""
    return [
        (receipt.node, part)
        for receipt in receipts
        if (part := receipt.parts[component]) is not None
    ]


def _is_held_host_copy(node: Node) -> bool:
    """Whether a node has state on the host that a lock on either tier keeps there."""
    return node.data[BASE].host_value is not None and any(
        data.lock_ref or data.host_lock_ref for data in node.data
    )


def common_bytes(edge: bytes, data: bytes, at: int, num_bytes: int) -> int:
    """How many of the first `num_bytes` of `edge` equal those of `data` from `at` on (a multiple of
    a token).

    Pieces of 32 KiB by memcmp, then the differing piece by numpy.
    """
    view = memoryview(edge)
    done, piece = 0, PIECE_TOKENS * TOKEN_BYTES
    while done < num_bytes:
        size = min(piece, num_bytes - done)
        if not data.startswith(view[done : done + size], at + done):
            ours = np.frombuffer(edge, dtype=np.int64, count=size // TOKEN_BYTES, offset=done)
            theirs = np.frombuffer(
                data, dtype=np.int64, count=size // TOKEN_BYTES, offset=at + done
            )
            return done + int(np.argmax(ours != theirs)) * TOKEN_BYTES
        done += size
    return num_bytes
