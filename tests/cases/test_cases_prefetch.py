"""Cases about what comes from storage: what arrives in part or not at all, what is given up on the
way, and what a wait may take. Seconds are those of the virtual clock."""

from __future__ import annotations

import asyncio
import errno
import random
from typing import Any, Final
from unittest import mock

import pytest

from tests.hybrid_helpers import STACKS, hybrid_tiers, kept, lose, objects, parts_of, usable
from tests.lease_helpers import P, Rig, cancelled, seq, start, turns
from tests.storage_helpers import (
    MODEL,
    Store,
    keep,
    on_virtual_clock,
    prefetched,
    three_tiers,
    wipe,
)
from tests.tier_helpers import on_tier
from tiered_cache import BackendError, ClosedError, Hits, IntegrityError, RadixKey, prefetch
from tiered_cache.storage.backend import ReadResult
from tiered_cache.testing.faulty_backend import CallGate, flipped, short, torn
from tiered_cache.types import MatchPrefixParams

A: Final = seq("A", 32)

OF_A_ROW: Final[dict[str, dict[str, Any]]] = {
    "missing": {"result": ReadResult.MISSING},
    "corrupt": {"result": ReadResult.CORRUPT},
    "unreadable": {"result": ReadResult.FAILED},
    "a bit of the header": {"change": flipped(40)},
    "a bit of the payload": {"change": flipped(600)},
    "zeros from the middle on": {"change": torn(560)},
    "short": {"change": short(100)},
    "nothing": {"change": short(0)},
}
"""Ways in which one row of a batch does not come."""

OF_A_CALL: Final[dict[str, dict[str, Any]]] = {
    "no space": {"error": OSError(errno.ENOSPC, "no space left on device")},
    "timeout": {"error": TimeoutError()},
    "its own": {"error": BackendError("unwell")},
    "bug": {"error": KeyError("row")},
    "cancels itself": {"error": asyncio.CancelledError()},
    "answers too little": {"answer": lambda answers: answers[:-1]},
    "answers too much": {"answer": lambda answers: [*answers, answers[0]]},
    "answers nothing": {"answer": lambda answers: None},
    "answers None for one": {"answer": lambda answers: [*answers[:3], None, *answers[4:]]},
    "answers otherwise": {"answer": lambda answers: [True] * len(answers)},
}
"""Ways in which a whole batch does not come."""


def now() -> float:
    return asyncio.get_running_loop().time()


def at_rest(r: Rig) -> None:
    """Nothing of the host is held, and all is accounted for."""
    assert r.host.in_flight == r.host.quarantined == r.host.protected == 0, r.host
    assert r.host.free + r.host.evictable == r.host.capacity
    assert r.stats.storage is not None
    assert r.stats.storage.pages_prefetched == 0
    assert r.cache.outstanding() == []
    assert r.counters.background_failures == 0
    r.check()


# --- what comes in part ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", OF_A_ROW)
@on_virtual_clock
async def test_b48_a_read_that_fails_in_its_middle(how: str) -> None:
    """B48: 40 pages are read, the 22nd does not come. Meanwhile nobody sees any of them; then all
    see 21, the rest goes home once, and a later prompt finds as many, or all when it comes."""
    tokens = seq("A", 160)
    async with three_tiers(192, 96) as (r, store):
        await keep(r, tokens)
        gate = CallGate()
        store.fault("read", gate=gate, at="inside", times=1)
        spoilt = store.fault("read", keys=[store.pages_of(tokens)[21]], **OF_A_ROW[how])
        reader = start(r.lease([*tokens, 1]))
        await gate.reached()
        joiner = start(r.lease([*tokens, 2]))
        await turns(20)
        async with r.cache.lease([*tokens, 3], timeout=0.5) as hasty:
            assert hasty.prefix_len == 0
            assert "storage" in hasty.why
        assert not reader.done()
        assert not joiner.done()
        assert on_tier(r, tokens) == "-" * 40
        gate.open()
        for lease in (await reader, await joiner):
            assert lease.prefix_len == 84
            r.oracle.verify(lease, lease.key, 0, 84)
            lease.close()
        await r.cache.drain()
        at_rest(r)
        wipe(r)
        assert await prefetched(r, tokens) == 84
        store.faults.remove(spoilt)
        await r.serve([*tokens, 1])
        await r.cache.drain()
        wipe(r)
        r.spoil_free_pages()
        assert await r.serve([*tokens, 1]) == 160
        at_rest(r)


@pytest.mark.parametrize("how", OF_A_ROW)
@on_virtual_clock
async def test_b51_what_did_not_come_is_not_there(how: str) -> None:
    """B51, B58: of eight pages the third does not come: two are there, with their bytes; the rest
    goes home, nothing beyond can be matched, and the handle says why."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        spoilt = store.fault("read", keys=[store.pages_of(A)[2]], **OF_A_ROW[how])
        r.spoil_free_pages()
        with r.cache.prefetch(A) as handle:
            assert await handle.wait("wait_complete") == 8
            assert handle.why
        assert on_tier(r, A) == "HH------"
        at_rest(r)
        store.faults.remove(spoilt)
        await r.serve([*A, 1])
        await r.cache.drain()
        wipe(r)
        assert await prefetched(r, A) == 32
        at_rest(r)


@pytest.mark.parametrize("op", ["contains", "read"])
@pytest.mark.parametrize("how", OF_A_CALL)
@on_virtual_clock
async def test_b51_a_backend_that_breaks_its_word_costs_a_prefix(how: str, op: Any) -> None:
    """B51, B64, B65: whatever it raises or answers, the request computes, nobody gets an error,
    nothing leaks, and the next request is served."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        failed = r.stats.storage.counters.calls_failed  # type: ignore[union-attr]
        store.fault(op, times=1, **OF_A_CALL[how])
        r.spoil_free_pages()
        async with r.cache.lease([*A, 1]) as lease:
            if (op, how) != ("contains", "answers otherwise"):  # that is what it should answer
                assert lease.prefix_len == 0
                assert lease.why
                assert r.stats.storage.counters.calls_failed == failed + 1  # type: ignore[union-attr]
        assert await r.serve([*A, 1]) == 32
        await r.cache.drain()
        at_rest(r)


@on_virtual_clock
async def test_b50_storage_loses_what_it_said_to_have() -> None:
    """B50: between the question and the read: a shorter prefix, said so; what was believed is
    believed no longer, and the next backup keeps it again."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        gate = CallGate()
        store.fault("read", gate=gate, times=1)
        with r.cache.prefetch(A) as handle:
            waiting = start(handle.wait("wait_complete"))
            await gate.reached()
            await store.kept.delete([store.key_of(A, page) for page in (4, 5, 7)])
            gate.open()
            assert await waiting == 16
            assert "missing" in handle.why
        assert on_tier(r, A) == "HHHH----"
        await r.serve([*A, 1])
        await r.cache.drain()
        assert store.has(A) == "S" * 8
        at_rest(r)


@on_virtual_clock
async def test_b50_what_a_handle_holds_stays_and_what_it_let_go_is_fetched_again() -> None:
    """B50: the host evicts between a prefetch and its lease."""
    async with three_tiers(48, 48) as (r, _):
        await keep(r, A)
        with r.cache.prefetch(A) as handle:
            assert await handle.wait() == 32
            wipe(r)
            assert on_tier(r, A) == "H" * 8
        wipe(r)
        assert on_tier(r, A) == "-" * 8
        r.spoil_free_pages()
        async with r.cache.lease([*A, 1]) as lease:
            assert lease.hits == Hits(storage=32)
            r.oracle.verify(lease, lease.key, 0, 32)
        await r.cache.drain()
        at_rest(r)


@pytest.mark.parametrize("seed", range(6))
@on_virtual_clock
async def test_b58_what_is_counted_has_arrived(seed: int) -> None:
    """B58: reads of two pages at a time, slow, in any order with others': whoever asks at any
    moment how far it is finds just those bytes; a hole ends it."""
    rng = random.Random(seed)
    tokens = seq("A", 96)
    with mock.patch.object(prefetch, "READ_BYTES", 2 * 4096):
        storage = {"prefetch": {"threshold": 0, "policy": "wait_complete"}}
        async with three_tiers(32, 96, storage=storage) as (r, store):
            await keep(r, tokens)
            r.spoil_free_pages()
            hole = rng.randrange(4, 24)
            for at in ("before", "inside", "after"):
                store.fault("read", at=at, delay=0.3)
            store.fault("read", keys=[store.pages_of(tokens)[hole]], result=ReadResult.FAILED)
            seen = set()
            with r.cache.prefetch(tokens) as handle:
                while not handle.is_done:
                    await asyncio.sleep(0.1 * rng.random())
                    if handle.tokens not in seen:
                        seen.add(handle.tokens)
                        assert on_tier(r, tokens).count("H") * P >= handle.tokens
                        r.oracle.verify_tree()
                assert handle.tokens == hole * P
                assert len(seen) > hole // 2
            await r.cache.drain()
            at_rest(r)


# --- what is given up -----------------------------------------------------------------------------

MOMENTS: Final = ("queued", "asked", "answered", "reading", "half read", "read", "taken")


@pytest.mark.parametrize("moment", MOMENTS)
@on_virtual_clock
async def test_b56_a_thousand_prefetches_that_are_given_up(moment: str) -> None:
    """B56: wherever that is, by whoever it is: the host has what it had, nothing is listed, and the
    next one comes."""
    async with three_tiers(32, 32) as (r, store):
        await keep(r, A)
        tier = r.cache._controller.storage
        assert tier is not None
        for number in range(1000):
            gate = CallGate()
            store.faults.clear()
            if moment in ("asked", "answered"):
                store.fault("contains", gate=gate, at="before" if moment == "asked" else "after")
            elif moment in ("reading", "half read", "read"):
                at: Any = {"reading": "before", "half read": "inside", "read": "after"}[moment]
                store.fault("read", gate=gate, at=at, stubborn=number % 5 == 0)
            if number % 3:
                handle = r.cache.prefetch(A)
                if moment == "taken":
                    assert await handle.wait() == 32
                elif moment != "queued":
                    await gate.reached()
                handle.close()
            else:
                waiting = start(r.lease([*A, 1]))
                if moment == "taken":
                    (await waiting).close()
                else:
                    if moment != "queued":
                        await gate.reached()
                    await cancelled(waiting)
            gate.open()
            await r.cache.drain()
            wipe(r)
            assert (r.host.free, r.pool.free) == (32, 32)
        store.faults.clear()
        at_rest(r)
        assert list(tier.prefetches) == []
        assert tier.prefetches._reading == {}
        assert await prefetched(r, A) == 32


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("op", ["contains", "read"])
@pytest.mark.parametrize("waits", ["handle", "lease"])
@on_virtual_clock
async def test_b55_a_time_limit_holds_whatever_hangs(policy: str, op: Any, waits: str) -> None:
    """B55: 0.2 s are allowed and something is never answered: who waits has less than it hoped for
    after 0.2 s at the latest, or when the call has failed, if it waits to the end; late data is
    dropped, and its pages are free when the call has really ended."""
    gate = CallGate()
    allowed = {"timeout_base": 0.2, "timeout_per_ki_token": 0.0}
    storage = {"timeout": 3.0, "prefetch": {"threshold": 0, "policy": policy, **allowed}}
    async with three_tiers(storage=storage) as (r, store):
        await keep(r, A)
        store.fault(op, gate=gate, at="inside", stubborn=True, times=1)
        began = now()
        if waits == "lease":
            async with r.cache.lease([*A, 1]) as lease:
                assert lease.prefix_len == 0
                assert lease.why
        else:
            with r.cache.prefetch(A) as handle:
                assert await handle.wait() == 0
                assert handle.why
        most = {"best_effort": 0, "timeout": 0.2, "wait_complete": 3.0}[policy]
        assert now() - began == pytest.approx(most, abs=1e-6)
        if op == "read" and gate.num_reached:
            assert r.host.in_flight == 8
        assert on_tier(r, A) == "-" * 8
        gate.open()
        await r.cache.drain()
        assert on_tier(r, A) == "-" * 8
        at_rest(r)


@on_virtual_clock
async def test_b55_a_longer_prefix_has_more_time() -> None:
    """B55: the time allowed counts from the first wait, and grows with what is to come."""
    tokens = seq("A", 1024)
    allowed = {"timeout_base": 1.0, "timeout_per_ki_token": 2.0}
    storage = {"prefetch": {"threshold": 0, **allowed}}
    async with three_tiers(256, 600, storage=storage) as (r, store):
        await keep(r, tokens)
        store.fault("read", delay=100.0)
        with r.cache.prefetch(tokens) as handle:
            await asyncio.sleep(2.0)
            began = now()
            assert await handle.wait() == 0
            assert now() - began == pytest.approx(3.0)
        await r.cache.drain()


@on_virtual_clock
async def test_b59_a_read_that_goes_on_writes_where_nobody_else_is() -> None:
    """B59: given up in its middle; everything else of the host is given to others and filled; then
    the call goes on, and their bytes are as they were."""
    gate = CallGate()
    async with three_tiers(48, 16) as (r, store):
        await keep(r, A)
        store.fault("read", gate=gate, at="inside", stubborn=True, times=1)
        with r.cache.prefetch(A):
            await gate.reached()
        assert (r.host.in_flight, r.host.free) == (8, 8)
        for name in "BCDE":
            await r.serve(seq(name, 32))
        await asyncio.sleep(1)
        assert r.host.in_flight == 8
        assert r.host.free == 0
        r.check()
        gate.open()
        await r.cache.drain()
        assert r.host.free == 8
        at_rest(r)
        home = r.cache._parts.host
        assert home is not None
        with pytest.raises(IntegrityError, match="given back twice"):
            home.allocators[0].free(home.allocators[0].free_ids()[:1])


@on_virtual_clock
async def test_b100_a_key_that_is_never_answered() -> None:
    """B100: what needs it ends by its limit, as a miss; other keys are as fast as ever; its rows
    are quarantined until the call has really ended, and then all is as it was."""
    gate = CallGate()
    async with three_tiers(64, 96, storage={"timeout": 2.0, "max_concurrency": 2}) as (r, store):
        await keep(r, A, seq("B", 32))
        store.fault("read", keys=[store.pages_of(A)[5]], gate=gate, stubborn=True, times=1)
        began = now()
        hung = start(prefetched(r, A, policy="wait_complete"))
        await gate.reached()
        for _ in range(20):
            assert await prefetched(r, seq("B", 32)) == 32
            wipe(r)
        assert now() == began
        assert await hung == 0
        assert now() - began == pytest.approx(2.0)
        assert [item.kind for item in r.cache.outstanding()] == ["quarantine"]
        assert r.stats.storage is not None
        assert r.stats.storage.counters.calls_timed_out == 1
        assert await r.serve([*A, 1]) == 32, "the next call is answered"
        assert r.host.in_flight == 8
        gate.open()
        await r.cache.drain()
        at_rest(r)


# --- what it may take -----------------------------------------------------------------------------


@pytest.mark.parametrize(("pages", "rows"), [(128, 128), (256, 128), (512, 96)])
@on_virtual_clock
async def test_b63_a_host_that_is_no_larger_than_the_device(pages: int, rows: int) -> None:
    """B63: with the defaults storage is read all the same; four requests at once that are more than
    the host may take of it come all, some of them later; a refusal says so and is counted."""
    prompts = [seq(name, 320) for name in "ABCD"]
    async with three_tiers(pages, rows, storage={"prefetch": {}}) as (r, store):
        for tokens in prompts:
            await keep(r, tokens)
        most = min(80, rows // 2) * P
        store.fault("read", delay=0.1)
        handles = [r.cache.prefetch(tokens) for tokens in prompts]
        got = [await handle.wait("wait_complete") for handle in handles]
        refused = [handle for handle in handles if "refused" in handle.why]
        assert max(got) >= most
        assert len(refused) == r.counters.prefetches_refused > 0
        for handle in handles:
            handle.close()
        for tokens in prompts:
            wipe(r)
            assert await prefetched(r, tokens, policy="wait_complete") == most
        at_rest(r)


@pytest.mark.parametrize("extra", [False, True])
@on_virtual_clock
async def test_b61_a_page_comes_with_all_its_pools(extra: bool) -> None:
    """B61: a side pool's rows are in the same object as the keys and values: nothing arrives
    without them, and an object from before there was one is a miss."""
    draft = {"name": "draft", "num_layers": 1, "row_shape": [8], "dtype": "int8"}
    store = Store()
    async with three_tiers(
        store=store, model={**MODEL, "extra_pools": [draft]} if extra else MODEL
    ) as (r, _):
        await keep(r, A)
    async with three_tiers(store=store, model={**MODEL, "extra_pools": [draft]}) as (r, _):
        r.spoil_free_pages()
        async with r.cache.lease([*A, 1]) as lease:
            assert lease.prefix_len == (32 if extra else 0)
            r.oracle.verify(lease, lease.key, 0, lease.prefix_len)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("waits", [True, False])
@on_virtual_clock
async def test_b94_two_handles_of_one_prompt_are_two_holds(order: Any, waits: bool) -> None:
    """B94: the host's copy stays until both are closed, in whichever order, whether or not anybody
    has waited; closing one again touches nothing of the other's."""
    async with three_tiers() as (r, _):
        await keep(r, A)
        handles = [r.cache.prefetch(A), r.cache.prefetch(A)]
        assert await handles[order[0]].wait("wait_complete") == 32
        if waits:
            assert await handles[order[1]].wait("wait_complete") == 32
        else:
            await asyncio.sleep(1)
        for _ in range(3):
            handles[order[0]].close()
        wipe(r)
        assert r.host.protected == 8
        assert on_tier(r, A) == "H" * 8
        with pytest.raises(ClosedError):
            handles[order[0]].done_now()
        assert handles[order[1]].done_now() == 32
        for handle in handles:
            handle.close()
        wipe(r)
        assert on_tier(r, A) == "-" * 8
        at_rest(r)


# --- windows and states ---------------------------------------------------------------------------

B: Final = seq("B", 48)


@pytest.mark.parametrize("how", ["by hand", "by a lease"])
@pytest.mark.parametrize("window", [16, 32])
@pytest.mark.parametrize("stack", STACKS)
@on_virtual_clock
async def test_b23_what_a_prefetch_brings_is_what_a_match_can_use(
    stack: str, window: int, how: str
) -> None:
    """B23: for every length around whole pages, a prompt that storage has is hit up to its last
    page but for one token, though the last page of all is not part of that hit."""
    for num_tokens in range(64, 81):
        tokens = seq("A", num_tokens)
        async with hybrid_tiers(stack, 16, 16, window=window, page_size=16) as (r, store):
            await keep(r, tokens)
            assert r.stats.num_nodes == 0
            r.spoil_free_pages()
            expected = (num_tokens - 1) // 16 * 16
            assert usable(r, store, stack, tokens, limit=num_tokens - 1, window=window) == expected
            if how == "by hand":
                with r.cache.prefetch(tokens) as handle:
                    assert await handle.wait() == num_tokens // 16 * 16
                    params = MatchPrefixParams(RadixKey(tokens), num_tokens - 1)
                    assert r.cache.tree.match_prefix(params).best_length == expected
                    num_calls = store.num_calls["read"]
                    assert await r.serve(tokens) == expected
                    assert store.num_calls["read"] == num_calls, "it was there"
            else:
                async with r.cache.lease(tokens) as lease:
                    assert lease.hits == Hits(storage=expected)
                    await r.compute(lease)  # with what has come
            await r.cache.drain()
            r.check()


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("state", ["done", "pending", "cancelled"])
@pytest.mark.parametrize("stack", STACKS)
@on_virtual_clock
async def test_b55_a_time_limit_holds_while_a_window_or_a_state_is_pending(
    stack: str, state: str, policy: str
) -> None:
    """B55: the base has come, the rest hangs: who waits has, in time, a length that is valid for
    all components; late data is dropped, and its rows are free when the read has ended."""
    allowed = {"timeout_base": 0.2, "timeout_per_ki_token": 0.0}
    storage = {"timeout": 3.0, "prefetch": {"threshold": 0, "policy": policy, **allowed}}
    last = parts_of(stack)[-1]
    async with hybrid_tiers(stack, storage=storage) as (r, store):
        await keep(r, B)
        gate = CallGate()
        if state != "done":
            keys = objects(r, store, last, B)
            store.fault("read", keys=keys, gate=gate, at="inside", stubborn=True, times=1)
        began = now()
        with r.cache.prefetch(B) as handle:
            if state == "cancelled":
                waiting = start(handle.wait("wait_complete"))
                await gate.reached()
                assert r.host.protected == 12, "what has come of the base"
                await cancelled(waiting)
                assert handle.done_now() == 0
                assert r.host.protected == 0, "and is of no use"
            elif state == "done" and policy != "best_effort":
                assert await handle.wait() == 48
            else:
                assert await handle.wait() == 0
                await turns()
                assert r.host.protected == 0, "nobody waits for what the base was to have"
        most = {"best_effort": 0, "timeout": 0.2, "wait_complete": 3.0}[policy]
        assert now() - began <= most + 1e-6
        match = r.cache.tree.match_prefix(MatchPrefixParams(RadixKey(B)))
        assert match.best_length == (48 if state == "done" and policy != "best_effort" else 0)
        if gate.num_reached:
            assert r.stats.host[last].in_flight >= 1
        gate.open()
        await r.cache.drain()
        assert r.cache.tree.match_prefix(MatchPrefixParams(RadixKey(B))).best_length == (
            match.best_length
        )
        assert r.stats.host[last].in_flight == 0
        at_rest(r)


@pytest.mark.parametrize("there", ["five of eight", "only the seventh"])
@pytest.mark.parametrize("stack", STACKS)
@on_virtual_clock
async def test_b61_a_base_without_its_windows_or_states_is_no_prefix(
    stack: str, there: str
) -> None:
    """B61: storage has eight pages of the base, and of one other component five, or only one: the
    length is that for which all are there, on every tier."""
    for name in parts_of(stack):
        async with hybrid_tiers(stack) as (r, store):
            tokens = seq("C", 32)
            for stop in range(8, 33, 4):
                await r.serve(tokens[:stop])
                await r.cache.drain()
            wipe(r)
            gone = range(5, 8) if there == "five of eight" else {*range(8)} - {6}
            lose(r, store, name, tokens, *gone)
            assert kept(r, store, "full", tokens) == "S" * 8
            expected = usable(r, store, stack, tokens)
            assert expected <= 28
            r.spoil_free_pages()
            assert await prefetched(r, tokens) == expected
            match = r.cache.tree.match_prefix(MatchPrefixParams(RadixKey(tokens)))
            assert match.best_length == expected
            async with r.cache.lease([*tokens, 1]) as lease:
                assert lease.prefix_len == expected
                await r.compute(lease)
            await r.cache.drain()
            at_rest(r)
