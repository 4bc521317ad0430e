"""Life cycle: reset, drain and close, whatever is in flight."""

from __future__ import annotations

import asyncio

from tests.lease_helpers import cancelled, other_tasks, rig, seq, settings, start, turns
from tiered_cache import UnifiedRadixCache
from tiered_cache.testing.gates import Gate


async def test_drain_after_a_reset_ends_with_the_sweep() -> None:
    """Nothing else has to happen for the waiter to look again (it would wait here for ever)."""
    async with rig() as r:
        await r.serve(seq("A", 40))
        r.cache.reset()
        async with asyncio.timeout(10):
            await r.cache.drain()


async def test_a_close_that_is_cancelled_leaves_no_task() -> None:
    """A second interrupt must not cost a clean-up that nobody would repeat."""
    before = other_tasks()
    cache = await UnifiedRadixCache.open(settings())
    lease = await cache.acquire(seq("A", 5))
    gate = Gate()
    running = start(lease.run(gate))
    await gate.reached()
    closing = start(cache.aclose())
    await turns()
    await cancelled(closing)
    await turns()
    left = other_tasks() - before
    gate.open()
    await running
    assert left == {running}
