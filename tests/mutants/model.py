"""What a mutant is, and where all of them are.

A mutant is one small change of the library that breaks one rule, written down as text so that a
reader sees the fault and a tool can make it. Each module beside this one that has a list `MUTANTS`
adds its own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPO: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to break the library.

    `rule`: what it violates, as `§6.2` of the semantics. `harm`: what a user would get: wrong
    bytes, a leak, an early free. `file`: below the repository's root. `old`: source that occurs
    there exactly once; `new`: what stands there instead. `test`: the node id of a test, of at most
    3 s, that fails under it.
    """

    id: str
    rule: str
    harm: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, source: str) -> str:
        """The broken source.

        Raises:
            ValueError: the snippet is not there exactly once: the library has moved on, and so must
                the mutant.
        """
        found = source.count(self.old)
        if found != 1:
            raise ValueError(
                f"mutant {self.id} is stale: {self.file} has its snippet {found} times"
            )
        return source.replace(self.old, self.new)


def all_mutants() -> list[Mutant]:
    """Every mutant of every module here, in a fixed order."""
    mutants: list[Mutant] = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in {"__main__", "model", "runner"} and not path.stem.startswith("test_"):
            mutants += importlib.import_module(f"tests.mutants.{path.stem}").MUTANTS
    return mutants
