"""What a lease does to be the same on all ranks of a model (semantics §10.10).

Owns: the questions on its way to its prefix and to each chunk, and what follows from the answers.
Refuses to know: how ranks talk (ranks), and how a lease holds what it gets.

    how much has each rank?            the least is what they go for
    is it rank 0's turn to admit it?   then the others do: so all admit in one order
    has each admitted it?              or none
    has each got as much?              or all start over, with the least

Whoever sees an answer sees what all see, so all go the same way: nothing that only one knows
decides after it. A reset that comes between two questions is part of the next offer, one that comes
after the last makes the lease stale.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final
from zlib import crc32

from tiered_cache.errors import AdmissionTimeout, CapacityError, RanksError
from tiered_cache.ranks import EQUAL
from tiered_cache.types import MatchPrefixParams

if TYPE_CHECKING:
    from tiered_cache.chunk import Chunk
    from tiered_cache.controller import HybridCacheController
    from tiered_cache.lease import Lease
    from tiered_cache.ranks import Limit, Operation
    from tiered_cache.tree.locks import Receipt

ADMITTED: Final = 1
WHOLE: Final = 2
"""Marks that ranks offer: the lease is admitted here, and holds all that it was to hold."""

HAS_PAGES: Final = 1
IS_CLEAR: Final = 2
"""There are pages for a chunk, and nobody else is computing it."""


class JointGrant:
    """One per lease, while it is being granted."""

    def __init__(
        self, lease: Lease, controller: HybridCacheController, operation: Operation
    ) -> None:
        self._lease = lease
        self._controller = controller
        self._operation = operation

    async def run(self, timeout: float | None, load_timeout: float | None) -> None:
        """The way of a request to its prefix, on all ranks. Time is judged on rank 0.

        Raises:
            AdmissionTimeout: on all ranks; nothing is held. RanksError: a rank has given up.
        """
        lease, controller, operation = self._lease, self._controller, self._operation
        began, size = controller.now(), controller.page_size
        place = controller.admission.take_place()
        limit = lease.reusable
        prompt = EQUAL - crc32(lease.key.data)
        await lease.prefetch(limit, timeout)  # storage → host
        while True:
            match = controller.tree.match_prefix(MatchPrefixParams(lease.key, limit))
            agreed = await operation.agree([*range(0, match.best_length + 1, size), prompt])
            controller.check()
            if prompt not in agreed:
                raise RanksError(f"{operation.name} is of another prompt on another rank")
            limit = min(limit, max(agreed))
            left = None
            if timeout is not None:
                left = max(0.0, timeout - (controller.now() - began))
            if await self._admit(limit, left, place):  # match → hold
                return
            agreed = await self._load_back(limit, load_timeout)  # host → device
            controller.check()
            if min(agreed) <= EQUAL:
                return
            lease.start_over()
            limit = max(agreed)

    # --- admission --------------------------------------------------------------------------------

    async def _admit(self, limit: int, timeout: float | None, place: int) -> bool:
        """Hold what the device has of the first `limit` tokens; whether that is all of them, on all
        ranks."""
        lease, controller, operation = self._lease, self._controller, self._operation
        until = None if timeout is None else operation.limit(_nothing, timeout)
        if operation.is_first:
            is_admitted = await self._admit_in_turn(limit, timeout, place)
            agreed = await operation.agree([ADMITTED] if is_admitted else [])
        else:
            agreed = await operation.agree([ADMITTED])  # when rank 0 has
            is_admitted = ADMITTED in agreed and await self._admit_after(limit, until)
        controller.check()
        if ADMITTED in agreed:
            is_whole = is_admitted and not lease.is_stale and lease.prefix_len == limit
            marks = (ADMITTED, is_admitted), (WHOLE, is_whole)
            agreed = await operation.agree([mark for mark, is_true in marks if is_true])
            controller.check()
        if until is not None:
            until.end()
        controller.end_turn(operation)
        if ADMITTED not in agreed:
            raise AdmissionTimeout(
                f"not admitted within the time limit on all {controller.ranks.world_size} ranks"
            )
        return WHOLE in agreed

    async def _admit_in_turn(self, limit: int, timeout: float | None, place: int) -> bool:
        controller, operation = self._controller, self._operation

        def attempt() -> bool:
            is_free = controller.turn is None and self._lease.try_grant(limit)
            if is_free:
                controller.turn = operation
            return is_free

        if not controller.admission.admit_now(attempt):
            try:
                await controller.admission.admit(attempt, timeout, controller.check, place)
            except AdmissionTimeout:
                return False
        return True

    async def _admit_after(self, limit: int, until: Limit | None) -> bool:
        """Rank 0 has admitted it, and says how long the others may take."""
        lease = self._lease
        if not lease.admit_now(limit):
            try:
                async with asyncio.timeout(0 if until and until.is_over else None) as waits:
                    if until is not None:
                        until.on_over = partial(self._wait_no_longer, waits)
                    await lease.admit(limit, None, None)
            except TimeoutError:
                return False
            finally:
                if until is not None:
                    until.on_over = _nothing
        return True

    def _wait_no_longer(self, waits: asyncio.Timeout) -> None:
        waits.reschedule(self._controller.now())

    # --- load -------------------------------------------------------------------------------------

    async def _load_back(self, limit: int, timeout: float | None) -> set[int]:
        """Bring what the host has; how much of it all have, and a mark below if that is the same on
        all."""
        lease, operation, size = self._lease, self._operation, self._controller.page_size
        until = None if timeout is None else operation.limit(lease.load_no_longer, timeout)
        if lease.may_be_longer and lease.prefix_len < limit:
            if until is not None and not operation.is_first:
                timeout = 0 if until.is_over else None
            await lease.load_back(limit, timeout)
        held = 0 if lease.is_stale else lease.prefix_len
        offers = [*range(0, held + 1, size)]
        if not (lease.is_stale or lease.has_lost_room):
            offers.append(EQUAL - held)
        agreed = await operation.agree(offers)
        if until is not None:
            until.end()
        return agreed


class JointChunk:
    """One per chunk that is asked for."""

    def __init__(
        self, lease: Lease, controller: HybridCacheController, operation: Operation
    ) -> None:
        self._lease = lease
        self._controller = controller
        self._operation = operation

    async def next(self, max_tokens: int) -> Chunk | None:
        """`Lease.next_chunk`, with the same answer on all ranks.

        Whatever one of them waits for, all wait for: who has nothing to wait for asks the next
        question, which is answered when the others have come to it.

        Raises:
            RanksError: another rank has given up, or has computed something else. StaleError: a run
                that came to nothing has cost the state that was taken over.
        """
        lease, controller = self._lease, self._controller
        try:
            while True:
                lease.check()
                lease.check_has_state()
                if lease.frontier >= lease.key.num_tokens:
                    return None
                await self._agree_on_rematch()
                start = lease.frontier
                stop = lease.end_of_chunk(start, max_tokens)
                claim = controller.claims.over(lease.id, lease.key, start)
                if await self._agree_on_pages(stop, is_clear=claim is None):
                    return lease.hand_out(start, stop)
                if claim is not None:
                    controller.counters.chunk_waits += 1
                    await claim.released.wait()
        except CapacityError:
            raise  # on all, and all can go on
        except BaseException:
            self._operation.give_up()
            raise

    async def _agree_on_rematch(self) -> None:
        """Go on from what others have published on all ranks; hold it here until all have said how
        much that is."""
        lease, controller, size = self._lease, self._controller, self._controller.page_size
        frontier = lease.frontier
        held = self._hold_deeper()
        reach = frontier - frontier % size if held is None else held.depth
        try:
            agreed = await self._operation.agree([*range(0, reach + 1, size), EQUAL - frontier])
            lease.check()
            if EQUAL - frontier not in agreed:
                raise RanksError(f"{lease!r}: another rank has not computed the same")
            lease.rematch(max(agreed))
        finally:
            if held is not None:
                controller.tree.let_go(held)
                controller.admission.look_again()

    def _hold_deeper(self) -> Receipt | None:
        """Hold what others have published beyond what the lease has computed, if it could go on
        from there."""
        lease, controller, receipt = self._lease, self._controller, self._lease.receipt
        assert receipt is not None, "granted leases hold a receipt"
        if lease.is_running or not controller.enabled:
            return None
        boundary = controller.tree.match_deeper(receipt, lease.key, len(lease) - 1)
        if boundary is None or boundary.depth <= lease.computed:
            return None
        spare, needed = controller.accounts.room_beside(0), controller.tree.would_need(boundary)
        if any(pages > room for pages, room in zip(needed, spare, strict=True)):
            return None
        return controller.tree.inc_lock_ref(boundary)

    async def _agree_on_pages(self, stop: int, *, is_clear: bool) -> bool:
        """Have pages up to `stop` on all ranks. False: go round again, for on some rank another
        lease is computing the same.

        Raises:
            CapacityError: on all ranks, when one has no room.
        """
        lease, had = self._lease, self._lease.table.num_pages
        refused = None
        try:
            lease.take_pages(-(-stop // self._controller.page_size))
        except CapacityError as error:
            refused = error
        marks = (HAS_PAGES, refused is None), (IS_CLEAR, is_clear)
        agreed = await self._operation.agree([mark for mark, is_true in marks if is_true])
        lease.check()
        if HAS_PAGES not in agreed:
            lease.keep_pages(had)
            missing = lease.pages_beyond_promise(stop)
            raise refused or self._controller.no_room_elsewhere(missing)
        return IS_CLEAR in agreed


def _nothing() -> None:
    """Who is told so now does not wait."""
