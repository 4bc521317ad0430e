"""The budget of the file backend: who goes, in which order, and no more than must."""

from __future__ import annotations

import asyncio
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.backends.file_helpers import (
    OTHER_SCOPE,
    ROW,
    counted,
    got,
    kept,
    keys,
    object_bytes,
    object_file,
    object_files,
    opened,
    put,
    rows,
    temporary_files,
)
from tiered_cache.storage import WriteResult
from tiered_cache_file import victims
from tiered_cache_file.victims import Clock

TEN = range(10)


async def test_b12_no_more_goes_than_must(tmp_path: Path) -> None:
    """One small need takes one object."""
    async with opened(tmp_path, max_size=10 * ROW) as store:
        await put(store, *TEN)
        await put(store, 10)
        assert store.stats().num_objects == 10
        await put(store, 11, num_bytes=2 * ROW)
        assert store.stats().num_bytes == 10 * ROW
        assert store.stats().num_objects == 9
        assert len(object_files(tmp_path)) == 9


async def test_a_chain_loses_its_tail(tmp_path: Path) -> None:
    """A batch comes from the root: without its head the rest could not be used."""
    async with opened(tmp_path, max_size=10 * ROW) as store:
        await put(store, *TEN)
        await put(store, 20, 21, 22)
        assert await kept(store, range(23)) == [*range(7), 20, 21, 22]


async def test_the_least_recently_used_goes(tmp_path: Path) -> None:
    """Read, asked for or written once more: each is a use."""
    async with opened(tmp_path, max_size=10 * ROW) as store:
        for number in TEN:
            await put(store, number)
        assert await got(store, 0) == ["read"]
        assert await store.contains(keys(2)) == [True]
        assert await put(store, 4) == ["exists"]
        for number in (20, 21, 22):
            await put(store, number)
        assert await kept(store, range(23)) == [0, 2, 4, 6, 7, 8, 9, 20, 21, 22]


async def test_a_used_chain_still_loses_its_tail(tmp_path: Path) -> None:
    """Whatever used it, and in however many jobs."""
    num_bytes = 1 << 20
    for use in (
        lambda store: got(store, *TEN, num_bytes=num_bytes),
        lambda store: store.contains(keys(*TEN)),
        lambda store: put(store, *TEN, num_bytes=num_bytes),
    ):
        root = tmp_path / str(time.monotonic_ns())
        async with opened(root, max_size=10 * num_bytes) as store:
            await put(store, *reversed(TEN), num_bytes=num_bytes)
            await use(store)
            await put(store, 20, 21, num_bytes=num_bytes)
            assert await kept(store, TEN) == [*range(8)]


async def test_b69_a_restart_remembers_how_much_and_in_which_order(tmp_path: Path) -> None:
    """Budget 10, put 10, open again: 10 hits; put 5, and the 5 oldest have gone."""
    async with opened(tmp_path, max_size=10 * ROW) as store:
        for number in TEN:
            await put(store, number)
        await got(store, 3)
    async with opened(tmp_path, max_size=10 * ROW) as store:
        assert store.stats().num_bytes == 10 * ROW
        for number in range(20, 25):
            await put(store, number)
            assert store.stats().num_bytes == object_bytes(tmp_path) == 10 * ROW
        assert await kept(store, range(25)) == [3, 6, 7, 8, 9, *range(20, 25)]
        assert await got(store, *TEN) == [
            "read" if n in (3, 6, 7, 8, 9) else "missing" for n in TEN
        ]


async def test_a_smaller_budget_holds_from_the_start(tmp_path: Path) -> None:
    """The oldest go when the directory is opened."""
    async with opened(tmp_path) as store:
        for start in range(0, 600, 50):
            await put(store, *range(start, start + 50))
    async with opened(tmp_path, max_size=200 * ROW) as store:
        assert store.stats().num_bytes == object_bytes(tmp_path) == 200 * ROW
        assert await kept(store, range(600)) == [*range(400, 600)]


async def test_scopes_share_the_budget(tmp_path: Path) -> None:
    """It is the directory's."""
    async with opened(tmp_path, max_size=10 * ROW) as store:
        await put(store, *TEN)
        others = keys(*range(6), scope=OTHER_SCOPE)
        await store.write(others, rows(*range(6)))
        assert await kept(store, TEN) == [*range(4)]
        assert await store.contains(others) == [True] * 6


async def test_of_a_batch_beyond_the_budget_the_head_is_kept(tmp_path: Path) -> None:
    """A tail without its head is worth nothing, so it takes no place from it."""
    async with opened(tmp_path, max_size=10 * ROW) as store:
        await put(store, 50, 51)
        assert await put(store, *range(16)) == ["written"] * 10 + ["refused"] * 6
        assert await kept(store, [*range(16), 50, 51]) == [*TEN]
        assert not temporary_files(tmp_path)


async def test_b70_a_refusal_leaves_no_mark(tmp_path: Path) -> None:
    """A row that is larger than the budget is refused, before anything goes for it; and the key is
    as good as new."""
    async with opened(tmp_path, max_size=10 * ROW) as store:
        await put(store, *TEN)
        assert await put(store, 20, num_bytes=11 * ROW) == ["refused"]
        assert await kept(store, range(21)) == [*TEN]
        assert not temporary_files(tmp_path)
        assert await store.contains(keys(20)) == [False]
        assert await put(store, 20) == ["written"]
        assert await got(store, 20) == ["read"]


async def test_order_survives_a_clock_that_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that was years ahead when the files were last used."""
    async with opened(tmp_path, max_size=10 * ROW) as store:
        await put(store, *TEN)
    ahead = time.time() + 10 * 365 * 86400
    for number in TEN:
        os.utime(object_file(tmp_path, number), (ahead - number, ahead - number))
    async with opened(tmp_path, max_size=10 * ROW) as store:
        assert await put(store, 20, 21) == ["written", "written"]
        monkeypatch.setattr(time, "time_ns", lambda: 10**9)
        assert await put(store, 22, 23) == ["written", "written"]
        assert await kept(store, range(24)) == [*range(6), 20, 21, 22, 23]
        assert all([info.age_s == 0 async for infos in store.scan() for info in infos])


def test_stamps_fall_in_a_batch_and_rise_over_batches() -> None:
    """However short the time between them."""
    clock = Clock()
    batches = [clock.falling(5) for _ in range(100)]
    for batch in batches:
        assert list(batch) == sorted(batch, reverse=True)
    for earlier, later in pairwise(batches):
        assert max(earlier) < min(later)
    clock.saw(max(batches[-1]) + 10**12)
    assert min(clock.falling(3)) > max(batches[-1]) + 10**12


async def test_one_listing_serves_for_many_evictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large directory: what it costs does not grow with every object that goes. Who goes is
    the same as if all were looked at each time."""
    monkeypatch.setattr(victims, "MIN_KEPT", 8)
    async with opened(tmp_path, max_size=400 * ROW) as store:
        for start in range(0, 400, 40):
            await put(store, *range(start, start + 40))
        with counted(monkeypatch, store._directory.room, "list_all") as calls:
            for number in range(1000, 1100):
                assert await put(store, number) == ["written"]
                assert store.stats().num_objects == 400
        assert calls["list_all"] <= 3
        tails_first = [start + at for start in range(0, 400, 40) for at in reversed(range(40))]
        assert set(await kept(store, range(400))) == set(tails_first[100:])


async def test_what_cannot_be_removed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another goes in its place, and it is said once."""
    async with opened(tmp_path, max_size=10 * ROW) as store:
        for number in TEN:
            await put(store, number)
        stuck = {str(object_file(tmp_path, number)) for number in (0, 1)}
        unlink = os.unlink

        def unlink_others(path: str) -> None:
            if path in stuck:
                raise OSError(1, "Operation not permitted")
            unlink(path)

        monkeypatch.setattr(os, "unlink", unlink_others)
        assert await put(store, 20) == ["written"]
        assert await kept(store, range(21)) == [0, 1, 3, 4, 5, 6, 7, 8, 9, 20]
        assert caplog.text.count("cannot evict") == 1


async def test_eviction_during_many_writes_keeps_to_the_budget(tmp_path: Path) -> None:
    """Batches at the same time, all of them larger than what is free."""
    num_bytes = 64 << 10
    async with opened(tmp_path, max_size=32 * num_bytes) as store:
        batches = [
            store.write(
                keys(*range(start, start + 8)), rows(*range(start, start + 8), num_bytes=num_bytes)
            )
            for start in range(0, 160, 8)
        ]
        results = [result for batch in await asyncio.gather(*batches) for result in batch]
        assert set(results) <= {WriteResult.WRITTEN, WriteResult.REFUSED}
        assert store.stats().num_bytes == object_bytes(tmp_path) <= 32 * num_bytes
        assert store.stats().num_objects >= 24
        assert not temporary_files(tmp_path)
