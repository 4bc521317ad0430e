"""A tree with its two allocators and a byte oracle: what a cache does with it, in a few words.

Every page's content is derived from the namespace and all tokens up to the page's end, so that a
page in the wrong place, freed too early or handed out twice is seen as wrong content, whatever the
counters say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tiered_cache.keys import RadixKey
from tiered_cache.observe import Observer
from tiered_cache.pools.allocator import PageAllocator
from tiered_cache.testing.component_scene import contents, path_to, whole_key
from tiered_cache.tree.components.base import Eviction
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.locks import Receipt
from tiered_cache.tree.node import Node
from tiered_cache.tree.policies import EvictionPolicy
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import (
    Boundary,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    PageIds,
    Tier,
)

SEQUENCE_LENGTH: Final = 100_000

Policy = str | Callable[[], EvictionPolicy]


def seq(name: str, stop: int, start: int = 0) -> list[int]:
    """`A[start:stop)` of a sequence of distinct tokens that shares none with any other name's."""
    base = SEQUENCE_LENGTH * int.from_bytes(name.encode(), "big")
    return list(range(base + start, base + stop))


class Rig:
    """One tree of the Full component over a device and a host tier of that many pages."""

    def __init__(
        self,
        page_size: int = 16,
        pages: int = 64,
        host_pages: int = 64,
        policy: Policy = "lru",
        host_policy: Policy = "lru",
        observers: Sequence[Observer] = (),
    ) -> None:
        self.page_size = page_size
        self.tree = RadixTree(
            [FullComponent("full")], page_size, policy, host_policy, observers=observers
        )
        self.device = PageAllocator(pages, check=True)
        self.host = PageAllocator(host_pages, check=True)
        self.content: dict[int, bytes] = {}
        self.host_content: dict[int, bytes] = {}
        self.private = 0

    # --- what a request does ----------------------------------------------------------------------

    def key(self, tokens: Any, **namespace: Any) -> RadixKey:
        return tokens if isinstance(tokens, RadixKey) else RadixKey(tokens, **namespace)

    def match(self, tokens: Any, limit: int | None = None, **namespace: Any) -> MatchResult:
        return self.tree.match_prefix(MatchPrefixParams(self.key(tokens, **namespace), limit))

    def hit(self, tokens: Any, limit: int | None = None, **namespace: Any) -> tuple[int, int]:
        """(device, host) lengths a match returns; the pages it names hold the right bytes."""
        key = self.key(tokens, **namespace)
        found = self.match(key, limit)
        pages = found.pages[0].tolist()
        assert len(pages) * self.page_size == found.device_length
        wanted = contents(key, self.page_size)
        assert [self.content[page] for page in pages] == wanted[: len(pages)]
        return found.device_length, found.host_hit_length

    def compute(self, key: RadixKey, first_page: int = 0) -> PageIds:
        """Pages of one's own with the state of a key from `first_page` on; −1 for those before."""
        wanted = contents(key, self.page_size)
        ids = np.full(len(wanted), -1, np.int32)
        own = self.device.allocate(len(wanted) - first_page)
        assert own is not None, "the test's device pool is too small"
        ids[first_page:] = own
        self.private += len(own)
        for page, content in zip(own.tolist(), wanted[first_page:], strict=True):
            self.content[page] = content
        return ids

    def give_back(self, ids: PageIds) -> None:
        self.device.free(ids)
        self.private -= len(ids)

    def publish(self, tokens: Any, *, counted: bool = True, **rest: Any) -> InsertResult:
        """A whole request: match, lock, compute what is missing, insert, unlock.

        `counted`: as a lease does, count a hit of what was matched.
        """
        namespace = {
            name: rest.pop(name)
            for name in ("extra_key", "cache_salt", "is_bigram")
            if name in rest
        }
        key = self.key(tokens, **namespace)
        found = self.match(key)
        length = found.device_length
        receipt = self.tree.inc_lock_ref(found.device_boundary)
        if counted:
            self.tree.count_hits(receipt)
        result = self.insert(key, self.compute(key, length // self.page_size), length, **rest)
        self.tree.dec_lock_ref(receipt)
        return result

    def publish_own(self, tokens: Any, **namespace: Any) -> InsertResult:
        """A request that has matched nothing and computes everything itself."""
        key = self.key(tokens, **namespace)
        return self.insert(key, self.compute(key))

    def insert(self, key: RadixKey, ids: PageIds, owned: int = 0, **rest: Any) -> InsertResult:
        """Insert pages that `compute` gave; give the duplicates back at once."""
        rest.setdefault("inserted_len", owned)
        result = self.tree.insert(InsertParams(key, (ids,), prev_prefix_len=owned, **rest))
        self.private -= result.length // self.page_size - owned // self.page_size
        self.private += len(result.duplicates[0])
        self.give_back(result.duplicates[0])
        return result

    def lock(self, tokens: Any, limit: int | None = None, **namespace: Any) -> Receipt:
        return self.tree.inc_lock_ref(self.match(tokens, limit, **namespace).device_boundary)

    def publish_and_lock(self, tokens: Any, length: int, **namespace: Any) -> Receipt:
        """Publish the first `length` tokens and hold them."""
        key = self.key(tokens, **namespace)
        self.publish(key.tokens[:length], **namespace)
        return self.lock(key, length)

    # --- what a cache does ------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> EvictResult:
        """Free at least so many tokens of the device, if possible."""
        return self._freed(self.tree.evict((-(-num_tokens // self.page_size),)))

    def evict_host(self, num_tokens: int) -> EvictResult:
        return self._freed(self.tree.evict_host((-(-num_tokens // self.page_size),)))

    def _freed(self, result: EvictResult) -> EvictResult:
        self.device.free(result.device[0])
        self.host.free(result.host[0])
        return result

    def backup(self, tokens: Any, **namespace: Any) -> None:
        """Copy a cached prefix to the host, and commit it."""
        found = self.match(tokens, **namespace)
        pages = found.pages[0]
        ids = self.host.allocate(len(pages))
        assert ids is not None, "the test's host pool is too small"
        for page, copy in zip(pages.tolist(), ids.tolist(), strict=True):
            self.host_content[copy] = self.content[page]
        left = self.tree.commit_transfer(found.device_boundary, 0, Tier.HOST, ids)
        self.host.free(left)

    def load_back(self, tokens: Any, **namespace: Any) -> int:
        """Bring back to the device what the host has of a prefix; tokens brought."""
        found = self.match(tokens, **namespace)
        if not found.host_hit_length:
            return 0
        boundary = found.best_boundary
        node = self.tree.cut(boundary)
        source = [
            int(page)
            for step in path_to(node)
            if step.data[0].value is None
            for page in host_value(step)
        ]
        ids = self.device.allocate(len(source))
        assert ids is not None, "the test's device pool is too small"
        for page, copy in zip(source, ids.tolist(), strict=True):
            self.content[copy] = self.host_content[page]
        self.device.free(self.tree.commit_transfer(boundary, 0, Tier.DEVICE, ids))
        return len(source) * self.page_size

    def host_only(self, tokens: Any, **namespace: Any) -> Boundary:
        """Publish, back up and evict from the device; nothing else may be evictable."""
        key = self.key(tokens, **namespace)
        self.publish(key)
        self.backup(key)
        self.evict(len(key))
        found = self.match(key)
        assert (found.device_length, found.host_hit_length) == (0, self.floor(len(key)))
        return found.best_boundary

    def lose_on_host(self, node: Node) -> None:
        """Give a node's host copy up, whatever is below it; its pages stay out (`host_gap`)."""
        self.tree.components[0].evict_component(node, Tier.HOST, Eviction(Tier.HOST, 1))

    def host_gap(self) -> PageIds:
        """Host pages that the allocator has given out and the tree does not hold."""
        pages = set(range(self.host.capacity)) - set(self.host.free_ids().tolist())
        for node in self.tree.nodes():
            if node.data[0].host_value is not None:
                pages -= set(node.data[0].host_value.tolist())
        return np.array(sorted(pages), np.int32)

    # --- proof ------------------------------------------------------------------------------------

    def floor(self, length: int) -> int:
        return length - length % self.page_size

    def check(self) -> None:
        """The tree's own proof, the account of every page, and the content of every page."""
        tree = self.tree
        tree.check_integrity()
        for tier, pool, content in (
            (Tier.DEVICE, self.device, self.content),
            (Tier.HOST, self.host, self.host_content),
        ):
            held = tree.evictable_size(0, tier) + tree.protected_size(0, tier)
            private = self.private if tier is Tier.DEVICE else 0
            assert pool.num_free + held + private == pool.capacity
            free = set(pool.free_ids().tolist())
            for node in tree.nodes():
                value = node.data[0].value if tier is Tier.DEVICE else node.data[0].host_value
                if value is None:
                    continue
                pages = value.tolist()
                assert not free.intersection(pages), "a page is both free and cached"
                wanted = contents(whole_key(node), self.page_size)[node.start // self.page_size :]
                assert [content[page] for page in pages] == wanted

    def spoil_free_pages(self) -> None:
        """Overwrite everything that the allocators would hand out."""
        for page in self.device.free_ids().tolist():
            self.content[page] = b"spoilt"
        for page in self.host.free_ids().tolist():
            self.host_content[page] = b"spoilt"


# --- reading a tree -------------------------------------------------------------------------------


def host_value(node: Node) -> PageIds:
    value = node.data[0].host_value
    assert value is not None
    return value


def device_value(node: Node) -> PageIds:
    value = node.data[0].value
    assert value is not None
    return value


def spans(tree: RadixTree) -> list[tuple[int, int]]:
    """(start, end) of every node, sorted."""
    return sorted((node.start, node.end) for node in tree.nodes())


def order_of(tree: RadixTree, tier: Tier = Tier.DEVICE) -> list[Node]:
    """The leaves of a tier, the next victim first."""
    return list(tree.leaves.in_order(tier))
