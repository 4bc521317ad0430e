"""The queue in front of the device tier: first in, first out (semantics §11.5).

Owns: whose turn it is. Refuses to know: what is asked for; whoever has the turn tries for itself,
so what it sees is what there is now, and nothing can get lost between being granted and waking up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from tiered_cache.errors import AdmissionTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered_cache.stats import Counters


class AdmissionQueue:
    """Callers that wait until their attempt succeeds."""

    __slots__ = ("_counters", "_turns")

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._turns: deque[asyncio.Event] = deque()

    def admit_now(self, attempt: Callable[[], bool]) -> bool:
        """Grant at once, if nobody is ahead and `attempt` succeeds."""
        return not self._turns and attempt()

    async def admit_first(self, attempt: Callable[[], bool], check: Callable[[], None]) -> None:
        """`admit` without a limit, in front of everybody: for who was admitted already, and has
        lost pages to a copy that does not end."""
        if not attempt():
            await self.admit(attempt, None, check, first=True)

    async def admit(
        self,
        attempt: Callable[[], bool],
        timeout: float | None,
        check: Callable[[], None],
        *,
        first: bool = False,
    ) -> None:
        """Wait until `attempt` succeeds. It is called only with nobody ahead, and grants in that
        very step.

        `check` is called after every wait, and may raise.

        Raises:
            AdmissionTimeout: `timeout` seconds have passed; nothing is held.
        """
        turn = asyncio.Event()
        (self._turns.appendleft if first else self._turns.append)(turn)
        self._counters.admissions_queued += 1
        try:
            async with asyncio.timeout(timeout):
                while not (self._turns[0] is turn and attempt()):
                    turn.clear()
                    await turn.wait()
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
            self._turns[0].set()

    def wake_all(self) -> None:
        """Everybody checks whether there is still something to wait for."""
        for turn in self._turns:
            turn.set()

    def __len__(self) -> int:
        return len(self._turns)
