"""Loads within a grant: what they bring, when it is seen, and what is left when they end badly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.lease_helpers import P, Rig, cancelled, rig, seq, start, turns
from tests.tier_helpers import Copies, Log, on_tier, soon, store, tiers, transfers
from tiered_cache import ClosedError, Lease, StaleError
from tiered_cache.testing.loop import DeterministicLoop, SeededExecutor
from tiered_cache.transfer import copier
from tiered_cache.types import Boundary, Outstanding

A, B = seq("A", 25), seq("B", 25)
FORK = A[:12] + B[12:]
"""Shares three pages with A."""


async def one_below_the_other(
    r: Rig, copies: Copies
) -> tuple[asyncio.Task[Lease], asyncio.Task[Lease]]:
    """A, which only the host has, is being loaded: three pages for one lease, the rest for another
    that has joined the first."""
    await store(r, copies, A)
    short = start(r.lease(A[:13]))
    await turns()
    long = start(r.lease(A))
    await turns()
    return short, long


def outstanding(r: Rig, found: Sequence[Outstanding] | None = None) -> list[tuple[str, int]]:
    """What is held, and how many pages each holder has."""
    held = r.cache.outstanding() if found is None else found
    return [(each.kind, each.pages["full"]) for each in held]


# --- visible only after its bytes (§9.1, §9.2) ----------------------------------------------------


async def test_a_load_is_seen_only_when_its_bytes_are_there() -> None:
    """Between reservation and commit the device has nothing, its pages are in flight."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        assert (r.hit(A), r.pool.free) == (0, 16)
        work = start(r.lease(A))
        await turns()
        copies.start()
        assert (r.hit(A), r.pool.in_flight, r.pool.free) == (0, 6, 10)
        r.check()
        await copies.all()
        lease = await soon(work)
        assert (lease.prefix_len, lease.hits.host, r.pool.in_flight) == (24, 24, 0)
        assert (r.counters.pages_loaded, r.counters.tokens_hit_host) == (6, 24)
        await r.compute(lease)
        lease.close()


async def test_a_load_brings_all_nodes_of_the_path_root_first() -> None:
    """§9.7: several host-only nodes come in one transfer, in the order of the path."""
    log = Log()
    async with tiers(options={"observers": [log]}) as (r, copies):
        await store(r, copies, A, FORK)
        assert on_tier(r, FORK[:24]) == "HHHHHH"
        log.lines.clear()
        work = start(r.lease(FORK))
        await copies.all()
        lease = await soon(work)
        assert log.lines == ["+device 12", "+device 24"]
        assert on_tier(r, A[:24]) == "BBBHHH"
        lease.close()


async def test_what_the_device_has_is_not_loaded_again() -> None:
    """A load starts where the device's part ends."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        async with asyncio.timeout(2.0):
            work = start(r.lease(A[:13]))
            await copies.all()
            (await work).close()
        assert on_tier(r, A[:24]) == "BBBHHH"
        work = start(r.lease(A))
        await turns()
        assert [(load.start, load.depth) for load in transfers(r)] == [(12, 24)]
        await copies.all()
        lease = await soon(work)
        assert (lease.hits.device, lease.hits.host) == (12, 12)
        lease.close()


async def test_a_short_hit_is_computed_again() -> None:
    """§9.7: below the threshold nothing is loaded; from it on it is."""
    async with tiers(load_back_threshold=16) as (r, copies):
        await store(r, copies, A)
        async with r.cache.lease(A[:16]) as lease:
            assert (lease.prefix_len, r.counters.loads) == (0, 0)
            assert "was known, but not on the device" in lease.why
        work = start(r.lease(A[:17]))
        await copies.all()
        lease = await soon(work)
        assert lease.prefix_len == 16
        lease.close()


async def test_at_least_one_token_is_left_to_compute() -> None:
    """§11.2 with the host: a prompt that is wholly there is loaded up to its last token's page."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A[:24]))
        await copies.all()
        lease = await soon(work)
        assert lease.prefix_len == 20
        lease.close()


# --- joins (§9.2) ---------------------------------------------------------------------------------


async def test_equal_prompts_load_each_page_once() -> None:
    """Who comes while a load is under way joins it."""
    async with tiers(pages=32) as (r, copies):
        await store(r, copies, A)
        works = [start(r.lease(A)) for _ in range(3)]
        await copies.all()
        leases = [await soon(work) for work in works]
        assert [lease.prefix_len for lease in leases] == [24] * 3
        assert (r.counters.pages_loaded, r.counters.loads, r.counters.loads_joined) == (6, 1, 2)
        for lease in leases:
            lease.close()


async def test_a_longer_prompt_joins_and_moves_only_the_rest() -> None:
    """A plan cuts its path at what is pending; the part below commits after the part above."""
    async with tiers() as (r, copies):
        short, long = await one_below_the_other(r, copies)
        assert [(load.start, load.depth) for load in transfers(r)] == [(0, 12), (12, 24)]
        first, second = copies.start(), copies.start()
        second.finish()  # the part below arrives first
        await turns()
        assert (r.hit(A), long.done()) == (0, False)
        r.check()
        first.finish()
        await turns()
        assert r.hit(A) == 24
        assert [(await soon(work)).prefix_len for work in (short, long)] == [12, 24]
        assert sum(job.num_pages for job in copies.moved if job.direction.value == "load") == 6
        for work in (short, long):
            work.result().close()


async def test_a_shorter_prompt_joins_part_of_a_load() -> None:
    """Only what it asked for counts as its prefix."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        long, short = start(r.lease(A)), start(r.lease(A[:13]))
        await copies.all()
        assert [(await soon(work)).prefix_len for work in (long, short)] == [24, 12]
        assert r.counters.loads == 1
        for work in (short, long):
            work.result().close()


async def test_a_load_goes_on_for_whoever_joined_it() -> None:
    """Its first waiter is cancelled; the second gets all of it."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        first, second = start(r.lease(A)), start(r.lease(A))
        await turns()
        await cancelled(first)
        await copies.all()
        lease = await soon(second)
        assert (lease.prefix_len, r.counters.loads) == (24, 1)
        lease.close()


async def test_a_predecessor_that_fails_is_planned_once_more() -> None:
    """Own pages that have moved are kept; only what failed is copied again."""
    async with tiers() as (r, copies):
        short, long = await one_below_the_other(r, copies)
        upper, lower = copies.start(), copies.start()
        lower.finish()
        await turns()
        copies.fails = lambda job: True
        upper.finish()
        await turns()
        copies.fails = lambda job: False
        assert (await soon(short)).prefix_len == 0
        assert [(load.start, load.depth) for load in transfers(r)] == [(12, 24), (0, 12)]
        r.check()
        await copies.all()
        lease = await soon(long)
        assert (lease.prefix_len, lease.hits.host) == (24, 24)
        loaded = [job.num_pages for job in copies.moved if job.direction.value == "load"]
        assert loaded == [3, 3]
        lease.close()
        short.result().close()


async def test_a_second_failure_makes_the_lease_shorter() -> None:
    """§9.2, §9.8: nothing is planned a third time, nothing is lost, `why` says it."""
    async with tiers() as (r, copies):
        short, long = await one_below_the_other(r, copies)
        copies.fails = lambda job: job.num_pages == 3 and job.direction.value == "load"
        await copies.all()
        lease = await soon(long)
        assert lease.prefix_len == 0
        assert "a bad row" in lease.why
        assert transfers(r) == []
        r.check()
        await r.compute(lease)
        lease.close()
        (await soon(short)).close()


# --- partial arrival (§9.1) -----------------------------------------------------------------------


@pytest.mark.usefixtures("one_page_a_job")
async def test_what_has_arrived_is_kept_when_the_rest_fails() -> None:
    """The prefix that arrived is committed, the rest goes home, the lease is that long."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        for _ in range(2):
            await copies.one()
        copies.fails = lambda job: True
        await copies.all()
        lease = await soon(work)
        assert (lease.prefix_len, lease.hits.host) == (8, 8)
        assert "a load from the host failed: a bad row" in lease.why
        assert (r.counters.pages_loaded, r.counters.loads_failed) == (2, 1)
        assert on_tier(r, A[:24]) == "BBHHHH"
        copies.fails = lambda job: False
        await r.compute(lease)
        lease.close()


@pytest.mark.usefixtures("one_page_a_job")
async def test_pages_that_arrive_out_of_order_count_from_the_root() -> None:
    """A page above which one is missing has not arrived."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        first, second = copies.start(), copies.start()
        second.finish()
        await turns()
        copies.fails = lambda job: True
        first.finish()
        await copies.all()
        lease = await soon(work)
        assert (lease.prefix_len, r.counters.pages_loaded) == (0, 0)
        lease.close()


# --- cancelled (§9.2, §9.3) -----------------------------------------------------------------------


async def test_a_load_that_is_cancelled_in_the_queue_never_runs() -> None:
    """Its pages are free at once, and the host's copy is held by nobody."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        num_moved = len(copies.moved)
        work = start(r.lease(A))
        await turns()
        assert r.host.protected == 6
        await cancelled(work)
        await turns()
        assert (r.pool.free, r.pool.in_flight, r.host.protected) == (16, 0, 0)
        await copies.all()
        assert len(copies.moved) == num_moved
        r.check()


async def test_pages_are_not_given_away_under_a_running_copy() -> None:
    """Cancelled while the thread copies: its target stays out of reach until that has ended."""
    async with tiers(pages=8) as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        job = copies.start()
        await cancelled(work)
        await turns()
        assert (r.pool.free, r.pool.in_flight) == (2, 6)
        assert outstanding(r) == [("quarantine", 6)]
        r.spoil_free_pages()
        waiting = start(r.lease(seq("C", 12)))
        await turns()
        assert not waiting.done()
        job.finish()
        r.verify_free_pages()
        await turns()
        lease = await soon(waiting)
        assert (r.cache.outstanding()[0].kind, len(r.cache.outstanding())) == ("lease", 1)
        lease.close()
        assert r.hit(A) == 24  # it had arrived


@pytest.mark.usefixtures("one_page_a_job")
async def test_a_cancelled_load_keeps_what_it_has_brought() -> None:
    """The queued jobs go, the running one ends, its page counts."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        await copies.one()
        job = copies.start()
        await cancelled(work)
        job.finish()
        await copies.all()
        assert (r.hit(A), r.counters.pages_loaded) == (8, 2)
        assert (r.pool.free, r.pool.evictable) == (14, 2)


# --- time limits (§9.3, §9.8) ---------------------------------------------------------------------


async def test_a_load_that_takes_too_long_is_done_without() -> None:
    """The lease goes on shorter and says why; the pages stay quarantined until the copy ends."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A, load_timeout=0.01))
        await turns()
        job = copies.start()
        lease = await soon(work)
        assert lease.prefix_len == 0
        assert "did not end within 0.01 s" in lease.why
        assert r.counters.load_timeouts == 1
        assert (r.pool.in_flight, r.pool.unspent) == (6, 7)
        assert outstanding(r) == [("lease", 0), ("quarantine", 6)]
        r.check()
        chunk = await lease.next_chunk(100)
        assert chunk is not None
        assert (chunk.start, r.pool.in_flight) == (0, 6)
        job.finish()
        await turns()
        assert r.pool.in_flight == 0
        lease.close()


async def test_after_the_time_limit_the_lease_waits_for_other_pages() -> None:
    """Its promise went into the load; it is granted when it has been promised others."""
    async with tiers(pages=8) as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A, load_timeout=0.01))
        await turns()
        job = copies.start()
        late = start(r.lease(seq("C", 4)))
        while not r.counters.load_timeouts:
            await asyncio.sleep(0.001)
        await turns()
        assert not work.done()
        r.check()
        job.finish()
        lease = await soon(work)
        # The bytes have arrived after all, but only a re-match may look.
        assert r.pool.unspent >= 7
        r.check()
        await r.compute(lease)
        lease.close()
        (await soon(late)).close()


async def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    """A load in time is a load."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A, load_timeout=5.0))
        await copies.all()
        lease = await soon(work)
        assert (lease.prefix_len, r.counters.load_timeouts) == (24, 0)
        lease.close()


async def test_a_failed_load_gives_its_promise_back() -> None:
    """The lease may take as many pages as if nothing had been tried (§11.5)."""
    async with tiers(pages=8) as (r, copies):
        await store(r, copies, A)
        copies.fails = lambda job: job.direction.value == "load"
        work = start(r.lease(A, reserve=4))
        await copies.all()
        lease = await soon(work)
        assert (lease.prefix_len, r.pool.unspent, r.pool.free) == (0, 8, 8)
        r.check()
        await r.compute(lease)
        for token in range(4):
            lease.append(token)
        lease.close()
        await copies.all()


async def test_a_load_leaves_no_less_room_to_others() -> None:
    """§11.5 while it runs: what it has taken comes out of the lease's own promise."""
    async with tiers(pages=8) as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        assert (r.pool.unspent, r.pool.in_flight, r.pool.free) == (1, 6, 2)
        other = await soon(start(r.lease(seq("C", 4))))
        r.check()
        await copies.all()
        lease = await soon(work)
        assert (r.pool.unspent, r.pool.protected) == (2, 6)
        other.close()
        lease.close()


# --- what happens meanwhile -----------------------------------------------------------------------


async def test_a_prompt_that_was_published_meanwhile_keeps_its_own_pages() -> None:
    """§5.12: a load's pages for what is there by then are duplicates and go home."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        loading = start(r.lease(A))
        await turns()
        rival = await soon(start(r.lease(A, load_timeout=0.0)))
        assert rival.prefix_len == 0
        await r.compute(rival)
        assert r.hit(A) == 24
        published = rival.pages["full"].copy()
        await copies.all()
        lease = await soon(loading)
        assert lease.prefix_len == 24
        assert (lease.pages["full"][:6] == published[:6]).all()
        assert (lease.hits.device + lease.hits.host) == 24
        r.check()
        rival.close()
        lease.close()
        assert r.pool.free + r.pool.evictable == 16


async def test_a_split_of_a_path_that_is_being_loaded() -> None:
    """§9.6: both parts are pending, and both become visible."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        cut = r.cache.tree.cut(Boundary(transfers(r)[0].node, 12))
        assert cut.end == 12
        assert cut.data[0].pending is transfers(r)[0]
        joined = start(r.lease(A[:13]))
        await turns()
        assert len(transfers(r)) == 1
        await copies.all()
        assert (await soon(work)).prefix_len == 24
        assert (await soon(joined)).prefix_len == 12
        assert on_tier(r, A[:24]) == "BBBBBB"
        assert all(node.data[0].pending is None for node in r.cache.tree.nodes())
        for task in (work, joined):
            task.result().close()


async def test_rows_are_not_taken_while_they_are_read() -> None:
    """§6.4: a load's source is host-locked; the host makes room elsewhere or not at all."""
    async with tiers(rows=8) as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        copies.start()
        assert (r.host.protected, r.host.evictable) == (6, 0)
        await r.serve(B)  # wants rows too
        await turns()
        assert (r.host.protected, r.host.in_flight) == (6, 2)
        copies.end()
        await copies.all()
        (await soon(work)).close()
        assert on_tier(r, A[:24]) == "BBBBBB"


# --- reset and the end (§12.1, §12.2) -------------------------------------------------------------


async def test_a_reset_while_pages_are_being_loaded() -> None:
    """Free and quarantined are the capacity at once; the waiter is granted without."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        job = copies.start()
        r.cache.reset()
        assert (r.pool.free, r.pool.quarantined) == (10, 6)
        assert (r.host.free, r.host.quarantined) == (64, 0)
        assert ("quarantine", 6) in outstanding(r)
        lease = await soon(work)
        assert (lease.prefix_len, lease.hits.total) == (0, 0)
        r.spoil_free_pages()
        job.finish()
        r.verify_free_pages()
        await turns()
        assert (r.pool.free, r.pool.quarantined) == (16, 0)
        assert r.hit(A) == 0
        await r.compute(lease)
        lease.close()
        await copies.all()


async def test_a_reset_of_a_load_that_has_moved_and_waits() -> None:
    """What only waited for a predecessor is free at once."""
    async with tiers() as (r, copies):
        short, long = await one_below_the_other(r, copies)
        upper, lower = copies.start(), copies.start()
        lower.finish()
        await turns()
        r.cache.reset()
        assert (r.pool.free, r.pool.quarantined) == (13, 3)
        for work in (short, long):
            (await soon(work)).close()
        upper.finish()
        await r.cache.drain()
        assert r.pool.free == 16


async def test_two_resets_while_a_copy_runs() -> None:
    """Late completions are recognised by epoch, however many have passed."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        job = copies.start()
        r.cache.reset()
        (await soon(work)).close()
        r.cache.reset()
        assert (r.pool.free, r.pool.quarantined) == (10, 6)
        job.finish()
        await r.cache.drain()
        assert (r.pool.free, r.pool.quarantined) == (16, 0)


async def test_closing_with_a_hung_copy_returns_in_time_and_says_so() -> None:
    """§12.2: what is quarantined is reported, and goes home when the thread has ended."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        job = copies.start()
        left = await r.cache.aclose(0.05)
        assert outstanding(r, left) == [("quarantine", 6)]
        with pytest.raises(ClosedError):
            await soon(work)  # who waits for the load is told, and not kept
        job.finish()
        await turns()
        assert r.cache.outstanding() == []


async def test_drain_waits_for_loads() -> None:
    """Nothing is in flight when it returns."""
    async with tiers() as (r, copies):
        await store(r, copies, A)
        work = start(r.lease(A))
        await turns()
        drained = start(r.cache.drain())
        await turns()
        assert not drained.done()
        await copies.all()
        await drained
        assert transfers(r) == []
        (await soon(work)).close()


# --- in any order ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_loads_stores_and_cancellations_in_any_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order things come in, accounts and bytes are right after every request."""
    monkeypatch.setattr(copier, "JOB_BYTES", 200)
    loop = DeterministicLoop(seed)

    async def main() -> None:
        def executor(name: str) -> SeededExecutor:
            return SeededExecutor(loop, name=name)

        options = {
            "run_executor": executor("run"),
            "copy_executor": executor("copy"),
            "io_executor": executor("io"),
        }
        async with rig(10, host={"tokens": 20 * P}, options=options) as r:

            async def request(name: str) -> None:
                tokens = [A, FORK, B, seq("C", 17)][ord(name) % 4]
                length = loop.random.randrange(5, len(tokens) + 1)
                limit = loop.random.choice([None, None, 0.0, 1.0])
                async with r.cache.lease(tokens[:length], load_timeout=limit) as lease:
                    await r.compute(lease, loop.random.choice([4, 8, 100]))
                r.check()

            for _ in range(4):
                works = [start(request(name)) for name in "ABCDEFGH"]
                await asyncio.sleep(loop.random.choice([0.0, 0.5, 2.0]))
                loop.random.choice(works).cancel()
                if loop.random.random() < 0.2:
                    r.cache.reset()
                results = await asyncio.gather(*works, return_exceptions=True)
                assert all(
                    result is None or isinstance(result, (asyncio.CancelledError, StaleError))
                    for result in results
                ), results
                r.check()
            await r.cache.drain()
            assert r.pool.protected == r.pool.in_flight == r.pool.quarantined == 0
            assert r.host.protected == r.host.in_flight == r.host.quarantined == 0

    loop.run(main())
