"""A backend that is unwell is noticed, left alone, and asked again; nobody waits for it and nobody
has to ask for it to recover (semantics §9.3, §10.9). Seconds are those of the virtual clock."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any, Final

import pytest
import uvloop

from tests.lease_helpers import Rig, cancelled, other_tasks, rig, seq, settings, start, turns
from tests.storage_helpers import (
    MODEL,
    Store,
    keep,
    on_virtual_clock,
    opens,
    prefetched,
    three_tiers,
    wipe,
)
from tests.tier_helpers import until
from tiered_cache import BackendError, UnifiedRadixCache, build
from tiered_cache.observe import Event, EventKind
from tiered_cache.stats import StorageStats
from tiered_cache.storage.backend import KEY_BYTES, ObjectKey, WriteResult
from tiered_cache.storage.health import Breaker, BreakerSettings, HealthState
from tiered_cache.storage.wrappers import Limited
from tiered_cache.testing.faulty_backend import CallGate
from tiered_cache_memory import MemoryBackend

A: Final = seq("A", 32)

CLOSED, DEGRADED, OPEN, HALF_OPEN = HealthState


class Patient:
    """A breaker, its clock, and what it has told."""

    def __init__(self, **settings: Any) -> None:
        self.now = 0.0
        self.changes: list[str] = []
        self.breaker = Breaker(
            BreakerSettings(**settings),
            lambda: self.now,
            lambda old, new: self.changes.append(f"{old.value} -> {new.value}"),
        )

    def fail(self, count: int = 1) -> None:
        for _ in range(count):
            self.breaker.failed("no such device")

    def opened(self) -> Breaker:
        self.fail(5)
        assert self.breaker.state is OPEN
        return self.breaker


# --- the breaker alone ----------------------------------------------------------------------------


def test_it_is_asked_while_it_is_well() -> None:
    """Success changes nothing, and nothing is told."""
    patient = Patient()
    for _ in range(100):
        assert patient.breaker.admits()
        patient.breaker.succeeded(0.01)
    assert patient.breaker.state is CLOSED
    assert patient.changes == []
    assert patient.breaker.latency_s == pytest.approx(0.01, rel=0.01)


def test_failures_in_a_row_open_it() -> None:
    """One is a warning; one that goes well between them starts the count again."""
    patient = Patient(failures=3)
    patient.fail(2)
    assert patient.breaker.state is DEGRADED
    assert patient.breaker.admits()
    patient.breaker.succeeded(0.01)
    assert patient.breaker.state is CLOSED
    patient.fail(2)
    assert patient.breaker.admits()
    patient.fail()
    assert patient.breaker.state is OPEN
    assert not patient.breaker.admits()
    assert patient.breaker.reason == "no such device"
    assert patient.changes == [
        "closed -> degraded",
        "degraded -> closed",
        "closed -> degraded",
        "degraded -> open",
    ]


def test_slow_calls_and_a_long_queue_are_a_warning() -> None:
    """It is asked as before, and well when they have gone."""
    patient = Patient(slow=1.0, long_queue=4)
    breaker = patient.breaker
    for _ in range(20):
        breaker.succeeded(3.0)
    assert breaker.state is DEGRADED
    assert breaker.admits()
    for _ in range(20):
        breaker.succeeded(0.01)
    assert breaker.state is CLOSED
    breaker.note_queue(4)
    assert breaker.state is CLOSED
    breaker.note_queue(5)
    assert breaker.state is DEGRADED
    breaker.note_queue(0)
    assert breaker.state is CLOSED


def test_a_queue_changes_nothing_while_it_is_open() -> None:
    """Whoever leaves it then says nothing about the backend."""
    breaker = Patient().opened()
    breaker.note_queue(100)
    breaker.note_queue(0)
    assert breaker.state is OPEN


def test_one_call_decides_when_it_is_due() -> None:
    """The others are refused until it has ended."""
    patient = Patient(retry_after=2.0)
    breaker = patient.opened()
    patient.now = 1.9
    assert not breaker.is_due
    assert not breaker.admits()
    patient.now = 2.0
    assert breaker.admits()
    assert breaker.state is HALF_OPEN
    assert not breaker.admits()
    breaker.succeeded(0.01)
    assert breaker.state is CLOSED
    assert breaker.admits()


def test_each_try_that_fails_doubles_the_time_until_the_next() -> None:
    """Up to a bound; after one that goes well it begins anew."""
    patient = Patient(retry_after=1.0, max_retry_after=5.0)
    breaker = patient.opened()
    waits = []
    for _ in range(5):
        waits.append(breaker.retry_at - patient.now)
        patient.now = breaker.retry_at
        assert breaker.admits()
        patient.fail()
        assert breaker.state is OPEN
    assert waits == [1, 2, 4, 5, 5]
    patient.now = breaker.retry_at
    assert breaker.admits()
    breaker.succeeded(0.01)
    patient.opened()
    assert breaker.retry_at - patient.now == 1


def test_what_is_open_is_not_opened_for_longer() -> None:
    """A crowd waits behind calls that hang, and each of them finds out for itself."""
    breaker = Patient().opened()
    retry_at = breaker.retry_at
    for count in range(5, 30):
        breaker.open(f"{count} calls hang")
    assert breaker.retry_at == retry_at
    assert breaker.reason == "29 calls hang"


def test_a_try_that_is_given_up_says_nothing() -> None:
    """The next one decides, at once."""
    patient = Patient()
    breaker = patient.opened()
    patient.now = breaker.retry_at
    assert breaker.admits()
    breaker.given_up()
    assert breaker.state is OPEN
    assert breaker.admits()
    breaker.succeeded(0.01)
    assert breaker.state is CLOSED


def test_a_call_that_is_given_up_leaves_it_as_it_is() -> None:
    """Whoever goes is not ill."""
    patient = Patient()
    patient.breaker.given_up()
    assert patient.breaker.state is CLOSED
    patient.fail()
    patient.breaker.given_up()
    assert patient.breaker.state is DEGRADED


def test_what_was_asked_before_it_opened_does_not_close_or_prolong_it() -> None:
    """Late answers come from another time."""
    patient = Patient()
    breaker = patient.opened()
    due = breaker.retry_at
    patient.now = 0.5
    breaker.succeeded(0.01)
    assert breaker.state is OPEN
    patient.fail()
    assert breaker.retry_at == due


def test_nothing_is_held_against_another_backend() -> None:
    """Connected again, it is well until it shows otherwise."""
    patient = Patient(retry_after=1.0)
    breaker = patient.opened()
    patient.now = breaker.retry_at
    breaker.admits()
    patient.fail()
    breaker.close()
    assert breaker.state is CLOSED
    assert breaker.reason == ""
    patient.opened()
    assert breaker.retry_at - patient.now == 1.0


# --- in a cache -----------------------------------------------------------------------------------


def health(r: Rig) -> StorageStats:
    return r.cache.storage.health()


def now() -> float:
    return asyncio.get_running_loop().time()


async def fails(r: Rig, count: int, tokens: Any = A) -> None:
    """So many prefetches that come to nothing."""
    for _ in range(count):
        assert await prefetched(r, tokens, policy="wait_complete") == 0


@on_virtual_clock
async def test_what_is_not_asked_costs_nothing() -> None:
    """After five errors no request asks it, and none waits, whatever it wants of storage."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        store.fault("contains", error=OSError("gone"), delay=0.3)
        await fails(r, 5)
        assert health(r).reads == "open"
        asked, began = len(store.calls), now()
        for at in range(20):
            assert await r.serve([*A, at]) == (32 if at else 0)
            assert await prefetched(r, seq("B", 16)) == 0
        assert now() == began
        assert len(store.calls) == asked
        assert r.counters.background_failures == 0


@on_virtual_clock
async def test_it_recovers_without_anybody_asking() -> None:
    """A question in the background finds out; the times between them are doubled, up to the
    bound."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        fault = store.fault("contains", error=OSError("gone"))
        await fails(r, 5)
        asked, began, times = store.num_calls["contains"], now(), []
        while now() < began + 200:
            await asyncio.sleep(0.5)
            if store.num_calls["contains"] > asked:
                asked += 1
                times.append(now() - began)
        due = (1, 3, 7, 15, 31, 61, 91, 121, 151, 181)
        assert times == [pytest.approx(at, abs=0.51) for at in due]
        store.faults.remove(fault)
        await asyncio.sleep(31)
        assert health(r).reads == "closed"
        assert await prefetched(r, A) == 32


@on_virtual_clock
async def test_writes_recover_by_a_backup() -> None:
    """Nobody's request waits for them: one is tried when it is time, and the others, which were
    left out and counted, come when they are next used."""
    prompts = [seq(name, 16) for name in "BCDEFGHIJ"]
    async with three_tiers() as (r, store):
        fault = store.fault("write", error=OSError("read-only"))
        for tokens in prompts[:5]:
            await r.serve(tokens)
            await r.cache.drain()
        assert health(r).writes == "open"
        assert health(r).reads == "closed"
        for tokens in prompts[5:]:
            await r.serve(tokens)
            await r.cache.drain()
        assert store.num_calls["write"] == 5, "nothing is asked"
        assert r.counters.backups_skipped == 4
        await asyncio.sleep(1.1)
        await r.serve([*prompts[0], 1])
        await r.cache.drain()
        assert health(r).writes == "open"
        assert store.num_calls["write"] == 6, "one was tried"
        store.faults.remove(fault)
        await asyncio.sleep(2.1)
        for tokens in prompts:
            await r.serve([*tokens, 1])
            await r.cache.drain()
        assert health(r).writes == "closed"
        assert all(store.has(tokens) == "SSSS" for tokens in prompts)


@on_virtual_clock
async def test_a_try_that_takes_too_long_decides_nothing() -> None:
    """Nobody waits with a limit for `clear`, so nobody has called it failed; the next call decides,
    instead of waiting for one that has ended."""
    async with three_tiers() as (r, store):
        writes = r.cache._controller.storage.writes  # type: ignore[union-attr]
        writes.open("no space")
        await asyncio.sleep(writes.retry_at - asyncio.get_running_loop().time())
        store.fault("clear", delay=100.0)
        await r.cache.storage.clear()
        assert writes.state is OPEN
        await r.serve(A)
        await r.cache.drain()
        assert store.has(A) == "S" * 8
        assert writes.state is CLOSED


@on_virtual_clock
async def test_reads_go_on_when_nothing_can_be_written() -> None:
    """A full disk is no reason not to read from it; and the other way round."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        store.fault("write", error=OSError("no space"))
        for name in "BCDEF":
            await r.serve(seq(name, 16))
            await r.cache.drain()
        assert (health(r).reads, health(r).writes) == ("closed", "open")
        assert await prefetched(r, A) == 32


@on_virtual_clock
async def test_a_batch_of_which_nothing_comes_is_a_failure() -> None:
    """A backend that answers that each single row has failed is as unwell as one that raises; one
    that has no room is not."""
    async with three_tiers() as (r, store):
        fault = store.fault("write", result=WriteResult.REFUSED)
        for name in "BCDEFG":
            await r.serve(seq(name, 16))
            await r.cache.drain()
        assert health(r).writes == "closed"
        fault.result = WriteResult.FAILED
        for name in "HIJKL":
            await r.serve(seq(name, 16))
            await r.cache.drain()
        assert health(r).writes == "open"
        assert "no object of a batch" in health(r).reason


@on_virtual_clock
async def test_slow_answers_are_seen() -> None:
    """Degraded, with the mean of what calls have taken; well again when they are fast."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        fault = store.fault("contains", delay=5.0)
        for _ in range(3):
            await prefetched(r, seq("B", 16), policy="wait_complete")
        assert health(r).reads == "degraded"
        assert health(r).read_latency_s > 1
        store.faults.remove(fault)
        for _ in range(12):
            await prefetched(r, seq("B", 16))
        assert health(r).reads == "closed"


@on_virtual_clock
async def test_a_long_queue_is_seen() -> None:
    """More wait for their turn than is good; all of them come to it."""
    gate = CallGate()
    async with three_tiers(storage={"max_concurrency": 2}) as (r, store):
        fault = store.fault("contains", gate=gate)
        prompts = [[*seq("A", 16, 1), at] for at in range(30)]
        waiting = [start(prefetched(r, tokens, policy="wait_complete")) for tokens in prompts]
        await gate.reached(2)
        await turns(20)
        assert health(r).calls_queued == 28
        assert health(r).reads == "degraded"
        gate.open()
        await asyncio.gather(*waiting)
        assert health(r).calls_queued == 0
        assert health(r).reads == "closed"
        assert fault.num_met == 30


@on_virtual_clock
async def test_calls_that_hang_are_replaced_four_times() -> None:
    """Each holds its turn for ever, and the next gets another; at the fifth storage is asked no
    more. When they have ended after all, it is as it was."""
    gate = CallGate()
    prompts = [seq(name, 16) for name in "BCDEF"]
    storage = {"max_concurrency": 1, "timeout": 1.0, "breaker": {"failures": 100}}
    async with three_tiers(rows=128, storage=storage) as (r, store):
        await keep(r, *prompts)
        store.fault("read", gate=gate, at="inside", stubborn=True)
        for count, tokens in enumerate(prompts, 1):
            began = now()
            assert await prefetched(r, tokens, policy="wait_complete") == 0
            assert now() - began == pytest.approx(1.0, abs=0.01)
            assert health(r).calls_hung == count
            assert health(r).reads == ("degraded" if count < 5 else "open")
        assert health(r).writes == "open"
        assert "5 calls hang" in health(r).reason
        assert gate.num_reached == 5
        held = [item for item in r.cache.outstanding() if item.kind == "quarantine"]
        assert sum(item.pages["full"] for item in held) == 20
        gate.open()
        await asyncio.sleep(40)
        assert health(r).calls_hung == 0
        assert health(r).reads == "closed"
        await r.cache.drain()
        assert r.cache.outstanding() == []
        # One turn again: two reads at once are one after the other.
        store.faults.clear()
        slow = store.fault("read", delay=0.3)
        began = now()
        both = [start(prefetched(r, tokens, policy="wait_complete")) for tokens in prompts[:2]]
        assert await asyncio.gather(*both) == [16, 16]
        assert now() - began == pytest.approx(0.6, abs=0.01)
        assert slow.num_met == 2


async def test_a_turn_that_was_never_taken_is_taken_back() -> None:
    """Who is late while he waits for his turn lets another in; when he goes without having had one,
    the next who ends makes up for it."""
    store, gate = Store(), CallGate()
    store.fault("contains", gate=gate)
    limited = Limited(store, 1, lambda num_waiting: None)
    calls = [start(limited.contains([ObjectKey(bytes(KEY_BYTES))])) for _ in range(5)]
    await turns()
    limited.replace(calls[2])
    await turns()
    assert gate.num_waiting == 2
    late = calls.pop(2)
    await cancelled(late)
    limited.hung_ended(late)
    gate.open()
    await asyncio.gather(*calls)
    store.faults.clear()
    gate = CallGate()
    store.fault("contains", gate=gate)
    calls = [start(limited.contains([ObjectKey(bytes(KEY_BYTES))])) for _ in range(3)]
    await turns()
    assert gate.num_waiting == 1
    gate.open()
    await asyncio.gather(*calls)


@on_virtual_clock
async def test_a_backend_that_is_slower_than_it_is_asked_has_no_queue() -> None:
    """Schedule 20261130014000: probes that nobody waited for any more stood in the queue, each was
    asked in its turn, later and later, and the next one stood behind them; so nothing ever ended,
    however often it answered in time.
    """
    storage = {"max_concurrency": 1, "timeout": 1.0}
    breaker = {"failures": 1, "retry_after": 0.5, "max_retry_after": 0.5}
    async with three_tiers(storage={**storage, "breaker": breaker}) as (r, store):
        slow = store.fault("contains", delay=7.0, stubborn=True)
        await fails(r, 1)
        await asyncio.sleep(1000)
        assert health(r).calls_queued <= 1
        assert health(r).calls_hung <= 5
        store.faults.remove(slow)
        async with asyncio.timeout(20):
            await r.cache.drain()
        await asyncio.sleep(20)
        assert health(r).reads == "closed"
        assert health(r).calls_hung == 0


async def test_what_is_late_in_the_queue_never_begins() -> None:
    """What has had its turn goes on, and has to be waited for."""
    store, gate = Store(), CallGate()
    store.fault("contains", gate=gate)
    limited = Limited(store, 1, lambda num_waiting: None)
    calls = [start(limited.contains([ObjectKey(bytes(KEY_BYTES))])) for _ in range(3)]
    await turns()
    assert [limited.withdraw(call) for call in calls] == [False, True, True]
    await turns()
    assert [call.cancelled() for call in calls] == [False, True, True]
    gate.open()
    await calls[0]
    assert store.num_calls["contains"] == 1


@pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_a_probe_that_is_due_at_once_is_made(new_loop: Any) -> None:
    """On any event loop: a request was to decide, and was given up."""

    async def main() -> None:
        gate = CallGate()
        storage = {"breaker": {"failures": 1, "retry_after": 0.02}}
        async with three_tiers(storage=storage) as (r, store):
            await keep(r, A)
            store.fault("contains", times=1, error=OSError("gone"))
            await fails(r, 1)
            reads = r.cache._controller.storage.reads  # type: ignore[union-attr]
            store.fault("contains", times=1, gate=gate)
            await gate.reached()
            assert reads.state is HALF_OPEN
            reads.given_up()
            await until(lambda: health(r).reads == "closed")
            gate.open()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


class Threaded(MemoryBackend):
    """Works in the cache's threads; those that read `held` stay there."""

    held = threading.Event()

    @classmethod
    async def open(cls, options: Any, context: Any) -> Any:
        made = cls()
        made.context = context  # type: ignore[attr-defined]
        return made

    async def contains(self, keys: Any) -> Any:
        return await self.context.run(lambda: [True] * len(keys))  # type: ignore[attr-defined]

    async def read(self, keys: Any, rows: Any, arrived: Any = None) -> Any:
        await self.context.run(self.held.wait)  # type: ignore[attr-defined]
        return await super().read(keys, rows)


async def test_threads_that_hang_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ones: four of four hang, and what comes next finds another."""
    monkeypatch.setattr(build, "load_backend", lambda name: Threaded)
    monkeypatch.setattr(Threaded, "held", threading.Event())
    storage = {"backend": "memory", "timeout": 0.1, "prefetch": {"threshold": 0}}
    async with rig(64, model=MODEL, host={"tokens": 256}, storage=storage) as r:
        r.at_exit(Threaded.held.set)
        waiting = [start(prefetched(r, seq(name, 16), policy="wait_complete")) for name in "BCDE"]
        assert await asyncio.gather(*waiting) == [0, 0, 0, 0]
        assert health(r).calls_hung == 4
        async with asyncio.timeout(5):
            assert await r.cache._controller.storage.io.contains(0, [bytes(32)]) == [True]  # type: ignore[union-attr]
        Threaded.held.set()
        await r.cache.drain()
        assert health(r).calls_hung == 0


# --- connecting -----------------------------------------------------------------------------------


class Refuses(MemoryBackend):
    """Cannot be reached the first `count` times."""

    count = 0
    num_tries = 0

    @classmethod
    async def open(cls, options: Any, context: Any) -> Any:
        cls.num_tries += 1
        if cls.num_tries <= cls.count:
            raise BackendError("nobody listens there")
        return cls()


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch) -> type[Refuses]:
    monkeypatch.setattr(Refuses, "num_tries", 0)
    monkeypatch.setattr(Refuses, "count", 0)
    return Refuses


@on_virtual_clock
async def test_it_connects_when_it_can(
    refuses: type[Refuses], caplog: pytest.LogCaptureFixture
) -> None:
    """Tried again, in times that are doubled; until then the cache goes on without, and from then
    on with it, whatever was held against it meanwhile."""
    refuses.count = 4
    caplog.set_level(logging.INFO, "tiered_cache")
    with opens(refuses):
        async with three_tiers(options={"storage_backend": None}) as (r, _):
            assert not health(r).is_connected
            assert "nobody listens there" in health(r).reason
            await r.serve(A)
            await fails(r, 10, seq("B", 16))
            tries = []
            await asyncio.sleep(0.5)
            while not health(r).is_connected:
                tries.append(refuses.num_tries)
                await asyncio.sleep(1.0)
            assert tries == [1, *[2] * 2, *[3] * 4, *[4] * 8]
            assert health(r).reads == "closed"
            await r.serve([*A, 1])
            await r.cache.drain()
            assert health(r).num_objects == 8
    assert "the cache goes on without: nobody listens there" in caplog.text
    assert "storage is there" in caplog.text


@pytest.mark.parametrize("error", [None, OSError("no such device"), asyncio.CancelledError()])
async def test_a_cache_that_needs_storage_does_not_open_without(
    refuses: type[Refuses], error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why, and leaves nothing: no task, no thread, no connection, also when it had
    connected and could not go on."""
    num_closed = 0

    async def register(backend: Refuses, view: memoryview) -> None:
        assert error is not None
        raise error

    async def close(backend: Refuses) -> None:
        nonlocal num_closed
        num_closed += 1

    refuses.count = 100 if error is None else 0
    if error is not None:
        monkeypatch.setattr(refuses, "register_memory", register)
    monkeypatch.setattr(refuses, "aclose", close)
    before = other_tasks()
    config = await asyncio.to_thread(
        settings, model=MODEL, host={"tokens": 64}, storage={"backend": "memory", "required": True}
    )
    with opens(refuses), pytest.raises(BackendError) as caught:
        await UnifiedRadixCache.open(config)
    reason = "nobody listens there" if error is None else f"raised {type(error).__name__}"
    assert reason in str(caught.value)
    assert num_closed == (error is not None)
    await turns()
    assert other_tasks() == before
    await until(lambda: not any(t.name.startswith("tiered-cache") for t in threading.enumerate()))


# --- seeing it ------------------------------------------------------------------------------------


class Watch:
    """An observer of storage's health."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_event(self, event: Event) -> None:
        if event.kind is EventKind.HEALTH:
            self.lines.append(event.detail)


@on_virtual_clock
async def test_who_looks_on_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Observers, the log and the snapshot agree, change by change; only what people must know is a
    warning."""
    watch = Watch()
    caplog.set_level(logging.INFO, "tiered_cache")
    async with three_tiers(options={"observers": [watch]}) as (r, store):
        await keep(r, A)
        store.fault("contains", error=OSError("gone"), times=6)
        await fails(r, 5)
        assert health(r).reads == "open"
        assert health(r).reason == "the backend raised OSError"
        assert health(r) == r.stats.storage
        assert "reads open" in repr(r.cache.storage)
        await asyncio.sleep(4)
        assert health(r).reads == "closed"
    assert watch.lines == [
        "storage reads: closed -> degraded: the backend raised OSError",
        "storage reads: degraded -> open: the backend raised OSError",
        "storage reads: open -> half-open: the backend raised OSError",
        "storage reads: half-open -> open: the backend raised OSError",
        "storage reads: open -> half-open: the backend raised OSError",
        "storage reads: half-open -> closed",
    ]
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [line for _, line in told if line.startswith("storage reads")] == watch.lines
    assert [level for level, line in told if "-> open" in line] == ["WARNING"] * 2
    assert [line for level, line in told if level == "WARNING" and "-> open" not in line] == []


SECRET: Final = "hunter2"
ADDRESS: Final = f"redis://alice:{SECRET}@keep.example:6379"


@pytest.mark.parametrize("op", ["open", "contains", "read", "write", "delete", "clear", "aclose"])
async def test_no_secret_is_shown(
    op: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever raises an error whose text holds a password: logs, events, snapshots, reasons and
    our own errors do not have it."""
    watch, shown = Watch(), []
    caplog.set_level(logging.DEBUG)
    store = Store()
    storage = {
        "backend": "memory",
        "prefetch": {"threshold": 0},
        "breaker": {"failures": 1, "retry_after": 0.01},
    }
    options = {"observers": [watch]}
    with opens(store.opened_as()):
        async with rig(
            64, options=options, model=MODEL, host={"tokens": 256}, storage=storage
        ) as r:
            await r.serve(A)
            await r.cache.drain()
            store.fault(op, error=ConnectionError(f"cannot reach {ADDRESS}"))
            if op == "open":
                await r.cache.storage.detach()
                await r.cache.storage.attach(r.config)
            if op == "delete":
                r.cache._controller.storage.io.suspect(0, store.pages_of(seq("B", 32)))  # type: ignore[union-attr]
            wipe(r)
            with r.cache.prefetch(A) as handle:
                await handle.wait()
                shown += [handle.why, repr(handle), repr(r.cache.outstanding())]
            async with r.cache.lease([*A, 1]) as lease:
                shown += [lease.why, repr(lease)]
            await r.serve(seq("B", 32))
            await r.cache.drain()
            try:
                shown.append(str(await r.cache.storage.clear()))
            except BackendError as error:
                shown += [str(error), repr(error)]
            shown += [repr(r.stats), repr(health(r)), repr(r.cache.storage), repr(r.config)]
            shown.append(r.cache.explain([*A, 1]))
    shown += [*watch.lines, caplog.text]
    assert any("ConnectionError" in text for text in shown), "it was met"
    assert not [text for text in shown if SECRET in text]
