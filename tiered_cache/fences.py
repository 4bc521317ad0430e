"""Pages that were published before they were written: a GPU computes on after `commit` (§9.4).

A fence stands between the two moments. While it stands nobody copies its pages to the host, they
stay where they are, and whoever matches them is told. What its lease gives up meanwhile stays the
lease's: the device may still read it, too. Owns: the fences that stand, and what is given up under
them. Refuses to know: what is computed, and when pages are copied.
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered_cache.tree.components.base import NO_PAGES, join
from tiered_cache.tree.node import BASE
from tiered_cache.types import NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tiered_cache.accounts import PageAccounts
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import PageIds


class Fence:
    """`ids`: per component, ids that are not written. `lifted` is set when they are, or when
    whoever said so has failed; `passed` then, or when a reset has made them meaningless."""

    __slots__ = ("ids", "lifted", "on_lift", "passed")

    def __init__(self, ids: Sequence[PageIds], on_lift: Callable[[], None]) -> None:
        self.ids = ids
        self.lifted = asyncio.Event()
        self.passed = asyncio.Event()
        self.on_lift = on_lift


class Fences:
    """All fences of a cache that stand. There are as many as commits under way, so they are looked
    through one by one.

    `computes_on`: runs are known to go on when they have returned. Where nobody has said so, the
    first fence does.
    """

    __slots__ = ("_changed", "_standing", "computes_on")

    def __init__(self, changed: Callable[[], None], *, computes_on: bool = False) -> None:
        self._standing: list[Fence] = []
        self._changed = changed
        self.computes_on = computes_on

    def raise_over(self, ids: Sequence[PageIds], on_lift: Callable[[], None]) -> Fence:
        """From now on these ids of each component are not written yet; `on_lift` is called when
        they are."""
        fence = Fence(ids, on_lift)
        self._standing.append(fence)
        self.computes_on = True
        return fence

    def lift(self, fence: Fence) -> None:
        """They are written."""
        if fence in self._standing:
            self._standing.remove(fence)
            fence.lifted.set()
            fence.passed.set()
            fence.on_lift()
            self._changed()

    def over(self, ids: PageIds, component: int = BASE) -> list[Fence]:
        """The fences over some of these ids of a component."""
        if not self._standing:
            return []
        return [fence for fence in self._standing if np.isin(ids, fence.ids[component]).any()]

    def reset(self) -> None:
        """Nothing is in the tree any more; who waits goes on. The fences go on for their owners."""
        for fence in self._standing:
            fence.ids = [NO_PAGES] * len(fence.ids)
            fence.passed.set()

    def __len__(self) -> int:
        return len(self._standing)


@dataclass(slots=True)
class _Left:
    """What was given up while `fences` stood (None: one of them is still to be raised). Per
    component, own ids, and those of the tree that `receipts` hold."""

    fences: Sequence[Fence] | None
    own: list[PageIds]
    tree: list[PageIds]
    receipts: Sequence[Receipt] = ()

    @property
    def is_over(self) -> bool:
        return self.fences is not None and all(fence.lifted.is_set() for fence in self.fences)


class LeaseFences:
    """A lease's fences that stand, and what it has given up under them.

    Nobody else has that before the fences that stood then are lifted, however many have been raised
    since: their device may still touch it, and a load would overwrite it on a stream of its own.
    The last run's fence comes with the commit that follows it, so what is given up in between waits
    for that, too. The lease itself may take what was its own again, at once: its runs follow each
    other. So a loop that is always ahead of its device needs no more than one that is not.
    """

    __slots__ = ("_accounts", "_all", "_is_open", "_left", "_standing", "_tree")

    def __init__(self, tree: RadixTree, accounts: PageAccounts, fences: Fences) -> None:
        self._tree = tree
        self._accounts = accounts
        self._all = fences
        self._is_open = False  # a run has returned, and its fence may still come
        self._standing: Sequence[Fence] = ()
        self._left: Sequence[_Left] = ()

    # --- fences -----------------------------------------------------------------------------------

    def run_ended(self) -> None:
        """It has returned; where devices compute on, a fence over it may come."""
        self._is_open = self._all.computes_on

    def add(self, fence: Fence) -> None:
        self._standing = [*self._standing, fence]

    def settle(self) -> bool:
        """The fence over the last run stands, or there is none to come. Whether anything has gone
        home."""
        if not self._is_open:
            return False
        self._is_open = False
        for batch in self._left:
            if batch.fences is None:
                batch.fences = self._standing
        return self._let_go()

    def look_again(self, *, is_stale: bool) -> None:
        """Some are lifted: what no other stood over goes home. `is_stale`: a reset came since."""
        self._standing = [fence for fence in self._standing if not fence.lifted.is_set()]
        self._let_go(is_stale=is_stale)

    def _let_go(self, *, is_stale: bool = False) -> bool:
        gone = [batch for batch in self._left if batch.is_over]
        if gone:
            self._left = [batch for batch in self._left if not batch.is_over]
        for batch in gone:
            if is_stale:
                self._accounts.give_back_stale(batch.own)
                self._accounts.give_back_stale(batch.tree)
            else:
                self._accounts.give_back(batch.own)
                for receipt in batch.receipts:
                    self._tree.let_go(receipt)
        return bool(gone)

    def __len__(self) -> int:
        """How many stand."""
        return len(self._standing)

    # --- what is given up -------------------------------------------------------------------------

    def give_back(self, pages: Sequence[PageIds]) -> None:
        """Own ids of each component that the lease does not need any more."""
        if self.keeps:
            self._leave([ids[ids != NO_PAGE] for ids in pages], self._none())
        else:
            self._accounts.give_back(pages)

    def give_back_of(self, index: int, ids: PageIds) -> None:
        """`give_back` of one component."""
        if len(ids):
            self.give_back(self._accounts.only(index, ids))

    def keep(self, index: int, ids: PageIds, receipt: Receipt) -> None:
        """Ids of the tree that the lease has let go of are held by `receipt` instead."""
        self._leave(self._none(), self._accounts.only(index, ids), receipt)

    def _leave(self, own: list[PageIds], tree: list[PageIds], *receipts: Receipt) -> None:
        fences = None if self._is_open else self._standing
        self._left = [*self._left, _Left(fences, own, tree, receipts)]

    @property
    def keeps(self) -> bool:
        """Whether what is given up now does not go home at once."""
        return bool(self._standing) or self._is_open

    def forget(self) -> None:
        """The lease has ended, and given all of its own back: nobody holds the rest any more."""
        left, self._left = self._left, ()
        for batch in left:
            for receipt in batch.receipts:
                self._tree.let_go(receipt)
        self._is_open = False

    def take(self, num_pages: int) -> list[PageIds]:
        """Ids for so many pages, of every component (−1 where it has none per page): what was given
        up first, then as `PageAccounts.take`."""
        if not self._left:
            return self._accounts.take(num_pages)
        return [
            self.take_of(component.index, num_pages)
            if component.is_per_page
            else np.full(num_pages, NO_PAGE, np.int32)
            for component in self._tree.components
        ]

    def take_of(self, index: int, num_ids: int) -> PageIds:
        """`take` of one component."""
        taken, missing = [], num_ids
        for batch in reversed(self._left):  # the last has the longest to wait
            ids = batch.own[index]
            batch.own[index], ids = ids[missing:], ids[:missing]
            taken.append(ids)
            missing -= len(ids)
        if missing:
            taken.append(self._accounts.take_of(index, missing))
        return join(taken)

    def num_left(self, index: int) -> int:
        """Own ids of a component that it has given up and may take again."""
        return sum(len(batch.own[index]) for batch in self._left)

    def own(self, index: int) -> PageIds:
        """These ids."""
        return join([batch.own[index] for batch in self._left])

    def of_tree(self, index: int) -> PageIds:
        """Ids of a component that are the tree's, and held for a device alone."""
        return join([batch.tree[index] for batch in self._left])

    @property
    def has_left(self) -> bool:
        """Whether anything is kept that was given up."""
        return bool(self._left)

    def _none(self) -> list[PageIds]:
        return [NO_PAGES] * len(self._accounts.allocators)


def is_device_event(ready: Any) -> bool:
    """Whether it blocks a thread until a device has come there (`torch.cuda.Event`)."""
    return not inspect.isawaitable(ready) and callable(getattr(ready, "synchronize", None))


def as_awaitable(ready: Any) -> Awaitable[object]:
    """What a caller gave as `ready`, as something to await on the loop.

    An awaitable, or an event with an async `wait` (`asyncio.Event`). A coroutine becomes a task.

    Raises:
        TypeError: neither.
    """
    if inspect.isawaitable(ready):
        return ready
    wait = getattr(ready, "wait", None)
    if inspect.iscoroutinefunction(wait):
        return wait()
    raise TypeError(f"ready must be awaitable or an event, not {type(ready).__name__}")
