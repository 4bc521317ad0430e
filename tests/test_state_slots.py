"""Leases of models with states, where slots are as few as can be (semantics §9.10)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from tests.hybrid_helpers import RATIO, STACKS, P, hybrid_rig
from tests.lease_helpers import Rig, cancelled, chunk_of, seq, start, turns
from tests.tier_helpers import Copies, soon
from tiered_cache import AdmissionTimeout, ClosedError, StaleError, Tier
from tiered_cache.testing.gates import Gate
from tiered_cache.testing.oracle import OracleModel

pytestmark = pytest.mark.parametrize("stack", [name for name in STACKS if "mamba" in name])

PAGES: Final = 64
PROMPT: Final = seq("A", 21)
KEPT: Final = 16
"""Where a state of the prompt stands: the last multiple of the grid before its last token."""


@contextlib.asynccontextmanager
async def slots(
    stack: str, num_slots: int, *, max_pinned: float = 0.25, **sections: Any
) -> AsyncIterator[Rig]:
    device: dict[str, Any] = {"tokens": PAGES * P, "max_pinned": max_pinned}
    device["ratio"] = {**RATIO[stack], "mamba": num_slots / PAGES}
    async with hybrid_rig(stack, PAGES, device=device, **sections) as r:
        assert r.stats.pools["mamba"].capacity == num_slots
        yield r


async def publish(r: Rig, tokens: list[int]) -> None:
    """With a state where a prompt's is kept, and none behind it."""
    async with r.cache.lease(tokens[: KEPT + 1]) as lease:
        while lease.computed < KEPT:
            await lease.run(r.model, await chunk_of(lease, KEPT))
        lease.finish()


async def test_what_no_slot_was_free_for_is_published_at_the_end(stack: str) -> None:
    """A lease that works in the only slot has none to go on with, until it needs none."""
    async with slots(stack, 1) as r:
        async with r.cache.lease(seq("A", KEPT + 1)) as lease:
            await lease.run(r.model, await chunk_of(lease))
            lease.finish()
            assert (lease.committed, r.hit(PROMPT)) == (0, 0)
            assert r.counters.states_skipped == 1
        assert r.hit(PROMPT) == KEPT
        r.check()


async def test_what_is_truncated_is_not_published_at_the_end(stack: str) -> None:
    """Of what could not be published, only what still stands is."""
    async with slots(stack, 2) as r:
        async with r.cache.lease(seq("A", 8), reserve=20) as lease:
            await lease.run(r.model, await chunk_of(lease, 8))
            for token in seq("A", KEPT, 8):  # the state at 8 is kept, in the other slot
                await lease.run(r.model, lease.append(token))
            lease.finish()
            assert (lease.committed, r.counters.states_skipped) == (0, 1)
            lease.truncate(8)
            for token in seq("B", 8):
                await lease.run(r.model, lease.append(token))
            assert lease.computed == KEPT
        assert r.hit([*seq("A", 8), *seq("B", 9)]) == 8
        r.check()


async def test_a_run_that_goes_on_at_the_end_is_waited_for(stack: str) -> None:
    async with slots(stack, 1) as r:
        gate = Gate()
        async with r.cache.lease(PROMPT) as lease:
            await lease.run(r.model, await chunk_of(lease, KEPT))
            lease.finish()
            slow = OracleModel(r.oracle, pause=gate)
            running = start(lease.run(slow, await chunk_of(lease)))
            await gate.reached()
        gate.open()
        await running
        assert slow.faults == []
        assert r.hit(PROMPT) == 0  # the run has made another state of it
        r.check()


async def test_the_only_slot_is_taken_over_with_the_state_in_it(stack: str) -> None:
    async with slots(stack, 1) as r:
        await publish(r, PROMPT)
        assert r.hit(PROMPT) == KEPT
        async with r.cache.lease(PROMPT, timeout=0) as lease:
            assert lease.prefix_len == KEPT
            assert (r.hit(PROMPT), r.stats.pools["mamba"].private) == (0, 1)
            assert r.counters.states_taken_over == 1
            r.check()
            await r.compute(lease)
            lease.finish()
            r.check()
        assert await r.serve([*PROMPT, 1]) in (0, 20)
        assert r.stats.pools["mamba"].unspent == 0


async def test_a_free_slot_is_taken_before_the_tree_s(stack: str) -> None:
    async with slots(stack, 2) as r:
        await publish(r, PROMPT)
        async with r.cache.lease(PROMPT) as lease:
            assert (lease.prefix_len, r.hit(PROMPT)) == (KEPT, KEPT)
        await publish(r, seq("B", 21))
        async with r.cache.lease(PROMPT) as lease:  # B's is older than A's, once that is matched
            assert (lease.prefix_len, r.hit(PROMPT)) == (KEPT, KEPT)
            await r.compute(lease)
            assert r.hit(seq("B", 21)) == 0
        assert r.counters.states_taken_over == 0


async def test_the_host_s_copy_stays(stack: str) -> None:
    async with slots(stack, 1, host={"tokens": 400}) as r:
        await publish(r, PROMPT)
        await r.cache.drain()
        async with r.cache.lease(PROMPT, timeout=0) as lease:
            assert lease.prefix_len == KEPT
            assert r.stats.host["mamba"].evictable == 1
            await r.compute(lease)
        r.check()


async def test_a_copy_to_the_host_that_is_under_way_is_waited_for(stack: str) -> None:
    """It holds the state; then there is a copy."""
    copies = Copies()
    options = {"copy_executor": copies}
    async with slots(stack, 1, host={"tokens": 400}, options=options) as r:
        copies.attach(r.cache._parts.host.copier)  # type: ignore[union-attr]
        r.at_exit(copies.end)
        await publish(r, PROMPT)
        await turns()
        tree = r.cache.tree
        while not any(node.data[-1].pending for node in tree.nodes()):
            await copies.one()  # of what comes before the state: that holds it not
        copies.start()
        await turns()
        granting = start(r.lease(PROMPT))
        await turns()
        assert not granting.done()
        await copies.all()
        lease = await soon(granting)
        assert (lease.prefix_len, r.stats.host["mamba"].evictable) == (KEPT, 1)
        lease.close()
        await copies.all()


async def test_a_state_that_another_lease_holds_is_not_taken(stack: str) -> None:
    async with slots(stack, 2) as r:
        await publish(r, PROMPT)
        async with r.cache.lease(PROMPT) as first:  # holds it, and is promised the other slot
            with pytest.raises(AdmissionTimeout):
                await r.lease(PROMPT, timeout=0)
            waiting = start(r.lease(PROMPT))
            await r.compute(first)
            r.check()
        second = await soon(waiting)
        assert second.prefix_len == KEPT
        await r.compute(second)
        second.close()


async def test_a_state_that_a_pin_holds_is_not_taken(stack: str) -> None:
    async with slots(stack, 4, max_pinned=1.0) as r:
        await publish(r, PROMPT)
        with contextlib.ExitStack() as pins:
            pins.enter_context(r.cache.pin(PROMPT, ttl=60, tier=Tier.DEVICE))
            others = [await r.lease(seq(name, 9)) for name in "BCD"]
            with pytest.raises(AdmissionTimeout):
                await r.lease(PROMPT, timeout=0)
            pins.close()
            others.append(await r.lease(PROMPT, timeout=0))
            assert (others[-1].prefix_len, r.counters.states_taken_over) == (KEPT, 1)
            for lease in others:
                lease.close()


async def test_a_lease_whose_taken_state_is_void_begins_again(stack: str) -> None:
    """The tokens that it holds are no use without a state: it computes them once more."""
    async with slots(stack, 1) as r:
        await publish(r, PROMPT)
        async with r.cache.lease(PROMPT) as lease:
            chunk = await chunk_of(lease)
            with pytest.raises(ZeroDivisionError):
                await lease.run(lambda chunk: (r.model(chunk), 1 / 0), chunk)
            assert (lease.committed, lease.computed) == (KEPT, KEPT)
            r.check()
            with pytest.raises(StaleError, match="ask for the next chunk"):
                await lease.run(r.model, lease.allocate(1))
            assert lease.finish() == KEPT
            again = await chunk_of(lease)
            assert (again.start, lease.prefix_len) == (0, 0)
            await lease.run(r.model, again)
            await r.compute(lease)
            r.check()
        r.check()


async def test_one_that_kept_the_state_goes_on_from_it(stack: str) -> None:
    """Where a slot has become free meanwhile, the state that it took over is copied first."""
    async with slots(stack, 2) as r:
        await publish(r, PROMPT)
        other = await r.lease(seq("B", 5))
        async with r.cache.lease(PROMPT, timeout=0) as lease:
            assert r.counters.states_taken_over == 1
            other.close()
            with pytest.raises(ZeroDivisionError):
                await lease.run(lambda chunk: (r.model(chunk), 1 / 0), await chunk_of(lease))
            assert lease.computed == KEPT
            assert (await chunk_of(lease)).start == KEPT
            await r.compute(lease)
        r.check()


async def test_a_run_that_never_began_leaves_the_state_as_it_is(stack: str) -> None:
    async with slots(stack, 1) as r:
        await publish(r, PROMPT)
        gate = Gate()
        async with r.cache.lease(PROMPT) as lease:
            blocking = start(r.cache.run([], gate))
            await gate.reached()
            queued = start(lease.run(r.model, await chunk_of(lease)))
            await turns()
            await cancelled(queued)
            gate.open()
            await blocking
            assert (await chunk_of(lease)).start == KEPT
            await r.compute(lease)
        r.check()


async def test_one_that_begins_again_waits_for_its_place(stack: str) -> None:
    """In front of everybody; and whoever closes it meanwhile ends that."""
    for is_closed in (False, True):
        async with slots(stack, 1) as r:
            await publish(r, PROMPT)
            gate = Gate()
            lease = await r.lease(PROMPT)
            with pytest.raises(ZeroDivisionError):
                await lease.run(lambda chunk: 1 / 0, await chunk_of(lease))
            running = start(r.cache.run([lease], gate))
            await gate.reached()
            again = start(lease.next_chunk(8))
            await turns()
            assert not again.done()
            behind = start(r.lease(seq("B", 5)))
            await turns()
            if is_closed:
                lease.close()
                gate.open()
                with pytest.raises(ClosedError):
                    await again
            else:
                gate.open()
                chunk = await soon(again)
                assert chunk is not None
                assert chunk.start == 0
                await r.compute(lease)
                lease.close()
            await running
            (await soon(behind)).close()
            r.check()


async def test_what_is_suspended_with_one_slot_goes_on_where_it_was(stack: str) -> None:
    async with slots(stack, 1) as r:
        tokens = seq("A", KEPT)
        lease = await r.lease(tokens, reserve=8)
        await r.compute(lease)
        lease.suspend()
        r.check()
        async with r.cache.lease([*tokens, 1], timeout=0) as lease:
            assert lease.prefix_len == KEPT
            await r.compute(lease)
        r.check()
