"""The `model` section from a Hugging Face config object, duck-typed: no transformers here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from tiered_cache.config.hf_states import layer_states
from tiered_cache.config.marks import Mark, Marks
from tiered_cache.config.problems import problems_of
from tiered_cache.config.schema import LAYER_TYPE_ALIASES, LAYER_TYPES, ModelConfig
from tiered_cache.errors import ConfigError, ConfigProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiered_cache.config.schema import StateKind


def model_from_hf(
    hf_config: Any, *, id: str | None = None, revision: str | None = None, dtype: Any = None
) -> ModelConfig:
    """The `model` section for a Hugging Face config object.

    Args:
        hf_config: anything with the attributes of a `PreTrainedConfig`; of a multimodal one, the
            text part is taken.
        id, revision: default: what the config object remembers of where it came from.
        dtype: of the attention state and the convolutions', a name or a torch dtype; default: the
            config object's. Recurrent states are float32, as transformers keeps them.

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
    dtype_name = _dtype_name(
        dtype or getattr(text, "dtype", None) or getattr(hf_config, "dtype", None)
    )
    settings: dict[str, Any] = {
        "id": id or getattr(hf_config, "_name_or_path", None) or None,
        "revision": revision or getattr(hf_config, "_commit_hash", None),
        "dtype": dtype_name,
        "num_layers": getattr(text, "num_hidden_layers", None),
        **_attention(text),
        **_layers(text, dtype_name),
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
    """State that no strategy here keeps, in words."""
    if getattr(text, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported"
    if (words := UNTOLD.get(str(getattr(text, "model_type", None)))) is not None:
        yield f"{words}: not supported yet"
    kinds = getattr(text, "layer_types", None)
    if kinds is None and getattr(text, "is_heterogeneous", False):
        yield "layers that differ are not supported yet where the config has no layer_types"
        return
    if kinds is not None and not _is_list_of_text(kinds):
        yield "layer_types must be a list of text"
    elif kinds is not None:
        for kind in sorted(set(kinds) - {*LAYER_TYPES, *LAYER_TYPE_ALIASES, *WINDOWS}):
            yield f"layers of type {kind} are not supported yet"
        yield from _differences(text)
    for telltale, words in TELLTALES.items():
        if getattr(text, telltale, None) is not None and kinds is None:
            yield f"{words} is not supported yet where the config has no layer_types"


def _differences(text: Any) -> Iterator[str]:
    """What is not the same on all layers, though a pool takes it to be."""
    full, window = (_configs_of(text, kind) for kind in ("full", "window"))
    for key, groups in (
        *((key, (full + window,)) for key in ("v_head_dim", "kv_lora_rank", "qk_rope_head_dim")),
        *((key, (full, window)) for key in ("num_key_value_heads", "head_dim", "hidden_size")),
    ):
        if any(len({getattr(layer, key, None) for layer in group}) > 1 for group in groups):
            yield f"layers that differ in {key} are not supported yet"


UNTOLD: Final = {
    "mimo_v2_flash": "sliding layers have twice the KV heads, which the config does not say"
}
"""By model type, what no attribute gives away."""

TELLTALES: Final = {
    "index_topk": "a sparse-attention indexer",
    "mamba_d_state": "Mamba state",
    "ssm_state_size": "Mamba state",
    "state_size": "Mamba state",
    "linear_num_key_heads": "linear attention",
    "compress_ratios": "compressed attention",
}
"""Attributes that give away a further kind of state where a config has no `layer_types`."""


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _layers(text: Any, dtype: str | None) -> dict[str, Any]:
    """What each layer keeps; nothing is said where that is full attention everywhere."""
    types = _layer_types(text)
    if not set(types) - {"full_attention"}:
        return {}
    kinds = [kind for name in types for kind in LAYER_TYPES[name]]
    return {
        "layer_types": types,
        "sliding_window": _windows(text) if "window" in kinds else None,
        "states": layer_states(text, dtype) if "recurrent" in kinds else None,
    }


def _configs_of(text: Any, kind: StateKind) -> list[Any]:
    """What describes the layers that keep this kind of state: one object where they are alike."""
    if not getattr(text, "is_heterogeneous", False):
        return [text]
    layers = enumerate(_layer_types(text))
    return [text.per_layer_config[at] for at, name in layers if kind in LAYER_TYPES.get(name, ())]


WINDOWS: Final = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Layers that see a part of the tokens, with the attribute that says how many. What a chunk needs
of the tokens before it is never more than a window as long has."""


def _layer_types(text: Any) -> list[str]:
    num_layers = getattr(text, "num_hidden_layers", None)
    kinds: Sequence[str] | None = getattr(text, "layer_types", None)
    if kinds is None:  # all alike
        kinds = [_only_type(text)] * (
            num_layers if isinstance(num_layers, int) and num_layers < 10**6 else 1
        )
    kinds = ["sliding_attention" if kind == "chunked_attention" else kind for kind in kinds]
    types = [LAYER_TYPE_ALIASES.get(kind, kind) for kind in kinds]
    shared = getattr(text, "num_kv_shared_layers", None)
    if isinstance(shared, int) and shared > 0:  # the last ones use the KV of layers before them
        types[-shared:] = ["none"] * min(shared, len(types))
    return types


def _only_type(text: Any) -> str:
    """What all layers are where the config does not say: as transformers makes their caches."""
    for kind, attribute in WINDOWS.items():
        if isinstance(getattr(text, attribute, None), int):
            return kind
    return "full_attention"


def _windows(text: Any) -> int | list[int | None] | None:
    """One window, or one for each layer that has one where these differ."""
    types = _layer_types(text)
    is_heterogeneous = getattr(text, "is_heterogeneous", False)
    layers = text.per_layer_config if is_heterogeneous else [text] * len(types)
    kinds = getattr(text, "layer_types", None) or [_only_type(text)] * len(types)
    windows = [
        getattr(layer, WINDOWS[kind], None)
        for layer, kind, name in zip(layers, kinds, types, strict=False)
        if "window" in LAYER_TYPES[name]
    ]
    return windows if len(set(windows)) > 1 else windows[0]


def _attention(text: Any) -> dict[str, Any]:
    """What the keys about attention say; nothing where no layer has it."""
    kinds = {kind for name in _layer_types(text) for kind in LAYER_TYPES[name]}
    if not {"full", "window"} & kinds:
        return {}
    return _latent_shape(text) if _is_latent(text) else _heads_shapes(text)


def _is_latent(text: Any) -> bool:
    return getattr(text, "kv_lora_rank", None) is not None


def _latent_shape(text: Any) -> dict[str, Any]:
    return {key: getattr(text, key, None) for key in ModelConfig.LATENT}


def _heads_shapes(text: Any) -> dict[str, Any]:
    """Heads of full attention, and of sliding layers what is not the same there."""
    full, window = (_configs_of(text, kind) for kind in ("full", "window"))
    shape = _heads_shape((full or window or [text])[0])
    if not any("window" in LAYER_TYPES[name] for name in _layer_types(text)):
        return shape
    others = _heads_shape(window[0])
    for key, name in (("num_kv_heads", "swa_num_key_value_heads"), ("head_dim", "swa_head_dim")):
        found = getattr(window[0], name, None) or others[key]
        shape[f"sliding_{key}"] = None if found == shape[key] else found
    return shape


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
