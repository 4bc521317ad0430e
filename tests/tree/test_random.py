"""Everything a tree can be asked, in random order, against the replayed events and the byte oracle,
with the proof after every step."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.tree.helpers import Rig
from tests.tree.test_observers import Replay, reality
from tiered_cache.errors import StaleError
from tiered_cache.keys import RadixKey
from tiered_cache.tree.locks import Receipt
from tiered_cache.tree.policies import RANKS
from tiered_cache.types import InsertParams, Tier

STEPS = [
    "publish",
    "publish_own",
    "publish_part",
    "backup",
    "evict",
    "evict_host",
    "load_back",
    "lock",
    "host_lock",
    "unlock",
    "release_early",
    "advance",
    "rely_on_too_much",
    "reset",
    "believe_stored",
]


class Walk:
    """One random walk: small keys of two token values, so that everything branches and splits."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        policy, host_policy = self.chance.choices(list(RANKS), k=2)
        self.replay = Replay()
        self.rig = Rig(
            page_size=self.chance.choice([1, 2, 4]),
            pages=60,
            host_pages=self.chance.choice([10, 40]),
            policy=policy,
            host_policy=host_policy,
            observers=[self.replay],
        )
        self.tree = self.replay.tree = self.rig.tree
        self.receipts: list[Receipt] = []
        self.beliefs = False
        self.met: Counter[str] = Counter()

    def step(self) -> None:
        chance, rig = self.chance, self.rig
        tokens = [chance.randrange(1, 3) for _ in range(chance.randrange(14))]
        key = RadixKey(tokens, None, chance.choice(["", "t"]), chance.random() < 0.3)
        name = chance.choice(STEPS)
        if getattr(self, name)(key, len(key) // rig.page_size) is False:
            return
        self.met[name] += 1
        rig.check()
        assert self.replay.model == reality(self.tree)
        if not self.beliefs:  # or a dead node may hide what the host has below it
            assert rig.hit(key) == self.replay.hit(key)

    def end(self) -> None:
        """Release everything, evict everything: nothing is left."""
        while self.receipts:
            self._let_go(self.receipts.pop())
        for evict in (self.rig.evict, self.rig.evict_host):
            self.rig.check()
            evict(10_000)
        self.rig.check()
        assert self.tree.num_nodes == 0
        assert self.rig.device.num_free == self.rig.device.capacity
        assert self.rig.host.num_free == self.rig.host.capacity

    # --- steps; False when one is not possible now ------------------------------------------------

    def publish(self, key: RadixKey, pages: int) -> bool | None:
        if self.rig.device.num_free < pages:
            return False
        self.rig.publish(key, priority=self.chance.randrange(3))
        return None

    def publish_own(self, key: RadixKey, pages: int) -> bool | None:
        if self.rig.device.num_free < pages:
            return False
        self.rig.publish_own(key)
        return None

    def publish_part(self, key: RadixKey, pages: int) -> bool | None:
        if self.rig.device.num_free < pages:
            return False
        ids = self.rig.compute(key)
        length, prompt_len = (self.chance.randrange(len(key) + 1) for _ in range(2))
        result = self.rig.insert(key, ids, length=length, prompt_len=prompt_len)
        self.rig.give_back(ids[result.length // self.rig.page_size :])
        return None

    def rely_on_too_much(self, key: RadixKey, pages: int) -> bool | None:
        size = self.rig.page_size
        owned = self.rig.match(key).device_length + size
        if owned >= pages * size or self.rig.device.num_free < pages:
            return False
        ids = self.rig.compute(key, owned // size)
        with pytest.raises(StaleError):
            self.tree.insert(InsertParams(key, (ids,), prev_prefix_len=owned, priority=5))
        self.rig.give_back(ids[owned // size :])
        return None

    def backup(self, key: RadixKey, pages: int) -> bool | None:
        if self.rig.host.num_free < pages:
            return False
        self.rig.backup(key)
        return None

    def load_back(self, key: RadixKey, pages: int) -> bool | None:
        if self.rig.device.num_free < pages:
            return False
        self.rig.load_back(key)
        return None

    def evict(self, key: RadixKey, pages: int) -> None:
        self.rig.evict(self.chance.randrange(1, 10) * self.rig.page_size)

    def evict_host(self, key: RadixKey, pages: int) -> None:
        self.rig.evict_host(self.chance.randrange(1, 10) * self.rig.page_size)

    def lock(self, key: RadixKey, pages: int) -> bool | None:
        if len(self.receipts) > 5:
            return False
        found = self.rig.match(key)
        boundary = self.chance.choice([found.device_boundary, found.best_boundary])
        (told,), before = self.tree.would_protect(boundary), self.tree.protected_size()
        receipt = self.tree.inc_lock_ref(boundary)
        assert self.tree.protected_size() - before == told
        if self.chance.random() < 0.5:
            self.tree.count_hits(receipt)
        self.receipts.append(receipt)
        return None

    def host_lock(self, key: RadixKey, pages: int) -> bool | None:
        if len(self.receipts) > 5:
            return False
        boundary = self.rig.match(key).best_boundary
        size = self.rig.page_size
        start = self.chance.randrange(boundary.depth // size + 1) * size
        self.receipts.append(self.tree.inc_host_lock_ref(boundary, start))
        return None

    def unlock(self, key: RadixKey, pages: int) -> bool | None:
        if not self.receipts:
            return False
        self._let_go(self.receipts.pop(self.chance.randrange(len(self.receipts))))
        return None

    def release_early(self, key: RadixKey, pages: int) -> bool | None:
        if not self.receipts:
            return False
        self.tree.release(self.chance.choice(self.receipts), 0)
        return None

    def advance(self, key: RadixKey, pages: int) -> bool | None:
        mine = [receipt for receipt in self.receipts if receipt.tier is Tier.DEVICE]
        if not mine:
            return False
        try:
            self.tree.advance(self.chance.choice(mine), self.rig.match(key).device_boundary)
        except ValueError:
            return False
        return None

    def reset(self, key: RadixKey, pages: int) -> bool | None:
        if self.chance.random() > 0.05:
            return False
        self.tree.reset()
        self.rig.device.reset()
        self.rig.host.reset()
        self.receipts.clear()
        return None

    def believe_stored(self, key: RadixKey, pages: int) -> bool | None:
        node = self.rig.match(key).best_node
        if node is self.tree.root or self.chance.random() > 0.2:
            return False
        self.tree.believe_stored(node, 0, True)
        self.beliefs = True
        return None

    def _let_go(self, receipt: Receipt) -> None:
        if receipt.tier is Tier.DEVICE:
            self.tree.dec_lock_ref(receipt)
        else:
            self.tree.dec_host_lock_ref(receipt)


def walk(seeds: range) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in seeds:
        walk = Walk(seed)
        for _ in range(200):
            walk.step()
        walk.end()
        met += walk.met
    return met


def test_random_walks() -> None:
    """Two dozen of them meet every step, many times."""
    met = walk(range(24))
    assert set(met) == set(STEPS)
    assert min(met.values()) >= 5, met


@pytest.mark.soak
def test_many_random_walks() -> None:
    """Thousands."""
    walk(range(1000, 6000))
