"""A tree vertex and what each component keeps there. Data only; the rules are elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered_cache.tree.policies import EvictionPolicy
    from tiered_cache.types import Namespace, PageIds

BASE: Final = 0
"""Index of the base component: where it is on no tier, a node stands for nothing, and its recency
ranks the leaves."""


class ComponentData:
    """One component's part of one node: where it is, who holds it, how old it is.

    `value`, `host_value`: page ids on the device and on the host (None: not there). The arrays are
    read-only and own their memory. `stamp`: last access, by the tree's operation counter. `queue`:
    the eviction order that the part belongs in, if any; `listed`: the one it stands in until the
    orders are settled, `unsettled` meanwhile; `rank`: where in it.
    `stored`: a belief that storage has it (semantics §8.4). `pending`: the transfer that is
    bringing it to the tier where it is missing, if any (semantics §9.2); what holds the device
    value is stored, what has only a host value is loaded, so there is one at most.
    `mirror_rank`: where it stands in the order of mirrors (−1: not in it).
    """

    __slots__ = (
        "host_lock_ref",
        "host_value",
        "listed",
        "lock_ref",
        "mirror_rank",
        "pending",
        "queue",
        "rank",
        "stamp",
        "stored",
        "unsettled",
        "value",
    )

    def __init__(self, stamp: int = 0) -> None:
        self.value: PageIds | None = None
        self.host_value: PageIds | None = None
        self.lock_ref = 0
        self.host_lock_ref = 0
        self.stamp = stamp
        self.queue: EvictionPolicy | None = None
        self.listed: EvictionPolicy | None = None
        self.rank = -1
        self.unsettled = False
        self.stored = False
        self.pending: object | None = None
        self.mirror_rank = -1


def new_data_for(num_components: int) -> Callable[[int], tuple[ComponentData, ...]]:
    """What makes a node's data, from its stamp. Few components are spelt out: half the time of a
    comprehension."""
    if num_components == 1:
        return lambda stamp: (ComponentData(stamp),)
    if num_components == 2:
        return lambda stamp: (ComponentData(stamp), ComponentData(stamp))
    return lambda stamp: tuple([ComponentData(stamp) for _ in range(num_components)])


class Node:
    """A vertex with the edge that leads to it.

    `key`: the edge's tokens as bytes (see `RadixKey.data`); `end`: absolute depth of its last token
    + 1, which no split ever changes; `child_key`: the key under which it hangs in
    `parent.children`. `device_children`, `host_children`, `live_children`: how many children have
    a base value on the device, on the host, and on any tier; they make the leaf predicates O(1).
    `only`: its one child, or None when there are more, or when a look at the edge would cost more
    than finding it by its first page; never the root's, whose children differ by namespace.
    `base`: the first of `data`.
    `is_gap`: it is nowhere, above host copies that were held when it went (semantics §6.4).
    """

    __slots__ = (
        "__weakref__",
        "base",
        "child_key",
        "children",
        "created",
        "data",
        "device_children",
        "end",
        "hit_count",
        "host_children",
        "is_gap",
        "key",
        "live_children",
        "namespace",
        "only",
        "page_keys",
        "parent",
        "priority",
    )

    def __init__(
        self,
        key: bytes,
        child_key: bytes,
        end: int,
        parent: Node | None,
        namespace: Namespace,
        data: tuple[ComponentData, ...],
        created: int = 0,
        priority: int = 0,
        hit_count: int = 0,
    ) -> None:
        self.key = key
        self.child_key = child_key
        self.end = end
        self.parent = parent
        self.namespace = namespace
        self.data = data
        self.base = data[BASE]
        self.created = created
        self.priority = priority
        self.hit_count = hit_count
        self.children: dict[bytes, Node] = {}
        self.only: Node | None = None
        self.device_children = 0
        self.host_children = 0
        self.live_children = 0
        self.is_gap = False
        self.page_keys: list[bytes] | None = None

    @property
    def start(self) -> int:
        """Absolute depth of the edge's first token."""
        return self.parent.end if self.parent is not None else 0

    def __repr__(self) -> str:
        parts = []
        for data in self.data:
            tiers = ("D" if data.value is not None else "-") + (
                "H" if data.host_value is not None else "-"
            )
            locks = (
                f" lock {data.lock_ref}/{data.host_lock_ref}"
                if data.lock_ref or data.host_lock_ref
                else ""
            )
            parts.append(tiers + locks)
        return f"<Node [{self.start}:{self.end}) {', '.join(parts)}, {self.hit_count} hits>"
