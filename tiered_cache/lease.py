"""A request's hold on the cache: from its prompt's prefix to its last published token.

Owns: the tokens of one request, its page tables, and which of its pages are the tree's and which
its own. Refuses to
know: who else there is. Whatever ends the block (return, exception, cancellation), nothing
unpublished is kept and nothing leaks; that needs no code in the block.

Ownership by position (semantics §11.1), in tokens:

    0 ──── committed ──── loaded ──── computed ──── allocated
      the tree's,     a load's,    private,      private,
      held by a lock  coming       written       not written yet

There is something between `committed` and `loaded` only while a layer-wise load is under way.
The table does not change under a run: below `committed`, too, it names what the run was given until
the run has ended. Of a load that is not complete, that is nothing to read without a layer wait.
"""

from __future__ import annotations

import asyncio
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tiered_cache.chunk import Chunk, find_chunks
from tiered_cache.errors import ClosedError, StaleError
from tiered_cache.fences import LeaseFences
from tiered_cache.joint import JointChunk, JointGrant
from tiered_cache.keys import check_token
from tiered_cache.layers import NO_LOADS
from tiered_cache.lease_parts import LeaseParts
from tiered_cache.page_table import PageTable
from tiered_cache.prefetch import NOBODY_WAITS
from tiered_cache.prefix_load import PrefixLoad
from tiered_cache.publish import publish
from tiered_cache.reuse import Reuse
from tiered_cache.tree.components.base import join
from tiered_cache.tree.node import BASE
from tiered_cache.types import NO_PAGE, Boundary, Hits, MatchPrefixParams, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiered_cache.controller import HybridCacheController
    from tiered_cache.keys import RadixKey
    from tiered_cache.layers import LayerWaits
    from tiered_cache.lease_parts import StateCopy
    from tiered_cache.prefetch import PrefetchHandle
    from tiered_cache.ranks import Operation
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.types import PageIds

T = TypeVar("T")


class Lease:
    """Made by `UnifiedRadixCache.lease` and `acquire`; belongs to the cache's loop.

    Attributes:
        id: unique within the cache.
        prefix_len: tokens at the front that were reused instead of computed. They are on the
            device, and held.
        key: the tokens (prompt and appended ones) in their namespace.
        layers: with `layerwise`, what the model waits for before it reads a layer of the prefix.
        committed: tokens that are published, and so read-only.
        table, receipt, prompt_len, priority: see `publish`; not for users.
    """

    __slots__ = (
        "__weakref__",
        "_admitted_len",
        "_admitted_pages",
        "_canonical",
        "_closed",
        "_computed",
        "_controller",
        "_cuts",
        "_deferred",
        "_fences",
        "_is_stranded",
        "_joint",
        "_layerwise",
        "_load",
        "_num_runs",
        "_page_size",
        "_parts",
        "_prefetch",
        "_promised",
        "_reuse",
        "_rollback",
        "_running",
        "_seen",
        "_skipped",
        "committed",
        "epoch",
        "granted_at",
        "id",
        "key",
        "layers",
        "prefix_len",
        "priority",
        "prompt_len",
        "receipt",
        "table",
    )

    def __init__(
        self,
        controller: HybridCacheController,
        key: RadixKey,
        *,
        priority: int,
        reserve: int,
        rollback: int = 0,
        layerwise: bool = False,
    ) -> None:
        self._closed = True  # until it is granted there is nothing to close
        self.id = controller.new_lease_id()
        self.key = key
        self.prefix_len = 0
        self.layers = NO_LOADS
        self.epoch = -1
        self.granted_at = 0.0
        # Other ranks' loads end at other times, and may end otherwise: the grant waits for them.
        self._layerwise = layerwise and controller.ranks.is_alone
        self._joint: Operation | None = None  # what it does with other ranks, until its end
        self._rollback = rollback
        self._controller = controller
        self._page_size = controller.page_size
        self.priority = priority
        self.prompt_len = key.num_tokens
        self._admitted_len = self.prompt_len + reserve
        self._admitted_pages = -(-self._admitted_len // self._page_size)
        self.receipt: Receipt | None = None
        self.committed = 0
        self._computed = 0
        self._running: Sequence[Chunk] = ()  # in runs that are active or queued
        self._num_runs = 0
        self._cuts: Sequence[int] = ()  # lengths that it was truncated to
        self._deferred = 0  # commit up to here when the last run has ended
        self._skipped = 0  # and up to here when it needs no state to go on with
        self._is_stranded = False  # the state that it took over is void: it begins again
        self._reuse = Reuse()
        self._prefetch: PrefetchHandle | None = None
        self._promised = 0  # of `unspent`, what the accounts know
        self._seen = -1  # the tree's growth when it was last matched
        self._load: PrefixLoad | None = None  # what it gets from the host
        # What it has given up under one, too: from that it takes its next pages.
        self._fences = LeaseFences(controller.tree, controller.accounts, controller.fences)
        # What the table is to name, and from which page on, when the last run has ended.
        self._canonical: Sequence[tuple[int, Sequence[PageIds]]] = ()
        # Without entries until admission has looked: a reserve that can never fit costs no memory.
        self.table = PageTable(len(controller.tree.components), self._page_size)
        self._parts: LeaseParts | None = None
        if controller.sparse:
            given = controller.sparse, self.table, controller.accounts, self._fences
            self._parts = LeaseParts(*given, self._admitted_pages, rollback)

    # --- grant ------------------------------------------------------------------------------------

    def check_fits(self) -> None:
        """Raise `CapacityError` for what the device tier could never hold."""
        controller = self._controller
        controller.check()
        if self._admitted_pages > controller.accounts.capacity:
            controller.check_fits(BASE, self._admitted_pages, self._admitted_len)
        if self._parts is not None:
            for index, footprint in self._parts.footprints():
                controller.check_fits(index, footprint, self._admitted_len)
        self.table.make_room(self._admitted_pages)

    @property
    def reusable(self) -> int:
        """Tokens that may be reused: at least one is always computed (semantics §11.2)."""
        return self.prompt_len - 1 if self._controller.enabled else 0

    async def grant_on_all(
        self, operation: Operation, timeout: float | None, load_timeout: float | None
    ) -> None:
        """The way to its prefix, where several ranks must come to the same; see `JointGrant`."""
        self._joint = operation
        try:
            await JointGrant(self, self._controller, operation).run(timeout, load_timeout)
        except BaseException:
            operation.give_up()
            self.close()
            raise
        finally:
            self.end_prefetch()

    async def prefetch(self, limit: int, timeout: float | None) -> None:
        """Have storage bring to the host what is missing of the first `limit` tokens, as long as
        the configured policy and `timeout` have it; hold it there until `end_prefetch`."""
        storage = self._controller.storage
        if storage is None or self._prefetch is not None:
            return
        match = self._controller.tree.match_prefix(MatchPrefixParams(self.key, limit))
        missing = limit - limit % self._page_size - match.best_length
        # Where there are several ranks, all of them ask: another may have less.
        if self._controller.ranks.is_alone and not storage.prefetches.is_worth(missing):
            return
        self._reuse.fetches_from(match.best_length)
        name = f"prefetch of lease {self.id}"
        self._prefetch = storage.prefetches.start(self.key, limit, name=name)
        if storage.prefetches.is_waited_for or not self._controller.ranks.is_alone:
            self._reuse.fetched_to(await self._prefetch.wait(timeout=timeout))
            self._controller.check()

    def fetch_no_more(self) -> None:
        """It is admitted: a prefetch that is not waited for has had its time."""
        if self._prefetch is not None:
            if not self._prefetch.is_done:
                self._prefetch.done_now(NOBODY_WAITS)
            self._reuse.fetched_to(self._prefetch.tokens)

    def end_prefetch(self) -> None:
        """What it brought is taken, or not needed; and so is what others have brought for it."""
        if self._prefetch is not None:
            self._reuse.not_fetched = self._prefetch.why
            self._prefetch.close()
            self._prefetch = None
        storage = self._controller.storage
        if storage is not None and self.receipt is not None and not self.is_stale:
            storage.prefetches.note_granted(self.receipt)

    def admit_now(self, limit: int) -> bool:
        """If there is a place and nobody ahead, hold what the device has of the first `limit`
        tokens."""
        return self._controller.admission.admit_now(partial(self.try_grant, limit))

    async def admit(self, limit: int, timeout: float | None, place: int | None) -> None:
        """`admit_now`, in the very step in which there is a place."""
        controller, attempt = self._controller, partial(self.try_grant, limit)
        await controller.admission.admit(attempt, timeout, controller.check, place)

    @property
    def may_be_longer(self) -> bool:
        """Whether the host has something beyond what it holds."""
        return self._reuse.known > self._computed and self._controller.transfers is not None

    async def load_back(self, limit: int, timeout: float | None) -> None:
        """Bring what the host has of the first `limit` tokens; less, if it does not come."""
        self._load = PrefixLoad(self, self._controller)
        # A window or a state is for all its layers at once.
        layerwise = self._layerwise and self._parts is None
        await self._load.bring(limit, timeout, layerwise=layerwise)
        self._controller.check()  # the cache may have been closed meanwhile

    def load_no_longer(self) -> None:
        """Be content with what has come."""
        if self._load is not None:
            self._load.wait_no_longer()

    @property
    def is_stale(self) -> bool:
        """Whether a `reset()` came since it was admitted."""
        return self.epoch != self._controller.epoch

    def try_grant(self, limit: int) -> bool:
        """If there is room, hold what the device has of the first `limit` tokens."""
        controller, tree = self._controller, self._controller.tree
        match = tree.match_prefix(MatchPrefixParams(self.key, limit))
        self._seen = tree.growth
        boundary = match.device_boundary
        need = self._admitted_pages - boundary.depth // self._page_size
        if controller.transfers is not None and controller.waits_for_copies(need):
            return False
        room = controller.accounts.room_beside(need)
        if self._parts is not None:
            would_hold = tree.would_hold(boundary)
            if not self._parts.has_room(boundary.depth, would_hold, room):
                return False
        held = tree.try_hold(boundary, room, self.priority)
        if held is None:
            return False
        self.receipt, pages = held
        self._closed = False
        self.granted_at = controller.now()
        if boundary.depth:
            self._adopt_prefix(boundary.depth, pages)
            self.prefix_len = boundary.depth
        self._reuse.known = match.full_hit_length
        self.epoch = controller.epoch
        self._promised = self._admitted_pages - self.table.num_pages
        controller.accounts.promise(self._promised)
        if self._parts is not None:
            if self._parts.take_over(partial(tree.take_out, self.receipt), boundary.depth):
                controller.counters.states_taken_over += 1
            self._parts.settle()
        controller.granted(self)
        return True

    def _adopt_prefix(self, depth: int, pages: Sequence[PageIds]) -> None:
        """Point the table at the tree's pages up to `depth`, which is locked; `pages` are those of
        `[committed, depth)`."""
        first = self.committed // self._page_size
        if self._num_runs:  # of a load whose pages others have published meanwhile
            self._canonical = [*self._canonical, (first, pages)]
        else:
            self.table.write(first, pages)
        if depth > self._computed:
            self._reuse.total += depth - self._computed
            self._computed = depth
            if self._parts is not None:
                self._parts.taken_over(depth)
        self.committed = depth
        if self._parts is not None:
            assert self.receipt is not None, "granted leases hold a receipt"
            self._parts.held(self.receipt)

    def start_over(self) -> None:
        """What it was admitted with is gone (a reset), or less on another rank: it is as it was
        before."""
        self._close()
        self.prefix_len = self.committed = self._computed = self._promised = 0
        self._reuse.start_over(self._load.shortened if self._load is not None else "")
        self._load = None
        self._skipped = 0
        self.table.cut(0)
        if self._parts is not None:
            self._parts.drop()

    # --- load (for `PrefixLoad`) ------------------------------------------------------------------

    def go_on_from(self, first: int, last: int, limit: int | None) -> None:
        """A load has made a longer prefix visible, up to `limit` tokens of which are wanted;
        `[first, last)` of it have come from the host."""
        controller, tree, receipt = self._controller, self._controller.tree, self.receipt
        assert receipt is not None, "granted leases hold a receipt"
        boundary = tree.match_deeper(receipt, self.key, len(self) - 1 if limit is None else limit)
        if boundary is None or not self._may_hold_state(boundary):
            return
        start, stop = max(self.committed, first), min(boundary.depth, last)
        from_host = max(0, stop - start)
        gained = boundary.depth - self._computed
        if gained > 0:
            self._reuse.loaded(start, start + from_host)
        self._take_over(boundary)
        if gained > 0:
            from_host = min(gained, from_host)
            from_storage = min(from_host, self._reuse.of_storage(start, stop))
            controller.loaded(self, gained, from_host=from_host, from_storage=from_storage)

    def use_load(self, stop: int, layers: LayerWaits) -> None:
        """The table names pages up to `stop` that are coming: a model waits for each layer."""
        self._reuse.total += stop - self._computed
        self._reuse.loaded(self._computed, stop)
        self._computed = self.prefix_len = stop
        self.layers = layers

    def load_is_complete(self) -> None:
        """All that it used before is the tree's now."""
        brought, from_storage = self._reuse.from_host, self._reuse.from_storage
        self._controller.loaded(self, brought, from_host=brought, from_storage=from_storage)
        if self._deferred and not self._num_runs:
            self._publish_deferred()

    def fall_back(self) -> None:
        """A load that the lease was using has failed: what is committed is what there is."""
        load = self._load
        assert load is not None, "it says so"
        own, keep = load.end // self._page_size, self.committed // self._page_size
        dropped = self.table.cut(keep)
        self._fences.give_back([ids[max(0, own - keep) :] for ids in dropped])
        self._reuse.lost(self.committed, max(self.committed, load.end))
        self._computed = self.prefix_len = self.committed
        self._cuts = [*self._cuts, self.committed]
        self._deferred = load.end = 0
        load.has_failed = False

    @property
    def _is_using_load(self) -> bool:
        return self._load is not None and self._load.is_under_way

    @property
    def _own_from(self) -> int:
        """Where its own pages begin, in pages: behind the tree's and a load's."""
        end = self._load.end if self._load is not None else 0
        return max(self.committed, end) // self._page_size

    async def wait_layer(self, layer: int) -> None:
        """Until the state of a layer of the prefix is on the device (with `layerwise=True`; at once
        otherwise). For the loop; a worker thread calls `layers.wait(layer)`.

        Raises:
            LoadFailed: it will not come; the lease has fallen back, `next_chunk` goes on from
                there. StaleError: a `reset()` came between.
        """
        await self.layers.arrive(layer)

    @property
    def hits(self) -> Hits:
        """Tokens that were reused instead of computed, by the tier they came from."""
        return self._reuse.hits

    @property
    def why(self) -> str:
        """Why the prefix ends where it does, for people."""
        if not self._controller.enabled:
            return "the cache is off"
        size = self._page_size
        reusable = (self.prompt_len - 1) // size * size
        shortened = self._load.shortened if self._load is not None else None
        return self._reuse.why(self.prefix_len, reusable, size, shortened)

    # --- compute ----------------------------------------------------------------------------------

    async def next_chunk(self, max_tokens: int) -> Chunk | None:
        """The next tokens to compute, at most `max_tokens`, with pages taken; None when all tokens
        are computed.

        A chunk ends where the tokens end or, when `max_tokens` does not reach that far, at the last
        whole page that it reaches (inside a page if it reaches none). First goes on from what
        others have published meanwhile, so `start` can be beyond the last chunk's `stop`. Waits
        only while another lease has a run active or queued over the same next page, and wakes at
        its commit (semantics §11.3).

        Raises:
            ValueError: `max_tokens` is less than 1. CapacityError: no room beyond the reserve.
        """
        if type(max_tokens) is not int:
            max_tokens = whole_number("max_tokens", max_tokens)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        controller = self._controller
        if self._joint is not None:
            return await JointChunk(self, controller, self._joint).next(max_tokens)
        while True:
            self.check()
            start, length = self.frontier, self.key.num_tokens
            if start >= length:
                return None
            if self._load is not None and self._load.pages and not self._is_using_load:
                await self._load.settled()
                continue
            if self._is_stranded:
                await self._begin_again()
                continue
            if controller.tree.growth != self._seen:
                self.rematch(length - 1)
                start = self.frontier
            claim = controller.claims.over(self.id, self.key, start)
            if claim is None:
                break
            controller.counters.chunk_waits += 1
            await claim.released.wait()
        return self.hand_out(start, self.end_of_chunk(start, max_tokens))

    async def _begin_again(self) -> None:
        """As if it was leased once more, in front of everybody: the state that it had taken over is
        void, and what it holds of the rest is no use without one."""
        controller = self._controller
        while self._num_runs or self._fences:
            await controller.changed()
            self.check()
        self.start_over()
        limit = len(self) - 1
        # Whoever closes it meanwhile has taken the mark away, and waits for nothing.
        await controller.admission.admit_first(
            lambda: not self._is_stranded or self.try_grant(limit), controller.check
        )
        self._is_stranded = False

    def end_of_chunk(self, start: int, max_tokens: int) -> int:
        """Where a chunk ends that may have so many tokens (semantics §11.3)."""
        stop, length, grid = start + max_tokens, self.key.num_tokens, self._controller.grid
        if stop < length:
            whole = stop - stop % grid
            stop = whole if whole > start else stop
        else:
            stop = length
        if self._parts is not None:
            # Where a state has to stand, for those who come with the same prompt or a fork of it.
            for depth in (self._reuse.known, self.prompt_len - 1):
                depth -= depth % grid
                if start < depth < stop:
                    stop = depth
            num_pages = self.table.num_pages + self._parts.num_pages_to_come()
            stop = min(stop, max(start + 1, num_pages * self._page_size))
        return stop

    def check_has_state(self) -> None:
        """On one rank alone it cannot begin again.

        Raises:
            StaleError: a run that came to nothing has cost the state that was taken over.
        """
        if self._is_stranded:
            raise StaleError(f"{self!r} has no state to go on from: lease its tokens again")

    def rematch(self, limit: int) -> None:
        """Go on from what others have published, if that is beyond what this lease has computed."""
        controller, tree, receipt = self._controller, self._controller.tree, self.receipt
        assert receipt is not None, "granted leases hold a receipt"
        if self._num_runs or self._is_using_load or not controller.enabled:
            return
        self._seen = tree.growth
        boundary = tree.match_deeper(receipt, self.key, limit)
        if boundary is None or boundary.depth <= self._computed or not self._may_hold(boundary):
            return
        gained = boundary.depth - self._computed
        self._take_over(boundary)
        self.settle_promise()
        controller.rematched(self, gained)

    def _may_hold(self, boundary: Boundary) -> bool:
        """Whether a deeper boundary can be held, although own pages do not go home for it before a
        fence is lifted, and the state that it works with is promised beside the one it holds."""
        if not self._may_hold_state(boundary):
            return False
        needed = self._controller.tree.would_need(boundary)
        return not self._fences.keeps or self._has_room_beside(boundary.depth, needed)

    def _has_room_beside(self, stop: int, needed: list[int]) -> bool:
        """Whether what it holds of `[0, stop)` then can be held beside what it gives up for it,
        which goes home when the fences that stand now are lifted."""
        if self._parts is not None:
            for index, num_ids in self._parts.would_leave(stop):
                needed[index] += num_ids
        spare = self._controller.accounts.room_beside(0)
        return all(num_ids <= room for num_ids, room in zip(needed, spare, strict=True))

    def _may_hold_state(self, boundary: Boundary) -> bool:
        if self._parts is None or not self._parts.has_states:
            return True
        return self._parts.may_hold(
            self._controller.tree.would_protect(boundary), self._would_release()
        )

    def _would_release(self) -> list[int]:
        """Per component, ids that go home when it holds something else instead."""
        assert self.receipt is not None, "granted leases hold a receipt"
        if self._fences.keeps:
            return [0] * len(self._controller.tree.components)
        return self._controller.tree.would_release([self.receipt])

    def _take_over(self, boundary: Boundary) -> None:
        """Hold a deeper device boundary, and use the tree's pages up to it instead of own ones."""
        tree, receipt = self._controller.tree, self.receipt
        assert receipt is not None, "granted leases hold a receipt"
        size, held = self._page_size, receipt.depth
        before = self._parts.hold(receipt) if self._parts is not None else None
        tree.advance(receipt, boundary)
        tree.count_hits(receipt, above=held, priority=self.priority)
        superfluous = []
        if not self._is_using_load:
            own = slice(held // size, min(boundary.depth // size, self.table.num_pages))
            superfluous = [ids[own].copy() for ids in self.table.ids]
        if self._computed == self.prefix_len:
            self.prefix_len = max(self.prefix_len, boundary.depth)
        self._adopt_prefix(boundary.depth, tree.pages(boundary, self.committed))
        if superfluous:
            self._fences.give_back(superfluous)
        if self._parts is not None and before is not None:
            self._parts.keep_left(tree, before, receipt)

    def allocate(self, num_tokens: int) -> Chunk:
        """The next `num_tokens` tokens to compute, for callers that cut and schedule themselves.
        Never waits.

        Raises:
            ValueError: fewer tokens are left. CapacityError: no room beyond the reserve.
        """
        self.check()
        num_tokens = whole_number("num_tokens", num_tokens)
        start = self.frontier
        if not 1 <= num_tokens <= len(self) - start:
            raise ValueError(
                f"cannot hand out {num_tokens} tokens: {len(self) - start} are left to compute"
            )
        return self.hand_out(start, start + num_tokens)

    @property
    def pending(self) -> Chunk | None:
        """All tokens that nobody computes yet, with their pages, as one chunk; None when there are
        none.

        Raises:
            CapacityError: no room beyond the reserve; of a window that is a chunk at a time, for
                more there must be room: `next_chunk` ends where there is none.
        """
        self.check()
        start = self.frontier
        return self.hand_out(start, len(self)) if start < len(self) else None

    def hand_out(self, start: int, stop: int) -> Chunk:
        """Tokens that are to be computed, with their pages.

        Raises:
            CapacityError: no room beyond the reserve.
        """
        self.take_pages(-(-stop // self._page_size))
        self._controller.counters.chunks += 1
        if self._load is not None and self._load.is_over:
            self.layers = NO_LOADS  # what failed is nothing to this chunk: it goes on from below
        return Chunk(self, start, stop)

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """`fn(*args)` in the cache's run executor; chunks of this lease among the arguments count
        as computed after it.

        Chunks are found among `args`, and two levels down in lists, tuples and dicts. Cancelled
        while queued it ends at once; cancelled while running it waits for the thread, then raises,
        and nothing counts as computed.

        Raises:
            StaleError: a chunk from before a truncation, or before somebody else's state was taken
                over, or one that follows a run that came to nothing: ask for the next one.
            ValueError: a chunk that leaves a gap. ClosedError: dropped while queued, because the
                cache or the executor was shut down.
        """
        self.check()
        return await self._controller.run((self,), find_chunks(args), fn, args)

    def begin_run(self, chunks: Sequence[Chunk]) -> None:
        """The controller is about to submit a run over these chunks (of this and other leases)."""
        self._num_runs += 1
        self._running = [*self._running, *[chunk for chunk in chunks if chunk.lease is self]]

    def prepare_run(self, chunks: Sequence[Chunk]) -> list[StateCopy]:
        """A run over these chunks is about to be given to its thread: what is copied there before
        it.

        Raises:
            StaleError: the state that it begins with is not kept.
        """
        mine = [chunk.start for chunk in chunks if chunk.lease is self]
        return self._parts.prepare_run(min(mine)) if mine and self._parts is not None else []

    def end_run(
        self, chunks: Sequence[Chunk], *, computed: bool, touched: bool | None = None
    ) -> None:
        """A run over `chunks` has really ended; whether it has computed them, and whether it has
        begun to (None: it was not even prepared)."""
        self._num_runs -= 1
        self._fences.run_ended()
        if self._parts is not None and self.epoch == self._controller.epoch:
            mine = [chunk.stop for chunk in chunks if chunk.lease is self]
            if mine and touched is not None:
                self._parts.run_ended(max(mine) if computed else -1, was_touched=touched)
                self.settle_promise()  # others may follow, and what is void is spare to nobody
        running = list(self._running)
        has_failed = self._load is not None and self._load.has_failed
        for chunk in chunks:
            if chunk.lease is self:
                running.remove(chunk)
                if computed and chunk.start <= self._computed and not has_failed:
                    self._count_computed(chunk.stop)
        self._running = running
        if self._num_runs:
            return
        self._name_canonical()
        if self._parts is not None and self.epoch == self._controller.epoch:
            self._go_back()
            self._leave_behind()
            self.settle_promise()
        if self.epoch != self._controller.epoch:
            self._deferred = 0
        elif has_failed:
            self.fall_back()
            self.settle_promise()
        elif self._deferred and not self._is_using_load:
            if self._deferred >= self._computed:
                self._settle_left()
            self._publish_deferred()
        if self._closed and not self._fences:
            self._end()

    def _go_back(self) -> None:
        """After a run that came to nothing: to where there is all that it takes to go on."""
        assert self._parts is not None, "the caller has looked"
        depth = self._parts.fallback(self._computed)
        if depth < self._computed:
            self._drop_from(max(depth, self.committed))
            self._is_stranded = self._parts.fallback(self._computed) < self._computed

    def _drop_from(self, depth: int) -> None:
        """What is computed from `depth` on is nothing any more; the tokens stay."""
        self._cuts = [*self._cuts, depth]
        self._computed = depth
        self.prefix_len = min(self.prefix_len, depth)
        keep = -(-depth // self._page_size)
        if keep < self.table.num_pages:
            self._fences.give_back(self.table.cut(keep))

    def _leave_behind(self) -> None:
        """Pages that no token to come needs go home (semantics §11.6)."""
        if self._parts is not None and not (self._num_runs or self._closed):
            ends = [self.prompt_len - 1, self.prompt_len]
            whole = [end - end % self._page_size for end in ends]
            self._parts.leave_behind(self._own_from, self._computed - self._rollback, whole)

    def _name_canonical(self) -> None:
        """What the table was not to name under a run; after a reset it goes on naming what it
        holds."""
        canonical, self._canonical = self._canonical, ()
        if self.epoch == self._controller.epoch:
            for first, pages in canonical:
                self.table.write(first, pages)

    def _end(self) -> None:
        """Closed, and nobody touches its pages any more."""
        self._release()
        self._controller.ended(self)

    def _publish_deferred(self) -> None:
        stop, self._deferred = min(self._deferred, self._computed), 0
        self._publish_when_quiet(stop)

    def _count_computed(self, stop: int) -> None:
        if stop > self._computed:
            self._controller.counters.tokens_computed += stop - self._computed
            self._computed = stop

    def check_chunk(self, chunk: Chunk, frontier: int) -> None:
        """Raise unless the chunk can be computed when everything up to `frontier` is."""
        if chunk.start < self.committed:
            raise StaleError(
                f"{chunk!r} is from before the lease took [0, {self.committed}) over: "
                "ask for the next chunk"
            )
        if chunk.num_cuts < len(self._cuts) and chunk.stop > min(self._cuts[chunk.num_cuts :]):
            raise StaleError(f"{chunk!r} was truncated away: other tokens may stand there now")
        if chunk.start > frontier:
            raise ValueError(f"{chunk!r} leaves a gap: only [0, {frontier}) is computed")

    # --- publish ----------------------------------------------------------------------------------

    def commit(self, chunk: Chunk, *, ready: Any = None) -> int:
        """Publish the whole pages of `[0, chunk.stop)`: others may share them from now on.

        The chunk counts as computed, unless a run over it is under way: then that run says.
        Returns the depth from which the page table has changed (somebody else published the same
        first; their pages count). While a run or a layer-wise load is active this is deferred to
        its end.

        `ready`: for a device that computes on after the run has returned: a CUDA event, an
        awaitable, or an event with an async `wait`, done when the chunk's pages are written
        (default: the stream given to `open`, as it is now, if there is one). Until then nobody
        copies them to the host and they stay this lease's, also after its end, and so does what the
        lease gives up meanwhile; its own runs follow each other. Another lease that is granted them
        says so (`ready`). It must not fail: if it does, nobody knows what was
        written, and the cache is `reset()`.

        Raises:
            StaleError, ValueError: as `run`. TypeError: not a chunk, or nothing to wait for.
        """
        self.check()
        if not isinstance(chunk, Chunk):
            raise TypeError(f"commit takes a chunk of this lease, not {type(chunk).__name__}")
        if chunk.lease is not self:
            raise ValueError(f"{chunk!r} is another lease's")
        if chunk.stop > self._computed:
            if self._parts is not None and self._parts.has_states and chunk not in self._running:
                raise ValueError(f"{chunk!r} was not run: a model with states computes in `run`")
            is_running = chunk in self._running
            self.check_chunk(chunk, self.frontier if is_running else self._computed)
            if not is_running:
                self._count_computed(chunk.stop)
        if ready is None and self._controller.stream is not None:
            ready = self._controller.stream.record_event()
        if ready is not None:
            self._raise_fence(chunk, ready)
        self._settle_left()
        return self._publish_when_quiet(chunk.stop)

    def _raise_fence(self, chunk: Chunk, ready: Any) -> None:
        first, last = chunk.start // self._page_size, -(-chunk.stop // self._page_size)
        ids = [ids[first:last].copy() for ids in self.table.ids]
        if self._parts is not None:
            for index, written in self._parts.under_run(first, last):
                ids[index] = written
        self._fences.add(self._controller.raise_fence(ids, ready, self._fence_lifted))

    def _settle_left(self) -> None:
        """The fence over the last run stands, or there is none to come."""
        if self._fences.settle():
            self.settle_promise()
            self._controller.calmed()

    def _fence_lifted(self) -> None:
        self._fences.look_again(is_stale=self.is_stale)
        if not self.is_stale:
            self.settle_promise()
            if self._deferred and not (self._num_runs or self._is_using_load):
                self._publish_deferred()
        if self._closed and not (self._num_runs or self._fences):
            self._end()

    async def ready(self) -> None:
        """Until all of the prefix is written (see `commit`): for a device that may read it before.

        Ask in the step in which a run begins: a run or a load that ends may change the prefix. Not
        needed where the same stream writes and reads.

        Raises:
            StaleError: a `reset()` came between.
        """
        self.check()
        fences = self._controller.fences
        while standing := fences.over(self.table.ids[BASE][: self.table.num_pages]):
            await standing[0].passed.wait()  # meanwhile a load may have ended: look again
            self.check()

    def finish(self) -> int:
        """Publish the whole pages of all that is computed, with a boundary at the prompt's end
        (semantics §5.9)."""
        self.check()
        self._settle_left()
        return self._publish_when_quiet(self._computed)

    def suspend(self) -> None:
        """Publish what is computed and let go: lease the same tokens again to resume."""
        self.finish()
        self.close()

    def _publish_when_quiet(self, stop: int) -> int:
        """Now, or when the last run and the load above which it stands have ended: the table must
        not change under a running model, nor the tree hold what hangs in the air."""
        if stop < self.committed + self._page_size:
            return self.committed  # no whole page more
        if (
            self._num_runs
            or (self._load is not None and self._load.is_under_way)
            or (self._fences.keeps and not self._has_room_to_publish(stop))
        ):
            self._deferred = max(self._deferred, stop)
            return self.committed
        return self._publish(stop)

    def _has_room_to_publish(self, stop: int) -> bool:
        """Whether what others have published of it can be held beside the own pages, and what it
        holds then beside what it has held, neither of which goes home before a fence is lifted."""
        assert self.receipt is not None, "granted leases hold a receipt"
        tree = self._controller.tree
        boundary = tree.match_deeper(self.receipt, self.key, stop)
        if boundary is not None and not self._may_hold_state(boundary):
            return False
        needed = [0] * len(tree.components) if boundary is None else tree.would_need(boundary)
        if self._parts is not None:  # where one lacks something, there is no boundary
            known = tree.known_below(self.receipt, self.key, stop) // self._page_size
            first = self.committed // self._page_size
            needed[BASE] = max(needed[BASE], known - first)
            for index, num_ids in self._parts.num_own(first, known):
                needed[index] += num_ids
        return self._has_room_beside(stop, needed)

    def _publish(self, stop: int) -> int:
        controller = self._controller
        stop -= stop % self._page_size
        if self._parts is not None:
            stop = self._publishable(stop)
        if stop <= self.committed or not controller.enabled:
            return stop
        published, receipt, before = stop - self.committed, self.receipt, None
        assert receipt is not None, "it holds what it has published"
        if self._parts is not None:
            before = self._parts.offer(receipt, self.committed, stop)
        first_changed, duplicates = publish(controller.tree, self, stop)
        if first_changed < stop:
            self._fences.give_back(duplicates)
            self.settle_promise()
            controller.counters.pages_duplicate += sum(map(len, duplicates))
        if self._parts is not None and before is not None:
            self._parts.published(stop, receipt)
            self._parts.keep_left(controller.tree, before, receipt)
        controller.committed(self, published)
        return first_changed

    def _publishable(self, stop: int) -> int:
        """How far `[0, stop)` can be published so that others can use it, and this lease go on."""
        assert self._parts is not None, "the caller has looked"
        publishable = self._parts.publishable(stop, self._would_release())
        if publishable is None:
            self._controller.counters.states_skipped += 1
            self._skipped = stop
            return self.committed
        return max(publishable, self.committed)

    # --- generate ---------------------------------------------------------------------------------

    def append(self, token: int) -> Chunk:
        """Add one generated token and take its page; the chunk to compute it. Synchronous,
        amortised O(1).

        Raises:
            CapacityError: beyond the reserve, and no room; nothing changes. ValueError: not a token
                id.
        """
        self.check()
        at = len(self)
        check_token(token, at)
        self.take_pages(at // self._page_size + 1)
        self.key.append(token)
        return Chunk(self, at, at + 1)

    @property
    def room(self) -> int:
        """Tokens that `append` takes for sure: what is left of the reserve."""
        return max(0, self._admitted_len - len(self))

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on (rejected drafts), and their pages.

        Raises:
            ValueError: a length that is committed already or longer than the tokens, or a run is
                active.
        """
        self.check()
        length = whole_number("length", length)
        if not self.committed <= length <= len(self) or length < 1:
            raise ValueError(
                f"cannot truncate to {length}: "
                f"{self.committed} tokens are committed, {len(self)} are there"
            )
        if self._num_runs:
            raise ValueError("cannot truncate while a run is active: it may be writing there")
        if self._is_using_load and length < self._own_from * self._page_size:
            raise ValueError(f"cannot truncate to {length}: a load is bringing what is there")
        kept = min(length, self._computed)
        if self._parts is not None:
            if kept < self._computed and self._parts.fallback(kept) != kept:
                raise ValueError(f"cannot truncate to {length}: what is needed there is not kept")
            self._parts.cut(kept)
        self.key.truncate(length)
        self._skipped = min(self._skipped, length)
        self._cuts = [*self._cuts, length]
        self._computed = min(self._computed, length)
        self.keep_pages(-(-length // self._page_size))

    # --- pages ------------------------------------------------------------------------------------

    @property
    def pages(self) -> Mapping[str, PageIds]:
        """Per component, the page table: read-only int32, one id per page of the sequence (−1: none
        taken yet)."""
        return self.page_tables(len(self))

    def page_tables(self, stop: int) -> dict[str, PageIds]:
        """The page tables of `[0, stop)`."""
        self._check_holds_pages()
        num_pages = -(-stop // self._page_size)
        return {
            str(component.id): self.table.view(component.index, num_pages)
            for component in self._controller.tree.components
        }

    @property
    def pages_version(self) -> int:
        """Rises whenever an entry of a page table changes."""
        return self.table.version

    def slots(
        self, component: str = "full", start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Device slots of the tokens `[start, stop)`: `page id × page_size + offset`, int64.

        Raises:
            ValueError: tokens whose pages are not taken. KeyError: no such component.
        """
        self._check_holds_pages()
        stop = len(self) if stop is None else stop
        return self.table.slots(self._component_index(component), start, stop)

    @property
    def device_indices(self) -> torch.Tensor:
        """Slots of the computed tokens in the first component's pools, int64 on the CPU."""
        return torch.from_numpy(
            self.slots(str(self._controller.tree.components[0].id), 0, self._computed)
        )

    def _check_holds_pages(self) -> None:
        """Closed, it still holds what a run touches; after that its ids are somebody else's."""
        if self._closed and not self._num_runs:
            raise ClosedError(f"{self!r} is closed: its pages are not its own any more")

    def _component_index(self, component: str) -> int:
        for index, known in enumerate(self._controller.tree.components):
            if known.id == component:
                return index
        names = ", ".join(repr(str(known.id)) for known in self._controller.tree.components)
        raise KeyError(f"no component {component!r}; there is {names}")

    def take_pages(self, num_pages: int) -> None:
        """Have pages for the first `num_pages` pages of the sequence; all components or none."""
        table = self.table
        missing = num_pages - table.num_pages
        if missing <= 0:
            return
        fresh = max(0, missing - self._fences.num_left(BASE))
        unspent = self.unspent
        if fresh > unspent:
            self._controller.check_spare_of_base(fresh - unspent)
        if self._parts is not None:
            for index, lacking in self._parts.lacking(missing):
                self._controller.check_spare_of_one(index, lacking)
        table.write(table.num_pages, self._fences.take(missing))
        self.settle_promise()

    def keep_pages(self, num_pages: int) -> None:
        """Give back what it has taken beyond the first `num_pages` pages of the sequence."""
        if num_pages < self.table.num_pages:
            self._fences.give_back(self.table.cut(num_pages))
            self.settle_promise()
            self._controller.admission.look_again()

    def held_pages(self) -> list[PageIds]:
        """Per component, all pages that the lease holds: the tree's, a load's, its own."""
        pages = self._with_left([ids[: self.table.num_pages] for ids in self.table.ids])
        if self._fences.has_left:
            return [join([ids, self._fences.of_tree(at)]) for at, ids in enumerate(pages)]
        return pages

    def private_pages(self) -> list[PageIds]:
        """Per component, the pages that are the lease's own."""
        first = self._own_from
        return self._with_left([ids[first : self.table.num_pages] for ids in self.table.ids])

    def _with_left(self, pages: list[PageIds]) -> list[PageIds]:
        if self._parts is not None:
            pages = self._parts.in_table(pages)
        if self._fences.has_left:
            return [join([ids, self._fences.own(at)]) for at, ids in enumerate(pages)]
        return pages

    @property
    def num_private_pages(self) -> int:
        """Pages of each component that are the lease's own."""
        return self.table.num_pages - self._own_from

    @property
    def unspent(self) -> int:
        """Pages of each component that admission promised and the lease has not taken."""
        if self._closed:
            return 0
        taken = self.table.num_pages
        if self._load is not None:  # what the table names of a load is paid for by `pages`
            taken += self._load.pages + self.committed // self._page_size - self._own_from
        if self._fences.has_left:
            taken += self._fences.num_left(BASE)
        return max(0, self._admitted_pages - taken)

    @property
    def unpromised(self) -> int:
        """Pages of the first component that it may still take, and the accounts do not know of."""
        return self.unspent - self._promised

    @property
    def has_lost_room(self) -> bool:
        """Whether a load has cost it what it was promised: it has to be admitted anew."""
        return self._load is not None and self._load.has_lost_room

    def settle_promise(self) -> None:
        """Bring the accounts in line with `unspent`, after whatever has changed it."""
        if self.epoch == self._controller.epoch:
            unspent = self.unspent
            if unspent != self._promised:
                self._controller.accounts.promise(unspent - self._promised)
                self._promised = unspent
            if self._parts is not None:
                self._parts.settle()

    def own_ids(self, index: int) -> int:
        """Ids of one component that its end would give back, beside what the tree holds for it."""
        if index == BASE:
            return self.num_private_pages + self.unspent
        return len(self.private_pages()[index]) + self.unspent_of(index)

    def unspent_of(self, index: int) -> int:
        """Ids of one component that admission promised and the lease has not taken."""
        unspent = self._parts.unspent(index) if self._parts is not None else None
        if unspent is None:
            return self.unspent
        return 0 if self._closed else unspent

    @property
    def state_slots(self) -> dict[str, int]:
        """Per component of states, the slot that a run of this lease works with, while it goes
        on."""
        components = self._controller.tree.components
        slots = self._parts.slots() if self._parts is not None else {}
        return {str(components[index].id): slot for index, slot in slots.items()}

    def pages_beyond_promise(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens would take beyond what the lease has or was promised."""
        num_pages = -(-num_tokens // self._page_size)
        return max(0, num_pages - max(self._admitted_pages, self.table.num_pages))

    def check_table(self) -> list[str]:
        """What is wrong with the page table, for `check_integrity`."""
        assert self.receipt is not None, "granted leases hold a receipt"
        faults = []
        if self.receipt.depth != self.committed:
            faults.append(f"{self!r} holds [0, {self.receipt.depth}) and says {self.committed}")
        canonical = list(
            self._controller.tree.pages(Boundary(self.receipt.node, self.receipt.depth))
        )
        if self._parts is not None:
            self._parts.show_held(canonical, self.receipt)
        for theirs, ours in zip(canonical, self.table.ids, strict=True):
            ours = ours[: len(theirs)]
            is_named = ours != NO_PAGE  # what is not held of a window is not named
            if not (self._canonical or np.array_equal(theirs[is_named], ours[is_named])):
                faults.append(f"{self!r} does not use the tree's pages of what it has committed")
        taken = self.table.num_pages * self._page_size
        if not 0 <= self.committed <= self._computed <= min(taken, len(self)):
            faults.append(f"{self!r} is out of order: pages are taken up to {taken}")
        return faults

    # --- looking ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Tokens of the prompt and appended ones."""
        return self.key.num_tokens

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Read-only view of all tokens, int64."""
        return self.key.tokens

    @property
    def computed(self) -> int:
        """Tokens whose state is in the pools."""
        return self._computed

    @property
    def frontier(self) -> int:
        """Tokens that are computed, or that a run under way will have computed."""
        if not self._running:
            return self._computed
        return max(self._computed, *[chunk.stop for chunk in self._running])

    @property
    def num_cuts(self) -> int:
        """How often it was truncated: chunks from before may name other tokens."""
        return len(self._cuts)

    @property
    def published(self) -> Boundary:
        """The end of what it holds of the tree."""
        assert self.receipt is not None, "granted leases hold a receipt"
        return Boundary(self.receipt.node, self.receipt.depth)

    @property
    def is_running(self) -> bool:
        """Whether a run may be touching its pages."""
        return self._num_runs > 0

    @property
    def closed(self) -> bool:
        return self._closed

    def __repr__(self) -> str:
        """No tokens: prompts do not belong in logs."""
        return (
            f"<Lease {self.id}: {len(self)} tokens, "
            f"{self._computed} computed, {self.committed} committed>"
        )

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of everything; what is not published is dropped.

        Any number of times, at any time, also after a `reset()` or the cache's end.

        Raises:
            WrongThreadError: from another thread than the cache's; nothing changes.
        """
        if not self._controller.may_clean_up():
            return
        if self._closed:
            self._is_stranded = False
            return
        if self._joint is not None:
            self._joint.give_up()
        self._close()

    def _close(self) -> None:
        controller = self._controller
        if self._closed:
            return
        if self._promised and self.epoch == controller.epoch:
            controller.accounts.promise(-self._promised)
            self._promised = 0
        self._closed = True
        if self.epoch == controller.epoch:
            self._fences.settle()
            if self._parts is not None:
                self._parts.close()
        if self._load is not None:
            if self._is_using_load:
                self._deferred = 0  # it stands on pages that may never come
            self._load.leave()
        if self._skipped and self.epoch == controller.epoch:
            self._publish_when_quiet(min(self._skipped, self._computed))
        is_running = self._num_runs > 0 or bool(self._fences)
        if not is_running:
            self._release()
        controller.released(self, is_running=is_running)

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing` and symmetry with `acquire`; does not wait."""
        self.close()

    def _release(self) -> None:
        controller, receipt = self._controller, self.receipt
        if receipt is None:
            return
        if self.epoch != controller.epoch:
            controller.accounts.give_back_stale(self.held_pages())
            self._fences.forget()
        else:
            if self.num_private_pages or self._fences.has_left or self._parts is not None:
                controller.accounts.give_back(self.private_pages())
            self._fences.forget()
            controller.tree.dec_lock_ref(receipt)
        self.receipt = None

    def check(self) -> None:
        """Raise unless the lease can be used here and now.

        Raises:
            ClosedError, StaleError (a `reset()` came between), WrongThreadError.
        """
        controller = self._controller
        # The first line of `controller.check`, spelt out: every call of a lease comes by here.
        if asyncio._get_running_loop() is not controller.loop or controller.closed:
            controller.check()
        if self._closed:
            raise ClosedError(f"{self!r} is closed: lease its tokens again")
        if self.epoch != controller.epoch:
            raise StaleError(f"{self!r} is from before a reset(): lease its tokens again")

    def check_is_of(self, controller: HybridCacheController) -> None:
        """Raise `ValueError` for a lease of another cache, which would not know who uses its
        pages."""
        if self._controller is not controller:
            raise ValueError(f"{self!r} is of another cache: run and extend it there")

    def __del__(self) -> None:
        if not self._closed:
            self._controller.dropped(self)
            warnings.warn(
                f"{self!r} was dropped without being closed", ResourceWarning, stacklevel=2
            )
