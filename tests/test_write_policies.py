"""When the device's pages are copied to the host, in which order, and what failures leave."""

from __future__ import annotations

import asyncio

import pytest

from tests.lease_helpers import P, Rig, rig, seq, start, turns
from tests.tier_helpers import Copies, Log, demote, on_tier, soon, store, tiers, transfers
from tiered_cache.write_policies import MAX_STORES, WriteThrough

A, B, C = seq("A", 25), seq("B", 25), seq("C", 25)
FORK = A[:12] + B[12:]


# --- when (§9.5) ----------------------------------------------------------------------------------


async def test_write_through_copies_at_the_first_use() -> None:
    """Nobody waits for it, and nothing is on the host before its bytes are there."""
    async with tiers() as (r, copies):
        await r.serve(A)
        await turns()
        copies.start()
        assert (on_tier(r, A[:24]), r.host.in_flight, r.host.free) == ("DDDDDD", 6, 58)
        r.check()
        await copies.all()
        assert (on_tier(r, A[:24]), r.host.in_flight, r.counters.pages_stored) == ("BBBBBB", 0, 6)


async def test_write_through_selective_copies_at_the_second_use() -> None:
    """A scan leaves nothing on the host; what comes back does."""
    async with tiers(write_policy="write_through_selective") as (r, copies):
        await r.serve(A)
        await copies.all()
        assert (on_tier(r, A[:24]), r.counters.stores) == ("DDDDDD", 0)
        await r.serve(A[:13])
        await copies.all()
        assert on_tier(r, A[:24]) == "BBBDDD"
        await r.serve(A)
        await copies.all()
        assert on_tier(r, A[:24]) == "BBBBBB"


async def test_write_back_copies_nothing_before_it_must() -> None:
    """The host is used when the device is full."""
    async with tiers(write_policy="write_back") as (r, copies):
        for _ in range(3):
            await r.serve(A)
        await copies.all()
        assert r.counters.stores == 0


async def test_a_chunked_prompt_ends_up_stored_like_a_whole_one() -> None:
    """Each chunk is a use of what it adds."""
    async with tiers() as (r, copies):
        async with r.cache.lease(A) as lease:
            await r.compute(lease, 8)
        await copies.all()
        assert on_tier(r, A[:24]) == "BBBBBB"
        assert sum(job.num_pages for job in copies.moved) == 6


async def test_unbacked_ancestors_go_with_a_node_root_first() -> None:
    """A node that is used often brings what it stands on."""
    log = Log()
    async with tiers(options={"observers": [log]}) as (r, copies):
        copies.fails = lambda job: True
        await r.serve(A)
        await copies.all()
        copies.fails = lambda job: False
        await r.serve(FORK)
        await copies.all()
        assert on_tier(r, FORK[:24]) == "BBBBBB"
        stored = [line for line in log.lines if line.startswith("+host")]
        assert stored == ["+host 12", "+host 24"]


# --- failures -------------------------------------------------------------------------------------


async def test_a_store_that_fails_is_tried_again_at_the_next_use() -> None:
    """Rows go home, the failure is counted, nothing is tried in between."""
    async with tiers() as (r, copies):
        copies.fails = lambda job: True
        await r.serve(A)
        await copies.all()
        assert (r.counters.stores, r.counters.stores_failed, r.host.free) == (1, 1, 64)
        copies.fails = lambda job: False
        await copies.all()
        assert r.counters.stores == 1
        await r.serve(A)
        await copies.all()
        assert on_tier(r, A[:24]) == "BBBBBB"


@pytest.mark.usefixtures("one_page_a_job")
async def test_write_through_stops_at_the_first_failure() -> None:
    """What is above it stays on the host; what is below is not tried."""
    async with tiers() as (r, copies):
        await r.serve(A)
        await turns()
        await copies.one()
        await copies.one()
        copies.fails = lambda job: True
        await copies.all()
        assert (on_tier(r, A[:24]), r.host.free) == ("BBDDDD", 62)
        assert (r.counters.stores, r.counters.stores_failed) == (1, 1)
        r.check()
        copies.fails = lambda job: False
        await r.serve(A)
        await copies.all()
        assert on_tier(r, A[:24]) == "BBBBBB"
        assert sum(job.num_pages for job in copies.moved) == 6


async def test_a_lower_part_waits_for_the_upper_one_that_may_still_fail() -> None:
    """Also when it is another request's: what is below a failure is not on the host."""
    async with tiers() as (r, copies):
        await r.serve(A[:12])
        await turns()
        job = copies.start()
        copies.fails = lambda job: True
        await r.serve(A)
        await turns()
        assert len(copies.jobs) == 1, "the part below is put off"
        job.finish()
        await copies.all()
        assert "H" not in on_tier(r, A[:24])
        assert "B" not in on_tier(r, A[:24])
        copies.fails = lambda job: False
        await r.serve(A)
        await copies.all()
        assert on_tier(r, A[:24]) == "BBBBBB"


async def test_who_needs_room_also_waits_for_a_copy_that_waits_for_the_one_above() -> None:
    """It comes: what hangs below a copy under way is not dropped for being second."""
    async with tiers(pages=8) as (r, copies):
        await r.serve(A[:12])
        await turns()
        job = copies.start()
        await r.serve(A[:24])
        await turns()
        waiting = start(r.serve(seq("B", 17)))
        await turns()
        assert not waiting.done(), "three pages of A are not on the host yet"
        job.finish()
        await copies.all()
        assert await waiting == 0
        assert r.counters.tokens_dropped == 0


async def test_a_full_host_refuses_stores_and_counts_them() -> None:
    """What is held there does not go; the request does not notice."""
    async with tiers(pages=32, rows=4) as (r, copies):
        await store(r, copies, A[:17])
        work = start(r.lease(A[:17]))
        await turns()
        copies.start()  # reads all rows
        assert r.host.protected == 4
        await r.serve(B)
        await turns()
        assert (r.counters.stores_refused, r.host.in_flight) == (1, 0)
        copies.end()
        (await soon(work)).close()
        await copies.all()


async def test_a_host_with_less_room_takes_the_front() -> None:
    """Root first, as far as it goes: a prefix is worth something, a suffix is not."""
    async with tiers(rows=4) as (r, copies):
        await r.serve(A)
        await copies.all()
        assert on_tier(r, A[:24]) == "BBBBDD"
        assert r.counters.stores_refused >= 1
        r.check()


# --- queue and protection -------------------------------------------------------------------------


async def test_what_is_being_copied_is_not_evicted() -> None:
    """The source is held by an ordinary lock from start to commit."""
    async with tiers() as (r, copies):
        await r.serve(A)
        await turns()
        job = copies.start()
        assert (r.pool.protected, r.pool.evictable) == (6, 0)
        demote(r)
        assert on_tier(r, A[:24]) == "DDDDDD"
        r.spoil_free_pages()
        job.finish()
        await turns()
        assert (r.pool.protected, r.pool.evictable) == (0, 6)
        r.check()


async def test_queued_stores_pin_nothing() -> None:
    """Only what has started does; what is gone when its turn comes is skipped."""
    async with tiers(pages=64) as (r, copies):
        prompts = [seq(name, 9) for name in "ABCDEFGH"]
        for tokens in prompts:
            await r.serve(tokens)
        await turns()
        assert len(transfers(r)) == MAX_STORES
        assert r.pool.protected == 2 * MAX_STORES
        demote(r)
        await copies.all()
        assert [on_tier(r, tokens[:8]) for tokens in prompts] == ["BB"] * 4 + ["--"] * 4
        assert r.counters.stores_failed == 0
        r.check()


async def test_a_split_of_what_is_being_stored() -> None:
    """§9.6: both parts are pending, nothing is stored twice, both are on the host after it."""
    async with tiers() as (r, copies):
        await r.serve(A)
        await turns()
        job = copies.start()
        await r.serve(FORK)
        pending = [node.data[0].pending is not None for node in r.cache.tree.nodes()]
        assert sorted(pending)[-2:] == [True, True]
        job.finish()
        await copies.all()
        assert (on_tier(r, A[:24]), on_tier(r, FORK[:24])) == ("BBBBBB", "BBBBBB")
        assert sum(job.num_pages for job in copies.moved) == 9
        assert all(node.data[0].pending is None for node in r.cache.tree.nodes())


async def test_loads_overtake_stores() -> None:
    """Somebody waits for a load; stores wait in the mover's queue."""
    async with tiers(pages=64) as (r, copies):
        await store(r, copies, A)
        copies.moved.clear()
        for tokens in (B, C, seq("D", 25)):
            await r.serve(tokens)
        await turns()
        work = start(r.lease(A))
        await turns()
        await copies.all()
        assert copies.directions == "SSLS"  # two were submitted before it came
        (await soon(work)).close()


async def test_who_waits_for_room_waits_for_the_copy_of_a_victim() -> None:
    """§11.5: an unbacked victim whose copy runs is waited for, then demoted; nothing is lost."""
    async with tiers(pages=8) as (r, copies):
        await r.serve(A)
        await turns()
        work = start(r.lease(B))
        await turns()
        assert not work.done()
        await copies.all()
        lease = await soon(work)
        assert r.counters.tokens_dropped == 0
        await r.compute(lease)
        assert on_tier(r, A[:24])[:3] == "HHH" or "H" in on_tier(r, A[:24])
        lease.close()
        await copies.all()


# --- write-back (§7.3) ----------------------------------------------------------------------------


async def test_write_back_copies_victims_in_a_round_before_they_go() -> None:
    """The lease waits for the copies, then takes the room; each page is copied once."""
    async with tiers(pages=8, write_policy="write_back") as (r, copies):
        await r.serve(A[:13])
        await r.serve(B[:13])
        work = start(r.lease(C))
        await turns()
        assert not work.done()
        assert [str(each.kind) for each in transfers(r)] == ["store", "store"]
        await copies.all()
        lease = await soon(work)
        await r.compute(lease)
        assert (on_tier(r, A[:12]), on_tier(r, B[:12])) == ("HHH", "HHH")
        assert (r.counters.tokens_dropped, r.counters.pages_stored) == (0, 6)
        lease.close()


async def test_write_back_needs_several_rounds_for_a_chain() -> None:
    """A parent becomes a leaf when its child has gone: that is the next round's."""
    async with tiers(pages=8, write_policy="write_back") as (r, copies):
        await r.serve(A[:13])
        await r.serve(A)
        work = start(r.lease(B + B[:6]))
        await copies.all()
        lease = await soon(work)
        await r.compute(lease)
        assert on_tier(r, A[:24]) == "HHHHHH"
        assert r.counters.tokens_dropped == 0
        lease.close()


async def test_write_back_gives_up_when_nothing_can_be_copied() -> None:
    """Bounded rounds: a host that always fails costs the victims, never the request."""
    async with tiers(pages=8, write_policy="write_back") as (r, copies):
        await r.serve(A)
        copies.fails = lambda job: True
        work = start(r.lease(B))
        await copies.all()
        lease = await soon(work)
        await r.compute(lease)
        assert r.counters.tokens_dropped > 0
        assert 0 < r.counters.stores_failed <= 8
        r.check()
        lease.close()


async def test_write_back_gives_mirrors_up_first() -> None:
    """§8.3: the device copy is enough, for it is copied again before it goes."""
    async with tiers(pages=32, rows=6, write_policy="write_back") as (r, copies):
        await r.serve(A)
        await _want(r, copies, 32)
        assert on_tier(r, A[:24]) == "BBBBBB"
        await r.serve(B)
        async with r.cache.lease(A) as holder:
            assert holder.prefix_len == 24
            await _want(r, copies, 25)  # B's pages, and all that is free
        assert (on_tier(r, A[:24]), on_tier(r, B[:24])) == ("DDDDDD", "BBBBBB")
        assert r.counters.tokens_dropped == 0
        r.check()


async def test_a_mirror_above_a_host_child_stays() -> None:
    """A host copy that another hangs below is not spare: nothing may hang below nothing."""
    async with tiers(pages=32, rows=6, write_policy="write_back") as (r, copies):
        await r.serve(A)
        await _want(r, copies, 32)
        demote(r)
        part = start(r.lease(A[:13]))
        await copies.all()
        (await soon(part)).close()
        assert on_tier(r, A[:24]) == "BBBHHH"
        host = r.cache._controller.host_pages
        assert host is not None
        assert len(host.evict([1]).host[0]) == 3
        assert on_tier(r, A[:24]) == "BBB---"
        assert len(host.evict([1]).host[0]) == 3
        assert on_tier(r, A[:24]) == "DDD---"
        r.check()


async def _want(r: Rig, copies: Copies, pages: int) -> None:
    """Be granted so many, and take none: victims are copied, and stay."""
    work = start(r.lease(seq("X", pages * P)))
    await copies.all()
    (await soon(work)).close()


# --- observers, reset, end ------------------------------------------------------------------------


async def test_observers_are_told_the_right_tier() -> None:
    """Stored on the device, then on the host; demoted; loaded; dropped from the host."""
    log = Log()
    async with tiers(rows=3, options={"observers": [log]}) as (r, copies):
        await r.serve(A[:13])
        await copies.all()
        demote(r)
        work = start(r.lease(A[:13]))
        await copies.all()
        (await soon(work)).close()
        demote(r)
        host = r.cache._controller.host_pages
        assert host is not None
        host.evict([3])
        assert log.lines == [
            "+device 12",
            "+host 12",
            "-device 12",
            "+device 12",
            "-device 12",
            "-host 12",
        ]


async def test_a_reset_while_pages_are_being_stored() -> None:
    """Rows that are being written are quarantined, all else is free; nothing is stored after."""
    async with tiers() as (r, copies):
        await r.serve(A)
        await r.serve(B)
        await turns()
        job = copies.start()
        r.cache.reset()
        assert (r.host.free + r.host.quarantined, r.pool.free) == (64, 16)
        await turns()
        assert (r.host.free, r.host.quarantined) == (58, 6)  # what was only queued has ended
        job.finish()
        await r.cache.drain()
        assert (r.host.free, r.host.quarantined, r.cache.tree.num_nodes) == (64, 0, 0)


async def test_closing_ends_what_is_queued() -> None:
    """Nothing is started after the close; the running store ends."""
    async with tiers() as (r, copies):
        await r.serve(A)
        await r.serve(B)
        await turns()
        job = copies.start()
        closing = start(r.cache.aclose())
        await turns()
        assert not closing.done()
        job.finish()
        async with asyncio.timeout(2.0):
            assert await closing == []
        assert len(copies.moved) == 1


async def test_closing_ends_a_path_that_is_stored_in_parts() -> None:
    """The part that runs ends, and sets nothing off."""
    async with tiers() as (r, copies):
        policy = r.cache._controller.write_policy
        assert isinstance(policy, WriteThrough)
        policy._parts = policy._parts._replace(max_pages=2)
        await r.serve(A)
        await turns()
        job = copies.start()
        closing = start(r.cache.aclose(1.0))
        await turns()
        job.finish()
        assert await closing == []
        assert (len(copies.moved), len(copies.jobs)) == (1, 0)


async def test_a_cache_that_is_off_stores_nothing() -> None:
    """`mode: off` compares without: no copy, no host."""
    async with rig(mode="off", host={"tokens": 64 * P}) as r:
        await r.serve(A)
        await r.cache.drain()
        assert (r.stats.host, r.counters.stores) == ({}, 0)
