"""Full attention on every layer: keys and values (MHA, GQA, MQA), or one latent per token (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered_cache.pools.spec import PoolSpec
from tiered_cache.strategies.base import ComponentSpec, StackPlan, extra_pool_specs
from tiered_cache.types import ComponentId

if TYPE_CHECKING:
    from tiered_cache.config import ModelConfig

FULL: Final = ComponentId("full")


class PlainStrategy:
    """One component, `full`. A rank holds its share of the heads, but a copy of the latents."""

    name = "plain"

    def matches(self, model: ModelConfig) -> bool:
        heads = model.num_kv_heads is not None and model.head_dim is not None
        return heads or model.is_latent

    def plan(self, model: ModelConfig, page_size: int) -> StackPlan:
        own = _latent(model, page_size) if model.is_latent else _keys_values(model, page_size)
        return StackPlan(
            components=(ComponentSpec(FULL, kind="full"),),
            pools=own + extra_pool_specs(model, page_size, FULL),
        )


def _keys_values(model: ModelConfig, page_size: int) -> tuple[PoolSpec, ...]:
    heads, key_dim = model.num_kv_heads, model.head_dim
    assert heads is not None  # the schema requires both
    assert key_dim is not None
    layers = tuple(range(model.num_layers))
    return (
        PoolSpec("k", FULL, layers, (heads, key_dim), model.dtype, page_size),
        PoolSpec("v", FULL, layers, (heads, model.v_head_dim or key_dim), model.dtype, page_size),
    )


def _latent(model: ModelConfig, page_size: int) -> tuple[PoolSpec, ...]:
    rank, rope_dim = model.kv_lora_rank, model.qk_rope_head_dim
    assert rank is not None  # the schema requires both
    assert rope_dim is not None
    layers = tuple(range(model.num_layers))
    return (
        PoolSpec("latent", FULL, layers, (rank + rope_dim,), model.dtype, page_size, "replicated"),
    )
