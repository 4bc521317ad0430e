"""`tiered-cache check`: a configuration judged without making anything of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_cache.build import Sizing, size_stack
from tiered_cache.config import Config, load_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console


def check_config(path: Path, console: Console) -> None:
    """Prints that the file is fine, with warnings.

    Raises:
        ConfigError: it is not.
    """
    config = load_config(path)
    sizing = size_stack(config)
    for text in warnings(config, sizing):
        console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{path}: fine", markup=False, highlight=False, soft_wrap=True)


def warnings(config: Config, sizing: Sizing) -> Iterator[str]:
    """What is allowed but probably not meant."""
    if sizing.num_pages is None:
        yield "device has no size and no tokens: open needs device_pools, which define them"
    elif min(sizing.num_pages.values()) < 2:
        yield "device holds a single page: a request longer than that cannot be admitted"
    tokens = config.device.tokens
    if tokens is not None and tokens % config.page_size:
        used = tokens // config.page_size * config.page_size
        yield f"device.tokens is not a multiple of page_size: {used:,} tokens are used"
    if config.mode == "off":
        yield "mode is off: nothing is reused"
    if config.check:
        yield "check is on: for tests and bug hunts, about half the speed of the tree"
