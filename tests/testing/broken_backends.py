"""Backends with one mistake each, as their authors make them, and which test must find it.

`Threaded` is a sound one that works in threads; most are made from it or from the reference.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fnmatch
import os
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from tiered_cache.storage import (
    BackendContext,
    BackendStats,
    ObjectKey,
    ReadResult,
    SealingBackend,
    WriteResult,
)
from tiered_cache.storage.backend import sealed_already
from tiered_cache_memory import Kept, MemoryBackend, MemoryOptions


class Mistake(NamedTuple):
    backend: type[MemoryBackend]
    test: str
    words: str
    """What the failure says, as a pattern."""
    args: tuple[Any, ...] = ()


MISTAKES: list[Mistake] = []


def found_by(test: str, words: str, *args: Any) -> Any:
    """For a class: this test must fail for it, in these words."""

    def add(backend: type[MemoryBackend]) -> type[MemoryBackend]:
        MISTAKES.append(Mistake(backend, test, words, args))
        return backend

    return add


# --- sound ----------------------------------------------------------------------------------------


class Threaded(MemoryBackend):
    """Rows are copied in threads, a part of the batch in each."""

    def __init__(self, context: BackendContext, kept: Kept) -> None:
        super().__init__(kept=kept)
        self._context = context
        self._writes = threading.Lock()

    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        return await self._in_parts(self._read, keys, rows)

    async def write(self, keys: Any, rows: Any) -> list[WriteResult]:
        return await self._in_parts(self._locked_write, keys, rows)

    def _locked_write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        with self._writes:
            return self._write(key, row)

    async def _in_parts(self, fn: Any, keys: Any, rows: Any) -> list[Any]:
        def work(part: list[Any]) -> list[Any]:
            return [fn(*of) for of in part]

        pairs = list(zip(keys, rows, strict=True))
        step = -(-len(pairs) // self._context.num_threads) or 1
        parts = [pairs[at : at + step] for at in range(0, len(pairs), step)]
        return [one for of in await self._gather(work, parts) for one in of]

    async def _gather(self, work: Any, parts: list[Any]) -> list[Any]:
        calls = [asyncio.ensure_future(self._context.run(work, part)) for part in parts]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


# --- answers --------------------------------------------------------------------------------------


@found_by("test_a_missing_key_keeps_the_positions_of_the_others_b72", "4 answers to 5 keys")
class LeavesOutTheMissing(MemoryBackend):
    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        results = await super().read(keys, rows)
        return [result for result in results if result is not ReadResult.MISSING]


@found_by("test_a_missing_key_keeps_the_positions_of_the_others_b72", "READ of a row that")
class ShiftsTheFound(MemoryBackend):
    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        results = await super().read(keys, rows)
        found = [bytes(row) for row, r in zip(rows, results, strict=True) if r is ReadResult.READ]
        for row, value in zip(rows, found, strict=False):
            row[:] = value
        return results


@found_by("test_a_key_may_go_between_two_calls_b72", "KeyError")
class RaisesForTheMissing(MemoryBackend):
    def _read(self, key: ObjectKey, row: memoryview) -> ReadResult:
        row[:] = self._kept.rows[key]
        return ReadResult.READ


@found_by("test_batches_of_all_sizes_come_back", "a list is the answer", 1, 4096)
class AnswersWithATuple(MemoryBackend):
    async def contains(self, keys: Any) -> Any:
        return tuple(await super().contains(keys))


@found_by("test_batches_of_all_sizes_come_back", "answers are of bool", 1, 4096)
class AnswersWithCounts(MemoryBackend):
    async def contains(self, keys: Any) -> Any:
        return [list(self._kept.rows).count(key) for key in keys]


@found_by("test_batches_of_all_sizes_come_back", "not enough", 0, 4096)
class FailsForNothing(MemoryBackend):
    async def contains(self, keys: Any) -> list[bool]:
        if not keys:
            raise ValueError("not enough keys")
        return await super().contains(keys)


@found_by("test_batches_of_all_sizes_come_back", "too many", 1100, 4096)
class FailsForMany(MemoryBackend):
    async def write(self, keys: Any, rows: Any) -> list[WriteResult]:
        if len(keys) > os.sysconf("SC_IOV_MAX"):
            raise OSError("too many buffers")
        return await super().write(keys, rows)


@found_by("test_batches_of_all_sizes_come_back", "not all were read|READ of a row", 5, 2101248)
class ReadsShort(MemoryBackend):
    """A system call that gives 2 MiB at most, and nobody asks for the rest."""

    def _read(self, key: ObjectKey, row: memoryview) -> ReadResult:
        if key not in self._kept.rows:
            return ReadResult.MISSING
        row[: 2 << 20] = self._kept.rows[key][: 2 << 20]
        return ReadResult.READ


@found_by("test_a_row_of_another_length_is_corrupt", "READ of a row", 2, 1)
class ReadsWhatFits(MemoryBackend):
    def _read(self, key: ObjectKey, row: memoryview) -> ReadResult:
        if key not in self._kept.rows:
            return ReadResult.MISSING
        kept = self._kept.rows[key][: len(row)]
        row[: len(kept)] = kept
        return ReadResult.READ


@found_by("test_a_row_of_another_length_is_corrupt", "beyond the end", 2, 1)
class WritesBeyondTheEnd(MemoryBackend):
    async def register_memory(self, view: memoryview) -> None:
        self._memory = np.frombuffer(view, np.uint8)

    def _read(self, key: ObjectKey, row: memoryview) -> ReadResult:
        kept = self._kept.rows.get(key, b"")
        start = np.frombuffer(row, np.uint8).ctypes.data - self._memory.ctypes.data
        self._memory[start : start + len(kept)] = np.frombuffer(kept, np.uint8)
        return super()._read(key, row)


@found_by("test_a_row_of_another_length_is_corrupt", "MISSING|EXISTS|not all", 1, 2)
class NeverForgetsTheCorrupt(MemoryBackend):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._corrupt: set[ObjectKey] = set()

    def _read(self, key: ObjectKey, row: memoryview) -> ReadResult:
        result = super()._read(key, row)
        if result is ReadResult.CORRUPT:
            self._corrupt.add(key)
        return ReadResult.CORRUPT if key in self._corrupt else result


@found_by("test_a_key_that_is_kept_can_be_written_again_b78", "not all were written")
class TakesExistsForAFailure(MemoryBackend):
    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        result = super()._write(key, row)
        return WriteResult.FAILED if result is WriteResult.EXISTS else result


@found_by("test_a_key_that_is_kept_can_be_written_again_b78", "READ of a row")
class MixesOldAndNew(MemoryBackend):
    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        old = self._kept.rows.get(key, bytes(row))
        self._kept.rows[key] = old[:600] + bytes(row[600:])
        return WriteResult.WRITTEN


@found_by("test_a_key_may_come_twice_in_a_batch", "nobody has written to|not all were read")
class AsksForEachKeyOnce(MemoryBackend):
    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        once = dict(zip(keys, rows, strict=True))
        found = dict(zip(once, await super().read([*once], [*once.values()]), strict=True))
        return [found[key] for key in keys]


@found_by("test_keys_are_any_bytes", "")
class TakesKeysForText(MemoryBackend):
    async def contains(self, keys: Any) -> list[bool]:
        text = {key.decode("latin-1").casefold() for key in self._kept.rows}
        return [key.decode("latin-1").casefold() in text for key in keys]


@found_by("test_keys_are_any_bytes", "")
class CutsKeys(MemoryBackend):
    async def contains(self, keys: Any) -> list[bool]:
        return [any(key[:47] == kept[:47] for kept in self._kept.rows) for key in keys]


@found_by("test_batches_of_all_sizes_come_back", "changed the caller's row", 1, 4096)
class WritesToWhatItIsGiven(MemoryBackend):
    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        result = super()._write(key, row)
        row[100] ^= 1
        return result


@found_by("test_batches_of_all_sizes_come_back", "scene.write", 1, 4096)
class RefusesWithoutNeed(MemoryBackend):
    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        return WriteResult.REFUSED


# --- deleting -------------------------------------------------------------------------------------


@found_by("test_what_is_deleted_is_gone", "KeyError")
class DeletesOnlyWhatIsThere(MemoryBackend):
    async def delete(self, keys: Any) -> None:
        for key in keys:
            del self._kept.rows[key]


@found_by("test_what_is_deleted_is_gone", "READ, MISSING, MISSING, READ")
@found_by("test_it_does_what_a_dictionary_does", "")
class DeletesTheFirst(MemoryBackend):
    async def delete(self, keys: Any) -> None:
        await super().delete(keys[:1])


@found_by("test_clear_takes_one_scope_and_counts", "")
class ClearsEverything(MemoryBackend):
    async def clear(self, scope: bytes) -> int:
        return await super().clear(b"")


@found_by("test_clear_takes_one_scope_and_counts", "")
class ClearsByPattern(MemoryBackend):
    async def clear(self, scope: bytes) -> int:
        pattern = scope.decode("latin-1") + "*"
        keys = [
            key for key in self._kept.rows if fnmatch.fnmatchcase(key.decode("latin-1"), pattern)
        ]
        await self.delete(keys)
        return len(keys)


@found_by("test_clear_takes_one_scope_and_counts", "")
class ClearsWhatContainsTheScope(MemoryBackend):
    async def clear(self, scope: bytes) -> int:
        keys = [key for key in self._kept.rows if scope in key]
        await self.delete(keys)
        return len(keys)


@found_by("test_a_scope_that_was_cleared_can_be_used_again", "")
class DoesNotCount(MemoryBackend):
    async def clear(self, scope: bytes) -> int:
        await super().clear(scope)
        return 0


@found_by("test_a_scope_that_was_cleared_can_be_used_again", "scene.write")
class RemembersWhatItCleared(MemoryBackend):
    async def clear(self, scope: bytes) -> int:
        self._cleared = [key for key in self._kept.rows if key.startswith(scope)]
        return await super().clear(scope)

    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        result = super()._write(key, row)
        return WriteResult.EXISTS if key in getattr(self, "_cleared", ()) else result


@found_by("test_a_scan_names_every_object", "")
class ScansTwice(MemoryBackend):
    async def scan(self, scope: bytes | None = None) -> Any:
        for _ in range(2):
            async for part in super().scan(scope):
                yield part


@found_by("test_a_scan_names_every_object", "")
class ScansEverything(MemoryBackend):
    async def scan(self, scope: bytes | None = None) -> Any:
        async for part in super().scan():
            yield part


@found_by("test_stats_are_there_at_once", "")
class CountsWrong(MemoryBackend):
    def stats(self) -> BackendStats:
        return BackendStats(num_objects=0)


# --- while bytes come -----------------------------------------------------------------------------


@found_by("test_what_is_said_to_have_arrived_is_there", "which is not so")
class SaysItBefore(MemoryBackend):
    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        if arrived is not None:
            for index, row in enumerate(rows):
                arrived(index, len(row))
        return await super().read(keys, rows)


@found_by("test_what_is_said_to_have_arrived_is_there", "after the call")
class SaysItAfterwards(MemoryBackend):
    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        if arrived is not None:
            asyncio.get_running_loop().call_soon(arrived, 0, len(rows[0]))
        return await super().read(keys, rows)


@found_by("test_what_is_said_to_have_arrived_is_there", "which is not so")
class SaysItOfTheNext(MemoryBackend):
    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        results = []
        for index, of in enumerate(zip(keys, rows, strict=True)):
            results.append(self._read(*of))
            if arrived is not None and index + 1 < len(rows):
                arrived(index + 1, len(of[1]))
        return results


# --- at the same time -----------------------------------------------------------------------------


@found_by("test_a_hundred_batches_at_once", "READ of a row|not all were read|answers to")
class KeepsACallInItself(MemoryBackend):
    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        self._asked = keys
        await asyncio.sleep(0)
        return await super().read(self._asked, rows)


@found_by("test_a_hundred_batches_at_once", "too many connections")
class HasNoMoreConnections(MemoryBackend):
    _num_used = 0

    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        if self._num_used == 50:
            raise ConnectionError("too many connections")
        self._num_used += 1
        await asyncio.sleep(0)
        self._num_used -= 1
        return await super().read(keys, rows)


@found_by("test_a_reader_sees_whole_rows_while_they_are_written", "READ of a row|CORRUPT")
class WritesInPlace(MemoryBackend):
    async def write(self, keys: Any, rows: Any) -> list[WriteResult]:
        for key, row in zip(keys, rows, strict=True):
            half = len(row) // 2
            self._kept.rows[key] = bytes(row[:half]) + bytes(half)
            await asyncio.sleep(0)
            self._kept.rows[key] = bytes(row)
        return [WriteResult.WRITTEN] * len(keys)


@found_by("test_a_reader_sees_whole_rows_while_they_are_written", "WHOLE_OR_NONE|CORRUPT")
class GrowsInPlace(MemoryBackend):
    async def write(self, keys: Any, rows: Any) -> list[WriteResult]:
        for key, row in zip(keys, rows, strict=True):
            for stop in range(0, len(row) + 1, len(row) // 4):
                self._kept.rows[key] = bytes(row[:stop])
                await asyncio.sleep(0)
        return [WriteResult.WRITTEN] * len(keys)


class Pool(concurrent.futures.ThreadPoolExecutor):
    def close(self) -> None:
        self.shutdown(wait=False)


# --- cancelled ------------------------------------------------------------------------------------


def slowly(fn: Any, keys: Any, rows: Any) -> list[Any]:
    """For a thread: each row takes a millisecond."""
    results = []
    for of in zip(keys, rows, strict=True):
        time.sleep(0.001)
        results.append(fn(*of))
    return results


@found_by("test_a_cancelled_read_leaves_its_buffers_alone", "after the call had ended")
class LeavesAThreadReading(MemoryBackend):
    """`to_thread` ends when it is cancelled, the thread does not."""

    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        return await asyncio.to_thread(slowly, self._read, keys, rows)


@found_by("test_a_cancelled_write_keeps_nothing_that_came_later", "READ of a row")
class LeavesAThreadWriting(MemoryBackend):
    async def write(self, keys: Any, rows: Any) -> list[WriteResult]:
        return await asyncio.to_thread(slowly, self._write, keys, rows)


@found_by("test_a_cancelled_write_keeps_nothing_that_came_later", "READ of a row")
class KeepsTheCallersRow(MemoryBackend):
    """Without a copy."""

    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        self._kept.rows[key] = row  # type: ignore[assignment]
        return WriteResult.WRITTEN


@found_by("test_a_cancelled_write_keeps_nothing_that_came_later", "READ of a row")
class WritesBehind(MemoryBackend):
    """What is answered now is written later."""

    async def write(self, keys: Any, rows: Any) -> list[WriteResult]:
        new = [key not in self._kept.rows for key in keys]
        work = super().write
        asyncio.get_running_loop().call_later(
            0.003, lambda: asyncio.ensure_future(work(keys, rows))
        )
        return [WriteResult.WRITTEN if is_new else WriteResult.EXISTS for is_new in new]


@found_by("test_a_cancelled_write_keeps_nothing_that_came_later", "WHOLE_OR_NONE|CORRUPT")
class LeavesHalfOfARow(MemoryBackend):
    async def write(self, keys: Any, rows: Any) -> list[WriteResult]:
        for key, row in zip(keys, rows, strict=True):
            self._kept.rows[key] = bytes(row[: len(row) // 2])
            await asyncio.sleep(0.0005)
            self._kept.rows[key] = bytes(row)
        return [WriteResult.WRITTEN] * len(keys)


@found_by("test_a_cancelled_read_leaves_its_buffers_alone", "is another page")
class LeavesAnAnswerBehind(MemoryBackend):
    """One connection: who is cancelled between question and answer leaves the answer on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answers: asyncio.Queue[list[bytes]] = asyncio.Queue()

    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        answer = [self._kept.rows[key] for key in keys]
        asyncio.get_running_loop().call_later(0.002, self._answers.put_nowait, answer)
        for row, value in zip(rows, await self._answers.get(), strict=False):
            row[:] = value
        return [ReadResult.READ] * len(keys)


@found_by("test_a_cancelled_call_waits_for_its_threads", "still at work", True)
@found_by("test_a_cancelled_call_waits_for_its_threads", "still at work", False)
class DoesNotWaitForThreads(Threaded):
    async def _gather(self, work: Any, parts: list[Any]) -> list[Any]:
        calls = [asyncio.ensure_future(self._context.run(work, part)) for part in parts]
        return await asyncio.shield(asyncio.gather(*calls))


@found_by("test_a_cancelled_call_waits_for_its_threads", "still at work", True)
@found_by("test_a_cancelled_call_waits_for_its_threads", "still at work", False)
class UsesToThread(Threaded):
    """It is cancelled, the thread is not."""

    async def _gather(self, work: Any, parts: list[Any]) -> list[Any]:
        return [await asyncio.to_thread(work, part) for part in parts]


@found_by("test_a_cancelled_call_waits_for_its_threads", "still at work", True)
@found_by("test_an_error_in_one_thread_waits_for_the_others", "still at work", True)
class HasAPoolOfItsOwn(Threaded):
    async def _gather(self, work: Any, parts: list[Any]) -> list[Any]:
        loop = asyncio.get_running_loop()
        with contextlib.closing(Pool(4)) as pool:
            jobs = [loop.run_in_executor(pool, work, part) for part in parts]
            return await asyncio.gather(*jobs)


@found_by("test_a_cancelled_call_waits_for_its_threads", "raises CancelledError", True)
class TakesACancellationForAMiss(Threaded):
    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        try:
            return await super().read(keys, rows)
        except asyncio.CancelledError:
            return [ReadResult.MISSING] * len(keys)


@found_by("test_an_error_in_one_thread_waits_for_the_others", "still at work", True)
@found_by("test_an_error_in_one_thread_waits_for_the_others", "still at work", False)
class GathersCarelessly(Threaded):
    """`gather` raises the first error at once, and the others go on."""

    async def _gather(self, work: Any, parts: list[Any]) -> list[Any]:
        return await asyncio.gather(*(self._context.run(work, part) for part in parts))


@found_by("test_an_error_in_one_thread_waits_for_the_others", "READ of a row", True)
class TakesAnErrorForARow(Threaded):
    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        try:
            return await super().read(keys, rows)
        except OSError:
            return [ReadResult.READ] * len(keys)


@found_by("test_half_of_a_hundred_calls_are_cancelled_b76", "no end after")
class LosesAPlaceWhenCancelled(MemoryBackend):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = asyncio.Semaphore(4)

    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        await self._places.acquire()
        for _ in range(4):
            await asyncio.sleep(0)
        self._places.release()
        return await super().read(keys, rows)


@found_by("test_opening_can_be_cancelled", "tasks are left")
class LeavesATaskOfItsOpening(MemoryBackend):
    @classmethod
    async def open(cls, options: MemoryOptions, context: BackendContext) -> Any:
        backend = cls()
        backend._task = asyncio.ensure_future(asyncio.sleep(60))  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return backend

    async def aclose(self) -> None:
        if hasattr(self, "_task"):
            self._task.cancel()
            await asyncio.wait([self._task])


# --- where it is kept -----------------------------------------------------------------------------


@found_by("test_a_changed_byte_is_found", "row 0 was")
class GivesUpTheBatch(MemoryBackend):
    """One row does not match a checksum of its own, and none is read."""

    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        self.__dict__.setdefault("_sums", {})[key] = hash(bytes(row))
        return super()._write(key, row)

    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        results = await super().read(keys, rows)
        sums = [hash(bytes(row)) for row in rows]
        if sums != [self._sums[key] for key in keys]:
            return [ReadResult.CORRUPT] * len(keys)
        return results


@found_by("test_an_object_of_another_length_is_not_read_b64_b79", "length", 511)
class RaisesForTheTruncated(MemoryBackend):
    def _read(self, key: ObjectKey, row: memoryview) -> ReadResult:
        result = super()._read(key, row)
        if result is ReadResult.CORRUPT:
            raise ValueError("unexpected length")
        return result


@found_by("test_an_object_of_another_length_is_not_read_b64_b79", "not all were written", 0)
class CannotReplaceTheEmpty(MemoryBackend):
    """It is absent by its length, and there by its name."""

    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        if self._kept.rows.get(key) == b"":
            return WriteResult.FAILED
        return super()._write(key, row)

    async def delete(self, keys: Any) -> None:
        await super().delete([key for key in keys if self._kept.rows.get(key)])


# --- opened again, two at once --------------------------------------------------------------------


@found_by("test_what_is_kept_is_there_after_a_restart", "")
class ForgetsAtRestart(MemoryBackend):
    async def aclose(self) -> None:
        self._kept.rows.clear()


class Seals(Threaded, SealingBackend):
    """A sound one, too: the header is read when it is there."""

    async def write(self, keys: Any, rows: Any, seal: Any = sealed_already) -> list[WriteResult]:
        def write(index: int) -> WriteResult:
            return self._sealed_write(index, keys[index], rows[index], seal)

        return await self._in_parts(lambda index, _: write(index), range(len(keys)), keys)

    def _sealed_write(self, index: int, key: Any, row: Any, seal: Any) -> WriteResult:
        for stop in range(4096, len(row) + 4096, 4096):
            seal(index, min(stop, len(row)))
        return self._locked_write(key, row)


@found_by("test_rows_are_sealed_on_their_way", "READ of a row that is not a row", 4096)
class NeverSeals(Seals):
    def _sealed_write(self, index: int, key: Any, row: Any, seal: Any) -> WriteResult:
        return self._locked_write(key, row)


@found_by("test_rows_are_sealed_on_their_way", "READ of a row that does not match", 65536)
class ReadsTheHeaderFirst(Seals):
    def _sealed_write(self, index: int, key: Any, row: Any, seal: Any) -> WriteResult:
        seal(index, 4096)
        early = memoryview(bytes(row))
        seal(index, len(row))
        return self._locked_write(key, early)


@found_by("test_rows_are_sealed_on_their_way", "is sealed up to 4096 after 65536", 65536)
class SealsFromTheEnd(Seals):
    def _sealed_write(self, index: int, key: Any, row: Any, seal: Any) -> WriteResult:
        seal(index, len(row))
        seal(index, 4096)
        return self._locked_write(key, row)


@found_by("test_a_cancelled_write_seals_nothing_that_came_later", "")
class SealsWhenTheCallHasEnded(Seals):
    async def _gather(self, work: Any, parts: list[Any]) -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(work, part) for part in parts))

    def _sealed_write(self, index: int, key: Any, row: Any, seal: Any) -> WriteResult:
        time.sleep(0.002)
        return super()._sealed_write(index, key, row, seal)


@found_by("test_a_restart_forgets_no_scope", "")
class CountsOnlyItsOwn(MemoryBackend):
    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        self.__dict__.setdefault("_own", set()).add(key)
        return super()._write(key, row)

    async def clear(self, scope: bytes) -> int:
        own = [key for key in self.__dict__.get("_own", ()) if key.startswith(scope)]
        await self.delete(own)
        return len(own)


@found_by("test_two_write_the_same_rows_b78", "not all were written")
class FailsWhenItIsSecond(MemoryBackend):
    async def write(self, keys: Any, rows: Any) -> list[WriteResult]:
        new = [key not in self._kept.rows for key in keys]
        await asyncio.sleep(0)
        results = await super().write(keys, rows)
        raced = [a and r is WriteResult.EXISTS for a, r in zip(new, results, strict=True)]
        return [WriteResult.FAILED if bad else WriteResult.WRITTEN for bad in raced]


@found_by("test_one_sees_what_the_other_has_done", "")
class RemembersWhatIsMissing(MemoryBackend):
    async def contains(self, keys: Any) -> list[bool]:
        memo = self.__dict__.setdefault("_memo", {})
        for key, found in zip(keys, await super().contains(keys), strict=True):
            memo.setdefault(key, found)
        return [memo[key] for key in keys]

    def _read(self, key: ObjectKey, row: memoryview) -> ReadResult:
        memo = self.__dict__.setdefault("_rows", {})
        memo[key] = memo.get(key) or self._kept.rows.get(key)
        if memo[key] is None:
            return ReadResult.MISSING
        row[:] = memo[key]
        return ReadResult.READ


@found_by("test_one_may_delete_what_the_other_reads_b70", "KeyError")
class LooksTwice(MemoryBackend):
    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> list[ReadResult]:
        there = await self.contains(keys)
        await asyncio.sleep(0)
        for key, row, found in zip(keys, rows, there, strict=True):
            if found:
                row[:] = self._kept.rows[key]
        return [ReadResult.READ if found else ReadResult.MISSING for found in there]


# --- its end --------------------------------------------------------------------------------------


class Opened(MemoryBackend):
    """Counts on being closed."""

    @classmethod
    async def open(cls, options: MemoryOptions, context: BackendContext) -> Any:
        backend = cls()
        backend._begin()
        return backend

    def _begin(self) -> None:
        raise NotImplementedError


STOPPED = threading.Event()
"""Ends the threads that are left, when the test has found them."""

LEFT_FDS: list[int] = []


@found_by("test_nothing_is_left_after_the_close_i6", "threads, and file descriptors")
class LeavesAThread(Opened):
    def _begin(self) -> None:
        threading.Thread(target=STOPPED.wait, args=(10,), daemon=True).start()


@found_by("test_nothing_is_left_after_the_close_i6", "threads, and file descriptors")
class LeavesAFile(Opened):
    def _begin(self) -> None:
        LEFT_FDS.append(os.dup(0))


@found_by("test_nothing_is_left_after_the_close_i6", "tasks are left")
class LeavesATask(Opened):
    def _begin(self) -> None:
        self._task = asyncio.ensure_future(asyncio.sleep(60))


@found_by("test_closing_is_idempotent", "no attribute '_task'")
class ClosesOnce(Opened):
    def _begin(self) -> None:
        self._task = None

    async def aclose(self) -> None:
        del self._task


@found_by("test_nothing_blocks_the_loop", r"on the event loop: \['open'\]")
class OpensAFileOnTheLoop(MemoryBackend):
    async def contains(self, keys: Any) -> list[bool]:
        with open(os.devnull, "rb"):  # noqa: ASYNC230
            return await super().contains(keys)


@found_by("test_nothing_blocks_the_loop", r"on the event loop: \['time.sleep'|Blocking call")
class SleepsOnTheLoop(MemoryBackend):
    async def delete(self, keys: Any) -> None:
        time.sleep(0)  # noqa: ASYNC251
        await super().delete(keys)


@found_by("test_nothing_is_left_after_the_close_i6", "nobody has looked at")
class LosesAnError(MemoryBackend):
    async def write(self, keys: Any, rows: Any) -> list[WriteResult]:
        async def fail() -> None:
            raise OSError("EIO")

        await asyncio.wait([asyncio.ensure_future(fail())])
        return await super().write(keys, rows)
