"""What a test of a storage backend is made of: threads, page-aligned rows, objects that can be told
from each other, and an open backend whose every answer is looked at.

Owns: the `BackendContext` without a cache, and what is so in every call. Refuses to know: what a
backend must do in which situation (`tiered_cache.testing.backends`).
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from tiered_cache.jobs import DaemonExecutor, run_to_end, submit, threads_ended
from tiered_cache.storage.backend import (
    HEADER_ROOM,
    SCOPE_BYTES,
    ObjectKey,
    ReadResult,
    WriteResult,
)
from tiered_cache.storage.record import Departures, RecordFormat
from tiered_cache.storage.wrappers import Sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    from tiered_cache.storage.backend import StorageBackend

T = TypeVar("T")

PAGE_BYTES: Final = 4 << 10
"""Rows are multiples of it, at addresses that are."""

SPOILT: Final = 0xA5
"""What stands in a buffer before anybody has written to it."""

SCRIBBLE: Final = 0x5A
"""What the owner of a buffer writes to it when a call has ended."""

STORED: Final = (WriteResult.WRITTEN, WriteResult.EXISTS)


class ThreadContext:
    """The `BackendContext` of a cache, without the cache: threads that are awaited to their end.

    Attributes:
        num_running: calls whose threads are at work.
    """

    def __init__(self, num_threads: int = 4) -> None:
        self.num_running = 0
        self._num_threads = num_threads
        self._num_calls = 0
        self._in_front: Callable[[int], None] | None = None
        self._lock = threading.Lock()
        self._executor = DaemonExecutor("backend-test", num_threads)

    @property
    def num_threads(self) -> int:
        return self._num_threads

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """See `BackendContext.run`."""
        return await run_to_end(submit(self._executor, self._work, fn, args))

    def _work(self, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
        with self._lock:
            self._num_calls += 1
            self.num_running += 1
            number = self._num_calls
        try:
            if self._in_front is not None:
                self._in_front(number)
            return fn(*args)
        finally:
            with self._lock:
                self.num_running -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._executor.shutdown(wait=False)
        await threads_ended([self._executor], timeout=10)

    @contextlib.contextmanager
    def held(self, *, first_fails: bool = False) -> Iterator[None]:
        """What is run in threads meanwhile stands in front of its work, and goes on at the end:
        here, and in every pool of threads, asyncio's own among them. `first_fails`: the first
        raises instead."""
        opened = threading.Event()
        first = self._num_calls + 1

        def in_front(number: int) -> None:
            if first_fails and number == first:
                raise OSError(5, "Input/output error")
            opened.wait(30)

        def submit_held(pool: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            return submit_to_pool(pool, self._work, functools.partial(fn, *args, **kwargs), ())

        submit_to_pool = ThreadPoolExecutor.submit
        self._in_front = in_front
        ThreadPoolExecutor.submit = submit_held  # type: ignore[method-assign]
        try:
            yield
        finally:
            ThreadPoolExecutor.submit = submit_to_pool  # type: ignore[method-assign]
            self._in_front = None
            opened.set()


class Arena:
    """Page-aligned memory for rows, with a guard behind each."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, num_bytes))
        self._used = 0
        self._guards: list[memoryview] = []

    def take(self, num_bytes: int = PAGE_BYTES) -> memoryview:
        """A row that nobody has written to."""
        stop = self._used + num_bytes
        row, guard = self.memory[self._used : stop], self.memory[stop : stop + PAGE_BYTES]
        assert len(guard) == PAGE_BYTES, "the test needs a larger arena"
        fill(row, SPOILT)
        fill(guard, SPOILT)
        self._guards.append(guard)
        self._used = stop + PAGE_BYTES
        return row

    def check(self) -> None:
        """Nobody has written beyond a row."""
        assert all(is_filled(guard, SPOILT) for guard in self._guards), (
            "the backend wrote beyond the end of a buffer"
        )


def fill(row: memoryview, value: int) -> None:
    row[:] = bytes([value]) * len(row)


def is_filled(row: memoryview, value: int) -> bool:
    return row == bytes([value]) * len(row)


class Objects:
    """The objects of a scope: each has a number, a size, and versions of its content.

    All are real ones, with header and checksum: `RecordFormat.check` knows what was read.
    """

    def __init__(self, scope: bytes | None = None) -> None:
        self.scope = os.urandom(SCOPE_BYTES) if scope is None else scope
        self._identity = self.scope + bytes(16)

    def page_key(self, number: int) -> bytes:
        return self._draws(number).randbytes(32)

    def key(self, number: int) -> ObjectKey:
        return ObjectKey(self.scope + self.page_key(number))

    def keys(self, numbers: Iterable[int]) -> list[ObjectKey]:
        return [self.key(number) for number in numbers]

    def record(self, size: int) -> RecordFormat:
        return RecordFormat("full", self._identity, size, size)

    def make(self, row: memoryview, number: int, version: int = 0) -> memoryview:
        """Write the object into a row, and give that."""
        row[:] = self._draws(number, version, len(row)).randbytes(len(row))
        self.record(len(row)).seal(row, self.page_key(number))
        return row

    def version_of(self, row: memoryview, number: int, num_versions: int) -> int | None:
        """Which version of an object a row is, bit for bit."""
        wanted = memoryview(bytearray(len(row)))
        for version in range(num_versions):
            if row == self.make(wanted, number, version):
                return version
        return None

    def fault(self, row: memoryview, number: int) -> str | None:
        """What the library finds wrong in a row that was read under this number's key."""
        return self.record(len(row)).check(row, self.page_key(number))

    def _draws(self, *of: int) -> random.Random:
        return random.Random(f"{self.scope!r} {of}")


class Scene:
    """An open backend, its threads, memory and objects.

    The calls check what is so in every call: an answer per key, of the right kind; rows that were
    read are whole, and of their key; rows that were written are as they were.
    """

    def __init__(self, backend: StorageBackend, context: ThreadContext, arena: Arena) -> None:
        self.backend = backend
        self.context = context
        self.arena = arena
        self.objects = Objects()
        self.scopes = [self.objects.scope]

    def other_objects(self, scope: bytes | None = None) -> Objects:
        """Of another scope."""
        objects = Objects(scope)
        self.scopes.append(objects.scope)
        return objects

    def row(self, number: int, size: int = PAGE_BYTES, version: int = 0) -> memoryview:
        return self.objects.make(self.arena.take(size), number, version)

    def rows(self, numbers: Iterable[int], size: int = PAGE_BYTES) -> list[memoryview]:
        return [self.row(number, size) for number in numbers]

    def buffers(self, count: int, size: int = PAGE_BYTES) -> list[memoryview]:
        return [self.arena.take(size) for _ in range(count)]

    def keys(self, numbers: Iterable[int]) -> list[ObjectKey]:
        return self.objects.keys(numbers)

    async def write(
        self, numbers: Sequence[int], size: int = PAGE_BYTES, version: int = 0
    ) -> list[WriteResult]:
        rows = [self.row(number, size, version) for number in numbers]
        results = await self.backend.write(self.keys(numbers), rows)
        check_answer(results, len(numbers), WriteResult)
        for number, row in zip(numbers, rows, strict=True):
            assert self.objects.fault(row, number) is None, "write has changed the caller's row"
        return results

    async def write_unsealed(
        self, numbers: Sequence[int], rows: Sequence[memoryview], *, wrong: list[str]
    ) -> list[WriteResult]:
        """Write these rows as the cache does: without headers, which they get on their way, by the
        backend if it is a `SealingBackend`. What it does with `seal` that it must not is in
        `wrong`."""
        departures = Departures(
            self.objects.record(len(rows[0])), rows, [self.objects.page_key(n) for n in numbers]
        )
        upto = [0] * len(rows)
        has_ended = False

        def seal(index: int, stop: int) -> None:
            if has_ended:
                wrong.append(f"row {index} is sealed after the call")
            elif not upto[index] <= stop <= len(rows[index]):
                wrong.append(f"row {index} is sealed up to {stop} after {upto[index]}")
            else:
                upto[index] = stop
                departures.seal(index, stop)

        for row in rows:
            fill(row[:HEADER_ROOM], SPOILT)
        backend = Sealed.unless_it_seals(self.backend, self.context)
        try:
            results = await backend.write(self.keys(numbers), rows, seal)
        finally:
            has_ended = True
        check_answer(results, len(numbers), WriteResult)
        for index, result in enumerate(results):
            if result is WriteResult.WRITTEN and upto[index] != len(rows[index]):
                wrong.append(f"row {index} is written, and sealed up to {upto[index]}")
        return results

    async def keep(self, numbers: Sequence[int], size: int = PAGE_BYTES, version: int = 0) -> None:
        """Write rows that must be kept: there is room, and nothing is wrong."""
        results = await self.write(numbers, size, version)
        assert all(result in STORED for result in results), f"not all were written: {results}"

    async def read_into(
        self, numbers: Sequence[int], rows: Sequence[memoryview]
    ) -> list[ReadResult]:
        """What was read, the check of the record has found right."""
        results = await self.backend.read(self.keys(numbers), rows)
        check_answer(results, len(numbers), ReadResult)
        for number, row, result in zip(numbers, rows, results, strict=True):
            if result is ReadResult.READ:
                fault = self.objects.fault(row, number)
                assert fault is None, "READ of a row that " + (
                    "nobody has written to" if is_filled(row, SPOILT) else str(fault)
                )
        return results

    async def read(self, numbers: Sequence[int], size: int = PAGE_BYTES) -> list[ReadResult]:
        return await self.read_into(numbers, self.buffers(len(numbers), size))

    async def verify(
        self, numbers: Sequence[int], size: int = PAGE_BYTES, version: int = 0
    ) -> None:
        """All of these are read, as they were written."""
        rows = self.buffers(len(numbers), size)
        results = await self.read_into(numbers, rows)
        assert results == [ReadResult.READ] * len(numbers), f"not all were read: {results}"
        wanted = memoryview(bytearray(size))
        for number, row in zip(numbers, rows, strict=True):
            assert row == self.objects.make(wanted, number, version), "READ of another version"

    async def contains(self, numbers: Sequence[int]) -> list[bool]:
        kept = await self.backend.contains(self.keys(numbers))
        check_answer(kept, len(numbers), bool)
        return kept

    async def delete(self, numbers: Sequence[int]) -> None:
        await self.backend.delete(self.keys(numbers))

    async def clear(self) -> int:
        return await self.backend.clear(self.objects.scope)


def check_answer(answer: object, count: int, kind: type) -> None:
    """One of a kind for each key."""
    assert isinstance(answer, list), f"a list is the answer, not {answer!r}"
    assert len(answer) == count, f"{len(answer)} answers to {count} keys"
    wrong = [item for item in answer if type(item) is not kind]
    assert not wrong, f"answers are of {kind.__name__}, not {wrong!r}"


class Model:
    """What may be kept: per key the versions of which one is. Absent: nothing is.

    Numbers below 3 are of one scope, the others of another.
    """

    NUM_VERSIONS: Final = 3

    def __init__(self, scene: Scene) -> None:
        self._backend = scene.backend
        self._arena = scene.arena
        self._scopes = (scene.objects, scene.other_objects())
        self._kept: dict[int, set[int]] = {}

    def _of(self, number: int) -> Objects:
        return self._scopes[number >= 3]

    def _keys(self, numbers: list[int]) -> list[ObjectKey]:
        return [self._of(number).key(number) for number in numbers]

    async def write(self, numbers: list[int], version: int) -> None:
        versions = [(version + at) % self.NUM_VERSIONS for at in range(len(numbers))]
        rows = [
            self._of(number).make(self._arena.take(), number, version)
            for number, version in zip(numbers, versions, strict=True)
        ]
        results = await self._backend.write(self._keys(numbers), rows)
        assert all(result in STORED for result in results), results
        for number in set(numbers) - self._kept.keys():
            first = [r for of, r in zip(numbers, results, strict=True) if of == number]
            assert WriteResult.WRITTEN in first, "nothing was there that could exist"
        for number, version, result in zip(numbers, versions, results, strict=True):
            if result is WriteResult.WRITTEN:
                self._kept.setdefault(number, set()).add(version)

    async def read(self, numbers: list[int], _: int) -> None:
        rows = [self._arena.take() for _ in numbers]
        results = await self._backend.read(self._keys(numbers), rows)
        for number, result, row in zip(numbers, results, rows, strict=True):
            if number not in self._kept:
                assert result is ReadResult.MISSING
                continue
            assert result is ReadResult.READ
            found = self._of(number).version_of(row, number, self.NUM_VERSIONS)
            assert found is not None, self._of(number).fault(row, number)
            assert found in self._kept[number], f"version {found} of {self._kept[number]}"
            self._kept[number] = {found}

    async def contains(self, numbers: list[int], _: int) -> None:
        answer = await self._backend.contains(self._keys(numbers))
        assert answer == [number in self._kept for number in numbers]

    async def delete(self, numbers: list[int], _: int) -> None:
        await self._backend.delete(self._keys(numbers))
        for number in numbers:
            self._kept.pop(number, None)

    async def clear(self, _: list[int], which: int) -> None:
        objects = self._scopes[which % 2]
        gone = [number for number in self._kept if self._of(number) is objects]
        assert await self._backend.clear(objects.scope) == len(gone)
        for number in gone:
            del self._kept[number]


class Blocking:
    """What this thread does meanwhile that can make it wait, of what the interpreter reports."""

    EVENTS: Final = frozenset(
        {
            "open",
            "os.listdir",
            "os.link",
            "os.mkdir",
            "os.remove",
            "os.rename",
            "os.rmdir",
            "os.scandir",
            "os.truncate",
            "os.utime",
            "socket.getaddrinfo",
            "sqlite3.connect",
            "subprocess.Popen",
            "time.sleep",
        }
    )
    _current: ClassVar[Blocking | None] = None
    _is_hooked: ClassVar[bool] = False

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        if not Blocking._is_hooked:  # for the life of the process: a hook cannot be removed
            sys.addaudithook(_report)
            Blocking._is_hooked = True
        Blocking._current = self
        return self

    def __exit__(self, *error: object) -> None:
        Blocking._current = None

    def report(self, event: str, args: tuple[Any, ...]) -> None:
        is_import = event == "open" and str(args[0]).endswith((".py", ".pyc"))
        if threading.get_ident() == self._thread and not is_import:
            self.seen.append(event)


def _report(event: str, args: tuple[Any, ...]) -> None:
    if Blocking._current is not None and event in Blocking.EVENTS:
        Blocking._current.report(event, args)
