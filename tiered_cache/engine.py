"""For an engine that owns its requests: match, lock, allocate, publish and let go by hand.

The lease is the safe form of the same; here the engine says when. Every call keeps the account that
leases rest on: what would take pages that are promised to somebody is refused. Owns: which pages
are lent to the engine. Refuses to know: how the engine schedules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiered_cache.errors import StaleError
from tiered_cache.page_table import PageTable
from tiered_cache.publish import publish
from tiered_cache.tree.components.base import NO_PAGES, join_each
from tiered_cache.tree.node import BASE
from tiered_cache.types import Boundary, EvictResult, MatchPrefixParams, Tier, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered_cache.controller import HybridCacheController
    from tiered_cache.keys import RadixKey
    from tiered_cache.transfers import Transfer
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.types import EvictParams, InsertParams, InsertResult, MatchResult, PageIds


class CacheRequest:
    """An engine's request, as `cache_unfinished_req` and `cache_finished_req` take it.

    Attributes:
        key: its tokens, prompt and generated ones; the engine appends to it.
        prompt_len: tokens of the prompt (a boundary is made there at the end).
        table: which page holds which tokens; the engine writes allocated pages behind what is
            there (`table.write(first page, ids per component)`), the cache rewrites what others
            published first.
        computed: tokens whose state is in the pools; the engine sets it.
        committed: tokens that are the tree's, under `receipt`; the cache sets it.
        priority: of what is published.
    """

    __slots__ = ("committed", "computed", "key", "priority", "prompt_len", "receipt", "table")

    def __init__(self, key: RadixKey, table: PageTable, *, priority: int = 0) -> None:
        self.key = key
        self.prompt_len = key.num_tokens
        self.table = table
        self.priority = priority
        self.computed = 0
        self.committed = 0
        self.receipt: Receipt | None = None

    def __repr__(self) -> str:
        """No tokens: prompts do not belong in logs."""
        return (
            f"<CacheRequest: {self.key.num_tokens} tokens, {self.computed} computed, "
            f"{self.committed} committed>"
        )


class Engine:
    """One per cache. Every method but the coroutines is atomic on the loop."""

    def __init__(self, controller: HybridCacheController) -> None:
        self._controller = controller
        self._tree = controller.tree
        self._accounts = controller.accounts
        self._page_size = controller.page_size

    # --- match and hold ---------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """See `RadixTree.match_prefix`."""
        self._controller.check()
        params = _with_whole_limit(params)
        if not self._controller.enabled:
            params = replace(params, limit=0)
        return self._tree.match_prefix(params)

    def inc_lock_ref(self, boundary: Boundary) -> Receipt:
        """See `RadixTree.inc_lock_ref`.

        Raises:
            CapacityError: it would hold what is promised to leases.
        """
        self._controller.check()
        self._controller.check_spare_of(self._tree.would_need(boundary))
        receipt = self._tree.inc_lock_ref(boundary)
        self._controller.used(boundary)
        return receipt

    def dec_lock_ref(self, receipt: Receipt) -> None:
        """See `RadixTree.dec_lock_ref`. Also after the cache's end, as all that gives back."""
        if not self._controller.may_clean_up():
            return
        self._tree.dec_lock_ref(receipt)
        self._controller.calmed()

    def inc_host_lock_ref(self, boundary: Boundary, start: int = 0) -> Receipt:
        """See `RadixTree.inc_host_lock_ref`."""
        self._controller.check()
        return self._tree.inc_host_lock_ref(boundary, start)

    def dec_host_lock_ref(self, receipt: Receipt) -> None:
        """See `RadixTree.dec_host_lock_ref`."""
        if not self._controller.may_clean_up():
            return
        self._tree.dec_host_lock_ref(receipt)
        self._controller.calmed()

    # --- pages ------------------------------------------------------------------------------------

    def allocate(self, num_pages: int) -> list[PageIds]:
        """Pages of every component, for what is to be computed; making room by victims.

        Raises:
            CapacityError: more than is neither held nor promised; nothing is taken. ValueError: a
                model with windows or states.
        """
        self._check()
        num_pages = whole_number("num_pages", num_pages)
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        self._controller.check_spare(num_pages)
        pages = self._accounts.take(num_pages)
        self._controller.lent.add(pages, self._controller.now())
        return pages

    def free(self, pages: Sequence[PageIds]) -> None:
        """Allocated pages, per component, that were not published go home.

        Raises:
            ValueError: pages that are not lent, or twice the same; nothing changes.
        """
        if not self._controller.may_clean_up():
            return
        self._controller.lent.give_back(pages)
        self._controller.calmed()

    def insert(self, params: InsertParams) -> InsertResult:
        """See `RadixTree.insert`. What the tree adopts is not the engine's any more; duplicates
        still are, to be given back with `free` after the last run that uses them.

        Raises:
            ValueError: pages that the engine was not lent, besides as `RadixTree.insert`; a model
                with windows or states.
        """
        self._check()
        lent = self._controller.lent
        lent.check(params)
        if not self._controller.enabled:
            params = replace(params, length=0)  # its pages stay the engine's
        result = self._tree.insert(params)
        lent.adopted(self._tree.pages(result.boundary), params)
        self._controller.used(result.boundary)
        return result

    def _check(self) -> None:
        self._controller.check()
        if self._controller.sparse:
            names = ", ".join(str(part.id) for part in self._controller.sparse)
            raise ValueError(
                f"requests of an engine's own are for full attention; this model has {names}: lease"
            )

    # --- requests ---------------------------------------------------------------------------------

    def begin(self, key: RadixKey, *, priority: int = 0) -> CacheRequest:
        """A request that holds the longest prefix of `key` that is on the device, less the last
        token.

        Raises:
            CapacityError: holding it would take what is promised to leases. ValueError: a model
                with windows or states.
        """
        self._check()
        request = CacheRequest(
            key, PageTable(len(self._tree.components), self._page_size), priority=priority
        )
        match = self.match_prefix(MatchPrefixParams(key, max(0, key.num_tokens - 1)))
        boundary = match.device_boundary
        request.receipt = self.inc_lock_ref(boundary)
        if boundary.depth:
            request.table.write(0, self._tree.pages(boundary))
        request.committed = request.computed = boundary.depth
        return request

    def cache_unfinished_req(self, request: CacheRequest) -> None:
        """Publish the whole pages of what is computed and hold them: the next chunk, and other
        requests, go on from there. Pages that others had published first are freed, and the
        request's table names theirs.

        Raises:
            StaleError: a `reset()` came since it was begun.
        """
        self._controller.check()
        if request.receipt is not None and request.receipt.epoch != self._tree.epoch:
            raise StaleError(f"{request!r} is from before a reset(): finish it, and begin another")
        self._publish(request)

    def cache_finished_req(self, request: CacheRequest, is_insert: bool = True) -> None:
        """The request has ended: publish what is computed (or not), free the rest of its pages and
        let go of the prefix. After a reset there is nothing to publish, nor to let go of; after the
        cache's end nothing is published."""
        if not self._controller.may_clean_up():
            return
        receipt = request.receipt
        is_current = receipt is not None and receipt.epoch == self._tree.epoch
        if is_insert and is_current and not self._controller.closed:
            self._publish(request)
        first = request.committed // self._page_size
        rest = [ids[first : request.table.num_pages] for ids in request.table.ids]
        self._controller.lent.give_back(rest)
        request.table.cut(first)
        if receipt is not None:
            if is_current:
                self._tree.dec_lock_ref(receipt)
            request.receipt = None
        self._controller.calmed()

    def _publish(self, request: CacheRequest) -> None:
        stop = request.computed - request.computed % self._page_size
        if stop <= request.committed or not self._controller.enabled:
            return
        first = request.committed // self._page_size
        own = [ids[first : stop // self._page_size].copy() for ids in request.table.ids]
        self._controller.lent.remove(own)
        _, duplicates = publish(self._tree, request, stop)
        self._accounts.give_back(duplicates)
        self._controller.used(self._end(request))
        self._controller.calmed()

    @staticmethod
    def _end(request: CacheRequest) -> Boundary:
        assert request.receipt is not None, "begun requests hold a receipt"
        return Boundary(request.receipt.node, request.receipt.depth)

    # --- make room, load --------------------------------------------------------------------------

    async def evict(self, params: EvictParams) -> EvictResult:
        """Have so much of the device free besides what is promised, as far as that can be; what
        the host lacks is copied there first, if the write policy has it so, and what is being
        copied is waited for.

        Returns what was given up; its ids have gone home.
        """
        self._controller.check()
        need = self._targets(params)
        found = []
        while True:
            if not self._controller.waits_for_copies(max(need)):
                found.append(self._accounts.evict(self._accounts.missing(need)))
                if not any(self._accounts.missing(need)) or not self._controller.is_storing:
                    return _sum(found)
            await self._controller.changed()

    async def evict_host(self, params: EvictParams) -> EvictResult:
        """Give up so much of the host, mirrors first. Returns what was given up."""
        self._controller.check()
        need = self._targets(params)
        pages = self._controller.host_pages
        if pages is None:
            nothing = (NO_PAGES,) * len(self._tree.components)
            return EvictResult(nothing, nothing)
        return pages.evict(need)

    def _targets(self, params: EvictParams) -> list[int]:
        """Pages per component."""
        known = [str(component.id) for component in self._tree.components]
        for name in params.num_pages:
            if name not in known:
                raise KeyError(f"no component {name!r}; there is {', '.join(known)}")
        num_tokens = whole_number("num_tokens", params.num_tokens)
        pages = -(-num_tokens // self._page_size)
        named = {
            name: whole_number(f"num_pages of {name}", count)
            for name, count in params.num_pages.items()
        }
        if num_tokens < 0 or min(named.values(), default=0) < 0:
            raise ValueError(f"cannot give up less than nothing: {params}")
        return [named.get(name, pages if index == BASE else 0) for index, name in enumerate(known)]

    async def load_back(self, key: RadixKey, limit: int | None = None) -> int:
        """Bring what the host has of `key[:limit]` to the device, as far as there is room; returns
        how many of its tokens are on the device then. Holds nothing: match and lock.

        Raises:
            ValueError: a model with windows or states.
        """
        self._check()
        params = _with_whole_limit(MatchPrefixParams(key, limit))
        if self._controller.transfers is not None:
            await _Loader(self._controller).load(params)
        self._controller.check()
        return self._tree.match_prefix(params).device_length


def _with_whole_limit(params: MatchPrefixParams) -> MatchPrefixParams:
    """Boundaries are made of it: one caller's fraction, or numpy's integers, would spread."""
    limit = params.limit
    if limit is None or type(limit) is int:
        return params
    return replace(params, limit=whole_number("limit", limit))


def _sum(results: Sequence[EvictResult]) -> EvictResult:
    """Several evictions as one."""
    if len(results) == 1:
        return results[0]
    return EvictResult(
        device=join_each(list(zip(*(result.device for result in results), strict=True))),
        host=join_each(list(zip(*(result.host for result in results), strict=True))),
        dropped_tokens=sum(result.dropped_tokens for result in results),
    )


class _Loader:
    """Who waits for `load_back`. Pays from what is spare."""

    is_running = False

    def __init__(self, controller: HybridCacheController) -> None:
        self._controller = controller

    def on_load_ended(self, load: Transfer) -> None:
        """What it has brought is the tree's."""

    async def load(self, params: MatchPrefixParams) -> None:
        loads: dict[Transfer, None] = {}
        transfers = self._controller.transfers
        assert transfers is not None, "the caller has looked"
        try:
            for _ in range(2):  # once more, if somebody else's load above has failed
                wanted = self._cover(params)
                loads.update(dict.fromkeys(wanted))
                failed = await transfers.first_failure(wanted)
                if failed is None or failed.funder is self:
                    return
        finally:
            transfers.leave(loads, self)

    def _cover(self, params: MatchPrefixParams) -> list[Transfer]:
        controller, tree = self._controller, self._controller.tree
        transfers = controller.transfers
        assert transfers is not None, "the caller has looked"
        match = tree.match_prefix(params)
        if match.host_hit_length < max(1, controller.load_back_threshold):
            return []
        room = controller.accounts.spare(BASE) - tree.would_protect(match.device_boundary)[BASE]
        if room <= 0:
            return []
        anchor = tree.inc_lock_ref(match.device_boundary)  # making room must not take it
        loads = []
        try:
            boundary, start = match.best_boundary, match.device_length
            for piece in tree.plan_transfer(boundary, BASE, Tier.DEVICE, start):
                if piece.ids is None:
                    load: Any = piece.pending
                    transfers.join(load, self)
                    loads.append(load)
                    continue
                pages = min(len(piece.ids), controller.accounts.spare(BASE))
                if pages <= 0:
                    break
                ids = controller.accounts.take_of(BASE, pages)
                end = Boundary(boundary.node, piece.start + pages * controller.page_size)
                rows = piece.ids[:pages]
                loads.append(transfers.load(end, piece.start, BASE, ids, rows, self))
                if pages < len(piece.ids):
                    break
        finally:
            tree.dec_lock_ref(anchor)
        return loads
