"""Faults do what they say to the calls they name, and nothing else; callers are watched too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.lease_helpers import start, turns
from tiered_cache.errors import BackendError
from tiered_cache.storage import ObjectKey, ReadResult, WriteResult
from tiered_cache.testing.faulty_backend import CallGate, Fault, FaultyBackend, flipped, short, torn
from tiered_cache.testing.loop import run
from tiered_cache_memory import MemoryBackend

SIZE = 64
KEYS = [ObjectKey(bytes([number]) * 48) for number in range(5)]
READ, MISSING, CORRUPT = ReadResult.READ, ReadResult.MISSING, ReadResult.CORRUPT
WRITTEN, REFUSED = WriteResult.WRITTEN, WriteResult.REFUSED


def row(number: int) -> memoryview:
    return memoryview(bytearray(range(number, number + SIZE)))


def empty(count: int) -> list[memoryview]:
    return [memoryview(bytearray(SIZE)) for _ in range(count)]


async def filled(*faults: Fault) -> FaultyBackend:
    """Five rows under five keys, and then the faults."""
    backend = FaultyBackend(MemoryBackend())
    assert await backend.write(KEYS, [row(at) for at in range(5)]) == [WRITTEN] * 5
    backend.faults += faults
    return backend


async def test_without_faults_it_is_the_backend_itself() -> None:
    """Every call goes through, and is in the list."""
    backend, rows, told = await filled(), empty(2), []
    assert await backend.read(KEYS[:2], rows, lambda *of: told.append(of)) == [READ] * 2
    assert rows == [row(0), row(1)]
    assert await backend.contains(KEYS) == [True] * 5
    await backend.delete(KEYS[:1])
    assert [len(part) async for part in backend.scan()] == [4]
    assert await backend.clear(KEYS[1][:16]) == 1
    assert backend.stats().num_objects == 3
    await backend.aclose()
    ops = [call.op for call in backend.calls]
    assert ops == ["write", "read", "contains", "delete", "clear", "aclose"]
    assert (backend.under_way, backend.violations) == ([], [])


async def test_results_are_put_in_the_place_of_single_keys() -> None:
    """Those of the others keep their positions, and the buffers of the named hold junk."""
    fault = Fault("read", keys=[KEYS[1]], result=MISSING)
    backend, rows = await filled(fault), empty(3)
    assert await backend.read(KEYS[:3], rows) == [READ, MISSING, READ]
    assert (rows[0], rows[2]) == (row(0), row(2))
    assert set(rows[1]) == {0xEE}
    assert await backend.read(KEYS[2:], empty(3)) == [READ] * 3
    assert fault.num_met == 1


async def test_a_page_key_names_its_object_too() -> None:
    backend = await filled(Fault("contains", keys=[KEYS[3][16:]], result=False))
    assert await backend.contains(KEYS) == [True, True, True, False, True]


async def test_what_is_refused_or_said_to_be_written_is_not_kept() -> None:
    """An answer of the script's own never reaches the wrapped backend."""
    backend = await filled()
    await backend.delete(KEYS[:2])
    backend.faults = [
        Fault("write", keys=KEYS[:1], result=REFUSED),
        Fault("write", keys=KEYS[1:2], result=WRITTEN),
    ]
    assert await backend.write(KEYS[:2], [row(0), row(1)]) == [REFUSED, WRITTEN]
    assert await backend.contains(KEYS[:2]) == [False, False]


async def test_bytes_change_on_the_way() -> None:
    """Flipped, torn or short; on reading as on writing."""
    backend, rows = await filled(Fault("read", keys=KEYS[:1], change=flipped(7))), empty(1)
    assert await backend.read(KEYS[:1], rows) == [READ]
    assert [at for at in range(SIZE) if rows[0][at] != row(0)[at]] == [7]
    backend.faults = [Fault("read", change=torn(60))]
    assert await backend.read(KEYS[:1], rows) == [READ]
    assert bytes(rows[0][56:]) == bytes([56, 57, 58, 59, 0, 0, 0, 0])
    backend.faults = [Fault("read", change=short(60))]
    assert await backend.read(KEYS[:1], rows) == [CORRUPT]
    await backend.delete(KEYS)
    backend.faults = [Fault("write", keys=KEYS[:1], change=short(60))]
    assert await backend.write(KEYS[:2], [row(0), row(1)]) == [WRITTEN] * 2
    assert await backend.read(KEYS[:2], empty(2)) == [CORRUPT, READ]


async def test_what_is_changed_later_is_not_said_to_have_arrived() -> None:
    """Else a checksum taken meanwhile would be that of the right bytes."""

    class Telling(MemoryBackend):
        async def read(self, keys: Any, rows: Any, arrived: Any = None) -> Any:
            results = await super().read(keys, rows)
            for index, lent in enumerate(rows):
                arrived(index, len(lent))
            return results

    backend = FaultyBackend(Telling(), Fault("read", keys=KEYS[1:2], change=flipped(0)))
    await backend.write(KEYS[:3], [row(at) for at in range(3)])
    told: list[Any] = []
    await backend.read(KEYS[:3], empty(3), lambda *of: told.append(of))
    assert told == [(0, SIZE), (2, SIZE)]


async def test_an_error_comes_before_inside_or_after() -> None:
    """After: the rows are kept, only the answer is lost."""
    backend = FaultyBackend(MemoryBackend())
    fault = Fault("write", error=OSError("EIO"))
    backend.faults.append(fault)
    for at, num_kept in (("before", 0), ("inside", 2), ("after", 4)):
        fault.at = at  # type: ignore[assignment]
        with pytest.raises(OSError, match="EIO"):
            await backend.write(KEYS[:4], [row(n) for n in range(4)])
        assert sum(await backend.contains(KEYS)) == num_kept


async def test_a_fault_meets_one_call_or_the_first_few() -> None:
    """`call` counts all calls of the operation, `times` those that it meets."""
    backend = await filled(Fault("contains", call=3, error=BackendError("the third")))
    for number in range(1, 5):
        if number == 3:
            with pytest.raises(BackendError, match="the third"):
                await backend.contains(KEYS)
        else:
            await backend.contains(KEYS)
    backend.faults = [Fault("contains", keys=KEYS[:1], times=1, result=False)]
    assert await backend.contains(KEYS[1:]) == [True] * 4
    assert await backend.contains(KEYS[:1]) == [False]
    assert await backend.contains(KEYS[:1]) == [True]


async def test_the_whole_answer_can_be_another() -> None:
    """Too short, say."""
    backend = await filled(Fault("contains", answer=lambda answer: answer[:-1]))
    assert len(await backend.contains(KEYS)) == 4
    backend.faults = [Fault("clear", result=7)]
    assert await backend.clear(bytes(16)) == 7


async def test_a_gate_holds_a_call_until_it_is_opened() -> None:
    """In the middle of a batch: one half has come by then, the other comes later."""
    gate = CallGate()
    backend, rows = await filled(Fault("read", gate=gate, at="inside")), empty(4)
    task = start(backend.read(KEYS[:4], rows))
    await gate.reached()
    await turns()
    assert (task.done(), gate.num_waiting, rows[:2]) == (False, 1, [row(0), row(1)])
    assert [bytes(lent) for lent in rows[2:]] == [bytes(SIZE)] * 2
    assert [call.op for call in backend.under_way] == ["read"]
    gate.open()
    assert await task == [READ] * 4
    assert rows == [row(at) for at in range(4)]


async def test_a_cancelled_call_leaves_its_gate_and_its_buffers() -> None:
    gate = CallGate()
    backend, rows = await filled(Fault("read", gate=gate)), empty(1)
    task = start(backend.read(KEYS[:1], rows))
    await gate.reached()
    task.cancel()
    await asyncio.wait([task])
    gate.open()
    await turns()
    assert (task.cancelled(), bytes(rows[0])) == (True, bytes(SIZE))
    assert (gate.num_waiting, backend.under_way) == (0, [])


async def test_a_stubborn_call_ends_when_it_would_have_ended() -> None:
    """Cancelled again and again it waits, writes to its buffers, and only then gives way."""
    gate = CallGate()
    backend, rows = await filled(Fault("read", gate=gate, stubborn=True)), empty(1)
    task = start(backend.read(KEYS[:1], rows))
    await gate.reached()
    for _ in range(3):
        task.cancel()
        await turns()
    assert not task.done()
    gate.open()
    await asyncio.wait([task])
    assert (task.cancelled(), rows) == (True, [row(0)])


def test_delays_are_on_the_clock_of_the_loop() -> None:
    """An hour passes at once on a deterministic loop, for this call only."""

    async def program() -> float:
        backend = await filled(Fault("read", delay=3600.0))
        await backend.contains(KEYS)
        before = asyncio.get_running_loop().time()
        await backend.read(KEYS[:1], empty(1))
        return asyncio.get_running_loop().time() - before

    assert run(program()) == 3600.0


async def test_it_can_be_opened_by_class() -> None:
    """Once the script lets it."""
    backend = await filled(Fault("open", call=1, error=BackendError("connection refused")))
    opened = backend.opened_as()
    options: Any = opened.Options(max_size=5)  # type: ignore[call-arg]
    with pytest.raises(BackendError, match="refused"):
        await opened.open(options, None)  # type: ignore[arg-type]
    assert await opened.open(options, None) is backend  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="opened_as"):
        await FaultyBackend.open(options, None)  # type: ignore[arg-type]


async def test_a_caller_that_touches_what_it_has_lent_is_found_out() -> None:
    """A source that is overwritten while it is stored, and a target while it is read."""
    for op, at in (("write", "before"), ("read", "after")):
        gate = CallGate()
        backend, lent = await filled(Fault(op, gate=gate, at=at)), row(0)  # type: ignore[arg-type]
        task = start(getattr(backend, op)(KEYS[:1], [lent]))
        await gate.reached()
        lent[5] ^= 1
        gate.open()
        with pytest.raises(AssertionError, match=f"while it was lent to {op}"):
            await task
        assert len(backend.violations) == 1


async def test_a_buffer_is_read_into_by_one_call_at_a_time() -> None:
    """Also when they overlap by one byte; two calls may store from the same row."""
    gate = CallGate()
    backend, memory = await filled(Fault("read", gate=gate)), memoryview(bytearray(2 * SIZE))
    reading = start(backend.read(KEYS[:1], [memory[:SIZE]]))
    await gate.reached()
    with pytest.raises(AssertionError, match="lent to read and to write"):
        await backend.write(KEYS[:1], [memory[SIZE - 1 : 2 * SIZE - 1]])
    beside = start(backend.read(KEYS[1:2], [memory[SIZE:]]))
    await gate.reached(2)
    gate.open()
    assert await reading + await beside == [READ, READ]
    with pytest.raises(AssertionError, match="lent to read and to read"):
        await backend.read(KEYS[:2], [memory[:SIZE], memory[:SIZE]])
    await backend.write(KEYS[:2], [memory[:SIZE], memory[:SIZE]])


async def test_a_caller_keeps_to_the_contract() -> None:
    """Keys of 48 bytes, a row each; and nothing after, or during, the close."""
    gate = CallGate()
    backend = await filled(Fault("contains", gate=gate))
    with pytest.raises(AssertionError, match="not of 48 bytes"):
        await backend.delete([ObjectKey(b"short")])
    with pytest.raises(AssertionError, match="2 keys with 1 rows"):
        await backend.write(KEYS[:2], [row(0)])
    task = start(backend.contains(KEYS))
    await gate.reached()
    with pytest.raises(AssertionError, match=r"\['contains'\] are under way"):
        await backend.aclose()
    gate.open()
    await task
    await backend.aclose()
    await backend.aclose()
    with pytest.raises(AssertionError, match="contains after aclose"):
        await backend.contains(KEYS)
    assert len(backend.violations) == 4
