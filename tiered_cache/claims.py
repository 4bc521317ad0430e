"""Runs under way, as others see them: tokens that need not be computed twice (semantics §11.3).

A claim stands from a run's submission until its lease commits, or the run has ended without one. A
lease whose next page is claimed waits for that instead of computing it; a chunk that was merely
handed out claims nothing, so a scheduler that steps its leases in turn cannot lock itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tiered_cache.keys import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiered_cache.keys import RadixKey

GRACE_TURNS: Final = 3
"""Turns of the loop between a run's end and the moment when others stop waiting for its commit:
enough for whoever awaited the run, directly or through `wait_for` or `gather`, to commit."""


class Claim:
    """A run over the whole pages `[start, stop)` of a lease's tokens."""

    __slots__ = ("ended", "key", "lease_id", "released", "start", "stop")

    def __init__(self, lease_id: int, key: RadixKey, start: int, stop: int) -> None:
        self.lease_id = lease_id
        self.key = key
        self.start = start
        self.stop = stop
        self.ended = False
        self.released = asyncio.Event()


class Claims:
    """All claims of a cache. There are as many as runs, so they are looked through one by one."""

    __slots__ = ("_claims", "_page_size")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._claims: list[Claim] = []

    def make(self, lease_id: int, key: RadixKey, start: int, stop: int) -> Claim:
        """A run over tokens `[start, stop)` was submitted: it claims the pages that it
        completes."""
        size = self._page_size
        claim = Claim(lease_id, key, start - start % size, stop - stop % size)
        self._claims.append(claim)
        return claim

    def over(self, lease_id: int, key: RadixKey, start: int) -> Claim | None:
        """Somebody else's claim on the page that the token `start` of `key` is in."""
        if not self._claims:
            return None
        start -= start % self._page_size
        if start + self._page_size > len(key) - 1:
            return None  # the last token is always computed, so this page would not be reused
        at = start * TOKEN_BYTES
        page = key.data[at : at + self._page_size * TOKEN_BYTES]
        for claim in self._claims:
            if claim.lease_id == lease_id or not claim.start <= start < claim.stop:
                continue
            if (
                claim.key.namespace == key.namespace
                and claim.key.data.startswith(page, at)
                and claim.key.data.startswith(memoryview(key.data)[:at])
            ):
                return claim
        return None

    def end(self, claims: Iterable[Claim]) -> None:
        """Their run has ended. They stand a few turns longer, for a commit to come first."""
        for claim in claims:
            claim.ended = True
            self._release_later(claim, GRACE_TURNS)

    def settle(self, lease_id: int) -> None:
        """What a lease's ended runs claimed is there to be matched, or never will be."""
        if self._claims:
            for claim in [other for other in self._claims if other.lease_id == lease_id]:
                if claim.ended:
                    self._release(claim)

    def release_all(self) -> None:
        for claim in tuple(self._claims):
            self._release(claim)

    def _release_later(self, claim: Claim, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._release_later, claim, turns - 1)
        else:
            self._release(claim)

    def _release(self, claim: Claim) -> None:
        if not claim.released.is_set():
            self._claims.remove(claim)
            claim.released.set()
