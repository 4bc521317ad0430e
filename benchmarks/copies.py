"""Copies between device pools and host rows against memcpy of the same bytes, in the same run.

Page ids are random on both sides, as they are after hours of service: every slice is apart. A plain
copy and a job of each direction take turns, and ratios are taken within a turn, so that a machine
that changes its speed changes all three.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from benchmarks.measure import Row
from tiered_cache.pools.device import DevicePools
from tiered_cache.pools.host import HostArena
from tiered_cache.pools.spec import PoolSpec, row_layout
from tiered_cache.transfer.copier import JOB_BYTES, Direction
from tiered_cache.transfer.cpu import CpuCopier
from tiered_cache.types import ComponentId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered_cache.transfer.copier import CopyJob
    from tiered_cache.types import PageIds

FULL: Final = ComponentId("full")

PAGE_SIZE: Final = 16
SLICES: Final = {"6 KiB": (30, 3, 64), "64 KiB": (32, 16, 128)}
"""Keys or values of one page in one layer, and the model that has such: layers, heads, head size;
16 bits. The first is a model of 135M parameters."""

TOTAL_BYTES: Final = 512 << 20
"""Moved each way in a run. More than any cache holds, so that both sides come from memory."""


def run(repeat: int = 5, *, quick: bool = False) -> list[Row]:
    """One line for each slice length and direction; medians over all turns of all runs."""
    rows = []
    with one_torch_thread():
        for name, shape in SLICES.items():
            bench = _Bench.of(*shape, total_bytes=TOTAL_BYTES // 16 if quick else TOTAL_BYTES)
            rows += bench.rows(name, repeat)
    return rows


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """For the plain copy, which torch would else cut into as many parts as there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Bench:
    """Pools and rows of one model, all of it once in each direction, and as much plain memory."""

    copier: CpuCopier
    num_pages: int
    num_slices: int
    source: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, num_layers: int, num_heads: int, head_dim: int, total_bytes: int) -> _Bench:
        specs = tuple(
            PoolSpec(
                name, FULL, tuple(range(num_layers)), (num_heads, head_dim), "bfloat16", PAGE_SIZE
            )
            for name in "kv"
        )
        layout = row_layout(specs)
        num_pages = total_bytes // layout.payload_bytes
        pools = DevicePools(specs, {FULL: num_pages})
        arena = HostArena(layout, num_pages)
        for chunk in arena.chunks():
            chunk.touch()
        # Ones, not zeros: memory that was never written is all one page, and in the cache.
        source = torch.ones(total_bytes, dtype=torch.uint8)
        return cls(
            CpuCopier(pools, [arena]),
            num_pages,
            len(layout.slices),
            source,
            torch.ones_like(source),
        )

    def rows(self, name: str, repeat: int) -> list[Row]:
        turns: dict[Direction, list[tuple[_Time, _Time, int]]] = {way: [] for way in Direction}
        for seed in range(repeat):
            jobs = {way: self._jobs(way, seed) for way in Direction}
            for turn in range(len(jobs[Direction.STORE])):
                num_bytes = jobs[Direction.STORE][turn].num_bytes
                plain = _Time.of(partial(self._memcpy, turn, num_bytes))
                for way in Direction:
                    took = _Time.of(partial(self.copier.copy, jobs[way][turn]))
                    turns[way].append((plain, took, jobs[way][turn].num_pages * self.num_slices))
        return [
            Row(
                "copies",
                f"{name} slices, {way.value}",
                {
                    "memcpy_x": median(plain.own_s / took.own_s for plain, took, _ in turns[way]),
                    "elapsed_x": median(
                        plain.elapsed_s / took.elapsed_s for plain, took, _ in turns[way]
                    ),
                    "slice_us": median(took.own_s / slices for _, took, slices in turns[way]) * 1e6,
                    "one_page_us": self._one_page_us(way),
                },
                PAGE_SIZE,
            )
            for way in Direction
        ]

    def _jobs(self, direction: Direction, seed: int) -> list[CopyJob]:
        chance = np.random.default_rng(seed)
        return self.copier.plan(direction, 0, *(self._random_ids(chance) for _ in range(2)))

    def _random_ids(self, chance: np.random.Generator) -> PageIds:
        return chance.permutation(self.num_pages).astype(np.int32)

    def _memcpy(self, turn: int, num_bytes: int) -> None:
        start = turn * JOB_BYTES
        self.target[start : start + num_bytes].copy_(self.source[start : start + num_bytes])

    def _one_page_us(self, direction: Direction) -> float:
        """A transfer of a single page, planned and copied: what a short hit costs."""
        chance = np.random.default_rng(1)
        times_s = []
        for _ in range(100):
            pair = [chance.integers(0, self.num_pages, 1, np.int32) for _ in range(2)]
            times_s.append(_Time.of(partial(self._move, direction, *pair)).own_s)
        return median(times_s) * 1e6

    def _move(self, direction: Direction, device_ids: PageIds, host_ids: PageIds) -> None:
        for job in self.copier.plan(direction, 0, device_ids, host_ids):
            self.copier.copy(job)


@dataclass(frozen=True, slots=True)
class _Time:
    """What a piece of work took: by the clock, and of this thread."""

    elapsed_s: float
    own_s: float

    @classmethod
    def of(cls, work: Callable[[], object]) -> _Time:
        start_s, start_own_s = perf_counter(), thread_time()
        work()
        own_s = thread_time() - start_own_s
        return cls(perf_counter() - start_s, own_s)
