"""A host hit: what the device had no room for comes back from host memory instead of the model.

The second prompt takes the first one's place on the device; then the first one is asked again.

    python examples/host_tier.py
"""

import asyncio

from tiered_cache import UnifiedRadixCache, load_config
from tiered_cache.integrations.transformers import TransformersRunner, model_from_hf
from tiered_cache.testing.models import tiny_model


async def prefill(cache: UnifiedRadixCache, runner: TransformersRunner, prompt: range) -> None:
    """Computes of a prompt what neither tier has."""
    async with cache.lease(prompt, load_timeout=10) as lease:  # granted when the load is there
        hits = lease.hits
        while chunk := await lease.next_chunk(64):
            await lease.run(runner, chunk)
            lease.commit(chunk)  # published, and copied to the host in the background
        computed = len(lease) - hits.total
        print(f"tokens from the device {hits.device}, the host {hits.host}, the model {computed}")
        runner.forget(lease.id)


async def main() -> None:
    model = tiny_model("llama")  # random weights, so that this runs in seconds
    tiers = {"page_size": 16, "device": {"tokens": 128}, "host": {"tokens": 1024}}
    config = load_config(tiers, {"model": model_from_hf(model.config, dtype=model.dtype)})
    async with UnifiedRadixCache.open(config) as cache:
        runner = TransformersRunner(model, cache.pools)
        for prompt in (range(100), range(100, 200), range(100)):  # two are more than fit
            await prefill(cache, runner, prompt)
        counters = cache.stats().counters
        print(f"{counters.pages_stored} pages stored, {counters.pages_loaded} loaded")


if __name__ == "__main__":
    asyncio.run(main())
