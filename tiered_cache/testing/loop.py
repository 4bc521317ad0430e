"""An event loop on which every interleaving replays from its seed, and an executor without threads.

The clock is virtual: when nothing is ready it jumps to the next timer, so nothing sleeps and five
seconds are exact. Order is drawn from the seed, within what a program may rely on elsewhere too.

What stays as on any loop:

* Turns. What is scheduled during a turn runs in the next one, and all of it does. Whoever counts
  turns (`await asyncio.sleep(0)`, "three turns later") counts right.
* Callbacks (`call_soon`, done callbacks of futures) that one source schedules run in that order.
  A source is a task, or a timer with the callbacks that follow from it.
* A task's step does not overtake callbacks that its waker scheduled before it: a future's done
  callbacks have run when those who awaited it, and came later, go on.
* A task that gives way (`await asyncio.sleep(0)`) goes on after all that it has set off: tasks that
  it has started, woken or cancelled have had a step.
* Timers run in the order of their times, never early.

What is drawn, because on other machines, days and loads it would come otherwise:

* Steps of different tasks in one turn, whoever woke them and in whatever order.
* Callbacks of different sources in one turn.
* How many turns after its time a timer runs, and so the order of those that are due together, and
  how they fall into what is going on. No virtual time passes in those turns.
* When jobs of a `SeededExecutor` start and end: they are timers.

So a schedule found here is one that a real loop could show on another day, with one exception:
tasks that one event wakes go on in any order, where asyncio keeps that of their waiting without
promising it.

Only the random parts of the program itself are beyond the seed: draw them from `loop.random`. Sets
of tasks and futures iterate alike in every process; other sets do as far as their members' hashes
do. What the cyclic garbage collector finalises comes when it comes.

Refuses to know: sockets, signals, other threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import heapq
import itertools
import math
import random
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, TypeVarTuple

from tiered_cache.testing.awaits import frames_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextvars import Context

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LATE_TURNS: Final = (0, 0, 0, 0, 1, 1, 2, 3, 4, 6, 8, 12)
"""A timer runs so many turns after its time. Up to 12: longer than what one event sets off in a
cache, so that another can fall into any part of it."""

MAX_TURNS: Final = 1_000_000
"""More is taken for a program that never ends."""

HANG: Final = math.inf
"""What a fault returns for a job that does not end until it is released."""

STEPS: Final = frozenset({None, "task_wakeup", "__step", "__wakeup"})
"""Names of a task's own callbacks, by which it goes on (the C class names only one of them)."""


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is set: the program would wait for ever."""


def run(main: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """`asyncio.run` on a `DeterministicLoop` with this seed.

    Raises:
        DeadlockError: the program waits for ever; says who waits, and where.
    """
    return DeterministicLoop(seed).run(main)


class DeterministicLoop(asyncio.BaseEventLoop):
    """See the module. Make one per run, in the thread that runs it.

    Attributes:
        seed: what the order is drawn from.
        random: for the program's own random parts.
        trace: names of what has run, in order: tasks, callbacks, and notes. It grows with the run.
    """

    _stopping: bool  # of the base class, which looks at it after each turn

    def __init__(self, seed: int = 0, *, max_turns: int = MAX_TURNS) -> None:
        super().__init__()
        self.seed = seed
        self.random = random.Random(seed)
        self.trace: list[str] = []
        self._order = random.Random(f"order {seed}")  # the program draws nothing from it
        self._max_turns = max_turns
        self._now = 0.0
        self._turn = 0
        self._next: list[_Entry] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._late: list[tuple[int, int, asyncio.TimerHandle]] = []
        self._timer_numbers = itertools.count()
        self._numbers = itertools.count(1)
        self._source: object = None
        self._home = threading.get_ident()
        self._failure: BaseException | None = None
        self._to_thread: SeededExecutor | None = None
        self.set_task_factory(_numbered_task)

    # --- for programs -----------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main`, cancel what it leaves, close the loop: once, as `asyncio.run`.

        Raises:
            DeadlockError: `main`, or what it leaves, waits for ever.
        """
        with asyncio.Runner(loop_factory=lambda: self) as runner:
            return runner.run(main)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    @property
    def trace_digest(self) -> str:
        """Equal for two runs if what ran, by name and order, is equal."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]

    def note(self, line: str) -> None:
        """Add a line to the trace: what happened besides tasks and callbacks."""
        self.trace.append(line)

    def next_number(self) -> int:
        """Counts what the loop has made: gives tasks and futures names and a stable hash."""
        return next(self._numbers)

    # --- what asyncio calls -----------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return _NumberedFuture(self)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._next.append((self._source, _task_of(callback), handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """`call_soon`: nothing comes from other threads, their moments would not replay."""
        if threading.get_ident() != self._home:
            raise RuntimeError(
                f"the thread {threading.current_thread().name} called a DeterministicLoop: "
                "threads do not replay, use a SeededExecutor"
            )
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if when < math.inf:
            heapq.heappush(self._timers, (when, next(self._timer_numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes; the clock does not stop there."""

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Without an executor (`asyncio.to_thread`): a seeded one of four threads."""
        if executor is None:
            if self._to_thread is None:
                self._to_thread = SeededExecutor(self, name="to-thread", num_threads=4)
            executor = self._to_thread
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("this event loop is closed")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """What a callback raises ends the run: elsewhere it would be a line in a log."""
        if "handle" in context and self._failure is None:
            self._failure = context["exception"]
        else:
            super().default_exception_handler(context)

    def close(self) -> None:
        super().close()
        self._next.clear()
        self._timers.clear()
        self._late.clear()

    # --- a turn -----------------------------------------------------------------------------------

    def _run_once(self) -> None:
        if not self._next and not self._stopping:
            self._jump()
        self._turn += 1
        if self._turn > self._max_turns:
            self._max_turns += self._turn  # to clean up
            raise RuntimeError(f"no end after {self._turn - 1} turns:\n{self._who_waits()}")
        self._add_due()
        batch = self._drawn_order()
        try:
            while batch:
                source, task, handle = batch.pop()
                if handle.cancelled():
                    continue
                self._source = source if task is None else task
                self.trace.append(_name_of(handle, task))
                handle._run()
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
        finally:  # also when something has raised through the loop: what is left runs later
            self._source = source = task = None
            self._next[:0] = reversed(batch)

    def _jump(self) -> None:
        """To the next turn, or else the next time, at which something runs."""
        self._late = [entry for entry in self._late if not entry[2].cancelled()]
        if self._late:
            self._turn = min(self._late)[0] - 1
            return
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise DeadlockError(f"nothing is ready and no timer is set:\n{self._who_waits()}")
        self._now = max(self._now, self._timers[0][0])

    def _add_due(self) -> None:
        while self._timers and self._timers[0][0] <= self._now:
            _, number, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                turn = self._turn + self._order.choice(LATE_TURNS)
                self._late.append((turn, number, handle))
        if self._late:
            waiting = []
            for entry in self._late:
                if entry[0] <= self._turn:
                    self._next.append((entry[1], None, entry[2]))
                else:
                    waiting.append(entry)
            self._late = waiting

    def _drawn_order(self) -> list[_Entry]:
        """What is ready, last first.

        Each entry draws a number above that of the last callback of its source; a source's own next
        step, above those of all that it has scheduled.
        """
        batch, self._next = self._next, []
        if len(batch) > 1:
            drawn = []
            last: dict[object, float] = {}
            highest: dict[object, float] = {}
            for at, (source, task, _) in enumerate(batch):
                floor = (highest if task is source else last).get(source, 0.0)
                number = floor + (1.0 - floor) * self._order.random()
                if task is None:
                    last[source] = number
                highest[source] = max(number, highest.get(source, 0.0))
                drawn.append((number, at))
            drawn.sort(reverse=True)
            batch = [batch[at] for _, at in drawn]
        return batch

    def _who_waits(self) -> str:
        lines = []
        for task in sorted(asyncio.all_tasks(self), key=hash):
            places = [
                f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
                for frame in frames_of(task.get_coro())
            ]
            lines.append(f"  {task.get_name()}\n    " + "\n    ".join(places))
        threads = [thread.name for thread in threading.enumerate() if thread.ident != self._home]
        if threads:
            lines.append(
                f"  threads are not waited for, use a SeededExecutor: {', '.join(threads)}"
            )
        return "\n".join(lines) or "  no task is left"


class SeededJob:
    """One submitted call: queued, running, ended.

    Attributes:
        number: from 1, in the order of submission.
        call, args, kwargs: what was submitted.
    """

    def __init__(
        self,
        executor: SeededExecutor,
        number: int,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.number = number
        self.call = call
        self.args = args
        self.kwargs = kwargs
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.is_held = False
        self._executor = executor
        self._outcome: tuple[bool, Any] | None = None

    def release(self) -> None:
        """Let a job that hangs end, in one of the next turns."""
        if self.is_held:
            self.is_held = False
            self._executor._end_after(self, 0.0)

    def execute(self) -> None:
        """Compute, as in a thread: no event loop is running there. Once."""
        if self._outcome is not None:
            return
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            self._outcome = True, self.call(*self.args, **self.kwargs)
        except BaseException as error:
            self._outcome = False, error
        finally:
            asyncio._set_running_loop(loop)

    def fail(self, error: BaseException) -> None:
        """It has raised this instead of computing."""
        self._outcome = False, error

    def settle(self) -> None:
        """Tell the future."""
        self.execute()
        assert self._outcome is not None, "executed"
        is_result, value = self._outcome
        if is_result:
            self.future.set_result(value)
        else:
            self.future.set_exception(value)

    def __repr__(self) -> str:
        return f"<SeededJob {self._executor.name}#{self.number}>"


class SeededExecutor(concurrent.futures.Executor):
    """Runs jobs without threads: each starts and ends at moments drawn from the loop's seed.

    Between the two a job is running and cannot be cancelled, before it can. Jobs start in the order
    of their submission, at most `num_threads` run at once. A job must not wait for another, or for
    the loop: there is one thread. On another loop than a `DeterministicLoop` the moments are drawn
    from seed 0.

    Args:
        name: for the trace.
        execute_at: when the function is called, at the job's start or end; "seeded" draws.
        durations: what a job's running time is drawn from, in virtual seconds. Few and round, so
            that jobs end together, and with other timers; even 0 takes some turns.
        fault: asked when a job starts. What it returns is raised instead of computing, if it is an
            exception; a number of seconds is added to the duration; `HANG` lets the job run until
            it is released.

    Attributes:
        queued, running: jobs, oldest first.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        name: str = "executor",
        num_threads: int = 1,
        execute_at: Literal["start", "end", "seeded"] = "seeded",
        durations: Sequence[float] = (0.0, 0.0, 1.0),
        fault: Callable[[SeededJob], float | BaseException | None] | None = None,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"an executor needs at least one thread, not {num_threads}")
        self.name = name
        self.queued: deque[SeededJob] = deque()
        self.running: list[SeededJob] = []
        self._loop = loop
        self._num_threads = num_threads
        self._num_starts = 0  # that are due
        self._execute_at = execute_at
        self._durations = durations
        self._fault = fault
        self._numbers = itertools.count(1)
        self._closed = False
        if isinstance(loop, DeterministicLoop):
            self._draws, self._note = loop.random, loop.note
        else:
            self._draws, self._note = random.Random(0), lambda line: None

    def submit(
        self, fn: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[T]:
        """Queue `fn(*args, **kwargs)`."""
        if self._closed:
            raise RuntimeError(f"the {self.name} executor is shut down")
        job = SeededJob(self, next(self._numbers), fn, args, kwargs)
        self.queued.append(job)
        self._use_threads()
        return job.future

    def release(self) -> None:
        """Let all jobs that hang end."""
        for job in tuple(self.running):
            job.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs. With `wait`, compute and end what is there, now."""
        self._closed = True
        if cancel_futures:
            for job in self.queued:
                job.future.cancel()
        if wait:
            while self.queued or self.running:
                for job in tuple(self.running):
                    self._end(job)
                self._start()

    def _use_threads(self) -> None:
        """One start for each thread that is free and each job that waits."""
        while self._num_starts < min(len(self.queued), self._num_threads - len(self.running)):
            self._num_starts += 1
            self._loop.call_later(0.0, self._start_due)

    def _start_due(self) -> None:
        self._num_starts -= 1
        self._start()
        self._use_threads()

    def _start(self) -> None:
        while self.queued and len(self.running) < self._num_threads:
            job = self.queued.popleft()
            if job.future.set_running_or_notify_cancel():
                self._run(job)
                return

    def _run(self, job: SeededJob) -> None:
        self._note(f"{self.name}#{job.number} starts")
        self.running.append(job)
        fault = self._fault(job) if self._fault else None
        duration = self._draws.choice(self._durations)
        if isinstance(fault, BaseException):
            job.fail(fault)
        else:
            duration += fault or 0.0
            at_start = self._execute_at == "start"
            if at_start or (self._execute_at == "seeded" and self._draws.random() < 0.5):
                job.execute()
        job.is_held = duration == HANG
        if not job.is_held:
            self._end_after(job, duration)

    def _end_after(self, job: SeededJob, duration: float) -> None:
        self._loop.call_later(duration, self._end, job)

    def _end(self, job: SeededJob) -> None:
        if job in self.running:  # and was not ended by a shutdown before its time
            self._note(f"{self.name}#{job.number} ends")
            self.running.remove(job)
            job.settle()
            self._use_threads()


_Entry: TypeAlias = tuple[object, asyncio.Task[Any] | None, asyncio.Handle]
"""Who scheduled it, the task that goes on by it, and the callback."""


class _NumberedTask(asyncio.Task[Any]):
    """Hashed by its number instead of its address: sets of tasks, of which asyncio and others have
    many, iterate in an order that replays."""

    def __init__(self, loop: DeterministicLoop, work: Any, **options: Any) -> None:
        self._number = loop.next_number()
        if options.get("name") is None:
            label = getattr(work, "__qualname__", type(work).__qualname__)
            options["name"] = f"{label}-{self._number}"
        super().__init__(work, loop=loop, **options)

    def set_name(self, name: object, /) -> None:
        if name is not None:  # as Python 3.13.0 passes on a name that was not given
            super().set_name(name)

    def __hash__(self) -> int:
        return self._number


def _numbered_task(loop: Any, work: Any, **options: Any) -> _NumberedTask:
    return _NumberedTask(loop, work, **options)


class _NumberedFuture(asyncio.Future[Any]):
    """Hashed by its number, as tasks are."""

    def __init__(self, loop: DeterministicLoop) -> None:
        self._number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


def _task_of(callback: Callable[..., object]) -> asyncio.Task[Any] | None:
    """The task whose step this is, if it is one."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task) and getattr(callback, "__name__", None) in STEPS:
        return owner
    return None


def _name_of(handle: Any, task: asyncio.Task[Any] | None) -> str:
    """Without numbers of the process: addresses, counters of other loops."""
    if isinstance(task, _NumberedTask):
        return task.get_name()
    callback = handle._callback if task is None else task.get_coro()
    callback = getattr(callback, "func", callback)  # a partial's
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))
