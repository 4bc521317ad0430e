"""Every option of `storage` does what the documentation says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.lease_helpers import P, rig, seq, start, turns
from tests.storage_helpers import MODEL, keep, prefetched, three_tiers
from tests.tier_helpers import until
from tiered_cache.errors import BackendError
from tiered_cache.stats import StorageStats
from tiered_cache.testing.faulty_backend import CallGate
from tiered_cache_memory import MemoryBackend

A = seq("A", 32)
ROW = 4096
"""Bytes of a page of this model in storage."""


def health(r: Any) -> StorageStats:
    stats: StorageStats | None = r.stats.storage
    assert stats is not None
    return stats


async def test_backend_and_options_are_who_keeps_it_and_how() -> None:
    """The memory backend of three rows: the fourth page is refused."""
    storage = {"backend": "memory", "options": {"max_size": 3 * ROW}, "prefetch": {"threshold": 0}}
    async with rig(64, model=MODEL, host={"tokens": 256}, storage=storage) as r:
        await r.cache.drain()
        await r.serve(A)
        await r.cache.drain()
        assert health(r).num_objects == 3
        assert health(r).max_bytes == 3 * ROW
        assert health(r).counters.objects_refused >= 1


@pytest.mark.parametrize("required", [False, True])
async def test_required_is_whether_opening_fails(
    monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    """By default the cache goes on without what cannot be reached, and says so."""

    async def refuse(options: Any, context: Any) -> Any:
        raise BackendError("nobody listens there")

    monkeypatch.setattr(MemoryBackend, "open", refuse)
    storage = {"backend": "memory", "required": required}
    opening = rig(16, model=MODEL, host={"tokens": 64}, storage=storage)
    if required:
        with pytest.raises(BackendError, match="nobody listens there"):
            await opening.__aenter__()
        return
    async with opening as r:
        await until(lambda: health(r).reason != "")
        assert not health(r).is_connected
        assert "nobody listens there" in health(r).reason
        assert await r.serve(A) == 0


@pytest.mark.parametrize(("timeout", "timed_out"), [(0.05, 1), (60, 0)])
async def test_timeout_is_how_long_a_batch_may_take(timeout: float, timed_out: int) -> None:
    """Later it has failed; the request is computed."""
    storage = {"timeout": timeout, "prefetch": {"threshold": 0, "policy": "wait_complete"}}
    async with three_tiers(storage=storage) as (r, store):
        await keep(r, A)
        store.fault("read", delay=0.2)
        assert await prefetched(r, A) == (0 if timed_out else 32)
        assert health(r).counters.calls_timed_out == timed_out


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_max_concurrency_is_how_many_calls_go_at_once(most: int) -> None:
    """The others wait for their turn."""
    gate = CallGate()
    prompts = [seq(name, 16) for name in "ABC"]
    async with three_tiers(storage={"max_concurrency": most}) as (r, store):
        await keep(r, *prompts)
        store.fault("contains", gate=gate)
        waiting = [start(prefetched(r, tokens, policy="wait_complete")) for tokens in prompts]
        await gate.reached(most)
        await turns()
        assert gate.num_waiting == most
        assert health(r).calls_queued == 3 - most
        gate.open()
        assert await asyncio.gather(*waiting) == [16, 16, 16]


# --- prefetch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "reused"), [("best_effort", 0), ("timeout", 0), ("wait_complete", 32)]
)
async def test_policy_is_how_long_a_request_waits_for_storage(policy: str, reused: int) -> None:
    """Not at all, for the time allowed, to the end."""
    prefetch = {"threshold": 0, "policy": policy, "timeout_base": 0.02, "timeout_per_ki_token": 0}
    async with three_tiers(storage={"prefetch": prefetch}) as (r, store):
        await keep(r, A)
        store.fault("read", delay=0.2)
        assert await r.serve([*A, 1]) == reused
        assert r.counters.prefetches_timed_out == (policy == "timeout")


@pytest.mark.parametrize(
    ("base", "per_ki_token", "reused"), [(0.02, 0, 0), (20, 0, 32), (0, 200, 32), (0, 0.02, 0)]
)
async def test_timeout_base_and_per_ki_token_are_the_time_allowed(
    base: float, per_ki_token: float, reused: int
) -> None:
    """Together: one for any prefetch, one that grows with its length; 32 tokens of 200 s for 1,024
    are 6 s."""
    prefetch = {"threshold": 0, "timeout_base": base, "timeout_per_ki_token": per_ki_token}
    async with three_tiers(storage={"prefetch": prefetch}) as (r, store):
        await keep(r, A)
        store.fault("read", delay=0.2)
        assert await prefetched(r, A) == reused


@pytest.mark.parametrize(("threshold", "reused"), [(0, 32), (32, 32), (33, 0)])
async def test_threshold_is_the_least_that_is_asked_for(threshold: int, reused: int) -> None:
    """Of fewer tokens, storage is not even asked."""
    prefetch = {"threshold": threshold, "policy": "wait_complete"}
    async with three_tiers(storage={"prefetch": prefetch}) as (r, _):
        await keep(r, A)
        before = health(r).counters.objects_probed
        assert await r.serve([*A, 1]) == reused
        assert (health(r).counters.objects_probed > before) == (reused > 0)


@pytest.mark.parametrize(("ttl", "held"), [(0.02, 0), (60, 8)])
async def test_result_ttl_is_how_long_the_host_keeps_a_result(ttl: float, held: int) -> None:
    """For whoever asked for it and has not come yet."""
    prefetch = {"threshold": 0, "result_ttl": ttl}
    async with three_tiers(storage={"prefetch": prefetch}) as (r, _):
        await keep(r, A)
        with r.cache.prefetch(A) as handle:
            assert await handle.wait("wait_complete") == 32
            assert health(r).pages_prefetched == 8
            await asyncio.sleep(0.1)
            assert health(r).pages_prefetched == r.host.protected == held


# --- backup -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [4, 16])
async def test_max_pending_is_how_much_waits_to_be_written(pages: int) -> None:
    """More is skipped, and counted."""
    gate = CallGate()
    storage = {"backup": {"max_pending": pages * ROW}}
    async with three_tiers(256, 256, storage=storage) as (r, store):
        store.fault("write", gate=gate)
        for at in range(20):
            await r.serve([at, *seq("A", 2 * P, 1)])
        await until(lambda: gate.num_waiting > 0 and r.counters.backups_skipped > 0)
        assert 0 < health(r).pages_pending <= pages
        gate.open()


# --- breaker ------------------------------------------------------------------------------------


async def fail_writes(r: Any, store: Any, count: int) -> None:
    store.faults.clear()
    store.fault("write", error=OSError("disk"), times=count)
    for at in range(count):
        await r.serve([7, at, *seq("B", P, 2)])
        await r.cache.drain()


@pytest.mark.parametrize("failures", [1, 3])
async def test_failures_is_how_many_in_a_row_open_the_breaker(failures: int) -> None:
    """One fewer does not."""
    breaker = {"failures": failures, "retry_after": 60, "max_retry_after": 60}
    async with three_tiers(storage={"breaker": breaker}) as (r, store):
        await fail_writes(r, store, failures - 1)
        assert health(r).writes == ("degraded" if failures > 1 else "closed")
        await r.serve(A)  # a write that goes well: they were not in a row
        await r.cache.drain()
        await fail_writes(r, store, failures)
        assert health(r).writes == "open"


@pytest.mark.parametrize(("retry_after", "state"), [(0.05, "closed"), (60, "open")])
async def test_retry_after_is_when_it_is_tried_again(retry_after: float, state: str) -> None:
    """Of itself; one call decides."""
    breaker = {"failures": 1, "retry_after": retry_after, "max_retry_after": 60}
    async with three_tiers(storage={"breaker": breaker}) as (r, store):
        store.fault("contains", error=OSError("disk"), times=1)
        await prefetched(r, A)
        assert health(r).reads == "open"
        await asyncio.sleep(0.3)
        assert health(r).reads == state


@pytest.mark.parametrize("most", [0.04, 60])
async def test_max_retry_after_bounds_the_doubling(most: float) -> None:
    """Six tries in vain: after 20, 40, 80, … ms that is 1.26 s; with a bound of 40 it is 0.22."""
    breaker = {"failures": 1, "retry_after": 0.02, "max_retry_after": most}
    async with three_tiers(storage={"breaker": breaker}) as (r, store):
        store.fault("contains", error=OSError("disk"))
        await prefetched(r, A)
        began = asyncio.get_running_loop().time()
        await until(lambda: health(r).counters.calls_failed >= 7)
        took_s = asyncio.get_running_loop().time() - began
        assert (took_s < 1) is (most < 1)


@pytest.mark.parametrize(("slow", "state"), [(0.01, "degraded"), (60, "closed")])
async def test_slow_is_what_is_called_degraded(slow: float, state: str) -> None:
    """On average, over the last calls; it is asked as before."""
    async with three_tiers(storage={"breaker": {"slow": slow}}) as (r, store):
        store.fault("write", delay=0.2)
        await r.serve(A)
        await r.cache.drain()
        assert health(r).writes == state
        assert store.has(A) == "SSSSSSSS"
