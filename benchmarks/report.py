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
    with_page_size = any(row.page_size is not None for row in rows)
    with_limits = any(limits_for(row) for row in rows)
    table = Table(title=bench, title_justify="left", title_style="bold")
    table.add_column("line")
    if with_page_size:
        table.add_column("P", justify="right")
    for name in names:
        table.add_column(_heading(name), justify="right")
    if with_limits:
        table.add_column("limit")
        table.add_column("")
    for row in rows:
        cells = [row.line]
        if with_page_size:
            cells.append("" if row.page_size is None else str(row.page_size))
        cells += [_cell(name, row.figures.get(name, math.nan)) for name in names]
        if with_limits:
            cells += _verdict(row)
        table.add_row(*cells)
    return table


def _verdict(row: Row) -> list[str]:
    """Limits of one figure with one bound are written once, so that a row stays a row."""
    limits = limits_for(row)
    if not limits:
        return ["", ""]
    failed = [limit for limit in limits if not limit.holds_for(row)]
    text = "; ".join(_heading(str(limit)) for limit in limits)
    return [text, "[red]over[/red]" if failed else "[green]ok[/green]"]


def _heading(name: str) -> str:
    for suffix, unit in (
        ("_us", ", µs"),
        ("_ms", ", ms"),
        ("_bytes", ", B"),
        ("_x", ", ×"),
        ("_c", ", c"),
    ):
        name = name.replace(f"{suffix} ", f"{unit} ") if " " in name else name
        if name.endswith(suffix):
            name = name.removesuffix(suffix) + unit
    return name.replace("_", " ")


def _cell(name: str, value: float) -> str:
    if math.isnan(value):
        return ""
    if name.endswith("_rate"):
        return f"{value:.4f}"
    if name.endswith(("_bytes", "_pages")):
        return f"{value:,.0f}"
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


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
