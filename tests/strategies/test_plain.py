"""A model with full attention everywhere needs one component, with keys and values or latents."""

from __future__ import annotations

from typing import Any

from tiered_cache.config import ModelConfig
from tiered_cache.strategies.plain import PlainStrategy

HEADS: dict[str, Any] = {"dtype": "bfloat16", "num_layers": 3, "num_kv_heads": 2, "head_dim": 64}
LATENT: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def pools(page_size: int = 16, **model: Any) -> dict[str, Any]:
    plan = PlainStrategy().plan(ModelConfig(**model), page_size)
    assert [(component.id, component.kind) for component in plan.components] == [("full", "full")]
    assert plan.pools_of(plan.components[0].id) == plan.pools
    return {pool.name: pool for pool in plan.pools}


def test_grouped_query_attention_has_keys_and_values() -> None:
    """One row per token, this rank's heads, on every layer."""
    found = pools(**HEADS)
    assert list(found) == ["k", "v"]
    assert found["k"].row_shape == found["v"].row_shape == (2, 64)
    assert (found["k"].layers, found["k"].rows_per_page) == ((0, 1, 2), 16)
    assert (found["k"].dtype, found["k"].sharding) == ("bfloat16", "per_rank")


def test_values_may_have_another_size() -> None:
    """`v_head_dim` is the values' own."""
    found = pools(**HEADS, v_head_dim=32)
    assert (found["k"].row_shape, found["v"].row_shape) == ((2, 64), (2, 32))


def test_latent_attention_has_one_vector_on_every_rank() -> None:
    """The compressed KV and the rotary key, side by side, not split over ranks."""
    found = pools(**LATENT)
    assert list(found) == ["latent"]
    assert (found["latent"].row_shape, found["latent"].sharding) == ((576,), "replicated")


def test_extra_pools_ride_in_the_component() -> None:
    """Numbered on after the model's layers or as written; fewer rows when compressed."""
    extra = [
        {"name": "draft", "num_layers": 2, "row_shape": [4], "dtype": "float16"},
        {
            "name": "index",
            "layers": [0, 2],
            "row_shape": [132],
            "dtype": "uint8",
            "tokens_per_row": 4,
            "sharding": "replicated",
        },
    ]
    found = pools(**HEADS, extra_pools=extra)
    assert list(found) == ["k", "v", "draft", "index"]
    assert (found["draft"].layers, found["draft"].rows_per_page) == ((3, 4), 16)
    assert (found["index"].layers, found["index"].rows_per_page) == ((0, 2), 4)
    assert (found["index"].sharding, found["index"].dtype) == ("replicated", "uint8")
    assert {pool.component for pool in found.values()} == {"full"}
