"""Mutants of keys, tree and allocator: semantics §2 to §8 and §10.1."""

from __future__ import annotations

from typing import Final

from tests.mutants.model import Mutant

RADIX: Final = "tiered_cache/tree/radix.py"
FULL: Final = "tiered_cache/tree/components/full.py"

MUTANTS: Final = [
    Mutant(
        id="split-restarts-age",
        rule="§3.7",
        harm="a cold suffix outlives what is in use",
        file=FULL,
        old="upper.stamp, upper.stored = lower.stamp, lower.stored",
        new="upper.stamp, upper.stored = 0, lower.stored",
        test="tests/tree/test_split.py::test_the_parent_takes_the_older_side_of_the_childs_place",
    )
]
