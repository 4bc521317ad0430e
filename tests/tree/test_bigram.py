"""Bigram keys: overlapping pairs as units, in pages like tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tree.helpers import Rig, seq, spans
from tiered_cache.keys import RadixKey


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17, 32, 33, 64, 65])
def test_lengths_are_in_pairs(num_tokens: int) -> None:
    """n tokens are n − 1 pairs; pages and boundaries count those."""
    rig = Rig()
    result = rig.publish(seq("A", num_tokens), is_bigram=True)
    pairs = max(0, num_tokens - 1) // 16 * 16
    assert result.length == pairs
    assert rig.hit(seq("A", num_tokens), is_bigram=True) == (pairs, 0)
    assert rig.hit(seq("A", 100), is_bigram=True) == (pairs, 0)
    rig.check()


@pytest.mark.parametrize(
    ("at", "length"), [(0, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 48)]
)
def test_a_pair_needs_both_tokens(at: int, length: int) -> None:
    """A differing token spoils the pair before it, too: the page that ends there does not match."""
    rig = Rig()
    rig.publish(seq("A", 65), is_bigram=True)
    tokens = seq("A", 65)
    tokens[at] += 7
    assert rig.hit(tokens, is_bigram=True) == (length, 0)


def test_a_limit_counts_pairs() -> None:
    """§3.1 in the key's own units."""
    rig = Rig()
    rig.publish(seq("A", 65), is_bigram=True)
    assert rig.hit(seq("A", 65), 63, is_bigram=True) == (48, 0)
    assert rig.hit(seq("A", 65), 64, is_bigram=True) == (64, 0)


def test_a_branch_and_a_split_keep_the_shared_token_on_both_sides() -> None:
    """The last token of a page is the first of the next one, in both nodes of a split."""
    rig = Rig(page_size=4)
    rig.publish(seq("A", 17), is_bigram=True)
    rig.publish(seq("A", 9) + seq("B", 8), is_bigram=True)
    rig.publish(seq("A", 8) + seq("C", 9), is_bigram=True)
    assert spans(rig.tree) == [(0, 4), (4, 8), (4, 16), (8, 16), (8, 16)]
    rig.check()
    assert rig.hit(seq("A", 17), is_bigram=True) == (16, 0)
    assert rig.hit(seq("A", 9) + seq("B", 8), is_bigram=True) == (16, 0)
    assert rig.hit(seq("A", 8) + seq("C", 9), is_bigram=True) == (16, 0)
    rig.evict(1000)
    rig.check()
    assert rig.tree.num_nodes == 0


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=0, max_size=14), st.booleans()), max_size=12
    ),
    page_size=st.integers(1, 4),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_both_kinds_in_one_tree_match_as_a_list_of_units_would(
    prompts: list[tuple[list[int], bool]], page_size: int
) -> None:
    """Tokens of two values, so that everything branches: hits equal those of a plain set of
    prefixes, and the kinds never meet."""
    rig = Rig(page_size=page_size, pages=400)
    known: set[tuple[bool, tuple[object, ...]]] = set()
    for tokens, is_bigram in prompts:
        units = units_of(tokens, is_bigram)
        wanted = 0
        for depth in range(page_size, len(units) + 1, page_size):
            if (is_bigram, tuple(units[:depth])) in known:
                wanted = depth
        assert rig.hit(tokens, is_bigram=is_bigram) == (wanted, 0)
        rig.publish(tokens, is_bigram=is_bigram)
        rig.check()
        for depth in range(page_size, len(units) + 1, page_size):
            known.add((is_bigram, tuple(units[:depth])))


def units_of(tokens: list[int], is_bigram: bool) -> list[object]:
    """What a key consists of."""
    pairs: list[object] = list(pairwise(tokens))
    return pairs if is_bigram else list(tokens)


def test_a_bigram_node_gives_the_keys_page_keys() -> None:
    """§10.1: pages of pairs hash both tokens of each, across node edges."""
    rig = Rig(page_size=4)
    tokens = seq("A", 17)
    rig.publish(tokens[:9], is_bigram=True)
    rig.publish(tokens, is_bigram=True)
    node = rig.match(tokens, is_bigram=True).best_node
    assert rig.tree.page_keys(node) == RadixKey(tokens, is_bigram=True).page_keys(4)[2:]
