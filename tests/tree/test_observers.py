"""Observers: every residency gained or lost is told, and only those (semantics §2, case B106)."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from tests.tree.helpers import Rig, path_to, seq
from tiered_cache.keys import RadixKey
from tiered_cache.observe import Event, EventKind
from tiered_cache.tree.node import Node
from tiered_cache.tree.radix import RadixTree
from tiered_cache.types import Tier


class Replay:
    """A model of both tiers, made from events alone: tier -> page keys."""

    def __init__(self) -> None:
        self.tree: RadixTree | None = None
        self.model: dict[Tier, set[bytes]] = {Tier.DEVICE: set(), Tier.HOST: set()}
        self.events = 0

    def on_event(self, event: Event) -> None:
        self.events += 1
        if event.kind is EventKind.CLEARED:
            self.model = {Tier.DEVICE: set(), Tier.HOST: set()}
            return
        if event.tier is Tier.STORAGE:
            return  # a belief, and of what outlives the tree
        assert self.tree is not None
        assert event.node is not None
        assert event.component == "full"
        keys = set(self.tree.page_keys(event.node))
        if event.kind is EventKind.STORED:
            assert not keys & self.model[event.tier], "stored twice"
            self.model[event.tier] |= keys
        else:
            assert event.kind is EventKind.REMOVED
            assert keys <= self.model[event.tier], "removed without having been stored"
            self.model[event.tier] -= keys

    def hit(self, key: RadixKey) -> tuple[int, int]:
        """(device, host) lengths that a match must find."""
        assert self.tree is not None
        keys = key.page_keys(self.tree.page_size)
        device = [page_key in self.model[Tier.DEVICE] for page_key in keys]
        best = [
            page_key in self.model[Tier.HOST] or on
            for page_key, on in zip(keys, device, strict=True)
        ]
        lengths = [[*found, False].index(False) * self.tree.page_size for found in (device, best)]
        return lengths[0], lengths[1] - lengths[0]


def reality(tree: RadixTree) -> dict[Tier, set[bytes]]:
    held: dict[Tier, set[bytes]] = {Tier.DEVICE: set(), Tier.HOST: set()}
    for node in tree.nodes():
        if node.data[0].value is not None:
            held[Tier.DEVICE] |= set(tree.page_keys(node))
        if node.data[0].host_value is not None:
            held[Tier.HOST] |= set(tree.page_keys(node))
    return held


@pytest.mark.parametrize("seed", range(3))
def test_b106_replayed_events_equal_what_is_there(seed: int) -> None:
    """B106: thousands of random steps (publish, revive, back up, demote, load back, evict, split,
    reset, in three namespaces); after each the replay has what the tiers have, and nothing was
    removed that had not been stored."""
    chance = random.Random(seed)
    replay = Replay()
    rig = Rig(page_size=4, pages=60, host_pages=40, observers=[replay])
    replay.tree = rig.tree
    met = dict.fromkeys(("publish", "backup", "evict", "evict_host", "load", "split", "reset"), 0)
    weights = (6, 4, 4, 3, 4, 2, 0.1)
    for _ in range(2000):
        stem = seq(chance.choice("AB"), 24)
        tokens = stem[: chance.randrange(25)] + seq(chance.choice("XY"), chance.randrange(12))
        namespace: dict[str, Any] = {"cache_salt": chance.choice(["", "t", "u"])}
        whole = len(tokens) // 4
        (step,) = chance.choices(list(met), weights)
        if step == "publish" and rig.device.num_free >= whole:
            rig.publish(tokens, **namespace)
        elif step == "backup" and rig.host.num_free >= whole:
            rig.backup(tokens, **namespace)
        elif step == "evict":
            rig.evict(chance.randrange(1, 40))
        elif step == "evict_host":
            rig.evict_host(chance.randrange(1, 40))
        elif step == "load" and rig.device.num_free >= whole:
            rig.load_back(tokens, **namespace)
        elif step == "split":
            rig.tree.dec_lock_ref(rig.lock(tokens, chance.randrange(0, 24), **namespace))
        elif step == "reset":
            rig.tree.reset()
            rig.device.reset()
            rig.host.reset()
        else:
            continue
        met[step] += 1
        assert replay.model == reality(rig.tree)
        assert rig.hit(tokens, **namespace) == replay.hit(rig.key(tokens, **namespace))
    assert replay.events > 500
    assert min(met.values()) >= 2, met
    rig.check()


def test_b106_an_event_comes_when_the_tree_is_whole_again() -> None:
    """An observer sees the node as it is now: told of a gain, the tier has it; of a loss, it has
    not; the node's path and page keys can be read."""
    seen: list[tuple[EventKind, Tier, bool, int]] = []

    class Look:
        def on_event(self, event: Event) -> None:
            assert event.node is not None
            data = event.node.data[0]
            value = data.value if event.tier is Tier.DEVICE else data.host_value
            seen.append((event.kind, event.tier, value is not None, path_end(event.node)))

    def path_end(node: Node) -> int:
        return len(rig.tree.page_keys(node)) * 16 + path_to(node)[-1].start

    rig = Rig(observers=[Look()])
    rig.host_only(seq("A", 32))
    rig.load_back(seq("A", 32))
    rig.evict(32)
    rig.evict_host(32)
    assert seen == [
        (EventKind.STORED, Tier.DEVICE, True, 32),
        (EventKind.STORED, Tier.HOST, True, 32),
        (EventKind.REMOVED, Tier.DEVICE, False, 32),
        (EventKind.STORED, Tier.DEVICE, True, 32),
        (EventKind.REMOVED, Tier.DEVICE, False, 32),
        (EventKind.REMOVED, Tier.HOST, False, 32),
    ]


def test_an_observer_that_raises_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """What looks on never breaks what it looks at; the others go on being told."""

    class Bad:
        def on_event(self, event: Event) -> None:
            raise RuntimeError("no")

    replay = Replay()
    bad = Bad()
    rig = Rig(observers=[bad, replay])
    replay.tree = rig.tree
    with caplog.at_level(logging.ERROR, "tiered_cache.observe"):
        rig.publish(seq("A", 32))
        rig.publish(seq("A", 64))
    assert len(caplog.records) == 1
    assert rig.tree.observers.listening == [replay]
    assert replay.model == reality(rig.tree)
    rig.check()
