"""A few real pages moved between small parts of the real kinds, and how long that takes.

Owns: what is moved, the clock, and that nothing of it stays behind. Refuses to know: what the
figures mean.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import torch

from tiered_cache.build import Parts, Sizing, build
from tiered_cache.cli._stored import Plan, Stored, open_stored
from tiered_cache.config import Config, DeviceConfig, HostConfig
from tiered_cache.errors import BackendError
from tiered_cache.jobs import DaemonExecutor
from tiered_cache.storage import ReadResult, WriteResult
from tiered_cache.storage.record import Arrivals, RecordFormat, fingerprint
from tiered_cache.storage_io import ThreadContext
from tiered_cache.transfer.copier import Direction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from tiered_cache.storage import BackendStats, ObjectKey
    from tiered_cache.types import PageIds

T = TypeVar("T")

PROBE_BYTES: Final = 32 << 20
"""Of rows: enough that a call's own cost no longer counts, little enough for a look in between."""
MAX_PAGES: Final = 1_024

BATCH_BYTES: Final = 8 << 20
"""Of one call of the backend."""
CALLS_AT_A_TIME: Final = 4

REPEAT: Final = 5
"""Figures are medians of so many."""

POISON: Final = 0xEE
"""What rows are filled with before they are read: bytes that do not arrive are seen."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one way. `one_page_s`: for a single page of each component; the rest of many at once."""

    one_page_s: float
    bytes_per_s: float
    s_per_token: float


@dataclass(slots=True)
class Measured:
    """`ask_s`: what it takes to learn that storage has not a page. `stats`: of the storage, before
    anything was written. `ailments`: what went wrong and what to do about it."""

    num_pages: int
    store: Speed | None = None
    load: Speed | None = None
    stats: BackendStats | None = None
    ask_s: float | None = None
    write: Speed | None = None
    read: Speed | None = None
    ailments: list[str] = field(default_factory=list)


def small_parts(config: Config, sizing: Sizing) -> Parts:
    """The configuration's own kinds of parts, as large as the probe needs, and not larger than the
    tiers themselves.

    Raises:
        ConfigError: the device is not there, or the memory for the probe.
    """
    row_bytes = sum(sizing.row_layout(part.id).stride for part in sizing.stack.components)
    most = [MAX_PAGES, PROBE_BYTES // row_bytes]
    for pages in (sizing.num_pages, sizing.host_pages):
        most += [] if pages is None else pages.values()
    tokens = max(1, min(most)) * config.page_size
    ratio = {str(part.id): 1.0 for part in sizing.stack.components[1:]}
    changes = {
        "mode": "on",
        "device": DeviceConfig(type=config.device.type, tokens=tokens, ratio=ratio),
        "host": HostConfig(tokens=tokens, ratio=ratio),
        "storage": None,
    }
    return build(config.model_copy(update=changes))


async def measure(parts: Parts, plan: Plan | None) -> Measured:
    """All figures of a configuration's tiers; storage's when there is a plan for it."""
    executor = DaemonExecutor("doctor", 1)
    threads = ThreadContext(executor, 1)
    assert parts.host is not None, "made with one"
    try:
        for touch in parts.host.touch:
            await threads.run(touch)
        await threads.run(_fill, parts)
        num_pages = min(arena.num_pages for arena in parts.arenas)
        measured = Measured(num_pages)
        measured.store = await _copy(parts, threads, Direction.STORE, num_pages)
        measured.load = await _copy(parts, threads, Direction.LOAD, num_pages)
        if plan is not None:
            await _measure_storage(plan, parts, measured)
        return measured
    finally:
        parts.host.close()
        executor.shutdown(wait=False)


def _fill(parts: Parts) -> None:
    """Bytes that no file system and no wire can make fewer."""
    for spec in parts.pools.specs:
        for layer in spec.layers:
            parts.pools.layer(spec.name, layer).view(torch.uint8).random_(0, 256)


# --- Device and host ------------------------------------------------------------------------------


async def _copy(
    parts: Parts, threads: ThreadContext, direction: Direction, num_pages: int
) -> Speed:
    # In no order, as ids are after hours of service.
    chance = np.random.default_rng(0)
    device_ids, host_ids = (chance.permutation(num_pages).astype(np.int32) for _ in range(2))

    async def once(count: int) -> float:
        began = time.perf_counter()
        await _copy_pages(parts, threads, direction, device_ids[:count], host_ids[:count])
        return time.perf_counter() - began

    await once(num_pages)  # the first touch of memory is not what is asked
    one = median([await once(1) for _ in range(REPEAT)])
    all_s = median([await once(num_pages) for _ in range(REPEAT)])
    page_bytes = sum(arena.layout.payload_bytes for arena in parts.arenas)
    return _speed(one, all_s, num_pages, page_bytes, parts.page_size)


async def _copy_pages(
    parts: Parts,
    threads: ThreadContext,
    direction: Direction,
    device_ids: PageIds,
    host_ids: PageIds,
) -> None:
    assert parts.host is not None, "made with one"
    copier = parts.host.copier
    for component in range(len(parts.arenas)):
        for job in copier.plan(direction, component, device_ids, host_ids):
            await threads.run(copier.copy, job)


def _speed(one_s: float, all_s: float, num_pages: int, page_bytes: int, page_size: int) -> Speed:
    all_s = max(all_s, 1e-9)
    return Speed(one_s, num_pages * page_bytes / all_s, all_s / (num_pages * page_size))


# --- Storage --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one component, sealed for a scope that no cache has, under keys that nobody
    has."""

    record: RecordFormat
    rows: list[memoryview]
    page_keys: list[bytes]

    @property
    def keys(self) -> list[ObjectKey]:
        return [self.record.object_key(key) for key in self.page_keys]

    def seal(self) -> None:
        for row, key in zip(self.rows, self.page_keys, strict=True):
            self.record.seal(row, key)

    def poison(self) -> None:
        for row in self.rows:
            np.frombuffer(row, np.uint8).fill(POISON)

    def batches(self) -> list[slice]:
        step = max(1, BATCH_BYTES // self.record.row_bytes)
        return [slice(start, start + step) for start in range(0, len(self.rows), step)]


async def _measure_storage(plan: Plan, parts: Parts, measured: Measured) -> None:
    sets = [
        _Rows(
            _throw_away(record),
            [arena.row(page) for page in range(measured.num_pages)],
            [secrets.token_bytes(32) for _ in range(measured.num_pages)],
        )
        for record, arena in zip(plan.parts.formats, parts.arenas, strict=True)
    ]
    try:
        async with open_stored(plan, needs_scan=False) as stored:
            measured.stats = stored.backend.stats()
            for arena in parts.arenas:
                await stored.ask(stored.backend.register_memory(arena.rows.data.cast("B")))
            async with _removed_afterwards(stored, sets, measured):
                await _write(stored, sets, measured, parts.page_size)
                if not measured.ailments:
                    await _read(stored, sets, measured, parts.page_size)
    except BackendError as error:
        measured.ailments.append(
            f"{error}: see that storage is up, and that storage.options lead to it"
        )


def _throw_away(record: RecordFormat) -> RecordFormat:
    """A scope that no cache has; always the same one, for backends that keep a place for each."""
    identity = fingerprint({"doctor": record.identity.hex()})
    return RecordFormat(record.component, identity, record.row_bytes, record.payload_end)


@asynccontextmanager
async def _removed_afterwards(
    stored: Stored, sets: Sequence[_Rows], measured: Measured
) -> AsyncIterator[None]:
    """Whatever happens in the block, an interrupt by the user included."""
    keys = [key for rows in sets for key in rows.keys]
    try:
        yield
    finally:
        await stored.ask(stored.backend.delete(keys))
    if any(await stored.ask(stored.backend.contains(keys))):
        measured.ailments.append(
            "storage still has what was deleted: run `tiered-cache storage gc`, and verify"
        )


async def _write(stored: Stored, sets: Sequence[_Rows], measured: Measured, page_size: int) -> None:
    backend = stored.backend
    for rows in sets:
        await stored.threads.run(rows.seal)
    asked = []
    for _ in range(REPEAT):
        _, took_s = await _timed(stored.ask(backend.contains([sets[0].keys[0]])))
        asked.append(took_s)
    measured.ask_s = median(asked)
    answers: list[WriteResult] = []

    async def write(rows: _Rows, part: slice) -> None:
        answers.extend(await stored.ask(backend.write(rows.keys[part], rows.rows[part])))

    one_s = 0.0
    for rows in sets:
        one_s += (await _timed(write(rows, slice(0, 1))))[1]
        await stored.ask(backend.delete(rows.keys[:1]))
    answers.clear()
    _, all_s = await _timed(_batches(write, sets, stored))
    if refused := answers.count(WriteResult.REFUSED):
        measured.ailments.append(
            f"storage has no room for {refused} of {len(answers)} rows: allow it more, or make "
            "room with `tiered-cache storage gc`"
        )
    if failed := answers.count(WriteResult.FAILED):
        measured.ailments.append(
            f"{failed} of {len(answers)} rows could not be written: see the storage's own log"
        )
    row_bytes = sum(rows.record.row_bytes for rows in sets)
    measured.write = _speed(one_s, all_s, measured.num_pages, row_bytes, page_size)


async def _read(stored: Stored, sets: Sequence[_Rows], measured: Measured, page_size: int) -> None:
    verdicts: list[str | None] = []

    async def read(rows: _Rows, part: slice) -> None:
        arrivals = Arrivals(rows.record, rows.rows[part], rows.page_keys[part])
        reading = stored.backend.read(rows.keys[part], rows.rows[part], arrivals.arrived)
        results = await stored.ask(reading)
        there = [at for at, result in enumerate(results) if result is ReadResult.READ]
        verdicts.extend(await stored.threads.run(arrivals.verdicts, there))
        verdicts.extend(f"is {r.value}" for r in results if r is not ReadResult.READ)

    ones, alls = [], []
    for _ in range(REPEAT):
        for rows in sets:
            await stored.threads.run(rows.poison)
        one_s = 0.0
        for rows in sets:
            one_s += (await _timed(read(rows, slice(0, 1))))[1]
        ones.append(one_s)
        alls.append((await _timed(_batches(read, sets, stored)))[1])
    if wrong := [verdict for verdict in verdicts if verdict is not None]:
        measured.ailments.append(
            f"{len(wrong)} of {len(verdicts)} rows came back wrong (the first {wrong[0]}): run "
            "`tiered-cache storage verify`, and suspect memory, disk or network"
        )
    row_bytes = sum(rows.record.row_bytes for rows in sets)
    measured.read = _speed(median(ones), median(alls), measured.num_pages, row_bytes, page_size)


async def _timed(call: Awaitable[T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = await call
    return result, time.perf_counter() - began


async def _batches(
    move: Callable[[_Rows, slice], Awaitable[None]], sets: Iterable[_Rows], stored: Stored
) -> None:
    """All rows, a few batches at a time; all calls have ended when this does."""
    turns = asyncio.Semaphore(min(CALLS_AT_A_TIME, stored.settings.max_concurrency))

    async def in_turn(rows: _Rows, part: slice) -> None:
        async with turns:
            await move(rows, part)

    batches = [in_turn(rows, part) for rows in sets for part in rows.batches()]
    results = await asyncio.gather(*batches, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
