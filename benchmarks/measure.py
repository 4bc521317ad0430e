"""How a benchmark measures: runs between two calibrations, medians over runs, rows of figures.

Owns: the gc policy of a server, laps (the times of one run), and `Row`, what every benchmark
returns. Refuses to know: the cache and the workloads' meaning.
"""

from __future__ import annotations

import gc
import math
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Final

from benchmarks.workloads import calibrate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GC_THRESHOLDS: Final = (700, 10, 1_000_000)

UNIT_ROUNDS: Final = 500
UNIT_HOLDS_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: what was measured, and its figures by name.

    A name ends in its unit: `_c` (multiples of `calibrate()`), `_us`, `_ms`, `_bytes`, `_x` (a
    ratio), `_rate`.
    """

    bench: str
    line: str
    figures: dict[str, float]
    page_size: int | None = None


class Laps:
    """The requests of one run: how long each took, how much of that its key took, and what was hit.

    The unit is taken before the first request and again whenever `UNIT_HOLDS_S` have passed,
    because a machine that changes its clock in the middle of a run would else make all of it look
    fast or slow.
    """

    def __init__(self) -> None:
        self._total_us: list[float] = []
        self._key_us: list[float] = []
        self._unit_us: list[float] = []
        self._asked = 0
        self._hit = 0
        self._unit = calibrate(UNIT_ROUNDS)
        self._unit_until_s = perf_counter() + UNIT_HOLDS_S

    def add(self, total_s: float, key_s: float, asked_tokens: int = 0, hit_tokens: int = 0) -> None:
        """Note one request. Call it after its time was taken."""
        self._total_us.append(total_s * 1e6)
        self._key_us.append(key_s * 1e6)
        self._unit_us.append(self._unit)
        self._asked += asked_tokens
        self._hit += hit_tokens
        if perf_counter() > self._unit_until_s:
            self._unit = calibrate(UNIT_ROUNDS)
            self._unit_until_s = perf_counter() + UNIT_HOLDS_S

    def summary(self) -> Run:
        in_c = [us / unit for us, unit in zip(self._total_us, self._unit_us, strict=True)]
        without_key_us = [us - key for us, key in zip(self._total_us, self._key_us, strict=True)]
        without_key_c = [us / unit for us, unit in zip(without_key_us, self._unit_us, strict=True)]
        return Run(
            median_c=median(in_c),
            mean_c=fmean(in_c),
            p99_c=percentile(in_c, 99),
            without_key_c=median(without_key_c),
            median_us=median(self._total_us),
            mean_us=fmean(self._total_us),
            p99_us=percentile(self._total_us, 99),
            without_key_us=median(without_key_us),
            unit_us=median(self._unit_us),
            hit_rate=self._hit / self._asked if self._asked else math.nan,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One run in figures: per request, in µs and in `c`; `unit_us` is what a `c` was meanwhile."""

    median_c: float
    mean_c: float
    p99_c: float
    without_key_c: float
    median_us: float
    mean_us: float
    p99_us: float
    without_key_us: float
    unit_us: float
    hit_rate: float


def timed_row(bench: str, line: str, page_size: int, runs: Sequence[Run]) -> Row:
    """The line for several runs of one work: medians over runs, the best run beside them."""
    figures = {
        "median_c": median(run.median_c for run in runs),
        "best_c": min(run.median_c for run in runs),
        "mean_c": median(run.mean_c for run in runs),
        "p99_c": median(run.p99_c for run in runs),
        "without_key_c": median(run.without_key_c for run in runs),
        "median_us": median(run.median_us for run in runs),
        "p99_us": median(run.p99_us for run in runs),
        "without_key_us": median(run.without_key_us for run in runs),
        "hit_rate": runs[-1].hit_rate,
        "unit_us": median(run.unit_us for run in runs),
    }
    return Row(bench, line, figures, page_size)


@contextmanager
def server_gc() -> Iterator[None]:
    """The gc policy that the README gives for servers, for the time of a benchmark.

    A full collection walks every node of the tree (60 ms at 10⁵ of them) and finds nothing: the
    tree drops its nodes without leaving cycles. So what is there is frozen and full collections are
    left to quiet moments; the young generations go on as ever. The library itself never touches the
    gc (semantics §12.4).
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
