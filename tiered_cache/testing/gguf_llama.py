"""GGUF files of the architecture `llama`, as SmolLM2's, for transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tiered_cache.testing.gguf_file import Architecture, hf_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer

    from tiered_cache.testing.gguf_file import GgufFile


def _settings(file: GgufFile) -> dict[str, Any]:
    def value(name: str) -> Any:
        return file.value(f"llama.{name}")

    return {
        "vocab_size": value("vocab_size"),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base")},
        "tie_word_embeddings": True,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id"),
    }


def _weights(file: GgufFile) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    heads = {
        "attn_q": file.value("llama.attention.head_count"),
        "attn_k": file.value("llama.attention.head_count_kv"),
    }
    for name, array in file.tensors():
        part = name.split(".")[-2]
        yield (
            hf_name(name, _BLOCK_NAMES),
            _unpermute(array, heads[part]) if part in heads else array,
        )


def _unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undoes GGUF's row order of q and k: there rotary pairs are neighbours, here two halves."""
    rows, columns = weight.shape
    return (
        weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
        .swapaxes(1, 2)
        .reshape(rows, columns)
        .copy()
    )


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


def _tokenizer(file: GgufFile) -> Tokenizer:
    """Byte-level BPE that cuts numbers into digits first (`tokenizer.ggml.pre = smollm`)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = file.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.value("tokenizer.ggml.merges")]
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
    control, _ = file.added_tokens()
    tokenizer.add_special_tokens(control)
    return tokenizer


def _restore_buffers(model: Any) -> None:
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


LLAMA: Final = Architecture(
    config_class="LlamaConfig",
    model_class="LlamaForCausalLM",
    settings=_settings,
    weights=_weights,
    tokenizer=_tokenizer,
    restore_buffers=_restore_buffers,
)
