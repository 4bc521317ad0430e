"""Locks and receipts: who may be released, once, by whom; host locks as spans (semantics §6)."""

from __future__ import annotations

import copy

import pytest

from tests.tree.helpers import Rig, order_of, path_to, seq, spans
from tiered_cache.errors import LockError, StaleError
from tiered_cache.keys import RadixKey
from tiered_cache.tree.locks import Receipt
from tiered_cache.types import Boundary, Tier


def sizes(rig: Rig, tier: Tier = Tier.DEVICE) -> tuple[int, int]:
    """(evictable, protected) pages."""
    return rig.tree.evictable_size(0, tier), rig.tree.protected_size(0, tier)


def test_a_lock_holds_every_node_to_the_root() -> None:
    """§6.2: F needs all of its path."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 64))
    rig.publish(seq("A", 96))
    receipt = rig.lock(seq("A", 64))
    assert sizes(rig) == (2, 4)
    assert [node.data[0].lock_ref for node in path_to(rig.match(seq("A", 96)).best_node)] == [
        1,
        1,
        0,
    ]
    rig.check()
    rig.evict(1000)
    assert rig.hit(seq("A", 96)) == (64, 0)
    rig.tree.dec_lock_ref(receipt)
    rig.check()
    assert sizes(rig) == (4, 0)


def test_locks_are_counted() -> None:
    """§6.1: what two hold stays until both have let go, in any order."""
    rig = Rig()
    rig.publish(seq("A", 64))
    first, second, third = (rig.lock(seq("A", 64), limit) for limit in (64, 32, 64))
    for receipt, held in ((first, 4), (third, 2), (second, 0)):
        rig.tree.dec_lock_ref(receipt)
        rig.check()
        assert sizes(rig) == (4 - held, held)


def test_a_lock_at_the_root_holds_nothing() -> None:
    """An empty match can be locked like any other, and must be released like any other."""
    rig = Rig()
    rig.publish(seq("A", 32))
    receipt = rig.lock(seq("B", 32))
    assert (receipt.depth, sizes(rig)) == (0, (2, 0))
    rig.tree.dec_lock_ref(receipt)
    with pytest.raises(LockError):
        rig.tree.dec_lock_ref(receipt)
    rig.check()


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_releasing_twice_is_refused_and_changes_nothing(tier: Tier) -> None:
    """§6.1: or it would release somebody else's lock."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.backup(seq("A", 64))
    boundary = rig.match(seq("A", 64)).device_boundary
    tree = rig.tree
    take, give = (
        (tree.inc_lock_ref, tree.dec_lock_ref)
        if tier is Tier.DEVICE
        else (tree.inc_host_lock_ref, tree.dec_host_lock_ref)
    )
    mine, theirs = take(boundary), take(boundary)
    give(mine)
    for _ in range(2):
        with pytest.raises(LockError, match="released before"):
            give(mine)
    assert sizes(rig, tier) == (0, 4)
    rig.check()
    give(theirs)
    rig.check()


def test_foreign_forged_and_copied_receipts_are_refused() -> None:
    """§6.1: a receipt is known by identity; nothing changes."""
    rig, other = Rig(), Rig()
    for each in (rig, other):
        each.publish(seq("A", 64))
    receipt, foreign = rig.lock(seq("A", 64)), other.lock(seq("A", 64))
    forged = Receipt(receipt.node, Tier.DEVICE, receipt.epoch, list(receipt.parts))
    for wrong in (foreign, forged, copy.copy(receipt)):
        with pytest.raises(LockError, match="not from this tree"):
            rig.tree.dec_lock_ref(wrong)
        with pytest.raises(LockError, match="not from this tree"):
            rig.tree.count_hits(wrong)
        with pytest.raises(LockError, match="not from this tree"):
            rig.tree.release(wrong, 0)
    assert sizes(rig) == sizes(other) == (0, 4)
    rig.tree.dec_lock_ref(receipt)
    other.tree.dec_lock_ref(foreign)
    rig.check()


def test_a_receipt_opens_its_own_tier_only() -> None:
    """A host lock given back as a device lock would free what a reader holds."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.backup(seq("A", 64))
    boundary = rig.match(seq("A", 64)).device_boundary
    device, host = rig.tree.inc_lock_ref(boundary), rig.tree.inc_host_lock_ref(boundary)
    with pytest.raises(LockError, match="locks the host tier, not the device tier"):
        rig.tree.dec_lock_ref(host)
    with pytest.raises(LockError, match="locks the device tier, not the host tier"):
        rig.tree.dec_host_lock_ref(device)
    assert sizes(rig) == sizes(rig, Tier.HOST) == (0, 4)
    rig.tree.dec_lock_ref(device)
    rig.tree.dec_host_lock_ref(host)
    rig.check()


def test_a_component_given_up_early_is_skipped_later() -> None:
    """§6.1: once; the full release still needs the receipt."""
    rig = Rig()
    rig.publish(seq("A", 64))
    receipt, other = rig.lock(seq("A", 64)), rig.lock(seq("A", 64))
    rig.tree.release(receipt, 0)
    rig.tree.release(receipt, 0)
    assert sizes(rig) == (0, 4)
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    assert sizes(rig) == (0, 4)
    rig.tree.dec_lock_ref(other)
    assert sizes(rig) == (4, 0)
    with pytest.raises(LockError):
        rig.tree.release(receipt, 0)
    rig.check()


def test_receipts_from_before_a_reset_are_stale() -> None:
    """§12.1: they say so, and open nothing in the new tree."""
    rig = Rig()
    rig.publish(seq("A", 64))
    receipt = rig.lock(seq("A", 64))
    boundary = rig.match(seq("A", 64)).device_boundary
    rig.tree.reset()
    rig.device.reset()
    assert sizes(rig) == (0, 0)
    rig.publish(seq("A", 64))
    for use in (rig.tree.dec_lock_ref, rig.tree.count_hits):
        with pytest.raises(StaleError, match="before a reset"):
            use(receipt)
    with pytest.raises(StaleError):
        rig.tree.inc_lock_ref(boundary)
    with pytest.raises(StaleError):
        rig.tree.pages(boundary)
    assert sizes(rig) == (4, 0)
    rig.check()


def test_splits_under_locks_keep_the_counts_right() -> None:
    """§6.1, §6.4: the receipt's end node stays the end, the new parent is held as often."""
    rig = Rig()
    rig.publish(seq("A", 96))
    receipts = [rig.lock(seq("A", 96)) for _ in range(2)]
    rig.publish(seq("A", 32) + seq("B", 32))
    rig.publish(seq("A", 64) + seq("C", 32))
    assert spans(rig.tree) == [(0, 32), (32, 64), (32, 64), (64, 96), (64, 96)]
    assert sizes(rig) == (4, 6)
    for receipt in receipts:
        rig.tree.dec_lock_ref(receipt)
        rig.check()
    assert sizes(rig) == (10, 0)


# --- what a lock would cost -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 16, 32, 48, 64, 96])
@pytest.mark.parametrize("held", [0, 16, 48, 64, 96])
def test_would_protect_says_what_a_lock_then_does(depth: int, held: int) -> None:
    """Admission counts with it: newly protected pages, inside an edge too."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 96))
    other = rig.lock(seq("A", 96), held)
    boundary = rig.match(seq("A", 96), depth).device_boundary
    (told,) = rig.tree.would_protect(boundary)
    before = rig.tree.protected_size()
    receipt = rig.tree.inc_lock_ref(boundary)
    assert rig.tree.protected_size() - before == told == max(0, depth - held) // 16
    rig.tree.dec_lock_ref(receipt)
    rig.tree.dec_lock_ref(other)


def test_would_release_counts_what_only_these_receipts_hold() -> None:
    """Together they may free what each alone would not."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.publish(seq("A", 32) + seq("B", 32))
    one, two, three = rig.lock(seq("A", 64)), rig.lock(seq("A", 32) + seq("B", 32)), None
    assert rig.tree.would_release([one]) == [2]
    assert rig.tree.would_release([two]) == [2]
    assert rig.tree.would_release([one, two]) == [6]
    three = rig.lock(seq("A", 32))
    assert rig.tree.would_release([one, two]) == [4]
    assert rig.tree.would_release([]) == [0]
    for receipt in (one, two, three):
        rig.tree.dec_lock_ref(receipt)


# --- host locks -----------------------------------------------------------------------------------


def test_a_host_lock_is_a_span_and_survives_splits() -> None:
    """§6.4: it touches every node that overlaps it, before and after splits, and nothing above."""
    rig = Rig()
    for end in (32, 64):
        rig.publish(seq("A", end))
    rig.publish(seq("A", 128))
    rig.backup(seq("A", 128))
    node = rig.match(seq("A", 128)).best_node
    receipt = rig.tree.inc_host_lock_ref(Boundary(node, 128), start=48)
    assert sizes(rig, Tier.HOST) == (2, 6)
    rig.tree.cut(Boundary(node, 96))
    rig.tree.cut(Boundary(node, 48))
    rig.check()
    counts = {(part.start, part.end): part.data[0].host_lock_ref for part in path_to(node)}
    assert counts == {(0, 32): 0, (32, 48): 1, (48, 64): 1, (64, 96): 1, (96, 128): 1}
    # (32, 48) was part of a node that overlapped the span when the lock was taken
    rig.tree.dec_host_lock_ref(receipt)
    rig.check()
    assert sizes(rig, Tier.HOST) == (8, 0)


def test_host_locked_nodes_are_not_evicted_from_the_host() -> None:
    """§6.4: others go instead."""
    rig = Rig()
    boundary = rig.host_only(seq("A", 32))
    receipt = rig.tree.inc_host_lock_ref(boundary)
    rig.host_only(seq("B", 32))
    rig.check()
    assert rig.evict_host(1000).count(0, Tier.HOST) == 2
    assert rig.hit(seq("A", 32)) == (0, 32)
    rig.tree.dec_host_lock_ref(receipt)
    assert rig.evict_host(1000).count(0, Tier.HOST) == 2
    assert rig.tree.num_nodes == 0
    rig.check()


@pytest.mark.parametrize("order", ["host last", "device last", "early"])
def test_a_host_locked_node_outlives_its_values(order: str) -> None:
    """§6.4: at worst it stays dead; when the last hold ends, whichever it is, it goes."""
    rig = Rig()
    rig.publish(seq("A", 64))
    boundary = rig.match(seq("A", 64)).device_boundary
    host = rig.tree.inc_host_lock_ref(boundary)
    assert rig.evict(64).count(0) == 4
    assert rig.tree.num_nodes == 1
    assert rig.hit(seq("A", 64)) == (0, 0)
    rig.check()
    device = rig.tree.inc_lock_ref(boundary)
    rig.check()
    if order == "device last":
        rig.tree.dec_host_lock_ref(host)
        rig.check()
        rig.tree.dec_lock_ref(device)
    else:
        rig.tree.dec_lock_ref(device)
        rig.check()
        if order == "early":
            rig.tree.release(host, 0)
            rig.check()
        rig.tree.dec_host_lock_ref(host)
    rig.check()
    assert rig.tree.num_nodes == 0


def test_a_dead_node_that_is_held_is_revived_by_an_insert() -> None:
    """§5.3: it adopts the incoming pages like any node without a value."""
    rig = Rig()
    key = RadixKey(seq("A", 64))
    rig.publish(key)
    host = rig.tree.inc_host_lock_ref(rig.match(key).device_boundary)
    rig.evict(64)
    rig.publish(key)
    assert rig.tree.num_nodes == 1
    assert rig.hit(key) == (64, 0)
    rig.check()
    rig.tree.dec_host_lock_ref(host)
    rig.check()
    assert rig.hit(key) == (64, 0)


def test_a_device_lock_on_what_only_the_host_has_keeps_it_there() -> None:
    """§6.2, §8.1: a tombstone may be locked, and no locked node is a host leaf."""
    rig = Rig()
    boundary = rig.host_only(seq("A", 64))
    receipt = rig.tree.inc_lock_ref(boundary)
    assert order_of(rig.tree, Tier.HOST) == []
    assert rig.evict_host(64).count(0, Tier.HOST) == 0
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    assert rig.evict_host(64).count(0, Tier.HOST) == 4
    rig.check()


# --- a lock that goes deeper ----------------------------------------------------------------------


def test_a_lock_advances_without_letting_go() -> None:
    """§5.10: what was held stays held, what is new is held too, and one receipt is enough."""
    rig = Rig()
    receipt = rig.publish_and_lock(seq("A", 32), 32)
    rig.publish(seq("A", 64))
    rig.publish(seq("A", 96))
    for depth, held in ((48, 3), (48, 3), (96, 6)):
        rig.tree.advance(receipt, rig.match(seq("A", 96), depth).device_boundary)
        assert receipt.depth == depth
        assert sizes(rig) == (6 - held, held)
        rig.check()
    rig.tree.dec_lock_ref(receipt)
    assert sizes(rig) == (6, 0)
    rig.check()


def test_a_lock_advances_below_itself_only() -> None:
    """Another branch, a shorter prefix, a node that is gone, a receipt that is: refused, and what
    was held is."""
    rig = Rig()
    receipt = rig.publish_and_lock(seq("A", 64), 64)
    rig.publish(seq("A", 32) + seq("B", 64))
    rig.publish(seq("C", 32))
    for tokens in (seq("A", 32) + seq("B", 64), seq("A", 32), seq("C", 32), seq("X", 16)):
        with pytest.raises(ValueError, match="is not below what"):
            rig.tree.advance(receipt, rig.match(tokens).device_boundary)
        assert receipt.depth == 64
        assert rig.tree.protected_size() == 4
        rig.check()
    rig.publish(seq("A", 96))
    gone = rig.match(seq("A", 96)).device_boundary
    rig.evict(1000)
    with pytest.raises(StaleError):
        rig.tree.advance(receipt, gone)
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    with pytest.raises(LockError):
        rig.tree.advance(receipt, gone)
    rig.check()


def test_other_holders_keep_theirs_when_a_lock_advances() -> None:
    """Counts are per receipt: one goes deeper, and the other lets go of what it had."""
    rig = Rig()
    mine, theirs = rig.publish_and_lock(seq("A", 32), 32), rig.lock(seq("A", 32))
    rig.publish(seq("A", 64))
    rig.tree.advance(mine, rig.match(seq("A", 64)).device_boundary)
    rig.tree.dec_lock_ref(mine)
    assert sizes(rig) == (2, 2)
    rig.check()
    rig.tree.dec_lock_ref(theirs)
    rig.check()
