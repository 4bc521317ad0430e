"""A model whose layers keep several kinds of state gets a component for each of them."""

from __future__ import annotations

from typing import Any

import pytest

from tiered_cache.build import COMPONENT_KINDS, size_stack
from tiered_cache.config import ModelConfig, load_config
from tiered_cache.errors import ConfigError
from tiered_cache.strategies.base import StackPlan
from tiered_cache.strategies.mamba import MambaStrategy
from tiered_cache.strategies.mamba_swa import MambaSWAStrategy
from tiered_cache.strategies.plain import PlainStrategy
from tiered_cache.strategies.registry import register_stack_strategy, select_strategy
from tiered_cache.strategies.swa import SWAStrategy
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.swa import SWAComponent

HEADS: dict[str, Any] = {"dtype": "bfloat16", "num_kv_heads": 2, "head_dim": 64}
STATES = [
    {"name": "conv", "row_shape": [96, 4], "dtype": "bfloat16"},
    {"name": "temporal", "row_shape": [8, 4, 16], "dtype": "float32", "sharding": "replicated"},
]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SWA: dict[str, Any] = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 512}
MAMBA: dict[str, Any] = {"layer_types": [LINEAR, FULL, LINEAR], "states": STATES}
NO_HEADS: dict[str, Any] = {"num_kv_heads": None, "head_dim": None}
ONLY_WINDOWS: dict[str, Any] = {"layer_types": [SLIDING] * 2, "sliding_window": 512}
ONLY_STATES: dict[str, Any] = {"layer_types": [LINEAR] * 2, "states": STATES, **NO_HEADS}
NOTHING_FULL: dict[str, Any] = {**ONLY_WINDOWS, "layer_types": [SLIDING, LINEAR], "states": STATES}
BOTH: dict[str, Any] = {
    "layer_types": ["hybrid_sliding", "hybrid", LINEAR, SLIDING, "none"],
    "sliding_window": [64, 32],
    "states": STATES,
}


def model(**keys: Any) -> ModelConfig:
    return ModelConfig(**{**HEADS, "num_layers": len(keys.get("layer_types", "ab")), **keys})


def plan(page_size: int = 16, **keys: Any) -> StackPlan:
    section = model(**keys)
    return select_strategy(section).plan(section, page_size)


def components(found: StackPlan) -> list[tuple[str, str, int | None]]:
    return [(part.id, part.kind, part.window) for part in found.components]


def pools(found: StackPlan) -> dict[str, tuple[Any, ...]]:
    return {
        pool.name: (pool.component, pool.layers, pool.row_shape, pool.rows_per_page)
        for pool in found.pools
    }


# --- What is declared ---------------------------------------------------------------------------


def test_layers_with_a_window_have_a_component_of_their_own() -> None:
    """Keys and values as of full attention, a row per token."""
    found = plan(**SWA)
    assert components(found) == [("full", "full", None), ("swa", "swa", 512)]
    assert pools(found) == {
        "k": ("full", (1,), (2, 64), 16),
        "v": ("full", (1,), (2, 64), 16),
        "swa.k": ("swa", (0, 2), (2, 64), 16),
        "swa.v": ("swa", (0, 2), (2, 64), 16),
    }


def test_each_window_has_a_component_the_largest_first() -> None:
    """What is evicted later comes first; the layers of one window share it."""
    windows = [128, 4096, 128]
    found = plan(layer_types=[SLIDING, SLIDING, FULL, SLIDING], sliding_window=windows)
    assert components(found)[1:] == [("swa.4096", "swa", 4096), ("swa.128", "swa", 128)]
    assert pools(found)["swa.4096.k"][1] == (1,)
    assert pools(found)["swa.128.v"][1] == (0, 3)


def test_equal_windows_of_a_list_are_one() -> None:
    """The number is what counts, not how it was written."""
    assert plan(**{**SWA, "sliding_window": [512, 512]}) == plan(**SWA)
    assert plan(**{**SWA, "sliding_window": [512]}) == plan(**SWA)


def test_heads_of_sliding_layers_may_be_others() -> None:
    """Gemma 4 and others: more of them, or narrower; values follow their keys."""
    found = pools(plan(**SWA, sliding_num_kv_heads=8, sliding_head_dim=32))
    assert (found["k"][2], found["v"][2]) == ((2, 64), (2, 64))
    assert (found["swa.k"][2], found["swa.v"][2]) == ((8, 32), (8, 32))
    found = pools(plan(**SWA, v_head_dim=16, sliding_num_kv_heads=4))
    assert (found["swa.k"][2], found["swa.v"][2]) == ((4, 64), (4, 16))


def test_recurrent_layers_have_one_row_per_slot() -> None:
    """Whatever the page size; a pool for each state, with its own type."""
    found = plan(page_size=64, **MAMBA)
    assert components(found) == [("full", "full", None), ("mamba", "mamba", None)]
    assert pools(found) == {
        "k": ("full", (1,), (2, 64), 64),
        "v": ("full", (1,), (2, 64), 64),
        "conv": ("mamba", (0, 2), (96, 4), 1),
        "temporal": ("mamba", (0, 2), (8, 4, 16), 1),
    }
    conv, temporal = found.pools[2:]
    assert (conv.dtype, conv.sharding) == ("bfloat16", "per_rank")
    assert (temporal.dtype, temporal.sharding) == ("float32", "replicated")


def test_a_layer_may_keep_two_kinds_or_none() -> None:
    """The union: each layer stands in the pools of all that it keeps."""
    found = plan(**BOTH)
    ids = [part.id for part in found.components]
    assert ids == ["full", "swa.64", "swa.32", "mamba"]
    layers = {name: pool[1] for name, pool in pools(found).items() if name[-2:] not in ("v", ".v")}
    assert layers == {
        "k": (1,),
        "swa.64.k": (0,),
        "swa.32.k": (3,),
        "conv": (0, 1, 2),
        "temporal": (0, 1, 2),
    }


@pytest.mark.parametrize(
    ("keys", "kind"), [(ONLY_WINDOWS, "swa"), (ONLY_STATES, "mamba"), (NOTHING_FULL, "mamba")]
)
def test_without_full_attention_a_byte_says_that_a_page_is_there(
    keys: dict[str, Any], kind: str
) -> None:
    """The prefix is held by pages of `full` all the same; what layers keep is elsewhere."""
    found = plan(**keys)
    assert components(found)[0] == ("full", "prefix", None)
    assert components(found)[-1][1] == kind
    assert pools(found)["prefix"] == ("full", (0,), (1,), 1)
    assert found.pools[0].page_bytes == 1
    assert found.pools[0].sharding == "replicated"
    assert not {"k", "v", "latent"} & {pool.name for pool in found.pools}


@pytest.mark.parametrize(("keys", "ratio"), [(ONLY_WINDOWS, 0.5), (ONLY_STATES, 0.1)])
def test_a_byte_is_no_measure_for_the_others(keys: dict[str, Any], ratio: float) -> None:
    """Else there would be one state for as many pages as it has bytes."""
    section = model(**keys).model_dump(exclude_unset=True, exclude_none=True)
    tiers = {"device": {"tokens": 1600}, "host": {"tokens": 1600}}
    sizing = size_stack(load_config({"model": section, **tiers}, environ={}))
    for pages in (sizing.num_pages, sizing.host_pages):
        assert pages is not None
        assert [pages[part.id] for part in sizing.stack.components] == [100, 100 * ratio]


def test_latent_attention_goes_with_states() -> None:
    """Kimi-Linear: one latent per token on the attention layers."""
    latent = {"num_kv_heads": None, "head_dim": None, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
    found = plan(**MAMBA, **latent)
    assert pools(found)["latent"] == ("full", (1,), (20,), 16)
    assert found.pools[0].sharding == "replicated"


def test_extra_pools_ride_in_the_first_component() -> None:
    """A draft's KV is needed for all tokens."""
    draft = {"name": "draft", "num_layers": 1, "row_shape": [4], "dtype": "int8"}
    assert pools(plan(**SWA, extra_pools=[draft]))["draft"] == ("full", (3,), (4,), 16)


def test_kinds_become_components_of_the_tree() -> None:
    """By kind; a window is the component's."""
    made = [COMPONENT_KINDS[part.kind](part) for part in plan(**BOTH).components]
    assert [part.id for part in made] == ["full", "swa.64", "swa.32", "mamba"]
    assert [type(part) for part in made[1:]] == [SWAComponent, SWAComponent, MambaComponent]
    assert isinstance(made[1], SWAComponent)
    assert made[1].window == 64


# --- Which strategy -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, PlainStrategy),
        ({"layer_types": [FULL, "none"]}, PlainStrategy),
        (SWA, SWAStrategy),
        (MAMBA, MambaStrategy),
        (BOTH, MambaSWAStrategy),
        (ONLY_WINDOWS, SWAStrategy),
        (ONLY_STATES, MambaStrategy),
        (NOTHING_FULL, MambaSWAStrategy),
    ],
)
def test_the_strategy_follows_from_the_layers(keys: dict[str, Any], expected: type) -> None:
    """It need not be named; naming it changes nothing."""
    found = select_strategy(model(**keys))
    assert type(found) is expected
    assert select_strategy(model(**keys, strategy=found.name)) is found


@pytest.mark.parametrize(
    ("keys", "strategy", "message"),
    [
        (SWA, "plain", "plain does not know sliding_attention layers"),
        (BOTH, "swa", "swa does not know hybrid, hybrid_sliding, linear_attention layers"),
        (SWA, "mamba", "mamba does not know sliding_attention layers"),
        ({}, "swa", "swa is for models with sliding_attention or hybrid_sliding layers"),
        (SWA, "mamba_swa", "mamba_swa is for models with linear_attention or hybrid"),
        (ONLY_WINDOWS, "plain", "plain does not know sliding_attention layers"),
        (ONLY_STATES, "swa", "swa does not know linear_attention layers"),
    ],
)
def test_a_strategy_that_does_not_fit_names_the_layers(
    keys: dict[str, Any], strategy: str, message: str
) -> None:
    """Half of a model's state would be worse than none."""
    section = model(**keys).model_dump(exclude_unset=True) | {"strategy": strategy}
    with pytest.raises(ConfigError, match=f"model.strategy: {message}.*register one of your own"):
        size_stack(load_config({"model": section}, environ={}))


class Chunked(PlainStrategy):
    """A user's: chunks are kept whole, as full attention."""

    name = "chunked"

    def plan(self, model: ModelConfig, page_size: int) -> StackPlan:
        section = model.model_copy(update={"layer_types": None})
        return super().plan(section, page_size)


def test_a_users_strategy_may_know_further_layers() -> None:
    """What nobody else knows is for the one that is named."""
    unregister = register_stack_strategy(Chunked())
    try:
        section = {**HEADS, "num_layers": 2, "layer_types": ["chunked_attention", FULL]}
        with pytest.raises(ConfigError, match=r"layer_types\[0\]: no strategy knows such a layer"):
            load_config({"model": section}, environ={})
        given = {"model": {**section, "strategy": "chunked"}, "device": {"tokens": 64}}
        sizing = size_stack(load_config(given, environ={}))
        assert sizing.stack.pools[0].layers == (0, 1)
    finally:
        unregister()
