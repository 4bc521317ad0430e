"""Full attention on some layers and a recurrent state on others, or both on one: Qwen3-Next, Bamba,
Falcon-H1, Nemotron-H, LFM2 (Mamba, Mamba2, gated delta rule, short convolutions). Or no attention
at all: Mamba2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered_cache.pools.spec import PoolSpec
from tiered_cache.strategies.base import ComponentSpec
from tiered_cache.strategies.builder import Part, PartsStrategy
from tiered_cache.strategies.plain import FULL_ATTENTION
from tiered_cache.types import ComponentId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered_cache.config import ModelConfig
    from tiered_cache.strategies.builder import Declared

MAMBA: Final = ComponentId("mamba")


def _states(model: ModelConfig, _: int) -> Iterator[Declared]:
    layers = model.layers_with("recurrent")
    pools = tuple(
        PoolSpec(
            *(state.name, MAMBA, layers, state.row_shape, state.dtype),
            rows_per_page=1,  # an id is a state slot: one row, whatever the page size
            sharding=state.sharding,
        )
        for state in model.states
    )
    yield ComponentSpec(MAMBA, "mamba"), pools


STATES: Final = Part("recurrent", _states)
"""One component, `mamba`, with a pool for each of `model.states`, under its name."""


class MambaStrategy(PartsStrategy):
    """Components `full` and `mamba`: a state stands for one exact depth."""

    name = "mamba"
    parts = (FULL_ATTENTION, STATES)
