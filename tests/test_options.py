"""Options that act at run time do what they say; the others are tested beside what reads them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tiered_cache import Chunk, Hits, UnifiedRadixCache, load_config

MODEL = {"dtype": "float32", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}


def opened(*, executor: concurrent.futures.Executor | None = None, **sections: Any) -> Any:
    settings = {"model": MODEL, "device": {"tokens": 64}, "page_size": 4, **sections}
    return UnifiedRadixCache.open(load_config(settings, environ={}), copy_executor=executor)


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


# --- the second tier ------------------------------------------------------------------------------


def prompt(name: str, num_pages: int) -> list[int]:
    """That many pages of four tokens, and one token more."""
    return [100 * ord(name) + at for at in range(4 * num_pages + 1)]


async def serve(cache: UnifiedRadixCache, tokens: list[int], **options: Any) -> Hits:
    """A whole request; what of it was reused, and once all of it has settled."""
    async with cache.lease(tokens, **options) as lease:
        hits = lease.hits
        while chunk := await lease.next_chunk(64):
            await lease.run(id, chunk)
            lease.commit(chunk)
    await cache.drain()
    return hits


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        ("write_through", [2, 2, 4]),
        ("write_through_selective", [0, 2, 2]),
        ("write_back", [0, 0, 2]),
    ],
)
async def test_write_policy_is_when_pages_are_copied(policy: str, stored: list[int]) -> None:
    """After a first use, after a second, and after the device has needed the pages."""
    host = {"tokens": 64, "write_policy": policy}
    async with opened(device={"tokens": 20}, host=host) as cache:
        counts = []
        for tokens in (prompt("A", 2), prompt("A", 2), [1] * 17):
            await serve(cache, tokens)
            counts.append(cache.stats().counters.pages_stored)
        assert counts[:2] == stored[:2]
        assert counts[2] >= stored[2]


@pytest.mark.parametrize(
    ("policy", "victims"),
    [("lru", "BC"), ("fifo", "AB"), ("mru", "AD"), ("lfu", "BC"), ("filo", "DC")],
)
async def test_host_eviction_policy_is_the_order_of_its_victims(policy: str, victims: str) -> None:
    """Four prompts that only the host has, A used again: which two make room for one of two
    pages."""
    host = {"tokens": 16, "eviction_policy": policy}
    async with opened(device={"tokens": 32}, host=host) as cache:
        for name in "ABCD":
            await serve(cache, prompt(name, 1))
        await serve(cache, prompt("A", 1))
        async with cache.lease([7] * 32) as lease:
            lease.allocate(32)  # the device gives up what it has
        assert cache.stats().host["full"].evictable == 4
        await serve(cache, prompt("E", 2))
        assert "".join(name for name in "ABCD" if not on_host(cache, name)) == "".join(
            sorted(victims)
        )


def on_host(cache: UnifiedRadixCache, name: str) -> int:
    text = cache.explain(prompt(name, 1))
    return int(text.split("on the host beyond it: ")[1].split()[0])


async def two_pages_on_the_host(cache: UnifiedRadixCache) -> None:
    await serve(cache, prompt("A", 2))
    async with cache.lease([7] * 64) as lease:
        lease.allocate(64)
    assert on_host(cache, "A") == 4


@pytest.mark.parametrize(("threshold", "loaded"), [(1, 8), (8, 8), (9, 0)])
async def test_load_back_threshold_is_the_least_that_is_loaded(threshold: int, loaded: int) -> None:
    """Eight tokens are on the host: loaded up to that, computed again beyond."""
    async with opened(host={"tokens": 64, "load_back_threshold": threshold}) as cache:
        await two_pages_on_the_host(cache)
        assert await serve(cache, prompt("A", 2)) == Hits(device=0, host=loaded)


@pytest.mark.parametrize(
    ("host", "pages"), [({"tokens": 20}, 5), ({"size": "12KiB"}, 3), ({"size": 4096}, 1)]
)
async def test_host_size_or_tokens_is_how_much_it_keeps(host: dict[str, Any], pages: int) -> None:
    """A page of this model takes a row of 4 KiB; a prompt of eight pages fits in part."""
    async with opened(host=host) as cache:
        await serve(cache, prompt("A", 8))
        stats = cache.stats()
        assert stats.host["full"].capacity == pages
        assert stats.host["full"].free == 0
        assert stats.counters.pages_stored == pages
        assert stats.counters.stores_refused >= 1


async def test_mode_off_beside_a_host_makes_none() -> None:
    """Nothing is copied, nothing is kept, and no memory is taken."""
    async with opened(mode="off", host={"tokens": 64}) as cache:
        for _ in range(2):
            assert await serve(cache, prompt("A", 2)) == Hits(device=0, host=0)
        stats = cache.stats()
        assert stats.host == {}
        assert cache.arenas == ()
        assert stats.counters.pages_stored == stats.counters.loads == 0


class Held(concurrent.futures.Executor):
    """Copies that wait until they are let go, once `is_shut`."""

    def __init__(self) -> None:
        self.is_shut = False
        self.waiting: list[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = []

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        if not self.is_shut:
            self.let_go()
        return future

    def let_go(self) -> None:
        self.is_shut = False
        for future, call in self.waiting:
            future.set_result(call())
        self.waiting.clear()


async def test_load_timeout_is_how_long_a_grant_waits_for_a_load() -> None:
    """Without one until the load has ended; with one not longer, and the lease says why."""
    copies = Held()
    async with opened(host={"tokens": 64}, executor=copies) as cache:
        await two_pages_on_the_host(cache)
        copies.is_shut = True
        patient = asyncio.ensure_future(cache.acquire(prompt("A", 2)))
        async with cache.lease(prompt("A", 2), load_timeout=0.01) as lease:
            assert lease.hits == Hits(device=0, host=0)
            assert "did not end within 0.01 s" in lease.why
        assert cache.stats().counters.load_timeouts == 1
        assert not patient.done()
        copies.let_go()
        lease = await patient
        assert lease.hits == Hits(device=0, host=8)
        lease.close()


async def test_layerwise_is_whether_a_grant_waits_for_the_load() -> None:
    """With it the lease is there while the copy waits, and its layers are waited for."""
    copies = Held()
    async with opened(host={"tokens": 64}, executor=copies) as cache:
        await two_pages_on_the_host(cache)
        copies.is_shut = True
        async with asyncio.timeout(5):
            lease = await cache.acquire(prompt("A", 2), layerwise=True)
        assert lease.prefix_len == 8
        layer = asyncio.ensure_future(lease.wait_layer(0))
        await asyncio.sleep(0.01)
        assert not layer.done()
        copies.let_go()
        await layer
        lease.close()
