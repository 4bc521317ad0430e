"""Leases: what a request may rely on, rule by rule (semantics §11, §12)."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest

from tests.lease_helpers import P, Rig, cancelled, chunk_of, other_tasks, rig, seq, start, turns
from tiered_cache import (
    AdmissionTimeout,
    CapacityError,
    ClosedError,
    Event,
    EventKind,
    Lease,
    StaleError,
    UnifiedRadixCache,
    WrongThreadError,
)
from tiered_cache.testing.gates import Gate, ManualExecutor
from tiered_cache.testing.oracle import OracleModel

WAIT_S = 2.0
"""Longer than anything takes here; only a hang reaches it."""


async def soon(work: Any) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await work


class GatedRig:
    """A rig whose model stops in the middle of each chunk until the gate is opened."""

    def __init__(self, r: Rig) -> None:
        self.gate = Gate()
        self.model = OracleModel(r.oracle, self.gate)
        r.at_exit(self.gate.open)  # also when the test has failed: nobody waits for a lost thread


# --- grant ----------------------------------------------------------------------------------------


async def test_a_wholly_cached_prompt_leaves_its_last_token_b08() -> None:
    """At least one token is always computed, and no page more than needed is lost."""
    async with rig() as r:
        await r.serve(seq("A", 17))
        for length, reused in ((16, 12), (17, 16), (18, 16), (13, 12), (12, 8), (4, 0), (1, 0)):
            async with r.cache.lease(seq("A", length)) as lease:
                assert lease.prefix_len == lease.hits.device == reused
                chunk = await chunk_of(lease)
                assert (chunk.start, chunk.stop) == (reused, length)


async def test_pages_that_a_prefix_would_pin_count_in_admission() -> None:
    """Evictable pages were promised to others already: pinning them has to wait."""
    async with rig(pages=8) as r:
        await r.serve(seq("A", 16))  # four pages, evictable
        async with r.cache.lease(seq("B", 16)):  # promised the four free ones
            assert r.pool.unspent == 4
            with pytest.raises(AdmissionTimeout):
                await r.cache.acquire(seq("A", 17), timeout=0)
            r.check()
        assert await r.serve(seq("A", 17)) == 16


async def test_growth_within_the_reserve_cannot_fail() -> None:
    """However much others publish meanwhile, what admission promised is there."""
    async with rig(pages=8) as r:
        async with r.cache.lease(seq("A", 3), reserve=13) as lease:
            assert r.pool.unspent == 4
            await r.compute(lease)
            for name in "BCDEFG":
                await r.serve(seq(name, 15))
                r.check()
            for token in range(13):
                assert lease.room == 13 - token
                await lease.run(r.model, lease.append(token))
            assert lease.room == 0
            assert r.pool.unspent == 0
            lease.finish()
        r.check()


async def test_beyond_the_reserve_there_is_room_or_a_capacity_error() -> None:
    """It says what was needed and who holds the rest, and nothing has changed."""
    async with rig(pages=4) as r:
        other = await r.lease(seq("B", 8))
        await r.compute(other)
        async with r.cache.lease(seq("A", 4)) as lease:
            await r.compute(lease)
            for token in range(4):
                lease.append(token)  # the fourth page is spare
            with pytest.raises(CapacityError) as caught:
                lease.append(9)
            assert caught.value.needed == 1
            assert (caught.value.free, caught.value.evictable) == (0, 0)
            assert any("Lease" in holder for holder in caught.value.held_by)
            assert len(lease) == 8
            r.check()
            other.close()
            lease.append(9)
            assert lease.tokens.tolist() == [*seq("A", 4), 0, 1, 2, 3, 9]
        r.check()


async def test_a_prompt_that_can_never_fit_is_refused_at_once() -> None:
    """It does not wait for room that cannot come, and blames nobody."""
    async with rig(pages=4) as r:
        with pytest.raises(CapacityError, match="17 tokens, the device tier holds 16") as caught:
            await soon(r.cache.acquire(seq("A", 12), reserve=5))
        assert caught.value.held_by == ()
        assert await r.serve(seq("A", 16)) == 0


async def test_admission_is_in_order_of_arrival() -> None:
    """A small request does not overtake a large one, and a cancelled one makes way at once."""
    async with rig(pages=4) as r:
        holder = await r.lease(seq("A", 12))
        granted: list[str] = []

        async def ask(name: str, length: int) -> None:
            async with r.cache.lease(seq(name, length)):
                granted.append(name)

        large = start(ask("B", 16))
        await turns()
        small = [start(ask(name, 4)) for name in "CD"]
        await turns()
        assert granted == []
        assert r.stats.num_queued == 3
        await cancelled(large)
        await soon(asyncio.gather(*small))
        assert granted == ["C", "D"]
        large = start(ask("E", 16))
        await turns()
        late = start(ask("F", 4))
        await turns()
        holder.close()
        await soon(asyncio.gather(large, late))
        assert granted == ["C", "D", "E", "F"]


async def test_a_timeout_holds_nothing() -> None:
    """The only limit that raises; whoever queues behind is not disturbed."""
    async with rig(pages=4) as r:
        holder = await r.lease(seq("A", 16))
        behind = start(r.serve(seq("C", 4)))
        await turns()
        with pytest.raises(AdmissionTimeout, match=r"0\.01 s"):
            await r.cache.acquire(seq("B", 4), timeout=0.01)
        assert r.stats.num_queued == 1
        holder.close()
        await soon(behind)
        assert r.stats.counters.admissions_timed_out == 1


async def test_a_thousand_grants_that_come_to_nothing_leak_nothing_b28() -> None:
    """Refused, cancelled, failed or dropped: the pool is as before."""
    async with rig(pages=8) as r:
        await r.serve(seq("A", 16))
        for attempt in range(250):
            assert r.pool.unspent == 0
            with pytest.raises(ValueError, match="on purpose"):
                async with r.cache.lease(seq("A", 20)) as lease:
                    await chunk_of(lease)
                    raise ValueError("on purpose")
            task = start(r.cache.acquire(seq("A", 20 + attempt % 3)))
            task.cancel()
            await asyncio.wait([task])
            with pytest.raises(AdmissionTimeout):
                async with r.cache.lease(seq("A", 24)):
                    await r.cache.acquire(seq("B", 24), timeout=0)
            with pytest.warns(ResourceWarning, match="without being closed"):
                await r.cache.acquire(seq("A", 20))
            await turns(2)
        assert r.pool.free + r.pool.evictable == 8
        assert r.stats.counters.leases_dropped_unclosed == 250


# --- chunks ---------------------------------------------------------------------------------------


async def test_chunks_end_at_whole_pages_and_at_the_end() -> None:
    """Inside a page only where `max_tokens` reaches none, or the tokens end."""
    async with rig() as r, r.cache.lease(seq("A", 22)) as lease:
        cuts = []
        for max_tokens in (3, 3, 9, 100):
            chunk = await chunk_of(lease, max_tokens)
            cuts.append((chunk.start, chunk.stop))
            await lease.run(r.model, chunk)
        assert cuts == [(0, 3), (3, 4), (4, 12), (12, 22)]
        assert await lease.next_chunk(5) is None
        with pytest.raises(ValueError, match="max_tokens"):
            await lease.next_chunk(0)


@pytest.mark.parametrize("how", ["run", "batch", "wait_for"])
async def test_a_burst_of_equal_prompts_computes_the_prompt_once(how: str) -> None:
    """Others wait for the run that is under way, and go on from what it publishes.

    A run that is started by another task starts a turn later: what was handed out in between is
    computed more than once, and published once all the same.
    """
    async with rig(pages=80) as r:
        prompt = seq("A", 41)

        async def request(tail: int) -> None:
            async with r.cache.lease([*prompt, tail]) as lease:
                while chunk := await lease.next_chunk(8):
                    if how == "run":
                        await lease.run(r.model, chunk)
                    elif how == "batch":
                        await r.cache.run([lease], r.model, [chunk])
                    else:
                        await asyncio.wait_for(lease.run(r.model, chunk), WAIT_S)
                    lease.commit(chunk)

        await soon(asyncio.gather(*(request(tail) for tail in range(6))))
        counters = r.stats.counters
        assert r.pool.evictable == 10
        if how == "wait_for":
            assert counters.tokens_computed <= 6 * 42
        else:
            assert counters.chunk_waits > 0
            assert counters.tokens_computed == 40 + 6 * 2
            assert counters.pages_duplicate == 0


async def test_a_scheduler_that_steps_leases_in_turn_cannot_lock_itself() -> None:
    """A chunk that was handed out, or computed and not committed, is never waited for."""
    async with rig(pages=40) as r:
        leases = [await r.lease([*seq("A", 13), tail]) for tail in range(3)]
        chunks = [await soon(chunk_of(lease, 8)) for lease in leases]
        for lease, chunk in zip(leases, chunks, strict=True):
            await lease.run(r.model, chunk)
        more = [await soon(chunk_of(lease, 8)) for lease in leases]
        await r.cache.run(leases, r.model, more)
        for lease, chunk in zip(leases, more, strict=True):
            lease.commit(chunk)
            r.check()
            lease.close()
        assert r.stats.counters.pages_duplicate == 6


@pytest.mark.parametrize("ends", ["fails", "is cancelled", "returns and is never committed"])
async def test_a_run_that_ends_without_a_commit_wakes_who_waits(ends: str) -> None:
    """The next one computes the page itself."""
    async with rig() as r:
        first, second = await r.lease(seq("A", 9)), await r.lease(seq("A", 9))
        gate = Gate()
        r.at_exit(gate.open)

        def model(_: object) -> None:
            gate()
            if ends == "fails":
                raise OSError("on purpose")

        running = start(first.run(model, await chunk_of(first)))
        await gate.reached()
        waiting = start(second.next_chunk(100))
        await turns()
        assert not waiting.done()
        if ends == "is cancelled":
            running.cancel()
        gate.open()
        await asyncio.gather(running, return_exceptions=True)
        chunk = await soon(waiting)
        assert chunk is not None
        assert (chunk.start, chunk.stop) == (0, 9)
        await second.run(r.model, chunk)
        second.commit(chunk)
        assert first.computed == (9 if ends.startswith("returns") else 0)
        first.close()
        second.close()


async def test_next_chunk_goes_on_from_what_others_have_published() -> None:
    """Own pages for the same tokens go home, and the promise is given back."""
    async with rig() as r:
        early = await r.lease(seq("A", 21))
        chunk = await chunk_of(early, 6)
        await early.run(r.model, chunk)
        assert early.computed == 4
        await r.serve(seq("A", 17))
        chunk = await chunk_of(early)
        assert (chunk.start, chunk.stop) == (16, 21)
        assert early.hits.device == 12
        r.check()
        await early.run(r.model, chunk)
        early.commit(chunk)
        r.check()
        early.close()
        assert r.pool.free == r.pool.capacity - 5


async def test_what_is_computed_is_not_given_up_for_less() -> None:
    """Others have published a part of it: there is nothing to go on from."""
    async with rig() as r:
        lease = await r.lease(seq("A", 21))
        await lease.run(r.model, await chunk_of(lease, 12))
        await r.serve(seq("A", 9))
        chunk = await chunk_of(lease)
        assert (chunk.start, lease.computed) == (12, 12)
        await lease.run(r.model, chunk)
        assert lease.commit(chunk) == 0
        r.check()
        lease.close()


async def test_a_chunk_from_before_a_take_over_is_refused() -> None:
    """Its pages are others' by now; writing there would be everybody's wrong bytes."""
    async with rig() as r:
        lease = await r.lease(seq("A", 21))
        old = await chunk_of(lease)
        await r.serve(seq("A", 17))
        fresh = await chunk_of(lease)
        with pytest.raises(StaleError, match="ask for the next chunk"):
            await lease.run(r.model, old)
        with pytest.raises(StaleError):
            lease.commit(old)
        await lease.run(r.model, fresh)
        lease.close()


async def test_a_chunk_that_leaves_a_gap_or_is_foreign_is_refused() -> None:
    """Nothing has run, and nothing counts as computed."""
    async with rig() as r:
        first, second = await r.lease(seq("A", 9)), await r.lease(seq("B", 9))
        chunk = await chunk_of(first, 4)
        token = first.append(5)
        with pytest.raises(ValueError, match="gap"):
            await first.run(r.model, token)
        with pytest.raises(ValueError, match="not of a lease that runs"):
            await second.run(r.model, chunk)
        with pytest.raises(ValueError, match="another lease's"):
            second.commit(chunk)
        assert first.computed == second.computed == 0
        first.close()
        second.close()


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, StopIteration, asyncio.CancelledError, SystemError])
async def test_a_run_that_raises_computes_nothing(error: type[BaseException]) -> None:
    """The error arrives, whatever it is, and the chunk can be tried again."""
    async with rig() as r, r.cache.lease(seq("A", 9)) as lease:
        chunk = await chunk_of(lease)

        def model(_: object) -> None:
            raise error("on purpose")

        with pytest.raises((error, RuntimeError)) as caught:
            await soon(lease.run(model, chunk))
        assert not isinstance(caught.value, asyncio.CancelledError)
        assert lease.computed == 0
        await lease.run(r.model, chunk)
        lease.commit(chunk)


async def test_a_cancelled_run_waits_for_its_thread_b96() -> None:
    """The pages that it writes are nobody else's before it has ended."""
    async with rig(pages=4) as r:
        gated = GatedRig(r)
        lease = await r.lease(seq("A", 16))
        running = start(lease.run(gated.model, await chunk_of(lease)))
        await gated.gate.reached()
        for _ in range(3):
            running.cancel()
            await turns()
            assert not running.done()
        lease.close()
        assert [held.kind for held in r.cache.outstanding()] == ["quarantine"]
        assert (r.pool.free, r.pool.quarantined) == (0, 4)
        waiting = start(r.serve(seq("B", 16)))
        draining = start(r.cache.drain())
        await turns()
        assert not waiting.done()
        assert not draining.done()
        gated.gate.open()
        await asyncio.wait([running])
        assert running.cancelled()
        assert await soon(waiting) == 0
        await soon(draining)
        r.check()


async def test_a_queued_run_cancels_at_once() -> None:
    """Its function never runs."""
    executor = ManualExecutor()
    async with rig(options={"run_executor": executor}) as r, r.cache.lease(seq("A", 9)) as lease:
        running = start(lease.run(r.model, await chunk_of(lease)))
        await turns()
        await cancelled(running)
        assert executor.jobs[0].start() is False
        assert lease.computed == 0


async def test_a_commit_during_a_run_takes_effect_at_its_end() -> None:
    """The page table of a running chunk does not change under it."""
    async with rig() as r:
        gated = GatedRig(r)
        lease = await r.lease(seq("A", 17))
        first = await chunk_of(lease, 8)
        await lease.run(r.model, first)
        await r.serve(seq("A", 9))  # the same pages, published by somebody else
        running = start(lease.run(gated.model, lease.allocate(8)))
        await gated.gate.reached()
        before, version = lease.pages["full"].copy(), lease.pages_version
        lease.commit(first)
        assert lease.committed == 0
        assert np.array_equal(lease.pages["full"], before)
        assert lease.pages_version == version
        gated.gate.open()
        await running
        assert lease.committed == 8
        assert not np.array_equal(lease.pages["full"][:2], before[:2])
        assert gated.model.faults == []
        r.check()
        lease.close()


async def test_a_batch_runs_over_chunks_of_several_leases() -> None:
    """All of them count as computed, wherever they stand among the arguments."""
    async with rig() as r:
        leases = [await r.lease(seq(name, 7)) for name in "ABC"]
        chunks = [await chunk_of(lease) for lease in leases]
        await r.cache.run(leases, lambda *_: None, chunks[0], [chunks[1]], {"last": chunks[2]})
        assert [lease.computed for lease in leases] == [7, 7, 7]
        await r.cache.run([], r.model)
        for lease in leases:
            lease.close()


# --- publish and generate -------------------------------------------------------------------------


async def test_who_publishes_second_uses_the_first_ones_pages() -> None:
    """The duplicates go home, and the table names the canonical pages from there on."""
    async with rig() as r:
        first, second = await r.lease(seq("A", 13)), await r.lease(seq("A", 13))
        chunks = [await chunk_of(lease) for lease in (first, second)]
        await r.cache.run([first, second], r.model, chunks)
        assert first.commit(chunks[0]) == 12
        free = r.pool.free
        assert second.commit(chunks[1]) == 0
        assert r.pool.free == free + 3
        assert np.array_equal(first.pages["full"][:3], second.pages["full"][:3])
        r.spoil_free_pages()
        r.oracle.verify(second, second.key, 0, 13)
        r.check()
        first.close()
        second.close()


async def test_what_was_not_published_is_dropped_b09() -> None:
    """An aborted request leaves what it has committed, byte for byte, and nothing else."""
    async with rig() as r:
        lease = await r.lease(seq("A", 17))
        chunk = await chunk_of(lease, 8)
        await lease.run(r.model, chunk)
        lease.commit(chunk)
        await lease.run(r.model, await chunk_of(lease, 4))
        lease.close()
        assert (r.pool.evictable, r.pool.free) == (2, 14)
        r.spoil_free_pages()
        r.check()
        assert r.hit(seq("A", 17)) == 8


@pytest.mark.parametrize("length", [1, 3, 4, 5, 13, 16, 30])
@pytest.mark.parametrize("step", [1, 3, 4, 7, 70])
async def test_no_length_and_no_chunking_leaks_a_page_b07(length: int, step: int) -> None:
    """Whole pages are cached, the tail comes back."""
    async with rig() as r:
        async with r.cache.lease(seq("A", length)) as lease:
            await r.compute(lease, step)
        assert r.pool.evictable == length // P
        assert r.pool.free == r.pool.capacity - length // P
        r.check()


async def test_truncate_drops_rejected_drafts() -> None:
    """Pages come back, the reserve is there again, committed tokens stay."""
    async with rig() as r, r.cache.lease(seq("A", 5), reserve=8) as lease:
        await r.compute(lease)
        free, unspent = r.pool.free, r.pool.unspent
        for token in range(7):
            await lease.run(r.model, lease.append(token))
        lease.truncate(6)
        r.check()
        assert (r.pool.free, r.pool.unspent) == (free, unspent)
        assert (len(lease), lease.computed, lease.room) == (6, 6, 7)
        for bad in (3, 7, -1):
            with pytest.raises(ValueError, match="cannot truncate"):
                lease.truncate(bad)
        await lease.run(r.model, lease.append(9))
        lease.finish()
        assert lease.tokens.tolist() == [*seq("A", 5), 0, 9]
        r.oracle.verify(lease, lease.key, 0, 7)


async def test_extend_is_all_or_nothing_and_names_enough_victims() -> None:
    """Youngest first, and only leases beyond their reserve."""
    async with rig(pages=6) as r:
        leases = [await r.lease(seq(name, 8)) for name in "ABC"]
        for lease in leases:
            await r.compute(lease)
        assert r.pool.free == 0
        victims = r.cache.extend(leases, [1, 2, 3])
        assert victims == [leases[2]]
        assert [len(lease) for lease in leases] == [8, 8, 8]
        victims[0].suspend()
        assert r.cache.extend(leases[:2], [1, 2]) == []
        for lease in leases[:2]:
            assert lease.pending is not None
            await lease.run(r.model, lease.pending)
            assert lease.pending is None
        with pytest.raises(ValueError, match="distinct"):
            r.cache.extend([leases[0], leases[0]], [1, 2])
        with pytest.raises(ValueError, match="u32"):
            r.cache.extend(leases[:2], [1, -2])
        assert [len(lease) for lease in leases[:2]] == [9, 9]
        for lease in leases:
            lease.close()


async def test_suspend_and_lease_again_resumes() -> None:
    """What was computed is found again, generated tokens included."""
    async with rig() as r:
        lease = await r.lease(seq("A", 6), reserve=8)
        await r.compute(lease)
        for token in range(6):
            await lease.run(r.model, lease.append(token))
        tokens = lease.tokens.tolist()
        lease.suspend()
        assert lease.closed
        assert await r.serve([*tokens, 1]) == 12


async def test_slots_and_tables_say_the_same() -> None:
    """Slot of token p = pages[p // P] * P + p % P; views are read-only."""
    async with rig() as r, r.cache.lease(seq("A", 11)) as lease:
        assert lease.pages["full"].tolist() == [-1, -1, -1]
        await r.compute(lease)
        pages = lease.pages["full"]
        wanted = [int(pages[p // P]) * P + p % P for p in range(11)]
        assert lease.slots("full", 0, 11).tolist() == wanted
        assert lease.slots("full", 3, 9).tolist() == wanted[3:9]
        assert lease.device_indices.tolist() == wanted
        assert pages.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            pages[0] = 1
        with pytest.raises(KeyError, match="full"):
            lease.slots("swa")
        with pytest.raises(ValueError, match="no slots"):
            lease.slots("full", 0, 13)


async def test_namespaces_share_nothing_b81() -> None:
    """The same tokens under another salt or adapter are another prompt."""
    async with rig() as r:
        await r.serve(seq("A", 9))
        assert await r.serve(seq("A", 9), cache_salt="a") == 0
        assert await r.serve(seq("A", 9), extra_key="a") == 0
        assert await r.serve(seq("A", 9), cache_salt="a") == 8
        assert await r.serve(seq("A", 9)) == 8


async def test_mode_off_computes_everything_and_keeps_nothing() -> None:
    """For A/B runs: the same loop, no reuse."""
    async with rig(mode="off") as r:
        for _ in range(2):
            async with r.cache.lease(seq("A", 9), reserve=3) as lease:
                assert "off" in lease.why
                await r.compute(lease)
                await lease.run(r.model, lease.append(1))
                lease.finish()
        assert r.stats.counters.tokens_computed == 20
        assert r.pool.free == r.pool.capacity


# --- life cycle -----------------------------------------------------------------------------------


async def test_a_reset_quarantines_what_leases_hold_b93() -> None:
    """free + quarantined = capacity at once, free = capacity when the leases have ended."""
    async with rig() as r:
        gated = GatedRig(r)
        await r.serve(seq("A", 9))
        idle, twin = await r.lease(seq("A", 13)), await r.lease(seq("A", 17))
        await chunk_of(idle)
        running = start(twin.run(gated.model, await chunk_of(twin)))
        await gated.gate.reached()
        for _ in range(2):
            r.cache.reset()
            assert r.pool.free + r.pool.quarantined == r.pool.capacity
            assert r.pool.unspent == 0
            r.check()
        assert r.pool.quarantined == 2 + 2 + 3
        for use in (idle.finish, lambda: idle.append(1), lambda: idle.truncate(4)):
            with pytest.raises(StaleError, match="reset"):
                use()
        async with r.cache.lease(seq("A", 9)) as fresh:
            assert fresh.prefix_len == 0
        idle.close()
        assert r.pool.quarantined == 2 + 3
        gated.gate.open()
        await running
        twin.close()
        await r.cache.drain()
        assert r.pool.quarantined == 0
        assert r.pool.free + r.pool.evictable == r.pool.capacity
        assert r.hit(seq("A", 9)) == 0


async def test_a_reset_wakes_who_waits() -> None:
    """A queued admission goes on; a lease that waits for a run says that it is stale."""
    async with rig(pages=5) as r:
        gated = GatedRig(r)
        first, second = await r.lease(seq("A", 9)), await r.lease(seq("A", 7))
        running = start(first.run(gated.model, await chunk_of(first)))
        await gated.gate.reached()
        waiting, queued = start(second.next_chunk(9)), start(r.serve(seq("B", 20)))
        await turns()
        r.cache.reset()
        with pytest.raises(StaleError):
            await soon(waiting)
        second.close()
        gated.gate.open()
        await running
        first.close()
        assert await soon(queued) == 0


async def test_closing_ends_everything_within_its_limit_b98() -> None:
    """Waiters get an error, a hung run is reported and its pages stay out of reach."""
    async with rig() as r:
        gated = GatedRig(r)
        cache = r.cache
        lease, other = await r.lease(seq("A", 33)), await r.lease(seq("A", 21))
        running = start(lease.run(gated.model, await chunk_of(lease)))
        await gated.gate.reached()
        waiting, queued = start(other.next_chunk(50)), start(cache.acquire(seq("B", 20)))
        await turns()
        report = await soon(start(cache.aclose(limit=0.02)))
        assert [held.kind for held in report] == ["quarantine"]
        for task in (waiting, queued):
            with pytest.raises(ClosedError):
                await soon(task)
        for use in (lambda: lease.append(1), cache.reset, lambda: cache.lease([1])):
            with pytest.raises(ClosedError):
                use()
        gated.gate.open()
        await running
        lease.close()
        assert await soon(cache.aclose()) == []


async def test_fifty_resets_under_load_leave_no_task_b98() -> None:
    """Background work ends by itself, and requests that come later find a whole cache."""
    async with rig(pages=24) as r:
        before = other_tasks()
        for _ in range(50):
            requests = [start(r.serve(seq(name, 21))) for name in "ABCA"]
            await turns(3)
            r.cache.reset()
            await asyncio.wait(requests)
            assert {type(request.exception()) for request in requests} <= {StaleError, type(None)}
            r.check()
        await soon(r.cache.drain())
        assert other_tasks() == before
        assert threading.active_count() < 10


async def test_a_lease_that_is_dropped_warns_and_is_cleaned_up() -> None:
    """It is listed until then."""
    async with rig() as r:
        lease: Lease | None = await r.lease(seq("A", 9))
        assert [held.kind for held in r.cache.outstanding()] == ["lease"]
        with pytest.warns(ResourceWarning, match="9 tokens"):
            lease = None
        assert lease is None
        assert len(r.cache.outstanding()) == 1
        await turns()
        assert r.cache.outstanding() == []
        assert r.pool.free == r.pool.capacity


async def test_other_threads_and_loops_are_refused() -> None:
    """One cache = one loop = one thread; nothing changes."""
    async with rig() as r:
        lease = await r.lease(seq("A", 9))
        errors: list[BaseException] = []

        def elsewhere() -> None:
            for use in (lambda: r.cache.lease([1]), lambda: lease.append(1), lease.close):
                try:
                    use()
                except WrongThreadError as error:
                    errors.append(error)

            async def on_another_loop() -> None:
                with pytest.raises(WrongThreadError):
                    await lease.next_chunk(1)

            asyncio.run(on_another_loop())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        assert len(errors) == 3
        assert len(lease) == 9
        lease.close()
        lease.close()


async def test_events_tell_a_lease_s_story() -> None:
    """In order, at each commit beat."""
    events: list[Event] = []

    class Recorder:
        def on_event(self, event: Event) -> None:
            events.append(event)

    async with rig(options={"observers": [Recorder()]}) as r:
        await r.serve(seq("A", 9))
        await r.serve(seq("A", 9))
    kinds = [(event.kind, event.tokens) for event in events if event.lease_id > 0]
    assert kinds == [
        (EventKind.GRANTED, 0),
        (EventKind.COMMITTED, 8),
        (EventKind.RELEASED, 8),
        (EventKind.GRANTED, 8),
        (EventKind.RELEASED, 8),
    ]


async def test_every_suspension_point_can_be_cancelled() -> None:
    """A flow is cancelled at its n-th suspension, for each n until it runs through."""
    async with rig(pages=10) as r:
        await r.serve(seq("A", 9))
        for limit in range(200):
            holder = await r.lease(seq("Z", 21))

            async def flow() -> None:
                async with r.cache.lease(seq("A", 21), reserve=4) as lease:
                    while chunk := await lease.next_chunk(6):
                        await lease.run(r.model, chunk)
                        lease.commit(chunk)
                    for token in range(4):
                        await lease.run(r.model, lease.append(token))
                    lease.finish()

            task = start(flow())
            for turn in range(limit):
                await asyncio.sleep(0)
                if turn == 3:
                    holder.close()
            finished = task.done()
            task.cancel()
            holder.close()
            await asyncio.wait([task])
            await r.cache.drain()
            r.check()
            assert r.cache.outstanding() == []
            if finished:
                break
        assert limit > 10


def test_opening_changes_nothing_about_the_process() -> None:
    """No thread count, no collector setting, no event-loop policy (semantics §12.4)."""
    import torch

    from tests.lease_helpers import settings

    def state() -> tuple[Any, ...]:
        policy = asyncio.get_event_loop_policy()
        return torch.get_num_threads(), gc.get_threshold(), gc.isenabled(), policy

    before = state()

    async def main() -> None:
        async with UnifiedRadixCache.open(settings()) as cache, cache.lease([1, 2, 3]):
            assert state() == before

    asyncio.run(main())
    assert state() == before


async def test_whoever_uses_a_prefix_gives_it_its_priority() -> None:
    """§5.2, also of who publishes nothing: A came with 0 and is used by 9; B has 5, and goes."""
    a, b = seq("A", 32), seq("B", 32)
    async with rig(24, device={"tokens": 24 * P, "eviction_policy": "priority"}) as r:
        await r.serve(a)
        await r.serve(b, priority=5)
        assert await r.serve([*a, 1], priority=9) == 32
        await r.serve(seq("C", 48), priority=7)
        assert (r.hit(a), r.hit(b)) == (32, 0)
