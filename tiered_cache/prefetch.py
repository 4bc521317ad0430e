"""Prefetch: from storage to the host, ahead of need (semantics §10.5–8).

Match, probe beyond what device and host have, take host room for what is there, read from the root,
and publish what has arrived and is proved. A result is held on the host until somebody has taken
it. Owns: the prefetches under way, who reads which page, and how much of the host they may have.
Refuses to know: how calls end (storage_io), and who wants a prefix.
"""

from __future__ import annotations

import asyncio
import warnings
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tiered_cache.errors import BackendError, ClosedError, RanksError, StaleError
from tiered_cache.keys import HASH_PAGES
from tiered_cache.storage.backend import ReadResult
from tiered_cache.tree.components.base import NO_PAGES
from tiered_cache.tree.node import BASE
from tiered_cache.types import Boundary, Holding, MatchPrefixParams, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from tiered_cache.accounts import HostPages
    from tiered_cache.config.schema import PrefetchConfig
    from tiered_cache.keys import RadixKey
    from tiered_cache.ranks import Limit, Operation
    from tiered_cache.stats import Counters
    from tiered_cache.storage_io import StorageCall, StorageIO
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import PageIds

PROBE_PAGES: Final = 256
"""Pages that are asked for in one question."""

READ_BYTES: Final = 32 << 20
"""What one call reads at most: enough for several threads, few enough to stop soon."""

KI: Final = 1024

NOBODY_WAITS: Final = "best effort: nobody waits"

POLICIES: Final = ("best_effort", "wait_complete", "timeout")

NUM_QUESTIONS: Final = 2
"""To other ranks: how much storage has, how much has come."""


class PrefetchHooks(NamedTuple):
    """What prefetches need of who owns them."""

    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    join: Callable[[str | None, int], Operation | None]
    """What is done with other ranks, if there are any: by name (None: the next in order), with so
    many questions (semantics §10.10)."""
    changed: Callable[[], None]
    """Host pages have become free, or may be given up now."""
    check_thread: Callable[[], None]
    """Raises from another thread than the cache's."""


class Prefetch:
    """One prefix on its way from storage to the host.

    Attributes:
        reached: tokens of the key that device and host have, and this holds there.
        reading: components and keys of the pages that it is reading.
        brought: by component, pages of the host that it takes of the quota: read, and not taken.
        why: why it ends where it does, for people.
        joint, limit: what it does with other ranks, and what ends it on all of them; None alone.
        parts: what it knows of windows and states, where there are any.
        done: set when no more will come.
    """

    __slots__ = (
        "brought",
        "call",
        "deadline",
        "detached",
        "done",
        "found",
        "is_stopped",
        "joint",
        "key",
        "length",
        "limit",
        "parts",
        "reached",
        "reading",
        "receipt",
        "started_at",
        "task",
        "timer",
        "why",
    )

    def __init__(
        self, key: RadixKey, length: int, now: float, num_components: int, *, detached: bool
    ) -> None:
        self.key = key
        self.length = length
        self.detached = detached
        self.started_at = now
        self.reached = 0
        self.found = 0
        self.brought = [0] * num_components
        self.reading: Sequence[tuple[int, bytes]] = ()
        self.why = ""
        self.done = asyncio.Event()
        self.is_stopped = False
        self.deadline: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.receipt: Receipt | None = None
        self.call: StorageCall | None = None
        self.task: asyncio.Task[None] | None = None
        self.joint: Operation | None = None
        self.limit: Limit | None = None
        self.parts: Any = None

    @property
    def num_pages(self) -> int:
        """All that it takes of the quota."""
        return sum(self.brought)

    @property
    def judges_time(self) -> bool:
        """Whether time limits count here: with several ranks, rank 0 says when it is over."""
        return self.joint is None or self.joint.is_first

    def note(self, why: str) -> None:
        """Why there is no more of it; the first reason stays."""
        if not self.done.is_set():
            self.why = self.why or why

    def end(self, why: str) -> None:
        """No more will come."""
        self.note(why)
        self.done.set()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def __repr__(self) -> str:
        return f"<prefetch of {self.length} tokens, {self.reached} on the host>"


class PrefetchHandle(Holding):
    """Somebody's interest in a prefix. Close it when the prefix was taken, or is not needed: `with
    cache.prefetch(tokens) as handle`, or `handle.close()`."""

    __slots__ = ("__weakref__", "_owner", "_prefetch")

    def __init__(self, owner: Prefetches | NoPrefetches, prefetch: Prefetch | None) -> None:
        self._owner = owner
        self._prefetch = prefetch

    async def wait(self, policy: str | None = None, timeout: float | None = None) -> int:
        """Wait as long as `policy` has it (default: the configured one), and `timeout` seconds at
        most; then the prefetch ends. Returns tokens of the prefix that device and host have.

        Policies: `best_effort` does not wait, `wait_complete` waits to the end, `timeout` for the
        configured time, from the first wait on. With several ranks it ends when rank 0 says so.

        Raises:
            ValueError, TypeError: no such policy, no such limit. ClosedError: the handle is closed.
        """
        prefetch = self._open()
        if policy is not None and policy not in POLICIES:
            raise ValueError(f"policy is best_effort, wait_complete or timeout, not {policy!r}")
        await self._owner.wait(prefetch, policy, seconds("timeout", timeout))
        return prefetch.reached

    def done_now(self, why: str = "ended by its owner") -> int:
        """End it now, with what is there; tokens of the prefix that device and host have. `why`:
        what the handle says then."""
        prefetch = self._open()
        self._owner.stop(prefetch, why)
        return prefetch.reached

    @property
    def tokens(self) -> int:
        """Tokens of the prefix that device and host have so far."""
        return self._open().reached

    @property
    def is_done(self) -> bool:
        """Whether no more will come."""
        return self._open().done.is_set()

    @property
    def why(self) -> str:
        """Why it has ended where it has, for people; empty while it goes on."""
        return self._open().why

    def close(self) -> None:
        """Drop the interest: what is on the host stays cached, and is not held any more. Any number
        of times."""
        self._owner.check_thread()
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            self._owner.close(prefetch)

    def _open(self) -> Prefetch:
        self._owner.check_thread()
        if self._prefetch is None:
            raise ClosedError("this prefetch handle is closed: ask the cache for another")
        return self._prefetch

    def __repr__(self) -> str:
        return f"<PrefetchHandle {self._prefetch or 'closed'!r}>"

    def __del__(self) -> None:
        if self._prefetch is not None:
            self._owner.dropped(self._prefetch)
            warnings.warn(
                f"{self!r} was dropped without being closed", ResourceWarning, stacklevel=2
            )


class NoPrefetches:
    """In place of `Prefetches` where there is no storage now: whatever is asked for has ended, with
    what device and host have.

    Args:
        why: there is none, for people.
    """

    def __init__(self, tree: RadixTree, why: str, check_thread: Callable[[], None]) -> None:
        self._tree = tree
        self._why = why
        self.check_thread = check_thread

    def start(self, key: RadixKey, *, detach: bool = False) -> PrefetchHandle:
        prefetch = Prefetch(key, len(key), 0.0, 0, detached=detach)
        prefetch.reached = self._tree.match_prefix(MatchPrefixParams(key)).best_length
        prefetch.end(self._why)
        return PrefetchHandle(self, None if detach else prefetch)

    async def wait(self, prefetch: Prefetch, policy: str | None, timeout: float | None) -> None: ...
    def stop(self, prefetch: Prefetch, why: str) -> None: ...
    def close(self, prefetch: Prefetch) -> None: ...
    def dropped(self, prefetch: Prefetch) -> None: ...


class Prefetches:
    """All prefetches of a cache. Every method but the coroutines is atomic on the loop."""

    def __init__(
        self,
        tree: RadixTree,
        host: HostPages,
        io: StorageIO,
        settings: PrefetchConfig,
        counters: Counters,
        hooks: PrefetchHooks,
    ) -> None:
        self._tree = tree
        self._page_size = tree.page_size
        self._host = host
        self._io = io
        self._settings = settings
        self._counters = counters
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._quotas = [max(1, allocator.capacity // 2) for allocator in host.allocators]
        self._read_pages = [max(1, READ_BYTES // record.row_bytes) for record in io.formats]
        self._active: dict[Prefetch, None] = {}  # oldest first
        self._reading: dict[tuple[int, bytes], Prefetch] = {}  # component, page key: who reads it

    # --- what a handle does -----------------------------------------------------------------------

    def check_thread(self) -> None:
        """Raise `WrongThreadError` from another thread than the cache's."""
        self._hooks.check_thread()

    @property
    def is_waited_for(self) -> bool:
        """Whether a lease waits for its prefetch before it queues; else it takes what has come when
        it is admitted."""
        return self._settings.policy != "best_effort"

    def is_worth(self, num_tokens: int) -> bool:
        """Whether it is worth asking storage for so many tokens."""
        return num_tokens >= max(self._settings.threshold, self._page_size)

    def start(
        self,
        key: RadixKey,
        limit: int | None = None,
        *,
        detach: bool = False,
        name: str | None = None,
    ) -> PrefetchHandle:
        """Bring what storage has of `key[:limit]`. With `detach` nobody waits for it, and the
        handle is closed. `name`: what ranks know it by (None: the order of asking)."""
        length = len(key) if limit is None else min(limit, len(key))
        length -= length % self._page_size
        num_components = len(self._quotas)
        prefetch = Prefetch(key, length, self._loop.time(), num_components, detached=detach)
        self._active[prefetch] = None
        self._counters.prefetches += 1
        prefetch.joint = self._hooks.join(name, NUM_QUESTIONS)
        if prefetch.joint is not None:
            on_over = partial(self.stop, prefetch, "rank 0 waits no longer")
            prefetch.limit = prefetch.joint.limit(on_over)
        if self._settings.policy == "timeout" and prefetch.judges_time:
            # From the start, until somebody waits.
            limit_s = self._limit_s(prefetch.length)
            prefetch.timer = self._loop.call_later(limit_s, self._too_late, prefetch)
        prefetch.task = self._hooks.spawn(self._run(prefetch), "prefetch")
        prefetch.task.add_done_callback(partial(self._ended, prefetch))
        return PrefetchHandle(self, None if detach else prefetch)

    def _limit_s(self, num_tokens: int) -> float:
        settings = self._settings
        return settings.timeout_base + settings.timeout_per_ki_token * num_tokens / KI

    def _too_late(self, prefetch: Prefetch) -> None:
        self._counters.prefetches_timed_out += 1
        self.stop(prefetch, "storage did not answer in time")

    async def wait(self, prefetch: Prefetch, policy: str | None, timeout: float | None) -> None:
        """See `PrefetchHandle.wait`."""
        policy = policy or self._settings.policy
        judges_time = prefetch.judges_time  # else rank 0 says when it is over
        if policy == "best_effort" and judges_time:
            self.stop(prefetch, NOBODY_WAITS)
            return
        now = self._loop.time()
        ends = [] if timeout is None or not judges_time else [now + timeout]
        if prefetch.timer is not None:  # somebody waits from now on
            prefetch.timer.cancel()
            prefetch.timer = None
        if policy == "timeout" and judges_time:
            if prefetch.deadline is None:
                prefetch.deadline = now + self._limit_s(prefetch.length)
            ends.append(prefetch.deadline)
        try:
            async with asyncio.timeout_at(min(ends, default=None)):
                await prefetch.done.wait()
        except TimeoutError:
            if not prefetch.done.is_set():
                self._too_late(prefetch)

    def stop(self, prefetch: Prefetch, why: str) -> None:
        """No more of it is needed: what is under way ends, and goes home."""
        prefetch.is_stopped = True
        prefetch.end(why)
        self._read_no_more(prefetch)
        if prefetch.call is not None:
            self._io.give_up(prefetch.call)
        if prefetch.task is not None:
            prefetch.task.cancel()
        self._end_for_all(prefetch)

    def _end_for_all(self, prefetch: Prefetch) -> None:
        """If it has not ended by itself, other ranks need not go on either."""
        if prefetch.joint is not None and prefetch.limit is not None:
            prefetch.limit.over()
            prefetch.joint.give_up()

    def close(self, prefetch: Prefetch) -> None:
        """Nobody needs it."""
        self.stop(prefetch, "closed")
        self._let_go(prefetch)
        self._active.pop(prefetch, None)

    def dropped(self, prefetch: Prefetch) -> None:
        """A handle went without being closed (called from its finaliser, in any thread)."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.close, prefetch)

    # --- the way ----------------------------------------------------------------------------------

    async def _run(self, prefetch: Prefetch) -> None:
        """Each `await` marks where the world may change, so each step matches anew."""
        joint = prefetch.joint
        keys: Sequence[bytes] = ()
        try:
            keys = await self._find(prefetch)
        except BackendError as error:
            prefetch.note(str(error))
        except StaleError:
            prefetch.note("the cache was reset")
        had = prefetch.reached
        try:
            if joint is not None:
                await self._agree_on_goal(prefetch, joint)
            await self._bring(prefetch, keys)
        except BackendError as error:
            prefetch.note(str(error))
        except StaleError:
            prefetch.note("the cache was reset")
        except (RanksError, ClosedError) as error:
            prefetch.note(str(error))
        if joint is not None:
            with suppress(RanksError, ClosedError):
                await self._agree_on_result(prefetch, joint)
        prefetch.end("all that storage has of it is on the host")
        if had and prefetch.reached > had:
            await self._use(keys[: had // self._page_size])

    async def _agree_on_goal(self, prefetch: Prefetch, joint: Operation) -> None:
        there = max(prefetch.reached, prefetch.found)
        prefetch.found = min(prefetch.found, await joint.least(there, self._page_size))

    async def _agree_on_result(self, prefetch: Prefetch, joint: Operation) -> None:
        prefetch.reached = await joint.least(prefetch.reached, self._page_size)

    async def _bring(self, prefetch: Prefetch, keys: Sequence[bytes]) -> None:
        while prefetch.found > prefetch.reached and await self._bring_some(prefetch, keys):
            pass

    async def _use(self, page_keys: Sequence[bytes]) -> None:
        """Storage was not asked for these, for device and host have them. Now it is: what is used
        last goes last, and no page is to outlive those above it. Nobody waits for this."""
        with suppress(BackendError):
            await self._io.contains(BASE, page_keys)

    async def _find(self, prefetch: Prefetch) -> Sequence[bytes]:
        """See how far storage has it: `prefetch.found`; its page keys."""
        hit = self._hold(prefetch)
        if not self.is_worth(prefetch.length - hit):
            prefetch.note("less than the threshold is missing")
            return ()
        keys = await self._hash(prefetch)
        believed = min(self._tree.stored_length(prefetch.key, hit), prefetch.length)
        found = await self._probe(prefetch, hit, keys)
        if found < believed:  # it is kept again when it is next used
            self._host.take_back(self._tree.forget_stored(prefetch.key, found))
        if found <= hit:
            prefetch.note("storage has no more of it")
        elif not self.is_worth(found - hit):
            prefetch.note("storage has less than the threshold more")
        else:
            prefetch.found = found
        return keys

    def _hold(self, prefetch: Prefetch, limit: int | None = None) -> int:
        """Hold what device and host have of it; how many tokens that are."""
        limit = prefetch.length if limit is None else limit
        match = self._tree.match_prefix(MatchPrefixParams(prefetch.key, limit))
        receipt = self._tree.inc_host_lock_ref(Boundary(match.best_node, match.best_length))
        if prefetch.receipt is not None:
            self._tree.let_go(prefetch.receipt)
        prefetch.receipt = receipt
        prefetch.reached = match.best_length
        return match.best_length

    async def _hash(self, prefetch: Prefetch) -> Sequence[bytes]:
        size, count = self._page_size, prefetch.length // self._page_size
        for done in range(HASH_PAGES, count, HASH_PAGES):
            prefetch.key.page_keys(size, done)
            await asyncio.sleep(0)
        return prefetch.key.page_keys(size, count)

    async def _probe(self, prefetch: Prefetch, hit: int, keys: Sequence[bytes]) -> int:
        """How many tokens of it storage says to have, going on from `hit`."""
        first = hit // self._page_size
        while first < len(keys):
            asked = keys[first : first + PROBE_PAGES]
            there = await self._io.contains(BASE, asked)
            for key, is_there in zip(asked, there, strict=True):
                if not is_there or self._io.is_wrong(BASE, key):
                    return first * self._page_size
                first += 1
        return first * self._page_size

    async def _bring_some(self, prefetch: Prefetch, keys: Sequence[bytes]) -> bool:
        """The next pages that are missing: read them, or wait for who is reading them. Whether
        there may be more."""
        size = self._page_size
        hit = self._hold(prefetch)
        if hit >= prefetch.found:
            return False
        first = hit // size
        other = self._reading.get((BASE, keys[first]))
        if other is not None:
            await self._join(other)
            return True
        wanted = self._unread(BASE, keys[first : prefetch.found // size])
        ids = self._take_rows(prefetch, BASE, len(wanted))
        if not len(ids):
            return False
        wanted = wanted[: len(ids)]
        await self._read(prefetch, BASE, hit, wanted, ids)
        # Short of what was asked, the next is missing, wrong or unreadable.
        return prefetch.reached >= hit + len(ids) * size

    def _unread(self, component: int, keys: Sequence[bytes]) -> list[bytes]:
        """The first of these that nobody reads, as many as one call reads."""
        wanted = []
        for key in keys[: self._read_pages[component]]:
            if (component, key) in self._reading:
                break
            wanted.append(key)
        return wanted

    async def _join(self, other: Prefetch) -> None:
        """Wait for what somebody else reads. If it is given up, the next step reads it, however
        long the other's call goes on."""
        call = other.call
        assert call is not None, "whoever reads has a call"
        self._counters.prefetches_joined += 1
        await call.answered.wait()
        if call.error is not None and not call.is_given_up:
            raise call.error

    def _room(self, component: int, num_pages: int) -> int:
        """What the quota has room for, when results have made room for so many pages."""
        room = self._quotas[component] - self._num_pages_of(component)
        if room < num_pages:
            self._let_go_of_results(component, num_pages - room)
            room = self._quotas[component] - self._num_pages_of(component)
        return room

    def _take_rows(self, prefetch: Prefetch, component: int, num_pages: int) -> PageIds:
        """Rows for so many pages, or for fewer: what the quota and the host have room for."""
        room = self._room(component, num_pages)
        if room <= 0:
            self._counters.prefetches_refused += 1
            prefetch.note("refused: other prefetches have all that they may of the host")
            return NO_PAGES
        ids = self._host.take_up_to(component, min(num_pages, room))
        if not len(ids):
            self._counters.prefetches_refused += 1
            prefetch.note("refused: the host has no room")
        return ids

    async def _read(
        self,
        prefetch: Prefetch,
        component: int,
        start: int,
        page_keys: Sequence[bytes],
        ids: PageIds,
    ) -> None:
        prefetch.reading = [(component, key) for key in page_keys]
        for page in prefetch.reading:
            self._reading[page] = prefetch
        on_end = partial(self._arrived, prefetch, start, page_keys)
        prefetch.call = self._io.read(component, page_keys, ids, self._tree.epoch, on_end)
        try:
            await prefetch.call.answered.wait()
        finally:
            self._read_no_more(prefetch)
        if prefetch.call.error is not None:
            raise prefetch.call.error

    def _read_no_more(self, prefetch: Prefetch) -> None:
        """Whoever wants these pages now reads them."""
        for page in prefetch.reading:
            if self._reading.get(page) is prefetch:
                del self._reading[page]
        prefetch.reading = ()

    def _arrived(
        self, prefetch: Prefetch, start: int, page_keys: Sequence[bytes], call: StorageCall
    ) -> None:
        """The rows are quiet: publish what has come and is still wanted, the rest goes home."""
        self._read_no_more(prefetch)
        component, ids = call.component, call.ids
        if call.epoch != self._tree.epoch:
            self._host.give_back_stale(self._host.only(component, ids))
            return
        count = 0 if call.is_given_up or call.error is not None else call.num_good
        unused = ids[:count]
        if count:
            keys = prefetch.key.page_keys(self._page_size, start // self._page_size + count)
            boundary, unused = self._tree.insert_host(
                prefetch.key, start, component, ids[:count], keys
            )
            self._counters.pages_prefetched += count - len(unused)
            if boundary is not None and call.clears == self._io.num_clears:
                self._tree.believe_span_stored(boundary.node, start, component)
            if boundary is not None and prefetch in self._active and not prefetch.is_stopped:
                self._hold(prefetch)
        self._host.give_back(self._host.only(component, ids[count:]))
        self._host.give_back(self._host.only(component, unused))
        if prefetch in self._active and not prefetch.is_stopped:
            prefetch.brought[component] += count - len(unused)
        if call.error is None:
            self._note_wrong(prefetch, start, page_keys, call)
        self._hooks.changed()

    def _note_wrong(
        self, prefetch: Prefetch, start: int, page_keys: Sequence[bytes], call: StorageCall
    ) -> None:
        """What storage said to have, and has not, or has wrong, or cannot read."""
        by_result: dict[ReadResult, list[bytes]] = {result: [] for result in ReadResult}
        for key, result in zip(page_keys, call.results, strict=True):
            by_result[result].append(key)
        for key in by_result[ReadResult.READ]:
            self._io.clear_suspect(call.component, key)
        num_wrong = len(page_keys) - len(by_result[ReadResult.READ])
        if not num_wrong:
            return
        corrupt, unread = by_result[ReadResult.CORRUPT], by_result[ReadResult.FAILED]
        self._io.suspect(call.component, corrupt)
        self._io.suspect(call.component, unread, is_read=False)
        prefetch.why = prefetch.why or (
            f"storage has {num_wrong} pages missing, wrong or unreadable that it said to have"
        )
        if call.component != BASE:
            return  # see `PrefetchesOfParts`
        forgotten = self._tree.forget_stored(prefetch.key, start + call.num_good * self._page_size)
        self._host.take_back(forgotten)

    # --- results ----------------------------------------------------------------------------------

    def _ended(self, prefetch: Prefetch, _: asyncio.Task[None]) -> None:
        prefetch.end("cancelled")
        self._end_for_all(prefetch)
        if prefetch in self._active and (prefetch.detached or prefetch.receipt is not None):
            ttl_s = self._settings.result_ttl
            prefetch.timer = self._loop.call_later(ttl_s, self._let_go, prefetch)

    def note_granted(self, receipt: Receipt) -> None:
        """A lease holds this prefix on the device: results within it are taken."""
        for prefetch in tuple(self._active):
            result = prefetch.receipt
            if result is None or not prefetch.done.is_set() or result.depth > receipt.depth:
                continue
            node = receipt.node
            while node.parent is not None and node.parent.end >= result.depth:
                node = node.parent
            if node is result.node:
                self._let_go(prefetch)

    def _let_go(self, prefetch: Prefetch) -> None:
        """Hold its result no longer: it stays cached."""
        receipt, prefetch.receipt = prefetch.receipt, None
        if receipt is not None:
            self._tree.let_go(receipt)
        prefetch.brought = [0] * len(self._quotas)
        if prefetch.detached and prefetch.done.is_set():
            self._active.pop(prefetch, None)
        if prefetch.timer is not None and prefetch.done.is_set():
            prefetch.timer.cancel()
            prefetch.timer = None
        self._hooks.changed()

    def _let_go_of_results(self, component: int, num_pages: int) -> None:
        """The oldest results that nobody has taken make room."""
        for prefetch in tuple(self._active):
            if num_pages <= 0:
                return
            if prefetch.done.is_set() and prefetch.brought[component]:
                num_pages -= prefetch.brought[component]
                self._let_go(prefetch)

    # --- life cycle -------------------------------------------------------------------------------

    def stop_all(self, why: str) -> None:
        """Nobody is to wait any longer."""
        for prefetch in tuple(self._active):
            self.stop(prefetch, why)
            self._let_go(prefetch)
        self._active.clear()

    def reset(self) -> None:
        """The tree has forgotten everything."""
        for prefetch in tuple(self._active):
            prefetch.receipt = None
            prefetch.reached, prefetch.brought = 0, [0] * len(self._quotas)
            self.stop(prefetch, "the cache was reset")
            if prefetch.detached:
                del self._active[prefetch]

    # --- looking ----------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages of the host that are being read, or were and wait to be taken."""
        return sum(map(self._num_pages_of, range(len(self._quotas))))

    def _num_pages_of(self, component: int) -> int:
        epoch = self._tree.epoch
        num_reading = sum(
            len(call.ids)
            for call in self._io
            if call.is_read and call.component == component and call.epoch == epoch
        )
        return num_reading + sum(prefetch.brought[component] for prefetch in self._active)

    def __iter__(self) -> Iterator[Prefetch]:
        """Those that somebody is interested in."""
        return iter(tuple(self._active))
