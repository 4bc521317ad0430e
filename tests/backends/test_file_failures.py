"""What the system refuses, and what others do to the directory: one operation pays, none hangs."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.backends.file_helpers import (
    ROW,
    SCOPE,
    buffers,
    counted,
    got,
    kept,
    key,
    keys,
    object_file,
    object_files,
    opened,
    put,
    rows,
    temporary_files,
)
from tiered_cache.errors import BackendError
from tiered_cache.storage import ReadResult
from tiered_cache.storage.record import Arrivals, RecordFormat, fingerprint
from tiered_cache.testing.backend_scene import ThreadContext
from tiered_cache_file import account
from tiered_cache_file.layout import bucket_of

ROOT = Path(__file__).parents[2]


class Failing:
    """A function of `os` that fails as often as the test says, on paths or for all."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, code: int) -> None:
        self._original = getattr(os, name)
        self._code = code
        self.left = 0
        self.only: str | None = None
        patch.setattr(os, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.left and (self.only is None or self.only in str(args[0])):
            self.left -= 1
            raise OSError(self._code, os.strerror(self._code))
        return self._original(*args, **kwargs)


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("function", ["write", "close", "rename", "mkdir"])
async def test_b67_a_full_disk_refuses_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, function: str
) -> None:
    """Wherever it shows; nothing is left of what was refused, and later there is room again."""
    async with opened(tmp_path) as store:
        await put(store, 1, 2)
        with monkeypatch.context() as patch:
            failing = Failing(patch, function, code)
            failing.only = None if function in ("write", "close") else str(tmp_path)
            failing.left = 1
            if function == "rename":
                await store.delete(keys(2))
            results = await put(store, 10)
            assert results == ["refused"]
            assert not failing.left
        assert not temporary_files(tmp_path)
        assert await got(store, 1, 10) == ["read", "missing"]
        assert store.stats().num_objects == len(object_files(tmp_path))
        assert await put(store, 10, 11) == ["written"] * 2
        assert await got(store, 1, 10, 11) == ["read"] * 3


async def test_on_a_full_disk_the_rest_of_a_job_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not fit either, and each try writes until it does not."""
    async with opened(tmp_path) as store:
        failing = Failing(monkeypatch, "write", errno.ENOSPC)
        failing.left = 100
        assert await put(store, 1, 2, 3) == ["refused"] * 3
        assert failing.left == 99


async def test_b65_one_bad_write_is_one_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other 99 are kept; the reason is in the log, once."""
    async with opened(tmp_path) as store:
        write, calls = os.write, 0

        def failing(fd: int, part: memoryview) -> int:
            nonlocal calls
            calls += 1
            if calls in (3, 50):
                raise OSError(errno.EIO, "Input/output error")
            return write(fd, part)

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", failing)
            results = await put(store, *range(100))
        assert [at for at, result in enumerate(results) if result == "failed"] == [2, 49]
        assert results.count("written") == 98
        assert not temporary_files(tmp_path)
        assert caplog.text.count("cannot write in") == 1
        assert await put(store, *range(100)) == [
            "exists" if at not in (2, 49) else "written" for at in range(100)
        ]


async def test_a_row_that_cannot_come_into_sight_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was counted before; the account is set right."""
    async with opened(tmp_path) as store:
        await put(store, 1)
        failing = Failing(monkeypatch, "rename", errno.EIO)
        failing.left = 1
        assert await put(store, 2, 3) == ["failed", "written"]
        assert store.stats().num_objects == len(object_files(tmp_path)) == 2
        assert not temporary_files(tmp_path)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
async def test_a_directory_that_cannot_be_written_to_is_unwell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A disk that has become read-only, say. What is kept can still be read."""
    async with opened(tmp_path / "kept") as store:
        await put(store, 1)
        with monkeypatch.context() as patch:
            opening, touching = Failing(patch, "open", code), Failing(patch, "utime", code)
            opening.left, opening.only = 100, "/kept/tmp/"
            touching.left = 100
            with pytest.raises(BackendError, match="cannot use"):
                await put(store, 2, 3)
            assert await store.contains(keys(1, 2)) == [True, False]
            assert await got(store, 1) == ["read"]
        assert await put(store, 2) == ["written"]


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ELOOP])
async def test_b64_an_unreadable_file_is_one_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Eight pages, the third cannot be read: the others can, and so can it the next time."""
    async with opened(tmp_path) as store:
        await put(store, *range(8))
        failing = Failing(monkeypatch, "open", code)
        failing.left, failing.only = 1, object_file(tmp_path, 2).name
        assert await got(store, *range(8)) == ["read"] * 2 + ["failed"] + ["read"] * 5
        assert await got(store, *range(8)) == ["read"] * 8


async def test_b64_a_read_that_fails_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left open by it."""
    num_bytes = 1 << 20
    async with opened(tmp_path) as store:
        await put(store, 1, num_bytes=num_bytes)
        before = len(os.listdir("/proc/self/fd"))
        preadv = os.preadv

        def failing(fd: int, parts: list[memoryview], at: int) -> int:
            if at:
                raise OSError(errno.EIO, "Input/output error")
            return preadv(fd, parts, at)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            assert await got(store, 1, num_bytes=num_bytes) == ["failed"]
        assert len(os.listdir("/proc/self/fd")) == before
        assert await got(store, 1, num_bytes=num_bytes) == ["read"]


async def test_b64_a_flipped_byte_is_found_by_the_row_itself(tmp_path: Path) -> None:
    """The backend reads it, its header and checksum do not agree, and it is deleted and rewritten
    by who knows that."""
    record = RecordFormat("full", fingerprint({"a": "fact"}), ROW, ROW)
    page_keys = [bytes([number]) * 32 for number in range(8)]
    names = [record.object_key(page_key) for page_key in page_keys]
    sealed = buffers(8)
    for place, page_key in zip(sealed, page_keys, strict=True):
        record.seal(place, page_key)
    async with opened(tmp_path) as store:
        await store.write(names, sealed)
        (path,) = [path for path in object_files(tmp_path) if path.name == page_keys[2].hex()]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        for wrong in ([2], []):
            places = buffers(8)
            arrivals = Arrivals(record, places, page_keys)
            results = await store.read(names, places, arrivals.arrived)
            assert results == [ReadResult.READ] * 8
            verdicts = arrivals.verdicts(range(8))
            assert [at for at, verdict in enumerate(verdicts) if verdict] == wrong
            await store.delete(names[2:3])
            await store.write(names, sealed)


async def test_what_a_link_points_to_is_not_read(tmp_path: Path) -> None:
    """An object is a file. A link is a failure, and is replaced by the next write."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * ROW)
    async with opened(tmp_path / "kept") as store:
        await put(store, 1)
        path = object_file(tmp_path / "kept", 1)
        path.unlink()
        path.symlink_to(secret)
        assert await got(store, 1) == ["failed"]
        assert await put(store, 1) == ["written"]
        assert await got(store, 1) == ["read"]
    assert secret.read_bytes() == b"x" * ROW


# --- what others remove ---------------------------------------------------------------------------


class Gated:
    """Threads that stop in front of each job, until the test lets them go."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.num_threads = context.num_threads
        self.stops = False
        self.reached = threading.Semaphore(0)
        self.opened = threading.Event()

    async def run(self, fn: Any, *args: Any) -> Any:
        return await self._context.run(self._job, fn, args)

    def _job(self, fn: Any, args: tuple[Any, ...]) -> Any:
        if self.stops:
            self.reached.release()
            self.opened.wait(10)
        return fn(*args)


@pytest.mark.parametrize("by", ["rm", "delete"])
async def test_b70_what_is_removed_before_it_is_read(tmp_path: Path, by: str) -> None:
    """Between being promised and being read, by an operator or by another instance: it is missing,
    the account is right, and it can be written again."""
    async with ThreadContext() as threads, opened(tmp_path) as other:
        context = Gated(threads)
        async with opened(tmp_path, context=context) as store:
            await put(store, 1, 2, 3)
            assert await store.contains(keys(1, 2, 3)) == [True] * 3
            context.stops = True
            reading = asyncio.create_task(got(store, 1, 2, 3))
            await asyncio.to_thread(context.reached.acquire)
            if by == "rm":
                object_file(tmp_path, 2).unlink()
            else:
                await other.delete(keys(2))
            context.stops = False
            context.opened.set()
            assert await reading == ["read", "missing", "read"]
            assert store.stats().num_objects == 2
            assert store.stats().num_bytes == 2 * ROW
            assert await store.contains(keys(1, 2, 3)) == [True, False, True]
            assert await put(store, 2) == ["written"]
            assert await got(store, 1, 2, 3) == ["read"] * 3
            assert store.stats().num_objects == 3


async def test_b70_what_is_removed_while_it_is_read_is_read(tmp_path: Path) -> None:
    """The file is there until it is closed."""
    num_bytes = 1 << 20
    async with opened(tmp_path) as store:
        await put(store, 1, num_bytes=num_bytes)
        path = object_file(tmp_path, 1)

        def arrived(index: int, stop: int) -> None:
            path.unlink(missing_ok=True)

        places = buffers(1, num_bytes)
        assert await store.read(keys(1), places, arrived) == [ReadResult.READ]
        assert places == rows(1, num_bytes=num_bytes)
        assert await got(store, 1, num_bytes=num_bytes) == ["missing"]
        assert store.stats().num_objects == 0


async def test_an_operator_may_remove_everything(tmp_path: Path) -> None:
    """Files, or the directories with them: all of it is missing, and room again."""
    async with opened(tmp_path, max_size=50 * ROW) as store:
        await put(store, *range(50))
        shutil.rmtree(tmp_path / "objects")
        assert await store.contains(keys(1)) == [False]
        assert await got(store, *range(50)) == ["missing"] * 50
        assert await put(store, *range(100, 140)) == ["written"] * 40
        assert await put(store, *range(200, 210)) == ["written"] * 10
        assert await kept(store, range(300)) == [*range(100, 140), *range(200, 210)]
        assert store.stats().num_objects == 50


async def test_a_missing_row_counts_a_bucket_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it look at each file of it, unless there are fewer than there should be."""
    async with opened(tmp_path) as store:
        await put(store, *range(100))
        path = object_file(tmp_path, 5)
        with counted(monkeypatch, os, "listdir", "scandir") as calls:
            assert await got(store, 1000) == ["missing"]
            assert calls == {"listdir": 2, "scandir": 0}
            same = next(n for n in range(2000, 9000) if bucket_of(key(n)) == bucket_of(key(5)))
            path.unlink()
            assert await got(store, same) == ["missing"]
            assert calls == {"listdir": 4, "scandir": 1}
        assert store.stats().num_objects == 99


async def test_a_removed_directory_is_unwell_until_it_is_opened_again(tmp_path: Path) -> None:
    """A lock that nobody else sees would let two exceed the budget."""
    root = tmp_path / "kept"
    async with opened(root) as store:
        await put(store, 1)
        shutil.rmtree(root)
        assert await store.contains(keys(1)) == [False]
        with pytest.raises(BackendError, match="removed while it was in use"):
            await put(store, 2)
        with pytest.raises(BackendError, match="removed while it was in use"):
            await store.delete(keys(1))
    async with opened(root) as again:
        assert await put(again, 2) == ["written"]


async def test_an_account_that_was_overwritten_is_made_anew(tmp_path: Path) -> None:
    """By the next who opens; nothing is believed of it."""
    async with opened(tmp_path) as store:
        await put(store, 1, 2)
        (tmp_path / "lock").write_bytes(b"not an account")
        with pytest.raises(BackendError, match="was overwritten"):
            await put(store, 3)
        assert await got(store, 1) == ["read"]
    async with opened(tmp_path) as again:
        assert again.stats().num_objects == 2
        assert await put(again, 3) == ["written"]


# --- what others hold -----------------------------------------------------------------------------


async def test_who_stops_with_the_lock_stops_writes_and_no_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a limit, after which the backend says that it is unwell, and of whom."""
    monkeypatch.setattr(account, "LIMIT_S", 0.05)
    async with opened(tmp_path) as store:
        await put(store, 1)
        fd = os.open(tmp_path / "lock", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            for call in (
                lambda: put(store, 2),
                lambda: store.delete(keys(1)),
                lambda: store.clear(SCOPE),
            ):
                with pytest.raises(BackendError, match=r"has been locked for 0\.05 s"):
                    await call()
            assert await got(store, 1, 3) == ["read", "missing"]
            assert await store.contains(keys(1)) == [True]
            with pytest.raises(BackendError, match="has been locked"):
                async with opened(tmp_path):
                    pass
        finally:
            os.close(fd)
        assert not temporary_files(tmp_path)
        assert await put(store, 2) == ["written"]
        assert await got(store, 1, 2) == ["read", "read"]


UNPRIVILEGED = """
import asyncio, concurrent.futures.thread, os, sys
from tiered_cache.errors import BackendError
from tiered_cache.testing.backend_scene import ThreadContext
from tiered_cache_file import FileBackend, FileOptions

async def main():
    async with ThreadContext() as context:
        for path in sys.argv[1:]:
            try:
                await FileBackend.open(FileOptions(path=path), context)
            except BackendError as error:
                print(error)

if os.geteuid() == 0:  # to whom nothing is forbidden
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
asyncio.run(main())
"""


def test_a_directory_of_somebody_else_says_what_to_do() -> None:
    """Where it may not be made, and where it may not be written to."""
    with tempfile.TemporaryDirectory() as folder:
        readable = Path(folder) / "readable"
        readable.mkdir()
        for path in (readable, Path(folder)):
            path.chmod(0o555)
        try:
            done = subprocess.run(
                [sys.executable, "-c", UNPRIVILEGED, f"{folder}/kept", str(readable)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        finally:
            for path in (Path(folder), readable):
                path.chmod(0o700)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert "Permission denied (let user" in line
        assert "or choose another `path`" in line
