"""The reference backend: a dictionary in this process. Read it first when you write your own.

For tests and examples: what it keeps ends with it, unless somebody else holds the `Kept`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from tiered_cache.storage import (
    BackendContext,
    BackendOptions,
    BackendStats,
    ObjectInfo,
    ObjectKey,
    ReadResult,
    StorageBackend,
    WriteResult,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from typing import Self


class MemoryOptions(BackendOptions):
    """`max_size`: bytes; a row that would exceed them is refused (None: no bound)."""

    max_size: int | None = Field(default=None, gt=0)


class Kept:
    """Rows as `bytes`, the oldest first, and how many bytes they are. Backends that are given the
    same one, at once or one after the other, keep their rows together."""

    __slots__ = ("num_bytes", "rows")

    def __init__(self) -> None:
        self.rows: dict[ObjectKey, bytes] = {}
        self.num_bytes = 0


class MemoryBackend(StorageBackend):
    """See `MemoryOptions`; `kept` for tests of a restart, or of several instances."""

    Options = MemoryOptions
    can_scan = True

    def __init__(self, max_size: int | None = None, kept: Kept | None = None) -> None:
        self._kept = Kept() if kept is None else kept
        self._max_size = max_size

    @classmethod
    async def open(cls, options: MemoryOptions, context: BackendContext) -> Self:
        return cls(options.max_size)

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [key in self._kept.rows for key in keys]

    async def read(
        self, keys: Sequence[ObjectKey], rows: Sequence[memoryview], arrived: Any = None
    ) -> list[ReadResult]:
        return [self._read(key, row) for key, row in zip(keys, rows, strict=True)]

    def _read(self, key: ObjectKey, row: memoryview) -> ReadResult:
        kept = self._kept.rows.get(key)
        if kept is None:
            return ReadResult.MISSING
        if len(kept) != len(row):
            return ReadResult.CORRUPT
        row[:] = kept
        return ReadResult.READ

    async def write(
        self, keys: Sequence[ObjectKey], rows: Sequence[memoryview]
    ) -> list[WriteResult]:
        return [self._write(key, row) for key, row in zip(keys, rows, strict=True)]

    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        if key in self._kept.rows:
            return WriteResult.EXISTS
        if self._max_size is not None and self._kept.num_bytes + len(row) > self._max_size:
            return WriteResult.REFUSED
        self._kept.rows[key] = bytes(row)
        self._kept.num_bytes += len(row)
        return WriteResult.WRITTEN

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self._kept.num_bytes -= len(self._kept.rows.pop(key, b""))

    async def clear(self, scope: bytes) -> int:
        keys = [key for key in self._kept.rows if key.startswith(scope)]
        await self.delete(keys)
        return len(keys)

    async def scan(self, scope: bytes | None = None) -> AsyncIterator[Sequence[ObjectInfo]]:
        yield [
            ObjectInfo(key, len(row))
            for key, row in self._kept.rows.items()
            if key.startswith(scope or b"")
        ]

    def stats(self) -> BackendStats:
        return BackendStats(len(self._kept.rows), self._kept.num_bytes, self._max_size)

    async def aclose(self) -> None:
        self._kept = Kept()
