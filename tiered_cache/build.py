"""From settings to parts: the only module that names concrete ones.

Owns: sizing (which components and pools, how many pages of each) and construction. Sizing is a pure
function without tensors, because `tiered-cache plan` and `check` need it without the memory.
Refuses to know: what happens at run time; `UnifiedRadixCache.open` calls it once.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from pydantic import ValidationError

from tiered_cache.config.problems import option_problems
from tiered_cache.config.schema import MAX_BYTES, MAX_BYTES_TEXT, NEEDED_BY_STORAGE, one_of
from tiered_cache.controller import HostTier
from tiered_cache.errors import BackendError, ConfigError, ConfigProblem
from tiered_cache.pools.allocator import PageAllocator, RunAllocator
from tiered_cache.pools.device import DevicePools
from tiered_cache.pools.host import HostArena
from tiered_cache.pools.memory import available_bytes
from tiered_cache.pools.shares import Shares
from tiered_cache.pools.spec import page_bytes, row_layout
from tiered_cache.storage.record import FORMAT_VERSION, RecordFormat, fingerprint
from tiered_cache.storage.registry import backend_names, install_hint, load_backend
from tiered_cache.storage_tier import StorageParts
from tiered_cache.strategies.registry import select_strategy
from tiered_cache.transfer.cpu import CpuCopier
from tiered_cache.transfer.cuda import CudaCopier
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.swa import SWAComponent
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiered_cache.config import Config, DeviceConfig, HostConfig, ModelConfig
    from tiered_cache.observe import Observer
    from tiered_cache.pools.spec import PoolSpec, RowLayout
    from tiered_cache.strategies.base import ComponentSpec, StackPlan
    from tiered_cache.tree.components.base import TreeComponent
    from tiered_cache.types import ComponentId


def _swa(spec: ComponentSpec) -> SWAComponent:
    if spec.window is None:
        raise ValueError("has no window")
    return SWAComponent(spec.id, spec.window)


COMPONENT_KINDS: Final[Mapping[str, Callable[[ComponentSpec], TreeComponent]]] = {
    "full": lambda spec: FullComponent(spec.id),
    "prefix": lambda spec: FullComponent(spec.id),
    "swa": _swa,
    "mamba": lambda spec: MambaComponent(spec.id),
}
"""What a strategy's `ComponentSpec.kind` can be, and what becomes of it. `ValueError`: its other
fields are not what the kind needs."""

DEFAULT_RATIOS: Final[Mapping[str, Callable[[Fraction], Fraction]]] = {
    "full": lambda _: Fraction(1),
    "prefix": lambda _: Fraction(1),
    "swa": lambda _: Fraction(1, 2),
    "mamba": lambda equal: min(Fraction(1, 10), equal),
}
"""Ids of a component per page of the first one, where the configuration does not say. Given the
ratio at which both take equally many bytes: one state can be as large as hundreds of pages."""

WEIGHTLESS: Final = frozenset({"prefix"})
"""Kinds whose pages hold nothing: a ratio to their bytes says nothing."""

MAX_PAGES: Final = int(np.iinfo(np.int32).max)
"""Page ids are int32 everywhere."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a configuration comes to: the stack, and the pages of each tier per component.

    `num_pages`, of the device, is None when the configuration sets no budget: the caller's tensors
    define it. `host_pages` is None when there is no host tier.
    """

    stack: StackPlan
    page_size: int
    num_pages: Mapping[ComponentId, int] | None
    host_pages: Mapping[ComponentId, int] | None

    def page_bytes(self, component: ComponentId) -> int:
        """Bytes of one page of a component on the device: all its pools, all layers."""
        return page_bytes(self.stack.pools, component)

    def row_layout(self, component: ComponentId) -> RowLayout:
        """How a page of a component lies in the host tier; its stride is the bytes it takes."""
        return row_layout(self.stack.pools_of(component))

    def is_per_page(self, part: ComponentSpec) -> bool:
        """Whether an id of the component stands for a page of tokens, not for a single state."""
        return COMPONENT_KINDS[part.kind](part).is_per_page

    @property
    def device_bytes(self) -> int:
        """Bytes of all device pools; 0 when the caller's tensors define them."""
        pages = self.num_pages or {}
        return sum(count * self.page_bytes(component) for component, count in pages.items())

    @property
    def host_bytes(self) -> int:
        """Bytes of all host rows; 0 without a host tier."""
        pages = self.host_pages or {}
        return sum(count * self.row_layout(component).stride for component, count in pages.items())


@dataclass(frozen=True, slots=True)
class Parts:
    """What `UnifiedRadixCache.open` puts together, and from what. Tuples are in dense component
    order."""

    config: Config
    stack: StackPlan
    tree: RadixTree
    components: tuple[TreeComponent, ...]
    allocators: tuple[PageAllocator, ...]
    pools: DevicePools
    page_size: int
    host: HostTier | None
    arenas: tuple[HostArena, ...]
    storage: StorageParts | None = None


def build(
    config: Config,
    *,
    device_pools: Mapping[str, Sequence[torch.Tensor]] | None = None,
    observers: Sequence[Observer] = (),
    rank: int = 0,
    world_size: int = 1,
) -> Parts:
    """Makes the parts of a cache.

    With a host tier it reads how much memory is left, from files: not for the event loop's thread.

    Args:
        config: what `load_config` returned.
        device_pools: the user's own tensors (see `DevicePools`); they define the page count.
        observers: called at every commit beat of the tree.
        rank, world_size: which of how many processes of one model this is.

    Raises:
        ConfigError: everything that is wrong, with file and line where it was written.
    """
    sizing = size_stack(config)
    problems = list(_device_problems(config, sizing, brings_tensors=device_pools is not None))
    if sizing.host_pages is not None:
        problems += memory_problems(config, sizing, available_bytes())
    storage: StorageParts | None = None
    if config.mode == "on":
        try:
            storage = storage_parts(config, sizing, rank=rank, world_size=world_size)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    components = tuple(COMPONENT_KINDS[part.kind](part) for part in sizing.stack.components)
    with _refused_memory(config, sizing, Tier.DEVICE):
        pools = DevicePools(sizing.stack.pools, sizing.num_pages, config.device.type, device_pools)
        allocators = tuple(
            PageAllocator(pools.num_pages[part.id], check=config.check)
            for part in sizing.stack.components
        )
    host: HostTier | None = None
    arenas: tuple[HostArena, ...] = ()
    if config.host is not None and config.mode == "on":
        host, arenas = _make_host_tier(config, sizing, pools)
    return Parts(
        config=config,
        stack=sizing.stack,
        tree=RadixTree(
            components,
            config.page_size,
            policy=config.device.eviction_policy,
            host_policy=config.host.eviction_policy if config.host is not None else "lru",
            observers=observers,
            mirrors_are_spare=config.host is not None and config.host.write_policy == "write_back",
        ),
        components=components,
        allocators=allocators,
        pools=pools,
        page_size=config.page_size,
        host=host,
        arenas=arenas,
        storage=storage,
    )


def _make_host_tier(
    config: Config, sizing: Sizing, pools: DevicePools
) -> tuple[HostTier, tuple[HostArena, ...]]:
    assert config.host is not None, "the caller has looked"
    assert sizing.host_pages is not None, "sized from it"
    is_cuda = pools.device.type == "cuda"
    with _refused_memory(config, sizing, Tier.HOST):
        arenas = tuple(
            HostArena(sizing.row_layout(part.id), sizing.host_pages[part.id], pinned=is_cuda)
            for part in sizing.stack.components
        )
        allocators = [RunAllocator(arena.num_pages, check=config.check) for arena in arenas]
    copier = (CudaCopier if is_cuda else CpuCopier)(pools, arenas)

    def close() -> None:
        copier.close()  # its views keep the memory
        for arena in arenas:
            arena.close()

    tier = HostTier(
        allocators=allocators,
        arenas=arenas,
        copier=copier,
        page_bytes=arenas[0].layout.payload_bytes,
        max_pinned=config.host.max_pinned,
        write_policy=config.host.write_policy,
        load_back_threshold=config.host.load_back_threshold,
        touch=[chunk.touch for arena in arenas for chunk in arena.chunks()],
        close=close,
    )
    return tier, arenas


def storage_parts(
    config: Config, sizing: Sizing, *, rank: int = 0, world_size: int = 1
) -> StorageParts | None:
    """What the storage tier is opened with; None when the configuration has none. Imports the
    backend, opens nothing.

    Raises:
        ConfigError: no such backend, one that cannot be imported, or options that it refuses.
    """
    settings = config.storage
    if settings is None:
        return None
    try:
        backend = load_backend(settings.backend)
    except LookupError:
        message, hint = "no such backend is installed", one_of(settings.backend, backend_names())
        raise ConfigError([config.problem("storage.backend", message, hint)]) from None
    except BackendError as error:
        hint = install_hint(settings.backend)
        raise ConfigError([config.problem("storage.backend", str(error), hint)]) from error
    try:
        options = backend.Options.model_validate(settings.options)
    except ValidationError as error:
        problems = option_problems(error, config.marks, settings.options, backend.Options)
        raise ConfigError(problems) from None  # pydantic's text repeats values
    parts = sizing.stack.components
    return StorageParts(
        backend,
        options,
        tuple(_record_format(config.model, sizing, part.id, rank, world_size) for part in parts),
        # What is the same on all ranks is written by the first (semantics §10.2).
        tuple(rank == 0 or _differs_by_rank(sizing, part.id, world_size) for part in parts),
        settings,
    )


def foreign_state(config: Config, parts: Parts) -> list[ConfigProblem]:
    """Why `config` does not describe the state of the cache that `parts` are of: its rows would be
    kept, and read, under the name of another model or layout."""
    problems = []
    if config.page_size != parts.page_size:
        message = f"is {config.page_size:,}, but the cache has pages of {parts.page_size:,} tokens"
        problems.append(config.problem("page_size", message))
    for key in NEEDED_BY_STORAGE:  # a cache that was opened without storage may lack them
        named = getattr(parts.config.model, key)
        if named is not None and named != getattr(config.model, key):
            problems.append(config.problem(f"model.{key}", "is not what the cache was opened with"))
    if not problems and size_stack(config).stack != parts.stack:
        message = "describes other state than the cache was opened for"
        problems.append(config.problem("model", message, "write the model's keys as they were"))
    return problems


def _differs_by_rank(sizing: Sizing, component: ComponentId, world_size: int) -> bool:
    pools = sizing.stack.pools_of(component)
    return world_size > 1 and any(pool.sharding == "per_rank" for pool in pools)


def _record_format(
    model: ModelConfig, sizing: Sizing, component: ComponentId, rank: int, world_size: int
) -> RecordFormat:
    layout = sizing.row_layout(component)
    last = layout.slices[-1]
    return RecordFormat(
        component,
        fingerprint(record_facts(model, sizing, component, rank=rank, world_size=world_size)),
        row_bytes=layout.stride,
        payload_end=last.offset + last.num_bytes,
    )


def record_facts(
    model: ModelConfig, sizing: Sizing, component: ComponentId, *, rank: int, world_size: int
) -> dict[str, Any]:
    """All that gives the bytes of a component's rows their meaning (semantics §10.2).

    Whatever is added to a `ComponentSpec` or a `PoolSpec` becomes a fact by itself: forgetting one
    would be wrong state, one too many is a miss. Where all ranks hold the same bytes they share
    them, whatever their number.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    pools = sizing.stack.pools_of(component)
    by_rank = _differs_by_rank(sizing, component, world_size)
    return {
        "format": FORMAT_VERSION,
        "byte_order": sys.byteorder,
        "model": [model.id, model.revision],
        "page_size": sizing.page_size,
        "components": [_given(part) for part in sizing.stack.components],
        "component": component,
        "pools": [_given(pool) for pool in pools],
        "rank": [rank, world_size] if by_rank else None,
    }


def _given(spec: ComponentSpec | PoolSpec) -> dict[str, Any]:
    return {key: value for key, value in asdict(spec).items() if value is not None}


def size_stack(config: Config) -> Sizing:
    """Which components and pools the model needs, and how many pages each tier's budget buys.

    Bytes are shared by ratio: how many ids a component has per page of the first one, at least 1.
    On the host an id takes a row, with its header room and padding.

    Raises:
        ConfigError: no strategy fits, a ratio is for no component, or the budget holds not even
            one page of the first component beside one id of each other.
    """
    try:
        stack = select_strategy(config.model).plan(config.model, config.page_size)
    except ConfigError as error:
        raise ConfigError([_placed(config, problem) for problem in error.problems]) from error
    problems = list(_stack_problems(config, stack))
    if problems:
        raise ConfigError(problems)
    device_page = sum(pool.page_bytes for pool in stack.pools)
    if device_page > MAX_BYTES:
        message = f"one page of {config.page_size:,} tokens takes {device_page:,} bytes"
        raise ConfigError([config.problem("model", message, f"the most is {MAX_BYTES_TEXT}")])
    problems = [
        *_ratio_problems(config, Tier.DEVICE, stack),
        *_ratio_problems(config, Tier.HOST, stack),
    ]
    if problems:
        raise ConfigError(problems)
    on_device, on_host = (shares(config, tier, stack) for tier in (Tier.DEVICE, Tier.HOST))
    device = _num_pages(config.device, config.page_size, on_device)
    host = _num_pages(config.host, config.page_size, on_host)
    problems = [
        *_budget_problems(config, Tier.DEVICE, device, on_device),
        *_budget_problems(config, Tier.HOST, host, on_host),
    ]
    if problems:
        raise ConfigError(problems)
    return Sizing(
        stack,
        config.page_size,
        num_pages=None if device is None else on_device.ids(device),
        host_pages=None if host is None else on_host.ids(host),
    )


def shares(config: Config, tier: Tier, stack: StackPlan) -> Shares:
    """How the components share a tier: by the ratios of its section, else by default."""
    id_bytes = {
        part.id: page_bytes(stack.pools, part.id)
        if tier is Tier.DEVICE
        else row_layout(stack.pools_of(part.id)).stride
        for part in stack.components
    }
    budget = config.device if tier is Tier.DEVICE else config.host
    given = {} if budget is None else budget.ratio
    first, *others = stack.components
    ratios = {first.id: Fraction(1)}
    for part in others:
        equal = Fraction(id_bytes[first.id], id_bytes[part.id])
        if first.kind in WEIGHTLESS:
            equal = Fraction(1)
        ratio = given.get(part.id)
        # Through text: 0.1 is meant as a tenth, not as the binary fraction next to it.
        ratios[part.id] = (
            DEFAULT_RATIOS[part.kind](equal) if ratio is None else Fraction(str(ratio))
        )
    return Shares(id_bytes, ratios)


def _ratio_problems(config: Config, tier: Tier, stack: StackPlan) -> Iterator[ConfigProblem]:
    budget = config.device if tier is Tier.DEVICE else config.host
    first, *others = (part.id for part in stack.components)
    for name in () if budget is None else budget.ratio:
        if name == first:
            message, hint = "is what the others are counted by: its ratio is 1", "take it out"
        elif name not in others:
            message = "there is no such component"
            hint = one_of(name, others) if others else f"{first} is the only one: take it out"
        else:
            continue
        yield config.problem((tier.value, "ratio", name), message, hint)


def _num_pages(
    budget: DeviceConfig | HostConfig | None, page_size: int, among: Shares
) -> int | None:
    """Pages of the first component that a tier's budget buys; None when there is none."""
    if budget is not None and budget.size is not None:
        return among.num_pages(budget.size)
    if budget is not None and budget.tokens is not None:
        return budget.tokens // page_size
    return None


def _budget_problems(
    config: Config, tier: Tier, num_pages: int | None, among: Shares
) -> Iterator[ConfigProblem]:
    if num_pages is None:
        return
    key = budget_key(config, tier)
    num_bytes = among.num_bytes(num_pages)
    if num_pages < 1:
        others = " and ".join(list(among.id_bytes)[1:])
        beside = f", with one id of {others} beside it," if others else ""
        hint = f"one page of {config.page_size:,} tokens{beside} takes {num_bytes:,} bytes"
        hint += ": write more"
        if key.endswith("tokens"):
            hint = f"write at least page_size ({config.page_size:,})"
        yield config.problem(key, "is too small for one page", hint)
    elif max(among.ids(num_pages).values()) > MAX_PAGES:
        most = f"at most {MAX_PAGES:,} pages can be told apart; raise page_size"
        yield config.problem(key, "is too large", most)
    elif num_bytes > MAX_BYTES:
        yield config.problem(key, f"comes to {num_bytes:,} bytes", f"the most is {MAX_BYTES_TEXT}")


def budget_key(config: Config, tier: Tier) -> str:
    """The setting that says how large a tier is."""
    budget = config.device if tier is Tier.DEVICE else config.host
    return f"{tier.value}.{'size' if budget is None or budget.size is not None else 'tokens'}"


def _stack_problems(config: Config, stack: StackPlan) -> Iterator[ConfigProblem]:
    """What a strategy, or extra pools beside it, got wrong."""
    ids = [component.id for component in stack.components]
    names = [pool.name for pool in stack.pools]
    for name in sorted({name for name in names if names.count(name) > 1}):
        is_state = name in {state.name for state in config.model.states}
        key = "model.states" if is_state else "model.extra_pools"
        yield config.problem(key, f"there are two pools {name!r}", "rename one")
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
        else:
            try:
                COMPONENT_KINDS[component.kind](component)
            except ValueError as error:
                yield config.problem("model.strategy", f"component {component.id!r}: {error}")
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
    if brings_tensors and sizing.num_pages is not None:
        yield config.problem(
            budget_key(config, Tier.DEVICE),
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


def memory_problems(
    config: Config, sizing: Sizing, available: int | None
) -> Iterator[ConfigProblem]:
    """A host tier that this machine cannot hold, beside the device tier where that lives here too.

    Said before anything is made: memory that is only promised is missed when it is touched, and
    then the kernel kills the process.
    """
    taken = sizing.device_bytes if config.device.type == "cpu" else 0
    if available is None or taken + sizing.host_bytes <= available:
        return
    beside = f", and the device tier {taken:,} beside it" if taken else ""
    message = f"the host tier takes {sizing.host_bytes:,} bytes{beside}; {available:,} are left"
    yield config.problem(
        budget_key(config, Tier.HOST), message, _what_fits(config, sizing, available - taken)
    )


def _what_fits(config: Config, sizing: Sizing, num_bytes: int) -> str:
    among = shares(config, Tier.HOST, sizing.stack)
    if not (pages := among.num_pages(num_bytes)):
        less = "write less for the device, or " if config.device.type == "cpu" else ""
        return f"{less}take the host section out"
    if budget_key(config, Tier.HOST) == "host.tokens":
        return f"write at most tokens: {pages * config.page_size}"
    return f"write at most size: {among.num_bytes(pages)}"


@contextmanager
def _refused_memory(config: Config, sizing: Sizing, tier: Tier) -> Iterator[None]:
    """What is said when memory is out, as a problem with the setting that asked for so much."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch says RuntimeError when memory is out
        num_bytes, place = sizing.device_bytes, f"on {config.device.type}"
        if tier is Tier.HOST:
            num_bytes, place = sizing.host_bytes, "for the host tier"
        message = f"the machine refused {num_bytes:,} bytes {place}, or the lists of their page ids"
        raise ConfigError([config.problem(budget_key(config, tier), message, "write less")]) from (
            error
        )


def _placed(config: Config, problem: ConfigProblem) -> ConfigProblem:
    """A problem from a floor that does not know where settings were written."""
    return config.problem(problem.key, problem.message, problem.suggestion)
