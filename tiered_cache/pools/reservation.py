"""Ids taken for something that may fail: they go home unless they are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from tiered_cache.pools.allocator import PageAllocator
    from tiered_cache.types import PageIds


class Reservation:
    """Beat two of four: `with Reservation(allocator, n) as reservation: … reservation.keep()`.

    `ids` is None when the pool was short. Leaving the block without `keep` gives the ids back,
    whatever ended it.
    """

    __slots__ = ("_allocator", "_kept", "ids")

    def __init__(self, allocator: PageAllocator, num_pages: int) -> None:
        self._allocator = allocator
        self._kept = False
        self.ids: PageIds | None = allocator.allocate(num_pages)

    def keep(self) -> PageIds:
        """The ids belong to the caller now."""
        if self.ids is None:
            raise ValueError("nothing was reserved: the pool was short")
        self._kept = True
        return self.ids

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.ids is not None and not self._kept:
            self._allocator.free(self.ids)
