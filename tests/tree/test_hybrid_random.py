"""Windows and states in random order, against a model by pages and the byte oracle, with the proof
after every step."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.tree.hybrid import STACKS, HybridRig
from tiered_cache.testing.component_scene import STEPS, Walk


def walk(stack: str, seeds: range) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in seeds:

        def make(page_size: int, host_pages: int) -> HybridRig:
            return HybridRig(STACKS[stack](), page_size, pages=80, host_pages=host_pages)

        met += Walk(f"{seed} {stack}", make).run(150)
    return met


@pytest.mark.parametrize("stack", STACKS)
def test_random_walks(stack: str) -> None:
    """A dozen of each stack meet every step, many times."""
    met = walk(stack, range(12))
    assert set(STEPS) <= set(met)
    assert min(met[step] for step in STEPS if step != "reset") >= 3, met
    assert met["shorter on the device"] >= 20
    assert met["a boundary below a tombstone"] >= 20


@pytest.mark.soak
@pytest.mark.parametrize("stack", STACKS)
def test_many_random_walks(stack: str) -> None:
    """Thousands."""
    walk(stack, range(1000, 3000))
