"""What a transfer would have to bring: pure descriptions, made from a path (semantics §9.1).

Owns: the words in which components answer and the tree's callers plan. Refuses to know: target ids,
copiers, whether anybody is waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.types import Boundary, PageIds


class Piece(NamedTuple):
    """Consecutive pages `[start, stop)` (in tokens) of a path that a component lacks on a tier.

    Either `ids`: where they are on the other tier, so that they can be copied; or `pending`: the
    transfer that is bringing them, to be joined. A pending transfer may reach beyond both ends.
    """

    start: int
    stop: int
    ids: PageIds | None
    pending: object | None


class Pinned(NamedTuple):
    """What keeps a transfer's span in place until it has ended: `[start, receipt's depth)`."""

    component: int
    start: int
    receipt: Receipt
    source: Receipt | None


class Unhashed(NamedTuple):
    """Tokens (as `RadixKey.data`) whose page keys are not known, from `start` on; `previous`: what
    the chain goes on from."""

    start: int
    data: bytes
    previous: bytes
    is_bigram: bool


@dataclass(slots=True)
class RoomPlan:
    """What a round of making room without losing anything comes to (semantics §7.3).

    `victims`: leaves without a copy on the host, the next victim first; `backed`: those between
    them that have one. `num_pages`: what both would give up, at most what was asked and a victim.
    """

    victims: list[Boundary]
    backed: list[Boundary]
    num_pages: int
