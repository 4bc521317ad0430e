"""The oracle sees wrong bytes, wrong places and writes to free pages; gates stop threads."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.lease_helpers import chunk_of, rig, seq, start, turns
from tiered_cache import RadixKey
from tiered_cache.testing.gates import Gate, GateError, ManualExecutor
from tiered_cache.testing.oracle import OracleError, OracleModel


async def test_a_flipped_byte_is_seen_in_the_tree_and_by_the_next_reader() -> None:
    """Control: what the oracle calls right is not just anything."""
    async with rig() as r:
        await r.serve(seq("A", 9))
        assert r.oracle.verify_tree() == 2
        lease = await r.lease(seq("A", 12))
        rows = r.cache.pools.layer("k", 1)
        slot = int(lease.slots("full", 0, 8)[5])
        right = rows[slot].clone()
        rows[slot] = 1.5
        with pytest.raises(OracleError, match="wrong bytes"):
            r.oracle.verify_tree()
        with pytest.raises(OracleError, match="pages"):
            await lease.run(r.model, await chunk_of(lease))
        assert len(r.model.faults) == 1
        r.model.faults.clear()
        rows[slot] = right
        lease.close()


@pytest.mark.parametrize("other", [{"extra_key": "x"}, {"cache_salt": "x"}])
async def test_bytes_depend_on_the_namespace_and_on_all_tokens_before(other: Any) -> None:
    """The same tokens elsewhere, or after others, are other bytes."""
    async with rig() as r, r.cache.lease(seq("A", 8)) as lease:
        await r.compute(lease)
        r.oracle.verify(lease, RadixKey(seq("A", 8)), 0, 8)
        for wrong in (RadixKey(seq("A", 8), **other), RadixKey([1, *seq("A", 8, 1)])):
            with pytest.raises(OracleError):
                r.oracle.verify(lease, wrong, 4, 8)


async def test_a_write_to_a_free_page_is_seen() -> None:
    """What is spoilt stays so until somebody owns it."""
    async with rig() as r:
        r.spoil_free_pages()
        r.verify_free_pages()
        r.cache.pools.layer("v", 0)[7] = 1.0
        with pytest.raises(OracleError, match=r"pages \[1\]"):
            r.verify_free_pages()


async def test_rows_for_several_tokens_are_written_at_their_last_token() -> None:
    """A pool with fewer rows than tokens per page is held to the same rule."""
    async with rig() as r, r.cache.lease(seq("A", 7)) as lease:
        (spec, *_) = r.oracle._specs
        await r.compute(lease, 3)
        halves = type(spec)(
            spec.name, spec.component, spec.layers, spec.row_shape, spec.dtype, rows_per_page=2
        )
        r.oracle._specs = (halves,)
        r.oracle._bytes = {
            place: rows.reshape(len(rows), 2, -1) for place, rows in r.oracle._bytes.items()
        }
        r.oracle.write(lease, lease.key, 0, 3)
        r.oracle.verify(lease, lease.key, 0, 3)
        r.oracle.write(lease, lease.key, 3, 7)
        r.oracle.verify(lease, lease.key, 0, 7)
        with pytest.raises(OracleError):
            r.oracle.verify(lease, RadixKey([1, *seq("A", 7, 1)]), 0, 7)
        r.oracle._specs = ()


async def test_a_gate_holds_a_thread_until_it_is_opened() -> None:
    """The test knows that the thread is inside, without waiting for time to pass."""
    async with rig() as r, r.cache.lease(seq("A", 3)) as lease:
        gate = Gate()
        task = start(lease.run(gate, 42))
        await gate.reached()
        await turns()
        assert not task.done()
        assert gate.num_passed == 0
        gate.open()
        assert await task == 42
        assert gate.num_passed == 1


def test_a_manual_job_goes_to_the_pause_and_then_to_its_end() -> None:
    """Queued, running, done: each when the test says so, in a thread of its own."""
    executor, seen = ManualExecutor(), []

    def work() -> str:
        seen.append("before")
        executor.pause()
        seen.append("after")
        return "result"

    future = executor.submit(work)
    (job,) = executor.queued
    assert job.start()
    assert (seen, future.running(), executor.running) == (["before"], True, [job])
    with pytest.raises(GateError, match="before"):
        job.start()
    job.finish()
    assert (seen, future.result(), executor.jobs) == (["before", "after"], "result", [])


def test_a_manual_job_without_a_pause_tells_its_future_only_at_the_finish() -> None:
    """Errors too; and what was cancelled while queued never runs."""
    executor = ManualExecutor()
    failing, cancelled = executor.submit(lambda: 1 // 0), executor.submit(lambda: 1)
    with pytest.raises(GateError, match="not started"):
        executor.jobs[0].finish()
    assert executor.jobs[0].start()
    assert not failing.done()
    assert cancelled.cancel()
    executor.run_all()
    assert isinstance(failing.exception(), ZeroDivisionError)
    assert executor.jobs == []


async def test_the_model_checks_again_after_its_pause() -> None:
    """What somebody overwrites meanwhile is noticed by the run itself."""
    executor = ManualExecutor()
    async with rig(options={"run_executor": executor}) as r, r.cache.lease(seq("A", 8)) as lease:
        model = OracleModel(r.oracle, executor.pause)
        task = start(lease.run(model, await chunk_of(lease)))
        await turns()
        (job,) = executor.jobs
        await asyncio.to_thread(job.start)
        assert not np.any(r.cache.pools.layer("k", 0)[lease.slots()[4:]].numpy())
        r.cache.pools.layer("k", 0)[lease.slots()[0]] = 7.0
        await asyncio.to_thread(job.finish)
        with pytest.raises(OracleError):
            await task
        assert len(model.faults) == 1
