"""How calls, handles and the storage tier end, whoever is cancelled or hangs meanwhile (semantics
§9.3, §10.5, §12); most of it was found by the schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.lease_helpers import cancelled, rig, seq, start, turns
from tests.storage_helpers import MODEL, Store, keep, prefetched, three_tiers, wipe
from tests.tier_helpers import on_tier, until
from tiered_cache import BackendError, build
from tiered_cache.storage.backend import ReadResult
from tiered_cache.testing.faulty_backend import CallGate
from tiered_cache.types import Boundary

A, B = seq("A", 32), seq("B", 32)

T = TypeVar("T")

STORAGE: Any = {"backend": "memory", "prefetch": {"threshold": 0}}


async def soon(work: Awaitable[T]) -> T:
    """What must not wait for what hangs."""
    async with asyncio.timeout(2.0):
        return await work


async def test_a_call_that_never_began_has_failed() -> None:
    """Given up in the very step in which it was started: it has no results, and an error that says
    why, instead of as many results as pages."""
    async with three_tiers() as (r, _):
        ended = []
        io = r.cache._controller.storage.io  # type: ignore[union-attr]
        call = io.read(0, [bytes(32)], np.empty(0, np.int32), 0, ended.append)
        io.give_up(call)
        await soon(call.ended.wait())
        assert ended == [call]
        assert call.error is not None
        await r.cache.drain()


async def test_a_prefetch_that_is_closed_as_its_read_begins() -> None:
    """Its rows go home."""
    async with three_tiers() as (r, _):
        await keep(r, A)
        for count in range(12):
            handle = r.cache.prefetch(A)
            await turns(count)
            handle.close()
            await r.cache.drain()
            assert r.host.free + r.host.evictable == r.host.capacity
            assert r.counters.background_failures == 0
            wipe(r)


async def test_a_backend_that_cancels_its_own_opening_cancels_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not there, and the cache goes on without."""
    store = Store()
    store.fault("open", error=asyncio.CancelledError(), times=1)
    monkeypatch.setattr(build, "load_backend", lambda name: store.opened_as())
    storage = {**STORAGE, "breaker": {"retry_after": 0.01}}
    async with rig(64, model=MODEL, host={"tokens": 256}, storage=storage) as r:
        assert await r.serve(A) == 0
        await until(lambda: r.cache.storage.health().is_connected)


@pytest.mark.parametrize("op", ["contains", "clear"])
async def test_no_backend_is_closed_under_a_call(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions, too, are waited for, though they touch no rows: up to the limit of the detach, and
    beyond it in the background."""
    store, gate = Store(), CallGate()
    monkeypatch.setattr(build, "load_backend", lambda name: store.opened_as())
    async with rig(64, model=MODEL, host={"tokens": 256}, storage=STORAGE) as r:
        store.fault("contains" if op == "contains" else "clear", gate=gate, stubborn=True, times=1)
        if op == "contains":
            r.cache.prefetch(A, detach=True)
        else:
            clearing = start(r.cache.storage.clear())
        await gate.reached()
        await soon(r.cache.storage.detach(0))
        assert store.num_calls["aclose"] == 0
        gate.open()
        await r.cache.drain()
        assert store.num_calls["aclose"] == 1
        if op == "clear":
            assert await clearing == 0
    assert store.violations == []


async def test_a_detach_that_is_cancelled_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tree believed of one store it must not believe of the next: pages would be kept
    there without those above them."""
    first, second, gate = Store(), Store(), CallGate()
    stores = [first, second]
    monkeypatch.setattr(build, "load_backend", lambda name: stores.pop(0).opened_as())
    async with rig(64, model=MODEL, host={"tokens": 256}, storage=STORAGE) as r:
        await r.serve(A)
        await r.cache.drain()
        first.fault("write", gate=gate, stubborn=True, times=1)
        await r.serve(B)
        await gate.reached()
        detaching = start(r.cache.storage.detach(None))
        await turns()
        await cancelled(detaching)
        await soon(r.cache.storage.attach(r.config))
        gate.open()
        for tokens in ([*A, 1, 2, 3, 4], B):
            await r.serve(tokens)
            await r.cache.drain()
            assert second.has(tokens) == "S" * (len(tokens) // 4)
        assert first.num_calls["aclose"] == 1


async def test_a_call_may_end_when_the_cache_has_gone() -> None:
    """Its limit passes, and the breaker opens, when nobody is there any more to ask again."""
    gate = CallGate()
    storage = {"timeout": 0.05, "breaker": {"failures": 1, "retry_after": 0.01}}
    async with three_tiers(storage=storage) as (r, store):
        await keep(r, A)
        store.fault("read", gate=gate, stubborn=True)
        handle = r.cache.prefetch(A)
        await gate.reached()
        await r.cache.aclose(0)
        await asyncio.sleep(0.1)
        gate.open()
        assert await r.cache.aclose(None) == []
        handle.close()


async def test_who_joined_a_read_does_not_wait_for_its_thread() -> None:
    """§10.8: the other's call was given up and does not end; the page is read again."""
    gate = CallGate()
    async with three_tiers() as (r, store):
        await keep(r, A)
        store.fault("read", gate=gate, stubborn=True, times=1)
        reader = r.cache.prefetch(A)
        with r.cache.prefetch(A) as joiner:
            await gate.reached()
            await turns()
            assert r.counters.prefetches_joined == 1
            reader.close()
            assert await soon(joiner.wait("wait_complete")) == 32
        gate.open()
        await r.cache.drain()


async def test_rows_of_reads_that_nobody_wants_count_until_they_end() -> None:
    """§10.7: in flight and untaken together are half of the host, whoever has closed his
    handle."""
    gate = CallGate()
    async with three_tiers(rows=16) as (r, store):
        await keep(r, A, B)
        fault = store.fault("read", gate=gate, stubborn=True)
        with r.cache.prefetch(A):
            await gate.reached()
        store.faults.remove(fault)
        with r.cache.prefetch(B) as handle:
            assert await soon(handle.wait("wait_complete")) == 0
            assert "refused" in handle.why
        gate.open()
        await r.cache.drain()
        assert await prefetched(r, B) == 32


@pytest.mark.parametrize("how", ["reset", "quota", "time", "detach"])
async def test_a_detached_prefetch_ends(how: str) -> None:
    """Nobody closes it: however its result is let go, it is listed no longer."""
    storage = {"prefetch": {"threshold": 0, "result_ttl": 0.02 if how == "time" else 30}}
    async with three_tiers(rows=16, storage=storage) as (r, _):
        await keep(r, A, B)
        r.cache.prefetch(A, detach=True)
        await until(lambda: r.host.protected == 8)
        assert [item.kind for item in r.cache.outstanding()] == ["prefetch"]
        if how == "reset":
            r.cache.reset()
        elif how == "quota":
            assert await prefetched(r, B) == 32
        elif how == "detach":
            await r.cache.storage.detach()
        await until(lambda: r.cache.outstanding() == [])
        if how != "detach":
            assert list(r.cache._controller.storage.prefetches) == []  # type: ignore[union-attr]


async def test_what_is_given_up_for_a_lost_page_is_counted() -> None:
    """§8.4: host copies below a page that storage has lost cannot be reached and go; those that
    are nowhere else are dropped."""
    async with three_tiers(pages=64, rows=64) as (r, store):
        controller = r.cache._controller
        assert controller.host_pages is not None
        await r.serve(A)
        await r.cache.drain()
        controller.host_pages.evict([8])  # a mirror that storage has
        await r.serve([*A, *B])
        await r.cache.drain()
        for node in r.cache.tree.nodes():
            if node.end == 64:
                r.cache.tree.believe_stored(node, 0, is_stored=False)
        controller.accounts.evict([1 << 20])
        assert on_tier(r, [*A, *B]) == "-" * 8 + "H" * 8
        before = r.counters.tokens_dropped
        lost = store.fault("read", keys=[store.pages_of(A)[0]], result=ReadResult.MISSING)
        assert await prefetched(r, A) == 0
        store.faults.remove(lost)
        assert on_tier(r, [*A, *B])[8:] == "-" * 8
        assert r.counters.tokens_dropped == before + 32


async def test_what_makes_room_for_a_copy_may_be_below_it() -> None:
    """Schedule 712: the path to be copied ended at a node that only the host had, which was given
    up for the copy's rows; nobody gave those back."""
    async with three_tiers(rows=8) as (r, _):
        controller = r.cache._controller
        assert controller.host_pages is not None
        await r.serve(A)
        await r.cache.drain()
        controller.host_pages.evict([8])
        await r.serve([*A, *B])
        await r.cache.drain()
        controller.accounts.evict([8])
        below = next(node for node in r.cache.tree.nodes() if node.end == 64)
        assert on_tier(r, [*A, *B]) == "D" * 8 + "H" * 8
        policy: Any = controller.write_policy
        policy._queue.append(Boundary(below, 64))
        r.cache.tree.believe_stored(below.parent, 0, is_stored=False)  # type: ignore[arg-type]
        policy.look_again()
        await r.cache.drain()
        r.check()
        assert on_tier(r, A) == "B" * 8


async def test_a_call_that_hangs_gives_its_turn_away() -> None:
    """§9.3: others go on in its stead; when it has ended after all, there are as many turns as
    before."""
    gates = [CallGate(), CallGate()]
    storage = {"timeout": 0.05, "max_concurrency": 1}
    async with three_tiers(pages=128, rows=128, storage=storage) as (r, store):
        await keep(r, A, B)
        hung = store.fault("read", gate=gates[0], stubborn=True)
        assert await soon(prefetched(r, A)) == 0
        store.faults.remove(hung)
        assert await soon(prefetched(r, B)) == 32
        gates[0].open()
        await r.cache.drain()
        wipe(r)
        store.fault("read", gate=gates[1])
        handles = [r.cache.prefetch(tokens) for tokens in (A, B)]
        await gates[1].reached()
        gates[1].open()
        for handle in handles:
            await handle.wait("wait_complete")
            handle.close()
        limited: Any = r.cache._controller.storage.io._limited  # type: ignore[union-attr]
        assert limited._turns._value - limited._surplus == 1


async def test_a_call_that_ends_late_has_failed() -> None:
    """§9.3: that it ends well after all says nothing for the backend: two in a row are too many."""
    storage = {"timeout": 0.03, "breaker": {"failures": 2, "retry_after": 20}}
    async with three_tiers(storage=storage) as (r, store):
        await keep(r, A)
        for _ in range(2):
            gate = CallGate()
            store.fault("contains", gate=gate, times=1)
            assert await soon(prefetched(r, A)) == 0
            gate.open()
            await r.cache.drain()
        health = r.cache.storage.health()
        assert health.reads == "open"
        assert "no answer within" in health.reason


async def test_a_probe_that_comes_early_is_made_later() -> None:
    """Schedule 22520: the probe came before its time (a loop's timers may, by a little), was
    refused, and no other came."""
    storage = {"breaker": {"retry_after": 0.02, "max_retry_after": 0.04}}
    async with three_tiers(storage=storage) as (r, _):
        reads = r.cache._controller.storage.reads  # type: ignore[union-attr]
        reads.open("5 calls hang")
        reads.retry_at += 0.02
        await until(lambda: r.cache.storage.health().reads == "closed")


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_what_a_clear_may_have_deleted_is_not_believed_to_be_there(how: str) -> None:
    """It has gone through, and its answer is lost; what was written while it began is gone too, and
    kept again when it is next used."""
    before, after = CallGate(), CallGate()
    async with three_tiers() as (r, store):
        store.fault("clear", gate=before)
        store.fault("clear", gate=after, at="after", error=OSError("connection lost"))
        clearing = start(r.cache.storage.clear())
        await before.reached()
        await r.serve(B)
        await until(lambda: store.has(B) == "S" * 8)
        before.open()
        await after.reached()
        assert store.rows == {}
        if how == "is cancelled":
            await cancelled(clearing)
        else:
            after.open()
            with pytest.raises(BackendError):
                await clearing
        await r.cache.drain()
        await r.serve([*B, 1])
        await r.cache.drain()
        assert store.has(B) == "S" * 8
