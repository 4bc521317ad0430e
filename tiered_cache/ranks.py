"""The seam between ranks of one model: what they must agree upon, and where (semantics §10.10).

Each rank has its own cache, tree and tiers; their orders may differ, their grants may not. So
before anything that changes what a lease holds, the ranks intersect the sets of boundaries that
each could offer. Owns: the contract, the default for a model on a single rank, and the order of
questions within one operation, with its end. Refuses to know: how ranks talk to each other, and
what they talk about.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from tiered_cache.errors import ClosedError, RanksError, TieredCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable

log = logging.getLogger(__name__)

HERE: Final = -1
"""What every rank offers that has not given up."""

EQUAL: Final = -2
"""And all below: a number that has to be the same on all ranks."""

UNLIMITED: Final = 1 << 62


class Ranks(Protocol):
    """How a rank agrees with the others. Given to `open(ranks=…)`."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with: then nothing is asked, and nothing waits."""

    async def agree(self, tag: str, boundaries: Collection[int]) -> Collection[int]:
        """What every rank has offered under this tag: boundaries in tokens, and marks below 0.

        Rank 0 announces tags, the others answer by tag, not by the order of their calls; rank 0's
        result is final. A rank that has given up answers with the empty set; every other one offers
        something. No rank asks a tag twice. Cancelled, an offer that was not agreed upon is
        withdrawn: the tag may never come on other ranks.

        Raises:
            TimeoutError: nobody announced the tag in time; on all ranks.
        """


class SingleRank:
    """The default."""

    is_alone = True
    rank = 0
    world_size = 1

    async def agree(self, tag: str, boundaries: Collection[int]) -> Collection[int]:
        return boundaries


class Operation:
    """What ranks do together: a lease, a prefetch. It asks the same questions on all of them.

    A tag is its name and the question's number. So a rank that gives up need not know what the
    others will ask: its answer to the next question is the empty set, and there it ends for all.

    Args:
        name: the same on all ranks, and of no other operation.
        spawn: starts background work: a question outlives who has asked it.
        num_questions: after so many it has ended by itself.
        on_end: called when no rank will ask or answer any more.
    """

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        *,
        num_questions: int = UNLIMITED,
        on_end: Callable[[Operation], object] = lambda _: None,
    ) -> None:
        self.name = name
        self.is_over = False
        self._ranks = ranks
        self._spawn = spawn
        self._num_questions = num_questions
        self._on_end = on_end
        self._num_asked = 0
        self._num_limits = 0
        self._is_asking = False
        self._has_given_up = False
        self._limit: Limit | None = None
        self._error: TieredCacheError = RanksError(f"{name}: another rank has given up")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which judges time."""
        return self._ranks.rank == 0

    async def agree(self, offers: Iterable[int]) -> set[int]:
        """What all ranks offer to its next question.

        Raises:
            RanksError: a rank has given up, or they cannot talk; so it is on all ranks.
            ClosedError: the cache is closing.
        """
        if self.is_over or self._has_given_up:
            raise self._error
        agreed = await self._ask({HERE, *offers})
        if not agreed:
            raise self._error
        return agreed

    async def least(self, num_tokens: int, page_size: int) -> int:
        """How many tokens all ranks have, of which this one has `num_tokens`; whole pages."""
        return max(await self.agree(range(0, num_tokens + 1, page_size)))

    def give_up(self) -> None:
        """This rank goes no further, so none does. Any number of times."""
        if not self._has_given_up:
            self._has_given_up = True
            if not self._is_asking and not self.is_over:
                self._ask(())

    def limit(self, on_over: Callable[[], object], timeout: float | None = None) -> Limit:
        """What can be over before the next answer, if rank 0 says so: `timeout` seconds from now,
        or by hand."""
        self._num_limits += 1
        self._limit = Limit(
            self._ranks, f"{self.name} over {self._num_limits}", self._spawn, on_over, timeout
        )
        return self._limit

    def _ask(self, offers: Collection[int]) -> asyncio.Future[set[int]]:
        self._num_asked += 1
        self._is_asking = True
        answer: asyncio.Future[set[int]] = asyncio.get_running_loop().create_future()
        agreed: set[int] = set()
        try:
            task = self._spawn(
                self._put(f"{self.name} #{self._num_asked}", offers, agreed), "agreement"
            )
        except ClosedError as error:
            self._error = error
            self._answered(answer, agreed)
        else:
            task.add_done_callback(lambda _: self._answered(answer, agreed))
        return answer

    async def _put(self, tag: str, offers: Collection[int], agreed: set[int]) -> None:
        try:
            agreed.update(await self._ranks.agree(tag, offers))
        except asyncio.CancelledError:
            self._error = ClosedError("the cache is closing")
            raise
        except Exception as error:
            log.warning("ranks have not agreed on %s: %r", tag, error)
            self._error = RanksError(f"ranks have not agreed on {tag!r}: {error!r}")
            self._error.__cause__ = error

    def _answered(self, answer: asyncio.Future[set[int]], agreed: set[int]) -> None:
        """Here it is also when the question never began, or was cancelled: the cache ends."""
        self._is_asking = False
        if not answer.done():
            answer.set_result(agreed)
        if not agreed or self._num_asked == self._num_questions:
            self.is_over = True
            if self._limit is not None:
                self._limit.end()
            self._on_end(self)
        elif self._has_given_up:
            self._ask(())

    def __repr__(self) -> str:
        return f"<{self.name}, {self._num_asked} questions>"


class Limit:
    """An end that rank 0 judges and the others keep: `on_over` is called once on all of them."""

    def __init__(
        self,
        ranks: Ranks,
        tag: str,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        on_over: Callable[[], object],
        timeout: float | None,
    ) -> None:
        self.is_over = False
        self._ranks = ranks
        self._tag = tag
        self._spawn = spawn
        self.on_over = on_over
        self._has_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        if ranks.rank:
            self._task = spawn(self._listen(), "limit")
        elif timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout, self.over)

    def over(self) -> None:
        """Rank 0 says so; elsewhere nothing."""
        if self._ranks.rank == 0 and not (self.is_over or self._has_ended):
            self.is_over = True
            with suppress(ClosedError):
                self._task = self._spawn(self._tell(), "limit")
            self.on_over()

    def end(self) -> None:
        """What it was for has ended on all ranks: nobody tells, nobody listens."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _tell(self) -> None:
        with suppress(Exception):  # then nobody can talk, and questions say so
            await self._ranks.agree(self._tag, [0])

    async def _listen(self) -> None:
        with suppress(Exception):
            if await self._ranks.agree(self._tag, (0,)) and not self._has_ended:
                self.is_over = True
                self.on_over()
