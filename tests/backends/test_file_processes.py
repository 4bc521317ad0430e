"""Several processes on one directory, and those that are killed there."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.backends import file_child
from tests.backends.file_child import ROW_BYTES, page_key, record
from tests.backends.file_helpers import (
    ROW,
    buffers,
    got,
    kept,
    keys,
    object_bytes,
    object_files,
    opened,
    put,
    rows,
    temporary_files,
)
from tiered_cache.storage import ReadResult, WriteResult
from tiered_cache_file import FileBackend
from tiered_cache_file.layout import NUM_BUCKETS, bucket_of


class Writer:
    """A process that starts writers; see `file_child`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, file_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, root: Path, max_size: int, seed: int, num_rows: int = 1_000_000) -> int:
        """Have one write; its process id, when it has opened the directory."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{root} {max_size} {seed} {num_rows}\n")
        self._process.stdin.flush()
        ready, pid = self._line().split()
        assert ready == "ready"
        return int(pid)

    def finish(self) -> list[int]:
        """The rows whose writing was confirmed, when it has ended."""
        return [int(line) for line in iter(self._line, "ended")]

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return line.strip()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:
            self._process.kill()


async def check(store: FileBackend, numbers: list[int]) -> list[ReadResult]:
    """Read rows that a child has written: whatever is read is right."""
    results = []
    for start in range(0, len(numbers), 64):
        part = numbers[start : start + 64]
        places = buffers(len(part), ROW_BYTES)
        names = [record().object_key(page_key(number)) for number in part]
        found = await store.read(names, places)
        for number, place, result in zip(part, places, found, strict=True):
            assert result in (ReadResult.READ, ReadResult.MISSING), number
            if result is ReadResult.READ:
                assert record().check(place, page_key(number)) is None, number
        results += found
    return results


async def kill_rounds(root: Path, num_rounds: int) -> int:
    """Kill a writing process again and again; how many rows were proved.

    What was confirmed in a round is there, as far as the budget allows: the newest of it.
    """
    max_rows, num_proved = 200, 0
    chance = random.Random(num_rounds)
    with Writer() as writer:
        for seed in range(1, num_rounds + 1):
            pid = writer.start(root, max_rows * ROW_BYTES, seed)
            await asyncio.sleep(chance.uniform(0, 0.15))
            os.kill(pid, signal.SIGKILL)
            numbers = writer.finish()
            async with opened(root, max_size=max_rows * ROW_BYTES) as store:
                assert not temporary_files(root)
                assert len(list((root / "tmp").iterdir())) == 1
                assert object_bytes(root) == store.stats().num_bytes <= max_rows * ROW_BYTES
                newest = numbers[-(max_rows - 2 * file_child.BATCH) :]
                assert await check(store, newest) == [ReadResult.READ] * len(newest)
                async for infos in store.scan():
                    assert {info.num_bytes for info in infos} == {ROW_BYTES}
                num_proved += len(newest)
    return num_proved


async def test_b69_kill_9_while_writing(tmp_path: Path) -> None:
    """No wrong byte, nothing lost that was confirmed, nothing half, and within the budget."""
    assert await kill_rounds(tmp_path / "kept", 20) > 0


@pytest.mark.soak
async def test_b69_kill_9_a_thousand_times(tmp_path: Path) -> None:
    """The same, for as long as it takes."""
    assert await kill_rounds(tmp_path / "kept", 1000) > 1000


async def test_b69_killed_while_the_eleventh_is_written(tmp_path: Path) -> None:
    """Budget 10, ten confirmed: they are hits but for the oldest, for which the eleventh may have
    come; and whatever was begun has gone."""
    root, max_size = tmp_path / "kept", 10 * ROW_BYTES
    with Writer() as writer:
        for seed in range(1, 11):
            writer.start(root, max_size, seed, 1)
            assert writer.finish() == [seed * 1_000_000]
        pid = writer.start(root, max_size, 11, 1)
        while is_running(pid) and not temporary_files(root):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        writer.finish()
    async with opened(root, max_size=max_size) as store:
        assert not temporary_files(root)
        assert object_bytes(root) == store.stats().num_bytes <= max_size
        newest = [seed * 1_000_000 for seed in range(2, 11)]
        assert await check(store, newest) == [ReadResult.READ] * len(newest)


def test_two_processes_keep_to_one_budget(tmp_path: Path) -> None:
    """Each evicts what the other has written; together they never exceed it by more than what they
    have in flight, which has no name yet."""
    root, max_size, num_rows = tmp_path / "kept", 60 * ROW_BYTES, 400
    with Writer() as first, Writer() as second:
        pids = [first.start(root, max_size, 1, num_rows), second.start(root, max_size, 2, num_rows)]
        while any(map(is_running, pids)):
            assert object_bytes_now(root) <= max_size
            time.sleep(0.002)
        confirmed = [writer.finish() for writer in (first, second)]
    # Who is held up while the other writes more than the budget comes too late with his rows.
    assert all(len(numbers) > 0.9 * num_rows for numbers in confirmed)
    assert object_bytes(root) == max_size
    asyncio.run(look_after(root, max_size))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def object_bytes_now(root: Path) -> int:
    """While nothing comes or goes."""
    with (root / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return object_bytes(root)


async def look_after(root: Path, max_size: int) -> None:
    async with opened(root, max_size=max_size) as store:
        assert store.stats().num_bytes == max_size
        there = [info.key async for infos in store.scan() for info in infos]
        places = buffers(len(there), ROW_BYTES)
        assert set(await store.read(there, places)) == {ReadResult.READ}
        for name, place in zip(there, places, strict=True):
            assert record().check(place, name[16:]) is None


# --- two instances --------------------------------------------------------------------------------


async def test_two_instances_share_what_they_keep(tmp_path: Path) -> None:
    """Each sees what the other writes and deletes; both count the same."""
    async with opened(tmp_path) as one, opened(tmp_path) as other:
        await put(one, 1, 2)
        assert await other.contains(keys(1, 2, 3)) == [True, True, False]
        assert await got(other, 2) == ["read"]
        assert await put(other, 2, 3) == ["exists", "written"]
        assert other.stats().num_objects == 3
        await one.delete(keys(2))
        assert one.stats().num_objects == 2
        assert await got(other, 1, 2, 3) == ["read", "missing", "read"]
        assert await other.clear(bytes(range(16))) == 2
        await one.delete([])
        assert await put(one, 4) == ["written"]
        assert one.stats().num_objects == 1


async def test_b78_two_instances_write_the_same_at_once(tmp_path: Path) -> None:
    """Both succeed, and it is there once."""
    numbers = range(34)
    async with opened(tmp_path) as one, opened(tmp_path) as other:
        for _ in range(5):
            results = await asyncio.gather(
                *(store.write(keys(*numbers), rows(*numbers)) for store in (one, other))
            )
            stored = {WriteResult.WRITTEN, WriteResult.EXISTS}
            assert all(set(result) <= stored for result in results)
            assert len(object_files(tmp_path)) == 34
            assert await got(one, *numbers) == await got(other, *numbers) == ["read"] * 34
            await one.delete(keys(*numbers))
        assert one.stats().num_objects == 0


async def test_what_another_uses_is_not_the_oldest(tmp_path: Path) -> None:
    """Uses count across processes, also when they come after the listing."""
    async with (
        opened(tmp_path, max_size=10 * ROW) as one,
        opened(tmp_path, max_size=10 * ROW) as other,
    ):
        for number in range(10):
            await put(one, number)
        await put(one, 10)  # has listed by now
        assert await got(other, 1, 2) == ["read", "read"]
        await put(one, 11, 12)
        assert await kept(one, range(13)) == [1, 2, *range(5, 13)]


async def test_what_a_live_instance_writes_is_not_swept(tmp_path: Path) -> None:
    """Only who is dead leaves things behind."""
    async with opened(tmp_path) as one:
        being_written = Path(one._directory._temporary.new_path())
        leave(being_written)
        leave(tmp_path / "tmp" / "0123456789abcdef" / "3")  # killed before it had a lock
        leave(tmp_path / "tmp" / "fedcba9876543210" / "alive")
        leave(tmp_path / "tmp" / "fedcba9876543210" / "7")
        async with opened(tmp_path) as other:
            assert temporary_files(tmp_path) == [being_written]
            assert len(list((tmp_path / "tmp").iterdir())) == 2
            assert await put(other, 1) == ["written"]
        assert await put(one, 2) == ["written"]


def leave(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("half a row")


async def test_many_open_an_empty_directory_at_once(tmp_path: Path) -> None:
    """One of them makes it, and nobody takes it for something else."""
    root = tmp_path / "kept"

    async def use(number: int) -> None:
        async with opened(root, num_threads=1) as store:
            assert await put(store, number) == ["written"]

    await asyncio.gather(*map(use, range(12)))
    async with opened(root) as store:
        assert store.stats().num_objects == 12
    assert sorted(os.listdir(root)) == ["FORMAT", "lock", "objects", "tmp"]


# --- many -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["big", "little"])
def test_b67_no_directory_is_large_whatever_keys_look_like(order: str) -> None:
    """200,000 keys that are numbers: the buckets fill evenly."""
    sizes = [0] * NUM_BUCKETS
    for number in range(200_000):
        sizes[bucket_of(number.to_bytes(48, order))] += 1  # type: ignore[arg-type]
    assert max(sizes) < 1000


async def test_b67_a_large_directory_opens_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is looked at once; a look-up looks at no other file than those asked for."""
    await many(tmp_path, 5_000, monkeypatch, limit_s=10)


@pytest.mark.soak
async def test_b67_a_directory_of_200_000(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same."""
    await many(tmp_path, 200_000, monkeypatch, limit_s=30)


async def many(root: Path, num: int, monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    async with opened(root) as store:
        batch = 1000
        for start in range(0, num, batch):
            numbers = range(start, start + batch)
            assert set(await put(store, *numbers, num_bytes=1)) == {"written"}
    folders = [len(names) for _, _, names in os.walk(root / "objects")]
    assert max(folders) < 2000
    started_s = time.monotonic()
    async with opened(root) as store:
        assert time.monotonic() - started_s < limit_s
        assert store.stats().num_objects == num
        calls = {"utime": 0, "stat": 0, "listdir": 0, "scandir": 0}
        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, counting(name, calls))
            found = await store.contains(keys(*range(num - 64, num + 64)))
        assert found == [True] * 64 + [False] * 64
        assert sum(calls.values()) == 128


def counting(name: str, calls: dict[str, int]):  # type: ignore[no-untyped-def]
    original = getattr(os, name)

    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        calls[name] += 1
        return original(*args, **kwargs)

    return call
