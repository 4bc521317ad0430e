"""Leases of models with windows and states: what they compute with is right, whatever happens, and
nothing of it leaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.hybrid_helpers import GRID, STACKS, P, hybrid_rig
from tests.lease_helpers import Rig, seq

pytestmark = pytest.mark.parametrize("stack", STACKS)


async def decode(r: Rig, lease: object, tokens: list[int]) -> None:
    for token in tokens:
        await lease.run(r.model, lease.append(token))  # type: ignore[attr-defined]


async def test_a_prompt_in_chunks_and_its_answer(stack: str) -> None:
    async with hybrid_rig(stack, 32) as r:
        async with r.cache.lease(seq("A", 45), reserve=20) as lease:
            await r.compute(lease, 12)
            r.check()
            await decode(r, lease, list(range(1, 18)))
            lease.finish()
            r.check()
        r.check()
        reused = await r.serve([*seq("A", 45), *range(1, 18), 99])
        assert reused >= 45 - GRID - P


async def test_what_the_device_gives_up_comes_back_from_the_host(stack: str) -> None:
    """All that a boundary needs, and nothing else: a window, a state."""
    async with hybrid_rig(stack, 32, host={"tokens": 400}) as r:
        for name in "ABC":
            await r.serve(seq(name, 50))
            await r.cache.drain()
        r.check()
        before = r.counters.tokens_hit_host
        for name in "ABCABC":
            r.spoil_free_pages()
            reused = await r.serve([*seq(name, 50), 1])
            assert reused >= 50 - GRID - P
            await r.cache.drain()
            r.check()
        assert r.counters.tokens_hit_host - before >= 4 * 40


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("seed", range(8))
async def test_the_same_over_two_tiers(stack: str, seed: int, policy: str) -> None:
    host = {"tokens": random.Random(seed).choice([80, 400]), "write_policy": policy}
    r = await many_requests(stack, f"two {policy} {seed}", host=host)
    assert r.counters.pages_stored > 0 or policy == "write_back"  # which may have had room


@pytest.mark.parametrize("seed", range(12))
async def test_many_requests_in_random_order(stack: str, seed: int) -> None:
    """Shared prefixes, small pools, runs that fail or are cancelled, leases that are dropped."""
    await many_requests(stack, seed)


async def many_requests(stack: str, seed: object, **sections: Any) -> Rig:
    chance = random.Random(f"{stack} {seed}")
    async with hybrid_rig(stack, chance.choice([30, 60]), **sections) as r:
        await requests_in_random_order(r, chance)
        return r


async def requests_in_random_order(
    r: Rig, chance: random.Random, between: Callable[[], object] = lambda: None
) -> None:
    """`between`: what happens to the cache after each round of requests."""
    trunks = [seq(name, 64) for name in "ABC"]

    async def request() -> None:
        trunk = chance.choice(trunks)[: chance.randrange(1, 60)]
        tokens = [*trunk, *[chance.randrange(1, 3) for _ in range(chance.randrange(8))]]
        async with r.cache.lease(tokens, reserve=chance.randrange(8)) as lease:
            while chunk := await lease.next_chunk(chance.randrange(1, 24)):
                if chance.random() < 0.1:
                    with contextlib.suppress(ZeroDivisionError):
                        await lease.run(lambda chunk: (r.model(chunk), 1 / 0), chunk)
                    continue
                await lease.run(r.model, chunk)
                if chance.random() < 0.7:
                    lease.commit(chunk)
                if chance.random() < 0.05:
                    return
            while lease.room and chance.random() < 0.8:
                await lease.run(r.model, lease.append(chance.randrange(1, 3)))
            if chance.random() < 0.7:
                lease.finish()

    async def impatient() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.choice([None, None, 0.002, 0.005])):
                await request()

    for _ in range(25):
        async with asyncio.TaskGroup() as group:
            for _ in range(chance.randrange(1, 4)):
                group.create_task(impatient())
        r.check()
        between()
        if chance.random() < 0.05:
            r.cache.reset()
        r.spoil_free_pages()
    await r.cache.drain()
    assert r.cache.outstanding() == []
