"""Matching: limits, partial edges, both boundaries, recency, and what it never does (semantics
§3)."""

from __future__ import annotations

import pytest

from tests.tree.helpers import Rig, device_value, order_of, path_to, seq, spans
from tiered_cache.errors import StaleError
from tiered_cache.keys import RadixKey
from tiered_cache.types import MatchPrefixParams


def test_an_empty_key_or_a_limit_of_nothing_matches_at_the_root() -> None:
    """§3.1: what floors to no page is the empty match, whatever is cached."""
    rig = Rig()
    rig.publish(seq("A", 64))
    for tokens, limit in (([], None), (seq("A", 15), None), (seq("A", 64), 0), (seq("A", 64), 15)):
        found = rig.match(tokens, limit)
        assert found.device_node is found.best_node is rig.tree.root
        assert (found.device_length, found.best_length, found.full_hit_length) == (0, 0, 0)
        assert [len(pages) for pages in found.pages] == [0]


@pytest.mark.parametrize(
    ("limit", "length"), [(63, 48), (64, 64), (47, 32), (16, 16), (1000, 64), (None, 64)]
)
def test_a_limit_cuts_before_flooring(limit: int | None, length: int) -> None:
    """§3.1: limit 63 with pages of 16 is at most 48; one above the key's length cuts nothing."""
    rig = Rig()
    rig.publish(seq("A", 64))
    assert rig.hit(seq("A", 64), limit) == (length, 0)


def test_a_negative_limit_is_refused() -> None:
    """§3.1: it is the caller's mistake, not an empty match."""
    with pytest.raises(ValueError, match="limit must not be negative, not -1"):
        Rig().tree.match_prefix(MatchPrefixParams(RadixKey([1]), limit=-1))


def test_a_match_goes_over_several_nodes_and_stops_where_the_tokens_differ() -> None:
    """§3.2: the walk follows children by first page and compares whole edges."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 32) + seq("B", 32))
    rig.publish(seq("A", 32) + seq("B", 32) + seq("C", 32))
    path = seq("A", 32) + seq("B", 32) + seq("C", 32)
    for depth in range(0, 97, 16):
        assert rig.hit(path[:depth] + seq("X", 40)) == (depth, 0)
    assert rig.hit(path) == (96, 0)


@pytest.mark.parametrize("at", [0, 1, 15, 16, 17, 31, 40, 62, 63])
def test_one_differing_token_ends_the_match_at_its_page(at: int) -> None:
    """§3.2: every token of an edge counts, and a page counts only whole."""
    rig = Rig()
    rig.publish(seq("A", 64))
    tokens = seq("A", 64)
    tokens[at] += 7
    assert rig.hit(tokens) == (at - at % 16, 0)


def test_long_edges_are_compared_to_the_last_token() -> None:
    """An edge longer than what is compared in one piece is searched for the place where it
    differs."""
    rig = Rig(page_size=1, pages=20_000)
    tokens = seq("A", 10_000)
    rig.publish(tokens)
    for at in (1, 4_095, 4_096, 4_097, 8_191, 8_192, 9_999):
        other = list(tokens)
        other[at] += 20_000
        assert rig.match(other).device_length == at
    assert rig.match(tokens).device_length == 10_000


def test_a_partial_match_splits_nothing_until_somebody_locks_it() -> None:
    """§3.2: a probe leaves the tree as it is; its boundary is a depth inside a node."""
    rig = Rig()
    rig.publish(seq("A", 64))
    found = rig.match(seq("A", 40))
    assert spans(rig.tree) == [(0, 64)]
    assert found.device_length == 32
    assert found.device_boundary.node.end == 64
    assert found.pages[0].tolist() == device_value(found.device_node)[:2].tolist()
    receipt = rig.tree.inc_lock_ref(found.device_boundary)
    assert spans(rig.tree) == [(0, 32), (32, 64)]
    assert receipt.depth == receipt.node.end == 32
    rig.tree.dec_lock_ref(receipt)
    rig.check()


def test_a_boundary_survives_splits_above_it() -> None:
    """§3.2: who locks walks up from the node to the one that contains the depth now."""
    rig = Rig()
    rig.publish(seq("A", 96))
    found = [rig.match(seq("A", length)) for length in (16, 48, 64, 96)]
    receipts = [rig.tree.inc_lock_ref(match.device_boundary) for match in reversed(found)]
    assert [receipt.depth for receipt in receipts] == [96, 64, 48, 16]
    assert spans(rig.tree) == [(0, 16), (16, 48), (48, 64), (64, 96)]
    assert [match.pages[0].size for match in found] == [1, 3, 4, 6]
    for receipt in receipts:
        rig.tree.dec_lock_ref(receipt)
    rig.check()


def test_a_boundary_whose_node_is_gone_is_stale() -> None:
    """§3.2: locking it, or reading its pages, raises; nothing is locked."""
    rig = Rig()
    rig.publish(seq("A", 64))
    found, partly = rig.match(seq("A", 64)), rig.match(seq("A", 32))
    rig.evict(64)
    for boundary in (found.device_boundary, partly.device_boundary):
        with pytest.raises(StaleError, match="match again"):
            rig.tree.inc_lock_ref(boundary)
    with pytest.raises(StaleError, match="match again"):
        found.pages
    rig.check()


def test_the_pages_of_a_demoted_boundary_are_stale() -> None:
    """The node still stands, on the host; its device pages are somebody else's by now."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.backup(seq("A", 64))
    found = rig.match(seq("A", 64))
    rig.evict(64)
    with pytest.raises(StaleError, match="left the device"):
        found.pages
    rig.check()


def test_host_only_nodes_lie_between_the_two_boundaries() -> None:
    """§3.3, §3.5: device boundary, best boundary, and how many tokens a load would bring."""
    rig = Rig()
    key = seq("A", 32) + seq("B", 64)
    rig.publish(seq("A", 32))
    rig.publish(key)
    rig.backup(key)
    rig.evict(64)
    found = rig.match(key)
    assert (found.device_length, found.best_length, found.host_hit_length) == (32, 96, 64)
    assert found.full_hit_length == 96
    assert found.device_node.end == 32
    assert found.best_node.end == 96
    partly = rig.match([*key[:70], 1, 2])
    assert (partly.device_length, partly.best_length) == (32, 64)


def test_a_dead_node_ends_the_walk() -> None:
    """§2.2, §3.2: where only storage is believed to have it, matching stops, above what the host
    has."""
    rig = Rig()
    key = seq("A", 32) + seq("B", 32)
    rig.publish(seq("A", 32))
    rig.publish(key)
    top, bottom = path_to(rig.match(key).best_node)
    rig.backup(key)
    rig.tree.believe_stored(top, 0, True)
    rig.evict(64)
    assert rig.hit(key) == (0, 64)
    # a second way down keeps the dead node from being pruned
    rig.lose_on_host(top)
    rig.tree.check_integrity()
    found = rig.match(key)
    assert (found.device_length, found.best_length, found.full_hit_length) == (0, 0, 0)
    assert bottom.data[0].host_value is not None


# --- recency --------------------------------------------------------------------------------------


def test_a_match_refreshes_its_path_and_children_stay_newer_than_parents() -> None:
    """§3.6: the path to the best boundary becomes the newest, end first in line to stay."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("B", 32))
    rig.publish(seq("A", 32) + seq("C", 32))
    rig.match(seq("B", 32))
    assert [node.end for node in order_of(rig.tree)] == [64, 32]
    rig.match(seq("A", 32) + seq("C", 32))
    victims = order_of(rig.tree)
    assert [node.end for node in victims] == [32, 64]
    rig.evict(16)
    assert rig.hit(seq("B", 32)) == (0, 0)


def test_a_probe_does_not_touch_a_partly_matched_node() -> None:
    """§3.6: the path above it is used, the node itself keeps its age."""
    rig = Rig()
    rig.publish(seq("A", 16))
    rig.publish(seq("A", 16) + seq("B", 48))
    top, bottom = path_to(rig.match(seq("A", 16) + seq("B", 48)).best_node)
    stamp = bottom.data[0].stamp
    rig.match(seq("A", 16) + seq("B", 20))
    assert bottom.data[0].stamp == stamp
    assert top.data[0].stamp > stamp


def test_the_split_at_grant_touches_the_matched_half_only() -> None:
    """§3.6: a lease dates what it uses; the suffix that it did not match keeps its age."""
    rig = Rig()
    rig.publish(seq("A", 64))
    stamp = rig.match(seq("A", 64)).best_node.data[0].stamp
    receipt = rig.lock(seq("A", 20))
    rig.tree.count_hits(receipt)
    upper = receipt.node
    (lower,) = upper.children.values()
    assert lower.data[0].stamp == stamp
    assert upper.data[0].stamp > stamp
    rig.tree.dec_lock_ref(receipt)


def test_a_match_counts_no_use_and_changes_no_size() -> None:
    """§3.8: hit counts rise at grant, once per node; matching moves no page."""
    rig = Rig()
    rig.publish(seq("A", 64))
    before = (rig.device.num_free, rig.tree.evictable_size(), rig.tree.num_nodes)
    node = rig.match(seq("A", 64)).best_node
    hits = node.hit_count
    for _ in range(5):
        rig.match(seq("A", 50))
        rig.match(seq("A", 64))
    assert node.hit_count == hits == 1
    receipt = rig.lock(seq("A", 64))
    rig.tree.count_hits(receipt)
    assert node.hit_count == 2
    rig.tree.count_hits(receipt, above=64)
    assert node.hit_count == 2
    rig.tree.dec_lock_ref(receipt)
    assert before == (rig.device.num_free, rig.tree.evictable_size(), rig.tree.num_nodes)


def test_page_ids_are_read_only_int32() -> None:
    """What the tree owns cannot be changed through what it shows."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 32) + seq("B", 32))
    for tokens in (seq("A", 32), seq("A", 32) + seq("B", 32), seq("A", 16)):
        (pages,) = rig.match(tokens).pages
        assert pages.dtype == "int32"
        assert not pages.flags.writeable


# --- a deeper match below what is held ------------------------------------------------------------


def test_match_deeper_finds_what_others_published_below_a_held_boundary() -> None:
    """§11.3: a lease goes on from what another has published; looking dates nothing."""
    rig = Rig()
    key = RadixKey(seq("A", 100))
    receipt = rig.publish_and_lock(key, 32)
    assert rig.tree.match_deeper(receipt, key, 99) is None
    rig.publish(seq("A", 84))
    found = rig.tree.match_deeper(receipt, key, 99)
    assert found is not None
    assert found.depth == 80
    assert rig.tree.match_deeper(receipt, key, 79) == (found.node, 64)
    assert rig.tree.match_deeper(receipt, key, 47) is None
    deeper = rig.tree.inc_lock_ref(found)
    rig.tree.dec_lock_ref(receipt)
    assert rig.tree.protected_size() == 5
    rig.tree.dec_lock_ref(deeper)
    rig.check()


def test_match_deeper_stops_at_what_only_the_host_has() -> None:
    """It is a device boundary, for pages that can be used at once."""
    rig = Rig()
    key = RadixKey(seq("A", 96))
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 64))
    rig.publish(key)
    rig.backup(key)
    rig.evict(32)
    receipt = rig.lock(key, 32)
    found = rig.tree.match_deeper(receipt, key, 96)
    assert found is not None
    assert found.depth == 64
    rig.tree.dec_lock_ref(receipt)
