"""Flows beside real threads, cancelled at each of their suspensions: nothing is left behind.

A flow is driven by hand. At its n-th suspension the driver waits as many turns of the loop as it is
told, and cancels; n grows until the flow runs through. That every await of the library is cancelled
somewhere is `test_cancel_everywhere`'s to prove.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import pytest

from tests.lease_helpers import Rig, chunk_of, other_tasks, rig, seq, settings, start, turns
from tiered_cache import StaleError, UnifiedRadixCache
from tiered_cache.testing.gates import Gate
from tiered_cache.testing.oracle import OracleModel

OPENING: set[asyncio.Task[None]] = set()

Flow = Callable[[], Coroutine[Any, Any, Any]]


class Suspended(Awaitable[Any]):
    """Drives a coroutine inside a task and calls `at(n)` at its n-th suspension."""

    def __init__(self, flow: Coroutine[Any, Any, Any], at: Callable[[int], None]) -> None:
        self._flow = flow
        self._at = at

    def __await__(self) -> Generator[Any, Any, Any]:
        count = 0
        error: BaseException | None = None
        while True:
            try:
                waited = self._flow.send(None) if error is None else self._flow.throw(error)
            except StopIteration as done:
                return done.value
            self._at(count)
            count += 1
            error = None
            try:
                yield waited
            except BaseException as raised:
                error = raised


async def cancel_each(flow: Flow, settled: Flow, *, delay: int, least: int) -> None:
    """Cancel `flow` at each of its suspensions, `delay` turns later; `settled` proves the rest."""
    for target in range(100):
        reached = asyncio.Event()
        task = start(driven(flow(), target, reached, at_once=not delay))
        if delay:
            waiter = start(reached.wait())
            await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            await turns(delay - 1)
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        await settled()
        while OPENING:
            OPENING.pop().cancel()  # of a gate that nobody came to
        if not reached.is_set() and not task.cancelled():
            assert target >= least, f"the flow has only {target} suspensions"
            return
    raise AssertionError("the flow never ends")


async def driven(
    flow: Coroutine[Any, Any, Any], target: int, reached: asyncio.Event, *, at_once: bool
) -> None:
    task = asyncio.current_task()
    assert task is not None

    def at(count: int) -> None:
        if count == target:
            if at_once:
                task.cancel()  # before the loop sees what is waited for
            else:
                reached.set()

    await Suspended(flow, at)


def self_opening_gate() -> Gate:
    """It opens after every place at which the flow that waits for it may be cancelled."""
    gate = Gate()

    async def opens() -> None:
        await gate.reached()
        await turns(40)
        gate.open()

    OPENING.add(start(opens()))
    return gate


def nothing_left(r: Rig) -> Flow:
    """All pages are accounted for, all bytes right, nothing in flight."""

    async def settled() -> None:
        async with asyncio.timeout(10):
            await r.cache.drain()
        await turns()
        assert r.cache.outstanding() == []
        pool = r.pool
        assert pool.protected == pool.private == pool.quarantined == pool.unspent == 0
        assert pool.free + pool.evictable == pool.capacity
        assert r.stats.num_queued == r.stats.num_runs == 0
        assert r.cache._controller.claims._claims == []
        r.check()
        r.spoil_free_pages()

    return settled


delays = pytest.mark.parametrize("delay", [0, 1, 2, 5])


@delays
async def test_a_request_from_its_prompt_to_its_last_token(delay: int) -> None:
    """Grant, chunks, runs, appended tokens; some of it published when it is cancelled."""
    async with rig(pages=12) as r:

        async def flow() -> None:
            async with r.cache.lease(seq("A", 21), reserve=4) as lease:
                while chunk := await lease.next_chunk(6):
                    await lease.run(r.model, chunk)
                    lease.commit(chunk)
                for token in range(4):
                    await lease.run(r.model, lease.append(token))
                lease.finish()

        await cancel_each(flow, nothing_left(r), delay=delay, least=4)


@delays
async def test_a_request_that_waits_for_admission(delay: int) -> None:
    """Whoever stands behind it gets in all the same."""
    async with rig(pages=8) as r:
        settled = nothing_left(r)

        async def flow() -> None:
            holder = await r.cache.acquire(seq("Z", 30))
            try:
                behind = start(r.serve(seq("B", 9)))
                asyncio.get_running_loop().call_soon(holder.close)
                lease = await r.cache.acquire(seq("A", 9))
                await lease.aclose()
            finally:
                holder.close()
                asked.append(behind)

        asked: list[asyncio.Task[int]] = []

        async def both() -> None:
            while asked:
                await asked.pop()
            await settled()

        await cancel_each(flow, both, delay=delay, least=1)


@delays
async def test_a_request_that_waits_for_anothers_run(delay: int) -> None:
    """The other is not disturbed, and its pages are found."""
    async with rig(pages=24) as r:
        settled, prompts = nothing_left(r), iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        others: list[asyncio.Task[Any]] = []

        async def flow() -> None:
            prompt, gate = seq(next(prompts), 9), self_opening_gate()
            model = OracleModel(r.oracle, gate)
            others.append(start(serve_gated(r, model, prompt)))
            await gate.reached()
            async with r.cache.lease(prompt) as lease:
                chunk = await lease.next_chunk(100)
                assert chunk is not None
                assert chunk.start == 8
                await lease.run(r.model, chunk)

        async def both() -> None:
            while others:
                await others.pop()
            await settled()

        await cancel_each(flow, both, delay=delay, least=3)


async def serve_gated(r: Rig, model: OracleModel, prompt: list[int]) -> None:
    async with r.cache.lease(prompt) as lease:
        chunk = await chunk_of(lease)
        await lease.run(model, chunk)
        lease.commit(chunk)


@delays
@pytest.mark.parametrize("how", ["is queued", "builds on another"])
async def test_a_run_that_is_queued_or_waits_for_the_one_before_it(how: str, delay: int) -> None:
    """Neither runs; what is being computed by others is not disturbed."""
    async with rig(pages=16) as r:
        prompts = iter("BCDEFGHIJKLMNOPQRSTUVWXYZ")

        async def flow() -> None:
            first_prompt, second_prompt = seq("A", 9), seq(next(prompts), 9)
            async with r.cache.lease(first_prompt) as one, r.cache.lease(second_prompt) as two:
                gate = self_opening_gate()
                first = start(two.run(OracleModel(r.oracle, gate), await chunk_of(two, 4)))
                try:
                    await gate.reached()
                    lease = one if how == "is queued" else two
                    await lease.run(r.model, await chunk_of(lease))
                    lease.finish()
                finally:
                    gate.open()
                    await asyncio.shield(first)

        await cancel_each(flow, nothing_left(r), delay=delay, least=2)


@delays
async def test_a_batch_and_growth(delay: int) -> None:
    """All leases of the batch or none."""
    async with rig(pages=16) as r:

        async def flow() -> None:
            async with r.cache.lease(seq("A", 6)) as one, r.cache.lease(seq("B", 7)) as two:
                leases = [one, two]
                chunks = [await chunk_of(lease) for lease in leases]
                await r.cache.run(leases, r.model, chunks)
                for token in range(3):
                    assert r.cache.extend(leases, [token, token]) == []
                    pending = [chunk for lease in leases if (chunk := lease.pending)]
                    await r.cache.run(leases, r.model, pending)
                one.suspend()
                two.finish()

        await cancel_each(flow, nothing_left(r), delay=delay, least=4)


@delays
async def test_drain_and_reset_with_a_run_going_on(delay: int) -> None:
    """Whoever drains may give up; the reset stands."""
    async with rig(pages=16) as r:

        async def flow() -> None:
            gate = self_opening_gate()
            async with r.cache.lease(seq("A", 9)) as lease:
                running = start(lease.run(gate, await chunk_of(lease)))
                try:
                    await gate.reached()
                    r.cache.reset()
                    await r.cache.drain()
                finally:
                    gate.open()
                    await asyncio.shield(running)
                with pytest.raises(StaleError):
                    lease.finish()

        await cancel_each(flow, nothing_left(r), delay=delay, least=2)


@delays
async def test_opening_and_closing(delay: int) -> None:
    """No task stays, and closing again finishes the job."""
    before = other_tasks()
    opened: list[UnifiedRadixCache] = []

    async def flow() -> None:
        async with UnifiedRadixCache.open(settings()) as cache:
            opened.append(cache)
            lease = await cache.acquire(seq("A", 5))
            cache.reset()
            gate = self_opening_gate()
            fresh = await cache.acquire(seq("B", 5))
            running = start(fresh.run(gate))
            await gate.reached()
            assert lease.epoch != fresh.epoch
            del lease
            runs.append(running)

    runs: list[asyncio.Task[Any]] = []

    async def settled() -> None:
        while runs:
            await asyncio.wait([runs.pop()])
        await turns()
        assert other_tasks() <= before
        while opened:
            assert await opened.pop().aclose() == []

    with pytest.warns(ResourceWarning):
        await cancel_each(flow, settled, delay=delay, least=2)
