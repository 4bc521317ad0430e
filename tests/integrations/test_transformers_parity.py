"""State that went through the pools gives the same logits, bit for bit, as state that never did.

Same run, same chunks: the reference computes exactly what the leases compute, with a transformers
cache of its own. Pools are full of NaN before, so a row read before it was written shows. The
controls prove that the comparison sees one wrong byte, on either tier.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from tests.integrations.helpers import PAGE_SIZE, NeverSerialised, poison, random_tokens, settings
from tiered_cache import UnifiedRadixCache
from tiered_cache.integrations.transformers import TransformersRunner
from tiered_cache.keys import RadixKey
from tiered_cache.testing.models import load_smollm2, tiny_model
from tiered_cache.types import Hits, MatchPrefixParams

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


# --- Two tiers ------------------------------------------------------------------------------------


TWO_TIERS = {"host": {"tokens": 4096}}


async def only_on_the_host(cache: UnifiedRadixCache, prompt: list[int], filler: int) -> None:
    """Let somebody else take the whole device; then everything that is not the host copy of
    `prompt` is NaN, on both tiers."""
    await cache.drain()
    num_tokens = cache.stats().pools["full"].capacity * cache.page_size
    async with cache.lease([1] * num_tokens, cache_salt=f"filler {filler}") as lease:
        lease.commit(lease.allocate(num_tokens))
    await cache.drain()
    match = cache.tree.match_prefix(MatchPrefixParams(RadixKey(prompt)))
    assert match.device_length == 0
    assert match.host_hit_length == len(prompt) // PAGE_SIZE * PAGE_SIZE
    poison(cache.pools)
    (arena,) = cache.arenas
    node, kept = match.best_node, []
    while node is not cache.tree.root:
        kept.append(node.data[0].host_value)
        node = node.parent
    others = np.setdiff1d(np.arange(arena.num_pages), np.concatenate(kept))
    arena.rows[others] = 0xFF  # a NaN in every type of state


async def computed(cache: Any, runner: Any, prompt: list[int]) -> NeverSerialised:
    """A request whose state goes to the host; returns the reference at its end."""
    reference = NeverSerialised(runner.model)
    async with cache.lease(prompt) as lease:
        await compute(lease, runner, reference, 40)
    return reference


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
async def test_state_that_was_on_the_host_gives_the_same_logits(
    model: Any, layerwise: bool
) -> None:
    """Device → host → device: evicted, everything else made NaN, loaded, and computed on from."""
    prompt = random_tokens(6 * PAGE_SIZE)
    async with UnifiedRadixCache.open(settings(model, 12 * PAGE_SIZE, **TWO_TIERS)) as cache:
        runner = TransformersRunner(model, cache.pools)
        reference = await computed(cache, runner, prompt)
        for boundary in (PAGE_SIZE, 4 * PAGE_SIZE, 6 * PAGE_SIZE):
            await only_on_the_host(cache, prompt, filler=boundary)
            longer = prompt[:boundary] + random_tokens(37, seed=boundary)
            async with cache.lease(longer, reserve=2, layerwise=layerwise) as lease:
                assert lease.hits == Hits(host=boundary)
                branch = reference.branch(boundary)
                await compute(lease, runner, branch, 24)
                chunk = lease.append(7)
                logits = await lease.run(runner, chunk)
                assert torch.equal(logits, branch.forward([7], chunk.start))
            cache.check_integrity()
        await cache.drain()
        counters = cache.stats().counters
        assert counters.tokens_hit_host == 11 * PAGE_SIZE
        assert counters.loads_failed == 0
        assert cache.outstanding() == []


async def test_one_byte_flipped_on_the_host_shows(model: Any) -> None:
    """The control: with one wrong byte in a row the comparison above fails."""
    prompt = random_tokens(4 * PAGE_SIZE)
    async with UnifiedRadixCache.open(settings(model, 12 * PAGE_SIZE, **TWO_TIERS)) as cache:
        runner = TransformersRunner(model, cache.pools)
        reference = await computed(cache, runner, prompt)
        expected = reference.forward([11, 12, 13], len(prompt))
        (arena,) = cache.arenas

        async def logits_after_loading(filler: int) -> torch.Tensor:
            await only_on_the_host(cache, prompt, filler)
            match = cache.tree.match_prefix(MatchPrefixParams(RadixKey(prompt)))
            row = int(match.best_node.data[0].host_value[0])
            piece = arena.layout.slices[0]
            # As above: the top bit of a mantissa, of the page's first token.
            arena.rows[row, piece.offset + model.dtype.itemsize - 2] ^= 0x40
            async with cache.lease([*prompt, 11, 12, 13]) as lease:
                assert lease.hits == Hits(host=len(prompt))
                return await lease.run(runner, await lease.next_chunk(512))

        assert not torch.equal(await logits_after_loading(1), expected)
        assert torch.equal(await logits_after_loading(2), expected), "flipped back, it is right"
