"""The contract of a backend over a directory: batches become jobs for the cache's threads.

Owns: how a batch is divided, and that all of it has ended when the call has. Refuses to know: what
a job does with files.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

from tiered_cache.errors import BackendError
from tiered_cache.storage import BackendStats, SealingBackend
from tiered_cache.storage.backend import ignore_arrivals, sealed_already
from tiered_cache_file.directory import Directory, Writing
from tiered_cache_file.layout import NUM_BUCKETS, prepare
from tiered_cache_file.options import FileOptions
from tiered_cache_file.reading import Item

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from typing import Any, Self

    from tiered_cache.storage import BackendContext, ObjectInfo, ObjectKey, ReadResult, WriteResult

T = TypeVar("T")
R = TypeVar("R")

JOB_BYTES: Final = 8 << 20
"""Of rows in a job, at most: what is running when a call is cancelled is waited for."""
MIN_JOB_BYTES: Final = 512 << 10
"""Fewer are not worth a thread of their own."""
JOB_KEYS: Final = 256
"""In a job that moves no rows."""


class FileBackend(SealingBackend):
    """Keeps each row as a file. See `FileOptions`."""

    Options = FileOptions
    can_scan = True

    def __init__(self, directory: Directory, context: BackendContext) -> None:
        self._directory = directory
        self._context = context
        self._is_listing = False
        self._closed = False

    @classmethod
    async def open(cls, options: FileOptions, context: BackendContext) -> Self:
        root = await prepare(options.path)
        made: list[Directory] = []

        def make() -> None:
            direct_beyond = memory_bytes() if options.direct == "auto" else None
            made.append(Directory(root, options.max_size, options.reserve, direct_beyond))

        try:
            await context.run(make)
            await context.run(made[0].room.list_all)
            await context.run(made[0].room.trim)
        except BaseException:
            for directory in made:  # also when it was cancelled and made all the same
                directory.close()
            raise
        return cls(made[0], context)

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        stamps = self._directory.room.clock.falling(len(keys))
        return await self._all(
            self._directory.contains,
            [
                (keys[start : start + JOB_KEYS], stamps[start : start + JOB_KEYS])
                for start in range(0, len(keys), JOB_KEYS)
            ],
        )

    async def read(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        arrived: Callable[[int, int], None] = ignore_arrivals,
    ) -> list[ReadResult]:
        stamps = self._directory.room.clock.falling(len(keys))
        parts = self._parts(keys, rows, stamps)
        return await self._all(self._directory.read, [(items, arrived) for items in parts])

    async def write(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        seal: Callable[[int, int], None] = sealed_already,
    ) -> list[WriteResult]:
        if not keys:
            return []
        await self._list_in_time()
        clock = self._directory.room.clock
        stamps = clock.falling(len(keys))
        parts = [list(map(Writing, items)) for items in self._parts(keys, rows, stamps)]
        with clock.writing(stamps):
            if len(parts) == 1:
                return await self._context.run(self._directory.write, parts[0], seal)
            batch = list(chain.from_iterable(parts))
            try:
                await self._at_once(self._directory.fill, [(part, seal) for part in parts])
                return await self._context.run(self._directory.land, batch)
            except BaseException:
                with suppress(BackendError):  # what is written is not lost
                    await self._context.run(self._directory.land, batch)
                raise

    async def _list_in_time(self) -> None:
        """One call pays for it while the others go on. When nobody has, all would have to wait."""
        if self._directory.room.wants_listing and not self._is_listing:
            self._is_listing = True
            try:
                await self._context.run(self._directory.room.list_all)
            finally:
                self._is_listing = False

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        for start in range(0, len(keys), JOB_KEYS):
            await self._context.run(self._directory.delete, keys[start : start + JOB_KEYS])

    async def clear(self, scope: bytes) -> int:
        if scope not in await self._context.run(self._directory.objects.scopes):
            return 0
        num_gone = 0
        for bucket in range(NUM_BUCKETS):
            num_gone += await self._context.run(self._directory.clear, scope, bucket)
        await self._context.run(self._directory.remove_scope, scope)
        return num_gone

    async def scan(self, scope: bytes | None = None) -> AsyncIterator[Sequence[ObjectInfo]]:
        objects = self._directory.objects
        for each in await self._context.run(objects.scopes):
            if scope is None or each == scope:
                for bucket in range(NUM_BUCKETS):
                    if found := await self._context.run(objects.infos, each, bucket):
                        yield found

    def stats(self) -> BackendStats:
        room = self._directory.room
        return BackendStats(room.account.num_objects, room.account.num_bytes, room.max_size)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._context.run(self._directory.remove_temporary)
        finally:
            self._directory.close()

    def _parts(
        self, keys: Sequence[ObjectKey], rows: Sequence[memoryview], stamps: range
    ) -> list[list[Item]]:
        """A batch as jobs: for all threads, but none too large or too small."""
        items = map(Item._make, zip(range(len(keys)), keys, rows, stamps, strict=True))
        share = -(-sum(map(len, rows)) // self._context.num_threads)
        return list(_divide(items, min(max(share, MIN_JOB_BYTES), JOB_BYTES)))

    async def _all(self, job: Callable[..., list[R]], parts: Sequence[tuple[Any, ...]]) -> list[R]:
        """As `_at_once`; the results in one list."""
        return list(chain.from_iterable(await self._at_once(job, parts)))

    async def _at_once(self, job: Callable[..., R], parts: Sequence[tuple[Any, ...]]) -> list[R]:
        """`job(*part)` for each part. Nothing of it goes on when this has ended, in whichever
        way."""
        if len(parts) == 1:
            return [await self._context.run(job, *parts[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._context.run(job, *part)) for part in parts]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]


def _divide(items: Iterator[Item], max_bytes: int) -> Iterator[list[Item]]:
    """In order; a row that is larger is alone."""
    part: list[Item] = []
    num_bytes = 0
    for item in items:
        if part and num_bytes + len(item.row) > max_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += len(item.row)
    if part:
        yield part


def memory_bytes() -> int:
    """Of this machine. What a page cache could hold is less, and what it does hold nobody knows."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
