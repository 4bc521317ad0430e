"""Layer-wise leases: used before their load has ended (semantics §9.9)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.lease_helpers import P, Rig, chunk_of, seq, start, turns
from tests.tier_helpers import Copies, on_tier, store, tiers, transfers, until
from tiered_cache import Chunk, Lease, LoadFailed, StaleError, WrongThreadError
from tiered_cache.layers import NO_LOADS, LayerProgress, LayerWaits
from tiered_cache.transfer import copier

A = seq("A", 25)
NUM_LAYERS = 3
MODEL = {"dtype": "float32", "num_layers": NUM_LAYERS, "num_kv_heads": 1, "head_dim": 2}


class LayeredModel:
    """Waits for each layer in the run's thread, then proves its bytes, then writes the chunk.

    `seen`: layers whose wait has returned. `then`: called in the thread after all of it.
    """

    def __init__(self, r: Rig) -> None:
        self.oracle = r.oracle
        self.seen: list[int] = []
        self.committed: list[int] = []
        self.then: Any = None

    def __call__(self, chunk: Chunk) -> int:
        lease = chunk.lease
        for layer in range(NUM_LAYERS):
            lease.layers.wait(layer)
            self.committed.append(lease.committed)
            self.seen.append(layer)
            self._verify(chunk, layer)
        self.oracle.write(chunk, lease.key, chunk.start, chunk.stop)
        if self.then is not None:
            self.then()
        return chunk.stop

    def _verify(self, chunk: Chunk, layer: int) -> None:
        if not chunk.start:
            return
        labels = [(spec, at) for spec in self.oracle._specs for at in spec.layers]
        spans = self.oracle._spans(chunk, chunk.lease.key, 0, chunk.start)
        for (_, at), (rows, pages, offsets, wanted) in zip(labels, spans, strict=True):
            if at == layer:
                assert (rows[pages, offsets] == wanted).all(), f"layer {layer} is not there"


@pytest.fixture(autouse=True)
def one_page_of_one_layer_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "JOB_BYTES", 1)


@asynccontextmanager
async def on_host(pages: int = 32, **host: Any) -> AsyncIterator[tuple[Rig, Copies, LayeredModel]]:
    """A cache whose host has A."""
    async with tiers(pages, model=MODEL, **host) as (r, copies):
        await store(r, copies, A)
        yield r, copies, LayeredModel(r)


async def layerwise(r: Rig, tokens: Any = A, **options: Any) -> Lease:
    async with asyncio.timeout(2.0):
        return await r.lease(tokens, layerwise=True, **options)


async def copy_layers(copies: Copies, count: int, pages: int = 6) -> None:
    for _ in range(count * pages):
        await copies.one()


async def test_a_lease_is_granted_before_its_load_has_ended() -> None:
    """Its table names the pages that come, its prefix is that long, the tree has nothing yet."""
    async with on_host() as (r, copies, _):
        lease = await layerwise(r)
        assert (lease.prefix_len, lease.computed, lease.committed) == (24, 24, 0)
        assert lease.hits.host == 24
        assert (r.hit(A), r.pool.in_flight, r.pool.private, r.pool.unspent) == (0, 6, 0, 1)
        assert (lease.pages["full"][:6] == transfers(r)[0].device_ids).all()
        r.check()
        await copies.all()
        assert (lease.committed, r.hit(A), r.pool.in_flight) == (24, 24, 0)
        lease.close()


async def test_a_model_reads_each_layer_when_it_is_there() -> None:
    """Waits return layer by layer, in the run's thread; the last one after the commit."""
    async with on_host() as (r, copies, model):
        lease = await layerwise(r)
        run = start(lease.run(model, await chunk_of(lease)))
        await turns()
        assert model.seen == []
        for layer in range(NUM_LAYERS - 1):
            await copy_layers(copies, 1)
            await until(lambda layer=layer: model.seen == list(range(layer + 1)))  # type: ignore[misc]
            assert lease.committed == 0
        await copies.all()
        assert await run == 25
        assert model.committed == [0, 0, 24]
        lease.close()


async def test_half_a_layer_is_no_layer() -> None:
    """A layer whose jobs have not all ended is waited for."""
    async with on_host() as (r, copies, _):
        lease = await layerwise(r)
        for _ in range(5):
            await copies.one()
        first = start(lease.wait_layer(0))
        await turns()
        assert not first.done()
        await copies.one()
        await first
        second = start(lease.wait_layer(1))
        await turns()
        assert not second.done()
        await copies.all()
        await second
        lease.close()


async def test_a_job_with_several_layers_ends_them_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that share a job arrive with it; the last waits for the commit."""
    async with on_host() as (r, copies, model):
        monkeypatch.setattr(copier, "JOB_BYTES", 1 << 20)
        lease = await layerwise(r)
        waits = [start(lease.wait_layer(layer)) for layer in range(NUM_LAYERS)]
        await turns()
        assert not any(wait.done() for wait in waits)
        await copies.all()
        await asyncio.gather(*waits)
        await lease.run(model, await chunk_of(lease))
        lease.close()


async def test_waiting_on_the_loop_is_refused() -> None:
    """It would block everything, the load's end included."""
    async with on_host() as (r, copies, _):
        lease = await layerwise(r)
        with pytest.raises(WrongThreadError, match="wait_layer"):
            lease.layers.wait(0)
        with pytest.raises(WrongThreadError):
            lease.layers.enqueue(0, None)  # type: ignore[arg-type]
        await copies.all()
        lease.close()


async def test_without_a_load_nobody_waits() -> None:
    """A prefix that is on the device, or none, is there; also on the loop's thread."""
    async with tiers(model=MODEL) as (r, copies):
        lease = await layerwise(r)
        lease.layers.wait(0)
        await lease.wait_layer(NUM_LAYERS - 1)
        assert lease.layers is NO_LOADS
        await r.compute(lease)
        lease.close()
        await copies.all()


# --- commits above a load -------------------------------------------------------------------------


async def test_a_commit_above_a_load_runs_in_its_commit_beat() -> None:
    """Recorded until then: the tree holds nothing that hangs in the air."""
    async with on_host() as (r, copies, model):
        tokens = A[:24] + seq("T", 9)
        lease = await layerwise(r, tokens)
        chunk = await chunk_of(lease)
        model.oracle.write(chunk, lease.key, chunk.start, chunk.stop)  # by other means than `run`
        assert lease.commit(chunk) == 0
        assert (lease.committed, r.hit(tokens)) == (0, 0)
        await copy_layers(copies, NUM_LAYERS - 1)
        assert lease.committed == 0
        await copies.all()
        assert (lease.committed, r.hit(tokens)) == (32, 32)
        r.check()
        lease.close()


async def test_a_commit_during_a_run_waits_for_both() -> None:
    """The load's end and the run's end, whichever comes last."""
    async with on_host() as (r, copies, model):
        tokens = A[:24] + seq("T", 9)
        lease = await layerwise(r, tokens)
        gate = threading.Event()
        r.at_exit(gate.set)
        model.then = lambda: gate.wait(5.0)
        chunk = await chunk_of(lease)
        run = start(lease.run(model, chunk))
        await turns()
        lease.commit(chunk)
        await copies.all()
        await until(lambda: len(model.seen) == NUM_LAYERS)
        assert lease.committed == 24
        gate.set()
        await run
        assert lease.committed == 32
        r.check()
        lease.close()


async def test_a_commit_above_a_load_that_fails_is_discarded() -> None:
    """What was computed on state that never came is not published."""
    async with on_host() as (r, copies, _):
        tokens = A[:24] + seq("T", 9)
        lease = await layerwise(r, tokens)
        chunk = await chunk_of(lease)
        lease.commit(chunk)
        copies.fails = lambda job: True
        await copies.all()
        assert (lease.committed, lease.computed, lease.prefix_len) == (0, 0, 0)
        assert r.hit(tokens) == 0
        r.check()
        lease.close()
        assert r.pool.free == 32


async def test_closing_discards_a_commit_above_a_load() -> None:
    """Also when a run keeps the lease's pages: nobody is there to see the load end."""
    async with on_host() as (r, copies, _):
        tokens = A[:24] + seq("T", 9)
        lease = await layerwise(r, tokens)
        chunk = await chunk_of(lease)
        lease.commit(chunk)
        gate = threading.Event()
        r.at_exit(gate.set)
        run = start(lease.run(lambda: gate.wait(5.0)))
        await turns()
        lease.close()
        await turns()
        r.check()
        gate.set()
        await run
        r.check()
        await copies.all()
        assert r.hit(tokens) == 0
        assert r.pool.free + r.pool.evictable == 32


# --- failure --------------------------------------------------------------------------------------


async def test_a_load_that_fails_under_a_model() -> None:
    """Waits raise, the lease falls back, and `next_chunk` goes on from there, also layer-wise."""
    async with on_host() as (r, copies, model):
        lease = await layerwise(r, reserve=8)
        run = start(lease.run(model, await chunk_of(lease)))
        await copy_layers(copies, 1)
        await until(lambda: model.seen == [0])
        copies.fails = lambda job: True
        await copies.all()
        with pytest.raises(LoadFailed, match="ask for the next chunk"):
            await run
        assert (lease.committed, lease.computed, lease.prefix_len, lease.hits.total) == (0,) * 4
        assert "a bad row" in lease.why
        r.check()
        assert r.pool.unspent == 9
        copies.fails = lambda job: False
        chunk = await chunk_of(lease)
        assert (chunk.start, chunk.stop) == (0, 25)
        async with asyncio.timeout(2.0):
            await lease.run(model, chunk)
        lease.commit(chunk)
        r.check()
        lease.close()
        await copies.all()


async def test_a_load_that_fails_while_nobody_runs() -> None:
    """A chunk from before is refused; whoever waits for it is told, not let through."""
    async with on_host() as (r, copies, model):
        lease = await layerwise(r)
        chunk = await chunk_of(lease)
        copies.fails = lambda job: True
        await copies.all()
        assert (lease.committed, lease.computed) == (0, 0)
        r.check()
        with pytest.raises(LoadFailed):
            await lease.wait_layer(0)
        with pytest.raises(StaleError, match="truncated away"):
            await lease.run(model, chunk)
        copies.fails = lambda job: False
        await r.compute(lease)
        assert lease.committed == 24
        lease.close()
        await copies.all()


async def test_layer_wise_loads_commit_all_or_nothing() -> None:
    """§9.1: whole pages of some layers are no pages."""
    async with on_host() as (r, copies, _):
        lease = await layerwise(r)
        await copy_layers(copies, NUM_LAYERS - 1)
        await copies.one()
        copies.fails = lambda job: True
        await copies.all()
        assert on_tier(r, A[:24]) == "HHHHHH"
        assert (r.counters.pages_loaded, r.counters.loads_failed) == (0, 1)
        lease.close()


async def test_a_lease_above_another_ones_load() -> None:
    """Two layer-wise leases: the second's waits cover the load that it has joined."""
    async with on_host() as (r, copies, model):
        first = await layerwise(r, A[:13])
        second = await layerwise(r)
        assert [(load.start, load.depth) for load in transfers(r)] == [(0, 12), (12, 24)]
        assert (second.prefix_len, r.counters.loads_joined) == (24, 1)
        r.check()
        run = start(second.run(model, await chunk_of(second)))
        await copy_layers(copies, NUM_LAYERS, pages=3)
        assert (first.committed, second.committed, model.seen) == (12, 12, [])
        r.check()
        await copies.all()
        assert await run == 25
        assert second.committed == 24
        r.check()
        assert r.counters.tokens_hit_host + r.counters.tokens_hit_device == 36
        first.close()
        second.close()


async def test_the_load_above_which_a_lease_stands_fails() -> None:
    """The joiner is told in the same beat, leaves its own load, and holds its promise again."""
    async with on_host(pages=16) as (r, copies, _):
        first = await layerwise(r, A[:13])
        second = await layerwise(r)
        copies.fails = lambda job: job.num_pages == 1 and len(copies.jobs) > 0
        await copies.all()
        assert (first.prefix_len, second.prefix_len) == (0, 0)
        r.check()
        assert r.pool.unspent == 4 + 7
        assert transfers(r) == []
        copies.fails = lambda job: False
        await r.compute(first)
        await r.compute(second)
        first.close()
        second.close()
        await copies.all()


async def test_a_load_that_has_moved_ends_with_the_one_that_fails() -> None:
    """Own pages that wait for another's load go home in the beat in which that fails, once."""
    async with on_host(pages=16) as (r, copies, _):
        first = await layerwise(r, A[:5])
        second = await layerwise(r, A[:9])
        held = [copies.start()]  # the upper load's first layer
        for _ in range(NUM_LAYERS):
            await copies.one()  # two jobs are submitted at a time: these are the lower load's
            if len(copies.queued) == 0:
                break
        await turns()
        copies.fails = lambda job: True
        held[0].finish()
        await copies.all()
        assert transfers(r) == []
        assert (first.prefix_len, second.prefix_len, second.hits.host) == (0, 0, 0)
        r.check()
        assert r.pool.unspent == 2 + 3
        first.close()
        second.close()


async def test_truncation_into_a_load_is_refused() -> None:
    """The pages there are the load's."""
    async with on_host() as (r, copies, _):
        lease = await layerwise(r)
        with pytest.raises(ValueError, match="a load is bringing"):
            lease.truncate(20)
        lease.truncate(24)
        await copies.all()
        r.check()
        lease.close()


async def test_a_prefix_that_is_published_under_a_layer_wise_load() -> None:
    """§5.12: the load's pages are duplicates, and stay until the run that reads them has ended; so
    long the table names them (§11.1)."""
    async with on_host() as (r, copies, model):
        gate = threading.Event()
        r.at_exit(gate.set)
        model.then = lambda: gate.wait(5.0)
        lease = await layerwise(r)
        mine = lease.pages["full"][:6].copy()
        run = start(lease.run(model, await chunk_of(lease)))
        rival = await r.lease(A, load_timeout=0.0)
        chunk = await chunk_of(rival)
        model.oracle.write(chunk, rival.key, chunk.start, chunk.stop)
        rival.commit(chunk)
        await copies.all()
        await until(lambda: len(model.seen) == NUM_LAYERS)
        assert (lease.pages["full"][:6] == mine).all()
        assert (r.pool.quarantined, r.pool.in_flight) == (6, 0)
        r.check()
        free = r.cache._parts.allocators[0].free_ids()
        assert not set(mine) & set(free)
        gate.set()
        await run
        assert (lease.pages["full"][:6] == rival.pages["full"][:6]).all()
        assert r.pool.quarantined == 0
        r.check()
        lease.close()
        rival.close()


async def test_closing_a_lease_leaves_its_load() -> None:
    """§11.7: pages under load go to the load; nobody needs it, so it ends."""
    async with on_host() as (r, copies, _):
        lease = await layerwise(r)
        job = copies.start()
        lease.close()
        await turns()
        assert (r.pool.in_flight, r.pool.unspent, r.pool.free) == (6, 0, 26)
        r.check()
        job.finish()
        await turns()
        assert (r.pool.free, transfers(r)) == (32, [])


# --- reset ----------------------------------------------------------------------------------------


async def test_a_reset_under_a_layer_wise_load() -> None:
    """§12.1: waits raise `StaleError`, in threads and on the loop; pages go home with the copy."""
    async with on_host() as (r, copies, model):
        lease = await layerwise(r)
        waiting = start(lease.wait_layer(0))
        run = start(lease.run(model, await chunk_of(lease)))
        await turns()
        job = copies.start()
        r.cache.reset()
        for work in (waiting, run):
            with pytest.raises(StaleError, match="reset"):
                await work
        assert r.pool.free + r.pool.quarantined == 32
        with pytest.raises(StaleError):
            await lease.next_chunk(10)
        lease.close()
        assert (r.pool.free, r.pool.quarantined) == (26, 6)
        job.finish()
        await r.cache.drain()
        assert r.pool.free == 32


async def test_a_reset_discards_what_was_recorded() -> None:
    """A commit above a load from before is not published after."""
    async with on_host() as (r, copies, _):
        tokens = A[:24] + seq("T", 9)
        lease = await layerwise(r, tokens)
        lease.commit(await chunk_of(lease))
        job = copies.start()
        r.cache.reset()
        job.finish()
        await r.cache.drain()
        assert (r.hit(tokens), r.cache.tree.num_nodes) == (0, 0)
        lease.close()
        assert r.pool.free == 32


# --- the waits themselves -------------------------------------------------------------------------


async def test_progress_of_one_load() -> None:
    """The last layer arrives with the commit, whatever has been copied."""
    progress = LayerProgress((3, 5, 9), [])
    waits = LayerWaits([progress], loop_thread=0)
    progress.advance(1)
    waits.wait(3)
    progress.advance(3)
    waits.wait(5)
    last = start(waits.arrive(9))
    await turns()
    assert not last.done()
    progress.finish()
    await last
    waits.wait(9)


async def test_a_layer_that_the_component_lacks_is_there() -> None:
    """A model asks for all its layers, a pool has some."""
    waits = LayerWaits([LayerProgress((3, 5), [])], loop_thread=0)
    waits.wait(4)


async def test_a_failure_reaches_whoever_waits_and_whoever_asks_later() -> None:
    """In threads and on the loop; layers that have arrived are no use either."""
    progress = LayerProgress((0, 1), [])
    waits = LayerWaits([progress], loop_thread=0)
    progress.advance(1)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            waits.wait(1)
        except LoadFailed as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    on_loop = start(waits.arrive(1))
    await turns()
    progress.fail(LoadFailed("gone"))
    await asyncio.to_thread(thread.join)
    assert len(found) == 1
    with pytest.raises(LoadFailed, match="gone"):
        await on_loop
    with pytest.raises(LoadFailed):
        waits.wait(0)


assert P == 4


async def test_a_load_that_fails_while_another_is_waited_for() -> None:
    """Seed 20261210003220: the first of two loads had brought the layer, and failed before the
    second had it. Its pages were somebody else's when the wait returned."""
    first, second = LayerProgress((0, 1), ()), LayerProgress((0, 1), ())
    waits = LayerWaits((first, second), 0)
    first.advance(1)
    on_loop = start(waits.arrive(0))
    in_thread = start(asyncio.to_thread(waits.wait, 0))
    await turns()
    first.fail(LoadFailed("a bad row"))
    second.advance(1)
    for waiting in (on_loop, in_thread):
        with pytest.raises(LoadFailed, match="a bad row"):
            await waiting
