"""A cancelled call ends with its round trip: no answer is left for somebody else, no connection is
lost, and nothing touches the buffers afterwards."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import pytest

from tests.backends.redis_helpers import KIB, MIB, READ, IoThreads, Pages, opened
from tests.backends.redis_proxy import Proxy
from tests.backends.redis_server import ValkeyServer
from tiered_cache.storage import ReadResult, WriteResult
from tiered_cache_redis import RedisBackend


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as started:
        yield started


@pytest.fixture
def proxy(server: ValkeyServer) -> Iterator[Proxy]:
    with Proxy(server.port) as between:
        yield between


async def test_five_hundred_reads_cancelled_at_random_times(
    server: ValkeyServer, proxy: Proxy
) -> None:
    """B74: by hand or by a time limit, in batches of several round trips, through a slow link. No
    value is ever under a foreign key, and the same connections go on."""
    pages = Pages.of(40, 16 * KIB)
    pages.put(server.client())
    chance = random.Random(74)
    proxy.delay_s = 0.0002
    proxy.chunk_bytes = 15_000  # so that values are cut everywhere
    ends = {"read": 0, "cancelled": 0}

    async def one(backend: RedisBackend) -> None:
        some = pages.some(chance.sample(range(40), chance.randint(1, 5)))
        buffers = some.buffers()
        call = asyncio.ensure_future(backend.read(some.keys, buffers))
        try:
            async with asyncio.timeout(chance.uniform(0, 0.04)):
                results = await call
        except TimeoutError:
            ends["cancelled"] += 1
            before = [bytes(each) for each in buffers]
            await asyncio.sleep(0.002)
            assert before == buffers  # quiet
        else:
            ends["read"] += 1
            assert results == [READ] * len(some.keys)
            assert buffers == some.rows

    async with opened(proxy.url, max_batch=32 * KIB) as backend:
        for _ in range(50):
            await asyncio.gather(*(one(backend) for _ in range(10)))
        assert min(ends.values()) > 50, ends
        assert proxy.connected <= 4
        proxy.delay_s = 0
        buffers = pages.buffers()
        assert await backend.read(pages.keys, buffers) == [READ] * 40
        assert buffers == pages.rows


async def test_a_thousand_cancels_of_everything(server: ValkeyServer) -> None:
    """Reads, writes, look-ups, deletions: what is kept afterwards is whole, and four connections
    were enough."""
    pages = Pages.of(24, 64 * KIB)
    chance = random.Random(1000)
    async with opened(server.url, max_batch=128 * KIB) as backend:
        await backend.write(pages.keys, pages.rows)

        async def one() -> bool:
            index = chance.randrange(20)
            some = pages.some(range(index, index + 4))
            keys, rows, buffers = some.keys, some.rows, some.buffers()
            use = chance.choice(
                [
                    lambda: backend.read(keys, buffers),
                    lambda: backend.read(keys, buffers),
                    lambda: backend.write(keys, rows),
                    lambda: backend.contains(keys),
                    lambda: backend.delete(keys),
                ]
            )
            call = asyncio.ensure_future(use())
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            call.cancel()
            try:
                results = await call
            except asyncio.CancelledError:
                return True
            if results and isinstance(results[0], ReadResult):
                for buffer, row, result in zip(buffers, rows, results, strict=True):
                    assert result is not READ or buffer == row
            return False

        cancelled = 0
        for _ in range(50):
            cancelled += sum(await asyncio.gather(*(one() for _ in range(20))))
        assert cancelled > 500
        assert server.num_clients() <= 4
        buffers = pages.buffers()
        pages.prove(buffers, await backend.read(pages.keys, buffers))
        assert await backend.write(pages.keys, pages.rows) == [WriteResult.WRITTEN] * 24
        assert await backend.read(pages.keys, buffers) == [READ] * 24
        assert buffers == pages.rows


async def test_half_of_a_crowd_leaves_and_the_other_half_is_served(
    server: ValkeyServer, proxy: Proxy
) -> None:
    """B76: four connections, a hundred readers; fifty are cancelled while they wait or read."""
    pages = Pages.of(4, 16 * KIB)
    pages.put(server.client())
    proxy.delay_s = 0.001
    async with opened(proxy.url, num_threads=8, connections=4) as backend:
        buffers = [pages.buffers() for _ in range(100)]
        calls = [asyncio.ensure_future(backend.read(pages.keys, each)) for each in buffers]
        while not any(call.done() for call in calls):
            await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert ends[1::2] == [[READ] * 4] * 50
        assert all(each == pages.rows for each in buffers[1::2])
        assert any(isinstance(end, asyncio.CancelledError) for end in ends[::2])
        assert proxy.connected <= 4
        assert backend._turns._value == 4


async def test_cancelled_it_starts_no_other_round_trip(server: ValkeyServer, proxy: Proxy) -> None:
    """The one under way is awaited, however long that takes and however often it is cancelled; its
    thread touches the buffers until then and not after."""
    pages = Pages.of(8, MIB)
    pages.put(server.client())
    threads = IoThreads()
    async with opened(proxy.url, context=threads, max_batch=MIB, stall_timeout=30) as backend:
        buffers = pages.buffers()
        proxy.hold_after(2 * MIB + 1000)  # in the third
        call = asyncio.ensure_future(backend.read(pages.keys, buffers))
        while proxy.flow.is_set():
            await asyncio.sleep(0)
        runs = threads.num_runs
        for _ in range(5):
            call.cancel()
            await asyncio.sleep(0.01)
            assert not call.done()
        proxy.flow.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert threads.num_runs == runs
        assert buffers[-1] == b"\xa5" * MIB
        assert await backend.read(pages.keys, buffers) == [READ] * 8


async def test_cancelled_while_queued_it_never_begins(server: ValkeyServer) -> None:
    """All threads are busy elsewhere: the call ends at once and sends nothing."""
    pages = Pages.of(1)
    threads = IoThreads(1)
    async with opened(server.url, context=threads) as backend:
        gate = threading.Event()
        busy = asyncio.ensure_future(threads.run(gate.wait))
        call = asyncio.ensure_future(backend.write(pages.keys, pages.rows))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gate.set()
        await busy
        assert await backend.contains(pages.keys) == [False]


async def test_an_opening_that_is_cancelled_leaves_no_connection(
    server: ValkeyServer, proxy: Proxy
) -> None:
    for wait_s in (0.0, 0.001, 0.002, 0.005):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(wait_s):
                proxy.delay_s = 0.02
                async with opened(proxy.url):
                    await asyncio.sleep(10)
    proxy.delay_s = 0
    while server.num_clients():
        await asyncio.sleep(0.001)
