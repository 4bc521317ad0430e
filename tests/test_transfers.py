"""Transfers themselves: pins, spans, commits, ends, what becomes of their ids (§9.1 to §9.3)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.lease_helpers import Rig, seq, start, turns
from tests.tier_helpers import demote, on_tier, store, tiers, transfers
from tiered_cache.transfers import Transfer, Transfers
from tiered_cache.types import Boundary, MatchPrefixParams, Tier

A = seq("A", 25)


class Waiting:
    """Somebody who needs a load."""

    def __init__(self) -> None:
        self.is_running = False
        self.told: list[Transfer] = []

    def on_load_ended(self, load: Transfer) -> None:
        self.told.append(load)


class Bench:
    """Loads of A by hand."""

    def __init__(self, r: Rig) -> None:
        self.r = r
        self.tree = r.cache.tree
        found = r.cache._controller.transfers
        assert found is not None
        self.transfers: Transfers = found

    @property
    def end(self) -> Boundary:
        from tiered_cache.keys import RadixKey

        match = self.tree.match_prefix(MatchPrefixParams(RadixKey(A[:24])))
        return Boundary(match.best_boundary.node, match.best_length)

    def load(self, start: int, stop: int, funder: Any, **options: Any) -> Transfer:
        end = Boundary(self.end.node, stop)
        self.tree.cut(Boundary(end.node, start))
        pieces = self.tree.plan_transfer(end, 0, Tier.DEVICE, start)
        assert pieces[0].ids is not None
        ids = self.r.cache._controller.accounts.take_of(0, len(pieces[0].ids))
        return self.transfers.load(end, start, 0, ids, pieces[0].ids, funder, **options)


async def test_a_load_holds_its_path_and_its_source() -> None:
    """Pinned from start to commit on both tiers, pending on each of its nodes; then let go."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter = Bench(r), Waiting()
        load = b.load(0, 24, waiter)
        node = load.node
        data = node.data[0]
        assert (data.lock_ref, data.host_lock_ref, data.pending) == (1, 1, load)
        r.cache.tree.check_integrity()
        await copies.all()
        assert (data.lock_ref, data.host_lock_ref, data.pending) == (0, 0, None)
        assert (waiter.told, load.is_complete, load.ended.is_set()) == ([load], True, True)


async def test_waiters_are_told_while_the_path_is_held() -> None:
    """In the commit beat: what they take over cannot have gone."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b = Bench(r)
        seen: list[tuple[int, bool]] = []

        class Looking(Waiting):
            def on_load_ended(self, load: Transfer) -> None:
                data = load.node.data[0]
                seen.append((data.lock_ref, data.value is not None))

        b.load(0, 24, Looking())
        await copies.all()
        assert seen == [(1, True)]


async def test_joiners_and_funder_are_told_once_each() -> None:
    """The funder also when it has left: its promise went into the load."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, funder, joiner = Bench(r), Waiting(), Waiting()
        load = b.load(0, 24, funder)
        b.transfers.join(load, joiner)
        b.transfers.leave([load], funder)
        await copies.all()
        assert (funder.told, joiner.told) == ([load], [load])


async def test_a_load_below_a_gap_waits_for_what_is_above() -> None:
    """Root first: it has moved, and is committed in the beat of its predecessor."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter = Bench(r), Waiting()
        lower = b.load(12, 24, waiter)
        await copies.all()
        assert (lower.has_moved, lower.ended.is_set(), on_tier(r, A[:24])) == (
            True,
            False,
            "HHHHHH",
        )
        assert r.pool.in_flight == 3
        r.cache.tree.check_integrity()
        upper = b.load(0, 12, waiter)
        await copies.all()
        assert on_tier(r, A[:24]) == "BBBBBB"
        assert waiter.told == [upper, lower]


async def test_a_load_below_a_gap_goes_home_when_nobody_waits() -> None:
    """What nobody can reach and nobody wants is nobody's."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter = Bench(r), Waiting()
        lower = b.load(12, 24, waiter)
        await copies.all()
        b.transfers.leave([lower], waiter)
        assert (len(transfers(r)), r.pool.free, on_tier(r, A[:24])) == (0, 16, "HHHHHH")
        assert (lower.is_complete, waiter.told) == (False, [lower])


@pytest.mark.usefixtures("one_page_a_job")
async def test_a_partial_predecessor_leaves_a_gap() -> None:
    """The part that arrived is committed, what is below the gap is not."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter, other = Bench(r), Waiting(), Waiting()
        upper = b.load(0, 12, waiter)
        lower = b.load(12, 24, other)
        await copies.one()
        copies.fails = lambda job: job in upper.batch.jobs  # type: ignore[union-attr]
        await copies.all()
        assert (on_tier(r, A[:24]), lower.ended.is_set()) == ("BHHHHH", False)
        assert str(upper.error) == "a bad row"
        r.cache.tree.check_integrity()
        b.transfers.leave([lower], other)
        assert r.pool.free + r.pool.evictable == 16


async def test_a_span_survives_splits_before_its_commit() -> None:
    """§1.5: pages are counted back from the end, through whatever was cut meanwhile."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter = Bench(r), Waiting()
        load = b.load(0, 24, waiter)
        end = load.node
        for depth in (20, 8, 4):
            cut = r.cache.tree.cut(Boundary(end, depth))
            assert cut.data[0].pending is load
            r.cache.tree.check_integrity()
        await copies.all()
        assert load.node is end
        assert on_tier(r, A[:24]) == "BBBBBB"
        r.check()
        assert all(
            (node.data[0].lock_ref, node.data[0].host_lock_ref, node.data[0].pending)
            == (0, 0, None)
            for node in r.cache.tree.nodes()
        )


async def test_pages_that_are_there_by_then_are_duplicates() -> None:
    """§5.12: values stay, the load's own ids go home; not under a run that may read them."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter = Bench(r), Waiting()
        load = b.load(0, 24, waiter)
        mine = load.device_ids
        await r.serve(A, load_timeout=0)
        there = load.node.data[0].value
        waiter.is_running = True
        await copies.all()
        assert load.node.data[0].value is there
        assert r.pool.quarantined == 6
        r.cache.check_integrity()
        assert not np.isin(mine, r.cache._parts.allocators[0].free_ids()).any()
        waiter.is_running = False
        b.transfers.release_retired()
        assert (r.pool.quarantined, r.pool.free) == (0, 10)


async def test_duplicates_go_home_in_any_order() -> None:
    """Schedule 20261201073039: what was looked for among those that still wait was compared by its
    pages, which numpy refuses, so the run that ended failed."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, first, second = Bench(r), Waiting(), Waiting()
        b.load(0, 12, first)
        b.load(12, 24, second)
        await r.serve(A, load_timeout=0)
        first.is_running = second.is_running = True
        await copies.all()
        assert r.pool.quarantined == 6
        second.is_running = False
        b.transfers.release_retired()
        assert r.pool.quarantined == 3
        first.is_running = False
        b.transfers.release_retired()
        assert (r.pool.quarantined, r.pool.free) == (0, 10)


async def test_duplicates_under_a_run_outlive_a_reset() -> None:
    """They are quarantined across it, and go home once."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter = Bench(r), Waiting()
        b.load(0, 24, waiter)
        await r.serve(A, load_timeout=0)
        waiter.is_running = True
        await copies.all()
        r.cache.reset()
        assert (r.pool.free, r.pool.quarantined) == (10, 6)
        waiter.is_running = False
        b.transfers.release_retired()
        assert (r.pool.free, r.pool.quarantined) == (16, 0)


async def test_late_completions_are_known_by_their_epoch() -> None:
    """A copy that ends after a reset publishes nothing, and tells nobody."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter = Bench(r), Waiting()
        load = b.load(0, 24, waiter)
        job = copies.start()
        r.cache.reset()
        assert load.ended.is_set()
        await r.serve(A)  # the same tokens, in the new tree
        value = next(iter(r.cache.tree.nodes())).data[0].value
        assert value is not None
        assert not np.isin(value, load.device_ids).any()
        job.finish()
        await copies.all()
        assert next(iter(r.cache.tree.nodes())).data[0].value is value
        assert (waiter.told, r.counters.pages_loaded) == ([], 0)


async def test_cancelling_all_ends_all() -> None:
    """What is queued goes at once, what runs when its thread has ended."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter = Bench(r), Waiting()
        b.load(0, 12, waiter)
        b.load(12, 24, waiter)
        job = copies.start()
        b.transfers.cancel_all()
        await turns()
        assert r.pool.in_flight == 6 or r.pool.in_flight == 3
        job.finish()
        await copies.all()
        assert len(b.transfers) == 0
        assert r.pool.free + r.pool.evictable == 16


async def test_a_store_is_pinned_on_the_device_only() -> None:
    """Its target is in flight, its source locked like any other prefix."""
    async with tiers() as (r, copies):
        await r.serve(A)
        await turns()
        data = transfers(r)[0].node.data[0]
        assert (data.lock_ref, data.host_lock_ref, data.pending) == (1, 0, transfers(r)[0])
        assert (transfers(r)[0].kind, repr(transfers(r)[0])) == (
            "store",
            "<store of [0:24), 6 pages>",
        )
        await copies.all()
        assert (data.lock_ref, data.pending) == (0, None)


async def test_what_is_loaded_can_be_evicted_at_once_by_others() -> None:
    """A commit without waiters holds nothing: the pages are evictable, and mirrors exist."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter = Bench(r), Waiting()
        load = b.load(0, 24, waiter)
        job = copies.start()
        b.transfers.leave([load], waiter)
        job.finish()
        await turns()
        assert (r.pool.evictable, on_tier(r, A[:24])) == (6, "BBBBBB")
        demote(r)
        assert (r.pool.free, on_tier(r, A[:24])) == (16, "HHHHHH")


async def test_drain_sees_transfers() -> None:
    """One that waits for its predecessor is in flight too."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        b, waiter = Bench(r), Waiting()
        lower = b.load(12, 24, waiter)
        await copies.all()
        drained = start(r.cache.drain())
        await turns()
        assert not drained.done()
        b.transfers.leave([lower], waiter)
        async with asyncio.timeout(2.0):
            await drained
