"""Leases of models with windows and states: what they compute with is right, whatever happens, and
nothing of it leaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.hybrid_helpers import GRID, RATIO, STACKS, P, hybrid_rig
from tests.lease_helpers import Rig, cancelled, chunk_of, seq, start, turns
from tests.tier_helpers import Copies, soon
from tiered_cache import AdmissionTimeout, InsertParams, Lease, RadixKey, StaleError
from tiered_cache.testing.gates import Gate
from tiered_cache.testing.oracle import OracleModel
from tiered_cache.tree.components import swa
from tiered_cache.types import EvictParams

CHUNK = P
"""A small one: windows are what counts."""

pytestmark = pytest.mark.parametrize("stack", STACKS)


async def decode(r: Rig, lease: object, tokens: list[int]) -> None:
    for token in tokens:
        await lease.run(r.model, lease.append(token))  # type: ignore[attr-defined]


async def test_a_prompt_in_chunks_and_its_answer(stack: str) -> None:
    async with hybrid_rig(stack, 32) as r:
        async with r.cache.lease(seq("A", 45), reserve=20) as lease:
            await r.compute(lease, 12)
            r.check()
            await decode(r, lease, list(range(1, 18)))
            lease.finish()
            r.check()
        r.check()
        reused = await r.serve([*seq("A", 45), *range(1, 18), 99])
        assert reused >= 45 - GRID - P


async def test_what_the_device_gives_up_comes_back_from_the_host(stack: str) -> None:
    """All that a boundary needs, and nothing else: a window, a state."""
    async with hybrid_rig(stack, 32, host={"tokens": 400}) as r:
        for name in "ABC":
            await r.serve(seq(name, 50))
            await r.cache.drain()
        r.check()
        before = r.counters.tokens_hit_host
        for name in "ABCABC":
            r.spoil_free_pages()
            reused = await r.serve([*seq(name, 50), 1])
            assert reused >= 50 - GRID - P
            await r.cache.drain()
            r.check()
        assert r.counters.tokens_hit_host - before >= 4 * 40


async def test_a_window_s_pages_are_few_however_long_the_prompt(stack: str) -> None:
    """§11.5–6: the window, what is computed and not committed, and the prompt's end."""
    if "swa" not in stack:
        return
    small = {"tokens": 160 * P, "ratio": {"swa": 0.1, "mamba": 1.0}}
    small["ratio"] = {name: small["ratio"][name] for name in STACKS[stack] if name != "full"}
    with mock.patch.object(swa, "CHUNK_TOKENS", 16):
        async with hybrid_rig(stack, 160, device=small) as r:
            assert r.stats.pools["swa"].capacity == 16
            async with r.cache.lease(seq("A", 400), reserve=100) as lease:
                while chunk := await lease.next_chunk(16):
                    await lease.run(r.model, chunk)
                    if chunk.start % 32 == 0:
                        lease.commit(chunk)
                    r.check()
                await decode(r, lease, list(range(1, 60)))
                lease.finish()
            assert await r.serve([*seq("A", 400), 1]) >= 400 - GRID - P


async def test_rejected_drafts_are_taken_back_as_far_as_asked(stack: str) -> None:
    """§11.6–7: `rollback` tokens of a window; a state only where it is kept."""
    async with hybrid_rig(stack, 32) as r:
        async with r.cache.lease(seq("A", 40), reserve=40, rollback=6) as lease:
            await r.compute(lease, 16)
            await decode(r, lease, list(range(1, 30)))
            length = len(lease)
            if "mamba" in stack:
                with pytest.raises(ValueError, match="not kept"):
                    lease.truncate(length - 1)
                kept = length - length % GRID
                lease.truncate(kept)
                assert lease.computed == kept
            else:
                lease.truncate(length - 6)
                with pytest.raises(ValueError, match=r"not kept|committed"):
                    lease.truncate(length - 6 - 2 * P)
            await decode(r, lease, [7, 8, 9])
            lease.finish()
        r.check()


async def test_a_run_that_comes_to_nothing(stack: str) -> None:
    """§9.10: the working state is void, and the lease goes on from the last one that is kept."""
    async with hybrid_rig(stack, 32) as r:
        async with r.cache.lease(seq("A", 44), reserve=8) as lease:
            first = await chunk_of(lease, 16)
            await lease.run(r.model, first)
            second = await chunk_of(lease, 12)
            with pytest.raises(ZeroDivisionError):
                await lease.run(lambda chunk: (r.model(chunk), 1 / 0), second)
            assert lease.computed == 16
            third = await chunk_of(lease, 12)
            assert (third.start, third.tokens.tolist()) == (16, second.tokens[:12].tolist())
            await r.compute(lease)
        r.check()


async def test_a_queued_run_that_is_cancelled_touches_nothing(stack: str) -> None:
    """The run before it goes on, and what it computes counts."""
    async with hybrid_rig(stack, 32) as r:
        gate = Gate()
        model = OracleModel(r.oracle, pause=gate)
        async with r.cache.lease(seq("A", 44)) as lease:
            first = lease.allocate(10)
            running = start(lease.run(model, first))
            await gate.reached()
            queued = start(lease.run(r.model, lease.allocate(6)))
            await turns()
            await cancelled(queued)
            gate.open()
            await running
            assert lease.computed == 10
            assert model.faults == []
            await r.compute(lease)
        r.check()


async def test_states_are_waited_for(stack: str) -> None:
    """§11.5: a lease is promised the slot that it works with."""
    if "mamba" not in stack:
        return
    device = {"tokens": 64 * P, "ratio": {**RATIO[stack], "mamba": 2 / 64}}
    async with hybrid_rig(stack, 64, device=device) as r:
        assert r.stats.pools["mamba"].capacity == 2
        async with r.cache.lease(seq("A", 20)) as first, r.cache.lease(seq("B", 20)) as second:
            with pytest.raises(AdmissionTimeout):
                async with r.cache.lease(seq("C", 20), timeout=0):
                    pass
            await r.compute(first)
            await r.compute(second)
            r.check()
        assert await r.serve([*seq("B", 20), 1]) == 20


async def test_an_engine_s_own_requests_are_refused(stack: str) -> None:
    """What it would allocate has no slots, and what it publishes of a window is not all held."""
    async with hybrid_rig(stack, 32) as r:
        key = RadixKey(seq("A", 16))
        for call in (
            lambda: r.cache.allocate(1),
            lambda: r.cache.begin_req(seq("A", 16)),
            lambda: r.cache.insert(InsertParams(key, ())),
        ):
            with pytest.raises(ValueError, match="full attention; this model has"):
                call()
        with pytest.raises(ValueError, match="full attention"):
            await r.cache.load_back(key)


async def test_what_was_not_run_has_no_state(stack: str) -> None:
    async with hybrid_rig(stack, 32) as r, r.cache.lease(seq("A", 20)) as lease:
        chunk = await chunk_of(lease, 8)
        if "mamba" in stack:
            with pytest.raises(ValueError, match="computes in `run`"):
                lease.commit(chunk)
        await r.compute(lease)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("seed", range(8))
async def test_the_same_over_two_tiers(stack: str, seed: int, policy: str) -> None:
    host = {"tokens": random.Random(seed).choice([80, 400]), "write_policy": policy}
    r = await many_requests(stack, f"two {policy} {seed}", host=host)
    assert r.counters.pages_stored > 0 or policy == "write_back"  # which may have had room


@pytest.mark.parametrize("seed", range(12))
async def test_many_requests_in_random_order(stack: str, seed: int) -> None:
    """Shared prefixes, small pools, runs that fail or are cancelled, leases that are dropped."""
    await many_requests(stack, seed)


async def many_requests(stack: str, seed: object, **sections: Any) -> Rig:
    chance = random.Random(f"{stack} {seed}")
    async with hybrid_rig(stack, chance.choice([30, 60]), **sections) as r:
        await requests_in_random_order(r, chance)
        return r


async def requests_in_random_order(
    r: Rig, chance: random.Random, between: Callable[[], object] = lambda: None
) -> None:
    """`between`: what happens to the cache after each round of requests."""
    trunks = [seq(name, 64) for name in "ABC"]

    async def request() -> None:
        trunk = chance.choice(trunks)[: chance.randrange(1, 60)]
        tokens = [*trunk, *[chance.randrange(1, 3) for _ in range(chance.randrange(8))]]
        async with r.cache.lease(tokens, reserve=chance.randrange(8)) as lease:
            while chunk := await lease.next_chunk(chance.randrange(1, 24)):
                if chance.random() < 0.1:
                    with contextlib.suppress(ZeroDivisionError):
                        await lease.run(lambda chunk: (r.model(chunk), 1 / 0), chunk)
                    continue
                await lease.run(r.model, chunk)
                if chance.random() < 0.7:
                    lease.commit(chunk)
                if chance.random() < 0.05:
                    return
            while lease.room and chance.random() < 0.8:
                await lease.run(r.model, lease.append(chance.randrange(1, 3)))
            if chance.random() < 0.7:
                lease.finish()

    async def impatient() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.choice([None, None, 0.002, 0.005])):
                await request()

    for _ in range(25):
        async with asyncio.TaskGroup() as group:
            for _ in range(chance.randrange(1, 4)):
                group.create_task(impatient())
        r.check()
        between()
        if chance.random() < 0.05:
            r.cache.reset()
        r.spoil_free_pages()
    await r.cache.drain()
    assert r.cache.outstanding() == []


# --- what the schedules have found ----------------------------------------------------------------


async def test_a_lease_that_is_closed_under_its_run_is_promised_no_more(stack: str) -> None:
    """Seed 130: when the run ended, what it still might have taken was promised once more."""
    async with hybrid_rig(stack, 32) as r:
        gate = Gate()
        async with r.cache.lease(seq("A", 44)) as lease:
            running = start(lease.run(OracleModel(r.oracle, pause=gate), await chunk_of(lease, 12)))
            await gate.reached()
            lease.finish()
        gate.open()
        await running
        r.check()
        assert [pool.unspent for pool in r.stats.pools.values()] == [0] * len(r.stats.pools)


async def test_a_failed_run_settles_before_the_one_behind_it(stack: str) -> None:
    """Seed 312: its state had gone home, and was promised to nobody until the next run ended."""
    async with hybrid_rig(stack, 32) as r:
        end_run = Lease.end_run

        def proving(lease: Lease, *args: Any, **options: Any) -> None:
            end_run(lease, *args, **options)
            if not lease.closed:
                assert lease._parts is not None
                for part in lease._parts._all:
                    assert part.promised == part.unspent(lease._parts._num_pages)

        with mock.patch.object(Lease, "end_run", proving):
            async with r.cache.lease(seq("A", 44)) as lease:
                gate = Gate()
                first = start(lease.run(lambda chunk: (gate(), 1 / 0), lease.allocate(10)))
                await gate.reached()
                second = start(lease.run(r.model, lease.allocate(6)))
                await turns()
                gate.open()
                for run in (first, second):
                    with pytest.raises((ZeroDivisionError, StaleError)):
                        await run
        r.check()


async def test_windows_go_home_although_no_state_can_be_kept(stack: str) -> None:
    """Seed 115: the next run might have gone back to the first token, so all was kept of a window;
    but what goes back there computes all of it again."""
    if stack != "mamba_swa":
        return
    device = {"tokens": 64 * P, "ratio": {"swa": 14 / 64, "mamba": 1 / 64}}
    with mock.patch.object(swa, "CHUNK_TOKENS", 16):
        async with hybrid_rig(stack, 64, device=device) as r:
            async with r.cache.lease(seq("A", 200)) as lease:
                has_failed = False
                while chunk := await lease.next_chunk(16):
                    await lease.run(r.model, chunk)
                    lease.commit(chunk)
                    if chunk.start == 96 and not has_failed:
                        has_failed = True
                        failing = await chunk_of(lease, 16)
                        with pytest.raises(ZeroDivisionError):
                            await lease.run(lambda chunk: 1 / 0, failing)
                    r.check()
                assert lease.computed == 200
            assert r.counters.states_skipped > 0


async def test_what_a_failed_run_computes_again_is_promised(stack: str) -> None:
    """Seed 10193: it had gone home behind the lease, and others had been promised it."""
    if stack != "mamba_swa":
        return
    device = {"tokens": 64 * P, "ratio": {"swa": 20 / 64, "mamba": 2 / 64}}
    async with contextlib.AsyncExitStack() as stacked:
        stacked.enter_context(mock.patch.object(swa, "CHUNK_TOKENS", 16))
        r = await stacked.enter_async_context(hybrid_rig(stack, 64, device=device))
        lease = await stacked.enter_async_context(r.cache.lease(seq("A", 64), reserve=1))
        async with r.cache.lease(seq("C", 4)):  # it has the slot that a state might be kept in
            while chunk := await lease.next_chunk(16):
                await lease.run(r.model, chunk)
        with contextlib.suppress(AdmissionTimeout):
            await stacked.enter_async_context(r.cache.lease(seq("B", 64), timeout=0))
        with pytest.raises(ZeroDivisionError):
            await lease.run(lambda chunk: 1 / 0, lease.append(1))
        r.check()


async def test_a_state_that_nobody_has_room_to_hold_is_not_taken_over(stack: str) -> None:
    """Seed 12850: it was held beside the slot that the lease is promised, and other leases found
    theirs gone."""
    if "mamba" not in stack:
        return
    device = {"tokens": 64 * P, "ratio": {**RATIO[stack], "mamba": 3 / 64}}
    async with hybrid_rig(stack, 64, device=device) as r, r.cache.lease(seq("A", 20)) as first:
        await r.serve(seq("A", 20))
        async with r.cache.lease(seq("B", 20)) as second, r.cache.lease(seq("C", 20)) as third:
            for lease in (first, second, third):
                await lease.run(r.model, await chunk_of(lease, 8))
                r.check()
            for lease in (first, second, third):
                await r.compute(lease)
                r.check()


async def test_a_split_in_what_a_window_holds_changes_nothing(stack: str) -> None:
    """Seed 319: a lease holds the whole node, and its table went on naming what is above."""
    async with hybrid_rig(stack, 64) as r:
        await r.serve(seq("A", 45))
        async with r.cache.lease(seq("A", 49)) as lease:
            await r.compute(lease)
            assert lease.committed == 48
            await r.serve([*seq("A", 36), *seq("B", 8)])
            r.check()
            lease.finish()
        r.check()


async def on_host(r: Rig, copies: Copies, tokens: list[int]) -> None:
    """A prompt that only the host has."""
    await r.serve(tokens)
    await copies.all()
    await r.cache.evict(EvictParams(1 << 10))


async def test_pages_with_a_copier_are_promised_again_of_the_first_component(stack: str) -> None:
    """Seeds 296, 434 and 732: room was asked for in windows, too, which had promised nothing; and
    where a window has less than that, for ever."""
    copies = Copies()
    device = {"tokens": 32 * P, "ratio": dict.fromkeys(RATIO[stack], 16 / 32)}
    options = {"copy_executor": copies}
    async with hybrid_rig(stack, 32, device=device, host={"tokens": 400}, options=options) as r:
        copies.attach(r.cache._parts.host.copier)  # type: ignore[union-attr]
        r.at_exit(copies.end)
        await on_host(r, copies, seq("A", 45))
        granting = start(r.lease(seq("A", 45), load_timeout=0.001))
        await turns()
        copies.start()
        lease = await soon(granting)
        assert lease.prefix_len == 0
        r.check()
        await copies.all()
        await r.compute(lease)
        lease.close()
        await copies.all()


async def test_a_lease_that_starts_over_after_a_reset_is_promised_all(stack: str) -> None:
    """What it had been promised before is nothing after a reset."""
    copies = Copies()
    options = {"copy_executor": copies}
    async with hybrid_rig(stack, 32, host={"tokens": 400}, options=options) as r:
        copies.attach(r.cache._parts.host.copier)  # type: ignore[union-attr]
        r.at_exit(copies.end)
        await on_host(r, copies, seq("A", 45))
        granting = start(r.lease(seq("A", 45)))
        await turns()
        copies.start()
        r.cache.reset()
        await copies.all()
        lease = await soon(granting)
        r.check()
        await r.compute(lease)
        lease.close()
        await copies.all()


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("prefix", [0, 60])
@pytest.mark.parametrize("rollback", [0, 10, 40])
async def test_growth_within_the_reserve_finds_its_windows(
    stack: str, rollback: int, prefix: int, commits: bool
) -> None:
    """§11.5 goes before §11.6: however late it is published, whatever can be rolled back, and
    however a prefix was cut, a lease finds all that it was promised, though others take the rest.
    """
    if "swa" not in stack:
        return
    alone = 2 * (8 + 1) + CHUNK // P + 1
    pages = 2 * alone + -(-rollback // P)
    device = {"tokens": 256 * P, "ratio": {**RATIO[stack], "swa": (pages + 0.1) / 256}}
    async with contextlib.AsyncExitStack() as stacked:
        stacked.enter_context(mock.patch.object(swa, "CHUNK_TOKENS", CHUNK))
        r = await stacked.enter_async_context(hybrid_rig(stack, 256, window=8 * P, device=device))
        assert r.stats.pools["swa"].capacity == pages
        for length in (33, 65):  # a window each
            await r.serve(seq("A", length))
        prompt = [*seq("A", prefix), *seq("B", 90 - prefix)]
        lease = r.cache.lease(prompt, reserve=100, rollback=rollback)
        lease = await stacked.enter_async_context(lease)
        with contextlib.suppress(AdmissionTimeout):
            for name in "CDEF":
                other = r.cache.lease(seq(name, 200), timeout=0)
                assert await (await stacked.enter_async_context(other)).next_chunk(200)
        while given := await lease.next_chunk(CHUNK):
            await lease.run(r.model, given)
            if commits:
                lease.commit(given)
            r.check()
        for token in range(100):
            await lease.run(r.model, lease.append(token))
            r.check()
        lease.finish()
        r.check()


async def test_a_prompt_s_end_is_kept_where_it_stands_in_nobody_s_way(stack: str) -> None:
    """§5.9, §11.6: generated tokens can go, and the prompt is there."""
    if stack != "swa":  # of states, none is kept so long
        return
    with mock.patch.object(swa, "CHUNK_TOKENS", 16):
        async with hybrid_rig(stack, 128) as r:
            async with r.cache.lease(seq("A", 90), reserve=60) as lease:
                while chunk := await lease.next_chunk(16):
                    await lease.run(r.model, chunk)
                for token in range(60):
                    await lease.run(r.model, lease.append(token))
                lease.finish()
            assert await r.serve([*seq("A", 90), *seq("C", 9)]) == 88


async def test_a_load_brings_a_window_and_no_more_of_the_nodes_it_is_in(stack: str) -> None:
    if stack != "swa":
        return
    async with hybrid_rig(stack, 64, window=4 * P, host={"tokens": 400}) as r:
        for length in (17, 33):  # a window each
            await r.serve(seq("A", length))
        await r.cache.drain()
        await r.cache.evict(EvictParams(1 << 10))
        before = r.counters.pages_loaded
        async with r.cache.lease([*seq("A", 28), *seq("C", 5)]) as lease:
            assert lease.prefix_len == 28
            assert r.counters.pages_loaded - before == 28 // P + 4  # all of the base, one window
            await r.compute(lease)
        r.check()
