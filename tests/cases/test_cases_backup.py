"""Cases about what goes to storage: in which order, through which failures, and how much of it
waits. Seconds are those of the virtual clock."""

from __future__ import annotations

import asyncio
import errno
import random
from typing import Any, Final

import pytest

from tests.lease_helpers import Rig, other_tasks, seq, start, turns
from tests.storage_helpers import Store, keep, on_virtual_clock, prefetched, three_tiers, wipe
from tiered_cache import BackendError, ClosedError, StaleError, UnifiedRadixCache, WrongThreadError
from tiered_cache.storage.backend import WriteResult
from tiered_cache.testing.faulty_backend import CallGate
from tiered_cache.testing.loop import SeededExecutor

A: Final = seq("A", 32)

POLICIES: Final = ("write_through", "write_through_selective", "write_back")

ERRORS: Final = [
    OSError(errno.EIO, "input/output error"),
    OSError(errno.ENOSPC, "no space left on device"),
    TimeoutError(),
    ValueError("a bad row"),
    KeyError("row"),
    BackendError("unwell"),
    asyncio.CancelledError(),
    AssertionError(),
    MemoryError(),
]


def now() -> float:
    return asyncio.get_running_loop().time()


def at_rest(r: Rig) -> None:
    """Nothing is held or waits, and all is accounted for."""
    assert r.host.in_flight == r.host.quarantined == r.host.protected == 0, r.host
    assert r.stats.storage is not None
    assert r.stats.storage.pages_pending == 0
    assert r.cache.outstanding() == []
    assert r.counters.background_failures == 0
    r.check()


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
@on_virtual_clock
async def test_b41_nothing_is_stored_that_cannot_be_reached(
    policy: str, page_size: int, seed: int
) -> None:
    """B41: random trees over a small host, and a backend that is slow, refuses, fails and raises,
    by row and by call: at any instant a page that is stored has all above it stored; and what can
    be matched there can be read."""
    rng = random.Random(seed)
    storage = {"breaker": {"failures": 3, "retry_after": 0.5}, "timeout": 2.0}
    async with three_tiers(
        24, 12, page_size=page_size, host={"write_policy": policy}, storage=storage
    ) as (r, store):
        chains: list[list[int]] = []
        failed: set[bytes] = set()  # visibly: the backend has said so

        def look() -> None:
            for tokens in chains:
                has, keys = store.has(tokens), store.pages_of(tokens)
                above = {
                    key for key, there in zip(keys, has.rstrip("-"), strict=False) if there == "-"
                }
                assert above <= failed, has

        for step in range(60):
            store.faults.clear()
            failed |= spoil_writes(store, rng, chains)
            base: list[int] = []
            if chains and rng.random() < 0.7:
                base = rng.choice(chains)
                base = base[: rng.randrange(0, len(base) + 1, page_size)]
            stop = page_size * rng.randrange(1, 6)
            tokens = [*base, *(rng.randrange(1 << 20) for _ in range(stop))][: 20 * page_size]
            chains.append(tokens)
            serving = start(r.serve([*tokens, step]))
            while not serving.done():
                await turns(3)
                look()
                await asyncio.sleep(0.05)
            await serving
            if rng.random() < 0.3:
                await r.cache.drain()
                look()
        store.faults.clear()
        failed.clear()
        await r.cache.drain()
        await asyncio.sleep(60)
        for tokens in chains:
            await r.serve([*tokens, 1])
            await r.serve([*tokens, 2])
            await r.cache.drain()
        look()
        for tokens in chains:
            wipe(r)
            kept = store.has(tokens).count("S") * page_size
            most = 6 * page_size
            assert await prefetched(r, tokens) == min(kept, most)
        wipe(r)
        at_rest(r)


def spoil_writes(store: Store, rng: random.Random, chains: list[list[int]]) -> set[bytes]:
    """Returns the pages of which single rows may fail."""
    rows: set[bytes] = set()
    for _ in range(rng.choice((0, 0, 1, 2))):
        pages = store.pages_of(rng.choice(chains)) if chains else []
        keys = [rng.choice(pages)] if pages and rng.random() < 0.5 else None
        what = rng.randrange(4)
        if what < 2:
            result = (WriteResult.REFUSED, WriteResult.FAILED)[what]
            store.fault("write", keys=keys, result=result)
            rows.update(keys or ())
            continue
        op: Any = rng.choice(("write", "write", "contains"))
        at: Any = rng.choice(("before", "inside", "after"))
        if what == 2:
            store.fault(op, keys=keys, at=at, error=rng.choice(ERRORS))
        else:
            store.fault(op, keys=keys, at=at, delay=rng.choice((0.1, 1.0, 5.0)))
    return rows


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
@on_virtual_clock
async def test_b45_no_order_of_reads_and_writes_mixes_up_bytes(policy: str, seed: int) -> None:
    """B45: device and host of eight pages each, storage that takes its time for each row: two
    thousand steps of publishing, prefetching, loading and giving up, and no byte is wrong in any
    tier, or in storage."""
    loop = asyncio.get_running_loop()
    copies = SeededExecutor(loop, num_threads=2, durations=(0.0, 0.01, 0.1))
    async with three_tiers(
        8, 8, host={"write_policy": policy}, options={"copy_executor": copies}
    ) as (r, store):
        for at in ("before", "inside", "after"):
            store.fault("read", at=at, delay=0.03)
            store.fault("write", at=at, delay=0.02)
        prompts = [[*seq(name, 8), *seq(other, 16)] for name in "AB" for other in "CDEF"]
        done = 0

        async def client(number: int) -> None:
            nonlocal done
            chance = random.Random(100 * seed + number)
            while done < 2000:
                done += 1
                tokens = chance.choice(prompts)[: chance.randrange(5, 25)]
                what = chance.random()
                if what < 0.6:
                    async with r.cache.lease([*tokens, done], timeout=None) as lease:
                        r.oracle.verify(lease, lease.key, 0, lease.prefix_len)
                        await asyncio.sleep(chance.choice((0, 0.01, 0.1)))
                        await r.compute(lease)
                elif what < 0.9:
                    with r.cache.prefetch(tokens) as handle:
                        await handle.wait(timeout=chance.choice((0.01, 0.1, 1.0)))
                else:
                    wipe(r)
                if chance.random() < 0.1:
                    r.check()

        await asyncio.gather(*[client(number) for number in range(3)])
        store.faults.clear()
        await r.cache.drain()
        at_rest(r)
        assert r.counters.pages_prefetched > 300
        assert r.counters.pages_loaded > 300
        for tokens in prompts:
            wipe(r)
            r.spoil_free_pages()
            async with r.cache.lease([*tokens, 1]) as lease:
                r.oracle.verify(lease, lease.key, 0, lease.prefix_len)
        await r.cache.drain()


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__} {error}")
@pytest.mark.parametrize("op", ["write", "contains"])
@pytest.mark.parametrize("at", ["before", "inside", "after"])
@on_virtual_clock
async def test_b65_one_call_of_a_hundred_raises(error: BaseException, op: Any, at: Any) -> None:
    """B65: the third. The others are stored, its rows are let go, it is counted, and what it was
    about is stored at its next use."""
    prompts = [[number, *seq("A", 8, 1)] for number in range(100)]
    async with three_tiers(300, 300, storage={"prefetch": {"threshold": 99}}) as (r, store):
        store.fault(op, call=3, error=error, at=at)
        for tokens in prompts:
            await r.serve(tokens)
            await r.cache.drain()
        at_rest(r)
        assert r.counters.backups_failed == 1
        assert r.stats.storage is not None
        assert r.stats.storage.counters.calls_failed == 1
        stored = [store.has(tokens) for tokens in prompts]
        missing = [number for number, has in enumerate(stored) if has != "SS"]
        assert missing == ([] if (op, at) == ("write", "after") else [2])
        await r.serve([*prompts[2], 1])
        await r.cache.drain()
        assert store.has(prompts[2]) == "SS"


@pytest.mark.parametrize("row", [b"", b"short", bytes(4096), b"x" * 4096, bytes(8192), "flipped"])
@on_virtual_clock
async def test_b64_b79_what_is_kept_is_not_a_row(row: Any) -> None:
    """B64, B79: somebody has left something else under the key of the third page: said to be there,
    two pages are read, nobody gets an error, it is not asked for again and again, and the next
    backup replaces it."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        key = store.key_of(A, 2)
        kept = store.rows[key]
        store.rows[key] = (
            kept[:700] + bytes([kept[700] ^ 1]) + kept[701:] if row == "flipped" else row
        )
        assert await store.contains([key]) == [True]
        r.spoil_free_pages()
        assert await prefetched(r, A) == 8
        reads = store.num_calls["read"]
        for _ in range(3):
            wipe(r)
            assert await prefetched(r, A) == 8
            assert await prefetched(r, A) == 8
        assert store.num_calls["read"] == reads + 3
        assert r.stats.storage is not None
        assert r.stats.storage.counters.objects_corrupt == 1
        await r.serve([*A, 1])
        await r.cache.drain()
        assert len(store.rows[key]) == 4096
        wipe(r)
        assert await prefetched(r, A) == 32
        wipe(r)
        at_rest(r)


@pytest.mark.parametrize("fails", ["write", "delete"])
@on_virtual_clock
async def test_b79_what_cannot_be_replaced_is_counted_and_not_tried_for_ever(fails: Any) -> None:
    """B79: tried once at each use, and no more."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        store.rows[store.key_of(A, 2)] = b""
        assert await prefetched(r, A) == 8
        if fails == "write":
            store.fault("write", result=WriteResult.REFUSED)
        else:
            store.fault("delete", error=OSError("read-only"))
        before = dict(store.num_calls)
        for uses in range(1, 4):
            await r.serve([*A, uses])
            await r.cache.drain()
            await asyncio.sleep(100)
            assert store.num_calls[fails] == before.get(fails, 0) + uses
        counters = r.counters
        assert counters.backups_refused + counters.backups_failed >= 3
        at_rest(r)


@on_virtual_clock
async def test_b72_a_page_that_goes_between_question_and_answer_shifts_nothing() -> None:
    """B72: the third of five is deleted meanwhile: two are used, with their own bytes, and the
    buffers of the others are free, once."""
    tokens = A[:20]
    async with three_tiers() as (r, store):
        await keep(r, tokens)
        gate = CallGate()
        store.fault("read", gate=gate, times=1)
        r.spoil_free_pages()
        with r.cache.prefetch(tokens) as handle:
            await gate.reached()
            await store.kept.delete([store.key_of(tokens, 2)])
            gate.open()
            assert await handle.wait("wait_complete") == 8
        assert r.stats.storage is not None
        assert r.stats.storage.counters.objects_read == 4
        assert (r.host.free, r.host.evictable) == (62, 2)
        at_rest(r)


@on_virtual_clock
async def test_b76_a_hundred_at_once_wait_for_their_turn() -> None:
    """B76: four calls at a time: all of a hundred come; when half of them are given up, the other
    half come."""
    prompts = [[number, *seq("A", 8, 1)] for number in range(100)]
    async with three_tiers(256, 512, storage={"max_concurrency": 4, "timeout": 60}) as (r, store):
        await keep(r, *prompts)
        for at in ("before", "after"):
            store.fault("read", at=at, delay=0.05)
            store.fault("contains", at=at, delay=0.01)
        for gives_up in (False, True):
            most = 0
            handles = [r.cache.prefetch(tokens) for tokens in prompts]
            if gives_up:
                await asyncio.sleep(0.2)
                for handle in handles[::2]:
                    handle.close()
                handles = handles[1::2]
            waiting = [start(handle.wait("wait_complete")) for handle in handles]
            while not all(task.done() for task in waiting):
                most = max(most, len(store.under_way))
                await asyncio.sleep(0.01)
            assert [task.result() for task in waiting] == [8] * len(waiting)
            assert most == 4
            for handle in handles:
                handle.close()
            await r.cache.drain()
            wipe(r)
        at_rest(r)


def test_b76_a_cache_of_another_loop_is_refused_and_a_new_one_works() -> None:
    """B76: a second `asyncio.run` opens its own, and finds what the first has kept; the first says
    what is wrong."""
    store, opened = Store(), list[UnifiedRadixCache]()

    async def main(expected: int) -> None:
        async with three_tiers(store=store) as (r, _):
            opened.append(r.cache)
            assert await r.serve([*A, 1]) == expected

    asyncio.run(main(0))
    asyncio.run(main(32))

    async def reuse() -> None:
        for use in (
            lambda: opened[0].prefetch(A),
            lambda: opened[0].lease(A),
            lambda: opened[0].storage.clear(),
        ):
            with pytest.raises((ClosedError, WrongThreadError), match="open"):
                result = use()
                if asyncio.iscoroutine(result):
                    await result

    asyncio.run(reuse())


# --- floods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_pages", [64, 1024])
@on_virtual_clock
async def test_b95_ten_thousand_pages_over_a_backend_of_20_ms_a_page(max_pages: int) -> None:
    """B95: as fast as they come: what waits stays within its bound, what is left out is counted, no
    request waits for storage, and the close comes within its limit."""
    storage = {"backup": {"max_pending": max_pages * 4096}, "prefetch": {"threshold": 999}}
    async with three_tiers(512, 2048, storage=storage) as (r, store):
        store.fault("write", delay=16 * 0.02)
        most, began = 0, now()
        for number in range(625):
            await r.serve([number, *seq("A", 64, 1)])
            assert r.stats.storage is not None
            most = max(most, r.stats.storage.pages_pending)
        assert now() == began
        assert max_pages - 16 <= most <= max_pages
        assert r.counters.backups_skipped > 0
        await asyncio.sleep(1)
        began = now()
        left = await r.cache.aclose(2.0)
        assert now() - began <= 2.0
        assert left == []


@pytest.mark.parametrize("limit", [0.0, 0.5, 7.0])
@pytest.mark.parametrize("op", ["contains", "read", "write", "delete", "aclose"])
@on_virtual_clock
async def test_b98_a_close_does_not_wait_longer_than_its_limit(limit: float, op: Any) -> None:
    """B98: a call hangs: the close returns within its limit and says what is quarantined, who waits
    gets what there is or an error, a second close is harmless, and use is refused."""
    gate = CallGate()
    async with three_tiers(storage={"timeout": 60}, is_owned=True) as (r, store):
        await keep(r, A)
        if op == "delete":
            store.rows[store.key_of(A, 2)] = b""
            assert await prefetched(r, A) == 8
        store.fault(op, gate=gate, at="before", stubborn=True)
        handle = waiter = None
        if op in ("write", "delete"):
            await r.serve([*A, *seq("B", 16)])
        elif op != "aclose":
            handle = r.cache.prefetch(A)
            waiter = start(handle.wait("wait_complete"))
        if op != "aclose":
            await gate.reached()
        began = now()
        left = await r.cache.aclose(limit)
        assert now() - began <= limit + 2.0
        assert [item.kind for item in left] == ["quarantine"] * (op in ("read", "write"))
        if handle is not None and waiter is not None:
            assert await waiter == 0
            handle.close()
        await r.cache.aclose(limit)
        with pytest.raises(ClosedError):
            r.cache.lease([1])
        with pytest.raises(ClosedError):
            r.cache.prefetch(A)
        gate.open()
        await asyncio.sleep(1)
        assert r.cache.outstanding() == []
        await r.cache.aclose(limit)
        assert store.num_calls["aclose"] == 1


@pytest.mark.parametrize("seed", range(3))
@on_virtual_clock
async def test_b98_fifty_resets_under_load(seed: int) -> None:
    """B93, B98: whatever is asked, read, written, queued and held at that moment: as many tasks as
    before, nothing held, all of the host free in the end, once, and storage is as good as ever."""
    rng = random.Random(seed)
    async with three_tiers(48, 48, storage={"max_concurrency": 3}) as (r, store):
        await r.cache.drain()
        before = len(other_tasks())
        for op in ("contains", "read", "write"):
            store.fault(op, at=rng.choice(("before", "inside")), delay=0.4, stubborn=op != "write")
        resets = 0

        async def client(number: int) -> None:
            chance = random.Random(100 * seed + number)
            while resets < 50:
                tokens = [*seq(chance.choice("AB"), 4 * chance.randint(1, 8)), chance.randrange(9)]
                try:
                    if chance.random() < 0.6:
                        await r.serve(tokens)
                    else:
                        with r.cache.prefetch(tokens) as handle:
                            await handle.wait(timeout=chance.choice((0.1, 1.0)))
                except StaleError:
                    pass
                await asyncio.sleep(0.1)

        clients = [start(client(number)) for number in range(6)]
        while resets < 50:
            await asyncio.sleep(rng.choice((0.0, 0.3, 2.0)))
            r.cache.reset()
            r.check()
            resets += 1
        await asyncio.gather(*clients)
        store.faults.clear()
        await r.cache.drain()
        assert len(other_tasks()) == before
        r.cache.reset()
        assert (r.host.free, r.pool.free) == (48, 48)
        at_rest(r)
        await r.serve([*A, 1])
        await r.cache.drain()
        wipe(r)
        assert await prefetched(r, A) == 32
