"""Who goes first when room is needed: the least recently used.

A file's modification time is when it was last used; within a batch it falls from the chain's head
to its tail, so the tail goes first. Listing a large directory takes a second, so one listing serves
for many evictions: of all objects the oldest are remembered, in order. They stay the oldest, since
whatever is used or written later is newer; one that was used or removed since is passed over.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from tiered_cache.storage import ObjectKey

MIN_KEPT: Final = 4096
KEPT_SHARE: Final = 4
"""One in four of what is listed is remembered: a quarter of what the directory holds is written
between two listings of it."""

STEP_NS: Final = 1000
"""Between two stamps of a batch. Small against the time of a batch, and more than the resolution
of common file systems."""


class Victim(NamedTuple):
    """An object as it was when it was listed. `stamp`: its modification time in ns."""

    stamp: int
    key: ObjectKey


class Victims:
    """The oldest objects of the last listing, oldest first. Held with the account."""

    __slots__ = ("_low", "_oldest")

    def __init__(self) -> None:
        self._oldest: deque[Victim] = deque()
        self._low = 0

    def listed(self, stamps: array[int], keys: Sequence[ObjectKey]) -> None:
        """Everything there is, in any order."""
        num_kept = max(MIN_KEPT, len(keys) // KEPT_SHARE)
        # numpy sorts without the GIL; a list of 200,000 would stop the loop for 0.3 s.
        order = np.argsort(np.frombuffer(stamps, np.int64), kind="stable")[:num_kept].tolist()
        self._oldest = deque(Victim(stamps[index], keys[index]) for index in order)
        self._low = num_kept // 4 if num_kept < len(keys) else 0

    @property
    def few(self) -> bool:
        """A listing is due before there are none, since there are more objects than these."""
        return len(self._oldest) < self._low

    def take(self, older_than: int) -> Victim | None:
        """The oldest, unless it is as new as that."""
        if self._oldest and self._oldest[0].stamp < older_than:
            return self._oldest.popleft()
        return None


class Clock:
    """Gives out modification times: later calls get newer ones, whatever the machine's clock does.

    Only their order matters.
    """

    __slots__ = ("_given", "_seen")

    def __init__(self) -> None:
        self._given = 0
        self._seen = 0

    def saw(self, stamp: int) -> None:
        """An object has this one. By one thread at a time; no lock, for the loop must not wait."""
        self._seen = max(self._seen, stamp)

    def falling(self, num: int) -> range:
        """One for each of a batch, the first the newest, all newer than any before. On the loop."""
        length = num * STEP_NS
        self._given = max(time.time_ns(), max(self._given, self._seen) + length)
        return range(self._given, self._given - length, -STEP_NS)
