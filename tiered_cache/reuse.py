"""Where a lease's prefix has come from, and why it ends where it does.

Owns: how many of the reused tokens each tier has brought, and the words for what is missing.
Decides nothing, and refuses to know pages.
"""

from __future__ import annotations

import sys

from tiered_cache.types import Hits


class Reuse:
    """One per lease; all in tokens of its prompt.

    Attributes:
        total: reused instead of computed.
        from_host: what of it a load has brought; of that, `from_storage` had been brought to the
            host by a prefetch of this lease.
        known: how far some tier had it when the lease was admitted.
        not_fetched: why storage had no more of it, for people.
        not_loaded: why it started over without what the host has, for people.
    """

    __slots__ = (
        "_fetched_from",
        "_fetched_to",
        "from_host",
        "from_storage",
        "known",
        "not_fetched",
        "not_loaded",
        "total",
    )

    def __init__(self) -> None:
        self.known = 0
        self.not_fetched = ""
        self.start_over("")

    def start_over(self, not_loaded: str) -> None:
        """Nothing is reused, as yet."""
        self.total = self.from_host = self.from_storage = 0
        self._fetched_from, self._fetched_to = sys.maxsize, 0
        self.not_loaded = not_loaded

    def fetches_from(self, start: int) -> None:
        """Device and host have `[0, start)`; a prefetch brings what follows, up to where
        `fetched_to` says."""
        self._fetched_from = start

    def fetched_to(self, stop: int) -> None:
        self._fetched_to = stop

    def of_storage(self, start: int, stop: int) -> int:
        """How many of these tokens a prefetch had brought to the host."""
        return max(0, min(stop, self._fetched_to) - max(start, self._fetched_from))

    def loaded(self, start: int, stop: int) -> None:
        """Of what is reused, `[start, stop)` has come from the host."""
        self.from_host += stop - start
        self.from_storage += self.of_storage(start, stop)

    def lost(self, start: int, stop: int) -> None:
        """What was to come from the host does not."""
        self.total -= stop - start
        self.from_host -= stop - start
        self.from_storage -= self.of_storage(start, stop)

    @property
    def hits(self) -> Hits:
        return Hits(
            device=self.total - self.from_host,
            host=self.from_host - self.from_storage,
            storage=self.from_storage,
        )

    def why(self, prefix_len: int, reusable: int, page_size: int, shortened: str | None) -> str:
        """
        Args:
            reusable: where the last whole page ends that may be reused.
            shortened: why the load has not brought all that the host has; None: there was no load.
        """
        if prefix_len == reusable:
            return (
                "all whole pages before the last token were cached"
                if reusable
                else "no whole page before the last token"
            )
        page = f"[{prefix_len}, {prefix_len + page_size})"
        if shortened is None:
            shortened = self.not_loaded
        if shortened:
            return f"page {page} did not come: {shortened}"
        if self.known > prefix_len:
            return f"page {page} was known, but not on the device"
        if self.not_fetched:
            return f"page {page} was not cached; storage: {self.not_fetched}"
        return f"page {page} was not cached"
