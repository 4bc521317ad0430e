"""What the suite for components plays in: a tree with its allocators, a byte oracle, a model by
pages of where a prefix may end, and random walks.

Every page's content is derived from the namespace and all tokens up to the page's end, so that a
page in the wrong place, freed too early or handed out twice is seen as wrong content, whatever the
counters say. The model knows no nodes and no edges, just what is there.

Owns: what a cache does with a tree, in a few words. Refuses to know: which component it is.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiered_cache.keys import TOKEN_BYTES, RadixKey
from tiered_cache.pools.allocator import PageAllocator
from tiered_cache.tree.components.base import Eviction, TreeComponent
from tiered_cache.tree.components.swa import SWAComponent
from tiered_cache.tree.node import BASE
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

if TYPE_CHECKING:
    from tiered_cache.observe import Observer
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.tree.node import Node

TIERS: Final = (Tier.DEVICE, Tier.HOST)

EVERYTHING: Final = 10_000
"""More pages than there are."""

Needed = Callable[[int, int], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Role:
    """What the model knows of a component.

    `needed(depth, page_size)`: the pages, by index, that a prefix of so many tokens needs of it.
    `brings(pages)`: of the pages that a request computes, those that it has an id for.
    """

    needed: Needed
    brings: Callable[[range], Iterable[int]] = lambda pages: pages


def role_of(component: TreeComponent) -> Role:
    """Of the components that are shipped; of others, that they need every page, or the state at
    the end."""
    if isinstance(component, SWAComponent):
        window = component.window
        return Role(lambda depth, size: range(max(0, depth - window) // size, depth // size))
    if component.is_per_page:
        return Role(lambda depth, size: range(depth // size))
    return Role(lambda depth, size: [depth // size - 1])


def contents(key: RadixKey, page_size: int) -> list[bytes]:
    """What each whole page of a key must hold."""
    namespace = key.namespace
    state = hashlib.blake2b(
        repr((namespace.extra_key, namespace.cache_salt, namespace.is_bigram)).encode(),
        digest_size=8,
    )
    extra = 1 if namespace.is_bigram else 0
    pages = []
    tokens = key.tokens
    for page in range(len(key) // page_size):
        state.update(tokens[page * page_size : (page + 1) * page_size + extra].tobytes())
        pages.append(state.copy().digest())
    return pages


def path_to(node: Node) -> list[Node]:
    """The nodes from below the root to `node`."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def whole_key(node: Node) -> RadixKey:
    """The key that ends where a node ends."""
    namespace = node.namespace
    overlap = TOKEN_BYTES if namespace.is_bigram else 0
    parts = [step.key for step in path_to(node)]
    data = b"".join(part[: len(part) - overlap] for part in parts[:-1]) + parts[-1]
    return RadixKey(
        np.frombuffer(data, np.int64),
        namespace.extra_key,
        namespace.cache_salt,
        namespace.is_bigram,
    )


def part_of(node: Node, index: int, tier: Tier) -> PageIds | None:
    """The ids of one component's part of a node on a tier."""
    data = node.data[index]
    return data.value if tier is Tier.DEVICE else data.host_value


class TreeScene:
    """What a cache does with a tree of these components, in a few words. Ids of all components are
    separate.

    Args:
        components: in eviction order, the base first.
        pages, host_pages: how many ids of each component there are.
        roles: what the model knows of each; default: as `role_of`.
    """

    def __init__(
        self,
        components: Sequence[TreeComponent],
        page_size: int = 4,
        pages: int = 64,
        host_pages: int = 64,
        observers: Sequence[Observer] = (),
        roles: Sequence[Role] | None = None,
    ) -> None:
        self.page_size = page_size
        self.tree = RadixTree(components, page_size, observers=observers)
        self.roles = list(map(role_of, components)) if roles is None else roles
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
        self,
        key: RadixKey,
        first: int,
        given_up: int = 0,
        states: Sequence[int] = (),
        gaps: Container[int] = (),
    ) -> tuple[PageIds, ...] | None:
        """Pages of one's own from depth `first` on: of what has tombstones without those that were
        given up, and without the pages `gaps`; of states at these depths. None: there is no
        room."""
        size = self.page_size
        num_pages = len(key) // size
        wanted: list[list[int]] = []
        for component, role in zip(self.components, self.roles, strict=True):
            if component.is_per_page:
                begin = max(first, -(-given_up // size) * size if component.has_tombstones else 0)
                pages = list(role.brings(range(begin // size, num_pages)))
                if component.has_tombstones:
                    pages = [page for page in pages if page not in gaps]
                wanted.append(pages)
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
            ids[at] = mine
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
        key = as_key(tokens)
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

    def publish_own(
        self,
        tokens: Any,
        *,
        given_up: int = 0,
        states: Sequence[int] = (),
        gaps: Container[int] = (),
    ) -> InsertResult | None:
        """A request that has matched nothing and computed everything itself."""
        key = as_key(tokens)
        pages = self.compute(key, 0, given_up, states, gaps)
        return None if pages is None else self.insert(key, pages, swa_evicted_seqlen=given_up)

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
        """Copy what the path to a boundary lacks of a component on a tier; False: there was not
        room for all."""
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

    def move_all(self, boundary: Boundary, target: Tier) -> bool:
        """The same of every component, whether or not there is room for the one before."""
        moved = [self.move(boundary, index, target) for index in range(len(self.components))]
        return all(moved)

    def fetch(self, key: RadixKey, indices: Iterable[int] | None = None) -> bool:
        """Put what a prefix of that length needs of each component on the host, as if it came from
        storage; False: there was not room for all."""
        size, pool = self.page_size, self.pools[Tier.HOST]
        depth = len(key) // size * size
        walked = self.match(key).full_hit_length // size
        for index in range(len(self.components)) if indices is None else indices:
            pages = list(self.roles[index].needed(depth, size))
            if index == BASE:
                pages = pages[walked:]
            ids = pool[index].allocate(len(pages))
            if ids is None:
                return False
            for page, of in zip(pages, ids.tolist(), strict=True):
                self.content[Tier.HOST, index, of] = self.wanted(key, index, page)
            if pages:
                _, left = self.tree.insert_host(key, pages[0] * size, index, ids)
                pool[index].free(left)
        return True

    def reset(self) -> None:
        self.tree.reset()
        for pools in self.pools.values():
            for pool in pools:
                pool.reset()

    # --- looking at one component -----------------------------------------------------------------

    def path(self, tokens: Any) -> list[Node]:
        """The nodes that a key passes, root first; dates nothing."""
        key = as_key(tokens)
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
            if part_of(node, index, tier) is not None
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

    # --- the model --------------------------------------------------------------------------------

    def there(self, key: RadixKey, *, device_only: bool) -> list[list[bool]]:
        return pages_there(self.tree, key, device_only=device_only)

    def legal(self, key: RadixKey, *, device_only: bool) -> list[int]:
        have = self.there(key, device_only=device_only)
        return legal_depths(self.roles, have, self.page_size)

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
        for index, role in enumerate(self.roles):
            assert len(pages[index]) == depth // size
            for page in role.needed(depth, size) if depth else ():
                found = self.content.get((Tier.DEVICE, index, int(pages[index][page])))
                assert found == self.wanted(key, index, page), (
                    f"page {page} of {self.components[index].id} is not what {depth} tokens need"
                )

    # --- proof ------------------------------------------------------------------------------------

    def check(self) -> None:
        """The tree's own proof, the account of every page, and the content of every page."""
        self.tree.check_integrity()
        for tier in TIERS:
            kept = self.kept(tier)
            for index, pool in enumerate(self.pools[tier]):
                name = f"{self.components[index].id} on the {tier.value}"
                assert pool.num_free + kept[index] == pool.capacity, f"{name}: pages are lost"
                free = set(pool.free_ids().tolist())
                for node in self.tree.nodes():
                    value = part_of(node, index, tier)
                    if value is None:
                        continue
                    assert not free.intersection(value.tolist()), f"{name}: free and cached"
                    key, last = whole_key(node), node.end // self.page_size
                    pages = range(last - len(value), last)
                    for page, held_id in zip(pages, value.tolist(), strict=True):
                        found = self.content[tier, index, held_id]
                        assert found == self.wanted(key, index, page), f"{name}: wrong page"


def pages_there(tree: RadixTree, key: RadixKey, *, device_only: bool) -> list[list[bool]]:
    """Per component, which pages of a key (or states that end them) a tree has."""
    size = tree.page_size
    have = [[False] * (len(key) // size) for _ in tree.components]
    data, overlap = key.data, key.overlap
    for node in tree.nodes():
        if node.namespace != key.namespace:
            continue
        mine = whole_key(node)
        shared = 0  # whole pages of the key that the node's path has too
        while (shared + 1) * size <= min(node.end, len(key)) and mine.data[
            : (shared + 1) * size * TOKEN_BYTES + overlap
        ] == data[: (shared + 1) * size * TOKEN_BYTES + overlap]:
            shared += 1
        for index, component in enumerate(tree.components):
            part = node.data[index]
            if part.value is None and (device_only or part.host_value is None):
                continue
            if component.is_per_page:
                for page in range(node.start // size, min(node.end // size, shared)):
                    have[index][page] = True
            elif shared * size >= node.end:
                have[index][node.end // size - 1] = True
    return have


def legal_depths(
    roles: Sequence[Role], have: Sequence[Sequence[bool]], page_size: int
) -> list[int]:
    """Depths at which a prefix may end: where every component has what is needed (semantics
    §3.3). `have`: as `pages_there` says."""
    return [0] + [
        depth
        for depth in range(page_size, len(have[BASE]) * page_size + 1, page_size)
        if all(
            have[index][page]
            for index, role in enumerate(roles)
            for page in role.needed(depth, page_size)
        )
    ]


def as_key(tokens: Any) -> RadixKey:
    return tokens if isinstance(tokens, RadixKey) else RadixKey(tokens)


# --- random walks ---------------------------------------------------------------------------------

STEPS: Final = (
    "publish",
    "publish",
    "publish_own",
    "evict_base",
    "evict_part",
    "evict_part",
    "evict_host",
    "back_up",
    "back_up",
    "back_up",
    "evict_base",
    "load_back",
    "load_back",
    "load_back",
    "lock",
    "fetch",
    "host_lock",
    "unlock",
    "release_early",
    "advance",
    "believe",
    "reset",
)


class Walk:
    """One random walk: keys of two token values, that go along few trunks and leave them anywhere,
    so that everything branches and splits and is met again. After every step everything is proven.

    Args:
        seed: of all chances.
        make: the scene, for a page size and a number of pages on the host.

    Attributes:
        met: how often each step was possible, and what it came upon.
    """

    def __init__(self, seed: object, make: Callable[[int, int], TreeScene]) -> None:
        self.chance = chance = random.Random(str(seed))
        size = chance.choice([1, 2, 4])
        self.trunks = [[chance.randrange(1, 3) for _ in range(32)] for _ in range(3)]
        self.scene = make(size, chance.choice([12, 60]))
        self.tree = self.scene.tree
        self.held: list[tuple[Receipt, RadixKey, tuple[PageIds, ...] | None]] = []
        self.beliefs = False
        self.met: Counter[str] = Counter()

    def run(self, num_steps: int) -> Counter[str]:
        for _ in range(num_steps):
            self.step()
        self.end()
        return self.met

    def step(self) -> None:
        chance, scene = self.chance, self.scene
        tokens = self.trunks[chance.randrange(3)][: chance.randrange(32)]
        if chance.random() < 0.5:
            tokens = tokens + [chance.randrange(1, 3) for _ in range(chance.randrange(10))]
        key = RadixKey(tokens, None, chance.choice(["", "", "", "t"]))
        name = chance.choice(STEPS)
        if getattr(self, name)(key) is False:
            return
        self.met[name] += 1
        scene.check()
        for receipt, of, pages in self.held:
            if pages is not None:
                scene.check_prefix(of, receipt.depth, pages)
                assert self._needed_is_there(receipt)
        if not self.beliefs:  # or a dead node may hide what the host has below it
            device, best = scene.hit(key, chance.choice([None, len(key) // 2]))
            self.met["shorter on the device"] += device < best
            self.met["a boundary below a tombstone"] += self._is_below_a_tombstone(key, device)

    def _needed_is_there(self, receipt: Receipt) -> bool:
        """What the holder of a prefix holds of each component is on the device."""
        return all(
            node.data[component.index].value is not None
            for component in self.scene.components
            if receipt.parts[component.index] is not None
            for node in component.held(receipt.node, Tier.DEVICE, receipt.parts[component.index])
        )

    def _is_below_a_tombstone(self, key: RadixKey, depth: int) -> bool:
        have = self.scene.there(key, device_only=True)
        return any(not all(part[: depth // self.scene.page_size]) for part in have[1:])

    def end(self) -> None:
        """Release everything, evict everything: nothing is left."""
        for receipt, *_ in self.held:
            self.tree.let_go(receipt)
        self.scene.check()
        num_components = len(self.scene.components)
        for tier in TIERS:
            for index in self.chance.sample(range(num_components), min(2, num_components)):
                self.scene.evict(index, EVERYTHING, tier)
                self.scene.check()
            self.scene.evict(BASE, EVERYTHING, tier)
        self.scene.check()
        assert self.tree.num_nodes == 0

    # --- steps; False when one is not possible now ------------------------------------------------

    def _a_part(self) -> int:
        """A component beside the base, if there is one."""
        return self.chance.randrange(1, max(2, len(self.scene.components))) % len(
            self.scene.components
        )

    def _states(self, key: RadixKey) -> list[int]:
        size = self.scene.page_size
        depths = range(size, len(key) + 1, size)
        return sorted(self.chance.sample(depths, min(len(depths), self.chance.randrange(4))))

    def publish(self, key: RadixKey) -> bool | None:
        given_up = self.chance.choice([0, self.chance.randrange(len(key) + 1)])
        prompt_len = self.chance.choice([None, len(key) // 2])
        result = self.scene.publish(
            key, given_up=given_up, states=self._states(key), prompt_len=prompt_len
        )
        return None if result is not None else False

    def publish_own(self, key: RadixKey) -> bool | None:
        chance = self.chance
        given_up = chance.choice([0, chance.randrange(len(key) + 1)])
        gaps = chance.sample(range(40), chance.choice([0, 8]))
        states = self._states(key)
        result = self.scene.publish_own(key, given_up=given_up, states=states, gaps=gaps)
        return None if result is not None else False

    def evict_base(self, key: RadixKey) -> None:
        self.scene.evict(BASE, self.chance.randrange(1, 8))

    def evict_part(self, key: RadixKey) -> None:
        index = self._a_part()
        wanted = self.chance.randrange(1, 4)
        before = self.tree.evictable_size(index)
        gone = self.scene.evict(index, wanted).count(index)
        assert gone >= min(wanted, before)

    def evict_host(self, key: RadixKey) -> None:
        index = self.chance.randrange(len(self.scene.components))
        self.scene.evict(index, self.chance.randrange(1, 6), Tier.HOST)

    def back_up(self, key: RadixKey) -> None:
        self.scene.move_all(self.scene.match(key).device_boundary, Tier.HOST)

    def load_back(self, key: RadixKey) -> bool | None:
        found = self.scene.match(key)
        if not found.host_hit_length:
            return False
        target = found.best_length
        if self.scene.move_all(found.best_boundary, Tier.DEVICE):
            assert self.scene.match(key).device_length >= target
        return None

    def fetch(self, key: RadixKey) -> bool | None:
        size = self.scene.page_size
        length = len(key) // size * size
        if not length or not self.scene.fetch(key):
            return False
        if not self.beliefs:
            assert self.scene.match(key).best_length == length
        return None

    def lock(self, key: RadixKey) -> bool | None:
        if len(self.held) > 5:
            return False
        found = self.scene.match(key)
        told = self.tree.would_protect(found.device_boundary)
        before = self.scene.held()
        receipt = self.tree.inc_lock_ref(found.device_boundary)
        assert [now - old for now, old in zip(self.scene.held(), before, strict=True)] == told
        if self.chance.random() < 0.5:
            self.tree.count_hits(receipt)
        pages = self.tree.pages(Boundary(receipt.node, receipt.depth))
        self.held.append((receipt, key, pages))
        return None

    def host_lock(self, key: RadixKey) -> bool | None:
        if len(self.held) > 5:
            return False
        boundary = self.scene.match(key).best_boundary
        size = self.scene.page_size
        start = self.chance.randrange(boundary.depth // size + 1) * size
        self.held.append((self.tree.inc_host_lock_ref(boundary, start), key, None))
        return None

    def unlock(self, key: RadixKey) -> bool | None:
        if not self.held:
            return False
        receipt, _, pages = self.held.pop(self.chance.randrange(len(self.held)))
        before = self.scene.held()
        told = self.tree.would_release([receipt]) if pages is not None else None
        self.tree.let_go(receipt)
        if told is not None:
            assert [old - now for old, now in zip(before, self.scene.held(), strict=True)] == told
        return None

    def release_early(self, key: RadixKey) -> bool | None:
        """What its holder needs no more, beside the base."""
        index = self._a_part()
        if not self.held or index == BASE:
            return False
        at = self.chance.randrange(len(self.held))
        receipt, of, _ = self.held[at]
        self.tree.release(receipt, index)
        self.held[at] = receipt, of, None
        return None

    def advance(self, key: RadixKey) -> bool | None:
        mine = [at for at, (_, _, pages) in enumerate(self.held) if pages is not None]
        if not mine:
            return False
        at = self.chance.choice(mine)
        receipt = self.held[at][0]
        try:
            self.tree.advance(receipt, self.scene.match(key).device_boundary)
        except ValueError:
            return False
        self.held[at] = receipt, key, self.tree.pages(Boundary(receipt.node, receipt.depth))
        return None

    def believe(self, key: RadixKey) -> bool | None:
        node = self.scene.match(key).best_node
        if node is self.tree.root or self.chance.random() > 0.2:
            return False
        for index in range(len(self.scene.components)):
            self.tree.believe_stored(node, index, self.chance.random() < 0.7)
        self.beliefs = True
        return None

    def reset(self, key: RadixKey) -> bool | None:
        if self.chance.random() > 0.05:
            return False
        self.scene.reset()
        self.held.clear()
        self.beliefs = False
        return None
