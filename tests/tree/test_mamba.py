"""A recurrent state keeps its rules: it stands at one depth, and is taken, held and given up there.

P is 16 throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.tree.helpers import seq, spans
from tests.tree.hybrid import HybridRig
from tiered_cache.keys import RadixKey
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.swa import SWAComponent
from tiered_cache.tree.locks import Receipt
from tiered_cache.types import NO_PAGE, Boundary, InsertParams, Tier

M = 1


def make(**rest: Any) -> HybridRig:
    return HybridRig([FullComponent("full"), MambaComponent("mamba")], 16, **rest)


def hits(rig: HybridRig, tokens: list[int]) -> list[int]:
    """What is found of each whole page of a key."""
    return [rig.hit(RadixKey(tokens[:stop]))[0] for stop in range(16, len(tokens) + 1, 16)]


def states(rig: HybridRig, tokens: list[int], tier: Tier = Tier.DEVICE) -> list[int]:
    """Depths at which a key's path has states."""
    return [end for _, end in rig.parts(tokens, M, tier)]


def lock(rig: HybridRig, tokens: list[int]) -> Receipt:
    return rig.tree.inc_lock_ref(Boundary(rig.path(tokens)[-1], len(tokens)))


def back_up(rig: HybridRig, tokens: list[int]) -> None:
    boundary = Boundary(rig.node(tokens), len(tokens))
    for index in range(len(rig.components)):
        rig.move(boundary, index, Tier.HOST)


# --- match ----------------------------------------------------------------------------------------


def test_a_prefix_ends_where_a_state_stands() -> None:
    """§3.3–4: exactly there; the longest, whatever is missing higher up."""
    rig = make()
    rig.publish(seq("A", 96), states=[32, 80])
    assert hits(rig, seq("A", 96)) == [0, 32, 32, 32, 80, 80]
    assert rig.match(RadixKey(seq("A", 96))).full_hit_length == 96
    rig.drop(seq("A", 80), M)
    assert hits(rig, seq("A", 96)) == [0, 32, 32, 32, 32, 32]
    rig.check()


def test_no_part_of_an_edge_has_a_state() -> None:
    """§3.2, §3.4: a state at the end says nothing of what is in front of it."""
    rig = make()
    rig.publish(seq("A", 64), states=[64])
    assert hits(rig, seq("A", 64)) == [0, 0, 0, 64]
    assert spans(rig.tree) == [(0, 64)]


def test_a_state_may_be_on_the_host() -> None:
    """§3.3: a deeper one there makes the second boundary."""
    rig = make()
    rig.publish(seq("A", 32), states=[32])
    rig.publish(seq("A", 64), states=[64])
    back_up(rig, seq("A", 64))
    rig.drop(seq("A", 64), M)
    assert rig.hit(RadixKey(seq("A", 64))) == (32, 64)
    rig.drop(seq("A", 64), M, Tier.HOST)
    assert rig.hit(RadixKey(seq("A", 64))) == (32, 32)
    rig.check()


def test_a_slot_stands_at_the_page_that_its_depth_ends() -> None:
    """§1.3, §3.5: that of the state at the end, −1 everywhere else."""
    rig = make()
    rig.publish(seq("A", 64), states=[32, 64])
    _, slots = rig.match(RadixKey(seq("A", 64))).pages
    assert (slots == NO_PAGE).tolist() == [True, True, True, False]
    later = rig.tree.pages(Boundary(rig.node(seq("A", 64)), 64), 32)[M]
    assert later.tolist() == slots[2:].tolist()


# --- recency --------------------------------------------------------------------------------------


def test_a_match_dates_one_state() -> None:
    """§3.6: the one that it found; those above get no younger."""
    rig = make()
    rig.publish(seq("A", 16), states=[16])
    rig.publish(seq("A", 32), states=[32])
    rig.publish(seq("B", 16), states=[16])
    rig.match(RadixKey(seq("A", 32)))
    rig.evict(M, 1)
    assert states(rig, seq("A", 32)) == [32]
    rig.evict(M, 1)
    assert states(rig, seq("A", 32)) == [32]
    assert rig.kept() == [2, 1]
    rig.check()


def test_a_state_that_was_not_found_is_not_dated() -> None:
    """§3.6: a match that ends above it."""
    rig = make()
    rig.publish(seq("A", 16), states=[16])
    rig.publish(seq("A", 48), states=[48])
    rig.publish(seq("B", 16), states=[16])
    assert rig.hit(RadixKey(seq("A", 32)))[0] == 16
    rig.evict(M, 1)
    assert states(rig, seq("A", 48)) == [16]


# --- split ----------------------------------------------------------------------------------------


def test_a_state_stays_with_the_child() -> None:
    """§4: the parent gets nothing, and no lock of it."""
    rig = make()
    rig.publish(seq("A", 64), states=[64])
    back_up(rig, seq("A", 64))
    held = lock(rig, seq("A", 64))
    kept = rig.tree.inc_host_lock_ref(Boundary(rig.node(seq("A", 64)), 64))
    rig.tree.cut(Boundary(rig.node(seq("A", 64)), 32))
    upper, lower = (node.data[M] for node in rig.path(seq("A", 64)))
    assert (upper.value, upper.host_value) == (None, None)
    assert (upper.lock_ref, upper.host_lock_ref) == (0, 0)
    assert lower.value is not None
    assert (lower.lock_ref, lower.host_lock_ref) == (1, 1)
    rig.check()
    rig.tree.dec_lock_ref(held)
    rig.tree.dec_host_lock_ref(kept)
    assert hits(rig, seq("A", 64)) == [0, 0, 0, 64]
    rig.check()


# --- insert ---------------------------------------------------------------------------------------


def test_a_new_leaf_takes_the_slot() -> None:
    """§5.7: and the caller's is gone."""
    rig = make()
    result = rig.publish(seq("A", 32), states=[32])
    assert result is not None
    assert not result.mamba_exist
    assert rig.kept() == [2, 1]
    rig.check()


def test_a_leaf_is_cut_where_its_states_stand() -> None:
    """§5.7: each is attached at the depth that it was computed at."""
    rig = make()
    rig.publish(seq("A", 96), states=[32, 48, 96])
    assert spans(rig.tree) == [(0, 32), (32, 48), (48, 96)]
    assert states(rig, seq("A", 96)) == [32, 48, 96]
    rig.check()


def test_a_leaf_without_a_state_is_one_node() -> None:
    """§5.6: F alone is enough."""
    rig = make()
    result = rig.publish(seq("A", 96))
    assert result is not None
    assert result.mamba_exist
    assert spans(rig.tree) == [(0, 96)]
    assert hits(rig, seq("A", 96)) == [0] * 6


def test_a_state_that_is_there_stays() -> None:
    """§5.7: the caller's slot goes back, and the tree's is the one to use."""
    rig = make()
    rig.publish(seq("A", 64), states=[64])
    key = RadixKey(seq("A", 64))
    pages = rig.compute(key, 0, states=[64])
    assert pages is not None
    result = rig.insert(key, pages)
    assert result.mamba_exist
    assert result.duplicates[M].tolist() == [pages[M][3]]
    assert result.first_changed < 64
    assert rig.tree.pages(result.boundary)[M][3] != pages[M][3]
    rig.check()


def test_one_s_own_state_is_no_duplicate() -> None:
    """§5.7: what the tree has taken is said again by the next insert of the same request."""
    rig = make()
    rig.publish(seq("A", 64), states=[64])
    ids = rig.tree.pages(Boundary(rig.node(seq("A", 64)), 64))
    result = rig.tree.insert(InsertParams(RadixKey(seq("A", 64)), ids))
    assert [len(of) for of in result.duplicates] == [0, 0]
    assert result.first_changed == 64


def test_a_tombstone_takes_a_state_at_the_insert_s_end() -> None:
    """§5.7: a node without a state that ends there; cut there if need be."""
    rig = make()
    rig.publish(seq("A", 96))
    for stop in (96, 32):
        pages = rig.compute(RadixKey(seq("A", stop)), 0, states=[stop])
        assert pages is not None
        assert not rig.insert(RadixKey(seq("A", stop)), pages).mamba_exist
        rig.check()
    assert spans(rig.tree) == [(0, 32), (32, 96)]
    assert hits(rig, seq("A", 96)) == [0, 32, 32, 32, 32, 96]


def test_a_state_inside_a_node_is_refused() -> None:
    """§5.7: an edge that is there is not cut for it; the slot goes home."""
    rig = make()
    rig.publish(seq("A", 96), states=[96])
    pages = rig.compute(RadixKey(seq("A", 96)), 0, states=[32, 96])
    assert pages is not None
    result = rig.insert(RadixKey(seq("A", 96)), pages)
    assert sorted(result.duplicates[M].tolist()) == sorted([pages[M][1], pages[M][5]])
    assert spans(rig.tree) == [(0, 96)]
    assert result.first_changed == 0
    rig.check()


def test_below_what_the_request_owns_nothing_is_taken() -> None:
    """§5.1: a state inside it is the tree's, or nobody's."""
    rig = make()
    rig.publish(seq("A", 96))
    ids = tuple(of.copy() for of in rig.tree.pages(Boundary(rig.node(seq("A", 96)), 96)))
    ids[M][1] = 7
    params = InsertParams(RadixKey(seq("A", 96)), ids, prev_prefix_len=48)
    assert rig.tree.insert(params).duplicates[M].tolist() == []
    assert rig.kept() == [6, 0]


def test_nothing_to_insert_leaves_the_slot_with_the_request() -> None:
    """§5.1: prefix 0, and the state was not taken."""
    rig = make()
    result = rig.publish(seq("A", 10))
    assert result is not None
    assert (result.prefix_len, result.mamba_exist) == (0, True)


def test_the_prompt_s_end_is_a_boundary_where_a_state_stands() -> None:
    """§5.9: every component must be able to use it."""
    rig = make()
    rig.publish(seq("A", 96), states=[96], prompt_len=50)
    rig.publish(seq("B", 96), states=[48, 96], prompt_len=50)
    assert spans(rig.tree) == [(0, 48), (0, 96), (48, 96)]


# --- locks ----------------------------------------------------------------------------------------


def test_a_lock_keeps_one_state() -> None:
    """§6.2: the end node's."""
    rig = make()
    rig.publish(seq("A", 96), states=[32, 64, 96])
    boundary = Boundary(rig.node(seq("A", 64)), 64)
    assert rig.tree.would_protect(boundary) == [4, 1]
    assert rig.tree.would_protect(Boundary(rig.node(seq("A", 96)), 80)) == [5, 0]
    receipt = rig.tree.inc_lock_ref(boundary)
    assert rig.locks(seq("A", 96), M) == [0, 1, 0]
    other = rig.tree.inc_lock_ref(boundary)
    assert rig.tree.would_release([receipt]) == [0, 0]
    assert rig.tree.would_release([receipt, other]) == rig.held() == [4, 1]
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    rig.tree.dec_lock_ref(other)
    assert rig.held() == [0, 0]
    rig.check()


def test_a_lock_moves_on_with_the_request() -> None:
    """§5.10: to the deeper state; the one above may go."""
    rig = make()
    rig.publish(seq("A", 32), states=[32])
    receipt = lock(rig, seq("A", 32))
    rig.publish(seq("A", 64), states=[64])
    rig.tree.advance(receipt, Boundary(rig.node(seq("A", 64)), 64))
    assert rig.locks(seq("A", 64), M) == [0, 1]
    assert rig.evict(M, 10).count(M) == 1
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    assert rig.locks(seq("A", 64), M) == [0, 0]


def test_a_state_is_released_early_once() -> None:
    """§6.1: when it was copied; the full release skips it."""
    rig = make()
    rig.publish(seq("A", 32), states=[32])
    receipt, other = lock(rig, seq("A", 32)), lock(rig, seq("A", 32))
    rig.tree.release(receipt, M)
    rig.tree.release(receipt, M)
    assert rig.locks(seq("A", 32), M) == [1]
    rig.tree.dec_lock_ref(receipt)
    assert rig.held() == [2, 1]
    rig.check()
    rig.tree.dec_lock_ref(other)
    assert rig.held() == [0, 0]


def test_a_state_that_comes_under_a_lock_is_held() -> None:
    """§6.3: by whoever holds the end of the node."""
    rig = make()
    rig.publish(seq("A", 32))
    receipt = lock(rig, seq("A", 32))
    pages = rig.compute(RadixKey(seq("A", 32)), 0, states=[32])
    assert pages is not None
    rig.insert(RadixKey(seq("A", 32)), pages)
    assert rig.held() == [2, 1]
    rig.check()
    rig.tree.dec_lock_ref(receipt)


# --- device eviction ------------------------------------------------------------------------------


def test_on_an_internal_node_only_the_state_goes() -> None:
    """§7.2: it is the last in the order of components."""
    rig = HybridRig(
        [FullComponent("full"), SWAComponent("swa", 64), MambaComponent("mamba")], page_size=16
    )
    rig.publish(seq("A", 16), states=[16])
    rig.publish(seq("A", 32), states=[32])
    gone = rig.evict(2, 1)
    assert [gone.count(index) for index in range(3)] == [0, 0, 1]
    assert rig.parts(seq("A", 32), 2) == [(16, 32)]
    assert rig.kept() == [2, 2, 1]
    rig.check()


def test_a_leaf_goes_whole() -> None:
    """§7.2: and the tombstones above that stood for nothing else stay, for they have F."""
    rig = make()
    rig.publish(seq("A", 32), states=[16, 32])
    rig.match(RadixKey(seq("A", 16)))
    gone = rig.evict(M, 1)
    assert [gone.count(index) for index in (0, M)] == [1, 1]
    assert spans(rig.tree) == [(0, 16)]
    rig.check()


def test_a_state_in_use_is_not_taken() -> None:
    """§7.2: the next one in the order goes."""
    rig = make()
    rig.publish(seq("A", 32), states=[32])
    rig.publish(seq("B", 32), states=[32])
    receipt = lock(rig, seq("A", 32))
    assert rig.evict(M, 5).count(M) == 1
    assert states(rig, seq("A", 32)) == [32]
    assert rig.evict(M, 1).count(M) == 0
    rig.tree.dec_lock_ref(receipt)
    rig.check()


def test_on_a_leaf_whose_base_is_locked_only_the_state_goes() -> None:
    """§7.2: the pages are in use."""
    rig = make()
    rig.publish(seq("A", 32), states=[32])
    receipt = lock(rig, seq("A", 32))
    rig.tree.release(receipt, M)
    gone = rig.evict(M, 1)
    assert [gone.count(index) for index in (0, M)] == [0, 1]
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    assert rig.evict(0, 1).count(0) == 2


def test_no_more_goes_than_was_asked() -> None:
    """§7.1: states are counted as states, not as the pages above them."""
    rig = make()
    rig.publish(seq("A", 96), states=[16, 32, 48, 64, 80])
    assert rig.evict(M, 3).count(M) == 3
    assert rig.kept() == [6, 2]


def test_a_demoted_leaf_keeps_the_state_that_the_host_has() -> None:
    """§7.3–4: and loses one that it has not."""
    for with_state, best in ((True, 32), (False, 0)):
        rig = make()
        rig.publish(seq("A", 32), states=[32])
        boundary = Boundary(rig.node(seq("A", 32)), 32)
        for index in (0, M) if with_state else (0,):
            rig.move(boundary, index, Tier.HOST)
        rig.evict(0, 1)
        assert (rig.kept(), rig.kept(Tier.HOST)) == ([0, 0], [2, int(with_state)])
        assert rig.hit(RadixKey(seq("A", 32))) == (0, best)
        rig.check()


# --- host eviction, moving ------------------------------------------------------------------------


def test_on_the_host_the_oldest_state_goes() -> None:
    """§8.2: alone; what F has there stays."""
    rig = make()
    for name in "ABC":
        rig.publish(seq(name, 32), states=[32])
        back_up(rig, seq(name, 32))
    rig.evict(0, 100)
    rig.match(RadixKey(seq("A", 32)))
    assert rig.evict(M, 1, Tier.HOST).count(M, Tier.HOST) == 1
    assert [states(rig, seq(name, 32), Tier.HOST) for name in "ABC"] == [[32], [], [32]]
    receipt = rig.tree.inc_host_lock_ref(Boundary(rig.node(seq("A", 32)), 32))
    assert rig.evict(M, 9, Tier.HOST).count(M, Tier.HOST) == 1
    assert states(rig, seq("A", 32), Tier.HOST) == [32]
    assert rig.kept(Tier.HOST) == [6, 1]
    rig.tree.dec_host_lock_ref(receipt)
    rig.check()


def test_the_mirror_of_a_state_goes_first() -> None:
    """§8.3: of one that storage has, though it is younger and has children."""
    rig = make()
    rig.publish(seq("B", 32), states=[32])
    back_up(rig, seq("B", 32))
    rig.evict(0, 100)
    rig.publish(seq("A", 32), states=[16, 32])
    back_up(rig, seq("A", 16))
    back_up(rig, seq("A", 32))
    assert states(rig, seq("A", 32), Tier.HOST) == [16, 32]
    rig.tree.believe_stored(rig.node(seq("A", 16)), M, True)
    assert rig.evict(M, 1, Tier.HOST).count(M, Tier.HOST) == 1
    assert states(rig, seq("A", 32), Tier.HOST) == [32]
    assert rig.evict(M, 9, Tier.HOST).count(M, Tier.HOST) == 1  # not the one that is nowhere else
    assert states(rig, seq("A", 32), Tier.HOST) == [32]
    assert states(rig, seq("B", 32), Tier.HOST) == []
    rig.check()


def test_a_host_lock_is_of_the_state_at_its_end() -> None:
    """§6.4: if the span is not empty."""
    rig = make()
    rig.publish(seq("A", 32), states=[16, 32])
    for stop in (16, 32):
        back_up(rig, seq("A", stop))
    boundary = Boundary(rig.node(seq("A", 32)), 32)
    nothing = rig.tree.inc_host_lock_ref(boundary, 32)
    assert rig.held(Tier.HOST) == [0, 0]
    receipt = rig.tree.inc_host_lock_ref(boundary, 0)
    assert rig.held(Tier.HOST) == [2, 1]
    rig.check()
    for of in (receipt, nothing):
        rig.tree.dec_host_lock_ref(of)
    assert rig.held(Tier.HOST) == [0, 0]
    rig.check()


def test_a_load_brings_the_state_at_its_end() -> None:
    """§9.7: the states above are not needed."""
    rig = make()
    rig.publish(seq("A", 64), states=[32, 64])
    for stop in (32, 64):
        back_up(rig, seq("A", stop))
    rig.evict(0, 100)
    boundary = rig.match(RadixKey(seq("A", 64))).best_boundary
    for index in (0, M):
        assert rig.move(boundary, index, Tier.DEVICE)
    assert rig.kept() == [4, 1]
    assert rig.hit(RadixKey(seq("A", 64))) == (64, 64)
    rig.check()


def test_a_commit_of_a_state_is_of_the_end_alone() -> None:
    """§1.5, §5.12: no cut, however long the edge; one that is there stays, one without a base is
    not taken."""
    rig = make()
    rig.publish(seq("A", 96))
    boundary = Boundary(rig.node(seq("A", 96)), 96)
    one, other = np.array([[5], [6]], np.int32)
    assert rig.tree.commit_transfer(boundary, M, Tier.DEVICE, one).tolist() == []
    assert rig.tree.commit_transfer(boundary, M, Tier.DEVICE, other).tolist() == [6]
    assert spans(rig.tree) == [(0, 96)]
    rig.tree.check_integrity()
    found, left = rig.tree.insert_host(RadixKey(seq("A", 96)), 80, M, one)
    assert (found, left.tolist()) == (boundary, [])
    found, left = rig.tree.insert_host(RadixKey(seq("A", 112)), 96, M, one)
    assert (found, left.tolist()) == (None, [5])
    rig.tree.check_integrity()
