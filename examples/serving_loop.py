"""The serving loop written out: three requests with a common beginning over one cache.

The model is a tiny Llama with random weights, so that this runs in seconds; what it says makes no
sense. Replace it by a model of yours, and `print` by your stream.

    python examples/serving_loop.py
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tiered_cache import UnifiedRadixCache, load_config
from tiered_cache.integrations.transformers import TransformersRunner, greedy, model_from_hf
from tiered_cache.testing.models import tiny_model

EOS = 1
MAX_NEW_TOKENS = 8


async def answer(
    cache: UnifiedRadixCache, runner: TransformersRunner, prompt: list[int]
) -> AsyncGenerator[int, None]:
    """Streams one answer. Leaving early, an error or a cancellation gives everything back."""
    async with cache.lease(prompt, reserve=MAX_NEW_TOKENS) as lease:
        while chunk := await lease.next_chunk(32):  # what is left to compute, pages taken
            logits = await lease.run(runner, chunk)  # in the model's thread
            lease.commit(chunk)  # published: others may share it from now on
        print(f"{len(prompt)} tokens, {lease.prefix_len} reused: {lease.why}")
        token = greedy(logits)
        for _ in range(MAX_NEW_TOKENS):
            if token == EOS:
                break
            yield token
            chunk = lease.append(token)
            token = greedy(await lease.run(runner, chunk))
        lease.finish()  # publishes what was generated
        runner.forget(lease.id)


async def main() -> None:
    model = tiny_model("llama")
    config = load_config(
        {"page_size": 16, "device": {"type": "cpu", "tokens": 1024}},
        {"model": model_from_hf(model.config, dtype=model.dtype)},
    )
    system = list(range(2, 98))
    async with UnifiedRadixCache.open(config) as cache:
        runner = TransformersRunner(model, cache.pools)
        for question in ([100, 101, 102], [110, 111], [100, 101, 102, 103]):
            async with aclosing(answer(cache, runner, system + question)) as tokens:
                print("  →", *[token async for token in tokens])
        print(f"hit rate {cache.stats().hit_rate:.0%}")


if __name__ == "__main__":
    asyncio.run(main())
