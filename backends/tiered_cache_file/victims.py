"""Who goes first when room is needed: the least recently used.

A file's modification time, its stamp, is when it was last used; within a batch it falls from the
chain's head to its tail, so the tail goes first. Listing a large directory takes a second, so one
listing serves for many evictions: of all objects the oldest are remembered, in order. They stay the
oldest, since whatever is used or written later is newer; one that was used or removed since is
passed over. Only a batch that was being written brings older ones after the listing: its tail comes
after its head. So nothing as new as such a batch is remembered.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

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
    """The oldest objects of the last listing, oldest first. Taken while the account is held."""

    __slots__ = ("_low", "_num_left", "_oldest")

    def __init__(self) -> None:
        self._oldest: Iterator[tuple[int, ObjectKey]] = iter(())
        self._num_left = 0
        self._low = 0

    def listed(self, stamps: array[int], keys: Sequence[ObjectKey], older_than: int) -> None:
        """Everything there is, in any order. Only what is older counts."""
        num_kept = max(MIN_KEPT, len(keys) // KEPT_SHARE)
        # numpy sorts without the GIL; a list of 200,000 would stop the loop for 0.3 s. And no
        # object is made for each: that many would make the garbage collector look at all others.
        found = np.frombuffer(stamps, np.int64)
        order = np.argsort(found, kind="stable")[:num_kept]
        order = order[: np.searchsorted(found[order], older_than)]
        self._low = num_kept // 4 if num_kept < len(keys) else 0
        self._num_left = len(order)
        self._oldest = zip(found[order].tolist(), [keys[at] for at in order.tolist()], strict=True)

    @property
    def few(self) -> bool:
        """A listing is due before there are none, since there are more objects than these."""
        return self._num_left < self._low

    def take(self) -> Victim | None:
        """The oldest."""
        victim = next(self._oldest, None)
        if victim is None:
            return None
        self._num_left -= 1
        return Victim(*victim)


class Clock:
    """Gives out stamps: later calls get newer ones, whatever the machine's clock does. Only their
    order matters. Of one event loop, except for what is said to be for threads."""

    __slots__ = ("_given", "_seen", "_writing")

    def __init__(self) -> None:
        self._given = 0
        self._seen = 0
        self._writing: set[int] = set()

    def falling(self, num: int) -> range:
        """One for each of a batch, the first the newest, all newer than any before."""
        length = num * STEP_NS
        self._given = max(time.time_ns(), max(self._given, self._seen) + length)
        return range(self._given, self._given - length, -STEP_NS)

    @contextmanager
    def writing(self, stamps: range) -> Iterator[None]:
        """Objects come, in any order, that have these stamps."""
        oldest = min(stamps)
        self._writing.add(oldest)
        try:
            yield
        finally:
            self._writing.remove(oldest)

    def saw(self, stamp: int) -> None:
        """An object has this one. For threads, one at a time; no lock, for the loop must not
        wait."""
        self._seen = max(self._seen, stamp)

    def settled(self) -> int:
        """Nothing older than this comes any more, of this process. For threads."""
        newest = max(time.time_ns(), self._given, self._seen) + 1
        return min((newest, *tuple(self._writing)))  # copied at one go: the loop changes it
