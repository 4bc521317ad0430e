"""How the components of a tier share its bytes.

Owns: the arithmetic from a budget to ids. Refuses to know: tensors, where ratios were written.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from fractions import Fraction

    from tiered_cache.types import ComponentId


@dataclass(frozen=True, slots=True)
class Shares:
    """Per component the bytes of one id, and how many ids it has per page of the first one.

    Fractions, because `0.29 × 100` pages are 29 ids and not 28.
    """

    id_bytes: Mapping[ComponentId, int]
    ratios: Mapping[ComponentId, Fraction]

    def ids(self, num_pages: int) -> dict[ComponentId, int]:
        """Ids of each component where the first has `num_pages`: rounded down, at least 1."""
        return {of: max(1, int(num_pages * ratio)) for of, ratio in self.ratios.items()}

    def num_bytes(self, num_pages: int) -> int:
        """What all ids take together where the first component has `num_pages`."""
        return sum(count * self.id_bytes[of] for of, count in self.ids(num_pages).items())

    def num_pages(self, num_bytes: int) -> int:
        """The most pages of the first component with which all ids fit; 0: not even with one."""
        first = next(iter(self.id_bytes.values()))
        return bisect_right(range(1, num_bytes // first + 1), num_bytes, key=self.num_bytes)
