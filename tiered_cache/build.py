"""From settings to parts: the only module that names concrete ones.

Owns: sizing (which components and pools, how many pages of each) and construction. Sizing is a pure
function without tensors, because `tiered-cache plan` and `check` need it without the memory.
Refuses to know: what happens at run time; `UnifiedRadixCache.open` calls it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tiered_cache.config.schema import MAX_BYTES, MAX_BYTES_TEXT
from tiered_cache.errors import ConfigError, ConfigProblem
from tiered_cache.pools.allocator import PageAllocator
from tiered_cache.pools.device import DevicePools
from tiered_cache.pools.spec import page_bytes
from tiered_cache.strategies.registry import select_strategy
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.radix import RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiered_cache.config import Config
    from tiered_cache.observe import Observer
    from tiered_cache.strategies.base import StackPlan
    from tiered_cache.tree.components.base import TreeComponent
    from tiered_cache.types import ComponentId

COMPONENT_KINDS: Final[Mapping[str, Callable[[str], TreeComponent]]] = {"full": FullComponent}
"""What a strategy's `ComponentSpec.kind` can be."""

MAX_PAGES: Final = int(np.iinfo(np.int32).max)
"""Page ids are int32 everywhere."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a configuration comes to: the stack, and the device's pages per component.

    `num_pages` is None when the configuration sets no budget: the caller's tensors define it.
    """

    stack: StackPlan
    page_size: int
    num_pages: Mapping[ComponentId, int] | None

    def page_bytes(self, component: ComponentId) -> int:
        """Bytes of one page of a component: all its pools, all layers."""
        return page_bytes(self.stack.pools, component)


@dataclass(frozen=True, slots=True)
class Parts:
    """What `UnifiedRadixCache.open` puts together. Tuples are in dense component order."""

    tree: RadixTree
    components: tuple[TreeComponent, ...]
    allocators: tuple[PageAllocator, ...]
    pools: DevicePools
    page_size: int


def build(
    config: Config,
    *,
    device_pools: Mapping[str, Sequence[torch.Tensor]] | None = None,
    observers: Sequence[Observer] = (),
) -> Parts:
    """Makes the parts of a cache.

    Args:
        config: what `load_config` returned.
        device_pools: the user's own tensors (see `DevicePools`); they define the page count.
        observers: called at every commit beat of the tree.

    Raises:
        ConfigError: everything that is wrong, with file and line where it was written.
    """
    sizing = size_stack(config)
    problems = list(_device_problems(config, sizing, brings_tensors=device_pools is not None))
    if problems:
        raise ConfigError(problems)
    components = tuple(COMPONENT_KINDS[part.kind](part.id) for part in sizing.stack.components)
    pools = _make_pools(config, sizing, device_pools)
    return Parts(
        tree=RadixTree(
            components, config.page_size, policy=config.device.eviction_policy, observers=observers
        ),
        components=components,
        allocators=tuple(
            PageAllocator(pools.num_pages[part.id], check=config.check)
            for part in sizing.stack.components
        ),
        pools=pools,
        page_size=config.page_size,
    )


def size_stack(config: Config) -> Sizing:
    """Which components and pools the model needs, and how many pages the budget buys.

    Bytes are shared so that all components get the same number of pages.

    Raises:
        ConfigError: no strategy fits, or the budget holds not even one page.
    """
    try:
        stack = select_strategy(config.model).plan(config.model, config.page_size)
    except ConfigError as error:
        raise ConfigError([_placed(config, problem) for problem in error.problems]) from error
    problems = list(_stack_problems(config, stack))
    if problems:
        raise ConfigError(problems)
    return Sizing(stack, config.page_size, _num_pages(config, stack))


def _num_pages(config: Config, stack: StackPlan) -> dict[ComponentId, int] | None:
    device, one_page = config.device, sum(pool.page_bytes for pool in stack.pools)
    if one_page > MAX_BYTES:
        message = f"one page of {config.page_size:,} tokens takes {one_page:,} bytes"
        raise ConfigError(
            [config.problem("model", message, f"at most {MAX_BYTES_TEXT} can be used")]
        )
    if device.size is not None:
        key, count = "size", device.size // one_page
        hint = f"one page of {config.page_size} tokens takes {one_page:,} bytes: write more"
    elif device.tokens is not None:
        key, count = "tokens", device.tokens // config.page_size
        hint = f"write at least page_size ({config.page_size})"
    else:
        return None
    if count < 1:
        raise ConfigError([config.problem(f"device.{key}", "is too small for one page", hint)])
    if count > MAX_PAGES:
        most = f"at most {MAX_PAGES:,} pages can be told apart; raise page_size"
        raise ConfigError([config.problem(f"device.{key}", "is too large", most)])
    if count * one_page > MAX_BYTES:
        message = f"comes to {count * one_page:,} bytes"
        raise ConfigError([config.problem(f"device.{key}", message, f"at most {MAX_BYTES_TEXT}")])
    return {component.id: count for component in stack.components}


def _stack_problems(config: Config, stack: StackPlan) -> Iterator[ConfigProblem]:
    """What a strategy, or extra pools beside it, got wrong."""
    ids = [component.id for component in stack.components]
    names = [pool.name for pool in stack.pools]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield config.problem("model.extra_pools", f"there are two pools {name!r}", "rename one")
    if not stack.components:
        yield config.problem(
            "model.strategy", "the strategy says that the model needs no component"
        )
    for component in stack.components:
        if component.kind not in COMPONENT_KINDS:
            yield config.problem(
                "model.strategy",
                f"component {component.id!r} is of an unknown kind, {component.kind!r}",
                f"the kinds are {', '.join(COMPONENT_KINDS)}",
            )
        if ids.count(component.id) > 1:
            yield config.problem("model.strategy", f"two components have the id {component.id!r}")
        if not stack.pools_of(component.id):
            yield config.problem("model.strategy", f"component {component.id!r} has no pool")
    for pool in stack.pools:
        if pool.component not in ids:
            yield config.problem(
                "model.strategy", f"pool {pool.name!r} names no component: {pool.component!r}"
            )


def _device_problems(
    config: Config, sizing: Sizing, *, brings_tensors: bool
) -> Iterator[ConfigProblem]:
    device = config.device
    budget = "size" if device.size is not None else "tokens"
    if brings_tensors and sizing.num_pages is not None:
        yield config.problem(
            f"device.{budget}",
            "contradicts device_pools: the tensors given define the number of pages",
            "take it out",
        )
    if not brings_tensors and sizing.num_pages is None:
        yield config.problem(
            "device", "has no budget", "write size: 8GiB or tokens: 65536, or bring device_pools"
        )
    if device.type.startswith("cuda"):
        index = int(device.type.partition(":")[2] or 0)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            has = f"{count} CUDA devices" if count else "no CUDA device"
            yield config.problem("device.type", f"this machine has {has}", "write cpu")


def _make_pools(
    config: Config, sizing: Sizing, tensors: Mapping[str, Sequence[torch.Tensor]] | None
) -> DevicePools:
    try:
        return DevicePools(sizing.stack.pools, sizing.num_pages, config.device.type, tensors)
    except (MemoryError, RuntimeError) as error:  # torch says RuntimeError when memory is out
        pages = sizing.num_pages or {}
        total = sum(count * sizing.page_bytes(component) for component, count in pages.items())
        key = "device.size" if config.device.size is not None else "device.tokens"
        message = f"the machine refused {total:,} bytes on {config.device.type}"
        raise ConfigError([config.problem(key, message, "write less")]) from error


def _placed(config: Config, problem: ConfigProblem) -> ConfigProblem:
    """A problem from a floor that does not know where settings were written."""
    return config.problem(problem.key, problem.message, problem.suggestion)
