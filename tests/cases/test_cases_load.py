"""Cases of the way back, host to device: what a load finds, brings, shares, fails at and leaves
when nobody waits for it. One kind of state, two tiers. The numbers are the project's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.case_helpers import PAGE_SIZES, Copies, Tiers, tiers
from tests.lease_helpers import start, turns
from tiered_cache import Lease
from tiered_cache.errors import IntegrityError
from tiered_cache.transfer import copier
from tiered_cache.transfer.copier import CopyJob, Direction
from tiered_cache.types import Tier


@pytest.fixture
def page_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is a job of its own."""
    monkeypatch.setattr(copier, "JOB_BYTES", 1)


def loads_of(r: Tiers) -> list[int]:
    """How often each host page was loaded."""
    return [count for (direction, *_), count in r.copied.items() if direction is Direction.LOAD]


async def waiting(r: Tiers, tokens: list[int], **options: Any) -> asyncio.Task[Lease]:
    """A lease that has come as far as it can."""
    task = start(r.lease(tokens, **options))
    await turns()
    return task


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("total", "shared", "inside"), [(4, 2, 0.5), (4, 3, 0), (9, 1, 0.9)])
async def test_b04_a_load_brings_the_matched_front_of_an_evicted_node(
    page_size: int, total: int, shared: int, inside: float
) -> None:
    """B04: a request that leaves A in the middle of a node that only the host has reuses the whole
    pages before that, in right bytes, and the rest of A stays on the host."""
    async with tiers(2 * total + 4, page_size=page_size) as r:
        whole = r.prompt("A", total)
        await r.host_only(whole)
        r.spoil_free_pages()
        cut = shared * page_size + int(inside * page_size)
        async with r.cache.lease([*whole[:cut], *r.prompt("X", 1)]) as lease:
            assert lease.prefix_len == lease.hits.host == shared * page_size
            assert r.have(whole) == (shared, total - shared)
            await r.compute(lease)
        assert r.mirrored(whole) == total
        await r.settled()
        assert await r.serve(whole) == total * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("why", ["threshold", "failure", "timeout"])
async def test_b06_a_revived_node_s_pages_are_not_freed(page_size: int, why: str) -> None:
    """B06: A is on the host alone, and a request computes it anew in pages of its own: they become
    the tree's, and nothing that is free is cached."""
    threshold = 10**6 if why == "threshold" else 1
    async with tiers(12, page_size=page_size, host={"load_back_threshold": threshold}) as r:
        tokens = r.prompt("A", 4)
        await r.host_only(tokens)
        options: dict[str, Any] = {}
        if why == "failure":
            r.fault = lambda job: OSError("no") if job.direction is Direction.LOAD else None
        elif why == "timeout":
            r.copies.shut()
            options["load_timeout"] = 0.01
        async with r.cache.lease(tokens, **options) as lease:
            assert lease.prefix_len == 0
            if why == "timeout":
                r.copies.open()
            await r.compute(lease)
            lease.finish()
        await r.settled()
        assert r.pool.free == 8
        r.spoil_free_pages()
        assert r.have(tokens) == (4, 0)
        r.check()
        assert await r.serve(tokens) == 4 * page_size


# --- between a match and its load -----------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layerwise", [False, True])
async def test_b50_what_the_host_loses_before_the_load_is_not_loaded(
    page_size: int, layerwise: bool
) -> None:
    """B50: the host had eight pages and evicts four; the lease is shorter, never foreign."""
    async with tiers(12, page_size=page_size) as r:
        await r.serve(r.prompt("A", 4))
        tokens = r.prompt("A", 8)
        await r.host_only(tokens)
        assert r.evict_host(4) == 4
        r.spoil_free_pages()
        async with r.cache.lease(tokens, layerwise=layerwise) as lease:
            assert lease.prefix_len == 4 * page_size
            await r.compute(lease)
        await r.settled()


async def test_b50_the_host_evicts_while_a_lease_waits_for_admission() -> None:
    """B50: what was there when it came is not what counts."""
    async with tiers(10) as r:
        await r.serve(r.prompt("A", 4))
        tokens = r.prompt("A", 8)
        await r.host_only(tokens)
        holder = await r.lease(r.prompt("B", 6))
        task = await waiting(r, tokens)
        assert not task.done()
        r.evict_host(4)
        r.spoil_free_pages()
        holder.close()
        lease = await task
        assert lease.prefix_len == 16
        await r.compute(lease)
        lease.close()
        await r.settled()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
async def test_b50_what_is_being_loaded_is_not_evicted(page_size: int) -> None:
    """B50: the source is held until the copy has ended."""
    async with tiers(12, page_size=page_size) as r:
        tokens = r.prompt("A", 8)
        await r.host_only(tokens)
        r.copies.shut()
        task = await waiting(r, tokens)
        assert r.evict_host(8) == 0
        r.spoil_free_pages()
        r.copies.open()
        lease = await task
        assert lease.prefix_len == 8 * page_size
        await r.compute(lease)
        lease.close()
        await r.settled()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("need", [1, 4, 7])
async def test_b16_eviction_passes_over_what_a_load_reads(page_size: int, need: int) -> None:
    """B16: eight one-page leaves on the host, the oldest is being read: of those asked the next
    ones go, and it keeps its bytes."""
    async with tiers(20, 8, page_size=page_size) as r:
        prompts = [r.prompt("A", number + 1, number) for number in range(0, 16, 2)]
        for tokens in prompts:
            await r.host_only(tokens)
        assert r.host.free == 0
        r.copies.shut()
        load = await waiting(r, prompts[0])
        for tokens in prompts[1:]:
            r.have(tokens)  # dates them: the one that is read is the oldest again
        await r.serve(r.prompt("B", need))
        await turns()
        assert r.host.in_flight == need
        assert r.host.evictable + r.host.protected == 8 - need
        left = [r.mirrored(tokens) for tokens in prompts]
        assert left == [1] + [0] * need + [1] * (7 - need)
        r.spoil_free_pages()
        r.copies.open()
        lease = await load
        assert lease.prefix_len == page_size
        await r.compute(lease)
        lease.close()
        await r.settled()


# --- sharing a load -------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shared", [1, 5, 8])
@pytest.mark.parametrize("layerwise", [(False, False), (True, False), (False, True), (True, True)])
async def test_b47_a_second_lease_joins_a_load_in_flight(
    page_size: int, shared: int, layerwise: tuple[bool, bool]
) -> None:
    """B47: R2 wants a part of what R1 is loading, to any depth: both get right bytes, and no page
    is copied twice."""
    async with tiers(24, page_size=page_size) as r:
        tokens = r.prompt("A", 8)
        await r.host_only(tokens)
        r.spoil_free_pages()
        r.copies.shut()
        first = await waiting(r, tokens, layerwise=layerwise[0])
        second = await waiting(r, r.fork("A", shared, "X"), layerwise=layerwise[1])
        assert (first.done(), second.done()) == layerwise
        r.cache.check_integrity()
        r.copies.open()
        for task, pages in ((first, 8), (second, shared)):
            lease = await task
            await lease.wait_layer(1)
            assert lease.prefix_len == pages * page_size
            await r.compute(lease)
            lease.close()
        assert loads_of(r) == [1] * 8
        assert r.counters.loads_joined == 1
        await r.settled()


async def test_b47_a_deeper_lease_loads_only_what_the_other_does_not() -> None:
    """B47: R1 loads the front, R2 joins that and loads the rest below it."""
    async with tiers(24) as r:
        tokens = r.prompt("A", 8)
        await r.host_only(tokens)
        r.copies.shut()
        first = await waiting(r, r.fork("A", 3, "X"))
        second = await waiting(r, tokens)
        r.copies.open()
        assert (await first).prefix_len == 12
        assert (await second).prefix_len == 32
        for task in (first, second):
            await r.compute(await task)
            (await task).close()
        assert loads_of(r) == [1] * 8
        await r.settled()


@pytest.mark.parametrize("who", ["first", "second", "both"])
async def test_b47_one_of_two_that_share_a_load_goes(who: str) -> None:
    """B47: the other still gets all of it."""
    async with tiers(24) as r:
        tokens = r.prompt("A", 8)
        await r.host_only(tokens)
        r.copies.shut()
        tasks = {"first": await waiting(r, tokens), "second": await waiting(r, tokens)}
        for name, task in tasks.items():
            if who in (name, "both"):
                task.cancel()
        await turns()
        r.cache.check_integrity()
        r.copies.open()
        await asyncio.wait(tasks.values())
        for name, task in tasks.items():
            assert task.cancelled() == (who in (name, "both"))
            if not task.cancelled():
                assert task.result().prefix_len == 32
                await r.compute(task.result())
                task.result().close()
        await r.settled()
        assert r.pool.protected == 0


@pytest.mark.usefixtures("page_jobs")
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("arrived", [0, 2])
async def test_b47_who_joins_a_load_that_was_given_up_gets_all_the_same(
    layerwise: bool, arrived: int
) -> None:
    """B47: R1 is cancelled and its load ends with the job that runs; R2 comes before that, and is
    brought the rest without an error, for nothing has failed."""
    async with tiers(24) as r:
        tokens = r.prompt("A", 6)
        await r.host_only(tokens)
        r.copies.shut()
        first = await waiting(r, tokens)
        for _ in range(arrived):
            r.copies.step()
            await turns()
        first.cancel()
        await turns()
        assert r.copies.num_running == 1
        second = await waiting(r, tokens, layerwise=layerwise)
        r.copies.open()
        lease = await second
        await lease.wait_layer(1)
        assert lease.prefix_len == 24
        await r.compute(lease)
        lease.close()
        await r.settled()


# --- failing --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("page_jobs")
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("fails_at", [0, 1, 87, 159])
async def test_b48_what_has_arrived_is_kept_and_the_rest_goes_home_once(
    page_size: int, fails_at: int
) -> None:
    """B48: a load of 160 pages fails at one, a second lease waits for the same: both have what has
    arrived before it, the tree too, and every other page goes home once."""
    async with tiers(400, 160, page_size=page_size) as r:
        tokens = r.prompt("A", 160)
        await r.host_only(tokens)
        row = r.host_rows(tokens)[fails_at]
        r.fault = lambda job: (
            OSError("bad page") if job.direction is Direction.LOAD and row in job.host_ids else None
        )
        r.spoil_free_pages()
        r.copies.shut()
        first = await waiting(r, tokens)
        second = await waiting(r, tokens)
        assert r.have(tokens) == (0, 160)
        r.copies.open()
        for task in (first, second):
            lease = await task
            assert lease.prefix_len == fails_at * page_size
            assert "a load from the host failed" in lease.why
        r.check()
        assert r.pool.free + r.pool.protected == 400
        assert r.have(tokens) == (fails_at, 160 - fails_at)
        r.fault = lambda job: None
        for task in (first, second):
            await r.compute(await task)
            (await task).close()
        await r.settled()
        assert r.have(tokens) == (160, 0)


@pytest.mark.usefixtures("page_jobs")
async def test_b48_a_waiter_of_a_failed_load_plans_once_more() -> None:
    """B48: the error came once; who had joined loads the rest for itself."""
    async with tiers(400, 160) as r:
        tokens = r.prompt("A", 160)
        await r.host_only(tokens)
        row, errors = r.host_rows(tokens)[87], [OSError("once")]

        def fault(job: CopyJob) -> BaseException | None:
            return errors.pop() if row in job.host_ids and errors else None

        r.fault = fault
        r.copies.shut()
        first = await waiting(r, tokens)
        second = await waiting(r, tokens)
        r.copies.open()
        assert (await second).prefix_len == 640
        assert (await first).prefix_len == 87 * 4
        for task in (first, second):
            await r.compute(await task)
            (await task).close()
        await r.settled()


@pytest.mark.usefixtures("page_jobs")
@pytest.mark.parametrize(
    "error",
    [
        OSError("I/O"),
        ValueError("bad"),
        MemoryError("full"),
        IntegrityError("range"),
        TimeoutError("late"),
        asyncio.CancelledError(),
        StopIteration(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("layerwise", [False, True])
async def test_b51_a_failed_copy_makes_a_shorter_prefix(
    error: BaseException, layerwise: bool
) -> None:
    """B51: page 3 of 8 fails; two pages are there and nothing beyond is matchable; layer by layer,
    none is."""
    async with tiers(12) as r:
        tokens = r.prompt("A", 8)
        await r.host_only(tokens)
        row = r.host_rows(tokens)[2]
        r.fault = lambda job: error if row in job.host_ids else None
        r.spoil_free_pages()
        async with r.cache.lease(tokens, layerwise=layerwise) as lease:
            await turns(40)
            there = 0 if layerwise else 2
            assert lease.prefix_len == there * 4
            assert r.have(tokens) == (there, 8 - there)
            assert r.counters.loads_failed == 1
            r.check()
            r.fault = lambda job: None
            await r.compute(lease)
        await r.settled()
        assert await r.serve(tokens) == 32


# --- cancelling -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("page_jobs")
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("moves_at", ["start", "end"])
@pytest.mark.parametrize("arrived", [0, 1, 3])
@pytest.mark.parametrize("order", ["cancel first", "copy first", "both at once"])
@pytest.mark.parametrize("layerwise", [False, True])
async def test_b96_cancelled_during_a_load(
    page_size: int, moves_at: Any, arrived: int, order: str, layerwise: bool
) -> None:
    """B96: nobody gets the pages that a copy may still write; they are free when it has ended,
    and who took everything else meanwhile keeps its bytes."""
    copies = Copies(moves_at=moves_at)
    async with tiers(16, page_size=page_size, copies=copies) as r:
        tokens = r.prompt("A", 5)
        await r.host_only(tokens)
        copies.shut()
        task = await waiting(r, tokens, layerwise=layerwise)
        for _ in range(arrived):
            copies.step()
            await turns()
        targets = r.in_flight(Tier.DEVICE)
        assert len(targets) == 5

        def cancel() -> None:
            if layerwise:
                task.result().close()
            else:
                task.cancel()

        if order == "cancel first":
            cancel()
        else:
            copies.step()
            if order == "copy first":
                await turns()
            cancel()
        await turns()
        others = []
        if room := r.pool.free + r.pool.evictable:
            others.append(await r.lease(r.prompt("B", room - 1)))
            await r.compute(others[0])
            if copies.num_running:
                assert not targets.intersection(others[0].pages["full"].tolist())
        r.spoil_free_pages()
        copies.open()
        await turns(40)
        for other in others:
            r.oracle.verify(other, other.key, 0, other.computed)
            other.close()
        await asyncio.wait([task])
        await r.settled()
        assert r.pool.free + r.pool.evictable == 16
