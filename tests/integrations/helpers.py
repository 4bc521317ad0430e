"""What the transformers tests share: settings that fit, and the reference."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from tiered_cache import load_config
from tiered_cache.integrations.transformers import ONE_AT_A_TIME, model_from_hf

if TYPE_CHECKING:
    from tiered_cache.config import Config

PAGE_SIZE = 16


def settings(
    model: Any, tokens: int = 1024, ratio: dict[str, float] | None = None, **more: Any
) -> Config:
    """A configuration whose pools fit the model."""
    device = {"tokens": tokens, "ratio": ratio or {}}
    return load_config(
        {"page_size": PAGE_SIZE, "device": device, "check": True, **more},
        {"model": model_from_hf(model.config, id="test/model", revision="1", dtype=model.dtype)},
    )


def poison(pools: Any) -> None:
    """NaN everywhere: whatever is read without having been written shows."""
    for spec in pools.specs:
        for layer in spec.layers:
            tensor = pools.layer(spec.name, layer)
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0xAA)


def poison_free(cache: Any) -> None:
    """NaN in every page of the device that nobody has."""
    pools, size = cache.pools, cache.page_size
    free = torch.from_numpy(cache._parts.allocators[0].free_ids().astype(np.int64))
    for spec in pools.specs:
        for layer in spec.layers:
            pages = pools.layer(spec.name, layer).unflatten(0, (-1, size))
            pages[free] = float("nan")


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 256, count).tolist()


class NeverSerialised:
    """The same model with a transformers cache of its own, which never goes through any pool."""

    def __init__(self, model: Any, cache: Any = None, length: int = 0) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config) if cache is None else cache
        self.length = length
        self._one_at_a_time = model.config.model_type in ONE_AT_A_TIME

    @torch.inference_mode()
    def forward(self, tokens: Any, start: int) -> torch.Tensor:
        """Logits after the last of `tokens`, which stand at positions from `start` on."""
        assert self.length == start
        tokens = torch.tensor(np.asarray(tokens, dtype=np.int64))
        self.length += len(tokens)
        step = 1 if self._one_at_a_time and start else len(tokens)
        positions = torch.arange(start, self.length)
        for ids, places in zip(tokens.split(step), positions.split(step), strict=True):
            output = self.model(
                input_ids=ids[None],
                position_ids=places[None],
                cache=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[0, -1].float()

    @torch.inference_mode()
    def branch(self, length: int) -> NeverSerialised:
        """Another one that goes on from the first `length` tokens."""
        cache = copy.deepcopy(self.cache)
        if length != self.length:
            cache.crop(length - self.length)
        return NeverSerialised(self.model, cache, length)


class Remembering(NeverSerialised):
    """One that can go on from where a forward ended, although windows and states do not go back.

    Models without states can go on from any place: of windows it remembers all that each forward
    had, before it forgets what it does not need for the next.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._past: dict[int, NeverSerialised] = {}
        self.has_states = any(hasattr(layer, "conv_states") for layer in self.cache.layers)
        if not self.has_states:
            self.cache.activate_past_recording()

    def forward(self, tokens: Any, start: int) -> torch.Tensor:
        logits = super().forward(tokens, start)
        self._past[self.length] = super().branch(self.length)
        if not self.has_states:
            self.cache.crop(0)
        return logits

    def branch(self, length: int) -> NeverSerialised:
        return self._past[min(end for end in self._past if end >= length)].branch(length)
