"""The proof of a storage backend: subclass `BackendTests`, say how to open one, run pytest.

    class TestSqlite(BackendTests):
        backend_class = SqliteBackend
        persists = True
        shared = True

        def options(self) -> SqliteOptions:
            return SqliteOptions(path=self.tmp_path / "rows.db")

It needs pytest alone (with hypothesis one test more): each test runs its own event loop. What is
asked and why is in `docs/backends/writing-a-backend.md`; without a file it runs as
`pytest --tiered-backend PACKAGE.MODULE:CLASS`.

A backend may be proven on a server that others use: tests draw scopes of their own, and clear them.
There must be room for 64 MiB.

Owns: what every backend must do. Refuses to know: how one does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final, ParamSpec, TypeVar

import pytest

from tiered_cache.storage.backend import (
    SCOPE_BYTES,
    BackendOptions,
    BackendStats,
    ObjectKey,
    ReadResult,
    StorageBackend,
    WriteResult,
)
from tiered_cache.storage.record import Arrivals
from tiered_cache.testing.backend_scene import (
    PAGE_BYTES,
    SCRIBBLE,
    STORED,
    Arena,
    Blocking,
    Model,
    Objects,
    Scene,
    ThreadContext,
    fill,
    is_filled,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from pathlib import Path

    from tiered_cache.storage.backend import BackendContext

__all__ = ["BackendTests", "Objects", "Scene", "ThreadContext", "needs", "on_a_loop"]

T = TypeVar("T")
P = ParamSpec("P")
Test = TypeVar("Test", bound="Callable[..., Any]")

KIB: Final = 1 << 10
MIB: Final = 1 << 20

ARENA_BYTES: Final = 64 * MIB

READ, MISSING, CORRUPT = ReadResult.READ, ReadResult.MISSING, ReadResult.CORRUPT
WHOLE_OR_NONE: Final = {READ, MISSING}

STILL_AT_WORK: Final = "the call has ended, and a thread is still at work on its buffers"
WROTE_LATER: Final = "the backend wrote to a buffer after the call had ended"


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine, as one that any pytest can run."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        suite: Any = args[0]
        suite.run(test(*args, **kwargs))

    return run


def needs(*things: str) -> Callable[[Test], Test]:
    """Collect a test only where these are: an attribute that is true, a hook that is overridden,
    hypothesis."""

    def mark(test: Test) -> Test:
        test.needs = things  # type: ignore[attr-defined]
        return test

    return mark


class BackendTests:
    """See the module. A subclass is collected if its name begins with `Test`.

    To set:
        backend_class: the backend.
        persists: what it keeps is there when it is opened again with equal options.
        shared: two that are open at once, with equal options, have the same objects.

    To override: `options`, or `open` where that is not enough; `tamper` if an object can be changed
    behind the backend's back. Tests for what a backend does not claim are not collected: they are
    in `left_out`, each with what it lacks, and in pytest's summary.

    Attributes:
        tmp_path: a folder, empty when a test begins.
    """

    backend_class: ClassVar[type[StorageBackend]]
    persists: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    new_loop: ClassVar[Callable[[], asyncio.AbstractEventLoop]] = asyncio.new_event_loop
    limit_s: ClassVar[float] = 30.0
    """For one test: only so that a broken one ends."""

    left_out: ClassVar[dict[str, str]] = {}
    tmp_path: Path

    # --- hooks ------------------------------------------------------------------------------------

    def options(self) -> BackendOptions:
        """For `backend_class.open`. Equal whenever it is called in one test."""
        return self.backend_class.Options()

    async def open(self, context: BackendContext) -> StorageBackend:
        """An open backend. A test calls it again for a restart, or for a second instance."""
        return await self.backend_class.open(self.options(), context)

    def tamper(self, key: ObjectKey, change: Callable[[bytes], bytes]) -> None:
        """Put `change(kept)` in the place of the bytes that are kept under a key, so that the next
        read meets it. Called in a thread, while the backend is open."""
        raise NotImplementedError

    # --- how it runs ------------------------------------------------------------------------------

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.left_out = {}
        for name, test in vars(BackendTests).items():
            missing = [thing for thing in getattr(test, "needs", ()) if not cls._has(thing)]
            if missing:
                cls.left_out[name] = f"needs {', '.join(missing)}"
                setattr(cls, name, None)
            elif hasattr(test, "needs") and getattr(cls, name) is None:
                setattr(cls, name, test)  # a parent could not, this one can

    @classmethod
    def _has(cls, thing: str) -> bool:
        if thing == "tamper":
            return cls.tamper is not BackendTests.tamper
        if thing == "hypothesis":
            return importlib.util.find_spec("hypothesis") is not None
        if thing == "can_scan":
            return hasattr(cls, "backend_class") and cls.backend_class.can_scan
        return bool(getattr(cls, thing))

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On a loop of its own, on which nothing may be left."""
        complaints: list[dict[str, Any]] = []

        async def limited() -> T:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
            limit = asyncio.timeout(self.limit_s)
            try:
                async with limit:
                    result = await work
            except TimeoutError as error:
                if limit.expired():
                    raise AssertionError(f"no end after {self.limit_s} s") from error
                raise
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks are left: {left}"
            return result

        with asyncio.Runner(loop_factory=type(self).new_loop) as runner:
            result = runner.run(limited())
        assert not complaints, f"nobody has looked at: {complaints}"
        return result

    @contextlib.asynccontextmanager
    async def scene(self, num_bytes: int = ARENA_BYTES) -> AsyncIterator[Scene]:
        """An open backend; at the end its objects are deleted, and it is closed."""
        arena = Arena(num_bytes)
        async with ThreadContext() as context:
            scene = Scene(await self._open(context, arena), context, arena)
            try:
                yield scene
            except BaseException:
                with contextlib.suppress(Exception):
                    await self._end(scene)  # what went wrong first is what matters
                raise
            await self._end(scene)
        arena.check()

    async def _open(self, context: BackendContext, arena: Arena) -> StorageBackend:
        backend = await self.open(context)
        await backend.register_memory(arena.memory)
        return backend

    async def _end(self, scene: Scene) -> None:
        async with asyncio.timeout(10):
            try:
                for scope in scene.scopes:
                    await scene.backend.clear(scope)
            finally:
                await scene.backend.aclose()

    async def _restart(self, scene: Scene) -> None:
        await scene.backend.aclose()
        scene.backend = await self._open(scene.context, scene.arena)

    @contextlib.asynccontextmanager
    async def _second(self, scene: Scene) -> AsyncIterator[Scene]:
        """Another instance, for the same objects, in the same memory."""
        other = Scene(await self._open(scene.context, scene.arena), scene.context, scene.arena)
        other.objects = scene.objects
        try:
            yield other
        finally:
            await other.backend.aclose()

    # --- what is written is read ------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("count", "size"),
        [
            (0, PAGE_BYTES),
            (1, PAGE_BYTES),
            (17, 64 * KIB),
            (1100, PAGE_BYTES),  # more than one system call takes
            (5, 2 * MIB + PAGE_BYTES),
        ],
    )
    @on_a_loop
    async def test_batches_of_all_sizes_come_back(self, count: int, size: int) -> None:
        """Nothing, one, many; small rows and large: what is written is read, bit for bit."""
        async with self.scene() as scene:
            numbers = range(count)
            assert await scene.contains(numbers) == [False] * count
            assert await scene.write(numbers, size) == [WriteResult.WRITTEN] * count
            assert await scene.contains(numbers) == [True] * count
            await scene.verify(numbers, size)
            await scene.delete(numbers)
            assert await scene.contains(numbers) == [False] * count

    @on_a_loop
    async def test_a_missing_key_keeps_the_positions_of_the_others_b72(self) -> None:
        """Whatever is missing, first, last or in between: each answer and row is its own key's."""
        kept = {0, 1, 3, 4, 8}
        async with self.scene() as scene:
            await scene.keep([*kept])
            for numbers in ([0, 1, 2, 3, 4], [7, 8], [4, 5, 6], [2], [6, 3, 2, 0], [5, 6, 7]):
                assert await scene.contains(numbers) == [number in kept for number in numbers]
                assert await scene.read(numbers) == [
                    READ if number in kept else MISSING for number in numbers
                ]

    @on_a_loop
    async def test_a_key_may_go_between_two_calls_b72(self) -> None:
        """What was there a moment ago is missing now, and that is an answer like any other."""
        async with self.scene() as scene:
            await scene.keep(range(5))
            assert await scene.contains(range(5)) == [True] * 5
            await scene.delete([2])
            assert await scene.read(range(5)) == [READ, READ, MISSING, READ, READ]
            await scene.verify([0, 1, 3, 4])

    @pytest.mark.parametrize(
        ("kept", "asked"), [(2, 1), (1, 2), (1, 65), (65, 1), (513, 512), (2, 513)]
    )
    @on_a_loop
    async def test_a_row_of_another_length_is_corrupt(self, kept: int, asked: int) -> None:
        """Longer or shorter than the buffer: not READ, and never written beyond it. The rows beside
        it are well, and the key is as good as new when it was deleted."""
        async with self.scene() as scene:
            await scene.keep([0, 2], asked * PAGE_BYTES)
            await scene.keep([1], kept * PAGE_BYTES)
            assert await scene.read([0, 1, 2], asked * PAGE_BYTES) == [READ, CORRUPT, READ]
            await scene.delete([1])
            await scene.keep([1], asked * PAGE_BYTES)
            await scene.verify([0, 1, 2], asked * PAGE_BYTES)

    @on_a_loop
    async def test_a_key_that_is_kept_can_be_written_again_b78(self) -> None:
        """It is left as it is, or written again: no failure, and whole in either case."""
        async with self.scene() as scene:
            await scene.keep([0, 1, 2])
            await scene.keep([1, 2, 3], version=1)
            rows = scene.buffers(4)
            assert await scene.read_into(range(4), rows) == [READ] * 4
            found = [scene.objects.version_of(row, at, 2) for at, row in enumerate(rows)]
            assert (found[0], found[3]) == (0, 1)
            assert None not in found

    @on_a_loop
    async def test_a_key_may_come_twice_in_a_batch(self) -> None:
        """Each of its places gets its answer."""
        async with self.scene() as scene:
            await scene.keep([5, 6, 5, 5])
            assert await scene.contains([5, 7, 5]) == [True, False, True]
            await scene.verify([5, 5, 6, 5])
            await scene.delete([5, 5])
            assert await scene.contains([5, 6]) == [False, True]

    @on_a_loop
    async def test_keys_are_any_bytes(self) -> None:
        """Zeros, slashes, dots, line ends, wildcards, letters that differ by case only: no two keys
        are one, and none is a path."""
        parts = [b"\0", b"\xff", b"/", b"../", b"*", b"?[!]", b"a", b"A", b"\r\n", b"%00", b"{}"]
        async with self.scene() as scene:
            ends = [(part * 32)[:32] for part in parts] + [bytes(31) + b"\1"]
            keys = [ObjectKey(scene.objects.scope + end) for end in ends]
            rows = scene.rows(range(len(keys)))
            for key, row in zip(keys, rows, strict=True):
                assert await scene.backend.contains([key]) == [False], key
                assert await scene.backend.write([key], [row]) == [WriteResult.WRITTEN]
            found = scene.buffers(len(keys))
            assert await scene.backend.read(keys, found) == [READ] * len(keys)
            assert found == rows
            await scene.backend.delete(keys[:1])
            assert await scene.backend.contains(keys) == [False] + [True] * (len(keys) - 1)

    # --- deleting ---------------------------------------------------------------------------------

    @on_a_loop
    async def test_what_is_deleted_is_gone(self) -> None:
        """Nothing else is; a key that is not there is fine, and so is a key twice."""
        async with self.scene() as scene:
            await scene.delete([])
            await scene.delete([0, 1])
            await scene.keep(range(4))
            await scene.delete([1, 9, 1, 2])
            await scene.delete([1])
            assert await scene.read(range(4)) == [READ, MISSING, MISSING, READ]
            assert await scene.write([1, 2]) == [WriteResult.WRITTEN] * 2
            await scene.verify(range(4))

    @on_a_loop
    async def test_clear_takes_one_scope_and_counts(self) -> None:
        """Whatever its bytes are: neighbours, what it would match as a pattern, and a key that only
        contains it are left."""
        async with self.scene() as scene:
            base = os.urandom(12)
            wild = base + b"*?[]"
            near = [base + b"*?[^", base + b"aa[]", b"\0" + base[1:] + b"*?[]", bytes(4) + base]
            everybody = [scene.other_objects(scope) for scope in (wild, *near)]
            for objects in everybody:
                rows = [objects.make(scene.arena.take(), number) for number in range(3)]
                results = await scene.backend.write(objects.keys(range(3)), rows)
                assert all(result in STORED for result in results)
            within = ObjectKey(near[-1] + wild + wild)
            await scene.backend.write([within], scene.rows([0]))
            assert await scene.backend.clear(wild) == 3
            for objects in everybody:
                kept = await scene.backend.contains(objects.keys(range(3)))
                assert kept == [objects.scope != wild] * 3, objects.scope
            assert await scene.backend.contains([within]) == [True]
            assert await scene.backend.clear(wild) == 0
            assert await scene.backend.clear(os.urandom(SCOPE_BYTES)) == 0
            assert await scene.backend.clear(near[-1]) == 4

    @on_a_loop
    async def test_a_scope_that_was_cleared_can_be_used_again(self) -> None:
        """At once."""
        async with self.scene() as scene:
            await scene.keep(range(3))
            assert await scene.clear() == 3
            assert await scene.read(range(3)) == [MISSING] * 3
            assert await scene.write(range(3)) == [WriteResult.WRITTEN] * 3
            await scene.verify(range(3))

    @needs("can_scan")
    @on_a_loop
    async def test_a_scan_names_every_object(self) -> None:
        """Of a scope each of its objects, once; of all scopes no less than ours."""
        async with self.scene() as scene:
            others = scene.other_objects()
            await scene.keep(range(40))
            other_key = others.key(0)
            await scene.backend.write([other_key], [others.make(scene.arena.take(), 0)])
            scanned = scene.backend.scan(scene.objects.scope)
            found = [info async for part in scanned for info in part]
            assert sorted(info.key for info in found) == sorted(scene.keys(range(40)))
            assert all(info.num_bytes > 0 for info in found)
            assert all(info.age_s is None or info.age_s >= 0 for info in found)
            everything = {info.key async for part in scene.backend.scan() for info in part}
            assert everything >= {*scene.keys(range(40)), other_key}
            unused = scene.backend.scan(os.urandom(SCOPE_BYTES))
            assert [info async for part in unused for info in part] == []

    @on_a_loop
    async def test_stats_are_there_at_once(self) -> None:
        """What a backend does not know is None; what it does is no less than we keep."""
        async with self.scene() as scene:
            await scene.keep(range(3))
            stats = scene.backend.stats()
            assert isinstance(stats, BackendStats), stats
            assert stats.num_objects is None or stats.num_objects >= 3
            assert stats.num_bytes is None or stats.num_bytes > 0
            assert stats.max_bytes is None or stats.max_bytes >= (stats.num_bytes or 0)

    # --- while bytes come -------------------------------------------------------------------------

    @on_a_loop
    async def test_what_is_said_to_have_arrived_is_there(self) -> None:
        """A backend need not say it. If it does, the bytes are the final ones, and the call has not
        ended yet."""
        size, numbers = MIB + PAGE_BYTES, range(4)
        async with self.scene() as scene:
            await scene.keep([0, 1, 3], size)
            wanted = scene.rows(numbers, size)
            rows = scene.buffers(4, size)
            wrong: list[str] = []
            has_ended = False

            def arrived(index: int, stop: int) -> None:
                if has_ended:
                    wrong.append(f"row {index}, after the call")
                elif not (0 <= index < 4 and 0 <= stop <= size):
                    wrong.append(f"row {index} up to {stop}, which does not exist")
                elif rows[index][:stop] != wanted[index][:stop]:
                    wrong.append(f"row {index} up to {stop}, which is not so")

            results = await scene.backend.read(scene.keys(numbers), rows, arrived)
            has_ended = True
            assert results == [READ, READ, MISSING, READ]
            await asyncio.sleep(0.02)
            assert not wrong, f"said to have arrived: {wrong[0]}"
            page_keys = [scene.objects.page_key(number) for number in (0, 1, 3)]
            again = scene.buffers(3, size)
            arrivals = Arrivals(scene.objects.record(size), again, page_keys)
            await scene.backend.read(scene.keys([0, 1, 3]), again, arrivals.arrived)
            assert arrivals.verdicts(range(3)) == [None] * 3

    # --- while bytes go ---------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [PAGE_BYTES, 64 * KIB, 256 * KIB, MIB + PAGE_BYTES])
    @on_a_loop
    async def test_rows_are_sealed_on_their_way(self, size: int) -> None:
        """A `SealingBackend` has each row that it keeps sealed, and keeps the header that this
        gives; any other is given sealed rows. A key may come twice, or be kept already."""
        numbers = [0, 1, 2, 1]
        async with self.scene() as scene:
            wrong: list[str] = []
            for _ in range(2):
                results = await scene.write_unsealed(
                    numbers, scene.rows(numbers, size), wrong=wrong
                )
                assert all(result in STORED for result in results), results
                await scene.verify(numbers, size)
            assert not wrong, wrong[0]

    @on_a_loop
    async def test_a_cancelled_write_seals_nothing_that_came_later(self) -> None:
        """When it has ended, the rows are the caller's again, their headers as well."""
        size = 320 * KIB
        async with self.scene() as scene:
            wrong: list[str] = []
            rows = scene.rows(range(4), size)
            duration = await _time(lambda: scene.write_unsealed(range(4), rows, wrong=wrong))
            end = 4
            for cancel in _moments(duration):
                numbers = range(end, end := end + 4)
                for number, row in zip(numbers, rows, strict=True):
                    scene.objects.make(row, number)
                await cancel(scene.write_unsealed(numbers, rows, wrong=wrong))
                for row in rows:
                    fill(row, SCRIBBLE)
                await asyncio.sleep(0.002)
                assert all(is_filled(row, SCRIBBLE) for row in rows), WROTE_LATER
            buffers = scene.buffers(4, size)
            for at in range(0, end, 4):
                results = await scene.read_into(range(at, at + 4), buffers)
                assert set(results) <= WHOLE_OR_NONE, results
            assert not wrong, wrong[0]

    # --- at the same time -------------------------------------------------------------------------

    @on_a_loop
    async def test_a_hundred_batches_at_once(self) -> None:
        """All of them succeed, each with its own rows, and readers do not mind writers."""
        async with self.scene() as scene:
            old = [range(number, number + 4) for number in range(0, 400, 4)]
            new = [range(number, number + 4) for number in range(1000, 1200, 4)]
            await asyncio.gather(*map(scene.keep, old))
            await asyncio.gather(*map(scene.verify, old), *map(scene.keep, new))
            await asyncio.gather(*map(scene.verify, new), *map(scene.delete, old))
            found = await asyncio.gather(*map(scene.contains, [*old, *new]))
            assert found == [[False] * 4] * 100 + [[True] * 4] * 50

    @on_a_loop
    async def test_a_reader_sees_whole_rows_while_they_are_written(self) -> None:
        """An old row, the new one, or none; never a part of one."""
        size = 256 * KIB
        async with self.scene() as scene:
            versions = [scene.row(0, size, version) for version in range(4)]
            keys, buffers = scene.keys([0]), scene.buffers(1, size)

            async def rewrite() -> None:
                for turn in range(40):
                    await scene.backend.write(keys, [versions[turn % 4]])
                    if turn % 4:
                        await scene.backend.delete(keys)

            writer = asyncio.create_task(rewrite())
            while not writer.done():
                (result,) = await scene.read_into([0], buffers)
                assert result in WHOLE_OR_NONE
                assert result is MISSING or buffers[0] in versions
                await asyncio.sleep(0)  # the answer may have been there at once
            await writer

    # --- cancelled --------------------------------------------------------------------------------

    @on_a_loop
    async def test_a_cancelled_read_leaves_its_buffers_alone(self) -> None:
        """When the call has ended its buffers are the caller's again, whenever it was cancelled;
        and the next reader does not get the answer that nobody has taken (B74)."""
        size, numbers = 256 * KIB, range(4)
        async with self.scene() as scene:
            await scene.keep(numbers, size)
            duration = await _time(lambda: scene.verify(numbers, size))
            scribbled: list[memoryview] = []
            for cancel in _moments(duration):
                rows = scene.buffers(4, size)
                await cancel(scene.backend.read(scene.keys(numbers), rows))
                for row in rows:
                    fill(row, SCRIBBLE)
                scribbled += rows
                await scene.verify([len(scribbled) // 4 % 4], size)
            await asyncio.sleep(max(0.05, 3 * duration))
            assert all(is_filled(row, SCRIBBLE) for row in scribbled), WROTE_LATER

    @on_a_loop
    async def test_a_cancelled_write_keeps_nothing_that_came_later(self) -> None:
        """What the caller writes to its rows when the call has ended is found under no key; and the
        keys can be written as if nothing had been."""
        size = 256 * KIB
        async with self.scene() as scene:
            duration = await _time(lambda: scene.keep(range(4), size))
            await scene.delete(range(4))
            end = 0
            for cancel in _moments(duration):
                numbers = range(end, end := end + 4)
                rows = scene.rows(numbers, size)
                await cancel(scene.backend.write(scene.keys(numbers), rows))
                for row in rows:
                    fill(row, SCRIBBLE)
            await asyncio.sleep(max(0.05, 3 * duration))
            buffers = scene.buffers(4, size)
            for at in range(0, end, 4):
                results = await scene.read_into(range(at, at + 4), buffers)
                assert set(results) <= WHOLE_OR_NONE, results
            await scene.delete(range(4))
            await scene.keep(range(8), size)
            await scene.verify(range(8), size)

    @pytest.mark.parametrize("is_read", [True, False], ids=["read", "write"])
    @on_a_loop
    async def test_a_cancelled_call_waits_for_its_threads(self, is_read: bool) -> None:
        """However often it is cancelled: while a thread is at work on its buffers, it goes on.

        Threads of `BackendContext.run` and of pools, such as that of `asyncio.to_thread`; whoever
        starts others may be found out by the tests above.
        """
        async with self.scene() as scene:
            await scene.keep(range(8), 64 * KIB)
            with scene.context.held():
                call, rows = self._call(scene, is_read)
                await _until(lambda: scene.context.num_running > 0 or call.done())
                has_threads = not call.done()
                for _ in range(3):
                    call.cancel()
                    await asyncio.sleep(0.005)
                    assert not call.done() or not scene.context.num_running, STILL_AT_WORK
            await asyncio.wait([call])
            assert call.cancelled() == has_threads, "who is cancelled raises CancelledError"
            await self._verify_after(scene, rows)

    @pytest.mark.parametrize("is_read", [True, False], ids=["read", "write"])
    @on_a_loop
    async def test_an_error_in_one_thread_waits_for_the_others(self, is_read: bool) -> None:
        """A call in one of whose threads there is an error ends when all of them have: with an
        error, or with an answer that is true."""
        async with self.scene() as scene:
            await scene.keep(range(8), 64 * KIB)
            with scene.context.held(first_fails=True):
                call, rows = self._call(scene, is_read)
                for _ in range(10):
                    await asyncio.sleep(0.005)
                    assert not call.done() or not scene.context.num_running, STILL_AT_WORK
            await asyncio.wait([call])
            assert not call.cancelled(), "an error in a thread is not a cancellation"
            if isinstance(error := call.exception(), AssertionError):
                raise error  # what was READ is not so; any other error will do
            await self._verify_after(scene, rows)

    def _call(
        self, scene: Scene, is_read: bool
    ) -> tuple[asyncio.Task[list[ReadResult]] | asyncio.Task[list[WriteResult]], list[memoryview]]:
        """A read of eight rows that are there, or a write of eight that are not; and its rows."""
        if is_read:
            rows = scene.buffers(8, 64 * KIB)
            return asyncio.create_task(scene.read_into(range(8), rows)), rows
        rows = scene.rows(range(8, 16), 64 * KIB)
        return asyncio.create_task(scene.backend.write(scene.keys(range(8, 16)), rows)), rows

    async def _verify_after(self, scene: Scene, rows: list[memoryview]) -> None:
        """The rows are the caller's; what was there is there, and what was not is whole or not."""
        for row in rows:
            fill(row, SCRIBBLE)
        await asyncio.sleep(0.02)
        assert all(is_filled(row, SCRIBBLE) for row in rows), WROTE_LATER
        await scene.verify(range(8), 64 * KIB)
        results = await scene.read(range(8, 16), 64 * KIB)
        assert set(results) <= WHOLE_OR_NONE, results
        await scene.keep(range(16), 64 * KIB)
        await scene.verify(range(16), 64 * KIB)

    @on_a_loop
    async def test_half_of_a_hundred_calls_are_cancelled_b76(self) -> None:
        """The other half does not notice, nor does who comes later."""
        size = 16 * KIB
        async with self.scene() as scene:
            await scene.keep(range(10), size)
            for turns in range(1, 11):
                calls = [asyncio.create_task(scene.verify([number], size)) for number in range(10)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                for call in calls[::2]:
                    call.cancel()
                await asyncio.wait(calls)
                for call in calls[1::2]:
                    await call

    @on_a_loop
    async def test_opening_can_be_cancelled(self) -> None:
        """Wherever it stands, no task is left of it; and the next one opens."""
        async with ThreadContext() as context:
            for turns in range(50):
                opening = asyncio.create_task(self.open(context))
                for _ in range(turns):
                    await asyncio.sleep(0)
                opening.cancel()
                await asyncio.wait([opening])
                if not opening.cancelled():
                    await opening.result().aclose()
                    break
        async with self.scene() as scene:
            await scene.keep([0])
            await scene.verify([0])

    # --- corrupt where it is kept -----------------------------------------------------------------

    async def _tamper(self, scene: Scene, number: int, change: Callable[[bytes], bytes]) -> None:
        await asyncio.to_thread(self.tamper, scene.objects.key(number), change)

    @needs("tamper")
    @on_a_loop
    async def test_a_changed_byte_is_found(self) -> None:
        """By the backend, or by the check of what it has read; what stands beside it is well."""
        size = 16 * KIB
        places = {1: 0, 2: 40, 3: 600, 4: size - 1}
        async with self.scene() as scene:
            await scene.keep(range(6), size)
            for number, at in places.items():
                await self._tamper(scene, number, _flipped(at))
            rows = scene.buffers(6, size)
            results = await scene.backend.read(scene.keys(range(6)), rows)
            for number, row in enumerate(rows):
                is_right = results[number] is READ and scene.objects.fault(row, number) is None
                assert is_right == (number not in places), f"row {number} was {results[number]}"

    @needs("tamper")
    @pytest.mark.parametrize("length", [0, 1, 511, 8191, 8193, 16384])
    @on_a_loop
    async def test_an_object_of_another_length_is_not_read_b64_b79(self, length: int) -> None:
        """Empty, cut or too long: no error, the others are well, and the key can be used again."""
        size = 8 * KIB
        async with self.scene() as scene:
            await scene.keep(range(3), size)
            await self._tamper(scene, 1, lambda kept: (kept + kept)[:length])
            results = await scene.read(range(3), size)
            assert results[1] is not READ
            assert [results[0], results[2]] == [READ, READ]
            await scene.delete([1])
            await scene.keep([1], size)
            await scene.verify(range(3), size)

    # --- opened again -----------------------------------------------------------------------------

    @needs("persists")
    @on_a_loop
    async def test_what_is_kept_is_there_after_a_restart(self) -> None:
        """And nothing else; twice."""
        async with self.scene() as scene:
            await scene.keep(range(20), 8 * KIB)
            await scene.keep([20], 2 * MIB)
            await scene.delete([3, 4])
            await self._restart(scene)
            there = [number not in (3, 4, 21) for number in range(22)]
            assert await scene.contains(range(22)) == there
            await scene.verify([0, 1, 2, *range(5, 20)], 8 * KIB)
            await scene.keep([3], 8 * KIB)
            await self._restart(scene)
            await scene.verify([3, 5], 8 * KIB)
            await scene.verify([20], 2 * MIB)

    @needs("persists")
    @on_a_loop
    async def test_a_restart_forgets_no_scope(self) -> None:
        """What was kept before can be cleared after, and is counted."""
        async with self.scene() as scene:
            others = scene.other_objects()
            await scene.keep(range(5))
            row = others.make(scene.arena.take(), 0)
            await scene.backend.write([others.key(0)], [row])
            await self._restart(scene)
            await scene.keep([5])
            assert await scene.clear() == 6
            assert await scene.backend.contains([others.key(0)]) == [True]
            await self._restart(scene)
            assert await scene.contains(range(6)) == [False] * 6

    # --- two at once ------------------------------------------------------------------------------

    @needs("shared")
    @on_a_loop
    async def test_two_write_the_same_rows_b78(self) -> None:
        """Which of them was first does not matter: neither fails, and both read all."""
        async with self.scene() as one, self._second(one) as two:
            for start in range(0, 136, 34):
                numbers = range(start, start + 34)
                await asyncio.gather(one.keep(numbers), two.keep(numbers[::-1]))
                await asyncio.gather(one.verify(numbers), two.verify(numbers))

    @needs("shared")
    @on_a_loop
    async def test_one_sees_what_the_other_has_done(self) -> None:
        """What one has written the other reads; what one has deleted neither does."""
        async with self.scene() as one, self._second(one) as two:
            await one.keep(range(4))
            assert await two.contains(range(5)) == [True] * 4 + [False]
            await two.verify(range(4))
            await two.delete([1])
            assert await one.read(range(4)) == [READ, MISSING, READ, READ]
            await one.keep([1])
            await two.verify([1])
            assert await two.clear() == 4
            assert await one.read(range(4)) == [MISSING] * 4

    @needs("shared")
    @on_a_loop
    async def test_one_may_delete_what_the_other_reads_b70(self) -> None:
        """Whole rows or none, and no error, whatever comes in between."""
        size, numbers = 64 * KIB, range(8)
        async with self.scene() as one, self._second(one) as two:
            keys, rows, buffers = one.keys(numbers), one.rows(numbers, size), two.buffers(8, size)
            for _ in range(12):
                await one.backend.write(keys, rows)
                results, _ = await asyncio.gather(
                    two.read_into(numbers, buffers), one.delete(numbers)
                )
                assert set(results) <= WHOLE_OR_NONE, results

    # --- its end ----------------------------------------------------------------------------------

    @on_a_loop
    async def test_nothing_is_left_after_the_close_i6(self) -> None:
        """No task, thread or file descriptor, after the first use as after the sixth."""
        await self._use()  # what a library keeps for good, it has by now
        before = await asyncio.to_thread(_held)
        for _ in range(5):
            await self._use()
        after = await asyncio.to_thread(_held)
        if after > before:  # a thread may need a moment
            await asyncio.sleep(0.5)
            after = await asyncio.to_thread(_held)
        assert after <= before, f"threads, and file descriptors: {before}, then {after}"

    async def _use(self) -> None:
        async with self.scene(4 * MIB) as scene:
            await scene.keep(range(8))
            await asyncio.gather(*(scene.verify([number]) for number in range(8)))
            call = asyncio.create_task(scene.verify(range(8)))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])

    @on_a_loop
    async def test_closing_is_idempotent(self) -> None:
        """Also when nothing was done."""
        async with ThreadContext() as context:
            backend = await self.open(context)
            await backend.aclose()
            await backend.aclose()

    @on_a_loop
    async def test_nothing_blocks_the_loop(self) -> None:
        """Files are opened, renamed, listed and removed in threads, and nobody sleeps.

        What the interpreter reports to audit hooks, that is; reads and writes are not among it.
        """
        async with self.scene() as scene:
            with Blocking() as blocking:
                await scene.keep(range(8), 64 * KIB)
                await scene.contains(range(9))
                await scene.verify(range(8), 64 * KIB)
                await scene.delete([1, 9])
                await scene.clear()
                scene.backend.stats()
            assert not blocking.seen, f"on the event loop: {blocking.seen[:5]}"

    # --- against a dictionary ---------------------------------------------------------------------

    @needs("hypothesis")
    def test_it_does_what_a_dictionary_does(self) -> None:
        """Any calls in any order, in two scopes, with keys that repeat."""
        import hypothesis
        from hypothesis import strategies as st

        step = st.tuples(
            st.sampled_from(["write", "write", "read", "contains", "delete", "clear"]),
            st.lists(st.integers(0, 5), max_size=6),
            st.integers(0, Model.NUM_VERSIONS - 1),
        )

        phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)  # to explain takes a minute

        @hypothesis.settings(
            max_examples=40, deadline=None, database=None, phases=phases, report_multiple_bugs=False
        )
        @hypothesis.given(st.lists(step, min_size=3, max_size=15))
        def follow(steps: list[tuple[str, list[int], int]]) -> None:
            self.run(self._follow(steps))

        follow()

    async def _follow(self, steps: list[tuple[str, list[int], int]]) -> None:
        async with self.scene(4 * MIB) as scene:
            model = Model(scene)
            for name, numbers, version in steps:
                await getattr(model, name)(numbers, version)
            await model.read(list(range(6)), 0)


# --- helpers --------------------------------------------------------------------------------------


async def _time(work: Callable[[], Coroutine[Any, Any, object]]) -> float:
    """Seconds, at the second go."""
    await work()
    before = time.perf_counter()
    await work()
    return time.perf_counter() - before


def _moments(
    duration: float,
) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, object]]]:
    """Ways to cancel a call that takes so long: after some turns of the loop, after some time.

    Each begins the call, cancels it, and returns when it has ended, by whatever end.
    """

    def cancelling(turns: int, seconds: float) -> Callable[..., Coroutine[Any, Any, None]]:
        async def cancel(call: Coroutine[Any, Any, Any]) -> None:
            task = asyncio.create_task(call)
            for _ in range(turns):
                await asyncio.sleep(0)
            if seconds:
                await asyncio.sleep(seconds)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()  # it was done before, and has an answer

        return cancel

    for turns in range(1, 9):
        yield cancelling(turns, 0.0)
    for part in range(1, 17):
        yield cancelling(1, duration * part / 16)


async def _until(is_true: Callable[[], bool]) -> None:
    """Let the loop and other threads go on until it is so. The test's own limit ends it."""
    while not is_true():  # noqa: ASYNC110 - there is no event: others' threads do it
        await asyncio.sleep(0.001)


def _flipped(at: int) -> Callable[[bytes], bytes]:
    """One bit of this byte, or of the last, is wrong."""

    def change(kept: bytes) -> bytes:
        changed = bytearray(kept)
        changed[min(at, len(kept) - 1)] ^= 1
        return bytes(changed)

    return change


def _held() -> tuple[int, int]:
    """How many threads and file descriptors there are."""
    try:
        num_fds = len(os.listdir("/proc/self/fd"))
    except OSError:  # not on this system
        num_fds = 0
    return threading.active_count(), num_fds
