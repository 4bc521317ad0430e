"""A sliding window keeps its rules: where a prefix may end, what is adopted, held and given up.

P is 16 throughout, and W is 32 where a test does not say otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tree.helpers import seq, spans
from tests.tree.hybrid import HybridRig
from tiered_cache.keys import RadixKey
from tiered_cache.tree.components.base import owns_memory
from tiered_cache.tree.components.full import FullComponent
from tiered_cache.tree.components.mamba import MambaComponent
from tiered_cache.tree.components.swa import SWAComponent
from tiered_cache.tree.locks import Receipt
from tiered_cache.types import NO_PAGE, Boundary, InsertParams, InsertResult, Tier

S, M = 1, 2


def make(*windows: int, **rest: Any) -> HybridRig:
    """F and a window of 32, or of these sizes."""
    many = [SWAComponent(f"swa.{window}", window) for window in windows or (32,)]
    return HybridRig([FullComponent("full"), *many], 16, **rest)


def by_page(rig: HybridRig, name: str, length: int) -> None:
    """Publish a sequence in nodes of a page."""
    for stop in range(16, length + 1, 16):
        rig.publish(seq(name, stop))


def lock(rig: HybridRig, tokens: list[int]) -> Receipt:
    return rig.tree.inc_lock_ref(Boundary(rig.path(tokens)[-1], len(tokens)))


def by_age(rig: HybridRig, tier: Tier = Tier.DEVICE) -> list[tuple[int, int]]:
    """What the window would give up, the oldest first: (first token's sequence, end)."""
    orders = rig.components[S].orders  # type: ignore[attr-defined]
    orders.settle()
    return [(node.start, node.end) for node in (orders.device, orders.host)[tier is Tier.HOST]]


def back_up(rig: HybridRig, tokens: list[int]) -> None:
    boundary = Boundary(rig.node(tokens), len(tokens))
    for index in range(len(rig.components)):
        rig.move(boundary, index, Tier.HOST)


# --- match ----------------------------------------------------------------------------------------


def test_a_path_without_a_tombstone_is_valid_though_it_is_short() -> None:
    """§3.4: the running length starts at infinity."""
    rig = make(1000)
    rig.publish(seq("A", 48))
    assert [rig.hit(RadixKey(seq("A", length)))[0] for length in (15, 16, 40, 48)] == [
        0,
        16,
        32,
        48,
    ]


@pytest.mark.parametrize(
    ("window", "first"), [(1, 48), (16, 48), (17, 64), (32, 64), (33, 80), (48, 80), (49, 96)]
)
def test_below_a_tombstone_a_whole_window_is_needed(window: int, first: int) -> None:
    """§3.3–4: the length becomes 0 at a tombstone; a refusal ends no walk."""
    rig = make(window)
    by_page(rig, "A", 112)
    rig.drop(seq("A", 32), S)
    legal = [rig.hit(RadixKey(seq("A", stop)))[0] for stop in range(16, 113, 16)]
    assert legal == [stop if stop == 16 or stop >= first else 16 for stop in range(16, 113, 16)]


def test_the_length_starts_anew_at_each_tombstone() -> None:
    """§3.4: the window says so by itself, and needs not be asked again."""
    rig = make()
    by_page(rig, "A", 80)
    for stop in (32, 64):
        rig.drop(seq("A", stop), S)
    path = rig.path(seq("A", 80))
    found = [rig.components[S].deepest_boundary(path, n, 16 * n, True) for n in range(6)]
    assert found == [0, 1, 1, 1, 1, 1]


def test_part_of_an_edge_is_judged_as_if_it_were_cut_there() -> None:
    """§3.2: 16 tokens of a window of 32, below a tombstone, are none."""
    rig = make()
    rig.publish(seq("A", 96))
    rig.drop(seq("A", 64), S)
    assert spans(rig.tree) == [(0, 64), (64, 96)]
    assert rig.hit(RadixKey(seq("A", 96))) == (96, 96)
    assert rig.hit(RadixKey(seq("A", 96)), 80) == (0, 0)
    assert rig.match(RadixKey(seq("A", 96)), 80).full_hit_length == 80
    assert spans(rig.tree) == [(0, 64), (64, 96)]


def test_a_window_may_be_on_the_host() -> None:
    """§3.3: two boundaries; what only the host has counts for the second one."""
    rig = make()
    by_page(rig, "A", 96)
    back_up(rig, seq("A", 96))
    for stop in (80, 96):
        rig.drop(seq("A", stop), S)
    assert rig.hit(RadixKey(seq("A", 96))) == (64, 96)
    rig.drop(seq("A", 80), S, Tier.HOST)
    assert rig.hit(RadixKey(seq("A", 96))) == (64, 64)
    rig.check()


def test_pages_say_where_there_are_none() -> None:
    """§3.5: one id per page of the window, −1 at a tombstone, and above the window, where pages may
    go at any time."""
    rig = make()
    by_page(rig, "A", 96)
    full, window = rig.match(RadixKey(seq("A", 96))).pages
    assert (full >= 0).all()
    assert (window >= 0).tolist() == [False] * 4 + [True] * 2
    rig.drop(seq("A", 80), S)
    window = rig.tree.pages(Boundary(rig.node(seq("A", 96)), 96))[S]
    assert (window >= 0).tolist() == [False] * 5 + [True]


# --- recency --------------------------------------------------------------------------------------


def test_a_match_dates_a_window_and_a_page() -> None:
    """§3.6: S is used within W + P of the boundary, the deepest newest; one long prompt does not
    push out all other windows."""
    rig = make()
    by_page(rig, "A", 96)
    rig.publish(seq("B", 32))
    rig.match(RadixKey(seq("A", 96)))
    assert by_age(rig) == [(0, 16), (16, 32), (32, 48), (0, 32), (48, 64), (64, 80), (80, 96)]


def test_a_probe_does_not_date_a_node_that_it_matches_in_part() -> None:
    """§3.6: nor does what is below a boundary get younger."""
    rig = make()
    rig.publish(seq("A", 32))
    rig.publish(seq("B", 32))
    rig.match(RadixKey(seq("A", 16)))
    assert rig.evict(S, 1).device[S].tolist() == [0, 1]
    assert rig.parts(seq("B", 32), S) == [(0, 32)]


def test_a_split_is_no_access() -> None:
    """§3.7: the new parent is as old as the child."""
    rig = make()
    rig.publish(seq("A", 32))
    rig.publish(seq("B", 32))
    rig.tree.cut(Boundary(rig.node(seq("A", 32)), 16))
    assert by_age(rig) == [(0, 16), (16, 32), (0, 32)]
    rig.check()


# --- split ----------------------------------------------------------------------------------------


def test_a_split_cuts_the_pages_and_copies_the_locks() -> None:
    """§4: on both tiers; each half owns its memory."""
    rig = make()
    rig.publish(seq("A", 32))
    back_up(rig, seq("A", 32))
    held = lock(rig, seq("A", 32))
    kept = rig.tree.inc_host_lock_ref(Boundary(rig.node(seq("A", 32)), 32))
    before = rig.tree.pages(Boundary(rig.node(seq("A", 32)), 32))[S].tolist()
    rig.tree.cut(Boundary(rig.node(seq("A", 32)), 16))
    parts = [node.data[S] for node in rig.path(seq("A", 32))]
    assert [part.value.tolist() for part in parts if part.value is not None] == [
        before[:1],
        before[1:],
    ]
    for part in parts:
        assert (part.lock_ref, part.host_lock_ref) == (1, 1)
        for value in (part.value, part.host_value):
            assert value is not None
            assert owns_memory(value)
    rig.check()
    rig.tree.dec_lock_ref(held)
    rig.tree.dec_host_lock_ref(kept)
    assert rig.held() == rig.held(Tier.HOST) == [0, 0]
    rig.check()


# --- insert ---------------------------------------------------------------------------------------


def computed(rig: HybridRig, tokens: list[int], given_up: int = 0, owned: int = 0) -> InsertResult:
    """A request that has computed everything from `owned` on itself."""
    key = RadixKey(tokens)
    pages = rig.compute(key, owned, given_up)
    assert pages is not None
    return rig.insert(key, pages, swa_evicted_seqlen=given_up, prev_prefix_len=owned)


def without_window(rig: HybridRig, length: int) -> None:
    """A(length) as one node on the device, its window gone."""
    rig.publish(seq("A", length), given_up=length)
    assert rig.kept() == [length // 16, 0]


@pytest.mark.parametrize(
    ("given_up", "owned", "start"),
    [(0, 0, 0), (40, 0, 48), (48, 0, 48), (40, 64, 64), (70, 64, 80)],
)
def test_a_tombstone_adopts_from_where_the_request_has_pages(
    given_up: int, owned: int, start: int
) -> None:
    """§5.5: from max(node start, ceilP(given up), prev_prefix_len) on, cut there; F is as it
    was."""
    rig = make(1000)
    without_window(rig, 96)
    before = rig.tree.pages(Boundary(rig.node(seq("A", 96)), 96))[0].tolist()
    computed(rig, seq("A", 96), given_up, owned)
    assert rig.parts(seq("A", 96), S) == [(start, 96)]
    assert rig.tree.pages(Boundary(rig.node(seq("A", 96)), 96))[0].tolist() == before
    rig.check()


def test_what_is_given_up_up_to_the_end_brings_nothing() -> None:
    """§5.5: a tombstone stays one, uncut."""
    rig = make()
    without_window(rig, 96)
    computed(rig, seq("A", 96), 96)
    assert rig.parts(seq("A", 96), S) == []
    assert spans(rig.tree) == [(0, 64), (64, 96)]
    rig.check()


def test_no_page_is_never_adopted() -> None:
    """§5.5: a node has all pages or none, so it is cut where they begin and cease; over a tombstone
    and in a fresh leaf."""
    rig = make(16)
    without_window(rig, 96)
    rig.publish(seq("B", 16))
    for name in "AB":
        key = RadixKey(seq(name, 96))
        pages = rig.compute(key, 0)
        assert pages is not None
        gaps = [0, 3]
        rig.pools[Tier.DEVICE][S].free(pages[S][gaps])
        pages[S][gaps] = NO_PAGE
        result = rig.insert(key, pages)
        assert rig.tree.pages(result.boundary)[S][5:].tolist() == pages[S][5:].tolist()
        assert [stop for stop in range(16, 97, 16) if rig.hit(key, stop)[0] == stop] == (
            [32, 48, 80, 96] if name == "A" else [16, 32, 48, 80, 96]
        )
        rig.check()


def test_what_is_given_up_and_named_goes_home() -> None:
    """§5.5: a request that names pages of tokens that it says it has given up gets them back, and
    reads of them no more."""
    rig = make(16)
    key = RadixKey(seq("A", 64))
    pages = rig.compute(key, 0)
    assert pages is not None
    result = rig.insert(key, pages, swa_evicted_seqlen=20)  # of the second page a part
    assert result.duplicates[S].tolist() == pages[S][:2].tolist()
    assert result.first_changed == 0
    assert rig.parts(seq("A", 64), S) == [(32, 48), (48, 64)]
    rig.check()


def test_what_the_request_owned_is_not_adopted() -> None:
    """§5.1, §5.5: below `prev_prefix_len` a tombstone stays one, whatever the request names."""
    rig = make(16)
    without_window(rig, 64)
    key = RadixKey(seq("A", 64))
    pages = rig.compute(key, 0)
    assert pages is not None
    result = rig.insert(key, pages, prev_prefix_len=32)
    assert rig.parts(seq("A", 64), S) == [(32, 48), (48, 64)]
    assert result.duplicates[S].tolist() == []
    for index in (0, S):
        rig.pools[Tier.DEVICE][index].free(pages[index][:2])
    rig.check()


def test_pages_that_are_there_go_home() -> None:
    """§5.5: S duplicates, from what the request has itself on; from there on the tree's are
    right."""
    rig = make()
    rig.publish(seq("A", 96))
    kept = rig.kept()
    result = computed(rig, seq("A", 96), given_up=40, owned=32)
    assert (len(result.duplicates[0]), len(result.duplicates[S])) == (4, 3)
    assert result.first_changed == 32
    assert rig.kept() == kept
    rig.check()
    ids = rig.tree.pages(result.boundary)
    result = rig.tree.insert(InsertParams(RadixKey(seq("A", 96)), ids))
    assert [len(of) for of in result.duplicates] == [0, 0]
    other = np.arange(50, 56, dtype=np.int32)
    result = rig.tree.insert(InsertParams(RadixKey(seq("A", 96)), (ids[0], other)))
    assert [of.tolist() for of in result.duplicates] == [[], other.tolist()]
    assert result.first_changed == 0


@pytest.mark.parametrize(
    ("windows", "given_up", "ends"),
    [
        ((32,), 0, [128, 160]),
        ((1,), 0, [144, 160]),
        ((33,), 0, [112, 160]),
        ((160,), 0, [160]),
        ((1000,), 0, [160]),
        ((32, 64), 0, [96, 128, 160]),
        ((32,), 50, [64, 128, 160]),
        ((32,), 128, [128, 160]),
        ((32,), 140, [128, 144, 160]),
    ],
)
def test_a_fresh_leaf_is_cut_for_its_windows(
    windows: tuple[int, ...], given_up: int, ends: list[int]
) -> None:
    """§5.6: where its pages begin, and so that its tail is exactly ceilP(W), for each W."""
    rig = make(*windows)
    rig.publish(seq("A", 160), given_up=given_up)
    assert [node.end for node in rig.path(seq("A", 160))] == ends
    rig.check()


def test_the_tail_of_an_insert_below_another_is_cut() -> None:
    """§5.6: the fresh leaf's, not the whole path's."""
    rig = make()
    rig.publish(seq("A", 16))
    rig.publish(seq("A", 112))
    assert [node.end for node in rig.path(seq("A", 112))] == [16, 80, 112]
    rig.publish(seq("A", 128))
    assert [node.end for node in rig.path(seq("A", 128))] == [16, 80, 112, 128]


# --- locks ----------------------------------------------------------------------------------------


def test_a_lock_keeps_one_window() -> None:
    """§5.6, §6.2: all of F, and of S no page more than W needs."""
    rig = make(32, 64)
    rig.publish(seq("A", 160))
    boundary = Boundary(rig.node(seq("A", 160)), 160)
    assert rig.tree.would_protect(boundary) == [10, 2, 4]
    receipt = rig.tree.inc_lock_ref(boundary)
    assert rig.held() == rig.tree.would_release([receipt]) == [10, 2, 4]
    assert rig.tree.would_protect(boundary) == [0, 0, 0]
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    assert rig.held() == [0, 0, 0]
    rig.check()


def test_a_lock_is_released_by_depth_whatever_is_split_meanwhile() -> None:
    """§6.1–2: above what was held nothing is touched, and below all of it."""
    rig = make()
    by_page(rig, "A", 64)
    rig.publish(seq("A", 96))
    outer, inner = lock(rig, seq("A", 64)), lock(rig, seq("A", 96))
    assert rig.locks(seq("A", 96), S) == [0, 0, 1, 1, 1]
    rig.tree.cut(Boundary(rig.node(seq("A", 96)), 80))
    assert rig.locks(seq("A", 96), S) == [0, 0, 1, 1, 1, 1]
    rig.check()
    rig.tree.dec_lock_ref(inner)
    assert rig.locks(seq("A", 96), S) == [0, 0, 1, 1, 0, 0]
    rig.check()
    rig.tree.dec_lock_ref(outer)
    assert rig.locks(seq("A", 96), S) == [0] * 6
    rig.check()


def test_a_cut_of_the_topmost_held_node_is_released_on_both_sides() -> None:
    """§6.2: the receipt says where that node began, not how long the window is."""
    rig = make(20)
    rig.publish(seq("A", 96))
    receipt = lock(rig, seq("A", 64))
    rig.publish(seq("A", 16) + seq("X", 16))
    assert rig.locks(seq("A", 96), S) == [1, 1, 0]
    assert rig.held()[S] == 4
    rig.tree.dec_lock_ref(receipt)
    assert rig.locks(seq("A", 96), S) == [0, 0, 0]
    rig.check()


def test_tombstones_are_counted_by_a_lock() -> None:
    """§6.2–3: counted, they cannot make two holders hold different things; and what appears under
    a lock is held."""
    rig = make()
    by_page(rig, "A", 64)
    rig.drop(seq("A", 64), S)
    receipt = lock(rig, seq("A", 64))
    assert rig.locks(seq("A", 64), S) == [0, 0, 1, 1]
    assert rig.held()[S] == 1
    other = lock(rig, seq("A", 64))
    computed(rig, seq("A", 64))
    assert rig.held()[S] == 2
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    assert rig.held()[S] == 2
    rig.tree.dec_lock_ref(other)
    assert rig.held()[S] == 0
    rig.check()


@pytest.mark.parametrize("comes", [False, True], ids=["gone", "on its way"])
def test_who_goes_on_does_not_hold_what_it_has_left_behind(comes: bool) -> None:
    """A request that publishes below a page of its window that it has given up: to hold the place
    would take room for a page that may not be home yet. What is on its way there is held."""
    rig = make()
    rig.publish(seq("A", 16))
    receipt = lock(rig, seq("A", 16))
    rig.publish(seq("A", 48), given_up=48)  # by somebody else
    place = rig.node(seq("A", 48)).data[S]
    place.pending = object() if comes else None
    key = RadixKey(seq("A", 64))
    pages = rig.compute(key, 48)
    assert pages is not None
    rig.tree.insert_below(receipt, InsertParams(key, pages, 64, prev_prefix_len=48))
    place.pending = None
    assert rig.locks(seq("A", 64), S) == [0, int(comes), 1]
    assert rig.components[S].device.held == 1 + 2 * comes
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    assert rig.locks(seq("A", 64), S) == [0, 0, 0]
    assert rig.components[S].device.held == 0
    rig.check()


def test_a_window_is_released_early_once() -> None:
    """§6.1: and the full release skips it; another's hold is another's."""
    rig = make()
    rig.publish(seq("A", 96))
    receipt, other = lock(rig, seq("A", 96)), lock(rig, seq("A", 96))
    rig.tree.release(receipt, S)
    rig.tree.release(receipt, S)
    assert rig.locks(seq("A", 96), S) == [0, 1]
    assert rig.tree.would_release([receipt, other]) == [6, 2]
    rig.tree.dec_lock_ref(receipt)
    assert rig.held() == [6, 2]
    rig.check()
    rig.tree.dec_lock_ref(other)
    assert rig.held() == [0, 0]
    rig.check()


def test_a_host_lock_is_a_span_of_the_window_too() -> None:
    """§6.4: every node that overlaps it, through a split."""
    rig = make()
    by_page(rig, "A", 48)
    rig.publish(seq("A", 80))
    back_up(rig, seq("A", 80))
    receipt = rig.tree.inc_host_lock_ref(Boundary(rig.node(seq("A", 80)), 80), 32)
    assert rig.held(Tier.HOST) == [3, 3]
    rig.tree.cut(Boundary(rig.node(seq("A", 80)), 64))
    assert rig.held(Tier.HOST) == [3, 3]
    rig.check()
    rig.tree.dec_host_lock_ref(receipt)
    assert rig.held(Tier.HOST) == [0, 0]
    rig.check()


# --- device eviction ------------------------------------------------------------------------------


def test_on_an_internal_node_only_the_window_goes() -> None:
    """§7.2: the oldest; a tombstone is left, F stays and is found further down."""
    rig = make()
    by_page(rig, "A", 64)
    gone = rig.evict(S, 1)
    assert [gone.count(index) for index in (0, S)] == [0, 1]
    assert rig.parts(seq("A", 64), S) == [(16, 32), (32, 48), (48, 64)]
    assert rig.kept() == [4, 3]
    assert rig.hit(RadixKey(seq("A", 64))) == (64, 64)
    rig.check()


def test_on_an_internal_node_it_takes_what_is_below_it() -> None:
    """§1.2, §7.2: a state whose window is gone is of no use; what is above stays."""
    components = [
        FullComponent("full"),
        SWAComponent("swa.64", 64),
        SWAComponent("swa.32", 32),
        MambaComponent("mamba"),
    ]
    rig = HybridRig(components, 16)
    rig.publish(seq("A", 16), states=[16])
    rig.publish(seq("A", 32), states=[32])
    gone = rig.evict(2, 1)
    assert [gone.count(index) for index in range(4)] == [0, 0, 1, 1]
    assert [rig.parts(seq("A", 32), index) for index in range(1, 4)] == [
        [(0, 16), (16, 32)],
        [(16, 32)],
        [(16, 32)],
    ]
    rig.check()


def test_a_leaf_goes_whole() -> None:
    """§7.2: F with it."""
    rig = make()
    rig.publish(seq("A", 32))
    gone = rig.evict(S, 1)
    assert [gone.count(index) for index in (0, S)] == [2, 2]
    assert rig.tree.num_nodes == 0
    rig.check()


def test_what_is_locked_is_not_taken() -> None:
    """§7.2: nor looked at: the next in the order goes."""
    rig = make()
    rig.publish(seq("A", 32))
    rig.publish(seq("B", 32))
    receipt = lock(rig, seq("A", 32))
    assert rig.evict(S, 10).count(S) == 2
    assert rig.parts(seq("A", 32), S) == [(0, 32)]
    assert rig.parts(seq("B", 32), S) == []
    assert rig.evict(S, 1).count(S) == 0
    rig.tree.dec_lock_ref(receipt)
    rig.check()


def test_on_a_leaf_whose_base_is_locked_only_the_window_goes() -> None:
    """§7.2: its holder has released the window early."""
    rig = make()
    rig.publish(seq("A", 32))
    receipt = lock(rig, seq("A", 32))
    rig.tree.release(receipt, S)
    gone = rig.evict(S, 1)
    assert [gone.count(index) for index in (0, S)] == [0, 2]
    assert rig.kept() == [2, 0]
    assert rig.held() == [2, 0]
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    assert rig.evict(0, 1).count(0) == 2
    rig.check()


def test_no_more_goes_than_was_asked_and_a_victim() -> None:
    """§7.1: what went along with F counts too."""
    rig = make()
    by_page(rig, "A", 64)
    assert rig.evict(S, 2).count(S) == 2
    gone = rig.tree.evict((1, 1))  # the leaf gives both
    assert [gone.count(index) for index in (0, S)] == [1, 1]


def test_a_demoted_leaf_keeps_what_the_host_has() -> None:
    """§7.3–4: F and S with a copy; an S without one is gone with F's device copy."""
    for with_window, best in ((True, 32), (False, 0)):
        rig = make()
        rig.publish(seq("A", 32))
        boundary = Boundary(rig.node(seq("A", 32)), 32)
        for index in (0, S) if with_window else (0,):
            rig.move(boundary, index, Tier.HOST)
        assert rig.evict(0, 1).dropped_tokens == 0
        assert (rig.kept(), rig.kept(Tier.HOST)) == ([0, 0], [2, 2 * with_window])
        assert rig.hit(RadixKey(seq("A", 32))) == (0, best)
        rig.check()


def test_a_base_without_a_copy_takes_the_window_s_copy_along() -> None:
    """§2.2, §7.4: host(S) does not outlive F on both tiers."""
    rig = make()
    rig.publish(seq("A", 32))
    rig.move(Boundary(rig.node(seq("A", 32)), 32), S, Tier.HOST)
    gone = rig.evict(0, 1)
    assert gone.count(S, Tier.HOST) == 2
    assert rig.kept(Tier.HOST) == [0, 0]
    rig.check()


def test_tombstones_go_when_the_last_child_has() -> None:
    """§7.5: up to the root."""
    rig = make()
    by_page(rig, "A", 64)
    for stop in (16, 32, 48):
        rig.drop(seq("A", stop), S)
    assert rig.evict(0, 100).count(0) == 4
    assert rig.tree.num_nodes == 0
    rig.check()


# --- host eviction --------------------------------------------------------------------------------


def test_on_the_host_the_oldest_goes() -> None:
    """§8.2: what only the host has, by age, and as much as was asked."""
    rig = make()
    for name in "ABC":
        rig.publish(seq(name, 32))
        back_up(rig, seq(name, 32))
    rig.evict(0, 100)
    rig.match(RadixKey(seq("A", 32)))
    assert rig.evict(S, 3, Tier.HOST).count(S, Tier.HOST) == 4
    assert [rig.parts(seq(name, 32), S, Tier.HOST) for name in "ABC"] == [[(0, 32)], [], []]
    assert rig.kept(Tier.HOST) == [6, 2]
    rig.check()


def test_on_the_host_what_is_held_stays() -> None:
    """§6.4, §2.5: held, it stands in no order."""
    rig = make()
    for name in "AB":
        rig.publish(seq(name, 32))
        back_up(rig, seq(name, 32))
    rig.evict(0, 100)
    receipt = rig.tree.inc_host_lock_ref(Boundary(rig.node(seq("A", 32)), 32))
    assert len(by_age(rig, Tier.HOST)) == 1
    assert rig.evict(S, 100, Tier.HOST).count(S, Tier.HOST) == 2
    assert rig.parts(seq("A", 32), S, Tier.HOST) == [(0, 32)]
    rig.tree.dec_host_lock_ref(receipt)
    assert rig.evict(S, 100, Tier.HOST).count(S, Tier.HOST) == 2
    rig.check()


def test_mirrors_go_first_whatever_is_below_them() -> None:
    """§8.3: a copy beside the device's, if storage has it, though it is younger; no rule of
    children."""
    rig = make()
    rig.publish(seq("B", 32))
    back_up(rig, seq("B", 32))
    rig.evict(0, 100)
    by_page(rig, "A", 32)
    back_up(rig, seq("A", 32))
    for node in rig.path(seq("A", 32)):
        rig.tree.believe_stored(node, S, True)
    assert rig.evict(S, 1, Tier.HOST).count(S, Tier.HOST) == 1
    assert rig.parts(seq("A", 32), S, Tier.HOST) == [(16, 32)]
    assert rig.evict(S, 1, Tier.HOST).count(S, Tier.HOST) == 1
    assert rig.parts(seq("B", 32), S, Tier.HOST) == [(0, 32)]
    assert rig.evict(S, 1, Tier.HOST).count(S, Tier.HOST) == 2
    rig.check()


def test_a_mirror_that_nothing_else_has_stays() -> None:
    """§8.3: the copy was made so that the device can let go."""
    rig = make()
    rig.publish(seq("A", 32))
    back_up(rig, seq("A", 32))
    assert rig.evict(S, 100, Tier.HOST).count(S, Tier.HOST) == 0
    rig.check()


# --- moving ---------------------------------------------------------------------------------------


def test_a_load_is_for_the_last_window() -> None:
    """§9.7: what only the host has of it; a tombstone further up stays one."""
    rig = make()
    by_page(rig, "A", 96)
    back_up(rig, seq("A", 96))
    rig.evict(0, 100)
    boundary = rig.match(RadixKey(seq("A", 96))).best_boundary
    assert rig.move(boundary, 0, Tier.DEVICE)
    assert rig.move(boundary, S, Tier.DEVICE)
    assert rig.kept() == [6, 2]
    assert rig.parts(seq("A", 96), S) == [(64, 80), (80, 96)]
    assert rig.hit(RadixKey(seq("A", 96))) == (96, 96)
    rig.check()


def test_a_commit_keeps_what_is_there() -> None:
    """§5.12: its own ids are duplicates then."""
    rig = make()
    by_page(rig, "A", 48)
    rig.drop(seq("A", 32), S)
    ids = rig.pools[Tier.DEVICE][S].allocate(3)
    assert ids is not None
    left = rig.tree.commit_transfer(Boundary(rig.node(seq("A", 48)), 48), S, Tier.DEVICE, ids)
    assert left.tolist() == [ids[0], ids[2]]
    assert rig.parts(seq("A", 48), S) == [(0, 16), (16, 32), (32, 48)]


def test_a_commit_takes_nothing_where_the_base_is_not() -> None:
    """§2.2: F has left, or has not come, so its window's pages go home."""
    rig = make()
    by_page(rig, "A", 48)
    back_up(rig, seq("A", 48))
    rig.evict(0, 100)
    ids = np.arange(3, dtype=np.int32)
    boundary = Boundary(rig.node(seq("A", 48)), 48)
    assert rig.move(Boundary(rig.node(seq("A", 16)), 16), 0, Tier.DEVICE)
    left = rig.tree.commit_transfer(boundary, S, Tier.DEVICE, ids)
    assert left.tolist() == [1, 2]
    rig.tree.check_integrity()


def test_rows_of_a_window_need_their_base() -> None:
    """§5.11: an insert on the host of what F has not, changes nothing."""
    rig = make()
    rig.publish(seq("A", 32))
    ids = np.arange(3, dtype=np.int32)
    boundary, left = rig.tree.insert_host(RadixKey(seq("A", 48)), 0, S, ids)
    assert boundary is None
    assert left.tolist() == [0, 1, 2]
    boundary, left = rig.tree.insert_host(RadixKey(seq("A", 32)), 0, S, ids[:2])
    assert boundary is not None
    assert rig.parts(seq("A", 32), S, Tier.HOST) == [(0, 32)]
    rig.tree.check_integrity()


def test_a_window_has_at_least_a_token() -> None:
    """It counts the current one."""
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        SWAComponent("swa", 0)
