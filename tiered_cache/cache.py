"""The cache as its users see it: open it, lease a prompt's prefix, compute, publish.

Tells the story and delegates: the tree decides, the controller sequences, leases hold.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tiered_cache.build import build
from tiered_cache.chunk import find_chunks
from tiered_cache.config import Config
from tiered_cache.controller import IO_THREADS, Executors, HybridCacheController
from tiered_cache.engine import Engine
from tiered_cache.errors import ClosedError
from tiered_cache.jobs import DaemonExecutor, run_to_end, submit, threads_ended
from tiered_cache.keys import RadixKey, check_token
from tiered_cache.lease import Lease
from tiered_cache.prefetch import NoPrefetches
from tiered_cache.ranks import SingleRank
from tiered_cache.storage_control import StorageControl
from tiered_cache.types import MatchPrefixParams, Tier, seconds, whole_number

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
    from types import TracebackType

    import torch

    from tiered_cache.build import Parts
    from tiered_cache.engine import CacheRequest
    from tiered_cache.lease_parts import StateCopy
    from tiered_cache.observe import Observer
    from tiered_cache.pins import Pin
    from tiered_cache.pools.device import DevicePools
    from tiered_cache.pools.host import HostArena
    from tiered_cache.prefetch import PrefetchHandle
    from tiered_cache.ranks import Ranks
    from tiered_cache.stats import CacheStats, PoolStats
    from tiered_cache.storage.backend import StorageBackend
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import (
        Boundary,
        EvictParams,
        EvictResult,
        InsertParams,
        InsertResult,
        MatchResult,
        Outstanding,
        PageIds,
    )

T = TypeVar("T")

OPEN_LIMIT_S: Final = 1.0
"""How long an opening that failed waits for its threads to let go of what they have made."""

COPY_NICE: Final = 5
"""Copies, files and checksums give way to the loop and the model where cores are short. Beside
copies and a model on two cores the loop is then 0.6 ms late instead of 2.7 (99th percentile;
`python -m benchmarks lateness`). Twice as nice, they were at times left to wait behind the model
for seconds, with a core to spare."""


class UnifiedRadixCache:
    """A prefix cache on one event loop. Made by `open`; not thread-safe, and checks that it does
    not have to be."""

    def __init__(self, parts: Parts, controller: HybridCacheController) -> None:
        self._parts = parts
        self._controller = controller
        self._engine = Engine(controller)

    @staticmethod
    def open(
        config: Config,
        *,
        device_pools: Mapping[str, Sequence[torch.Tensor]] | None = None,
        stream: torch.cuda.Stream | None = None,
        observers: Sequence[Observer] = (),
        run_executor: concurrent.futures.Executor | None = None,
        copy_executor: concurrent.futures.Executor | None = None,
        io_executor: concurrent.futures.Executor | None = None,
        ranks: Ranks | None = None,
        storage_backend: StorageBackend | None = None,
    ) -> Opening:
        """`async with UnifiedRadixCache.open(config) as cache`, or `cache = await
        UnifiedRadixCache.open(config)`.

        Args:
            config: from `load_config`.
            device_pools: your own device tensors: pool name to one tensor per layer; they define
                the page count.
            stream: the CUDA stream that your models compute on, when they go on after `run` has
                returned: each `commit` then waits for what is on it, unless it says `ready`.
            observers: told of every change, synchronously (see `tiered_cache.observe`).
            run_executor, copy_executor, io_executor: where `run` computes, where pages are copied,
                and where the rest is done that takes long; yours to shut down. Default: own daemon
                threads, of which `run_threads` compute and one copies.
            ranks: how this rank of a model agrees with the others (default: there are none).
            storage_backend: your own, open already, instead of the one that `storage.backend`
                names; yours to close, after the cache.

        Raises:
            ConfigError: with all that is wrong, when awaited or entered.
        """
        if not isinstance(config, Config):
            raise TypeError(
                f"open takes a Config, not {type(config).__name__}: open(load_config(…))"
            )
        executors = (run_executor, copy_executor, io_executor)
        if storage_backend is not None and config.storage is None:
            raise ValueError("storage_backend needs a `storage:` section in the configuration")
        return Opening(
            config,
            device_pools,
            stream,
            observers,
            executors,
            ranks or SingleRank(),
            storage_backend,
        )

    # --- for a serving loop -----------------------------------------------------------------------

    def lease(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        load_timeout: float | None = None,
        reserve: int = 0,
        rollback: int = 0,
        layerwise: bool = False,
    ) -> LeaseContext:
        """A hold on the longest cached prefix of a prompt: `async with cache.lease(prompt) as
        lease`.

        Args:
            tokens: the prompt, at least one token: a list, array, numpy array or 1-D torch tensor
                of ids in u32.
            extra_key, cache_salt: what reuse must not cross: an adapter, a tenant.
            priority: of what it uses and publishes, for the eviction policy `priority`: higher
                stays longer.
            timeout: seconds to wait for admission (None: as long as it takes). The only limit that
                raises.
            load_timeout: seconds to wait for what the host has (None: as long as it takes). After
                that the prefix is shorter, and `Lease.why` says so.
            reserve: tokens that `append` must be able to take, whatever others do.
            rollback: tokens that `truncate` must be able to take back: windows are kept for as much
                longer.
            layerwise: do not wait for the load: the model waits for each layer before it reads it
                (`Lease.layers.wait`).

        Raises:
            ValueError, TypeError: tokens or arguments that make no sense (at once).
            AdmissionTimeout: not admitted in time; nothing is held (when entered).
            CapacityError: more than the device tier could ever hold (when entered).
        """
        self._controller.check()
        key = RadixKey(tokens, extra_key, cache_salt)
        if not len(key):
            raise ValueError(
                "a lease needs at least one token: there is nothing to compute for an empty prompt"
            )
        priority, reserve = whole_number("priority", priority), whole_number("reserve", reserve)
        rollback = whole_number("rollback", rollback)
        for name, value in (("reserve", reserve), ("rollback", rollback)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        if not isinstance(layerwise, bool):
            raise TypeError(f"layerwise must be True or False, not {type(layerwise).__name__}")
        if timeout is not None or load_timeout is not None:
            timeout = seconds("timeout", timeout)
            load_timeout = seconds("load_timeout", load_timeout)
        lease = Lease(
            self._controller,
            key,
            priority=priority,
            reserve=reserve,
            rollback=rollback,
            layerwise=layerwise,
        )
        return LeaseContext(lease, partial(self._grant, timeout, load_timeout))

    async def _grant(self, timeout: float | None, load_timeout: float | None, lease: Lease) -> None:
        """The way of every request to its prefix: what storage has comes to the host, admission
        holds what the device has, and what the host has comes there.

        Each `await` marks where the world may change, so each step matches anew.
        """
        lease.check_fits()
        controller = self._controller
        joint = controller.join(f"lease {lease.id}")
        if joint is not None:
            await lease.grant_on_all(joint, timeout, load_timeout)
            return
        began = controller.now() if timeout is not None else 0.0
        left = timeout
        place = controller.admission.take_place() if controller.storage is not None else None
        limit, has_tried_again = lease.reusable, False
        try:
            while True:
                if place is not None:
                    await lease.prefetch(limit, left)  # storage → host
                    if timeout is not None:
                        left = max(0.0, timeout - (controller.now() - began))
                if not lease.admit_now(limit):  # match → hold
                    await lease.admit(limit, left, place)
                lease.fetch_no_more()
                if not lease.may_be_longer:
                    return
                try:
                    await lease.load_back(limit, load_timeout)  # host → device
                except BaseException:
                    lease.close()
                    raise
                if not (lease.is_stale or lease.has_lost_room):
                    return
                # A reset came between; or others, and then what did not come is tried once more.
                if not lease.is_stale:
                    limit = lease.prefix_len if has_tried_again else lease.reusable
                    has_tried_again = True
                lease.start_over()
                lease.end_prefetch()
                if timeout is not None:
                    left = max(0.0, timeout - (controller.now() - began))
        finally:
            if place is not None:
                lease.end_prefetch()

    async def acquire(self, tokens: Any, **options: Any) -> Lease:
        """`lease` for callers whose requests do not fit a block: end it with `await
        lease.aclose()`."""
        return await self.lease(tokens, **options).__aenter__()

    def prefetch(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        detach: bool = False,
    ) -> PrefetchHandle:
        """Bring what storage has of a prompt to the host, ahead of its lease: `with
        cache.prefetch(prompt) as handle: await handle.wait()`.

        A handle holds what has come until it is closed, a lease has taken it, or `result_ttl`
        seconds have passed. With `detach` there is nothing to close. Where an operator has detached
        storage, a prefetch ends at once and says so.

        Raises:
            ValueError: there never was a storage tier. Tokens: as `lease`.
        """
        controller = self._controller
        controller.check()
        key = self._key(tokens, extra_key, cache_salt)
        if controller.storage is not None:
            return controller.storage.prefetches.start(key, detach=detach)
        if self._parts.config.storage is None and not controller.had_storage:
            raise ValueError("there is no storage tier: write a `storage:` section")
        why = "storage is detached" if controller.enabled else "the cache is off (mode: off)"
        return NoPrefetches(controller.tree, why, controller.check_thread).start(key, detach=detach)

    def pin(
        self,
        tokens: Any,
        ttl: float | None,
        *,
        tier: Tier | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> Pin:
        """Keep what is cached of a prefix now where it is, for `ttl` seconds (None: until it is
        closed): `with cache.pin(system_prompt, ttl=600)`, or keep the pin and `close` it.

        Args:
            tier: the host (default, where there is one) or the device, where it counts as held.

        Raises:
            CapacityError: more than `max_pinned` of the tier, or on the device more than is
                neither held nor promised. ValueError, TypeError: arguments that make no sense.
        """
        self._controller.check()
        if tier is not None and not isinstance(tier, Tier):
            raise TypeError(f"tier is Tier.HOST or Tier.DEVICE, not {type(tier).__name__}")
        if tier is None or not self._controller.enabled:  # with `mode: off` there is one tier
            tier = Tier.HOST if self._controller.host_pages is not None else Tier.DEVICE
        key = self._key(tokens, extra_key, cache_salt)
        return self._controller.pins.make(key, tier, seconds("ttl", ttl))

    @staticmethod
    def _key(tokens: Any, extra_key: str | None, cache_salt: str | None) -> RadixKey:
        """Tokens, or a key that somebody has made of them, who may change it while this goes on:
        what storage has of it would be published under what it has become."""
        if not isinstance(tokens, RadixKey):
            return RadixKey(tokens, extra_key, cache_salt)
        if extra_key is not None or cache_salt is not None:
            raise ValueError("a RadixKey has its namespace already: take extra_key, cache_salt out")
        return tokens.snapshot()

    @property
    def storage(self) -> StorageControl:
        """The storage tier, for an operator: attach, detach, clear, health."""
        return StorageControl(self._controller, self._parts)

    async def run(self, leases: Sequence[Lease], fn: Callable[..., T], *args: Any) -> T:
        """One scheduler step of a batch: as `Lease.run`, over chunks of several leases among
        `args`."""
        self._controller.check()
        for lease in _all_leases(leases):
            lease.check()
        return await self._controller.run(tuple(leases), find_chunks(args), fn, args)

    def extend(self, leases: Sequence[Lease], tokens: Sequence[int]) -> list[Lease]:
        """Append one token to each lease: to all of them, and return `[]`, or to none.

        When there is no room for all, returns the youngest leases beyond their reserve whose
        release would make enough: suspend or close them, and extend the rest. Compute what was
            appended through each lease's `pending`.

        Raises:
            ValueError: not one token per lease, a lease twice, or not a token id; nothing changes.
        """
        self._controller.check()
        if len(_all_leases(leases)) != len(tokens) or len(set(leases)) != len(leases):
            raise ValueError(
                f"extend takes one token for each of distinct leases: "
                f"{len(leases)} leases, {len(tokens)} tokens"
            )
        for lease, token in zip(leases, tokens, strict=True):
            lease.check()
            lease.check_is_of(self._controller)
            check_token(token, len(lease))
        victims = self._victims(leases)
        if not victims:
            for lease, token in zip(leases, tokens, strict=True):
                lease.append(token)
        return victims

    def _victims(self, leases: Sequence[Lease]) -> list[Lease]:
        growing = [lease for lease in leases if lease.pages_beyond_promise(len(lease) + 1)]
        youngest_first = sorted(
            growing, key=lambda lease: (lease.granted_at, lease.id), reverse=True
        )
        wanted = [lease.pages_beyond_promise(len(lease) + 1) for lease in youngest_first]
        accounts, tree = self._controller.accounts, self._controller.tree

        def is_enough(count: int) -> bool:
            victims = youngest_first[:count]
            freed = tree.would_spare([lease.receipt for lease in victims if lease.receipt])
            for index in range(len(freed)):
                freed[index] += sum(lease.own_ids(index) for lease in victims)
            return all(
                sum(wanted[count:]) <= accounts.spare(index) + freed[index]
                for index, component in enumerate(tree.components)
                if component.is_per_page
            )

        # Each further victim frees more and wants nothing: what is enough stays enough.
        return youngest_first[: bisect_left(range(len(wanted) + 1), True, key=is_enough)]

    def explain(
        self, tokens: Any, *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> str:
        """How much of a prompt is cached, where it ends and why, for people. Changes nothing but
        ages."""
        self._controller.check()
        key = RadixKey(tokens, extra_key, cache_salt)
        page_size = self.page_size
        match = self.tree.match_prefix(MatchPrefixParams(key))
        whole = len(key) - len(key) % page_size
        lines = [
            f"{len(key)} tokens, {whole // page_size} whole pages of {page_size}",
            f"on the device: {match.device_length} tokens; "
            f"known to the tree: {match.full_hit_length}",
            f"on the host beyond it: {match.host_hit_length} tokens",
        ]
        if self._controller.storage is not None:
            stored = self.tree.believed_length(key) - match.best_length
            lines.append(f"believed to be in storage beyond that: {max(0, stored)} tokens")
        if not self._controller.enabled:
            lines.append("the cache is off (mode: off)")
        elif match.device_length == whole:
            lines.append("every whole page is cached")
        else:
            page = f"[{match.device_length}, {match.device_length + page_size})"
            lines.append(f"page {page} is not: never published in this namespace, or evicted")
            if not any(
                child.namespace == key.namespace for child in self.tree.root.children.values()
            ):
                lines.append("the namespace has no pages at all")
        return "\n".join(lines)

    # --- for an engine that owns its requests -----------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest reusable prefix per tier (see `MatchResult`). Holds nothing: lock a boundary
        of the result before anything else happens."""
        return self._engine.match_prefix(params)

    def insert(self, params: InsertParams) -> InsertResult:
        """Publish pages that came from `allocate`. What the tree adopts is not yours any more; the
        result's duplicates are, to be given back with `free` after the last run that uses them.

        Raises:
            ValueError, TypeError, StaleError: arguments that do not fit; nothing was adopted.
        """
        return self._engine.insert(params)

    def allocate(self, num_pages: int) -> list[PageIds]:
        """Pages, per component in dense order (int32), for what is to be computed.

        Raises:
            CapacityError: more than is neither held nor promised to leases; nothing is taken.
        """
        return self._engine.allocate(num_pages)

    def free(self, pages: Sequence[PageIds]) -> None:
        """Pages from `allocate`, per component, that were not published go home.

        Raises:
            ValueError: pages that are not lent to you, or twice the same; nothing changes.
        """
        self._engine.free(pages)

    def inc_lock_ref(self, boundary: Boundary) -> Receipt:
        """Hold a prefix on the device: it is not evicted before `dec_lock_ref(receipt)`.

        Raises:
            StaleError: the boundary is gone. CapacityError: it would hold what is promised.
        """
        return self._engine.inc_lock_ref(boundary)

    def dec_lock_ref(self, receipt: Receipt) -> None:
        """Let go of a prefix, once per receipt.

        Raises:
            LockError, StaleError: not a receipt that is out; nothing changes.
        """
        self._engine.dec_lock_ref(receipt)

    def inc_host_lock_ref(self, boundary: Boundary, start: int = 0) -> Receipt:
        """Hold the host's copy of the tokens `[start, boundary)`; errors as `inc_lock_ref`."""
        return self._engine.inc_host_lock_ref(boundary, start)

    def dec_host_lock_ref(self, receipt: Receipt) -> None:
        """Let go of it; errors as `dec_lock_ref`."""
        self._engine.dec_host_lock_ref(receipt)

    def begin_req(self, tokens: Any, **options: Any) -> CacheRequest:
        """A request that holds the longest prefix of its tokens that is on the device.

        `options`: `extra_key`, `cache_salt`, `priority`. End it with `cache_finished_req`.
        """
        priority = whole_number("priority", options.pop("priority", 0))
        return self._engine.begin(RadixKey(tokens, **options), priority=priority)

    def cache_unfinished_req(self, request: CacheRequest) -> None:
        """Publish the whole pages of what is computed, and hold them: the next chunk goes on from
        there, and so may others."""
        self._engine.cache_unfinished_req(request)

    def cache_finished_req(self, request: CacheRequest, is_insert: bool = True) -> None:
        """The request has ended: publish what is computed (unless `is_insert` is False), free its
        other pages and let go of its prefix."""
        self._engine.cache_finished_req(request, is_insert)

    async def evict(self, params: EvictParams) -> EvictResult:
        """Have so much of the device free besides what is promised, as far as that can be. What
        the host lacks is copied there first, if the write policy has it so.

        Returns what was given up, for counting: its pages have gone home already.
        """
        return await self._engine.evict(params)

    async def evict_host(self, params: EvictParams) -> EvictResult:
        """Give up so much of the host, mirrors first; the same in return."""
        return await self._engine.evict_host(params)

    async def load_back(self, key: RadixKey, limit: int | None = None) -> int:
        """Bring what the host has of `key[:limit]` to the device, as far as there is room.

        Returns how many of its tokens are on the device then; they are not held.
        """
        return await self._engine.load_back(key, limit)

    def evictable_size(self, component: str = "full", tier: Tier = Tier.DEVICE) -> int:
        """Pages of a component on a tier that the tree has and nobody holds."""
        return self._pool(component, tier).evictable

    def protected_size(self, component: str = "full", tier: Tier = Tier.DEVICE) -> int:
        """Pages of a component on a tier that locks keep."""
        return self._pool(component, tier).protected

    def available_size(self, component: str = "full", tier: Tier = Tier.DEVICE) -> int:
        """Pages of a component on a tier that are free."""
        return self._pool(component, tier).free

    def _pool(self, component: str, tier: Tier) -> PoolStats:
        stats = self.stats()
        pools = stats.pools if tier is Tier.DEVICE else stats.host
        if component not in pools:
            raise KeyError(f"no component {component!r} on the {tier.value}")
        return pools[component]

    # --- for an operator --------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """A frozen snapshot of pools and counters."""
        self._controller.check_thread()
        return self._controller.stats()

    def outstanding(self) -> list[Outstanding]:
        """What somebody holds, with owner and age; also after `aclose`."""
        self._controller.check_thread()
        return self._controller.outstanding()

    def reset(self) -> None:
        """Drop all content, whatever is in flight. Leases from before raise `StaleError`; closing
        them never does."""
        self._controller.check()
        self._controller.reset()

    async def drain(self) -> None:
        """Wait until nothing is in flight: runs, quarantines, background work."""
        self._controller.check()
        await self._controller.drain()

    async def aclose(self, limit: float | None = 10.0) -> list[Outstanding]:
        """End everything within `limit` seconds (None: however long it takes); idempotent, from any
        task.

        Returns what a run still touches. Its buffers stay alive until it ends.
        """
        return await self._controller.aclose(seconds("limit", limit))

    def check_integrity(self) -> None:
        """Prove the invariants by recomputing everything; O(everything).

        Raises:
            IntegrityError: a bug of this library.
        """
        self._controller.check_thread()
        self._controller.check_integrity()

    def pretty_print(self) -> str:
        """The tree as text, a line per node."""
        self._controller.check_thread()
        return self.tree.pretty_print()

    @property
    def page_size(self) -> int:
        return self._parts.page_size

    @property
    def pools(self) -> DevicePools:
        """The device tensors that slots index."""
        return self._parts.pools

    @property
    def arenas(self) -> tuple[HostArena, ...]:
        """The host's memory, per component in dense order; empty without a host tier."""
        return self._parts.arenas

    @property
    def tree(self) -> RadixTree:
        """The index itself, for engines and tests. Pages that you insert must come from its
        allocators."""
        return self._parts.tree

    @property
    def closed(self) -> bool:
        return self._controller.closed

    def __repr__(self) -> str:
        pools = ", ".join(
            f"{name}: {pool.free} of {pool.capacity} pages free"
            for name, pool in self.stats().pools.items()
        )
        return f"<UnifiedRadixCache {pools}{', closed' if self.closed else ''}>"


def _copy_states(parts: Parts, copies: Sequence[StateCopy]) -> None:
    """In a run's thread."""
    for component, source, target in copies:
        parts.pools.copy_page(parts.components[component].id, source, target)


def _all_leases(leases: Sequence[Lease]) -> Sequence[Lease]:
    """What a caller gave as leases, if they are that."""
    for lease in leases:
        if not isinstance(lease, Lease):
            raise TypeError(f"a batch is made of leases, not of {type(lease).__name__}")
    return leases


class LeaseContext:
    """`async with cache.lease(…) as lease`."""

    __slots__ = ("_entered", "_grant", "_lease")

    def __init__(self, lease: Lease, grant: Callable[[Lease], Awaitable[None]]) -> None:
        self._lease = lease
        self._grant = grant
        self._entered = False

    async def __aenter__(self) -> Lease:
        if self._entered:  # also while it still waits: granted twice, it would hold two prefixes
            raise ClosedError("this lease was entered before: ask the cache for a new one")
        self._entered = True
        await self._grant(self._lease)
        return self._lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lease.close()


class Opening:
    """What `open` returns: awaitable, and an asynchronous context manager that closes what it
    opened."""

    __slots__ = (
        "_cache",
        "_config",
        "_device_pools",
        "_executors",
        "_observers",
        "_ranks",
        "_storage_backend",
        "_stream",
    )

    def __init__(
        self,
        config: Config,
        device_pools: Mapping[str, Sequence[torch.Tensor]] | None,
        stream: torch.cuda.Stream | None,
        observers: Sequence[Observer],
        executors: Sequence[concurrent.futures.Executor | None],
        ranks: Ranks,
        storage_backend: StorageBackend | None,
    ) -> None:
        self._config = config
        self._storage_backend = storage_backend
        self._device_pools = device_pools
        self._stream = stream
        self._observers = observers
        self._executors = executors
        self._ranks = ranks
        self._cache: UnifiedRadixCache | None = None

    def __await__(self) -> Generator[Any, None, UnifiedRadixCache]:
        return self._open().__await__()

    async def _open(self) -> UnifiedRadixCache:
        executors = self._make_executors()
        try:
            # In a thread: memory is made ready and files are read.
            work = partial(
                build,
                self._config,
                device_pools=self._device_pools,
                observers=self._observers,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
            )
            parts = await run_to_end(submit(executors.io, work))
            controller = HybridCacheController(
                parts.tree,
                parts.allocators,
                executors=executors,
                host=parts.host,
                enabled=self._config.mode == "on",
                observers=parts.tree.observers,
                ranks=self._ranks,
                max_pinned=self._config.device.max_pinned,
                stream=self._stream,
                computes_on=parts.pools.device.type == "cuda",
                copy_states=partial(_copy_states, parts),
            )
            storage = parts.storage
            if storage is not None and self._storage_backend is not None:
                storage = replace(storage, given=self._storage_backend)
            await controller.start(storage)
        except BaseException:
            for executor in executors.owned:
                executor.shutdown(wait=False)
            await threads_ended(executors.owned, OPEN_LIMIT_S)
            raise
        return UnifiedRadixCache(parts, controller)

    def _make_executors(self) -> Executors:
        """The user's, and daemon threads where they brought none."""
        # On a GPU the bytes of one copy cross while the kernels of another run.
        copies = 2 if self._config.device.type.startswith("cuda") else 1
        threads = {"run": self._config.run_threads, "copy": copies, "io": IO_THREADS}
        run, copy, io = [
            given or DaemonExecutor(name, count, nice=0 if name == "run" else COPY_NICE)
            for given, (name, count) in zip(self._executors, threads.items(), strict=True)
        ]
        owned = [executor for executor in (run, copy, io) if executor not in self._executors]
        return Executors(run, copy, io, owned)

    async def __aenter__(self) -> UnifiedRadixCache:
        if self._cache is not None:
            raise ClosedError("this was entered before: call open again for another cache")
        self._cache = await self._open()
        return self._cache

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._cache is not None, "entered before it is left"
        await self._cache.aclose()
