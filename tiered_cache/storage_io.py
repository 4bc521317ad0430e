"""Calls of the storage backend: each with a limit, each with an end, and the rows that it touches
known until then (semantics §9.3).

A waiter has a limit, a call has none: when the limit has passed, the call counts as failed, and its
rows stay quarantined until nobody touches them any more. Owns: the calls under way. Refuses to
know: what is read or written for whom, and what becomes of the rows.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tiered_cache.errors import BackendError
from tiered_cache.jobs import DaemonExecutor, run_to_end, submit
from tiered_cache.storage.backend import ReadResult, WriteResult
from tiered_cache.storage.record import Arrivals, Departures

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from tiered_cache.pools.host import HostArena
    from tiered_cache.stats import StorageCounters
    from tiered_cache.storage.backend import SealingBackend
    from tiered_cache.storage.health import Breaker
    from tiered_cache.storage.record import RecordFormat
    from tiered_cache.storage.wrappers import Limited
    from tiered_cache.types import PageIds

T = TypeVar("T")

MAX_SUSPECTS: Final = 4096
"""Pages that are remembered as wrong in storage; of more the oldest are read, and found wrong,
again."""

MAX_REPLACED: Final = 4
"""Threads that hang and are replaced (semantics §9.3); after that storage is not asked any more."""


BUSY_S: Final = 0.02
"""A job that runs for longer waits for something: computing takes 1 ms per MiB at most."""


class Turns:
    """So many jobs compute at a time. More than there are cores would only keep one another, and
    the event loop, from the interpreter's lock: whoever holds it is then mostly not running."""

    def __init__(self, num_busy: int) -> None:
        self._free = asyncio.Semaphore(num_busy)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Until the block ends, or has taken so long that it does not compute."""
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._free.release()

        await self._free.acquire()
        timer = asyncio.get_running_loop().call_later(BUSY_S, end)
        try:
            yield
        finally:
            timer.cancel()
            end()


def num_spare_cores() -> int:
    """Cores that this process may use, without the event loop's; one at least."""
    usable = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return max(1, len(usable) - 1)


class ThreadContext:
    """What a backend is given: the cache's io threads.

    Args:
        given_up: done when the cache is closed and waits no longer.
        num_busy: how many jobs may compute at the same time; others have their turn later, or as
            soon as one of them turns out to wait.
    """

    def __init__(
        self,
        executor: concurrent.futures.Executor,
        num_threads: int,
        given_up: asyncio.Future[None] | None = None,
        num_busy: int | None = None,
    ) -> None:
        self._executor = executor
        self._given_up = given_up
        self._turns = Turns(num_busy or num_threads)
        self._jobs: set[concurrent.futures.Future[Any]] = set()
        self.num_threads = num_threads

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """See `BackendContext.run`."""
        async with self._turns.turn():
            job = submit(self._executor, fn, *args)
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)
            return await run_to_end(job, self._given_up)

    @property
    def num_running(self) -> int:
        """Jobs that have not ended, also those that nobody waits for any more."""
        return len(self._jobs)

    def replace_hung(self, num_hung: int) -> None:
        """So many threads hang: have as many more."""
        if isinstance(self._executor, DaemonExecutor):
            self._executor.grow_to(self.num_threads + num_hung)


class StorageCall:
    """One batch on its way between rows of the host and storage.

    Attributes:
        results: per row, when it has ended well.
        error: why it has not, or has not in time.
        answered: set when it has ended, its limit has passed, or nobody wants it any more.
        ended: set when nobody touches its rows any more.
        is_given_up: nobody wants what it brings.
        clears: how often storage had been cleared when it began.
    """

    __slots__ = (
        "answered",
        "clears",
        "component",
        "ended",
        "epoch",
        "error",
        "ids",
        "is_given_up",
        "is_read",
        "on_end",
        "results",
        "started_at",
        "task",
    )

    def __init__(
        self,
        component: int,
        ids: PageIds,
        epoch: int,
        on_end: Callable[[StorageCall], None],
        *,
        is_read: bool,
        clears: int,
    ) -> None:
        self.clears = clears
        self.component = component
        self.ids = ids
        self.epoch = epoch
        self.on_end = on_end
        self.is_read = is_read
        self.results: Sequence[Any] = ()
        self.error: BackendError | None = None
        self.answered = asyncio.Event()
        self.ended = asyncio.Event()
        self.is_given_up = False
        self.started_at = 0.0
        self.task: asyncio.Task[None]

    @property
    def is_quiet(self) -> bool:
        """Whether nobody touches its rows any more."""
        return self.ended.is_set()

    @property
    def num_good(self) -> int:
        """Rows from the first on that have been read, or are kept now."""
        good = (ReadResult.READ, WriteResult.WRITTEN, WriteResult.EXISTS)
        for count, result in enumerate(self.results):
            if result not in good:
                return count
        return len(self.results)

    def __repr__(self) -> str:
        return f"<storage {'read' if self.is_read else 'write'} of {len(self.ids)} pages>"


class StorageIO:
    """All calls of one backend that touch rows, and the questions that do not.

    Args:
        backend: with its wrappers; `limited` is the one among them that bounds calls.
        formats, arenas: per component in dense order.
        limit_s: seconds that a call may take.
        spawn: starts background work.

    Attributes:
        num_clears: how often storage was cleared: what was asked, read or written before says
            nothing of what is there after.
    """

    def __init__(
        self,
        backend: SealingBackend,
        limited: Limited,
        breakers: tuple[Breaker, Breaker],
        context: ThreadContext,
        formats: Sequence[RecordFormat],
        arenas: Sequence[HostArena],
        counters: StorageCounters,
        limit_s: float,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self.backend = backend
        self.reads, self.writes = breakers
        self.formats = formats
        self.counters = counters
        self._limited = limited
        self._context = context
        self._arenas = arenas
        self._limit_s = limit_s
        self._spawn = spawn
        self.num_clears = 0
        self._loop = asyncio.get_running_loop()
        self._active: dict[StorageCall, None] = {}
        self._num_hung = 0
        self._suspects: dict[tuple[int, bytes], bool] = {}  # by component; the oldest first

    # --- what is known to be wrong ----------------------------------------------------------------

    def suspect(self, component: int, page_keys: Sequence[bytes], *, is_read: bool = True) -> None:
        """What storage has of these pages of a component is not what it should be, or (not
        `is_read`) cannot be read: it is written again by the next backup (semantics §10.3)."""
        for key in page_keys:
            is_wrong = is_read or self.is_wrong(component, key)
            self._suspects[component, key] = is_wrong
        while len(self._suspects) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]

    def is_suspect(self, component: int, page_key: bytes) -> bool:
        """Whether it is to be written again."""
        return (component, page_key) in self._suspects

    def is_wrong(self, component: int, page_key: bytes) -> bool:
        """Whether it counts as missing until then; what could not be read may be read again."""
        return self._suspects.get((component, page_key), False)

    def clear_suspect(self, component: int, page_key: bytes) -> None:
        """It was written again, or could be read after all."""
        self._suspects.pop((component, page_key), None)

    # --- questions --------------------------------------------------------------------------------

    async def contains(self, component: int, page_keys: Sequence[bytes]) -> list[bool]:
        """Which pages of a component are kept.

        Raises:
            BackendError: nobody knows.
        """
        record = self.formats[component]
        keys = [record.object_key(key) for key in page_keys]
        return await self._within_limit(lambda: self.backend.contains(keys), self.reads)

    async def delete(self, component: int, page_keys: Sequence[bytes]) -> None:
        """Keep them no longer.

        Raises:
            BackendError: they may still be there.
        """
        record = self.formats[component]
        keys = [record.object_key(key) for key in page_keys]
        await self._within_limit(lambda: self.backend.delete(keys), self.writes)

    async def _within_limit(
        self, question: Callable[[], Coroutine[Any, Any, T]], breaker: Breaker
    ) -> T:
        """No buffer is touched, so nobody need wait for what does not end."""
        answer: asyncio.Future[T] = self._loop.create_future()

        async def ask() -> None:
            try:
                result = await question()
            except BackendError as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(result)
            finally:
                if not answer.done():
                    answer.cancel()

        task = self._spawn(ask(), "storage question")
        try:
            done, _ = await asyncio.wait([answer], timeout=self._limit_s)
        except asyncio.CancelledError:
            answer.cancel()
            task.cancel()
            raise
        if not done:
            answer.cancel()
            self.counters.calls_timed_out += 1
            breaker.failed(f"no answer within {self._limit_s:g} s")
            self._replace(task)
            raise BackendError(f"no answer within {self._limit_s:g} s")
        if answer.cancelled():
            raise BackendError("the cache is closing")
        return answer.result()

    # --- rows -------------------------------------------------------------------------------------

    def read(
        self,
        component: int,
        page_keys: Sequence[bytes],
        ids: PageIds,
        epoch: int,
        on_end: Callable[[StorageCall], None],
    ) -> StorageCall:
        """Fill rows. `on_end` is called in the very step in which they are quiet and proved."""
        call = StorageCall(component, ids, epoch, on_end, is_read=True, clears=self.num_clears)
        return self._start(call, partial(self._read, call, page_keys))

    def write(
        self,
        component: int,
        page_keys: Sequence[bytes],
        ids: PageIds,
        epoch: int,
        on_end: Callable[[StorageCall], None],
    ) -> StorageCall:
        """Keep rows; likewise."""
        call = StorageCall(component, ids, epoch, on_end, is_read=False, clears=self.num_clears)
        return self._start(call, partial(self._write, call, page_keys))

    def _start(
        self, call: StorageCall, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> StorageCall:
        call.started_at = self._loop.time()
        self._active[call] = None
        timer = self._loop.call_later(self._limit_s, self._expire, call)
        call.task = self._spawn(self._run(call, work, timer), "storage call")
        call.task.add_done_callback(partial(self._never_began, call))
        return call

    def _never_began(self, call: StorageCall, _: asyncio.Task[None]) -> None:
        """Its task was cancelled before its first step."""
        if not call.is_quiet:
            call.error = call.error or BackendError("nobody needs it any more")
            self._end(call)

    async def _run(
        self,
        call: StorageCall,
        work: Callable[[], Coroutine[Any, Any, None]],
        timer: asyncio.TimerHandle,
    ) -> None:
        try:
            await work()
        except BackendError as error:
            call.error = call.error or error
        except asyncio.CancelledError:
            call.error = call.error or BackendError("nobody needs it any more")
            raise
        except BaseException:
            call.error = call.error or BackendError("failed in the library itself")
            raise
        finally:
            timer.cancel()
            self._end(call)

    def _end(self, call: StorageCall) -> None:
        if call.is_quiet:
            return
        call.ended.set()
        call.answered.set()
        del self._active[call]
        if call.error is not None:
            call.results = ()
        call.on_end(call)

    async def _read(self, call: StorageCall, page_keys: Sequence[bytes]) -> None:
        record = self.formats[call.component]
        rows = self._rows(call)
        keys = [record.object_key(key) for key in page_keys]
        arrivals = Arrivals(record, rows, page_keys)
        results = await self.backend.read(keys, rows, arrivals.arrived)
        there = [at for at, result in enumerate(results) if result is ReadResult.READ]
        if not arrivals.are_judged(there):
            await self._context.run(arrivals.verdicts, there)
        for at, verdict in zip(there, arrivals.verdicts(there), strict=True):
            if verdict is not None:
                results[at] = ReadResult.CORRUPT
                self.counters.objects_corrupt += 1
        call.results = results

    async def _write(self, call: StorageCall, page_keys: Sequence[bytes]) -> None:
        record = self.formats[call.component]
        rows = self._rows(call)
        keys = [record.object_key(key) for key in page_keys]
        seal = Departures(record, rows, page_keys).seal
        call.results = await self.backend.write(keys, rows, seal)

    def _rows(self, call: StorageCall) -> list[memoryview]:
        arena = self._arenas[call.component]
        return [arena.row(int(page)) for page in call.ids]

    # --- limits -----------------------------------------------------------------------------------

    def give_up(self, call: StorageCall) -> None:
        """Nobody wants it any more: what has not begun never does, what runs ends."""
        if not call.is_quiet and not call.is_given_up:
            call.is_given_up = True
            call.answered.set()
            call.task.cancel()

    def _expire(self, call: StorageCall) -> None:
        if call.is_quiet:
            return
        call.error = BackendError(f"no answer within {self._limit_s:g} s")
        call.answered.set()
        self.counters.calls_timed_out += 1
        (self.reads if call.is_read else self.writes).failed(str(call.error))
        self._replace(call.task)

    def _replace(self, hung: asyncio.Task[None]) -> None:
        """A call hangs: its thread and its turn are held by nobody who works. One that has had no
        turn yet gets none."""
        if hung.done() or self._limited.withdraw(hung):
            return
        self._num_hung += 1
        if self._num_hung <= MAX_REPLACED:
            self._limited.replace(hung)
            self._context.replace_hung(self._num_hung)
        else:
            for breaker in (self.reads, self.writes):
                breaker.open(f"{self._num_hung} calls hang")
        hung.add_done_callback(self._hung_ended)

    def _hung_ended(self, hung: asyncio.Task[None]) -> None:
        self._num_hung -= 1
        self._limited.hung_ended(hung)

    # --- looking ----------------------------------------------------------------------------------

    @property
    def num_hung(self) -> int:
        """Calls beyond their limit that have not ended."""
        return self._num_hung

    def __iter__(self) -> Iterator[StorageCall]:
        return iter(tuple(self._active))

    def __len__(self) -> int:
        return len(self._active)
