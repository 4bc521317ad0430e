"""Full attention on every layer: keys and values (MHA, GQA, MQA), or one latent per token (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered_cache.pools.spec import PoolSpec
from tiered_cache.strategies.base import ComponentSpec
from tiered_cache.strategies.builder import Part, PartsStrategy, attention_pools
from tiered_cache.types import ComponentId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered_cache.config import ModelConfig
    from tiered_cache.strategies.builder import Declared

FULL: Final = ComponentId("full")

MARK: Final = PoolSpec("prefix", FULL, (0,), (1,), "uint8", rows_per_page=1, sharding="replicated")
"""A byte for each page, which no model reads: so a page of the prefix is somewhere, goes from tier
to tier, and is counted, as any other is."""


def _full(model: ModelConfig, page_size: int) -> Iterator[Declared]:
    if layers := model.layers_with("full"):
        yield ComponentSpec(FULL, "full"), attention_pools(model, page_size, FULL, layers)
    else:
        yield ComponentSpec(FULL, "prefix"), (MARK,)


FULL_ATTENTION: Final = Part("full", _full)
"""One component, `full`: pools `k` and `v`, or `latent`. Where no layer has full attention, it only
says which pages of a prefix there are."""


class PlainStrategy(PartsStrategy):
    """One component, `full`. A rank holds its share of the heads, but a copy of the latents."""

    name = "plain"
    parts = (FULL_ATTENTION,)
