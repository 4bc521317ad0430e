"""A lease's own path against the tree's line on the same requests, in the same run.

The lease is granted, hands out its chunks, commits them without a computation, finishes and ends:
all that the cache adds to a model's time. The tree's line does the same work by hand: match, lock,
allocate, insert, unlock.
"""

from __future__ import annotations

import asyncio
import gc
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Final

from benchmarks.measure import Laps, Row, timed_row
from benchmarks.rig import Rig
from benchmarks.workloads import Chat, Eviction
from tiered_cache import UnifiedRadixCache, load_config

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable

    from benchmarks.measure import Run
    from tiered_cache.config import Config

PAGE_SIZES: Final = (1, 16, 64)


def run(
    repeat: int = 5, *, quick: bool = False, page_sizes: tuple[int, ...] = PAGE_SIZES
) -> list[Row]:
    """Tree and lease in turn on the prompts of (a) and (d); the ratio is taken within a round."""
    chat = Chat(conversations=5, turns=3, new=128) if quick else Chat()
    eviction = Eviction(requests=50) if quick else Eviction()
    works: dict[str, tuple[Callable[[], Iterable[array[int]]], int]] = {
        "a: {}": (lambda: (prompt for _, prompt in chat), chat.num_tokens),
        "d: {}, evicting": (lambda: eviction, 20_000 if quick else Eviction.POOL_TOKENS),
    }
    kinds = {"tree": tree_requests, "lease": lease_requests, "tree, two tiers": tiers_requests}
    runs: dict[tuple[str, int], list[Run]] = {}
    for _ in range(repeat):
        for page_size in page_sizes:
            for name, (prompts, pool_tokens) in works.items():
                for who, requests in kinds.items():
                    gc.collect()
                    laps = requests(prompts(), page_size, pool_tokens)
                    runs.setdefault((name.format(who), page_size), []).append(laps.summary())
    rows = []
    for name in works:
        for page_size in page_sizes:
            tree, lease = name.format("tree"), name.format("lease")
            ratios = [
                mine.median_c / theirs.median_c
                for mine, theirs in zip(runs[lease, page_size], runs[tree, page_size], strict=True)
            ]
            rows.append(timed_row("lease", tree, page_size, runs[tree, page_size]))
            figures = timed_row("lease", lease, page_size, runs[lease, page_size]).figures
            for name_of_key in ("without_key_c", "without_key_us"):  # a lease makes its own key
                del figures[name_of_key]
            rows.append(Row("lease", lease, {"tree_x": median(ratios), **figures}, page_size))
            two = name.format("tree, two tiers")
            ratios = [
                mine.median_c / theirs.median_c
                for mine, theirs in zip(runs[two, page_size], runs[tree, page_size], strict=True)
            ]
            figures = timed_row("lease", two, page_size, runs[two, page_size]).figures
            rows.append(Row("lease", two, {"one_tier_x": median(ratios), **figures}, page_size))
    return rows


def tiers_requests(prompts: Iterable[array[int]], page_size: int, pool_tokens: int) -> Laps:
    """`tree_requests`, with a host tier four times as large."""
    rig = Rig(pool_tokens, page_size, host_tokens=4 * pool_tokens)
    laps = Laps()
    for prompt in prompts:
        rig.request(prompt, None, laps)
    return laps


def tree_requests(prompts: Iterable[array[int]], page_size: int, pool_tokens: int) -> Laps:
    rig = Rig(pool_tokens, page_size)
    laps = Laps()
    for prompt in prompts:
        rig.request(prompt, None, laps)
    return laps


def lease_requests(prompts: Iterable[array[int]], page_size: int, pool_tokens: int) -> Laps:
    return asyncio.run(_lease_requests(prompts, page_size, pool_tokens))


async def _lease_requests(prompts: Iterable[array[int]], page_size: int, pool_tokens: int) -> Laps:
    laps = Laps()
    async with UnifiedRadixCache.open(_config(page_size, pool_tokens)) as cache:
        for prompt in prompts:
            start_s = perf_counter()
            async with cache.lease(prompt) as lease:
                while chunk := await lease.next_chunk(len(prompt)):
                    lease.commit(chunk)
                lease.finish()
                reused = lease.prefix_len
            laps.add(perf_counter() - start_s, 0.0, len(prompt), reused)
            await asyncio.sleep(0)  # as in a server: what the cache does in the background, it does
    return laps


def _config(page_size: int, pool_tokens: int) -> Config:
    """The smallest model there is: only its pages count here."""
    return load_config(
        {
            "model": {
                "strategy": "plain",
                "dtype": "float32",
                "num_layers": 1,
                "num_kv_heads": 1,
                "head_dim": 1,
            },
            "page_size": page_size,
            "device": {"type": "cpu", "tokens": pool_tokens},
        }
    )
