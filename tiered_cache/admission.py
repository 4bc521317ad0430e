"""The queue in front of the device tier: first in, first out (semantics §11.5).

Owns: whose turn it is. Refuses to know: what is asked for; whoever has the turn tries for itself,
so what it sees is what there is now, and nothing can get lost between being granted and waking up.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from operator import itemgetter
from typing import TYPE_CHECKING

from tiered_cache.errors import AdmissionTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered_cache.stats import Counters


class AdmissionQueue:
    """Callers that wait until their attempt succeeds."""

    __slots__ = ("_counters", "_num_first", "_num_places", "_turns")

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._turns: list[tuple[int, asyncio.Event]] = []  # by place
        self._num_places = 0
        self._num_first = 0

    def take_place(self) -> int:
        """A place in the queue, for who is not ready to wait in it yet: nobody waits for him, and
        nobody who came later is before him when he is."""
        self._num_places += 1
        return self._num_places

    def admit_now(self, attempt: Callable[[], bool]) -> bool:
        """Grant at once, if nobody is ahead and `attempt` succeeds."""
        return not self._turns and attempt()

    async def admit_first(self, attempt: Callable[[], bool], check: Callable[[], None]) -> None:
        """`admit` without a limit, in front of everybody: for who was admitted already, and has
        lost pages to a copy that does not end."""
        if not attempt():
            self._num_first += 1
            await self.admit(attempt, None, check, -self._num_first)

    async def admit(
        self,
        attempt: Callable[[], bool],
        timeout: float | None,
        check: Callable[[], None],
        place: int | None = None,
    ) -> None:
        """Wait until `attempt` succeeds. It is called only with nobody ahead, and grants in that
        very step.

        `check` is called after every wait, and may raise. `place`: see `take_place`; None: behind
        everybody.

        Raises:
            AdmissionTimeout: `timeout` seconds have passed; nothing is held.
        """
        event = asyncio.Event()
        turn = (self.take_place() if place is None else place, event)
        insort(self._turns, turn, key=itemgetter(0))
        self._counters.admissions_queued += 1
        try:
            async with asyncio.timeout(timeout):
                while not (self._turns[0] is turn and attempt()):
                    event.clear()
                    await event.wait()
                    check()
        except TimeoutError:
            self._counters.admissions_timed_out += 1
            raise AdmissionTimeout(
                f"not admitted within {timeout} s: the device tier is held by other leases"
            ) from None
        except asyncio.CancelledError:
            self._counters.admissions_cancelled += 1
            raise
        finally:
            self._turns.remove(turn)
            self.look_again()

    def look_again(self) -> None:
        """Pages may have become spare: the head of the queue tries again."""
        if self._turns:
            self._turns[0][1].set()

    def wake_all(self) -> None:
        """Everybody checks whether there is still something to wait for."""
        for _, event in self._turns:
            event.set()

    def __len__(self) -> int:
        return len(self._turns)
