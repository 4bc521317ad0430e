"""What stands around every backend: counts, a circuit breaker, a bound on calls at a time, and
sealing where the backend does not seal.

Each is a backend around another, so each is one small class, and the order is said where they are
put together. Owns: nothing of the backend's. Refuses to know: which backend it is.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tiered_cache.errors import BackendError
from tiered_cache.jobs import is_cancelled
from tiered_cache.storage.backend import (
    ObjectKey,
    ReadResult,
    SealingBackend,
    StorageBackend,
    WriteResult,
    ignore_arrivals,
    sealed_already,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from typing import Self

    from tiered_cache.stats import StorageCounters
    from tiered_cache.storage.backend import BackendContext, BackendStats, ObjectInfo
    from tiered_cache.storage.health import Breaker


B = TypeVar("B", bound=StorageBackend)

SEAL_BYTES: Final = 2 << 20
"""Rows of more are sealed by all threads together: 0.1 ms per MiB and thread."""


class Wrapper(SealingBackend, Generic[B]):
    """Passes on what a wrapper has nothing to add to."""

    def __init__(self, inner: B) -> None:
        self._inner = inner

    @classmethod
    async def open(cls, options: Any, context: Any) -> Self:
        raise TypeError("a wrapper is made around a backend that is open")

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await self._inner.contains(keys)

    async def read(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        arrived: Callable[[int, int], None] = ignore_arrivals,
    ) -> list[ReadResult]:
        return await self._inner.read(keys, rows, arrived)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await self._inner.delete(keys)

    async def clear(self, scope: bytes) -> int:
        return await self._inner.clear(scope)

    def scan(self, scope: bytes | None = None) -> AsyncIterator[Sequence[ObjectInfo]]:
        return self._inner.scan(scope)

    async def register_memory(self, view: memoryview) -> None:
        await self._inner.register_memory(view)

    def stats(self) -> BackendStats:
        return self._inner.stats()

    async def aclose(self) -> None:
        await self._inner.aclose()


class Sealed(Wrapper[StorageBackend]):
    """Seals rows in threads, for a backend that is given them sealed."""

    def __init__(self, inner: StorageBackend, context: BackendContext) -> None:
        super().__init__(inner)
        self._context = context

    @classmethod
    def unless_it_seals(cls, backend: StorageBackend, context: BackendContext) -> SealingBackend:
        return backend if isinstance(backend, SealingBackend) else cls(backend, context)

    async def write(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        seal: Callable[[int, int], None] = sealed_already,
    ) -> list[WriteResult]:
        if seal is not sealed_already:
            await self._seal(rows, seal)
        return await self._inner.write(keys, rows)

    async def _seal(self, rows: Sequence[memoryview], seal: Callable[[int, int], None]) -> None:
        """All threads together, where that is worth their while."""

        def seal_some(first: int) -> None:
            for at in range(first, len(rows), step):
                seal(at, len(rows[at]))

        step = self._context.num_threads if sum(map(len, rows)) > SEAL_BYTES else 1
        async with asyncio.TaskGroup() as group:
            for first in range(step):
                group.create_task(self._context.run(seal_some, first))


class Limited(Wrapper[SealingBackend]):
    """At most `limit` calls at a time; the others wait, first come first served.

    `queued` is told how many wait, whenever that changes.
    """

    def __init__(self, inner: SealingBackend, limit: int, queued: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._turns = asyncio.Semaphore(limit)
        self._queued = queued
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self._replaced: set[asyncio.Task[None]] = set()
        self._surplus = 0

    def withdraw(self, late: asyncio.Task[None]) -> bool:
        """Nobody waits for a task's call any more: whether it waits for its turn still, and so
        never begins. Else a backend that is slower than it is asked would never be done."""
        if late not in self._waiting:
            return False
        late.cancel()
        return True

    def replace(self, hung: asyncio.Task[None]) -> None:
        """A task's call hangs: another may start in its stead."""
        self._replaced.add(hung)
        self._turns.release()

    def hung_ended(self, hung: asyncio.Task[None]) -> None:
        """The task has ended after all."""
        if hung in self._replaced:  # it never had a turn that it could have given back
            self._replaced.remove(hung)
            self._surplus += 1

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        task = asyncio.current_task()
        self._waiting.add(task)
        self._queued(len(self._waiting))
        try:
            await self._turns.acquire()
        finally:
            self._waiting.discard(task)
            self._queued(len(self._waiting))
        try:
            yield
        finally:
            if task in self._replaced:
                self._replaced.remove(task)
            elif self._surplus:
                self._surplus -= 1
            else:
                self._turns.release()

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        async with self._turn():
            return await self._inner.contains(keys)

    async def read(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        arrived: Callable[[int, int], None] = ignore_arrivals,
    ) -> list[ReadResult]:
        async with self._turn():
            return await self._inner.read(keys, rows, arrived)

    async def write(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        seal: Callable[[int, int], None] = sealed_already,
    ) -> list[WriteResult]:
        async with self._turn():
            return await self._inner.write(keys, rows, seal)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        async with self._turn():
            await self._inner.delete(keys)


class Guarded(Wrapper[SealingBackend]):
    """Asks a backend only while it is well, and makes of whatever it raises a `BackendError` with a
    reason that holds no secret. A call that took longer than `limit_s` was none that went well."""

    def __init__(
        self,
        inner: SealingBackend,
        reads: Breaker,
        writes: Breaker,
        clock: Callable[[], float],
        limit_s: float,
    ) -> None:
        super().__init__(inner)
        self._limit_s = limit_s
        self._reads = reads
        self._writes = writes
        self._clock = clock

    @contextmanager
    def _asked(self, breaker: Breaker) -> Iterator[list[Any]]:
        """The block puts its answers into the list: when all say that they failed, so has the
        call."""
        if not breaker.admits():
            raise BackendError(f"storage is not asked for now: {breaker.reason}")
        began = self._clock()
        answers: list[Any] = []
        try:
            yield answers
        except asyncio.CancelledError:
            if is_cancelled():
                breaker.given_up()
                raise
            breaker.failed("the backend cancelled its own call")
            raise BackendError("the backend cancelled its own call") from None
        except Exception as error:
            reason = said(error)
            breaker.failed(reason)
            raise BackendError(reason) from error
        except BaseException:
            breaker.given_up()
            raise
        if answers and all(answer.value == "failed" for answer in answers):
            breaker.failed("no object of a batch could be read or written")
        elif (took_s := self._clock() - began) <= self._limit_s:
            breaker.succeeded(took_s)
        else:  # whoever had a limit has given it up, and it counts as failed; else it says nothing
            breaker.given_up()

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._asked(self._reads):
            return _one_each(await self._inner.contains(keys), keys, bool)

    async def read(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        arrived: Callable[[int, int], None] = ignore_arrivals,
    ) -> list[ReadResult]:
        with self._asked(self._reads) as answers:
            answers += _one_each(await self._inner.read(keys, rows, arrived), keys, ReadResult)
            return answers

    async def write(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        seal: Callable[[int, int], None] = sealed_already,
    ) -> list[WriteResult]:
        with self._asked(self._writes) as answers:
            answers += _one_each(await self._inner.write(keys, rows, seal), keys, WriteResult)
            return answers

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        with self._asked(self._writes):
            await self._inner.delete(keys)

    async def clear(self, scope: bytes) -> int:
        with self._asked(self._writes):
            return await self._inner.clear(scope)


def said(error: BaseException) -> str:
    """What a backend says of itself is meant for people; of what else comes through only the kind
    is shown, for its text may hold an address with a password."""
    if isinstance(error, BackendError):
        return str(error)
    return f"the backend raised {type(error).__name__}"


def _one_each(answers: list[Any], keys: Sequence[ObjectKey], kind: type) -> list[Any]:
    """Somebody else's code may have answered anything."""
    if len(answers) != len(keys):
        raise BackendError(f"the backend gave {len(answers)} answers to {len(keys)} keys")
    for answer in answers:
        if not isinstance(answer, kind):
            wrong = type(answer).__name__
            raise BackendError(f"the backend answered with {wrong}, where {kind.__name__} was due")
    return answers


COUNTER_OF: Final[dict[ReadResult | WriteResult, str]] = {
    ReadResult.READ: "objects_read",
    ReadResult.MISSING: "objects_missing",
    ReadResult.CORRUPT: "objects_corrupt",
    ReadResult.FAILED: "objects_unreadable",
    WriteResult.WRITTEN: "objects_written",
    WriteResult.EXISTS: "objects_existing",
    WriteResult.REFUSED: "objects_refused",
    WriteResult.FAILED: "objects_unwritable",
}


class Counted(Wrapper[SealingBackend]):
    """Counts."""

    def __init__(self, inner: SealingBackend, counters: StorageCounters) -> None:
        super().__init__(inner)
        self._counters = counters

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._failures():
            found = await self._inner.contains(keys)
        self._counters.objects_probed += len(keys)
        self._counters.objects_found += sum(found)
        return found

    async def read(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        arrived: Callable[[int, int], None] = ignore_arrivals,
    ) -> list[ReadResult]:
        with self._failures():
            results = await self._inner.read(keys, rows, arrived)
        self._count(results, rows)
        return results

    async def write(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        seal: Callable[[int, int], None] = sealed_already,
    ) -> list[WriteResult]:
        with self._failures():
            results = await self._inner.write(keys, rows, seal)
        self._count(results, rows)
        return results

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        with self._failures():
            await self._inner.delete(keys)
        self._counters.objects_deleted += len(keys)

    def _count(
        self, results: Sequence[ReadResult | WriteResult], rows: Sequence[memoryview]
    ) -> None:
        counters = self._counters
        for result, row in zip(results, rows, strict=True):
            name = COUNTER_OF[result]
            setattr(counters, name, getattr(counters, name) + 1)
            if result is ReadResult.READ:
                counters.bytes_read += len(row)
            elif result is WriteResult.WRITTEN:
                counters.bytes_written += len(row)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except BackendError:
            self._counters.calls_failed += 1
            raise
