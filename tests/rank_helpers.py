"""Ranks of one model in one loop, joined by a barrier that matches by tag."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

from tests.lease_helpers import Rig
from tests.storage_helpers import Store, three_tiers


class Barrier:
    """A tag is agreed upon when all ranks have come to it; who is not there in time is an error on
    all, also on who comes later.

    Attributes:
        agreed: what was agreed upon, by tag; `heard`: the tags that each rank has an answer to.
        delay: seconds that a message takes, asked for each of them.
        failed: tags that not all ranks came to in time.
        open: tags that some ranks wait at.
    """

    def __init__(self, num_ranks: int, *, agree_timeout: float = 60.0) -> None:
        self.num_ranks = num_ranks
        self.agree_timeout = agree_timeout
        self.delay: Callable[[], float] = lambda: 0.0
        self.agreed: dict[str, set[int]] = {}
        self.heard: list[set[str]] = [set() for _ in range(num_ranks)]
        self.asked: list[set[str]] = [set() for _ in range(num_ranks)]
        self.failed: set[str] = set()
        self.open: dict[str, dict[int, tuple[set[int], asyncio.Future[set[int]]]]] = {}

    async def agree(self, rank: int, tag: str, offers: Collection[int]) -> set[int]:
        assert tag not in self.asked[rank], f"rank {rank} has asked {tag} before"
        self.asked[rank].add(tag)
        if seconds := self.delay():
            await asyncio.sleep(seconds)
        if tag in self.failed:
            raise TimeoutError(tag)
        loop = asyncio.get_running_loop()
        if tag not in self.open:
            self.open[tag] = {}
            loop.call_later(self.agree_timeout, self._fail, tag)
        answer: asyncio.Future[set[int]] = loop.create_future()
        self.open[tag][rank] = set(offers), answer
        if len(self.open[tag]) == self.num_ranks:
            self._settle(tag)
        try:
            agreed = await answer
        except asyncio.CancelledError:
            self.open.get(tag, {}).pop(rank, None)
            if not self.open.get(tag, True):
                del self.open[tag]
            raise
        if seconds := self.delay():
            await asyncio.sleep(seconds)
        self.heard[rank].add(tag)
        return agreed

    def _settle(self, tag: str) -> None:
        offers = self.open.pop(tag)
        self.agreed[tag] = set.intersection(*[offered for offered, _ in offers.values()])
        for _, answer in offers.values():
            answer.set_result(set(self.agreed[tag]))

    def _fail(self, tag: str) -> None:
        waiting = self.open.pop(tag, None)
        if waiting is not None:
            self.failed.add(tag)
            for _, answer in waiting.values():
                answer.set_exception(TimeoutError(tag))

    def check(self) -> None:
        """Nobody waits, and all have heard the same."""
        assert self.open == {}
        assert self.failed == set()
        questions = [{tag for tag in heard if "#" in tag} for heard in self.heard]
        assert all(heard == questions[0] for heard in questions)
        assert questions[0], "nothing was agreed upon"


class Rank:
    is_alone = False

    def __init__(self, barrier: Barrier, rank: int) -> None:
        self._barrier = barrier
        self.rank = rank
        self.world_size = barrier.num_ranks

    async def agree(self, tag: str, boundaries: Collection[int]) -> Collection[int]:
        return await self._barrier.agree(self.rank, tag, boundaries)


@contextlib.asynccontextmanager
async def some_ranks(
    num_ranks: int = 2,
    *,
    pages: int = 64,
    rows: int = 64,
    stores: Sequence[Store] | None = None,
    barrier: Barrier | None = None,
    tiers: Callable[..., Any] = three_tiers,
    **how: Any,
) -> AsyncIterator[tuple[list[Rig], Barrier]]:
    """Three tiers on each; what is stored is each one's own."""
    barrier = barrier or Barrier(num_ranks)
    async with contextlib.AsyncExitStack() as stack:
        rigs = []
        for rank in range(num_ranks):
            store = stores[rank] if stores else Store()
            options = {"ranks": Rank(barrier, rank)}
            made = tiers(pages, rows, store=store, options=options, **how)
            rigs.append((await stack.enter_async_context(made))[0])
        yield rigs, barrier
