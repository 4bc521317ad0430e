"""A second process that answers prompts out of what a first one has left in storage.

For each line of JSON on its input it opens a fresh cache, fills device and host with NaN, computes
what storage does not have of the prompt, and says from where the rest came and what the model said.
Logits travel as hexadecimal digits of their bytes: equal means equal.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from typing import Any

import torch

from tests.integrations.helpers import poison, settings
from tiered_cache import UnifiedRadixCache
from tiered_cache.config import Config
from tiered_cache.integrations.transformers import TransformersRunner
from tiered_cache.testing.chat_models import load_smollm2
from tiered_cache.testing.models import tiny_model


@functools.cache
def model_of(name: Any, dtype: torch.dtype) -> Any:
    return load_smollm2(dtype).model if name == "smollm2" else tiny_model(name, dtype)


async def answer(model: Any, config: Config, question: dict[str, Any]) -> dict[str, Any]:
    chunks = []
    async with UnifiedRadixCache.open(config) as cache:
        poison(cache.pools)
        for arena in cache.arenas:
            arena.rows[:] = 0xFF  # a NaN in every type of state
        runner = TransformersRunner(model, cache.pools)
        async with cache.lease(question["prompt"], layerwise=question["layerwise"]) as lease:
            hits = lease.hits
            while (chunk := await lease.next_chunk(question["max_tokens"])) is not None:
                logits = await lease.run(runner, chunk)
                lease.commit(chunk)
                chunks.append((chunk.start, chunk.stop, logits.numpy().tobytes().hex()))
            runner.forget(lease.id)
        await cache.drain()
        cache.check_integrity()
        storage = cache.stats().storage
        assert storage is not None
        counters = {name: getattr(storage.counters, name) for name in COUNTERS}
    return {"hits": (hits.device, hits.host, hits.storage), "chunks": chunks, **counters}


COUNTERS = ("objects_read", "bytes_read", "objects_corrupt", "objects_written")


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        question = json.loads(line)
        model = model_of(question["model"], getattr(torch, question["dtype"]))
        config = settings(model, **question["tiers"])
        sys.stdout.write(json.dumps(asyncio.run(answer(model, config, question))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
