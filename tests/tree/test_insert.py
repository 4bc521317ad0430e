"""Inserting: adoption, duplicates, what is owned already, boundaries and bad arguments (semantics
§5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tree.helpers import Rig, device_value, order_of, path_to, seq, spans
from tiered_cache.errors import StaleError
from tiered_cache.keys import RadixKey
from tiered_cache.types import Boundary, InsertParams


def ids(*pages: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(pages, np.int32)


def test_an_insert_into_an_empty_tree_adopts_whole_pages() -> None:
    """§5.1, §5.6: floored to pages; the tail stays with the request."""
    rig = Rig()
    key = RadixKey(seq("A", 50))
    own = rig.compute(key)
    result = rig.insert(key, own)
    assert (result.prefix_len, result.length, result.first_changed) == (0, 48, 48)
    assert result.node.end == 48
    assert result.duplicates[0].tolist() == []
    assert device_value(result.node).tolist() == own.tolist()
    assert rig.tree.evictable_size() == 3
    rig.check()


@pytest.mark.parametrize("tokens", [[], seq("A", 15)])
def test_nothing_to_insert(tokens: list[int]) -> None:
    """§5.1: less than a page gives prefix 0 and `mamba_exist`, and makes no node."""
    rig = Rig()
    result = rig.tree.insert(InsertParams(RadixKey(tokens), (ids(),)))
    assert (result.prefix_len, result.length, result.mamba_exist) == (0, 0, True)
    assert result.node is rig.tree.root
    assert rig.tree.num_nodes == 0
    rig.check()


def test_the_tree_keeps_a_copy_of_the_ids() -> None:
    """The caller's table is overwritten with canonical ids, and the tree's ids stay."""
    rig = Rig()
    key = RadixKey(seq("A", 32))
    own = rig.compute(key)
    result = rig.insert(key, own)
    kept = own.tolist()
    own[:] = -7
    assert device_value(result.node).tolist() == kept
    rig.check()


def test_duplicates_are_a_copy_too() -> None:
    """The caller may overwrite its table before it gives the duplicates back."""
    rig = Rig()
    key = RadixKey(seq("A", 32))
    rig.publish(key)
    own = rig.compute(key)
    result = rig.tree.insert(InsertParams(key, (own,)))
    mine = own.tolist()
    own[:] = rig.tree.pages(result.boundary)[0]
    assert result.duplicates[0].tolist() == mine
    rig.give_back(result.duplicates[0])
    rig.check()


def test_what_is_there_already_is_reported_as_duplicate() -> None:
    """§5.4: the tree keeps its own pages, the caller uses them from `first_changed` on."""
    rig = Rig()
    key = RadixKey(seq("A", 64))
    first = rig.publish(key)
    own = rig.compute(key)
    result = rig.tree.insert(InsertParams(key, (own,)))
    assert (result.prefix_len, result.first_changed) == (64, 0)
    assert result.duplicates[0].tolist() == own.tolist()
    assert rig.tree.pages(result.boundary)[0].tolist() == device_value(first.node).tolist()
    rig.give_back(result.duplicates[0])
    rig.check()


@pytest.mark.parametrize("owned", [0, 16, 32, 48, 64])
@pytest.mark.parametrize("node_ends", [(64,), (32, 64), (16, 32, 48, 64)])
def test_pages_owned_by_the_tree_are_neither_freed_nor_adopted(
    owned: int, node_ends: tuple[int, ...]
) -> None:
    """§5.4: of what is there twice, only what lies beyond `prev_prefix_len` goes back, wherever the
    nodes are cut."""
    rig = Rig()
    for end in node_ends:
        rig.publish(seq("A", end))
    key = RadixKey(seq("A", 96))
    own = rig.compute(key, owned // 16)
    result = rig.tree.insert(InsertParams(key, (own,), prev_prefix_len=owned))
    assert result.duplicates[0].tolist() == own[owned // 16 : 4].tolist()
    assert result.first_changed == (owned if owned < 64 else 96)
    assert (result.prefix_len, result.length) == (64, 96)
    rig.private -= 6 - owned // 16 - len(result.duplicates[0])
    rig.give_back(result.duplicates[0])
    rig.check()


def test_the_very_page_that_is_there_is_no_duplicate() -> None:
    """A request that inserts again what it has inserted before, with canonical ids, owes nothing:
    giving such a page back would free it under the tree."""
    rig = Rig()
    key = RadixKey(seq("A", 64))
    rig.publish(seq("A", 32))
    own = rig.compute(key, 2)
    own[:2] = rig.match(key).pages[0]
    for _ in range(3):
        result = rig.tree.insert(InsertParams(key, (own,)))
        assert result.duplicates[0].tolist() == []
    own[3] = 60  # one page of somebody's own, at the end of a node of which the rest is the tree's
    result = rig.tree.insert(InsertParams(key, (own,)))
    assert result.duplicates[0].tolist() == [60]
    rig.private -= 2
    rig.check()


def test_canonical_pages_from_first_changed_on() -> None:
    """`RadixTree.pages(boundary, first_changed)` is what the caller's table must show, and empty
    when nothing has changed."""
    rig = Rig()
    rig.publish(seq("A", 64))
    key = RadixKey(seq("A", 96))
    own = rig.compute(key)
    result = rig.insert(key, own)
    table = own.copy()
    table[result.first_changed // 16 :] = rig.tree.pages(result.boundary, result.first_changed)[0]
    assert table.tolist() == rig.tree.pages(result.boundary)[0].tolist()
    again = rig.insert(key, table, owned=96)
    assert again.first_changed == 96
    assert rig.tree.pages(again.boundary, again.first_changed)[0].tolist() == []
    rig.check()


@pytest.mark.parametrize("start", [0, 16, 32, 48, 64, 80, 96])
def test_pages_of_any_part_of_a_path(start: int) -> None:
    """`RadixTree.pages` cuts at any page, in the middle of nodes too."""
    rig = Rig()
    for end in (32, 48, 96):
        rig.publish(seq("A", end))
    found = rig.match(seq("A", 96))
    whole = found.pages[0].tolist()
    assert rig.tree.pages(found.device_boundary, start)[0].tolist() == whole[start // 16 :]
    for stop in range(start, 97, 16):
        boundary = Boundary(found.device_node, stop)
        assert rig.tree.pages(boundary, start)[0].tolist() == whole[start // 16 : stop // 16]


def test_a_branch_splits_the_node_it_leaves() -> None:
    """§5.2: the shared part becomes a node of its own."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.publish(seq("A", 40) + seq("B", 40))
    assert spans(rig.tree) == [(0, 32), (32, 64), (32, 80)]
    assert rig.hit(seq("A", 64)) == (64, 0)
    assert rig.hit(seq("A", 40) + seq("B", 40)) == (80, 0)
    assert rig.tree.evictable_size() == 7
    rig.check()


@pytest.mark.parametrize("at", [1, 15, 16, 17, 40, 63])
def test_an_insert_without_a_match_splits_where_the_tokens_differ(at: int) -> None:
    """§5.2: it compares whole edges itself; a page with one other token is a page of its own."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.publish_own(seq("A", at) + seq("B", 80 - at))
    shared = rig.floor(at)
    assert rig.hit(seq("A", at) + seq("B", 80 - at)) == (80, 0)
    assert rig.hit(seq("A", 64)) == (64, 0)
    assert rig.tree.evictable_size() == (64 + 80 - shared) // 16
    rig.check()


def test_an_insert_that_ends_inside_a_node_cuts_it_there() -> None:
    """§5.2, §5.10: the caller can lock exactly what it has inserted."""
    rig = Rig()
    rig.publish(seq("A", 64))
    key = RadixKey(seq("A", 32))
    result = rig.insert(key, rig.compute(key))
    assert result.node.end == result.length == 32
    receipt = rig.tree.inc_lock_ref(result.boundary)
    assert (rig.tree.protected_size(), rig.tree.evictable_size()) == (2, 2)
    rig.tree.dec_lock_ref(receipt)
    rig.check()


def test_length_publishes_a_part_of_the_key() -> None:
    """A chunk of a prompt: the key is the whole, `length` what is computed so far."""
    rig = Rig()
    key = RadixKey(seq("A", 64))
    own = rig.compute(key)
    for length, end in ((20, 16), (40, 32), (64, 64)):
        result = rig.tree.insert(InsertParams(key, (own,), length=length))
        assert (result.length, result.node.end) == (end, end)
    rig.private -= 4
    rig.check()


def test_bad_lengths_and_page_arrays_are_refused_before_anything_changes() -> None:
    """Wrong input is an error with a number in it, and the tree stays as it was."""
    rig = Rig()
    key = RadixKey(seq("A", 64))
    for params, message in (
        (
            InsertParams(key, (ids(1, 2, 3, 4),), length=65),
            "cannot insert 65 tokens of a key of 64",
        ),
        (InsertParams(key, (ids(1, 2, 3, 4),), length=-1), "cannot insert -1"),
        (InsertParams(key, (ids(1, 2, 3),)), "3 page ids for 4 pages"),
        (InsertParams(key, ()), "0 page arrays for 1 components"),
        (InsertParams(key, (ids(1, 2, 3, 4), ids())), "2 page arrays for 1 components"),
        (InsertParams(key, (ids(1, 2, 3, 4),), prev_prefix_len=8), "prev_prefix_len 8 is not"),
        (InsertParams(key, (ids(1, 2, 3, 4),), prev_prefix_len=-16), "prev_prefix_len -16 is not"),
    ):
        with pytest.raises(ValueError, match=message):
            rig.tree.insert(params)
    for pages in (np.arange(4), np.arange(4, dtype=np.uint8)):
        with pytest.raises(TypeError, match="page ids must be int32"):
            rig.tree.insert(InsertParams(key, (pages,)))  # type: ignore[arg-type]
    assert rig.tree.num_nodes == 0
    rig.check()


# --- a prefix that the tree does not hold ---------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "lfu", "priority", "slru"])
def test_relying_on_a_prefix_that_was_evicted_is_stale(policy: str) -> None:
    """Nothing is adopted or counted: the ids before `prev_prefix_len` are not the caller's, and the
    tree has lost them."""
    rig = Rig(policy=policy)
    rig.publish(seq("A", 32))
    rig.publish(seq("B", 32))
    order_of(rig.tree)  # settled: a changed rank would show
    node = rig.match(seq("A", 32)).best_node
    order_of(rig.tree)
    key = RadixKey(seq("A", 64))
    own = rig.compute(key, 3)
    before = (rig.tree.num_nodes, rig.tree.evictable_size(), node.hit_count)
    with pytest.raises(StaleError, match=r"prev_prefix_len is 48, .* only up to 32"):
        rig.tree.insert(InsertParams(key, (own,), prev_prefix_len=48, priority=9))
    assert before == (rig.tree.num_nodes, rig.tree.evictable_size(), node.hit_count)
    rig.check()


def test_relying_on_a_prefix_that_only_the_host_has_is_stale() -> None:
    """Its device pages are gone; the ids would be adopted from a table that no longer holds
    them."""
    rig = Rig(policy="lfu")
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 64))
    rig.backup(seq("A", 64))
    rig.evict(32)
    rig.check()
    key = RadixKey(seq("A", 96))
    own = rig.compute(key, 3)
    with pytest.raises(StaleError, match=r"prev_prefix_len is 48, .* only up to 32"):
        rig.tree.insert(InsertParams(key, (own,), prev_prefix_len=48))
    rig.check()


# --- what an insert counts and dates --------------------------------------------------------------


def test_hits_count_once_per_request_and_node() -> None:
    """§5.8: matched nodes at grant, new ones when inserted; what this request has inserted before
    does not count again."""
    rig = Rig()
    key = RadixKey(seq("A", 96))
    own = rig.compute(key)
    done = 0
    for length in (32, 64, 96):
        params = InsertParams(key, (own,), length=length, prev_prefix_len=done, inserted_len=done)
        end = rig.tree.insert(params).node
        done = length
    rig.private -= 6
    assert [node.hit_count for node in path_to(end)] == [1, 1, 1]
    rig.publish(key)
    assert [node.hit_count for node in path_to(end)] == [2, 2, 2]
    rig.check()


def test_priority_rises_to_the_highest_that_passed() -> None:
    """§5.2: along the path, and never falls."""
    rig = Rig()
    rig.publish(seq("A", 32), priority=2)
    rig.publish(seq("A", 64), priority=5)
    rig.publish(seq("A", 64), priority=1)
    assert [node.priority for node in path_to(rig.match(seq("A", 64)).best_node)] == [5, 5]


def test_an_insert_is_an_access_of_its_whole_path() -> None:
    """§5.2: what a request publishes is the newest, children newer than parents."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("B", 32))
    key = RadixKey(seq("A", 48))
    rig.insert(key, rig.compute(key))
    victims = [(leaf.start, leaf.end) for leaf in order_of(rig.tree)]
    assert victims == [(0, 32), (32, 48)]


# --- the prompt's end -----------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt_len", "cut"), [(40, 32), (32, 32), (16, 16), (63, 48)])
def test_a_boundary_at_the_prompts_end(prompt_len: int, cut: int) -> None:
    """§5.9: generated tokens can go first."""
    rig = Rig()
    key = RadixKey(seq("A", 64))
    rig.insert(key, rig.compute(key), prompt_len=prompt_len)
    assert spans(rig.tree) == [(0, cut), (cut, 64)]
    rig.evict(16)
    assert rig.hit(seq("A", 64)) == (cut, 0)
    rig.check()


@pytest.mark.parametrize("prompt_len", [0, 15, 64, 80])
def test_no_boundary_where_the_prompt_ends_outside_the_fresh_leaf(prompt_len: int) -> None:
    """§5.9: no empty node, and nothing beyond the key."""
    rig = Rig()
    key = RadixKey(seq("A", 64))
    rig.insert(key, rig.compute(key), prompt_len=prompt_len)
    assert spans(rig.tree) == [(0, 64)]
    rig.check()


# --- under locks ----------------------------------------------------------------------------------


def test_what_is_adopted_under_a_lock_is_protected() -> None:
    """§5.3, §6.3: a node that is held and had nothing gets its pages; they are not evictable."""
    rig = Rig()
    key = RadixKey(seq("A", 64))
    boundary = rig.host_only(key)
    receipt = rig.tree.inc_lock_ref(boundary)
    result = rig.insert(key, rig.compute(key))
    assert result.duplicates[0].tolist() == []
    assert (rig.tree.protected_size(), rig.tree.evictable_size()) == (4, 0)
    rig.check()
    rig.evict(64)
    assert rig.hit(key) == (64, 0)
    rig.tree.dec_lock_ref(receipt)
    assert (rig.tree.protected_size(), rig.tree.evictable_size()) == (0, 4)
    rig.check()


def test_a_new_leaf_below_a_lock_is_not_locked() -> None:
    """§5.10: the insert owns nothing; the request's new lock does."""
    rig = Rig()
    receipt = rig.publish_and_lock(seq("A", 32), 32)
    result = rig.publish(seq("A", 64))
    assert (rig.tree.protected_size(), rig.tree.evictable_size()) == (2, 2)
    new = rig.tree.inc_lock_ref(result.boundary)
    rig.tree.dec_lock_ref(receipt)
    assert (rig.tree.protected_size(), rig.tree.evictable_size()) == (4, 0)
    rig.tree.dec_lock_ref(new)
    rig.check()


# --- a key that was matched before: the tree goes on from where it has seen it --------------------


def test_a_key_that_was_cut_since_its_match_is_looked_for_again() -> None:
    """Its place in the tree was that of tokens that it has no longer."""
    rig = Rig()
    rig.publish(seq("A", 64))
    key = RadixKey(seq("A", 64))
    held = rig.tree.inc_lock_ref(rig.match(key, 32).device_boundary)
    rig.match(key)
    key.truncate(32)
    key.extend(seq("B", 32))
    assert rig.insert(key, rig.compute(key, 2), 32).node.end == 64
    assert rig.hit(seq("A", 64)) == rig.hit([*seq("A", 32), *seq("B", 32)]) == (64, 0)
    rig.tree.dec_lock_ref(held)
    rig.check()


def test_a_key_whose_first_tokens_are_other_ones_now() -> None:
    """Cut to less than is owned of it: the tree does not hold that."""
    rig = Rig()
    rig.publish(seq("A", 32))
    key = RadixKey(seq("A", 32))
    rig.match(key)
    key.truncate(16)
    key.extend(seq("B", 32))
    with pytest.raises(StaleError, match="only up to 16"):
        rig.tree.insert(InsertParams(key, (ids(-1, -1, 9),), prev_prefix_len=32))
    rig.check()


def test_a_key_of_which_less_is_owned_than_was_matched() -> None:
    """What it has found beyond is not passed over: the caller's pages there are duplicates."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 64))
    key = RadixKey(seq("A", 80))
    rig.match(key)
    result = rig.insert(key, rig.compute(key, 2), 32)
    assert (result.first_changed, result.prefix_len) == (32, 64)
    assert len(result.duplicates[0]) == 2
    rig.check()


def test_a_key_that_another_tree_has_seen() -> None:
    """A place in one tree is none in another, nor in the same one after a `reset()`."""
    rig, other = Rig(), Rig()
    for subject in (rig, other):
        subject.publish(seq("A", 32))
    key = RadixKey(seq("A", 64))
    rig.match(key)
    assert other.insert(key, other.compute(key, 2), 32).node.end == 64
    assert other.hit(key) == (64, 0)
    other.check()
    rig.match(key)
    rig.tree.reset()
    with pytest.raises(StaleError, match="only up to 0"):
        rig.tree.insert(InsertParams(key, (ids(-1, -1, 9, 9),), prev_prefix_len=32))


def test_the_path_to_a_match_is_walked_again_after_a_split() -> None:
    """Between a match and the lock of it, a lock of something shorter cuts the path."""
    rig = Rig()
    rig.publish(seq("A", 64))
    long, short = rig.match(seq("A", 64)), rig.match(seq("A", 32))
    rig.match(seq("A", 64))
    first = rig.tree.inc_lock_ref(short.device_boundary)
    second = rig.tree.inc_lock_ref(long.device_boundary)
    assert [node.data[0].lock_ref for node in path_to(long.device_node)] == [2, 1]
    assert rig.tree.protected_size() == 4
    for receipt in (first, second):
        rig.tree.dec_lock_ref(receipt)
    rig.check()


def test_an_only_child_that_gets_a_sibling() -> None:
    """From then on a page decides which of them is meant."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 64))
    fork = [*seq("A", 32), *seq("B", 32)]
    rig.publish(fork)
    assert rig.hit(seq("A", 64)) == rig.hit(fork) == (64, 0)
    rig.check()
