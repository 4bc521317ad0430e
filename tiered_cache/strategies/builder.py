"""The generic builder: a strategy is a list of parts, each of which keeps one kind of state.

A part declares the components for the layers that keep its kind of state, with their pools. What a
layer keeps is what `model.layer_types` says; nothing here depends on a model's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tiered_cache.config.schema import LAYER_TYPES
from tiered_cache.errors import ConfigError, ConfigProblem
from tiered_cache.pools.spec import PoolSpec
from tiered_cache.strategies.base import ComponentSpec, StackPlan, extra_pool_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered_cache.config import ModelConfig
    from tiered_cache.config.schema import StateKind
    from tiered_cache.pools.spec import Sharding
    from tiered_cache.types import ComponentId

Declared = tuple[ComponentSpec, tuple[PoolSpec, ...]]


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of state, and a function of model and page size (tokens) that declares for it."""

    keeps: StateKind
    declare: Callable[[ModelConfig, int], Iterator[Declared]]


class PartsStrategy:
    """Base of the built-in strategies: fits the models whose layers keep what its parts keep.

    The order of the parts is that of the components: the first holds the prefix, also where no
    layer keeps its kind of state, and the extra pools ride in it; of the others, what is evicted
    last comes first.
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[Part, ...]]

    def matches(self, model: ModelConfig) -> bool:
        keeps = {part.keeps for part in self.parts}
        return model.is_described and not self._lacking(model) and keeps >= model.state_kinds

    def plan(self, model: ModelConfig, page_size: int) -> StackPlan:
        """Components and pools.

        Raises:
            ConfigError: the model's layers keep other kinds of state; names them.
        """
        if problems := list(self._misfits(model)):
            raise ConfigError(problems)
        declared = [found for part in self.parts for found in part.declare(model, page_size)]
        components = tuple(component for component, _ in declared)
        own = tuple(pool for _, pools in declared for pool in pools)
        return StackPlan(
            components, pools=own + extra_pool_specs(model, page_size, components[0].id)
        )

    def _lacking(self, model: ModelConfig) -> list[StateKind]:
        """Kinds of state that this strategy is for, and no layer keeps."""
        first, *others = self.parts
        return sorted({part.keeps for part in others or [first]} - model.state_kinds)

    def _misfits(self, model: ModelConfig) -> Iterator[ConfigProblem]:
        keeps = {part.keeps for part in self.parts}
        types = sorted(set(model.layer_types or ("full_attention",)))
        homeless = [name for name in types if not keeps.issuperset(LAYER_TYPES.get(name, (name,)))]
        hint = "take strategy out: the one that fits is found; or register one of your own"
        if homeless:
            message = f"{self.name} does not know {', '.join(homeless)} layers"
            yield ConfigProblem(message, "model.strategy", suggestion=hint)
        for kind in self._lacking(model):
            layers = " or ".join(name for name, kinds in LAYER_TYPES.items() if kind in kinds)
            message = f"{self.name} is for models with {layers} layers, and there is none"
            yield ConfigProblem(message, "model.strategy", suggestion=hint)


def attention_pools(
    model: ModelConfig,
    page_size: int,
    component: ComponentId,
    layers: tuple[int, ...],
    *,
    prefix: str = "",
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> tuple[PoolSpec, ...]:
    """Pools of attention layers, a row per token: keys and values (MHA, GQA, MQA), of which a rank
    holds its share of the heads; or one latent (MLA), of which each holds a copy.

    `num_kv_heads` and `head_dim`: where these layers' are not the model's.
    """

    sharding: Sharding = "replicated" if model.is_latent else "per_rank"

    def pool(name: str, *row_shape: int) -> PoolSpec:
        kept = prefix + name, component, layers, row_shape, model.dtype, page_size, sharding
        return PoolSpec(*kept)

    if model.is_latent:
        rank, rope_dim = model.kv_lora_rank, model.qk_rope_head_dim
        assert rank is not None  # the schema requires both
        assert rope_dim is not None
        return (pool("latent", rank + rope_dim),)
    heads, key_dim = num_kv_heads or model.num_kv_heads, head_dim or model.head_dim
    assert heads is not None  # the schema requires both
    assert key_dim is not None
    return pool("k", heads, key_dim), pool("v", heads, model.v_head_dim or key_dim)
