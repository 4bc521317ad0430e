"""Leases where several things happen at once: runs, commits, resets, queues, two caches."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.lease_helpers import P, Rig, chunk_of, rig, seq, settings, start, turns
from tiered_cache import ClosedError, Lease, UnifiedRadixCache
from tiered_cache.testing.gates import Gate
from tiered_cache.testing.oracle import OracleModel

LIMIT_S = 2.0
"""Only a hang reaches it."""


async def soon(work: asyncio.Task[Lease]) -> Lease:
    async with asyncio.timeout(LIMIT_S):
        return await work


def gated(r: Rig) -> tuple[Gate, OracleModel]:
    """A model that stops in the middle of each chunk."""
    gate = Gate()
    r.at_exit(gate.open)
    return gate, OracleModel(r.oracle, gate)


# --- who may be granted ---------------------------------------------------------------------------


async def test_a_lease_that_is_entered_after_the_close_is_refused() -> None:
    """It would hold pages of a cache that nobody closes again."""
    cache = await UnifiedRadixCache.open(settings())
    late = cache.lease(seq("A", 9))
    await cache.aclose()
    try:
        with pytest.raises(ClosedError):
            await late.__aenter__()
        assert cache.outstanding() == []
    finally:
        await late.__aexit__(None, None, None)


async def test_a_lease_is_entered_once_also_while_it_waits() -> None:
    """Granted twice it would hold two prefixes and give one back."""
    async with rig(pages=8) as r:
        await r.serve(seq("A", 9))
        holder = await r.lease(seq("B", 32))
        context = r.cache.lease(seq("A", 9))
        first = start(context.__aenter__())
        await turns()
        with pytest.raises(ClosedError, match="entered before"):
            await soon(start(context.__aenter__()))
        holder.close()
        (await soon(first)).close()
        with pytest.raises(ClosedError, match="entered before"):
            await context.__aenter__()
        assert r.pool.protected == r.pool.unspent == 0


async def test_a_lease_of_another_cache_is_refused() -> None:
    """Its own cache would free its pages under the run; ids are unique within one cache only."""
    async with rig() as r, rig() as other:
        ours, theirs = await r.lease(seq("A", 9)), await other.lease(seq("A", 9))
        assert ours.id == theirs.id
        chunk = await chunk_of(theirs)
        with pytest.raises(ValueError, match="not of a lease that runs"):
            await ours.run(r.model, chunk)
        for leases in ([theirs], [ours, theirs]):
            with pytest.raises(ValueError, match="another cache"):
                await r.cache.run(leases, r.model, chunk)
            with pytest.raises(ValueError, match="another cache"):
                r.cache.extend(leases, [1] * len(leases))
        assert (ours.computed, theirs.computed, len(ours), len(theirs)) == (0, 0, 9, 9)
        assert r.stats.counters.runs == other.stats.counters.runs == 0
        ours.close()
        theirs.close()


# --- while a run is active ------------------------------------------------------------------------


async def test_nothing_is_taken_over_while_a_run_writes() -> None:
    """Its pages would be somebody else's in the middle of it."""
    async with rig() as r:
        gate, model = gated(r)
        early, late = await r.lease(seq("A", 21)), await r.lease(seq("A", 21))
        running = start(early.run(model, await chunk_of(early, 8)))
        await gate.reached()
        publish = late.allocate(21)
        late.commit(publish)  # the bytes are the test's, which has computed them itself
        r.oracle.write(late, late.key, 0, 21)
        before = early.pages["full"][:2].copy()
        chunk = await chunk_of(early, 4)
        assert chunk.start == 8
        assert np.array_equal(early.pages["full"][:2], before)
        r.check()
        gate.open()
        await running
        assert early.computed == 8
        chunk = await chunk_of(early)
        assert chunk.start == 20
        assert model.faults == []
        early.close()
        late.close()


async def test_truncate_is_refused_while_a_run_writes() -> None:
    """Its pages would go home under it; afterwards it is fine."""
    async with rig() as r, r.cache.lease(seq("A", 12)) as lease:
        gate, model = gated(r)
        running = start(lease.run(model, await chunk_of(lease)))
        await gate.reached()
        with pytest.raises(ValueError, match="run is active"):
            lease.truncate(4)
        assert (len(lease), lease.num_private_pages) == (12, 3)
        gate.open()
        await running
        lease.truncate(4)
        assert (len(lease), lease.num_private_pages) == (4, 1)


async def test_a_reset_forgets_what_was_committed_during_a_run() -> None:
    """The new tree must not get pages that are only quarantined."""
    async with rig() as r:
        gate, model = gated(r)
        lease = await r.lease(seq("A", 9))
        chunk = await chunk_of(lease)
        running = start(lease.run(model, chunk))
        await gate.reached()
        lease.commit(chunk)
        r.cache.reset()
        gate.open()
        await running
        assert r.hit(seq("A", 9)) == 0
        r.check()
        lease.close()
        assert r.pool.free == r.pool.capacity


async def test_a_commit_that_came_to_nothing_is_forgotten() -> None:
    """What a later run computes is not published before somebody says so: it may be a draft."""
    async with rig() as r, r.cache.lease(seq("A", 9)) as lease:
        gate = Gate()
        r.at_exit(gate.open)

        def fail(_: object) -> None:
            gate()
            raise OSError("on purpose")

        chunk = await chunk_of(lease)
        running = start(lease.run(fail, chunk))
        await gate.reached()
        lease.commit(chunk)
        gate.open()
        with pytest.raises(OSError, match="on purpose"):
            await running
        await lease.run(r.model, chunk)
        assert (lease.computed, lease.committed, r.hit(seq("A", 9))) == (9, 0, 0)


async def test_drain_waits_for_runs_also_for_those_that_follow_at_once() -> None:
    """Quiet means that nothing runs when the waiter looks, not that something has ended."""
    async with rig() as r, r.cache.lease(seq("A", 9)) as lease:
        gates = [Gate(), Gate()]

        async def two_runs() -> None:
            for gate in gates:
                r.at_exit(gate.open)
                await lease.run(gate)

        running = start(two_runs())
        await gates[0].reached()
        draining = start(r.cache.drain())
        await turns()
        assert not draining.done()
        gates[0].open()
        await gates[1].reached()
        await turns()
        assert not draining.done()
        gates[1].open()
        await running
        async with asyncio.timeout(LIMIT_S):
            await draining


# --- who waits for admission ----------------------------------------------------------------------


async def test_duplicates_that_go_home_let_the_queue_go_on() -> None:
    """Whoever waits for pages looks at that commit; nothing else has to happen."""
    async with rig(pages=9) as r:
        one, two = await r.lease(seq("A", 13)), await r.lease(seq("A", 13))
        chunks = [await chunk_of(one), await chunk_of(two)]
        await r.cache.run([one, two], r.model, chunks)
        waiting = start(r.lease(seq("B", 16)))  # four pages, one is spare
        await turns()
        one.commit(chunks[0])
        await turns()
        assert not waiting.done()
        two.commit(chunks[1])
        lease = await soon(waiting)
        for held in (one, two, lease):
            held.close()


async def test_a_truncation_lets_the_queue_go_on() -> None:
    """Pages beyond the reserve are anybody's."""
    async with rig(pages=4) as r, r.cache.lease(seq("A", 4)) as lease:
        await r.compute(lease)
        for token in range(9):
            lease.append(token)
        waiting = start(r.lease(seq("B", 12)))
        await turns()
        assert not waiting.done()
        lease.truncate(4)
        (await soon(waiting)).close()


async def test_closing_wakes_a_queue_that_only_a_hung_run_holds_up() -> None:
    """There is no open lease whose end would wake it."""
    cache = await UnifiedRadixCache.open(settings(pages=4))
    lease = await cache.acquire(seq("A", 16))
    gate = Gate()
    running = start(lease.run(gate, await chunk_of(lease)))
    await gate.reached()
    lease.close()
    waiting = [start(cache.acquire(seq(name, 16))) for name in "BC"]
    await turns()
    try:
        report = await cache.aclose(limit=0)
        assert [held.kind for held in report] == ["quarantine"]
        done, _ = await asyncio.wait(waiting, timeout=LIMIT_S)
        assert done == set(waiting)
        for task in waiting:
            with pytest.raises(ClosedError):
                await task
    finally:
        gate.open()
        await asyncio.wait([running, *waiting])
    assert cache.outstanding() == []


# --- what is told ---------------------------------------------------------------------------------


async def test_the_version_rises_with_every_change_of_the_table() -> None:
    """A kernel's copy of the table is good for as long as the version is the same."""
    async with rig() as r, r.cache.lease(seq("A", 9), reserve=8) as lease:
        twin = await r.lease(seq("A", 9))
        seen = [lease.pages_version]

        def changed() -> bool:
            seen.append(lease.pages_version)
            return seen[-1] > seen[-2]

        chunk = await chunk_of(lease)
        assert changed()
        await lease.run(r.model, chunk)
        assert not changed()
        lease.append(1)
        assert not changed()  # on a page that is there
        lease.truncate(9)
        assert not changed()
        for token in range(4):
            lease.append(token)
        assert changed()
        lease.truncate(9)
        assert changed()
        other = twin.allocate(9)
        await twin.run(r.model, other)
        twin.commit(other)
        lease.commit(chunk)
        assert changed()  # the twin's pages are canonical
        twin.close()


async def test_a_finished_request_ends_a_node_with_its_prompt() -> None:
    """So that what was generated can go first (semantics §5.9)."""
    async with rig() as r, r.cache.lease(seq("A", 2 * P), reserve=2 * P) as lease:
        await lease.run(r.model, await chunk_of(lease))
        for token in range(2 * P):
            await lease.run(r.model, lease.append(token))
        lease.finish()
        assert sorted(node.end for node in r.cache.tree.nodes() if node.parent) == [8, 16]
        r.check()


async def test_a_request_counts_once_for_each_node_b13() -> None:
    """However many chunks it came in; whoever reuses the prefix counts at its grant (§5.8)."""

    def counts(r: Rig) -> dict[int, int]:
        return {node.end: node.hit_count for node in r.cache.tree.nodes() if node.parent}

    async with rig() as r:
        async with r.cache.lease(seq("A", 13)) as lease:
            await r.compute(lease, 4)
        assert set(counts(r).values()) == {1}
        async with r.cache.lease(seq("A", 9)):
            pass
        assert {count for end, count in counts(r).items() if end <= 8} == {2}
        assert {count for end, count in counts(r).items() if end > 8} == {1}
        late = await r.lease(seq("B", 21))
        await r.serve(seq("B", 21))
        await chunk_of(late)  # takes over what was published since its grant
        assert counts(r)[20] == 2
        late.close()


async def test_two_leases_of_one_prompt_are_two_holds_b94() -> None:
    """Released in any order, any number of times, neither touches the other's."""
    async with rig(pages=4) as r:
        await r.serve(seq("A", 9))
        one, two = await r.lease(seq("A", 9)), await r.lease(seq("A", 9))
        assert r.pool.protected == 2
        for _ in range(2):
            one.close()
            assert r.pool.protected == 2
        assert r.cache.tree.evict((4,)).device[0].size == 0
        r.oracle.verify(two, two.key, 0, 8)
        two.close()
        two.close()
        assert (r.pool.protected, r.pool.evictable) == (0, 2)
