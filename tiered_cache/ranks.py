"""The seam between ranks of one model: what they must agree upon, and where (semantics §10.10).

Each rank has its own cache, tree and tiers; their orders may differ, their grants may not. So
before anything that changes what a lease holds, the ranks intersect the sets of boundaries that
each could offer. Owns: the contract, and the default for a model on a single rank. Refuses to know:
how ranks talk to each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection


class Ranks(Protocol):
    """How a rank agrees with the others. Given to `open(ranks=…)`."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with: then nothing is asked, and nothing waits."""

    async def agree(self, tag: str, boundaries: Collection[int]) -> Collection[int]:
        """The boundaries (in tokens) that every rank has offered under this tag.

        Rank 0 announces tags, the others answer by tag, not by the order of their calls; rank 0's
        result is final. A rank that has nothing left to offer answers with the empty set.

        Raises:
            TimeoutError: nobody announced the tag in time; on all ranks.
        """


class SingleRank:
    """The default."""

    is_alone = True
    rank = 0
    world_size = 1

    async def agree(self, tag: str, boundaries: Collection[int]) -> Collection[int]:
        return boundaries
