"""What the schedules have found, each as short as it gets; the docstrings name a seed of that
time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest

from tests.hybrid_helpers import hybrid_rig, hybrid_tiers, kept, lose, objects
from tests.lease_helpers import P, Rig, cancelled, chunk_of, rig, seq, start, turns
from tests.schedule_stacks import StackShape, known
from tests.schedules import prove_lease
from tests.storage_helpers import Store, keep, on_virtual_clock, prefetched, three_tiers
from tests.tier_helpers import Copies, demote, on_tier, soon, store, tiers, transfers
from tiered_cache import (
    AdmissionTimeout,
    BackendError,
    CapacityError,
    Chunk,
    ClosedError,
    Lease,
    LoadFailed,
    StaleError,
)
from tiered_cache.layers import LayerProgress, stale_load
from tiered_cache.storage.backend import WriteResult
from tiered_cache.testing.faulty_backend import CallGate, flipped
from tiered_cache.transfer.copier import Direction
from tiered_cache.tree.components import swa
from tiered_cache.types import Boundary, EvictParams, Tier

A, B, C = seq("A", 25), seq("B", 25), seq("C", 25)
FORK = A[:12] + B[12:]
"""Shares three pages with A."""


async def test_of_anothers_load_a_lease_uses_what_is_on_its_own_path() -> None:
    """Seed 75: the load goes on below the fork, and the page table named its pages there too."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        first = await r.lease(A, layerwise=True)
        second = await r.lease(FORK, layerwise=True)
        assert (first.prefix_len, second.prefix_len) == (24, 12)
        r.check()
        await copies.all()
        await r.compute(second)
        await r.compute(first)
        second.close()
        first.close()
        await copies.all()


async def test_its_own_load_begins_where_anothers_leaves_its_path() -> None:
    """Seed 1796039720905: of the other's load the page table named all as far as its own went, and
    the model read the other's pages below the fork."""
    async with tiers() as (r, copies):
        await store(r, copies, A, FORK)
        r.spoil_free_pages()
        first = await r.lease(A, layerwise=True)
        second = await r.lease(FORK, layerwise=True)
        theirs, own = transfers(r)
        assert [(load.start, load.depth) for load in (theirs, own)] == [(0, 24), (12, 24)]
        ids = [*theirs.device_ids[:3], *own.device_ids]
        assert (second.prefix_len, second.pages["full"][:6].tolist()) == (24, ids)

        def model(chunk: Chunk) -> list[int]:
            chunk.lease.layers.wait(1)
            return r.model(chunk)

        run = start(second.run(model, await chunk_of(second)))
        await copies.all()
        assert await run == [25]
        r.check()
        second.close()
        first.close()


async def test_who_joined_a_load_hears_that_the_cache_was_closed() -> None:
    """Seed 24: the joined load was cancelled, and planning again met a lease without a receipt."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        first = start(r.lease(A[:13]))
        await turns()
        second = start(r.lease(A))
        await turns()
        assert r.counters.loads_joined == 1
        copies.start()
        await r.cache.aclose(0)
        copies.end()
        for work in (first, second):
            with pytest.raises(ClosedError):
                await work
        await r.cache.aclose()


async def test_a_job_that_ends_after_a_reset_does_not_undo_the_failure() -> None:
    """Seed 489: the model waited for ever for the layers of a load that nobody would commit."""
    progress = LayerProgress((0, 1, 2), ())
    progress.fail(stale_load())
    progress.advance(2)
    with pytest.raises(StaleError):
        progress.wait(0)
    with pytest.raises(StaleError):
        await progress.arrive(2)


async def test_a_commit_under_a_fence_leaves_what_is_promised_to_others() -> None:
    """Seed 538: it held another's equal pages, and its own did not go home before the fence was
    lifted; so it waits, if there is no room for both."""
    async with rig(pages=8) as r:
        first = await r.lease(A[:9])
        chunk = await chunk_of(first, 8)
        await first.run(r.model, chunk)
        async with r.cache.lease(A[:9]) as second:
            await second.run(r.model, again := await chunk_of(second, 8))
            second.commit(again)
        third = await r.lease(C[:20])
        assert (r.pool.free, r.pool.evictable, r.pool.unspent) == (4, 2, 6)
        written = asyncio.Event()
        assert first.commit(chunk, ready=written) == 0
        assert first.committed == 0
        r.check()
        await r.compute(third)  # takes all that was promised
        written.set()
        await turns()
        assert first.committed == 8
        r.check()
        await r.compute(first)
        first.close()
        third.close()


async def test_with_room_for_both_a_commit_under_a_fence_takes_the_canonical_pages() -> None:
    """Its own ones are quarantined until the fence is lifted."""
    async with rig(pages=8) as r:
        first = await r.lease(A[:9])
        chunk = await chunk_of(first, 8)
        await first.run(r.model, chunk)
        async with r.cache.lease(A[:9]) as second:
            await second.run(r.model, again := await chunk_of(second, 8))
            second.commit(again)
            canonical = second.pages["full"][:2].tolist()
        written = asyncio.Event()
        first.commit(chunk, ready=written)
        assert (first.committed, first.pages["full"][:2].tolist()) == (8, canonical)
        assert (r.pool.free, r.pool.evictable) == (4, 0)
        r.check()
        first.close()
        assert r.pool.free == 4
        written.set()
        await turns()
        assert (r.pool.free, r.pool.evictable) == (6, 2)


async def test_growth_after_a_truncation_under_a_fence_cannot_fail() -> None:
    """The pages that it gave up are its next ones: the same device writes them, later."""
    async with rig(pages=4) as r:
        lease = await r.lease(A[:5], reserve=8)
        await lease.run(r.model, chunk := await chunk_of(lease))
        written = asyncio.Event()
        lease.commit(chunk, ready=written)
        for _ in range(2):
            for token in range(4):
                lease.append(token)
            lease.truncate(5)
            r.check()
        for token in range(8):
            lease.append(token)
        assert (r.pool.free, r.pool.unspent) == (0, 0)
        r.check()
        written.set()
        await turns()
        r.check()
        lease.close()
        assert r.pool.free == 3


async def test_a_fence_that_stands_when_the_cache_is_closed_is_lifted_later() -> None:
    """Seed 464: whoever was to lift it had been stopped, and its pages were quarantined for
    ever."""
    async with rig(pages=4) as r:
        lease = await r.lease(A[:9])
        await lease.run(r.model, chunk := await chunk_of(lease))
        written = asyncio.Event()
        lease.commit(chunk, ready=written)
        left = await r.cache.aclose(0)
        assert [item.kind for item in left] == ["quarantine"]
        written.set()
        assert await r.cache.aclose() == []


async def test_an_engines_request_ends_without_a_word_after_a_reset() -> None:
    """Closing what is stale never raises (semantics §12.1): its pages go home."""
    async with rig(pages=8) as r:
        await r.serve(A[:9])
        for is_insert in (True, False):
            request = r.cache.begin_req(A[:13])
            held = request.committed // P
            request.table.write(held, r.cache.allocate(4 - held))
            request.computed = 13
            r.cache.reset()
            r.check()
            r.cache.cache_finished_req(request, is_insert)
            assert (r.pool.free, r.pool.quarantined) == (8, 0)


async def _published_by_another(r: Rig, tokens: list[int]) -> Lease:
    """A lease that has computed a prompt itself, although the host has it, and publishes it."""
    lease = await r.lease(tokens, load_timeout=0.0)
    chunk = await chunk_of(lease)
    r.oracle.write(chunk, lease.key, chunk.start, chunk.stop)
    lease.commit(chunk)
    return lease


async def test_a_run_above_a_load_that_fails_counts_for_nothing() -> None:
    """Seed 1796037447896: the lease held what another had published, and its table still named the
    load's pages, which had gone home, for the run that was to hear of it. The schedules read them
    there, and took them for wrong bytes."""
    async with tiers(32) as (r, copies):
        await store(r, copies, A)
        lease = await r.lease(A + B[:8], layerwise=True)
        gate = threading.Event()
        r.at_exit(gate.set)

        def model(chunk: Chunk) -> None:
            gate.wait(5.0)
            lease.layers.wait(0)

        runs = [start(lease.run(model, chunk := await chunk_of(lease)))]
        await turns()
        other = await _published_by_another(r, A)
        copies.fails = lambda job: True
        await copies.all()
        r.spoil_free_pages()
        assert (lease.committed, lease.is_running) == (24, True)
        assert set(lease.pages["full"][:6]) <= set(r.cache._parts.allocators[0].free_ids())
        prove_lease(r.oracle, lease)
        r.check()
        lease.append(0)
        await chunk_of(lease)  # handed out now, it takes nothing from what the runs wait for
        runs.append(start(lease.run(model, chunk)))
        await turns()
        gate.set()
        for run in runs:
            with pytest.raises(LoadFailed):
                await run
        assert lease.pages["full"][:6].tolist() == other.pages["full"][:6].tolist()
        assert (lease.computed, lease.committed) == (24, 24)
        with pytest.raises(StaleError, match="truncated away"):
            lease.commit(chunk)
        prove_lease(r.oracle, lease)
        await r.compute(lease)
        assert lease.committed == 32
        r.check()
        lease.close()
        other.close()
        await copies.all()


async def test_a_lease_may_hold_what_its_run_still_waits_for() -> None:
    """The same, and nothing fails: the upper of two loads ends when another has published all."""
    async with tiers(32) as (r, copies):
        await store(r, copies, A)
        r.spoil_free_pages()
        upper = await r.lease(A[:13], layerwise=True)
        lease = await r.lease(A + B[:8], layerwise=True)

        def model(chunk: Chunk) -> list[int]:
            lease.layers.wait(0)
            return r.model(chunk)

        run = start(lease.run(model, await chunk_of(lease)))
        await turns()
        other = await _published_by_another(r, A)
        await copies.one()
        assert [(load.start, load.depth) for load in transfers(r)] == [(12, 24)]
        assert (lease.committed, lease.is_running) == (24, True)
        prove_lease(r.oracle, lease)
        r.check()
        await copies.all()
        assert await run == [33]
        prove_lease(r.oracle, lease)
        r.check()
        for held in (upper, lease, other):
            held.close()
        await copies.all()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("has_moved", [False, True])
async def test_who_plans_once_more_goes_on_from_what_others_publish(
    layerwise: bool, has_moved: bool
) -> None:
    """Found beside that. A load above its own fails, and in the same turn others publish what is
    missing: the page table had the rest at its front, or the load was never committed."""
    async with tiers(24) as (r, copies):
        await store(r, copies, A)
        r.spoil_free_pages()
        other = await r.lease(A[:17], load_timeout=0.0)
        published = await chunk_of(other)
        r.oracle.write(published, other.key, published.start, published.stop)
        gone = start(r.lease(A[:9]))
        await turns()
        job = copies.start()
        await cancelled(gone)
        copies.fails = lambda job: job.num_pages == 2
        work = start(r.lease(A, layerwise=layerwise))
        await turns()
        above, own = transfers(r)
        assert (above.is_given_up, above.depth, own.start) == (True, 8, 8)
        if has_moved:
            await copies.one()
        assert own.has_moved == has_moved
        job.finish()
        while above in transfers(r):
            await asyncio.sleep(0)
        other.commit(published)
        await turns()
        r.check()
        await copies.all()
        lease = await soon(work)
        assert (lease.prefix_len, lease.committed, transfers(r)) == (24, 24, [])
        assert lease.pages["full"][:4].tolist() == other.pages["full"][:4].tolist()
        prove_lease(r.oracle, lease)
        await r.compute(lease)
        r.check()
        lease.close()
        other.close()


async def test_a_store_whose_rows_are_made_of_what_is_below_it() -> None:
    """Seed 1796043080289: a node that only the host had named the path, making room took it away,
    and the rows that were taken were nobody's."""
    async with tiers(rows=4) as (r, copies):
        tree, controller = r.cache.tree, r.cache._controller
        await r.serve(A[:9])
        await copies.all()
        upper = next(iter(tree.root.children.values()))
        tree.believe_stored(upper, 0, True)
        await r.cache.evict_host(EvictParams(2 * P))  # what storage has is spare
        await r.serve(A[:17])
        await copies.all()
        lower = next(iter(upper.children.values()))
        demote(r, 2)
        tree.believe_stored(upper, 0, False)
        pages, parts = controller.host_pages, controller.write_policy._parts  # type: ignore[attr-defined]
        assert pages is not None, "there is a host tier"
        rows = pages.take_up_to(0, 2)
        assert (on_tier(r, A[:16]), r.host.free) == ("DDHH", 0)
        (piece,) = tree.plan_transfer(Boundary(lower, 16), 0, Tier.HOST)
        assert parts.store(lower, 0, piece, lambda store: None) == 2
        pages.give_back([rows])
        r.check()
        await copies.all()
        assert on_tier(r, A[:16]) == "BB--"


@contextlib.asynccontextmanager
async def small_windows(
    pages: int, windows: int, **sections: Any
) -> AsyncIterator[tuple[Rig, Copies]]:
    """Two tiers of a model with a window of three pages, and so many pages of it; chunks of two."""
    copies = Copies()
    device = {"tokens": pages * P, "ratio": {"swa": (windows + 0.01) / pages}}
    given = {"device": device, "host": {"tokens": 64 * P}, "options": {"copy_executor": copies}}
    with mock.patch.object(swa, "CHUNK_TOKENS", 2 * P):
        async with hybrid_rig("swa", pages, **given, **sections) as r:
            copies.attach(r.cache._parts.host.copier)  # type: ignore[union-attr]
            r.at_exit(copies.end)
            yield r, copies


async def _of_which_the_device_has_half(r: Rig, copies: Copies) -> None:
    """Of A the device has the first three pages, and none of its window; the host has all."""
    await r.serve(A)
    await copies.all()
    await r.cache.evict(EvictParams(num_pages={"swa": 1 << 10}))
    assert (r.pool.evictable, r.stats.pools["swa"].evictable) == (3, 0)


@pytest.mark.parametrize("pages", [7, 8, 9, 10])
@pytest.mark.parametrize("brings", [True, False])
async def test_what_a_load_holds_on_the_device_is_in_its_lease_s_promise(
    pages: int, brings: bool
) -> None:
    """Seeds 20261130000995, 4744 and 5242: the load held what the device had of the prompt, and its
    lease and others had been promised as much."""
    async with small_windows(pages, 12) as (r, copies):
        await _of_which_the_device_has_half(r, copies)
        granting = start(r.lease(A, reserve=3))  # seven pages in all
        await turns()
        assert transfers(r)
        r.check()
        copies.fails = lambda job: not brings
        await copies.all()
        lease = await soon(granting)
        assert lease.prefix_len == (24 if brings else 0)
        r.check()
        await r.compute(lease)
        lease.close()
        await copies.all()


@pytest.mark.parametrize("pages", [9, 10])
async def test_a_lease_that_has_lost_its_room_to_a_load_starts_over(pages: int) -> None:
    """Beside those: what its load holds of the device others may hold on to when the load has
    failed. Of nine pages six are left, which are fewer than it was promised."""
    async with small_windows(pages, 20) as (r, copies):
        await _of_which_the_device_has_half(r, copies)
        granting = start(r.lease(A, reserve=3))
        await turns()
        (node,) = r.cache.tree.root.children.values()
        held = r.cache.inc_lock_ref(Boundary(node, 12))
        copies.fails = lambda job: True
        await copies.all()
        r.check()
        assert granting.done() == (pages == 10)
        r.cache.dec_lock_ref(held)
        copies.fails = lambda job: False
        await turns()
        await copies.all()
        lease = await soon(granting)
        assert lease.prefix_len == (0 if pages == 10 else 24)
        r.check()
        await r.compute(lease)
        lease.close()
        await copies.all()


async def test_what_a_load_has_brought_of_the_first_component_waits_for_its_window() -> None:
    """Seed 30411 of windows alone: the first component's pages had come, were held by the load of
    the window, which had not, and the lease was promised as many again."""
    async with small_windows(8, 12) as (r, copies):
        await r.serve(A)
        await copies.all()
        await r.cache.evict(EvictParams(1 << 10))
        granting = start(r.lease(A, reserve=3))
        await turns()
        base = tuple(copies.queued)[-1]  # behind the window, which is there only with it
        base.start()
        base.finish()
        await turns()
        r.check()
        assert [load.component for load in transfers(r)] == [1]
        await copies.all()
        lease = await soon(granting)
        assert lease.prefix_len == 24
        await r.compute(lease)
        lease.close()
        await copies.all()


@pytest.mark.parametrize("windows", range(18, 28))
async def test_a_window_that_two_hold_is_room_for_both(windows: int) -> None:
    """Beside seed 20261130001875: who let go of it first had been promised as many pages again, and
    there was nothing to take them from, for the other held on. Each needs eleven (§11.5)."""
    async with small_windows(64, windows) as (r, copies):
        await r.serve(A)
        await copies.all()
        leases = []
        for name in "XY":
            with contextlib.suppress(AdmissionTimeout):
                leases.append(await r.lease(A[:24] + seq(name, 80), timeout=0))
        assert {lease.prefix_len for lease in leases} == {24}
        assert len(leases) == (2 if windows >= 22 else 1)
        with contextlib.suppress(AdmissionTimeout):  # who holds none of it needs four
            leases.append(await r.lease(seq("Z", 16), timeout=0))
        assert len(leases) == (3 if windows >= 26 else 2)
        r.check()
        for _ in range(12):
            for lease in leases:
                chunk = await chunk_of(lease, 2 * P) if lease.computed < len(lease) else None
                if chunk is not None:
                    await lease.run(r.model, chunk)
                    lease.commit(chunk)
                r.check()
        for lease in leases:
            assert lease.committed == len(lease)
            lease.close()
        await copies.all()


async def test_a_window_is_held_without_what_is_above_it() -> None:
    """Found on the way: a prefix that ends inside a long node held all of that, and its lease was
    promised as much less; where that was all that it needs, it had no page to go on with."""
    long = seq("A", 60)
    async with small_windows(32, 15) as (r, copies):
        first = await r.lease([*long, 0])
        chunk = await chunk_of(first, 60)
        r.oracle.write(chunk, first.key, 0, 60)  # not in a run: no page has been left behind
        first.commit(chunk)
        first.close()
        await copies.all()
        lease = await r.lease(long[:45] + seq("X", 40))
        other = await r.lease(seq("Y", 16))
        assert (lease.prefix_len, r.stats.pools["swa"].protected) == (44, 3)
        r.check()
        await r.compute(lease)
        lease.close()
        other.close()
        await copies.all()


async def test_all_that_is_pending_may_be_more_than_a_window_is_promised() -> None:
    """Seed 20261130001875: two leases of nine pages had been promised six each of a window of
    twelve; who wants all at once has to take what there is."""
    async with small_windows(32, 11) as (r, copies):
        lease = await r.lease(seq("A", 60))
        with pytest.raises(CapacityError, match="swa"):
            _ = lease.pending
        assert (lease.computed, r.stats.pools["swa"].unspent) == (0, 11)
        await r.compute(lease)
        assert lease.committed == 60
        lease.close()
        await copies.all()


async def test_rows_that_storage_reads_are_quiet_when_the_device_gives_up_their_base() -> None:
    """Seed 1234 of stacks on storage: what a window has on the host went with a node whose base was
    on the device alone, and others were given its rows while they were being written."""
    async with hybrid_tiers("swa") as (r, store):
        store.fault("write", keys=objects(r, store, "swa", A), result=WriteResult.REFUSED)
        await r.serve(A)
        await r.cache.drain()
        controller = r.cache._controller
        assert controller.host_pages is not None
        controller.host_pages.evict([1 << 20, 0])  # the base, a copy of which is stored
        store.faults.clear()
        store.fault("write", gate=(gate := CallGate()))
        r.at_exit(gate.open)
        await r.serve(A)
        await gate.reached()
        (call,) = controller.storage_calls()
        assert call.component == 1
        controller.accounts.evict([1 << 20, 0])
        assert r.pool.free == r.pool.capacity
        swa = r.stats.host["swa"]
        assert (swa.protected, swa.quarantined) == (0, len(call.ids))
        r.check()
        r.oracle.spoil("swa", controller.host_pages.allocators[1].free_ids(), on_host=True)
        gate.open()
        await r.cache.drain()
        assert r.stats.host["swa"].free == r.stats.host["swa"].capacity
        r.check()


async def test_a_component_of_a_user_s_own_in_a_lease() -> None:
    """It was taken for a window that reaches back to the first page: a request that had matched a
    prefix went on from its beginning after a run that failed, kept all its pages, and wrote to page
    -1 when the one that it went on in was gone; what an insert left of them was lost."""
    shape = StackShape(("sinks",), (0,), 4, 4, (16,), (4,), has_host=True)
    device = {"tokens": 16 * P, "ratio": shape.ratio(shape.device, 16)}
    with known(shape):
        async with rig(model=shape.model(), device=device) as r:
            await r.serve(A[:17])
            async with r.cache.lease(A, reserve=8, rollback=2) as lease:
                assert (lease.prefix_len, lease.pages["sinks"][:4].tolist()[1:]) == (16, [-1] * 3)
                with pytest.raises(ZeroDivisionError):
                    await lease.run(lambda chunk: 1 // 0, await chunk_of(lease, 6))
                assert lease.computed == 16
                await lease.run(r.model, lease.allocate(9))
                sinks = r.stats.pools["sinks"]
                assert (sinks.protected, sinks.private) == (1, 2)  # of 23 tokens on, and no more
                lease.truncate(23)
                with pytest.raises(ValueError, match="not kept"):
                    lease.truncate(18)
                await lease.run(r.model, lease.append(7))
                r.check()
                lease.finish()
                r.check()
            sinks = r.stats.pools["sinks"]
            assert (sinks.evictable, sinks.free) == (1, 15)


async def test_a_boundary_that_does_not_come_leaves_room_for_the_next() -> None:
    """Seed 7000308: what had been read of a window for the deepest boundary, before a page of it
    was found to be wrong, took all that the prefetch may have, and it brought nothing at all."""
    host = {"tokens": 16 * P, "ratio": {"swa": 6.01 / 16}}
    async with hybrid_tiers("swa", 16, 16, host=host) as (r, store):
        await keep(r, A[:13], A)
        assert kept(r, store, "swa", A) == "SSSSSS"
        wrong = objects(r, store, "swa", A)[5]
        store.fault("read", keys=[wrong], change=flipped(600))
        lose(r, store, "swa", A, 2)  # so that only one and two pages are windows, and all six
        assert await prefetched(r, A, policy="wait_complete") == 8
        assert r.stats.host["swa"].evictable == 4
        await r.cache.drain()
        r.check()


async def test_a_prefetch_keeps_what_the_host_has_below_what_is_missing() -> None:
    """Not by a schedule, but by the demo on a model with windows: room for the beginning of a
    prompt, which only storage had, was made by giving up its end, which only the host had; then the
    window at its end had to come from storage, too, and was not asked for."""
    async with hybrid_tiers("swa", 16, 8) as (r, _):
        controller = r.cache._controller
        await r.serve(A[:13])
        await r.cache.drain()
        assert controller.host_pages is not None
        controller.host_pages.evict([1 << 20, 0])
        await r.serve(A)
        await r.serve(B[:21])  # what is younger, and would go after
        await r.cache.drain()
        await r.cache.evict(EvictParams(1 << 10))
        assert (on_tier(r, A), on_tier(r, B[:20])) == ("---HHH", "HHHHH")
        assert await prefetched(r, A, policy="wait_complete") == 24
        r.check()


async def test_what_waits_below_a_lost_page_follows_whoever_writes_that() -> None:
    """Seed 20261130419833: storage had lost the beginning of a prompt, and the host did not have
    it; so the rest could not be written. Another prompt brought the beginning again, in one call
    with its own rest, and only what hung on the end of that call followed (semantics §10.4)."""
    first, second = [*A[:8], *B[8:24]], [*A[:8], *C[8:24]]
    async with three_tiers() as (r, store):
        await r.serve(A[:8])
        await r.cache.drain()
        controller = r.cache._controller
        assert controller.host_pages is not None
        controller.host_pages.evict([1 << 20])  # a copy of which is stored
        lease = await r.lease(second)
        await store.kept.delete(list(store.rows))
        await r.serve(first)
        await r.cache.drain()
        assert (on_tier(r, first), store.has(first)) == ("DDBBBB", "------")
        store.calls.clear()
        await r.compute(lease)
        lease.close()
        await r.cache.drain()
        assert [len(call.keys) for call in store.calls if call.op == "write"] == [6, 4]
        assert (store.has(second), store.has(first)) == ("SSSSSS", "SSSSSS")


async def _waits_for(ended: asyncio.Task[Any], closing: CallGate, store: Store) -> None:
    """Whoever closes the cache waits until the store is closed, which takes its time."""
    await closing.reached()
    await asyncio.wait([ended], timeout=1.0)
    assert not ended.done()
    closing.open()
    await ended
    assert (store.under_way, store.num_calls["aclose"]) == ([], 1)


@on_virtual_clock
async def test_the_cache_s_end_waits_for_a_store_that_was_detached_as_it_was_opened() -> None:
    """Seed 20261130418790: the store was being connected again when it was detached. It counted as
    gone, for there was nothing yet to close, and what was opened then was closed when the cache,
    its threads and its loop had ended."""
    store, opening, closing = Store(), CallGate(), CallGate()
    store.fault("open", call=1, error=OSError("nobody listens there"))
    store.fault("open", call=2, gate=opening)
    store.fault("aclose", gate=closing)
    async with three_tiers(store=store, is_owned=True) as (r, _):
        await opening.reached()
        await r.cache.storage.detach(0)
        ended = start(r.cache.aclose(None))
        opening.open()
        await _waits_for(ended, closing, store)


@pytest.mark.parametrize("is_required", [False, True])
@on_virtual_clock
async def test_the_cache_s_end_waits_for_a_store_that_is_being_attached(is_required: bool) -> None:
    """Found beside that: nobody knew of it before it was attached, nor if it could not be."""
    store, opening, closing = Store(), CallGate(), CallGate()
    storage = {"timeout": 2.0, "required": is_required}
    async with three_tiers(store=store, is_owned=True, storage=storage) as (r, _):
        await r.cache.storage.detach()
        store.num_calls.clear()
        store.fault("open", gate=opening)
        store.fault("aclose", gate=closing)
        attaching = start(r.cache.storage.attach(r.config))
        await opening.reached()
        if is_required:  # and cannot use the memory
            with mock.patch.object(store, "register_memory", side_effect=OSError("no such device")):
                opening.open()
                with pytest.raises(BackendError, match="OSError"):
                    await attaching
            await r.cache.storage.attach(r.config, backend=Store())  # another may come
        ended = start(r.cache.aclose(None))
        if not is_required:
            await asyncio.wait([ended], timeout=1.0)
            assert not ended.done()
            opening.open()
        await _waits_for(ended, closing, store)
        if not is_required:
            with pytest.raises(ClosedError):
                await attaching


async def only_windows_are_gone(r: Rig, copies: Copies, tokens: list[int]) -> None:
    """The host has all of a prompt, the device the base of nearly all."""
    lease = await r.lease(tokens)
    await r.compute(lease, P)
    lease.close()
    await copies.all()
    await r.cache.evict(EvictParams(num_pages={"swa": 1 << 10}))


async def test_loads_that_fail_again_and_again_end_in_a_grant() -> None:
    """Seed 1133 of a changed schedule: of two windows one had no room, so the loads of the other
    came to nothing, and while they held the base the lease had lost its room; so it started over,
    with the very same loads, for ever."""
    copies = Copies()
    device = {"tokens": 16 * P, "ratio": {"swa": 2.0}}
    options = {"copy_executor": copies}
    async with hybrid_rig("swa", 16, device=device, host={"tokens": 400}, options=options) as r:
        copies.attach(r.cache._parts.host.copier)  # type: ignore[union-attr]
        r.at_exit(copies.end)
        await only_windows_are_gone(r, copies, seq("A", 44))
        other = await r.lease(seq("B", 16))
        copies.fails = lambda job: job.direction is Direction.LOAD
        granting = start(r.lease([*seq("A", 44), 1]))
        for _ in range(40):
            await turns()
            if granting.done():
                break
            copies.run_all()
        lease = await soon(granting)
        assert lease.prefix_len == 0
        assert "a bad row" in lease.why
        copies.fails = lambda job: False
        await r.compute(lease)
        lease.close()
        other.close()
        await copies.all()


async def test_no_load_is_begun_where_one_component_has_no_room() -> None:
    """Found beside that: what had room was copied, and was of no use."""
    device = {"tokens": 32 * P, "ratio": {"swa": 14 / 32, "mamba": 8 / 32}}
    with mock.patch.object(swa, "CHUNK_TOKENS", P):
        async with hybrid_rig("mamba_swa", 32, device=device, host={"tokens": 400}) as r:
            await r.serve(A[:24])
            await r.cache.drain()
            await r.cache.evict(EvictParams(1 << 10))
            other = await r.lease(B)
            async with r.cache.lease([*A[:24], 1]) as lease:
                assert (lease.prefix_len, r.counters.loads) == (0, 0)
                assert "no room for swa" in lease.why
                await r.compute(lease)
            other.close()
