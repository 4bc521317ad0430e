"""A lease that is granted before its load has ended: what its model waits for, and what if not."""

from __future__ import annotations

import threading

import pytest

from tests.lease_helpers import P, Rig, chunk_of, rig, seq
from tiered_cache import Chunk, LoadFailed
from tiered_cache.testing.gates import LIMIT_S
from tiered_cache.transfer.copier import CopyJob, Direction


async def demoted(r: Rig, name: str, length: int) -> None:
    """A prompt that the device has given up and the host has."""
    await r.serve(seq(name, length))
    await r.cache.drain()
    await r.serve(seq("Z", 8 * P - 1))
    await r.cache.drain()
    assert r.hit(seq(name, length)) == 0


def fail_loads(r: Rig, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let loads fail, once the event that is returned is set."""
    copier = r.cache._controller.transfers._mover.copier
    copy, may_fail = copier.copy, threading.Event()

    def fail(job: CopyJob) -> None:
        if job.direction is Direction.LOAD:
            assert may_fail.wait(LIMIT_S)
            raise OSError("the bus is down")
        copy(job)

    monkeypatch.setattr(copier, "copy", fail)
    return may_fail


async def test_after_a_failed_load_the_model_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first run hears of it; from the next chunk on there is nothing to wait for any more."""
    async with rig(pages=8, host={"tokens": 64 * P}) as r:
        await demoted(r, "A", 24)
        may_fail = fail_loads(r, monkeypatch)
        async with r.cache.lease(seq("A", 24), layerwise=True) as lease:
            assert lease.prefix_len == 20

            def waiting(chunk: Chunk) -> Chunk:
                may_fail.set()
                for layer in range(2):
                    lease.layers.wait(layer)
                return r.model(chunk)

            with pytest.raises(LoadFailed):
                await lease.run(waiting, await chunk_of(lease))
            chunk = await chunk_of(lease)
            assert (chunk.start, chunk.stop) == (0, 24)
            await lease.run(waiting, chunk)
            await lease.wait_layer(0)
            lease.commit(chunk)
