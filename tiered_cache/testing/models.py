"""Tiny models to run the cache on.

`tiny_model(kind)` gives an architecture with random weights: what a strategy has to carry, without
its cost. Real ones are in `chat_models`.

Refuses to know: the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TinyKind = Literal[
    "llama",
    "qwen3",
    "deepseek_v3",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gpt_oss",
    "cohere2",
    "llama4",
    "qwen3_next",
    "qwen3_5",
    "olmo_hybrid",
    "kimi_linear",
    "bamba",
    "falcon_h1",
    "granite_hybrid",
    "nemotron_h",
    "zamba2",
    "mamba",
    "mamba2",
    "lfm2",
    "jamba",
]
TINY_KINDS: Final[tuple[TinyKind, ...]] = get_args(TinyKind)

SLOWER: Final = 3.0
"""Logarithm of how much longer a tiny model's recurrent states remember than transformers would
have it at the start of a training: there, some are gone after a token."""


def tiny_model(
    kind: TinyKind, dtype: torch.dtype = torch.float32, *, num_layers: int = 3, seed: int = 0
) -> PreTrainedModel:
    """A model of a few hundred kilobytes with random weights (vocabulary 256): plumbing, not sense.

    `llama` and `qwen3` have grouped KV heads (4 query heads, 2 KV heads); `deepseek_v3` has
    multi-head latent attention and a mixture of experts. The others have sliding windows of 24
    tokens (`llama4`: chunks of 32) or recurrent states: on every other layer, usually, and on all
    in `mistral`, `falcon_h1`, `mamba` and `mamba2`. Weights are ten times larger than transformers
    would draw them, and recurrent states fade more slowly: attention is then far from uniform, old
    tokens count, and one wrong byte of state shows in the logits.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _tiny_architecture(kind, num_layers)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data -= SLOWER
    for_inference(model, dtype)
    return model


def for_inference(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts the parameters only.

    Buffers (rotary frequencies, router biases) stay float32, as when transformers loads a model.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    model.train(False)


def _tiny_architecture(kind: TinyKind, num_layers: int) -> PreTrainedModel:
    import transformers  # an extra

    if kind not in _TINY:
        raise ValueError(f"no tiny model {kind!r}; there are {', '.join(_TINY)}")
    name, own = _TINY[kind]
    settings = {**_TINY_COMMON, "num_hidden_layers": num_layers, **own}
    for key in ("layer_types", "layers_block_type"):
        if key in own:
            settings[key] = [own[key][at % len(own[key])] for at in range(num_layers)]
    # Gemma 3, Llama 4 and Qwen3.5 are multimodal: their language model has a config of its own.
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(
        transformers, f"{name}Config"
    )
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config(**settings))
    return model


_TINY_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_LINEAR_FULL: Final = ("linear_attention", "full_attention")
_SLIDING_FULL: Final = ("sliding_attention", "full_attention")
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2}
_GATED_DELTA: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2: Final = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_TINY: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", {"head_dim": 16}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
        },
    ),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": 24}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 24, "layer_types": _SLIDING_FULL}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 24, "layer_types": _SLIDING_FULL}),
    "gemma3n": (
        "Gemma3n",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": _SLIDING_FULL,
            "num_kv_shared_layers": 1,
            "vocab_size_per_layer_input": 256,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": None,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 24,
            "layer_types": ("sliding_attention", "full_attention", "full_attention"),
            "vocab_size_per_layer_input": 256,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": _SLIDING_FULL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "cohere2": (
        "Cohere2",
        {"sliding_window": 24, "layer_types": _SLIDING_FULL, "logit_scale": 1.0},
    ),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "attention_chunk_size": 32,
            "layer_types": ("chunked_attention", "full_attention"),
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "moe_layers": [],
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 16,
            "layer_types": _LINEAR_FULL,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            **_GATED_DELTA,
            **_EXPERTS,
        },
    ),
    "qwen3_5": ("Qwen3_5", {"head_dim": 16, "layer_types": _LINEAR_FULL, **_GATED_DELTA}),
    "olmo_hybrid": (
        "OlmoHybrid",
        {"layer_types": _LINEAR_FULL, "pad_token_id": 0, **_GATED_DELTA, "linear_num_key_heads": 4},
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            "layer_types": _LINEAR_FULL,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 32,
            "pad_token_id": 0,
        },
    ),
    "bamba": ("Bamba", {"attn_layer_indices": [1], **_MAMBA2}),
    "falcon_h1": ("FalconH1", {"head_dim": 16, "mamba_d_ssm": 128, **_MAMBA2}),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {
            "layer_types": ("mamba", "attention"),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            **_MAMBA2,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ("mamba", "attention", "moe"),
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            "layers_block_type": ("mamba", "hybrid"),
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
        },
    ),
    "mamba": ("Mamba", {"state_size": 16}),
    "mamba2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    ),
    "lfm2": ("Lfm2", {"layer_types": ("conv", "full_attention")}),
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
            **_EXPERTS,
        },
    ),
}
"""By kind: how transformers calls it, and what differs from `_TINY_COMMON`. Layer types repeat, up
to the number of layers."""
