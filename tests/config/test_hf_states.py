"""What a Hugging Face config comes to is what its model really keeps: asked of tiny models."""

from __future__ import annotations

from typing import Any

import pytest

from tiered_cache.config import model_from_hf
from tiered_cache.strategies.registry import select_strategy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_TOKENS = 5
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma3TextConfig": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "head_dim": 8,
    },
    "Gemma4TextConfig": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 64,
    },
    "BambaConfig": {**MAMBA2, "attn_layer_indices": [1]},
    "FalconH1Config": {**MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    "NemotronHConfig": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "head_dim": 16,
    },
    "JambaConfig": {
        "num_experts": 2,
        "mamba_d_state": 16,
        "mamba_dt_rank": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "Qwen3NextConfig": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 8},
    "Qwen3_5TextConfig": DELTA,
    "OlmoHybridConfig": {**DELTA, "linear_num_value_heads": 2},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
}


@pytest.mark.filterwarnings("ignore")  # of kernels that are not installed
@pytest.mark.parametrize("name", MODELS)
def test_pools_have_the_shapes_of_the_models_cache(name: str) -> None:
    """Layer by layer: which kinds of state, how many heads, which types."""
    hf_config = getattr(transformers, name)(**{**TINY, **MODELS[name]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).eval()
    cache = transformers.DynamicCache(config=hf_config)
    with torch.inference_mode():
        model(input_ids=torch.arange(3, 3 + NUM_TOKENS)[None], cache=cache, use_cache=True)

    section = model_from_hf(hf_config, dtype="bfloat16")
    plan = select_strategy(section).plan(section, page_size=16)
    assert len(cache.layers) == section.num_layers
    for at, layer in enumerate(cache.layers):
        pools = {
            pool.name.rpartition(".")[2]: (pool.row_shape, pool.dtype)
            for pool in plan.pools
            if at in pool.layers
        }
        assert pools == kept(layer)
    windows = [part.window for part in plan.components if part.window is not None]
    assert windows == ([hf_config.sliding_window] if "sliding_window" in MODELS[name] else [])


def kept(layer: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Row shapes and types of all that a layer of a transformers cache holds for one sequence."""
    found = {}
    for name, tensor in (("k", layer.keys), ("v", layer.values)) if has_keys(layer) else ():
        found[name] = ((tensor.shape[1], tensor.shape[3]), tensor.dtype)
    for name, states in (("conv", "conv_states"), ("temporal", "recurrent_states")):
        for tensor in getattr(layer, states, {}).values():
            if tensor is not None:
                found[name] = (tuple(tensor.shape[1:]), tensor.dtype)
    return {
        name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in found.items()
    }


def has_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None
