"""A tree of several components with their allocators and a byte oracle, and a model by pages of
where a prefix may end: no nodes, no edges, just what is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tests.tree.helpers import contents, path_to, whole_key
from tiered_cache.keys import RadixKey
from tiered_cache.pools.allocator import PageAllocator
from tiered_cache.tree.components.base import Eviction, TreeComponent
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.swa import SWAComponent
from tiered_cache.tree.locks import Receipt
from tiered_cache.tree.node import Node
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import (
    NO_PAGE,
    Boundary,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    PageIds,
    Tier,
)

TIERS: Final = (Tier.DEVICE, Tier.HOST)

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


class HybridRig:
    """What a cache does with such a tree, in a few words. Ids of all components are separate."""

    def __init__(
        self,
        components: Sequence[TreeComponent],
        page_size: int = 4,
        pages: int = 64,
        host_pages: int = 64,
        observers: Any = (),
    ) -> None:
        self.page_size = page_size
        self.tree = RadixTree(components, page_size, observers=observers)
        self.pools = {
            tier: [PageAllocator(size, check=True) for _ in components]
            for tier, size in ((Tier.DEVICE, pages), (Tier.HOST, host_pages))
        }
        self.content: dict[tuple[Tier, int, int], bytes] = {}

    @property
    def components(self) -> Sequence[TreeComponent]:
        return self.tree.components

    # --- what a request does ----------------------------------------------------------------------

    def match(self, key: RadixKey, limit: int | None = None) -> MatchResult:
        return self.tree.match_prefix(MatchPrefixParams(key, limit))

    def compute(
        self, key: RadixKey, first: int, given_up: int = 0, states: Sequence[int] = ()
    ) -> tuple[PageIds, ...] | None:
        """Pages of one's own from depth `first` on: of windows without what was given up, of
        states at these depths. None: there is no room."""
        size = self.page_size
        num_pages = len(key) // size
        wanted = []
        for component in self.components:
            if isinstance(component, FullComponent):
                wanted.append(range(first // size, num_pages))
            elif isinstance(component, SWAComponent):
                wanted.append(range(max(first, -(-given_up // size) * size) // size, num_pages))
            else:
                depths = [depth for depth in states if first < depth <= num_pages * size]
                wanted.append([depth // size - 1 for depth in depths])
        pools = self.pools[Tier.DEVICE]
        if any(pool.num_free < len(at) for pool, at in zip(pools, wanted, strict=True)):
            return None
        made = []
        for index, (pool, at) in enumerate(zip(pools, wanted, strict=True)):
            ids = np.full(num_pages, NO_PAGE, np.int32)
            mine = pool.allocate(len(at))
            assert mine is not None
            ids[list(at)] = mine
            for page in at:
                self.content[Tier.DEVICE, index, int(ids[page])] = self.wanted(key, index, page)
            made.append(ids)
        return tuple(made)

    def wanted(self, key: RadixKey, index: int, page: int) -> bytes:
        """What a page, or the state that ends it, must hold."""
        return contents(key, self.page_size)[page] + bytes([index])

    def insert(self, key: RadixKey, pages: tuple[PageIds, ...], **rest: Any) -> InsertResult:
        """Publish, and give back at once what the tree did not take."""
        result = self.tree.insert(InsertParams(key, pages, **rest))
        for pool, ids in zip(self.pools[Tier.DEVICE], result.duplicates, strict=True):
            pool.free(ids)
        return result

    def publish(
        self, tokens: Any, *, given_up: int = 0, states: Sequence[int] = (), **rest: Any
    ) -> InsertResult | None:
        """A whole request; None: there was no room."""
        key = tokens if isinstance(tokens, RadixKey) else RadixKey(tokens)
        found = self.match(key)
        receipt = self.tree.inc_lock_ref(found.device_boundary)
        try:
            pages = self.compute(key, found.device_length, given_up, states)
            if pages is None:
                return None
            return self.insert(
                key,
                pages,
                prev_prefix_len=found.device_length,
                inserted_len=found.device_length,
                swa_evicted_seqlen=given_up,
                **rest,
            )
        finally:
            self.tree.dec_lock_ref(receipt)

    # --- what a cache does ------------------------------------------------------------------------

    def need(self, index: int, num_pages: int) -> list[int]:
        return [num_pages if other == index else 0 for other in range(len(self.components))]

    def evict(self, index: int, num_pages: int, tier: Tier = Tier.DEVICE) -> EvictResult:
        evict = self.tree.evict if tier is Tier.DEVICE else self.tree.evict_host
        result = evict(self.need(index, num_pages))
        for pools, given_up in (
            (self.pools[Tier.DEVICE], result.device),
            (self.pools[Tier.HOST], result.host),
        ):
            for pool, ids in zip(pools, given_up, strict=True):
                pool.free(ids)
        return result

    def move(self, boundary: Boundary, index: int, target: Tier) -> bool:
        """Copy what the path to a boundary lacks of a component on a tier. False: there was not
        room for all of it."""
        source = Tier.HOST if target is Tier.DEVICE else Tier.DEVICE
        pool = self.pools[target][index]
        for piece in self.tree.plan_transfer(boundary, index, target):
            assert piece.ids is not None, "nothing is pending"
            ids = pool.allocate(len(piece.ids))
            if ids is None:
                return False
            for old, new in zip(piece.ids.tolist(), ids.tolist(), strict=True):
                self.content[target, index, new] = self.content[source, index, old]
            end = Boundary(boundary.node, piece.stop)
            pool.free(self.tree.commit_transfer(end, index, target, ids))
        return True

    def reset(self) -> None:
        self.tree.reset()
        for pools in self.pools.values():
            for pool in pools:
                pool.reset()

    # --- the model --------------------------------------------------------------------------------

    def there(self, key: RadixKey, *, device_only: bool) -> list[list[bool]]:
        """Per component, which pages of a key (or states that end them) the tree has."""
        size = self.page_size
        have = [[False] * (len(key) // size) for _ in self.components]
        data = key.data
        for node in self.tree.nodes():
            if node.namespace != key.namespace:
                continue
            mine = whole_key(node)
            overlap = key.overlap
            shared = 0  # whole pages of the key that the node's path has too
            while (shared + 1) * size <= min(node.end, len(key)) and mine.data[
                : (shared + 1) * size * 8 + overlap
            ] == data[: (shared + 1) * size * 8 + overlap]:
                shared += 1
            for index, component in enumerate(self.components):
                part = node.data[index]
                if part.value is None and (device_only or part.host_value is None):
                    continue
                if component.is_per_page:
                    for page in range(node.start // size, min(node.end // size, shared)):
                        have[index][page] = True
                elif shared * size >= node.end:
                    have[index][node.end // size - 1] = True
        return have

    def legal(self, key: RadixKey, *, device_only: bool) -> list[int]:
        """Depths at which a prefix of a key may end (semantics §3.4), by pages."""
        size = self.page_size
        have = self.there(key, device_only=device_only)
        depths = [0]
        for num_pages in range(1, len(key) // size + 1):
            if all(
                self._agrees(component, have[index][:num_pages])
                for index, component in enumerate(self.components)
            ):
                depths.append(num_pages * size)
        return depths

    def _agrees(self, component: TreeComponent, have: list[bool]) -> bool:
        if isinstance(component, FullComponent):
            return all(have)
        if isinstance(component, SWAComponent):
            pages = -(-component.window // self.page_size)
            return all(have[-pages:])
        return have[-1]

    def hit(self, key: RadixKey, limit: int | None = None) -> tuple[int, int]:
        """(device, best) lengths of a match; what a prefix needs is there and right."""
        found = self.match(key, limit)
        salt = key.namespace.cache_salt
        cut = RadixKey(key.tokens[: len(key) if limit is None else limit], None, salt)
        assert found.device_length == max(self.legal(cut, device_only=True))
        assert found.best_length == max(self.legal(cut, device_only=False))
        self.check_prefix(key, found.device_length, found.pages)
        return found.device_length, found.best_length

    def check_prefix(self, key: RadixKey, depth: int, pages: tuple[PageIds, ...]) -> None:
        """What a prefix needs of each component is named, and is what it should be."""
        size = self.page_size
        for index, component in enumerate(self.components):
            assert len(pages[index]) == depth // size
            first = 0
            if isinstance(component, SWAComponent):
                first = max(0, depth - component.window) // size
            elif isinstance(component, MambaComponent):
                first = max(0, depth // size - 1)
            for page in range(first, depth // size):
                found = self.content[Tier.DEVICE, index, int(pages[index][page])]
                assert found == self.wanted(key, index, page)

    # --- looking at one component -----------------------------------------------------------------

    def path(self, tokens: Any) -> list[Node]:
        """The nodes that a key passes, root first; dates nothing."""
        key = tokens if isinstance(tokens, RadixKey) else RadixKey(tokens)
        return self.tree._known(key, len(key) // self.page_size * self.page_size)[0]

    def node(self, tokens: Any) -> Node:
        """The node that ends where a key does."""
        found = self.path(tokens)[-1]
        assert found.end == len(tokens)
        return found

    def parts(self, tokens: Any, index: int, tier: Tier = Tier.DEVICE) -> list[tuple[int, int]]:
        """Which of a key's nodes, by start and end, have a component's part on a tier."""
        return [
            (node.start, node.end)
            for node in self.path(tokens)
            if (node.data[index].value if tier is Tier.DEVICE else node.data[index].host_value)
            is not None
        ]

    def drop(self, tokens: Any, index: int, tier: Tier = Tier.DEVICE) -> None:
        """Make a tombstone of the node that ends where a key does, whatever its age."""
        eviction = Eviction(tier, len(self.components))
        self.components[index].evict_component(self.node(tokens), tier, eviction)
        result = eviction.result()
        ids = (result.device if tier is Tier.DEVICE else result.host)[index]
        self.pools[tier][index].free(ids)

    def held(self, tier: Tier = Tier.DEVICE) -> list[int]:
        """Per component, pages that locks keep."""
        return [self.tree.protected_size(index, tier) for index in range(len(self.components))]

    def kept(self, tier: Tier = Tier.DEVICE) -> list[int]:
        """Per component, all pages that the tree has."""
        return [
            self.tree.evictable_size(index, tier) + held
            for index, held in enumerate(self.held(tier))
        ]

    def locks(self, tokens: Any, index: int) -> list[int]:
        """The device locks of a component along a key's path."""
        return [node.data[index].lock_ref for node in self.path(tokens)]

    # --- proof ------------------------------------------------------------------------------------

    def check(self) -> None:
        """The tree's own proof, the account of every page, and the content of every page."""
        self.tree.check_integrity()
        for tier in TIERS:
            for index, pool in enumerate(self.pools[tier]):
                held = self.tree.evictable_size(index, tier) + self.tree.protected_size(index, tier)
                assert pool.num_free + held == pool.capacity, (tier, index)
                free = set(pool.free_ids().tolist())
                for node in self.tree.nodes():
                    data = node.data[index]
                    value = data.value if tier is Tier.DEVICE else data.host_value
                    if value is None:
                        continue
                    assert not free.intersection(value.tolist()), "a page is free and cached"
                    key, last = whole_key(node), node.end // self.page_size
                    for page, held_id in zip(
                        range(last - len(value), last), value.tolist(), strict=True
                    ):
                        assert self.content[tier, index, held_id] == self.wanted(key, index, page)


def state_depths(rig: HybridRig, key: RadixKey, tier: Tier = Tier.DEVICE) -> list[int]:
    """Where a key's path has states, by the last component."""
    index = len(rig.components) - 1
    nodes: list[Node] = path_to(rig.match(key).best_node)
    return [
        node.end
        for node in nodes
        if (node.data[index].value if tier is Tier.DEVICE else node.data[index].host_value)
        is not None
    ]


__all__ = ["STACKS", "HybridRig", "Receipt", "state_depths"]
