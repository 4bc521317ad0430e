"""Arguments that make no sense: a clear error at once, and nothing lost or spoilt for others."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from tests.lease_helpers import chunk_of, rig, seq, settings
from tiered_cache import CapacityError, ClosedError, UnifiedRadixCache


@pytest.mark.parametrize("bad", [1.5, 16.0, "5", None, True, [3]])
async def test_numbers_of_tokens_are_whole(bad: Any) -> None:
    """One caller's fraction must not reach the accounts that everybody shares."""
    async with rig() as r, r.cache.lease(seq("A", 9)) as lease:
        for name, use in (("num_tokens", lease.allocate), ("length", lease.truncate)):
            with pytest.raises(TypeError, match=f"{name} must be a whole number"):
                use(bad)
        with pytest.raises(TypeError, match="max_tokens must be a whole number"):
            await lease.next_chunk(bad)
        for name in ("reserve", "priority"):
            with pytest.raises(TypeError, match=f"{name} must be a whole number"):
                r.cache.lease([1], **{name: bad})
        r.check()
        await r.compute(lease)
        assert await r.serve(seq("B", 9)) == 0


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
async def test_numpy_integers_do_not_wrap_around(kind: Any) -> None:
    """They are taken at their value, and leave no numpy scalar in the records."""
    async with rig(pages=40) as r, r.cache.lease(seq("A", 120), reserve=kind(8)) as lease:
        assert len(await chunk_of(lease, kind(64))) == 64
        await r.compute(lease)
        for token in range(8):
            lease.append(token)
        lease.truncate(kind(125))
        assert len(lease) == 125
        lease.finish()
        assert {type(value) for value in vars_of(r.pool)} == {int}


def vars_of(pool: Any) -> list[Any]:
    return [getattr(pool, name) for name in type(pool).__slots__]


@pytest.mark.parametrize("bad", ["5", True, float("nan"), -1, [1]])
async def test_a_timeout_is_seconds(bad: Any) -> None:
    """It is refused before anything waits."""
    async with rig() as r:
        with pytest.raises((TypeError, ValueError), match="timeout must be seconds"):
            r.cache.lease([1], timeout=bad)


@pytest.mark.parametrize("reserve", [10**9, 2**62, 10**30])
async def test_a_reserve_that_can_never_fit_costs_nothing(reserve: int) -> None:
    """It comes from clients (max_new_tokens), so it is looked at before memory is made for it."""
    async with rig() as r:
        tracemalloc.start()
        try:
            with pytest.raises(CapacityError, match="ask for less"):
                async with r.cache.lease([1, 2, 3], reserve=reserve):
                    pass
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_a_model_cannot_end_the_server(error: type[BaseException]) -> None:
    """What would end the event loop reaches the one who awaits the run as an ordinary error."""
    async with rig() as r, r.cache.lease(seq("A", 9)) as lease:

        def model(_: object) -> None:
            raise error

        with pytest.raises(RuntimeError, match=error.__name__):
            await lease.run(model, await chunk_of(lease))
        await r.compute(lease)


async def test_a_closed_lease_names_no_pages() -> None:
    """They are the next lease's: writing there would be its wrong bytes."""
    async with rig() as r:
        lease = await r.lease(seq("A", 9))
        chunk = await chunk_of(lease)
        lease.close()
        for use in (lambda: lease.pages, lease.slots, chunk.slots, lambda: chunk.pages):
            with pytest.raises(ClosedError):
                use()


async def test_an_empty_batch_is_checked_like_any_other() -> None:
    """A closed cache runs nothing."""
    cache = await UnifiedRadixCache.open(settings())
    assert await cache.run([], int) == 0
    await cache.aclose()
    with pytest.raises(ClosedError):
        await cache.run([], int)


async def test_open_is_entered_once() -> None:
    """The second cache would hide the first, which nobody would close."""
    opening = UnifiedRadixCache.open(settings())
    async with opening:
        with pytest.raises(ClosedError, match="open again"):
            await opening.__aenter__()


@pytest.mark.parametrize("foreign", [None, 5, "chunk", object()])
async def test_what_is_no_chunk_and_no_lease_is_named(foreign: Any) -> None:
    """Not an attribute that something does not have."""
    async with rig() as r, r.cache.lease(seq("A", 9)) as lease:
        with pytest.raises(TypeError, match="takes a chunk"):
            lease.commit(foreign)
        with pytest.raises(TypeError, match="made of leases"):
            await r.cache.run([lease, foreign], int)
        with pytest.raises(TypeError, match="made of leases"):
            r.cache.extend([foreign], [1])
        with pytest.raises(TypeError, match="takes a function"):
            await lease.run(foreign)
        with pytest.raises(TypeError, match=r"load_config\("):
            UnifiedRadixCache.open(foreign)
        await r.compute(lease)


@pytest.mark.parametrize("bad", [1.5, "7", True, None])
async def test_a_token_is_a_whole_number(bad: Any) -> None:
    """And the lease is as it was."""
    async with rig() as r, r.cache.lease(seq("A", 9), reserve=4) as lease:
        with pytest.raises(TypeError, match="position 9"):
            lease.append(bad)
        assert len(lease) == 9


@pytest.mark.parametrize("bad", ["5", float("nan"), -1])
async def test_the_limit_of_a_close_is_seconds(bad: Any) -> None:
    """A close that failed would leave the cache open for good."""
    async with rig() as r:
        with pytest.raises((TypeError, ValueError), match="limit must be seconds"):
            await r.cache.aclose(bad)


async def test_chunks_are_found_within_what_a_batch_is_made_of() -> None:
    """A chunk that nobody counts would be computed again."""
    async with rig() as r, r.cache.lease(seq("A", 9)) as lease:
        chunk = await chunk_of(lease)
        await lease.run(lambda batch: r.model(batch["x"][0]), {"x": [chunk]})
        assert lease.computed == 9


async def test_an_error_names_a_few_holders_and_knows_them_all() -> None:
    """20,000 leases must not become a message of a megabyte."""
    async with rig(pages=16) as r:
        leases = [await r.lease(seq("A", 4), reserve=4) for _ in range(8)]
        with pytest.raises(CapacityError, match="and 3 more") as caught:
            for token in range(20):
                leases[0].append(token)
        assert len(caught.value.held_by) == 8
        for lease in leases:
            lease.close()
