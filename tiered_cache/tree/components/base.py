"""The contract of a component: one kind of state, and its rules on the tree.

The tree walks, cuts and sequences; a component answers for its own ids. It sees nodes, page ids and
the tree's leaf sets and nothing else: no cache, no pool, no controller. Hooks are grouped by phase,
with the seeds' names where the concept remains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy import frombuffer
from numpy.typing import NDArray

from tiered_cache.observe import Event, EventKind
from tiered_cache.tree.plans import Piece
from tiered_cache.types import DEVICE, ComponentId, EvictResult, PageIds, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiered_cache.observe import Observers
    from tiered_cache.tree.leaves import LeafSets
    from tiered_cache.tree.node import ComponentData, Node
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import InsertParams, InsertResult


INT32: Final = np.dtype(np.int32)

Flags: TypeAlias = NDArray[np.bool_]
"""A yes or no for each page of a prefix."""

NO_PAGES: Final[PageIds] = np.frombuffer(b"", INT32)


def own(ids: PageIds) -> PageIds:
    """A read-only copy with memory of its own: no view keeps a large buffer alive, nobody changes a
    value in place.

    Through bytes, because that is half the time of `copy` and `setflags`.
    """
    return frombuffer(ids.tobytes(), INT32)


def owns_memory(ids: PageIds) -> bool:
    """Whether an array is as `own` makes it (for the checker)."""
    memory: object = ids.base
    return isinstance(memory, bytes) and len(memory) == ids.nbytes


def join(parts: Sequence[PageIds]) -> PageIds:
    """One read-only array from several; a single one is not copied. A third of the time of
    `np.concatenate`."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_PAGES
    return frombuffer(b"".join(parts), INT32)  # type: ignore[arg-type]  # arrays are buffers


def empty_lists(count: int) -> list[list[PageIds]]:
    """A list per component. Few are spelt out, here and below: half the time of a comprehension."""
    if count == 1:
        return [[]]
    return [[], []] if count == 2 else [[] for _ in range(count)]


def join_each(parts: Sequence[Sequence[PageIds]]) -> tuple[PageIds, ...]:
    """`join` per component."""
    if len(parts) == 1:
        return (join(parts[0]),)
    if len(parts) == 2:
        base, other = parts
        return join(base), join(other)
    return tuple([join(ids) for ids in parts])


class Sizes:
    """Pages that a component holds on one tier, by whether a lock keeps them.

    `held`: of windows on the device, pages (and places of pages that may come) that locks hold,
    each counted as often as it is held.
    """

    __slots__ = ("evictable", "held", "protected")

    def __init__(self) -> None:
        self.evictable = 0
        self.protected = 0
        self.held = 0

    def credit(self, num_pages: int, locks: int) -> None:
        """Count pages gained (or lost, if negative) by a node with that many locks."""
        if locks:
            self.protected += num_pages
        else:
            self.evictable += num_pages

    def protect(self, num_pages: int) -> None:
        """Count pages that a first lock has taken hold of (or the last has let go, if negative)."""
        self.evictable -= num_pages
        self.protected += num_pages


class Eviction:
    """What one eviction has given up so far: per component the ids, and how many on the tier that
    is asked."""

    __slots__ = ("_host", "counts", "device", "dropped_tokens", "tier")

    def __init__(self, tier: Tier, num_components: int) -> None:
        self.tier = tier
        self.device = empty_lists(num_components)
        self._host: list[list[PageIds]] | None = None
        self.counts = [0] * num_components
        self.dropped_tokens = 0

    @property
    def host(self) -> list[list[PageIds]]:
        """Made when first asked for: most evictions leave the host as it is."""
        if self._host is None:
            self._host = empty_lists(len(self.counts))
        return self._host

    def result(self) -> EvictResult:
        device, host = join_each(self.device), self._host
        nothing = (NO_PAGES,) * len(device)
        return EvictResult(device, join_each(host) if host else nothing, self.dropped_tokens)


class TreeComponent(ABC):
    """One kind of state. Made with its id, bound once by the tree that it is given to.

    `is_per_page`: an id stands for each page of a node; else one for the state at its end.
    `has_tombstones`: it may be missing at a node that exists. `is_window`: whoever holds a part of
    it lets go of that and needs as much again, so each holder has to find room for all it holds.
    """

    is_per_page: ClassVar[bool] = True
    has_tombstones: ClassVar[bool] = False
    is_window: ClassVar[bool] = False

    def __init__(self, component_id: str) -> None:
        self.id = ComponentId(component_id)
        self.device = Sizes()
        self.host = Sizes()
        self.index = -1
        self.page_size = 0
        self.leaves: LeafSets
        self.observers: Observers

    def bind(self, index: int, page_size: int, leaves: LeafSets, observers: Observers) -> None:
        """Called by the tree: the dense index, and what all components of a tree share."""
        self.index, self.page_size, self.leaves, self.observers = (
            index,
            page_size,
            leaves,
            observers,
        )
        self.device, self.host = Sizes(), Sizes()

    def tell(self, kind: EventKind, tier: Tier, node: Node) -> None:
        """Tell the observers of a residency gained or lost."""
        self.observers.on_event(Event(kind, component=self.id, tier=tier, node=node))

    # --- match ------------------------------------------------------------------------------------

    @abstractmethod
    def deepest_boundary(
        self, path: Sequence[Node], count: int, depth: int, device_only: bool
    ) -> int:
        """The largest n ≤ `count` such that a prefix may end behind `path[:n]` (0 always may;
        semantics §3.4).

        `depth` is where `path[:count]` ends; it is inside the last node's edge when that matched
        partly.
        """

    @abstractmethod
    def collect(self, path: Sequence[Node], start: int, stop: int) -> PageIds:
        """Device ids of the pages of `[start, stop)`, one per page (−1: none there); `stop` is in
        `path`'s last node."""

    @abstractmethod
    def touch(self, path: Sequence[Node], stamp: int) -> None:
        """`path` has been used as a prefix; date what this component would use of it (semantics
        §3.6)."""

    # --- insert -----------------------------------------------------------------------------------

    @abstractmethod
    def update_component_on_insert_overlap(
        self, node: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        """An insert passes over `node`, which begins at `start`: adopt, or return the caller's ids
        that are there twice (semantics §5.3–5).

        Lowers `result.prefix_len` to the start of what was not on the device, and
        `result.first_changed` to that of what was there twice.
        """

    def overlap_cut(self, node: Node, start: int, params: InsertParams) -> int | None:
        """Where `node`, which begins at `start` and which an insert is about to pass over, must be
        cut so that this component can adopt what is below (semantics §5.5)."""
        return None

    @abstractmethod
    def commit_insert_component_data(
        self, leaf: Node, start: int, params: InsertParams, result: InsertResult
    ) -> PageIds | None:
        """An insert has made `leaf`, which begins at `start`: take what belongs there (semantics
        §5.6–7), or return the caller's ids that do not."""

    def leaf_cuts(self, start: int, stop: int, params: InsertParams) -> Iterable[int]:
        """Depths at which a fresh leaf `[start, stop)` should be cut for this component's sake
        (semantics §5.6)."""
        return ()

    def allows_boundary(self, depth: int, params: InsertParams) -> bool:
        """Whether a boundary at the prompt's end suits this component (semantics §5.9)."""
        return True

    # --- request ----------------------------------------------------------------------------------

    @property
    def grid(self) -> int:
        """A request that computes in pieces ends them, where it can, at multiples of so many
        tokens."""
        return self.page_size

    def footprint(self, num_pages: int) -> int:
        """The most ids that a request of so many pages needs at a time (semantics §11.5)."""
        return num_pages

    @property
    def chunk_pages(self) -> int:
        """How many ids of `footprint` are for the chunk that a request computes next."""
        return 0

    def needed_from(self, depth: int) -> int:
        """The first token whose state is needed to compute what follows `depth`."""
        return 0

    def pages_to_go_on(self, depth: int) -> range:
        """The pages, by number, whose state is needed to compute what follows `depth`. Of what has
        tombstones a request keeps these, and the one that `depth` is inside of, and no others."""
        whole = depth - depth % self.page_size
        return self.pages_needed(whole) if whole else range(0)

    def pages_needed(self, depth: int) -> range:
        """The pages, by number, that a prefix of `depth` tokens needs of this component: it may end
        where they are all there. Of a state, the page that it ends. The rule of `deepest_boundary`,
        of pages that no node stands for yet."""
        size = self.page_size
        first = self.needed_from(depth) // size if self.is_per_page else depth // size - 1
        return range(max(0, first), depth // size)

    def restorable(self, there: Flags) -> Flags:
        """Per page, whether a prefix may end behind it, where `there` says which pages there are.

        Says the same as `pages_needed`, of all depths at once.
        """
        size, gone = self.page_size, np.concatenate(([0], np.cumsum(~there)))
        needed = [self.pages_needed((page + 1) * size) for page in range(len(there))]
        legal: Flags = np.array([gone[pages.stop] == gone[pages.start] for pages in needed], bool)
        return legal

    # --- split ------------------------------------------------------------------------------------

    @abstractmethod
    def redistribute_on_node_split(self, parent: Node, child: Node, num_pages: int) -> None:
        """`child` has become the suffix below the new `parent`, which takes the first `num_pages`
        (semantics §4)."""

    # --- eviction ---------------------------------------------------------------------------------

    @abstractmethod
    def evict_component(self, node: Node, tier: Tier, eviction: Eviction) -> None:
        """Give up this component's part of `node` on a tier where it has one. The caller has
        checked that it may."""

    def _give_up(self, data: ComponentData, tier: Tier, eviction: Eviction) -> None:
        """Move what a part has on a tier into `eviction`, and out of the counts."""
        index = self.index
        if tier is DEVICE:
            ids, data.value = data.value, None
            sizes, locks, given_up = self.device, data.lock_ref, eviction.device
        else:
            ids, data.host_value = data.host_value, None
            sizes, locks, given_up = self.host, data.host_lock_ref, eviction.host
        assert ids is not None, "callers have looked"
        given_up[index].append(ids)
        sizes.credit(-len(ids), locks)
        if tier is eviction.tier:
            eviction.counts[index] += len(ids)

    @abstractmethod
    def drive_eviction(self, tree: RadixTree, need: int, eviction: Eviction) -> None:
        """Choose victims on the device until `need` pages of this component are given up, or none
        is left."""

    @abstractmethod
    def drive_host_eviction(self, tree: RadixTree, need: int, eviction: Eviction) -> None:
        """The same on the host."""

    # --- locks ------------------------------------------------------------------------------------

    @abstractmethod
    def acquire_component_lock(self, path: Sequence[Node], tier: Tier, start: int) -> Any:
        """Hold what this component needs of `path` (end first, up to below the root); return what
        release needs.

        On the host, only nodes that overlap `[start, end)` are held (a host lock is a span,
        semantics §6.4).
        """

    @abstractmethod
    def release_component_lock(self, node: Node, tier: Tier, part: Any) -> None:
        """Undo one acquisition whose path ended at `node`."""

    def advance_component_lock(
        self, node: Node, part: Any, path: Sequence[Node], below: Sequence[Node]
    ) -> Any:
        """A device lock that ended at `node` ends where `path` (end first) does; `below` is what of
        `path` is below `node`. Returns what release needs from now on."""
        fresh = self.acquire_component_lock(path, Tier.DEVICE, 0)
        self.release_component_lock(node, Tier.DEVICE, part)
        return fresh

    @abstractmethod
    def would_protect(self, path: Sequence[Node], depth: int) -> int:
        """Evictable device pages that a lock on `path` (end first), cut at `depth`, would
        protect."""

    def would_need(self, path: Sequence[Node], depth: int) -> int:
        """Device pages that there must be room for before `path` (end first), cut at `depth`, is
        held once more: what that protects, and of a window what others hold, too."""
        return self.would_protect(path, depth)

    @abstractmethod
    def would_release(self, parts: Sequence[tuple[Node, Any]]) -> int:
        """Device pages that would become evictable if one lock for each of `parts` (the node where
        it ends, and what its acquisition returned) were released."""

    def would_spare(self, parts: Sequence[tuple[Node, Any]]) -> int:
        """Device pages that there would be room for then: as `would_need`."""
        return self.would_release(parts)

    def lock_cut(self, path: Sequence[Node]) -> int:
        """The depth at which `path` (end first) must be cut before a request holds it, so that it
        does not hold more than its `footprint` has room for. 0: nowhere."""
        return 0

    def held_from(self, depth: int, part: Any) -> int:
        """Where what a device lock holds begins, that ended at `depth` and whose acquisition
        returned `part`: of what `collect` names above, somebody may take it at any time."""
        return 0

    @abstractmethod
    def held(self, node: Node, tier: Tier, part: Any) -> Iterable[Node]:
        """The nodes that an acquisition holds which ended at `node` and returned `part`."""

    # --- transfer ---------------------------------------------------------------------------------

    def num_ids(self, node: Node) -> int:
        """How many ids stand for this component's part of `node`."""
        return (node.end - node.start) // self.page_size if self.is_per_page else 1

    def part_start(self, node: Node) -> int:
        """Where this component's part of `node` begins: as a span of its ids."""
        return self.span_start(node.end, self.num_ids(node))

    def span_start(self, depth: int, num_ids: int) -> int:
        """Where a span begins that ends at `depth` and has so many ids (semantics §1.5)."""
        return depth - num_ids * self.page_size

    def needed(self, path: Sequence[Node], target: Tier) -> Sequence[Node]:
        """What of `path` (root first) a transfer to `target` is for: of a load, what a prefix that
        ends there needs."""
        return path

    def build_hicache_transfers(
        self, path: Sequence[Node], start: int, target: Tier, *, unless_stored: bool = False
    ) -> list[Piece]:
        """What `path` (root first) lacks on `target` from `start` on, and another tier has or is
        bringing; root first, consecutive pages in one piece. `unless_stored`: what storage is
        believed to have is not lacking.

        Ends where neither is the case. A component with tombstones goes on there, and has a piece
        for each node: a lock at the end of one holds that node, and maybe no more.
        """
        pieces: list[Piece] = []
        parts: list[PageIds] = []
        for node in self.needed(path, target):
            data = node.data[self.index]
            there, source = data.value, data.host_value
            if target is Tier.HOST:
                there, source = source, there
            if node.end <= start or there is not None or (unless_stored and data.stored):
                continue
            pending = data.pending
            if pending is None and source is None:
                if self.has_tombstones:
                    continue
                break
            last = pieces[-1] if pieces and not self.has_tombstones else None
            if last is None or last.stop != node.start or last.pending is not pending:
                last = Piece(self.part_start(node), node.end, None, pending)
                pieces.append(last)
                parts = []
            if pending is None:
                assert source is not None, "looked at above"
                parts.append(source)
            pieces[-1] = Piece(last.start, node.end, join(parts) if parts else None, pending)
        return pieces

    @abstractmethod
    def commit_hicache_transfer(self, nodes: Sequence[Node], tier: Tier, ids: PageIds) -> PageIds:
        """`ids` now hold this component's state of `nodes` (root first) on `tier`; return those not
        taken.

        Values that are already there stay (semantics §5.12).
        """

    # --- proof ------------------------------------------------------------------------------------

    def note_change(self, node: Node) -> None:
        """Something that an order of this component is made of has changed at `node`."""
        self.leaves.refresh(node)

    @abstractmethod
    def check(self, node: Node, fail: Any) -> None:
        """Call `fail(message)` for each invariant of this component that does not hold at
        `node`."""

    def check_orders(self, nodes: Sequence[Node], fail: Any) -> None:  # noqa: B027 - most have none
        """The same for the orders of this component, where it has some of its own."""
