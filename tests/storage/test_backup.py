"""Backup: what is written when, in which order, and what a store that refuses or hangs costs
(semantics §10.4, §10.9)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.lease_helpers import P, Rig, seq, turns
from tests.storage_helpers import Store, keep, prefetched, three_tiers, wipe
from tests.tier_helpers import on_tier, until
from tiered_cache import backup
from tiered_cache.storage.backend import SCOPE_BYTES, WriteResult
from tiered_cache.testing.faulty_backend import CallGate
from tiered_cache.types import Boundary

A = seq("A", 32)

POLICIES = ["write_through", "write_through_selective", "write_back"]


async def stored(r: Rig, store: Store, tokens: Any) -> str:
    await r.cache.drain()
    return store.has(tokens)


async def test_a_split_while_it_is_written_loses_nothing() -> None:
    """B36, B37: what a write names are rows and keys, not the node; both parts are known to be
    stored when it has ended, and nobody gets the rows before."""
    gate = CallGate()
    async with three_tiers(rows=16) as (r, store):
        store.fault("write", gate=gate, at="inside", times=1)
        await r.serve(A)
        await gate.reached()
        await r.serve([*A[:16], *seq("B", 16)])  # splits
        await r.serve([*A[:8], *seq("C", 8)])  # and again
        for name in "DEF":  # the host must evict
            await r.serve(seq(name, 16))
        gate.open()
        await r.cache.drain()
        assert store.has(A) == "S" * 8
        assert await stored(r, store, [*A[:16], *seq("B", 16)]) == "S" * 8
        wipe(r)
        r.spoil_free_pages()
        assert await prefetched(r, A) == 32
        assert await prefetched(r, [*A[:16], *seq("B", 16)]) == 32
        r.check()


async def test_a_split_between_the_two_steps_down() -> None:
    """B36: between device to host and host to storage."""
    gate = CallGate()
    async with three_tiers() as (r, store):
        store.fault("contains", gate=gate, times=1)
        await r.serve(A)
        await gate.reached()
        await r.serve([*A[:16], *seq("B", 16)])
        gate.open()
        await r.cache.drain()
        assert store.has(A) == store.has([*A[:16], *seq("B", 16)]) == "S" * 8


@pytest.mark.parametrize("chunk", [16, 64, 160])
async def test_first_seen_chunked_prompts_are_kept(chunk: int) -> None:
    """B40: whatever the chunks, and though the host holds only one of them."""
    prompts = [seq(name, 160) for name in "ABCDE"]
    async with three_tiers(pages=64, rows=48) as (r, store):
        for tokens in prompts:
            async with r.cache.lease(tokens) as lease:
                await r.compute(lease, chunk)
            await r.cache.drain()
        wipe(r)
        for tokens in prompts:
            assert store.has(tokens) == "S" * 40
            assert await prefetched(r, tokens) == 24 * P  # half of the host
            wipe(r)


async def test_a_refused_page_is_written_when_it_is_next_used() -> None:
    """B40: and those behind it are not abandoned for ever; a counter says how many."""
    async with three_tiers() as (r, store):
        third = store.pages_of(A)[2]
        refused = store.fault("write", keys=[third], result=WriteResult.REFUSED, times=1)
        await r.serve(A)
        await r.cache.drain()
        assert refused.num_met == 1
        assert r.counters.backups_refused == 1
        assert store.has(A)[2] == "-"
        await r.serve([*A, 1])
        assert await stored(r, store, A) == "S" * 8


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
async def test_no_page_without_those_above_it(policy: str, seed: int) -> None:
    """B41: at any instant, whatever is refused, a page that is kept has all its ancestors kept; and
    after the drain no page is that cannot be reached."""
    rng = random.Random(seed)
    host = {"write_policy": policy}
    async with three_tiers(pages=24, rows=16, host=host) as (r, store):
        store.fault("write", result=WriteResult.REFUSED, call=3)
        chains: list[Any] = []
        for _ in range(40):
            if chains and rng.random() < 0.7:
                base = rng.choice(chains)
                base = base[: rng.randrange(0, len(base) + 1, P)]
            else:
                base = []
            tokens = [*base, *(rng.randrange(1 << 20) for _ in range(rng.randrange(P, 6 * P)))]
            chains.append(tokens)
            await r.serve(tokens)
            if rng.random() < 0.3:
                await r.cache.drain()
            for known in chains:
                has = store.has(known)
                assert "-S" not in has, has
        await r.cache.drain()
        for known in chains:
            assert "-S" not in store.has(known)


async def test_a_host_smaller_than_the_device() -> None:
    """B43: mirrors that storage has make room, so all of it is kept."""
    prompts = [[1000 + n, *seq("A", 32, 1)] for n in range(100)]
    async with three_tiers(pages=64, rows=32) as (r, store):
        for count, tokens in enumerate(prompts, 1):
            await r.serve(tokens)
            if count % 4 == 0:
                await r.cache.drain()
        assert all(store.has(tokens) == "S" * 8 for tokens in prompts)
        wipe(r)
        assert await prefetched(r, prompts[0]) == 32


async def test_a_prompt_longer_than_the_host() -> None:
    """§8.4: it comes to storage part by part; the part that was copied first, and makes room for
    the next, is not copied again."""
    tokens = seq("A", 80)
    async with three_tiers(pages=64, rows=8) as (r, store):
        await r.serve(tokens)
        await r.cache.drain()
        assert store.has(tokens) == "S" * 20
        assert r.counters.pages_stored == 20


async def test_what_waits_is_bounded() -> None:
    """B95: more is skipped and counted; no insert waits for it; and the end comes in bounded
    time."""
    gate = CallGate()
    storage = {"backup": {"max_pending": 16 * 4096}}
    async with three_tiers(pages=512, rows=512, storage=storage) as (r, store):
        store.fault("write", gate=gate)
        for n in range(100):
            await r.serve([n, *seq("A", 16, 1)])
            assert r.stats.storage is not None
            assert r.stats.storage.pages_pending <= 16
        await until(lambda: gate.num_waiting > 0)
        assert r.counters.backups_skipped > 0
        gate.open()
        await r.cache.drain()
        kept = sum(store.has([n, *seq("A", 16, 1)]) == "SSSS" for n in range(100))
        assert 4 <= kept < 100
        for n in range(100):  # at their next use
            await r.serve([n, *seq("A", 16, 1), 1])
            await r.cache.drain()
        assert all(store.has([n, *seq("A", 16, 1)]) == "SSSS" for n in range(100))


@pytest.mark.parametrize(
    "error", [OSError("disk"), TimeoutError(), ValueError("no"), RuntimeError("x")]
)
async def test_a_write_that_raises_costs_itself(error: Exception) -> None:
    """B65: the others are kept, its rows are let go, and it is counted."""
    async with three_tiers(pages=256, rows=256) as (r, store):
        store.fault("write", call=3, error=error)
        prompts = [[n, *seq("A", 16, 1)] for n in range(20)]
        for tokens in prompts:
            await r.serve(tokens)
            await r.cache.drain()
        assert r.host.protected == 0
        assert r.counters.backups_failed == 1
        assert r.stats.storage is not None
        assert r.stats.storage.counters.calls_failed == 1
        assert sum(store.has(tokens) == "SSSS" for tokens in prompts) == 19


async def test_nodes_from_before_storage_have_the_keys_of_any_others() -> None:
    """B86: what was cached before storage is on is kept under the keys that a fresh instance gives
    it, and a prompt that begins in the middle of another meets nothing."""
    tokens = seq("A", 128)
    async with three_tiers() as (r, store):
        await r.cache.storage.detach()
        await r.serve(tokens[:64])
        await r.serve([*tokens[:32], *seq("B", 16)])
        await r.cache.drain()
        assert store.has(tokens) == "-" * 32
        await r.cache.storage.attach(r.config, backend=store)
        await r.serve(tokens)
        assert await stored(r, store, tokens) == "S" * 32
        wipe(r)
        assert await prefetched(r, tokens[64:]) == 0
        assert await prefetched(r, tokens) == 128


async def test_what_storage_has_wrong_is_replaced() -> None:
    """B79: it is said to be there and cannot be read: deleted, and written again."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        key = store.key_of(A, 3)
        store.rows[key] = store.rows[key][:700] + b"x" + store.rows[key][701:]
        assert await prefetched(r, A) == 12
        assert await prefetched(r, A) == 12, "it is not read again"
        await r.serve([*A, 1])
        await r.cache.drain()
        wipe(r)
        r.spoil_free_pages()
        assert await prefetched(r, A) == 32
        r.check()


async def test_what_storage_has_lost_is_found_out() -> None:
    """§8.4: beliefs are corrected by reads."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        for key in [key for key in store.rows if key.endswith(store.pages_of(A)[2])]:
            await store.kept.delete([key])
        assert await prefetched(r, A) == 8
        await r.serve([*A, 1])
        assert await stored(r, store, A) == "S" * 8


async def test_a_hung_write_is_waited_for_by_nobody() -> None:
    """B100, §9.3: it counts as failed at its limit; its rows stay until it has ended; the next
    writes go on."""
    gate = CallGate()
    async with three_tiers(storage={"timeout": 0.05}) as (r, store):
        store.fault("write", gate=gate, at="inside", stubborn=True, times=1)
        await r.serve(A)
        await until(lambda: r.stats.storage.calls_hung == 1)  # type: ignore[union-attr]
        assert r.host.protected == 8
        assert [item.kind for item in r.cache.outstanding()] == ["quarantine"]
        await r.serve(seq("B", 32))
        await until(lambda: store.has(seq("B", 32)) == "S" * 8)
        gate.open()
        await r.cache.drain()
        assert r.host.protected == 0
        assert r.stats.storage is not None
        assert r.stats.storage.calls_hung == 0


async def test_reset_while_it_is_written() -> None:
    """B93: rows are quarantined until the backend has ended, then free, once."""
    gate = CallGate()
    async with three_tiers() as (r, store):
        store.fault("write", gate=gate, at="inside", stubborn=True, times=1)
        await r.serve(A)
        await gate.reached()
        r.cache.reset()
        assert r.host.quarantined == 8
        assert r.host.free == 56
        await r.serve(seq("B", 32))
        gate.open()
        await r.cache.drain()
        assert r.host.quarantined == 0
        assert await stored(r, store, seq("B", 32)) == "S" * 8
        assert on_tier(r, A) == "--------"
        await turns()


async def test_pages_are_written_from_the_root() -> None:
    """§10.4: within a call too: whatever ends it half way, what is kept can be reached."""
    gate = CallGate()
    async with three_tiers() as (r, store):
        store.fault("write", gate=gate, at="inside", times=1)
        await r.serve(A)
        await gate.reached()
        assert store.has(A) == "SSSS----"
        gate.open()
        assert await stored(r, store, A) == "S" * 8


async def test_below_what_could_not_be_written_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """§10.4: children after their parents' success, also when they go in calls of their own."""
    monkeypatch.setattr(backup, "WRITE_BYTES", 2 * 4096)
    async with three_tiers() as (r, store):
        page = store.pages_of(A)[3]
        refused = store.fault("write", keys=[page], result=WriteResult.REFUSED)
        await r.serve(A)
        assert await stored(r, store, A) == "SSS-----"
        store.faults.remove(refused)
        await r.serve([*A, 1])
        assert await stored(r, store, A) == "S" * 8


async def test_what_comes_as_the_worker_ends_is_not_forgotten() -> None:
    """It looks at its queue for the last time, and whoever comes then starts another one."""
    async with three_tiers(pages=256, rows=256) as (r, store):
        backups = r.cache._controller.storage.backups  # type: ignore[union-attr]
        await r.serve(A)
        await r.cache.drain()
        tree = r.cache.tree
        node = next(iter(tree.nodes()))
        changed, told, noted = backups._changed, [], []

        def note_last() -> None:
            """The worker tells of its last path's end, and then of its own."""
            changed()
            task = asyncio.current_task()
            if task is not None and task.get_name() == "tiered-cache-backup" and not noted:
                told.extend([task] if not backups._queue else [])
                if len(told) == 2:
                    noted.append(node)
                    tree.believe_stored(node, 0, is_stored=False)
                    store.rows.clear()
                    backups.note(Boundary(node, node.end))

        backups._changed = note_last
        await r.serve(seq("B", 16))
        await r.cache.drain()
        assert noted
        assert store.has(A) == "S" * 8


async def test_what_storage_lacks_above_what_it_has_is_written() -> None:
    """§10.4: it was refused, and what is below it has come from storage; each use of the whole
    prefix tries it again."""
    left = [*A, *seq("B", 32)]
    async with three_tiers() as (r, store):
        await keep(r, left)
        await store.kept.delete(
            [key for key in store.rows if key[SCOPE_BYTES:] in store.pages_of(A)]
        )
        assert store.has(left) == "-" * 8 + "S" * 8
        refused = store.fault("write", result=WriteResult.REFUSED)
        await r.serve(A)
        await r.cache.drain()
        assert await prefetched(r, left) == 64
        await r.serve([*left, 1])
        await r.cache.drain()
        store.faults.remove(refused)
        await r.serve([*left, 1])
        assert await stored(r, store, left) == "S" * 16


async def test_a_part_that_is_there_says_nothing_of_what_is_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A path is written in parts; that storage has the first one does not mean that it has the
    rest."""
    monkeypatch.setattr("tiered_cache.backup.WRITE_BYTES", 4 * 4096)
    store = Store()
    async with three_tiers(store=store) as (r, _):
        await r.serve(A[:16])
    async with three_tiers(store=store, storage={"prefetch": {"threshold": 1000}}) as (r, _):
        await r.serve(A)
        await r.cache.drain()
        assert store.has(A) == "S" * 8


async def test_what_is_above_is_used_with_what_is_below() -> None:
    """§7 of the design: no page outlives those above it, so whoever writes or reads the end of a
    path asks for its beginning, too, root first."""
    tokens = [*A, *seq("B", 16)]
    async with three_tiers() as (r, store):
        await r.serve(A)
        await r.cache.drain()
        asked: list[list[bytes]] = []
        contains = store.contains

        async def noting(keys: Any) -> list[bool]:
            asked.append([bytes(key[-32:]) for key in keys])
            return await contains(keys)

        store.contains = noting  # type: ignore[method-assign]
        await r.serve(tokens)
        await r.cache.drain()
        assert asked[-1] == store.pages_of(tokens), "a backup"
        wipe(r)
        await prefetched(r, A)
        asked.clear()
        assert await prefetched(r, tokens) == 48
        await r.cache.drain()
        assert asked[-1] == store.pages_of(A), "a prefetch"
