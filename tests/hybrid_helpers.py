"""A small cache of a model with windows and states, by a strategy of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final
from unittest import mock

from tests.lease_helpers import P, Rig, rig
from tests.storage_helpers import Store, three_tiers
from tiered_cache import build
from tiered_cache.pools.spec import PoolSpec
from tiered_cache.strategies.base import ComponentSpec, StackPlan
from tiered_cache.strategies.registry import register_stack_strategy
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.swa import SWAComponent
from tiered_cache.types import ComponentId

WINDOW: Final = 10
GRID: Final = 8

KINDS: Final[dict[str, Any]] = {
    "full": lambda spec: FullComponent(spec.id),
    "swa": lambda spec: SWAComponent(spec.id, spec.window),
    "mamba": lambda spec: MambaComponent(spec.id, GRID),
}

STACKS: Final = {
    "swa": ("full", "swa"),
    "mamba": ("full", "mamba"),
    "mamba_swa": ("full", "swa", "mamba"),
}


RATIO: Final = {
    "swa": {"swa": 1.0},
    "mamba": {"mamba": 1.0},
    "mamba_swa": {"swa": 1.0, "mamba": 1.0},
}


class Hybrid:
    """A layer of full attention, one with a window, one with a state, as far as there are any."""

    def __init__(self, stack: str, window: int = WINDOW) -> None:
        self.name = f"test_{stack}"
        self._kinds = STACKS[stack]
        self._window = window

    def matches(self, model: Any) -> bool:
        return False

    def plan(self, model: Any, page_size: int) -> StackPlan:
        pools = []
        for layer, kind in enumerate(self._kinds):
            rows = 1 if kind == "mamba" else page_size
            pools.append(
                PoolSpec(f"{kind}_a", ComponentId(kind), (layer,), (2, 3), "float32", rows)
            )
            pools.append(PoolSpec(f"{kind}_b", ComponentId(kind), (layer,), (4,), "float32", rows))
        components = tuple(
            ComponentSpec(ComponentId(kind), kind, self._window if kind == "swa" else None)
            for kind in self._kinds
        )
        return StackPlan(components, tuple(pools))


@contextlib.contextmanager
def known(stack: str, window: int = WINDOW) -> Iterator[None]:
    unregister = register_stack_strategy(Hybrid(stack, window))
    try:
        with mock.patch.object(build, "COMPONENT_KINDS", KINDS):
            yield
    finally:
        unregister()


@contextlib.asynccontextmanager
async def hybrid_rig(
    stack: str, pages: int = 16, *, window: int = WINDOW, **sections: Any
) -> AsyncIterator[Rig]:
    with known(stack, window):
        sections.setdefault("device", {"tokens": pages * P, "ratio": RATIO[stack]})
        model = {"dtype": "float32", "num_layers": 3, "num_kv_heads": 1, "head_dim": 2}
        async with rig(pages, model={**model, "strategy": f"test_{stack}"}, **sections) as made:
            yield made


@contextlib.asynccontextmanager
async def hybrid_tiers(
    stack: str,
    pages: int = 64,
    rows: int = 64,
    *,
    window: int = WINDOW,
    host: Any = None,
    **sections: Any,
) -> AsyncIterator[tuple[Rig, Store]]:
    """Three tiers, with as many windows and states as pages."""
    size = sections.get("page_size", P)
    with known(stack, window):
        sections.setdefault("device", {"tokens": pages * size, "ratio": RATIO[stack]})
        model = {"id": "test/hybrid", "revision": "1", "dtype": "float32", "num_layers": 3}
        model |= {"num_kv_heads": 1, "head_dim": 2, "strategy": f"test_{stack}"}
        host = {"tokens": rows * size, "ratio": RATIO[stack], **(host or {})}
        async with three_tiers(pages, rows, model=model, host=host, **sections) as made:
            yield made


def objects(r: Rig, store: Store, component: str, tokens: Any) -> list[Any]:
    """Per page of a prompt, the object that storage would keep of a component."""
    storage = r.cache._controller.storage
    assert storage is not None
    record = next(made for made in storage.io.formats if str(made.component) == component)
    return [record.object_key(key) for key in store.pages_of(tokens)]


def kept(r: Rig, store: Store, component: str, tokens: Any) -> str:
    """Which pages of a prompt storage has of a component: S or -, root first."""
    wanted = objects(r, store, component, tokens)
    return "".join("S" if key in store.rows else "-" for key in wanted)


def lose(r: Rig, store: Store, component: str, tokens: Any, *pages: int) -> None:
    """Storage has these pages of a component no more."""
    wanted = objects(r, store, component, tokens)
    for page in pages:
        store.rows.pop(wanted[page], None)


def parts_of(stack: str) -> tuple[str, ...]:
    """The components but the base."""
    return STACKS[stack][1:]


def usable(
    r: Rig, store: Store, stack: str, tokens: Any, *, limit: int | None = None, window: int = WINDOW
) -> int:
    """The longest prefix that storage alone can give back, by the rules for tokens."""
    size = store.page_size
    limit = len(tokens) if limit is None else limit
    there = {name: kept(r, store, name, tokens) for name in STACKS[stack]}
    for depth in range(limit - limit % size, 0, -size):
        seen = range(max(0, depth - window), depth)
        if (
            "-" not in there["full"][: depth // size]
            and all(there["swa"][token // size] == "S" for token in seen if "swa" in there)
            and ("mamba" not in there or there["mamba"][depth // size - 1] == "S")
        ):
            return depth
    return 0


def wipe_parts(r: Rig) -> None:
    """The host keeps the base and nothing else, the device nothing."""
    controller = r.cache._controller
    assert controller.host_pages is not None
    everything = [1 << 20] * len(controller.tree.components)
    controller.accounts.evict(everything)
    controller.host_pages.evict([0, *everything[1:]])


__all__ = [
    "GRID",
    "STACKS",
    "WINDOW",
    "P",
    "hybrid_rig",
    "hybrid_tiers",
    "kept",
    "known",
    "lose",
    "objects",
    "parts_of",
    "usable",
    "wipe_parts",
]
