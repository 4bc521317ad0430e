"""A prefix that outlives the process: kept in files by one, found there by the next.

The example starts itself a second time: another process, another cache, nothing but the folder in
common. Then it computes 4 tokens of a prompt of 100.

    python examples/serving_loop_file.py
"""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tiered_cache import Config, UnifiedRadixCache, load_config
from tiered_cache.integrations.transformers import TransformersRunner, greedy, model_from_hf
from tiered_cache.testing.models import tiny_model

MODEL = tiny_model("llama")  # random weights, so that this runs in seconds
EOS = 1
MAX_NEW_TOKENS = 8


def settings(folder: str) -> Config:
    """Three tiers. `id` and `revision` name the weights: others would not find this state."""
    model = model_from_hf(MODEL.config, id="example/tiny", revision="1", dtype=MODEL.dtype)
    storage = {"backend": "file", "options": {"path": folder}, "prefetch": {"threshold": 64}}
    tiers = {"device": {"tokens": 1024}, "host": {"tokens": 4096}, "storage": storage}
    return load_config(tiers, {"model": model})


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


async def serve(config: Config) -> None:
    async with UnifiedRadixCache.open(config) as cache:
        runner = TransformersRunner(MODEL, cache.pools)
        async with aclosing(answer(cache, runner, list(range(2, 102)))) as tokens:
            print("  →", *[token async for token in tokens])
        await cache.drain()  # a server would go on; all that was published is in storage now


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(serve(settings(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(serve(settings(folder)))
            print("another process:", flush=True)
            subprocess.run([sys.executable, __file__, folder], check=True)
