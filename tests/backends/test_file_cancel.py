"""A cancelled call of the file backend: what is queued never runs, what runs is waited for."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.backends.file_helpers import (
    buffers,
    got,
    keys,
    object_files,
    opened,
    put,
    rows,
    temporary_files,
)
from tiered_cache.errors import BackendError
from tiered_cache.testing.backend_scene import ThreadContext, fill, is_filled
from tiered_cache_file import FileBackend, FileOptions

MIB = 1 << 20


async def running(context: ThreadContext, num: int) -> None:
    """Until so many threads are at work."""
    while context.num_running != num:
        await asyncio.sleep(0.001)


async def test_a_cancelled_read_waits_for_two_threads_and_drops_six_jobs(tmp_path: Path) -> None:
    """When it has ended its buffers are the caller's, though eight jobs were asked for."""
    numbers = range(64)
    async with ThreadContext(2) as context, opened(tmp_path, context=context) as store:
        await put(store, *numbers, num_bytes=MIB)
        places = buffers(64, MIB)
        with context.held():
            reading = asyncio.create_task(store.read(keys(*numbers), places))
            await running(context, 2)
            reading.cancel()
            await asyncio.sleep(0.02)
            assert not reading.done()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert context.num_running == 0
        assert sum(not is_filled(place, 0xEE) for place in places) == 16  # two jobs of 8 MiB
        for place in places:
            fill(place, 0x5A)
        await asyncio.sleep(0.02)
        assert all(is_filled(place, 0x5A) for place in places)
        assert await got(store, *numbers, num_bytes=MIB) == ["read"] * 64


async def test_a_cancelled_write_leaves_whole_objects_or_none(tmp_path: Path) -> None:
    """What ran is kept and counted, what was queued is not, and nothing is half."""
    numbers = range(64)
    async with ThreadContext(2) as context, opened(tmp_path, context=context) as store:
        with context.held():
            writing = asyncio.create_task(
                store.write(keys(*numbers), rows(*numbers, num_bytes=MIB))
            )
            await running(context, 2)
            writing.cancel()
            await asyncio.sleep(0.02)
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert len(object_files(tmp_path)) == store.stats().num_objects == 16
        assert not temporary_files(tmp_path)
        expected = ["read"] * 16 + ["missing"] * 48
        assert await got(store, *numbers, num_bytes=MIB) == expected


async def test_when_one_job_raises_all_are_quiet_before_the_call_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are not left to themselves with the caller's rows."""
    slow = threading.Event()
    open_ = os.open
    first: list[str] = []
    num_slow = 0

    def opening(path: Any, flags: int, *args: Any) -> int:
        nonlocal num_slow
        if "/kept/tmp/" in str(path) and flags & os.O_EXCL:
            if not first:
                first.append(path)
                raise OSError(30, "Read-only file system")
            num_slow += 1
            slow.wait(10)
        return open_(path, flags, *args)

    numbers = range(16)
    async with opened(tmp_path / "kept") as store:
        monkeypatch.setattr(os, "open", opening)
        writing = asyncio.create_task(store.write(keys(*numbers), rows(*numbers, num_bytes=MIB)))
        while num_slow < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert not writing.done()
        slow.set()
        with pytest.raises(BackendError, match="Read-only"):
            await writing
        assert not temporary_files(tmp_path / "kept")


async def test_an_open_that_is_cancelled_leaves_no_descriptor(tmp_path: Path) -> None:
    """At whichever of its awaits; and what it has left is swept by the next."""
    async with ThreadContext(1) as context:
        before = len(os.listdir("/proc/self/fd"))
        for delay_ms in range(30):
            opening = asyncio.create_task(
                FileBackend.open(FileOptions(path=str(tmp_path), reserve=0), context)
            )
            await asyncio.sleep(delay_ms / 2000)
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled():
                await opening.result().aclose()
        assert len(os.listdir("/proc/self/fd")) <= before + 1  # the loop's own may come late
    async with opened(tmp_path):
        assert len(list((tmp_path / "tmp").iterdir())) == 1


async def test_a_close_that_is_cancelled_lets_go_all_the_same(tmp_path: Path) -> None:
    """The folder may be left; it is nobody's, and swept."""
    async with ThreadContext(1) as context:
        store = await FileBackend.open(FileOptions(path=str(tmp_path), reserve=0), context)
        with context.held():
            holding = asyncio.create_task(store.contains(keys(1)))
            await running(context, 1)
            closing = asyncio.create_task(store.aclose())
            await asyncio.sleep(0.01)
            closing.cancel()
            await asyncio.wait([closing])
            assert closing.cancelled()
        assert await holding == [False]
    async with opened(tmp_path):
        assert len(list((tmp_path / "tmp").iterdir())) == 1


async def test_clearing_can_be_cancelled_between_two_buckets(tmp_path: Path) -> None:
    """What has gone has gone, and the account knows it."""
    async with opened(tmp_path) as store:
        await put(store, *range(500))
        clearing = asyncio.create_task(store.clear(bytes(range(16))))
        await asyncio.sleep(0.005)
        clearing.cancel()
        await asyncio.wait([clearing])
        assert store.stats().num_objects == len(object_files(tmp_path))


async def test_a_scan_can_be_left(tmp_path: Path) -> None:
    """After its first piece, with no harm to the next."""
    async with opened(tmp_path) as store:
        await put(store, *range(100))
        scanning = store.scan()
        async for infos in scanning:
            assert infos
            break
        await scanning.aclose()  # type: ignore[attr-defined]
        assert await store.clear(bytes(range(16))) == 100
