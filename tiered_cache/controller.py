"""Sequences: what leases do to tree and pages, in which order, and how everything ends.

Owns: who may call, the open leases, the supervisor and the life cycle. Page accounts, the admission
queue, claims, runs, transfers, write policies, fences and storage each have a file of their own;
the controller is where they meet. Refuses to know: tokens of a lease, page tables, models.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tiered_cache import ledger
from tiered_cache.accounts import HostPages, PageAccounts
from tiered_cache.admission import AdmissionQueue
from tiered_cache.claims import Claims
from tiered_cache.errors import CapacityError, ClosedError, WrongThreadError
from tiered_cache.fences import Fences, as_awaitable, is_device_event
from tiered_cache.jobs import DaemonExecutor, Supervisor, run_to_end, submit, threads_ended
from tiered_cache.layers import LayerWaits
from tiered_cache.lent import LentPages
from tiered_cache.observe import Event, EventKind, Observers
from tiered_cache.pins import Pins
from tiered_cache.ranks import UNLIMITED, Operation
from tiered_cache.runs import Runs
from tiered_cache.stats import CacheStats, Counters
from tiered_cache.storage_io import ThreadContext, num_spare_cores
from tiered_cache.storage_tier import StorageTier, Surroundings
from tiered_cache.transfer.mover import Mover
from tiered_cache.transfers import Transfers
from tiered_cache.tree.node import BASE
from tiered_cache.types import Outstanding, Tier
from tiered_cache.write_policies import (
    STORE_BYTES,
    NoWrites,
    Storing,
    WriteBack,
    WritePolicy,
    WriteThrough,
)

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine, Sequence

    import torch

    from tiered_cache.accounts import TierPages
    from tiered_cache.chunk import Chunk
    from tiered_cache.fences import Fence
    from tiered_cache.lease import Lease
    from tiered_cache.lease_parts import StateCopy
    from tiered_cache.pools.allocator import PageAllocator
    from tiered_cache.pools.host import HostArena
    from tiered_cache.ranks import Ranks
    from tiered_cache.storage_io import StorageCall
    from tiered_cache.storage_tier import StorageParts
    from tiered_cache.transfer.copier import Copier
    from tiered_cache.transfers import Transfer
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import Boundary, PageIds

T = TypeVar("T")


log = logging.getLogger(__name__)

SWEEP_NODES: Final = 1000
"""Nodes taken apart between two turns of the loop after a reset (1 ms)."""


SUPERVISOR_LIMIT_S: Final = 1.0
"""How long the end of the cache waits for background tasks that were cancelled: a backend may be
somebody else's code."""

IO_THREADS: Final = 4
"""Of the io executor (design §3)."""

WRITE_THROUGH_THRESHOLDS: Final = {"write_through": 1, "write_through_selective": 2}
"""Uses from which a node is copied to the host (semantics §9.5)."""


@dataclass(frozen=True, slots=True)
class Executors:
    """Where the cache's work runs: models, copies, and what takes long and is neither. `owned`:
    those that are shut down with it."""

    run: concurrent.futures.Executor
    copy: concurrent.futures.Executor
    io: concurrent.futures.Executor
    owned: Sequence[concurrent.futures.Executor] = ()


@dataclass(frozen=True, slots=True)
class HostTier:
    """What a second tier adds.

    Attributes:
        allocators, arenas: of its rows, in dense component order.
        page_bytes: of a page of the first component.
        max_pinned: how much of it pins may hold, from 0 to 1.
        write_policy: "write_through", "write_through_selective" or "write_back" (semantics §9.5).
        load_back_threshold: tokens; a shorter hit is computed again.
        touch: makes its memory ready, a piece per call, ahead of need; in a thread.
        close: lets go of the copier and the memory, when nobody copies any more.
    """

    allocators: Sequence[PageAllocator]
    arenas: Sequence[HostArena]
    copier: Copier
    page_bytes: int
    max_pinned: float
    write_policy: str
    load_back_threshold: int
    touch: Sequence[Callable[[], None]]
    close: Callable[[], None]


class HybridCacheController:
    """One per cache. Every method but the coroutines is atomic on the loop.

    Args:
        tree, allocators: the index, and the device's pages in dense component order.
        executors: where its work runs.
        host: the second tier, if there is one.
        enabled: False for comparing with and without: nothing matches and nothing is kept.
        ranks: whom to agree with.
        max_pinned: how much of the device pins may hold, from 0 to 1.
        stream: on which the models compute, if they go on after a run has returned.
        computes_on: whether they do, on a stream that each commit says.
        copy_states: copies states of the device, in a run's thread.
    """

    def __init__(
        self,
        tree: RadixTree,
        allocators: Sequence[PageAllocator],
        *,
        executors: Executors,
        host: HostTier | None,
        enabled: bool,
        observers: Observers,
        ranks: Ranks,
        max_pinned: float = 0.25,
        stream: torch.cuda.Stream | None = None,
        computes_on: bool = False,
        copy_states: Callable[[Sequence[StateCopy]], None] | None = None,
    ) -> None:
        self.tree = tree
        self.page_size = tree.page_size
        self.grid = math.lcm(*[component.grid for component in tree.components])
        self.sparse = [part for part in tree.components if part.has_tombstones]
        self.enabled = enabled
        self.closed = False
        self.epoch = tree.epoch
        self.counters = Counters()
        self.host_pages = None
        if host is not None:
            self.host_pages = HostPages(tree, host.allocators, self.counters)
        self.accounts = PageAccounts(tree, allocators, self.counters, self.host_pages)
        self.lent = LentPages(self.accounts, tree.page_size)
        self.admission = AdmissionQueue(self.counters)
        self.claims = Claims(tree.page_size)
        self.fences = Fences(self.calmed, computes_on=computes_on or stream is not None)
        self.transfers: Transfers | None = None
        self.write_policy: WritePolicy = NoWrites()
        self.storage: StorageTier | None = None
        self.had_storage = False
        self._attaching: StorageTier | None = None
        self._detached: list[StorageTier] = []  # that have not gone
        self.load_back_threshold = 0
        if host is not None and enabled:
            self._add_host_tier(host, executors.copy)
        tiers: dict[Tier, TierPages] = {Tier.DEVICE: self.accounts}
        shares = {Tier.DEVICE: max_pinned}
        if host is not None and self.host_pages is not None:
            tiers[Tier.HOST], shares[Tier.HOST] = self.host_pages, host.max_pinned
        self.pins = Pins(tree, self.accounts, tiers, shares, self.calmed, self.may_clean_up)
        self.ranks = ranks
        self.stream = stream
        self.observers = observers
        self._host = host
        self._executors = executors
        self._lease_ids = itertools.count(1)
        self._prefetch_numbers = itertools.count(1)
        # What rank 0 is admitting on all ranks: one after the other, so they have one order.
        self.turn: Operation | None = None
        # Open leases are held weakly, so that a forgotten one is noticed. Closed ones that a run
        # still touches and forgotten ones are held until their pages have gone home.
        self._leases: dict[int, weakref.ref[Lease]] = {}
        self._ending: dict[int, Lease] = {}
        self._dropped: deque[Lease] = deque()
        self._quiet = asyncio.Event()
        self._watchers: list[asyncio.Future[None]] = []
        self._given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = Supervisor(self.calmed)
        self.runs = Runs(
            executors.run,
            self.claims if enabled else None,
            self.counters,
            self._given_up,
            self._run_ended,
            copy_states,
        )
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._process = os.getpid()

    def _add_host_tier(self, host: HostTier, executor: concurrent.futures.Executor) -> None:
        assert self.host_pages is not None, "made for it"
        self.load_back_threshold = host.load_back_threshold
        mover = Mover(host.copier, executor)
        self.transfers = Transfers(
            self.tree,
            self.accounts,
            self.host_pages,
            mover,
            self.counters,
            self.calmed,
            self._note_backup,
        )
        parts = Storing(
            self.tree,
            self.accounts,
            self.host_pages,
            self.transfers,
            self.fences,
            self.counters,
            max(1, STORE_BYTES // host.page_bytes),
            lambda: self.storage is not None and self.storage.backups.is_busy,
            self._look_again,
        )
        if host.write_policy == "write_back":
            self.write_policy = WriteBack(parts)
        else:
            threshold = WRITE_THROUGH_THRESHOLDS[host.write_policy]
            self.write_policy = WriteThrough(parts, threshold)

    async def start(self, storage: StorageParts | None = None) -> None:
        """Begin with what goes on in the background.

        Raises:
            BackendError: storage is required, and not there.
        """
        try:
            await self._supervisor.start()
            if storage is not None:
                await self.attach(storage)
        except BaseException:
            self.closed = True
            self._supervisor.stop()
            raise
        if self.transfers is not None and self._host is not None and self._host.touch:
            self._supervisor.spawn(self._touch(self._host.touch), "touch")

    async def _touch(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Make the host's memory ready ahead of need; whoever is faster only waits for the
        kernel."""
        for piece in pieces:
            if self.closed:
                return
            await run_to_end(submit(self._executors.io, piece))

    # --- the third tier ---------------------------------------------------------------------------

    async def attach(self, parts: StorageParts) -> None:
        """Have a third tier from now on.

        Raises:
            BackendError: it is required, and not there. ValueError: there is no host tier, or there
                is a third one.
        """
        if self._host is None or self.host_pages is None or self.transfers is None:
            raise ValueError("storage needs a host tier: its pages go through it")
        if self.storage is not None or self._attaching is not None:
            raise ValueError("there is a storage tier already: detach it first")
        io = self._executors.io
        threads = getattr(io, "_max_workers", IO_THREADS)
        num_busy = num_spare_cores() if isinstance(io, DaemonExecutor) else threads
        around = Surroundings(
            self.tree,
            self.host_pages,
            self._host.arenas,
            self.counters,
            ThreadContext(io, threads, self._given_up, num_busy),
            self.observers,
            self._supervisor.spawn,
            self.join,
            self.calmed,
            self.check_thread,
        )
        tier = StorageTier(parts, around)
        self._attaching = tier
        try:
            for old in tuple(self._detached):
                await old.forgotten.wait()  # what the tree believes of it is not true of this one
            await tier.start()
            if self.closed:  # meanwhile
                await tier.aclose(parts.settings.timeout)
                self.check()
        except BaseException:
            tier.end()
            tier.forgotten.set()  # nothing was believed of it
            self._detached.append(tier)
            tier.when_gone(partial(self._gone, tier))
            raise
        finally:
            self._attaching = None
        self.storage = tier
        self.had_storage = True

    async def detach(self, limit: float | None) -> None:
        """Have it no longer. What it is writing ends within `limit` seconds, or stays quarantined
        until it does."""
        tier, self.storage = self.storage, None
        if tier is None:
            return
        self._detached.append(tier)
        try:
            await tier.detach(limit)
        finally:
            tier.when_gone(partial(self._gone, tier))

    def _gone(self, tier: StorageTier) -> None:
        self._detached.remove(tier)
        self.calmed()

    def _note_backup(self, boundary: Boundary) -> None:
        """A prefix was used, or has come to the host."""
        if self.storage is not None:
            self.storage.backups.note(boundary)

    @property
    def io_executor(self) -> concurrent.futures.Executor:
        """Where what takes long is done that is neither a model nor a copy."""
        return self._executors.io

    def storage_calls(self) -> list[StorageCall]:
        """Calls under way that touch rows of the host, also of storage that was detached."""
        return [call for tier in self._tiers for call in tier.io]

    @property
    def _tiers(self) -> list[StorageTier]:
        """What there is of storage, also what is being attached, and what has not gone yet."""
        current = (self._attaching, self.storage)
        return [*self._detached, *[tier for tier in current if tier is not None]]

    def _rows_of_calls(self) -> list[list[PageIds]]:
        """Host pages of this epoch that such calls touch; by component, for each."""
        calls = [call for call in self.storage_calls() if call.epoch == self.epoch]
        return [self.accounts.only(call.component, call.ids) for call in calls]

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

    def check_fits(self, index: int, num_ids: int, num_tokens: int) -> None:
        """Raise `CapacityError` for what the device tier could never hold of a component."""
        capacity = self.accounts.allocators[index].capacity
        if num_ids > capacity:
            most = f"holds {capacity * self.page_size}"
            if index != BASE:
                most = f"has {capacity} of the {num_ids} pages of its own that they need"
            message = (
                f"prompt and reserve are {num_tokens} tokens, the device tier {most}: "
                "ask for less, or give it more"
            )
            raise self._capacity_error(message, index, num_ids)

    def check_spare(self, num_pages: int) -> None:
        """Raise `CapacityError` unless so many pages of every component can be taken, or held,
        beyond what is promised."""
        components = self.tree.components
        self.check_spare_of([num_pages if part.is_per_page else 0 for part in components])

    def check_spare_of_base(self, num_pages: int) -> None:
        """`check_spare` of the first component alone."""
        self.check_spare_of([num_pages])

    def check_spare_of_one(self, index: int, num_ids: int) -> None:
        """`check_spare` of one component."""
        self.check_spare_of([0] * index + [max(0, num_ids)])

    def check_spare_of(self, pages: Sequence[int]) -> None:
        """`check_spare`, with a number per component."""
        for index, num_pages in enumerate(pages):
            if num_pages > 0 and num_pages > self.accounts.spare(index):
                holders = tuple(repr(lease) for lease in self.all_leases())
                raise self._capacity_error("no room beyond the reserve", index, num_pages, holders)

    def no_room_elsewhere(self, num_pages: int) -> CapacityError:
        """What a rank raises that has the pages itself."""
        return self._capacity_error("another rank has no room for it", 0, num_pages)

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

    async def run(
        self, leases: Sequence[Lease], chunks: Sequence[Chunk], fn: Callable[..., T], args: Any
    ) -> T:
        """See `Runs.run`. Raises `ValueError` for a lease of another cache, too."""
        for lease in leases:
            lease.check_is_of(self)
        return await self.runs.run(leases, chunks, fn, args)

    def _run_ended(self) -> None:
        if self.transfers is not None:
            self.transfers.release_retired()
        self.calmed()

    # --- what leases report -----------------------------------------------------------------------

    def new_lease_id(self) -> int:
        return next(self._lease_ids)

    def granted(self, lease: Lease) -> None:
        """A lease holds its prefix."""
        self._leases[lease.id] = weakref.ref(lease)
        counters = self.counters
        counters.leases_granted += 1
        counters.tokens_requested += lease.key.num_tokens
        counters.tokens_hit_device += lease.prefix_len
        self.used(lease.published)
        if self.observers.listening:
            self._tell(EventKind.GRANTED, lease, lease.prefix_len)

    def used(self, boundary: Boundary) -> None:
        """A prefix was published, or granted: it may be worth a copy."""
        if self.transfers is not None:
            self.write_policy.note_used(boundary)
            if self.storage is not None:
                self.storage.backups.note(boundary)

    def rematched(self, lease: Lease, num_tokens: int) -> None:
        """A lease goes on from what others have published."""
        self.counters.rematches += 1
        self.counters.tokens_hit_device += num_tokens
        if self.observers.listening:
            self._tell(EventKind.REMATCHED, lease, num_tokens)
        self.admission.look_again()

    def committed(self, lease: Lease, num_tokens: int) -> None:
        """A lease has published tokens."""
        self.counters.tokens_committed += num_tokens
        self.used(lease.published)
        self.claims.settle(lease.id)
        if self.observers.listening:
            self._tell(EventKind.COMMITTED, lease, num_tokens)
        self.admission.look_again()

    def loaded(
        self, lease: Lease, num_tokens: int, *, from_host: int, from_storage: int = 0
    ) -> None:
        """A load has lengthened a lease's prefix; `from_host` includes what a prefetch had brought
        there for it."""
        self.counters.tokens_hit_device += num_tokens - from_host
        self.counters.tokens_hit_host += from_host - from_storage
        self.counters.tokens_hit_storage += from_storage
        self.used(lease.published)  # when it was granted, it was no longer than what was here
        if self.observers.listening:
            self._tell(EventKind.LOADED, lease, num_tokens)

    def released(self, lease: Lease, *, is_running: bool) -> None:
        """A lease is closed; while a run goes on its pages are quarantined, until `ended`."""
        self._leases.pop(lease.id, None)
        self.counters.leases_released += 1
        if is_running:
            self._ending[lease.id] = lease
        self.claims.settle(lease.id)
        if self.observers.listening:
            self._tell(EventKind.RELEASED, lease, lease.committed)
        self.admission.look_again()

    def ended(self, lease: Lease) -> None:
        """The last run of a closed lease has ended."""
        self._ending.pop(lease.id, None)
        self.calmed()

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
        self.calmed()

    def _tell(self, kind: EventKind, lease: Lease, tokens: int) -> None:
        self.observers.on_event(Event(kind, lease_id=lease.id, tokens=tokens))

    def _open_leases(self) -> list[Lease]:
        return [lease for ref in self._leases.values() if (lease := ref()) is not None]

    def all_leases(self) -> list[Lease]:
        """All that hold pages: open, forgotten and not cleaned up, closed with a run going on."""
        holders = (*self._open_leases(), *self._dropped, *self._ending.values())
        found = {lease.id: lease for lease in holders}
        return [found[lease_id] for lease_id in sorted(found)]

    def current_leases(self) -> list[Lease]:
        """Those of this epoch."""
        return [lease for lease in self.all_leases() if lease.epoch == self.epoch]

    # --- the second tier --------------------------------------------------------------------------

    def waits_for_copies(self, num_pages: int) -> bool:
        """Whether copies under way will save what would be dropped for so many more pages."""
        short = self.accounts.short(num_pages)
        return short > 0 and self.write_policy.makes_room(short)

    @property
    def is_storing(self) -> bool:
        """Whether pages are held by copies to the host that will end."""
        return any(transfer.target is Tier.HOST for transfer in self.transfers or ())

    def layer_waits(self, loads: Sequence[Transfer]) -> LayerWaits:
        """What a lease's model waits for, layer by layer."""
        progress = [load.progress for load in loads if load.progress is not None]
        return LayerWaits(progress, self._thread)

    def raise_fence(self, ids: Sequence[PageIds], ready: Any, on_lift: Callable[[], None]) -> Fence:
        """Ids of each component are published that a device has not written yet.

        Raises:
            TypeError: `ready` is nothing to wait for.
        """
        if is_device_event(ready):  # it blocks a thread: not the loop's, nor that of the copies
            waits = asyncio.wrap_future(submit(self._executors.io, ready.synchronize))
        else:
            waits = asyncio.ensure_future(as_awaitable(ready))
        fence = self.fences.raise_over(ids, on_lift)
        # Not the supervisor's: a fence that stands at the close is lifted when it may be.
        waits.add_done_callback(partial(self._lift, fence))
        return fence

    def _lift(self, fence: Fence, waits: asyncio.Future[Any]) -> None:
        error = None if waits.cancelled() else waits.exception()
        if (waits.cancelled() or error is not None) and not self.closed:
            # Nobody knows what the pages hold, and others may have taken them over.
            log.error("`ready` of a commit failed: the cache is reset", exc_info=error)
            self.reset()
        self.fences.lift(fence)

    # --- other ranks ------------------------------------------------------------------------------

    def join(self, name: str | None = None, num_questions: int = UNLIMITED) -> Operation | None:
        """What is done together with the other ranks, if there are any. Without a name it is known
        by the order of asking."""
        if self.ranks.is_alone:
            return None
        if name is None:
            name = f"prefetch {next(self._prefetch_numbers)}"
        return Operation(
            self.ranks,
            name,
            self._supervisor.spawn,
            num_questions=num_questions,
            on_end=self.end_turn,
        )

    def end_turn(self, operation: Operation) -> None:
        """Its lease is admitted on all ranks, or on none."""
        if self.turn is operation:
            self.turn = None
            self.admission.look_again()

    # --- life cycle -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is in flight: a run, a quarantine, background work."""
        if self.runs or self._ending or self._dropped or self._supervisor.num_running:
            return True
        return bool(self.transfers) or bool(self.fences) or self.write_policy.is_busy

    def calmed(self) -> None:
        """Something in flight has ended: let `drain` and the admission queue look again."""
        self.write_policy.look_again()
        self._look_again()

    def _look_again(self) -> None:
        if not self.busy:
            self._quiet.set()
        self.admission.look_again()
        if self._watchers:
            for watcher in self._watchers:
                if not watcher.done():
                    watcher.set_result(None)
            self._watchers.clear()

    async def changed(self) -> None:
        """Until something in flight has ended, or pages have become spare."""
        watcher = self.loop.create_future()
        self._watchers.append(watcher)
        await watcher

    def reset(self) -> None:
        """Drop all content, whatever is in flight (semantics §12.1).

        Pages of leases stay quarantined until the lease has ended; all others are free at once.
        """
        self.pins.close_all()
        held = [lease.held_pages() for lease in self.current_leases()]
        held.append(self.lent.held())
        held_host: list[list[PageIds]] = []
        if self.transfers is not None:
            held += self.transfers.held(Tier.DEVICE)
            held_host = self.transfers.held(Tier.HOST) + self._rows_of_calls()
        self.tree.reset()
        self.epoch = self.tree.epoch
        self.counters.resets += 1
        self.accounts.reset(held)
        self.lent.reset()
        if self.host_pages is not None:
            self.host_pages.reset(held_host)
        if self.transfers is not None:
            self.transfers.reset()
        self.write_policy.reset()
        if self.storage is not None:
            self.storage.reset()
        self.fences.reset()
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
        began = self.now()
        if not self.closed:
            self.closed = True
            self.admission.wake_all()
            self.claims.release_all()
            for lease in self._open_leases():
                lease.close()
            self._close_dropped()
            self.pins.close_all()
            self.runs.cancel_queued()
            if self.transfers is not None:
                self.transfers.cancel_all(stores=False)
            if self.storage is not None:
                self.storage.prefetches.stop_all("the cache is closing")
            else:
                self._end_stores()  # without storage they would be copied for nobody
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self.drain()  # what is on its way to storage comes there
                    for tier in self._tiers:
                        await tier.aclose(None)
        finally:  # also when whoever closes is cancelled
            self._end_stores()
            for tier in self._tiers:
                tier.end()
            if not self._given_up.done():
                self._given_up.set_result(None)
            self._supervisor.stop()
            self._shut_down_after(self._tiers)
        await self._supervisor.aclose(SUPERVISOR_LIMIT_S)
        if not self.busy:
            for tier in self._tiers:
                await tier.aclose(SUPERVISOR_LIMIT_S)
            left_s = None if limit is None else max(0.0, limit - (self.now() - began))
            await threads_ended(self._executors.owned, left_s)
        if self._host is not None and not self.transfers and not self.storage_calls():
            self._host.close()
        return self.outstanding()

    def _shut_down_after(self, tiers: Sequence[StorageTier]) -> None:
        """A backend may need a thread to let go of what it has."""
        if tiers:
            tiers[0].when_gone(partial(self._shut_down_after, tiers[1:]))
        else:
            for executor in self._executors.owned:
                executor.shutdown(wait=False)

    def _end_stores(self) -> None:
        """Nothing more goes to the host."""
        self.write_policy.close()
        if self.transfers is not None:
            self.transfers.cancel_all()

    # --- looking ----------------------------------------------------------------------------------

    def outstanding(self) -> list[Outstanding]:
        """All that somebody holds, oldest first."""
        return ledger.outstanding(self)

    def stats(self) -> CacheStats:
        return ledger.stats(self)

    def check_integrity(self) -> None:
        """Prove the tree's invariants, the page accounts and that no page has two owners (§2)."""
        self.tree.check_integrity()
        ledger.check(self)

    def is_ending(self, lease: Lease) -> bool:
        """Whether it is closed, and a run or a device still touches its pages."""
        return lease.id in self._ending

    @property
    def num_background_failures(self) -> int:
        return self._supervisor.num_failures
