"""Jobs of storage compute a few at a time, and those that wait for something hold nobody up."""

from __future__ import annotations

import asyncio

import pytest

from tests.lease_helpers import cancelled, start
from tests.storage_helpers import on_virtual_clock
from tiered_cache.storage_io import BUSY_S, ThreadContext, num_spare_cores
from tiered_cache.testing.loop import HANG, DeterministicLoop, SeededExecutor, SeededJob


def threads(
    num_busy: int, *, seconds: float, num_hanging: int = 0
) -> tuple[ThreadContext, list[int]]:
    """Four threads, of which the first jobs hang; and how many jobs ran when each began."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, DeterministicLoop)
    began: list[int] = []

    def fault(job: SeededJob) -> float:
        began.append(len(executor.running))
        return HANG if job.number <= num_hanging else 0.0

    executor = SeededExecutor(loop, num_threads=4, durations=(seconds,), fault=fault)
    return ThreadContext(executor, 4, num_busy=num_busy), began


@pytest.mark.parametrize("num_busy", [1, 2, 4])
@on_virtual_clock
async def test_no_more_compute_than_may(num_busy: int) -> None:
    """However many threads there are."""
    context, began = threads(num_busy, seconds=BUSY_S / 2)
    async with asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(context.run(int))
    assert max(began) == num_busy
    assert len(began) == 12


@on_virtual_clock
async def test_who_waits_gives_up_his_turn() -> None:
    """A hung read keeps its thread, and nobody else from the processor."""
    context, began = threads(1, seconds=BUSY_S / 4, num_hanging=2)
    hung = [start(context.run(int)) for _ in range(2)]
    begun_s = asyncio.get_running_loop().time()
    await asyncio.sleep(BUSY_S / 2)
    assert await context.run(int) == 0
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(2.25 * BUSY_S)
    assert began == [1, 2, 3]
    context._executor.release()  # type: ignore[attr-defined]
    assert await asyncio.gather(*hung) == [0, 0]
    assert context.num_running == 0


@on_virtual_clock
async def test_a_turn_ends_once() -> None:
    """Also when it was given up before, or its job was cancelled: no turn is lost, none is made."""
    context, began = threads(1, seconds=2 * BUSY_S)
    for _ in range(3):
        await context.run(int)
    first, second = start(context.run(int)), start(context.run(int))
    await asyncio.sleep(0)
    await cancelled(second)
    await first
    assert context._turns._free._value == 1
    assert max(began) == 1


def test_one_may_always_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with many cores all but one: that is the event loop's."""
    monkeypatch.setattr("sys.platform", "linux")
    for cores, spare in ((1, 1), (2, 1), (16, 15)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=cores: set(range(n)), raising=False)
        assert num_spare_cores() == spare
