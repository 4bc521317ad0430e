"""GGUF files of the architecture `gemma3`, for transformers.

Sliding windows on most layers and full attention on some. What such a file does not say is the same
for all models of the family, and stands here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tiered_cache.testing.gguf_file import Architecture, hf_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer

    from tiered_cache.testing.gguf_file import GgufFile

FULL_EVERY: Final = 6
"""Of so many layers the last one has full attention, the others a window."""

LOCAL_ROPE_BASE: Final = 10_000.0
"""Of layers with a window; that of the others is in the file."""


def _settings(file: GgufFile) -> dict[str, Any]:
    def value(name: str) -> Any:
        return file.value(f"gemma3.{name}")

    num_layers = value("block_count")
    kinds = ("sliding_attention",) * (FULL_EVERY - 1) + ("full_attention",)
    bases = {"sliding_attention": LOCAL_ROPE_BASE, "full_attention": value("rope.freq_base")}
    return {
        "vocab_size": len(file.value("tokenizer.ggml.tokens")),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"),
        # Attention scores are divided by its root: true of all sizes but 27B.
        "query_pre_attn_scalar": value("attention.key_length"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "sliding_window": value("attention.sliding_window"),
        "layer_types": [kinds[at % FULL_EVERY] for at in range(num_layers)],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
        },
        "tie_word_embeddings": True,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id"),
    }


def _weights(file: GgufFile) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Norms are written as what is multiplied with; transformers keeps them less one."""
    for name, array in file.tensors():
        yield hf_name(name, _BLOCK_NAMES), array - 1 if name.endswith("norm.weight") else array


_BLOCK_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _tokenizer(file: GgufFile) -> Tokenizer:
    """BPE over whole text, with bytes for what the vocabulary lacks (SentencePiece)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    # Tokens of nothing but spaces are written with real ones.
    tokens = [
        _SPACE * len(token) if token and not token.strip(" ") else token
        for token in file.value("tokenizer.ggml.tokens")
    ]
    vocab = {token: at for at, token in enumerate(tokens)}
    unknown = tokens[file.value("tokenizer.ggml.unknown_token_id")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=_merges(vocab), fuse_unk=True, unk_token=unknown, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    control, own = file.added_tokens()
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([token for token in own if token.content in vocab])
    return tokenizer


_SPACE: Final = "▁"


def _merges(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Which pairs become one, first ones first. The file does not list them: they are all cuts of a
    token into two, in the order of the tokens (and not of their scores, which say otherwise)."""
    return [
        (token[:at], token[at:])
        for token in vocab
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in vocab and token[at:] in vocab
    ]


def _restore_buffers(model: Any) -> None:
    import torch

    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(model.config)
    inner.embed_tokens.embed_scale = torch.tensor(inner.embed_tokens.scalar_embed_scale)


GEMMA3: Final = Architecture(
    config_class="Gemma3TextConfig",
    model_class="Gemma3ForCausalLM",
    settings=_settings,
    weights=_weights,
    tokenizer=_tokenizer,
    restore_buffers=_restore_buffers,
)
