"""Transfers between device and host, from their reservation to their commit (semantics §9).

Four beats: whoever wants one *plans* it on the tree and *reserves* target ids; here the path is
pinned and the jobs are *moved*; when the buffers are quiet, what has arrived is *committed* as far
as it is legal, and the rest goes home. Nothing is visible before its bytes are there.

Owns: the transfers under way, and what becomes of their ids. Refuses to know: why somebody wants
one, and who may take how many pages.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from tiered_cache.transfer.copier import Direction
from tiered_cache.types import Boundary, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tiered_cache.accounts import HostPages, PageAccounts, TierPages
    from tiered_cache.stats import Counters
    from tiered_cache.transfer.copier import CopyJob
    from tiered_cache.transfer.mover import Batch, Mover
    from tiered_cache.tree.node import Node
    from tiered_cache.tree.plans import Pinned
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import PageIds

NO_IDS: Final = np.empty(0, np.int32)


class Waiter(Protocol):
    """Somebody who needs a load. Told in its commit beat, while the load still holds the path."""

    def on_load_ended(self, load: Transfer) -> None: ...


class Transfer:
    """Pages `[start, depth)` (in tokens) of one component on their way from one tier to the other.

    A span (semantics §1.5): `node` ends at `depth`, whatever splits come. `num_moved`: pages whose
    bytes have arrived, from the root on; known when it has `moved`. `num_committed`: pages that are
    visible; known when it has `ended`.
    """

    __slots__ = (
        "batch",
        "component",
        "depth",
        "device_ids",
        "ended",
        "epoch",
        "error",
        "funder",
        "has_moved",
        "host_ids",
        "node",
        "num_committed",
        "num_moved",
        "on_end",
        "on_progress",
        "pinned",
        "start",
        "started_at",
        "target",
        "waiters",
    )

    def __init__(
        self, target: Tier, boundary: Boundary, start: int, component: int, epoch: int
    ) -> None:
        self.target = target
        self.node: Node = boundary.node
        self.depth = boundary.depth
        self.start = start
        self.component = component
        self.epoch = epoch
        self.device_ids: PageIds = NO_IDS
        self.host_ids: PageIds = NO_IDS
        self.pinned: Pinned
        self.batch: Batch | None = None
        self.has_moved = False
        self.num_moved = 0
        self.num_committed = 0
        self.error: BaseException | None = None
        self.waiters: set[Waiter] = set()
        self.funder: Waiter | None = None
        self.ended = asyncio.Event()
        self.on_end: Callable[[Transfer], None] | None = None
        self.on_progress: Callable[[Transfer], None] | None = None
        self.started_at = 0.0

    @property
    def target_ids(self) -> PageIds:
        return self.device_ids if self.target is Tier.DEVICE else self.host_ids

    @property
    def num_pages(self) -> int:
        return len(self.device_ids)

    @property
    def is_complete(self) -> bool:
        """Whether all of it has become visible."""
        return self.num_committed == self.num_pages

    def __repr__(self) -> str:
        name = "load" if self.target is Tier.DEVICE else "store"
        return f"<{name} of [{self.start}:{self.depth}), {self.num_pages} pages>"


class Transfers:
    """All transfers of a cache. Every method is atomic on the loop."""

    def __init__(
        self,
        tree: RadixTree,
        device: PageAccounts,
        host: HostPages,
        mover: Mover,
        counters: Counters,
        changed: Callable[[], None],
    ) -> None:
        self._tree = tree
        self._page_size = tree.page_size
        self._tiers: dict[Tier, TierPages] = {Tier.DEVICE: device, Tier.HOST: host}
        self._mover = mover
        self._counters = counters
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._active: dict[Transfer, None] = {}  # a dict for its order

    # --- start ------------------------------------------------------------------------------------

    def store(
        self,
        boundary: Boundary,
        start: int,
        component: int,
        device_ids: PageIds,
        host_ids: PageIds,
        on_end: Callable[[Transfer], None],
    ) -> Transfer:
        """Copy pages that the tree has on the device to rows that the caller has taken."""
        transfer = Transfer(Tier.HOST, boundary, start, component, self._tree.receipts.epoch)
        transfer.on_end = on_end
        self._counters.stores += 1
        jobs = self._mover.copier.plan(Direction.STORE, component, device_ids, host_ids)
        return self._begin(transfer, device_ids, host_ids, jobs)

    def load(
        self,
        boundary: Boundary,
        start: int,
        component: int,
        device_ids: PageIds,
        host_ids: PageIds,
        funder: Waiter,
        *,
        on_progress: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Copy rows that the tree has on the host to pages that the caller has taken. `funder`
        waits for it, and is who the pages were promised to.

        With `on_progress` it goes layer by layer, and is told after each job; it commits all or
        nothing.
        """
        transfer = Transfer(Tier.DEVICE, boundary, start, component, self._tree.receipts.epoch)
        if on_progress is not None:
            transfer.on_progress = on_progress
        transfer.funder = funder
        transfer.waiters.add(funder)
        self._counters.loads += 1
        jobs = self._mover.copier.plan(
            Direction.LOAD, component, device_ids, host_ids, by_layer=on_progress is not None
        )
        return self._begin(transfer, device_ids, host_ids, jobs)

    def _begin(
        self, transfer: Transfer, device_ids: PageIds, host_ids: PageIds, jobs: Sequence[CopyJob]
    ) -> Transfer:
        transfer.device_ids, transfer.host_ids = device_ids, host_ids
        boundary = Boundary(transfer.node, transfer.depth)
        transfer.pinned = self._tree.pin_transfer(
            boundary, transfer.start, transfer.component, transfer.target, transfer
        )
        transfer.node = transfer.pinned.receipt.node
        transfer.started_at = self._loop.time()
        self._active[transfer] = None
        on_job = None if transfer.on_progress is None else partial(transfer.on_progress, transfer)
        transfer.batch = self._mover.start(jobs, partial(self._moved, transfer), on_job)
        return transfer

    def join(self, load: Transfer, waiter: Waiter) -> None:
        """One more needs it."""
        load.waiters.add(waiter)
        self._counters.loads_joined += 1

    def leave(self, loads: Iterable[Transfer], waiter: Waiter) -> None:
        """One fewer does. A load that nobody needs ends soon, and keeps what has arrived
        (§9.2)."""
        for load in loads:
            if waiter in load.waiters:
                load.waiters.discard(waiter)
                if not load.waiters and not load.has_moved:
                    self._cancel(load)
        self._commit_loads()

    def _cancel(self, transfer: Transfer) -> None:
        assert transfer.batch is not None, "set when it began"
        self._mover.cancel(transfer.batch)

    # --- end --------------------------------------------------------------------------------------

    def _moved(self, transfer: Transfer) -> None:
        """The buffers are quiet."""
        batch = transfer.batch
        assert batch is not None, "set when it began"
        transfer.has_moved = True
        transfer.error = batch.error
        if transfer.on_progress is None:
            transfer.num_moved = batch.num_pages_done
        elif batch.num_done == len(batch.jobs):
            transfer.num_moved = transfer.num_pages
        if transfer.epoch != self._tree.receipts.epoch:
            self._end_stale(transfer)
        elif transfer.target is Tier.HOST:
            self._commit(transfer)
        else:
            self._commit_loads()

    def _commit_loads(self) -> None:
        """Commit what has arrived and can be reached from the root; drop what nobody waits for.

        Root first, so that one load's commit is seen by the one below it.
        """
        moved = [load for load in self._active if load.has_moved and load.epoch == self._epoch]
        for load in sorted(moved, key=lambda load: load.start):
            if self._tree.is_on_device(load.node, load.start):
                self._commit(load)
            elif not load.waiters:
                load.num_moved = 0
                self._commit(load)

    @property
    def _epoch(self) -> int:
        return self._tree.receipts.epoch

    def _commit(self, transfer: Transfer) -> None:
        tree, count, index = self._tree, transfer.num_moved, transfer.component
        del self._active[transfer]
        ids = transfer.target_ids
        unused = NO_IDS
        if count:
            depth = transfer.start + count * self._page_size
            boundary = Boundary(transfer.node, depth)
            unused = tree.commit_transfer(boundary, index, transfer.target, ids[:count])
        allocator = self._tiers[transfer.target].allocators[index]
        allocator.free(unused)
        allocator.free(ids[count:])
        transfer.num_committed = count
        self._count(transfer)
        for waiter in tuple(transfer.waiters):
            waiter.on_load_ended(transfer)
        if transfer.funder is not None and transfer.funder not in transfer.waiters:
            transfer.funder.on_load_ended(transfer)
        tree.unpin_transfer(transfer.pinned)
        transfer.ended.set()
        if transfer.on_end is not None:
            transfer.on_end(transfer)
        self._changed()

    def _count(self, transfer: Transfer) -> None:
        counters, failed = self._counters, transfer.error is not None
        if transfer.target is Tier.DEVICE:
            counters.pages_loaded += transfer.num_committed
            counters.loads_failed += failed
        else:
            counters.pages_stored += transfer.num_committed
            counters.stores_failed += failed

    def _end_stale(self, transfer: Transfer) -> None:
        del self._active[transfer]
        tier = self._tiers[transfer.target]
        tier.give_back_stale(self._by_component(transfer))
        transfer.ended.set()
        if transfer.on_end is not None:
            transfer.on_end(transfer)
        self._changed()

    # --- life cycle -------------------------------------------------------------------------------

    def cancel_all(self) -> None:
        """End everything as soon as the copy threads allow."""
        for transfer in tuple(self._active):
            if not transfer.has_moved:
                self._cancel(transfer)

    def reset(self) -> None:
        """The tree has forgotten everything: nothing will be committed, and nobody waits any more.

        What runs keeps its target ids quarantined until it has ended.
        """
        for transfer in tuple(self._active):
            transfer.waiters.clear()
            transfer.funder = None
            if transfer.has_moved:  # its buffers are quiet; it only waited for others
                self._end_stale(transfer)
            else:
                transfer.ended.set()
                self._cancel(transfer)

    # --- looking ----------------------------------------------------------------------------------

    def held(self, tier: Tier) -> list[list[PageIds]]:
        """Target ids on a tier, by transfer and component."""
        return [
            self._by_component(transfer)
            for transfer in self._active
            if transfer.target is tier
        ]

    def num_in_flight(self, tier: Tier, component: int) -> int:
        """Target pages of this epoch's transfers."""
        return sum(
            transfer.num_pages
            for transfer in self._active
            if (transfer.target, transfer.component) == (tier, component)
            and transfer.epoch == self._epoch
        )

    def _by_component(self, transfer: Transfer) -> list[PageIds]:
        ids: list[PageIds] = [NO_IDS] * len(self._tree.components)
        ids[transfer.component] = transfer.target_ids
        return ids

    def __iter__(self) -> Iterator[Transfer]:
        return iter(tuple(self._active))

    def __len__(self) -> int:
        return len(self._active)
