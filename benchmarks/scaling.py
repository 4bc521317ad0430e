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
from statistics import median
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from benchmarks.measure import Laps, Row
from benchmarks.rig import Rig
from benchmarks.workloads import SEED, as_array
from tiered_cache.keys import RadixKey
from tiered_cache.types import InsertParams, MatchPrefixParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.measure import Run
    from tiered_cache.types import Boundary, PageIds

T = TypeVar("T")

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

    def prepared(self, leaf: int) -> tuple[RadixKey, PageIds]:
        """What publishing a leaf takes: its key, and pages of its own."""
        key = self.key(leaf)
        return key, self.rig.take(len(key) // PAGE_SIZE)

    def insert(self, leaf: int) -> float:
        """Seconds that the tree took to publish one leaf."""
        key, pages = self.prepared(leaf)
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
    rounds: dict[tuple[int, bool, str], list[Run]] = defaultdict(list)
    for _ in range(repeat):
        for size in sizes:
            for locked in (False, True):
                for call, run in _calls(size, samples, locked=locked).items():
                    rounds[size, locked, call].append(run)
    rows = []
    for size in sizes:
        for locked in (False, True):
            figures = {}
            for call in ("match", "insert", "evict"):
                runs = rounds[size, locked, call]
                base = rounds[sizes[0], locked, call]
                figures[f"{call}_us"] = median(run.median_us for run in runs)
                figures[f"{call}_c"] = median(run.median_c for run in runs)
                figures[f"{call}_x"] = median(
                    mine.median_c / least.median_c for mine, least in zip(runs, base, strict=True)
                )
            line = f"{size:,} leaves{', 90 % locked' if locked else ''}"
            rows.append(Row("scaling", line, figures, PAGE_SIZE))
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
    """The longest single call of a run, and of several runs the least; the same for each kind.

    The least, because the machine's own stalls are in every maximum but rarely in the same place.
    `cpu_ms` is the longest call by the thread's own time, which no other process adds to.
    """
    maxima = [_worst_calls(num_leaves, policy, group_leaves) for _ in range(repeat)]
    least_ms = {f"{call}_ms": min(run[call] for run in maxima) * 1e3 for call in maxima[0]}
    figures = {"worst_ms": least_ms.pop("any_ms"), "cpu_ms": least_ms.pop("cpu_ms"), **least_ms}
    return Row("worst call", line or f"{num_leaves:,} leaves, {policy}", figures, PAGE_SIZE)


def _calls(num_leaves: int, samples: int, *, locked: bool) -> dict[str, Run]:
    """Single calls on one tree, in turn, so that it keeps its size."""
    random = Random(SEED)
    grove = Grove(num_leaves)
    grove.grow()
    if locked:
        for leaf in range(num_leaves):
            if leaf % 10:
                grove.rig.tree.inc_lock_ref(grove.match(leaf)[1])
    gc.collect()
    laps = {call: Laps() for call in ("match", "insert", "evict")}
    for _ in range(samples):
        laps["match"].add(grove.match(random.randrange(num_leaves))[0], 0.0)
    for leaf in range(num_leaves, num_leaves + samples):
        laps["insert"].add(grove.insert(leaf), 0.0)
        laps["evict"].add(grove.evict(), 0.0)
    return {call: taken.summary() for call, taken in laps.items()}


def _worst_calls(num_leaves: int, policy: str, group_leaves: int) -> dict[str, float]:
    """Seconds of the longest call of each kind as a tree grows, is used all over, and shrinks."""
    gc.collect()
    grove = Grove(num_leaves, policy, group_leaves)
    tree, watch = grove.rig.tree, _Watch()
    for leaf in range(num_leaves):
        key, pages = grove.prepared(leaf)
        result = watch("insert", partial(tree.insert, InsertParams(key, (pages,))))
        grove.rig.allocator.free(result.duplicates[0])
    # Every leaf is touched, then evicted from: work that a tree puts off comes due in that call.
    for leaf in range(num_leaves):
        watch("match", partial(tree.match_prefix, MatchPrefixParams(grove.key(leaf))))
    evicted = watch("first evict", partial(tree.evict, (1,)))
    grove.rig.allocator.free(evicted.device[0])
    # In another order than they grew in, which moves every leaf elsewhere; as an array, because a
    # young list of so many would itself be what the next young collection spends its time on.
    for leaf in map(int, np.random.default_rng(SEED).permutation(num_leaves)):
        match = watch("match", partial(tree.match_prefix, MatchPrefixParams(grove.key(leaf))))
        receipt = watch("lock", partial(tree.inc_lock_ref, match.device_boundary))
        watch("hit", partial(tree.count_hits, receipt))
        watch("unlock", partial(tree.dec_lock_ref, receipt))
    evicted = watch("first evict", partial(tree.evict, (1,)))
    grove.rig.allocator.free(evicted.device[0])
    for leaf in range(num_leaves, num_leaves + min(num_leaves, SAMPLES)):
        key, pages = grove.prepared(leaf)
        result = watch("insert", partial(tree.insert, InsertParams(key, (pages,))))
        grove.rig.allocator.free(result.duplicates[0])
        evicted = watch("evict", partial(tree.evict, (1,)))
        grove.rig.allocator.free(evicted.device[0])
    return watch.worst_s


class _Watch:
    """Makes calls and remembers the longest of each kind, and of all by the thread's own time."""

    def __init__(self) -> None:
        self.worst_s: dict[str, float] = defaultdict(float)

    def __call__(self, kind: str, call: Callable[[], T]) -> T:
        cpu_s, start_s = thread_time(), perf_counter()
        result = call()
        took_s, cpu_s = perf_counter() - start_s, thread_time() - cpu_s
        worst_s = self.worst_s
        worst_s["any"] = max(worst_s["any"], took_s)
        worst_s[kind] = max(worst_s[kind], took_s)
        worst_s["cpu"] = max(worst_s["cpu"], cpu_s)
        return result
