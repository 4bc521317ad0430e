"""The engine-level API: everything by hand, and leases beside it lose nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.lease_helpers import P, Rig, rig, seq
from tiered_cache import (
    CacheRequest,
    CapacityError,
    EvictParams,
    InsertParams,
    LockError,
    MatchPrefixParams,
    RadixKey,
    StaleError,
    Tier,
)
from tiered_cache.types import PageIds

HOST: dict[str, Any] = {"tokens": 64 * P}


class Slots:
    """The slots of a request, as the oracle asks for them."""

    def __init__(self, request: CacheRequest) -> None:
        self._table = request.table

    def slots(self, component: str = "full", start: int = 0, stop: int | None = None) -> Any:
        assert stop is not None
        return self._table.slots(0, start, stop)


def compute(r: Rig, request: CacheRequest, stop: int) -> None:
    """What an engine does between two calls of the cache: pages, the model, how far it came."""
    missing = -(-stop // P) - request.table.num_pages
    if missing > 0:
        request.table.write(request.table.num_pages, r.cache.allocate(missing))
    r.oracle.verify(Slots(request), request.key, 0, request.computed)
    r.oracle.write(Slots(request), request.key, request.computed, stop)
    request.computed = stop


async def serve(r: Rig, tokens: list[int], chunk: int = 6) -> int:
    request = r.cache.begin_req(tokens)
    reused = request.committed
    while request.computed < len(tokens):
        compute(r, request, min(len(tokens), request.computed + chunk))
        r.cache.cache_unfinished_req(request)
        r.check()
    r.cache.cache_finished_req(request)
    r.check()
    return reused


async def test_a_request_by_hand_is_shared_like_a_lease() -> None:
    """Chunks are published as they are computed; leases and requests reuse each other's."""
    async with rig(pages=16) as r:
        assert await serve(r, seq("A", 22)) == 0
        assert await r.serve(seq("A", 22)) == 20
        assert await r.serve(seq("B", 13)) == 0
        assert await serve(r, seq("B", 13)) == 12
        assert r.pool.private == 0
        assert r.cache.evictable_size() == 5 + 3
        assert r.cache.available_size() == 16 - 8
        assert r.cache.protected_size() == 0


@pytest.mark.parametrize("is_insert", [True, False])
async def test_an_ended_request_keeps_nothing_of_its_own(is_insert: bool) -> None:
    """Published or not, the tail's page and what was not inserted go home (B07, B09)."""
    async with rig(pages=16) as r:
        request = r.cache.begin_req(seq("A", 30))
        compute(r, request, 18)
        r.cache.cache_unfinished_req(request)
        compute(r, request, 30)
        assert r.pool.private == 8 - 4
        r.cache.cache_finished_req(request, is_insert)
        r.spoil_free_pages()
        r.check()
        assert r.pool.private == r.pool.protected == 0
        assert r.hit(seq("A", 30)) == (28 if is_insert else 16)


async def test_two_requests_that_compute_the_same_share_what_came_first() -> None:
    """The second's pages go home, and its table names the first's from then on."""
    async with rig(pages=16) as r:
        one, two = r.cache.begin_req(seq("A", 13)), r.cache.begin_req(seq("A", 13))
        for request in (one, two):
            compute(r, request, 13)
        r.cache.cache_unfinished_req(one)
        r.cache.cache_unfinished_req(two)
        assert np.array_equal(one.table.ids[0][:3], two.table.ids[0][:3])
        r.check()
        r.oracle.verify(Slots(two), two.key, 0, 13)
        for request in (one, two):
            r.cache.cache_finished_req(request)
        assert r.pool.free == 16 - 3


async def test_what_is_promised_to_leases_is_not_lent() -> None:
    """Neither by allocating nor by locking; nothing changes."""
    async with rig(pages=8) as r:
        await r.serve(seq("A", 12))
        async with r.cache.lease(seq("B", 16), reserve=8) as lease:
            with pytest.raises(CapacityError):
                r.cache.allocate(3)
            match = r.cache.match_prefix(MatchPrefixParams(RadixKey(seq("A", 12))))
            with pytest.raises(CapacityError):
                r.cache.inc_lock_ref(match.device_boundary)
            r.check()
            (pages,) = r.cache.allocate(2)
            for token in range(8):
                lease.append(token)
            r.cache.free([pages])
        assert r.pool.free + r.pool.evictable == 8


async def test_foreign_and_second_releases_change_nothing() -> None:
    """Pages and receipts alike."""
    async with rig(pages=8) as r:
        (pages,) = r.cache.allocate(3)
        for wrong in (np.array([7], np.int32), np.array([-1], np.int32), pages[[0, 0]]):
            if wrong[0] in pages and len(wrong) == 1:
                continue
            with pytest.raises(ValueError, match="not \\(all\\) lent"):
                r.cache.free([wrong.astype(np.int32)])
        r.cache.free([pages])
        with pytest.raises(ValueError, match="not \\(all\\) lent"):
            r.cache.free([pages])
        await r.serve(seq("A", 8))
        match = r.cache.match_prefix(MatchPrefixParams(RadixKey(seq("A", 8))))
        receipt = r.cache.inc_lock_ref(match.device_boundary)
        assert r.cache.protected_size() == 2
        r.cache.dec_lock_ref(receipt)
        with pytest.raises(LockError):
            r.cache.dec_lock_ref(receipt)


async def test_an_insert_takes_only_pages_that_were_lent() -> None:
    """A page of somebody else's under a second name would be wrong bytes for one of them."""
    async with rig(pages=8) as r:
        key = RadixKey(seq("A", 8))
        with pytest.raises(ValueError, match="not \\(all\\) lent"):
            r.cache.insert(InsertParams(key, (np.array([0, 1], np.int32),)))
        pages = tuple(r.cache.allocate(2))
        r.oracle.write(_At(pages[0]), key, 0, 8)
        r.cache.insert(InsertParams(key, pages))
        assert r.pool.private == 0
        again = tuple(r.cache.allocate(2))
        r.oracle.write(_At(again[0]), key, 0, 8)
        result = r.cache.insert(InsertParams(key, again))
        assert r.pool.private == 2
        r.cache.free(result.duplicates)
        r.check()


class _At:
    def __init__(self, pages: PageIds) -> None:
        self._slots = (pages.astype(np.int64)[:, None] * P + np.arange(P)).ravel()

    def slots(self, component: str = "full", start: int = 0, stop: int | None = None) -> Any:
        return self._slots[start:stop]


async def test_a_reset_leaves_lent_pages_until_they_are_given_back() -> None:
    """Quarantined: the engine's model may be writing there."""
    async with rig(pages=8) as r:
        (before,) = r.cache.allocate(3)
        request = r.cache.begin_req(seq("A", 9))
        r.cache.reset()
        assert r.pool.quarantined == 3
        (after,) = r.cache.allocate(5)
        assert not set(before.tolist()) & set(after.tolist())
        r.cache.free([np.concatenate((before, after[:2]))])
        r.check()
        with pytest.raises(StaleError):
            r.cache.dec_lock_ref(request.receipt)  # type: ignore[arg-type]
        r.cache.free([after[2:]])
        assert r.pool.free == 8


async def test_eviction_and_loading_by_hand() -> None:
    """What is evicted is demoted; `load_back` brings it, as far as there is room (B04, B50)."""
    async with rig(pages=8, host=HOST) as r:
        key = RadixKey(seq("A", 32))
        await r.serve(seq("A", 32))
        await r.cache.drain()
        result = await r.cache.evict(EvictParams(num_tokens=8 * P))
        assert result.count(0) == 8
        assert r.cache.available_size() == 8
        match = r.cache.match_prefix(MatchPrefixParams(key))
        assert (match.device_length, match.host_hit_length) == (0, 32)
        host = r.cache.inc_host_lock_ref(match.best_boundary)
        assert (await r.cache.evict_host(EvictParams(num_pages={"full": 8}))).count(
            0, Tier.HOST
        ) == 0
        r.cache.dec_host_lock_ref(host)
        r.spoil_free_pages()
        assert await r.cache.load_back(key, limit=19) == 16
        r.check()
        (pages,) = r.cache.allocate(2)
        assert await r.cache.load_back(key) == 24
        r.check()
        r.cache.free([pages])
        assert await r.cache.load_back(key) == 32
        assert (await r.cache.evict_host(EvictParams(num_tokens=P))).count(0, Tier.HOST) == 0
        with pytest.raises(KeyError):
            await r.cache.evict(EvictParams(num_pages={"swa": 1}))


async def test_evicting_copies_first_with_write_back() -> None:
    """And what the host has no room for is dropped."""
    async with rig(pages=8, host={"tokens": 4 * P, "write_policy": "write_back"}) as r:
        for name in "AB":
            await r.serve(seq(name, 16))
        await r.cache.evict(EvictParams(num_tokens=4 * P))
        assert r.counters.tokens_dropped == 0
        assert r.host.evictable == 4
        await r.cache.evict(EvictParams(num_tokens=8 * P))
        assert r.pool.free == 8
        assert r.host.evictable == 4
        r.check()


async def test_loads_by_hand_join_those_under_way() -> None:
    """Each page is copied once, whoever asks."""
    async with rig(pages=16, host=HOST) as r:
        await r.serve(seq("A", 33))
        await r.cache.drain()
        await r.cache.evict(EvictParams(num_tokens=16 * P))
        key = RadixKey(seq("A", 33))
        lengths = await asyncio.gather(*[r.cache.load_back(key) for _ in range(3)])
        assert lengths == [32, 32, 32]
        assert r.counters.pages_loaded == 8
        assert r.counters.loads_joined == 2


async def test_what_was_lent_comes_back_after_the_close_too() -> None:
    """Until then it is outstanding: a model may be writing there."""
    async with rig(pages=8) as r:
        (pages,) = r.cache.allocate(2)
        request = r.cache.begin_req(seq("A", 9))
        compute(r, request, 9)
        [left] = await r.cache.aclose()
        assert (left.kind, left.pages) == ("lent pages", {"full": 5})
        r.cache.free([pages])
        r.cache.cache_finished_req(request)
        assert r.cache.outstanding() == []
        assert r.pool.free == 8
