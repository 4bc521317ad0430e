"""The queue in front of the copy threads: order, ends, cancellation, failure."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.lease_helpers import turns
from tiered_cache.jobs import DaemonExecutor
from tiered_cache.testing.gates import ManualExecutor, ManualJob
from tiered_cache.transfer.copier import CopyJob, Direction
from tiered_cache.transfer.mover import LOADS_PER_STORE, Batch, Mover

LOAD, STORE = Direction.LOAD, Direction.STORE


class FakeCopier:
    """Notes what it is told to move. `bad`: jobs that fail."""

    staging_bytes = 0

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self.moved: list[CopyJob] = []
        self.bad: list[CopyJob] = []

    def copy(self, job: CopyJob) -> None:
        if job in self.bad:
            raise OSError("a bad row")
        self.moved.append(job)


class Bench:
    """A mover whose jobs are started and ended by hand."""

    def __init__(self, num_threads: int = 1) -> None:
        self.copier = FakeCopier(num_threads)
        self.executor = ManualExecutor()
        copier: Any = self.copier
        self.mover = Mover(copier, self.executor)
        self.ended: list[Batch] = []
        self.steps: list[int] = []

    def begin(self, direction: Direction, num_jobs: int = 1, pages: int = 2) -> Batch:
        jobs = [job_of(direction, pages) for _ in range(num_jobs)]
        batch: list[Batch] = []
        batch.append(
            self.mover.start(
                jobs,
                lambda: self.ended.append(batch[0]),
                lambda: self.steps.append(batch[0].num_done),
            )
        )
        return batch[0]

    def start(self) -> ManualJob:
        job = self.executor.queued[0]
        assert job.start()
        return job

    async def one(self) -> None:
        self.start().finish()
        await turns(3)

    async def all(self) -> None:
        while self.executor.jobs:
            self.executor.run_all()
            await turns(3)

    @property
    def order(self) -> str:
        return "".join("S" if job.direction is STORE else "L" for job in self.copier.moved)


def job_of(direction: Direction, pages: int = 2) -> CopyJob:
    ids = np.arange(pages, dtype=np.int32)
    return CopyJob(direction, 0, ids, ids, None, 100)


async def test_jobs_are_moved_in_order_and_their_end_is_told_once() -> None:
    """`on_job` after each, `on_end` after the last, on the loop and never within `start`."""
    b = Bench()
    batch = b.begin(LOAD, 3)
    assert b.ended == []
    await b.all()
    assert b.copier.moved == list(batch.jobs)
    assert (b.steps, b.ended, batch.is_quiet, batch.error) == ([1, 2, 3], [batch], True, None)
    assert batch.num_pages_done == 6


async def test_threads_have_their_next_job_and_no_more() -> None:
    """One more than there are threads is submitted; the rest can still be overtaken."""
    b = Bench(num_threads=2)
    b.begin(LOAD, 9)
    assert len(b.executor.jobs) == 3
    await b.one()
    assert len(b.executor.jobs) == 3
    await b.all()


async def test_loads_go_before_stores() -> None:
    """Somebody waits for a load."""
    b = Bench()
    b.begin(STORE, 4)  # two of them are submitted at once
    b.begin(LOAD, 2)
    await b.all()
    assert b.order == "SSLLSS"


async def test_after_eight_loads_one_store_goes() -> None:
    """Stores are late, not lost."""
    b = Bench()
    b.begin(LOAD, 20)
    b.begin(STORE, 3)
    await b.all()
    assert b.order == "L" * LOADS_PER_STORE + "S" + "L" * LOADS_PER_STORE + "S" + "LLLL" + "S"


async def test_a_failed_job_is_not_done_and_ends_its_batch() -> None:
    """What was queued behind it never runs; what arrived before counts."""
    b = Bench()
    batch = b.begin(LOAD, 4)
    other = b.begin(LOAD, 1)
    b.copier.bad = [batch.jobs[1]]
    await b.all()
    assert b.copier.moved == [batch.jobs[0], *other.jobs]
    assert (batch.num_done, batch.num_pages_done, str(batch.error)) == (1, 2, "a bad row")
    assert b.ended == [batch, other]


async def test_what_ends_above_a_failure_has_not_arrived() -> None:
    """With several threads a later job may end well: pages count from the first on."""
    b = Bench(num_threads=2)
    batch = b.begin(LOAD, 3)
    b.copier.bad = [batch.jobs[0]]
    first, second = b.start(), b.start()
    second.finish()
    await turns(3)
    assert (batch.num_done, b.ended) == (0, [])
    first.finish()
    await turns(3)
    assert (batch.num_done, batch.num_pages_done, b.ended) == (0, 0, [batch])


async def test_a_batch_is_quiet_only_when_nothing_of_it_runs() -> None:
    """One job fails, another is still being copied: the buffers are not quiet."""
    b = Bench(num_threads=2)
    batch = b.begin(LOAD, 3)
    b.copier.bad = [batch.jobs[0]]
    first, second = b.start(), b.start()
    first.finish()
    await turns(3)
    assert (batch.is_quiet, b.ended) == (False, [])
    second.finish()
    await turns(3)
    assert (batch.is_quiet, b.ended) == (True, [batch])


async def test_cancelled_in_the_queue() -> None:
    """It never runs, and its end is told, not within the call."""
    b = Bench()
    batch = b.begin(LOAD, 3)
    b.mover.cancel(batch)
    assert b.ended == []
    await turns(3)
    assert (b.ended, batch.num_done, batch.error) == ([batch], 0, None)
    await b.all()
    assert b.copier.moved == []


async def test_cancelled_while_it_is_copied() -> None:
    """The running job ends and counts, the rest is dropped, then the end is told."""
    b = Bench()
    batch = b.begin(LOAD, 3)
    job = b.start()
    b.mover.cancel(batch)
    await turns(3)
    assert (batch.is_quiet, b.ended) == (False, [])
    job.finish()
    await turns(3)
    assert (b.ended, batch.num_done, batch.num_pages_done) == ([batch], 1, 2)
    await b.all()
    assert len(b.copier.moved) == 1


async def test_cancelled_twice_and_after_its_end() -> None:
    """One end, whatever comes."""
    b = Bench()
    batch = b.begin(LOAD)
    b.mover.cancel(batch)
    b.mover.cancel(batch)
    await turns(3)
    b.mover.cancel(batch)
    await turns(3)
    assert b.ended == [batch]


async def test_a_cancelled_batch_makes_room_for_the_next() -> None:
    """Queued jobs of whoever comes later are submitted in its place."""
    b = Bench()
    first, second = b.begin(LOAD, 5), b.begin(STORE, 2)
    b.mover.cancel(first)
    await turns(3)
    await b.all()
    assert (b.order, b.ended) == ("SS", [first, second])


async def test_an_executor_that_takes_no_more_work() -> None:
    """Shut down by its owner: the transfer fails, nothing hangs."""
    executor = DaemonExecutor("copy", 1)
    executor.shutdown(wait=False)
    copier: Any = FakeCopier()
    ended = asyncio.Event()
    batch = Mover(copier, executor).start([job_of(STORE)], ended.set)
    assert not ended.is_set()
    async with asyncio.timeout(2.0):
        await ended.wait()
    assert (batch.num_done, batch.is_quiet) == (0, True)
    assert "shut down" in str(batch.error)


async def test_an_executor_that_drops_what_is_queued() -> None:
    """It counts as cancelled, and ends."""
    b = Bench()
    batch = b.begin(LOAD, 2)
    for job in b.executor.jobs:
        job.future.cancel()
    await turns(3)
    assert (b.ended, batch.num_done) == ([batch], 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration])
async def test_what_a_copy_raises_never_poses_as_the_loops_own(error: type[BaseException]) -> None:
    """A transfer fails, and the loop goes on."""

    class Raising(FakeCopier):
        def copy(self, job: CopyJob) -> None:
            raise error

    copier: Any = Raising()
    executor = DaemonExecutor("copy", 1)
    ended = asyncio.Event()
    batch = Mover(copier, executor).start([job_of(LOAD)], ended.set)
    async with asyncio.timeout(2.0):
        await ended.wait()
    assert isinstance(batch.error, RuntimeError)
    executor.shutdown(wait=False)
