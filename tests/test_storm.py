"""Many requests at once on real threads: runs in flight over runs, cancellations, resets, failures.

The state machine replays its interleavings; here the threads really race. The schedule is not
reproducible, what must hold is: no run reads a wrong byte, nothing is left, nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from tests.lease_helpers import Rig, rig, start
from tiered_cache import CapacityError, ClosedError, Lease, StaleError

EXPECTED = (CapacityError, ClosedError, StaleError, ZeroDivisionError, ValueError)
"""ValueError: a chunk that builds on one that a failed run did not compute."""


def fail(*_: Any) -> None:
    raise ZeroDivisionError


async def request(r: Rig, rng: random.Random, met: Counter[str]) -> None:
    """One request with up to three runs in flight at once, some of which fail."""
    prompt = [rng.randint(0, 1)] * rng.randint(1, 12) + [rng.randint(0, 2)] * rng.randint(1, 9)
    options: dict[str, Any] = {"reserve": rng.randint(0, 4), "cache_salt": rng.choice(["", "x"])}
    async with r.cache.lease(prompt, **options) as lease:
        runs: list[asyncio.Task[Any]] = []
        try:
            while chunk := await lease.next_chunk(rng.choice([2, 4, 8])):
                fn: Any = fail if rng.random() < 0.1 else r.model
                runs.append(start(lease.run(fn, chunk)))
                await asyncio.sleep(0)
                met["runs over runs"] += lease.frontier > chunk.stop or len(runs) > 1
                if rng.random() < 0.5 or len(runs) == 3:
                    await finish(runs, met)
                    lease.finish()
                elif rng.random() < 0.2:
                    lease.commit(chunk)
                    met["commits of what is being computed"] += 1
            await finish(runs, met)
            await generate(r, rng, lease)
            lease.finish()
        finally:
            for run in runs:
                run.cancel()
            if runs:
                await asyncio.wait(runs)
                await asyncio.gather(*runs, return_exceptions=True)


async def finish(runs: list[asyncio.Task[Any]], met: Counter[str]) -> None:
    results = await asyncio.gather(*runs, return_exceptions=True)
    runs.clear()
    for error in results:
        if isinstance(error, BaseException):
            met[type(error).__name__] += 1
            if not isinstance(error, EXPECTED):
                raise error


async def generate(r: Rig, rng: random.Random, lease: Lease) -> None:
    for _ in range(lease.room):
        chunk = lease.append(rng.randint(0, 1))
        await lease.run(r.model, chunk)
        if rng.random() < 0.3 and len(lease) - 1 >= lease.committed:
            lease.truncate(len(lease) - 1)
            lease.append(rng.randint(0, 1))
            if rest := lease.pending:
                await lease.run(r.model, rest)


async def client(r: Rig, rng: random.Random, met: Counter[str], count: int) -> None:
    for _ in range(count):
        task = start(request(r, rng, met))
        if rng.random() < 0.3:
            for _ in range(rng.randint(0, 30)):
                await asyncio.sleep(0)
            met["cancelled"] += task.cancel()
        await asyncio.wait([task])
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EXPECTED):
            raise error


@pytest.mark.parametrize("num_threads", [1, 3])
async def test_a_storm_of_requests(num_threads: int) -> None:
    """Eight clients on a pool for about two of them."""
    met: Counter[str] = Counter()
    async with rig(pages=14, run_threads=num_threads) as r:
        clients = [start(client(r, random.Random(seed), met, 25)) for seed in range(8)]
        rng = random.Random(99)
        while not all(task.done() for task in clients):
            for _ in range(rng.randint(50, 150)):
                await asyncio.sleep(0)
            r.check()
            if rng.random() < 0.1:
                r.cache.reset()
                met["resets"] += 1
        await asyncio.gather(*clients)
        async with asyncio.timeout(10):
            await r.cache.drain()
        assert r.cache.outstanding() == []
        assert r.stats.counters.admissions_queued > 20
    for what in ("runs over runs", "cancelled", "ZeroDivisionError", "resets"):
        assert met[what] >= 1, met
