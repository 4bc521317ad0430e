"""The shipped components, and one of a user's own, pass the suite that is shipped for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiered_cache.testing.components import ComponentTests
from tiered_cache.tree.components.base import TreeComponent
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.swa import SWAComponent


class TestFull(ComponentTests):
    """The base, alone."""

    def make(self) -> FullComponent:
        return FullComponent("full")

    def stack(self) -> list[TreeComponent]:
        return [self.make()]


class TestSWA(ComponentTests):
    """A window that ends inside a page."""

    def make(self) -> SWAComponent:
        return SWAComponent("swa", 9)


class TestSmallSWA(ComponentTests):
    """A window smaller than a page, in the company of a larger one and a state."""

    def make(self) -> SWAComponent:
        return SWAComponent("swa.3", 3)

    def stack(self) -> Sequence[TreeComponent]:
        large = SWAComponent("swa.17", 17)
        return [FullComponent("full"), large, self.make(), MambaComponent("mamba")]


class TestMamba(ComponentTests):
    """A state."""

    def make(self) -> MambaComponent:
        return MambaComponent("mamba")


class TestSinks(ComponentTests):
    """The component of `examples/custom_component.py`."""

    def make(self) -> TreeComponent:
        return example().SinkComponent("acme.sinks")

    def needed(self, depth: int, page_size: int) -> range:
        return range(1)


def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "custom_component.py"
    spec = importlib.util.spec_from_file_location("custom_component", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
