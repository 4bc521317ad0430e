"""State that went through the pools gives the same logits, bit for bit, as state that never did.

Same run, same chunks: the reference computes exactly what the leases compute, with a transformers
cache of its own. Pools are full of NaN before, so a row read before it was written shows. The
control proves that the comparison sees one wrong byte.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.integrations.helpers import PAGE_SIZE, NeverSerialised, poison, random_tokens, settings
from tiered_cache import UnifiedRadixCache
from tiered_cache.integrations.transformers import TransformersRunner
from tiered_cache.testing.models import load_smollm2, tiny_model

DTYPES = [torch.float32, torch.bfloat16]
MODELS = ["llama", "qwen3", "deepseek_v3", "smollm2"]

pytestmark = pytest.mark.timeout(180)  # the first test of a fresh machine converts SmolLM2

CASES = [(name, dtype) for name in MODELS for dtype in DTYPES]


@pytest.fixture(
    params=CASES, ids=[f"{name}-{str(dtype).removeprefix('torch.')}" for name, dtype in CASES]
)
def model(request: pytest.FixtureRequest) -> Any:
    """Made outside the event loop: loading reads files."""
    return model_of(*request.param)


@functools.cache
def model_of(name: Any, dtype: torch.dtype) -> Any:
    return load_smollm2(dtype).model if name == "smollm2" else tiny_model(name, dtype)


async def compute(lease: Any, runner: Any, reference: NeverSerialised, max_tokens: int) -> None:
    """The rest of the prompt on both sides, compared after every chunk."""
    while (chunk := await lease.next_chunk(max_tokens)) is not None:
        logits = await lease.run(runner, chunk)
        lease.commit(chunk)
        assert torch.equal(logits, reference.forward(chunk.tokens, chunk.start))


async def test_attached_state_gives_the_logits_of_the_never_serialised_cache(model: Any) -> None:
    """A first lease computes and publishes; others branch off at any page and go on."""
    prompt, answer = random_tokens(83), random_tokens(14, seed=1)
    async with UnifiedRadixCache.open(settings(model)) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        reference = NeverSerialised(model)
        async with cache.lease(prompt, reserve=len(answer)) as lease:
            assert lease.prefix_len == 0
            await compute(lease, runner, reference, 40)
            for token in answer:
                chunk = lease.append(token)
                logits = await lease.run(runner, chunk)
                assert torch.equal(logits, reference.forward([token], chunk.start))
            lease.finish()

        known = prompt + answer
        for boundary in (
            PAGE_SIZE,
            3 * PAGE_SIZE,
            5 * PAGE_SIZE,
            len(known) // PAGE_SIZE * PAGE_SIZE,
        ):
            longer = known[:boundary] + random_tokens(37, seed=boundary)
            async with cache.lease(longer, reserve=2) as lease:
                assert lease.prefix_len == boundary
                branch = reference.branch(boundary)
                await compute(lease, runner, branch, 24)
                chunk = lease.append(7)
                logits = await lease.run(runner, chunk)
                assert torch.equal(logits, branch.forward([7], chunk.start))
        cache.check_integrity()
        assert cache.outstanding() == []


async def test_one_flipped_byte_shows(model: Any) -> None:
    """The control: with one wrong byte in the pools the comparison above fails."""
    prompt = random_tokens(4 * PAGE_SIZE)
    longer = [*prompt, 11, 12, 13]
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        reference = NeverSerialised(model)
        async with cache.lease(prompt) as lease:
            await compute(lease, runner, reference, 512)

        async def logits_of_longer() -> torch.Tensor:
            async with cache.lease(longer) as lease:
                assert lease.prefix_len == len(prompt)
                chunk = await lease.next_chunk(512)
                flip_one_byte(cache.pools, int(chunk.slots("full", 5, 6)[0]))
                return await lease.run(runner, chunk)

        expected = reference.forward([11, 12, 13], len(prompt))
        assert not torch.equal(await logits_of_longer(), expected)
        assert torch.equal(await logits_of_longer(), expected), "flipped back, it is right again"


def flip_one_byte(pools: Any, slot: int) -> None:
    """Flips the top bit of the mantissa of one number of the first layer: a small, finite error."""
    pool = pools.layer(pools.specs[0].name, 0)
    element = pool[slot].reshape(-1).view(torch.uint8)
    element[pool.element_size() - 2] ^= 0x40
