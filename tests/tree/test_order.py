"""The order of nodes, against a plain sorted list."""

from __future__ import annotations

import random

import pytest

from tiered_cache.keys import DEFAULT_NAMESPACE
from tiered_cache.tree import order as order_module
from tiered_cache.tree.node import BASE, ComponentData, Node
from tiered_cache.tree.order import Order
from tiered_cache.tree.policies import RANKS


def _node(rng: random.Random, step: int) -> Node:
    stamp = step if rng.random() < 0.8 else rng.randrange(step)
    data = (ComponentData(stamp),)
    node = Node(b"", b"", step, None, DEFAULT_NAMESPACE, data, step, rng.randrange(3))
    node.hit_count = rng.randrange(4)
    return node


@pytest.mark.parametrize("chunk", [4, 8, 512])
@pytest.mark.parametrize("policy", sorted(RANKS))
def test_an_order_equals_a_sorted_list(
    monkeypatch: pytest.MonkeyPatch, policy: str, chunk: int
) -> None:
    """Thousands of inserts, moves and removals, growing and shrinking, leave what sorting gives."""
    monkeypatch.setattr(order_module, "CHUNK", chunk)
    rank, rng = RANKS[policy], random.Random(f"{policy}{chunk}")
    order, live = Order(rank), list[Node]()
    for step in range(1, 6001):
        growing = 0.55 if step // 1000 % 2 == 0 else 0.25
        if not live or rng.random() < growing:
            live.append(_node(rng, step))
            order.insert(live[-1])
        elif rng.random() < 0.7:
            first = order.first()
            node = rng.choice(live) if rng.random() < 0.7 or first is None else first
            live.remove(node)
            order.remove(node)
            assert node not in order
            if step % 7 == 0:
                assert order.first_with(node) is min((*live, node), key=rank)
        else:
            node = rng.choice(live)
            node.data[BASE].stamp = step
            node.hit_count += rng.randrange(2)
            assert order.is_in_place(node) == (rank(node) == node.data[BASE].rank)
            order.move(node)
            assert order.is_in_place(node)
        if step % 499 == 0:
            assert list(order) == sorted(live, key=rank)
            assert len(order) == len(live)
            assert all(node in order for node in live)
            assert order.first() is (min(live, key=rank) if live else None)
