"""Rows as tables for a reader, and as JSON for a program."""

from __future__ import annotations

import json
import math
import os
import platform
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from benchmarks.limits import limits_for
from benchmarks.measure import GC_THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from benchmarks.measure import Row


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """One table per benchmark; the last columns say what a line is held against."""
    for bench, group in groupby(rows, key=lambda row: row.bench):
        console.print(_table(bench, list(group)))


def missed(rows: Iterable[Row]) -> list[str]:
    """The limits that do not hold, each with the line it is about."""
    return [
        f"{row.bench}, {row.line}{'' if row.page_size is None else f', P={row.page_size}'}: {limit}"
        for row in rows
        for limit in limits_for(row)
        if not limit.holds_for(row)
    ]


def as_json(rows: Iterable[Row], repeat: int) -> str:
    """Everything in the tables, with what is needed to compare two files."""
    document = {
        "machine": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
        },
        "gc_thresholds": GC_THRESHOLDS,
        "repeat": repeat,
        "rows": [_row_as_json(row) for row in rows],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _table(bench: str, rows: list[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    names = [name for name in names if not (name.endswith("_us") and _in_c(name) in names)]
    with_page_size = any(row.page_size is not None for row in rows)
    with_limits = any(limits_for(row) for row in rows)
    table = Table(title=bench, title_justify="left", title_style="bold")
    table.add_column("line", no_wrap=True)
    if with_page_size:
        table.add_column("P", justify="right")
    for name in names:
        table.add_column(_heading(name, rows), justify="right")
    if with_limits:
        table.add_column("limit", no_wrap=True)
        table.add_column("")
    for row in rows:
        cells = [row.line]
        if with_page_size:
            cells.append("" if row.page_size is None else str(row.page_size))
        cells += [_cell(row, name) for name in names]
        if with_limits:
            cells += _verdict(row)
        table.add_row(*cells)
    return table


def _verdict(row: Row) -> tuple[str, str]:
    """What the row is held against; figures with one bound in common are named together."""
    limits = limits_for(row)
    if not limits:
        return "", ""
    names_by_bound: dict[str, list[str]] = {}
    for limit in limits:
        bound = f"{'≥' if limit.at_least else '≤'} {limit.bound:g}"
        names_by_bound.setdefault(bound, []).append(_plain(limit.figure))
    text = "; ".join(f"{', '.join(names)} {bound}" for bound, names in names_by_bound.items())
    held = all(limit.holds_for(row) for limit in limits)
    return text, "[green]ok[/green]" if held else "[red]over[/red]"


def _heading(name: str, rows: list[Row]) -> str:
    """The figure's name and unit; times in `c` carry their µs in the same column."""
    if name.endswith("_c") and any(name.removesuffix("_c") + "_us" in row.figures for row in rows):
        return f"{_plain(name)} (µs)"
    return _plain(name)


def _plain(name: str) -> str:
    for suffix, unit in (("_c", "c"), ("_us", "µs"), ("_ms", "ms"), ("_bytes", "B"), ("_x", "×")):
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')} {unit}"
    return name.replace("_", " ")


def _in_c(name: str) -> str:
    return name.removesuffix("_us") + "_c"


def _cell(row: Row, name: str) -> str:
    value = row.figures.get(name, math.nan)
    if math.isnan(value):
        return ""
    if name.endswith("_rate"):
        return f"{value:.4f}"
    if name.endswith("_bytes") or name == "requests":
        return f"{value:,.0f}"
    text = f"{value:,.2f}" if value < 10 else f"{value:,.1f}"
    in_us = name.removesuffix("_c") + "_us"
    return f"{text} ({row.figures[in_us]:,.1f})" if in_us in row.figures else text


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "bench": row.bench,
        "line": row.line,
        "page_size": row.page_size,
        "figures": {
            name: None if math.isnan(value) else value for name, value in row.figures.items()
        },
        "limits": [
            {"limit": str(limit), "holds": limit.holds_for(row)} for limit in limits_for(row)
        ],
    }
