"""The transformers runner and `generate`: what is kept, what is dropped, what is refused."""

from __future__ import annotations

import asyncio
import copy
import threading
from contextlib import aclosing
from typing import Any

import pytest
import torch
from transformers import BambaConfig, DeepseekV32Config, LlamaConfig, LlamaForCausalLM

from tests.integrations.helpers import (
    PAGE_SIZE,
    NeverSerialised,
    poison,
    poison_free,
    random_tokens,
    settings,
)
from tiered_cache import ConfigError, UnifiedRadixCache
from tiered_cache.integrations.transformers import TransformersRunner, check_layers, generate
from tiered_cache.pools.device import DevicePools
from tiered_cache.pools.spec import PoolSpec
from tiered_cache.testing.models import tiny_model
from tiered_cache.transfer.copier import CopyJob, Direction
from tiered_cache.transfer.cpu import CpuCopier
from tiered_cache.types import ComponentId, Hits


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers itself makes of the prompt, without any cache of ours."""
    reference = NeverSerialised(model)
    answer = [int(reference.forward(prompt, 0).argmax())]
    while len(answer) < count:
        position = len(prompt) + len(answer) - 1
        answer.append(int(reference.forward(answer[-1:], position).argmax()))
    return answer


async def collect(*args: Any, **kwargs: Any) -> list[int]:
    return [token async for token in generate(*args, **kwargs)]


# --- generate -------------------------------------------------------------------------------------


async def test_generate_streams_what_the_model_says_and_reuses_it(model: Any) -> None:
    """The same prompt again says the same, reused; a longer one reuses the answer, too."""
    prompt = random_tokens(50)
    expected = greedy_tokens(model, prompt, 20)
    async with UnifiedRadixCache.open(settings(model)) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        computed: list[tuple[int, int]] = []

        async def ask(tokens: list[int]) -> list[int]:
            computed.clear()
            return await collect(
                cache,
                runner,
                tokens,
                20,
                chunk_tokens=32,
                on_chunk=lambda chunk: computed.append((chunk.start, chunk.stop)),
            )

        assert await ask(prompt) == expected
        assert computed[0] == (0, 32)
        assert computed[-1] == (68, 69), "the last token's own state is not needed"
        assert await ask(prompt) == expected
        assert computed[0] == (48, 50)
        await ask(prompt + expected + [9] * 5)
        assert computed[0][0] == 64
        assert cache.outstanding() == []
        assert runner.num_live == 0


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
async def test_generate_goes_on_from_what_comes_back_from_the_host(
    model: Any, layerwise: bool
) -> None:
    """Two prompts on a device that holds one: what each says does not change, and little is
    computed."""
    prompts = [random_tokens(100, seed=1), random_tokens(100, seed=2)]
    config = settings(model, tokens=8 * PAGE_SIZE, host={"tokens": 1024})
    async with UnifiedRadixCache.open(config) as cache:
        runner = TransformersRunner(model, cache.pools)
        hits: list[Hits] = []
        for turn in range(3):
            for prompt in prompts:
                stream = collect(
                    cache,
                    runner,
                    prompt,
                    12,
                    on_lease=lambda lease: hits.append(lease.hits),
                    layerwise=layerwise,
                )
                assert await stream == greedy_tokens(model, prompt, 12), (turn, hits)
                await cache.drain()
                poison_free(cache)
        assert hits == [Hits()] * 2 + [Hits(host=96)] * 4
        assert cache.outstanding() == []
        cache.check_integrity()


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
async def test_generate_computes_what_does_not_come_back(
    model: Any, layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that fails costs time, whether the model has begun with it or not."""
    prompt, other = random_tokens(100, seed=1), random_tokens(100, seed=2)
    config = settings(model, tokens=8 * PAGE_SIZE, host={"tokens": 1024})
    async with UnifiedRadixCache.open(config) as cache:
        runner = TransformersRunner(model, cache.pools)
        for tokens in (prompt, other):
            await collect(cache, runner, tokens, 12)
            await cache.drain()
        poison_free(cache)
        copy = CpuCopier.copy

        def fail(copier: CpuCopier, job: CopyJob) -> None:
            if job.direction is Direction.LOAD:
                raise OSError("cannot be read")
            copy(copier, job)

        monkeypatch.setattr(CpuCopier, "copy", fail)
        said = await collect(cache, runner, prompt, 12, layerwise=layerwise)
        assert said == greedy_tokens(model, prompt, 12)
        assert cache.stats().counters.loads_failed == 1
        assert runner.num_live == 0
        await cache.drain()
        assert cache.outstanding() == []
        cache.check_integrity()


async def test_generate_ends_at_eos_and_does_not_yield_it(model: Any) -> None:
    prompt = random_tokens(20)
    said = greedy_tokens(model, prompt, 12)
    eos = said[7]
    expected = said[: said.index(eos)]
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        assert await collect(cache, runner, prompt, 12, eos=eos) == expected
        assert await collect(cache, runner, prompt, 12, eos=[eos, 10_000]) == expected
        assert cache.outstanding() == []


@pytest.mark.parametrize("stop_after", [1, 5, 12])
async def test_closing_the_stream_early_gives_everything_back(model: Any, stop_after: int) -> None:
    """Whoever stops reading holds nothing afterwards, and the next request is right."""
    prompt = random_tokens(40)
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        async with aclosing(generate(cache, runner, prompt, 12)) as tokens:
            read = 0
            async for _ in tokens:
                read += 1
                if read == stop_after:
                    break
        assert cache.outstanding() == []
        assert runner.num_live == 0
        cache.check_integrity()
        assert await collect(cache, runner, prompt, 12) == greedy_tokens(model, prompt, 12)


async def test_what_was_read_to_the_last_token_is_published(model: Any) -> None:
    """A reader that takes exactly what it asked for, and then closes, has not closed early."""
    prompt = random_tokens(2 * PAGE_SIZE)
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        async with aclosing(generate(cache, runner, prompt, PAGE_SIZE + 1)) as tokens:
            answer = [await anext(tokens) for _ in range(PAGE_SIZE + 1)]
        async with cache.lease(prompt + answer) as lease:
            assert lease.prefix_len == 3 * PAGE_SIZE


async def test_a_cancelled_stream_gives_everything_back(model: Any) -> None:
    """Cancelled while the model runs: the run is waited for, then nothing is left."""
    prompt = random_tokens(40)
    async with UnifiedRadixCache.open(settings(model)) as cache:
        entered, leave = threading.Event(), threading.Event()

        class Held(TransformersRunner):
            def __call__(self, chunk: Any) -> torch.Tensor:
                entered.set()
                assert leave.wait(10)
                return super().__call__(chunk)

        held = Held(model, cache.pools)
        task = asyncio.create_task(collect(cache, held, prompt, 12))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0.01)
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held.num_live == 0
        await cache.drain()
        assert cache.outstanding() == []
        cache.check_integrity()
        runner = TransformersRunner(model, cache.pools)
        assert await collect(cache, runner, prompt, 12) == greedy_tokens(model, prompt, 12)


async def test_moments_are_told_in_order(model: Any) -> None:
    """First the grant, when the model begins; then the first token, before it is yielded."""
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        told: list[tuple[str, float]] = []
        stream = generate(
            cache,
            runner,
            random_tokens(40),
            3,
            on_grant=lambda moment: told.append(("grant", moment)),
            on_first_token=lambda moment: told.append(("first token", moment)),
        )
        async with aclosing(stream) as tokens:
            await anext(tokens)
            assert [name for name, _ in told] == ["grant", "first token"]
            async for _ in tokens:
                pass
        assert len(told) == 2
        assert told[0][1] < told[1][1]


async def test_a_turn_keeps_prompts_together(model: Any) -> None:
    """With one lock for all, nobody's run comes between the chunks of a prompt."""
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        turn = asyncio.Lock()
        order: list[int] = []
        await asyncio.gather(
            *(
                collect(
                    cache,
                    runner,
                    random_tokens(64, seed=number),
                    2,
                    chunk_tokens=16,
                    turn=turn,
                    on_chunk=lambda chunk, number=number: (
                        order.append(number) if chunk.stop <= 64 else None
                    ),
                )
                for number in range(3)
            )
        )
        assert order == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(("prompt", "count"), [([], 4), ([5, 6], 0)])
async def test_nothing_to_do_is_an_error(model: Any, prompt: list[int], count: int) -> None:
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        with pytest.raises(ValueError):
            await collect(cache, runner, prompt, count)
        assert cache.outstanding() == []


# --- What the runner keeps between chunks ---------------------------------------------------------


async def test_after_a_jump_the_state_of_others_is_read(model: Any) -> None:
    """Another request published what comes next: what was kept is too short, and replaced."""
    prompt = random_tokens(100)
    async with UnifiedRadixCache.open(settings(model)) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        reference = NeverSerialised(model)
        async with cache.lease(prompt) as slow, cache.lease([*prompt[:70], 1, 2]) as fast:
            chunk = await slow.next_chunk(16)
            await slow.run(runner, chunk)
            slow.commit(chunk)
            reference.forward(chunk.tokens, 0)
            while (chunk := await fast.next_chunk(16)) is not None:
                await fast.run(runner, chunk)
                fast.commit(chunk)
                if chunk.stop <= 64:
                    reference.forward(chunk.tokens, chunk.start)
            chunk = await slow.next_chunk(16)
            assert chunk.start == 64
            logits = await slow.run(runner, chunk)
            assert torch.equal(logits, reference.forward(chunk.tokens, 64))


async def test_after_truncate_the_rejected_tokens_are_forgotten(model: Any) -> None:
    """Draft tokens are computed, rejected, and replaced by others: their state is not used."""
    prompt = random_tokens(20)
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        reference = NeverSerialised(model)
        async with cache.lease(prompt, reserve=16) as lease:
            chunk = await lease.next_chunk(512)
            while chunk is not None:
                await lease.run(runner, chunk)
                reference.forward(chunk.tokens, chunk.start)
                chunk = await lease.next_chunk(512)
            for token in (3, 4, 5):
                await lease.run(runner, lease.append(token))
            lease.truncate(20)
            for token in (6, 7, 8, 9):
                chunk = lease.append(token)
                logits = await lease.run(runner, chunk)
                assert torch.equal(logits, reference.forward([token], chunk.start))


async def test_drafts_are_not_mistaken_for_what_others_published(model: Any) -> None:
    """Drafts are rejected, and what replaces them was published by somebody else up to the same
    length: what was kept for the lease is as long as the new prefix, and still not its state.
    """
    prompt, drafts, published = random_tokens(20), [3] * 12, [4] * 12
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        async with cache.lease(prompt, reserve=16) as lease:
            while (chunk := await lease.next_chunk(512)) is not None:
                await lease.run(runner, chunk)
            for token in drafts:
                await lease.run(runner, lease.append(token))
            lease.truncate(20)
            await collect(
                cache, TransformersRunner(model, cache.pools), [*prompt, *published, 5], 1
            )
            for token in [*published, 6]:
                lease.append(token)
            chunk = await lease.next_chunk(512)
            assert (chunk.start, chunk.stop) == (32, 33)
            reference = NeverSerialised(model)
            reference.forward([*prompt, *published], 0)
            logits = await lease.run(runner, chunk)
            assert torch.allclose(logits, reference.forward([6], 32), atol=1e-4)


async def test_a_run_that_raised_leaves_nothing_half_grown(model: Any) -> None:
    """The model fails in the middle of a layer stack; the next run gives the right logits."""
    prompt = random_tokens(60)
    async with UnifiedRadixCache.open(settings(model)) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        reference = NeverSerialised(model)
        async with cache.lease(prompt) as lease:
            chunk = await lease.next_chunk(32)
            await lease.run(runner, chunk)
            reference.forward(chunk.tokens, 0)
            chunk = await lease.next_chunk(512)

            def fail(*_: Any) -> None:
                raise RuntimeError("no memory")

            hook = model.model.layers[2].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="no memory"):
                await lease.run(runner, chunk)
            hook.remove()
            assert runner.num_live == 0
            while chunk is not None:
                logits = await lease.run(runner, chunk)
                assert torch.equal(logits, reference.forward(chunk.tokens, chunk.start))
                chunk = await lease.next_chunk(512)


@pytest.mark.parametrize("live_limit", [0, 1, 8])
async def test_kept_caches_change_nothing_but_time(model: Any, live_limit: int) -> None:
    """Two requests decode in turn; with every limit they say the same, and each its own."""
    prompts = [random_tokens(30, seed=1), random_tokens(45, seed=2)]
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools, live_limit=live_limit)
        answers = await asyncio.gather(*(collect(cache, runner, p, 10) for p in prompts))
        assert answers == [greedy_tokens(model, p, 10) for p in prompts]
        assert runner.num_live == 0


async def test_kept_caches_are_bounded(model: Any) -> None:
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools, live_limit=2)
        for seed in range(4):
            async with cache.lease(random_tokens(20, seed=seed)) as lease:
                chunk = await lease.next_chunk(512)
                await lease.run(runner, chunk)
        assert runner.num_live == 2
        runner.forget(chunk.lease_id)
        runner.forget(chunk.lease_id)
        assert runner.num_live == 1


async def test_a_batch_step_gives_what_single_runs_give(model: Any) -> None:
    prompts = [random_tokens(30, seed=1), random_tokens(45, seed=2)]
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        leases = [await cache.acquire(prompt) for prompt in prompts]
        try:
            chunks = [await lease.next_chunk(16) for lease in leases]
            logits = await cache.run(leases, runner.step, chunks)
            for got, prompt in zip(logits, prompts, strict=True):
                assert torch.equal(got, NeverSerialised(model).forward(prompt[:16], 0))
            assert [lease.computed for lease in leases] == [16, 16]
        finally:
            for lease in leases:
                await lease.aclose()


# --- What is refused ------------------------------------------------------------------------------


def test_layers_with_other_state_are_refused_by_name() -> None:
    config = DeepseekV32Config(num_hidden_layers=2)
    with pytest.raises(ConfigError, match="DynamicIndexedLayer at layers 0, 1"):
        check_layers(config)


def test_layers_with_several_states_of_a_kind_are_refused_by_name() -> None:
    config = BambaConfig(num_hidden_layers=3, attn_layer_indices=[1])
    check_layers(config)
    config.number_of_conv_states = 3
    with pytest.raises(ConfigError, match="LinearAttentionLayer at layers 0, 2"):
        check_layers(config)


@pytest.fixture(scope="module")
def other_models() -> dict[str, Any]:
    """By words of the error. Made outside the event loop: transformers reads files."""
    return {
        "bfloat16": tiny_model("llama", torch.bfloat16),
        r"rows \(2, 32\)": tiny_model("qwen3"),
        "for its layer 3": tiny_model("llama", num_layers=4),
        "for 3 layers, the model has 2": tiny_model("llama", num_layers=2),
        "a pool conv for its layer 0": tiny_model("qwen3_5"),
        "a pool latent": tiny_model("deepseek_v3"),
    }


async def test_pools_of_another_model_are_refused(model: Any, other_models: dict[str, Any]) -> None:
    """Another type, size, number of layers or kind of attention: the error says what differs."""
    async with UnifiedRadixCache.open(settings(model)) as cache:
        for words, other in other_models.items():
            with pytest.raises(ConfigError, match=words):
                TransformersRunner(other, cache.pools)


async def test_a_model_that_caches_expanded_heads_is_not_taken_for_latent() -> None:
    """What a config promises and what the model caches can differ: seen at the first write."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
    )
    model = LlamaForCausalLM(config).eval()
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        async with cache.lease([1, 2, 3]) as lease:
            chunk = await lease.next_chunk(16)
            with pytest.raises(ConfigError, match="not the latent"):
                await lease.run(runner, chunk)


def test_keys_and_values_that_do_not_share_their_pages_are_refused(model: Any) -> None:
    """A strategy of one's own can do that; here slots would be those of one of them."""
    specs = [
        PoolSpec(name, ComponentId(component), (0, 1, 2), (2, 16), "float32", PAGE_SIZE)
        for name, component in (("k", "full"), ("other.v", "other"))
    ]
    pools = DevicePools(specs, {spec.component: 4 for spec in specs})
    with pytest.raises(ConfigError, match="layer 0 is in pools of several components"):
        TransformersRunner(model, pools)


@pytest.fixture(scope="module")
def lfm2() -> Any:
    """Its config looks like one of Mamba, too."""
    model = tiny_model("lfm2")
    model.config.update({"mamba_expand": 1, "mamba_d_state": 8, "mamba_d_conv": 3})
    return model


async def test_a_model_that_keeps_other_states_than_its_pools_is_refused(lfm2: Any) -> None:
    """What a config promises and what the model keeps: seen at the first write, again."""
    config = settings(lfm2, ratio={"mamba": 0.5})
    async with UnifiedRadixCache.open(config) as cache:
        runner = TransformersRunner(lfm2, cache.pools)
        async with cache.lease([1, 2, 3]) as lease:
            chunk = await lease.next_chunk(16)
            with pytest.raises(ConfigError, match="keep no recurrent state"):
                await lease.run(runner, chunk)


def test_states_of_a_family_that_is_not_known_are_refused(lfm2: Any) -> None:
    other = copy.copy(lfm2)
    other.config = BambaConfig(num_hidden_layers=3, attn_layer_indices=[1], mamba_d_conv=None)
    pools = DevicePools([], {})
    with pytest.raises(ConfigError, match="states of the linear layers of BambaConfig are unknown"):
        TransformersRunner(other, pools)
