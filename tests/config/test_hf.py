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
        ({"layer_types": ["full_attention", "chunked_attention"]}, "sliding_window: is required"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window: is required"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "states: is required"),
        ({"layer_types": ["linear_attention"] * 2}, "states: is required"),
        (
            {"layer_types": ["mlp", "full_attention", "none"]},
            "names 3 layers, where num_layers is 2",
        ),
        ({"layer_types": ["indexed_attention"]}, "type indexed_attention"),
        ({"index_topk": 2048}, "sparse-attention indexer"),
        ({"state_size": 16}, "Mamba"),
        ({"num_kv_shared_layers": 15}, "no layer keeps anything"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_other_kinds_of_state_are_refused(extra: dict[str, Any], words: str) -> None:
    """Better no cache than one that restores half of a model's state."""
    with pytest.raises(ConfigError, match=words):
        model_from_hf(SimpleNamespace(**LLAMA, **extra))


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


def test_windows_and_the_layers_that_have_them() -> None:
    """As the config names them; of layers that use another layer's KV nothing is kept."""
    layers = ["sliding_attention", "full_attention"] * 3
    given = {**LLAMA, "num_hidden_layers": 6, "layer_types": layers, "sliding_window": 512}
    model = model_from_hf(SimpleNamespace(**given))
    assert (model.layers_with("full"), model.windows) == ((1, 3, 5), {512: (0, 2, 4)})
    model = model_from_hf(SimpleNamespace(**given, num_kv_shared_layers=3))
    assert (model.layers_with("full"), model.windows) == ((1,), {512: (0, 2)})


def test_layers_with_windows_of_their_own() -> None:
    """A config that differs from layer to layer is asked layer by layer."""
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    each = [SimpleNamespace(**LLAMA, sliding_window=window) for window in (64, None, 128)]
    config = SimpleNamespace(
        **{**LLAMA, "num_hidden_layers": 3},
        layer_types=layers,
        is_heterogeneous=True,
        per_layer_config=each,
    )
    assert model_from_hf(config).windows == {128: (2,), 64: (0,)}
    each[0].head_dim = each[2].head_dim = 4
    each[1].num_key_value_heads = 8
    model = model_from_hf(config)
    assert (model.num_kv_heads, model.head_dim) == (8, 8)
    assert (model.sliding_num_kv_heads, model.sliding_head_dim) == (2, 4)
    each[0].head_dim = 16
    with pytest.raises(ConfigError, match="layers that differ in head_dim are not supported yet"):
        model_from_hf(config)


def test_layers_that_differ_without_types_are_refused() -> None:
    """Nobody says which of them sees what."""
    with pytest.raises(ConfigError, match="layers that differ are not supported yet where"):
        model_from_hf(SimpleNamespace(**LLAMA, is_heterogeneous=True))


def test_a_chunk_is_a_window() -> None:
    """A layer with chunked attention needs no more than the tokens of one chunk."""
    layers = ["chunked_attention", "full_attention", "sliding_attention"]
    config = {**LLAMA, "num_hidden_layers": 3, "layer_types": layers, "sliding_window": 64}
    model = model_from_hf(SimpleNamespace(**config, attention_chunk_size=128))
    assert model.windows == {128: (0,), 64: (2,)}


@pytest.mark.parametrize(
    "extra",
    [
        {"sliding_window": 4096},
        {"attention_chunk_size": 4096},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4096},
    ],
)
def test_all_layers_may_have_windows(extra: dict[str, Any]) -> None:
    """Where the config has no types of layers, as transformers makes their caches."""
    plain = model_from_hf(SimpleNamespace(**LLAMA))
    model = model_from_hf(SimpleNamespace(**LLAMA, **extra))
    assert model.windows == {4096: (0, 1)}
    assert (model.num_kv_heads, model.head_dim) == (plain.num_kv_heads, plain.head_dim)


def test_a_model_without_attention_has_no_heads() -> None:
    """Though its config may have a number by that name: of its states."""
    states = {"num_heads": 8, "head_dim": 16, "state_size": 4, "n_groups": 1, "conv_kernel": 4}
    types = ["linear_attention"] * 2
    model = model_from_hf(SimpleNamespace(**{**LLAMA, **states, "layer_types": types}))
    assert (model.num_kv_heads, model.head_dim, model.kv_lora_rank) == (None, None, None)
    assert [state.row_shape for state in model.states] == [(136, 4), (8, 16, 4)]


def test_words_of_single_models_for_layers() -> None:
    """Attention, Mamba, MLPs by the names that older configs have."""
    config = SimpleNamespace(
        **{**LLAMA, "num_hidden_layers": 4},
        layer_types=["mamba", "moe", "attention", "mlp"],
        mamba_expand=2,
        mamba_d_state=16,
        mamba_d_conv=4,
    )
    model = model_from_hf(config)
    assert (model.layers_with("recurrent"), model.layers_with("full")) == ((0,), (2,))
    assert [(state.row_shape, state.dtype) for state in model.states] == [
        ((128, 4), "bfloat16"),
        ((128, 16), "float32"),
    ]


REAL = [
    ("LlamaConfig", {}, None),
    ("Qwen3Config", {}, None),
    ("DeepseekV3Config", {}, None),
    ("MistralConfig", {}, None),
    ("Gemma2Config", {}, None),
    ("Gemma3TextConfig", {}, None),
    ("Gemma3nTextConfig", {}, None),
    ("Gemma4TextConfig", {}, None),
    ("GptOssConfig", {}, None),
    ("MiMoV2FlashConfig", {}, "twice the KV heads"),
    ("InklingTextConfig", {}, "states: is required"),
    ("Llama4TextConfig", {}, None),
    ("Qwen3NextConfig", {}, None),
    ("KimiLinearConfig", {}, None),
    ("BambaConfig", {}, None),
    ("BambaConfig", {"attn_layer_indices": [9, 18, 27]}, None),
    ("FalconH1Config", {}, None),
    ("NemotronHConfig", {}, None),
    ("JambaConfig", {}, None),
    ("MambaConfig", {}, None),
    ("FalconMambaConfig", {}, None),
    ("Mamba2Config", {}, None),
    ("MiniMaxConfig", {}, "states: is required"),
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
