"""Cases of what storage does to those around it: what observers are told of it, what is believed,
and that it does not hold up the loop."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch

from tests.case_helpers import content
from tests.cases.test_cases_tiers import widest_gap
from tests.lease_helpers import P, Rig, rig, seq, start
from tests.storage_helpers import (
    MODEL,
    Store,
    Told,
    keep,
    on_virtual_clock,
    prefetched,
    three_tiers,
    wipe,
)
from tests.tier_helpers import demote, on_tier
from tiered_cache import StaleError, backup, keys
from tiered_cache.storage.backend import SCOPE_BYTES
from tiered_cache.storage.record import Arrival, Departure
from tiered_cache.testing.faulty_backend import CallGate
from tiered_cache.testing.loop import DeterministicLoop, SeededExecutor
from tiered_cache.transfer.cpu import CpuCopier
from tiered_cache.types import Tier

A: Final = seq("A", 32)


def kept(store: Store) -> set[bytes]:
    """Page keys of what storage has."""
    return {key[SCOPE_BYTES:] for key in store.rows}


def believed(r: Rig) -> set[bytes]:
    """Page keys of what the tree believes it to have."""
    tree = r.cache.tree
    return {key for node in tree.nodes() if node.data[0].stored for key in tree.page_keys(node)}


# --- what observers are told ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [("write_through", 50), ("write_through_selective", 15), ("write_back", 15)],
)
@on_virtual_clock
async def test_b106_replayed_events_equal_what_three_tiers_have(policy: str, rounds: int) -> None:
    """B106: five thousand random steps (fewer for others of the kind): publish, revive, demote,
    load, prefetch, back up, give up at any moment, evict, reset, clear storage. A model made from
    events alone equals device and host after each drain; of storage it has all that the tree
    believes, nothing that is not there, and lacks only what was written over a reset or a clear.
    Nothing was removed that had not been stored."""
    told, chance = Told(), random.Random(1)
    loop = asyncio.get_running_loop()
    copies = SeededExecutor(
        loop,
        durations=(0.0, 0.1),
        fault=lambda job: OSError("sometimes") if chance.random() < 0.02 else None,
    )
    options = {"observers": [told], "copy_executor": copies}
    untold: set[bytes] = set()
    async with three_tiers(12, 10, host={"write_policy": policy}, options=options) as (r, store):
        told.tree = r.cache.tree
        for op in ("contains", "read", "write"):
            store.fault(op, at="before", delay=0.02)
            store.fault(op, at="inside", delay=0.05)
            store.fault(op, at="after", delay=0.02)
        for round_ in range(rounds):
            before = told.met["cleared"] + told.met["forgotten"]
            await asyncio.gather(*[steps(r, random.Random(round_ * 9 + n)) for n in range(4)])
            await r.cache.drain()
            assert told.faults == []
            for tier, has in content(r.cache.tree).items():
                assert told.model[tier] == has, tier
            there = kept(store)
            assert believed(r) <= told.model[Tier.STORAGE] <= there
            if told.met["cleared"] + told.met["forgotten"] > before:
                untold |= there - told.model[Tier.STORAGE]
            assert there - told.model[Tier.STORAGE] <= untold
            r.check()
        for tier in ("device", "host"):
            assert told.met[f"stored {tier}"] > 20 + rounds, told.met
            assert told.met[f"removed {tier}"] > 20 + rounds, told.met
        assert told.met["stored storage"] > rounds
        assert told.met["cleared"] >= rounds // 10
        assert told.met["forgotten"] >= rounds // 10
        assert r.counters.pages_loaded > rounds
        assert r.counters.pages_prefetched > rounds


async def steps(r: Rig, rng: random.Random) -> None:
    """25 things that a user does, and an operator at times."""
    for _ in range(25):
        stem = seq(rng.choice("AB"), P * rng.randint(0, 4))
        tokens = [*stem, *seq(rng.choice("XYZVW"), P * rng.randint(1, 2)), 1]
        what = rng.random()
        if what < 0.005:
            r.cache.reset()
        elif what < 0.01:
            await r.cache.storage.clear()
        elif what < 0.1:
            wipe(r) if rng.random() < 0.5 else demote(r)
        elif what < 0.25:
            with r.cache.prefetch(tokens) as handle:
                await handle.wait(timeout=rng.choice((0.0, 0.05, 1.0)))
        elif what < 0.35:
            task = start(r.lease(tokens))
            await asyncio.sleep(rng.choice((0.0, 0.03, 0.1)))
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result().close()
        else:
            try:
                await r.serve(tokens, load_timeout=rng.choice((None, 0.0, 0.05)))
            except StaleError:
                pass


# --- what is believed -----------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["before", "inside", "after"])
@pytest.mark.parametrize("op", ["contains", "read", "write"])
@on_virtual_clock
async def test_b106_what_was_under_way_at_a_clear_is_not_believed(op: Any, at: Any) -> None:
    """B106, B41: a call that began before storage was cleared ends after it: what it says is of
    before. Nothing is believed that is not there, and what is next used is kept, all of it."""
    told, gate, longer = Told(), CallGate(), [*A, *seq("B", 8)]
    storage = {"prefetch": {"threshold": 0 if op == "read" else 1000}}
    async with three_tiers(storage=storage, options={"observers": [told]}) as (r, store):
        told.tree = r.cache.tree
        if op != "write":  # a question is whether to write
            await keep(r, A)
        store.fault(op, gate=gate, at=at, times=1)
        asked = start(r.serve(A) if op != "read" else prefetched(r, A, policy="wait_complete"))
        await gate.reached()
        await r.cache.storage.clear()
        assert told.model[Tier.STORAGE] == set()
        gate.open()
        await asked
        await r.cache.drain()
        store.faults.clear()
        assert believed(r) <= told.model[Tier.STORAGE] <= kept(store)
        await r.serve(longer)
        await r.cache.drain()
        assert store.has(longer) == "S" * 10
        assert told.model[Tier.STORAGE] == kept(store)
        assert told.faults == []


@pytest.mark.parametrize("lost", [0, 2, 3])
@on_virtual_clock
async def test_b106_what_is_believed_is_put_right_by_a_question(lost: int) -> None:
    """B106: four pages are believed to be in storage and are nowhere else; below them is what the
    host has. One of the four is gone when a request asks: observers are told, it is computed, and
    kept again, so that what is below can be reached by others, too."""
    told = Told()
    async with three_tiers(options={"observers": [told]}) as (r, store):
        told.tree = r.cache.tree
        await keep(r, A)
        await r.serve([*A[:16], 1])
        r.cache._controller.host_pages.evict([4])  # type: ignore[union-attr]
        with r.cache.prefetch(A) as handle:
            await handle.wait("wait_complete")
        demote(r)
        assert on_tier(r, A) == "----HHHH"
        await store.kept.delete([store.key_of(A, lost)])
        assert await r.serve([*A, 1]) == lost * P
        assert told.met["removed storage"] > 0
        await r.cache.drain()
        assert store.has(A) == "S" * 8
        assert told.model[Tier.STORAGE] == kept(store)
        assert told.faults == []


@pytest.mark.parametrize("lost", [0, 2, 7])
@pytest.mark.parametrize("on_host", [True, False])
@on_virtual_clock
async def test_b41_what_storage_has_lost_above_is_kept_again(lost: int, on_host: bool) -> None:
    """B41: eight pages are on the device (and the host, or not), and believed to be in storage,
    where one is gone. A longer prompt is published: nothing is kept below a gap, observers are
    told, and all of it is kept: at once if the host has what is gone, else by the next use."""
    told, longer = Told(), [*A, *seq("B", 8)]
    async with three_tiers(options={"observers": [told]}) as (r, store):
        told.tree = r.cache.tree
        await r.serve(A)
        await r.cache.drain()
        if not on_host:
            r.cache._controller.host_pages.evict([8])  # type: ignore[union-attr]
        await store.kept.delete([store.key_of(A, lost)])
        assert await r.serve(longer) == 32
        await r.cache.drain()
        assert told.met["removed storage"] > 0
        assert store.has(longer)[8:] == ("SS" if on_host else "--")
        await r.serve([*longer, 1])
        await r.cache.drain()
        assert store.has(longer) == "S" * 10
        assert believed(r) == told.model[Tier.STORAGE] == kept(store)
        assert told.faults == []


@on_virtual_clock
async def test_b106_a_page_that_is_believed_no_longer_can_still_be_given_up() -> None:
    """B106, §11.5: the device alone has four pages, and storage; below them the host holds what is
    being written. Storage is cleared. Whoever has been promised all of the device has it."""
    gate = CallGate()
    async with three_tiers(8, 16) as (r, store):
        await r.serve(A[:16])
        await r.cache.drain()
        r.cache._controller.host_pages.evict([4])  # type: ignore[union-attr]
        store.fault("write", gate=gate, times=1)
        await r.serve(A)
        await gate.reached()
        r.cache._controller.accounts.evict([4])
        assert on_tier(r, A) == "DDDDHHHH"
        await r.cache.storage.clear()
        assert await r.serve(seq("B", 32)) == 0
        r.check()
        gate.open()
        await r.cache.drain()
        r.check()
        assert await r.serve(A) == 0
        await r.cache.drain()
        assert store.has(A) == "S" * 8


@pytest.mark.parametrize("how", ["cleared", "exchanged"])
@on_virtual_clock
async def test_b40_what_the_host_lacks_in_the_middle_is_kept_when_it_is_next_used(how: str) -> None:
    """B40, §9.5: the first half is on the device alone, for storage had it; the second half on the
    host, too. Storage is emptied, or another one: the next use keeps all of it."""
    async with three_tiers() as (r, store):
        await r.serve(A[:16])
        await r.cache.drain()
        r.cache._controller.host_pages.evict([4])  # type: ignore[union-attr]
        await r.serve(A)
        await r.cache.drain()
        assert on_tier(r, A) == "DDDDBBBB"
        if how == "cleared":
            await r.cache.storage.clear()
        else:
            await r.cache.storage.detach()
            store = Store()
            await r.cache.storage.attach(r.config, backend=store)
        assert store.has(A) == "-" * 8
        assert await r.serve([*A, 1]) == 32
        await r.cache.drain()
        assert store.has(A) == "S" * 8


# --- the loop -------------------------------------------------------------------------------------

FILE_CALLS: Final = (
    *("open", "close", "preadv", "pread", "pwrite", "write", "ftruncate", "lseek", "fstat", "stat"),
    *("utime", "rename", "replace", "unlink", "mkdir", "makedirs", "rmdir", "listdir", "scandir"),
    "statvfs",
)
"""Of `os`, what the file backend works with."""


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Which threads have done what of all that takes its time."""
    done: dict[str, set[int]] = {}

    def watch(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def calling(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("tiered_cache"):
                done.setdefault(name, set()).add(threading.get_ident())
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, calling)

    for name in FILE_CALLS:
        watch(os, name)
    watch(CpuCopier, "copy")
    watch(Departure, "seal")
    watch(Arrival, "verdict")
    return done


async def test_b104_files_do_not_block_the_loop(tmp_path: Path, work: dict[str, set[int]]) -> None:
    """B104: 256 pages of 256 KiB from the device to the host, to files, to the host and back, byte
    for byte: nothing is copied, sealed, proved or written to a file on the loop's thread, and a
    probe that ticks each 5 ms is not held up. The machine may be busy with other things: the best
    of three counts, and much is allowed."""
    model = {**MODEL, "num_kv_heads": 8, "head_dim": 64}
    files = {"path": str(tmp_path), "max_size": "1GiB", "reserve": 0}
    storage = {"backend": "file", "options": files, "prefetch": {"policy": "wait_complete"}}
    host = {"tokens": 640 * 32}
    async with rig(300, page_size=32, model=model, host=host, storage=storage) as r:
        await r.cache.drain()
        names = [(spec.name, layer) for spec in r.cache.pools.specs for layer in spec.layers]
        pools = [r.cache.pools.pages(*name).view(torch.int32) for name in names]
        gaps: list[float] = []

        def fill(chunk: Any) -> None:
            for pool in pools:
                pool.random_()

        for name in "ABC":
            probe = start(widest_gap())
            tokens = seq(name, 256 * 32 + 1)
            async with r.cache.lease(tokens) as lease:
                chunk = lease.allocate(256 * 32)
                await lease.run(fill, chunk)
                lease.commit(chunk)
                ids = torch.from_numpy(lease.pages["full"][:256].copy()).long()
                wanted = [await asyncio.to_thread(pool.__getitem__, ids) for pool in pools]
            await r.cache.drain()
            wipe(r)
            with r.cache.prefetch(tokens) as handle:
                assert await handle.wait() == 256 * 32
                async with r.cache.lease(tokens) as lease:
                    assert lease.hits.host == 256 * 32
                    ids = torch.from_numpy(lease.pages["full"][:256].copy()).long()
                    for pool, was in zip(pools, wanted, strict=True):
                        is_now = await asyncio.to_thread(pool.__getitem__, ids)
                        assert await asyncio.to_thread(torch.equal, is_now, was)
            probe.cancel()
            gaps.append(await probe)
            r.cache.reset()
            if gaps[-1] < 0.1:
                break
        assert min(gaps) < 0.5, gaps
        assert work.keys() >= {"open", "write", "preadv", "copy", "seal", "verdict"}, work
        for call, threads in work.items():
            assert threading.get_ident() not in threads, call


@on_virtual_clock
async def test_b104_hashing_yields() -> None:
    """B104: the page keys of 100,000 tokens, for a prefetch and for a backup: at most a few hundred
    between two turns of the loop."""
    tokens, now, by_turn = list(range(100_000)), 0, Counter[tuple[str, int]]()

    def counted(name: str, hash_pages: Callable[..., list[bytes]]) -> Callable[..., list[bytes]]:
        def hashing(*args: Any, **kwargs: Any) -> list[bytes]:
            made = hash_pages(*args, **kwargs)
            by_turn[name, now] += len(made)
            return made

        return hashing

    async def tick() -> None:
        nonlocal now
        while True:
            now += 1
            await asyncio.sleep(0)

    async with three_tiers(6300, 6300, page_size=16) as (r, store):
        with (
            mock.patch.object(keys, "hash_pages", counted("prefetch", keys.hash_pages)),
            mock.patch.object(backup, "hash_pages", counted("backup", backup.hash_pages)),
        ):
            ticking = start(tick())
            async with r.cache.lease(tokens) as lease:
                chunk = lease.allocate(len(tokens))
                await lease.run(lambda _: None, chunk)
                lease.commit(chunk)
            await r.cache.drain()
            ticking.cancel()
        assert len(store.rows) == 6250
        for name in ("prefetch", "backup"):
            made = [count for (of, _), count in by_turn.items() if of == name]
            assert sum(made) >= 6249
            assert max(made) <= 2 * keys.HASH_PAGES  # who comes first in a turn is drawn
        r.cache.reset()


@on_virtual_clock
async def test_b104_storage_at_rest_does_nothing() -> None:
    """B104: nothing polls: when all is kept, or has come and was let go, the loop has nothing to
    run."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, DeterministicLoop)
    async with three_tiers() as (r, _):
        await keep(r, A)
        assert await prefetched(r, A) == 32
        await r.serve([*A, 1])
        await r.cache.drain()
        await asyncio.sleep(100)
        before = len(loop.trace)
        await asyncio.sleep(1000)
        assert len(loop.trace) - before <= 3
