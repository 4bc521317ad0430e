"""`tiered-cache plan`: what a configuration comes to in bytes and tokens, without the memory.

The row is shown without a host tier, too: its padding is what a page size would cost there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from tiered_cache.build import Sizing, memory_problems, size_stack
from tiered_cache.cli.check import warnings
from tiered_cache.config import Config, load_config
from tiered_cache.pools.memory import available_bytes
from tiered_cache.pools.spec import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console

    from tiered_cache.strategies.base import ComponentSpec


def show_plan(path: Path, console: Console) -> None:
    """Prints the tables.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    config = load_config(path)
    sizing = size_stack(config)
    model = config.model
    name = f"{model.id or 'model'}{f' @ {model.revision}' if model.revision else ''}"
    console.print(
        f"{name}: {model.num_layers:,} layers, {model.dtype}, pages of {config.page_size:,} tokens."
        "\nAll sizes are per rank.\n",
        markup=False,
        highlight=False,
    )
    console.print(pools_table(sizing))
    console.print(tiers_table(config, sizing))
    console.print(rows_table(config, sizing))
    for text in (*warnings(config, sizing), *memory_warnings(config, sizing, available_bytes())):
        console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)


def pools_table(sizing: Sizing) -> Table:
    """What each pool costs: per page, or per state where one stands for all tokens before it."""
    table = _table("Pools", text=("pool", "row", "ranks"))
    for heading in ("layers", "bytes/token", "bytes/page"):
        table.add_column(heading, justify="right", no_wrap=True)
    parts = sizing.stack.components
    for part in parts:
        is_per_page = sizing.is_per_page(part)
        for pool in sizing.stack.pools_of(part.id):
            table.add_row(
                pool.name if pool.name.startswith(f"{part.id}.") else f"{part.id}/{pool.name}",
                f"{'×'.join(map(str, pool.row_shape))} {pool.dtype}",
                "the same" if pool.sharding == "replicated" else "a share",
                str(len(pool.layers)),
                f"{pool.page_bytes / sizing.page_size:,.10g}" if is_per_page else "",
                f"{pool.page_bytes:,}",
            )
        table.add_section()
        total = sizing.page_bytes(part.id)
        table.add_row(
            "all" if len(parts) == 1 else f"all of {part.id}",
            *("", "", ""),
            f"{total / sizing.page_size:,.10g}" if is_per_page else "a state",
            f"{total:,}",
            style="bold",
            end_section=True,
        )
    return table


def tiers_table(config: Config, sizing: Sizing) -> Table:
    """What the budget buys. Pages are a component's ids; a state stands for no number of tokens."""
    table = _table("Tiers", text=("tier", "on", "component"))
    for heading in ("pages", "tokens", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for part in sizing.stack.components:
        cells = ["as in", "device_pools", ""]
        if sizing.num_pages is not None:
            size = sizing.page_bytes(part.id)
            cells = _tier_cells(sizing, part, sizing.num_pages[part.id], size)
        window = "" if part.window is None else f", window {part.window:,}"
        table.add_row("device", config.device.type, f"{part.id}{window}", *cells)
    if sizing.host_pages is not None:
        for part in sizing.stack.components:
            stride = sizing.row_layout(part.id).stride
            cells = _tier_cells(sizing, part, sizing.host_pages[part.id], stride)
            table.add_row("host", "memory", part.id, *cells)
    if config.storage is not None:
        for part in sizing.stack.components:
            table.add_row("storage", config.storage.backend, part.id, "as its", "options say", "")
    if sizing.num_pages is not None and sizing.host_pages is not None:
        table.add_section()
        total = sizing.device_bytes + sizing.host_bytes
        table.add_row("all", "", "", "", "", human_bytes(total), style="bold")
    return table


def _tier_cells(sizing: Sizing, part: ComponentSpec, num_pages: int, page_bytes: int) -> list[str]:
    tokens = f"{num_pages * sizing.page_size:,}" if sizing.is_per_page(part) else "states"
    return [f"{num_pages:,}", tokens, human_bytes(num_pages * page_bytes)]


def rows_table(config: Config, sizing: Sizing) -> Table:
    """How a page lies in a row of the host tier; an object in storage is the same row."""
    how = "would lie in a" if sizing.host_pages is None else "lies in the"
    also = "" if config.storage is None else ", and in storage"
    table = _table(f"Rows in bytes (how a page {how} host tier{also})", text=("row of",))
    for heading in ("slices", "slice", "header", "payload", "padding", "stride", "waste"):
        table.add_column(heading, justify="right", no_wrap=True)
    for component in sizing.stack.components:
        layout = sizing.row_layout(component.id)
        waste = 1 - layout.payload_bytes / layout.stride
        sizes = sorted({piece.num_bytes for piece in layout.slices})
        table.add_row(
            component.id,
            f"{len(layout.slices):,}",
            f"{sizes[0]:,}" if len(sizes) == 1 else f"≤ {sizes[-1]:,}",
            f"{HEADER_BYTES:,}",
            f"{layout.payload_bytes:,}",
            f"{layout.padding_bytes:,}",
            f"{layout.stride:,}",
            f"{waste:.1%}" if waste < 0.9995 else "100%",
        )
    return table


def memory_warnings(config: Config, sizing: Sizing, available: int | None) -> Iterator[str]:
    """What `open` would refuse here. It may be another machine that opens it."""
    if config.host is not None:
        for problem in memory_problems(config, sizing, available):
            yield f"on this machine: {problem}"


def _table(title: str, text: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in text:
        table.add_column(heading, no_wrap=True)
    return table


def human_bytes(count: int) -> str:
    """`1.5 GiB`, as `size:` takes it."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:,.4g} {units[0]}"
