"""Whether a backend is well enough to be asked: a circuit breaker for each direction (design §7).

Pure: told what happened and when, it says what may be tried. Owns: the states and their times.
Refuses to know: backends, tasks, who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable


class HealthState(Enum):
    """Of one direction."""

    CLOSED = "closed"  # well
    DEGRADED = "degraded"  # asked as before, but slow, failing now and then, or with a long queue
    OPEN = "open"  # not asked
    HALF_OPEN = "half-open"  # one call is under way that decides


LATENCY_WEIGHT: Final = 0.2
"""Of the newest call in the running mean."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When to stop asking, and when to try again.

    `failures`: in a row. `retry_after`, `max_retry_after`: seconds until the next try; doubled
    after each that fails. `slow`: seconds; calls that take longer on average are `degraded`.
    `long_queue`: calls that wait for their turn; more are `degraded`.
    """

    failures: int = 5
    retry_after: float = 1.0
    max_retry_after: float = 30.0
    slow: float = 1.0
    long_queue: int = 16


class Breaker:
    """One direction. `changed` is called with the old and the new state after every change."""

    __slots__ = (
        "_changed",
        "_clock",
        "_failures",
        "_retry_s",
        "_settings",
        "_state",
        "latency_s",
        "queued",
        "reason",
        "retry_at",
    )

    def __init__(
        self,
        settings: BreakerSettings,
        clock: Callable[[], float],
        changed: Callable[[HealthState, HealthState], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._changed = changed
        self._state = HealthState.CLOSED
        self._failures = 0
        self._retry_s = settings.retry_after
        self.retry_at = 0.0
        self.latency_s = 0.0
        self.queued = 0
        self.reason = ""

    @property
    def state(self) -> HealthState:
        return self._state

    @property
    def is_due(self) -> bool:
        """Whether it may be tried again."""
        return self._clock() >= self.retry_at

    def admits(self) -> bool:
        """Whether a call may start; if it is the one that decides, it has started."""
        if self._state is HealthState.OPEN and self.is_due:
            self._become(HealthState.HALF_OPEN)
            return True
        return self._state in (HealthState.CLOSED, HealthState.DEGRADED)

    def succeeded(self, seconds: float) -> None:
        """A call has ended well after so long."""
        if self._state is HealthState.OPEN:
            return  # a call from before; the next try decides
        self._failures = 0
        self._retry_s = self._settings.retry_after
        self.latency_s += LATENCY_WEIGHT * (seconds - self.latency_s)
        self._judge()

    def failed(self, reason: str) -> None:
        """A call has failed, or has not ended in time. `reason` is shown to people."""
        self.reason = reason
        self._failures += 1
        if self._state is HealthState.OPEN:
            return
        if self._state is HealthState.HALF_OPEN or self._failures >= self._settings.failures:
            self.open(reason)
        else:
            self._judge()

    def given_up(self) -> None:
        """A call was cancelled: it says nothing. If it was to decide, the next one is."""
        if self._state is HealthState.HALF_OPEN:
            self._become(HealthState.OPEN)

    def open(self, reason: str) -> None:
        """Ask no more for a while. What is open already is tried again when it would have been,
        however many have found out meanwhile."""
        self.reason = reason
        if self._state is HealthState.OPEN:
            return
        self.retry_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, self._settings.max_retry_after)
        self._become(HealthState.OPEN)

    def close(self) -> None:
        """It is another one now, or the same anew: nothing is held against it."""
        self._failures = 0
        self._retry_s = self._settings.retry_after
        self.latency_s = 0.0
        self.reason = ""
        self._judge()

    def note_queue(self, num_calls: int) -> None:
        """So many calls wait for their turn."""
        self.queued = num_calls
        if self._state in (HealthState.CLOSED, HealthState.DEGRADED):
            self._judge()

    def _judge(self) -> None:
        settings = self._settings
        is_unwell = (
            self._failures > 0
            or self.latency_s > settings.slow
            or self.queued > settings.long_queue
        )
        self._become(HealthState.DEGRADED if is_unwell else HealthState.CLOSED)

    def _become(self, state: HealthState) -> None:
        old, self._state = self._state, state
        if old is not state:
            self._changed(old, state)

    def __repr__(self) -> str:
        return f"<Breaker {self._state.value}{f': {self.reason}' if self.reason else ''}>"
