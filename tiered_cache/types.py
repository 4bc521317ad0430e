"""Words that every room shares: tiers, ids, and the parameters and results of tree operations.

Lengths and depths are in tokens, ids and counts of ids in pages (state slots for recurrent state)
unless a name says otherwise. A tuple with one entry per component is ordered by the component's
dense index.

Parameter and result classes are slotted but not frozen: they are made several times per request,
and freezing costs as much as a tree step (design §9). Treat them as values.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from operator import index
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from tiered_cache.keys import RadixKey
    from tiered_cache.tree.node import Node
    from tiered_cache.tree.radix import RadixTree

PageIds = npt.NDArray[np.int32]
ComponentId = NewType("ComponentId", str)

NO_PAGE = -1
"""Entry of a page table, or of an insert, where a component has no page."""


class Holding(ABC):
    """Something that is held until it is closed, or until the end of its block (semantics §6.5)."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Let go. Any number of times."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Tier(Enum):
    """Where state can be (glossary): L1 device memory, L2 host memory, L3 storage."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


DEVICE: Final = Tier.DEVICE
"""For the tree's hot paths: looking an enum member up costs as much as a step there."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Isolation of reuse (semantics §1.6): two namespaces never share a page in any tier, key or
    event.

    `""` stands for absent, and equals `None` wherever a user writes it.
    """

    extra_key: str = ""
    cache_salt: str = ""
    is_bigram: bool = False


class Boundary(NamedTuple):
    """A depth of a path, as (node, absolute depth): a place inside a node's edge, until someone
    needs it cut.

    `node` is the node that contained the depth when the boundary was made. Splits put new nodes
    above it, so whoever uses a boundary walks up from it (semantics §3.2).
    """

    node: Node
    depth: int


@dataclass(slots=True)
class MatchPrefixParams:
    """What to look up: at most the first `limit` tokens of `key` (None: all of it)."""

    key: RadixKey
    limit: int | None = None


@dataclass(slots=True)
class MatchResult:
    """The longest reusable prefix per tier (semantics §3.5). Holds nothing: lock a boundary to keep
    it.

    `device_length`: tokens on the device. `best_length`: tokens on device or host.
    `full_hit_length`: tokens walked, whatever the other components say.
    """

    device_node: Node
    device_length: int
    best_node: Node
    best_length: int
    full_hit_length: int
    tree: RadixTree

    @property
    def device_boundary(self) -> Boundary:
        return Boundary(self.device_node, self.device_length)

    @property
    def best_boundary(self) -> Boundary:
        return Boundary(self.best_node, self.best_length)

    @property
    def host_hit_length(self) -> int:
        """Tokens between the device boundary and the best one: what a load back would bring."""
        return self.best_length - self.device_length

    @property
    def pages(self) -> tuple[PageIds, ...]:
        """Per component, the device page ids of `[0, device_length)`, read-only int32, one per page
        (−1: none).

        Read from the tree now, so read them before anything else happens, or lock the boundary
        first.

        Raises:
            StaleError: the boundary has been evicted since.
        """
        return self.tree.pages(self.device_boundary)


@dataclass(slots=True)
class InsertParams:
    """What a request publishes (semantics §5.1).

    `pages`: per component, page ids of `[0, length)`, int32, one per whole page (−1: this component
    has none there).
    `length`: tokens to publish, floored to pages (None: the whole key).
    `prev_prefix_len`: tokens whose pages the tree owns already: never freed, never adopted.
    `inserted_len`: tokens that this request has counted as a hit before (semantics §5.8).
    `swa_evicted_seqlen`: tokens whose window pages the request has given up.
    `prompt_len`: make a boundary here, so that generated tokens can be evicted first (semantics
    §5.9).
    """

    key: RadixKey
    pages: tuple[PageIds, ...]
    length: int | None = None
    prev_prefix_len: int = 0
    inserted_len: int = 0
    swa_evicted_seqlen: int = 0
    priority: int = 0
    prompt_len: int | None = None


@dataclass(slots=True)
class InsertResult:
    """What became of the caller's pages.

    `boundary` (`node`, `length`): the end of what is published; lock it. `prefix_len`: tokens that
    were on the device before.
    `first_changed`: depth from which the tree's pages may differ from the caller's (the published
    length when none does): from there on use the canonical ones, `RadixTree.pages(boundary,
    first_changed)`.
    `duplicates`: per component, the caller's ids that the tree did not take. They are the caller's
    to give back, after the last run that uses them. `mamba_exist`: the caller's state slot was not
    taken.
    """

    node: Node
    length: int
    prefix_len: int
    first_changed: int
    duplicates: tuple[PageIds, ...]
    mamba_exist: bool = True

    @property
    def boundary(self) -> Boundary:
        return Boundary(self.node, self.length)


@dataclass(slots=True)
class EvictParams:
    """How much to give up, or to have free: `num_tokens` of the first component, rounded up to
    pages, or `num_pages` by component id."""

    num_tokens: int = 0
    num_pages: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class EvictResult:
    """What eviction gave up. `device` and `host`: per component, ids to give back to that tier's
    allocator.

    `dropped_tokens`: tokens whose last copy is gone; the rest of the victims' tokens live on in a
    lower tier.
    """

    device: tuple[PageIds, ...]
    host: tuple[PageIds, ...]
    dropped_tokens: int = 0

    def count(self, component: int, tier: Tier = Tier.DEVICE) -> int:
        """Pages given up by one component on one tier."""
        return len((self.device if tier is Tier.DEVICE else self.host)[component])


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens of a lease's prefix by the tier they came from."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


@dataclass(frozen=True, slots=True)
class Outstanding:
    """One thing that somebody still holds: what, who, for how long (seconds), and what of each
    component (pages)."""

    kind: str
    owner: str
    age_s: float
    pages: dict[str, int] = field(default_factory=dict)


def whole_number(name: str, value: Any) -> int:
    """An argument as a plain int; numpy's integers wrap around, and fractions spread.

    Raises:
        TypeError: naming the argument.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}")
    return index(value)


def seconds(name: str, value: Any) -> float | None:
    """A time limit as an argument; None is no limit.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be seconds or None, not {type(value).__name__}")
    limit = math.inf if value > sys.float_info.max else float(value)
    if not limit >= 0:
        raise ValueError(f"{name} must be seconds >= 0 or None, not {value}")
    return limit
