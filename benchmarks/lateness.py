"""How late the event loop is, with and without transfers, alone and beside a model.

A thread sends the loop an event every 2 ms, as a socket would, and the loop notes how much later it
comes to it. (Not timers: asyncio rounds what is left of one up to a millisecond whenever the loop
is woken in between, so a busy loop is late by half of that without anybody's doing.) Four phases
take turns: nothing; transfers both ways without a pause; a language model computing in the run
thread; both. And again with a third tier on files, where all that is moved goes down to it and
comes back. What counts is the difference to the same phase without transfers, within one round:
this machine's own lateness is in both.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from benchmarks.copies import one_torch_thread
from benchmarks.measure import Row
from tiered_cache import EvictParams, InsertParams, RadixKey, UnifiedRadixCache, load_config
from tiered_cache.testing.chat_models import MissingModelError, load_smollm2
from tiered_cache.testing.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tiered_cache.config import Config

PERIOD_S: Final = 0.002
PHASE_S: Final = 3.0
PAGE_SIZE: Final = 16
NUM_PAGES: Final = 256
"""Pages of a prefix that goes to the host and back: 94 MB of a model of 135M parameters."""

MODEL_TOKENS: Final = 128
"""What the model computes at a time, as a chunk of a prompt."""


def run(repeat: int = 5, *, quick: bool = False) -> list[Row]:
    """Lines of all phases, with two tiers and with three, and the differences."""
    seconds = 0.4 if quick else PHASE_S
    with one_torch_thread(), torch.inference_mode():
        model = _model(quick=quick)
        rows = []
        for what, work in (("transfers", _Transfers), ("all tiers", _AllTiers)):
            with tempfile.TemporaryDirectory() as folder:
                rounds = []
                for number in range(repeat):
                    place = Path(folder) / str(number) if work is _AllTiers else None
                    rounds.append(asyncio.run(_round(model, seconds, work, _config(place))))
            rows += _rows(what, rounds)
    return rows


def _rows(what: str, rounds: list[dict[str, Phase]]) -> list[Row]:
    """`what`: the name of what is moved."""
    rows = [
        Row(
            "lateness",
            phase.replace("moving", what),
            {
                "p50_ms": median(found[phase].p50_ms for found in rounds),
                "p99_ms": median(found[phase].p99_ms for found in rounds),
                "max_ms": max(found[phase].max_ms for found in rounds),
                "moved_gb_per_s": median(found[phase].gb_per_s for found in rounds),
            },
        )
        for phase in PHASES
    ]
    for phase, alone in (("moving", "idle"), ("model, moving", "model")):
        added = [found[phase].p99_ms - found[alone].p99_ms for found in rounds]
        rows[PHASES.index(phase)].figures["added_p99_ms"] = median(added)
    return rows if what == "transfers" else [row for row in rows if what in row.line]


PHASES: Final = ("idle", "moving", "model", "model, moving")


class Phase:
    """What one phase has shown."""

    def __init__(self, late_s: list[float], num_bytes: int, seconds: float) -> None:
        self.p50_ms, self.p99_ms, self.max_ms = (
            float(np.percentile(late_s, share)) * 1e3 for share in (50, 99, 100)
        )
        self.gb_per_s = num_bytes / seconds / 1e9


async def _round(
    model: Callable[[], object], seconds: float, kind: type[_Transfers], config: Config
) -> dict[str, Phase]:
    found = {}
    async with UnifiedRadixCache.open(config) as cache:
        work = kind(cache)
        await work.begin()
        for phase in PHASES:
            gc.collect()
            async with (
                _beside(work.run if "moving" in phase else None),
                _beside((lambda: _compute(cache, model)) if "model" in phase else None),
            ):
                before, start_s = work.num_bytes, perf_counter()
                late_s = await _probe(seconds)
                moved, took_s = work.num_bytes - before, perf_counter() - start_s
            found[phase] = Phase(late_s, moved, took_s)
            await cache.drain()
    return found


async def _probe(seconds: float) -> list[float]:
    """How late the loop came to each event that a thread has sent it."""
    loop, late_s, stop = asyncio.get_running_loop(), list[float](), threading.Event()

    def note(sent_s: float) -> None:
        late_s.append(perf_counter() - sent_s)

    def send() -> None:
        while not stop.wait(PERIOD_S):
            loop.call_soon_threadsafe(note, perf_counter())

    sender = threading.Thread(target=send)
    sender.start()
    try:
        await asyncio.sleep(seconds)
    finally:
        stop.set()
        sender.join()
    return late_s


@asynccontextmanager
async def _beside(work: Callable[[], Any] | None) -> AsyncIterator[None]:
    """Something that goes on until the block ends."""
    if work is None:
        yield
        return
    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _compute(cache: UnifiedRadixCache, model: Callable[[], object]) -> None:
    while True:
        await cache.run([], model)


class _Transfers:
    """Prefixes that are published, stored, demoted and loaded again, one after the other."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self._keys: list[RadixKey] = []
        self._page_bytes = cache.pools.page_bytes(cache.tree.components[0].id)

    @property
    def num_bytes(self) -> int:
        counters = self._cache.stats().counters
        return (counters.pages_loaded + counters.pages_stored) * self._page_bytes

    async def begin(self) -> None:
        """Have memory touched and something on the host."""
        for _ in range(4):
            await self._publish()
        await self._cache.drain()

    async def run(self) -> None:
        while True:
            await self._publish()  # is copied to the host in the background
            for key in self._keys[-4:-1]:
                await self._cache.evict(EvictParams(num_tokens=2 * NUM_PAGES * PAGE_SIZE))
                await self._cache.load_back(key)

    async def _publish(self) -> None:
        start = len(self._keys) * NUM_PAGES * PAGE_SIZE
        key = RadixKey(np.arange(start, start + NUM_PAGES * PAGE_SIZE))
        await self._cache.evict(EvictParams(num_tokens=NUM_PAGES * PAGE_SIZE))
        self._cache.insert(InsertParams(key, tuple(self._cache.allocate(NUM_PAGES))))
        self._keys.append(key)


class _AllTiers(_Transfers):
    """The same, down to storage and back."""

    @property
    def num_bytes(self) -> int:
        counters = self._cache.stats().counters
        pages = counters.pages_backed_up + counters.pages_prefetched
        return super().num_bytes + pages * self._page_bytes

    async def run(self) -> None:
        while True:
            due = self._num_backed_up + NUM_PAGES
            await self._publish()
            while self._num_backed_up < due:  # noqa: ASYNC110 - `drain` waits for the model, too
                await asyncio.sleep(PERIOD_S)
            everything = EvictParams(num_tokens=8 * NUM_PAGES * PAGE_SIZE)
            await self._cache.evict(everything)
            await self._cache.evict_host(everything)
            for key in self._keys[-3:]:
                with self._cache.prefetch(key) as handle:
                    await handle.wait("wait_complete")
                    await self._cache.evict(EvictParams(num_tokens=2 * NUM_PAGES * PAGE_SIZE))
                    await self._cache.load_back(key)

    @property
    def _num_backed_up(self) -> int:
        return self._cache.stats().counters.pages_backed_up


def _model(*, quick: bool) -> Callable[[], object]:
    """A real one where it is installed, else a tiny one with random weights."""
    model: Any = None
    if not quick:
        with suppress(MissingModelError):
            model = load_smollm2().model
    if model is None:
        model = tiny_model("llama")
    tokens = torch.arange(MODEL_TOKENS)[None] % 256

    def compute() -> object:
        with torch.inference_mode():
            return model(tokens, use_cache=False)

    return compute


def _config(folder: Path | None) -> Config:
    """Of two tiers, or of three with files in a folder."""
    shape = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64}
    settings: dict[str, Any] = {
        "model": {"id": "bench", "revision": "1", "dtype": "bfloat16", **shape},
        "page_size": PAGE_SIZE,
        "device": {"tokens": 3 * NUM_PAGES * PAGE_SIZE},
        "host": {"tokens": 8 * NUM_PAGES * PAGE_SIZE},
    }
    if folder is not None:
        options = {"path": str(folder), "max_size": 2 << 30}
        settings["storage"] = {"backend": "file", "options": options}
    return load_config(settings)
