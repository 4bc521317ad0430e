"""Windows and states that were on the host, in files, and in another process give the same logits,
bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.helpers import poison, random_tokens, settings
from tests.integrations.test_hybrid_parity import KNOWN, STATES, WINDOWS, goes_on, publish
from tests.integrations.test_transformers_parity import (
    another_process,
    check_chunks,
    question,
    three_tiers,
)
from tiered_cache import UnifiedRadixCache
from tiered_cache.integrations.transformers import TransformersRunner
from tiered_cache.testing.models import tiny_model
from tiered_cache.types import EvictParams

__all__ = ["another_process"]  # a fixture

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", params=WINDOWS + STATES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tiers_of(model: Any, path: Path) -> dict[str, Any]:
    """Room for all pages of windows on both tiers, and for a state for each fourth page."""
    kinds = settings(model).model.state_kinds
    rooms = {"swa": ("window", 1.0), "mamba": ("recurrent", 0.25)}
    ratio = {part: room for part, (kind, room) in rooms.items() if kind in kinds}
    tiers = three_tiers(path)
    return {**tiers, "tokens": 1024, "ratio": ratio, "host": {"tokens": 1024, "ratio": ratio}}


async def empty_device(cache: UnifiedRadixCache) -> None:
    """The host has it, and the device is full of NaN."""
    await cache.drain()
    capacity = {name: pool.capacity for name, pool in cache.stats().pools.items()}
    await cache.evict(EvictParams(num_pages=capacity))
    assert all(pool.free == pool.capacity for pool in cache.stats().pools.values())
    poison(cache.pools)


async def test_state_of_every_tier_gives_the_same_logits(
    name: str, tmp_path: Path, another_process: Any
) -> None:
    """Device → host → device here, at every place where a prefix can end; and device → host → file
    → host → device of a second process, whose memory is full of NaN."""
    model = await asyncio.to_thread(tiny_model, name)
    tiers = tiers_of(model, tmp_path)
    config = await asyncio.to_thread(settings, model, **tiers)
    async with UnifiedRadixCache.open(config) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        reference = await publish(cache, runner)
        for boundary in (48, 80, 96):
            await empty_device(cache)
            before = cache.stats().counters.tokens_hit_host
            tokens = KNOWN[:boundary] + random_tokens(29, seed=boundary)
            assert await goes_on(cache, runner, reference, tokens) == boundary
            assert cache.stats().counters.tokens_hit_host - before == boundary
        await cache.drain()
        cache.check_integrity()
    for boundary in (80, 96):
        tokens = KNOWN[:boundary] + random_tokens(37, seed=boundary)
        answer = another_process(question((name, torch.float32), tiers, tokens))
        assert answer["hits"] == [0, 0, boundary]
        check_chunks(answer, tokens, reference)
