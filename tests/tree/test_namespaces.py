"""Namespaces in the tree: nothing is shared, everything else is (semantics §1.6, case B81)."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest

from tests.tree.helpers import Rig, path_to, seq, whole_key
from tiered_cache.keys import RadixKey

NAMESPACES: Final[list[dict[str, Any]]] = [
    {},
    {"extra_key": "a"},
    {"cache_salt": "a"},
    {"extra_key": "a", "cache_salt": "b"},
    {"extra_key": "b", "cache_salt": "a"},
    {"is_bigram": True},
    {"is_bigram": True, "extra_key": "a"},
]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("mine", "other"), list(itertools.permutations(range(7), 2)))
def test_b81_no_namespace_hits_what_another_has_published(
    mine: int, other: int, page_size: int
) -> None:
    """B81: the same tokens, on the device and on the host; only the own namespace hits."""
    rig = Rig(page_size=page_size, pages=100)
    tokens = seq("A", 32) + seq("B", 1)
    rig.publish(tokens, **NAMESPACES[mine])
    whole = rig.floor(len(rig.key(tokens, **NAMESPACES[mine])))
    assert rig.hit(tokens, **NAMESPACES[other]) == (0, 0)
    assert rig.hit(tokens, **NAMESPACES[mine]) == (whole, 0)
    rig.backup(tokens, **NAMESPACES[mine])
    rig.evict(whole)
    assert rig.hit(tokens, **NAMESPACES[other]) == (0, 0)
    assert rig.hit(tokens, **NAMESPACES[mine]) == (0, whole)


def test_b81_all_namespaces_live_in_one_tree() -> None:
    """B81: each has its own pages and page keys for the same tokens, and eviction order does not
    ask for the namespace."""
    rig = Rig(page_size=4, pages=200)
    tokens = seq("A", 41)
    for namespace in NAMESPACES:
        rig.publish(tokens, **namespace)
        rig.publish(tokens[:20] + seq("B", 20), **namespace)
    rig.check()
    owners: dict[int, dict[str, Any]] = {}
    first_keys = set()
    for namespace in NAMESPACES:
        found = rig.match(tokens, **namespace)
        assert found.device_length == 40
        for page in found.pages[0].tolist():
            assert owners.setdefault(page, namespace) is namespace
        first_keys.add(rig.tree.page_keys(path_to(found.best_node)[0])[0])
    assert len(first_keys) == len(NAMESPACES)
    rig.evict(10_000)
    assert rig.tree.num_nodes == 0


def test_b81_absent_and_empty_are_the_same_namespace() -> None:
    """§1.6: `None` equals `""`."""
    rig = Rig()
    rig.publish(seq("A", 32), extra_key="", cache_salt=None)
    assert rig.hit(seq("A", 32)) == (32, 0)
    assert rig.hit(seq("A", 32), extra_key=None, cache_salt="") == (32, 0)


@pytest.mark.parametrize("namespace", NAMESPACES, ids=str)
def test_b86_a_nodes_page_keys_are_those_of_the_whole_prefix(namespace: dict[str, Any]) -> None:
    """B86, §10.1: computed late, after splits, revivals and inserts below, they equal those of a
    fresh key; a chain never restarts in the middle."""
    rig = Rig(page_size=4, pages=100)
    tokens = seq("A", 65)
    rig.publish(tokens[:33], **namespace)
    early = rig.match(tokens[:33], **namespace).best_node
    rig.tree.page_keys(early)
    rig.publish(tokens, **namespace)
    rig.publish(tokens[:20] + seq("B", 20), **namespace)
    rig.publish(tokens[:50] + seq("C", 20), **namespace)
    rig.backup(tokens, **namespace)
    rig.evict(1000)
    rig.publish(tokens, **namespace)
    for node in rig.tree.nodes():
        wanted = whole_key(node).page_keys(4)
        assert rig.tree.page_keys(node) == wanted[node.start // 4 :]
    rig.check()


def test_b86_a_suffix_is_not_a_prefix() -> None:
    """B86: a prompt that equals the rest of a cached one hits nothing, and has other page keys."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.publish(seq("A", 128))
    assert rig.hit(seq("A", 128, 64)) == (0, 0)
    keys = set(RadixKey(seq("A", 128)).page_keys(16))
    assert not keys.intersection(RadixKey(seq("A", 128, 64)).page_keys(16))


def test_b89_the_tree_compares_tokens_not_hashes() -> None:
    """B89: two sequences hit one another only as far as their tokens are equal, whatever any hash
    says."""
    rig = Rig(page_size=1, pages=2000)
    for first, second in itertools.product(range(1, 20), repeat=2):
        rig.publish([first, second])
    for first, second, third in itertools.product(range(1, 20, 3), range(1, 30), (1, 2)):
        wanted = 2 if second < 20 else 1
        assert rig.hit([first, second, third]) == (wanted, 0)
