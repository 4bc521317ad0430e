"""A deterministic loop: what is drawn, what is not, and that it replays."""

from __future__ import annotations

import asyncio
import math
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest

from tests.lease_helpers import rig, seq, start, turns
from tiered_cache import AdmissionTimeout, CacheStats, CapacityError, StaleError
from tiered_cache.testing.loop import (
    HANG,
    DeadlockError,
    DeterministicLoop,
    SeededExecutor,
    SeededJob,
    run,
)

SEEDS: Final = range(60)

Program = Callable[[], Coroutine[Any, Any, Any]]


def outcomes(program: Program, seeds: range = SEEDS) -> Counter[Any]:
    return Counter(run(program(), seed) for seed in seeds)


# --- what is drawn --------------------------------------------------------------------------------


async def lost_update(lock: Any) -> int:
    """Two tasks add one to what they read a moment before."""
    total = 0

    async def add_one(at: float) -> None:
        nonlocal total
        await asyncio.sleep(at)
        async with lock:
            seen = total
            for _ in range(2):
                await asyncio.sleep(0)
            total = seen + 1

    await asyncio.gather(add_one(1), add_one(1))
    return total


def test_a_race_shows_all_its_outcomes() -> None:
    """A lost update is found, and so are the schedules that hide it."""

    async def racy() -> int:
        return await lost_update(asyncio.Semaphore(2))

    assert set(outcomes(racy)) == {1, 2}


def test_a_program_without_a_race_has_one_outcome() -> None:
    """Control: the loop makes no race of its own."""

    async def right() -> int:
        return await lost_update(asyncio.Lock())

    assert set(outcomes(right)) == {2}


def test_tasks_that_wake_together_go_on_in_any_order() -> None:
    """All six orders of three come, about alike."""

    async def program() -> str:
        order, bell = [], asyncio.Event()

        async def waits(name: str) -> None:
            await bell.wait()
            order.append(name)

        waiters = [start(waits(name)) for name in "abc"]
        await turns(2)
        bell.set()
        await asyncio.gather(*waiters)
        return "".join(order)

    found = outcomes(program, range(300))
    assert len(found) == 6
    assert min(found.values()) > 20


def test_what_is_due_together_comes_in_any_order_and_many_turns_apart() -> None:
    """A timer may fall into any part of what another sets off."""

    async def program() -> int:
        done = 0

        async def chain() -> None:
            nonlocal done
            await asyncio.sleep(1)
            for _ in range(5):
                done += 1
                await asyncio.sleep(0)

        task = start(chain())
        await asyncio.sleep(1)
        seen = done
        await task
        return seen

    assert set(outcomes(program, range(200))) == set(range(6))


# --- what is not ----------------------------------------------------------------------------------


def test_a_turn_is_a_turn() -> None:
    """All that was ready runs before anything that it has scheduled."""

    async def program() -> list[int]:
        counts = [0, 0, 0]

        async def counter(at: int) -> None:
            for _ in range(20):
                counts[at] += 1
                assert max(counts) - min(counts) <= 1
                await asyncio.sleep(0)

        await asyncio.gather(*(counter(at) for at in range(3)))
        return counts

    for seed in SEEDS:
        assert run(program(), seed) == [20, 20, 20]


def test_callbacks_of_one_source_stay_in_order_and_come_before_its_next_step() -> None:
    """Of a task, and of a callback; whatever others schedule between them."""

    async def program() -> None:
        loop = asyncio.get_running_loop()

        async def source() -> None:
            for _ in range(5):
                order: list[int] = []
                for number in range(3):
                    loop.call_soon(order.append, number)
                await asyncio.sleep(0)
                assert order == [0, 1, 2]

        def more() -> None:
            order: list[int] = []
            for number in range(3):
                loop.call_soon(order.append, number)
            loop.call_soon(lambda: seen.append(order))

        seen: list[list[int]] = []
        loop.call_later(0, more)
        loop.call_soon(more)
        await asyncio.gather(source(), source(), source())
        await asyncio.sleep(1)
        assert seen == [[0, 1, 2], [0, 1, 2]]

    for seed in SEEDS:
        run(program(), seed)


def test_done_callbacks_have_run_when_a_later_waiter_goes_on() -> None:
    """`task.add_done_callback(registry.discard); await task` may rely on it."""

    async def program() -> None:
        registry: set[asyncio.Task[None]] = set()
        others = [start(turns(3)) for _ in range(3)]
        task = start(turns(2))
        registry.add(task)
        task.add_done_callback(registry.discard)
        await task
        assert not registry
        await asyncio.gather(*others)

    for seed in SEEDS:
        run(program(), seed)


def test_a_task_that_gives_way_goes_on_after_what_it_has_set_off() -> None:
    """Tasks that it has started, woken or cancelled have had a step."""

    async def program() -> None:
        steps = []
        bell = asyncio.Event()

        async def other(name: str) -> None:
            steps.append(f"{name} starts")
            try:
                await bell.wait()
            finally:
                steps.append(f"{name} ends")

        noise = [start(turns(5)) for _ in range(3)]
        tasks = [start(other("a")), start(other("b")), start(other("c"))]
        await asyncio.sleep(0)
        assert sorted(steps) == ["a starts", "b starts", "c starts"]
        bell.set()
        tasks[2].cancel()
        await asyncio.sleep(0)
        assert sorted(steps[3:]) == ["a ends", "b ends", "c ends"]
        await asyncio.gather(*noise, *tasks, return_exceptions=True)

    for seed in SEEDS:
        run(program(), seed)


def test_timers_run_in_the_order_of_their_times_and_never_early() -> None:
    """Late by turns, never by time."""

    async def program() -> None:
        loop = asyncio.get_running_loop()
        seen: list[float] = []

        def note(when: float) -> None:
            assert loop.time() == when
            seen.append(when)

        times = [loop.random.choice([0.5, 1.0, 1.5, 2.0]) for _ in range(20)]  # type: ignore[attr-defined]
        for when in times:
            loop.call_at(when, note, when)
        await asyncio.sleep(3)
        assert seen == sorted(times)

    for seed in SEEDS:
        run(program(), seed)


# --- the clock ------------------------------------------------------------------------------------


def test_time_is_virtual_and_exact() -> None:
    """A day passes at once; a cancelled timer, or one that never comes, does not move the clock."""

    async def program() -> None:
        loop = asyncio.get_running_loop()
        assert loop.time() == 0
        loop.call_later(7, lambda: None).cancel()
        loop.call_later(math.inf, lambda: None)
        await asyncio.sleep(86_400)
        assert loop.time() == 86_400
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        assert loop.time() == 86_405
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.25)
        assert loop.time() == 86_405.25

    run(program())


def test_a_timer_cancelled_while_it_is_late_does_not_run() -> None:
    """`cancel` holds until the very moment."""

    async def program() -> None:
        loop = asyncio.get_running_loop()
        ran: list[int] = []

        def first_one(number: int) -> None:
            ran.append(number)
            for handle in handles:
                handle.cancel()

        handles = [loop.call_later(1, first_one, number) for number in range(3)]
        await asyncio.sleep(2)
        assert len(ran) == 1

    for seed in SEEDS:
        run(program(), seed)


# --- it replays -----------------------------------------------------------------------------------

BUSY: Final = """
import asyncio
from tiered_cache.testing.loop import DeterministicLoop, SeededExecutor

async def main():
    loop = asyncio.get_running_loop()
    executor = SeededExecutor(loop, num_threads=2)

    async def worker(number):
        await asyncio.sleep(loop.random.choice([0, 1]))
        for _ in range(3):
            await asyncio.shield(loop.run_in_executor(executor, str, number))
        await asyncio.sleep(number)

    work = {asyncio.create_task(worker(number)) for number in range(8)}
    done, pending = await asyncio.wait(work, timeout=4)
    for task in pending:
        task.cancel()
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(asyncio.sleep(number), name=f"sleeper {number}")
    names = ",".join(task.get_name() for task in done)
    loop.note(names)
    jobs = {loop.run_in_executor(executor, str, number) for number in range(8)}
    done, _ = await asyncio.wait(jobs)
    loop.note(",".join(job.result() for job in done))

def digests(seeds):
    found = []
    for seed in seeds:
        loop = DeterministicLoop(seed)
        loop.run(main())
        found.append(loop.trace_digest)
    return found
"""


def test_a_seed_replays_in_any_process() -> None:
    """Neither hash seeds nor addresses nor what ran before have a part in it."""
    other = subprocess.run(
        [sys.executable, "-c", f"{BUSY}\nprint(*digests(range(20)))"],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split() == busy_digests(range(20))


def test_seeds_give_different_schedules() -> None:
    """And one seed the same again, in one process."""
    digests = busy_digests(range(100))
    assert busy_digests(range(100)) == digests
    assert len(set(digests)) >= 99


def busy_digests(seeds: range) -> list[str]:
    scope: dict[str, Any] = {}
    exec(BUSY, scope)
    found: list[str] = scope["digests"](seeds)
    return found


def test_the_trace_has_names() -> None:
    """Tasks by their names, callbacks by their functions, whatever is noted."""

    async def program() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, DeterministicLoop)
        await asyncio.create_task(asyncio.sleep(0), name="nap")
        await asyncio.Task(turns(1), loop=loop)
        loop.note("noted")
        assert "nap" in loop.trace
        assert "turns" in loop.trace  # not made by the loop: its name counts in the whole process
        assert loop.trace[0].endswith("program-1")
        assert loop.trace[-1] == "noted"

    run(program())


# --- a whole event loop ---------------------------------------------------------------------------


def test_asyncio_works_on_it() -> None:
    """Groups, shields, queues, conditions, generators, contexts."""

    async def numbers() -> Any:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            ended.append("generator")

    async def shielded() -> None:
        await asyncio.sleep(3)
        ended.append("shielded")

    async def program() -> str:
        queue: asyncio.Queue[int] = asyncio.Queue(2)

        async def puts() -> None:
            for number in range(5):
                await queue.put(number)

        async with asyncio.TaskGroup() as group:
            group.create_task(puts())
            assert [await queue.get() for _ in range(5)] == list(range(5))
        inner = start(shielded())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(inner), 1)
        await inner
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.Event().wait())
                group.create_task(asyncio.wait_for(asyncio.Event().wait(), 1))
        assert await asyncio.to_thread(lambda: 7) == 7
        async for number in left_open:
            return f"left at {number}"
        return ""

    ended: list[str] = []
    left_open = numbers()
    assert run(program()) == "left at 1"
    assert ended == ["shielded", "generator"]


def test_a_deadlock_names_who_waits_and_where() -> None:
    """Instead of waiting for ever; what waited is cancelled."""
    cancelled = []

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("stuck")
            raise

    async def program() -> None:
        await asyncio.create_task(stuck(), name="a stuck request")

    with pytest.raises(DeadlockError) as error:
        run(program())
    text = str(error.value)
    assert "a stuck request" in text
    assert "stuck\n" in text
    assert f"{__file__}:" in text
    assert "Event.wait" in text
    assert cancelled == ["stuck"]


def test_a_program_without_end_is_ended() -> None:
    """Polling is not a deadlock."""

    async def polls() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(RuntimeError, match="no end after 100 turns"):
        DeterministicLoop(max_turns=100).run(polls())


def test_what_a_callback_raises_ends_the_run() -> None:
    """It would be a line in a log."""

    async def program() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(5)

    with pytest.raises(ZeroDivisionError):
        run(program())


def test_leftovers_are_cancelled_and_nothing_global_stays() -> None:
    """Not a running loop, nor a current one, nor a policy; a second run on a closed loop fails."""
    ended = []

    async def left() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0)
            ended.append(asyncio.get_running_loop().time())

    async def program() -> None:
        for _ in range(3):
            start(left())
        await asyncio.sleep(1)

    policy = asyncio.get_event_loop_policy()
    loop = DeterministicLoop()
    loop.run(program())
    assert ended == [1.0] * 3
    assert asyncio._get_running_loop() is None
    assert asyncio.get_event_loop_policy() is policy
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)


def test_a_loop_may_be_turned_by_hand() -> None:
    """Each call goes on from where the last one stopped, as a state machine needs it."""
    loop = DeterministicLoop(3)
    executor = SeededExecutor(loop, durations=(0.0,), fault=lambda _: HANG)

    async def work() -> int:
        return await asyncio.wrap_future(executor.submit(int, "7"))

    task = loop.create_task(work())
    loop.run_until_complete(turns(40))
    assert [job.number for job in executor.running] == [1]
    assert not task.done()
    executor.running[0].release()
    assert loop.run_until_complete(task) == 7
    assert loop.time() == 0
    loop.close()


def test_threads_are_refused() -> None:
    """Their moments would not replay."""

    async def program() -> None:
        loop = asyncio.get_running_loop()
        errors = []

        def thread() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                errors.append(str(error))

        other = threading.Thread(target=thread, name="intruder")
        other.start()
        other.join()
        assert "intruder" in errors[0]

    run(program())


def test_a_deadlock_names_threads_that_may_be_meant() -> None:
    """An executor of threads was used by mistake."""

    async def program() -> None:
        await asyncio.Event().wait()

    done = threading.Event()
    other = threading.Thread(target=done.wait, name="a pool's thread")
    other.start()
    try:
        with pytest.raises(DeadlockError, match=r"use a SeededExecutor: .*a pool's thread"):
            run(program())
    finally:
        done.set()
        other.join()


# --- the executor ---------------------------------------------------------------------------------


def executor_program(
    act: Callable[[SeededExecutor, DeterministicLoop], Coroutine[Any, Any, Any]], **options: Any
) -> Program:
    async def program() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, DeterministicLoop)
        return await act(SeededExecutor(loop, **options), loop)

    return program


@pytest.mark.parametrize("num_threads", [1, 3])
def test_jobs_start_in_order_and_no_more_run_than_there_are_threads(num_threads: int) -> None:
    """They end in any order, when there are several."""

    async def act(executor: SeededExecutor, loop: DeterministicLoop) -> str:
        most = 0

        def job(number: int) -> int:
            nonlocal most
            most = max(most, len(executor.running))
            return number

        jobs = [loop.run_in_executor(executor, job, number) for number in range(6)]
        assert await asyncio.gather(*jobs) == list(range(6))
        assert most <= num_threads
        assert not executor.running
        assert not executor.queued
        starts = [line for line in loop.trace if line.endswith("starts")]
        assert starts == [f"executor#{number} starts" for number in range(1, 7)]
        return "".join(line[9] for line in loop.trace if line.endswith("ends"))

    found = outcomes(executor_program(act, num_threads=num_threads))
    assert (len(found) == 1) == (num_threads == 1)


@pytest.mark.parametrize("execute_at", ["start", "end", "seeded"])
def test_a_job_computes_when_it_starts_or_when_it_ends(execute_at: Any) -> None:
    """What it reads is of that moment. Between them it runs and cannot be cancelled."""

    async def act(executor: SeededExecutor, _: DeterministicLoop) -> str:
        now = "queued"
        job = executor.submit(lambda: now)
        while executor.queued:
            await asyncio.sleep(0)
        assert job.running()
        assert not job.cancel()
        now = "running"
        return await asyncio.wrap_future(job)

    found = set(outcomes(executor_program(act, execute_at=execute_at, durations=(1.0,))))
    assert (
        found
        == {"start": {"queued"}, "end": {"running"}, "seeded": {"queued", "running"}}[execute_at]
    )


def test_a_queued_job_can_be_cancelled_and_never_runs() -> None:
    """The one behind it does."""

    async def act(executor: SeededExecutor, _: DeterministicLoop) -> None:
        ran: list[int] = []
        jobs = [executor.submit(ran.append, number) for number in range(3)]
        assert jobs[1].cancel()
        await asyncio.wrap_future(jobs[2])
        assert ran == [0, 2]

    outcomes(executor_program(act))


def test_faults_raise_delay_or_hang() -> None:
    """Each job as the fault function says; a job that hangs ends when it is released."""

    def fault(job: SeededJob) -> float | BaseException | None:
        return job.args[0]  # type: ignore[no-any-return]

    async def act(executor: SeededExecutor, loop: DeterministicLoop) -> None:
        ran: list[Any] = []
        with pytest.raises(OSError, match="a bad disk"):
            await loop.run_in_executor(executor, ran.append, OSError("a bad disk"))
        assert ran == []
        await loop.run_in_executor(executor, ran.append, 60.0)
        assert loop.time() == 60
        job = loop.run_in_executor(executor, ran.append, HANG)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.shield(job)
        executor.release()
        await job
        assert loop.time() == 1060

    outcomes(executor_program(act, durations=(0.0,), fault=fault))


def test_a_job_runs_as_if_in_a_thread() -> None:
    """No loop is running there; what it raises is the future's."""

    async def act(executor: SeededExecutor, loop: DeterministicLoop) -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            await loop.run_in_executor(executor, asyncio.get_running_loop)
        assert asyncio.get_running_loop() is loop

    outcomes(executor_program(act))


@pytest.mark.parametrize("cancel_futures", [False, True])
def test_a_shutdown_ends_what_is_there(cancel_futures: bool) -> None:
    """At once: nobody else could end it. Then it takes nothing."""

    async def act(executor: SeededExecutor, _: DeterministicLoop) -> None:
        ran: list[int] = []
        jobs = [executor.submit(ran.append, number) for number in range(4)]
        while executor.queued and len(executor.queued) == 4:
            await asyncio.sleep(0)
        executor.shutdown(cancel_futures=cancel_futures)
        assert all(job.done() for job in jobs)
        assert ran == ([0] if cancel_futures else [0, 1, 2, 3])
        with pytest.raises(RuntimeError, match="shut down"):
            executor.submit(print)
        await asyncio.sleep(10)

    outcomes(executor_program(act))


async def test_the_executor_works_on_other_loops_too() -> None:
    """There the moments are of one seed."""
    executor = SeededExecutor(asyncio.get_running_loop(), num_threads=2, durations=(0.0,))
    jobs = [asyncio.wrap_future(executor.submit(str, number)) for number in range(5)]
    assert await asyncio.gather(*jobs) == list("01234")
    with pytest.raises(ValueError, match="at least one thread"):
        SeededExecutor(asyncio.get_running_loop(), num_threads=0)


# --- the library on it ----------------------------------------------------------------------------


def on_the_loop(seed: int, program: Program) -> tuple[Any, str, float]:
    loop = DeterministicLoop(seed)
    return loop.run(program()), loop.trace_digest, loop.time()


def seeded() -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    executors = {
        name: SeededExecutor(loop, durations=(0.0,)) for name in ("copy_executor", "io_executor")
    }
    return {"run_executor": SeededExecutor(loop, num_threads=2), **executors}


async def busy() -> CacheStats:
    """Requests of alike and other prompts, with limits, cancellations and a reset."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, DeterministicLoop)
    draws: random.Random = loop.random
    async with rig(pages=9, options=seeded()) as r:

        async def request(name: str, length: int) -> None:
            await asyncio.sleep(draws.choice([0, 0, 1, 2]))
            options: dict[str, Any] = {"timeout": draws.choice([1, 5, None])}
            async with r.cache.lease(seq(name, length), reserve=2, **options) as lease:
                await r.compute(lease, 8)
                for token in range(draws.randrange(3)):
                    await lease.run(r.model, lease.append(token))
                lease.finish()

        requests = [("A", 13), ("A", 13), ("A", 9), ("B", 21), ("C", 17), ("A", 20)]
        tasks = [start(request(name, length)) for name, length in requests]
        loop.call_later(draws.choice([1, 2]), draws.choice(tasks).cancel)
        if draws.random() < 0.3:
            timer = loop.call_later(2, r.cache.reset)
            r.at_exit(timer.cancel)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert error is None or isinstance(
                error, (AdmissionTimeout, StaleError, asyncio.CancelledError)
            )
        await r.cache.drain()
        assert r.cache.outstanding() == []
        return r.stats


def test_a_busy_cache_replays_and_leaves_nothing() -> None:
    """Same seed, same schedule, same stats; every seed a schedule of its own."""
    digests, met = set(), Counter[str]()
    for seed in range(40):
        stats, digest, ended = on_the_loop(seed, busy)
        digests.add(digest)
        for name in stats.counters.__slots__:
            met[name] += getattr(stats.counters, name)
        if seed < 5:
            assert on_the_loop(seed, busy) == (stats, digest, ended)
    assert len(digests) == 40
    for name in ("admissions_timed_out", "chunk_waits", "runs_cancelled", "rematches", "resets"):
        assert met[name] > 0, met


def test_a_burst_of_equal_prompts_is_computed_once() -> None:
    """Whatever the order (semantics §11.3)."""

    async def program() -> None:
        async with rig(pages=30, options=seeded()) as r:
            await asyncio.gather(*(r.serve(seq("A", 21)) for _ in range(5)))
            # The last page of a prompt is never whole before its last token.
            assert r.stats.counters.tokens_computed == 21 + 4

    for seed in SEEDS:
        run(program(), seed)


def test_admission_times_out_after_exactly_its_limit() -> None:
    """Five virtual seconds."""

    async def program() -> None:
        loop = asyncio.get_running_loop()
        async with rig(pages=4, options=seeded()) as r, r.cache.lease(seq("A", 16)):
            await asyncio.sleep(2)
            with pytest.raises(AdmissionTimeout):
                await r.lease(seq("B", 16), timeout=5)
            assert loop.time() == 7
            with pytest.raises(CapacityError):
                await r.lease(seq("B", 17), timeout=5)

    for seed in SEEDS:
        run(program(), seed)


def test_closing_stops_at_its_limit_and_reports_what_hangs() -> None:
    """Ten virtual seconds; the pages go home when the job ends."""

    async def program() -> None:
        loop = asyncio.get_running_loop()
        executor = SeededExecutor(loop, durations=(0.0,), fault=lambda _: HANG)
        async with rig(options={**seeded(), "run_executor": executor}) as r:
            lease = await r.lease(seq("A", 9))
            running = start(lease.run(r.model, await lease.next_chunk(9)))
            await asyncio.sleep(1)
            left = await r.cache.aclose(10)
            assert loop.time() == 11
            assert [(item.kind, item.pages) for item in left] == [("quarantine", {"full": 3})]
            executor.release()
            await asyncio.wait([running])
            assert r.cache.outstanding() == []

    for seed in SEEDS:
        run(program(), seed)
