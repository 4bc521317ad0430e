"""Keeps to the budget: counts what is there, and has the oldest go when room is needed.

Owns: the account, and who goes. Refuses to know: what the room is for.
"""

from __future__ import annotations

import threading
import time
from array import array
from typing import TYPE_CHECKING, Final

from tiered_cache_file.account import REST_S, Account
from tiered_cache_file.layout import NUM_BUCKETS, bucket_of
from tiered_cache_file.victims import Clock, Victims

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered_cache.storage import ObjectKey
    from tiered_cache_file.account import Usage
    from tiered_cache_file.objects import Objects

MAX_RECOUNTED: Final = 8
"""Buckets that one job counts again, at most: 2 ms each where there are 200,000 objects."""

TRIMMED_AT_ONCE: Final = 256
HELD_S: Final = 0.02
"""By a listing, at a time. A large one takes a second, and others want the lock meanwhile."""


class Room:
    """What may be kept in a directory, and what is. For threads, all methods.

    Args:
        complain: told of an object that cannot be removed.
    """

    def __init__(
        self, objects: Objects, max_size: int, complain: Callable[[str, OSError], None]
    ) -> None:
        self.max_size = max_size
        self.clock = Clock()
        self.account = Account(objects.layout.lock)
        self._objects = objects
        self._complain = complain
        self._victims = Victims()
        self._list_lock = threading.Lock()
        self._num_listings = self._num_evicted = 0
        self._doubtful: set[int] = set()
        """Buckets that may hold less than the account says."""

    # --- while the account is held ----------------------------------------------------------------

    def make(self, usage: Usage, num_bytes: int) -> bool:
        """Have as many go as must, so that there is room. False: there is nobody who could go, as
        far as is known."""
        while usage.num_bytes + num_bytes > self.max_size:
            if self.evict(usage) is None:
                return False
        return True

    def evict(self, usage: Usage) -> int | None:
        """The bytes of the one who had to go; None: nobody, as far as is known."""
        while (victim := self._victims.take()) is not None:
            try:
                gone = self.remove(usage, victim.key, victim.stamp)
            except OSError as error:
                self._complain("evict", error)
                continue
            if gone is not None:
                self._num_evicted += 1
                return gone
        return None

    def remove(self, usage: Usage, key: ObjectKey, stamp: int | None = None) -> int | None:
        """See `Objects.unlink`."""
        gone = self._objects.unlink(key, stamp)
        if gone is not None:
            usage.remove(bucket_of(key), gone)
        return gone

    # --- by itself --------------------------------------------------------------------------------

    def rounds(self) -> Iterator[None]:
        """Try again after a listing, as long as that helps. Not while the account is held."""
        seen = self._num_listings
        yield
        num_evicted = -1
        while num_evicted != self._num_evicted:
            self.list_all(seen)
            seen, num_evicted = self._num_listings, self._num_evicted
            yield

    def shrink(self, num_bytes: int) -> None:
        """By so much, or what there is."""
        for _ in self.rounds():
            with self.account.held() as usage:
                while num_bytes > 0 and (gone := self.evict(usage)) is not None:
                    num_bytes -= gone
            if num_bytes <= 0:
                break

    @property
    def wants_listing(self) -> bool:
        """Victims run short. One thread can see to that while the others go on."""
        return self._victims.few

    def list_all(self, seen: int | None = None) -> None:
        """Count everything and remember the oldest. With `seen`: unless somebody has done it since
        there were so many listings."""
        with self._list_lock:
            if seen not in (None, self._num_listings):
                return
            settled = self.clock.settled()
            stamps: array[int] = array("q")
            keys: list[ObjectKey] = []
            buckets = iter(range(NUM_BUCKETS))
            while self._list_some(buckets, stamps, keys):
                time.sleep(REST_S)
            self._victims.listed(stamps, keys, settled)
            self._num_listings += 1

    def _list_some(self, buckets: Iterator[int], stamps: array[int], keys: list[ObjectKey]) -> bool:
        """For as long as others can be kept waiting; whether there are more."""
        with self.account.held() as usage:
            scopes = self._objects.scopes()
            until_s = time.monotonic() + HELD_S
            for bucket in buckets:
                num_before, num_bytes = len(keys), 0
                for found in self._objects.in_bucket(scopes, bucket):
                    keys.append(found.key)
                    stamps.append(found.stamp)
                    num_bytes += found.num_bytes
                self.clock.saw(max(stamps[num_before:], default=0))
                usage.counted(bucket, num_bytes, len(keys) - num_before)
                if time.monotonic() > until_s:
                    return True
        return False

    def trim(self) -> None:
        """Down to the budget, which may have become smaller since the directory was last open."""
        while self._trim_some():
            time.sleep(REST_S)

    def _trim_some(self) -> bool:
        """Some at a time, since others want the lock; whether there may be more to do."""
        num_gone = 0
        with self.account.held() as usage:
            while num_gone < TRIMMED_AT_ONCE:
                if usage.num_bytes <= self.max_size:
                    return False
                if self.evict(usage) is None:
                    break
                num_gone += 1
            else:
                return True
        if num_gone:
            self.list_all()
        return num_gone > 0

    def recount(self, buckets: set[int]) -> None:
        """Something may be gone from these that nobody has taken off the account: an operator may
        remove files. Does not wait for the lock, since a read waits for this."""
        self._doubtful |= buckets
        if not self._doubtful:
            return
        with self.account.held_if_free() as usage:
            if usage is None:
                return
            scopes = self._objects.scopes()
            for _ in range(min(MAX_RECOUNTED, len(self._doubtful))):
                bucket = self._doubtful.pop()
                if self._objects.num_names(scopes, bucket) != usage.num_objects_in(bucket):
                    sizes = [found.num_bytes for found in self._objects.in_bucket(scopes, bucket)]
                    usage.counted(bucket, sum(sizes), len(sizes))
