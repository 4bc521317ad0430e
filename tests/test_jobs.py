"""Executors, the one helper that awaits a job to its end, and the supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.lease_helpers import cancelled, start, turns
from tiered_cache import ClosedError
from tiered_cache.jobs import DaemonExecutor, Supervisor, run_to_end, submit, threads_ended
from tiered_cache.testing.gates import Gate, ManualExecutor


@pytest.fixture
def executor() -> Iterator[DaemonExecutor]:
    made = DaemonExecutor("test", 1)
    yield made
    made.shutdown()


# --- the executor ---------------------------------------------------------------------------------


def test_an_executor_needs_a_thread() -> None:
    """None is a mistake, not a way to say "no limit"."""
    with pytest.raises(ValueError, match="at least one thread"):
        DaemonExecutor("test", 0)


def test_jobs_run_first_in_first_out_in_daemon_threads() -> None:
    """So that a hung job does not keep the interpreter from ending."""
    executor = DaemonExecutor("test", 1)
    seen: list[int] = []
    futures = [executor.submit(seen.append, count) for count in range(20)]
    daemon = executor.submit(lambda: threading.current_thread().daemon)
    assert daemon.result(10)
    assert seen == list(range(20))
    assert all(future.done() for future in futures)
    executor.shutdown()


def test_threads_are_started_as_they_are_needed_and_end_at_the_shutdown() -> None:
    """An unused executor costs nothing; shutting it down twice is harmless, using it after is
    not."""
    executor = DaemonExecutor("test", 3)
    assert not threads_of("test")
    executor.submit(int).result(10)
    assert len(threads_of("test")) == 1
    executor.shutdown()
    executor.shutdown()
    assert not threads_of("test")
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(int)


async def test_an_end_is_told_when_no_thread_holds_anything() -> None:
    """Not before what runs has ended, and at once when no thread was ever started."""
    idle = DaemonExecutor("test", 2)
    idle.shutdown(wait=False)
    await threads_ended([idle], None)
    gate, busy = Gate(), DaemonExecutor("test", 2)
    jobs = [busy.submit(gate), busy.submit(int)]
    await gate.reached()
    busy.shutdown(wait=False)
    await threads_ended([busy], 0.01)
    assert not busy.ended.done()
    gate.open()
    await threads_ended([busy], None)
    assert all(job.done() for job in jobs)


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's own priority is Linux's")
def test_threads_give_way_as_far_as_they_are_told() -> None:
    """And nobody else's priority changes."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    nice = DaemonExecutor("test", 1, nice=3)

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert nice.submit(priority).result() == before + 3
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    nice.shutdown()


async def test_what_is_queued_before_the_shutdown_is_still_run(executor: DaemonExecutor) -> None:
    """Nobody who waits for a job is left waiting."""
    gate = Gate()
    first, second = executor.submit(gate, 1), executor.submit(gate, 2)
    await gate.reached()
    executor.shutdown(wait=False)
    gate.open()
    assert await asyncio.wrap_future(first) == 1
    assert await asyncio.wrap_future(second) == 2


def threads_of(name: str) -> list[threading.Thread]:
    prefix = f"tiered-cache-{name}"
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


# --- a job to its end -----------------------------------------------------------------------------


async def test_a_job_gives_its_result_or_its_error(executor: DaemonExecutor) -> None:
    """As if it had been called here."""
    assert await run_to_end(submit(executor, divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await run_to_end(submit(executor, divmod, 7, 0))


@pytest.mark.parametrize(
    "error", [StopIteration("x"), asyncio.CancelledError("x"), KeyError("x"), TimeoutError("x")]
)
async def test_errors_that_mean_something_to_the_loop_do_not_pose_as_its_own(
    executor: DaemonExecutor, error: BaseException
) -> None:
    """A CancelledError out of a thread would read as the caller's own cancellation."""

    def fail() -> None:
        raise error

    expected = type(error) if isinstance(error, (KeyError, TimeoutError)) else RuntimeError
    with pytest.raises(expected) as caught:
        await run_to_end(submit(executor, fail))
    assert str(caught.value) == str(error) or caught.value.__cause__ is error


async def test_cancelled_while_queued_it_ends_at_once_and_never_runs(
    executor: DaemonExecutor,
) -> None:
    """The thread is busy with something else all the time."""
    gate = Gate()
    ran: list[int] = []
    busy = start(run_to_end(submit(executor, gate)))
    await gate.reached()
    queued = start(run_to_end(submit(executor, ran.append, 1)))
    await turns()
    await cancelled(queued)
    gate.open()
    await busy
    await run_to_end(submit(executor, int))
    assert ran == []


async def test_cancelled_while_running_it_waits_for_the_thread_however_often(
    executor: DaemonExecutor,
) -> None:
    """When it raises, nobody runs it any more."""
    gate = Gate()
    task = start(run_to_end(submit(executor, gate)))
    await gate.reached()
    for _ in range(3):
        task.cancel()
        await turns()
        assert not task.done()
    gate.open()
    await asyncio.wait([task])
    assert task.cancelled()
    assert gate.num_passed == 1


async def test_an_error_after_a_cancellation_is_seen_by_nobody_and_warns_nobody(
    executor: DaemonExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """ "Future exception was never retrieved" would be noise: the caller has gone."""
    gate = Gate()

    def fail() -> None:
        gate()
        raise ValueError

    task = start(run_to_end(submit(executor, fail)))
    await gate.reached()
    task.cancel()
    await turns()
    gate.open()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    await turns()
    assert not caplog.records


async def test_an_executor_that_drops_a_queued_job_is_not_a_cancellation() -> None:
    """A user's executor may be shut down under a run: that is an error to report."""
    executor = ManualExecutor()
    task = start(run_to_end(submit(executor, int)))
    await turns()
    executor.jobs[0].future.cancel()
    with pytest.raises(ClosedError, match="dropped"):
        await task
    task = start(run_to_end(submit(executor, int)))
    await turns()
    executor.jobs[1].future.cancel()
    await cancelled(task)  # both at once: the caller's own counts


# --- the supervisor -------------------------------------------------------------------------------


async def test_a_child_that_fails_is_counted_and_hurts_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither its siblings nor whoever opened the cache."""
    supervisor = Supervisor(int)
    await supervisor.start()
    done = asyncio.Event()

    async def fail() -> None:
        raise ValueError

    async def go_on() -> None:
        await turns()
        done.set()

    supervisor.spawn(fail(), "failing")
    supervisor.spawn(go_on(), "going on")
    await done.wait()
    assert supervisor.num_failures == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    await supervisor.aclose()
    assert supervisor.num_running == 0


async def test_its_end_is_told_when_a_child_no_longer_counts() -> None:
    """Whoever waits for quiet looks exactly then."""
    seen: list[int] = []
    supervisor = Supervisor(lambda: seen.append(supervisor.num_running))
    await supervisor.start()
    supervisor.spawn(turns(1), "short")
    await turns()
    assert seen == [0]
    await supervisor.aclose()


async def test_closing_cancels_the_children_and_is_idempotent() -> None:
    """Also from two tasks at once."""
    supervisor = Supervisor(int)
    await supervisor.start()
    forever = asyncio.Event()
    supervisor.spawn(_wait(forever), "forever")
    await turns()
    await asyncio.gather(supervisor.aclose(), supervisor.aclose())
    await supervisor.aclose()
    assert supervisor.num_running == 0


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def test_cancelled_at_its_start_it_leaves_no_task() -> None:
    """`open` may be cancelled like everything else."""
    before = asyncio.all_tasks()
    task = start(Supervisor(int).start())
    await asyncio.sleep(0)
    await cancelled(task)
    await turns()
    assert asyncio.all_tasks() == before
