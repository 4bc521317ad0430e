"""`tiered-cache check`: a configuration judged without making anything of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered_cache.build import Sizing, size_stack, storage_parts
from tiered_cache.config import Config, load_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rich.console import Console

    from tiered_cache.config import HostConfig, StorageConfig
    from tiered_cache.types import ComponentId


def check_config(path: Path, console: Console) -> None:
    """Prints that the file is fine, with warnings.

    Raises:
        ConfigError: it is not.
    """
    config = load_config(path)
    sizing = size_stack(config)
    storage_parts(config, sizing)  # for what a backend says of its options
    for text in warnings(config, sizing):
        console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{path}: fine", markup=False, highlight=False, soft_wrap=True)


def warnings(config: Config, sizing: Sizing) -> Iterator[str]:
    """What is allowed but probably not meant."""
    if sizing.num_pages is None:
        yield "device has no size and no tokens: open needs device_pools, which define them"
    else:
        yield from _device_warnings(sizing, sizing.num_pages)
    yield from _unused_tokens("device", config.device.tokens, config.page_size)
    if config.host is not None:
        yield from _host_warnings(config.host, sizing)
    if config.storage is not None:
        yield from _storage_warnings(config.storage, sizing)
    if config.mode == "off":
        yield "mode is off: nothing is reused"
    if config.check:
        yield "check is on: for tests and bug hunts, about half the speed of the tree"


def _unused_tokens(tier: str, tokens: int | None, page_size: int) -> Iterator[str]:
    if tokens is not None and tokens % page_size:
        used = tokens // page_size * page_size
        yield f"{tier}.tokens is not a multiple of page_size: {used:,} tokens are used"


def _device_warnings(sizing: Sizing, num_pages: Mapping[ComponentId, int]) -> Iterator[str]:
    """What the ids of a component are too few for."""
    first, *others = sizing.stack.components
    if num_pages[first.id] < 2:
        yield "device holds a single page: a request longer than that cannot be admitted"
    for part in others:
        ids = num_pages[part.id]
        tokens = ids * sizing.page_size
        more = f"write more, or a higher device.ratio for {part.id}"
        if part.window is not None and tokens < part.window + sizing.page_size:
            yield (
                f"device holds {tokens:,} tokens of {part.id}, less than its window "
                f"({part.window:,}) and a page: no longer request can be admitted; {more}"
            )
        elif ids < 2:
            yield f"device holds a single id of {part.id}: nothing of it can be kept; {more}"


def _host_warnings(host: HostConfig, sizing: Sizing) -> Iterator[str]:
    yield from _unused_tokens("host", host.tokens, sizing.page_size)
    first = sizing.stack.components[0].id
    for component, pages in (sizing.host_pages or {}).items():
        device_pages = (sizing.num_pages or {component: pages})[component]
        if pages < device_pages:
            held = f"fewer ids of {component} ({pages:,}) than the device ({device_pages:,})"
            if component == first:
                tokens, more = (count * sizing.page_size for count in (pages, device_pages))
                held = f"{tokens:,} tokens, fewer than the device ({more:,})"
            yield f"host holds {held}: what the device evicts would not fit"
        tokens = min(pages, device_pages) * sizing.page_size
        if component == first and host.load_back_threshold > tokens:
            yield (
                f"host.load_back_threshold is {host.load_back_threshold:,}, but no hit is longer "
                f"than {tokens:,} tokens: nothing would be loaded back"
            )
        layout = sizing.row_layout(component)
        of = "" if len(sizing.stack.components) == 1 else f"'s part for {component}"
        is_small = pages * layout.stride < SMALL_PART * sizing.host_bytes
        if (waste := 1 - layout.payload_bytes / layout.stride) > HIGH_WASTE and not is_small:
            yield (
                f"{waste:.0%} of the host tier{of} would hold no state but the header room and "
                "padding of its rows: a larger page_size wastes less"
            )


def _storage_warnings(storage: StorageConfig, sizing: Sizing) -> Iterator[str]:
    host_pages = (sizing.host_pages or {}).get(sizing.stack.components[0].id, 0)
    most = max(1, host_pages // 2) * sizing.page_size
    threshold = storage.prefetch.threshold
    if threshold > most:
        yield (
            f"storage.prefetch.threshold is {threshold:,}, but prefetches may take half of the "
            f"host tier ({most:,} tokens): nothing would be read"
        )
    row = max(sizing.row_layout(part.id).stride for part in sizing.stack.components)
    if storage.backup.max_pending < row:
        yield (
            f"storage.backup.max_pending is {storage.backup.max_pending:,}, less than a row "
            f"({row:,} bytes): rows are written one by one"
        )
    if storage.breaker.slow >= storage.timeout:
        yield (
            f"storage.breaker.slow is {storage.breaker.slow:g}, not less than storage.timeout "
            f"({storage.timeout:g}): a call that takes so long has failed"
        )


HIGH_WASTE: Final = 0.25
"""Of a host row: a page of a real model wastes a few percent."""

SMALL_PART: Final = 0.05
"""Of a tier: what is wasted of less is not worth a word, as where rows only say that a page is
there."""
