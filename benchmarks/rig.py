"""One tree and the pages it shares out: what benchmarks drive, through public methods only."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tiered_cache.keys import RadixKey
from tiered_cache.pools.allocator import PageAllocator
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import InsertParams, MatchPrefixParams

if TYPE_CHECKING:
    from array import array

    from benchmarks.measure import Laps
    from tiered_cache.types import InsertResult, PageIds


class Rig:
    """A device tier without a device: the tree and its allocator."""

    def __init__(self, num_tokens: int, page_size: int, policy: str = "lru") -> None:
        self.page_size = page_size
        self.tree = RadixTree([FullComponent("full")], page_size=page_size, policy=policy)
        self.allocator = PageAllocator(num_tokens // page_size)

    def take(self, num_pages: int) -> PageIds:
        """Pages from the allocator; where these are short, from the tree."""
        allocator = self.allocator
        short = num_pages - allocator.num_free
        if short > 0:
            allocator.free(self.tree.evict((short,)).device[0])
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
