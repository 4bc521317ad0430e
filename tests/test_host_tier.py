"""Two tiers: what the device gives up comes back from the host, and never before its bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lease_helpers import P, rig, seq

HOST: dict[str, Any] = {"tokens": 64 * P}


async def test_what_the_device_evicts_comes_back_from_the_host() -> None:
    """Write-through copies at the first use; a demoted prefix is loaded within the grant."""
    async with rig(pages=8, host=HOST) as r:
        assert await r.serve(seq("A", 24)) == 0
        await r.cache.drain()
        assert r.counters.pages_stored == 6
        assert await r.serve(seq("B", 28)) == 0
        assert r.hit(seq("A", 24)) < 20
        r.check()
        async with r.cache.lease(seq("A", 24)) as lease:
            assert lease.prefix_len == 20
            assert lease.hits.host > 0
            assert lease.hits.total == 20
            await r.compute(lease)
        assert r.counters.tokens_dropped == 0


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
async def test_a_stream_of_prompts_over_a_small_device(policy: str) -> None:
    """Every policy, the same bytes."""
    async with rig(pages=8, host={**HOST, "write_policy": policy}) as r:
        for turn in range(3):
            for name in "ABCDE":
                reused = await r.serve(seq(name, 16))
                await r.serve(seq(name, 16))  # a second use, for the selective policy
                if turn:
                    assert reused == 12, (name, r.counters)
                r.check()
                await r.cache.drain()
        assert r.counters.tokens_dropped == 0
        assert r.counters.tokens_hit_host >= 5 * 2 * 12
