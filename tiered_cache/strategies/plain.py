"""Full attention on every layer: keys and values (MHA, GQA, MQA), or one latent per token (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered_cache.strategies.base import ComponentSpec
from tiered_cache.strategies.builder import Part, PartsStrategy, attention_pools
from tiered_cache.types import ComponentId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered_cache.config import ModelConfig
    from tiered_cache.strategies.builder import Declared

FULL: Final = ComponentId("full")


def _full(model: ModelConfig, page_size: int) -> Iterator[Declared]:
    layers = model.layers_with("full")
    yield ComponentSpec(FULL, "full"), attention_pools(model, page_size, FULL, layers)


FULL_ATTENTION: Final = Part("full", _full)
"""One component, `full`: pools `k` and `v`, or `latent`."""


class PlainStrategy(PartsStrategy):
    """One component, `full`. A rank holds its share of the heads, but a copy of the latents."""

    name = "plain"
    parts = (FULL_ATTENTION,)
