"""The file backend against plain files: the same bytes, threads and jobs, in the same run.

Reads carry the proof of each row (header and checksum, `storage.record`), writes the sealing of it,
as the cache has them. The plain side opens, reads and closes the very same files, or writes others
and renames them; a second time it takes a bare checksum of each row besides, which nobody who
proves what he reads can do without. All take turns, and ratios are taken within a turn.

An ext4 without a journal passes over all inodes of the last minutes when it makes a new one. So
nothing is removed before the end, all sides make their files in the same folder, and what was
written is cut to nothing, so that the disk stays out of it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import tempfile
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Final, TypeVar

import xxhash

from benchmarks.measure import Row
from tiered_cache.jobs import DaemonExecutor, run_to_end, submit, threads_ended
from tiered_cache.storage.backend import ReadResult, WriteResult
from tiered_cache.storage.record import Arrivals, Departures, RecordFormat, fingerprint
from tiered_cache_file import FileBackend, FileOptions
from tiered_cache_file.layout import NUM_BUCKETS, Layout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tiered_cache.storage import ObjectKey

    Sides = tuple[Callable[[], Awaitable[None]], ...]

T = TypeVar("T")

NUM_THREADS: Final = 4
CALL_BYTES: Final = 32 << 20
"""Of one call of the backend, as the cache makes them."""
JOB_BYTES: Final = CALL_BYTES // NUM_THREADS
CALLS: Final = 8
ROW_BYTES: Final = {"256 KiB": 256 << 10, "2 MiB": 2 << 20}


def run(repeat: int = 5, *, quick: bool = False) -> list[Row]:
    """Three lines for each row length: cold reads, warm reads, writes; medians over all turns."""
    num_calls = 1 if quick else CALLS
    rows = []
    with tempfile.TemporaryDirectory(prefix="tiered-cache-bench-", dir=".") as folder:
        for name, row_bytes in ROW_BYTES.items():
            of = f"{folder}/{row_bytes}"
            os.mkdir(of)
            rows += asyncio.run(_lines(name, of, row_bytes, num_calls, repeat))
    return rows


async def _lines(name: str, folder: str, row_bytes: int, num_calls: int, repeat: int) -> list[Row]:
    context = _Context()
    try:
        backend = await FileBackend.open(FileOptions(path=f"{folder}/kept"), context)
        try:
            bench = _Bench(backend, context, folder, row_bytes)
            return await bench.lines(name, num_calls, repeat)
        finally:
            await backend.aclose()
    finally:
        context.executor.shutdown(wait=False)
        await threads_ended([context.executor], 5)


class _Context:
    """What the cache gives a backend: its threads."""

    num_threads = NUM_THREADS

    def __init__(self) -> None:
        self.executor = DaemonExecutor("io", NUM_THREADS)

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        return await run_to_end(submit(self.executor, fn, *args))


@dataclass(frozen=True, slots=True)
class _Time:
    """By the clock, and of all threads together."""

    elapsed_s: float
    cpu_s: float

    @classmethod
    async def of(cls, work: Awaitable[object]) -> _Time:
        start_s, start_cpu_s = perf_counter(), process_time()
        await work
        return cls(perf_counter() - start_s, process_time() - start_cpu_s)


@dataclass(slots=True)
class _Batch:
    """The objects of one call."""

    page_keys: list[bytes]
    keys: list[ObjectKey]
    paths: list[str]


@dataclass
class _Bench:
    """Rows of one length in memory, and objects of that length in files."""

    backend: FileBackend
    context: _Context
    folder: str
    row_bytes: int
    turns: dict[str, list[tuple[_Time, ...]]] = field(default_factory=dict)
    """By line: plain, plain with a checksum, and the backend."""

    def __post_init__(self) -> None:
        self.record = RecordFormat(
            "full", fingerprint({"of": "benchmark"}), self.row_bytes, self.row_bytes
        )
        self.layout = Layout(os.path.abspath(f"{self.folder}/kept"))
        arena = memoryview(mmap.mmap(-1, CALL_BYTES))
        for start in range(0, CALL_BYTES, 1 << 20):
            arena[start : start + (1 << 20)] = secrets.token_bytes(1 << 20)
        self.rows = [
            arena[start : start + self.row_bytes] for start in range(0, CALL_BYTES, self.row_bytes)
        ]
        os.mkdir(f"{self.folder}/plain")
        (instance,) = os.listdir(self.layout.temporary)
        self.temporary = f"{self.layout.temporary}/{instance}"
        for bucket in range(NUM_BUCKETS):  # made once in the life of a directory, not in every call
            os.makedirs(self.layout.bucket(self.record.scope, bucket), exist_ok=True)

    def batch(self) -> _Batch:
        page_keys = [secrets.token_bytes(32) for _ in self.rows]
        keys = [self.record.object_key(page_key) for page_key in page_keys]
        return _Batch(page_keys, keys, [self.layout.path(key) for key in keys])

    async def lines(self, name: str, num_calls: int, repeat: int) -> list[Row]:
        batches = [self.batch() for _ in range(num_calls)]
        for batch in batches:
            await self.write(batch)
            _sync(batch.paths)
        for turn in range(repeat):
            for number, batch in enumerate(batches):
                first = turn + number
                reads: Sides = (*self.plain(_read_plain, batch.paths), partial(self.read, batch))
                cool = partial(_cool, batch.paths)
                await self._turn(f"{name} rows, cold read", reads, first, cool)
                await self._turn(f"{name} rows, warm read", reads, first)
                fresh, ways = self.batch(), [self.plain_ways() for _ in range(2)]
                writes: Sides = (*self.plain(_write_plain, *ways), partial(self.write, fresh))
                await self._turn(f"{name} rows, write", writes, first)
                _empty([*fresh.paths, *(path for way in ways for _, path in way)])
        return [self._line(line) for line in self.turns]

    async def _turn(
        self, line: str, sides: Sides, first: int, before: Callable[[], None] = lambda: None
    ) -> None:
        """Another one is first each time."""
        order = deque(range(len(sides)))
        order.rotate(first)
        times = {}
        for side in order:
            before()
            times[side] = await _Time.of(sides[side]())
        self.turns.setdefault(line, []).append(tuple(times[side] for side in range(len(sides))))

    def _line(self, line: str) -> Row:
        turns = self.turns[line]
        return Row(
            "files",
            line,
            {
                "plain_x": median(plain.elapsed_s / kept.elapsed_s for plain, _, kept in turns),
                "cpu_x": median(plain.cpu_s / kept.cpu_s for plain, _, kept in turns),
                "checked_x": median(
                    checked.elapsed_s / kept.elapsed_s for _, checked, kept in turns
                ),
                "gb_per_s": median(CALL_BYTES / kept.elapsed_s for *_, kept in turns) / 1e9,
                "plain_gb_per_s": median(CALL_BYTES / plain.elapsed_s for plain, *_ in turns) / 1e9,
                "checked_gb_per_s": median(
                    CALL_BYTES / checked.elapsed_s for _, checked, _ in turns
                )
                / 1e9,
            },
        )

    # --- the backend, as the cache calls it -------------------------------------------------------

    async def read(self, batch: _Batch) -> None:
        arrivals = Arrivals(self.record, self.rows, batch.page_keys)
        results = await self.backend.read(batch.keys, self.rows, arrivals.arrived)
        everything = range(len(self.rows))
        if not arrivals.are_judged(everything):
            await self.context.run(arrivals.verdicts, everything)
        verdicts = arrivals.verdicts(everything)
        if set(results) != {ReadResult.READ} or any(verdicts):
            raise RuntimeError(f"not read: {results}, {verdicts}")

    async def write(self, batch: _Batch) -> None:
        seal = Departures(self.record, self.rows, batch.page_keys).seal
        results = await self.backend.write(batch.keys, self.rows, seal)
        if set(results) != {WriteResult.WRITTEN}:
            raise RuntimeError(f"not written: {results}")

    # --- plain files ------------------------------------------------------------------------------

    def plain(self, job: Callable[..., None], *of: Sequence[Any]) -> Sides:
        """A job without and with a checksum, of the same files or each of its own."""
        return tuple(
            partial(self._in_jobs, partial(job, checked=checked), of[min(checked, len(of) - 1)])
            for checked in (False, True)
        )

    def plain_ways(self) -> list[tuple[str, str]]:
        """Under which names files are written, and which they get then."""
        names = [secrets.token_hex(32) for _ in self.rows]
        return [(f"{self.temporary}/{name}", f"{self.folder}/plain/{name}") for name in names]

    async def _in_jobs(self, job: Callable[..., None], paths: Sequence[Any]) -> None:
        num = JOB_BYTES // self.row_bytes
        async with asyncio.TaskGroup() as group:
            for start in range(0, len(paths), num):
                part = paths[start : start + num], self.rows[start : start + num]
                group.create_task(self.context.run(job, *part))


def _read_plain(paths: Sequence[str], rows: Sequence[memoryview], *, checked: bool) -> None:
    for path, row in zip(paths, rows, strict=True):
        fd = os.open(path, os.O_RDONLY)
        if os.preadv(fd, [row], 0) != len(row):
            raise RuntimeError("a short read")
        if checked:
            xxhash.xxh3_128_digest(row)
        os.close(fd)


def _write_plain(
    paths: Sequence[tuple[str, str]], rows: Sequence[memoryview], *, checked: bool
) -> None:
    for (temporary, path), row in zip(paths, rows, strict=True):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        if os.write(fd, row) != len(row):
            raise RuntimeError("a short write")
        if checked:
            xxhash.xxh3_128_digest(row)
        os.close(fd)
        os.rename(temporary, path)


def _sync(paths: Sequence[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _cool(paths: Sequence[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _empty(paths: Sequence[str]) -> None:
    for path in paths:
        os.truncate(path, 0)
