"""`tiered-cache doctor`: how fast the tiers of a configuration are on this machine, what that is
good for, and what ails them.

Owns: what the figures mean, and the words. Refuses to know: how they came about.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from dataclasses import dataclass
from pathlib import Path  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tiered_cache.build import memory_problems, size_stack
from tiered_cache.cli import check
from tiered_cache.cli._doctor_probe import Measured, measure, small_parts
from tiered_cache.cli._stored import plan_of
from tiered_cache.cli.plan import human_bytes
from tiered_cache.config import load_config
from tiered_cache.pools.memory import available_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered_cache.cli._doctor_probe import Speed
    from tiered_cache.cli._stored import Plan
    from tiered_cache.config import Config
    from tiered_cache.storage import BackendStats

UNWELL: Final = 1

SPEEDS: Final = (1_000.0, 5_000.0, 20_000.0, 100_000.0)
"""Tokens per second at which models compute prompts: a large one, and ever smaller ones."""


def doctor(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")],
    tokens_per_second: Annotated[
        float | None, typer.Option(min=1, help="How fast your model computes prompts (prefill).")
    ] = None,
) -> None:
    """Connect to everything, move a few pages, and say what is slow or wrong.

    What is written to storage is removed again. Exits with 1 when something does not work.
    """
    settings = load_config(config)
    sizing = size_stack(settings)
    plan = plan_of(settings, sizing)
    console = Console(highlight=False, soft_wrap=True)
    ailments = [str(problem) for problem in memory_problems(settings, sizing, available_bytes())]
    notes = list(check.warnings(settings, sizing))
    if settings.host is None:
        console.print("One tier: there is nothing to move, and nothing to measure.")
    else:
        measured = asyncio.run(measure(small_parts(settings, sizing), plan))
        ailments += measured.ailments
        loads = list(_sources(measured))
        console.print(_transfers(measured, settings))
        speeds = SPEEDS if tokens_per_second is None else (tokens_per_second,)
        console.print(_break_evens(loads, speeds, settings.page_size))
        if tokens_per_second is not None:
            notes += _too_slow(settings, loads, tokens_per_second)
        notes += _storage_notes(settings, measured)
        if plan is not None and measured.stats is not None:
            notes += _disk_notes(plan, measured.stats)
    for text in notes:
        console.print(f"warning: {text}", markup=False)
    for text in ailments:
        console.print(f"problem: {text}", markup=False)
    if ailments:
        raise typer.Exit(UNWELL)
    console.print("Everything works.")


# --- What the figures mean ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """Where a prefix comes from: seconds before its first token is there, and for each one."""

    name: str
    first_s: float
    s_per_token: float

    def break_even(self, tokens_per_second: float, page_size: int) -> int | None:
        """The shortest prefix, in whole pages, that is loaded sooner than it is computed; None:
        however long it is, computing is faster."""
        saved = 1 / tokens_per_second - self.s_per_token
        if saved <= 0:
            return None
        return max(1, math.ceil(self.first_s / saved / page_size)) * page_size


def _sources(measured: Measured) -> Iterator[Source]:
    load, read = measured.load, measured.read
    if load is None:
        return
    yield Source("host", load.one_page_s, load.s_per_token)
    if read is not None:  # it comes through the host
        first_s = (measured.ask_s or 0) + read.one_page_s + load.one_page_s
        yield Source("storage", first_s, read.s_per_token + load.s_per_token)


def _too_slow(config: Config, loads: list[Source], tokens_per_second: float) -> Iterator[str]:
    """Thresholds that load what is computed sooner."""
    assert config.host is not None, "the caller has looked"
    thresholds = {"host": ("host.load_back_threshold", config.host.load_back_threshold)}
    if config.storage is not None:
        thresholds["storage"] = ("storage.prefetch.threshold", config.storage.prefetch.threshold)
    for source in loads:
        key, threshold = thresholds[source.name]
        least = source.break_even(tokens_per_second, config.page_size)
        if least is None:
            yield (
                f"{source.name} is slower than your model: a prefix of any length is computed "
                f"sooner than loaded. Take the {source.name} section out"
            )
        elif least > max(threshold, config.page_size):
            yield (
                f"{key} is {threshold:,}, but your model computes fewer than {least:,} tokens "
                f"sooner than {source.name} brings them: write {least}"
            )


def _storage_notes(config: Config, measured: Measured) -> Iterator[str]:
    """Limits that these figures do not keep."""
    storage, read = config.storage, measured.read
    if storage is None or read is None:
        return
    prefetch = storage.prefetch
    needed = 1024 * read.s_per_token
    if prefetch.policy == "timeout" and needed > prefetch.timeout_per_ki_token:
        yield (
            f"storage takes {needed:.2g} s for 1,024 tokens, and "
            f"storage.prefetch.timeout_per_ki_token allows {prefetch.timeout_per_ki_token:g}: "
            "long prefixes will come in part"
        )


def _disk_notes(plan: Plan, stats: BackendStats) -> Iterator[str]:
    """Of a backend that has a path and a limit: whether the disk has room for what may come."""
    path = getattr(plan.parts.options, "path", None)
    if not isinstance(path, str | Path) or stats.max_bytes is None:
        return
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    room, free = stats.max_bytes - (stats.num_bytes or 0), shutil.disk_usage(place).free
    if free < room:
        yield (
            f"storage may take {human_bytes(room)} more, and its disk has {human_bytes(free)} left"
        )


# --- What is shown --------------------------------------------------------------------------------


def _transfers(measured: Measured, config: Config) -> Table:
    table = _table(f"Speed, with {measured.num_pages:,} pages of {config.page_size:,} tokens")
    for heading in ("one page", "many at once", "1,024 tokens"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(name: str, speed: Speed | None) -> None:
        if speed is not None:
            bandwidth = f"{speed.bytes_per_s / 1e9:,.3g} GB/s"
            table.add_row(name, _ms(speed.one_page_s), bandwidth, _ms(1024 * speed.s_per_token))

    add(f"device ({config.device.type}) → host", measured.store)
    add(f"host → device ({config.device.type})", measured.load)
    if config.storage is not None:
        name = config.storage.backend
        add(f"host → storage ({name})", measured.write)
        add(f"storage ({name}) → host", measured.read)
        if measured.ask_s is not None:
            table.add_row("ask storage for a page", _ms(measured.ask_s), "", "")
    return table


def _break_evens(loads: list[Source], speeds: tuple[float, ...], page_size: int) -> Table:
    table = _table("Tokens from which on a load beats computing them again")
    for source in loads:
        table.add_column(f"from {source.name}", justify="right", no_wrap=True)
    for speed in speeds:
        least = [source.break_even(speed, page_size) for source in loads]
        cells = ["never" if tokens is None else f"{tokens:,}" for tokens in least]
        table.add_row(f"a model of {speed:,.0f} tokens/s", *cells)
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms"
