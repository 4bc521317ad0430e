"""Pages that are published before a device has written them (semantics §9.4)."""

from __future__ import annotations

import asyncio
import logging
import threading

import numpy as np
import pytest

from tests.lease_helpers import P, Rig, chunk_of, rig, seq, start, turns
from tests.tier_helpers import on_tier, tiers
from tiered_cache import Lease, StaleError
from tiered_cache.fences import Fences, as_awaitable, is_device_event

A = seq("A", 13)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


async def published_too_early(r: Rig) -> tuple[Lease, asyncio.Event]:
    """A lease that has committed all of A, and what says that a device has written it."""
    ready = asyncio.Event()
    lease = await r.lease(A)
    chunk = await chunk_of(lease)
    await lease.run(r.model, chunk)
    lease.commit(chunk, ready=ready)
    return lease, ready


async def test_write_through_waits_for_the_fence() -> None:
    """Published and matched at once, copied only when it is written."""
    async with tiers() as (r, copies):
        lease, ready = await published_too_early(r)
        await copies.all()
        assert (r.hit(A), on_tier(r, A), r.counters.stores) == (12, "DDD", 0)
        ready.set()
        await copies.all()
        assert on_tier(r, A) == "BBB"
        lease.close()


async def test_the_fence_is_awaited_on_the_loop() -> None:
    """A copy thread is not kept: other pages are stored meanwhile."""
    async with tiers() as (r, copies):
        lease, ready = await published_too_early(r)
        await r.serve(seq("B", 9))
        await copies.all()
        assert (on_tier(r, A), on_tier(r, seq("B", 8))) == ("DDD", "BB")
        lease.close()
        ready.set()
        await copies.all()
        assert on_tier(r, A) == "BBB"


async def test_pages_leave_a_lease_with_the_fence_of_its_last_run() -> None:
    """Closed before, it keeps its private pages quarantined until they are written."""
    async with rig() as r:
        ready = asyncio.Event()
        lease = await r.lease(seq("A", 14))
        chunk = await chunk_of(lease)
        lease.commit(chunk, ready=ready)
        lease.close()
        assert (r.pool.quarantined, r.pool.free) == (1, 12)
        assert [held.kind for held in r.cache.outstanding()] == ["quarantine"]
        r.cache.check_integrity()
        drained = start(r.cache.drain())
        await turns()
        assert not drained.done()
        ready.set()
        await drained
        assert (r.pool.quarantined, r.pool.free) == (0, 13)
        r.cache.reset()  # what this test has published was never written


async def test_duplicates_stay_until_they_are_written() -> None:
    """Somebody else published first: the own pages go home with the fence, not before."""
    async with rig() as r:
        ready = asyncio.Event()
        lease = await r.lease(A)
        chunk = await chunk_of(lease)
        await lease.run(r.model, chunk)
        await r.serve(A)
        mine = lease.pages["full"][:3].copy()
        lease.commit(chunk, ready=ready)
        assert not set(mine) & set(r.cache._parts.allocators[0].free_ids())
        r.check()
        ready.set()
        await turns()
        assert set(mine) <= set(r.cache._parts.allocators[0].free_ids())
        lease.close()


async def test_truncated_pages_are_not_handed_out_under_a_fence() -> None:
    """A rejected draft's page may still be written to; growth within the reserve cannot fail."""
    async with rig(pages=4) as r:
        ready = asyncio.Event()
        lease = await r.lease(seq("A", 6), reserve=10)
        for token in range(8):
            lease.append(token)
        lease.commit(await chunk_of(lease), ready=ready)
        dropped = set(lease.pages["full"][3:])
        lease.truncate(12)
        r.cache.check_integrity()
        with pytest.raises(TimeoutError):
            await r.lease(seq("B", 4), timeout=0)
        for token in range(4):
            lease.append(token)
        assert set(lease.pages["full"][3:]) == dropped
        ready.set()
        await turns()
        r.cache.check_integrity()
        lease.close()
        r.cache.reset()


async def test_a_match_hands_the_fence_over() -> None:
    """Whoever takes the pages over can wait for them (`Lease.ready`)."""
    async with rig() as r:
        lease, ready = await published_too_early(r)
        other = await r.lease(A)
        assert other.prefix_len == 12
        written = start(other.ready())
        await turns()
        assert not written.done()
        ready.set()
        await written
        stranger = await r.lease(seq("B", 5))
        await stranger.ready()
        for each in (lease, other, stranger):
            each.close()


async def test_the_end_of_a_run_may_change_what_is_ready() -> None:
    """A commit that waited for it takes over what another has published, and its device has not
    written: whoever has asked before asks again in the step in which the next run begins."""
    async with rig() as r:
        lease = await r.lease(A)
        gate = threading.Event()
        r.at_exit(gate.set)
        chunk = lease.allocate(12)
        run = start(lease.run(lambda chunk: gate.wait(5.0), chunk))
        await turns()
        assert lease.commit(chunk) == 0
        other = await r.lease(A)
        published, written = other.allocate(12), asyncio.Event()
        other.commit(published, ready=written)
        await lease.ready()
        gate.set()
        await run
        assert lease.pages["full"][:3].tolist() == other.pages["full"][:3].tolist()
        waiting = start(lease.ready())
        await turns()
        assert not waiting.done()
        r.oracle.write(published, other.key, 0, 12)
        written.set()
        await waiting
        await r.compute(lease)
        lease.close()
        other.close()


async def test_a_fence_that_fails_resets_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knows what the pages hold, and others may have taken them over."""
    async with rig() as r:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lease = await r.lease(A)
        chunk = await chunk_of(lease)
        await lease.run(r.model, chunk)
        lease.commit(chunk, ready=never)
        with caplog.at_level(logging.CRITICAL):
            never.set_exception(OSError("a device was lost"))
            await turns()
        assert (r.hit(A), r.counters.resets) == (0, 1)
        with pytest.raises(StaleError):
            await lease.next_chunk(1)
        lease.close()


async def test_a_reset_under_a_fence() -> None:
    """§12.1: its pages are quarantined until the fence is lifted, then free."""
    async with rig() as r:
        ready = asyncio.Event()
        lease = await r.lease(A)
        lease.commit(await chunk_of(lease), ready=ready)
        r.cache.reset()
        lease.close()
        assert (r.pool.free, r.pool.quarantined) == (12, 4)
        ready.set()
        await r.cache.drain()
        assert (r.pool.free, r.pool.quarantined) == (16, 0)


async def test_several_fences_over_one_lease() -> None:
    """Its pages go home when the last of them is lifted."""
    async with rig() as r:
        first, second = asyncio.Event(), asyncio.Event()
        lease = await r.lease(seq("A", 14))
        for event in (first, second):
            lease.commit(await chunk_of(lease, 2 * P), ready=event)
        lease.close()
        first.set()
        await turns()
        assert r.pool.quarantined == 1
        second.set()
        await turns()
        assert r.pool.quarantined == 0
        r.cache.reset()


async def test_what_can_be_waited_for() -> None:
    """Awaitables, events with an async `wait`, device events; nothing else."""
    event = asyncio.Event()
    event.set()
    await as_awaitable(event)
    await as_awaitable(asyncio.sleep(0))
    with pytest.raises(TypeError, match="not int"):
        as_awaitable(3)

    class DeviceEvent:
        def synchronize(self) -> None: ...

    assert is_device_event(DeviceEvent())
    assert not is_device_event(event)


async def test_only_the_pages_under_a_fence_are_held_back() -> None:
    """Looked for by page, in any order; a lifted fence stands over nothing."""
    lifted: list[str] = []
    fences = Fences(lambda: lifted.append("changed"))
    fence = fences.raise_over([ids(7, 3)], lambda: lifted.append("mine"))
    assert fences.over(ids(1, 3)) == [fence]
    assert fences.over(ids(1, 2, 4)) == []
    fences.lift(fence)
    fences.lift(fence)
    assert (fences.over(ids(3, 7)), lifted, len(fences)) == ([], ["mine", "changed"], 0)


async def test_a_reset_ends_the_wait_for_what_was_to_be_written() -> None:
    """The lease is stale then, and says so."""
    async with tiers() as (r, _):
        lease, ready = await published_too_early(r)
        other = await r.lease(A)
        waiting = start(other.ready())
        await turns()
        assert not waiting.done()
        r.cache.reset()
        with pytest.raises(StaleError):
            await waiting
        for held in (lease, other):
            held.close()
        ready.set()
