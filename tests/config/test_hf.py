"""A model section is filled from a Hugging Face config object, or refused for what is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiered_cache.config import model_from_hf
from tiered_cache.errors import ConfigError

LLAMA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "dtype": "bfloat16",
}
MLA: dict[str, Any] = {**LLAMA, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8}


def test_grouped_query_attention() -> None:
    """Head size follows from the hidden size; the number of KV heads is taken as it is."""
    model = model_from_hf(SimpleNamespace(**LLAMA), id="a/b", revision="r")
    assert (model.num_layers, model.num_kv_heads, model.head_dim) == (2, 2, 8)
    assert (model.id, model.revision, model.dtype, model.is_latent) == (
        "a/b",
        "r",
        "bfloat16",
        False,
    )


def test_an_own_head_size_wins() -> None:
    """Qwen3 and others do not derive it from the hidden size."""
    layers = ["full_attention", "full_attention"]
    config = SimpleNamespace(**LLAMA, head_dim=32, layer_types=layers, sliding_window=None)
    assert model_from_hf(config).head_dim == 32


def test_multi_head_attention_has_as_many_kv_heads() -> None:
    """A config without KV heads means one per attention head; values may have their own size."""
    config = {**LLAMA, "num_key_value_heads": None, "head_dim": 8, "v_head_dim": 4}
    model = model_from_hf(SimpleNamespace(**config))
    assert (model.num_kv_heads, model.v_head_dim) == (8, 4)


def test_latent_attention() -> None:
    """MLA is described by its latent, and by nothing else."""
    model = model_from_hf(SimpleNamespace(**MLA))
    assert (model.kv_lora_rank, model.qk_rope_head_dim) == (16, 4)
    assert (model.num_kv_heads, model.head_dim, model.v_head_dim) == (None, None, None)


def test_dtype_can_be_given_by_name_or_as_torch_has_it() -> None:
    """What the KV is kept in may differ from the config's word, or be absent there."""
    torch = pytest.importorskip("torch")
    assert model_from_hf(SimpleNamespace(**LLAMA), dtype=torch.float32).dtype == "float32"
    config = SimpleNamespace(**{**LLAMA, "dtype": torch.float16})
    assert model_from_hf(config).dtype == "float16"
    with pytest.raises(ConfigError, match=r"model\.dtype: is required"):
        model_from_hf(SimpleNamespace(**{**LLAMA, "dtype": None}))


def test_the_text_part_of_a_multimodal_config_counts() -> None:
    """Such a config says itself where the language model is."""
    text = SimpleNamespace(**LLAMA)
    assert model_from_hf(SimpleNamespace(get_text_config=lambda decoder: text)).num_layers == 2


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "states are not known"),
        ({"layer_types": ["hybrid", "hybrid"]}, "states are not known"),
        ({"layer_types": ["indexed_attention"] * 2}, "type indexed_attention"),
        ({"layer_types": ["no_such", "linear_attention"]}, "type no_such"),
        ({"index_topk": 2048}, "sparse-attention indexer"),
        ({"state_size": 16}, "Mamba"),
        ({"num_kv_shared_layers": 15}, "share another layer's KV"),
        ({"kv_sharing_modes": ["store", "reuse"]}, "share another layer's KV"),
        (
            {"per_layer_config": [SimpleNamespace(head_dim=8), SimpleNamespace(head_dim=16)]},
            "differ from layer to layer",
        ),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_other_kinds_of_state_are_refused(extra: dict[str, Any], words: str) -> None:
    """Better no cache than one that restores half of a model's state."""
    with pytest.raises(ConfigError, match=words):
        model_from_hf(SimpleNamespace(**LLAMA, **extra))


def test_windows_and_chunks() -> None:
    """Each layer's window in tokens, from wherever its kind says so; a chunk is a window."""
    config = {
        **LLAMA,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "chunked_attention", "full_attention"],
        "sliding_window": 4096,
        "attention_chunk_size": 8192,
    }
    model = model_from_hf(SimpleNamespace(**config))
    assert model.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    assert model.sliding_window == (4096, 8192)
    of_layers = [
        SimpleNamespace(sliding_window=16 * at, attention_chunk_size=8) for at in (1, 2, 3)
    ]
    model = model_from_hf(SimpleNamespace(**config, per_layer_config=of_layers))
    assert model.sliding_window == (16, 8)


@pytest.mark.parametrize(
    "extra",
    [
        {"sliding_window": 4096},
        {"attention_chunk_size": 8192},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4096},
    ],
)
def test_windows_on_all_layers_are_kept_as_full_attention(extra: dict[str, Any]) -> None:
    """Something has to hold the prefix. It costs memory, and is right."""
    assert model_from_hf(SimpleNamespace(**LLAMA, **extra)) == model_from_hf(
        SimpleNamespace(**LLAMA)
    )


def test_states_and_layers_without_any() -> None:
    """Words of single models are understood; what a recurrence sums up is float32."""
    sizes = {
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 3,
    }
    types = ["mamba", "attention", "moe", "mlp"]
    config = {**LLAMA, **sizes, "num_hidden_layers": 4, "layer_types": types}
    model = model_from_hf(SimpleNamespace(**config))
    assert model.layer_types == ("linear_attention", "full_attention", "none", "none")
    assert [(s.name, s.row_shape, s.dtype) for s in model.states] == [
        ("conv", (96, 3), "bfloat16"),
        ("recurrent", (8, 4, 16), "float32"),
    ]
    with pytest.raises(ConfigError, match="states are not known"):
        model_from_hf(SimpleNamespace(**{**config, "conv_kernel": "4"}))


def test_missing_numbers_are_named() -> None:
    """The error names the config class and the key."""
    with pytest.raises(ConfigError, match=r"SimpleNamespace: model\.num_layers: is required"):
        model_from_hf(SimpleNamespace(dtype="float32", num_key_value_heads=1, head_dim=4))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_attention_heads": 0}, "model.head_dim"),
        ({"num_attention_heads": -8}, "model.head_dim"),
        ({"hidden_size": 10**400}, "model.head_dim"),
        ({"hidden_size": 1.5}, "model.head_dim"),
        ({"num_hidden_layers": "x"}, "model.num_layers"),
        ({"layer_types": 5}, "model"),
        ({"layer_types": [["full_attention"], 5, None]}, "model"),
        ({"dtype": object()}, "model.dtype"),
        ({"_name_or_path": 5}, "model.id"),
    ],
)
def test_numbers_that_no_model_has_are_named(change: dict[str, Any], key: str) -> None:
    """Zero heads, huge sizes, other types: no error but the library's."""
    with pytest.raises(ConfigError) as caught:
        model_from_hf(SimpleNamespace(**{**LLAMA, **change}))
    assert key in {problem.key for problem in caught.value.problems}


REAL = [
    ("LlamaConfig", {}, None),
    ("Qwen3Config", {}, None),
    ("DeepseekV3Config", {}, None),
    ("MistralConfig", {}, None),
    ("Gemma2Config", {}, None),
    ("GptOssConfig", {}, None),
    ("Llama4TextConfig", {}, None),
    ("Gemma4TextConfig", {}, "differ from layer to layer"),
    ("Qwen3NextConfig", {}, None),
    ("BambaConfig", {"attn_layer_indices": [9]}, None),
    ("FalconH1Config", {}, None),
    ("Zamba2Config", {}, None),
    ("JambaConfig", {}, None),
    ("Lfm2Config", {}, None),
    ("Mamba2Config", {}, "are not known"),
    ("DeepseekV32Config", {}, "indexed_attention"),
    ("T5Config", {}, "encoder-decoder"),
]


@pytest.mark.parametrize(("name", "arguments", "refusal"), REAL)
def test_real_configs(name: str, arguments: dict[str, Any], refusal: str | None) -> None:
    """The classes of transformers themselves are taken or refused, none slips through."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**arguments)
    if refusal is None:
        assert model_from_hf(config, dtype="float32").num_layers == config.num_hidden_layers
    else:
        with pytest.raises(ConfigError, match=refusal):
            model_from_hf(config, dtype="float32")
