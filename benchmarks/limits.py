"""What the figures are held against, as data. Nothing here measures.

Times are in `c` with key construction included, medians of the runs' medians, so that the limits
mean the same on any machine. `python -m benchmarks --strict` fails when one is missed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from benchmarks.measure import Row


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on one figure of the rows that it names (`page_size` None: at every page size)."""

    bench: str
    line: str
    figure: str
    bound: float
    page_size: int | None = None
    at_least: bool = False

    def applies_to(self, row: Row) -> bool:
        return (
            (row.bench, row.line) == (self.bench, self.line)
            and self.page_size in (None, row.page_size)
            and not math.isnan(row.figures.get(self.figure, math.nan))
        )

    def holds_for(self, row: Row) -> bool:
        value = row.figures[self.figure]
        if self.figure.endswith("_rate"):
            value = round(value, 4)  # as the bounds are given
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{self.figure} {'≥' if self.at_least else '≤'} {self.bound:g}"


LIMITS: Final = (
    Limit("tree", "a: request", "median_c", 32, page_size=1),
    Limit("tree", "a: request", "median_c", 28, page_size=16),
    Limit("tree", "a: request", "median_c", 28, page_size=64),
    Limit("tree", "b: match and ids", "median_c", 100),
    Limit("tree", "c: match", "median_c", 3),
    Limit("tree", "c: insert", "median_c", 6),
    Limit("tree", "d: request, evicting", "median_c", 21),
    Limit("tree", "a: request", "hit_rate", 0.9998, at_least=True),
    Limit("tree", "b: match and ids", "hit_rate", 0.9922, at_least=True),
    Limit("tree", "c: match", "hit_rate", 1.0, at_least=True),
    Limit("tree", "d: request, evicting", "hit_rate", 0.3495, at_least=True),
    *(
        Limit("hybrid", f"{work}, {other}", "median_c", bound)
        for work, other, bound in (
            ("a: request", "a window", 42),
            ("a: request", "states", 33),
            ("d: request, evicting", "a window", 40),
            ("d: request, evicting", "states", 28),
        )
    ),
    Limit("lease", "a: lease", "tree_x", 2),
    Limit("lease", "d: lease, evicting", "tree_x", 2),
    Limit("lease", "a: tree, two tiers", "one_tier_x", 1.15),
    Limit("lease", "d: tree, two tiers, evicting", "one_tier_x", 1.15),
    *(
        Limit("scaling", f"{leaves:,} leaves{locked}", figure, bound)
        for leaves, bound in ((10_000, 3), (100_000, 3), (1_000_000, 5))
        for locked in ("", ", 90 % locked")
        for figure in ("match_x", "insert_x", "evict_x")
    ),
    *(
        Limit("worst call", f"100,000 leaves, {policy}", "worst_ms", 5)
        for policy in ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
    ),
    *(
        Limit("copies", f"{size} slices, {way}", "memcpy_x", bound, at_least=True)
        for size, bound in (("6 KiB", 0.45), ("64 KiB", 0.75))
        for way in ("store", "load")
    ),
    *(
        Limit("files", f"{size} rows, {work}", "plain_x", bound, at_least=True)
        for size, read in (("256 KiB", 0.85), ("2 MiB", 0.7))
        for work, bound in (("cold read", read), ("warm read", read), ("write", 0.8))
    ),
    # A model on all cores makes the loop 1 ms late and more. One that leaves a core free makes it
    # 0.15 ms late, and a share of that is less than it takes to note the end of one copy: there it
    # is the difference.
    *(
        Limit("lateness", line.format(moved), figure, bound)
        for line, figure, bound in (
            ("{}", "added_p99_ms", 1),
            ("model, {}", "alone_x", 1.2),
            ("model on one core, {}", "added_p99_ms", 1),
        )
        for moved in ("transfers", "all tiers")
    ),
    *(
        Limit("redis", f"{size} rows, read", "client_x", 0.9, at_least=True)
        for size in ("64 KiB", "256 KiB", "2 MiB")
    ),
    Limit("trace", "10,000 blocks", "hit_rate", 0.207, at_least=True),
    Limit("trace", "50,000 blocks", "hit_rate", 0.354, at_least=True),
)


def limits_for(row: Row) -> list[Limit]:
    return [limit for limit in LIMITS if limit.applies_to(row)]
