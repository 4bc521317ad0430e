"""How late the event loop is, with and without transfers, alone and beside a model.

A thread sends the loop an event every 2 ms, as a socket would, and the loop notes how much later it
comes to it. (Not timers: asyncio rounds what is left of one up to a millisecond whenever the loop
is woken in between, so a busy loop is late by half of that without anybody's doing.) Beside the
loop there is nothing; or a language model computes in the run thread, on all cores, as torch does
by itself; or it does so on one core, which leaves the loop another. In each case phases alone and
with transfers both ways without a pause take turns, and again with a third tier on files, where all
that is moved goes down to it and comes back. What counts is the difference between the two phases
of a turn, or their ratio where a model on all cores makes the loop late by itself: this machine's
own lateness is in both.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from benchmarks.measure import Row
from tiered_cache import EvictParams, InsertParams, RadixKey, UnifiedRadixCache, load_config
from tiered_cache.testing.chat_models import MissingModelError, load_smollm2
from tiered_cache.testing.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tiered_cache.config import Config

PERIOD_S: Final = 0.002
PHASE_S: Final = 4.0
PAGE_SIZE: Final = 16
NUM_PAGES: Final = 256
"""Pages of a prefix that goes to the host and back: 94 MB of a model of 135M parameters."""

MODEL_TOKENS: Final = 128
"""What the model computes at a time, as a chunk of a prompt."""

ONE_CORE: Final = "model on one core"


def run(repeat: int = 5, *, quick: bool = False) -> list[Row]:
    """Lines of all phases, with two tiers and with three, and what transfers add to them."""
    seconds = 0.4 if quick else PHASE_S
    model, cores = _model(quick=quick), torch.get_num_threads()
    rows = []
    for name, compute in (("idle", None), ("model", model), (ONE_CORE, model)):
        if name == ONE_CORE:  # last: torch's threads for all cores are gone after that
            torch.set_num_threads(1)
        for what, work in (("transfers", _Transfers), ("all tiers", _AllTiers)):
            with tempfile.TemporaryDirectory() as folder:
                rounds = []
                for number in range(repeat):
                    place = Path(folder) / str(number) if work is _AllTiers else None
                    rounds.append(asyncio.run(_round(compute, seconds, work, _config(place))))
            alone, moving = zip(*rounds, strict=True)
            if work is _Transfers:
                rows.append(_row(name, alone))
            rows.append(_row(f"{name}, {what}" if compute else what, moving, alone))
    torch.set_num_threads(cores)
    return rows


def _row(line: str, found: Sequence[Phase], alone: Sequence[Phase] = ()) -> Row:
    """Medians over the rounds; `alone` are the same phases without transfers."""
    figures = {
        "p50_ms": median(phase.p50_ms for phase in found),
        "p99_ms": median(phase.p99_ms for phase in found),
        "max_ms": max(phase.max_ms for phase in found),
        "moved_gb_per_s": median(phase.gb_per_s for phase in found),
    }
    if alone:
        pairs = [(mine.p99_ms, its.p99_ms) for mine, its in zip(found, alone, strict=True)]
        figures["added_p99_ms"] = median(mine - its for mine, its in pairs)
        figures["alone_x"] = median(mine / its for mine, its in pairs)
    return Row("lateness", line, figures)


class Phase:
    """What one phase has shown."""

    def __init__(self, late_s: list[float], num_bytes: int, seconds: float) -> None:
        self.p50_ms, self.p99_ms, self.max_ms = (
            float(np.percentile(late_s, share)) * 1e3 for share in (50, 99, 100)
        )
        self.gb_per_s = num_bytes / seconds / 1e9


async def _round(
    compute: Callable[[], object] | None, seconds: float, kind: type[_Transfers], config: Config
) -> list[Phase]:
    """Alone, and with transfers."""
    found = []
    async with UnifiedRadixCache.open(config) as cache:
        work = kind(cache)
        await work.begin()
        for is_moving in (False, True):
            gc.collect()
            async with (
                _beside(work.run if is_moving else None),
                _beside(partial(_compute, cache, compute) if compute else None),
            ):
                before, start_s = work.num_bytes, perf_counter()
                late_s = await _probe(seconds)
                moved, took_s = work.num_bytes - before, perf_counter() - start_s
            found.append(Phase(late_s, moved, took_s))
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
