"""The tree's cost with windows and with states: requests of (a) and (d), as `tree` has them.

Every request brings pages of the window for all that is new, as an engine computes them, and a
state at its end. Ids of all components are separate, and short on (d).
"""

from __future__ import annotations

import gc
from time import perf_counter
from typing import TYPE_CHECKING, Final

from benchmarks.measure import Laps, Row, timed_row
from benchmarks.workloads import Chat, Eviction
from tiered_cache.keys import RadixKey
from tiered_cache.pools.allocator import PageAllocator
from tiered_cache.tree.components.base import join
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.sparse import behind_gaps
from tiered_cache.tree.components.swa import SWAComponent
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import InsertParams, MatchPrefixParams

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable

    from benchmarks.measure import Run
    from tiered_cache.tree.components.base import TreeComponent
    from tiered_cache.types import PageIds

PAGE_SIZES: Final = (1, 16, 64)
WINDOW: Final = 128
STATES: Final = 256
"""Slots on (d); on (a) there is one for each turn."""

WITH: Final[dict[str, Callable[[], TreeComponent]]] = {
    "a window": lambda: SWAComponent("swa", WINDOW),
    "states": lambda: MambaComponent("mamba"),
}


def run(
    repeat: int = 5, *, quick: bool = False, page_sizes: tuple[int, ...] = PAGE_SIZES
) -> list[Row]:
    """Every workload `repeat` times in turn."""
    chat = Chat(conversations=5, turns=3, new=128) if quick else Chat()
    eviction = Eviction(requests=50) if quick else Eviction()
    pool = 20_000 if quick else Eviction.POOL_TOKENS
    runs: dict[tuple[str, int], list[Run]] = {}
    for _ in range(repeat):
        for page_size in page_sizes:
            for name, make in WITH.items():
                gc.collect()
                rig = HybridRig(make(), chat.num_tokens, chat.num_tokens // 100, page_size)
                turns = ((history, prompt[len(history) :]) for history, prompt in chat)
                line = f"a: request, {name}", page_size
                runs.setdefault(line, []).append(_laps(rig, turns).summary())
                gc.collect()
                rig = HybridRig(make(), pool, STATES, page_size)
                prompts = ((tokens, None) for tokens in eviction)
                line = f"d: request, evicting, {name}", page_size
                runs.setdefault(line, []).append(_laps(rig, prompts).summary())
    return [timed_row("hybrid", *line, found) for line, found in runs.items()]


def _laps(rig: HybridRig, requests: Iterable[tuple[array[int], array[int] | None]]) -> Laps:
    laps = Laps()
    for tokens, more in requests:
        rig.request(tokens, more, laps)
    return laps


class HybridRig:
    """A tree of full attention and one other component, and their ids."""

    def __init__(
        self, other: TreeComponent, num_tokens: int, num_states: int, page_size: int
    ) -> None:
        self.page_size = page_size
        self.tree = RadixTree([FullComponent("full"), other], page_size=page_size)
        self._is_per_page = other.is_per_page
        num_pages = num_tokens // page_size
        sizes = num_pages, num_pages if other.is_per_page else num_states
        self._pools = [PageAllocator(size) for size in sizes]

    def take(self, index: int, num_ids: int) -> PageIds:
        """Ids from the allocator; where these are short, from the tree."""
        pool = self._pools[index]
        ids = pool.allocate(num_ids)
        if ids is None:
            short = num_ids - pool.num_free
            self._free(self.tree.evict((0, short) if index else (short, 0)).device)
            ids = pool.allocate(num_ids)
        if ids is None:
            raise MemoryError(f"the benchmark's pool is too small for {num_ids} more")
        return ids

    def _free(self, pages: tuple[PageIds, ...]) -> None:
        base, other = pages
        if len(base):
            self._pools[0].free(base)
        if len(other):
            self._pools[1].free(other)

    def request(self, tokens: array[int], more: array[int] | None, laps: Laps) -> None:
        """As `benchmarks.rig.Rig.request`, with ids of the other component besides."""
        tree, size = self.tree, self.page_size
        start_s = perf_counter()
        key = RadixKey(tokens)
        key_s = perf_counter() - start_s
        asked = len(key)
        boundary = tree.match_prefix(MatchPrefixParams(key)).device_boundary
        cached, held = boundary.depth, tree.pages(boundary)
        receipt = tree.inc_lock_ref(boundary)
        if more is not None:
            extend_s = perf_counter()
            key.extend(more)
            key_s += perf_counter() - extend_s
        fresh = len(key) // size - cached // size
        base = join((held[0], self.take(0, fresh)))
        if self._is_per_page:
            other = join((held[1], self.take(1, fresh)))
        else:
            state = self.take(1, min(1, fresh))
            other = behind_gaps(len(base) - len(state), (state,))
        result = tree.insert(InsertParams(key, (base, other), prev_prefix_len=cached))
        self._free(result.duplicates)
        tree.dec_lock_ref(receipt)
        laps.add(perf_counter() - start_s, key_s, asked, cached)
