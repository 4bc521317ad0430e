"""The third tier of a schedule: a content store that outlives caches, behind backends that fail as
the seed has it, and what must hold of both.

What is proved on the way, besides what `schedules` proves of the rest:

* in the step in which an object is written: it is a page that somebody has published, its bytes are
  those of the oracle, it passes `RecordFormat.check`, and the page above it is kept;
* the cache deletes nothing but what it was shown to be wrong;
* what the tree believes to be stored, and what it has given up without counting it as dropped, is;
* lent buffers stay quiet (`FaultyBackend.violations`);
* in the end nothing is read, written, queued or held, every turn has come home, the breakers are
  closed, what was used is kept, and a fresh cache finds all that is kept, with its bytes, and
  nothing in another namespace.

What the schedule itself has spoilt is excused, by page: `gone` may be missing under pages that are
kept, `wrong` may be kept with other bytes, `doubted` may be deleted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiered_cache import ClosedError, RadixKey
from tiered_cache.errors import BackendError, ConfigError
from tiered_cache.storage.backend import SCOPE_BYTES, ObjectKey, ReadResult, WriteResult
from tiered_cache.storage.health import HealthState
from tiered_cache.storage.record import RecordFormat
from tiered_cache.testing.faulty_backend import Call, Fault, FaultyBackend, flipped, short, torn
from tiered_cache.testing.oracle import _digests, _row, path_tokens
from tiered_cache.tree.node import BASE
from tiered_cache_memory import Kept, MemoryBackend

if TYPE_CHECKING:
    from tests.schedules import Schedule
    from tiered_cache.storage.backend import StorageBackend
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


class Content(MemoryBackend):
    """What is kept, and whether that may be."""

    def __init__(self, third: ThirdTier) -> None:
        super().__init__(kept=third.kept)
        self._third = third
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
            if page_of(key) not in self._third.doubted:
                self._third.schedule.faults.append("a page was deleted that nobody doubted")
        self._third.gone.update(map(page_of, keys))
        await super().delete(keys)

    async def clear(self, scope: bytes) -> int:
        self._third.gone.update(map(page_of, self.rows))
        self._third.doubted.update(map(page_of, self.rows))
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
        self.kept = Kept()
        self.gone: set[bytes] = set()
        self.wrong: set[bytes] = set()
        self.doubted: set[bytes] = set()
        self._pages: dict[bytes, tuple[str, bytes, bytes | None]] = {}
        """By key: salt, tokens up to the page's end, key of the page above."""
        self._backends: list[DrawnBackend] = []
        self._tiers: list[StorageTier] = []
        self._num_changing = 0
        self._record: RecordFormat

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
        if call.keys and draws.random() < shape.lying:
            lie = {"contains": self._lie, "read": self._misread, "write": self._miswrite}
            if call.op in lie:
                self.schedule.meet(f"{call.op} with a lie")
                faults.append(lie[call.op](call, draws.choice(call.keys)))
        return faults

    def _lie(self, call: Call, key: ObjectKey) -> Fault:
        if self.schedule.draws.random() < 0.1:
            return Fault("contains", answer=lambda answer: answer[:-1])
        is_there = key in self.kept.rows
        if not is_there:
            self.gone.add(page_of(key))
        return Fault("contains", keys=[key], result=not is_there)

    def _misread(self, call: Call, key: ObjectKey) -> Fault:
        draws = self.schedule.draws
        if draws.random() < 0.1:
            return Fault("read", answer=lambda answer: answer[:-1])
        self.doubted.add(page_of(key))
        if draws.random() < 0.5:
            return Fault("read", keys=[key], change=self._change())
        results = (ReadResult.MISSING, ReadResult.FAILED, ReadResult.CORRUPT)
        return Fault("read", keys=[key], result=draws.choice(results))

    def _miswrite(self, call: Call, key: ObjectKey) -> Fault:
        draws, page = self.schedule.draws, page_of(key)
        choice = draws.random()
        if choice < 0.6:
            results = (WriteResult.REFUSED, WriteResult.FAILED)
            return Fault("write", keys=[key], result=draws.choice(results))
        if key not in self.kept.rows:
            self.gone.add(page)
        if choice < 0.8:
            return Fault("write", keys=[key], result=WriteResult.WRITTEN)
        self.doubted.add(page)
        self.wrong.add(page)
        return Fault("write", keys=[key], change=self._change())

    def _change(self) -> Callable[[bytes], bytes]:
        draws = self.schedule.draws
        at = draws.choice((draws.randrange(self._record.payload_end), 8, 512, 600))
        change = draws.choice((flipped, flipped, torn, short))
        return lambda row: change(min(at, len(row) - 1))(row) if row else row

    def _spoil(self) -> None:
        """Behind everybody's back."""
        draws, rows = self.schedule.draws, self.kept.rows
        if not rows:
            return
        key = draws.choice(list(rows))
        page = page_of(key)
        self.schedule.meet("objects spoilt behind the cache's back")
        if draws.random() < 0.5:
            self.gone.add(page)
            self.kept.num_bytes -= len(rows.pop(key))
        else:
            self.doubted.add(page)
            self.wrong.add(page)
            row = self._change()(rows[key])
            self.kept.num_bytes += len(row) - len(rows[key])
            rows[key] = row

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
            num_kept += sum(map(self._is_kept, page_keys(salt, data, size)))
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
            self.kept = Kept()
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
        self._record = tier.io.formats[BASE]
        give_up, arrived = tier.io.give_up, tier.prefetches._arrived

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
            is_hit = not call.is_read and rows is not None and bool(np.isin(rows, call.ids).any())
            self.schedule.meet("splits while a backup is under way", is_hit)

    def look_at_written(self, content: Content, key: ObjectKey) -> None:
        """In the step in which an object is written."""
        page, row = page_of(key), memoryview(content.rows[key])
        if key[:SCOPE_BYTES] != self._record.scope or page not in self._pages:
            self._fail("an object is kept that nobody has published")
            return
        salt, tokens, above = self._pages[page]
        verdict = self._record.check(row, page)
        if verdict is None:
            verdict = self._verdict_on_bytes(row, salt, tokens)
        if verdict is not None and page not in self.wrong:
            self._fail(f"a kept row {verdict}")
        if above is not None and not self._may_lack(content, above):
            self._fail("a page is kept, and the one above it is not")
        if verdict is None:
            self.wrong.discard(page)
            self.gone.discard(page)

    def _may_lack(self, content: Content, page: bytes) -> bool:
        """Whether a page is kept, or the schedule has seen to it that it is not."""
        if ObjectKey(self._record.scope + page) in content.rows or page in self.gone:
            return True
        return any(
            fault.result is not None and fault.names(self._record.scope + page)
            for call in content.faulty.under_way
            if call.op == "write"
            for fault in call.faults
        )

    def _verdict_on_bytes(self, row: memoryview, salt: str, tokens: bytes) -> str | None:
        size = self.schedule.page_size
        key = RadixKey(np.frombuffer(tokens, np.int64).tolist(), cache_salt=salt)
        digests = _digests(key.namespace, tokens)[-size:]
        for piece in self.schedule.cache.arenas[BASE].layout.slices:
            label = f"full/{piece.pool}/{piece.layer}".encode()
            wanted = b"".join(_row(each, label, piece.num_bytes // size) for each in digests)
            if row[piece.offset : piece.offset + piece.num_bytes] != wanted:
                return "has the bytes of another page"
        return None

    def _fail(self, words: str) -> None:
        self.schedule.faults.append(words)

    def _is_kept(self, page: bytes) -> bool:
        return ObjectKey(self._record.scope + page) in self.kept.rows

    def prove(self) -> None:
        """What holds between any two callbacks."""
        for backend in self._backends:
            assert backend.violations == [], backend.violations
        tier, size = self.schedule.controller.storage, self.schedule.page_size
        if tier is not None:
            quota = max(1, self.schedule.shape.host_pages // 2)
            assert tier.prefetches.num_pages <= quota, "more than prefetches may have"
        if self._num_changing:
            return
        for node in self.schedule.cache.tree.nodes():
            if node.data[BASE].stored:
                keys = page_keys(node.namespace.cache_salt, path_tokens(node), size)
                for page in keys[node.start // size :]:
                    assert self._is_kept(page) or page in self.gone, f"{node!r} is not stored"

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
        for at, page in enumerate(page_keys(salt, data, size)):
            is_there = any(node.start <= at * size < node.end for node in live)
            if at * size >= start and not is_there:
                assert self._is_kept(page) or page in self.gone, (
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
            base = node.data[BASE]
            if not base.stored:
                assert base.host_value is None, (
                    f"{node!r} was used and is not stored:\n{self.schedule.cache.pretty_print()}"
                )
                break

    async def read_all(self) -> None:
        """A fresh cache finds what is kept, and it is what it should be."""
        schedule, size = self.schedule, self.schedule.page_size
        cache, shape = schedule.cache, schedule.shape
        least = max(self.shape.threshold, size)
        samples = schedule.draws.sample(sorted(schedule.known), min(3, len(schedule.known)))
        for salt, data in samples:
            tokens = np.frombuffer(data, np.int64).tolist()
            num_kept = 0
            for page in page_keys(salt, data, size):
                if not self._is_kept(page) or page in self.wrong:
                    break
                num_kept += 1
            hit = schedule.match(salt, tokens, None).best_length
            with cache.prefetch(tokens, cache_salt=salt) as handle:
                got = await handle.wait("wait_complete")
                # Its own prefix is held meanwhile, and so takes room where there is little.
                room = min(max(1, shape.host_pages // 2), shape.host_pages - hit // size)
                wanted = min(num_kept * size, hit + room * size)
                if len(tokens) - hit < least or num_kept * size - hit < least:
                    wanted = 0
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

    def prove_end(self) -> None:
        """After everything."""
        for backend in self._backends:
            assert backend.violations == [], backend.violations
            assert backend.under_way == []
        for key, row in self.kept.rows.items():
            page = page_of(key)
            assert page in self.wrong or self._record.check(memoryview(row), page) is None
        for tier in self._tiers:
            for name in tier.counters.__slots__:
                self.schedule.meet(f"storage: {name}", getattr(tier.counters, name))


def page_of(key: bytes) -> bytes:
    return key[SCOPE_BYTES:]


@lru_cache(maxsize=4096)
def page_keys(salt: str, data: bytes, page_size: int) -> tuple[bytes, ...]:
    """Of all whole pages of tokens as `RadixKey.data` has them."""
    key = RadixKey(np.frombuffer(data, np.int64).tolist(), cache_salt=salt)
    return tuple(key.page_keys(page_size))
