"""A storage backend of one's own: rows in an SQLite database, which several processes may share.

    python examples/custom_backend.py

docs/backends/writing-a-backend.md goes through it. It is proven without a line more:

    PYTHONPATH=examples pytest --tiered-backend custom_backend:SqliteBackend \
        --tiered-backend-options '{"path": "{tmp}/rows.db"}' --tiered-backend-claims persists,shared
"""

import asyncio
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field

from tiered_cache.errors import BackendError
from tiered_cache.storage import (
    BackendContext,
    BackendOptions,
    BackendStats,
    ObjectKey,
    ReadResult,
    StorageBackend,
    WriteResult,
)
from tiered_cache.testing.backend_scene import Objects, ThreadContext

T = TypeVar("T")


class SqliteOptions(BackendOptions):
    """What stands under `storage.options` in a configuration."""

    path: Path = Field(strict=False)  # a string will do


class Database:
    """What threads do. One connection, for one at a time: SQLite lets only one write anyway."""

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # prompts are nobody else's business
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, timeout=10, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = OFF")  # what a crash takes is computed again
        self._db.execute("CREATE TABLE IF NOT EXISTS objects (key BLOB PRIMARY KEY, row BLOB)")

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._lock:
            find = "SELECT 1 FROM objects WHERE key = ?"
            return [self._db.execute(find, (key,)).fetchone() is not None for key in keys]

    def read(self, keys: Sequence[ObjectKey], rows: Sequence[memoryview]) -> list[ReadResult]:
        with self._lock:
            return [self._read(key, row) for key, row in zip(keys, rows, strict=True)]

    def _read(self, key: ObjectKey, row: memoryview) -> ReadResult:
        found = self._db.execute("SELECT row FROM objects WHERE key = ?", (key,)).fetchone()
        if found is None:
            return ReadResult.MISSING
        if len(found[0]) != len(row):
            return ReadResult.CORRUPT
        row[:] = found[0]
        return ReadResult.READ

    def write(self, keys: Sequence[ObjectKey], rows: Sequence[memoryview]) -> list[WriteResult]:
        insert = "INSERT OR IGNORE INTO objects VALUES (?, ?)"
        with self._lock, self._db:  # a transaction: all of them or none
            news = [self._db.execute(insert, of).rowcount for of in zip(keys, rows, strict=True)]
        return [WriteResult.WRITTEN if is_new else WriteResult.EXISTS for is_new in news]

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        with self._lock, self._db:
            self._db.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in keys])

    def clear(self, scope: bytes) -> int:
        with self._lock, self._db:
            delete = "DELETE FROM objects WHERE key BETWEEN ? AND ?"
            return self._db.execute(delete, (scope, scope + b"\xff" * 33)).rowcount

    def close(self) -> None:
        self._db.close()


class SqliteBackend(StorageBackend):
    """What the event loop does: hand over to a thread, and wait."""

    Options = SqliteOptions

    def __init__(self, database: Database, context: BackendContext) -> None:
        self._database = database
        self._context = context

    @classmethod
    async def open(cls, options: SqliteOptions, context: BackendContext) -> Self:
        opened: list[Database] = []
        try:
            await context.run(lambda: opened.append(Database(options.path)))
        except BaseException as error:
            for database in opened:  # by a thread that was cancelled
                database.close()
            if isinstance(error, sqlite3.Error | OSError):
                raise BackendError(f"{options.path} cannot be opened: {error}") from error
            raise
        return cls(opened[0], context)

    async def _run(self, fn: Callable[..., T], *args: Any) -> T:
        """Ends when the thread has: rows are lent for no longer than the call."""
        try:
            return await self._context.run(fn, *args)
        except sqlite3.Error as error:
            raise BackendError(f"SQLite: {error}") from error

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await self._run(self._database.contains, keys)

    async def read(
        self, keys: Sequence[ObjectKey], rows: Sequence[memoryview], arrived: Any = None
    ) -> list[ReadResult]:
        return await self._run(self._database.read, keys, rows)

    async def write(
        self, keys: Sequence[ObjectKey], rows: Sequence[memoryview]
    ) -> list[WriteResult]:
        return await self._run(self._database.write, keys, rows)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await self._run(self._database.delete, keys)

    async def clear(self, scope: bytes) -> int:
        return await self._run(self._database.clear, scope)

    def stats(self) -> BackendStats:
        return BackendStats()  # it would have to ask

    async def aclose(self) -> None:
        await self._run(self._database.close)


async def main() -> None:
    objects, numbers = Objects(), range(8)
    keys = objects.keys(numbers)
    with tempfile.TemporaryDirectory() as folder:
        options = SqliteOptions(path=Path(folder) / "rows.db")
        async with ThreadContext() as context:  # in a cache, its own threads
            backend = await SqliteBackend.open(options, context)
            rows = [objects.make(memoryview(bytearray(4096)), number) for number in numbers]
            await backend.write(keys, rows)
            await backend.aclose()

            backend = await SqliteBackend.open(options, context)
            rows = [memoryview(bytearray(4096)) for _ in numbers]
            results = await backend.read(keys, rows)
            await backend.aclose()
        num_read = sum(result is ReadResult.READ for result in results)
        faults = [objects.fault(row, number) for number, row in zip(numbers, rows, strict=True)]
        print(f"{num_read} rows read after a restart, {len(faults) - faults.count(None)} wrong")


if __name__ == "__main__":
    asyncio.run(main())
