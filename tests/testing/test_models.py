"""Tiny models: the same ones for the same seed, without touching anybody's random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiered_cache.testing import models
from tiered_cache.testing.models import tiny_model


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
