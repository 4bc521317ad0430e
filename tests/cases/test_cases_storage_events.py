"""Cases of what storage does to those around it: what observers are told of it, what is believed,
and that it does not hold up the loop."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final

import pytest

from tests.case_helpers import content
from tests.lease_helpers import P, Rig, seq, start
from tests.storage_helpers import Store, Told, keep, on_virtual_clock, prefetched, three_tiers, wipe
from tests.tier_helpers import demote, on_tier
from tiered_cache import StaleError
from tiered_cache.storage.backend import SCOPE_BYTES
from tiered_cache.testing.faulty_backend import CallGate
from tiered_cache.testing.loop import SeededExecutor
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
