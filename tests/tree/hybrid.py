"""Trees of several components, as the tests of windows and states use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tiered_cache.testing.component_scene import TreeScene as HybridRig
from tiered_cache.tree.components.base import TreeComponent
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.swa import SWAComponent

Make = Callable[[], list[TreeComponent]]

STACKS: Final[dict[str, Make]] = {
    "F,S": lambda: [FullComponent("full"), SWAComponent("swa", 5)],
    "F,M": lambda: [FullComponent("full"), MambaComponent("mamba")],
    "F,S,M": lambda: [FullComponent("full"), SWAComponent("swa", 4), MambaComponent("mamba")],
    "F,S9,S3,M": lambda: [
        FullComponent("full"),
        SWAComponent("swa.9", 9),
        SWAComponent("swa.3", 3),
        MambaComponent("mamba"),
    ],
}

__all__ = ["STACKS", "HybridRig"]
