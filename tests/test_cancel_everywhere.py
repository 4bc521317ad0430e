"""Every await of the library is found by machine and cancelled in turn, on three event loops.

A scenario sets the scene, yields the coroutine to cancel, and is left when that has ended; then
nothing may be outstanding. To add one, decorate it with `@scenario`: it takes part on all loops,
and what is cancelled in it counts. The last test says which awaits lack one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final
from unittest import mock

import pytest
import uvloop

import tiered_cache
from tests.lease_helpers import P, Rig, chunk_of, seq, settings, start, turns
from tiered_cache import (
    EvictParams,
    LoadFailed,
    RadixKey,
    StaleError,
    UnifiedRadixCache,
    controller,
)
from tiered_cache.ranks import Ranks
from tiered_cache.testing.awaits import Coverage, assert_nothing_left, cancel_everywhere
from tiered_cache.testing.loop import HANG, DeterministicLoop, SeededExecutor, SeededJob

NEVER: Final = {
    "admission.py AdmissionQueue.admit: async with asyncio.timeout(timeout)": "sets a timer",
    "controller.py HybridCacheController.aclose: async with asyncio.timeout(limit)": "sets a timer",
    "prefix_load.py PrefixLoad.bring: async with asyncio.timeout(timeout)": "sets a timer",
    "controller.py HybridCacheController.aclose: await threads_ended("
    "self._executors.owned, left_s)": "real threads: `test_cancellation` has them",
    "cache.py Opening._open: await threads_ended(executors.owned, OPEN_LIMIT_S)": "(same)",
    "jobs.py threads_ended: await asyncio.wait(ends, timeout=timeout)": "(same)",
    "cache.py UnifiedRadixCache.evict_host: await self._engine.evict_host(params)": "gives up at "
    "once; a coroutine as `evict` is, and because a tier below may make it wait",
}
"""Awaits that no scenario can be cancelled in, and why."""

SLOW_TURNS: Final = 40
"""A slow run takes longer than what happens around it, wherever that is cancelled."""

HOST: Final = {"tokens": 64 * P}

HOW: Final = [(0, 1), (0, 2), (0, 3), (1, 1), (2, 1), (2, 2), (5, 1)]
"""Turns between a suspension and the cancellation, and how often it is cancelled."""

LOOPS: Final[dict[str, list[Callable[[], asyncio.AbstractEventLoop]]]] = {
    "asyncio": [asyncio.new_event_loop],
    "uvloop": [uvloop.new_event_loop],
    "seeded": [functools.partial(DeterministicLoop, seed) for seed in range(5)],
}

Work = Coroutine[Any, Any, Any]

SCENARIOS: Final[dict[str, Callable[[], AbstractAsyncContextManager[Work]]]] = {}


def scenario(fn: Callable[[], AsyncIterator[Work]]) -> None:
    SCENARIOS[fn.__name__.replace("_", " ")] = contextlib.asynccontextmanager(fn)


# --- what scenarios are made of -------------------------------------------------------------------


class Stage(Rig):
    """A cache that outlives whoever is cancelled, and others that must not be disturbed."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        super().__init__(cache)
        self.others: list[asyncio.Task[Any]] = []

    def other(self, work: Work) -> None:
        """Somebody whose work must succeed."""
        self.others.append(start(work))

    async def until_runs(self, count: int = 1) -> None:
        """Until so many runs are active or queued."""
        while self.stats.num_runs < count:
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def stage(
    pages: int = 16,
    *,
    slow: bool = False,
    slow_copies: bool = False,
    copy_threads: int = 1,
    copy_s: float = 0.0,
    ranks: Ranks | None = None,
    **sections: Any,
) -> AsyncIterator[Stage]:
    options = {**executors(slow=slow), "ranks": ranks}
    options["copy_executor"] = executor(
        slow=slow_copies and not copy_s, num_threads=copy_threads, seconds=copy_s
    )
    async with UnifiedRadixCache.open(settings(pages, **sections), **options) as cache:
        made = Stage(cache)
        yield made
        await asyncio.gather(*made.others)
        await assert_nothing_left(cache)
        made.check()
        assert cache._controller.claims._claims == []


@contextlib.asynccontextmanager
async def stage_with_a_on_the_host(pages: int = 8, **how: Any) -> AsyncIterator[Stage]:
    """Six pages of a sequence A are on the host, none on the device."""
    async with stage(pages, slow_copies=True, host=HOST, **how) as s:
        await s.serve(seq("A", 24))
        await s.cache.drain()
        await s.cache.evict(EvictParams(num_tokens=pages * P))
        assert s.hit(seq("A", 24)) == 0
        yield s


def executors(*, slow: bool, slow_copies: bool = False, slow_io: bool = False) -> dict[str, Any]:
    """All three of a cache; `slow`: where models run."""
    return {
        "run_executor": executor(slow=slow),
        "copy_executor": executor(slow=slow_copies),
        "io_executor": executor(slow=slow_io),
    }


def executor(*, slow: bool, num_threads: int = 1, seconds: float = 0.0) -> SeededExecutor:
    loop, fault = asyncio.get_running_loop(), end_later if slow else None
    return SeededExecutor(loop, num_threads=num_threads, durations=(seconds,), fault=fault)


def end_later(job: SeededJob) -> float:
    in_turns(SLOW_TURNS, job.release)
    return HANG


def in_turns(count: int, action: Callable[[], object]) -> None:
    if count:
        asyncio.get_running_loop().call_soon(in_turns, count - 1, action)
    else:
        action()


# --- scenarios ------------------------------------------------------------------------------------


@scenario
async def a_request_from_its_prompt_to_its_last_token() -> AsyncIterator[Work]:
    """Some of it is published when it is cancelled."""
    async with stage(pages=12) as s:

        async def request() -> None:
            async with s.cache.lease(seq("A", 21), reserve=4) as lease:
                await s.compute(lease, 6)
                for token in range(4):
                    await lease.run(s.model, lease.append(token))
                lease.finish()

        yield request()


@scenario
async def a_request_that_waits_for_admission() -> AsyncIterator[Work]:
    """Whoever stands behind it and fits gets in, without anybody leaving."""
    async with stage(pages=8) as s:
        holder = await s.lease(seq("Z", 15))
        in_turns(100, holder.close)
        in_turns(1, lambda: s.other(s.serve(seq("B", 9))))
        granted = []

        async def request() -> None:
            async with s.cache.lease(seq("A", 21), timeout=1000) as lease:
                granted.append(lease.id)

        yield request()
        await turns(2)
        await asyncio.gather(*s.others)
        assert granted or s.stats.num_leases == 1
        holder.close()


@scenario
async def a_lease_acquired_by_hand_that_waits_for_admission() -> AsyncIterator[Work]:
    """There is no lease to close when `acquire` was cancelled."""
    async with stage(pages=8) as s:
        holder = await s.lease(seq("Z", 30))
        in_turns(8, holder.close)

        async def request() -> None:
            lease = await s.cache.acquire(seq("A", 9))
            await lease.aclose()

        yield request()
        await turns(10)


@scenario
async def a_request_that_waits_for_anothers_run() -> AsyncIterator[Work]:
    """The other publishes, and its pages are found."""
    async with stage(slow=True) as s:
        s.other(s.serve(seq("A", 9)))
        await s.until_runs()
        yield s.serve(seq("A", 9))
        await asyncio.gather(*s.others)
        assert s.hit(seq("A", 9)) == 8


@scenario
async def a_run_behind_anothers() -> AsyncIterator[Work]:
    """In the executor's queue."""
    async with stage(slow=True) as s:
        s.other(s.serve(seq("B", 9)))
        await s.until_runs()
        yield s.serve(seq("A", 9))


@scenario
async def a_run_that_builds_on_one_under_way() -> AsyncIterator[Work]:
    """The first is not the one that is cancelled."""
    async with stage(slow=True) as s, s.cache.lease(seq("A", 9)) as lease:
        s.other(lease.run(s.model, await chunk_of(lease, 4)))
        await s.until_runs()

        async def second() -> None:
            await lease.run(s.model, await chunk_of(lease))

        yield second()
        await asyncio.gather(*s.others)
        lease.finish()


@scenario
async def a_batch() -> AsyncIterator[Work]:
    """All of it or nothing."""
    async with stage(slow=True) as s:

        async def batch() -> None:
            async with s.cache.lease(seq("A", 6)) as one, s.cache.lease(seq("B", 7)) as two:
                leases = [one, two]
                await s.cache.run(leases, s.model, [await chunk_of(lease) for lease in leases])
                assert s.cache.extend(leases, [1, 2]) == []
                await s.cache.run(leases, s.model, [lease.pending for lease in leases])
                one.finish()

        yield batch()
        assert s.stats.num_runs == 0, "whoever is cancelled waits for the thread"


@scenario
async def a_drain_and_a_reset_while_others_run() -> AsyncIterator[Work]:
    """Whoever drains may give up; the reset stands."""
    async with stage(slow=True) as s:

        async def stale() -> None:
            with pytest.raises(StaleError):
                await s.serve(seq("A", 9))

        s.other(stale())
        await s.until_runs()

        async def drain() -> None:
            s.cache.reset()
            await s.cache.drain()

        yield drain()


@scenario
async def a_cache_opened_and_closed_with_a_run_under_way() -> AsyncIterator[Work]:
    """No task stays, and closing again finishes the job."""
    opened: list[UnifiedRadixCache] = []
    runs: list[asyncio.Task[Any]] = []

    async def program() -> None:
        async with UnifiedRadixCache.open(settings(), **executors(slow=True)) as cache:
            opened.append(cache)
            lease = await cache.acquire(seq("A", 5))
            runs.append(start(lease.run(len, "")))
            await turns(2)

    yield program()
    await asyncio.gather(*runs, return_exceptions=True)
    for cache in opened:
        assert await cache.aclose() == []
        await assert_nothing_left(cache)


@scenario
async def a_cache_awaited_and_closed_by_hand() -> AsyncIterator[Work]:
    """A cancelled open leaves nothing to close, and a cancelled close need not be repeated."""
    opened: list[UnifiedRadixCache] = []
    runs: list[asyncio.Task[Any]] = []

    async def program() -> None:
        opened.append(await UnifiedRadixCache.open(settings(), **executors(slow=True)))
        lease = await opened[0].acquire(seq("A", 5))
        runs.append(start(lease.run(len, "")))
        await turns(2)
        await opened[0].aclose()

    yield program()
    for cache in opened:
        if not cache.closed:
            await cache.aclose()
    await asyncio.gather(*runs, return_exceptions=True)
    for cache in opened:
        await assert_nothing_left(cache)


@scenario
async def a_cache_closed_while_it_sweeps() -> AsyncIterator[Work]:
    """Its background tasks are cancelled where they stand."""
    async with many_nodes() as s:
        s.cache.reset()
        yield s.cache.aclose(0)


@scenario
async def the_end_of_a_program_that_never_closed_its_cache() -> AsyncIterator[Work]:
    """`asyncio.run` cancels all tasks that are left, the cache's too; it can still be closed."""
    async with many_nodes() as s:

        async def end() -> None:
            s.cache.reset()
            await turns(2)
            for _ in range(3):
                for task in asyncio.all_tasks():
                    if task.get_name().startswith("tiered-cache"):
                        task.cancel()
                await asyncio.sleep(0)

        yield end()


@contextlib.asynccontextmanager
async def many_nodes() -> AsyncIterator[Stage]:
    """A cache whose content takes many turns to sweep away."""
    async with stage(pages=24) as s:
        for name in "ABCDEFGHIJKL":
            await s.serve(seq(name, 9))
        with mock.patch.object(controller, "SWEEP_NODES", 1):
            yield s
            await s.cache.aclose()


# --- two tiers ------------------------------------------------------------------------------------


@scenario
async def a_request_whose_prefix_is_loaded() -> AsyncIterator[Work]:
    """What arrives after it has gone is not lost."""
    async with stage_with_a_on_the_host() as s:
        yield s.serve(seq("A", 24))


@scenario
async def a_request_that_joins_anothers_load() -> AsyncIterator[Work]:
    """The other gets its prefix."""
    async with stage_with_a_on_the_host() as s:

        async def other() -> None:
            async with s.cache.lease(seq("A", 21)) as lease:
                assert lease.hits.host == 20

        s.other(other())
        await turns(3)
        yield s.cache.load_back(RadixKey(seq("A", 24)))


@scenario
async def a_request_that_gives_up_waiting_for_its_load() -> AsyncIterator[Work]:
    """Its pages are with the copier, so it queues for others."""
    async with stage_with_a_on_the_host(copy_s=0.01) as s:
        yield s.serve(seq("A", 24), load_timeout=0.001)


@scenario
async def a_model_that_waits_for_layers_of_its_prefix() -> AsyncIterator[Work]:
    """The lease is used while its prefix is on the way."""
    async with stage_with_a_on_the_host() as s:

        async def request() -> None:
            async with s.cache.lease(seq("A", 24), layerwise=True) as lease:
                for layer in range(2):
                    await lease.wait_layer(layer)
                await s.compute(lease)

        yield request()


@scenario
async def a_model_whose_prefix_is_lost_above_what_it_loads_itself() -> AsyncIterator[Work]:
    """It goes on when its own pages are back."""
    async with stage_with_a_on_the_host(pages=16, copy_threads=2) as s:
        s.other(s.cache.load_back(RadixKey(seq("A", 24)), limit=12))
        copies = s.cache._controller._executors.copy
        assert isinstance(copies, SeededExecutor)
        while not copies.running:
            await asyncio.sleep(0)
        copies.running[0].fail(OSError("a bad copy"))

        async def request() -> None:
            async with s.cache.lease(seq("A", 24), layerwise=True) as lease:
                with contextlib.suppress(LoadFailed):
                    await lease.wait_layer(0)
                await s.compute(lease)

        yield request()


@scenario
async def a_prefix_loaded_by_hand() -> AsyncIterator[Work]:
    """As engines do that own their requests."""
    async with stage_with_a_on_the_host() as s:
        yield s.cache.load_back(RadixKey(seq("A", 24)))


@scenario
async def room_made_by_hand_where_copies_hold_it() -> AsyncIterator[Work]:
    """What is being copied cannot go before that has ended."""
    async with stage(pages=8, slow_copies=True, host=HOST) as s:
        await s.serve(seq("A", 24))
        await turns(3)
        assert s.cache._controller.is_storing
        yield s.cache.evict(EvictParams(num_tokens=8 * P))


@scenario
async def room_made_by_hand_when_it_must_be_copied_first() -> AsyncIterator[Work]:
    """Whoever wanted it may go; what is being copied stays cached."""
    host = {**HOST, "write_policy": "write_back"}
    async with stage(pages=8, slow_copies=True, host=host) as s:
        await s.serve(seq("A", 24))
        yield s.cache.evict(EvictParams(num_tokens=8 * P))
        await s.cache.drain()
        assert await s.serve(seq("A", 24)) == 20


@scenario
async def a_lease_that_waits_for_pages_to_be_written() -> AsyncIterator[Work]:
    """They were published ahead of a device that computes on."""
    async with stage(host=HOST) as s:
        written = asyncio.Event()
        async with s.cache.lease(seq("A", 9)) as first:
            chunk = await chunk_of(first)
            await first.run(s.model, chunk)
            first.commit(chunk, ready=written)

        async def second() -> None:
            async with s.cache.lease(seq("A", 9)) as lease:
                await lease.ready()

        in_turns(10, written.set)
        yield second()
        await written.wait()


@scenario
async def a_cache_closed_while_it_makes_its_host_memory_ready() -> AsyncIterator[Work]:
    """A piece that is being touched is touched to its end."""
    opened: list[UnifiedRadixCache] = []
    options = executors(slow=False, slow_io=True)

    async def program() -> None:
        async with UnifiedRadixCache.open(settings(host=HOST), **options) as cache:
            opened.append(cache)
            while not options["io_executor"].running:
                await asyncio.sleep(0)
            await cache.aclose(0)

    yield program()
    for cache in opened:
        await cache.aclose(0)
        await assert_nothing_left(cache)


class SlowRanks:
    """Another rank that takes its time."""

    is_alone = False
    rank = 0
    world_size = 1

    async def agree(self, _: str, boundaries: Collection[int]) -> Collection[int]:
        await turns(3)
        return boundaries


@scenario
async def a_request_of_several_ranks() -> AsyncIterator[Work]:
    """It holds nothing while they agree."""
    async with stage(ranks=SlowRanks()) as s:
        yield s.serve(seq("A", 9))


# --- all of them ----------------------------------------------------------------------------------

COVERAGE: Final = {name: Coverage(tiered_cache) for name in LOOPS}


@functools.cache
def cancel_all(loop: str, name: str) -> int:
    """Once per process, whoever asks first; returns how many schedules were run."""
    num_runs = 0
    for new_loop in LOOPS[loop]:
        for delay, times in HOW:
            num_runs += 1 + cancel_everywhere(
                SCENARIOS[name], COVERAGE[loop], new_loop, delay=delay, times=times
            )
    return num_runs


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("loop", LOOPS)
def test_whatever_is_cancelled_nothing_is_left(loop: str, name: str) -> None:
    """See the scenario; at each suspension, at once and some turns later, once and again."""
    least = len(LOOPS[loop]) * len(HOW) * 2
    assert cancel_all(loop, name) >= least, "the scenario never suspends"


@pytest.mark.parametrize("loop", LOOPS)
def test_every_await_of_the_library_is_cancelled_by_a_scenario(loop: str) -> None:
    """Or has a reason, in `NEVER`, why nobody can be cancelled there."""
    for name in SCENARIOS:
        cancel_all(loop, name)
    gaps = COVERAGE[loop].gaps(NEVER)
    assert gaps == [], "\n".join([f"on {loop}:", *gaps])
