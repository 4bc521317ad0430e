"""Objects as files: what is written is read, each answer stands at its key, no file is half."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.backends.file_helpers import (
    OTHER_SCOPE,
    ROW,
    SCOPE,
    buffers,
    counted,
    got,
    key,
    keys,
    object_file,
    object_files,
    opened,
    put,
    row,
    rows,
    temporary_files,
)
from tiered_cache.storage import BackendStats, ObjectKey, ReadResult
from tiered_cache.storage.registry import load_backend
from tiered_cache.testing.backend_scene import ThreadContext
from tiered_cache_file import FileBackend, backend


def test_it_is_found_by_its_name() -> None:
    """`storage.backend: file` means this one."""
    assert load_backend("file") is FileBackend


@pytest.mark.parametrize("num_bytes", [1, 512, 4096, 4097, 300_000, 3 << 20])
async def test_rows_come_back_as_they_were(tmp_path: Path, num_bytes: int) -> None:
    """Of any length, and after the directory was opened again."""
    async with opened(tmp_path) as first:
        assert await put(first, 1, 2, 3, num_bytes=num_bytes) == ["written"] * 3
        assert await got(first, 1, 2, 3, num_bytes=num_bytes) == ["read"] * 3
    async with opened(tmp_path) as second:
        assert await got(second, 3, 1, 2, num_bytes=num_bytes) == ["read"] * 3


async def test_b72_every_answer_stands_at_its_key(tmp_path: Path) -> None:
    """What is missing, cut or unreadable moves nothing; many jobs make one answer."""
    num_bytes = 2 << 20
    async with opened(tmp_path) as store:
        await put(store, *range(12), num_bytes=num_bytes)
        await store.delete(keys(2, 7))
        os.truncate(object_file(tmp_path, 5), 1000)
        os.truncate(object_file(tmp_path, 9), 0)
        expected = ["read"] * 12
        expected[2] = expected[7] = "missing"
        expected[5] = expected[9] = "corrupt"
        assert await got(store, *range(12), num_bytes=num_bytes) == expected
        assert await store.contains(keys(*range(14))) == [
            number not in (2, 7, 12, 13) for number in range(14)
        ]


async def test_nothing_of_nothing(tmp_path: Path) -> None:
    """Empty batches, unknown keys, an unknown scope."""
    async with opened(tmp_path) as store:
        assert await store.contains([]) == []
        assert await store.read([], []) == []
        assert await store.write([], []) == []
        await store.delete([])
        await store.delete(keys(1))
        assert await store.clear(SCOPE) == 0
        assert [infos async for infos in store.scan()] == []
        assert store.stats() == BackendStats(0, 0, 10 << 30)


async def test_b64_another_length_is_corrupt(tmp_path: Path) -> None:
    """Longer, shorter or empty: it is not said to have arrived, and nothing behind the row is
    touched."""
    async with opened(tmp_path) as store:
        await put(store, 1)
        for num_bytes in (0, ROW - 1, ROW + 1, 3 * ROW):
            os.truncate(object_file(tmp_path, 1), num_bytes)
            place, behind = buffers(2)
            told: list[tuple[int, int]] = []
            results = await store.read(keys(1), [place], lambda *row: told.append(row))  # noqa: B023
            assert results == [ReadResult.CORRUPT]
            assert all(stop < ROW for _, stop in told)
            assert behind == b"\xee" * ROW


async def test_b79_what_has_the_wrong_length_is_replaced(tmp_path: Path) -> None:
    """It says that it exists, cannot be read, and is written anew; the account stays right."""
    async with opened(tmp_path) as store:
        await put(store, 1, 2)
        os.truncate(object_file(tmp_path, 1), 0)
        assert await store.contains(keys(1)) == [True]
        assert await got(store, 1, 2) == ["corrupt", "read"]
        assert await put(store, 1, 2) == ["written", "exists"]
        assert await got(store, 1, 2) == ["read", "read"]
        assert len(object_files(tmp_path)) == 2
        assert await put(store, 2, num_bytes=2 * ROW) == ["written"]
        assert store.stats().num_objects == 2
    async with opened(tmp_path) as again:
        assert again.stats().num_bytes == 3 * ROW


async def test_b78_what_exists_is_left_as_it_is(tmp_path: Path) -> None:
    """No byte is written for it, and its file stays the same one."""
    async with opened(tmp_path) as store:
        await put(store, 1, 2)
        before = object_file(tmp_path, 1).stat().st_ino
        assert await put(store, 1, 2, 3) == ["exists", "exists", "written"]
        assert object_file(tmp_path, 1).stat().st_ino == before


async def test_a_key_may_stand_twice_in_a_batch(tmp_path: Path) -> None:
    """Also in two jobs that run at once."""
    num_bytes = 1 << 20
    async with opened(tmp_path) as store:
        results = await put(store, *[1] * 8, num_bytes=num_bytes)
        assert sorted(set(results)) == ["exists", "written"]
        assert results.count("written") == 1
        assert await got(store, *[1] * 8, num_bytes=num_bytes) == ["read"] * 8
        assert store.stats().num_bytes == num_bytes
        assert await put(store, 2, 3, 2, 2) == ["written", "written", "exists", "exists"]
        assert store.stats().num_objects == 3
        assert not temporary_files(tmp_path)


async def test_what_arrives_is_told_in_pieces(tmp_path: Path) -> None:
    """Of 512 KiB, in order, while it is hot; the last one ends the row."""
    num_bytes = (1 << 20) + ROW
    told: dict[int, list[int]] = {0: [], 1: []}
    async with opened(tmp_path) as store:
        await put(store, 1, 2, num_bytes=num_bytes)
        places = buffers(2, num_bytes)

        def arrived(index: int, stop: int) -> None:
            assert places[index][:stop] == row(index + 1, num_bytes)[:stop]
            told[index].append(stop)

        await store.read(keys(1, 2), places, arrived)
    pieces = [*range(512 << 10, num_bytes, 512 << 10), num_bytes]
    assert told == {0: pieces, 1: pieces}


async def test_short_reads_and_writes_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may do less than it was asked to."""
    preadv, write = os.preadv, os.write
    num_bytes = 10_000
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:999]], at))
        patch.setattr(os, "write", lambda fd, part: write(fd, part[:777]))
        async with opened(tmp_path) as store:
            assert await put(store, 1, 2, num_bytes=num_bytes) == ["written"] * 2
            assert await got(store, 1, 2, num_bytes=num_bytes) == ["read"] * 2


async def test_a_file_that_shrinks_while_it_is_read_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before the row does."""
    num_bytes = 1 << 20
    async with opened(tmp_path) as store:
        await put(store, 1, num_bytes=num_bytes)
        path = object_file(tmp_path, 1)

        def arrived(index: int, stop: int) -> None:
            os.truncate(path, stop)

        places = buffers(1, num_bytes)
        assert await store.read(keys(1), places, arrived) == [ReadResult.CORRUPT]


async def test_files_are_private(tmp_path: Path) -> None:
    """Whatever the mask says; what is in them is somebody's conversation."""
    root = tmp_path / "made" / "here"
    before = os.umask(0)
    try:
        async with opened(root) as store:
            await put(store, 1, 2)
    finally:
        os.umask(before)
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


async def test_names_are_hexadecimal_whatever_the_key(tmp_path: Path) -> None:
    """A key is not text, and never part of a path."""
    hostile = [
        ObjectKey(b"../../../../etc/" + (b"/" * 32)),
        ObjectKey(b"\0" * 16 + b"../" * 10 + b".."),
    ]
    async with opened(tmp_path) as store:
        assert len(await store.write(hostile, rows(1, 2))) == 2
        assert await store.contains(hostile) == [True, True]
    for path in object_files(tmp_path):
        assert set(str(path.relative_to(tmp_path / "objects"))) <= set("0123456789abcdef/")


async def test_a_scope_is_cleared_and_no_other(tmp_path: Path) -> None:
    """How many there were is the answer; its directories go, too."""
    async with opened(tmp_path) as store:
        await store.write(keys(*range(20)), rows(*range(20)))
        others = keys(*range(5), scope=OTHER_SCOPE)
        await store.write(others, rows(*range(5)))
        assert await store.clear(SCOPE) == 20
        assert await store.clear(SCOPE) == 0
        assert await store.contains(keys(*range(20))) == [False] * 20
        assert await store.contains(others) == [True] * 5
        assert store.stats() == BackendStats(5, 5 * ROW, 10 << 30)
        assert [path.name for path in (tmp_path / "objects").iterdir()] == [OTHER_SCOPE.hex()]


async def test_a_scan_tells_all_with_their_ages(tmp_path: Path) -> None:
    """Of all scopes or of one; what is not an object is nobody's business."""
    async with opened(tmp_path) as store:
        assert store.can_scan
        await put(store, *range(10))
        await store.write(keys(1, scope=OTHER_SCOPE), rows(1))
        for junk in ("objects/README", f"objects/{SCOPE.hex()}/00/notes.txt"):
            (tmp_path / junk).parent.mkdir(exist_ok=True)
            (tmp_path / junk).write_text("left by somebody")
        os.utime(object_file(tmp_path, 3), (1, 1))
        everything = [info async for infos in store.scan() for info in infos]
        assert {info.key for info in everything} == {*keys(*range(10)), key(1, OTHER_SCOPE)}
        assert {info.num_bytes for info in everything} == {ROW}
        ages = {info.key: info.age_s for info in everything}
        assert ages.pop(key(3)) > 1e9
        assert all(age is not None and 0 <= age < 60 for age in ages.values())
        (only,) = [info async for infos in store.scan(OTHER_SCOPE) for info in infos]
        assert only.key == key(1, OTHER_SCOPE)
    async with opened(tmp_path) as again:
        assert again.stats().num_objects == 11


async def test_stats_know_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be called at any time on the loop."""
    async with opened(tmp_path, max_size=10 * ROW) as store:
        await put(store, 1, 2, 3)
        await store.delete(keys(2))
        with counted(monkeypatch, os, "stat", "pread", "lseek", "listdir", "scandir") as calls:
            assert store.stats() == BackendStats(2, 2 * ROW, 10 * ROW)
        assert not any(calls.values())


async def test_closing_leaves_nothing_open_and_may_be_done_twice(tmp_path: Path) -> None:
    """No descriptor, no folder for what is being written."""
    before = len(os.listdir("/proc/self/fd"))
    async with opened(tmp_path) as store:
        await put(store, 1)
        await store.aclose()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any((tmp_path / "tmp").iterdir())


async def test_one_thread_is_enough(tmp_path: Path) -> None:
    """Nothing waits for something that needs a thread of its own."""
    async with opened(tmp_path, num_threads=1, max_size=6 << 20) as store:
        for first in range(0, 20, 4):
            assert await put(store, *range(first, first + 4), num_bytes=1 << 20) == ["written"] * 4
        assert await got(store, 16, 17, 18, 19, num_bytes=1 << 20) == ["read"] * 4


@pytest.mark.parametrize(
    ("sizes", "num_threads", "parts"),
    [
        ([ROW] * 100, 4, [100]),
        ([1 << 20] * 8, 4, [2, 2, 2, 2]),
        ([1 << 20] * 9, 4, [2, 2, 2, 2, 1]),
        ([1 << 20] * 64, 4, [8] * 8),
        ([64 << 20, ROW, ROW], 4, [1, 2]),
        ([256 << 10] * 4, 1, [4]),
    ],
)
async def test_a_batch_is_divided_into_jobs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    num_threads: int,
    parts: list[int],
) -> None:
    """All threads get some, but a job has at most 8 MiB, and hardly fewer than 512 KiB."""
    jobs: list[int] = []

    class Noting(ThreadContext):
        async def run(self, fn, *args):  # type: ignore[no-untyped-def]
            if fn.__name__ == "read":
                jobs.append(len(args[0]))
            return await super().run(fn, *args)

    async with Noting(num_threads) as context, opened(tmp_path, context=context) as store:
        arena = memoryview(bytearray(max(sizes)))
        await store.read(keys(*range(len(sizes))), [arena[:size] for size in sizes])
    assert jobs == parts
    assert backend.JOB_BYTES == 8 << 20
