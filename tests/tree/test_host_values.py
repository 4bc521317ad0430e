"""Host values as part of the data model: committed, demoted, loaded, evicted, split, adopted
(semantics §2.2, §5.12, §8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.tree.helpers import Rig, device_value, host_value, order_of, path_to, seq, spans
from tiered_cache.errors import StaleError
from tiered_cache.keys import RadixKey
from tiered_cache.tree.locks import Receipt
from tiered_cache.types import Boundary, Tier


def host_sizes(rig: Rig) -> tuple[int, int]:
    return rig.tree.evictable_size(0, Tier.HOST), rig.tree.protected_size(0, Tier.HOST)


def test_a_write_through_makes_mirrors() -> None:
    """§8.3: a host value beside the device value; neither boundary moves."""
    rig = Rig()
    rig.publish(seq("A", 64))
    rig.backup(seq("A", 64))
    assert rig.hit(seq("A", 64)) == (64, 0)
    assert host_sizes(rig) == (4, 0)
    assert order_of(rig.tree, Tier.HOST) == []
    rig.check()


def test_demote_and_load_back() -> None:
    """§7.3, §9.7: the device copy goes, comes back into other pages, with the same bytes; the host
    copy stays a mirror."""
    rig = Rig()
    rig.host_only(seq("A", 64))
    rig.spoil_free_pages()
    assert rig.hit(seq("A", 64)) == (0, 64)
    assert rig.load_back(seq("A", 64)) == 64
    assert rig.hit(seq("A", 64)) == (64, 0)
    assert host_sizes(rig) == (4, 0)
    rig.check()


def test_a_commit_keeps_values_that_are_there_already() -> None:
    """§5.12: its own ids for those are returned, to go home."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.backup(seq("A", 32))
    rig.publish(seq("A", 96))
    node = rig.match(seq("A", 96)).best_node
    top = path_to(node)[0]
    kept = host_value(top).tolist()
    ids = rig.host.allocate(6)
    assert ids is not None
    for copy, page in zip(ids.tolist(), rig.match(seq("A", 96)).pages[0].tolist(), strict=True):
        rig.host_content[copy] = rig.content[page]
    left = rig.tree.commit_transfer(Boundary(node, 96), 0, Tier.HOST, ids)
    assert left.tolist() == ids[:2].tolist()
    assert host_value(top).tolist() == kept
    assert host_value(node).tolist() == ids[2:].tolist()
    rig.host.free(left)
    rig.check()


def test_a_commit_is_by_span_through_splits() -> None:
    """§1.5, §9.1: pages are counted back from the end of the path, however it has been cut since
    the plan, and a node that starts before the span is cut at its start."""
    rig = Rig()
    boundary = rig.publish(seq("A", 96)).boundary
    ids = rig.host.allocate(4)
    assert ids is not None
    for copy, page in zip(ids.tolist(), rig.match(seq("A", 96)).pages[0].tolist()[2:], strict=True):
        rig.host_content[copy] = rig.content[page]
    rig.publish(seq("A", 64) + seq("B", 32))  # splits at 64, between plan and commit
    for step in path_to(boundary.node)[:1]:
        rig.tree.believe_stored(step, 0, True)  # so that its child may be on the host without it
    left = rig.tree.commit_transfer(boundary, 0, Tier.HOST, ids)
    assert left.tolist() == []
    assert spans(rig.tree) == [(0, 32), (32, 64), (64, 96), (64, 96)]
    assert [node.data[0].host_value is not None for node in path_to(boundary.node)] == [
        False,
        True,
        True,
    ]
    rig.check()


def test_a_commit_skips_the_nodes_before_its_span() -> None:
    """§1.5: what lies wholly in front of the last pages gets nothing, and is not cut."""
    rig = Rig()
    for end in (32, 64, 96):
        rig.publish(seq("A", end))
    found = rig.match(seq("A", 96))
    for node in path_to(found.device_node)[:2]:
        rig.tree.believe_stored(node, 0, True)
    ids = rig.host.allocate(2)
    assert ids is not None
    for copy, page in zip(ids.tolist(), found.pages[0].tolist()[4:], strict=True):
        rig.host_content[copy] = rig.content[page]
    assert rig.tree.commit_transfer(found.device_boundary, 0, Tier.HOST, ids).tolist() == []
    assert spans(rig.tree) == [(0, 32), (32, 64), (64, 96)]
    assert host_value(found.device_node).tolist() == ids.tolist()
    rig.check()


def test_a_commit_that_does_not_fit_the_path_is_refused() -> None:
    """More ids than the path has pages, ids that are not int32, a node that is gone: nothing is
    taken."""
    rig = Rig()
    boundary = rig.publish(seq("A", 32)).boundary
    with pytest.raises(ValueError, match="3 pages do not fit"):
        rig.tree.commit_transfer(boundary, 0, Tier.HOST, np.arange(3, dtype=np.int32))
    with pytest.raises(TypeError, match="page ids must be int32"):
        rig.tree.commit_transfer(boundary, 0, Tier.HOST, np.arange(2))  # type: ignore[arg-type]
    rig.check()
    rig.evict(32)
    with pytest.raises(StaleError):
        rig.tree.commit_transfer(boundary, 0, Tier.HOST, np.arange(2, dtype=np.int32))
    assert host_sizes(rig) == (0, 0)
    rig.check()


def test_an_empty_commit_changes_nothing() -> None:
    """What has fully arrived may be nothing at all."""
    rig = Rig()
    boundary = rig.publish(seq("A", 32)).boundary
    left = rig.tree.commit_transfer(boundary, 0, Tier.HOST, np.empty(0, np.int32))
    assert len(left) == 0
    assert spans(rig.tree) == [(0, 32)]
    rig.check()


def test_what_arrives_under_a_lock_is_protected() -> None:
    """§6.3: on either tier, by whoever creates it."""
    rig = Rig()
    boundary = rig.host_only(seq("A", 64))
    receipt = rig.tree.inc_lock_ref(boundary)
    rig.load_back(seq("A", 64))
    assert (rig.tree.protected_size(), rig.tree.evictable_size()) == (4, 0)
    rig.check()
    rig.publish(seq("B", 32))
    held = rig.tree.inc_host_lock_ref(rig.match(seq("B", 32)).device_boundary)
    rig.backup(seq("B", 32))
    assert host_sizes(rig) == (4, 2)
    rig.check()
    rig.tree.dec_lock_ref(receipt)
    rig.tree.dec_host_lock_ref(held)
    assert host_sizes(rig) == (6, 0)
    rig.check()


@pytest.mark.parametrize(("need", "leaves"), [(1, 1), (16, 1), (17, 2), (20, 2), (32, 2), (33, 3)])
def test_b12_host_eviction_takes_exactly_what_is_asked(need: int, leaves: int) -> None:
    """B12, §8.2: rounded up to one victim, on the host as on the device."""
    rig = Rig()
    for number in range(10):
        rig.host_only(seq("A", number * 16 + 16, number * 16))
    assert rig.evict_host(need).count(0, Tier.HOST) == leaves
    assert rig.tree.num_nodes == 10 - leaves
    assert rig.tree.evictable_size(0, Tier.HOST) == 10 - leaves
    rig.check()


def test_host_victims_go_by_their_own_policy() -> None:
    """§8.2: the tiers may be ordered differently."""
    rig = Rig(policy="lru", host_policy="mru")
    for name in "ABC":
        rig.host_only(seq(name, 16))
    rig.match(seq("B", 16))
    rig.evict_host(16)
    assert rig.hit(seq("B", 16)) == (0, 0)
    assert rig.hit(seq("A", 16)) == rig.hit(seq("C", 16)) == (0, 16)
    rig.check()


@pytest.mark.parametrize("length", [16, 32, 48, 64])
def test_b06_an_insert_revives_host_only_nodes(length: int) -> None:
    """B06, §5.3: the incoming pages are adopted, not duplicates; the caller never frees them, and
    the host copy stays a mirror."""
    rig = Rig()
    rig.host_only(seq("A", 64))
    key = RadixKey(seq("A", length))
    own = rig.compute(key)
    result = rig.insert(key, own)
    assert (result.prefix_len, result.first_changed) == (0, length)
    assert result.duplicates[0].tolist() == []
    assert rig.match(key).pages[0].tolist() == own.tolist()
    rig.spoil_free_pages()
    assert rig.hit(seq("A", 64)) == (length, 64 - length)
    assert rig.device.num_free == rig.device.capacity - length // 16
    rig.check()


def test_a_revival_in_the_middle_counts_what_was_on_the_device_before() -> None:
    """§5.3, §5.4: duplicates up to the first node without a device value, adopted from there."""
    rig = Rig()
    rig.publish(seq("A", 32))
    rig.publish(seq("A", 64))
    rig.backup(seq("A", 64))
    rig.evict(32)
    assert rig.hit(seq("A", 64)) == (32, 32)
    key = RadixKey(seq("A", 96))
    own = rig.compute(key)
    result = rig.insert(key, own)
    assert (result.prefix_len, result.first_changed) == (32, 0)
    assert result.duplicates[0].tolist() == own[:2].tolist()
    assert rig.hit(key) == (96, 0)
    rig.check()


@pytest.mark.parametrize("length", [17, 31, 33, 40, 63])
def test_b04_a_partial_match_goes_into_host_only_nodes(length: int) -> None:
    """B04, §3.2: up to the last whole page, judged as if cut there; the rest stays matchable."""
    rig = Rig()
    rig.host_only(seq("A", 64))
    tokens = seq("A", length) + seq("X", 5)
    usable = length // 16 * 16
    assert rig.hit(tokens) == (0, usable)
    assert spans(rig.tree) == [(0, 64)]
    assert rig.load_back(tokens) == usable
    assert rig.hit(tokens) == (usable, 0)
    assert rig.hit(seq("A", 64)) == (usable, 64 - usable)
    rig.check()


def test_a_demoted_suffix_below_a_device_prefix() -> None:
    """§2.2: dev(F) is prefix closed in every state on the way down and up again."""
    rig = Rig()
    for end in (32, 64, 96):
        rig.publish(seq("A", end))
    rig.backup(seq("A", 96))
    for left in (64, 32, 0):
        rig.evict(32)
        assert rig.hit(seq("A", 96)) == (left, 96 - left)
        rig.check()
    for length in (40, 70, 96):
        rig.load_back(seq("A", length))
        assert rig.hit(seq("A", 96)) == (rig.floor(length), 96 - rig.floor(length))
        rig.check()


def test_both_tiers_full_of_random_steps_agree_with_the_oracle() -> None:
    """Publish, back up, demote, load, evict and lock at random; every page accounted for and right
    after every step."""
    chance = np.random.default_rng(5)
    rig = Rig(page_size=4, pages=40, host_pages=30)
    receipts: list[tuple[Callable[[Receipt], None], Receipt]] = []
    met = dict.fromkeys(
        ("publish", "backup", "evict", "evict_host", "load", "lock", "host lock", "unlock"), 0
    )
    stems = [seq(name, 24) for name in "ABC"]
    for _ in range(1500):
        stem = stems[chance.integers(3)]
        cut = int(chance.integers(0, 25))
        tokens = stem[:cut] + seq("XYZ"[chance.integers(3)], int(chance.integers(0, 12)))
        step = str(chance.choice(list(met)))
        whole = len(tokens) // 4
        if step == "publish" and rig.device.num_free >= whole:
            rig.publish(tokens)
        elif step == "backup" and rig.host.num_free >= whole:
            rig.backup(tokens)
        elif step == "evict":
            rig.evict(int(chance.integers(1, 20)))
        elif step == "evict_host":
            rig.evict_host(int(chance.integers(1, 20)))
        elif step == "load" and rig.device.num_free >= whole:
            rig.load_back(tokens)
        elif step == "lock" and len(receipts) < 6:
            receipts.append((rig.tree.dec_lock_ref, rig.lock(tokens)))
        elif step == "host lock" and len(receipts) < 6:
            boundary = rig.match(tokens).best_boundary
            start = int(chance.integers(0, boundary.depth + 1)) // 4 * 4
            receipts.append(
                (rig.tree.dec_host_lock_ref, rig.tree.inc_host_lock_ref(boundary, start))
            )
        elif step == "unlock" and receipts:
            release, receipt = receipts.pop(int(chance.integers(len(receipts))))
            release(receipt)
        else:
            continue
        met[step] += 1
        rig.hit(tokens)
        rig.check()
    assert min(met.values()) > 50, met
    for release, receipt in receipts:
        release(receipt)
    rig.evict(1000)
    rig.evict_host(1000)
    rig.check()
    assert rig.tree.num_nodes == 0
    assert rig.device.num_free == 40
    assert rig.host.num_free == 30


def test_values_are_read_only_and_own_their_memory() -> None:
    """§4: after a commit, a load and a split no value is a view of a larger array."""
    rig = Rig()
    rig.host_only(seq("A", 64))
    rig.load_back(seq("A", 40))
    for node in rig.tree.nodes():
        for value in (node.data[0].value, node.data[0].host_value):
            if value is not None:
                assert not value.flags.writeable
                memory: object = value.base
                assert isinstance(memory, bytes)
                assert len(memory) == value.nbytes
    assert len(device_value(rig.match(seq("A", 32)).best_node)) == 2
    rig.check()
