"""What a lease has of components with tombstones: windows, whose pages go home behind it, and
states, of which it works with one.

A lease of a model with full attention has none of these. Owns: what of such a component is the
lease's own, and how much of it admission has promised. Refuses to know: which component it is
(`is_per_page` says of which of two kinds), and the tokens.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiered_cache.errors import StaleError
from tiered_cache.tree.components.base import NO_PAGES, join
from tiered_cache.types import NO_PAGE, Boundary, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiered_cache.accounts import PageAccounts
    from tiered_cache.fences import LeaseFences
    from tiered_cache.page_table import PageTable
    from tiered_cache.tree.components.base import TreeComponent
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.tree.node import Node
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import PageIds


class StateCopy(NamedTuple):
    """What is done in a run's thread before the run: `target` becomes what `source` is (−1: the
    state of no tokens)."""

    component: int
    source: int
    target: int


class Hold(NamedTuple):
    """What a lease held of the tree (`parts` of the receipt that ended at `node`), and per
    component the ids of its own that it then gave to the tree."""

    node: Node
    parts: Sequence[Any]
    own: Sequence[PageIds]


def nodes_between(node: Node, above: Node) -> Iterator[Node]:
    """`node` and its ancestors below `above`."""
    while node is not above and node.parent is not None:
        yield node
        node = node.parent


class LeasePart(ABC):
    """A lease's part of one component.

    Attributes:
        index: of the component.
        promised: of `unspent`, what there was room to promise: a state that is published is the
            tree's, and there may be no slot to go on with for a while. `is_short`: it is less.
    """

    __slots__ = ("_accounts", "_component", "_fences", "_table", "index", "is_short", "promised")

    def __init__(
        self,
        component: TreeComponent,
        table: PageTable,
        accounts: PageAccounts,
        fences: LeaseFences,
    ) -> None:
        self._component = component
        self._accounts = accounts
        self._fences = fences
        self._table = table
        self.index = component.index
        self.promised = 0
        self.is_short = False
        self.drop()

    @property
    def _size(self) -> int:
        return self._component.page_size

    @property
    def _ids(self) -> PageIds:
        return self._table.ids[self.index]

    def footprint(self, num_pages: int) -> int:
        """The most ids that a lease of so many pages is promised."""
        return self._component.footprint(num_pages)

    def need(self, num_pages: int, depth: int, held: int) -> int:
        """Ids that a lease of so many pages must be promised if it begins at `depth`, where it
        holds so many."""
        to_come = num_pages - depth // self._size
        return max(0, min(to_come, self.footprint(num_pages) - held))

    @abstractmethod
    def unspent(self, num_pages: int) -> int:
        """Ids that a lease of so many pages may still take."""

    @property
    def num_left(self) -> int:
        """Ids that it has given up under a fence, and takes first."""
        return self._fences.num_left(self.index)

    def own_beside_table(self) -> PageIds:
        """Own ids that the lease's table does not name."""
        return NO_PAGES

    def under_run(self, first: int, last: int) -> PageIds:
        """Ids that a run over these pages may have written."""
        ids = self._ids[first:last]
        return join([ids[ids != NO_PAGE], self.own_beside_table()])

    def would_leave(self, stop: int) -> int:
        """Ids that would be the tree's, and that the lease would hold no longer or not at all, if
        it held `[0, stop)`; at most."""
        return 0

    def keep_left(self, tree: RadixTree, before: Hold, receipt: Receipt) -> None:
        """What the lease held before, or has given to the tree, and `receipt` does not hold:
        somebody holds it as long as the fences stand that stand now."""
        component, index, part = self._component, self.index, before.parts[self.index]
        if part is None:
            return
        nodes = list(component.held(before.node, Tier.DEVICE, part))
        nodes += [
            node
            for node in nodes_between(receipt.node, before.node)
            if (value := node.data[index].value) is not None
            and np.isin(value, before.own[index]).any()
        ]
        still = set(component.held(receipt.node, Tier.DEVICE, receipt.parts[index]))
        starts: list[int | None] = [None] * len(before.parts)
        for node in nodes:
            ids = node.data[index].value
            if ids is not None and node not in still:
                starts[index] = node.start
                kept = tree.hold_each(Boundary(node, node.end), Tier.DEVICE, starts)
                self._fences.keep(index, ids, kept)

    def held(self, receipt: Receipt) -> None:
        """The lease holds what `receipt` does, and its table names it: of this component no more
        than that is held."""
        top, part = receipt.depth, receipt.parts[self.index]
        if part is not None:
            top = self._component.held_from(top, part)
        self._ids[: top // self._size] = NO_PAGE

    def in_tree(self, receipt: Receipt) -> PageIds:
        """What the tree has of what `receipt` holds, by page: a node of a window is held whole, and
        a split in between leaves both halves held."""
        pages = np.full(receipt.depth // self._size, NO_PAGE, np.int32)
        part = receipt.parts[self.index]
        if part is not None:
            for node in self._component.held(receipt.node, Tier.DEVICE, part):
                value, last = node.data[self.index].value, node.end // self._size
                if value is not None:
                    pages[last - len(value) : last] = value
        return pages

    # --- what only one of the two kinds does ------------------------------------------------------

    def taken_over(self, depth: int) -> PageIds:
        """The lease goes on from `depth`, which is the tree's: own ids that it needs no more."""
        return NO_PAGES

    def prepare_run(self, start: int) -> list[StateCopy]:
        """A run that begins at `start` is about to begin."""
        return []

    def run_ended(self, depth: int, *, was_touched: bool) -> PageIds:
        """It has, with everything computed up to `depth`: own ids that hold nothing now."""
        return NO_PAGES

    def fallback(self, depth: int) -> int:
        """The deepest place up to `depth`, which is computed, that the lease can go on from."""
        return depth

    def cut(self, depth: int) -> PageIds:
        """What follows `depth` is dropped: own ids of this component that are not in the table."""
        return NO_PAGES

    def costs_promise(self, stop: int) -> bool:
        """Whether publishing `[0, stop)` gives away an id that the lease needs another for."""
        return False

    def publishable(self, stop: int) -> int:
        """How far a prefix up to `stop` can be published so that others can use it."""
        return stop

    def offer(self, stop: int) -> None:  # noqa: B027 - windows are named already
        """`[0, stop)` is about to be published: the table names what there is."""

    def published(self, stop: int) -> None:  # noqa: B027 - likewise
        """It was: the table names what the tree has."""

    def drop(self) -> None:  # noqa: B027 - likewise
        """The lease has given all of it back."""


class WindowPart(LeasePart):
    """Pages of a window: two of these, a chunk and one more, however long the prompt; and what can
    be rolled back.

    Args:
        num_pages: of the lease, prompt and reserve.
        rollback: tokens behind what is computed that it may be cut to.
    """

    __slots__ = ("_committed", "_most", "_most_behind", "_num_held")

    def __init__(
        self,
        component: TreeComponent,
        table: PageTable,
        accounts: PageAccounts,
        fences: LeaseFences,
        num_pages: int,
        rollback: int,
    ) -> None:
        super().__init__(component, table, accounts, fences)
        footprint = component.footprint(num_pages)
        self._most = min(num_pages, footprint + -(-rollback // self._size))
        self._most_behind = footprint - component.chunk_pages if self._most < num_pages else None

    def footprint(self, num_pages: int) -> int:
        return self._most

    def drop(self) -> None:
        self._committed = self._num_held = 0  # in pages: where what it holds ends, and how many

    def unspent(self, num_pages: int) -> int:
        """What it may take again, too: after a run that came to nothing, or a truncation, pages
        that it has left behind are computed once more; but never what is committed."""
        is_own = self._ids[self._committed : self._table.num_pages] != NO_PAGE
        own = int(np.count_nonzero(is_own))
        held = self._num_held + own
        to_come = num_pages - self._committed - own
        most = min(to_come, self._most - held)
        return max(0, most - self.num_left)

    def would_leave(self, stop: int) -> int:
        needed, committed = self._component.needed_from(stop) // self._size, self._committed
        return self.num_own(committed, needed) + max(
            0, min(committed, needed) - (committed - self._num_held)
        )

    def num_own(self, first: int, last: int) -> int:
        """Own ids of the pages `[first, last)`, none of which is committed."""
        return int(np.count_nonzero(self._ids[first : max(first, last)] != NO_PAGE))

    def held(self, receipt: Receipt) -> None:
        super().held(receipt)
        depth, part = receipt.depth, receipt.parts[self.index]
        self._committed = depth // self._size
        if self._component.is_window:  # tombstones, too: what comes there is held
            top = depth if part is None else self._component.held_from(depth, part)
            self._num_held = self._committed - top // self._size
        else:
            self._num_held = int(np.count_nonzero(self._ids[: self._committed] != NO_PAGE))

    def fallback(self, depth: int) -> int:
        pages = self._component.pages_to_go_on(depth)
        is_there = (self._ids[pages.start : pages.stop] != NO_PAGE).all()
        if depth % self._size:  # and the page that it goes on in
            is_there &= self._ids[depth // self._size] != NO_PAGE
        return depth if is_there else -1

    def left_behind(self, own_from: int, depth: int, ends: Sequence[int]) -> PageIds:
        """Own ids that neither what follows `depth` needs, nor what follows one of `ends`; these go
        with the rest where they would stand in the way of the chunk that comes (semantics §11.5).
        """
        component, depth = self._component, max(0, depth)
        own = self._ids[own_from : depth // self._size] != NO_PAGE
        gone = own.copy()
        for pages in (component.pages_to_go_on(depth), *map(component.pages_to_go_on, ends)):
            gone[max(0, pages.start - own_from) : max(0, pages.stop - own_from)] = False
        if self._most_behind is not None and ends:
            kept = int(np.count_nonzero(own)) - int(np.count_nonzero(gone))
            if self._num_held + kept > self._most_behind:
                return self.left_behind(own_from, depth, ())
        at = own_from + np.flatnonzero(gone)
        ids = self._ids[at].copy()
        self._ids[at] = NO_PAGE
        return ids


class StatePart(LeasePart):
    """One state to work with, and where to start it from.

    The state in the working slot stands at a depth; a run that begins there goes on in place.
    Where it does not, or that state is to be kept, the run gets a fresh slot and begins with a copy
    of the origin: in the run's own thread, before the model (a copy on the loop would block it).
    The origin is a state of the tree, at the end of what the lease holds, or an own one on the
    grid, or that of no tokens.
    """

    __slots__ = (
        "_begun_at",
        "_is_prepared",
        "_kept",
        "_kept_depth",
        "_origin",
        "_origin_depth",
        "_slot",
        "_slot_depth",
    )

    def drop(self) -> None:
        self._slot = self._kept = self._origin = NO_PAGE
        self._slot_depth = self._kept_depth = self._begun_at = -1
        self._origin_depth = 0
        self._is_prepared = False

    @property
    def slot(self) -> int:
        """The working slot, while a run goes on (−1: none)."""
        return self._slot

    def need(self, num_pages: int, depth: int, held: int) -> int:
        """None where anything is spare: if that is the very state that the lease is to hold, it
        works with this one (`work_with_held`)."""
        needed = super().need(num_pages, depth, held)
        return needed if self._accounts.spare(self.index) < needed else 0

    def unspent(self, num_pages: int) -> int:
        own = (self._slot != NO_PAGE) + self.num_left
        return max(0, self._component.footprint(num_pages) - own)

    @property
    def lacks_slot(self) -> bool:
        """Whether none is left to work with, just after the grant."""
        return self._accounts.spare(self.index) < 1

    def work_with_held(self, slot: int, depth: int) -> None:
        """`slot`, the state at `depth`, was the tree's, and is the lease's from now on: a run goes
        on in it, and when that comes to nothing there is no state but that of no tokens."""
        self._slot, self._slot_depth = slot, depth
        self._origin, self._origin_depth = NO_PAGE, 0
        self._ids[depth // self._size - 1] = NO_PAGE

    def own_beside_table(self) -> PageIds:
        return np.array([slot for slot in (self._slot, self._kept) if slot != NO_PAGE], np.int32)

    def taken_over(self, depth: int) -> PageIds:
        own = self.own_beside_table()
        self.drop()
        self._origin = int(self._ids[depth // self._size - 1])
        self._origin_depth = depth
        return own

    def prepare_run(self, start: int) -> list[StateCopy]:
        if self._slot_depth == start:
            if start % self._component.grid or not self._may_keep():
                self._begun_at, self._slot_depth = start, -1  # in place: no state until it ends
                self._is_prepared = True
                return []
            self._give_up_kept()
            self._kept, self._kept_depth, self._slot = self._slot, start, NO_PAGE
        source = self._source(start)
        if self._slot == NO_PAGE:
            self._slot = int(self._fences.take_of(self.index, 1)[0])
        self._begun_at = self._slot_depth = -1
        self._is_prepared = True
        return [StateCopy(self.index, source, self._slot)]

    def _source(self, start: int) -> int:
        if self._kept_depth == start:
            return self._kept
        if self._origin_depth == start:
            return self._origin
        raise StaleError(
            f"there is no state at {start} to go on from, only at "
            f"{max(self._origin_depth, self._kept_depth)}: ask for the next chunk"
        )

    def _may_keep(self) -> bool:
        """Whether there is a slot beside what is promised: keeping a state is not."""
        spare = self._accounts.spare(self.index) + self.num_left
        return self._kept != NO_PAGE or spare >= 1

    def _give_up_kept(self) -> None:
        if self._kept != NO_PAGE:
            self._fences.give_back_of(self.index, np.array([self._kept], np.int32))
            self._kept, self._kept_depth = NO_PAGE, -1

    def run_ended(self, depth: int, *, was_touched: bool) -> PageIds:
        if not self._is_prepared:
            return NO_PAGES
        self._is_prepared = False
        if was_touched and depth >= 0:
            self._slot_depth = depth
            return NO_PAGES
        if not was_touched and self._begun_at >= 0:
            self._slot_depth = self._begun_at  # as it was
            return NO_PAGES
        void, self._slot = self._slot, NO_PAGE
        self._slot_depth = -1
        return np.array([void], np.int32) if void != NO_PAGE else NO_PAGES

    def fallback(self, depth: int) -> int:
        known = [self._origin_depth, self._kept_depth, self._slot_depth]
        return max(at for at in known if at <= depth)

    @property
    def safe_depth(self) -> int:
        """Where the lease goes on if its next run fails."""
        return max(self._origin_depth, self._kept_depth)

    def cut(self, depth: int) -> PageIds:
        gone = []
        if self._slot_depth > depth:
            gone.append(self._slot)
            self._slot, self._slot_depth = NO_PAGE, -1
        if self._kept_depth > depth:
            gone.append(self._kept)
            self._kept, self._kept_depth = NO_PAGE, -1
        return np.array(gone, np.int32)

    def costs_promise(self, stop: int) -> bool:
        return self._slot_depth == stop

    def publishable(self, stop: int) -> int:
        """The deepest state that is the lease's own."""
        on_page = self._slot_depth > 0 and self._slot_depth % self._size == 0
        own = [self._kept_depth, self._slot_depth if on_page else -1]
        return max((depth for depth in own if depth <= stop), default=-1)

    def offer(self, stop: int) -> None:
        slot = self._slot if self._slot_depth == stop else self._kept
        self._ids[stop // self._size - 1] = slot

    def published(self, stop: int) -> None:
        if self._slot_depth == stop:
            self._slot, self._slot_depth = NO_PAGE, -1
            self._give_up_kept()
        else:
            self._kept, self._kept_depth = NO_PAGE, -1
        self._origin = int(self._ids[stop // self._size - 1])
        self._origin_depth = stop


class LeaseParts:
    """All that a lease has of such components.

    Args:
        fences: what is given up goes home through them.
        num_pages: of the lease, prompt and reserve.
        rollback: tokens behind what is computed that it may be cut to.
    """

    __slots__ = (
        "_accounts",
        "_all",
        "_fences",
        "_is_closed",
        "_num_pages",
        "_size",
        "_states",
        "_table",
        "_windows",
    )

    def __init__(
        self,
        components: Sequence[TreeComponent],
        table: PageTable,
        accounts: PageAccounts,
        fences: LeaseFences,
        num_pages: int,
        rollback: int,
    ) -> None:
        self._accounts = accounts
        self._fences = fences
        self._table = table
        self._size = components[0].page_size
        self._num_pages = num_pages
        self._is_closed = False
        given = table, accounts, fences
        self._windows = [
            WindowPart(part, *given, num_pages, rollback) for part in components if part.is_per_page
        ]
        self._states = [StatePart(part, *given) for part in components if not part.is_per_page]
        self._all: list[LeasePart] = [*self._windows, *self._states]

    @property
    def has_states(self) -> bool:
        return bool(self._states)

    # --- what admission promises ------------------------------------------------------------------

    def footprints(self) -> list[tuple[int, int]]:
        """Per component, the most ids that the lease is promised."""
        return [(part.index, part.footprint(self._num_pages)) for part in self._all]

    def has_room(self, depth: int, would_hold: Sequence[int], room: list[int]) -> bool:
        """Whether the lease can be promised what it needs if it begins at `depth`; `would_hold`:
        what it holds of windows there. In `room`, of components with tombstones, what it may
        protect besides."""
        for part in self._all:
            held = would_hold[part.index]
            spare = self._accounts.spare(part.index)
            spare -= held + part.need(self._num_pages, depth, held)
            if spare < 0:
                return False
            room[part.index] = spare + held
        return True

    def unspent(self, index: int) -> int | None:
        """Ids of a component that the lease is promised; None: it is none of these."""
        for part in self._all:
            if part.index == index:
                return part.promised
        return None

    def close(self) -> None:
        """The lease takes no more, though a run of it may still end, or publish."""
        self._is_closed = True
        self.settle()

    def settle(self) -> None:
        """Bring the accounts in line with what is unspent."""
        for part in self._all:
            unspent = 0 if self._is_closed else part.unspent(self._num_pages)
            more = unspent - part.promised
            if more > 0 or part.is_short:  # then what it takes is not promised any more, either
                more = max(-part.promised, min(more, self._accounts.spare(part.index)))
            self._accounts.promise(more, part.index)
            part.promised += more
            part.is_short = part.promised < unspent

    def lacking(self, num_pages: int) -> list[tuple[int, int]]:
        """Per component, ids beyond the promise that so many more pages of the sequence take."""
        return [
            (part.index, max(0, num_pages - part.num_left - part.promised))
            for part in self._windows
        ]

    def num_pages_to_come(self) -> int:
        """How many more pages of the sequence there can be, of all that is promised or spare."""
        spare = self._accounts.spare
        return min(
            (part.num_left + part.promised + max(0, spare(part.index)) for part in self._windows),
            default=sys.maxsize,
        )

    # --- what is the tree's -----------------------------------------------------------------------

    def held(self, receipt: Receipt) -> None:
        """The lease holds what `receipt` does: of that the table names what is held."""
        for part in self._all:
            part.held(receipt)

    def taken_over(self, depth: int) -> None:
        """The lease goes on from `depth`, which is the tree's."""
        for part in self._all:
            self._free(part, part.taken_over(depth))

    def take_over(self, take: Callable[[int], PageIds], depth: int) -> bool:
        """Just granted, with a hold of what ends at `depth`: where nothing is left to work with but
        the state that it holds, have the tree give that up (semantics §9.10). Whether one was.

        `take`: has the tree give up what it has of a component at the end of what the lease holds.
        """
        lacking = [part for part in self._states if part.lacks_slot]
        for part in lacking:
            part.work_with_held(int(take(part.index)[0]), depth)
        return bool(lacking)

    def publishable(self, stop: int, released: Sequence[int]) -> int | None:
        """How far `[0, stop)` can be published so that others can use it, and the lease go on;
        `released`: per component, ids that are spare when the lease holds what is published
        instead. None: nothing, for there is no slot to go on with."""
        stop = min(part.publishable(stop) for part in self._all)
        for part in () if self._is_closed else self._states:
            spare = self._accounts.spare(part.index) + released[part.index] + part.num_left
            if part.costs_promise(stop) and spare < 1:
                return None
        return stop

    def may_hold(self, would_protect: Sequence[int], would_release: Sequence[int]) -> bool:
        """Whether another state can be held instead; nothing that is promised pays for it."""
        return all(
            would_protect[part.index]
            <= max(0, self._accounts.spare(part.index)) + would_release[part.index]
            for part in self._states
        )

    def would_leave(self, stop: int) -> list[tuple[int, int]]:
        """Per component, ids that would be the tree's and not held, if the lease held `[0, stop)`:
        under a fence there must be room for them."""
        return [(part.index, part.would_leave(stop)) for part in self._all]

    def num_own(self, first: int, last: int) -> list[tuple[int, int]]:
        """Per component that has an id per page, own ids of the pages `[first, last)`."""
        return [(part.index, part.num_own(first, last)) for part in self._windows]

    def keep_left(self, tree: RadixTree, before: Hold, receipt: Receipt) -> None:
        """The lease holds what `receipt` does, and not what it held before, or has given to the
        tree: if a fence stands, that stays where it is until it is lifted."""
        if self._fences.keeps:
            for part in self._all:
                part.keep_left(tree, before, receipt)

    def under_run(self, first: int, last: int) -> list[tuple[int, PageIds]]:
        """Per component, ids that a run over these pages may have written."""
        return [(part.index, part.under_run(first, last)) for part in self._all]

    def hold(self, receipt: Receipt) -> Hold:
        """What the lease holds, before it comes to hold something else."""
        return Hold(receipt.node, tuple(receipt.parts), [NO_PAGES] * len(self._table.ids))

    def offer(self, receipt: Receipt, start: int, stop: int) -> Hold:
        """`[start, stop)` is about to be published; what the lease holds, and gives to the tree."""
        for part in self._all:
            part.offer(stop)
        if not self._fences.keeps:
            return self.hold(receipt)
        own = [ids[start // self._size : stop // self._size].copy() for ids in self._table.ids]
        return self.hold(receipt)._replace(own=own)

    def published(self, stop: int, receipt: Receipt) -> None:
        """It was, and is held."""
        for part in self._all:
            part.published(stop)
        self.held(receipt)
        self.settle()

    def show_held(self, pages: list[PageIds], receipt: Receipt) -> None:
        """For proofs: of these components, what the tree has of what `receipt` holds."""
        for part in self._all:
            pages[part.index] = part.in_tree(receipt)

    # --- runs -------------------------------------------------------------------------------------

    def prepare_run(self, start: int) -> list[StateCopy]:
        """A run that begins at `start` is about to be given to its thread: what is copied there
        before it.

        Raises:
            StaleError: the state that it begins with is not kept.
        """
        copies = [copy for part in self._states for copy in part.prepare_run(start)]
        self.settle()
        return copies

    def run_ended(self, depth: int, *, was_touched: bool) -> None:
        """It has, with everything computed up to `depth` (−1: nothing was)."""
        for part in self._states:
            self._free(part, part.run_ended(depth, was_touched=was_touched))

    def fallback(self, depth: int) -> int:
        """Where there is all that it takes to go on, at `depth` or before."""
        return min(part.fallback(depth) for part in self._all)

    def leave_behind(self, own_from: int, depth: int, ends: Sequence[int]) -> None:
        """Pages go home that neither what follows `depth` needs, nor what follows one of `ends`,
        nor what is computed again when the next run fails (semantics §11.6)."""
        safe = [part.safe_depth for part in self._states]
        for part in self._windows:
            self._free(part, part.left_behind(own_from, depth, (*ends, *safe)))

    def cut(self, depth: int) -> None:
        """What follows `depth` is dropped, and the table cut by its owner."""
        for part in self._all:
            self._free(part, part.cut(depth))

    def drop(self) -> None:
        """The lease has given all of it back, or a reset has forgotten it: as it was before."""
        self._is_closed = False
        for part in self._all:
            part.drop()
            part.promised, part.is_short = 0, False

    # --- looking ----------------------------------------------------------------------------------

    def in_table(self, pages: list[PageIds]) -> list[PageIds]:
        """Ids out of the lease's table, without gaps, and those that no table names."""
        for part in self._all:
            ids = pages[part.index]
            pages[part.index] = np.concatenate((ids[ids != NO_PAGE], part.own_beside_table()))
        return pages

    def slots(self) -> dict[int, int]:
        """Per component of states, the slot that a run works with."""
        return {part.index: part.slot for part in self._states}

    def _free(self, part: LeasePart, ids: PageIds) -> None:
        self._fences.give_back_of(part.index, ids)
