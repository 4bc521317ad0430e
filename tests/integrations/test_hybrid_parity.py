"""Models with sliding windows and recurrent states: what went through the pools gives the same
logits, bit for bit, as a transformers cache that computed the same chunks and never did.

Device tier only. The architectures are real, their weights random (`tiny_model`); windows (24
tokens, `llama4` 32) end inside pages of 16. Pools are full of NaN before. The controls prove that
one wrong byte of any pool shows, and so does the state of another depth.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from tests.integrations.helpers import (
    PAGE_SIZE,
    NeverSerialised,
    Remembering,
    poison,
    random_tokens,
    settings,
)
from tiered_cache import IntegrityError, UnifiedRadixCache
from tiered_cache.integrations.transformers import TransformersRunner, generate
from tiered_cache.strategies.plain import MARK
from tiered_cache.testing.models import tiny_model
from tiered_cache.types import EvictParams

WINDOWS = ["mistral", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss", "cohere2", "llama4"]
STATES = [
    *("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"),
    *("bamba", "granite_hybrid", "nemotron_h", "falcon_h1", "zamba2"),
    *("lfm2", "jamba", "mamba", "mamba2"),
]

PROMPT = random_tokens(83)
ANSWER = random_tokens(14, seed=1)
KNOWN = PROMPT + ANSWER


@pytest.fixture(scope="module", params=WINDOWS + STATES)
def model(request: pytest.FixtureRequest) -> Any:
    """By name, or by name and type. Made outside the event loop: transformers reads files."""
    name, *dtype = (request.param,) if isinstance(request.param, str) else request.param
    return tiny_model(name, *dtype)


def open_cache(model: Any, tokens: int = 1024) -> Any:
    """With room for all pages of windows, and a state for each fourth page."""
    has = settings(model).model.state_kinds
    rooms = {"swa": ("window", 1.0), "mamba": ("recurrent", 0.25)}
    ratio = {name: room for name, (kind, room) in rooms.items() if kind in has}
    return UnifiedRadixCache.open(settings(model, tokens, ratio))


async def publish(cache: Any, runner: TransformersRunner) -> Remembering:
    """A first request computes and publishes `KNOWN`: in chunks, one of which is longer than any
    window, and then token by token. Compared with a transformers cache that is left alone."""
    reference, alone = Remembering(runner.model), NeverSerialised(runner.model)
    async with cache.lease(PROMPT, reserve=len(ANSWER)) as lease:
        assert lease.prefix_len == 0
        while (chunk := await lease.next_chunk(50)) is not None:
            logits = await lease.run(runner, chunk)
            lease.commit(chunk)
            assert torch.equal(logits, alone.forward(chunk.tokens, chunk.start))
            assert torch.equal(logits, reference.forward(chunk.tokens, chunk.start))
        for token in ANSWER:
            chunk = lease.append(token)
            logits = await lease.run(runner, chunk)
            assert torch.equal(logits, alone.forward([token], chunk.start))
            assert torch.equal(logits, reference.forward([token], chunk.start))
        lease.finish()
    return reference


def boundaries(cache: Any) -> list[int]:
    """Where a prefix can end: at any page, but for those whose window the request had left behind
    by the time it published; where there are states, at the ends of its chunks."""
    components = {str(part.id) for part in cache.tree.components}
    if "mamba" in components:
        return [48, 80, 96]
    return [48, 64, 80, 96] if "swa" in components else [16, 32, 48, 64, 80, 96]


async def goes_on(
    cache: Any, runner: TransformersRunner, reference: Remembering, tokens: list[int]
) -> int:
    """A request computes what is missing of its tokens, and one more; nothing is published. Every
    chunk is compared with a transformers cache that goes on from where the prefix ends. Returns
    how much was reused."""
    async with cache.lease(tokens, reserve=1) as lease:
        start = lease.prefix_len
        branch = reference.branch(start) if start else NeverSerialised(runner.model)
        while (chunk := await lease.next_chunk(24)) is not None:
            logits = await lease.run(runner, chunk)
            assert torch.equal(logits, branch.forward(chunk.tokens, chunk.start))
        chunk = lease.append(7)
        logits = await lease.run(runner, chunk)
        assert torch.equal(logits, branch.forward([7], chunk.start))
    return int(start)


async def test_attached_state_gives_the_logits_of_the_never_serialised_cache(model: Any) -> None:
    """Others branch off wherever a prefix can end, twice: what is attached is not changed."""
    async with open_cache(model) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        reference = await publish(cache, runner)
        for boundary in boundaries(cache):
            for seed in (1, 2):
                tokens = KNOWN[:boundary] + random_tokens(37, seed=boundary * seed)
                assert await goes_on(cache, runner, reference, tokens) == boundary
        cache.check_integrity()
        assert cache.outstanding() == []


async def test_what_is_left_after_an_eviction_gives_the_same_logits(model: Any) -> None:
    """Of each component alone, one id after the other, the deepest first: the prefix becomes
    shorter, and its end is right every time."""
    tokens = KNOWN[:96] + random_tokens(5, seed=9)
    async with open_cache(model) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        for component in [part.id for part in cache.tree.components]:
            cache.reset()
            reference = await publish(cache, runner)
            reused = [96]
            while reused[-1]:
                for boundary in boundaries(cache)[::-1]:  # the shallowest is used last
                    async with cache.lease([*KNOWN[:boundary], 3]):
                        pass
                free = cache.available_size(component)
                await cache.evict(EvictParams(num_pages={component: free + 1}))
                assert cache.available_size(component) > free
                reused.append(await goes_on(cache, runner, reference, tokens))
            assert reused == sorted(reused, reverse=True)
            assert len(set(reused)) > 2
            cache.check_integrity()


async def test_one_flipped_byte_of_any_pool_shows(model: Any) -> None:
    """The control: with one wrong byte the comparison fails, wherever the byte is."""
    tokens = [*KNOWN[:80], 11]
    async with open_cache(model) as cache:
        runner = TransformersRunner(model, cache.pools)
        reference = await publish(cache, runner)
        for spec in cache.pools.specs:
            for layer in spec.layers if spec.name != MARK.name else ():  # which nothing reads
                byte = await sign_of_the_largest(cache, spec, layer, tokens)
                byte ^= 0x80
                with pytest.raises(AssertionError):
                    await goes_on(cache, runner, reference, tokens)
                byte ^= 0x80
        assert await goes_on(cache, runner, reference, tokens) == 80


async def sign_of_the_largest(cache: Any, spec: Any, layer: int, tokens: list[int]) -> torch.Tensor:
    """A byte of a number that matters for what follows these tokens: of a convolution, the oldest
    input does not."""
    async with cache.lease(tokens) as lease:
        page = int(lease.pages[spec.component][lease.prefix_len // PAGE_SIZE - 1])
    last = cache.pools.pages(spec.name, layer)[page][..., -1:]
    at = torch.unravel_index(last.abs().argmax(), last.shape[:-1])
    return last[at].view(torch.uint8)[-1:]


@pytest.mark.parametrize("model", WINDOWS, indirect=True)
async def test_a_window_that_is_not_all_there_shows(model: Any) -> None:
    """The control: a page of the window that holds something else, or is not named at all."""
    tokens = [*KNOWN[:80], 11, 12, 13]
    async with open_cache(model) as cache:
        runner = TransformersRunner(model, cache.pools)
        reference = await publish(cache, runner)
        async with cache.lease(tokens) as lease:
            pages = lease.pages["swa"].copy()
        kept = cache.pools.pages("swa.v", 0)[pages[4]].clone()
        cache.pools.pages("swa.v", 0)[pages[4]] = 0
        with pytest.raises(AssertionError):
            await goes_on(cache, runner, reference, tokens)
        cache.pools.pages("swa.v", 0)[pages[4]] = kept
        assert await goes_on(cache, runner, reference, tokens) == 80
        async with cache.lease(tokens) as lease:
            chunk = await lease.next_chunk(16)
            lease.table.ids[1][4] = -1
            with pytest.raises(IntegrityError, match=r"swa \[\d+, 80\)"):
                await lease.run(runner, chunk)


@pytest.mark.parametrize("model", STATES, indirect=True)
async def test_the_state_of_another_depth_shows(model: Any) -> None:
    """The control: the state 32 tokens before the prefix's end is not the one at its end."""
    async with open_cache(model) as cache:
        runner = TransformersRunner(model, cache.pools)
        reference = await publish(cache, runner)
        states = []
        for depth in (48, 80):
            async with cache.lease([*KNOWN[:depth], 11]) as lease:
                assert lease.prefix_len == depth
                states.append(int(lease.pages["mamba"][depth // PAGE_SIZE - 1]))
        cache.pools.copy_page("mamba", *states)
        tokens = [*KNOWN[:80], 11, 12, 13]
        with pytest.raises(AssertionError):
            await goes_on(cache, runner, reference, tokens)


@pytest.mark.parametrize("model", ["mistral", "gemma2"], indirect=True)
async def test_of_a_window_no_more_is_kept_between_chunks(model: Any) -> None:
    """Neither in what is attached nor in what a long chunk leaves behind."""
    async with open_cache(model) as cache:
        runner = TransformersRunner(model, cache.pools)
        for _ in range(2):
            async with cache.lease(PROMPT) as lease:
                while (chunk := await lease.next_chunk(50)) is not None:
                    await lease.run(runner, chunk)
                    lease.commit(chunk)
                    (live,) = runner._live.values()
                    assert live.cache.layers[0].keys.shape[-2] == 23
                runner.forget(lease.id)


@pytest.mark.parametrize(
    "model",
    [(name, torch.bfloat16) for name in ("gpt_oss", "qwen3_next", "zamba2")],
    indirect=True,
    ids=lambda param: param[0],
)
async def test_bfloat16(model: Any) -> None:
    """What a recurrence sums up stays float32."""
    async with open_cache(model) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        reference = await publish(cache, runner)
        for boundary in boundaries(cache):
            tokens = KNOWN[:boundary] + random_tokens(37, seed=boundary)
            assert await goes_on(cache, runner, reference, tokens) == boundary


@pytest.mark.parametrize("model", ["gemma3", "bamba", "jamba"], indirect=True)
async def test_generate_says_the_same_with_and_without_reuse(model: Any) -> None:
    async with open_cache(model) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        said, hits = [], []
        for _ in range(3):
            stream = generate(
                cache,
                runner,
                PROMPT,
                20,
                chunk_tokens=32,
                on_lease=lambda lease: hits.append(lease.prefix_len),
            )
            said.append([token async for token in stream])
        assert said[0] == said[1] == said[2]
        assert hits == [0, 80, 80]


@pytest.mark.parametrize("model", ["gemma3", "qwen3_next", "falcon_h1"], indirect=True)
async def test_after_a_run_that_raised_the_logits_are_right(model: Any) -> None:
    """The model fails half way, in the prompt and in the answer: what it has written over of its
    state is not used. The next chunk begins where there is all that it needs."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    async with open_cache(model) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        ends = {0: NeverSerialised(model)}

        async def run(chunk: Any) -> None:
            branch = ends[chunk.start].branch(chunk.start)
            logits = await lease.run(runner, chunk)
            assert torch.equal(logits, branch.forward(chunk.tokens, chunk.start))
            ends[chunk.stop] = branch

        async def run_and_fail(chunk: Any) -> None:
            hook = model.model.layers[2].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="no memory"):
                await lease.run(runner, chunk)
            hook.remove()

        async def compute_the_rest() -> None:
            while (chunk := await lease.next_chunk(50)) is not None:
                await run_and_fail(chunk)
                chunk = await lease.next_chunk(50)
                await run(chunk)
                lease.commit(chunk)

        async with cache.lease(PROMPT, reserve=8) as lease:
            await compute_the_rest()
            for token in ANSWER[:3]:
                await run(lease.append(token))
            await run_and_fail(lease.append(ANSWER[3]))
            await compute_the_rest()
            await run(lease.append(ANSWER[4]))
        cache.check_integrity()


@pytest.mark.parametrize("model", ["gemma3", "qwen3_5", "falcon_h1"], indirect=True)
async def test_many_requests_on_a_small_device(model: Any) -> None:
    """Cut anywhere, evicted, going on from each other: near enough to what the model says when it
    computes the whole prompt at once. Wrong state is far away."""
    chance = random.Random(0)
    trunks = [random_tokens(97, seed=seed) for seed in range(3)]
    prompts = [
        [*chance.choice(trunks)[: chance.randrange(20, 90)], chance.randrange(2, 6)]
        for _ in range(24)
    ]
    async with open_cache(model, tokens=18 * PAGE_SIZE) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools, live_limit=2)

        async def request(prompt: list[int]) -> int:
            async with cache.lease(prompt) as lease:
                while (chunk := await lease.next_chunk(chance.randrange(1, 40))) is not None:
                    logits = await lease.run(runner, chunk)
                    if chance.random() < 0.7:
                        lease.commit(chunk)
                expected = NeverSerialised(model).forward(prompt, 0)
                assert torch.allclose(logits, expected, atol=1e-3)
                return lease.hits.total

        reused = 0
        for first in range(0, len(prompts), 4):
            reused += sum(await asyncio.gather(*map(request, prompts[first : first + 4])))
        assert reused > 8 * PAGE_SIZE
        assert cache.stats().counters.pages_evicted > 0
        cache.check_integrity()
