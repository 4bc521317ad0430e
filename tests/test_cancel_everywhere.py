"""Every await of the library is found by machine and cancelled in turn, on three event loops.

A scenario sets the scene, yields the coroutine to cancel, and is left when that has ended; then
nothing may be outstanding. To add one, decorate it with `@scenario`: it takes part on all loops,
and what is cancelled in it counts. The last test says which awaits lack one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final
from unittest import mock

import pytest
import uvloop

import tiered_cache
from tests.hybrid_helpers import known
from tests.lease_helpers import P, Rig, chunk_of, seq, settings, start, turns
from tests.storage_helpers import MODEL, Store, keep, opens
from tiered_cache import (
    BackendError,
    ClosedError,
    EvictParams,
    LoadFailed,
    RadixKey,
    StaleError,
    UnifiedRadixCache,
    backup,
    controller,
    prefetch,
    storage_tier,
)
from tiered_cache.prefetch import PrefetchHandle
from tiered_cache.ranks import Ranks
from tiered_cache.storage.backend import SCOPE_BYTES, ReadResult, StorageBackend
from tiered_cache.storage_io import ThreadContext
from tiered_cache.testing.awaits import Coverage, assert_nothing_left, cancel_everywhere
from tiered_cache.testing.faulty_backend import CallGate
from tiered_cache.testing.loop import HANG, DeterministicLoop, SeededExecutor, SeededJob
from tiered_cache.tree.components import swa
from tiered_cache.types import Boundary
from tiered_cache_memory import MemoryBackend

NEVER: Final = {
    "admission.py AdmissionQueue.admit: async with asyncio.timeout(timeout)": "sets a timer",
    "controller.py HybridCacheController.aclose: async with asyncio.timeout(limit)": "sets a timer",
    "prefix_load.py PrefixLoad.bring: async with asyncio.timeout(timeout) as self._waits": "sets a "
    "timer",
    "prefix_load.py PrefixLoad.settled: await self._be_promised_again()": "there is room for what "
    "a load by layers has brought home; were there none, `next_chunk` would go round for ever",
    "joint.py JointGrant._admit_after: async with asyncio.timeout(0 if until and until.is_over "
    "else None) as waits": "(same)",
    "prefetch.py Prefetches.wait: async with asyncio.timeout_at(min(ends, default=None))": "(same)",
    "storage_tier.py StorageTier._connect: async with asyncio.timeout(settings.timeout)": "(same)",
    "storage/wrappers.py Wrapper.register_memory: await self._inner.register_memory(view)": "part "
    "of the contract; a tier registers with the backend and closes it, not its wrappers",
    "storage/wrappers.py Wrapper.aclose: await self._inner.aclose()": "(same)",
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

IN_ANY_TURN: Final[set[str]] = set()
"""Scenarios that yield `turns(count)`: what is cancelled is something else, in any of these turns.
When and how often `turns` is cancelled makes no difference."""


def scenario(fn: Callable[[], AsyncIterator[Work]]) -> None:
    SCENARIOS[fn.__name__.replace("_", " ")] = contextlib.asynccontextmanager(fn)


def in_any_turn(fn: Callable[[], AsyncIterator[Work]]) -> None:
    IN_ANY_TURN.add(fn.__name__.replace("_", " "))
    scenario(fn)


def how(name: str) -> list[tuple[int, int]]:
    return HOW[:1] if name in IN_ANY_TURN else HOW


def loops(loop: str, name: str) -> list[Callable[[], asyncio.AbstractEventLoop]]:
    return LOOPS[loop][:2] if name in IN_ANY_TURN else LOOPS[loop]


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
    config: Any = None,
    **sections: Any,
) -> AsyncIterator[Stage]:
    options = {**executors(slow=slow), "ranks": ranks}
    options["copy_executor"] = executor(
        slow=slow_copies and not copy_s, num_threads=copy_threads, seconds=copy_s
    )
    config = config or settings(pages, **sections)
    async with UnifiedRadixCache.open(config, **options) as cache:
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
            await end_of_program()

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
    """Other ranks that take their time, and have what this one has. Rank 0 ends nothing early."""

    is_alone = False
    world_size = 2

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    async def agree(self, tag: str, boundaries: Collection[int]) -> Collection[int]:
        await turns(3)
        if self.rank and "over" in tag:
            await asyncio.Event().wait()
        return boundaries


@scenario
async def a_request_of_several_ranks() -> AsyncIterator[Work]:
    """It holds nothing while they agree."""
    async with stage(ranks=SlowRanks()) as s:
        yield s.serve(seq("A", 9))


@scenario
async def a_request_of_several_ranks_that_waits_for_admission() -> AsyncIterator[Work]:
    """Whoever stands behind it gets in, though they are admitted one after the other."""
    async with a_full_stage_of_rank(0) as s:
        yield s.serve(seq("A", 9), timeout=1000)


@scenario
async def a_request_that_waits_for_admission_after_rank_0() -> AsyncIterator[Work]:
    """Likewise, where rank 0 has admitted it."""
    async with a_full_stage_of_rank(1) as s:
        yield s.serve(seq("A", 9), timeout=1000)


@contextlib.asynccontextmanager
async def a_full_stage_of_rank(rank: int) -> AsyncIterator[Stage]:
    """For some turns; then there is somebody else, too."""
    async with stage(pages=8, ranks=SlowRanks(rank)) as s:
        holder = await s.lease(seq("Z", 30))
        in_turns(40, holder.close)
        in_turns(12, lambda: s.other(s.serve(seq("B", 9))))
        yield s
        await turns(50)


@scenario
async def a_request_of_several_ranks_with_a_load() -> AsyncIterator[Work]:
    """They agree once more when it has come."""
    async with stage_with_a_on_the_host(ranks=SlowRanks()) as s:
        yield s.serve(seq("A", 25), load_timeout=1000)


@scenario
async def a_request_of_several_ranks_that_waits_for_anothers_run() -> AsyncIterator[Work]:
    """The other publishes, and its pages are found."""
    async with stage(slow=True, ranks=SlowRanks()) as s:
        s.other(s.serve(seq("A", 9)))
        await s.until_runs()
        yield s.serve(seq("A", 9))
        await asyncio.gather(*s.others)
        assert s.hit(seq("A", 9)) == 8


@in_any_turn
async def a_cache_closed_while_ranks_agree() -> AsyncIterator[Work]:
    """Nobody waits for an answer after its end."""
    async with stage(ranks=SlowRanks()) as s:
        lease = await s.lease(seq("A", 9))
        yield turns(4)
        lease.close()
        await s.cache.aclose(0)


# --- three tiers ----------------------------------------------------------------------------------


def with_storage(*, model: Any = MODEL, **storage: Any) -> Any:
    section = {"backend": "memory", "prefetch": {"threshold": 0, "policy": "wait_complete"}}
    ratio = {} if model is MODEL else {"swa": 1.0, "mamba": 1.0}
    device, host = {"tokens": 16 * P, "ratio": ratio}, {**HOST, "ratio": ratio}
    return settings(model=model, device=device, host=host, storage={**section, **storage})


# Made here: they look for what is installed, which no loop is to wait for.
THREE_TIERS: Final = with_storage()
TWO_TIERS: Final = settings(model=MODEL, host=HOST)
ONE_AT_A_TIME: Final = with_storage(max_concurrency=1)
UNWELL: Final = with_storage(breaker={"failures": 1, "retry_after": 0.001})
REQUIRED: Final = with_storage(required=True)
with known("mamba_swa"):
    WINDOWS_AND_STATES: Final = with_storage(
        model={**MODEL, "num_layers": 3, "strategy": "test_mamba_swa"}
    )
with known("mamba"):
    FEW_STATES: Final = settings(
        model={**MODEL, "num_layers": 2, "strategy": "test_mamba"},
        device={"tokens": 16 * P, "ratio": {"mamba": 3 / 16}},
    )

with known("swa"):
    NINE_PAGES: Final = settings(
        model={**MODEL, "num_layers": 3, "strategy": "test_swa"},
        device={"tokens": 9 * P, "ratio": {"swa": 20.01 / 9}},
        host=HOST,
    )

OPERATIONS: Final = ("contains", "read", "write", "delete", "clear")

A: Final = seq("A", 16)


@contextlib.asynccontextmanager
async def storage_stage(
    config: Any = THREE_TIERS, ranks: Ranks | None = None
) -> AsyncIterator[tuple[Stage, Store]]:
    """Sequence A is kept by storage alone; the cache opens and closes it."""
    store = Store()
    with opens(store.opened_as()):
        async with stage(config=config, ranks=ranks) as s:
            await keep(s, A)
            yield s, store
    assert store.violations == []
    assert store.under_way == []
    assert store.num_calls["aclose"] == 1


class SomeTurns(CallGate):
    """A place at which calls are held up."""

    def __init__(self, num_turns: int = 3) -> None:
        super().__init__()
        self._num_turns = num_turns

    async def wait(self) -> None:
        self.num_reached += 1
        self._arrived.set()
        await turns(self._num_turns)


def make_slow(store: Store, *operations: Any, stubborn: bool = False) -> dict[str, CallGate]:
    """Each call takes some turns before it does anything, and some after that. Where they are held
    up first, by operation."""
    gates: dict[str, CallGate] = {}
    for operation in operations or OPERATIONS:
        gates[operation] = SomeTurns()
        store.fault(operation, gate=gates[operation], stubborn=stubborn)
        store.fault(operation, at="after", gate=SomeTurns(), stubborn=stubborn)
    return gates


@contextlib.contextmanager
def small_steps() -> Iterator[None]:
    """What gives way to the loop now and then does so at every step."""
    with (
        mock.patch.object(prefetch, "HASH_PAGES", 1),
        mock.patch.object(backup, "HASH_PAGES", 1),
        mock.patch.object(storage_tier, "SWEEP_NODES", 1),
        mock.patch("tiered_cache.storage.wrappers.SEAL_BYTES", 0),
    ):
        yield


@scenario
async def a_job_that_waits_for_its_turn() -> AsyncIterator[Work]:
    """It is the next, or leaves the turn to who is."""
    threads = ThreadContext(executor(slow=True, num_threads=2), 2, num_busy=1)
    before = start(threads.run(int))
    await turns(1)
    yield threads.run(int)
    assert await before == await threads.run(int) == 0
    assert threads.num_running == 0


@scenario
async def a_request_whose_prefix_storage_has() -> AsyncIterator[Work]:
    """It does not come for nobody."""
    async with storage_stage() as (s, store):
        make_slow(store)
        yield s.serve([*A, 1])


@in_any_turn
async def a_prefetch_of_what_follows_is_given_up() -> AsyncIterator[Work]:
    """Device and host have the front of it, which storage is asked for in the end."""
    async with storage_stage() as (s, store):
        make_slow(store)
        await s.serve([*A[:5]])
        with s.cache.prefetch(A):
            yield turns(40)


@scenario
async def a_request_of_several_ranks_whose_prefix_storage_has() -> AsyncIterator[Work]:
    """Nobody waits for an answer that does not come."""
    async with storage_stage(ranks=SlowRanks()) as (s, store):
        make_slow(store)
        yield s.serve([*A, 1])


@in_any_turn
async def a_prefetch_of_several_ranks_that_is_given_up() -> AsyncIterator[Work]:
    """While they agree, or before, or after."""
    async with storage_stage(ranks=SlowRanks()) as (s, _):
        with s.cache.prefetch(A):
            yield turns(30)


@in_any_turn
async def a_prefetch_after_rank_0_that_is_given_up() -> AsyncIterator[Work]:
    """Likewise; and nobody listens any more whether rank 0 ends it."""
    async with storage_stage(ranks=SlowRanks(1)) as (s, _):
        with s.cache.prefetch(A):
            yield turns(30)


@scenario
async def a_prefetch_that_somebody_waits_for() -> AsyncIterator[Work]:
    """Who waits goes; who has the handle does not, and gets it."""
    async with storage_stage() as (s, store):
        make_slow(store)
        with s.cache.prefetch(A) as handle:
            yield handle.wait()
            assert await handle.wait() == 16


@in_any_turn
async def prefetches_given_up_in_any_turn() -> AsyncIterator[Work]:
    """Some of several that read the same: the other gets it."""
    async with storage_stage() as (s, store):
        make_slow(store)
        with small_steps(), s.cache.prefetch(A) as handle:
            with s.cache.prefetch([*A, 1]), s.cache.prefetch([*A, *seq("B", 48)]):
                yield turns(40)
            assert await handle.wait() == 16


@in_any_turn
async def a_read_given_up_that_cannot_be_stopped() -> AsyncIterator[Work]:
    """Who joined it waits for its end, or gives up too."""
    async with storage_stage() as (s, store):
        slow = make_slow(store, "read", stubborn=True)
        with s.cache.prefetch(A) as first, s.cache.prefetch([*A, 1]):
            await slow["read"].reached()
            await turns(2)
            first.close()
            yield turns(20)


@in_any_turn
async def a_tier_detached_in_any_turn_of_a_prefetch() -> AsyncIterator[Work]:
    """Nobody uses the backend when it is let go."""
    async with storage_stage() as (s, store):
        make_slow(store)
        with small_steps(), s.cache.prefetch(A):
            yield turns(40)
            await s.cache.storage.detach()


@in_any_turn
async def a_tier_detached_in_any_turn_of_a_backup() -> AsyncIterator[Work]:
    """Of a page that storage has wrong, and of some that it lacks."""
    async with storage_stage() as (s, store):
        await spoil_a(s, store)
        make_slow(store)
        with small_steps():
            await s.serve([*A, *seq("B", 16)])
            yield turns(60)
            await s.cache.storage.detach()


@in_any_turn
async def a_tier_detached_while_calls_wait_for_their_turn() -> AsyncIterator[Work]:
    """Questions, reads and a deletion."""
    async with a_backend_that_does_one_thing_at_a_time() as (s, handles):
        handles += [s.cache.prefetch(tokens) for tokens in OTHERS]
        yield turns(70)


@in_any_turn
async def a_tier_detached_while_a_write_waits_for_its_turn() -> AsyncIterator[Work]:
    """Behind others' questions."""
    async with a_backend_that_does_one_thing_at_a_time("delete") as (s, handles):
        handles += [s.cache.prefetch(tokens) for tokens in OTHERS]
        yield turns(40)


OTHERS: Final = [seq(name, 8) for name in "CDEFGH"]


@contextlib.asynccontextmanager
async def a_backend_that_does_one_thing_at_a_time(
    operation: str = "",
) -> AsyncIterator[tuple[Stage, list[PrefetchHandle]]]:
    """Others' prompts are kept, and a backup has come to an operation: a page is deleted first. The
    tier is detached, and then the handles are closed."""
    async with storage_stage(ONE_AT_A_TIME) as (s, store):
        await keep(s, *OTHERS)
        await spoil_a(s, store)
        slow = make_slow(store)
        await s.serve([*A, *seq("B", 16)])
        if operation:
            await slow[operation].reached()
        handles: list[PrefetchHandle] = []
        yield s, handles
        await s.cache.storage.detach()
        for handle in handles:
            handle.close()


@in_any_turn
async def the_end_of_a_program_while_a_tier_is_detached() -> AsyncIterator[Work]:
    """`asyncio.run` cancels all tasks that are left, also who waits for a write that cannot be
    stopped; the cache can still be closed."""
    async with storage_stage() as (s, store):
        slow = make_slow(store, stubborn=True)
        with small_steps():
            await s.serve([*A, *seq("B", 16)])
            await slow["write"].reached()
            s.other(s.cache.storage.detach())
            yield turns(30)
            await end_of_program()
        s.others.clear()
        await s.cache.aclose()


@in_any_turn
async def the_end_of_a_program_while_a_question_is_waited_for() -> AsyncIterator[Work]:
    """Likewise; nobody needs the answer."""
    async with storage_stage() as (s, store):
        slow = make_slow(store, stubborn=True)
        store.fault("aclose", gate=SomeTurns())
        with s.cache.prefetch([*A, 1]):
            await slow["contains"].reached()
            s.other(s.cache.storage.detach())
            yield turns(20)
            await end_of_program()
        s.others.clear()
        await s.cache.aclose()


@contextlib.asynccontextmanager
async def hybrid_stage(ranks: Ranks | None = None) -> AsyncIterator[tuple[Stage, Store]]:
    """The same of a model with windows and states."""
    with known("mamba_swa"):
        async with storage_stage(WINDOWS_AND_STATES, ranks) as made:
            yield made


@scenario
async def a_request_whose_windows_and_states_storage_has() -> AsyncIterator[Work]:
    """They do not come for nobody, nor does the base."""
    async with hybrid_stage() as (s, store):
        make_slow(store)
        yield s.serve([*A, 1])


@scenario
async def a_lease_that_has_lost_its_room_to_a_load() -> AsyncIterator[Work]:
    """It waits for its place again: when its load has failed, somebody else holds what that held of
    the device."""
    prompt = seq("A", 25)
    with known("swa"), mock.patch.object(swa, "CHUNK_TOKENS", 2 * P):
        async with stage(config=NINE_PAGES, slow_copies=True) as s:
            await s.serve(prompt)
            await s.cache.drain()
            await s.cache.evict(EvictParams(num_pages={"swa": 1 << 10}))
            (node,) = s.cache.tree.root.children.values()
            assert (node.end, s.pool.evictable) == (12, 3)

            async def somebody() -> None:
                await turns(SLOW_TURNS // 4)  # the load is under way
                held = s.cache.inc_lock_ref(Boundary(node, 12))
                await turns(3 * SLOW_TURNS)
                s.cache.dec_lock_ref(held)

            async def request() -> None:
                async with s.cache.lease(prompt, reserve=3) as lease:
                    await s.compute(lease)

            s.other(somebody())
            with mock.patch.object(s.cache._parts.host.copier, "copy", side_effect=OSError):  # type: ignore[union-attr]
                yield request()


@scenario
async def a_lease_that_begins_again_without_its_state() -> AsyncIterator[Work]:
    """It waits for a run that may touch what it holds, and then for its place: what it held of the
    prefix somebody else holds, too."""
    with known("mamba"):
        async with stage(config=FEW_STATES, slow=True) as s:
            for stop in (17, 41):
                await s.serve(seq("A", stop))
            deeper = await s.lease(seq("A", 45), reserve=8)

            async def request() -> None:
                async with s.cache.lease(seq("A", 21)) as lease:
                    assert s.counters.states_taken_over == 1
                    with contextlib.suppress(ZeroDivisionError):
                        await lease.run(lambda chunk: 1 / 0, await chunk_of(lease))
                    s.other(s.cache.run([lease], lambda: None))
                    await s.until_runs()
                    in_turns(2 * SLOW_TURNS, deeper.close)
                    assert (await chunk_of(lease)).start == 0
                    await s.compute(lease)

            yield request()
            deeper.close()


@in_any_turn
async def prefetches_of_windows_and_states_given_up_in_any_turn() -> AsyncIterator[Work]:
    """Of several ranks; some of several that read the same: the other gets it."""
    async with hybrid_stage(SlowRanks()) as (s, store):
        make_slow(store)
        with small_steps(), s.cache.prefetch(A) as handle:
            with s.cache.prefetch([*A, 1]), s.cache.prefetch([*A, *seq("B", 48)]):
                yield turns(100)
            assert await handle.wait() == 16


@in_any_turn
async def a_tier_detached_in_any_turn_of_a_prefetch_of_windows_and_states() -> AsyncIterator[Work]:
    """Nobody uses the backend when it is let go."""
    async with hybrid_stage() as (s, store):
        make_slow(store)
        with small_steps(), s.cache.prefetch(A):
            yield turns(90)
            await s.cache.storage.detach()


@in_any_turn
async def a_tier_detached_in_any_turn_of_a_backup_of_windows_and_states() -> AsyncIterator[Work]:
    """Rows that are being written stay where they are until that has ended."""
    async with hybrid_stage() as (s, store):
        make_slow(store)
        with small_steps():
            await s.serve([*A, *seq("B", 16)])
            yield turns(120)
            await s.cache.storage.detach()


async def end_of_program() -> None:
    """What `asyncio.run` does when its coroutine has ended."""
    for _ in range(3):
        for task in asyncio.all_tasks():
            if task.get_name().startswith("tiered-cache"):
                task.cancel()
        await asyncio.sleep(0)


@scenario
async def a_tier_attached_by_hand() -> AsyncIterator[Work]:
    """Who connected in vain hangs up, and another can attach."""
    line = Line()
    async with stage(config=TWO_TIERS) as s:
        await s.serve(A)
        with opens(line.backend()):
            yield s.cache.storage.attach(THREE_TIERS)
            await s.cache.storage.detach()
            await turns(8)
            assert line.num_open == 0
            await s.cache.storage.attach(THREE_TIERS)
        await s.serve([*A, 1])
        await s.cache.drain()
        assert s.stats.counters.pages_backed_up == 4
    assert line.num_open == 0


@scenario
async def a_tier_attached_while_another_is_being_detached() -> AsyncIterator[Work]:
    """What the tree believes of the first is not true of the second."""
    async with storage_stage() as (s, _):
        await s.serve([*A, *seq("B", 16)])
        await s.cache.drain()
        second = Store()
        with small_steps():
            s.other(s.cache.storage.detach())
            await turns(1)
            yield s.cache.storage.attach(THREE_TIERS, backend=second)
            await asyncio.gather(*s.others)
            if not s.cache.storage:
                await s.cache.storage.attach(THREE_TIERS, backend=second)
        await s.serve([*A, *seq("B", 17)])
        await s.cache.drain()
        assert second.has([*A, *seq("B", 16)]) == "S" * 8
        await s.cache.storage.detach()


@scenario
async def a_tier_attached_to_a_cache_that_is_closed_meanwhile() -> AsyncIterator[Work]:
    """Nobody stays connected."""
    line = Line()
    async with stage(config=TWO_TIERS) as s:

        async def attach() -> None:
            with contextlib.suppress(ClosedError):
                await s.cache.storage.attach(THREE_TIERS)

        line.on_open = lambda: s.other(s.cache.aclose())
        with opens(line.backend()):
            yield attach()
            await turns(8)
        await asyncio.gather(*s.others)
        await s.cache.aclose()
        await turns(8)
        assert line.num_open == 0


@scenario
async def a_cache_opened_with_storage_that_takes_its_time() -> AsyncIterator[Work]:
    """Nobody stays connected, however it ends."""
    line = Line()
    opened: list[UnifiedRadixCache] = []
    options = executors(slow=False)

    async def program() -> None:
        async with UnifiedRadixCache.open(REQUIRED, **options) as cache:
            opened.append(cache)

    with opens(line.backend()):
        yield program()
    for cache in opened:
        await cache.aclose()
        await assert_nothing_left(cache)
    await turns(8)
    assert line.num_open == 0


@scenario
async def storage_that_is_required_and_not_there() -> AsyncIterator[Work]:
    """It had connected, and then could not use the memory."""
    line = Line(error=OSError("no such device"))

    async def program() -> None:
        with pytest.raises(BackendError):
            await UnifiedRadixCache.open(REQUIRED, **executors(slow=False))

    with opens(line.backend()):
        yield program()
    await turns(8)
    assert line.num_open == 0


@scenario
async def a_tier_detached_by_hand() -> AsyncIterator[Work]:
    """Begun, it ends: nothing is believed to be stored, and nobody is connected."""
    async with storage_stage() as (s, store):
        slow = make_slow(store)
        store.fault("aclose", gate=SomeTurns())
        store.fault("write", at="inside", gate=SomeTurns(), stubborn=True)
        await s.serve([*A, *seq("B", 16)])
        await slow["write"].reached()
        with small_steps():
            yield s.cache.storage.detach()
            await s.cache.drain()
        if not s.cache.storage:
            assert not any(node.data[0].stored for node in s.cache.tree.nodes())
            assert store.num_calls["aclose"] == 1
            assert store.under_way == []


@scenario
async def storage_cleared_by_hand() -> AsyncIterator[Work]:
    """What is gone, or part of it, is not believed to be there."""
    async with storage_stage() as (s, store):
        await s.serve([*A, *seq("B", 16)])
        await s.cache.drain()
        make_slow(store)
        with small_steps():
            yield s.cache.storage.clear()
            await s.cache.drain()
        there = {key[SCOPE_BYTES:] for key in store.rows}
        for node in s.cache.tree.nodes():
            if node.data[0].stored:
                assert there >= set(s.cache.tree.page_keys(node))


@scenario
async def a_cache_closed_while_storage_is_busy() -> AsyncIterator[Work]:
    """What is on its way comes there; who is cancelled waits no longer, and the rest ends by
    itself."""
    async with storage_stage() as (s, store):
        make_slow(store)
        store.fault("aclose", gate=SomeTurns())
        handle = s.cache.prefetch(A)
        await s.serve([*A, *seq("B", 16)])
        yield s.cache.aclose()
        await turns(60)
        assert store.num_calls["aclose"] == 1
        handle.close()


@scenario
async def a_cache_closed_at_once_though_its_backend_takes_its_time() -> AsyncIterator[Work]:
    """It is let go all the same."""
    async with storage_stage() as (s, store):
        store.fault("aclose", gate=SomeTurns(30))
        yield s.cache.aclose(0)
        await turns(40)
        assert store.num_calls["aclose"] == 1


@in_any_turn
async def a_cache_closed_in_any_turn_of_a_probe() -> AsyncIterator[Work]:
    """Nobody asks after its end."""
    async with storage_stage(UNWELL) as (s, store):
        store.fault("contains", times=1, error=OSError("gone"))
        slow = make_slow(store)
        with s.cache.prefetch(A) as handle:
            assert await handle.wait() == 0
            await slow["contains"].reached()  # by the probe
        yield turns(8)
        await end_of_program()
        await s.cache.aclose(0)


@in_any_turn
async def a_tier_detached_in_any_turn_of_a_reconnection() -> AsyncIterator[Work]:
    """Who connects after that hangs up."""
    line = Line(num_refused=1)
    with opens(line.backend()):
        async with stage(config=UNWELL) as s:
            await line.tried_again.wait()
            yield turns(12)
            await s.cache.storage.detach()
            await s.cache.aclose(0)
            await turns(8)
    assert line.num_open == 0


@in_any_turn
async def the_end_of_a_program_while_a_detached_store_is_being_opened() -> AsyncIterator[Work]:
    """Whoever waits to close it is cancelled, too; the cache can still be closed."""
    line = Line(num_refused=1)
    with opens(line.backend()):
        async with stage(config=UNWELL) as s:
            await line.tried_again.wait()
            s.other(s.cache.storage.detach())
            yield turns(12)
            await end_of_program()
            s.others.clear()
            await s.cache.aclose()
            await turns(8)
    assert line.num_open == 0


@in_any_turn
async def a_cache_closed_in_any_turn_of_a_reconnection() -> AsyncIterator[Work]:
    """What came half way is hung up before the next try, or at the end."""
    line = Line(error=OSError("no such device"))
    with opens(line.backend()):
        async with stage(config=UNWELL) as s:
            await line.hung_up.wait()
            yield turns(16)
            await end_of_program()
            await s.cache.aclose(0)
            await turns(8)
    assert line.num_open == 0


class Line:
    """What a backend is connected by: how often, and how that fails."""

    def __init__(self, *, num_refused: int = 0, error: Exception | None = None) -> None:
        self.num_tries = 0
        self.num_open = 0
        self.num_refused = num_refused
        self.error = error
        self.on_open: Callable[[], object] = lambda: None
        self.tried_again, self.hung_up = asyncio.Event(), asyncio.Event()

    def backend(self) -> type[StorageBackend]:
        line = self

        class Connected(MemoryBackend):
            @classmethod
            async def open(cls, options: Any, context: Any) -> Any:
                line.num_tries += 1
                line.on_open()
                if line.num_tries > 1:
                    line.tried_again.set()
                await turns(4)
                if line.num_tries <= line.num_refused:
                    raise BackendError("not yet")
                line.num_open += 1
                return cls()

            async def register_memory(self, view: memoryview) -> None:
                await turns(2)
                if line.error is not None:
                    raise line.error

            async def aclose(self) -> None:
                line.num_open -= 1
                line.hung_up.set()
                await turns(10)

        return Connected


async def spoil_a(s: Stage, store: Store) -> None:
    """The cache knows that storage has the third page of A wrong."""
    corrupt = store.fault("read", keys=[store.pages_of(A)[2]], result=ReadResult.CORRUPT)
    with s.cache.prefetch(A) as handle:
        assert await handle.wait() == 8
    store.faults.remove(corrupt)


# --- all of them ----------------------------------------------------------------------------------

COVERAGE: Final = {name: Coverage(tiered_cache) for name in LOOPS}


@functools.cache
def cancel_all(loop: str, name: str) -> int:
    """Once per process, whoever asks first; returns how many schedules were run."""
    num_runs = 0
    for new_loop in loops(loop, name):
        for delay, times in how(name):
            num_runs += 1 + cancel_everywhere(
                SCENARIOS[name], COVERAGE[loop], new_loop, delay=delay, times=times
            )
    return num_runs


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("loop", LOOPS)
def test_whatever_is_cancelled_nothing_is_left(loop: str, name: str) -> None:
    """See the scenario; at each suspension, at once and some turns later, once and again."""
    least = len(loops(loop, name)) * len(how(name)) * 2
    assert cancel_all(loop, name) >= least, "the scenario never suspends"


@pytest.mark.parametrize("loop", LOOPS)
def test_every_await_of_the_library_is_cancelled_by_a_scenario(loop: str) -> None:
    """Or has a reason, in `NEVER`, why nobody can be cancelled there."""
    for name in SCENARIOS:
        cancel_all(loop, name)
    gaps = COVERAGE[loop].gaps(NEVER)
    assert gaps == [], "\n".join([f"on {loop}:", *gaps])
