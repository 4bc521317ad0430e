"""Transfers between device and host, from their reservation to their commit (semantics §9).

Four beats: whoever wants one *plans* it on the tree and *reserves* target ids; here the path is
pinned and the jobs are *moved*; when the buffers are quiet, what has arrived is *committed* as far
as it is legal, and the rest goes home. Nothing is visible before its bytes are there.

Owns: the transfers under way, and what becomes of their ids. Refuses to know: why somebody wants
one, and who may take how many pages.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tiered_cache.layers import LayerProgress, load_failed, stale_load
from tiered_cache.transfer.copier import Direction
from tiered_cache.tree.components.base import NO_PAGES
from tiered_cache.tree.node import BASE
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


class Waiter(Protocol):
    """Somebody who needs a load. Told in its commit beat, while the load still holds the path."""

    @property
    def is_running(self) -> bool:
        """Whether a run may be reading the pages that it was given."""

    def on_load_ended(self, load: Transfer) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Retired:
    """Pages that go home when none of `readers` is running."""

    target: Tier
    component: int
    epoch: int
    ids: PageIds
    readers: list[Waiter]


class Transfer:
    """Pages `[start, depth)` (in tokens) of one component on their way from one tier to the other.

    A span (semantics §1.5): `node` ends at `depth`, whatever splits come. `num_moved`: pages whose
    bytes have arrived, from the root on; known when it has `moved`. `num_committed`: pages that are
    visible; known when it has `ended`.
    """

    __slots__ = (
        "batch",
        "by_layer",
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
        "pinned",
        "progress",
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
        self.device_ids: PageIds = NO_PAGES
        self.host_ids: PageIds = NO_PAGES
        self.pinned: Pinned
        self.batch: Batch | None = None
        self.has_moved = False
        self.num_moved = 0
        self.num_committed = 0
        self.error: BaseException | None = None
        self.waiters: dict[Waiter, None] = {}  # a dict for its order
        self.funder: Waiter | None = None
        self.ended = asyncio.Event()
        self.on_end: Callable[[Transfer], None] | None = None
        self.by_layer = False
        self.progress: LayerProgress | None = None
        self.started_at = 0.0

    @property
    def target_ids(self) -> PageIds:
        return self.device_ids if self.target is Tier.DEVICE else self.host_ids

    @property
    def kind(self) -> str:
        return "load" if self.target is Tier.DEVICE else "store"

    @property
    def num_pages(self) -> int:
        return len(self.device_ids)

    @property
    def is_complete(self) -> bool:
        """Whether all of it has become visible."""
        return self.num_committed == self.num_pages

    @property
    def is_given_up(self) -> bool:
        """Whether no more of its jobs are started: nobody needed it, or one has failed."""
        return self.batch is not None and not self.batch.is_wanted

    def __repr__(self) -> str:
        return f"<{self.kind} of [{self.start}:{self.depth}), {self.num_pages} pages>"


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
        stored: Callable[[Boundary], None],
    ) -> None:
        self._tree = tree
        self._page_size = tree.page_size
        self._tiers: dict[Tier, TierPages] = {Tier.DEVICE: device, Tier.HOST: host}
        self._mover = mover
        self._counters = counters
        self._changed = changed
        self._stored = stored
        self._loop = asyncio.get_running_loop()
        self._active: dict[Transfer, None] = {}  # a dict for its order
        self._retired: list[Retired] = []

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
        transfer = Transfer(Tier.HOST, boundary, start, component, self._tree.epoch)
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
        by_layer: bool = False,
    ) -> Transfer:
        """Copy rows that the tree has on the host to pages that the caller has taken. `funder`
        waits for it, and is who the pages were promised to.

        `by_layer`: its layers are waited for one by one, and it commits all or nothing.
        """
        transfer = Transfer(Tier.DEVICE, boundary, start, component, self._tree.epoch)
        transfer.by_layer = by_layer
        transfer.funder = funder
        transfer.waiters[funder] = None
        self._counters.loads += 1
        copier = self._mover.copier
        jobs = copier.plan(Direction.LOAD, component, device_ids, host_ids, by_layer=by_layer)
        transfer.progress = LayerProgress(copier.layers(component), jobs)
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
        on_job = partial(self._layers_moved, transfer) if transfer.by_layer else None
        transfer.batch = self._mover.start(jobs, partial(self._moved, transfer), on_job)
        return transfer

    @staticmethod
    def _layers_moved(load: Transfer) -> None:
        batch, progress = load.batch, load.progress
        assert batch is not None, "set when it began"
        assert progress is not None, "loads have it"
        done, jobs = batch.num_done, batch.jobs
        # A layer may be in several jobs, and the next one begin within a layer.
        moved = {layer for job in jobs[:done] for layer in job.layers or ()}
        if done < len(jobs):
            moved.difference_update(jobs[done].layers or ())
        progress.advance(len(moved))

    def join(self, load: Transfer, waiter: Waiter) -> None:
        """One more needs it."""
        load.waiters[waiter] = None
        self._counters.loads_joined += 1
        if load.has_moved:  # it waits for what is above it, which others may have published
            self._loop.call_soon(self._commit_loads)

    def leave(self, loads: Iterable[Transfer], waiter: Waiter) -> None:
        """One fewer does. A load that nobody needs ends soon, and keeps what has arrived
        (§9.2)."""
        for load in loads:
            if waiter in load.waiters:
                del load.waiters[waiter]
                if not load.waiters and not load.has_moved:
                    self._cancel(load)
        self._commit_loads()

    @staticmethod
    async def first_failure(loads: Sequence[Transfer]) -> Transfer | None:
        """Wait for loads, root first; the first that has not brought all of it, or None."""
        for load in loads:
            await load.ended.wait()
            if not load.is_complete:
                return load
        return None

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
        if not transfer.by_layer:
            transfer.num_moved = batch.num_pages_done
        elif batch.num_done == len(batch.jobs):
            transfer.num_moved = transfer.num_pages
        if transfer.epoch != self._tree.epoch:
            self._end_stale(transfer)
        elif transfer.target is Tier.HOST:
            self._commit(transfer)
        else:
            self._commit_loads()

    def _commit_loads(self) -> None:
        """Commit what has arrived and can be reached from the root; drop what nobody waits for.

        Root first, so that one load's commit is seen by the one below it.
        """
        moved = [load for load in self._active if load.has_moved and load.epoch == self._tree.epoch]
        # The first component's before others': nothing is there without it.
        for load in sorted(moved, key=lambda load: (load.component, load.start)):
            if load not in self._active:
                continue  # committed by what the commit of another has set off
            needs_to = load.start if load.component == BASE else load.depth
            if self._tree.is_on_device(load.node, needs_to):
                self._commit(load)
            elif not load.waiters or (load.component != BASE and not self._is_coming(load)):
                load.num_moved = 0
                self._commit(load)

    def _is_coming(self, load: Transfer) -> bool:
        """Whether the first component's part of what a load brings is on its way, too."""
        node: Node | None = load.node
        while node is not None and node.parent is not None:
            data = node.data[BASE]
            if data.value is None and data.pending is None:
                return False
            node = node.parent
        return True

    def _commit(self, transfer: Transfer) -> None:
        tree, count, index = self._tree, transfer.num_moved, transfer.component
        del self._active[transfer]
        ids = transfer.target_ids
        unused = NO_PAGES
        if count:
            depth = transfer.start + count * self._page_size
            boundary = Boundary(transfer.node, depth)
            unused = tree.commit_transfer(boundary, index, transfer.target, ids[:count])
        allocator = self._tiers[transfer.target].allocators[index]
        allocator.free(ids[count:])
        transfer.num_committed = count
        self._count(transfer)
        for waiter in tuple(transfer.waiters):
            waiter.on_load_ended(transfer)
        if transfer.funder is not None and transfer.funder not in transfer.waiters:
            transfer.funder.on_load_ended(transfer)
        self._retire(transfer, unused)
        tree.unpin_transfer(transfer.pinned)
        if count and transfer.target is Tier.HOST:
            self._stored(boundary)
        if transfer.progress is not None:
            if transfer.is_complete:
                transfer.progress.finish()
            else:
                transfer.progress.fail(load_failed(transfer.error))
        self._tell_ended(transfer)

    def _tell_ended(self, transfer: Transfer) -> None:
        transfer.ended.set()
        if transfer.on_end is not None:
            transfer.on_end(transfer)
        self._changed()

    def _retire(self, transfer: Transfer, ids: PageIds) -> None:
        """Target pages that the tree did not take, because somebody else had published the same
        meanwhile. A run of a layer-wise lease may still be reading them."""
        if not len(ids):
            return
        readers = [waiter for waiter in transfer.waiters if waiter.is_running]
        if readers:
            retired = Retired(transfer.target, transfer.component, self._tree.epoch, ids, readers)
            self._retired.append(retired)
        else:
            self._tiers[transfer.target].allocators[transfer.component].free(ids)

    def release_retired(self) -> None:
        """A run has ended."""
        for retired in tuple(self._retired):
            if any(reader.is_running for reader in retired.readers):
                continue
            self._retired.remove(retired)
            tier = self._tiers[retired.target]
            if retired.epoch == self._tree.epoch:
                tier.allocators[retired.component].free(retired.ids)
            else:
                tier.give_back_stale(tier.only(retired.component, retired.ids))

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
        tier.give_back_stale(tier.only(transfer.component, transfer.target_ids))
        self._tell_ended(transfer)

    # --- life cycle -------------------------------------------------------------------------------

    def cancel_all(self, *, stores: bool = True) -> None:
        """The cache is being closed: end everything (or all loads) as soon as the copy threads
        allow, and let nobody wait for that."""
        for transfer in tuple(self._active):
            if transfer.target is Tier.HOST and not stores:
                continue
            if not transfer.has_moved:
                self._cancel(transfer)
            transfer.ended.set()
            if transfer.progress is not None:
                transfer.progress.fail(load_failed(None))

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
            if transfer.progress is not None:
                transfer.progress.fail(stale_load())

    # --- looking ----------------------------------------------------------------------------------

    def held(self, tier: Tier) -> list[list[PageIds]]:
        """Pages of this epoch on a tier that are no longer free and not yet the tree's: by
        component, for each that holds some."""
        held = [
            (transfer.component, transfer.target_ids)
            for transfer in self._active
            if transfer.target is tier and transfer.epoch == self._tree.epoch
        ]
        held += [
            (retired.component, retired.ids)
            for retired in self._retired
            if retired.target is tier and retired.epoch == self._tree.epoch
        ]
        return [self._tiers[tier].only(*pages) for pages in held]

    def num_in_flight(self, tier: Tier, component: int) -> int:
        """Target pages of this epoch's transfers."""
        return sum(
            transfer.num_pages
            for transfer in self._active
            if (transfer.target, transfer.component) == (tier, component)
            and transfer.epoch == self._tree.epoch
        )

    def num_retired(self, tier: Tier, component: int) -> int:
        """Pages of this epoch that nobody needs, and a run may still be reading."""
        return sum(
            len(retired.ids)
            for retired in self._retired
            if (retired.target, retired.component) == (tier, component)
            and retired.epoch == self._tree.epoch
        )

    def __iter__(self) -> Iterator[Transfer]:
        return iter(tuple(self._active))

    def __len__(self) -> int:
        return len(self._active)
