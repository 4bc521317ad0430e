"""Prefetch: what it waits for, what it may take, how it ends (semantics §10.5–8)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.lease_helpers import P, rig, seq, start, turns
from tests.storage_helpers import (
    MODEL,
    Store,
    keep,
    on_virtual_clock,
    prefetched,
    three_tiers,
    wipe,
)
from tests.tier_helpers import on_tier, until
from tiered_cache.config import StorageConfig
from tiered_cache.errors import ClosedError
from tiered_cache.storage.backend import ReadResult
from tiered_cache.testing.faulty_backend import CallGate, flipped

A = seq("A", 32)


async def test_progress_is_not_taken_for_the_end() -> None:
    """B53: while nobody knows yet what storage has, a prefetch is not done."""
    gate = CallGate()
    async with three_tiers() as (r, store):
        await keep(r, A)
        store.fault("contains", gate=gate)
        with r.cache.prefetch(A) as handle:
            waiting = start(handle.wait("wait_complete"))
            await gate.reached()
            await turns()
            assert not waiting.done()
            assert handle.tokens == 0
            gate.open()
            assert await waiting == 32


async def test_best_effort_does_not_wait() -> None:
    """B53: it may come to nothing, and that is said at once."""
    async with three_tiers() as (r, _):
        await keep(r, A)
        with r.cache.prefetch(A) as handle:
            assert await handle.wait("best_effort") == 0
            assert handle.is_done


@on_virtual_clock
async def test_best_effort_goes_on_while_its_lease_queues() -> None:
    """§11.5: a prefetch runs while queueing; §10.6: and the lease takes what has come by then."""
    storage = {"prefetch": {"threshold": 0, "policy": "best_effort"}}
    async with three_tiers(16, 64, storage=storage) as (r, _):
        await keep(r, A)
        first = await r.lease(seq("B", 60))
        await r.compute(first)
        work = start(r.lease([*A, 1]))
        await asyncio.sleep(1.0)
        assert not work.done()
        came = on_tier(r, A)
        first.close()
        lease = await work
        lease.close()
        assert (came, lease.hits.storage) == ("H" * 8, 32)


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("state", ["done", "pending", "cancelled"])
async def test_every_policy_in_every_state(policy: str, state: str) -> None:
    """B55: the time limit holds whatever is pending; late data is dropped, and its pages go home
    when the read has really ended."""
    gate = CallGate()
    storage = {"prefetch": {"threshold": 0, "timeout_base": 0.05, "timeout_per_ki_token": 0}}
    async with three_tiers(storage=storage) as (r, store):
        await keep(r, A)
        if state != "done":
            store.fault("read", gate=gate, at="inside", stubborn=True)
        with r.cache.prefetch(A) as handle:
            if state == "done":
                await until(lambda: handle.is_done)
                assert await handle.wait(policy) == 32
                return
            waiting = start(handle.wait(policy))
            if policy != "best_effort":
                await gate.reached()
            if state == "cancelled" and policy != "best_effort":
                await turns()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                assert handle.done_now() == 0
            elif policy == "wait_complete":
                await asyncio.sleep(0.1)
                assert not waiting.done()
                gate.open()
                assert await waiting == 32
                return
            else:
                assert await waiting == 0
        if gate.num_reached:
            assert r.host.in_flight == 8, "the call still writes there"
        gate.open()
        await r.cache.drain()
        assert r.host.in_flight == 0
        assert on_tier(r, A) == "--------", "nobody wanted it any more"


async def test_equal_pages_are_read_once() -> None:
    """§10.8: two prompts with one beginning read it together."""
    gate = CallGate()
    left, right = [*A, *seq("B", 16)], [*A, *seq("C", 16)]
    async with three_tiers() as (r, store):
        await keep(r, left, right)
        store.fault("read", gate=gate)
        with r.cache.prefetch(left) as one, r.cache.prefetch(right) as other:
            await gate.reached()
            await turns()
            gate.open()
            assert await one.wait("wait_complete") == 48
            assert await other.wait("wait_complete") == 48
        assert r.stats.storage is not None
        assert r.stats.storage.counters.objects_read == 16
        assert r.counters.prefetches_joined >= 1


async def test_a_reader_that_goes_leaves_nobody_waiting() -> None:
    """§10.8: who joined a read that is given up reads for himself."""
    gate = CallGate()
    async with three_tiers() as (r, store):
        await keep(r, A)
        store.fault("read", gate=gate, times=1)
        one, other = r.cache.prefetch(A), r.cache.prefetch(A)
        await gate.reached()
        await turns()
        one.close()
        assert await other.wait("wait_complete") == 32
        other.close()


@pytest.mark.parametrize("rows", [16, 40])
async def test_quota(rows: int) -> None:
    """B63, §10.7: half of the host, however small; a longer prefix is shortened, not refused; and
    results that nobody takes make room for the next."""
    long = seq("A", 64)
    async with three_tiers(rows=rows, host={"write_policy": "write_through"}) as (r, _):
        await keep(r, long, seq("B", 32))
        half = rows // 2 * P
        first = r.cache.prefetch(long)
        assert await first.wait("wait_complete") == min(64, half)
        if half < 64:
            assert "refused" in first.why
        second = r.cache.prefetch(seq("B", 32))
        assert await second.wait("wait_complete") == 32, "an untaken result made room"
        first.close()
        second.close()


async def test_a_refusal_can_be_tried_again() -> None:
    """B63: the fourth of four is refused while the others have all there is, and says so; later it
    comes."""
    gate = CallGate()
    async with three_tiers(rows=32) as (r, store):
        prompts = [seq(name, 32) for name in "ABCD"]
        await keep(r, *prompts)
        fault = store.fault("read", gate=gate)
        handles = [r.cache.prefetch(tokens) for tokens in prompts[:2]]
        await gate.reached(2)
        with r.cache.prefetch(prompts[3]) as refused:
            assert await refused.wait("wait_complete") == 0
            assert "refused" in refused.why
        assert r.counters.prefetches_refused == 1
        gate.open()
        for handle in handles:
            assert await handle.wait("wait_complete") == 32
            handle.close()
        store.faults.remove(fault)
        assert await prefetched(r, prompts[3]) == 32


@pytest.mark.parametrize("threshold", [0, 16, 32, 36])
async def test_threshold(threshold: int) -> None:
    """§10.6: less is neither asked for nor read."""
    async with three_tiers(storage={"prefetch": {"threshold": threshold}}) as (r, store):
        await keep(r, A)
        got = await prefetched(r, A)
        assert got == (32 if threshold <= 32 else 0)
        if threshold > 32:
            assert store.num_calls["contains"] == 1, "only the backup's"


async def test_what_device_and_host_have_is_not_read() -> None:
    """It goes on from there."""
    async with three_tiers() as (r, _):
        await keep(r, [*A, *seq("B", 32)])
        assert await r.serve(A) == 28  # of 32 tokens one is always computed
        assert await prefetched(r, [*A, *seq("B", 32)]) == 64
        assert r.stats.storage is not None
        assert r.stats.storage.counters.objects_read <= 7 + 8 + 1


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ({"result": ReadResult.MISSING}, "SSSSSSSS"),
        ({"result": ReadResult.FAILED}, "SSSSSSSS"),
        ({"result": ReadResult.CORRUPT}, "SSSSSSSS"),
        ({"change": flipped(600)}, "SSSSSSSS"),
        ({"change": flipped(40)}, "SSSSSSSS"),
    ],
)
async def test_a_page_that_is_wrong_ends_the_prefix(fault: Any, left: str) -> None:
    """B51, B58, B64, B72: what came before it is used, what came after it goes home, nobody gets an
    error; and the next backup writes it again."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        spoilt = store.fault("read", keys=[store.pages_of(A)[3]], **fault)
        assert await prefetched(r, A) == 12
        assert r.host.in_flight == 0
        store.faults.remove(spoilt)
        r.spoil_free_pages()
        assert await r.serve([*A, 1]) >= 12
        await r.cache.drain()
        wipe(r)
        assert await prefetched(r, A) == 32, "rewritten, or never wrong"


async def test_a_handle_that_is_closed_says_so() -> None:
    async with three_tiers() as (r, _):
        handle = r.cache.prefetch(A)
        handle.close()
        handle.close()
        with pytest.raises(ClosedError):
            handle.done_now()


async def test_a_handle_that_is_dropped_warns_and_lets_go() -> None:
    """§6.5."""
    async with three_tiers() as (r, _):
        await keep(r, A)
        handle = r.cache.prefetch(A)
        await handle.wait()
        with pytest.warns(ResourceWarning, match="dropped without being closed"):
            del handle
        await until(lambda: r.host.protected == 0)


async def test_detached_it_needs_no_handle() -> None:
    """Its result is held for `result_ttl` seconds, or until a lease has it."""
    storage = {"prefetch": {"threshold": 0, "result_ttl": 0.05}}
    async with three_tiers(storage=storage) as (r, _):
        await keep(r, A)
        r.cache.prefetch(A, detach=True)
        await until(lambda: r.host.protected == 8)
        await until(lambda: r.host.protected == 0)
        assert on_tier(r, A) == "HHHHHHHH", "it stays cached"


async def test_a_lease_takes_a_result() -> None:
    async with three_tiers() as (r, _):
        await keep(r, A)
        with r.cache.prefetch(A) as handle:
            assert await handle.wait() == 32
            async with r.cache.lease([*A, 1]):
                assert r.stats.storage is not None
                assert r.stats.storage.pages_prefetched == 0


@pytest.mark.parametrize("moment", ["queued", "contains", "read", "read inside", "after"])
async def test_cancelled_prefetches_leave_nothing(moment: str) -> None:
    """B56: wherever they are given up."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        free = r.host.free
        for _ in range(50):
            gate = CallGate()
            store.faults.clear()
            if moment == "contains":
                store.fault("contains", gate=gate)
            elif moment.startswith("read"):
                at = "inside" if moment.endswith("inside") else "before"
                store.fault("read", gate=gate, at=at)
            with r.cache.prefetch(A) as handle:
                if moment == "after":
                    await handle.wait()
                elif moment != "queued":
                    await gate.reached()
            gate.open()
            await r.cache.drain()
            wipe(r)
            assert r.host.free == free
            assert r.stats.storage is not None
            assert r.stats.storage.pages_prefetched == 0
        store.faults.clear()
        assert await prefetched(r, A) == 32


async def test_pages_of_a_read_that_runs_are_nobody_elses() -> None:
    """B59: given up, its rows go home only when the backend has ended."""
    gate = CallGate()
    async with three_tiers(rows=16) as (r, store):
        await keep(r, A)
        store.fault("read", gate=gate, at="inside", stubborn=True, times=1)
        with r.cache.prefetch(A):
            await gate.reached()
        assert r.host.free + r.host.in_flight == 16
        assert r.host.in_flight == 8
        await r.serve(seq("B", 32))  # takes what the host has left
        r.spoil_free_pages()
        gate.open()
        await r.cache.drain()
        r.check()
        assert r.host.in_flight == 0


async def test_reset_ends_prefetches() -> None:
    """§12.1: with nothing; late bytes go nowhere."""
    gate = CallGate()
    async with three_tiers() as (r, store):
        await keep(r, A)
        store.fault("read", gate=gate, at="inside", stubborn=True, times=1)
        with r.cache.prefetch(A) as handle:
            waiting = start(handle.wait("wait_complete"))
            await gate.reached()
            r.cache.reset()
            assert await waiting == 0
            assert r.host.quarantined == 8
            assert r.host.free == 56
        gate.open()
        await r.cache.drain()
        assert r.host.free == 64
        assert await prefetched(r, A) == 32, "storage still has it"


async def test_a_lease_waits_as_long_as_its_timeout() -> None:
    """The issue's §6: `timeout` covers the prefetch, and then there is less of a prefix."""
    gate = CallGate()
    async with three_tiers() as (r, store):
        await keep(r, A)
        store.fault("read", gate=gate, stubborn=True, times=1)
        async with r.cache.lease([*A, 1], timeout=0.05) as lease:
            assert lease.prefix_len == 0
            assert "storage" in lease.why
        gate.open()
        await r.cache.drain()


async def test_a_store_that_is_cancelled_by_a_lease() -> None:
    """B56: who stops waiting for a lease leaves nothing behind."""
    gate = CallGate()
    async with three_tiers() as (r, store):
        await keep(r, A)
        store.fault("read", gate=gate, times=1)
        waiting = start(r.lease([*A, 1]))
        await gate.reached()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await r.cache.drain()
        assert r.host.free == 64
        assert r.pool.free == r.pool.capacity


async def test_where_storage_was_detached_a_prefetch_has_ended() -> None:
    """An operator's step is no error of a request."""
    async with three_tiers() as (r, _):
        await r.serve([*A[:8], 1])
        await r.cache.storage.detach()
        assert not r.cache.storage
        with r.cache.prefetch(A) as handle:
            assert handle.is_done
            assert handle.why == "storage is detached"
            assert await handle.wait("wait_complete") == handle.tokens == handle.done_now() == 8
        r.cache.prefetch(A, detach=True)


async def test_without_storage_a_prefetch_is_a_mistake() -> None:
    """Until there is one, and when it has gone again it is none."""
    async with rig(64, host={"tokens": 64 * P}, model=MODEL) as r:
        with pytest.raises(ValueError, match="write a `storage:` section"):
            r.cache.prefetch(A)
        storage = await asyncio.to_thread(StorageConfig, backend="memory")  # looks it up on disk
        other = r.config.model_copy(update={"storage": storage})
        await r.cache.storage.attach(other, backend=Store())
        await r.cache.storage.detach()
        with r.cache.prefetch(A) as handle:
            assert (handle.is_done, handle.tokens) == (True, 0)


async def test_less_than_the_threshold_is_not_read() -> None:
    """§10.6: whatever was asked for, a hit that is shorter is left where it is."""
    async with three_tiers(storage={"prefetch": {"threshold": 20}}) as (r, store):
        await keep(r, A[:16])
        assert await prefetched(r, A) == 0
        assert store.num_calls["read"] == 0


async def test_a_miss_is_not_remembered() -> None:
    """§10.7: what storage lacked may come there at any time."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        gone = store.fault("read", keys=[store.pages_of(A)[3]], result=ReadResult.MISSING)
        assert await prefetched(r, A) == 12
        store.faults.remove(gone)
        assert await prefetched(r, A) == 32
