"""Options that act at run time do what they say; the others are tested beside what reads them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from tiered_cache import Chunk, UnifiedRadixCache, load_config

MODEL = {"dtype": "float32", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}


def opened(**sections: Any) -> Any:
    settings = {"model": MODEL, "device": {"tokens": 64}, "page_size": 4, **sections}
    return UnifiedRadixCache.open(load_config(settings, environ={}))


async def prefix_at_second_time(cache: UnifiedRadixCache) -> int:
    prompt = list(range(21))
    async with cache.lease(prompt) as lease:
        chunk = await lease.next_chunk(64)
        assert chunk is not None
        await lease.run(id, chunk)
        lease.commit(chunk)
    async with cache.lease(prompt) as lease:
        return lease.prefix_len


async def test_mode_on_reuses_and_off_does_not() -> None:
    """The same program, with and without the cache."""
    async with opened() as cache:
        assert await prefix_at_second_time(cache) == 20
    async with opened(mode="off") as cache:
        assert await prefix_at_second_time(cache) == 0


async def test_page_size_is_the_grain_of_reuse() -> None:
    """Nothing shorter than a page is kept."""
    async with opened(page_size=16) as cache:
        assert await prefix_at_second_time(cache) == 16


async def test_run_threads_is_how_many_runs_go_at_once() -> None:
    """Two threads meet at a barrier; one would wait there for ever."""
    barrier = threading.Barrier(2)

    def meet(chunk: Chunk) -> int:
        return barrier.wait(timeout=10)

    async with opened(run_threads=2) as cache:

        async def request(token: int) -> int:
            async with cache.lease([token]) as lease:
                return int(await lease.run(meet, await lease.next_chunk(1)))

        assert sorted(await asyncio.gather(request(1), request(2))) == [0, 1]
