"""A device that computes on after a run has returned: what is launched is done later, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_cache import Chunk, RadixKey, UnifiedRadixCache
from tiered_cache.testing.oracle import ByteOracle, OracleModel


class Tables:
    """Where a run's tokens and states stood when it began: a kernel looks once."""

    def __init__(self, chunk: Chunk, page_size: int) -> None:
        lease = chunk.lease
        components = lease._controller.tree.components
        num_pages = lease.table.num_pages
        self._ids = {
            str(component.id): ids[:num_pages].astype(np.int64)
            for component, ids in zip(components, lease.table.ids, strict=True)
        }
        self._page_size = page_size
        self.state_slots = dict(chunk.state_slots)

    def slots(
        self, component: str = "full", start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        size = self._page_size
        slots = (self._ids[component][:, None] * size + np.arange(size)).ravel()
        wanted = slots[start:stop]
        assert (wanted >= 0).all(), f"{component} lacks some of [{start}, {stop})"
        return wanted

    def pages(self, component: str, start: int, stop: int) -> set[int]:
        return set((self.slots(component, start, stop) // self._page_size).tolist())


class Launched:
    """A run over one chunk that is on the device: `ready` is for its commit."""

    def __init__(self, chunk: Chunk, loop: asyncio.AbstractEventLoop) -> None:
        self.chunk = chunk
        self.ready: asyncio.Future[None] = loop.create_future()
        self.is_done = False
        self.unwritten: dict[str, set[int]] = {}


class Device:
    """One stream. A model to give to `run`: `await lease.run(device, chunk)`; it reads and writes
    when somebody lets it (`step`), and so do the copies of states that belong before it."""

    def __init__(self, cache: UnifiedRadixCache, oracle: ByteOracle) -> None:
        self._cache = cache
        self._loop = asyncio.get_running_loop()
        self._oracle = oracle
        self._work: deque[tuple[Launched | None, Callable[[], None]]] = deque()
        self.launched: list[Launched] = []
        self.faults: list[str] = []
        cache._controller.fences.computes_on = True  # as on CUDA
        runs: Any = cache._controller.runs
        self._copy_states = runs._copy_states
        runs._copy_states = self._copy_later

    def _copy_later(self, copies: Any) -> None:
        self._work.append((None, partial(self._copy_states, copies)))

    def __call__(self, chunk: Chunk) -> int:
        self.launch(chunk)
        return chunk.stop

    def launch(self, chunk: Chunk) -> Launched:
        """Put it on the stream."""
        lease, size = chunk.lease, self._cache.page_size
        launched, tables = Launched(chunk, self._loop), Tables(chunk, size)
        key = RadixKey(lease.tokens.copy(), cache_salt=lease.key.namespace.cache_salt)
        for component in self._cache.tree.components:
            name = str(component.id)
            if component.is_per_page:
                launched.unwritten[name] = tables.pages(name, chunk.start, chunk.stop)
            else:
                launched.unwritten[name] = {tables.state_slots[name]}
        work = partial(self._compute, chunk, tables, key)
        self._work.append((launched, work))
        self.launched.append(launched)
        return launched

    def _compute(self, chunk: Chunk, tables: Tables, key: RadixKey) -> None:
        try:
            self._oracle.verify(tables, key, 0, chunk.start)
            self._oracle.write(tables, key, chunk.start, chunk.stop)
        except BaseException as error:
            self.faults.append(f"{chunk!r}: {error!r}")
            raise

    def forget(self, launched: Launched) -> None:
        """It came to nothing before it began, and so does what was to be copied for it."""
        kept: deque[tuple[Launched | None, Callable[[], None]]] = deque()
        before: list[tuple[Launched | None, Callable[[], None]]] = []
        for item in self._work:
            before.append(item)
            if item[0] is not None:
                if item[0] is not launched:
                    kept.extend(before)
                before = []
        self._work = deque([*kept, *before])

    def step(self, count: int = 1) -> None:
        """Do so many of the launched runs, the oldest first, with what is before them."""
        for _ in range(count):
            launched = None
            while launched is None:
                launched, work = self._work.popleft()
                work()
            launched.is_done = True

    def finish(self, launched: Launched | None = None) -> None:
        """Do all of it, or all up to one of them."""
        while self._work and not (launched is not None and launched.is_done):
            done, work = self._work.popleft()
            work()
            if done is not None:
                done.is_done = True

    def end(self) -> None:
        """Nothing is done any more, and nobody waits for it."""
        self._work.clear()
        for launched in self.launched:
            if not launched.ready.done():
                launched.ready.set_result(None)

    @property
    def unwritten(self) -> dict[str, set[int]]:
        """Per component, ids that are not written yet."""
        found: dict[str, set[int]] = {}
        for launched, _ in self._work:
            if launched is not None:
                for name, ids in launched.unwritten.items():
                    found.setdefault(name, set()).update(ids)
        return found

    def __len__(self) -> int:
        return sum(launched is not None for launched, _ in self._work)


class Synchronised(OracleModel):
    """A model on the same stream that waits for it."""

    def __init__(self, device: Device, oracle: ByteOracle) -> None:
        super().__init__(oracle)
        self._device = device

    def __call__(self, *chunks: Chunk | list[Chunk]) -> list[int]:
        self._device.finish()
        return super().__call__(*chunks)
