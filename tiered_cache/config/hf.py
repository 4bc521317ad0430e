"""The `model` section from a Hugging Face config object, duck-typed: no transformers here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from tiered_cache.config.marks import Mark, Marks
from tiered_cache.config.problems import problems_of
from tiered_cache.config.schema import LAYER_TYPE_ALIASES, LAYER_TYPES, ModelConfig
from tiered_cache.errors import ConfigError, ConfigProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def model_from_hf(
    hf_config: Any, *, id: str | None = None, revision: str | None = None, dtype: Any = None
) -> ModelConfig:
    """The `model` section for a Hugging Face config object.

    Args:
        hf_config: anything with the attributes of a `PreTrainedConfig`; of a multimodal one, the
            text part is taken.
        id, revision: default: what the config object remembers of where it came from.
        dtype: of keys, values and convolutions, a name or a torch dtype; default: the config
            object's.

    Raises:
        ConfigError: the model keeps state that no strategy handles yet, or a number is missing.
    """
    get_text_config = getattr(hf_config, "get_text_config", None)
    text = get_text_config(decoder=True) if get_text_config is not None else hf_config
    refusals = list(_unsupported(text))
    if refusals:
        raise ConfigError(
            [ConfigProblem(refusal, "model", file=_hf_name(text)) for refusal in refusals]
        )
    state_dtype = _dtype_name(
        dtype or getattr(text, "dtype", None) or getattr(hf_config, "dtype", None)
    )
    settings: dict[str, Any] = {
        "id": id or getattr(hf_config, "_name_or_path", None) or None,
        "revision": revision or getattr(hf_config, "_commit_hash", None),
        "dtype": state_dtype,
        "num_layers": getattr(text, "num_hidden_layers", None),
        **(_latent_shape(text) if _is_latent(text) else _heads_shape(text)),
        **_layers(text, state_dtype),
    }
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        return ModelConfig.model_validate(given)
    except ValidationError as error:
        marks = Marks({(): Mark(_hf_name(text))})
        raise ConfigError(problems_of(error, marks, inside=("model",))) from None


def _hf_name(text: Any) -> str:
    return type(text).__name__


def _unsupported(text: Any) -> Iterator[str]:
    """State that cannot be described, in words."""
    if getattr(text, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported"
    sharing = getattr(text, "kv_sharing_modes", None) or ()
    if getattr(text, "num_kv_shared_layers", None) or "reuse" in sharing:
        yield "layers that share another layer's KV are not supported yet"
    if len({repr(_heads_shape(layer)) for layer in getattr(text, "per_layer_config", ())}) > 1:
        yield "attention heads that differ from layer to layer are not supported yet"
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        for telltale, words in TELLTALES.items():
            if getattr(text, telltale, None) is not None:
                yield f"{words} is not supported where the config has no layer_types"
    elif not _is_list_of_text(kinds):
        yield "layer_types must be a list of text"
    else:
        unknown = sorted(set(kinds) - KNOWN_TYPES)
        for kind in unknown:
            yield f"layers of type {kind} are not supported yet"
        if not unknown and _has_states(_layer_types(text)) and not _states(text, None):
            yield "the shapes of its linear layers' states are not known"


TELLTALES: Final = {
    "index_topk": "a sparse-attention indexer",
    "mamba_d_state": "Mamba state",
    "ssm_state_size": "Mamba state",
    "state_size": "Mamba state",
    "linear_num_key_heads": "linear attention",
    "compress_ratios": "compressed attention",
}
"""Attributes that give away a further kind of state where a config has no `layer_types`."""

WINDOWS: Final = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Layers that see a part of the tokens, with the attribute that says how many. Of a chunk, too, no
more is needed than the tokens of a window as long."""

KNOWN_TYPES: Final = frozenset({*LAYER_TYPES, *LAYER_TYPE_ALIASES, *WINDOWS})


def _layers(text: Any, dtype: str | None) -> dict[str, Any]:
    """What kinds of layers there are, and what describes them. Nothing for full attention alone."""
    types = _layer_types(text)
    if "full" not in {kind for name in types for kind in LAYER_TYPES[name]}:
        # Somebody has to hold the prefix: windows are kept in full, and used in part.
        types = [WITHOUT_WINDOW.get(name, name) for name in types]
    if set(types) <= {"full_attention"}:
        return {}
    layers: dict[str, Any] = {"layer_types": types}
    if any("window" in LAYER_TYPES[name] for name in types):
        layers["sliding_window"] = _windows(text)
    if _has_states(types):
        layers["states"] = _states(text, dtype)
    return layers


WITHOUT_WINDOW: Final = {"sliding_attention": "full_attention", "hybrid_sliding": "hybrid"}


def _layer_types(text: Any) -> list[str]:
    """In our words. Where a config says nothing, all layers are alike: with windows or without."""
    types = [
        "sliding_attention" if name == "chunked_attention" else name for name in _hf_types(text)
    ]
    return [LAYER_TYPE_ALIASES.get(name, name) for name in types]


def _hf_types(text: Any) -> list[str]:
    return list(getattr(text, "layer_types", None) or ())


def _windows(text: Any) -> list[Any]:
    """Of each layer that has one, in tokens."""
    types = _hf_types(text)
    of_layers = getattr(text, "per_layer_config", None) or [text] * len(types)
    return [
        getattr(layer, WINDOWS[name], None)
        for name, layer in zip(types, of_layers, strict=False)
        if name in WINDOWS
    ]


def _has_states(types: list[str]) -> bool:
    return any("recurrent" in LAYER_TYPES[name] for name in types)


def _states(text: Any, dtype: str | None) -> list[dict[str, Any]]:
    """What each linear layer keeps, if its family is known. Transformers keeps what a convolution
    sees in the model's `dtype`, and what a recurrence sums up in float32, always."""
    dtypes = {"conv": dtype, "recurrent": "float32"}
    for names, shapes in STATE_FAMILIES:
        sizes = [getattr(text, name, None) for name in names]
        if all(type(size) is int for size in sizes):
            return [
                {"name": name, "row_shape": shape, "dtype": dtypes[name]}
                for name, shape in shapes(*sizes).items()
            ]
    return []


Shapes = dict[str, tuple[int, ...]]


def _mamba2(heads: int, head_dim: int, state_size: int, groups: int, kernel: int) -> Shapes:
    channels = heads * head_dim + 2 * groups * state_size
    return {"conv": (channels, kernel), "recurrent": (heads, head_dim, state_size)}


def _mamba(hidden_size: int, expand: int, state_size: int, kernel: int) -> Shapes:
    channels = hidden_size * expand
    return {"conv": (channels, kernel), "recurrent": (channels, state_size)}


def _gated_delta(
    key_heads: int, key_dim: int, value_heads: int, value_dim: int, kernel: int
) -> Shapes:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return {"conv": (channels, kernel), "recurrent": (value_heads, key_dim, value_dim)}


def _short_conv(hidden_size: int, kernel: int) -> Shapes:
    return {"conv": (hidden_size, kernel)}


STATE_FAMILIES: Final[tuple[tuple[tuple[str, ...], Callable[..., Shapes]], ...]] = (
    (  # Bamba, Falcon-H1, Granite 4
        ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
        _mamba2,
    ),
    (  # Nemotron-H
        ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
        _mamba2,
    ),
    (  # Zamba2
        ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"),
        _mamba2,
    ),
    # Jamba
    (("hidden_size", "mamba_expand", "mamba_d_state", "mamba_d_conv"), _mamba),
    (  # Qwen3-Next, Qwen3.5, OLMo hybrid
        (
            "linear_num_key_heads",
            "linear_key_head_dim",
            "linear_num_value_heads",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
        ),
        _gated_delta,
    ),
    # LFM2
    (("hidden_size", "conv_L_cache"), _short_conv),
)
"""How the families of linear layers call their sizes, and the states that follow from them."""


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _is_latent(text: Any) -> bool:
    return getattr(text, "kv_lora_rank", None) is not None


def _latent_shape(text: Any) -> dict[str, Any]:
    return {key: getattr(text, key, None) for key in ModelConfig.LATENT}


def _heads_shape(text: Any) -> dict[str, Any]:
    num_heads = getattr(text, "num_attention_heads", None)
    hidden_size = getattr(text, "hidden_size", None)
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None and isinstance(num_heads, int) and isinstance(hidden_size, int):
        head_dim = hidden_size // num_heads if num_heads > 0 else None
    value_dim = getattr(text, "v_head_dim", None)
    return {
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or num_heads,
        "head_dim": head_dim,
        "v_head_dim": None if value_dim == head_dim else value_dim,
    }


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
