"""The seam between ranks: what a lease holds on one, it holds on all (§10.10, B90, B91)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest

from tests.lease_helpers import P, Rig, seq, settings, start, turns
from tests.storage_helpers import keep, three_tiers
from tiered_cache import CapacityError, ClosedError, EvictParams, UnifiedRadixCache
from tiered_cache.ranks import SingleRank


class Meeting:
    """Two ranks in one loop: a tag is agreed upon when both have come to it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._offers: dict[str, list[Collection[int]]] = {}
        self._agreed: dict[str, asyncio.Future[set[int]]] = {}

    async def agree(self, tag: str, boundaries: Collection[int]) -> set[int]:
        offers = self._offers.setdefault(tag, [])
        agreed = self._agreed.setdefault(tag, asyncio.get_running_loop().create_future())
        offers.append(boundaries)
        if len(offers) == self._num_ranks:
            agreed.set_result(set.intersection(*map(set, offers)))
        return await asyncio.shield(agreed)

    @property
    def tags(self) -> list[str]:
        return list(self._agreed)


class Rank:
    is_alone = False
    rank = 0
    world_size = 1

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    async def agree(self, tag: str, boundaries: Collection[int]) -> Collection[int]:
        return await self._meeting.agree(tag, boundaries)


@contextlib.asynccontextmanager
async def two_ranks(pages: tuple[int, int], **sections: Any) -> AsyncIterator[tuple[Rig, Rig]]:
    meeting = Meeting(2)
    async with (
        UnifiedRadixCache.open(settings(pages[0], **sections), ranks=Rank(meeting)) as one,
        UnifiedRadixCache.open(settings(pages[1], **sections), ranks=Rank(meeting)) as two,
    ):
        rigs = Rig(one), Rig(two)
        yield rigs
        for rig in rigs:
            rig.check()
        assert meeting.tags, "nothing was agreed upon"


async def serve(rigs: tuple[Rig, Rig], tokens: list[int]) -> tuple[int, int]:
    """The same request on both, as the ranks of one model have it."""
    one, two = await asyncio.gather(*[rig.serve(tokens) for rig in rigs])
    return one, two


@pytest.mark.parametrize("has_host", [False, True])
async def test_ranks_reuse_what_all_of_them_have(has_host: bool) -> None:
    """One has lost a part of it: both compute that part, and hold the same."""
    sections = {"host": {"tokens": 64 * P}} if has_host else {}
    async with two_ranks((16, 16), **sections) as rigs:
        assert await serve(rigs, seq("A", 12)) == (0, 0)
        assert await serve(rigs, seq("A", 30)) == (12, 12)
        assert await serve(rigs, seq("A", 30)) == (28, 28)
        await rigs[1].cache.drain()
        await rigs[1].cache.evict(EvictParams(num_tokens=12 * P))
        reused = await serve(rigs, seq("A", 30))
        assert reused == ((28, 28) if has_host else (12, 12))


async def test_a_chunk_that_one_rank_has_no_room_for_is_refused_on_all() -> None:
    """None waits for the others, none goes on alone."""
    async with two_ranks((8, 6)) as rigs:
        leases = await asyncio.gather(*[rig.lease([1]) for rig in rigs])
        for lease in leases:
            lease.key.extend(range(2, 30))
        results = await asyncio.gather(
            *[lease.next_chunk(100) for lease in leases], return_exceptions=True
        )
        assert [type(result) for result in results] == [CapacityError, CapacityError]
        for lease in leases:
            lease.close()


async def test_alone_nothing_is_asked() -> None:
    """Neither by leases nor by prefetches."""

    class Alone(SingleRank):
        async def agree(self, tag: str, boundaries: Collection[int]) -> Collection[int]:
            raise AssertionError(tag)

    async with three_tiers(options={"ranks": Alone()}) as (r, _):
        await keep(r, seq("A", 32))
        with r.cache.prefetch(seq("A", 32)) as handle:
            assert await handle.wait() == 32
        assert await r.serve(seq("A", 40)) == 32


async def test_who_waits_for_an_answer_when_the_cache_closes() -> None:
    """Is told that; and the close does not wait longer than it may."""
    async with UnifiedRadixCache.open(settings(), ranks=Rank(Meeting(2))) as cache:
        waiting = start(cache.acquire(seq("A", 9)))
        await turns()
        await cache.aclose(0.01)
        with pytest.raises(ClosedError):
            await waiting
