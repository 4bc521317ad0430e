"""Windows and states in storage: what is kept of them, and which prefix comes back (semantics
§10.4–5)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import pytest

from tests.hybrid_helpers import (
    GRID,
    STACKS,
    P,
    hybrid_tiers,
    kept,
    lose,
    objects,
    parts_of,
    usable,
    wipe_parts,
)
from tests.lease_helpers import Rig, seq, start, turns
from tests.storage_helpers import Store, keep, on_virtual_clock, prefetched, wipe
from tests.test_hybrid_leases import requests_in_random_order
from tests.tier_helpers import until
from tiered_cache import backup, backup_parts, prefetch
from tiered_cache.storage.backend import ReadResult, WriteResult
from tiered_cache.testing.faulty_backend import CallGate, flipped

A: Final = seq("A", 48)

each_stack = pytest.mark.parametrize("stack", STACKS)


def at_rest(r: Rig) -> None:
    """Nothing of the host is held, and all is accounted for."""
    for pool in r.stats.host.values():
        assert pool.in_flight == pool.quarantined == pool.protected == 0, pool
    assert r.stats.storage is not None
    assert r.stats.storage.pages_prefetched == 0
    assert r.cache.outstanding() == []
    assert r.counters.background_failures == 0
    r.check()


# --- there and back -------------------------------------------------------------------------------


@each_stack
async def test_what_storage_has_is_served(stack: str) -> None:
    """With device and host wiped, the prefix that was there before is there again, byte for
    byte."""
    async with hybrid_tiers(stack) as (r, store):
        await keep(r, A)
        assert r.stats.num_nodes == 0
        assert kept(r, store, "full", A) == "S" * 12
        r.spoil_free_pages()
        reused = await r.serve([*A, 1])
        assert reused >= 48 - GRID
        assert r.counters.tokens_hit_storage == reused
        await r.cache.drain()
        at_rest(r)


@each_stack
async def test_a_second_cache_finds_them(stack: str) -> None:
    """Their names are the same in another cache of the same model (B84)."""
    async with hybrid_tiers(stack) as (r, store):
        await keep(r, A)
    async with hybrid_tiers(stack, store=store) as (r, store):
        assert await r.serve([*A, 1]) >= 48 - GRID
        at_rest(r)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@each_stack
async def test_every_write_policy(stack: str, policy: str) -> None:
    """What comes to the host goes on to storage, by whatever way it came."""
    async with hybrid_tiers(stack, host={"write_policy": policy}, pages=24) as (r, store):
        for name in "ABC":
            for _ in range(2):
                await r.serve(seq(name, 48))
                await r.cache.drain()
        for name in "DEF":  # the device gives up what it has
            await r.serve(seq(name, 48))
            await r.cache.drain()
        wipe(r)
        r.spoil_free_pages()
        found = 0
        for name in "ABC":
            expected = usable(r, store, stack, seq(name, 48), limit=47)
            assert await r.serve(seq(name, 48)) == expected
            found += expected
        assert found >= 3 * (47 - GRID - P)
        await r.cache.drain()
        at_rest(r)


@each_stack
async def test_nothing_is_written_twice(stack: str) -> None:
    """What is believed to be stored is neither asked for nor written again."""
    async with hybrid_tiers(stack) as (r, store):
        await r.serve(A)
        await r.cache.drain()
        num_calls = store.num_calls.copy()
        await r.serve([*A[:40], 1])  # inside of what there is, as far as the host is concerned
        await r.cache.drain()
        written, num_asked = r.counters.pages_backed_up, store.num_calls["contains"]
        await r.serve([*A[:40], 1])
        await r.cache.drain()
        assert r.counters.pages_backed_up == written
        assert store.num_calls["contains"] == num_asked
        assert written == len(store.rows)
        assert num_calls["write"] >= len(parts_of(stack)) + 1


@each_stack
async def test_a_store_that_is_attached_later(stack: str) -> None:
    """What was there before is kept when it is next used; of a store that has gone nothing is
    believed."""
    async with hybrid_tiers(stack) as (r, store):
        await r.cache.storage.detach()
        await r.serve(A)
        await r.cache.drain()
        assert store.rows == {}
        for _ in range(2):
            await r.cache.storage.attach(r.config, backend=store)
            await r.serve([*A, 1])
            await r.cache.drain()
            assert usable(r, store, stack, A) >= 48 - GRID
            await r.cache.storage.detach()
            assert not any(data.stored for node in r.cache.tree.nodes() for data in node.data)
            store.rows.clear()


# --- what is missing, or wrong --------------------------------------------------------------------


@each_stack
@pytest.mark.parametrize("seed", range(12))
async def test_any_loss_against_the_rule_by_tokens(stack: str, seed: int) -> None:
    """Whatever objects storage has lost: the longest prefix that all components can give back
    comes, with its bytes, and no longer one; what is read in vain leaves nothing."""
    rng = random.Random(seed)
    async with hybrid_tiers(stack) as (r, store):
        for stop in (48, 40, 28, 21):  # windows and states at several depths
            await r.serve(A[:stop])
            await r.cache.drain()
        wipe(r)
        for name in STACKS[stack]:
            pages = range(6, 12) if name == "full" else range(12)
            lose(r, store, name, A, *rng.sample(pages, rng.randrange(3)))
        r.spoil_free_pages()
        expected = usable(r, store, stack, A)
        assert await prefetched(r, A) == expected
        r.check()
        shorter = usable(r, store, stack, A, limit=47)
        assert await r.serve(A) == shorter
        await r.cache.drain()
        at_rest(r)
        wipe(r)
        assert await r.serve([*A, 1]) >= 48 - GRID, "what was lost is written again"


@each_stack
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("how", ["missing", "corrupt", "failed"])
async def test_any_read_that_fails_against_the_rule_by_tokens(
    stack: str, seed: int, how: str
) -> None:
    """The same when storage says to have it, and the read shows that it has not: the next shorter
    boundary is gone for."""
    rng = random.Random(f"{seed} {how}")
    async with hybrid_tiers(stack) as (r, store):
        for stop in (48, 40, 28, 21):
            await r.serve(A[:stop])
            await r.cache.drain()
        wipe(r)
        spoilt = {}
        for name in parts_of(stack):
            for key in rng.sample(objects(r, store, name, A)[6:], 2):
                if key in store.rows:
                    spoilt[key] = store.rows[key]
        results = {"missing": ReadResult.MISSING, "failed": ReadResult.FAILED}
        if how == "corrupt":
            fault = store.fault("read", keys=list(spoilt), change=flipped(520))
        else:
            fault = store.fault("read", keys=list(spoilt), result=results[how])
        rows = dict(store.rows)
        for key in spoilt:
            del store.rows[key]
        expected = usable(r, store, stack, A)
        store.rows.update(rows)
        r.spoil_free_pages()
        if spoilt:
            assert await prefetched(r, A) == expected
        r.check()
        store.faults.remove(fault)
        for _ in range(2):
            await r.serve([*A, 1])
            await r.cache.drain()
        wipe(r)
        r.spoil_free_pages()
        assert await r.serve([*A, 1]) >= 48 - GRID, "rewritten, or never wrong"
        at_rest(r)


@each_stack
async def test_a_corrupt_part_is_replaced_and_its_base_is_not(stack: str) -> None:
    """B51, B64: what is wrong of one component says nothing of another under the same page key."""
    async with hybrid_tiers(stack) as (r, store):
        await keep(r, A)
        last = parts_of(stack)[-1]
        there = kept(r, store, last, A)
        keys = objects(r, store, last, A)
        wrong = keys[there.rindex("S")]
        base = store.rows[objects(r, store, "full", A)[there.rindex("S")]]
        good, store.rows[wrong] = store.rows[wrong], flipped(520)(store.rows[wrong])
        assert await prefetched(r, A) < 48
        for _ in range(2):
            await r.serve([*A, 1])
            await r.cache.drain()
        assert store.rows[wrong] == good
        assert store.rows[objects(r, store, "full", A)[there.rindex("S")]] is base


@each_stack
async def test_a_tombstone_is_restored_alone(stack: str) -> None:
    """§10.5: inside of what the host has, only the window and the state are read."""
    async with hybrid_tiers(stack) as (r, store):
        await r.serve(A)
        await r.cache.drain()
        wipe_parts(r)
        assert r.host.evictable == 12
        assert r.stats.storage is not None
        before = r.stats.storage.counters.objects_read
        r.spoil_free_pages()
        found = await prefetched(r, A)
        assert found == usable(r, store, stack, A)
        num_read = r.stats.storage.counters.objects_read - before
        window = 6 if "swa" in STACKS[stack] else 0  # of both boundaries of this prompt
        assert 1 <= num_read <= window + 2
        assert await r.serve([*A, 1]) == found
        await r.cache.drain()
        at_rest(r)


@each_stack
async def test_beliefs_are_put_right_by_component(stack: str) -> None:
    """§8.4: a question, or a read, that shows a part to be missing says nothing of the base; the
    part is written again when it is next used."""
    async with hybrid_tiers(stack) as (r, store):
        await r.serve(A)
        await r.cache.drain()
        wipe_parts(r)
        for name in parts_of(stack):
            lose(r, store, name, A, *range(12))
        assert await prefetched(r, A) == 0
        stored = [[data.stored for data in node.data] for node in r.cache.tree.nodes()]
        assert all(base for base, *_ in stored)
        assert not any(part for _, *parts in stored for part in parts[-1:])
        await r.serve([*A, 1])
        await r.cache.drain()
        wipe(r)
        assert await r.serve([*A, 1]) >= 48 - GRID


@each_stack
async def test_a_part_that_a_read_finds_wrong_is_written_again(stack: str) -> None:
    """§8.4: though the tree believed it to be stored."""
    for name in parts_of(stack):
        async with hybrid_tiers(stack) as (r, store):
            await r.serve(A)
            await r.cache.drain()
            wipe_parts(r)
            for key in objects(r, store, name, A):
                if key in store.rows:
                    store.rows[key] = flipped(520)(store.rows[key])
            index, nodes = STACKS[stack].index(name), list(r.cache.tree.nodes())
            believed = sum(node.data[index].stored for node in nodes)
            assert await prefetched(r, A) == 0
            assert all(node.data[0].stored for node in nodes)
            assert sum(node.data[index].stored for node in r.cache.tree.nodes()) < believed
            await r.serve([*A, 1])
            await r.cache.drain()
            wipe(r)
            r.spoil_free_pages()
            assert await r.serve([*A, 1]) >= 40


# --- room -----------------------------------------------------------------------------------------


@each_stack
async def test_a_prefix_that_has_no_room_is_shortened_to_a_boundary(stack: str) -> None:
    """§10.7: half of the host is less than it; what comes ends where all components agree, and
    nothing beyond it was read."""
    long = seq("A", 96)
    async with hybrid_tiers(stack, rows=24, pages=64) as (r, store):
        for stop in range(16, 97, 8):
            await r.serve(long[:stop])
            await r.cache.drain()
        wipe(r)
        expected = usable(r, store, stack, long, limit=48)
        assert expected >= 40
        before = r.stats.storage.counters.objects_read  # type: ignore[union-attr]
        with r.cache.prefetch(long) as handle:
            assert await handle.wait("wait_complete") == expected
            assert "refused" in handle.why
        num_read = r.stats.storage.counters.objects_read - before  # type: ignore[union-attr]
        assert num_read <= expected // P + 8
        await r.cache.drain()
        at_rest(r)


@pytest.mark.parametrize("held", ["base", "parts"])
@each_stack
async def test_a_host_that_is_held_refuses(stack: str, held: str) -> None:
    """Nothing leaks, and later it comes."""
    async with hybrid_tiers(stack) as (r, _):
        await keep(r, A)
        pages = r.cache._controller.host_pages
        assert pages is not None
        index = 0 if held == "base" else len(STACKS[stack]) - 1
        ids = pages.take_up_to(index, 1 << 10)
        with r.cache.prefetch(A) as handle:
            assert await handle.wait("wait_complete") == 0
            assert "no room" in handle.why
            assert r.counters.prefetches_refused == 1
        pages.allocators[index].free(ids)
        assert await prefetched(r, A) >= 40
        await r.cache.drain()
        at_rest(r)


@each_stack
async def test_a_result_is_held_with_its_parts(stack: str) -> None:
    """Until it is taken, the host may be as full as it likes."""
    async with hybrid_tiers(stack, rows=32) as (r, _):
        await keep(r, A)
        with r.cache.prefetch(A) as handle:
            found = await handle.wait("wait_complete")
            assert found >= 48 - GRID
            for name in "BCDEFG":
                await r.serve(seq(name, 48))
                await r.cache.drain()
            reused = await r.serve([*A, 1])
            assert reused >= found
        r.check()


@contextlib.contextmanager
def small_calls(num_bytes: int) -> Iterator[None]:
    """One call reads or writes no more than so many bytes, or a page."""
    with (
        mock.patch.object(prefetch, "READ_BYTES", num_bytes),
        mock.patch.object(backup, "WRITE_BYTES", num_bytes),
        mock.patch.object(backup_parts, "WRITE_BYTES", num_bytes),
    ):
        yield


# --- one at a time, and each part once ------------------------------------------------------------


@each_stack
async def test_equal_parts_are_read_once(stack: str) -> None:
    """§10.8: for each component."""
    async with hybrid_tiers(stack) as (r, store):
        await keep(r, A)
        gate = CallGate()
        last = parts_of(stack)[-1]
        store.fault("read", keys=objects(r, store, last, A), gate=gate, times=1)
        before = r.stats.storage.counters.objects_read  # type: ignore[union-attr]
        with r.cache.prefetch(A) as one, r.cache.prefetch(A) as other:
            await gate.reached()
            await turns(20)
            gate.open()
            assert await one.wait("wait_complete") == await other.wait("wait_complete") >= 40
        num_read = r.stats.storage.counters.objects_read - before  # type: ignore[union-attr]
        assert num_read <= len(store.rows)
        assert r.counters.prefetches_joined >= 1


@each_stack
async def test_small_calls(stack: str) -> None:
    """A window that takes several reads and writes is whole in the end."""
    with small_calls(1):
        await of_small_calls(stack)


async def of_small_calls(stack: str) -> None:
    async with hybrid_tiers(stack) as (r, store):
        await keep(r, A)
        assert kept(r, store, "full", A) == "S" * 12
        assert await r.serve([*A, 1]) == usable(r, store, stack, A) >= 40
        await r.cache.drain()
        at_rest(r)


@each_stack
async def test_a_split_while_a_part_is_written(stack: str) -> None:
    """B36, B37: what a write names are rows and keys; both halves are known to be stored."""
    last = parts_of(stack)[-1]
    async with hybrid_tiers(stack) as (r, store):
        gate = CallGate()
        keys = objects(r, store, last, A)
        store.fault("write", keys=keys, gate=gate, at="inside", times=1)
        await r.serve(A)
        await gate.reached()
        await r.serve([*A[:40], *seq("B", 8)])  # splits
        await r.serve([*A[:44], *seq("C", 8)])
        gate.open()
        await r.cache.drain()
        wipe(r)
        r.spoil_free_pages()
        for tokens in (A, [*A[:40], *seq("B", 8)], [*A[:44], *seq("C", 8)]):
            assert await r.serve([*tokens, 1]) == usable(r, store, stack, tokens) >= 40
            await r.cache.drain()
        at_rest(r)


@each_stack
async def test_a_refused_part_keeps_none_of_the_others(stack: str) -> None:
    """And it is written when it is next used."""
    async with hybrid_tiers(stack) as (r, store):
        name = parts_of(stack)[0]
        keys = objects(r, store, name, A)
        refused = store.fault("write", keys=keys, result=WriteResult.REFUSED)
        await r.serve(A)
        await r.cache.drain()
        assert kept(r, store, "full", A) == "S" * 12
        assert kept(r, store, name, A) == "-" * 12
        for other in parts_of(stack)[1:]:
            assert "S" in kept(r, store, other, A)
        assert r.counters.backups_refused >= 1
        store.faults.remove(refused)
        await r.serve([*A, 1])
        await r.cache.drain()
        wipe(r)
        assert await r.serve([*A, 1]) >= 40


@each_stack
async def test_no_part_without_its_base(stack: str) -> None:
    """B41: what nobody can reach is not kept: where the base is refused nothing of the others is
    written, and it follows when the base has."""
    async with hybrid_tiers(stack) as (r, store):
        keys = objects(r, store, "full", A)[8:]
        refused = store.fault("write", keys=keys, result=WriteResult.REFUSED)
        await r.serve(A)
        await r.cache.drain()
        for name in STACKS[stack]:
            assert kept(r, store, name, A)[8:] == "----"
        store.faults.remove(refused)
        await r.serve([*A, 1])
        await r.cache.drain()
        assert usable(r, store, stack, A) >= 40


@each_stack
async def test_what_is_written_stays_where_it_is(stack: str) -> None:
    """§6.4: the host gives no row up that is being read by the backend."""
    last = parts_of(stack)[-1]
    async with hybrid_tiers(stack) as (r, store):
        gate = CallGate()
        keys = objects(r, store, last, A)
        store.fault("write", keys=keys, gate=gate, at="inside", times=1)
        await r.serve(A)
        await gate.reached()
        wipe(r)
        assert r.stats.host[last].protected >= 1
        r.spoil_free_pages()
        gate.open()
        await r.cache.drain()
        wipe(r)
        there = usable(r, store, stack, A)  # before the next request, which keeps more
        assert await r.serve([*A, 1]) == there >= 40
        assert r.stats.storage is not None
        assert r.stats.storage.counters.objects_corrupt == 0


async def test_a_window_always_has_room() -> None:
    """§10.7: half of the host's windows are less than one: then one is what there may be."""
    async with hybrid_tiers("swa", host={"ratio": {"swa": 0.07}}) as (r, _):
        assert r.stats.host["swa"].capacity == 4
        await keep(r, A)
        assert await r.serve([*A, 1]) >= 40


@each_stack
async def test_reset_while_a_part_is_written_or_read(stack: str) -> None:
    """§12.1: its rows are quarantined until the call has ended."""
    last = parts_of(stack)[-1]
    async with hybrid_tiers(stack) as (r, store):
        gate = CallGate()
        keys = objects(r, store, last, A)
        fault = store.fault("write", keys=keys, gate=gate, at="inside", stubborn=True, times=1)
        await r.serve(A)
        await gate.reached()
        r.cache.reset()
        assert r.stats.host[last].quarantined >= 1
        gate.open()
        await r.cache.drain()
        assert r.stats.host[last].free == r.stats.host[last].capacity
        store.faults.remove(fault)
        await keep(r, A)
        gate = CallGate()
        store.fault("read", keys=keys, gate=gate, at="inside", stubborn=True, times=1)
        with r.cache.prefetch(A) as handle:
            waiting = start(handle.wait("wait_complete"))
            await gate.reached()
            r.cache.reset()
            assert await waiting == 0
            assert r.stats.host[last].quarantined >= 1
        gate.open()
        await r.cache.drain()
        at_rest(r)
        assert await prefetched(r, A) >= 40


@each_stack
@pytest.mark.parametrize("moment", ["contains", "read", "read inside"])
async def test_cancelled_prefetches_leave_nothing(stack: str, moment: str) -> None:
    """B56: wherever they are given up, in whichever component."""
    async with hybrid_tiers(stack) as (r, store):
        await keep(r, A)
        free = {name: pool.free for name, pool in r.stats.host.items()}
        for name in STACKS[stack]:
            gate = CallGate()
            op, _, at = moment.partition(" ")
            fault: Any = {"keys": objects(r, store, name, A), "gate": gate}
            store.fault(op, at=at or "before", times=1, **fault)  # type: ignore[arg-type]
            with r.cache.prefetch(A):
                await gate.reached()
                r.check()
            gate.open()
            await r.cache.drain()
            at_rest(r)
            wipe(r)
            assert {name: pool.free for name, pool in r.stats.host.items()} == free
        store.faults.clear()
        assert await prefetched(r, A) >= 40


async def test_it_ends_when_nobody_waits() -> None:
    """A detached one holds its boundaries for `result_ttl` seconds."""
    storage = {"prefetch": {"threshold": 0, "result_ttl": 0.05}}
    async with hybrid_tiers("mamba_swa", storage=storage) as (r, _):
        await keep(r, A)
        r.cache.prefetch(A, detach=True)
        await until(lambda: r.stats.host["mamba"].protected > 0)
        assert r.host.protected == 12
        await until(lambda: r.host.protected == 0)
        at_rest(r)


# --- all of it ------------------------------------------------------------------------------------


def spoil_something(r: Rig, store: Store, chance: random.Random) -> None:
    """Somebody takes device, host or a part of storage away, or storage is unwell for a while."""
    what = chance.randrange(10)
    if what < 3:
        wipe(r)
    elif what < 5:
        wipe_parts(r)
    elif what == 5 and store.rows:
        for key in chance.sample(list(store.rows), min(len(store.rows), 3)):
            del store.rows[key]
    elif what == 6 and store.rows:
        for key in chance.sample(list(store.rows), min(len(store.rows), 3)):
            store.rows[key] = flipped(520)(store.rows[key])
    elif what == 7:
        op: Any = chance.choice(["read", "write", "contains"])
        store.fault(op, call=store.num_calls[op] + chance.randrange(1, 4), error=OSError("unwell"))
    elif what == 8:
        store.fault("read", call=store.num_calls["read"] + 1, result=ReadResult.FAILED)
    elif what == 9:
        store.fault("write", call=store.num_calls["write"] + 1, result=WriteResult.REFUSED)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("seed", range(8))
@each_stack
async def test_many_requests_over_three_tiers(stack: str, seed: int, policy: str) -> None:
    """Shared prefixes, small pools, faults on all ways: what is computed with is right, and nothing
    leaks."""
    chance = random.Random(f"{stack} {seed} {policy}")
    rows, pages = chance.choice([20, 48, 100]), chance.choice([30, 60])
    host = {"write_policy": policy}
    async with hybrid_tiers(stack, pages, rows, host=host) as (r, store):
        await requests_in_random_order(r, chance, lambda: spoil_something(r, store, chance))
        at_rest(r)
        store.faults.clear()
        store.rows.clear()
        r.cache.reset()
        await r.cache.drain()
        r.spoil_free_pages()
        if policy == "write_through":
            await keep(r, A)
            most = min(48, rows // 2 * P)  # of the base; windows have room for one
            assert await r.serve([*A, 1]) == usable(r, store, stack, A, limit=most)


@pytest.mark.parametrize("seed", range(10))
@each_stack
@on_virtual_clock
async def test_slow_storage_in_any_order(stack: str, seed: int) -> None:
    """Requests, prefetches that are given up, evictions, splits and resets while calls take their
    time: what is computed with is right, nobody waits for ever, and nothing leaks."""
    chance = random.Random(f"{stack} {seed}")
    rows, pages = chance.choice([16, 32, 80]), chance.choice([40, 80])
    storage = {"prefetch": {"threshold": 0, "policy": "wait_complete", "result_ttl": 2.0}}
    how: dict[str, Any] = {"storage": storage, "host": {"write_policy": "write_through"}}
    with small_calls(chance.choice([1, 8192, 1 << 20])):
        async with hybrid_tiers(stack, pages, rows, **how) as (r, store):
            for op in ("contains", "read", "write"):
                store.fault(op, delay=0.3, at="before")  # type: ignore[arg-type]
                store.fault(op, delay=0.2, at="inside")  # type: ignore[arg-type]
            trunks = [seq(name, 64) for name in "ABC"]

            def some() -> list[int]:
                trunk = chance.choice(trunks)[: chance.randrange(1, 60)]
                return [*trunk, *[chance.randrange(1, 3) for _ in range(chance.randrange(8))]]

            async def request() -> None:
                await asyncio.sleep(chance.random() * 3)
                async with r.cache.lease(some(), reserve=4) as lease:
                    while chunk := await lease.next_chunk(chance.randrange(1, 24)):
                        await lease.run(r.model, chunk)
                        lease.commit(chunk)
                        await asyncio.sleep(chance.random() * 0.2)

            async def ask() -> None:
                await asyncio.sleep(chance.random() * 3)
                with r.cache.prefetch(some()) as handle:
                    await handle.wait(timeout=chance.choice([None, 0.1, 0.6, 1.0]))
                    await asyncio.sleep(chance.random())

            async def disturb() -> None:
                for _ in range(8):
                    await asyncio.sleep(chance.random() * 0.5)
                    chance.choice([wipe, wipe_parts, Rig.check, Rig.spoil_free_pages])(r)

            for _ in range(6):
                async with asyncio.TaskGroup() as group:
                    for _ in range(3):
                        group.create_task(request())
                        group.create_task(ask())
                    group.create_task(disturb())
                r.check()
                if chance.random() < 0.1:
                    r.cache.reset()
            await r.cache.drain()
            at_rest(r)
