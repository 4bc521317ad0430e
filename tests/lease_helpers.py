"""A small cache, a model that knows its bytes, and a request in one call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from tiered_cache import CacheStats, Chunk, Lease, UnifiedRadixCache, load_config
from tiered_cache.stats import Counters, PoolStats
from tiered_cache.testing.oracle import ByteOracle, OracleModel

T = TypeVar("T")

P: Final = 4
"""Tokens per page here."""

MODEL: Final = {"dtype": "float32", "num_layers": 2, "num_kv_heads": 1, "head_dim": 2}


def settings(pages: int = 16, **sections: Any) -> Any:
    page_size = sections.get("page_size", P)
    return load_config(
        {
            "model": MODEL,
            "page_size": P,
            "device": {"tokens": pages * page_size},
            "check": True,
            **sections,
        },
        environ={},
    )


class Rig:
    """An open cache with its oracle. `model` is what to run."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self.cache = cache
        self.config: Any = None
        self.oracle = ByteOracle(cache)
        self.model = OracleModel(self.oracle)
        self.exit_actions: list[Callable[[], object]] = []

    def at_exit(self, action: Callable[[], object]) -> None:
        """Call it when the rig is left, however that is."""
        self.exit_actions.append(action)

    @property
    def pool(self) -> PoolStats:
        return self.stats.pools["full"]

    @property
    def host(self) -> PoolStats:
        return self.stats.host["full"]

    @property
    def counters(self) -> Counters:
        return self.stats.counters

    @property
    def stats(self) -> CacheStats:
        return self.cache.stats()

    async def lease(self, tokens: Sequence[int], **options: Any) -> Lease:
        return await self.cache.acquire(tokens, **options)

    async def compute(self, lease: Lease, max_tokens: int = 1 << 20) -> None:
        """Compute and commit what is left of a lease's tokens."""
        while chunk := await lease.next_chunk(max_tokens):
            await lease.run(self.model, chunk)
            lease.commit(chunk)

    async def serve(self, tokens: Sequence[int], **options: Any) -> int:
        """A whole request; returns how much of it was reused."""
        async with self.cache.lease(tokens, **options) as lease:
            reused = lease.prefix_len
            await self.compute(lease)
            return reused

    def hit(self, tokens: Sequence[int], **namespace: Any) -> int:
        """Tokens of a prompt that the device has, by `explain`."""
        text = self.cache.explain(tokens, **namespace)
        return int(text.split("on the device: ")[1].split()[0])

    def check(self) -> None:
        """Accounts, owners, and the bytes of all that is published; nothing free was written."""
        self.cache.check_integrity()
        self.oracle.verify_tree()
        assert self.model.faults == []

    def spoil_free_pages(self) -> None:
        """Overwrite everything that could be handed out, as a next owner would."""
        self.oracle.spoil("full", self.cache._parts.allocators[0].free_ids())
        if self.cache._parts.host is not None:
            ids = self.cache._parts.host.allocators[0].free_ids()
            self.oracle.spoil("full", ids, on_host=True)

    def verify_free_pages(self) -> None:
        """Nobody has written to a free page since."""
        self.oracle.verify_spoilt("full", self.cache._parts.allocators[0].free_ids())
        if self.cache._parts.host is not None:
            ids = self.cache._parts.host.allocators[0].free_ids()
            self.oracle.verify_spoilt("full", ids, on_host=True)


@contextlib.asynccontextmanager
async def rig(pages: int = 16, *, options: Any = None, **sections: Any) -> AsyncIterator[Rig]:
    """A cache that is checked when it is left, whatever the test did to it."""
    if "storage" in sections:  # it looks for what is installed, on disk
        config = await asyncio.to_thread(settings, pages, **sections)
    else:
        config = settings(pages, **sections)
    async with UnifiedRadixCache.open(config, **(options or {})) as cache:
        made = Rig(cache)
        made.config = config
        try:
            yield made
        finally:
            for action in made.exit_actions:
                action()
        made.check()


def seq(name: str, stop: int, start: int = 0) -> list[int]:
    """`A[start:stop)` of a sequence of distinct tokens that shares none with another name's."""
    base = 100_000 * ord(name)
    return list(range(base + start, base + stop))


async def turns(count: int = 8) -> None:
    """Let the loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.get_running_loop().create_task(work)


async def chunk_of(lease: Lease, max_tokens: int = 1 << 20) -> Chunk:
    """The next chunk, which must be there."""
    chunk = await lease.next_chunk(max_tokens)
    assert chunk is not None
    return chunk


def other_tasks() -> set[asyncio.Task[Any]]:
    """All tasks of the loop but the one that asks."""
    return asyncio.all_tasks() - {asyncio.current_task()}


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and see it end as cancelled."""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled(), task
