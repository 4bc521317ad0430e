"""Pins: a hold on a prefix without a request, for a while (semantics §6.6).

Owns: which pins there are, when they end, and that they never take more than their share of a tier.
Refuses to know: what is worth pinning.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tiered_cache.errors import CapacityError
from tiered_cache.tree.node import BASE
from tiered_cache.types import Boundary, Holding, MatchPrefixParams, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered_cache.accounts import PageAccounts, TierPages
    from tiered_cache.keys import RadixKey
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.tree.radix import RadixTree


class Pin(Holding):
    """Keeps a prefix where it is until it is closed, its time is over, the cache is reset or
    closed: `with cache.pin(tokens, ttl=60) as pin`.

    A pin that nobody keeps lasts as long.

    Attributes:
        tier: what it keeps the prefix on.
        tokens: how much of the prefix was cached when it was made; that much it holds.
        since: on the loop's clock.
    """

    __slots__ = (
        "__weakref__",
        "_owner",
        "num_pages",
        "receipt",
        "since",
        "tier",
        "timer",
        "tokens",
    )

    def __init__(self, owner: Pins, tier: Tier, receipt: Receipt, num_pages: int) -> None:
        self._owner = owner
        self.tier = tier
        self.receipt: Receipt | None = receipt
        self.tokens = receipt.depth
        self.num_pages = num_pages
        self.since = asyncio.get_running_loop().time()
        self.timer: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        """Whether it holds nothing any more."""
        return self.receipt is None

    def close(self) -> None:
        """Let go. Any number of times."""
        self._owner.close(self)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<Pin of {self.tokens} tokens on the {self.tier.value}{state}>"


class Pins:
    """All pins of a cache.

    Args:
        tiers: the pages of each tier that there is.
        shares: of each, how much pins may hold, from 0 to 1.
        may_clean_up: whether there is something to let go of here; raises in another thread.
    """

    def __init__(
        self,
        tree: RadixTree,
        device: PageAccounts,
        tiers: dict[Tier, TierPages],
        shares: dict[Tier, float],
        changed: Callable[[], None],
        may_clean_up: Callable[[], bool],
    ) -> None:
        self._tree = tree
        self._device = device
        self._tiers = tiers
        self._shares = shares
        self._changed = changed
        self._may_clean_up = may_clean_up
        self._loop = asyncio.get_running_loop()
        self._open: dict[Pin, None] = {}

    def make(self, key: RadixKey, tier: Tier, ttl: float | None) -> Pin:
        """Hold the longest prefix of `key` that is cached now, for `ttl` seconds (None: until it is
        closed).

        Raises:
            ValueError: there is no such tier. CapacityError: more than pins may hold, or, on the
                device, than is neither held nor promised.
        """
        if tier not in self._tiers:
            raise ValueError(f"there is no {tier.value} tier to pin to")
        match = self._tree.match_prefix(MatchPrefixParams(key))
        boundary = match.device_boundary
        if tier is Tier.HOST:
            boundary = Boundary(match.best_node, match.best_length)
        num_pages = boundary.depth // self._tree.page_size
        self._check_share(tier, num_pages)
        if tier is Tier.DEVICE:
            needs = self._tree.would_need(boundary)
            for index, pages in enumerate(needs):
                if pages > self._device.spare(index):
                    raise self._no_room(tier, pages, self._device.spare(index), "is not promised")
            receipt = self._tree.inc_lock_ref(boundary)
        else:
            receipt = self._tree.inc_host_lock_ref(boundary)
        pin = Pin(self, tier, receipt, num_pages)
        self._open[pin] = None
        if ttl is not None:
            pin.timer = self._loop.call_later(ttl, self._end, pin)
        return pin

    def _check_share(self, tier: Tier, num_pages: int) -> None:
        capacity = self._tiers[tier].allocators[BASE].capacity
        most = int(capacity * self._shares[tier])
        held = sum(pin.num_pages for pin in self._open if pin.tier is tier)
        if held + num_pages > most:
            raise self._no_room(tier, num_pages, most - held, f"pins may hold ({most} in all)")

    def _no_room(self, tier: Tier, needed: int, there: int, what: str) -> CapacityError:
        return CapacityError(
            f"a pin on the {tier.value} would hold {needed} pages, {there} are left of what {what}",
            component=self._tree.components[BASE].id,
            needed=needed,
            free=there,
            evictable=0,
            held_by=tuple(repr(pin) for pin in self._open if pin.tier is tier),
        )

    def close(self, pin: Pin) -> None:
        """See `Pin.close`."""
        if self._may_clean_up():
            self._end(pin)

    def _end(self, pin: Pin) -> None:
        receipt, pin.receipt = pin.receipt, None
        self._open.pop(pin, None)
        if pin.timer is not None:
            pin.timer.cancel()
            pin.timer = None
        if receipt is not None:
            self._tree.let_go(receipt)
            self._changed()

    def close_all(self) -> None:
        """The cache ends, or was reset."""
        for pin in self:
            self._end(pin)

    def __iter__(self) -> Iterator[Pin]:
        return iter(tuple(self._open))

    def __len__(self) -> int:
        return len(self._open)
