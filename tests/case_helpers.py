"""Two tiers under a test's hand: copies that stop at a gate, fail where they are told to, and are
counted; what each tier has of a prompt; and the same on the virtual clock."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final, Literal

import numpy as np

from tests.lease_helpers import Rig, rig, seq
from tiered_cache import Lease, MatchPrefixParams, RadixKey, UnifiedRadixCache
from tiered_cache.observe import Event, EventKind
from tiered_cache.testing.loop import DeterministicLoop, SeededExecutor
from tiered_cache.testing.oracle import path_tokens
from tiered_cache.transfer.copier import CopyJob, Direction
from tiered_cache.tree.node import Node
from tiered_cache.types import Tier

POLICIES: Final = ("write_through", "write_through_selective", "write_back")
PAGE_SIZES: Final = (1, 4, 16)


class Copies(concurrent.futures.Executor):
    """Give it to `open(copy_executor=…)`: copies run at once while the gate is open.

    At a shut gate up to `num_threads` jobs run, and cannot be cancelled; the others are queued, and
    can. `moves_at`: when a running job touches its bytes, before the gate or behind it.
    """

    def __init__(
        self, *, moves_at: Literal["start", "end"] = "end", num_threads: int = 1, shut: bool = False
    ) -> None:
        self.is_open = not shut
        self._moves_at = moves_at
        self._num_threads = num_threads
        self._queued: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()
        self._running: deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = deque()

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._queued.append((future, lambda: fn(*args, **kwargs)))
        self._start()
        if self.is_open:
            self.step(len(self._running))
        return future

    def shut(self) -> None:
        self.is_open = False

    def open(self) -> None:
        """Let through who waits, and all who come later."""
        self.is_open = True
        while self._running:
            self.step()

    def step(self, count: int = 1) -> None:
        """Let so many running jobs end."""
        for _ in range(count):
            future, call = self._running.popleft()
            _settle(future, call)
            self._start()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_queued(self) -> int:
        return sum(not future.cancelled() for future, _ in self._queued)

    def _start(self) -> None:
        while self._queued and len(self._running) < self._num_threads:
            future, call = self._queued.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            if self._moves_at == "start":
                outcome = _outcome(call)
                self._running.append((future, lambda outcome=outcome: _repeat(outcome)))  # type: ignore[misc]
            else:
                self._running.append((future, call))


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:
        return None, error


def _repeat(outcome: tuple[Any, BaseException | None]) -> Any:
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _settle(future: concurrent.futures.Future[Any], call: Callable[[], Any]) -> None:
    result, error = _outcome(call)
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class Tiers(Rig):
    """A rig with two tiers.

    Attributes:
        copies: its copy executor, if `tiers` made it.
        fault: asked before every copy; what it returns is raised instead of copying.
        copied: how often each page was copied, by direction and (device, host) page.
    """

    def __init__(self, cache: UnifiedRadixCache, copies: Any, policy: str) -> None:
        super().__init__(cache)
        self.copies: Copies = copies
        self.policy = policy
        self.fault: Callable[[CopyJob], BaseException | None] = lambda job: None
        self.copied: Counter[tuple[Direction, int, int]] = Counter()
        host = cache._parts.host
        assert host is not None
        copy = host.copier.copy

        def watched(job: CopyJob) -> None:
            error = self.fault(job)
            if error is not None:
                raise error
            copy(job)
            pages = zip(job.device_ids.tolist(), job.host_ids.tolist(), strict=True)
            self.copied.update((job.direction, device, row) for device, row in pages)

        host.copier.copy = watched  # type: ignore[method-assign]

    @property
    def page_size(self) -> int:
        return self.cache.page_size

    async def compute(self, lease: Lease, max_tokens: int = 1 << 20) -> None:
        """Compute and commit all but the last token, so that `prompt(name, n)` is n pages of any
        size."""
        while (left := len(lease) - 1 - lease.computed) > 0:
            chunk = await lease.next_chunk(min(left, max_tokens))
            if chunk is None or chunk.start >= len(lease) - 1:
                return
            await lease.run(self.model, chunk)
            lease.commit(chunk)

    def prompt(self, name: str, num_pages: int, start: int = 0) -> list[int]:
        """Pages `[start, num_pages)` of a sequence, and a token, so that all of them can be
        reused."""
        return seq(name, num_pages * self.page_size + 1, start * self.page_size)

    def fork(self, name: str, num_pages: int, other: str, num_others: int = 1) -> list[int]:
        """Pages of one sequence, then of another, and a token."""
        return seq(name, num_pages * self.page_size) + self.prompt(other, num_others)

    def have(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Whole pages of a prompt on the device, and on the host beyond that."""
        text = self.cache.explain(tokens)
        device = int(text.split("on the device: ")[1].split()[0])
        host = int(text.split("on the host beyond it: ")[1].split()[0])
        assert device % self.page_size == host % self.page_size == 0
        return device // self.page_size, host // self.page_size

    def mirrored(self, tokens: Sequence[int]) -> int:
        """Whole pages of a prompt that the host has, whatever the device has."""
        return len(self.host_rows(tokens))

    def host_rows(self, tokens: Sequence[int]) -> list[int]:
        """The host's rows of a prompt's pages, from the root on as far as it has them."""
        match = self.cache.tree.match_prefix(_params(tokens))
        node: Node | None = match.best_node
        path = []
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        rows: list[int] = []
        for node in reversed(path):
            if node.data[0].host_value is None:
                break
            rows += node.data[0].host_value.tolist()
        return rows[: match.best_length // self.page_size]

    def in_flight(self, tier: Tier) -> set[int]:
        """Pages of a tier that a transfer is bringing something to."""
        transfers = self.cache._controller.transfers
        assert transfers is not None
        return {page for held in transfers.held(tier) for page in held[0].tolist()}

    def demote(self, num_pages: int = 1 << 20) -> None:
        """Let the device evict so many pages, or all that can go, as somebody's need would."""
        self.cache._controller.accounts.evict([num_pages])

    def evict_host(self, num_pages: int) -> int:
        """Let the host evict so many pages; how many went."""
        evicted = self.cache.tree.evict_host([num_pages])
        host = self.cache._controller.host_pages
        assert host is not None
        host.give_back(evicted.host)
        return sum(map(len, evicted.host))

    async def host_only(self, tokens: Sequence[int], **options: Any) -> None:
        """Serve a prompt, and leave it on the host alone."""
        await self.serve(tokens, **options)
        await self.cache.drain()
        self.demote()
        assert self.have(tokens[:-1]) == (0, (len(tokens) - 1) // self.page_size)

    async def settled(self) -> None:
        """Until nothing moves any more, with the gate open."""
        if isinstance(self.copies, Copies):
            self.copies.open()
        async with asyncio.timeout(30):
            await self.cache.drain()
        self.assert_calm()

    def assert_calm(self) -> None:
        """Nothing is held, nothing is in flight, and the accounts and all bytes are right."""
        self.check()
        for pool in (self.pool, self.host):
            assert pool.free + pool.evictable + pool.protected + pool.private == pool.capacity, pool
        assert self.host.protected == 0

    def pages_on_device(self, tokens: Sequence[int]) -> set[int]:
        """The device pages that the tree has of a prompt."""
        match = self.cache.tree.match_prefix(_params(tokens))
        return set(self.cache.tree.pages(match.device_boundary)[0].tolist())


def _params(tokens: Any) -> MatchPrefixParams:
    return MatchPrefixParams(RadixKey(tokens))


@contextlib.asynccontextmanager
async def tiers(
    pages: int = 16,
    host_pages: int = 16,
    *,
    page_size: int = 4,
    policy: str = "write_through",
    copies: Any = None,
    options: Any = None,
    host: Any = None,
    **sections: Any,
) -> AsyncIterator[Tiers]:
    """Two tiers of so many pages, and a copy executor at a gate, which is open at first."""
    copies = Copies() if copies is None else copies
    made = {"tokens": host_pages * page_size, "write_policy": policy, **(host or {})}
    given = {"copy_executor": copies, **(options or {})}
    async with rig(pages, options=given, page_size=page_size, host=made, **sections) as plain:
        r = Tiers(plain.cache, copies, policy)
        yield r
        if isinstance(copies, Copies):
            copies.open()
        r.check()


# --- on the virtual clock -------------------------------------------------------------------------


def seeded(main: Callable[[], Coroutine[Any, Any, Any]], seed: int = 0) -> Any:
    """Run a test on the deterministic loop."""
    return DeterministicLoop(seed).run(main())


def seeded_executors(**copies: Any) -> dict[str, Any]:
    """All three of a cache, on the running deterministic loop; `copies` is for the copies'."""
    loop = asyncio.get_running_loop()
    return {
        "run_executor": SeededExecutor(loop, name="run", durations=(0.0, 0.0, 0.5)),
        "copy_executor": SeededExecutor(loop, name="copy", **copies),
        "io_executor": SeededExecutor(loop, name="io", durations=(0.0,)),
    }


# --- watching -------------------------------------------------------------------------------------


class Watch:
    """An observer that keeps a model of both tiers by page keys, and looks at every event that no
    host page hangs below one that is nowhere."""

    def __init__(self) -> None:
        self.tree: Any = None
        self.model: dict[Tier, set[bytes]] = {Tier.DEVICE: set(), Tier.HOST: set()}
        self.faults: list[str] = []
        self.met: Counter[str] = Counter()

    def on_event(self, event: Event) -> None:
        if event.kind is EventKind.CLEARED:
            self.met["cleared"] += 1
            self.model = {Tier.DEVICE: set(), Tier.HOST: set()}
        if event.kind not in (EventKind.STORED, EventKind.REMOVED):
            return
        node = event.node
        assert node is not None
        self.met[f"{event.kind.value} {event.tier.value}"] += 1
        keys, has = set(self.tree.page_keys(node)), self.model[event.tier]
        if event.kind is EventKind.STORED:
            if keys & has:
                self.faults.append(f"{node!r} was stored on the {event.tier.value} twice")
            has |= keys
        else:
            if not keys <= has:
                self.faults.append(f"{node!r} was removed from the {event.tier.value} unstored")
            has -= keys
        self._look_around(node)

    def _look_around(self, node: Node) -> None:
        below = node.children.values()
        if _is_dead(node) and any(child.data[0].host_value is not None for child in below):
            self.faults.append(f"{node!r} is nowhere, and its child is on the host")
        above = node.parent
        while node.data[0].host_value is not None and above is not None and above.parent:
            if _is_dead(above):
                self.faults.append(f"{node!r} is on the host below {above!r}")
            above = above.parent

    def check(self) -> None:
        """The model is what is there."""
        assert self.faults == []
        assert self.model == content(self.tree)


def _is_dead(node: Node) -> bool:
    data = node.data[0]
    return data.value is None and data.host_value is None and not data.stored


def content(tree: Any) -> dict[Tier, set[bytes]]:
    """The page keys that each tier really has."""
    held: dict[Tier, set[bytes]] = {Tier.DEVICE: set(), Tier.HOST: set()}
    for node in tree.nodes():
        if node.data[0].value is not None:
            held[Tier.DEVICE].update(tree.page_keys(node))
        if node.data[0].host_value is not None:
            held[Tier.HOST].update(tree.page_keys(node))
    return held


def unreachable(r: Rig) -> list[str]:
    """Nodes with a host copy that no prompt would find."""
    lost = []
    for node in r.cache.tree.nodes():
        if node.data[0].host_value is None:
            continue
        tokens = np.frombuffer(path_tokens(node), np.int64)
        match = r.cache.tree.match_prefix(_params(tokens))
        if match.best_length < node.end:
            lost.append(repr(node))
    return lost
