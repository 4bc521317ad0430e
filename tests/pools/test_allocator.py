"""The allocator and reservations: all or nothing, no id twice, nothing lost (semantics §2.4)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tiered_cache.errors import IntegrityError
from tiered_cache.pools.allocator import PageAllocator
from tiered_cache.pools.reservation import Reservation


def ids(*pages: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(pages, np.int32)


@pytest.mark.parametrize("check", [False, True])
def test_all_or_nothing(check: bool) -> None:
    """As many as asked, or None; a refusal takes nothing."""
    pool = PageAllocator(8, check=check)
    first = pool.allocate(5)
    assert first is not None
    assert (first.dtype, len(set(first.tolist()))) == (np.dtype(np.int32), 5)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    rest = pool.allocate(3)
    assert rest is not None
    assert sorted([*first.tolist(), *rest.tolist()]) == list(range(8))
    assert pool.allocate(1) is None
    nothing = pool.allocate(0)
    assert nothing is not None
    assert len(nothing) == 0


def test_ids_come_in_rising_runs() -> None:
    """From a fresh pool, and what is given back as a run goes out as one: whole rows move faster in
    runs."""
    pool = PageAllocator(10, check=True)
    first, second = pool.allocate(4), pool.allocate(3)
    assert first is not None
    assert second is not None
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [4, 5, 6]
    pool.free(first)
    again = pool.allocate(4)
    assert again is not None
    assert again.tolist() == [0, 1, 2, 3]


def test_what_is_handed_out_belongs_to_the_caller() -> None:
    """No view of the free list: later calls do not change it, nor does the caller change them."""
    pool = PageAllocator(6, check=True)
    mine = pool.allocate(3)
    assert mine is not None
    kept = mine.tolist()
    mine[:] = 99
    other = pool.allocate(3)
    assert other is not None
    assert not set(other.tolist()) & set(kept)
    pool.free(ids(*kept))
    pool.free(other)
    assert sorted(pool.free_ids().tolist()) == list(range(6))


def test_double_and_foreign_frees_are_refused_in_check_mode() -> None:
    """Freed before, twice in one call, out of range, negative: nothing changes."""
    pool = PageAllocator(6, check=True)
    mine = pool.allocate(4)
    assert mine is not None
    pool.free(mine[:1])
    for wrong in (mine[:1], ids(5), ids(1, 1), ids(2, 0), ids(1, 6), ids(-1), ids(1, -1)):
        before = sorted(pool.free_ids().tolist())
        with pytest.raises(IntegrityError, match=r"given back twice|not in a pool"):
            pool.free(wrong)
        assert sorted(pool.free_ids().tolist()) == before
    pool.free(mine[1:])
    assert pool.num_free == 6


def test_more_than_there_are_cannot_be_given_back_even_without_checks() -> None:
    """The one check that costs nothing is always on."""
    pool = PageAllocator(4)
    with pytest.raises(IntegrityError, match="1 pages given back to a pool of 4 that has 4 free"):
        pool.free(ids(1))
    assert pool.num_free == 4


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_pool_has_at_least_a_page(capacity: int) -> None:
    """And nobody allocates a negative number."""
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(capacity)
    with pytest.raises(ValueError, match="cannot allocate -1"):
        PageAllocator(1).allocate(-1)


@pytest.mark.parametrize("check", [False, True])
def test_reset_frees_all_but_what_is_still_in_use(check: bool) -> None:
    """§12.1: pages that a run still writes into are quarantined through a reset, and come home
    later, once."""
    pool = PageAllocator(6, check=check)
    mine = pool.allocate(4)
    assert mine is not None
    pool.reset(taken=mine[:2])
    assert sorted(pool.free_ids().tolist()) == [2, 3, 4, 5]
    if check:
        with pytest.raises(IntegrityError):
            pool.free(mine[2:])
    pool.free(mine[:2])
    assert pool.num_free == 6
    pool.reset()
    assert sorted(pool.free_ids().tolist()) == list(range(6))


def test_random_steps_against_a_set() -> None:
    """Thousands of allocations and frees in any grouping: no id twice, none lost."""
    chance = random.Random(1)
    pool = PageAllocator(50, check=True)
    taken: list[int] = []
    for _ in range(3000):
        if chance.random() < 0.5:
            want = chance.randrange(12)
            got = pool.allocate(want)
            assert (got is None) == (want > 50 - len(taken))
            if got is not None:
                assert not set(got.tolist()) & set(taken)
                taken += got.tolist()
        else:
            chance.shuffle(taken)
            count = chance.randrange(len(taken) + 1)
            pool.free(ids(*taken[:count]))
            del taken[:count]
        assert pool.num_free == 50 - len(taken)
        assert set(pool.free_ids().tolist()) == set(range(50)) - set(taken)
    assert repr(pool) == f"<PageAllocator {50 - len(taken)} of 50 free>"


# --- reservations ---------------------------------------------------------------------------------


def test_a_reservation_goes_home_unless_it_is_kept() -> None:
    """§9.1: whatever ends the block, so that failure needs no code of its own."""
    pool = PageAllocator(8, check=True)
    with Reservation(pool, 3):
        assert pool.num_free == 5
    assert pool.num_free == 8
    with pytest.raises(RuntimeError, match="boom"), Reservation(pool, 3):
        raise RuntimeError("boom")
    assert pool.num_free == 8
    with Reservation(pool, 3) as reservation:
        mine = reservation.keep()
    assert pool.num_free == 5
    pool.free(mine)


def test_a_reservation_of_a_short_pool_has_no_ids() -> None:
    """It says so with None, holds nothing, and cannot be kept."""
    pool = PageAllocator(2, check=True)
    with Reservation(pool, 3) as reservation:
        assert reservation.ids is None
        with pytest.raises(ValueError, match="the pool was short"):
            reservation.keep()
    assert pool.num_free == 2
