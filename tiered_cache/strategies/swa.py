"""Full attention on some layers and sliding windows on others: Gemma, gpt-oss, Cohere2, OLMo 3. Or
windows on all of them: Mistral."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered_cache.strategies.base import ComponentSpec
from tiered_cache.strategies.builder import Part, PartsStrategy, attention_pools
from tiered_cache.strategies.plain import FULL_ATTENTION
from tiered_cache.types import ComponentId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered_cache.config import ModelConfig
    from tiered_cache.strategies.builder import Declared


def _windows(model: ModelConfig, page_size: int) -> Iterator[Declared]:
    windows = model.windows
    for window, layers in windows.items():
        component = ComponentId("swa" if len(windows) == 1 else f"swa.{window}")
        pools = attention_pools(
            *(model, page_size, component, layers),
            prefix=f"{component}.",
            num_kv_heads=model.sliding_num_kv_heads,
            head_dim=model.sliding_head_dim,
        )
        yield ComponentSpec(component, "swa", window), pools


WINDOWS: Final = Part("window", _windows)
"""A component for each window, the largest first: `swa`, or `swa.4096` where there are several.
Its pools are those of full attention, named `swa.k`, `swa.4096.k`."""


class SWAStrategy(PartsStrategy):
    """Components `full` and `swa`: what is behind the window of a layer can go before the rest."""

    name = "swa"
    parts = (FULL_ATTENTION, WINDOWS)
