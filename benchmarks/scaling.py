"""What a large tree costs: single calls from 10³ to 10⁶ leaves, the worst call, bytes per leaf.

Calls are timed without key construction, which does not depend on the tree's size. Leaves hang in
groups: a node with very many children is one dict, whose resizing is a stall of its own; that wide
root is measured apart.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections import defaultdict
from functools import partial
from random import Random
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.measure import Row
from benchmarks.rig import Rig
from benchmarks.workloads import SEED, as_array, calibrate
from tiered_cache.keys import RadixKey
from tiered_cache.types import InsertParams, MatchPrefixParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiered_cache.types import Boundary

PAGE_SIZE: Final = 16
PREFIX_TOKENS: Final = 64
LEAF_TOKENS: Final = PAGE_SIZE
GROUP_LEAVES: Final = 4000
"""Leaves under one node; leaves room below 4,096 for those that a benchmark adds."""

SIZES: Final = (1_000, 10_000, 100_000)
FULL_SIZES: Final = (*SIZES, 1_000_000)
POLICIES: Final = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
SAMPLES: Final = 2000
MARGIN_PAGES: Final = 64
"""Pages beyond the leaves', so that an insert never evicts by itself."""


class Grove:
    """A tree with `num_leaves` leaves of one page, in groups under prefixes of their own."""

    def __init__(
        self, num_leaves: int, policy: str = "lru", group_leaves: int = GROUP_LEAVES
    ) -> None:
        self.group_leaves = group_leaves
        self.num_groups = -(-num_leaves // group_leaves)
        self.num_leaves = num_leaves
        prefix_tokens = self.num_groups * PREFIX_TOKENS
        self.rig = Rig(prefix_tokens + (num_leaves + MARGIN_PAGES) * LEAF_TOKENS, PAGE_SIZE, policy)

    def key(self, leaf: int) -> RadixKey:
        """The key of a leaf. Those from `num_leaves` on are new leaves, dealt out to all groups."""
        group = leaf // self.group_leaves if leaf < self.num_leaves else leaf % self.num_groups
        prefix = np.arange(PREFIX_TOKENS, dtype=np.int64) + group * PREFIX_TOKENS
        tail = np.full(LEAF_TOKENS, (1 << 30) + leaf, dtype=np.int64)
        return RadixKey(as_array(np.concatenate((prefix, tail))))

    def insert(self, leaf: int) -> float:
        """Seconds that the tree took to publish one leaf."""
        key = self.key(leaf)
        pages = self.rig.take(len(key) // PAGE_SIZE)
        start_s = perf_counter()
        result = self.rig.tree.insert(InsertParams(key, (pages,)))
        took_s = perf_counter() - start_s
        self.rig.allocator.free(result.duplicates[0])
        return took_s

    def match(self, leaf: int) -> tuple[float, Boundary]:
        key = self.key(leaf)
        start_s = perf_counter()
        match = self.rig.tree.match_prefix(MatchPrefixParams(key))
        return perf_counter() - start_s, match.device_boundary

    def evict(self) -> float:
        start_s = perf_counter()
        result = self.rig.tree.evict((1,))
        took_s = perf_counter() - start_s
        self.rig.allocator.free(result.device[0])
        return took_s

    def grow(self) -> None:
        for leaf in range(self.num_leaves):
            self.insert(leaf)


def run(repeat: int = 5, *, full: bool = False, quick: bool = False) -> list[Row]:
    """Single calls by size, memory, the worst call; `full` adds 10⁶ leaves and every policy."""
    if quick:
        sizes: Sequence[int] = (100, 300)
        worst_size = 300
    else:
        sizes = FULL_SIZES if full else SIZES
        worst_size = 100_000
    policies = POLICIES if full else POLICIES[:1]
    rows = calls_by_size(sizes, repeat, samples=50 if quick else SAMPLES)
    rows.append(memory(sizes[-1] if quick else 100_000))
    rows += [worst_call(worst_size, policy, repeat) for policy in policies]
    rows.append(
        worst_call(
            worst_size,
            "lru",
            repeat,
            group_leaves=worst_size,
            line=f"{worst_size:,} under one node",
        )
    )
    return rows


def calls_by_size(sizes: Sequence[int], repeat: int, samples: int = SAMPLES) -> list[Row]:
    """Median match, insert and eviction of one page, free and with 90 % of the leaves locked.

    The ratio to the smallest tree is taken in `c` and within one round, so that drift of the
    machine drops out.
    """
    rounds: dict[tuple[int, bool, str], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(repeat):
        for size in sizes:
            for locked in (False, True):
                for call, timing in _calls(size, samples, locked=locked).items():
                    rounds[size, locked, call].append(timing)
    rows = []
    for size in sizes:
        for locked in (False, True):
            figures = {}
            for call in ("match", "insert", "evict"):
                timings = rounds[size, locked, call]
                base = rounds[sizes[0], locked, call]
                figures[f"{call}_us"] = median(us for us, _ in timings)
                figures[f"{call}_c"] = median(us / unit for us, unit in timings)
                figures[f"{call}_x"] = median(
                    (us / unit) / (base_us / base_unit)
                    for (us, unit), (base_us, base_unit) in zip(timings, base, strict=True)
                )
            rows.append(
                Row(
                    "scaling",
                    f"{size:,} leaves{', 90 % locked' if locked else ''}",
                    figures,
                    PAGE_SIZE,
                )
            )
    return rows


def memory(num_leaves: int) -> Row:
    """Bytes that the tree keeps per leaf of one page, its edge included (128 B of tokens)."""
    grove = Grove(num_leaves)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    grove.grow()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Row(
        "memory", f"{num_leaves:,} leaves", {"leaf_bytes": (after - before) / num_leaves}, PAGE_SIZE
    )


def worst_call(
    num_leaves: int,
    policy: str,
    repeat: int,
    group_leaves: int = GROUP_LEAVES,
    line: str | None = None,
) -> Row:
    """The longest single call of each kind: its maximum in a run, and of several runs the least.

    The least, because the machine's own stalls are in every maximum but rarely in the same place.
    """
    maxima = [_worst_calls(num_leaves, policy, group_leaves) for _ in range(repeat)]
    least_ms = {f"{call}_ms": min(run[call] for run in maxima) * 1e3 for call in maxima[0]}
    figures = {"worst_ms": max(least_ms.values()), **least_ms}
    return Row("worst call", line or f"{num_leaves:,} leaves, {policy}", figures, PAGE_SIZE)


def _calls(num_leaves: int, samples: int, *, locked: bool) -> dict[str, tuple[float, float]]:
    """Per call its median in µs, and the unit that held meanwhile."""
    random = Random(SEED)
    grove = Grove(num_leaves)
    grove.grow()
    if locked:
        for leaf in range(num_leaves):
            if leaf % 10:
                grove.rig.tree.inc_lock_ref(grove.match(leaf)[1])
    gc.collect()
    before_us = calibrate()
    times: dict[str, list[float]] = {
        "match": [grove.match(random.randrange(num_leaves))[0] for _ in range(samples)],
        "insert": [],
        "evict": [],
    }
    for leaf in range(num_leaves, num_leaves + samples):  # in turn, so that the tree keeps its size
        times["insert"].append(grove.insert(leaf))
        times["evict"].append(grove.evict())
    unit_us = fmean((before_us, calibrate()))
    return {call: (median(taken) * 1e6, unit_us) for call, taken in times.items()}


def _worst_calls(num_leaves: int, policy: str, group_leaves: int) -> dict[str, float]:
    """Seconds of the longest call of each kind as a tree grows, is used all over, and shrinks."""
    gc.collect()
    grove = Grove(num_leaves, policy, group_leaves)
    tree = grove.rig.tree
    worst: dict[str, float] = defaultdict(float)

    def note(call: str, took_s: float) -> None:
        worst[call] = max(worst[call], took_s)

    for leaf in range(num_leaves):
        note("insert", grove.insert(leaf))
    # Every leaf is touched, then evicted from: work that a tree puts off comes due in that call.
    for leaf in range(num_leaves):
        note("match", grove.match(leaf)[0])
    note("first evict", grove.evict())
    for leaf in range(num_leaves):
        took_s, boundary = grove.match(leaf)
        note("match", took_s)
        note("hit", _seconds(partial(tree.count_hits, boundary, above=0)))
        start_s = perf_counter()
        receipt = tree.inc_lock_ref(boundary)
        note("lock", perf_counter() - start_s)
        note("unlock", _seconds(partial(tree.dec_lock_ref, receipt)))
    note("first evict", grove.evict())
    for leaf in range(num_leaves, num_leaves + min(num_leaves, SAMPLES)):
        note("insert", grove.insert(leaf))
        note("evict", grove.evict())
    return dict(worst)


def _seconds(call: Callable[[], object]) -> float:
    start_s = perf_counter()
    call()
    return perf_counter() - start_s
