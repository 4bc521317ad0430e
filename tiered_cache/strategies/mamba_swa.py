"""Full attention, sliding windows and recurrent states in one model: the union of swa and mamba."""

from __future__ import annotations

from tiered_cache.strategies.builder import PartsStrategy
from tiered_cache.strategies.mamba import STATES
from tiered_cache.strategies.plain import FULL_ATTENTION
from tiered_cache.strategies.swa import WINDOWS


class MambaSWAStrategy(PartsStrategy):
    """Components `full`, `swa` and `mamba`."""

    name = "mamba_swa"
    parts = (FULL_ATTENTION, WINDOWS, STATES)
