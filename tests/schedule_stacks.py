"""Stacks with windows, states and a component of a user's own, for `schedules`: their shapes, and
what is proved of them.

What they add to the proofs:

* a match ends where the rule by pages says (`component_scene`), on the device and on both tiers;
* what a lease goes on from reads right: the window behind it, the state that it works with, and
  where it would go back to when its next run fails;
* while nothing was evicted, every prefix that somebody has published to is found;
* a device that computes on after a run has returned reads and writes what nobody else has
  (`Launch`), states and the copies of them included.

Left out: an engine that calls for everything itself (a model with states computes in `run`, and
`begin_req` knows no chunks), and layers (a window or a state is loaded for all its layers at once).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import runpy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import numpy.typing as npt

from tests.device_helpers import Device, Launched
from tiered_cache import Chunk, Lease, RadixKey, UnifiedRadixCache, build
from tiered_cache.lease_parts import StatePart
from tiered_cache.pools.spec import PoolSpec
from tiered_cache.strategies.base import ComponentSpec, StackPlan
from tiered_cache.strategies.registry import register_stack_strategy
from tiered_cache.testing.component_scene import Role, legal_depths, pages_there, role_of
from tiered_cache.testing.oracle import ByteOracle
from tiered_cache.tree.components import swa
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.node import BASE
from tiered_cache.types import NO_PAGE, ComponentId, MatchResult

TOKEN_STATE_BYTES: Final = 40
"""Of each component, and of a state."""

STACKS: Final = (("swa",), ("mamba",), ("swa", "mamba"), ("swa.a", "swa.b"))
"""Beside full attention."""

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "custom_component.py"

SinkComponent: Final[Any] = runpy.run_path(str(EXAMPLE))["SinkComponent"]
"""A component of a user's own: the first page is all that a prefix needs of it."""

SINKS: Final = "sinks"

SINK_SHARE: Final = 1 / 4
"""Of the stacks: so many have such a component, too."""

ROLLBACKS: Final = (0, 0, 3, 6)
"""Tokens that a lease may ask to be able to go back by."""

KINDS: Final = {"swa": "a window", "mamba": "a state", SINKS: "a sink"}
"""By the first part of a component's id."""


@dataclass(frozen=True)
class StackShape:
    """What does not change within a schedule of such a stack.

    `windows`: tokens, or 0 for what has none. `device`, `host`: ids of each component beside the
    first.
    """

    names: tuple[str, ...]
    windows: tuple[int, ...]
    grid: int
    chunk_tokens: int
    device: tuple[int, ...]
    host: tuple[int, ...]
    has_host: bool

    @classmethod
    def drawn(
        cls, draws: random.Random, page_size: int, device_pages: int, host_pages: int
    ) -> StackShape:
        names = draws.choice(STACKS)
        windows = tuple(
            0 if name == "mamba" else draws.randint(1, 3 * page_size + 1) for name in names
        )
        chunk_tokens = page_size * draws.choice((1, 2, 4))
        device, host = [], []
        for window in windows:
            if window:
                fewest = _footprint(window, chunk_tokens, page_size, device_pages)
                device.append(draws.randint(fewest, device_pages))
                host.append(draws.randint(4, host_pages))
            else:
                device.append(draws.choice((1, 2, 2, 3, 4, 6)))
                host.append(draws.choice((1, 2, 8, 8, 16, 16)))
        return cls(
            names=names,
            windows=windows,
            grid=draws.choice((1, page_size, 2 * page_size, 3 * page_size)),
            chunk_tokens=chunk_tokens,
            device=tuple(device),
            host=tuple(host),
            has_host=draws.random() < 0.75,
        )

    def with_sinks(self, draws: random.Random, device_pages: int) -> StackShape:
        """The same with a component of a user's own; or that alone."""
        shape = (
            self
            if draws.random() < 0.7
            else replace(self, names=(), windows=(), device=(), host=())
        )
        return replace(
            shape,
            names=(*shape.names, SINKS),
            windows=(*shape.windows, 0),
            device=(*shape.device, device_pages),  # a request takes a page for each of its own
            host=(*shape.host, draws.choice((1, 2, 4, 8))),
        )

    def ratio(self, ids: tuple[int, ...], num_pages: int) -> dict[str, float]:
        """Sections count by ratio, rounded down."""
        return {
            name: round((count + 0.01) / num_pages, 6)
            for name, count in zip(self.names, ids, strict=True)
        }

    def model(self) -> dict[str, Any]:
        layers = {"num_layers": 1 + len(self.names), "num_kv_heads": 1, "head_dim": 2}
        name = {"id": "test/stack", "revision": "1"}
        return {**name, "dtype": "float32", **layers, "strategy": Strategy.name}


def kind_of(name: str) -> str:
    return name.split(".")[0]


def _footprint(window: int, chunk_tokens: int, page_size: int, num_pages: int) -> int:
    with mock.patch.object(swa, "CHUNK_TOKENS", chunk_tokens):
        component = swa.SWAComponent("swa", window)
        component.page_size = page_size
        return min(num_pages, component.footprint(num_pages) + -(-max(ROLLBACKS) // page_size))


class Strategy:
    """Of each component one layer."""

    name = "schedules"

    def __init__(self, shape: StackShape) -> None:
        self._shape = shape

    def matches(self, model: Any) -> bool:
        return False

    def plan(self, model: Any, page_size: int) -> StackPlan:
        parts = [ComponentSpec(ComponentId("full"), "full")]
        for name, window in zip(self._shape.names, self._shape.windows, strict=True):
            parts.append(ComponentSpec(ComponentId(name), kind_of(name), window or None))
        pools = []
        for layer, part in enumerate(parts):
            rows = 1 if part.kind == "mamba" else page_size
            for name, row in (("k", (2, 3)), ("v", (4,))):
                pools.append(PoolSpec(f"{part.id}_{name}", part.id, (layer,), row, "float32", rows))
        return StackPlan(tuple(parts), tuple(pools))


@contextlib.contextmanager
def known(shape: StackShape | None) -> Iterator[None]:
    """While a schedule with this stack is played."""
    if shape is None:
        yield
        return
    grid = shape.grid
    kinds = {
        **build.COMPONENT_KINDS,
        "mamba": lambda spec: MambaComponent(spec.id, grid),
        SINKS: lambda spec: SinkComponent(spec.id),
    }
    ratios = {**build.DEFAULT_RATIOS, SINKS: lambda _: 1}
    unregister = register_stack_strategy(Strategy(shape))
    try:
        with (
            mock.patch.object(build, "COMPONENT_KINDS", kinds),
            mock.patch.object(build, "DEFAULT_RATIOS", ratios),
            mock.patch.object(swa, "CHUNK_TOKENS", shape.chunk_tokens),
        ):
            yield
    finally:
        unregister()


class Rule:
    """Where a prefix may end, by pages, of a cache's tree."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._tree = cache.tree
        sinks = Role(lambda depth, size: range(1))
        self.roles: list[Role] = [
            sinks if isinstance(component, SinkComponent) else role_of(component)
            for component in cache.tree.components
        ]

    def prove(self, key: RadixKey, limit: int | None, found: MatchResult) -> bool:
        """A match ends where it may; whether that is below a tombstone on the device."""
        stop = len(key) if limit is None else min(limit, len(key))
        cut = RadixKey(key.tokens[:stop], None, key.namespace.cache_salt)
        on_device = pages_there(self._tree, cut, device_only=True)
        on_both = pages_there(self._tree, cut, device_only=False)
        size = self._tree.page_size
        device = max(legal_depths(self.roles, on_device, size))
        best = max(legal_depths(self.roles, on_both, size))
        assert (found.device_length, found.best_length) == (device, best), (found, device, best)
        return any(
            not all(have[: device // size])
            for have, component in zip(on_device, self._tree.components, strict=True)
            if component.is_per_page
        )


class Standing:
    """Where a lease stands: its table, and one of its states."""

    def __init__(self, lease: Lease, state: int) -> None:
        self._lease = lease
        self._state = state

    def slots(
        self, component: str = "full", start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        table, index = self._lease.table, self._lease._component_index(component)
        slots = table.slots(index, start, table.num_pages if stop is None else stop)
        assert (slots >= 0).all(), f"{self._lease!r} lacks {component} in [{start}, {stop})"
        return slots

    @property
    def state_slots(self) -> dict[str, int]:
        return dict.fromkeys(map(str, self._lease.state_slots), self._state)


def states_of(lease: Lease) -> list[StatePart]:
    return lease._parts._states if lease._parts is not None else []


class Launch:
    """A run over one chunk that a device goes on with when it has returned: it reads and writes
    when `finish` comes to it, or whoever runs next."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._launched: Launched | None = None
        self._is_committed = False

    def __call__(self, chunk: Chunk) -> int:
        self._launched = self._device.launch(chunk)
        return chunk.stop

    @property
    def ready(self) -> asyncio.Future[None]:
        assert self._launched is not None, "it has run"
        return self._launched.ready

    def finish(self) -> None:
        assert self._launched is not None, "it has run"
        self._device.finish(self._launched)

    def start(self) -> None:
        """Its chunk is about to be committed."""
        self._is_committed = True

    def end(self) -> None:
        """Whoever has launched it is through with it."""
        if self._launched is not None and not self._is_committed:
            self._device.forget(self._launched)


def prove_standing(oracle: ByteOracle, lease: Lease, device: Device) -> None:
    """A lease can go on from what it has computed, and from where it goes back to if that fails;
    and of windows it is promised all that it may take."""
    if lease._parts is not None:
        for window in lease._parts._windows:
            assert window.promised == window.unspent(lease._parts._num_pages), lease
            num_computed = -(-lease.computed // lease._page_size)
            is_at_rest = num_computed == lease.table.num_pages and not lease.is_running
            if is_at_rest and num_computed < lease._parts._num_pages:
                has_pages = window.promised or window.num_left
                assert has_pages, f"{lease!r} may grow, and has no page of a window for that"
    if is_unwritten(lease, device.unwritten):
        return
    depths = [(lease.computed, NO_PAGE)]
    for part in states_of(lease):
        known = {
            part._origin_depth: part._origin,
            part._kept_depth: part._kept,
            part._slot_depth: part._slot,
        }
        safe = part.safe_depth
        depths = [(safe, known[safe])]
        if lease.computed in known:
            depths.append((lease.computed, known[lease.computed]))
        elif lease._is_stranded:  # on what it has taken over; it begins again
            assert safe == 0 < lease.committed == lease.computed, lease
        else:
            assert lease.is_running, f"{lease!r} has no state to go on from"
    for depth, state in depths:
        if depth:
            oracle.verify(Standing(lease, state), lease.key, 0, depth)


def is_unwritten(lease: Lease, unwritten: Mapping[str, set[int]]) -> bool:
    """Whether a device is to write some of what a lease goes on from."""
    states = {part.index: part for part in states_of(lease)}
    for component, ids in zip(lease._controller.tree.components, lease.table.ids, strict=True):
        held = set(ids[: lease.table.num_pages].tolist())
        if component.index in states:
            part = states[component.index]
            held |= {part._slot, part._kept, part._origin}
        if held & unwritten.get(str(component.id), set()):
            return True
    return False


def has_left_behind(lease: Lease) -> bool:
    """Whether own pages of a window have gone home."""
    first, last = lease._own_from, lease.table.num_pages
    return any(
        bool((ids[first:last] == NO_PAGE).any())
        for ids, component in zip(lease.table.ids, lease._controller.tree.components, strict=True)
        if component.index != BASE and component.is_per_page
    )


def is_complete(lease: Any) -> bool:
    """Whether there is a window behind what a lease has just published: one that is committed late
    has gone home already."""
    needed = {
        component.index: component.pages_to_go_on(lease.committed)
        for component in lease._controller.tree.components
        if component.is_per_page
    }
    return all(
        bool((lease.table.ids[index][pages.start : pages.stop] != NO_PAGE).all())
        for index, pages in needed.items()
    )


def may_lack_room(lease: Lease) -> bool:
    """Whether a lease may find no room although no run of it is under way: a run that failed has
    cost it pages beyond its reserve."""
    return bool(states_of(lease)) and len(lease) > lease._admitted_len
