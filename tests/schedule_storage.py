"""The third tier of a schedule: a content store that outlives caches, behind backends that fail as
the seed has it, and what must hold of both.

What is proved on the way, besides what `schedules` proves of the rest:

* in the step in which an object is written: it is a page that somebody has published, its bytes are
  those of the oracle, it passes `RecordFormat.check`, and what it hangs on is kept: of the base the
  page above it, of a window or a state the base of its own page;
* the cache deletes nothing but what it was shown to be wrong;
* what the tree believes to be stored, and what it has given up without counting it as dropped, is;
* lent buffers stay quiet (`FaultyBackend.violations`);
* in the end nothing is read, written, queued or held, every turn has come home, the breakers are
  closed, what was used is kept, and a fresh cache finds all that is kept, with its bytes, and
  nothing in another namespace.

What the schedule itself has spoilt is excused, by store and object (`Spoilt`).
"""

from __future__ import annotations

import asyncio
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tests.schedule_stacks import KINDS, kind_of
from tiered_cache import ClosedError, RadixKey
from tiered_cache.errors import BackendError, ConfigError
from tiered_cache.prefetch_parts import PrefetchesOfParts
from tiered_cache.storage.backend import SCOPE_BYTES, ObjectKey, ReadResult, WriteResult
from tiered_cache.storage.health import HealthState
from tiered_cache.testing.component_scene import legal_depths, pages_there
from tiered_cache.testing.faulty_backend import Call, Fault, FaultyBackend, flipped, short, torn
from tiered_cache.testing.oracle import _digests, _row, path_tokens
from tiered_cache.tree.node import BASE, Node
from tiered_cache_memory import Kept, MemoryBackend

if TYPE_CHECKING:
    from tests.schedules import Schedule
    from tiered_cache.storage.backend import StorageBackend
    from tiered_cache.storage.record import RecordFormat
    from tiered_cache.storage_io import StorageCall
    from tiered_cache.storage_tier import StorageTier

ROW_BYTES: Final = 4096

CALL_S: Final = (0.0, 0.5, 1.0, 1.0)
"""What a call takes that is not late."""

LATE_S: Final = (1.0, 2.0, 3.0, 6.0, 20.0, 200.0)
"""How much later a call that is late goes on; the last ones are beyond every limit here."""

WELL_S: Final = 300.0
"""By then everything has ended that was late, and every breaker has tried again."""

ERRORS: Final = (
    BackendError("no"),
    OSError("no"),
    TimeoutError(),
    ValueError("no"),
    asyncio.CancelledError(),
)

MAX_CALLS: Final = 12
"""Whose limits somebody may wait for one after the other; who waits longer waits for a hung one."""

NOBODY: Final = "nobody"
"""A namespace in which nothing was published."""


@dataclass(frozen=True)
class StorageShape:
    """What does not change of it within a schedule. Times in seconds, room in pages."""

    timeout: float
    concurrency: int
    threshold: int
    policy: str
    prefetch_s: float
    result_ttl: float
    max_pending: int
    failures: int
    raising: float
    """Share of the calls that raise; `late`: that go on late, or never in time; `lying`: of which a
    page is lied about, or other bytes are read or kept."""
    late: float
    lying: float
    spoiling: float
    """Share of an operator's steps in which he spoils what is kept; `changing`: in which he
    detaches, attaches or clears."""
    changing: float
    misreading: float = 0.0
    """Share of the reads of windows and states that are lied about, if that is more."""

    @classmethod
    def drawn(cls, draws: random.Random, page_size: int) -> StorageShape:
        is_calm = draws.random() < 0.3
        return cls(
            timeout=draws.choice((2.0, 2.0, 4.0)),
            concurrency=draws.choice((1, 2, 8)),
            threshold=draws.choice((0, 0, 0, 2 * page_size + 1)),
            policy=draws.choice(("timeout",) * 3 + ("wait_complete",) * 5 + ("best_effort",)),
            prefetch_s=draws.choice((0.5, 2.0, 4.0)),
            result_ttl=draws.choice((1.0, 5.0, 30.0)),
            max_pending=draws.choice((2, 8, 1000)),
            failures=draws.choice((1, 3, 5)),
            raising=0.0 if is_calm else draws.choice((0.0, 0.05, 0.15)),
            late=0.05 if is_calm else draws.choice((0.05, 0.3)),
            lying=0.0 if is_calm else draws.choice((0.0, 0.1, 0.2)),
            spoiling=draws.choice((0.0, 0.2)),
            changing=draws.choice((0.0, 0.0, 0.0, 0.1, 0.3)),
        )

    def section(self, page_size: int) -> dict[str, Any]:
        """Of the configuration."""
        return {
            "backend": "memory",
            "timeout": self.timeout,
            "max_concurrency": self.concurrency,
            "prefetch": {
                "policy": self.policy,
                "threshold": self.threshold,
                "timeout_base": self.prefetch_s,
                "result_ttl": self.result_ttl,
            },
            "backup": {"max_pending": self.max_pending * ROW_BYTES},
            "breaker": {"failures": self.failures, "retry_after": 1, "max_retry_after": 4},
        }


class Spoilt(Kept):
    """What one store keeps, and what the schedule itself has spoilt of it: `gone` may be missing
    under what is kept, `wrong` may be kept with other bytes, `doubted` may be deleted."""

    __slots__ = ("doubted", "gone", "wrong")

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[ObjectKey] = set()
        self.wrong: set[ObjectKey] = set()
        self.doubted: set[ObjectKey] = set()


class Content(MemoryBackend):
    """What is kept, and whether that may be."""

    def __init__(self, third: ThirdTier) -> None:
        super().__init__(kept=third.kept)
        self._third = third
        self.store = third.kept
        """Also when another one has been attached: a call may end late."""
        self.faulty: FaultyBackend

    @property
    def rows(self) -> dict[ObjectKey, bytes]:
        return self._kept.rows

    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        result = super()._write(key, row)
        if result is WriteResult.WRITTEN:
            self._third.look_at_written(self, key)
        return result

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            if key not in self.store.doubted:
                self._third.schedule.faults.append("a page was deleted that nobody doubted")
        self.store.gone.update(keys)
        await super().delete(keys)

    async def clear(self, scope: bytes) -> int:
        cleared = [key for key in self.rows if key.startswith(scope)]
        self.store.gone.update(cleared)
        self.store.doubted.update(cleared)
        return await super().clear(scope)


class DrawnBackend(FaultyBackend):
    """Fails as the third tier draws it."""

    def __init__(self, third: ThirdTier) -> None:
        content = Content(third)
        super().__init__(content)
        content.faulty = self
        self._third = third

    def _meet(self, call: Call) -> list[Fault]:
        return self._third.draw_faults(call)


class ThirdTier:
    """One per schedule that has it; `kept` is what all caches of the schedule share."""

    def __init__(self, schedule: Schedule, shape: StorageShape) -> None:
        self.schedule = schedule
        self.shape = shape
        self.kept = Spoilt()
        self._pages: dict[bytes, tuple[str, bytes, bytes | None]] = {}
        """By key: salt, tokens up to the page's end, key of the page above."""
        self._backends: list[DrawnBackend] = []
        self._tiers: list[StorageTier] = []
        self._num_changing = 0
        self._formats: Sequence[RecordFormat]
        """By component."""

    def load_backend(self, name: str) -> type[StorageBackend]:
        """In place of the registry's."""
        self._backends.append(DrawnBackend(self))
        return self._backends[-1].opened_as()

    # --- what goes wrong --------------------------------------------------------------------------

    def draw_faults(self, call: Call) -> list[Fault]:
        """For a call that begins."""
        shape, draws, faults = self.shape, self.schedule.draws, list[Fault]()
        if self.schedule.is_over:
            return faults
        at: Any = draws.choice(("before", "inside", "after"))
        is_stubborn = draws.random() < 0.5
        late = draws.choice(CALL_S) * (1.5 if call.op == "write" else 1.0)
        if draws.random() < shape.late:
            late += draws.choice(LATE_S)
        if late:
            faults.append(Fault(call.op, at=at, delay=late, stubborn=is_stubborn))
        if draws.random() < shape.raising:
            self.schedule.meet("storage calls that raise")
            faults.append(Fault(call.op, at=at, error=draws.choice(ERRORS)))
        if call.keys and draws.random() < self._share_of_lies(call):
            lie = {"contains": self._lie, "read": self._misread, "write": self._miswrite}
            if call.op in lie:
                self.schedule.meet(f"{call.op} with a lie")
                faults.append(lie[call.op](call, draws.choice(call.keys)))
        return faults

    def _share_of_lies(self, call: Call) -> float:
        if call.op == "read" and self._component_of(call.keys[0]) != BASE:
            return max(self.shape.lying, self.shape.misreading)
        return self.shape.lying

    def _lie(self, call: Call, key: ObjectKey) -> Fault:
        if self.schedule.draws.random() < 0.1:
            return Fault("contains", answer=lambda answer: answer[:-1])
        is_there = key in self.kept.rows
        if not is_there:
            self.kept.gone.add(key)
        return Fault("contains", keys=[key], result=not is_there)

    def _misread(self, call: Call, key: ObjectKey) -> Fault:
        draws = self.schedule.draws
        if draws.random() < 0.1:
            return Fault("read", answer=lambda answer: answer[:-1])
        self.kept.doubted.add(key)
        if draws.random() < 0.5:
            return Fault("read", keys=[key], change=self._change(key))
        results = (ReadResult.MISSING, ReadResult.FAILED, ReadResult.CORRUPT)
        return Fault("read", keys=[key], result=draws.choice(results))

    def _miswrite(self, call: Call, key: ObjectKey) -> Fault:
        draws = self.schedule.draws
        choice = draws.random()
        if choice < 0.6:
            results = (WriteResult.REFUSED, WriteResult.FAILED)
            return Fault("write", keys=[key], result=draws.choice(results))
        if key not in self.kept.rows:
            self.kept.gone.add(key)
        if choice < 0.8:
            return Fault("write", keys=[key], result=WriteResult.WRITTEN)
        self.kept.doubted.add(key)
        self.kept.wrong.add(key)
        return Fault("write", keys=[key], change=self._change(key))

    def _change(self, key: ObjectKey) -> Callable[[bytes], bytes]:
        draws, record = self.schedule.draws, self._formats[self._component_of(key)]
        at = draws.choice((draws.randrange(record.payload_end), 8, 512, 600))
        change = draws.choice((flipped, flipped, torn, short))
        return lambda row: change(min(at, len(row) - 1))(row) if row else row

    def _spoil(self) -> None:
        """Behind everybody's back."""
        draws, rows = self.schedule.draws, self.kept.rows
        if not rows:
            return
        key = draws.choice(list(rows))
        self.schedule.meet("objects spoilt behind the cache's back")
        if draws.random() < 0.5:
            self.kept.gone.add(key)
            self.kept.num_bytes -= len(rows.pop(key))
        else:
            self._spoil_row(key)

    def _spoil_row(self, key: ObjectKey) -> None:
        rows = self.kept.rows
        self.kept.doubted.add(key)
        self.kept.wrong.add(key)
        row = self._change(key)(rows[key])
        self.kept.num_bytes += len(row) - len(rows[key])
        rows[key] = row

    def _spoil_boundary(self, salt: str, data: bytes, depth: int) -> None:
        """Something of a window or a state that a prefix needs which ends there."""
        size, roles = self.schedule.page_size, self.schedule.rule.roles
        needed = [
            key
            for index, role in enumerate(roles)
            for key in [self._objects(salt, data, index)[at] for at in role.needed(depth, size)]
            if index != BASE and self._is_fine(key)
        ]
        if needed:
            self._spoil_row(self.schedule.draws.choice(needed))

    # --- what is done with it ---------------------------------------------------------------------

    def most_kept(self) -> tuple[str, list[int]]:
        """Of some prefixes, the one with most pages in storage that are nowhere else."""
        schedule, size = self.schedule, self.schedule.page_size
        best, most = ("", list[int]()), -1
        known = sorted(schedule.known)
        for salt, data in schedule.draws.sample(known, min(6, len(known))):
            tokens = np.frombuffer(data, np.int64).tolist()
            num_kept = 0
            if not schedule.cache.closed:
                num_kept = -(schedule.match(salt, tokens, None).best_length // size)
            num_kept += sum(map(self._is_kept, self._objects(salt, data)))
            if num_kept > most:
                best, most = (salt, tokens), num_kept
        return best

    async def prefetch(self, tokens: list[int], salt: str) -> None:
        """Somebody who has a prefix brought ahead of need."""
        cache, schedule, draws = self.schedule.cache, self.schedule, self.schedule.draws
        if draws.random() < 0.7 and schedule.known:
            salt, tokens = self.most_kept()
        is_detached = draws.random() < 0.2
        try:
            handle = cache.prefetch(tokens, cache_salt=salt, detach=is_detached)
        except ValueError:
            assert not cache.storage
            return
        except ClosedError:
            assert cache.closed
            return
        schedule.meet("prefetches by hand")
        if is_detached:
            schedule.meet("detached prefetches")
            return
        with handle:
            for _ in range(draws.choice((1, 1, 2))):
                await self._use(handle, len(tokens))
        handle.close()

    async def _use(self, handle: Any, length: int) -> None:
        schedule, draws = self.schedule, self.schedule.draws
        how = draws.choice(("wait", "wait", "wait", "wait", "end", "leave", "close"))
        reached = 0
        if how == "wait":
            policy = draws.choice(
                (None, "wait_complete", "wait_complete", "timeout", "best_effort")
            )
            timeout = draws.choice((None, None, None, 0, 1, 3))
            began = schedule.loop.time()
            reached = await handle.wait(policy, timeout)
            took = schedule.loop.time() - began
            assert took <= MAX_CALLS * self.shape.timeout, f"waited {took} s: {handle.why}"
            assert handle.is_done
            assert handle.why
        elif how == "end":
            await schedule.pause()
            reached = handle.done_now()
        elif how == "leave":
            schedule.meet("prefetches left to their time")
            await asyncio.sleep(draws.choice((1, self.shape.result_ttl + 1)))
        else:
            await schedule.pause()
        assert 0 <= reached <= length
        assert reached % schedule.page_size == 0
        schedule.step()

    async def operate(self) -> None:
        """Somebody who spoils what is kept, changes the storage tier, and looks."""
        schedule, draws, cache = self.schedule, self.schedule.draws, self.schedule.cache
        while not cache.closed:
            await asyncio.sleep(draws.choice((1, 2, 3)))
            choice = draws.random()
            try:
                if choice < self.shape.spoiling:
                    self._spoil()
                elif choice < self.shape.spoiling + self.shape.changing:
                    await self._change_tier()
                elif cache.storage:
                    cache.storage.health()
            except ClosedError:
                assert cache.closed
            schedule.step()

    async def _change_tier(self) -> None:
        schedule, draws, cache = self.schedule, self.schedule.draws, self.schedule.cache
        if not cache.storage:
            await self._attach()
        elif draws.random() < 0.15:
            schedule.meet("clears")
            try:
                await cache.storage.clear()
            except BackendError:
                schedule.meet("clears that fail")
        else:
            await self._detach()

    async def _detach(self) -> None:
        schedule, draws, cache = self.schedule, self.schedule.draws, self.schedule.cache
        schedule.meet("detaches")
        schedule.meet(
            "detaches with storage calls under way", bool(cache._controller.storage_calls())
        )
        limit = draws.choice((0, 1, 10, None))
        self._num_changing += 1
        detaching = schedule.loop.create_task(cache.storage.detach(limit))
        try:
            await schedule.pause()
            if draws.random() < 0.3 and not cache.closed:
                await self._attach()
            await detaching
        except asyncio.CancelledError:
            detaching.cancel()
            await asyncio.wait([detaching])
            raise
        finally:
            self._num_changing -= 1
        if draws.random() < 0.6 and not cache.closed:
            await self._attach()

    async def _attach(self) -> None:
        cache, draws = self.schedule.cache, self.schedule.draws
        if not cache.storage and not self._num_changing and draws.random() < 0.15:
            self.schedule.meet("other stores")
            self.kept = Spoilt()
            self.schedule.forget()
        try:
            await cache.storage.attach(self.schedule.shape.config())
        except ConfigError:
            raise
        except ValueError:
            return  # another was faster
        self.schedule.meet("attaches")
        self.attached()

    def attached(self) -> None:
        """There is a new tier: watch it."""
        schedule, tier = self.schedule, self.schedule.controller.storage
        if tier is None or tier in self._tiers:
            return
        self._tiers.append(tier)
        self._formats = tier.io.formats
        give_up, arrived = tier.io.give_up, tier.prefetches._arrived
        components = schedule.cache.tree.components

        def giving_up(call: StorageCall) -> None:
            is_under_way = call.is_read and not (call.is_quiet or call.is_given_up)
            schedule.meet("reads given up under way", is_under_way)
            give_up(call)

        def arriving(prefetch: Any, start: int, page_keys: Sequence[bytes], call: Any) -> None:
            before = schedule.controller.counters.pages_prefetched
            arrived(prefetch, start, page_keys, call)
            is_more = schedule.controller.counters.pages_prefetched > before
            schedule.meet("reads that brought something", is_more)
            is_short = 0 < call.num_good < len(call.ids)
            schedule.meet("reads that brought a part", is_more and is_short)
            if call.component != BASE and is_more:
                kind = KINDS[kind_of(components[call.component].id)]
                schedule.meet(f"reads that brought {kind}")
                is_alone = not prefetch.brought[BASE]
                schedule.meet("tombstones that storage alone made good", is_alone)

        def going_for(prefetch: Any) -> int:
            before, call = prefetch.parts.goal, prefetch.call
            had = began_with.setdefault(prefetch, prefetch.reached)
            goal: int = find_goal(prefetch)
            is_short = call is not None and call.error is None and call.num_good < len(call.ids)
            is_back = is_short and had < goal < min(before, prefetch.parts.most)
            schedule.meet("prefetches that fell back to another boundary", is_back)
            return goal

        if isinstance(tier.prefetches, PrefetchesOfParts):
            find_goal = tier.prefetches._goal
            began_with: dict[Any, int] = {}
            tier.prefetches._goal = going_for  # type: ignore[method-assign]
        tier.io.give_up = giving_up  # type: ignore[method-assign]
        tier.prefetches._arrived = arriving  # type: ignore[method-assign]

    # --- proof ------------------------------------------------------------------------------------

    def note_published(self, salt: str, data: bytes) -> None:
        """All whole pages of these tokens may be kept."""
        size, above = self.schedule.page_size, None
        for at, key in enumerate(page_keys(salt, data, size), 1):
            self._pages[key] = (salt, data[: at * size * 8], above)
            above = key

    def note_split(self, child: Any) -> None:
        """Whether what is split is being written."""
        rows = child.data[BASE].host_value
        for call in self.schedule.controller.storage_calls():
            is_write = not call.is_read and call.component == BASE
            is_hit = is_write and rows is not None and bool(np.isin(rows, call.ids).any())
            self.schedule.meet("splits while a backup is under way", is_hit)

    def look_at_written(self, content: Content, key: ObjectKey) -> None:
        """In the step in which an object is written."""
        page, row = key[SCOPE_BYTES:], memoryview(content.rows[key])
        scopes = [record.scope for record in self._formats]
        if key[:SCOPE_BYTES] not in scopes or page not in self._pages:
            self._fail("an object is kept that nobody has published")
            return
        salt, tokens, above = self._pages[page]
        index = self._component_of(key)
        verdict = self._formats[index].check(row, page)
        if verdict is None:
            verdict = self._verdict_on_bytes(index, row, salt, tokens)
        if verdict is not None and key not in content.store.wrong:
            self._fail(f"a kept row {verdict}")
        hangs_on = above if index == BASE else page
        if hangs_on is not None and not self._may_lack(content, hangs_on):
            self._fail("a page is kept, and what it hangs on is not")
        if verdict is None:
            content.store.gone.discard(key)
            if not self._will_be_spoilt(key):
                content.store.wrong.discard(key)

    def _component_of(self, key: bytes) -> int:
        """Whose object it is."""
        scopes = [record.scope for record in self._formats]
        return scopes.index(key[:SCOPE_BYTES])

    def _may_lack(self, content: Content, page: bytes) -> bool:
        """Whether the base of a page is kept, or the schedule has seen to it that it is not."""
        key = self._formats[BASE].object_key(page)
        if key in content.rows or key in content.store.gone:
            return True
        return any(
            fault.result is not None and fault.names(key)
            for call in content.faulty.under_way
            if call.op == "write"
            for fault in call.faults
        )

    def _will_be_spoilt(self, key: ObjectKey) -> bool:
        """Whether a write that is late will put other bytes there."""
        return any(
            fault.change is not None and fault.names(key)
            for backend in self._backends
            for call in backend.under_way
            if call.op == "write"
            for fault in call.faults
        )

    def _verdict_on_bytes(
        self, index: int, row: memoryview, salt: str, tokens: bytes
    ) -> str | None:
        cache, size = self.schedule.cache, self.schedule.page_size
        component = cache.tree.components[index]
        key = RadixKey(np.frombuffer(tokens, np.int64).tolist(), cache_salt=salt)
        # Of a page the rows of all its tokens; a state is that of the last one.
        digests = _digests(key.namespace, tokens)[-size if component.is_per_page else -1 :]
        for piece in cache.arenas[index].layout.slices:
            label = f"{component.id}/{piece.pool}/{piece.layer}".encode()
            each_bytes = piece.num_bytes // len(digests)
            wanted = b"".join(_row(each, label, each_bytes) for each in digests)
            if row[piece.offset : piece.offset + piece.num_bytes] != wanted:
                return "has the bytes of another page"
        return None

    def _fail(self, words: str) -> None:
        self.schedule.faults.append(words)

    def _objects(self, salt: str, data: bytes, index: int = BASE) -> list[ObjectKey]:
        """Those of a component, of all whole pages of tokens; of a state, at each page's end."""
        pages = page_keys(salt, data, self.schedule.page_size)
        return [self._formats[index].object_key(page) for page in pages]

    def _is_kept(self, key: ObjectKey) -> bool:
        return key in self.kept.rows

    def _is_fine(self, key: ObjectKey) -> bool:
        """Whether it is kept as it was written."""
        return key in self.kept.rows and key not in self.kept.wrong

    def prove(self) -> None:
        """What holds between any two callbacks."""
        for backend in self._backends:
            assert backend.violations == [], backend.violations
        tier, size = self.schedule.controller.storage, self.schedule.page_size
        if tier is not None:
            for index, quota in enumerate(self._quotas()):
                num_pages = tier.prefetches._num_pages_of(index)
                assert num_pages <= quota, "more than prefetches may have"
        if self._num_changing:
            return
        tree = self.schedule.cache.tree
        for node in tree.nodes():
            for component, part in zip(tree.components, node.data, strict=True):
                if not part.stored:
                    continue
                salt, data = node.namespace.cache_salt, path_tokens(node)
                first = component.part_start(node) // size
                for key in self._objects(salt, data, component.index)[first:]:
                    assert self._is_kept(key) or key in self.kept.gone, (
                        f"{component.id} of {node!r} is not stored"
                    )

    def _quotas(self) -> list[int]:
        """By component, what prefetches may have of the host: half, and one boundary's need."""
        size, quotas = self.schedule.page_size, list[int]()
        assert self.schedule.controller.host_pages is not None
        allocators = self.schedule.controller.host_pages.allocators
        for role, allocator in zip(self.schedule.rule.roles, allocators, strict=True):
            least = 1
            if len(quotas):  # a shorter prefix needs less of the base
                depths = range(size, (allocator.capacity + 1) * size, size)
                least = max(len([*role.needed(depth, size)]) for depth in depths)
            quotas.append(max(1, allocator.capacity // 2, least))
        return quotas

    def prove_kept(self, salt: str, data: bytes, start: int) -> None:
        """Of what was published, and nothing of which was dropped, storage has what the other tiers
        cannot reach."""
        size, tree = self.schedule.page_size, self.schedule.cache.tree
        key = RadixKey(np.frombuffer(data, np.int64).tolist(), cache_salt=salt)
        path, _ = tree._known(key, len(key))
        live = [
            node
            for node in path
            if node.data[BASE].value is not None or node.data[BASE].host_value is not None
        ]
        for at, page in enumerate(self._objects(salt, data)):
            is_there = any(node.start <= at * size < node.end for node in live)
            if at * size >= start and not is_there:
                assert self._is_kept(page) or page in self.kept.gone, (
                    f"page {at} of {key!r} was given up, and is not stored"
                )

    async def is_well(self) -> None:
        """Nothing is late any more, and every breaker has had the time to try again."""
        await asyncio.sleep(WELL_S)
        if not self.schedule.cache.storage:
            await self._attach()
        await self.schedule.cache.drain()

    def prove_quiet(self) -> None:
        """Nothing is under way."""
        tier = self.schedule.controller.storage
        assert tier is not None
        stats = tier.stats()
        assert stats.is_connected, stats
        waiting = stats.calls_hung, stats.calls_queued, stats.pages_pending, stats.pages_prefetched
        assert waiting == (0, 0, 0, 0), stats
        assert tier.reads.state in (HealthState.CLOSED, HealthState.DEGRADED), stats
        assert not len(tier.io)
        prefetches, backups = tier.prefetches, tier.backups
        assert not prefetches._active, prefetches._active
        assert not prefetches._reading
        assert not backups._queue
        assert not backups._queued
        assert backups._worker is None
        limited: Any = tier.io._limited
        assert limited._turns._value - limited._surplus == self.shape.concurrency
        assert not limited._waiting

    def prove_backed_up(self, salt: str, data: bytes) -> None:
        """What was used just now is stored, as far as the host has it from the root on."""
        key = RadixKey(np.frombuffer(data, np.int64).tolist(), cache_salt=salt)
        path, _ = self.schedule.cache.tree._known(key, len(key))
        for node in path:
            for part in node.data if node.data[BASE].stored else node.data[:1]:
                assert part.stored or part.host_value is None, (
                    f"{node!r} was used and is not stored:\n{self.schedule.cache.pretty_print()}"
                )
            if not node.data[BASE].stored:
                break

    async def read_all(self) -> None:
        """A fresh cache finds what is kept, and it is what it should be."""
        schedule, size = self.schedule, self.schedule.page_size
        cache = schedule.cache
        least = max(self.shape.threshold, size)
        samples = schedule.draws.sample(sorted(schedule.known), min(3, len(schedule.known)))
        for salt, data in samples:
            tokens = np.frombuffer(data, np.int64).tolist()
            hit = schedule.match(salt, tokens, None).best_length
            wanted = self._can_be_had(salt, data, hit)
            if schedule.stack is not None and wanted > hit and schedule.draws.random() < 0.5:
                self._spoil_boundary(salt, data, wanted)
                wanted = self._can_be_had(salt, data, hit)
            if len(tokens) - hit < least or wanted - hit < least:
                wanted = 0
            with cache.prefetch(tokens, cache_salt=salt) as handle:
                got = await handle.wait("wait_complete")
                assert got >= wanted, (got, wanted, hit, handle.why)
                schedule.meet("read by another cache", got > hit)
            await cache.drain()
            schedule.prove()
            with cache.prefetch(tokens, cache_salt=NOBODY) as handle:
                assert await handle.wait("wait_complete") == 0
            async with cache.lease(tokens, cache_salt=salt) as lease:
                while chunk := await lease.next_chunk(100):
                    await lease.run(schedule.model, chunk)
                    lease.commit(chunk)
            await cache.drain()

    def _stuck(self, key: RadixKey) -> list[int]:
        """By component, pages of the host that cannot make room, off the path of `key`: the device
        has them, too, and storage is not believed to (8.3)."""
        tree = self.schedule.cache.tree
        counts = [0] * len(tree.components)
        if tree.leaves.mirrors_are_spare:
            return counts
        own, _ = tree._known(key, len(key))
        held: set[Node] = set()
        for node in reversed(list(tree.nodes())):
            for at, part in enumerate(node.data):
                if part.host_value is None:
                    continue
                is_stuck = part.value is not None and not part.stored
                if at == BASE:
                    is_stuck = is_stuck or any(map(held.__contains__, node.children.values()))
                    held |= {node} if is_stuck else set()
                counts[at] += len(part.host_value) * (is_stuck and node not in own)
        return counts

    def _can_be_had(self, salt: str, data: bytes, hit: int) -> int:
        """How much of a prefix a prefetch must come to, by pages, if nobody else does anything and
        the first `hit` tokens are there already: what storage has, as far as there is room."""
        schedule, size = self.schedule, self.schedule.page_size
        assert schedule.controller.host_pages is not None
        allocators = schedule.controller.host_pages.allocators
        roles = schedule.rule.roles
        key = RadixKey(np.frombuffer(data, np.int64).tolist(), cache_salt=salt)
        there = pages_there(schedule.cache.tree, key, device_only=False)
        fine = [[*map(self._is_fine, self._objects(salt, data, at))] for at in range(len(roles))]
        both = [list(map(any, zip(*pair, strict=True))) for pair in zip(there, fine, strict=True)]
        # Its own prefix is held meanwhile, and so takes room where there is little.
        stuck = self._stuck(key)
        rooms = [
            min(quota, allocator.capacity - sum(have) - stuck[at])
            for at, (quota, allocator, have) in enumerate(
                zip(self._quotas(), allocators, there, strict=True)
            )
        ]
        lacking = {
            depth: [
                len([page for page in role.needed(depth, size) if not have[page]])
                for role, have in zip(roles, there, strict=True)
            ]
            for depth in legal_depths(roles, both, size)
            if depth > hit
        }
        depth = max((at for at in lacking if lacking[at][BASE] <= rooms[BASE]), default=hit)
        if depth > hit and any(map(operator.gt, lacking[depth], rooms)):
            return hit  # what has no room of a window or of states is as good as not there
        return depth

    def prove_end(self) -> None:
        """After everything."""
        for backend in self._backends:
            assert backend.violations == [], backend.violations
            assert backend.under_way == []
        for key, row in self.kept.rows.items():
            record, page = self._formats[self._component_of(key)], key[SCOPE_BYTES:]
            assert key in self.kept.wrong or record.check(memoryview(row), page) is None
        for tier in self._tiers:
            for name in tier.counters.__slots__:
                self.schedule.meet(f"storage: {name}", getattr(tier.counters, name))


@lru_cache(maxsize=4096)
def page_keys(salt: str, data: bytes, page_size: int) -> tuple[bytes, ...]:
    """Of all whole pages of tokens as `RadixKey.data` has them."""
    key = RadixKey(np.frombuffer(data, np.int64).tolist(), cache_salt=salt)
    return tuple(key.page_keys(page_size))
