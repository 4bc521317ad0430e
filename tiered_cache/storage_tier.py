"""The third tier of one cache, from its connection to its end.

Puts the wrappers around a backend, connects, connects again, notices when it is unwell and when it
is well again. Owns: the connection and its health. Refuses to know: which backend it is, what is
prefetched and what is backed up.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tiered_cache.backup import Backups
from tiered_cache.backup_parts import BackupsOfParts
from tiered_cache.errors import BackendError, ClosedError
from tiered_cache.jobs import is_cancelled
from tiered_cache.observe import Event, EventKind
from tiered_cache.prefetch import Prefetches, PrefetchHooks
from tiered_cache.prefetch_parts import PrefetchesOfParts
from tiered_cache.stats import StorageCounters, StorageStats
from tiered_cache.storage.backend import (
    KEY_BYTES,
    SCOPE_BYTES,
    BackendStats,
    ObjectKey,
    SealingBackend,
    StorageBackend,
    ignore_arrivals,
    sealed_already,
)
from tiered_cache.storage.health import Breaker, BreakerSettings, HealthState
from tiered_cache.storage.wrappers import Counted, Guarded, Limited, Sealed, Wrapper, said
from tiered_cache.storage_io import StorageIO
from tiered_cache.tree.node import BASE
from tiered_cache.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from tiered_cache.accounts import HostPages
    from tiered_cache.config.schema import StorageConfig
    from tiered_cache.observe import Observers
    from tiered_cache.pools.host import HostArena
    from tiered_cache.ranks import Operation
    from tiered_cache.stats import Counters
    from tiered_cache.storage.backend import BackendContext, BackendOptions, ReadResult, WriteResult
    from tiered_cache.storage.record import RecordFormat
    from tiered_cache.storage_io import ThreadContext
    from tiered_cache.tree.radix import RadixTree

log = logging.getLogger(__name__)

PROBE_PAGE: Final = bytes(KEY_BYTES - SCOPE_BYTES)
"""The page key that a probe asks for."""

SWEEP_NODES: Final = 1000
"""Nodes whose belief is taken back between two turns of the loop."""


@dataclass(frozen=True, slots=True)
class StorageParts:
    """What a third tier is made of.

    `formats`: how the rows of each component prove what they are, in dense order. `writes`: per
    component, whether this rank writes it. `settings`: the `storage` section. `given`: a backend
    that is open already, and stays open.
    """

    backend: type[StorageBackend]
    options: BackendOptions = field(repr=False)  # an address may hold a password
    formats: tuple[RecordFormat, ...]
    writes: tuple[bool, ...]
    settings: StorageConfig
    given: StorageBackend | None = None

    async def connect(self, context: BackendContext) -> StorageBackend:
        if self.given is not None:
            return self.given
        return await self.backend.open(self.options, context)

    async def close(self, backend: StorageBackend) -> None:
        if self.given is None:
            await backend.aclose()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a third tier needs of the cache around it."""

    tree: RadixTree
    host: HostPages
    arenas: Sequence[HostArena]
    counters: Counters
    context: ThreadContext
    observers: Observers
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    join: Callable[[str | None, int], Operation | None]
    changed: Callable[[], None]
    check_thread: Callable[[], None]


class StorageTier:
    """One attached backend. Made by the controller; `start` connects, `aclose` ends."""

    def __init__(self, parts: StorageParts, around: Surroundings) -> None:
        self.parts = parts
        self._around = around
        self._loop = asyncio.get_running_loop()
        settings = parts.settings
        breaker = BreakerSettings(
            failures=settings.breaker.failures,
            retry_after=settings.breaker.retry_after,
            max_retry_after=settings.breaker.max_retry_after,
            slow=settings.breaker.slow,
        )
        clock = self._loop.time
        self.reads = Breaker(breaker, clock, partial(self._health_changed, "reads"))
        self.writes = Breaker(breaker, clock, partial(self._health_changed, "writes"))
        self.counters = StorageCounters()
        self._connection = _Connection()
        limited = Limited(self._connection, settings.max_concurrency, self._queue_changed)
        guarded = Guarded(limited, self.reads, self.writes, clock, settings.timeout)
        self.backend = Counted(guarded, self.counters)
        self.io = StorageIO(
            self.backend,
            limited,
            (self.reads, self.writes),
            around.context,
            parts.formats,
            around.arenas,
            self.counters,
            settings.timeout,
            around.spawn,
        )
        has_parts = any(component.has_tombstones for component in around.tree.components)
        self.prefetches = (PrefetchesOfParts if has_parts else Prefetches)(
            around.tree,
            around.host,
            self.io,
            settings.prefetch,
            around.counters,
            PrefetchHooks(around.spawn, around.join, around.changed, around.check_thread),
        )
        self.backups = (BackupsOfParts if has_parts else Backups)(
            around.tree,
            around.host,
            self.io,
            around.counters,
            max(1, settings.backup.max_pending // parts.formats[BASE].row_bytes),
            parts.writes,
            around.spawn,
            around.changed,
        )
        self._opened: list[StorageBackend] = []  # and not closed
        self._closings: set[asyncio.Task[None]] = set()
        self._on_gone: list[Callable[[], object]] = []
        self.forgotten = asyncio.Event()
        """Set when the tree believes nothing of it any more, after `detach`."""
        self._timers: list[asyncio.TimerHandle] = []
        self._retry_s = settings.breaker.retry_after
        self._tried = asyncio.Event()  # not while it connects
        self._tried.set()
        self._is_closed = False

    # --- connection -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect; if that cannot be now, go on without and try again, unless it is required.

        Raises:
            BackendError: it is required.
        """
        try:
            await self._connect()
        except BackendError as error:
            if self.parts.settings.required:
                await self.aclose(self.parts.settings.timeout)
                raise
            log.warning("storage is not there, the cache goes on without: %s", error)
            self._connect_later()

    async def _connect(self) -> None:
        settings = self.parts.settings
        self._tried.clear()
        try:
            async with asyncio.timeout(settings.timeout):
                await self._close_opened()  # of a try that came half way
                backend = await self.parts.connect(self._around.context)
                self._opened.append(backend)
                for arena in self._around.arenas:
                    await backend.register_memory(arena.rows.data.cast("B"))
        except BackendError as error:
            self._connection.reason = str(error)
            raise
        except TimeoutError as error:
            self._connection.reason = f"no answer within {settings.timeout:g} s"
            raise BackendError(self._connection.reason) from error
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            self._connection.reason = said(error)
            raise BackendError(self._connection.reason) from error
        finally:
            self._tried.set()
            if self._is_closed and self._opened and not self._closings:  # before it began
                self._begin_to_close()
        if self._is_closed:
            return
        self._connection.backend = Sealed.unless_it_seals(backend, self._around.context)
        for breaker in (self.reads, self.writes):
            breaker.close()

    def _connect_later(self) -> None:
        if self._is_closed:
            return  # while it was tried
        self._later(self._retry_s, self._connect_again, "connect")
        self._retry_s = min(2 * self._retry_s, self.parts.settings.breaker.max_retry_after)

    async def _connect_again(self) -> None:
        if self._is_closed:
            return
        try:
            await self._connect()
        except BackendError:
            self._connect_later()
        else:
            log.info("storage is there")

    @property
    def is_connected(self) -> bool:
        return self._connection.backend is not None

    # --- health -----------------------------------------------------------------------------------

    def _queue_changed(self, num_waiting: int) -> None:
        self.reads.note_queue(num_waiting)
        self.writes.note_queue(num_waiting)

    def _health_changed(self, direction: str, old: HealthState, new: HealthState) -> None:
        breaker = self.reads if direction == "reads" else self.writes
        text = f"storage {direction}: {old.value} -> {new.value}"
        if breaker.reason and new is not HealthState.CLOSED:
            text += f": {breaker.reason}"
        log.log(logging.WARNING if new is HealthState.OPEN else logging.INFO, text)
        if self._around.observers.listening:
            event = Event(EventKind.HEALTH, tier=Tier.STORAGE, detail=text)
            self._around.observers.on_event(event)
        if new is HealthState.OPEN and breaker is self.reads and self.is_connected:
            # A probe finds out, so that no request has to. Writes are nobody's request: the next
            # backup finds out.
            self._probe_later()

    def _probe_later(self) -> None:
        delay_s = max(0.0, self.reads.retry_at - self._loop.time())
        self._later(delay_s, self._probe, "storage probe")

    def _later(
        self, delay_s: float, work: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> None:
        def begin() -> None:
            self._timers.remove(timer)
            with suppress(ClosedError):
                self._around.spawn(work(), name)

        timer = self._loop.call_later(delay_s, begin)
        self._timers.append(timer)

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    async def _probe(self) -> None:
        if not (self.is_connected and self.reads.state is HealthState.OPEN):
            return
        if not self.reads.is_due:
            self._probe_later()  # its timer came early
            return
        with suppress(BackendError):  # the breaker has taken note, and asks for another
            await self.io.contains(BASE, [PROBE_PAGE])

    # --- life cycle -------------------------------------------------------------------------------

    def reset(self) -> None:
        """The tree has forgotten everything."""
        self.prefetches.reset()
        self.backups.reset()

    async def clear(self) -> int:
        """Delete what storage has of this model in this format; how many objects that were
        (semantics §12.1)."""
        await self._forget_beliefs()
        found = 0
        try:
            for record in self.parts.formats:
                found += await self.backend.clear(record.scope)
        finally:  # also what was written meanwhile; and part of it may have gone, or all
            self.io.num_clears += 1
            forgetting = self._around.spawn(self._forget_beliefs(), "forget storage")
        await asyncio.wait([forgetting])
        return found

    async def detach(self, limit: float | None) -> None:
        """End it while the cache goes on: what waits to be written is not, what the tree believes
        to be stored it believes no longer.

        Nothing that it has begun comes to a good end, so there is nothing to believe. It goes on
        when whoever waits is cancelled, or `limit` seconds have passed.
        """
        self.end()
        forgetting = self._around.spawn(self._forget_beliefs(), "forget storage")
        forgetting.add_done_callback(lambda _: self.forgotten.set())
        closing = self._around.spawn(self.aclose(None), "close storage")
        await self.forgotten.wait()
        await asyncio.wait([closing], timeout=limit)

    async def _forget_beliefs(self) -> None:
        for forgotten in self._around.tree.forget_all_stored(SWEEP_NODES):
            self._around.host.take_back(forgotten)
            await asyncio.sleep(0)

    def end(self) -> None:
        """Nobody is to wait any longer, nothing is to begin, and the backend is closed as soon as
        nobody uses it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_timers()
        self._connection.end("detached")
        self.prefetches.stop_all("storage is being detached")
        self.backups.close()
        for call in self.io:
            self.io.give_up(call)
        self._begin_to_close()

    async def aclose(self, limit: float | None) -> None:
        """`end` it, and wait up to `limit` seconds until the backend is closed. What hangs keeps
        it."""
        self.end()
        if self._opened and not self._closings:  # somebody has cancelled all tasks of the loop
            self._begin_to_close()
        if self._closings:
            await asyncio.wait(self._closings, timeout=limit)

    def _begin_to_close(self) -> None:
        """In a task of its own: whoever ends the tier may be cancelled, or not wait."""
        closing = self._loop.create_task(self._close(), name="tiered-cache-storage-close")
        self._closings.add(closing)
        closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closings.discard(closing)
        while self._on_gone and self._is_gone:
            self._on_gone.pop()()

    @property
    def _is_gone(self) -> bool:
        return not (self._closings or self._opened)

    def when_gone(self, action: Callable[[], object]) -> None:
        """After `end`: call it when no call is under way and the backend is closed."""
        if self._is_gone:
            action()
        else:
            self._on_gone.append(action)

    async def _close(self) -> None:
        for call in self.io:
            await call.ended.wait()
        await self._connection.idle()
        await self._tried.wait()  # who connects yet opens what is to be closed
        if self._around.context.num_running:
            self._opened.clear()  # threads that the cache has given up keep it
        await self._close_opened()

    async def _close_opened(self) -> None:
        while self._opened:
            try:
                await self.parts.close(self._opened.pop())
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and is_cancelled():
                    raise
                log.warning("the storage backend did not close well: %s", said(error))

    # --- looking ----------------------------------------------------------------------------------

    @property
    def _reason(self) -> str:
        if self._connection.backend is None:
            return self._connection.reason
        return self.reads.reason or self.writes.reason

    def stats(self) -> StorageStats:
        """A frozen snapshot."""
        backend = self._connection.backend
        known = backend.stats() if backend is not None else BackendStats()
        return StorageStats(
            is_connected=backend is not None,
            reads=self.reads.state.value,
            writes=self.writes.state.value,
            reason=self._reason,
            read_latency_s=self.reads.latency_s,
            write_latency_s=self.writes.latency_s,
            calls_queued=self.reads.queued,
            calls_hung=self.io.num_hung,
            pages_pending=self.backups.num_pending,
            pages_prefetched=self.prefetches.num_pages,
            num_objects=known.num_objects,
            num_bytes=known.num_bytes,
            max_bytes=known.max_bytes,
            counters=replace(self.counters),
        )


class _Connection(Wrapper[SealingBackend]):
    """The backend, while there is one; before and after, every call fails, with the reason. Knows
    how many calls are under way, so that a backend is closed under none."""

    def __init__(self) -> None:
        self.backend: SealingBackend | None = None
        self.reason = "not connected yet"
        self._num_calls = 0
        self._ended = asyncio.Event()

    def end(self, reason: str) -> None:
        """Nothing begins any more."""
        self.backend = None
        self.reason = reason

    async def idle(self) -> None:
        """Until no call is under way."""
        while self._num_calls:
            self._ended.clear()
            await self._ended.wait()

    @contextmanager
    def _asked(self) -> Iterator[SealingBackend]:
        backend = self._inner
        self._num_calls += 1
        try:
            yield backend
        finally:
            self._num_calls -= 1
            self._ended.set()

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._asked() as backend:
            return await backend.contains(keys)

    async def read(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        arrived: Callable[[int, int], None] = ignore_arrivals,
    ) -> list[ReadResult]:
        with self._asked() as backend:
            return await backend.read(keys, rows, arrived)

    async def write(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        seal: Callable[[int, int], None] = sealed_already,
    ) -> list[WriteResult]:
        with self._asked() as backend:
            return await backend.write(keys, rows, seal)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        with self._asked() as backend:
            await backend.delete(keys)

    async def clear(self, scope: bytes) -> int:
        with self._asked() as backend:
            return await backend.clear(scope)

    @property
    def _inner(self) -> SealingBackend:  # type: ignore[override]  # here it comes and goes
        if self.backend is None:
            raise BackendError(f"storage is not connected: {self.reason}")
        return self.backend
