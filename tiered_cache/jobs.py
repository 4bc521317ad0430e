"""Work that leaves the loop or outlives a call: executors, the one helper that awaits a job to its
real end, and the supervisor of background tasks.

Owns: daemon threads (so that a hung job cannot block interpreter exit) and the only shield of the
library. Refuses to know what the jobs do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import queue
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tiered_cache.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

log = logging.getLogger(__name__)

T = TypeVar("T")

STOP: Final = None

NOT_ACROSS_THREADS: Final = (
    asyncio.CancelledError,
    concurrent.futures.CancelledError,
    StopIteration,
    GeneratorExit,
    KeyboardInterrupt,
    SystemExit,
)
"""What means something of its own to an event loop, up to ending it."""


give_way: Final[Callable[[], None]] = getattr(os, "sched_yield", lambda: None)
"""Let go of the core if somebody waits for it, the event loop for one: for a thread that computes
without end. Windows has no such call."""


class DaemonExecutor(concurrent.futures.Executor):
    """A bounded pool of daemon threads, first in first out.

    Queued jobs can be cancelled; running ones cannot. Unlike the standard pool it does not make the
    interpreter wait for its threads at exit. `nice`: how far its threads give way to others where
    cores are short (the unit of `os.nice`). `ended`: done when it is shut down and no thread of it
    holds anything any more.
    """

    def __init__(self, name: str, num_threads: int, *, nice: int = 0) -> None:
        if num_threads < 1:
            raise ValueError(f"an executor needs at least one thread, not {num_threads}")
        self._name = name
        self._num_threads = num_threads
        self._nice = nice
        self._queue: queue.SimpleQueue[
            tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None
        ]
        self._queue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_working = 0
        self._lock = threading.Lock()
        self._closed = False
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    def submit(
        self, fn: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[T]:
        """Queue `fn(*args, **kwargs)`. Threads are started as they are needed."""
        if self._closed:
            raise RuntimeError(f"the {self._name} executor is shut down")
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._queue.put((future, lambda: fn(*args, **kwargs)))
        if len(self._threads) < self._num_threads:
            self._start_thread()
        return future

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=self._work, name=f"tiered-cache-{self._name}-{len(self._threads)}", daemon=True
        )
        self._threads.append(thread)
        with self._lock:
            self._num_working += 1
        thread.start()

    def _work(self) -> None:
        if self._nice and sys.platform == "linux":  # elsewhere a priority is the whole process's
            thread = threading.get_native_id()
            with suppress(OSError):
                priority = os.getpriority(os.PRIO_PROCESS, thread) + self._nice
                os.setpriority(os.PRIO_PROCESS, thread, min(priority, 19))
        while (item := self._queue.get()) is not STOP:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            del item, future, call  # an idle thread keeps nothing alive
        with self._lock:
            self._num_working -= 1
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._closed and not self._num_working and not self.ended.done():
            self.ended.set_result(None)

    def grow_to(self, num_threads: int) -> None:
        """Have so many threads at least, now: others hang, and what is queued must go on."""
        if self._closed:
            return
        self._num_threads = max(self._num_threads, num_threads)
        while len(self._threads) < num_threads:
            self._start_thread()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after what is queued. With `wait`, blocks until they have."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._queue.put(STOP)
            with self._lock:
                self._end_if_idle()
        if wait:
            for thread in self._threads:
                thread.join()


async def threads_ended(
    executors: Iterable[concurrent.futures.Executor], timeout: float | None
) -> None:
    """Until executors that were shut down have no thread left that holds anything, or `timeout`
    seconds have passed.

    A thread that lets go of a tensor while the interpreter is being finalised ends the process
    (C++ frees it without the GIL, and a thread that asks for the GIL then is unwound through it).
    """
    ends = [
        asyncio.wrap_future(executor.ended)
        for executor in executors
        if isinstance(executor, DaemonExecutor)
    ]
    if ends:
        await asyncio.wait(ends, timeout=timeout)


def submit(
    executor: concurrent.futures.Executor, fn: Callable[..., T], *args: Any
) -> concurrent.futures.Future[T]:
    """Queue `fn(*args)`; what it raises will not pose as the event loop's own.

    Raises:
        ClosedError: the executor is shut down.
    """
    try:
        return executor.submit(_guarded, fn, args)
    except RuntimeError as error:
        raise ClosedError(f"the executor takes no more work: {error}") from error


async def run_to_end(
    job: concurrent.futures.Future[T], given_up: asyncio.Future[None] | None = None
) -> T:
    """Await a submitted job; when this returns or raises, nobody runs it any more (semantics §9.3).

    Cancelled while the job is queued, it ends at once and the job never runs. Cancelled while it is
    running, it waits for the thread, however often it is cancelled meanwhile, then raises
    `CancelledError`. The one exception: when `given_up` is done, a cancelled caller is not kept any
    longer. The job may still run then (`job.done()` says), and its buffers stay quarantined.

    Raises:
        ClosedError: somebody else cancelled the job while it was queued.
    """
    waiter = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        if waiter.cancelled() and not is_cancelled():
            # Nobody has cancelled the caller, so it must not look as if.
            raise ClosedError("dropped before it began: its executor was shut down") from None
        if not job.cancel():
            await _settled(waiter, given_up)
        raise


def is_cancelled() -> bool:
    """Whether somebody has cancelled the task that asks; else a `CancelledError` is one that
    somebody's code has raised of itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _settled(waiter: asyncio.Future[Any], given_up: asyncio.Future[None] | None) -> None:
    waiter.add_done_callback(_seen)
    ends = [waiter] if given_up is None else [waiter, given_up]
    while not any(end.done() for end in ends):
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            continue  # the first is raised when the thread has ended; more of them change nothing
    waiter.cancel()  # given up: it must not call a loop that may be closed by then


def _seen(waiter: asyncio.Future[Any]) -> None:
    """Whoever waited has gone: nobody else will look at how it ended."""
    if not waiter.cancelled():
        waiter.exception()


def _guarded(fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Keep exceptions that mean something to the event loop from posing as its own."""
    try:
        return fn(*args)
    except NOT_ACROSS_THREADS as error:
        raise RuntimeError(
            f"{getattr(fn, '__qualname__', fn)!s} raised {type(error).__name__} in its thread"
        ) from error


class Supervisor:
    """One task that owns the background tasks of a cache (semantics §12.3).

    A child that fails is logged and counted; its siblings and the opener go on.
    """

    def __init__(self, on_end: Callable[[], object]) -> None:
        self.num_failures = 0
        self._on_end = on_end
        self._children: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._supervise(ready), name="tiered-cache-supervisor")
        try:
            await ready.wait()
        except BaseException:
            self.stop()
            raise

    async def _supervise(self, ready: asyncio.Event) -> None:
        async with self._group:
            ready.set()
            await self._closing.wait()
            for child in tuple(self._children):
                child.cancel()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in the background; `on_end` is called when it no longer counts as running.

        Raises:
            ClosedError: everything is at its end.
        """
        contained = self._contained(work, name)
        try:
            child = self._group.create_task(contained, name=f"tiered-cache-{name}")
        except RuntimeError as error:  # its group has ended
            contained.close()
            work.close()
            raise ClosedError(f"no background task begins any more: {name}") from error
        self._children.add(child)
        child.add_done_callback(self._ended)
        # Cancelled before its first step, the child has never begun to await it.
        child.add_done_callback(lambda _: work.close())
        return child

    def _ended(self, child: asyncio.Task[None]) -> None:
        self._children.discard(child)
        self._on_end()

    async def _contained(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception:
            self.num_failures += 1
            log.exception("background task %s failed", name)

    @property
    def num_running(self) -> int:
        return len(self._children)

    def stop(self) -> None:
        """Cancel what runs and end, in the next turns of the loop."""
        self._closing.set()

    async def aclose(self, timeout: float | None = None) -> None:
        """`stop`, and wait for the end, up to `timeout` seconds: a child may be somebody else's
        code. Idempotent, from any task."""
        self.stop()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout)
