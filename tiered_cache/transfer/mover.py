"""The queue in front of the copy threads: loads before stores, jobs in order, an end for all.

Owns: which job is next, and when a transfer's buffers are quiet. Refuses to know: what a transfer
is for, who waits for it, and which pages are whose.

A batch is not a task: it ends once, on the loop, whoever has gone meanwhile. So no cancellation can
come between a copy and what has to happen when it has ended (semantics §9.3).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from tiered_cache.errors import ClosedError
from tiered_cache.jobs import submit
from tiered_cache.transfer.copier import Direction

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Sequence

    from tiered_cache.transfer.copier import Copier, CopyJob

log = logging.getLogger(__name__)

LOADS_PER_STORE: Final = 8
"""Loads go before stores, because somebody waits for them; but after so many in a row one store
goes, so that stores are late and not lost (semantics §9.5)."""


class Batch:
    """The jobs of one transfer, in the order in which they are copied.

    `num_done`: how many have ended well, from the first on. `error`: what the transfer stopped at,
    if a job failed. `is_quiet`: it has ended, and nobody touches the buffers any more.
    """

    __slots__ = (
        "_done",
        "error",
        "is_quiet",
        "is_wanted",
        "jobs",
        "num_done",
        "num_started",
        "on_end",
        "on_job",
        "running",
    )

    def __init__(
        self, jobs: Sequence[CopyJob], on_end: Callable[[], None], on_job: Callable[[], None] | None
    ) -> None:
        self.jobs = jobs
        self.num_started = 0
        self.num_done = 0
        self.error: BaseException | None = None
        self.is_wanted = True
        self.is_quiet = False
        self.running: dict[int, concurrent.futures.Future[None]] = {}
        self.on_end = on_end
        self.on_job = on_job
        self._done: set[int] = set()

    @property
    def num_pages_done(self) -> int:
        """Pages that have arrived, from the first on; for jobs that move whole pages."""
        return sum(job.num_pages for job in self.jobs[: self.num_done])

    @property
    def has_more(self) -> bool:
        """Whether there is a job to start."""
        return self.is_wanted and self.num_started < len(self.jobs)

    def note_done(self, at: int) -> None:
        """A job has ended well; with several threads not necessarily the next."""
        self._done.add(at)
        while self.num_done in self._done:
            self.num_done += 1


class Mover:
    """One per cache, on its loop.

    `executor` runs the copies; it is the owner's to shut down.
    """

    def __init__(self, copier: Copier, executor: concurrent.futures.Executor) -> None:
        self.copier = copier
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._queues: dict[Direction, deque[Batch]] = {kind: deque() for kind in Direction}
        # One more than there are threads: a thread finds its next job without waiting for the loop.
        self._max_submitted = copier.num_threads + 1
        self._num_submitted = 0
        self._loads_in_a_row = 0

    def start(
        self,
        jobs: Sequence[CopyJob],
        on_end: Callable[[], None],
        on_job: Callable[[], None] | None = None,
    ) -> Batch:
        """Queue a transfer's jobs (all of one direction, at least one).

        `on_end` is called once, on the loop and never within this call, when all have ended well,
        or one has failed or the batch was cancelled and none runs any more. `on_job` is called
        after each job that ended well, before `on_end`.
        """
        batch = Batch(jobs, on_end, on_job)
        self._queues[jobs[0].direction].append(batch)
        self._fill()
        return batch

    def cancel(self, batch: Batch) -> None:
        """Nobody needs it: start no more, drop what is queued. It ends when what runs has ended."""
        self._stop(batch)
        self._loop.call_soon(self._end_if_quiet, batch)

    @staticmethod
    def _stop(batch: Batch) -> None:
        batch.is_wanted = False
        for future in tuple(batch.running.values()):
            future.cancel()

    def _next_queue(self) -> deque[Batch] | None:
        loads, stores = self._queues[Direction.LOAD], self._queues[Direction.STORE]
        for queue in (loads, stores):
            while queue and not queue[0].has_more:
                queue.popleft()
        if loads and not (stores and self._loads_in_a_row >= LOADS_PER_STORE):
            self._loads_in_a_row += 1
            return loads
        self._loads_in_a_row = 0
        return stores or None

    def _fill(self) -> None:
        """Keep the copy threads busy."""
        while self._num_submitted < self._max_submitted:
            queue = self._next_queue()
            if queue is None:
                return
            batch = queue[0]
            at = batch.num_started
            batch.num_started += 1
            try:
                future = submit(self._executor, self.copier.copy, batch.jobs[at])
            except ClosedError as error:
                self._failed(batch, at, error)
                self._loop.call_soon(self._end_if_quiet, batch)
                continue
            batch.running[at] = future
            self._num_submitted += 1
            future.add_done_callback(partial(self._ended_in_thread, batch, at))

    def _ended_in_thread(self, batch: Batch, at: int, _: object) -> None:
        """Called where the future was settled: in a copy thread, or on the loop by `cancel`."""
        try:
            self._loop.call_soon_threadsafe(self._ended, batch, at)
        except RuntimeError:  # the loop is closed: nobody else is there any more
            self._ended(batch, at)

    def _ended(self, batch: Batch, at: int) -> None:
        future = batch.running.pop(at)
        self._num_submitted -= 1
        if future.cancelled():
            batch.is_wanted = False  # by `cancel`, or by whoever has shut the executor down
        elif (error := future.exception()) is not None:
            self._failed(batch, at, error)
        else:
            batch.note_done(at)
            if batch.on_job is not None:
                batch.on_job()
        self._fill()
        self._end_if_quiet(batch)

    def _failed(self, batch: Batch, at: int, error: BaseException) -> None:
        log.warning("%r failed: %r", batch.jobs[at], error)
        if batch.error is None:
            batch.error = error
        self._stop(batch)

    def _end_if_quiet(self, batch: Batch) -> None:
        if not (batch.running or batch.has_more or batch.is_quiet):
            batch.is_quiet = True
            batch.on_end()
