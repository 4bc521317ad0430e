"""Sequences: what leases do to tree and pages, in which order, and how everything ends.

Owns: who may call, the open leases, the runs, the supervisor and the life cycle. Page accounts, the
admission queue and claims each have a file of their own; the controller is where they meet. Refuses
to
know: tokens of a lease, page tables, models.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from tiered_cache.accounts import PageAccounts
from tiered_cache.admission import AdmissionQueue
from tiered_cache.claims import Claims
from tiered_cache.errors import (
    CapacityError,
    ClosedError,
    IntegrityError,
    StaleError,
    WrongThreadError,
)
from tiered_cache.jobs import Supervisor, run_to_end, submit
from tiered_cache.observe import Event, EventKind, Observers
from tiered_cache.stats import CacheStats, Counters, PoolStats
from tiered_cache.types import Outstanding

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine, Sequence

    from tiered_cache.lease import Chunk, Lease
    from tiered_cache.pools.allocator import PageAllocator
    from tiered_cache.tree.radix import RadixTree

T = TypeVar("T")


SWEEP_NODES: Final = 1000
"""Nodes taken apart between two turns of the loop after a reset (1 ms)."""


class Run:
    """A run under way: waiting for the one before it, queued, or active."""

    __slots__ = ("ended", "job", "leases")

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = leases
        self.ended = asyncio.Event()
        self.job: concurrent.futures.Future[Any] | None = None


class HybridCacheController:
    """One per cache. Every method but the coroutines is atomic on the loop."""

    def __init__(
        self,
        tree: RadixTree,
        allocators: Sequence[PageAllocator],
        run_executor: concurrent.futures.Executor,
        *,
        owns_executor: bool,
        enabled: bool,
        observers: Observers,
    ) -> None:
        self.tree = tree
        self.page_size = tree.page_size
        self.enabled = enabled
        self.closed = False
        self.epoch = tree.receipts.epoch  # counts resets: what is from an earlier one is stale
        self.counters = Counters()
        self.accounts = PageAccounts(tree, allocators, self.counters)
        self.admission = AdmissionQueue(self.counters)
        self.claims = Claims(tree.page_size)
        self.observers = observers
        self._executor = run_executor
        self._owns_executor = owns_executor
        self._runs: list[Run] = []
        self._lease_ids = itertools.count(1)
        # Open leases are held weakly, so that a forgotten one is noticed. Closed ones that a run
        # still touches and forgotten ones are held until their pages have gone home.
        self._leases: dict[int, weakref.ref[Lease]] = {}
        self._ending: dict[int, Lease] = {}
        self._dropped: deque[Lease] = deque()
        self._quiet = asyncio.Event()
        self._given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = Supervisor(self._calmed)
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._process = os.getpid()

    async def start(self) -> None:
        try:
            await self._supervisor.start()
        except BaseException:
            self.closed = True
            raise

    def now(self) -> float:
        """Seconds on the loop's clock."""
        return self.loop.time()

    # --- who may call -----------------------------------------------------------------------------

    def check(self) -> None:
        """One cache = one loop = one thread = one process, and open (semantics §12.4).

        Raises:
            ClosedError: closed, or inherited through a fork. WrongThreadError.
        """
        # The running loop is per thread, and forgotten in a forked child: one look covers all
        # three.
        if asyncio._get_running_loop() is not self.loop or self.closed:
            raise self._why_not()

    def may_clean_up(self) -> bool:
        """Whether there is something to clean up here: not in a copy in a forked child.

        Raises:
            WrongThreadError: from another thread than the cache's.
        """
        if asyncio._get_running_loop() is self.loop:
            return True
        self.check_thread()
        return os.getpid() == self._process

    def check_thread(self) -> None:
        """Raise `WrongThreadError` from another thread than the cache's, also after its end."""
        if threading.get_ident() != self._thread and os.getpid() == self._process:
            raise self._why_not()

    def _why_not(self) -> Exception:
        if os.getpid() != self._process:
            return ClosedError("this cache was inherited through a fork: open one in the child")
        if threading.get_ident() != self._thread:
            return WrongThreadError(
                "the cache belongs to the thread that opened it: "
                "use loop.call_soon_threadsafe to get there"
            )
        if self.closed:
            return ClosedError("the cache is closed: open a new one")
        return WrongThreadError(
            "the cache belongs to the event loop that opened it, and that loop is not running here"
        )

    # --- capacity ---------------------------------------------------------------------------------

    def check_fits(self, num_pages: int, num_tokens: int) -> None:
        """Raise `CapacityError` for what the device tier could never hold."""
        for index, allocator in enumerate(self.accounts.allocators):
            if num_pages > allocator.capacity:
                most = allocator.capacity * self.page_size
                message = (
                    f"prompt and reserve are {num_tokens} tokens, the device tier holds {most}: "
                    "ask for less, or give it more"
                )
                raise self._capacity_error(message, index, num_pages)

    def check_spare(self, num_pages: int) -> None:
        """Raise `CapacityError` unless so many pages more than what is promised can be taken."""
        for index in range(len(self.accounts.allocators)):
            if num_pages > self.accounts.spare(index):
                holders = tuple(repr(lease) for lease in self.all_leases())
                raise self._capacity_error("no room beyond the reserve", index, num_pages, holders)

    def _capacity_error(
        self, message: str, index: int, needed: int, held_by: tuple[str, ...] = ()
    ) -> CapacityError:
        component = self.tree.components[index]
        return CapacityError(
            message,
            component=component.id,
            needed=needed,
            free=self.accounts.allocators[index].num_free,
            evictable=component.device.evictable,
            held_by=held_by,
        )

    # --- runs -------------------------------------------------------------------------------------

    async def run(
        self, leases: Sequence[Lease], chunks: Sequence[Chunk], fn: Callable[..., T], args: Any
    ) -> T:
        """`fn(*args)` in the run executor, over `chunks` of `leases`; back when nobody runs it any
        more.

        Raises:
            StaleError, ValueError: a chunk that cannot be computed now. Nothing has run.
        """
        if inspect.iscoroutinefunction(fn):
            raise TypeError("run computes in a thread and takes a plain function, not a coroutine")
        if not callable(fn):
            raise TypeError(f"run takes a function and its arguments, not {type(fn).__name__}")
        self._check_chunks(leases, chunks)
        claims = []
        if self.enabled:
            claims = [
                self.claims.make(chunk.lease_id, chunk.lease.key, chunk.start, chunk.stop)
                for chunk in chunks
            ]
        for lease in leases:
            lease.begin_run(chunks)
        run = Run(leases)
        ahead = self._runs_ahead(chunks)
        self._runs.append(run)
        self.counters.runs += 1
        is_computed = False
        try:
            for other in ahead:
                await other.ended.wait()
            if ahead:
                self._check_still_follows(leases, chunks)
            job = submit(self._executor, fn, *args)
            run.job = job
            result = await run_to_end(job, self._given_up)
            is_computed = True
        except asyncio.CancelledError:
            self.counters.runs_cancelled += 1
            raise
        except BaseException:
            self.counters.runs_failed += 1
            raise
        finally:
            self.claims.end(claims)
            if run.job is None or run.job.done():
                self._end_run(run, chunks, is_computed)
            else:  # given up by `aclose`; its pages stay quarantined until the thread has ended
                run.job.add_done_callback(lambda _: self._end_later(run, chunks))
        return result

    def _end_run(self, run: Run, chunks: Sequence[Chunk], is_computed: bool) -> None:
        self._runs.remove(run)
        for lease in run.leases:
            lease.end_run(chunks, computed=is_computed)
        run.ended.set()
        self._calmed()

    def _end_later(self, run: Run, chunks: Sequence[Chunk]) -> None:
        """In the run's thread, which has outlived the cache."""
        try:
            self.loop.call_soon_threadsafe(self._end_run, run, chunks, False)
        except RuntimeError:  # the loop is closed: nobody else is there any more
            self._end_run(run, chunks, is_computed=False)

    def _runs_ahead(self, chunks: Sequence[Chunk]) -> list[Run]:
        """Runs that compute what these chunks build on.

        A run starts only after them: there may be several threads, and a run that fails must not be
        followed by one that reads what was never written.
        """
        builds_on = {chunk.lease for chunk in chunks if chunk.start > chunk.lease.computed}
        return [run for run in self._runs if not builds_on.isdisjoint(run.leases)]

    @staticmethod
    def _check_still_follows(leases: Sequence[Lease], chunks: Sequence[Chunk]) -> None:
        ends = {}
        for lease in leases:
            lease.check()
            ends[lease] = lease.computed
        for chunk in chunks:
            if chunk.start > ends[chunk.lease]:
                raise StaleError(
                    f"{chunk!r} follows a run that came to nothing: ask for the next chunk"
                )
            ends[chunk.lease] = max(ends[chunk.lease], chunk.stop)

    def _check_chunks(self, leases: Sequence[Lease], chunks: Sequence[Chunk]) -> None:
        ends = {}  # by lease, not by its id: that is unique within its cache only
        for lease in leases:
            lease.check_is_of(self)
            ends[lease] = lease.frontier
        for chunk in chunks:
            if chunk.lease not in ends:
                raise ValueError(f"{chunk!r} is not of a lease that runs")
            chunk.lease.check_chunk(chunk, ends[chunk.lease])
            ends[chunk.lease] = max(ends[chunk.lease], chunk.stop)

    # --- what leases report -----------------------------------------------------------------------

    def new_lease_id(self) -> int:
        return next(self._lease_ids)

    def granted(self, lease: Lease) -> int:
        """A lease holds its prefix; returns the epoch that it lives in."""
        self._leases[lease.id] = weakref.ref(lease)
        counters = self.counters
        counters.leases_granted += 1
        counters.tokens_requested += lease.key.num_tokens
        counters.tokens_hit_device += lease.prefix_len
        self._tell(EventKind.GRANTED, lease, lease.prefix_len)
        return self.epoch

    def rematched(self, lease: Lease, num_tokens: int) -> None:
        """A lease goes on from what others have published."""
        self.counters.rematches += 1
        self.counters.tokens_hit_device += num_tokens
        self._tell(EventKind.REMATCHED, lease, num_tokens)
        self.admission.look_again()

    def committed(self, lease: Lease, num_tokens: int) -> None:
        """A lease has published tokens."""
        self.counters.tokens_committed += num_tokens
        self.claims.settle(lease.id)
        self._tell(EventKind.COMMITTED, lease, num_tokens)
        self.admission.look_again()

    def released(self, lease: Lease, *, is_running: bool) -> None:
        """A lease is closed; while a run goes on its pages are quarantined, until `ended`."""
        self._leases.pop(lease.id, None)
        self.counters.leases_released += 1
        if is_running:
            self._ending[lease.id] = lease
        self.claims.settle(lease.id)
        self._tell(EventKind.RELEASED, lease, lease.committed)
        self.admission.look_again()

    def ended(self, lease: Lease) -> None:
        """The last run of a closed lease has ended."""
        self._ending.pop(lease.id, None)
        self._calmed()

    def dropped(self, lease: Lease) -> None:
        """A lease went without being closed (called from its finaliser, in any thread)."""
        if os.getpid() != self._process:
            return
        self._dropped.append(lease)
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._close_dropped)

    def _close_dropped(self) -> None:
        while self._dropped:
            self._dropped.popleft().close()
            self.counters.leases_dropped_unclosed += 1
        self._calmed()

    def _tell(self, kind: EventKind, lease: Lease, tokens: int) -> None:
        if self.observers.listening:
            self.observers.on_event(Event(kind, lease_id=lease.id, tokens=tokens))

    def _open_leases(self) -> list[Lease]:
        return [lease for ref in self._leases.values() if (lease := ref()) is not None]

    def all_leases(self) -> list[Lease]:
        """All that hold pages: open, forgotten and not cleaned up, closed with a run going on."""
        holders = (*self._open_leases(), *self._dropped, *self._ending.values())
        found = {lease.id: lease for lease in holders}
        return [found[lease_id] for lease_id in sorted(found)]

    def _current_leases(self) -> list[Lease]:
        """Those of this epoch."""
        return [lease for lease in self.all_leases() if lease.epoch == self.epoch]

    # --- life cycle -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is in flight: a run, a quarantine, background work."""
        return bool(self._runs or self._ending or self._dropped or self._supervisor.num_running)

    def _calmed(self) -> None:
        """Something in flight has ended: let `drain` and the admission queue look again."""
        if not self.busy:
            self._quiet.set()
        self.admission.look_again()

    def reset(self) -> None:
        """Drop all content, whatever is in flight (semantics §12.1).

        Pages of leases stay quarantined until the lease has ended; all others are free at once.
        """
        holders = self._current_leases()
        self.tree.reset()
        self.epoch = self.tree.receipts.epoch
        self.counters.resets += 1
        self.accounts.reset(lease.held_pages() for lease in holders)
        self.claims.release_all()
        self.spawn(self._sweep(), "sweep")
        self.admission.look_again()

    async def _sweep(self) -> None:
        while self.tree.sweep(SWEEP_NODES):  # noqa: ASYNC110 - gives way, waits for nothing
            await asyncio.sleep(0)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Background work of this cache."""
        self._supervisor.spawn(work, name)

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        while self.busy:
            self._quiet.clear()
            await self._quiet.wait()

    async def aclose(self, limit: float | None) -> list[Outstanding]:
        """Stop admission, end all leases, drop queued runs, wait for active ones up to `limit`
        seconds; report what is still quarantined. Whoever awaits a run that goes on can be
        cancelled from then on.

        Raises:
            ClosedError, WrongThreadError: not on the cache's loop.
        """
        if asyncio._get_running_loop() is not self.loop:
            raise self._why_not()
        if not self.closed:
            self.closed = True
            self.admission.wake_all()
            self.claims.release_all()
            for lease in self._open_leases():
                lease.close()
            self._close_dropped()
            for run in self._runs:
                if run.job is not None:
                    run.job.cancel()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self.drain()
        finally:  # also when whoever closes is cancelled
            if not self._given_up.done():
                self._given_up.set_result(None)
            self._supervisor.stop()
            if self._owns_executor:
                self._executor.shutdown(wait=False)
        await self._supervisor.aclose()
        return self.outstanding()

    # --- looking ----------------------------------------------------------------------------------

    def outstanding(self) -> list[Outstanding]:
        """All that somebody holds, oldest first."""
        now = self.now()
        found = []
        for lease in self.all_leases():
            kind = "lease"
            if lease.id in self._ending:
                kind = "quarantine"
            elif lease.epoch != self.epoch:
                kind = "stale lease"
            held = zip(self.tree.components, lease.held_pages(), strict=True)
            pages = {str(component.id): len(ids) for component, ids in held}
            found.append(Outstanding(kind, repr(lease), now - lease.granted_at, pages))
        return found

    def stats(self) -> CacheStats:
        leases = self._current_leases()
        pools = {}
        for index, component in enumerate(self.tree.components):
            allocator = self.accounts.allocators[index]
            private = {lease.id: len(lease.private_pages()[index]) for lease in leases}
            ending = sum(private[lease.id] for lease in leases if lease.id in self._ending)
            pools[str(component.id)] = PoolStats(
                capacity=allocator.capacity,
                free=allocator.num_free,
                evictable=component.device.evictable,
                protected=component.device.protected,
                private=sum(private.values()) - ending,
                quarantined=len(self.accounts.stale(index)) + ending,
                unspent=self.accounts.promised[index],
            )
        counters = Counters(**{name: getattr(self.counters, name) for name in Counters.__slots__})
        counters.background_failures = self._supervisor.num_failures
        num_leases = sum(lease.id not in self._ending for lease in leases)
        return CacheStats(
            pools, self.tree.num_nodes, num_leases, len(self.admission), len(self._runs), counters
        )

    def check_integrity(self) -> None:
        """Prove the tree's invariants, the page accounts and that no page has two owners (§2)."""
        self.tree.check_integrity()
        faults = []
        leases = self._current_leases()
        for index, (name, pool) in enumerate(self.stats().pools.items()):
            total = pool.free + pool.evictable + pool.protected + pool.private + pool.quarantined
            if total != pool.capacity:
                faults.append(f"{name}: {pool} adds up to {total}")
            promised = sum(lease.unspent for lease in leases)
            if pool.unspent != promised:
                faults.append(f"{name}: {pool.unspent} pages are promised, leases say {promised}")
            if pool.free + pool.evictable < pool.unspent:
                faults.append(f"{name}: more is promised than there is: {pool}")
            faults += self._wrong_owners(index, leases)
        for lease in leases:
            faults += lease.check_table()
        if faults:
            raise IntegrityError("\n".join(faults))

    def _wrong_owners(self, index: int, leases: Sequence[Lease]) -> list[str]:
        component, allocator = self.tree.components[index], self.accounts.allocators[index]
        owners = np.zeros(allocator.capacity, dtype=np.int32)
        held = [allocator.free_ids(), self.accounts.stale(index)]
        held += [lease.private_pages()[index] for lease in leases]
        values = (node.data[index].value for node in self.tree.nodes())
        held += [value for value in values if value is not None]
        for ids in held:
            np.add.at(owners, ids, 1)
        wrong = np.flatnonzero(owners != 1)
        if not len(wrong):
            return []
        return [f"{component.id}: pages {wrong.tolist()} have {owners[wrong].tolist()} owners"]
