"""What a lease has of components with tombstones: windows, whose pages go home behind it, and
states, of which it works with one.

A lease of a model with full attention has none of these. Owns: what of such a component is the
lease's own, and how much of it admission has promised. Refuses to know: which component it is
(`is_per_page` says of which of two kinds), and the tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiered_cache.errors import StaleError
from tiered_cache.tree.components.base import NO_PAGES
from tiered_cache.types import NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered_cache.accounts import PageAccounts
    from tiered_cache.page_table import PageTable
    from tiered_cache.tree.components.base import TreeComponent
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.types import PageIds


class StateCopy(NamedTuple):
    """What is done in a run's thread before the run: `target` becomes what `source` is (−1: the
    state of no tokens)."""

    component: int
    source: int
    target: int


class LeasePart(ABC):
    """A lease's part of one component.

    Attributes:
        index: of the component.
        promised: of `unspent`, what the accounts know.
    """

    __slots__ = ("_accounts", "_component", "_table", "index", "promised")

    def __init__(self, component: TreeComponent, table: PageTable, accounts: PageAccounts) -> None:
        self._component = component
        self._accounts = accounts
        self._table = table
        self.index = component.index
        self.promised = 0

    @property
    def _size(self) -> int:
        return self._component.page_size

    @property
    def _ids(self) -> PageIds:
        return self._table.ids[self.index]

    @abstractmethod
    def footprint(self, num_pages: int) -> int:
        """The most ids that a lease of so many pages is promised."""

    @abstractmethod
    def unspent(self, num_pages: int) -> int:
        """Ids that a lease of so many pages may still take."""

    @abstractmethod
    def own(self, first: int) -> PageIds:
        """Ids that are the lease's own, whose own pages begin at page `first`."""

    def held(self, receipt: Receipt) -> None:
        """The lease holds what `receipt` does, and its table names it: of this component no more
        than that is held."""
        top = receipt.parts[self.index] if receipt.parts[self.index] is not None else receipt.depth
        self._ids[: self._first_held(receipt, top) // self._size] = NO_PAGE

    @abstractmethod
    def _first_held(self, receipt: Receipt, top: int) -> int: ...

    # --- what only one of the two kinds does ------------------------------------------------------

    def taken_over(self, depth: int) -> PageIds:
        """The lease goes on from `depth`, which is the tree's: own ids that it needs no more."""
        return NO_PAGES

    def left_behind(self, own_from: int, depth: int, kept: Sequence[tuple[int, int]]) -> PageIds:
        """Own ids that nothing beyond `depth` needs, but for those in `kept` (depths from, to)."""
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

    def safe_depth(self, depth: int) -> int:
        """Where a lease that has computed up to `depth` goes on if its next run fails."""
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
    """Pages of a window: as many as the window, a chunk and one more, however long the prompt."""

    __slots__ = ()

    def footprint(self, num_pages: int) -> int:
        return self._component.footprint(num_pages)

    def unspent(self, num_pages: int) -> int:
        used = self._table.num_pages
        held = int(np.count_nonzero(self._ids[:used] != NO_PAGE))
        return max(0, min(num_pages - used, self._component.footprint(num_pages) - held))

    def own(self, first: int) -> PageIds:
        ids = self._ids[first : self._table.num_pages]
        own: PageIds = ids[ids != NO_PAGE]
        return own

    def _first_held(self, receipt: Receipt, top: int) -> int:
        return top

    def fallback(self, depth: int) -> int:
        size = self._size
        window = self._ids[self._component.needed_from(depth) // size : -(-depth // size)]
        return depth if (window != NO_PAGE).all() else -1

    def left_behind(self, own_from: int, depth: int, kept: Sequence[tuple[int, int]]) -> PageIds:
        size = self._size
        stop = self._component.needed_from(depth) // size
        gone = self._ids[own_from:stop] != NO_PAGE
        for first, last in kept:
            gone[max(0, first // size - own_from) : max(0, last // size - own_from)] = False
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
        "_kept",
        "_kept_depth",
        "_origin",
        "_origin_depth",
        "_slot",
        "_slot_depth",
    )

    def __init__(self, component: TreeComponent, table: PageTable, accounts: PageAccounts) -> None:
        super().__init__(component, table, accounts)
        self.drop()

    def drop(self) -> None:
        self._slot = self._kept = self._origin = NO_PAGE
        self._slot_depth = self._kept_depth = self._begun_at = -1
        self._origin_depth = 0

    @property
    def slot(self) -> int:
        """The working slot, while a run goes on (−1: none)."""
        return self._slot

    def footprint(self, num_pages: int) -> int:
        return self._component.footprint(num_pages)

    def unspent(self, num_pages: int) -> int:
        return max(0, self._component.footprint(num_pages) - (self._slot != NO_PAGE))

    def own(self, first: int) -> PageIds:
        return np.array([slot for slot in (self._slot, self._kept) if slot != NO_PAGE], np.int32)

    def _first_held(self, receipt: Receipt, top: int) -> int:
        return receipt.depth - self._size  # that of the page which the held state ends

    def taken_over(self, depth: int) -> PageIds:
        own = self.own(0)
        self.drop()
        self._origin = int(self._ids[depth // self._size - 1])
        self._origin_depth = depth
        return own

    def prepare_run(self, start: int) -> list[StateCopy]:
        if self._slot_depth == start:
            if start % self._component.grid or not self._may_keep():
                self._begun_at, self._slot_depth = start, -1  # in place: no state until it ends
                return []
            self._give_up_kept()
            self._kept, self._kept_depth, self._slot = self._slot, start, NO_PAGE
        source = self._source(start)
        if self._slot == NO_PAGE:
            self._slot = int(self._accounts.take_of(self.index, 1)[0])
        self._begun_at = self._slot_depth = -1
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
        return self._kept != NO_PAGE or self._accounts.spare(self.index) >= 1

    def _give_up_kept(self) -> None:
        if self._kept != NO_PAGE:
            self._accounts.allocators[self.index].free(np.array([self._kept], np.int32))
            self._kept, self._kept_depth = NO_PAGE, -1

    def run_ended(self, depth: int, *, was_touched: bool) -> PageIds:
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

    def safe_depth(self, depth: int) -> int:
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


def make_parts(
    components: Sequence[TreeComponent], table: PageTable, accounts: PageAccounts
) -> list[LeasePart]:
    """What a fresh lease has of the components that need it."""
    return [
        (WindowPart if component.is_per_page else StatePart)(component, table, accounts)
        for component in components
    ]
