"""What a lease does to get what the host has of its prefix: cover, wait, take over, or do without.

Owns: the loads that a lease waits for, and how many pages of its promise are with them. Refuses to
know: how pages are copied (transfers), and what the lease does with its prefix.

Pages that are loaded come out of the lease's own promise, so it needs nobody's leave; and whatever
does not come is promised to it again in the very step in which it goes home. A load also holds what
the device has on its path, and that comes out of the promise, too, where there is no other room. If
others hold it when the load has ended, and there is still no other, the lease starts over.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, cast

from tiered_cache.tree.node import BASE
from tiered_cache.types import Boundary, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered_cache.controller import HybridCacheController
    from tiered_cache.lease import Lease
    from tiered_cache.transfers import Transfer


class PrefixLoad:
    """One per lease that found something on the host.

    Attributes:
        pages: out of the lease's promise, with loads that have not ended, or held on their path.
        has_lost_room: not all of that could be promised again.
        end: with `layerwise`, how far (in tokens) the lease's table names pages that are a load's
            until it has ended; 0 otherwise.
        has_failed: a load that the lease was using did not come, and a run is using it still.
        shortened: why what the host has is not all here, for people.
    """

    __slots__ = (
        "_beside",
        "_brought",
        "_controller",
        "_lease",
        "_limit",
        "_loads",
        "_using",
        "_waits",
        "end",
        "has_failed",
        "has_lost_room",
        "pages",
        "shortened",
    )

    def __init__(self, lease: Lease, controller: HybridCacheController) -> None:
        self._lease = lease
        self._controller = controller
        # All that it has waited for, and up to where (in tokens): others' may leave its path.
        self._loads: dict[Transfer, int] = {}
        self._brought = (sys.maxsize, 0)  # from where to where the first component has come
        self._using: Sequence[Transfer] = ()  # while the lease's table names their pages
        self._limit = 0  # tokens that are wanted
        self._waits: asyncio.Timeout | None = None
        self.pages = 0
        self._beside = 0  # of `pages`, what no load of its own is bringing
        self.has_lost_room = False
        self.end = 0
        self.has_failed = False
        self.shortened = ""

    @property
    def is_under_way(self) -> bool:
        """Whether the lease is using pages that are a load's."""
        return bool(self._using)

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more: it has come, or the lease has fallen back."""
        return not (self._using or self.has_failed)

    @property
    def is_running(self) -> bool:
        return self._lease.is_running

    # --- wait -------------------------------------------------------------------------------------

    async def bring(self, limit: int, timeout: float | None, *, layerwise: bool) -> None:
        """Bring what the host has up to `limit` tokens; be content with less when it does not come.

        With `layerwise` the lease can use it before it is there.
        """
        controller, transfers = self._controller, self._controller.transfers
        assert transfers is not None, "there is a host tier"
        if timeout == 0:
            self.shortened = "load_timeout is 0"
            return
        self._limit = limit
        try:
            async with asyncio.timeout(timeout) as self._waits:
                # A load of somebody else's may fail above this lease's own: then plan once more,
                # and what has arrived below is kept.
                for _ in range(2):
                    wanted = self._cover(limit, layerwise=layerwise)
                    # One that others have given up ends early, though nothing has failed.
                    if layerwise and not any(load.is_given_up for load in wanted):
                        self._use(wanted)
                        return
                    own = [load for load in wanted if load.funder is self]
                    failed = await transfers.first_failure(wanted)
                    controller.check()
                    if failed is None or failed in own:
                        break
        except TimeoutError:
            controller.counters.load_timeouts += 1
            self.shortened = "the load did not end in time"
            if timeout is not None:
                self.shortened = f"the load did not end within {timeout} s"
        finally:
            self._waits = None
            if not self._using:
                self.leave()
        if self.pages and self._lease.epoch == controller.epoch:
            self._settle()
            self.has_lost_room = self._beside > 0
            if self.pages and not self.has_lost_room:
                await self._be_promised_again()

    def wait_no_longer(self) -> None:
        """As if its time limit had come."""
        if self._waits is not None:
            self._waits.reschedule(self._controller.now())

    def _cover(self, limit: int, *, layerwise: bool) -> list[Transfer]:
        """Join the loads that bring a part of what is missing, start one for each other part."""
        lease, controller, tree = self._lease, self._controller, self._controller.tree
        receipt, transfers = lease.receipt, controller.transfers
        if lease.closed or lease.epoch != controller.epoch:
            return []
        assert receipt is not None, "granted leases hold a receipt"
        assert transfers is not None, "there is a host tier"
        lease.rematch(limit)  # planned once more: others may have published meanwhile
        boundary = tree.match_deeper(receipt, lease.key, limit, device_only=False)
        if boundary is None or boundary.depth - receipt.depth < controller.load_back_threshold:
            return []
        for part in controller.sparse:  # before any is begun: without all, none is of use
            if not self._has_room(part.index, boundary):
                self.shortened = f"there is no room for {part.id}"
                return []
        # What must not be there without the first component comes first, and waits for it: then all
        # of it becomes visible in one step.
        loads: list[Transfer] = []
        for part in reversed(tree.components):
            start = receipt.depth if part.index == BASE else 0
            for piece in tree.plan_transfer(boundary, part.index, Tier.DEVICE, start):
                if piece.ids is None:
                    load = cast("Transfer", piece.pending)
                    transfers.join(load, self)
                else:
                    ids = controller.accounts.take_of(part.index, len(piece.ids))
                    if part.index == BASE:
                        self.pages += len(ids)
                    lease.settle_promise()
                    end = Boundary(boundary.node, piece.stop)
                    load = transfers.load(
                        end, piece.start, part.index, ids, piece.ids, self, by_layer=layerwise
                    )
                loads.append(load)
                self._loads[load] = piece.stop
        self._settle()
        return loads

    def _has_room(self, index: int, boundary: Boundary) -> bool:
        """Whether there are pages for what is missing of a component with tombstones, beside what
        is promised, until the lease's own are free again. (Those of the first are its own.)"""
        pieces = self._controller.tree.plan_transfer(boundary, index, Tier.DEVICE)
        wanted = sum(len(piece.ids) for piece in pieces if piece.ids is not None)
        return wanted <= self._controller.accounts.spare(index)

    async def _be_promised_again(self) -> None:
        """Its pages are with a copier that has not ended, and the lease needs others for the same
        tokens."""
        controller = self._controller
        for load in self._loads:
            if load.funder is self:
                load.funder = None

        def attempt() -> bool:
            is_current = self._lease.epoch == controller.epoch
            # Of windows and states nothing was promised for it.
            if is_current and controller.accounts.spare(BASE) < self.pages:
                return False
            self.pages = self._beside = 0
            self._lease.settle_promise()
            return True

        await controller.admission.admit_first(attempt, controller.check)

    def _settle(self) -> None:
        """Be promised what is not with a load, as far as there is room."""
        lease, accounts = self._lease, self._controller.accounts
        self.pages -= self._beside
        self._beside = max(0, lease.unpromised - accounts.spare(BASE))
        self.pages += self._beside
        lease.settle_promise()

    async def settled(self) -> None:
        """Until no load has pages out of the lease's promise any more."""
        for load in self._loads:
            if load.funder is self:
                await load.ended.wait()
        if self.pages:
            await self._be_promised_again()

    def leave(self) -> None:
        """The lease does not need them any more."""
        self._using = ()
        if self._controller.transfers is not None:
            self._controller.transfers.leave(self._loads, self)

    # --- end --------------------------------------------------------------------------------------

    def on_load_ended(self, load: Transfer) -> None:
        """In a load's commit beat, while it still holds its path: go on from what it brought."""
        lease, controller = self._lease, self._controller
        if load.funder is self:
            if load.component == BASE:
                self.pages -= load.num_pages
            load.funder = None
        if lease.closed or lease.epoch != controller.epoch:
            return
        if load.error is not None:
            self.shortened = f"a load from the host failed: {load.error}"
        if self in load.waiters:
            if load.component == BASE:
                stop = load.start + load.num_committed * controller.page_size
                first, last = self._brought
                self._brought = (min(first, load.start), max(last, stop))
            lease.go_on_from(*self._brought, self.end or self._limit)
        if self._using:
            self._check_used(load)
        self._settle()

    # --- layer by layer ---------------------------------------------------------------------------

    def _use(self, loads: Sequence[Transfer]) -> None:
        """Let the lease's table name the pages that are coming (semantics §9.9)."""
        lease, size = self._lease, self._controller.page_size
        start = lease.committed
        for load in loads:
            stop = self._loads[load]
            ids = load.device_ids[(start - load.start) // size : (stop - load.start) // size]
            lease.table.write(start // size, [ids])
            start = stop
        if loads:
            self._using = loads
            self.end = start
            lease.use_load(start, self._controller.layer_waits(loads))

    def _check_used(self, ended: Transfer) -> None:
        """One of the loads in use has ended."""
        if not ended.is_complete:
            self.leave()
            self.has_failed = True
            if not self._lease.is_running:
                self._lease.fall_back()
        elif all(load.is_complete for load in self._using):
            self._using = ()
            self.end = 0
            self._lease.load_is_complete()
