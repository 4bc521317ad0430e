"""Windows and states in random order, against a model by pages and the byte oracle, with the proof
after every step."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.tree.hybrid import STACKS, HybridRig
from tiered_cache.keys import RadixKey
from tiered_cache.tree.locks import Receipt
from tiered_cache.types import Boundary, PageIds, Tier

STEPS = [
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
    "host_lock",
    "unlock",
    "release_early",
    "advance",
    "believe",
    "reset",
]


class Walk:
    """One random walk: keys of two token values, that go along few trunks and leave them anywhere,
    so that everything branches and splits and is met again."""

    def __init__(self, seed: int, stack: str) -> None:
        self.chance = chance = random.Random(f"{seed} {stack}")
        size = chance.choice([1, 2, 4])
        self.trunks = [[chance.randrange(1, 3) for _ in range(32)] for _ in range(3)]
        self.rig = HybridRig(STACKS[stack](), size, pages=80, host_pages=chance.choice([12, 60]))
        self.tree = self.rig.tree
        self.held: list[tuple[Receipt, RadixKey, tuple[PageIds, ...] | None]] = []
        self.beliefs = False
        self.met: Counter[str] = Counter()

    def step(self) -> None:
        chance, rig = self.chance, self.rig
        tokens = self.trunks[chance.randrange(3)][: chance.randrange(32)]
        if chance.random() < 0.5:
            tokens = tokens + [chance.randrange(1, 3) for _ in range(chance.randrange(10))]
        key = RadixKey(tokens, None, chance.choice(["", "", "", "t"]))
        name = chance.choice(STEPS)
        if getattr(self, name)(key) is False:
            return
        self.met[name] += 1
        rig.check()
        for receipt, of, pages in self.held:
            if pages is not None:
                rig.check_prefix(of, receipt.depth, pages)
                assert self._needed_is_there(receipt)
        if not self.beliefs:  # or a dead node may hide what the host has below it
            device, best = rig.hit(key, chance.choice([None, len(key) // 2]))
            self.met["shorter on the device"] += device < best
            self.met["a boundary below a tombstone"] += self._is_below_a_tombstone(key, device)

    def _needed_is_there(self, receipt: Receipt) -> bool:
        """What the holder of a prefix holds of each component is on the device."""
        return all(
            node.data[component.index].value is not None
            for component in self.rig.components
            if receipt.parts[component.index] is not None
            for node in component.held(receipt.node, Tier.DEVICE, receipt.parts[component.index])
        )

    def _is_below_a_tombstone(self, key: RadixKey, depth: int) -> bool:
        have = self.rig.there(key, device_only=True)
        return any(not all(part[: depth // self.rig.page_size]) for part in have[1:])

    def end(self) -> None:
        """Release everything, evict everything: nothing is left."""
        for receipt, *_ in self.held:
            self.tree.let_go(receipt)
        self.rig.check()
        for tier in (Tier.DEVICE, Tier.HOST):
            for index in self.chance.sample(range(len(self.rig.components)), 2):
                self.rig.evict(index, 10_000, tier)
                self.rig.check()
            self.rig.evict(0, 10_000, tier)
        self.rig.check()
        assert self.tree.num_nodes == 0

    # --- steps; False when one is not possible now ------------------------------------------------

    def _states(self, key: RadixKey) -> list[int]:
        size = self.rig.page_size
        depths = range(size, len(key) + 1, size)
        return sorted(self.chance.sample(depths, min(len(depths), self.chance.randrange(4))))

    def publish(self, key: RadixKey) -> bool | None:
        given_up = self.chance.choice([0, self.chance.randrange(len(key) + 1)])
        prompt_len = self.chance.choice([None, len(key) // 2])
        result = self.rig.publish(
            key, given_up=given_up, states=self._states(key), prompt_len=prompt_len
        )
        return None if result is not None else False

    def publish_own(self, key: RadixKey) -> bool | None:
        """A request that has matched nothing and computed everything itself."""
        given_up = self.chance.randrange(len(key) + 1)
        pages = self.rig.compute(key, 0, given_up, self._states(key))
        if pages is None:
            return False
        self.rig.insert(key, pages, swa_evicted_seqlen=given_up)
        return None

    def evict_base(self, key: RadixKey) -> None:
        self.rig.evict(0, self.chance.randrange(1, 8))

    def evict_part(self, key: RadixKey) -> None:
        index = self.chance.randrange(1, len(self.rig.components))
        wanted = self.chance.randrange(1, 4)
        before = self.tree.evictable_size(index)
        gone = self.rig.evict(index, wanted).count(index)
        assert gone >= min(wanted, before)

    def evict_host(self, key: RadixKey) -> None:
        index = self.chance.randrange(len(self.rig.components))
        self.rig.evict(index, self.chance.randrange(1, 6), Tier.HOST)

    def back_up(self, key: RadixKey) -> None:
        boundary = self.rig.match(key).device_boundary
        for index in range(len(self.rig.components)):
            self.rig.move(boundary, index, Tier.HOST)

    def load_back(self, key: RadixKey) -> bool | None:
        found = self.rig.match(key)
        if not found.host_hit_length:
            return False
        target = found.best_length
        indexes = range(len(self.rig.components))
        if all(self.rig.move(found.best_boundary, index, Tier.DEVICE) for index in indexes):
            assert self.rig.match(key).device_length >= target
        return None

    def lock(self, key: RadixKey) -> bool | None:
        if len(self.held) > 5:
            return False
        found = self.rig.match(key)
        told = self.tree.would_protect(found.device_boundary)
        before = self._protected()
        receipt = self.tree.inc_lock_ref(found.device_boundary)
        assert [after - old for after, old in zip(self._protected(), before, strict=True)] == told
        if self.chance.random() < 0.5:
            self.tree.count_hits(receipt)
        pages = self.tree.pages(Boundary(receipt.node, receipt.depth))
        self.held.append((receipt, key, pages))
        return None

    def _protected(self) -> list[int]:
        return [self.tree.protected_size(index) for index in range(len(self.rig.components))]

    def host_lock(self, key: RadixKey) -> bool | None:
        if len(self.held) > 5:
            return False
        boundary = self.rig.match(key).best_boundary
        size = self.rig.page_size
        start = self.chance.randrange(boundary.depth // size + 1) * size
        self.held.append((self.tree.inc_host_lock_ref(boundary, start), key, None))
        return None

    def unlock(self, key: RadixKey) -> bool | None:
        if not self.held:
            return False
        receipt, _, pages = self.held.pop(self.chance.randrange(len(self.held)))
        before = self._protected()
        told = self.tree.would_release([receipt]) if pages is not None else None
        self.tree.let_go(receipt)
        if told is not None:
            assert [old - now for old, now in zip(before, self._protected(), strict=True)] == told
        return None

    def release_early(self, key: RadixKey) -> bool | None:
        """A window, or a state, that its holder needs no more."""
        if not self.held:
            return False
        at = self.chance.randrange(len(self.held))
        receipt, of, _ = self.held[at]
        self.tree.release(receipt, self.chance.randrange(1, len(self.rig.components)))
        self.held[at] = receipt, of, None
        return None

    def advance(self, key: RadixKey) -> bool | None:
        mine = [at for at, (_, _, pages) in enumerate(self.held) if pages is not None]
        if not mine:
            return False
        at = self.chance.choice(mine)
        receipt = self.held[at][0]
        try:
            self.tree.advance(receipt, self.rig.match(key).device_boundary)
        except ValueError:
            return False
        self.held[at] = receipt, key, self.tree.pages(Boundary(receipt.node, receipt.depth))
        return None

    def believe(self, key: RadixKey) -> bool | None:
        node = self.rig.match(key).best_node
        if node is self.tree.root or self.chance.random() > 0.2:
            return False
        for index in range(len(self.rig.components)):
            self.tree.believe_stored(node, index, self.chance.random() < 0.7)
        self.beliefs = True
        return None

    def reset(self, key: RadixKey) -> bool | None:
        if self.chance.random() > 0.05:
            return False
        self.rig.reset()
        self.held.clear()
        self.beliefs = False
        return None


def walk(stack: str, seeds: range) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in seeds:
        walk = Walk(seed, stack)
        for _ in range(150):
            walk.step()
        walk.end()
        met += walk.met
    return met


@pytest.mark.parametrize("stack", STACKS)
def test_random_walks(stack: str) -> None:
    """A dozen of each stack meet every step, many times."""
    met = walk(stack, range(12))
    assert set(STEPS) <= set(met)
    assert min(met[step] for step in STEPS if step != "reset") >= 3, met
    assert met["shorter on the device"] >= 20
    assert met["a boundary below a tombstone"] >= 20


@pytest.mark.soak
@pytest.mark.parametrize("stack", STACKS)
def test_many_random_walks(stack: str) -> None:
    """Thousands."""
    walk(stack, range(1000, 3000))
