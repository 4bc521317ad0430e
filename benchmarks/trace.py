"""Replay of a recorded trace: token hit rate and time per request, in pools of so many blocks."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks.measure import Laps, Row
from benchmarks.rig import Rig
from benchmarks.workloads import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BLOCK_TOKENS: Final = 16
POOL_BLOCKS: Final = (10_000, 50_000)


def run(
    path: Path,
    repeat: int = 1,
    *,
    limit: int | None = None,
    pool_blocks: Sequence[int] = POOL_BLOCKS,
) -> list[Row]:
    """Requests in order of arrival, each published whole; a block id is one page of 16 tokens."""
    trace = Trace(path, BLOCK_TOKENS, limit)
    rows = []
    for blocks in pool_blocks:
        runs = [replay(trace, blocks).summary() for _ in range(repeat)]
        figures = {
            "hit_rate": runs[-1].hit_rate,
            "mean_us": median(run.mean_us for run in runs),
            "mean_c": median(run.mean_c for run in runs),
            "median_us": median(run.median_us for run in runs),
            "p99_us": median(run.p99_us for run in runs),
            "requests": math.nan if not trace.rows else float(len(trace.rows)),
        }
        rows.append(Row("trace", f"{blocks:,} blocks", figures, BLOCK_TOKENS))
    return rows


def replay(trace: Trace, blocks: int) -> Laps:
    rig = Rig(blocks * BLOCK_TOKENS, BLOCK_TOKENS)
    laps = Laps()
    for tokens in trace:
        rig.request(tokens, None, laps)
    return laps
