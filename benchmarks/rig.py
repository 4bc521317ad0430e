"""One tree and the pages it shares out: what benchmarks drive, through public methods only."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tiered_cache.keys import RadixKey
from tiered_cache.pools.allocator import PageAllocator, RunAllocator
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import Boundary, InsertParams, MatchPrefixParams, Tier

if TYPE_CHECKING:
    from array import array

    from benchmarks.measure import Laps
    from tiered_cache.types import InsertResult, PageIds


class Rig:
    """A device tier without a device: the tree and its allocator."""

    def __init__(
        self, num_tokens: int, page_size: int, policy: str = "lru", *, host_tokens: int = 0
    ) -> None:
        self.page_size = page_size
        self.host = RunAllocator(host_tokens // page_size) if host_tokens else None
        self.tree = RadixTree([FullComponent("full")], page_size=page_size, policy=policy)
        self.allocator = PageAllocator(num_tokens // page_size)

    def store(self, key: RadixKey) -> None:
        """Give the host a copy of all of a key that it lacks: what a copy thread would do."""
        tree, host = self.tree, self.host
        assert host is not None, "made with a host tier"
        boundary = tree.match_prefix(MatchPrefixParams(key)).device_boundary
        for piece in tree.plan_transfer(boundary, 0, Tier.HOST):
            short = (piece.stop - piece.start) // self.page_size - host.num_free
            if short > 0:
                host.free(tree.evict_host((short,)).host[0])
            rows = host.allocate((piece.stop - piece.start) // self.page_size)
            if rows is None:
                return
            end = Boundary(boundary.node, piece.stop)
            host.free(tree.commit_transfer(end, 0, Tier.HOST, rows))

    def take(self, num_pages: int) -> PageIds:
        """Pages from the allocator; where these are short, from the tree."""
        allocator = self.allocator
        short = num_pages - allocator.num_free
        if short > 0:
            evicted = self.tree.evict((short,))
            allocator.free(evicted.device[0])
            if self.host is not None:
                self.host.free(evicted.host[0])
        pages = allocator.allocate(num_pages)
        if pages is None:
            raise MemoryError(f"the benchmark's pool is too small for {num_pages} more pages")
        return pages

    def insert(self, key: RadixKey) -> InsertResult:
        """Publish a whole key on fresh pages, and give back those that the tree had already."""
        result = self.tree.insert(InsertParams(key, (self.take(len(key) // self.page_size),)))
        self.allocator.free(result.duplicates[0])
        return result

    def request(self, tokens: array[int], more: array[int] | None, laps: Laps) -> None:
        """What a scheduler does for one request: match, hold, make room, publish, let go.

        `tokens` is the prompt that is matched; `more` comes after it (a new turn) and lengthens the
        same key.
        """
        tree = self.tree
        start_s = perf_counter()
        key = RadixKey(tokens)
        key_s = perf_counter() - start_s
        asked = len(key)
        match = tree.match_prefix(MatchPrefixParams(key))
        cached, held = match.device_length, match.pages[0]
        receipt = tree.inc_lock_ref(match.device_boundary)
        if more is not None:
            extend_s = perf_counter()
            key.extend(more)
            key_s += perf_counter() - extend_s
        fresh = self.take(len(key) // self.page_size - cached // self.page_size)
        pages = np.concatenate((held, fresh))
        result = tree.insert(InsertParams(key, (pages,), prev_prefix_len=cached))
        self.allocator.free(result.duplicates[0])
        tree.dec_lock_ref(receipt)
        laps.add(perf_counter() - start_s, key_s, asked, cached)
        if self.host is not None:
            self.store(key)
