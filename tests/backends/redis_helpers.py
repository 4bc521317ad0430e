"""What the tests of the redis backend share: threads, rows that prove what they are, and a backend
on a real server."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import redis

from tiered_cache.jobs import DaemonExecutor
from tiered_cache.storage import ObjectKey, ReadResult
from tiered_cache.storage.record import RecordFormat, fingerprint
from tiered_cache.testing.backend_scene import ThreadContext
from tiered_cache_redis import RedisBackend, RedisOptions

T = TypeVar("T")

KIB, MIB = 1 << 10, 1 << 20

READ, MISSING, CORRUPT = ReadResult.READ, ReadResult.MISSING, ReadResult.CORRUPT


class IoThreads(ThreadContext):
    """The shipped `BackendContext`. `num_runs`: jobs so far."""

    def __init__(self, num_threads: int = 4) -> None:
        super().__init__(num_threads)
        self.num_runs = 0

    @property
    def executor(self) -> DaemonExecutor:
        return self._executor

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        self.num_runs += 1
        return await super().run(fn, *args)

    async def aclose(self) -> None:
        await self.__aexit__()


@asynccontextmanager
async def opened(
    url: str, *, context: IoThreads | None = None, num_threads: int = 4, **options: Any
) -> AsyncIterator[RedisBackend]:
    """A backend on threads of its own."""
    threads = context or IoThreads(num_threads)
    try:
        backend = await RedisBackend.open(RedisOptions(url=url, **options), threads)
        try:
            yield backend
        finally:
            await backend.aclose()
    finally:
        await threads.aclose()


@dataclass(frozen=True)
class Pages:
    """Sealed rows of one component, and buffers to read them into."""

    record: RecordFormat
    page_keys: list[bytes]
    rows: list[memoryview]

    @classmethod
    def of(cls, num: int, row_bytes: int = 64 * KIB, component: str = "full") -> Pages:
        record = RecordFormat(component, fingerprint({"of": component}), row_bytes, row_bytes)
        page_keys = [hashlib.sha256(b"%d" % index).digest() for index in range(num)]
        rows = []
        for page_key in page_keys:
            row = memoryview(bytearray((page_key * (row_bytes // 32 + 1))[:row_bytes]))
            record.seal(row, page_key)
            rows.append(row)
        return cls(record, page_keys, rows)

    @property
    def keys(self) -> list[ObjectKey]:
        return [self.record.object_key(page_key) for page_key in self.page_keys]

    def names(self, prefix: str = "tiered-cache:") -> list[str]:
        """As the server knows them."""
        return [f"{prefix}{self.record.scope.hex()}:{key.hex()}" for key in self.page_keys]

    def some(self, indexes: Iterable[int]) -> Pages:
        """A few of them."""
        chosen = list(indexes)
        return Pages(
            self.record, [self.page_keys[i] for i in chosen], [self.rows[i] for i in chosen]
        )

    def buffers(self) -> list[memoryview]:
        """One for each row, poisoned, inside one arena."""
        size = self.record.row_bytes
        arena = memoryview(mmap.mmap(-1, size * len(self.rows)))
        arena[:] = b"\xa5" * len(arena)
        return [arena[index * size : (index + 1) * size] for index in range(len(self.rows))]

    def verdicts(self, buffers: Sequence[memoryview]) -> list[str | None]:
        """What is wrong with each."""
        return [self.record.check(*of) for of in zip(buffers, self.page_keys, strict=True)]

    def prove(self, buffers: Sequence[memoryview], results: Sequence[ReadResult]) -> None:
        """Whatever is said to be read is what it should be."""
        for result, verdict in zip(results, self.verdicts(buffers), strict=True):
            assert result is not ReadResult.READ or verdict is None, verdict

    def put(self, client: redis.Redis) -> None:
        """All of them into a server, by somebody else."""
        client.mset({name: bytes(row) for name, row in zip(self.names(), self.rows, strict=True)})
