"""Sequences: who gets pages when, which runs are under way, and what happens to both at a reset or
the end.

Owns: the page accounts (what is promised, what is quarantined), the admission queue, the runs, the
supervisor and the life cycle. Refuses to know: tokens of a lease, page tables, models. The tree
decides what can be reused and evicted, the allocators hold the ids; the controller is the only one
that moves ids between them.

The account that everything rests on (semantics §11.5): per component, at any time,
`free + evictable ≥ Σ pages promised to admitted leases and not taken yet`. So growth within a
lease's reserve is one synchronous step that cannot fail.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tiered_cache.errors import (
    AdmissionTimeout,
    CapacityError,
    ClosedError,
    IntegrityError,
    WrongThreadError,
)
from tiered_cache.jobs import Supervisor, run_to_end
from tiered_cache.keys import TOKEN_BYTES
from tiered_cache.observe import Event, EventKind, Observers
from tiered_cache.stats import CacheStats, Counters, PoolStats
from tiered_cache.types import Outstanding

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Iterable, Sequence

    from tiered_cache.lease import Chunk, Lease
    from tiered_cache.pools.allocator import PageAllocator
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import PageIds

T = TypeVar("T")

SWEEP_NODES = 1000
"""Nodes taken apart between two turns of the loop after a reset (1 ms)."""

GRACE_TURNS = 3
"""Turns of the loop between a run's end and the moment when others stop waiting for its commit:
enough for whoever awaited the run, directly or through `wait_for` or `gather`, to commit."""


class Claim:
    """A run over whole pages `[start, stop)` of a lease's tokens, from its submission until its
    commit (or its end)."""

    __slots__ = ("ended", "lease", "released", "start", "stop")

    def __init__(self, lease: Lease, start: int, stop: int) -> None:
        self.lease = lease
        self.start = start
        self.stop = stop
        self.ended = False
        self.released = asyncio.Event()


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
        self.allocators = tuple(allocators)
        self.page_size = tree.page_size
        self.enabled = enabled
        self.observers = observers
        self.counters = Counters()
        self.unspent = [0] * len(self.allocators)
        self._leases: dict[int, weakref.ref[Lease]] = {}  # weak: a forgotten lease is to be noticed
        self.closed = False
        self._executor = run_executor
        self._owns_executor = owns_executor
        self._queue: deque[asyncio.Event] = deque()
        self._claims: list[Claim] = []
        self._num_runs = 0
        self._lease_ids = itertools.count(1)
        self._ending: dict[
            int, Lease
        ] = {}  # closed leases that a run still touches: strong, or their pages would leak
        self._dropped: deque[Lease] = (
            deque()
        )  # leases whose last reference went: strong until they are cleaned up
        self._stale_refs: list[PageIds | None] = [None] * len(self.allocators)
        self._quiet = asyncio.Event()
        self._supervisor = Supervisor()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._process = os.getpid()

    async def start(self) -> None:
        await self._supervisor.start()

    def now(self) -> float:
        """Seconds on the loop's clock."""
        return self._loop.time()

    # --- who may call -----------------------------------------------------------------------------

    def check(self) -> None:
        """One cache = one loop = one thread = one process, and open (semantics §12.4)."""
        # The running loop is per thread and forgotten in a forked child: one comparison covers all
        # three.
        if asyncio._get_running_loop() is not self._loop or self.closed:
            raise self._why_not()

    @property
    def is_foreign_process(self) -> bool:
        """Whether this is a copy in a forked child, which must not touch anything."""
        return os.getpid() != self._process

    def may_clean_up(self) -> bool:
        """Whether there is something to clean up here: not in a copy in a forked child.

        Raises:
            WrongThreadError: from another thread than the cache's.
        """
        if asyncio._get_running_loop() is self._loop:
            return True
        if self.is_foreign_process:
            return False
        if threading.get_ident() != self._thread:
            raise self._why_not()
        return True

    def new_lease_id(self) -> int:
        return next(self._lease_ids)

    def _why_not(self) -> Exception:
        if self.is_foreign_process:
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

    # --- page accounts ----------------------------------------------------------------------------

    def spare(self, index: int) -> int:
        """Pages of a component that are neither held nor promised."""
        return (
            self.allocators[index].num_free
            + self.tree.components[index].device.evictable
            - self.unspent[index]
        )

    def require(self, index: int, num_pages: int) -> None:
        """Raise unless `num_pages` more than what is promised can be taken."""
        if num_pages > self.spare(index):
            raise self.shortage(index, num_pages)

    def shortage(self, index: int, num_pages: int) -> CapacityError:
        component = self.tree.components[index]
        return CapacityError(
            "no room beyond the reserve",
            component=component.id,
            needed=num_pages,
            free=self.allocators[index].num_free,
            evictable=component.device.evictable,
            held_by=tuple(repr(lease) for lease in self.all_leases()),
        )

    def take(self, index: int, num_pages: int) -> PageIds:
        """Take ids, making room by victims in policy order: one synchronous step. The caller has
        the right to them."""
        allocator = self.allocators[index]
        short = num_pages - allocator.num_free
        if short > 0:
            self._make_room(index, short)
        ids = allocator.allocate(num_pages)
        if ids is None:
            raise IntegrityError(f"{num_pages} pages were promised, {allocator.num_free} are there")
        return ids

    def _make_room(self, index: int, num_pages: int) -> None:
        need = [0] * len(self.allocators)
        need[index] = num_pages
        evicted = self.tree.evict(need)
        for allocator, ids in zip(self.allocators, evicted.device, strict=True):
            allocator.free(ids)
            self.counters.pages_evicted += len(ids)
        self.counters.tokens_dropped += evicted.dropped_tokens

    def give_back(self, index: int, ids: PageIds) -> None:
        """Ids that nobody touches any more go home."""
        self.allocators[index].free(ids)

    def room_made(self) -> None:
        """Pages may have become spare: let the head of the admission queue look again."""
        if self._queue:
            self._queue[0].set()

    def _calmed(self) -> None:
        """Something in flight has ended: let `drain` and the admission queue look again."""
        if not self.busy:
            self._quiet.set()
        self.room_made()

    # --- admission --------------------------------------------------------------------------------

    def admit_now(self, attempt: Callable[[], bool]) -> bool:
        """Grant at once if nobody is ahead and `attempt` succeeds."""
        return not self._queue and attempt()

    async def admit(self, attempt: Callable[[], bool], timeout: float | None) -> None:
        """First in, first out, until `attempt` succeeds; it is called with nobody ahead, and grants
        in that very step.

        Raises:
            AdmissionTimeout: `timeout` seconds have passed; nothing is held.
        """
        turn = asyncio.Event()
        self._queue.append(turn)
        self.counters.admissions_queued += 1
        try:
            async with asyncio.timeout(timeout):
                while not (self._queue[0] is turn and attempt()):
                    turn.clear()
                    await turn.wait()
                    self.check()
        except TimeoutError:
            self.counters.admissions_timed_out += 1
            raise AdmissionTimeout(
                f"not admitted within {timeout} s: the device tier is held by other leases"
            ) from None
        except asyncio.CancelledError:
            self.counters.admissions_cancelled += 1
            raise
        finally:
            self._queue.remove(turn)
            self.room_made()

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
        self._check_chunks(leases, chunks)
        claims = [
            Claim(
                chunk.lease,
                chunk.start - chunk.start % self.page_size,
                chunk.stop - chunk.stop % self.page_size,
            )
            for chunk in chunks
        ]
        for lease in leases:
            lease.begin_run(chunks)
        self._claims += claims
        self._num_runs += 1
        self.counters.runs += 1
        ended_well = False
        try:
            result = await run_to_end(self._executor, fn, *args)
            ended_well = True
        except asyncio.CancelledError:
            self.counters.runs_cancelled += 1
            raise
        except BaseException:
            self.counters.runs_failed += 1
            raise
        finally:
            self._num_runs -= 1
            for claim in claims:
                claim.ended = True
            for lease in leases:
                lease.end_run(chunks if ended_well else ())
            self._release_later(claims, GRACE_TURNS)
            self._calmed()
        return result

    @staticmethod
    def _check_chunks(leases: Sequence[Lease], chunks: Sequence[Chunk]) -> None:
        ends = {lease.id: lease.frontier for lease in leases}
        for chunk in chunks:
            if chunk.lease_id not in ends:
                raise ValueError(f"{chunk!r} is not of a lease that runs")
            chunk.lease.check_chunk(chunk, ends[chunk.lease_id])
            ends[chunk.lease_id] = max(ends[chunk.lease_id], chunk.stop)

    def claim_over(self, lease: Lease, start: int) -> Claim | None:
        """A run of another lease that will complete the page which `lease` would compute next
        (semantics §11.3)."""
        if not self._claims or not self.enabled:
            return None
        start -= start % self.page_size
        if start + self.page_size > len(lease) - 1:
            return None  # the last token is always computed, so this page would not be reused
        key = lease.key
        at = start * TOKEN_BYTES
        page = key.data[at : at + self.page_size * TOKEN_BYTES]
        for claim in self._claims:
            if claim.lease is lease or not claim.start <= start < claim.stop:
                continue
            other = claim.lease.key
            if (
                other.namespace == key.namespace
                and other.data.startswith(page, at)
                and other.data.startswith(memoryview(key.data)[:at])
            ):
                return claim
        return None

    def _settle_claims(self, lease: Lease) -> None:
        """What a lease's ended runs claimed is there to be matched, or never will be."""
        if self._claims:
            self._release([claim for claim in self._claims if claim.lease is lease and claim.ended])

    def _release_later(self, claims: list[Claim], turns: int) -> None:
        if turns:
            self._loop.call_soon(self._release_later, claims, turns - 1)
        else:
            self._release(claims)

    def _release(self, claims: list[Claim]) -> None:
        for claim in claims:
            if not claim.released.is_set():
                self._claims.remove(claim)
                claim.released.set()

    # --- what leases report -----------------------------------------------------------------------

    def granted(self, lease: Lease) -> int:
        """A lease holds its prefix; returns the epoch that it lives in."""
        self._leases[lease.id] = weakref.ref(lease)
        counters = self.counters
        counters.leases_granted += 1
        counters.tokens_requested += len(lease)
        counters.tokens_hit_device += lease.prefix_len
        self._tell(EventKind.GRANTED, lease, lease.prefix_len)
        return self.epoch

    def rematched(self, lease: Lease, num_tokens: int) -> None:
        """A lease goes on from what others have published."""
        self.counters.rematches += 1
        self.counters.tokens_hit_device += num_tokens
        self._tell(EventKind.REMATCHED, lease, num_tokens)
        self.room_made()

    def committed(self, lease: Lease, num_tokens: int) -> None:
        """A lease has published tokens."""
        self.counters.tokens_committed += num_tokens
        self._settle_claims(lease)
        self._tell(EventKind.COMMITTED, lease, num_tokens)
        self.room_made()

    def released(self, lease: Lease, *, is_running: bool) -> None:
        """A lease is closed; while a run goes on its pages are quarantined, until `ended`."""
        self._leases.pop(lease.id, None)
        self.counters.leases_released += 1
        if is_running:
            self._ending[lease.id] = lease
        self._settle_claims(lease)
        self._tell(EventKind.RELEASED, lease, lease.committed)
        self.room_made()

    def ended(self, lease: Lease) -> None:
        """The last run of a closed lease has ended."""
        self._ending.pop(lease.id, None)
        self._calmed()

    def dropped(self, lease: Lease) -> None:
        """A lease went without being closed (called from its finaliser, in any thread)."""
        if self.is_foreign_process:
            return
        self._dropped.append(lease)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close_dropped)

    def _close_dropped(self) -> None:
        while self._dropped:
            self._dropped.popleft().close()
            self.counters.leases_dropped_unclosed += 1
        self._calmed()

    def _open_leases(self) -> list[Lease]:
        return [lease for ref in self._leases.values() if (lease := ref()) is not None]

    def all_leases(self) -> list[Lease]:
        """All that hold pages: open, dropped and not cleaned up, closed with a run going on."""
        found = {
            lease.id: lease
            for lease in (*self._open_leases(), *self._dropped, *self._ending.values())
        }
        return [found[lease_id] for lease_id in sorted(found)]

    # --- life cycle -------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Counts resets: what was made in an earlier epoch is stale."""
        return self.tree.receipts.epoch

    @property
    def busy(self) -> bool:
        """Whether anything is in flight: a run, a quarantine, background work."""
        return bool(self._num_runs or self._ending or self._dropped or self._supervisor.num_running)

    def reset(self) -> None:
        """Drop all content, whatever is in flight (semantics §12.1).

        Pages of leases stay quarantined until the lease has ended; all others are free at once.
        """
        epoch = self.epoch
        holders = [lease for lease in self.all_leases() if lease.epoch == epoch]
        self.tree.reset()
        self.counters.resets += 1
        for index, allocator in enumerate(self.allocators):
            refs = self._stale_refs[index]
            if refs is None:
                refs = np.zeros(allocator.capacity, dtype=np.int32)
            for lease in holders:
                refs[lease.held_pages(index)] += 1
            self._stale_refs[index] = refs if refs.any() else None
            allocator.reset(np.flatnonzero(refs).astype(np.int32))
            self.unspent[index] = 0
        self._release(list(self._claims))
        self._spawn_sweep()
        self.room_made()

    def give_back_stale(self, lease: Lease) -> None:
        """A lease from before a reset has ended: its pages that no other such lease holds are
        free."""
        for index, allocator in enumerate(self.allocators):
            refs, ids = self._stale_refs[index], lease.held_pages(index)
            if refs is None or not len(ids):
                continue
            refs[ids] -= 1
            allocator.free(ids[refs[ids] == 0])
            if not refs.any():
                self._stale_refs[index] = None

    def quarantined(self, index: int) -> int:
        """Pages that were given up while something may still touch them."""
        refs, epoch = self._stale_refs[index], self.epoch
        pages = 0 if refs is None else int(np.count_nonzero(refs))
        return pages + sum(
            lease.num_private_pages(index)
            for lease in self._ending.values()
            if lease.epoch == epoch
        )

    def _spawn_sweep(self) -> None:
        async def sweep() -> None:
            while self.tree.sweep(SWEEP_NODES):  # noqa: ASYNC110 - gives way, waits for nothing
                await asyncio.sleep(0)

        self.spawn(sweep(), "sweep")

    def spawn(self, work: Any, name: str) -> None:
        """Background work of this cache."""

        async def counted() -> None:
            try:
                await work
            finally:
                self._loop.call_soon(self._calmed)

        self._supervisor.spawn(counted(), name)

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        while self.busy:
            self._quiet.clear()
            await self._quiet.wait()

    async def aclose(self, limit: float | None) -> list[Outstanding]:
        """Stop admission, end all leases, wait for runs up to `limit` seconds; report what is still
        quarantined."""
        if not self.closed:
            self.closed = True
            for turn in self._queue:
                turn.set()
            self._release(list(self._claims))
            for lease in self._open_leases():
                lease.close()
            self._close_dropped()
        try:
            async with asyncio.timeout(limit):
                await self.drain()
        except TimeoutError:
            pass
        await self._supervisor.aclose()
        if self._owns_executor:
            self._executor.shutdown(wait=False)
        return self.outstanding()

    # --- looking ----------------------------------------------------------------------------------

    def outstanding(self) -> list[Outstanding]:
        """All that somebody holds, oldest first."""
        now, epoch = self.now(), self.epoch
        found = []
        for lease in self.all_leases():
            kind = "lease"
            if lease.id in self._ending:
                kind = "quarantine"
            elif lease.epoch != epoch:
                kind = "stale lease"
            pages = {
                str(component.id): len(lease.held_pages(index))
                for index, component in enumerate(self.tree.components)
            }
            found.append(Outstanding(kind, repr(lease), now - lease.granted_at, pages))
        return found

    def stats(self) -> CacheStats:
        epoch = self.epoch
        leases = [
            lease
            for lease in self.all_leases()
            if lease.epoch == epoch and lease.id not in self._ending
        ]
        pools = {}
        for index, (component, allocator) in enumerate(
            zip(self.tree.components, self.allocators, strict=True)
        ):
            pools[str(component.id)] = PoolStats(
                capacity=allocator.capacity,
                free=allocator.num_free,
                evictable=component.device.evictable,
                protected=component.device.protected,
                private=sum(lease.num_private_pages(index) for lease in leases),
                quarantined=self.quarantined(index),
                unspent=self.unspent[index],
            )
        counters = Counters(**{name: getattr(self.counters, name) for name in Counters.__slots__})
        counters.background_failures = self._supervisor.num_failures
        return CacheStats(
            pools, self.tree.num_nodes, len(leases), len(self._queue), self._num_runs, counters
        )

    def check_integrity(self) -> None:
        """Prove the tree's invariants, the page accounts and that no page has two owners (semantics
        §2)."""
        self.tree.check_integrity()
        faults = []
        stats = self.stats()
        epoch = self.epoch
        live = [lease for lease in self.all_leases() if lease.epoch == epoch]
        for index, component in enumerate(self.tree.components):
            pool = stats.pools[str(component.id)]
            total = pool.free + pool.evictable + pool.protected + pool.private + pool.quarantined
            if total != pool.capacity:
                faults.append(f"{component.id}: {pool} adds up to {total}")
            promised = sum(lease.unspent(index) for lease in live)
            if pool.unspent != promised:
                faults.append(
                    f"{component.id}: {pool.unspent} pages are promised, the leases say {promised}"
                )
            if pool.free + pool.evictable < pool.unspent:
                faults.append(
                    f"{component.id}: more is promised ({pool.unspent}) than there is: {pool}"
                )
            faults += self._check_owners(index, live)
        if faults:
            raise IntegrityError("\n".join(faults))

    def _check_owners(self, index: int, live: Iterable[Lease]) -> list[str]:
        component, allocator = self.tree.components[index], self.allocators[index]
        owners = np.zeros(allocator.capacity, dtype=np.int32)
        np.add.at(owners, allocator.free_ids(), 1)
        for node in self.tree.nodes():
            value = node.data[index].value
            if value is not None:
                owners[value] += 1
        for lease in live:
            owners[lease.private_pages(index)] += 1
        refs = self._stale_refs[index]
        if refs is not None:
            owners += refs > 0
        wrong = np.flatnonzero(owners != 1)
        faults = (
            [f"{component.id}: pages {wrong.tolist()} have {owners[wrong].tolist()} owners"]
            if len(wrong)
            else []
        )
        for lease in live:
            faults += lease.check_table(index)
        return faults

    def _tell(self, kind: EventKind, lease: Lease, tokens: int) -> None:
        if self.observers.listening:
            self.observers.on_event(Event(kind, lease_id=lease.id, tokens=tokens))
