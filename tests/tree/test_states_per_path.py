"""Of many states on one path, those that it can do without go before the oldest (semantics §9.10).

P is 16 throughout.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.tree.helpers import seq
from tests.tree.hybrid import HybridRig
from tiered_cache.keys import RadixKey
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import SURPLUS, MambaComponent
from tiered_cache.tree.node import Node
from tiered_cache.types import Boundary, Tier

M = 1
LONG = seq("A", 160)
ENDS = list(range(16, 161, 16))
"""Ten states: the first, the last, and eight between."""


def make(cap: int = 4, **rest: Any) -> HybridRig:
    component = MambaComponent("mamba", states_per_path=cap)
    return HybridRig([FullComponent("full"), component], 16, **rest)


def states(rig: HybridRig, tokens: list[int], tier: Tier = Tier.DEVICE) -> list[int]:
    """Depths at which a key's path has states."""
    return [end for _, end in rig.parts(tokens, M, tier)]


def gone(rig: HybridRig, tokens: list[int], count: int, tier: Tier = Tier.DEVICE) -> list[int]:
    """Which states of a path go, one after the other, when so many have to; 0: none of it."""
    order = []
    for _ in range(count):
        before = states(rig, tokens, tier)
        assert rig.evict(M, 1, tier).count(M, tier) == 1
        lost = set(before) - set(states(rig, tokens, tier))
        order.append(lost.pop() if lost else 0)
    rig.check()
    return order


def back_up(rig: HybridRig, tokens: list[int]) -> None:
    for stop in range(16, len(tokens) + 1, 16):
        boundary = Boundary(rig.node(tokens[:stop]), stop)
        for index in range(len(rig.components)):
            rig.move(boundary, index, Tier.HOST)


def test_what_a_path_can_do_without_goes_before_the_oldest() -> None:
    """The first, the last, and four between them, evenly spread, are as old as they are."""
    rig = make()
    rig.publish(seq("B", 16), states=[16])
    rig.publish(LONG, states=ENDS)
    assert gone(rig, LONG, 5) == [32, 64, 96, 128, 0]
    assert states(rig, LONG) == [16, 48, 80, 112, 144, 160]
    assert gone(rig, LONG, 1) == [16]


def test_it_is_the_same_when_a_prompt_comes_in_chunks() -> None:
    """Though who publishes a chunk holds the state of the one before."""
    rig = make()
    rig.publish(seq("B", 16), states=[16])
    for stop in ENDS:
        rig.publish(LONG[:stop], states=[end for end in ENDS if end <= stop])
    assert gone(rig, LONG, 5) == [32, 64, 96, 128, 0]


@pytest.mark.parametrize(("cap", "surplus"), [(0, 8), (7, 1), (8, 0)])
def test_how_many_is_for_the_component_to_say(cap: int, surplus: int) -> None:
    rig = make(cap)
    rig.publish(seq("B", 16), states=[16])
    rig.publish(LONG, states=ENDS)
    assert gone(rig, LONG, surplus + 1) == [*ENDS[1 : 1 + surplus], 0]


def test_a_number_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        MambaComponent("mamba", states_per_path=-1)


def test_states_where_paths_fork_are_kept() -> None:
    """Also where they come to fork when their place in the order was found."""
    rig = make()
    rig.publish(seq("B", 16), states=[16])
    rig.publish_own(LONG, states=ENDS)
    rig.publish_own([*LONG[:64], *seq("C", 96)], states=ENDS)
    assert gone(rig, LONG, 6) == [32, 96, 128, 0, 0, 0]
    assert states(rig, seq("B", 16)) == []
    assert states(rig, LONG)[:3] == [16, 48, 64]


def test_a_fork_is_none_of_the_others() -> None:
    rig = make(2)
    rig.publish(seq("B", 16), states=[16])
    rig.publish_own(LONG[:80], states=ENDS)
    rig.publish_own([*LONG[:48], *seq("C", 32)], states=ENDS)
    assert gone(rig, LONG, 1) == [0]
    assert states(rig, seq("B", 16)) == []


def test_above_a_fork_the_newest_path_says_what_can_be_done_without() -> None:
    rig = make()
    rig.publish(seq("B", 16), states=[16])
    rig.publish_own(LONG, states=ENDS)
    rig.publish_own([*LONG[:64], *seq("C", 16)], states=[80])
    assert gone(rig, LONG, 2) == [96, 128]


def test_the_last_state_before_a_fork_is_the_fork_s() -> None:
    rig = make(0)
    rig.publish(seq("B", 16), states=[16])
    rig.publish(LONG[:96], states=[16, 32, 48, 96])
    rig.publish_own([*LONG[:64], *seq("C", 48)], states=[80, 96, 112])
    assert gone(rig, LONG, 3) == [32, 0, 0]
    assert states(rig, [*LONG[:64], *seq("C", 48)]) == [16, 48, 112]


def test_a_state_that_is_held_is_kept() -> None:
    """And is none of the others: as many as ever are kept beside it."""
    rig = make()
    rig.publish(seq("B", 16), states=[16])
    rig.publish(LONG, states=ENDS)
    receipt = rig.tree.inc_lock_ref(Boundary(rig.node(LONG[:80]), 80))
    assert gone(rig, LONG, 4) == [64, 96, 128, 0]
    assert states(rig, LONG) == [16, 32, 48, 80, 112, 144, 160]
    rig.tree.dec_lock_ref(receipt)


def test_who_uses_a_state_makes_it_young() -> None:
    """§3.6: as any other; it is not the first to go any more."""
    rig = make()
    rig.publish(LONG, states=ENDS)
    assert rig.hit(RadixKey(LONG[:64]))[0] == 64
    rig.publish(seq("B", 16), states=[16])
    assert gone(rig, LONG, 4) == [32, 96, 128, 16]
    rig.check()


def test_what_is_left_of_a_path_is_looked_at_again() -> None:
    """When its end has gone, more of the rest are kept."""
    rig = make(2)
    rig.publish(LONG, states=ENDS)
    rig.publish(seq("B", 16), states=[16])
    rig.evict(0, 5)
    assert states(rig, LONG) == ENDS[:5]
    assert gone(rig, LONG, 2) == [64, 16]
    assert states(rig, LONG) == [32, 48, 80]


def test_the_first_that_is_left_is_kept() -> None:
    rig = make(6)
    rig.publish(seq("B", 16), states=[16])
    rig.publish(LONG, states=ENDS)
    rig.drop(LONG[:16], M)
    assert gone(rig, LONG, 2) == [64, 0]


def test_a_state_that_comes_to_stand_once_more_is_new() -> None:
    rig = make()
    rig.publish(LONG, states=ENDS)
    assert gone(rig, LONG, 1) == [32]
    rig.publish(LONG[:32], states=[32])
    rig.publish(seq("B", 16), states=[16])
    assert gone(rig, LONG, 4) == [64, 96, 128, 48]
    assert states(rig, LONG)[:2] == [16, 32]


def test_the_same_on_the_host() -> None:
    rig = make()
    rig.publish(seq("B", 16), states=[16])
    rig.publish(LONG, states=ENDS)
    for tokens in (seq("B", 16), LONG):
        back_up(rig, tokens)
    rig.evict(M, 100)
    assert states(rig, LONG, Tier.HOST) == ENDS
    assert gone(rig, LONG, 5, Tier.HOST) == [32, 64, 96, 128, 0]


def test_a_mirror_of_one_is_found_again() -> None:
    """Its rank is no other's, whatever the order."""
    rig = make()
    rig.publish(LONG, states=ENDS)
    back_up(rig, LONG)
    for end in ENDS:
        rig.tree.believe_stored(rig.node(LONG[:end]), M, True)
    rig.check()
    assert gone(rig, LONG, 3, Tier.HOST) == [32, 64, 96]
    rig.match(RadixKey(LONG[:128]))
    rig.check()
    assert len(gone(rig, LONG, 7, Tier.HOST)) == 7


# --- against the rule, spelt out ------------------------------------------------------------------


def can_do_without(path: list[Node], cap: int) -> set[Node]:
    """Of the nodes of a path from the root to a leaf, those whose states it can do without."""
    has = [node for node in path if node.data[M].value is not None]
    others = []
    for node in has[1:-1]:
        below = has[has.index(node) + 1]
        way = path[path.index(node) : path.index(below)]
        if all(len(step.children) == 1 for step in way) and not node.data[M].lock_ref:
            others.append(node)
    return set(others) if len(others) > cap else set()


def surplus(rig: HybridRig, cap: int) -> set[Node]:
    found: set[Node] = set()
    for leaf in rig.tree.nodes():
        if not leaf.children:
            path = []
            node = leaf
            while node.parent is not None:
                path.append(node)
                node = node.parent
            found |= can_do_without(path[::-1], cap)
    return found


def age(node: Node) -> tuple[int, int]:
    return node.data[M].stamp % SURPLUS, node.end


def walk(seed: int, turns: int = 60) -> Counter[str]:
    """Conversations that go on, fork and are tried again, while others need their states' room."""
    chance, met = random.Random(seed), Counter[str]()
    cap = chance.randrange(5)
    rig = make(cap, pages=120)
    talks = [seq(name, 16) for name in "ABC"]
    for turn in range(turns):
        talk = chance.choice(talks)
        if chance.random() < 0.2:
            at = 16 * chance.randrange(1, len(talk) // 16 + 1)
            talk = talk[:at]
            talks.append(talk)
        longer = [*talk, *seq("D", 1000 * turn + 16 * chance.randrange(1, 4), 1000 * turn)]
        if chance.random() < 0.3:
            rig.match(RadixKey(longer))
        publish = chance.choice([rig.publish, rig.publish_own])
        publish(longer, states=[end for end in range(16, 999, 16) if chance.random() < 0.8])
        talks[talks.index(talk)] = longer
        rig.evict(0, max(0, rig.kept()[0] - chance.choice([60, 90])))
        while rig.kept()[M] > 25:
            on_device = [node for node in rig.tree.nodes() if node.data[M].value is not None]
            allowed = surplus(rig, cap)
            oldest = min(on_device, key=age)
            rig.evict(M, 1)
            lost = [node for node in on_device if node.data[M].value is None]
            assert len(lost) == 1
            assert lost == [oldest] or lost[0] in allowed, (lost, oldest, allowed)
            met["surplus"] += lost[0] in allowed
            met["before the oldest"] += lost[0] is not oldest
            met["the oldest"] += not allowed
        rig.check()
    return met


def test_random_conversations() -> None:
    """Who goes is the oldest of all, or one that a path can do without."""
    met: Counter[str] = Counter()
    for seed in range(3):
        met += walk(seed)
    assert min(met[what] for what in ("surplus", "before the oldest", "the oldest")) >= 20, met


@pytest.mark.soak
def test_many_random_conversations() -> None:
    """Hundreds."""
    for seed in range(1000, 1300):
        walk(seed)
