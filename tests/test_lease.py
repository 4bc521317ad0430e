"""What could make a lease publish wrong bytes, or an operation do half of what it says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.lease_helpers import P, cancelled, chunk_of, rig, seq, start, turns
from tiered_cache import CapacityError, Chunk, ClosedError, StaleError
from tiered_cache.testing.gates import Gate, ManualExecutor
from tiered_cache.testing.oracle import OracleModel


def fail(*_: Any) -> None:
    raise ZeroDivisionError


# --- chunks and truncation ------------------------------------------------------------------------


async def test_a_chunk_from_before_a_truncation_is_refused_whatever_stands_there_now() -> None:
    """Its state is that of the rejected draft; counted as computed it would be published."""
    async with rig() as r, r.cache.lease(seq("A", 4), reserve=8) as lease:
        await r.compute(lease)
        draft = lease.append(7)
        await lease.run(r.model, draft)
        lease.truncate(4)
        for token in (8, 9, 10, 11):
            lease.append(token)
        assert len(lease) > draft.stop
        runs = lease._controller.runs
        for use in (lease.commit, lambda chunk: runs._check_chunks([lease], [chunk])):
            with pytest.raises(StaleError, match="truncated"):
                use(draft)
        assert lease.computed == 4
        await r.compute(lease)
        r.oracle.verify(lease, lease.key, 0, 8)


async def test_a_chunk_that_a_truncation_has_not_reached_stays_good() -> None:
    """Only what was cut off is stale."""
    async with rig() as r, r.cache.lease(seq("A", 4), reserve=8) as lease:
        chunk = await chunk_of(lease)
        lease.append(7)
        lease.truncate(4)
        lease.append(8)
        await lease.run(r.model, chunk)
        lease.commit(chunk)
        await r.compute(lease)
        assert (lease.computed, lease.committed) == (5, 4)


async def test_a_truncated_prompt_is_computed_anew_from_there() -> None:
    """What was computed beyond the new length does not count any more."""
    async with rig() as r, r.cache.lease(seq("A", 11)) as lease:
        await lease.run(r.model, await chunk_of(lease))
        assert lease.computed == 11
        lease.truncate(6)
        assert (lease.computed, len(lease), lease.num_private_pages) == (6, 6, 2)
        for token in (1, 2, 3):
            lease.append(token)
        await r.compute(lease)
        assert lease.committed == 8


# --- runs that build on runs ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raises", "is cancelled"])
async def test_a_run_that_builds_on_one_that_came_to_nothing_does_not_start(how: str) -> None:
    """It would read what was never written and return it as a result."""
    executor = ManualExecutor()
    async with rig(options={"run_executor": executor}) as r, r.cache.lease(seq("A", 12)) as lease:
        ran: list[Chunk] = []
        first: Any = fail if how == "raises" else ran.append
        one = start(lease.run(first, await chunk_of(lease, 4)))
        await turns()
        two = start(lease.run(ran.append, await chunk_of(lease, 4)))
        three = start(lease.run(ran.append, await chunk_of(lease, 4)))
        await turns()
        if how == "is cancelled":
            one.cancel()
            await turns()
        for _ in range(3):  # whatever is submitted is run
            await asyncio.to_thread(executor.run_all)
            await turns()
        await asyncio.wait([one, two, three])
        assert one.cancelled() or isinstance(one.exception(), ZeroDivisionError)
        assert isinstance(two.exception(), StaleError)
        assert isinstance(three.exception(), StaleError)
        assert ran == []
        assert (lease.computed, lease.frontier) == (0, 0)
        del one, two, three
        chunk = await chunk_of(lease, 4)
        assert (chunk.start, chunk.stop) == (0, 4)


async def test_runs_of_one_lease_go_in_order_even_with_several_threads() -> None:
    """The second reads what the first writes."""
    async with rig(run_threads=3) as r, r.cache.lease(seq("A", 12)) as lease:
        gate = Gate()
        r.at_exit(gate.open)
        model = OracleModel(r.oracle, gate)
        runs = [start(lease.run(model, await chunk_of(lease, 12)))]
        await gate.reached()
        lease.append(1)
        runs.append(start(lease.run(r.model, await chunk_of(lease, 4))))
        other = await r.lease(seq("B", 3))
        await other.run(r.model, await chunk_of(other))  # others are not held up
        assert not runs[1].done()
        gate.open()
        await asyncio.gather(*runs)
        assert lease.computed == 13
        lease.finish()
        other.close()
        assert model.faults == []


async def test_a_run_that_waits_for_another_is_cancelled_at_once() -> None:
    """And whoever comes after it can still wait for the first."""
    async with rig() as r, r.cache.lease(seq("A", 12)) as lease:
        gate = Gate()
        first = start(lease.run(gate, await chunk_of(lease, 4)))
        await gate.reached()
        second = start(lease.run(r.model, await chunk_of(lease, 4)))
        await turns()
        await cancelled(second)
        assert not first.done()
        gate.open()
        await first
        assert lease.computed == lease.frontier == 4


async def test_a_commit_of_a_chunk_that_is_being_computed_is_undone_by_its_failure() -> None:
    """The run says whether the chunk is computed; nothing unwritten is ever published."""
    executor = ManualExecutor()
    async with rig(options={"run_executor": executor}) as r, r.cache.lease(seq("A", 9)) as lease:
        chunk = await chunk_of(lease, 8)
        run = start(lease.run(fail, chunk))
        await turns()
        assert lease.commit(chunk) == 0
        assert lease.computed == 0
        await asyncio.to_thread(executor.run_all)
        with pytest.raises(ZeroDivisionError):
            await run
        assert (lease.computed, lease.committed, r.hit(seq("A", 8))) == (0, 0, 0)
        again = start(lease.run(r.model, chunk))
        await turns()
        lease.commit(chunk)
        await asyncio.to_thread(executor.run_all)
        await again
        assert (lease.committed, r.hit(seq("A", 8))) == (8, 8)


async def test_what_was_committed_during_a_run_is_published_though_the_lease_has_gone() -> None:
    """`suspend` publishes what is written, also when it has to wait for a run to end first."""
    async with rig() as r:
        lease = await r.lease(seq("A", 12))
        await lease.run(r.model, await chunk_of(lease, 8))
        gate = Gate()
        run = start(lease.run(gate, await chunk_of(lease)))
        await gate.reached()
        lease.suspend()
        assert lease.closed
        assert r.hit(seq("A", 12)) == 0
        assert r.pool.quarantined == 3
        gate.open()
        await run
        assert r.hit(seq("A", 12)) == 8
        assert (r.pool.free, r.pool.evictable) == (14, 2)


# --- all or nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error"), [(-1, ValueError), (1 << 32, ValueError), (1.5, TypeError), ("1", TypeError)]
)
async def test_a_token_that_is_none_changes_nothing(bad: Any, error: type[Exception]) -> None:
    """Neither one lease nor, among several, the others."""
    async with rig() as r, r.cache.lease(seq("A", 4)) as one, r.cache.lease(seq("B", 4)) as two:
        await r.compute(one)
        await r.compute(two)
        before = r.pool
        with pytest.raises(error):
            one.append(bad)
        with pytest.raises(error):
            r.cache.extend([one, two], [1, bad])
        assert (len(one), len(two), r.pool) == (4, 4, before)


async def test_extend_counts_what_a_victim_was_promised() -> None:
    """Its release frees that, too, so one victim suffices."""
    async with rig(pages=6) as r:
        leases = [await r.lease(seq(name, 2 * P)) for name in "ABC"]
        assert r.pool.unspent == 6
        assert r.cache.extend(leases, [1, 1, 1]) == leases[:0:-1][:1]
        assert [len(lease) for lease in leases] == [8, 8, 8]
        leases.pop().close()
        assert r.cache.extend(leases, [1, 1]) == []
        for lease in leases:
            lease.close()


async def test_extend_takes_one_token_for_each_of_distinct_leases() -> None:
    """Anything else is a mistake of the caller's."""
    async with rig() as r, r.cache.lease(seq("A", 4)) as one, r.cache.lease(seq("B", 4)) as two:
        for leases, tokens in (([one], [1, 2]), ([one, one], [1, 2]), ([one, two], [1])):
            with pytest.raises(ValueError, match="one token"):
                r.cache.extend(leases, tokens)
        assert r.cache.extend([], []) == []
        two.close()
        with pytest.raises(ClosedError):
            r.cache.extend([one, two], [1, 2])
        assert len(one) == 4


async def test_growth_that_is_refused_changes_nothing() -> None:
    """The same append succeeds when there is room."""
    async with rig(pages=2) as r, r.cache.lease(seq("A", 4)) as one:
        await r.compute(one)
        two = await r.lease(seq("B", 4))
        before = r.pool
        with pytest.raises(CapacityError) as caught:
            one.append(1)
        assert (caught.value.needed, caught.value.free, caught.value.evictable) == (1, 1, 0)
        assert len(caught.value.held_by) == 2
        assert (len(one), r.pool) == (4, before)
        two.close()
        one.append(1)
