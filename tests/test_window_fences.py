"""What a lease gives up of windows and states while a device computes on (semantics §9.4, §11.5–6):
nobody else has it before the device is done, and the lease needs no more than it was promised."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest

from tests.device_helpers import Device, Launched, Synchronised
from tests.hybrid_helpers import GRID, STACKS, P, hybrid_rig
from tests.lease_helpers import Rig, chunk_of, seq, turns
from tests.schedules import Guarded
from tiered_cache import AdmissionTimeout, Lease
from tiered_cache.tree.components import swa
from tiered_cache.types import EvictParams

CHUNK = 16

FOOTPRINT = 2 * (12 // P + 1) + CHUNK // P + 1
"""Of a window of 10 tokens, in pages."""

PAGES = 160

every_stack = pytest.mark.parametrize("stack", STACKS)
every_depth = pytest.mark.parametrize("depth", [1, 2, 5])


@contextlib.asynccontextmanager
async def device_rig(
    stack: str, swa_pages: int = FOOTPRINT, states: int = 8, **sections: Any
) -> AsyncIterator[tuple[Rig, Device]]:
    """Just room for the window of one lease; whatever is free is overwritten, and what is taken
    must not have been written to since."""
    ids = {"swa": swa_pages, "mamba": states}
    ratio = {name: (ids[name] + 0.01) / PAGES for name in STACKS[stack] if name != "full"}
    sections = {"device": {"tokens": PAGES * P, "ratio": ratio}, **sections}
    async with contextlib.AsyncExitStack() as stacked:
        stacked.enter_context(mock.patch.object(swa, "CHUNK_TOKENS", CHUNK))
        r = await stacked.enter_async_context(hybrid_rig(stack, PAGES, **sections))
        guard(r)
        device = Device(r.cache, r.oracle)
        r.at_exit(device.end)
        r.model = Synchronised(device, r.oracle)
        yield r, device
        device.finish()


def guard(r: Rig) -> None:
    accounts, components = r.cache._controller.accounts, r.cache.tree.components
    guards: list[Any] = [
        Guarded(allocator, r.oracle, str(component.id), on_host=False)
        for allocator, component in zip(accounts.allocators, components, strict=True)
    ]
    accounts.allocators = tuple(guards)


class Loop:
    """A serving loop that is so many runs ahead of its device, so that some fence always stands."""

    def __init__(self, r: Rig, device: Device, lease: Lease, depth: int, every: int = 1) -> None:
        self.r = r
        self.device = device
        self.lease = lease
        self.depth = depth
        self.every = every
        self.ahead: deque[Launched] = deque()
        self.num_runs = 0

    async def run(self, chunk: Any, *, commits: bool = True) -> None:
        await self.lease.run(self.device, chunk)
        self.num_runs += 1
        if commits and self.num_runs % self.every == 0:
            self.commit(chunk)
        while len(self.ahead) > self.depth:
            await self.lift()
        self.r.cache.check_integrity()

    def commit(self, chunk: Any) -> None:
        launched = self.device.launched[-1]
        self.lease.commit(chunk, ready=launched.ready)
        self.ahead.append(launched)

    async def lift(self, at: int = 0) -> None:
        launched = self.ahead[at]
        del self.ahead[at]
        self.device.finish(launched)
        launched.ready.set_result(None)
        await turns(4)
        self.r.cache.check_integrity()

    async def prompt(self) -> None:
        while chunk := await self.lease.next_chunk(CHUNK):
            assert self.num_runs < self.every or self.ahead, "some fence stands"
            await self.run(chunk)

    async def decode(self, count: int) -> None:
        for token in range(1, count + 1):
            await self.run(self.lease.append(token))

    async def end(self) -> None:
        while self.ahead:
            await self.lift()


@every_depth
@every_stack
async def test_a_prompt_of_many_windows_under_fences(stack: str, depth: int) -> None:
    """Growth within the reserve cannot fail, though some fence stands at every run's end."""
    async with device_rig(stack) as (r, device):
        async with r.cache.lease(seq("A", 180), reserve=36) as lease:
            loop = Loop(r, device, lease, depth)
            await loop.prompt()
            await loop.decode(36)
            lease.finish()
            await loop.end()
        r.check()


@every_depth
@every_stack
async def test_what_is_published_under_fences_is_found(stack: str, depth: int) -> None:
    """At once, where there is room for what it leaves behind."""
    async with device_rig(stack, swa_pages=4 * FOOTPRINT, states=40) as (r, device):
        async with r.cache.lease(seq("A", 180), reserve=36) as lease:
            loop = Loop(r, device, lease, depth)
            await loop.prompt()
            assert r.hit(seq("A", 180)) >= 180 - GRID - P
            await loop.decode(36)
            await loop.end()
        r.check()
        assert await r.serve([*seq("A", 180), 1]) >= 180 - GRID - P


@every_depth
@every_stack
async def test_commits_that_are_rare_under_fences(stack: str, depth: int) -> None:
    """Most of it is the lease's own for long: with every seventh run there comes a commit."""
    async with device_rig(stack) as (r, device):
        async with r.cache.lease(seq("A", 250), reserve=36) as lease:
            loop = Loop(r, device, lease, depth, every=7)
            await loop.run(await chunk_of(lease, CHUNK), commits=False)
            loop.commit(device.launched[-1].chunk)
            await loop.prompt()
            await loop.decode(36)
            device.finish()
            lease.finish()
            await loop.end()
        r.check()


@every_stack
async def test_one_fence_that_stands_for_long(stack: str) -> None:
    """What is left behind under it is used again by the lease itself: its runs follow each
    other."""
    async with device_rig(stack) as (r, device):
        async with r.cache.lease(seq("A", 180), reserve=36) as lease:
            loop = Loop(r, device, lease, 100, every=1000)
            await loop.run(await chunk_of(lease, CHUNK), commits=False)
            loop.commit(device.launched[-1].chunk)
            await loop.prompt()
            await loop.decode(36)
            device.finish()
            await loop.end()
            lease.finish()
        r.check()


@every_depth
@every_stack
async def test_a_cache_that_is_off_under_fences(stack: str, depth: int) -> None:
    """Nothing is published, so all is the lease's own."""
    async with device_rig(stack, mode="off") as (r, device):
        async with r.cache.lease(seq("A", 180), reserve=36) as lease:
            loop = Loop(r, device, lease, depth)
            await loop.prompt()
            await loop.decode(36)
            await loop.end()
        r.cache.check_integrity()


@every_stack
async def test_nobody_has_what_a_device_still_reads(stack: str) -> None:
    """Own pages behind the window, and what was published behind it: whoever evicts all he can,
    and takes all there is, gets none of it."""
    async with device_rig(stack, swa_pages=3 * FOOTPRINT) as (r, device):
        async with r.cache.lease(seq("A", 180), reserve=36) as lease:
            loop = Loop(r, device, lease, 3)
            while chunk := await lease.next_chunk(CHUNK):
                await loop.run(chunk)
                await r.cache.evict(EvictParams(PAGES * P))
                for index in range(1, len(r.cache.tree.components)):
                    name = str(r.cache.tree.components[index].id)
                    await r.cache.evict(EvictParams(num_pages={name: PAGES}))
                take_and_write_all(r)
                r.cache.check_integrity()
            await loop.end()
        r.check()


@pytest.mark.parametrize("num_chunks", [1, 3])
@every_stack
async def test_what_a_run_leaves_behind_waits_for_the_fence_of_its_commit(
    stack: str, num_chunks: int
) -> None:
    """It is left when the run returns, before there is a fence over it."""
    if "swa" not in stack:
        return
    async with device_rig(stack) as (r, device):
        async with r.cache.lease(seq("A", 60)) as lease:
            loop = Loop(r, device, lease, 100)
            for at in range(num_chunks):
                await loop.run(await chunk_of(lease, CHUNK))
                if at:
                    await loop.lift()
            assert lease._fences.num_left(1) > 0
            device.finish()
            take_and_write_all(r)  # the device has written to none of what is free
            await loop.end()
        r.check()


def take_and_write_all(r: Rig) -> None:
    """As loads would, on a stream of their own."""
    for allocator in r.cache._controller.accounts.allocators:
        ids = allocator.allocate(allocator.num_free)
        assert ids is not None
        allocator.free(ids)


@every_stack
async def test_each_page_waits_for_the_fences_that_stood_when_it_was_left(stack: str) -> None:
    """Not for those that were raised later; lifted in any order."""
    if "swa" not in stack:
        return
    async with device_rig(stack, swa_pages=4 * FOOTPRINT) as (r, device):
        async with r.cache.lease(seq("A", 180), reserve=36) as lease:
            loop = Loop(r, device, lease, 100)
            for _ in range(4):
                await loop.run(await chunk_of(lease, CHUNK))
            held = [r.stats.pools["swa"].protected]
            for at in (2, 1, 0):  # the first still stands over all that was left behind since
                await loop.lift(at)
                held.append(r.stats.pools["swa"].protected)
            assert held[0] == held[1] == held[2] > held[3]
            await loop.end()
        r.check()


@every_stack
async def test_a_lease_that_is_closed_under_fences(stack: str) -> None:
    """All of it is quarantined until the last of them is lifted, then home."""
    async with device_rig(stack) as (r, device):
        lease = await r.lease(seq("A", 96))
        loop = Loop(r, device, lease, 2, every=3)
        await loop.prompt()
        lease.close()
        assert [held.kind for held in r.cache.outstanding()] == ["quarantine"]
        assert all(pool.unspent == 0 for pool in r.stats.pools.values())
        take_and_write_all(r)
        while loop.ahead:
            await loop.lift(-1)
        device.finish()
        await r.cache.drain()
        assert r.cache.outstanding() == []
        r.check()


@every_stack
async def test_drafts_that_are_rejected_under_fences(stack: str) -> None:
    """They are taken back, and written again, with what was promised; nobody else has them."""
    async with device_rig(stack, FOOTPRINT + 2) as (r, device):  # what can be rolled back
        async with r.cache.lease(seq("A", 32), reserve=120, rollback=6) as lease:
            loop = Loop(r, device, lease, 3)
            await loop.prompt()
            for _ in range(20):
                kept = len(lease)
                for token in range(1, 6):
                    await loop.run(lease.append(token), commits=False)
                if "mamba" in stack:
                    kept = max(kept, len(lease) - len(lease) % GRID)
                    with contextlib.suppress(ValueError):
                        lease.truncate(kept)
                else:
                    lease.truncate(kept)
                r.cache.check_integrity()
                if len(lease) > 130:
                    break
                chunk = lease.append(9)
                await loop.run(chunk, commits=False)
                loop.commit(chunk)
                while len(loop.ahead) > 2:
                    await loop.lift()
            lease.finish()
            device.finish()
            await loop.end()
        r.check()


@every_stack
async def test_a_reset_under_fences(stack: str) -> None:
    """§12.1: what a device still reads is quarantined, all else is free at once."""
    async with device_rig(stack) as (r, device):
        lease = await r.lease(seq("A", 100))
        loop = Loop(r, device, lease, 3)
        for _ in range(4):
            await loop.run(await chunk_of(lease, CHUNK))
        r.cache.reset()
        for pool in r.stats.pools.values():
            assert pool.free + pool.quarantined == pool.capacity
        take_and_write_all(r)
        lease.close()
        await loop.end()
        await r.cache.drain()
        for pool in r.stats.pools.values():
            assert pool.free == pool.capacity, pool


@every_stack
async def test_what_stands_under_a_fence_is_not_promised_twice(stack: str) -> None:
    """Another lease is admitted when there is room for its window, not before."""
    if "swa" not in stack:
        return
    async with device_rig(stack, swa_pages=FOOTPRINT + 4) as (r, device):
        async with r.cache.lease(seq("A", 100), reserve=36) as lease:
            loop = Loop(r, device, lease, 2, every=2)
            while chunk := await lease.next_chunk(CHUNK):
                await loop.run(chunk)
                with pytest.raises(AdmissionTimeout):
                    await r.lease(seq("B", 60), timeout=0)
            device.finish()
            await loop.end()
        await r.serve(seq("B", 60))
        r.check()


@every_stack
async def test_windows_and_states_come_to_the_host_under_other_s_fences(stack: str) -> None:
    """A fence holds back what it stands over, and nothing else."""
    async with device_rig(stack, swa_pages=4 * FOOTPRINT, host={"tokens": 400}) as (r, device):
        async with r.cache.lease(seq("A", 100)) as lease:
            loop = Loop(r, device, lease, 100)
            await loop.run(await chunk_of(lease, CHUNK))
            await r.serve(seq("B", 33))
            await turns(200)
            async with asyncio_timeout():
                while not all(pool.evictable for pool in r.stats.host.values()):
                    await turns()
            for name in STACKS[stack]:
                found = r.stats.host[name]
                assert found.capacity - found.free > 0
            assert r.counters.pages_stored > 0
            await loop.end()
        await r.cache.drain()
        r.check()


def asyncio_timeout() -> Any:
    import asyncio

    return asyncio.timeout(5)


async def test_a_window_that_is_not_whole_at_its_commit() -> None:
    """Schedule 20261201089446: the lease had left behind a page of the window that it published,
    under the fence, and held its place all the same: that is room for what others put there, and
    there was none, since the page was not home yet."""
    depth = FOOTPRINT * P - 1
    async with device_rig("swa") as (r, device):
        async with r.cache.lease(seq("A", depth + 2 * P)) as lease:
            loop = Loop(r, device, lease, 1)
            lease.truncate(depth)
            chunk = await lease.next_chunk(depth)
            assert chunk is not None
            assert chunk.stop == depth
            await loop.run(chunk)
            assert lease.committed == depth - depth % P
            await loop.end()
        r.check()
