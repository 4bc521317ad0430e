"""The allocator and reservations: all or nothing, no id twice, nothing lost (semantics §2.4)."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_cache.errors import IntegrityError
from tiered_cache.pools.allocator import PageAllocator, RunAllocator
from tiered_cache.pools.reservation import Reservation

either = pytest.mark.parametrize("allocator", [PageAllocator, RunAllocator])
Allocator = type[PageAllocator]


def ids(*pages: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(pages, np.int32)


@either
@pytest.mark.parametrize("check", [False, True])
def test_all_or_nothing(allocator: Allocator, check: bool) -> None:
    """As many as asked, or None; a refusal takes nothing."""
    pool = allocator(8, check=check)
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


@either
def test_ids_come_in_rising_runs(allocator: Allocator) -> None:
    """From a fresh pool, and what is given back as a run goes out as one: whole rows move faster in
    runs."""
    pool = allocator(10, check=True)
    first, second = pool.allocate(4), pool.allocate(3)
    assert first is not None
    assert second is not None
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [4, 5, 6]
    pool.free(first)
    again = pool.allocate(4)
    assert again is not None
    assert again.tolist() == [0, 1, 2, 3]


@either
def test_what_is_handed_out_belongs_to_the_caller(allocator: Allocator) -> None:
    """No view of the free list: later calls do not change it, nor does the caller change them."""
    pool = allocator(6, check=True)
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


@either
def test_double_and_foreign_frees_are_refused_in_check_mode(allocator: Allocator) -> None:
    """Freed before, twice in one call, out of range, negative: nothing changes."""
    pool = allocator(6, check=True)
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


@either
def test_more_than_there_are_cannot_be_given_back_even_without_checks(allocator: Allocator) -> None:
    """The one check that costs nothing is always on."""
    pool = allocator(4)
    with pytest.raises(IntegrityError, match="1 pages given back to a pool of 4 that has 4 free"):
        pool.free(ids(1))
    assert pool.num_free == 4


@either
@pytest.mark.parametrize("capacity", [0, -1])
def test_a_pool_has_at_least_a_page(allocator: Allocator, capacity: int) -> None:
    """And nobody allocates a negative number."""
    with pytest.raises(ValueError, match="at least one page"):
        allocator(capacity)
    with pytest.raises(ValueError, match="cannot allocate -1"):
        allocator(1).allocate(-1)


@either
@pytest.mark.parametrize("check", [False, True])
def test_reset_frees_all_but_what_is_still_in_use(allocator: Allocator, check: bool) -> None:
    """§12.1: pages that a run still writes into are quarantined through a reset, and come home
    later, once."""
    pool = allocator(6, check=check)
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


@either
def test_random_steps_against_a_set(allocator: Allocator) -> None:
    """Thousands of allocations and frees in any grouping: no id twice, none lost."""
    chance = random.Random(1)
    pool = allocator(50, check=True)
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
    assert repr(pool) == f"<{allocator.__name__} {50 - len(taken)} of 50 free>"


# --- runs ---------------------------------------------------------------------------------------


def num_runs(pages: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    return 1 + int(np.count_nonzero(np.diff(pages) != 1))


@given(
    st.lists(
        st.one_of(
            st.integers(0, 20),  # allocate
            st.lists(st.integers(0, 39), unique=True),  # free those of these that are taken
        ),
        max_size=60,
    )
)
def test_free_runs_are_as_long_as_can_be(steps: list[int | list[int]]) -> None:
    """After any steps the free ids are those of the model, neighbours have been joined, and what a
    run of its own size class holds comes out as one."""
    pool = RunAllocator(40, check=True)
    free = set(range(40))
    for step in steps:
        if isinstance(step, int):
            got = pool.allocate(step)
            assert (got is None) == (step > len(free))
            if got is not None:
                assert len(got) == step == len(free & set(got.tolist()))
                assert got.tolist() == sorted(got.tolist())
                free -= set(got.tolist())
        else:
            given_back = [page for page in step if page not in free]
            pool.free(ids(*given_back))
            free |= set(given_back)
        assert pool.free_ids().tolist() == sorted(free)
        assert pool.num_free == len(free)
    while free:
        longest = max(len(run) for run in np.split(*_parts(sorted(free))))
        got = pool.allocate(longest)
        assert got is not None
        free -= set(got.tolist())
        if longest & (longest - 1) == 0:
            assert num_runs(got) == 1


def _parts(pages: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(pages), np.flatnonzero(np.diff(pages) != 1) + 1


def test_an_allocation_that_fits_into_a_run_of_twice_its_size_is_one_run() -> None:
    """The shortest run that is surely long enough is taken, so that longer ones stay for others."""
    pool = RunAllocator(1000, check=True)
    assert pool.allocate(1000) is not None
    for start, length in ((0, 3), (100, 16), (300, 200), (600, 40), (900, 8)):
        pool.free(np.arange(start, start + length, dtype=np.int32))
    for wanted, start in ((5, 900), (16, 100), (30, 600), (100, 300)):
        got = pool.allocate(wanted)
        assert got is not None
        assert got.tolist() == list(range(start, start + wanted))
    rest = pool.allocate(110)  # 100 are left in a run: they, then the longest of the others
    assert rest is not None
    assert num_runs(rest) == 2


def test_a_shuffled_pool_still_gives_long_runs() -> None:
    """What a host arena sees for hours: the stack hands out singles in the end, runs stay runs."""

    def pages_per_run(allocator: Allocator) -> float:
        chance = random.Random(5)
        pool = allocator(4000)
        held: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        runs = pages = 0
        for step in range(4000):
            while pool.num_free < 400:
                pool.free(held.pop(chance.randrange(len(held))))
            got = pool.allocate(chance.randint(1, 64))
            assert got is not None
            cut = chance.randrange(len(got) + 1)
            held += [part for part in (got[:cut], got[cut:]) if len(part)]
            if step > 2000:
                runs += num_runs(got)
                pages += len(got)
        return pages / runs

    stack, in_runs = pages_per_run(PageAllocator), pages_per_run(RunAllocator)
    assert stack < 2
    assert in_runs > 4 * stack


def test_the_cost_does_not_follow_the_capacity_or_the_number_of_free_runs() -> None:
    """Calls of Python code per allocation, in a pool of 200 free runs and in one of 20,000."""

    def calls(num_runs_free: int) -> int:
        pool = RunAllocator(2 * num_runs_free)
        taken = pool.allocate(2 * num_runs_free)
        assert taken is not None
        pool.free(taken[::2])
        count = 0

        def counting(*_: object) -> None:
            nonlocal count
            count += 1

        before = sys.getprofile()
        sys.setprofile(counting)
        try:
            pool.allocate(10)
            pool.free(taken[1:10:2])
        finally:
            sys.setprofile(before)
        return count

    assert calls(200) == calls(20_000)


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
