"""`python -m benchmarks`: runs what is asked for, prints tables, and on request writes JSON."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from benchmarks import (
    copies,
    files,
    hybrid,
    lateness,
    lease,
    redis_store,
    report,
    scaling,
    trace,
    tree,
)
from benchmarks.measure import server_gc

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.measure import Row


FILE_COLUMNS: Final = 180
"""Width of a table that goes into a file or a pipe."""


class Bench(StrEnum):
    """What can be asked for."""

    TREE = "tree"
    HYBRID = "hybrid"
    LEASE = "lease"
    SCALING = "scaling"
    COPIES = "copies"
    FILES = "files"
    LATENESS = "lateness"
    REDIS = "redis"
    TRACE = "trace"


def main(
    benches: Annotated[
        list[Bench] | None,
        typer.Argument(help="What to run; default: all (trace only with --trace)."),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Runs of each; figures are medians over them.")
    ] = 5,
    full: Annotated[
        bool, typer.Option("--full", help="Scaling: 10⁶ leaves, every policy (minutes, 3 GB).")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows that it runs, not how fast.")
    ] = False,
    trace_path: Annotated[
        Path | None,
        typer.Option(
            "--trace", exists=True, dir_okay=False, help="JSON lines with `hash_ids` to replay."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first requests of the trace.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all figures here.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 when a limit is missed.")
    ] = False,
) -> None:
    """Measure tiered-cache: tree, lease, large trees, copies, files, the loop, a trace."""
    works: dict[Bench, Callable[[], list[Row]]] = {
        Bench.TREE: lambda: tree.run(repeat, quick=quick),
        Bench.HYBRID: lambda: hybrid.run(repeat, quick=quick),
        Bench.LEASE: lambda: lease.run(repeat, quick=quick),
        Bench.SCALING: lambda: scaling.run(repeat, full=full, quick=quick),
        Bench.COPIES: lambda: copies.run(repeat, quick=quick),
        Bench.FILES: lambda: files.run(repeat, quick=quick),
        Bench.LATENESS: lambda: lateness.run(repeat, quick=quick),
        Bench.REDIS: lambda: redis_store.run(repeat, quick=quick),
    }
    if trace_path is not None:
        works[Bench.TRACE] = lambda: trace.run(trace_path, repeat, limit=limit)
    elif benches and Bench.TRACE in benches:
        raise typer.BadParameter("the trace benchmark needs --trace PATH")
    console = Console()
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    rows: list[Row] = []
    with server_gc():
        for bench in benches or works:
            found = works[bench]()
            report.print_tables(found, console)
            rows += found
    if json_path is not None:
        json_path.write_text(report.as_json(rows, repeat), encoding="utf-8")
    missed = report.missed(rows)
    for line in missed:
        console.print(f"over the limit: {line}", style="red")
    raise typer.Exit(1 if strict and missed else 0)


if __name__ == "__main__":
    typer.run(main)
