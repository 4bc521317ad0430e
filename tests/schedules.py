"""Schedules of a cache of two or three tiers: requests that share prefixes, on a deterministic
loop.

A schedule follows from its seed alone: the cache's shape, who comes when, what they do, which
copies fail, hang or are late, when somebody resets, and in which order all of that happens. To see
one again, step by step: `python -m tests.schedules SEED`. What a third tier adds, and what is
proved of it, is in `schedule_storage`; what windows and states add, in `schedule_stacks`.

What is proved on the way:

* a model reads the right bytes, layer by layer where the load is layer-wise (`ByteOracle`);
* whatever is freed is overwritten at once, and whatever is taken must not have been written to
  since (`Guarded`): nobody reads or writes a page that is not his;
* the library's own checker and the bytes of both tiers, every few steps and at every quiet moment;
* what the tree has was published, and while nothing was dropped, all that was published is found;
* in the end nothing is held, locked, in flight or waiting.

`Played.met` says what a schedule has met; `test_schedules.py` has the floors.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final
from unittest import mock

import numpy as np
import numpy.typing as npt

from tests import schedule_stacks, storage_helpers
from tests.device_helpers import Device, Synchronised
from tests.lease_helpers import MODEL, settings
from tests.schedule_stacks import Rule, StackShape
from tests.schedule_storage import StorageShape, ThirdTier
from tiered_cache import (
    AdmissionTimeout,
    CacheRequest,
    CapacityError,
    Chunk,
    ClosedError,
    Lease,
    LoadFailed,
    MatchPrefixParams,
    RadixKey,
    StaleError,
    UnifiedRadixCache,
    build,
)
from tiered_cache.config import schema
from tiered_cache.layers import NO_LOADS
from tiered_cache.observe import Event, EventKind
from tiered_cache.page_table import PageTable
from tiered_cache.pools.allocator import PageAllocator
from tiered_cache.testing.awaits import assert_nothing_left
from tiered_cache.testing.loop import HANG, DeterministicLoop, SeededExecutor, SeededJob
from tiered_cache.testing.oracle import ByteOracle, OracleModel, path_tokens
from tiered_cache.transfer import copier
from tiered_cache.transfer.copier import Direction
from tiered_cache.transfer.cpu import CpuCopier
from tiered_cache.tree.node import BASE
from tiered_cache.types import EvictParams, PageIds, Tier
from tiered_cache.write_policies import Turn, WriteBack, WriteThrough

LAYERS: Final = (0, 1)

TOKEN_STATE_BYTES: Final = 32
"""Of `lease_helpers.MODEL`: two layers, keys and values, 8 bytes of each."""

WRITE_POLICIES: Final = ("write_through", "write_through_selective", "write_back")

MAX_SECONDS: Final = 4_000
"""Of virtual time; more is taken for a schedule in which somebody waits for what nobody does."""

STACK_SHARE: Final = 1 / 3
"""Of the schedules without storage: so many have windows or states."""

THIRD_TIER_SHARE: Final = 1 / 2
"""Of those: so many have storage after all."""

MAX_STEPS: Final = 60
"""More steps of one request are taken for one that never ends."""


class ModelError(Exception):
    """What a failing run raises."""


class CopyError(Exception):
    """What a failing copy raises."""


class DeviceError(Exception):
    """What the `ready` of a commit raises."""


@dataclass(frozen=True)
class Shape:
    """What does not change within a schedule."""

    write_policy: str
    device_pages: int
    host_pages: int
    eviction_policy: str
    threshold: int
    run_threads: int
    copy_threads: int
    job_pages: int
    """A job moves at most so many pages, so that a load is several jobs and may arrive in part."""
    raising: float
    """Share of the copies that fail; `hanging`: that end late or very late."""
    hanging: float
    resets: int
    closes_early: bool
    checks: float
    """Share of the steps after which everything is proved."""
    page_size: int
    restarts: int
    """The cache is closed and another one opened so often; on the same storage, if there is one."""
    storage: StorageShape | None
    stack: StackShape | None = None

    @classmethod
    def drawn(cls, draws: random.Random) -> Shape:
        device_pages = draws.choice((8, 8, 10, 12, 16))
        smaller, larger = draws.randint(3, device_pages - 1), device_pages + draws.randint(4, 40)
        is_calm = draws.random() < 0.35
        page_size = draws.choice((4, 4, 4, 4, 4, 4, 1, 2, 3))
        storage = StorageShape.drawn(draws, page_size) if draws.random() < 0.5 else None
        return cls(
            write_policy=draws.choice(WRITE_POLICIES + WRITE_POLICIES[:1] * (2 if storage else 0)),
            device_pages=device_pages,
            host_pages=smaller if draws.random() < (0.5 if storage else 0.3) else larger,
            eviction_policy=draws.choice(("lru", "lru", "lru", "lfu", "slru")),
            threshold=draws.choice((1, 1, 1, 2 * page_size + 1)),
            run_threads=draws.choice((1, 1, 2)),
            copy_threads=draws.choice((1, 1, 1, 2)),
            job_pages=draws.choice((1, 1, 2, 100)),
            raising=0.0 if is_calm else draws.choice((0.05, 0.15, 0.3)),
            hanging=0.0 if is_calm else draws.choice((0.1, 0.3)),
            resets=0 if is_calm else draws.choice((0, 0, 1, 2)),
            closes_early=draws.random() < 0.06,
            checks=draws.choice((0.03,) * 7 + (0.5,)),
            page_size=page_size,
            restarts=draws.choice((0, 1, 1, 1, 2)) if storage else draws.choice((0,) * 9 + (1,)),
            storage=storage,
        )

    def with_stack(self, draws: random.Random) -> Shape:
        """The same with windows and states: longer prompts, that a window is short of."""
        device_pages = draws.choice((10, 12, 14, 16))
        host_pages = max(4, self.host_pages + device_pages - self.device_pages)
        stack = StackShape.drawn(draws, self.page_size, device_pages, host_pages)
        return replace(self, device_pages=device_pages, host_pages=host_pages, stack=stack)

    def with_sinks(self, draws: random.Random) -> Shape:
        """The same with a component of a user's own."""
        assert self.stack is not None, "beside others, or instead of them"
        return replace(self, stack=self.stack.with_sinks(draws, self.device_pages))

    def with_storage(self, draws: random.Random) -> Shape:
        """The same with a third tier, below a second one."""
        assert self.stack is not None, "others are drawn with it"
        storage = StorageShape.drawn(draws, self.page_size)
        return replace(
            self,
            write_policy=draws.choice((self.write_policy, *WRITE_POLICIES[:1] * 2)),
            restarts=draws.choice((0, 1, 1, 1, 2)),
            storage=replace(storage, misreading=draws.choice((0.0, 0.4))),
            stack=replace(self.stack, has_host=True),
        )

    @property
    def job_bytes(self) -> int:
        if self.stack is not None:
            return self.job_pages * self.page_size * schedule_stacks.TOKEN_STATE_BYTES
        return self.job_pages * self.page_size * TOKEN_STATE_BYTES

    @property
    def most_pages(self) -> int:
        """Of a prompt."""
        return min(6 if self.stack is None else 9, self.device_pages - 1)

    def config(self) -> Any:
        return _config(
            self.write_policy,
            self.page_size,
            self.device_pages,
            self.host_pages,
            self.eviction_policy,
            self.threshold,
            self.run_threads,
            self.storage,
            self.stack,
        )


@lru_cache(maxsize=4096)
def _config(
    write_policy: str,
    page_size: int,
    pages: int,
    host_pages: int,
    policy: str,
    threshold: int,
    threads: int,
    storage: StorageShape | None,
    stack: StackShape | None,
) -> Any:
    third: dict[str, Any] = {}
    if storage is not None:
        third = {"storage": storage.section(page_size), "model": storage_helpers.MODEL}
    device: dict[str, Any] = {"tokens": pages * page_size, "eviction_policy": policy}
    host: dict[str, Any] = {
        "tokens": host_pages * page_size,
        "write_policy": write_policy,
        "eviction_policy": policy,
        "load_back_threshold": threshold,
    }
    if stack is not None:
        device["ratio"] = stack.ratio(stack.device, pages)
        host["ratio"] = stack.ratio(stack.host, host_pages)
        third["model"] = stack.model()
    return settings(
        page_size=page_size,
        device=device,
        **({"host": host} if stack is None or stack.has_host else {}),
        run_threads=threads,
        **{"model": MODEL, **third},
    )


class Slots:
    """Where a run's tokens stood when it began: a model looks once."""

    def __init__(self, slots: npt.NDArray[np.int64]) -> None:
        self._slots = slots.copy()

    def slots(
        self, component: str = "full", start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        return self._slots[start:stop]


class Guarded:
    """An allocator whose free pages are overwritten, and must stay so until they are taken."""

    def __init__(
        self, inner: PageAllocator, oracle: ByteOracle, component: str, *, on_host: bool
    ) -> None:
        self._inner = inner
        self._component = component
        self._oracle = oracle
        self._on_host = on_host
        self.capacity = inner.capacity
        self._spoil(inner.free_ids())

    @property
    def num_free(self) -> int:
        return self._inner.num_free

    def allocate(self, num_pages: int) -> PageIds | None:
        ids = self._inner.allocate(num_pages)
        if ids is not None:
            self._oracle.verify_spoilt(self._component, ids, on_host=self._on_host)
        return ids

    def free(self, ids: PageIds) -> None:
        self._inner.free(ids)
        self._spoil(ids)

    def reset(self, taken: PageIds | None = None) -> None:
        self._inner.reset(taken)
        self._spoil(self._inner.free_ids())

    def free_ids(self) -> PageIds:
        return self._inner.free_ids()

    def verify(self) -> None:
        """Nobody has written to a free page."""
        self._oracle.verify_spoilt(self._component, self._inner.free_ids(), on_host=self._on_host)

    def _spoil(self, ids: PageIds) -> None:
        self._oracle.spoil(self._component, ids, on_host=self._on_host)


class LayerReader:
    """A model in a thread that waits for each layer before it reads it.

    A job on this loop cannot wait. So the job hangs, and a task does what the thread would do.
    """

    def __init__(self, schedule: Schedule, chunk: Chunk) -> None:
        self._schedule = schedule
        self._oracle = schedule.oracle
        self._chunk = chunk
        self._error: BaseException | None = None

    async def read(self, job: SeededJob) -> None:
        chunk, oracle = self._chunk, self._oracle
        key, layers = chunk.lease.key, chunk.lease.layers
        try:
            slots = Slots(chunk.slots("full", 0))
            for layer in LAYERS:
                await layers.arrive(layer)
                oracle.verify(slots, key, 0, chunk.start, layer)
                oracle.write(slots, key, chunk.start, chunk.stop, layer)
                await self._schedule.pause()
            oracle.verify(slots, key, 0, chunk.stop)
        except BaseException as error:
            self._error = error
            if not isinstance(error, (LoadFailed, StaleError)):
                self._schedule.faults.append(f"{chunk!r}: {error!r}")
        job.release()

    def __call__(self, chunk: Chunk) -> int:
        if self._error is not None:
            raise self._error
        return chunk.stop


class Launch:
    """A model on a device that computes on after the run has returned: it writes when `finish`
    comes to it."""

    def __init__(self, schedule: Schedule, chunk: Chunk) -> None:
        self._schedule = schedule
        self._oracle = schedule.oracle
        self._unwritten = schedule.unwritten
        self._page_size = schedule.page_size
        self._chunk = chunk
        self._slots: Slots | None = None
        self.pages: set[int] = set()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, chunk: Chunk) -> int:
        self._oracle.verify(chunk, chunk.lease.key, 0, chunk.start)
        self._slots = Slots(chunk.slots("full", 0))
        self.pages = set((self._slots.slots()[chunk.start :] // self._page_size).tolist())
        return chunk.stop

    def start(self) -> None:
        """Its chunk is about to be committed."""
        self._unwritten |= self.pages
        lease = self._chunk.lease
        key = RadixKey(lease.tokens.copy(), cache_salt=lease.key.namespace.cache_salt)
        self._schedule.spawn(self._finish(key))

    async def _finish(self, key: RadixKey) -> None:
        assert self._slots is not None, "it has run"
        await asyncio.sleep(self._schedule.draws.choice((0, 1, 1, 2, 5)))
        self._oracle.write(self._slots, key, self._chunk.start, self._chunk.stop)
        self._unwritten -= self.pages
        if self._schedule.draws.random() < 0.03:
            self._schedule.meet("fences that failed")
            self.ready.set_exception(DeviceError())
        else:
            self.ready.set_result(None)


class Schedule:
    """One run of everything. `met`: what came about."""

    def __init__(self, loop: DeterministicLoop) -> None:
        self.loop = loop
        self.draws = loop.random
        self.shape = Shape.drawn(self.draws)
        # Of their own, so that the other schedules are what they would be without these.
        stack_draws = random.Random(f"stack {loop.seed}")
        if self.shape.storage is None and stack_draws.random() < STACK_SHARE:
            self.shape = self.shape.with_stack(stack_draws)
            sink_draws = random.Random(f"sinks {loop.seed}")
            if sink_draws.random() < schedule_stacks.SINK_SHARE:
                self.shape = self.shape.with_sinks(sink_draws)
            storage_draws = random.Random(f"stack on storage {loop.seed}")
            if storage_draws.random() < THIRD_TIER_SHARE:
                self.shape = self.shape.with_storage(storage_draws)
        self.stack = self.shape.stack
        self.page_size = self.shape.page_size
        self.met: Counter[str] = Counter()
        self.faults: list[str] = []
        self.unwritten: set[int] = set()
        """Device pages that were published before they are written."""
        self._published: set[tuple[str, bytes]] = set()
        self._ends: set[tuple[str, bytes]] = set()
        """Of these, to where somebody has published."""
        """By this cache since its last reset; `known`: by any, ever."""
        self.known: set[tuple[str, bytes]] = set()
        self._closed: list[UnifiedRadixCache] = []
        self._models: list[OracleModel] = []
        self._dropped_before = self._evicted_before = 0
        self._actors: list[asyncio.Task[None]] = []
        self._cancelled: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self.is_over = False
        self.digest = ""
        self.third: ThirdTier | None = None
        if self.shape.storage is not None:
            self.third = ThirdTier(self, self.shape.storage)
        self.cache: UnifiedRadixCache
        self.oracle: ByteOracle
        self.model: OracleModel

    def load_backend(self, name: str) -> Any:
        """What is installed here."""
        assert self.third is not None, "only it has a backend"
        return self.third.load_backend(name)

    def meet(self, what: str, count: int = 1) -> None:
        self.met[what] += count

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- the course of it -------------------------------------------------------------------------

    async def play(self) -> Counter[str]:
        self.loop.note(repr(self.shape))
        await self._open()
        for _ in range(self.shape.restarts):
            await self._bursts()
            await self._restart()
        await self._bursts()
        if self.shape.closes_early:
            self.meet("closed with everything under way")
            await self.cache.aclose(self.draws.choice((0, 1, 10)))
        await self._end()
        self.digest = self.loop.trace_digest  # what the loop's own end comes to does not replay
        return self.met

    async def _open(self) -> None:
        shape, loop = self.shape, self.loop
        self.cache = await UnifiedRadixCache.open(
            shape.config(),
            observers=[self],
            run_executor=SeededExecutor(
                loop,
                name="run",
                num_threads=shape.run_threads,
                execute_at="end",
                fault=self._run_fault,
            ),
            copy_executor=SeededExecutor(
                loop, name="copy", num_threads=shape.copy_threads, fault=self._copy_fault
            ),
            io_executor=SeededExecutor(loop, name="io", num_threads=2),
        )
        self.controller = self.cache._controller
        self.oracle = ByteOracle(self.cache)
        self.model = OracleModel(self.oracle)
        self.device: Device | None = None
        if self.stack is not None:
            self.device = Device(self.cache, self.oracle)
            self.model = Synchronised(self.device, self.oracle)
        self._models.append(self.model)
        self.rule = Rule(self.cache)
        self.unwritten = set()
        self.forget()
        self._guard()
        self._watch()
        if self.third:
            self.third.attached()

    async def _restart(self) -> None:
        """This cache ends, with all that is under way, and another one begins. What it cannot stop
        (the storage calls of a thread) goes on."""
        self.meet("restarts")
        await self.cache.aclose(self.draws.choice((0, 0, 1, 10, None)))
        await self._everybody_has_gone()
        self.meet("restarts with storage calls under way", bool(self.controller.storage_calls()))
        self.note("restart")
        self._closed.append(self.cache)
        await self._open()

    async def _bursts(self) -> None:
        draws = self.draws
        longest = min(self.shape.most_pages + 1, self.shape.device_pages - 1) * self.page_size
        families = [_tokens(name, longest) for name in range(draws.choice((2, 3)))]
        operators = [self.loop.create_task(self._operate())]
        if self.third:
            operators.append(self.loop.create_task(self.third.operate()))
        resets = sorted(draws.choice((3, 6, 9, 12)) for _ in range(self.shape.resets))
        for at in resets:
            self.loop.call_later(at, self._reset)
        for family in families:
            self._arrive(family[: self._length()], "")
        num_bursts = draws.randint(2, 4 - self.shape.restarts)
        for _ in range(num_bursts):
            await asyncio.sleep(draws.choice((0, 1, 2, 5)))
            if draws.random() < 0.8:
                await asyncio.wait(self._actors, timeout=draws.choice((0, 20, 100)))
                await self._demote()
                if self.third and draws.random() < 0.8:
                    await self._wipe_host()
            family, length = draws.choice(families), self._length()
            if draws.random() < 0.8 and not self.cache.closed:  # what the host has most of
                hits = [self.match("", family, None).host_hit_length for family in families]
                family = families[hits.index(max(hits))]
                length = max(length, min(max(hits) + draws.randint(1, self.page_size), len(family)))
            is_equal = draws.random() < 0.6
            salt = "x" if draws.random() < 0.08 else ""
            if self.third and draws.random() < 0.7:  # what storage has most of
                salt, family = self.third.most_kept()
                family = [*family[: longest - 1], 80]
                length = len(family)
            for _ in range(draws.choice((1, 2, 3, 4))):
                tokens = family[: length if is_equal else self._length()]
                if draws.random() < 0.25:
                    cut = draws.randint(1, len(tokens))
                    tokens = tokens[:cut] + _tokens(90 + draws.randint(0, 2), len(tokens) - cut)
                self._arrive(tokens, salt)
        for task in operators:
            task.cancel()
        await asyncio.wait(operators)
        for task in operators:
            if not task.cancelled():
                task.result()

    def _length(self) -> int:
        return self.draws.randint(2 * self.page_size, self.shape.most_pages * self.page_size)

    async def _demote(self) -> None:
        """As an engine that needs the device for something else, for a moment."""
        with contextlib.suppress(TimeoutError, ClosedError):
            async with asyncio.timeout(self.draws.choice((1, 10, 10))):
                num_tokens = self.shape.device_pages * self.page_size
                await self.cache.evict(self._to_evict(num_tokens))

    def _to_evict(self, num_tokens: int) -> EvictParams:
        """So many; sometimes of a window, or all states, alone."""
        if self.stack is not None and self.draws.random() < 0.4:
            of = self.draws.choice(self.stack.names)
            return EvictParams(num_pages={of: -(-num_tokens // self.page_size)})
        return EvictParams(num_tokens)

    async def _wipe_host(self) -> None:
        """What only storage has then must come from there."""
        with contextlib.suppress(TimeoutError, ClosedError):
            async with asyncio.timeout(10):
                await self.cache.drain()
                if self.stack is not None and self.draws.random() < 0.4:
                    await self._wipe_parts(self.stack)
                    return
                await self._demote()
                num_tokens = self.shape.host_pages * self.page_size
                await self.cache.evict_host(EvictParams(num_tokens))

    async def _wipe_parts(self, stack: StackShape) -> None:
        """Only the base is left, or it and some of what hangs on it."""
        gone = self.draws.sample(stack.names, self.draws.randint(1, len(stack.names)))
        for evict, ids in ((self.cache.evict, stack.device), (self.cache.evict_host, stack.host)):
            num_pages = dict(zip(stack.names, ids, strict=True))
            await evict(EvictParams(num_pages={name: num_pages[name] for name in gone}))

    def _arrive(self, tokens: list[int], salt: str) -> None:
        draws = self.draws
        works = [self._request] * 10 + [self._pair]
        if self.stack is None:
            works += [self._engine] * 2
        if self.third:
            works += [self.third.prefetch] * 5
        work = draws.choice(works)
        if (self.shape.closes_early or self.shape.restarts) and work == self._engine:
            work = self._request  # an engine gives its pages back before it closes the cache
        task = self.loop.create_task(work(tokens, salt))
        self._actors.append(task)
        if draws.random() < 0.2:
            self.loop.call_later(draws.choice((0, 1, 1, 2, 3, 5)), self._cancel, task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            self.meet("cancelled")
            self.meet("cancelled with transfers under way", bool(self.controller.transfers))
            self.meet("cancelled with storage calls under way", bool(self._num_calls()))
            self._cancelled.add(task)
            task.cancel()

    def _num_calls(self) -> int:
        """Of storage, that read or write rows."""
        return len(self.controller.storage_calls())

    async def _everybody_has_gone(self) -> None:
        await asyncio.wait(self._actors)
        for task in self._actors:
            if task.cancelled():
                assert task in self._cancelled, f"{task.get_name()} was not cancelled by anybody"
            else:
                task.result()
        while self._background:
            await asyncio.wait(tuple(self._background))

    async def _end(self) -> None:
        """Nothing fails or hangs any more; everybody comes to an end, and nothing is left."""
        self.is_over = True
        await self._everybody_has_gone()
        if not self.cache.closed:
            if self.third:
                await self.third.is_well()
            await self.cache.drain()
            self._prove_quiet()
            num_skipped = self.controller.counters.backups_skipped
            used = await self._read_back()
            await self.cache.drain()
            self._prove_quiet()
            if self.third and num_skipped == self.controller.counters.backups_skipped:
                for salt, data in used:
                    self.third.prove_backed_up(salt, data)
        if self.third and self.draws.random() < (0.3 if self.stack is None else 0.6):
            await self.cache.aclose(None)
            self._closed.append(self.cache)
            await self._open()
            await self.third.read_all()
            await self.cache.drain()
            self._prove_quiet()
        for cache in (*self._closed, self.cache):
            left = await cache.aclose(None)
            assert left == [], left
            await assert_nothing_left(cache)
            counters = cache.stats().counters
            for name in counters.__slots__:
                self.meet(name, getattr(counters, name))
        if self.third:
            self.third.prove_end()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"
        assert self.loop.time() < MAX_SECONDS, "that took too long"

    async def _read_back(self) -> list[tuple[str, bytes]]:
        """What is known to be there is reused, and reads right; what that was."""
        draws = self.draws
        used = []
        for salt, data in draws.sample(sorted(self._published), min(2, len(self._published))):
            tokens = np.frombuffer(data, np.int64).tolist()
            match = self.match(salt, tokens, len(tokens) - 1)
            before = self._num_lost()
            async with self.cache.lease(tokens, cache_salt=salt) as lease:
                self._granted(lease)
                if before == self._num_lost():
                    wanted = match.best_length
                    if match.best_length - match.device_length < self.shape.threshold:
                        wanted = match.device_length
                    is_as_wanted = lease.prefix_len == wanted
                    if self.third:  # which may have more
                        is_as_wanted = lease.prefix_len >= wanted
                    if self.stack is not None and "no room" in lease.why:
                        self.meet("loads that had no room")
                        most = len(tokens) if self.third else wanted
                        is_as_wanted = match.device_length <= lease.prefix_len <= most
                    assert is_as_wanted, (lease, match, lease.why)
                while chunk := await lease.next_chunk(100):
                    await lease.run(self.model, chunk)
                    lease.commit(chunk)
                used.append((salt, data[: lease.committed * 8]))
        return used

    @property
    def _num_given_up(self) -> int:
        """What the tree has given up on the device: to whoever needed room, or the state itself."""
        counters = self.controller.counters
        return counters.pages_evicted + counters.states_taken_over

    def _num_lost(self) -> tuple[int, ...]:
        counters = self.controller.counters
        lost = (counters.pages_evicted_host, counters.tokens_dropped)
        # What storage has is not dropped when the device gives it up.
        # Nor what it gives up of a window or a state.
        return (*lost, counters.pages_evicted) if self.third or self.stack else lost

    # --- requests ---------------------------------------------------------------------------------

    async def _request(self, tokens: list[int], salt: str) -> None:
        draws = self.draws
        reserve = draws.choice((0, 0, 0, 3, 6))
        room = self.shape.device_pages * self.page_size - len(tokens)
        timeout = draws.choice((None, None, None, 0, 3))
        rollback = draws.choice(schedule_stacks.ROLLBACKS) if self.stack is not None else 0
        lease: Lease | None = None
        try:
            async with self.cache.lease(
                tokens,
                cache_salt=salt,
                reserve=min(reserve, room),
                priority=draws.choice((0, 0, 1)),
                layerwise=draws.random() < 0.6,
                timeout=timeout,
                load_timeout=draws.choice((None, None, None, 0, 0.5, 1)),
                rollback=rollback,
            ) as lease:
                self._granted(lease)
                await self._use(lease)
        except AdmissionTimeout:
            assert timeout is not None
        except StaleError:
            assert lease is not None, "waiting requests outlive a reset"
            assert self._is_stale(lease), lease
        except ClosedError:
            assert self.cache.closed

    def _granted(self, lease: Lease) -> None:
        self.note(f"{lease!r} granted {lease.prefix_len}")
        self.step()
        if self._is_stale(lease):
            return
        assert lease.prefix_len % self.page_size == 0
        assert lease.prefix_len < len(lease)
        assert lease.hits.total == lease.prefix_len == lease.computed, (lease, lease.hits)
        assert lease.why

    async def _use(self, lease: Lease) -> None:
        draws = self.draws
        num_appended, most = 0, draws.choice((0, 0, 2, 6))
        for _ in range(MAX_STEPS):
            await self.pause()
            self.step()
            if self.cache.closed:
                return
            choice = draws.random()
            if choice < 0.05:
                self._truncate(lease)
            elif choice < 0.1:
                self.note(f"{lease!r} finishes")
                lease.finish()
            elif choice < 0.12:
                break
            try:
                chunk = await lease.next_chunk(draws.choice((3, 2 * self.page_size, 100, 100)))
            except CapacityError:
                assert schedule_stacks.may_lack_room(lease), lease
                self.meet("growth refused")
                break
            if chunk is not None:
                self._check_chunk(lease, chunk)
                await self._compute(lease, chunk)
            elif num_appended < most:
                num_appended += 1
                if not self._append(lease):
                    break
            else:
                break
        else:
            raise AssertionError(f"{lease!r} never ends")
        end = draws.choice(("finish", "finish", "suspend", "close"))
        self.note(f"{lease!r}: {end}")
        if end == "suspend":
            lease.suspend()
        elif end == "finish":
            lease.finish()

    def _check_chunk(self, lease: Lease, chunk: Chunk) -> None:
        assert chunk.start == lease.frontier < chunk.stop
        assert chunk.tokens.tolist() == lease.tokens[chunk.start : chunk.stop].tolist()

    def _append(self, lease: Lease) -> bool:
        room = lease.room
        try:
            lease.append(self.draws.randint(50, 52))
        except CapacityError:
            assert room == 0, "growth within the reserve cannot fail"
            self.meet("growth refused")
            return False
        return True

    def _truncate(self, lease: Lease) -> None:
        length = len(lease) - self.draws.randint(1, 5)
        is_legal = max(1, lease.committed) <= length
        is_kept = length >= lease.computed
        if not schedule_stacks.states_of(lease) and not lease.num_cuts:
            is_kept |= length >= lease.computed - lease._rollback
        before = lease.computed
        try:
            lease.truncate(length)
        except ValueError:
            is_coming = lease._is_using_load and length < lease._own_from * self.page_size
            is_gone = self.stack is not None and not is_kept
            assert not is_legal or lease.is_running or is_coming or is_gone
        else:
            assert is_legal
            self.meet("truncations")
            if self.device is not None:
                assert lease.computed == min(before, length)
                self.meet("truncations of what was computed", length < before)
                schedule_stacks.prove_standing(self.oracle, lease, self.device)

    async def _compute(self, lease: Lease, chunk: Chunk) -> None:
        draws = self.draws
        hows = ("commits",) * 6 + ("launches", "returns", "fails", "pipelines")
        if self.stack is not None:
            hows += ("computes on",) * 3
        how = draws.choice(hows)
        await lease.ready()
        self.note(f"{chunk!r} {how}")
        model: Callable[..., Any] = self._model_for(lease, chunk)
        launch: Launch | schedule_stacks.Launch | None = None
        if how == "fails":
            model = _explode if self.device is None else partial(_explode_after, self.device)
        elif self.device is not None:
            if how == "launches":
                model = partial(_fail_late, self.model)
            elif how == "computes on":
                model = launch = schedule_stacks.Launch(self.device)
        elif how == "launches" and model is self.model:
            model = launch = Launch(self, chunk)
        try:
            if how == "pipelines":
                await self._pipeline(lease, chunk, model)
            else:
                await lease.run(model, chunk)
            if self.stack is not None and not self._is_stale(lease):
                self.meet("windows given up behind", schedule_stacks.has_left_behind(lease))
                kept = [part._kept_depth >= 0 for part in schedule_stacks.states_of(lease)]
                self.meet("states kept", any(kept))
            if how in ("commits", "launches", "pipelines", "computes on"):
                await self._commit(lease, chunk, launch)
        except LoadFailed:
            self.meet("runs that a load has failed under")
        except ModelError:
            if schedule_stacks.states_of(lease) and not self._is_stale(lease):
                is_back = lease.computed < chunk.start
                self.meet("states restored after a failed run", how == "launches" and not is_back)
                self.meet("failed runs that went back to a state", is_back)
                self.meet("failed runs that void a state taken over", lease._is_stranded)
        except StaleError:
            if self._is_stale(lease):
                raise
            self.meet("chunks that had become stale")
        finally:
            if isinstance(launch, schedule_stacks.Launch):
                launch.end()

    async def _commit(
        self, lease: Lease, chunk: Chunk, launch: Launch | schedule_stacks.Launch | None
    ) -> None:
        if launch is None:
            if self.draws.random() < 0.2:
                await self.pause()
            lease.commit(chunk)
        elif self.cache.closed or self._is_stale(lease):
            lease.check()
        else:
            self.meet("fences")
            launch.start()
            lease.commit(chunk, ready=launch.ready)
            if isinstance(launch, schedule_stacks.Launch):
                self.meet("fences over windows and states")
                self.meet("given up under a fence", lease._fences.has_left)
                self.spawn(self._finish(launch))
        self.step()

    async def _finish(self, launch: schedule_stacks.Launch) -> None:
        await asyncio.sleep(self.draws.choice((0, 1, 1, 2, 5)))
        launch.finish()
        if self.draws.random() < 0.03:
            self.meet("fences that failed")
            launch.ready.set_exception(DeviceError())
        else:
            launch.ready.set_result(None)

    def _model_for(self, lease: Lease, chunk: Chunk) -> Callable[..., Any]:
        return self.model if lease.layers is NO_LOADS else LayerReader(self, chunk)

    async def _pipeline(self, lease: Lease, chunk: Chunk, model: Callable[..., Any]) -> None:
        """The next chunk is asked for, and queued, while the first is being computed."""
        runs = [self.loop.create_task(self._run_when_ready(lease, model, chunk))]
        try:
            await asyncio.sleep(0)
            if chunk.stop < len(lease) and lease.frontier == chunk.stop:
                second = None
                try:
                    second = await lease.next_chunk(self.page_size)
                except CapacityError:  # a window's pages go home when the first has ended
                    assert lease.is_running, lease
                    assert self.stack is not None, lease
                    self.meet("queued chunks that a window had no room for")
                if second is not None:
                    self._check_chunk(lease, second)
                    await lease.ready()
                    self.meet("runs queued behind their own")
                    model = self._model_for(lease, second)
                    work = self._run_when_ready(lease, model, second)
                    runs.append(self.loop.create_task(work))
                    await asyncio.sleep(0)
                    if lease.is_running and self.draws.random() < 0.5:
                        lease.finish()
            for run in runs:
                await run
        finally:
            for run in runs:
                if not run.done():
                    run.cancel()
            await _all_ended(runs)

    async def _run_when_ready(self, lease: Lease, model: Callable[..., Any], chunk: Chunk) -> None:
        """Looks in the step in which the run begins, too: a run or a load that has ended meanwhile
        may have changed the prefix to what another's device has not written."""
        await lease.ready()
        await lease.run(model, chunk)

    async def _pair(self, tokens: list[int], salt: str) -> None:
        """Two leases that are computed in batches and grow together."""
        leases: list[Lease] = []
        other = tokens[: 1 + len(tokens) // 2] + _tokens(99, 2)
        try:
            for prompt in (tokens, other):
                lease = await self.cache.acquire(prompt, cache_salt=salt, timeout=2)
                leases.append(lease)
            for _ in range(3):
                while ready := await self._to_compute(leases):
                    for lease in leases:
                        await lease.ready()
                    self.meet("batches")
                    await self.cache.run(leases, self.model, ready)
                    for chunk in ready:
                        chunk.lease.commit(chunk)
                self.step()
                victims = self.cache.extend(leases, [60] * len(leases))
                if victims:
                    self.meet("growth refused")
                    for lease in victims:
                        lease.suspend()
                        leases.remove(lease)
                    assert not leases or self.cache.extend(leases, [60] * len(leases)) == []
        except AdmissionTimeout:
            pass
        except StaleError:
            assert any(map(self._is_stale, leases)) or not leases, leases
        except ClosedError:
            assert self.cache.closed
        finally:
            for lease in leases:
                lease.close()

    async def _to_compute(self, leases: Sequence[Lease]) -> list[Chunk]:
        """All of it at once; of a window as much as there is room for."""
        chunks = [
            lease.pending if self.stack is None else await lease.next_chunk(100) for lease in leases
        ]
        return [chunk for chunk in chunks if chunk is not None]

    async def _engine(self, tokens: list[int], salt: str) -> None:
        """A request of an engine that calls for everything itself."""
        cache, draws, epoch = self.cache, self.draws, self.controller.epoch
        size = self.page_size
        request = None
        try:
            if draws.random() < 0.7:
                limit = len(tokens) - draws.randint(0, 1)
                there = await cache.load_back(RadixKey(tokens, cache_salt=salt), limit)
                self.meet("loads by an engine", there > 0)
            epoch = self.controller.epoch
            request = cache.begin_req(tokens, cache_salt=salt)
            self.meet("requests of an engine")
            while request.computed < len(tokens):
                stop = min(len(tokens), request.computed + draws.choice((3, 2 * size, 100)))
                table, missing = request.table, -(-stop // size) - request.table.num_pages
                if missing > 0:
                    table.write(table.num_pages, cache.allocate(missing))
                slots = Slots(table.slots(0, 0, stop))
                if not self.unwritten.intersection((slots.slots() // size).tolist()):
                    self.oracle.verify(slots, request.key, 0, request.computed)
                self.oracle.write(slots, request.key, request.computed, stop)
                await self.pause()
                if cache.closed or epoch != self.controller.epoch:
                    break
                request.computed = stop
                if draws.random() < 0.5:
                    cache.cache_unfinished_req(request)
                    self._note_published(request)
                self.step()
        except CapacityError:
            self.meet("no room for an engine")
        except ClosedError:
            assert cache.closed
        finally:
            if request is not None and not cache.closed:
                cache.cache_finished_req(request, is_insert=draws.random() < 0.7)
                if epoch == self.controller.epoch:
                    self._note_published(request)

    # --- operators --------------------------------------------------------------------------------

    async def _operate(self) -> None:
        """Somebody who drains, looks, and takes room away."""
        draws = self.draws
        while not self.cache.closed:
            await asyncio.sleep(draws.choice((1, 2, 3)))
            choice = draws.random()
            if choice < 0.2:
                await self.cache.drain()
            elif choice < 0.5:
                if self.controller.host_pages is not None:
                    num_tokens = draws.randint(1, 4) * self.page_size
                    await self.cache.evict_host(self._to_evict(num_tokens))
            elif choice < 0.6:
                await self.cache.evict(self._to_evict(draws.randint(1, 4) * self.page_size))
            elif choice < 0.8:
                self.prove()
            else:
                self.cache.stats()
                self.cache.outstanding()

    def _reset(self) -> None:
        if self.cache.closed or self.is_over:
            return
        transfers = list(self.controller.transfers or ())
        self.meet("resets with transfers in flight", bool(transfers))
        self.meet("resets with storage calls in flight", bool(self._num_calls()))
        self.note(f"reset with {transfers}")
        self.cache.reset()
        self.forget()
        for pools in (self.cache.stats().pools, self.cache.stats().host):
            for pool in pools.values():
                assert pool.free + pool.quarantined == pool.capacity, pool

    def forget(self) -> None:
        self._published.clear()
        self._ends.clear()
        self._dropped_before = self.controller.counters.tokens_dropped
        self._evicted_before = self._num_given_up

    # --- executors --------------------------------------------------------------------------------

    def _copy_fault(self, job: SeededJob) -> float | BaseException | None:
        if self.is_over:
            return None
        shape, draws = self.shape, self.draws
        draw = draws.random()
        if draw < shape.raising:
            if draws.random() < 0.5:
                job.execute()  # and then it says that it has failed
            return CopyError()
        is_load = job.args[1][0].direction is Direction.LOAD  # somebody may join it
        if draw < shape.raising + shape.hanging * (2 if is_load else 1):
            if draws.random() < 0.2:
                self.meet("copies that hang")
                self.loop.call_later(draws.choice((2, 6, 20)), job.release)
                return HANG
            return draws.choice((0.5, 1.0, 3.0))
        return None

    def _run_fault(self, job: SeededJob) -> float | BaseException | None:
        model = job.args[0]
        if isinstance(model, LayerReader):
            self.spawn(model.read(job))
            return HANG
        return self.draws.choice((None, None, None, 1.0, 3.0))

    # --- what is watched --------------------------------------------------------------------------

    def _guard(self) -> None:
        controller = self.controller
        self._guards: list[Guarded] = []
        names = [str(component.id) for component in self.cache.tree.components]
        for pages, on_host in ((controller.accounts, False), (controller.host_pages, True)):
            if pages is None:
                continue
            guards: list[Any] = [
                Guarded(allocator, self.oracle, name, on_host=on_host)
                for allocator, name in zip(pages.allocators, names, strict=True)
            ]
            pages.allocators = tuple(guards)
            self._guards += guards

    def _watch(self) -> None:
        """Count what the library's own counters do not."""
        controller, tree = self.controller, self.cache.tree
        transfers, policy = controller.transfers, controller.write_policy
        if transfers is None:
            return

        def on_split(child: Any, depth: int) -> None:
            is_pending = any(data.pending is not None for data in child.data)
            self.meet("splits with a transfer pending", is_pending)
            if self.third:
                self.third.note_split(child)

        def on_failed(batch: Any, at: int, error: Any) -> None:
            self.meet(f"copies that failed at {'the first job' if at == 0 else 'a later job'}")

        def on_commit(transfer: Any) -> None:
            batch = transfer.batch
            arrived_any = transfer.num_moved > 0
            arrived = 0 < transfer.num_moved < transfer.num_pages
            self.meet(f"{transfer.kind}s that arrived in part", arrived)
            is_lost = not transfer.num_moved and batch.num_pages_done > 0
            self.meet("loads whose path did not come", is_lost and not transfer.by_layer)
            self.meet("layer-wise loads", transfer.by_layer)
            if transfer.component != BASE and transfer.kind == "load":
                kind = schedule_stacks.kind_of(tree.components[transfer.component].id)
                self.meet(f"loads of {schedule_stacks.KINDS[kind]}", arrived_any)

        def on_stale(transfer: Any) -> None:
            self.meet(f"{transfer.kind}s that a reset came before")

        _before(tree, "_split_node", on_split)
        _before(transfers._mover, "_failed", on_failed)
        _before(transfers, "_commit", on_commit)
        _before(transfers, "_end_stale", on_stale)
        self._count(
            tree, "commit_transfer", "transfers that brought what was there", lambda ids: len(ids)
        )
        if isinstance(policy, WriteBack):
            self._count(policy, "_start_round", "write_back rounds", bool)
        elif isinstance(policy, WriteThrough):
            self._count(policy, "_start", "stores put off", lambda turn: turn is not Turn.TAKEN)

    def _count(self, owner: Any, name: str, what: str, counts: Callable[[Any], object]) -> None:
        call = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.meet(what, bool(counts(result)))
            return result

        setattr(owner, name, counting)

    def on_event(self, event: Event) -> None:
        if event.kind is EventKind.REMOVED:
            assert event.node is not None
            data = event.node.data[0]
            if event.tier is Tier.DEVICE:
                self.meet("demotions", data.host_value is not None)
            elif data.value is not None:
                self.meet("mirror reclaims")
        elif event.kind is EventKind.COMMITTED:
            leases = {lease.id: lease for lease in self.controller.all_leases()}
            if event.lease_id in leases:
                self._note_published(leases[event.lease_id])
            else:
                self.faults.append(f"lease {event.lease_id} has committed and is unknown")
        elif event.kind is EventKind.CLEARED:
            self.forget()

    def _note_published(self, request: Lease | CacheRequest) -> None:
        key = request.key
        size, salt = self.page_size, key.namespace.cache_salt
        pages = [(salt, key.data[: stop * 8]) for stop in range(size, request.committed + 1, size)]
        self._published.update(pages)
        if self.stack is not None and schedule_stacks.is_complete(request):
            self._ends.update(pages[-1:])
        if self.third and pages and pages[-1] not in self.known:
            self.third.note_published(salt, pages[-1][1])
        self.known.update(pages)

    # --- proof ------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Some turns, or some time."""
        choice = self.draws.choice((0, 0, 1, 2, 3, 4))
        if choice > 2:
            await asyncio.sleep(choice - 2)
        for _ in range(choice):
            await asyncio.sleep(0)

    def note(self, line: str) -> None:
        self.loop.note(f"{self.loop.time():g} {line}")

    def _is_stale(self, lease: Lease) -> bool:
        return lease.epoch != self.controller.epoch

    def step(self) -> None:
        if self.draws.random() < self.shape.checks:
            self.prove()

    def prove(self) -> None:
        """Everything that must hold between any two callbacks."""
        self.cache.check_integrity()
        self.oracle.verify_tree(self._unwritten_by_component())
        for guard in self._guards:
            guard.verify()
        faults = [*self.faults, *(fault for model in self._models for fault in model.faults)]
        if self.device is not None:
            faults += self.device.faults
        assert not faults, faults
        for node in self.cache.tree.nodes():
            known = node.namespace.cache_salt, path_tokens(node)
            assert known in (self.known if self.third else self._published), (
                f"{node!r} was never published"
            )
        for lease in self.controller.all_leases():
            if not lease.closed and not self._is_stale(lease):
                if self.device is not None:
                    schedule_stacks.prove_standing(self.oracle, lease, self.device)
                else:
                    prove_lease(self.oracle, lease, self.unwritten)
        if self.third:
            self.third.prove()
        if self.stack is not None:
            self._prove_matches()
        else:
            self._prove_found()

    def _prove_matches(self) -> None:
        """A match ends where the rule by pages says; and while nothing was evicted, whatever
        somebody has published to is there."""
        if self.cache.closed or not self._published:
            return
        draws = self.draws
        for salt, data in draws.sample(sorted(self._published), 1):
            tokens = [*np.frombuffer(data, np.int64).tolist(), *_tokens(90, draws.randint(0, 2))]
            for limit in (None, draws.randint(1, len(tokens))):
                key = RadixKey(tokens, cache_salt=salt)
                found = self.match(salt, tokens, limit)
                is_below = self.rule.prove(key, limit, found)
                self.meet("tombstones matched below", is_below)
        if self._ends and self._num_given_up == self._evicted_before:
            self.meet("found what was published to")
            for salt, data in draws.sample(sorted(self._ends), 1):
                found = self.match(salt, np.frombuffer(data, np.int64).tolist(), None)
                assert found.device_length == len(data) // 8, (found, self.cache.pretty_print())

    def _prove_found(self) -> None:
        """While nothing was dropped, everything that was published is on one of the tiers."""
        if self.cache.closed or not self._published:
            return
        if self.controller.counters.tokens_dropped != self._dropped_before:
            return
        self.meet("found what was published")
        for salt, data in self.draws.sample(sorted(self._published), 1):
            match = self.match(salt, np.frombuffer(data, np.int64).tolist(), None)
            if self.third and match.best_length < len(data) // 8:
                self.third.prove_kept(salt, data, match.best_length)
                continue
            assert match.best_length == len(data) // 8, (match, self.cache.pretty_print())

    def match(self, salt: str, tokens: list[int], limit: int | None) -> Any:
        return self.cache.tree.match_prefix(
            MatchPrefixParams(RadixKey(tokens, cache_salt=salt), limit)
        )

    def _unwritten_by_component(self) -> dict[str, set[int]]:
        if self.device is not None:
            return self.device.unwritten
        return {str(self.cache.tree.components[BASE].id): self.unwritten}

    def _prove_quiet(self) -> None:
        """Nothing is in flight, and nobody holds anything."""
        self.prove()
        assert not any(self._unwritten_by_component().values())
        controller, tree = self.controller, self.cache.tree
        assert self.cache.outstanding() == []
        assert len(controller.fences) == len(tree.receipts) == len(controller.claims._claims) == 0
        stats = self.cache.stats()
        assert stats.num_leases == stats.num_queued == stats.num_runs == 0, stats
        for pool in (*stats.pools.values(), *stats.host.values()):
            assert pool.free + pool.evictable == pool.capacity, pool
            assert pool.unspent == 0
        for node in tree.nodes():
            assert all(data.pending is None for data in node.data), node
        if self.third:
            self.third.prove_quiet()


def prove_lease(oracle: ByteOracle, lease: Lease, unwritten: Collection[int] = ()) -> None:
    """The bytes that a lease has are right, where it stands and where its run reads them.

    A table does not change under a run (semantics §11.1). So the lease may hold what others have
    published while its table still names a load's pages, which are coming, or have gone home with
    a load that failed: the run waits for each layer, and hears of it (§9.9).
    """
    assert lease.is_running or not lease._canonical, f"{lease!r} names what its runs were given"
    load = lease._load
    stop = lease.computed if load is None or load.is_over else lease.committed
    spans = [(_named_without_runs(lease), stop)]
    if lease._canonical and not (load is not None and load.has_failed):
        coming = [ours.start for ours in load._using if not ours.is_complete] if load else []
        spans.append((lease.table, min((stop, *coming))))
    for table, end in spans:
        slots = table.slots(BASE, 0, end)
        if end and not set(unwritten).intersection((slots // lease._page_size).tolist()):
            oracle.verify(Slots(slots), lease.key, 0, end)


def _named_without_runs(lease: Lease) -> PageTable:
    """What the table of a lease is to name when its runs have ended."""
    table = PageTable(1, lease._page_size)
    table.write(0, [lease.table.ids[BASE][: lease.table.num_pages]])
    for first, pages in lease._canonical:
        table.write(first, [pages[BASE]])
    return table


def _tokens(name: int, stop: int) -> list[int]:
    return list(range(1000 * name, 1000 * name + stop))


def _explode(*_: Any) -> None:
    raise ModelError


def _explode_after(device: Device, *_: Any) -> None:
    """What was put on the device before comes to its end."""
    device.finish()
    raise ModelError


def _fail_late(model: Callable[[Chunk], Any], chunk: Chunk) -> None:
    """All is written, and nothing is true."""
    model(chunk)
    raise ModelError


def _before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Let `look` see what a method is called with."""
    call = getattr(owner, name)

    def looking(*args: Any) -> Any:
        look(*args)
        return call(*args)

    setattr(owner, name, looking)


async def _all_ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait for tasks to end, whoever is cancelled meanwhile; look at what they have raised."""
    waiting = set(tasks)
    is_cancelled = False
    while waiting := {task for task in waiting if not task.done()}:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError:
            is_cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if is_cancelled:
        raise asyncio.CancelledError


@dataclass(frozen=True)
class Played:
    """What a schedule came to."""

    seed: int
    digest: str
    met: Counter[str]


def play(seed: int, trace: list[str] | None = None) -> Played:
    """Run the schedule of a seed.

    Raises:
        Whatever it has found, with the seed and how to see it again as a note.
    """
    loop = DeterministicLoop(seed)
    schedule = Schedule(loop)
    if trace is not None:
        loop.trace = trace
    try:
        with (
            mock.patch.object(copier, "JOB_BYTES", schedule.shape.job_bytes),
            mock.patch.object(CpuCopier, "num_threads", schedule.shape.copy_threads),
            mock.patch.object(build, "load_backend", schedule.load_backend),
            mock.patch.object(schema, "installed_backends", return_value=["memory"]),
            schedule_stacks.known(schedule.stack),
        ):
            met = loop.run(schedule.play())
    except BaseException as error:
        error.add_note(f"seed {seed}; to see it again: python -m tests.schedules {seed}")
        raise
    return Played(seed, schedule.digest, met)


def main(seeds: Sequence[str]) -> None:
    """Replay the schedules of these seeds, with all that happened in the one that fails."""
    for seed in seeds:
        trace: list[str] = []
        try:
            played = play(int(seed), trace)
        except BaseException:
            sys.stdout.write("\n".join(trace) + "\n")
            raise
        sys.stdout.write(f"{played}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
