"""The contract of a strategy: from a model's description to components and pools.

A strategy is a declaration. It makes no tensor, holds no state and decides nothing at run time;
`build` turns what it says into parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tiered_cache.pools.spec import PoolSpec

if TYPE_CHECKING:
    from tiered_cache.config import ExtraPool, ModelConfig
    from tiered_cache.types import ComponentId


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """One component of the tree: its id, and the kind of state whose rules it follows ("full").

    `window`: tokens, the current one included, where these rules are about a window.
    """

    id: ComponentId
    kind: str
    window: int | None = None


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What a model needs. The order of `components` is their dense index.

    Every pool names one of the components; every component has a pool; pool names are unique.
    """

    components: tuple[ComponentSpec, ...]
    pools: tuple[PoolSpec, ...]

    def pools_of(self, component: ComponentId) -> tuple[PoolSpec, ...]:
        """The pools that share the component's page ids."""
        return tuple(pool for pool in self.pools if pool.component == component)


class StackStrategy(Protocol):
    """Implement this, and register it, for a kind of model that is not built in."""

    @property
    def name(self) -> str:
        """What a configuration writes as `model.strategy`."""

    def matches(self, model: ModelConfig) -> bool:
        """Whether this strategy fits the model, when the configuration names none."""

    def plan(self, model: ModelConfig, page_size: int) -> StackPlan:
        """The model's components and pools, for pages of `page_size` tokens."""


def extra_pool_specs(
    model: ModelConfig, page_size: int, component: ComponentId
) -> tuple[PoolSpec, ...]:
    """The configuration's extra pools, riding in `component`: they share its ids and its fate."""
    return tuple(
        PoolSpec(
            name=pool.name,
            component=component,
            layers=_layers(pool, model),
            row_shape=pool.row_shape,
            dtype=pool.dtype,
            rows_per_page=page_size // pool.tokens_per_row,
            sharding=pool.sharding,
        )
        for pool in model.extra_pools
    )


def _layers(pool: ExtraPool, model: ModelConfig) -> tuple[int, ...]:
    if pool.layers is not None:
        return pool.layers
    # After the model's own: a layer-wise load brings a draft's KV when the target's is there.
    return tuple(range(model.num_layers, model.num_layers + (pool.num_layers or 0)))
