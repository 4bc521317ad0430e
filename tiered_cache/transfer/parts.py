"""What copiers join: a component's rows and its tensors, slice by slice.

Owns: the proof that an arena's rows are laid out for the pools, planning for a component, and the
range checks of a job. Refuses to know: how bytes move.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from tiered_cache.transfer.copier import check_ids, cut, layers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from tiered_cache.pools.device import DevicePools
    from tiered_cache.pools.host import HostArena
    from tiered_cache.pools.spec import RowSlice
    from tiered_cache.transfer.copier import CopyJob, Direction
    from tiered_cache.types import PageIds

Member = tuple["RowSlice", "torch.Tensor"]
"""A slice of the row, and the tensor of its pool and layer, `[pages, …]`."""


class Part:
    """One component on both sides.

    Raises:
        ValueError: the rows are laid out for other pools.
    """

    def __init__(self, pools: DevicePools, arena: HostArena) -> None:
        self.arena = arena
        self.members: tuple[Member, ...] = tuple(
            (piece, pools.pages(piece.pool, piece.layer)) for piece in arena.layout.slices
        )
        for piece, pages in self.members:
            page_bytes = pages[0].numel() * pages.element_size()
            if page_bytes != piece.num_bytes:
                raise ValueError(
                    f"pool {piece.pool!r}, layer {piece.layer}: a page has {page_bytes} bytes, "
                    f"the row has {piece.num_bytes} for it"
                )
        self.layers = layers_of(arena.layout)
        self.num_pages = int(self.members[0][1].shape[0])

    def chosen(self, layers: tuple[int, ...] | None) -> list[Member]:
        """The slices of these layers (None: all), in the row's order."""
        return [member for member in self.members if layers is None or member[0].layer in layers]

    def check(self, device_ids: PageIds, host_ids: PageIds) -> None:
        """Raises IntegrityError: see `check_ids`."""
        check_ids(device_ids, host_ids, self.num_pages, self.arena.num_pages)

    def plan(
        self,
        direction: Direction,
        component: int,
        device_ids: PageIds,
        host_ids: PageIds,
        *,
        by_layer: bool,
    ) -> list[CopyJob]:
        """See `Copier.plan`."""
        self.check(device_ids, host_ids)
        layout = self.arena.layout
        return cut(layout, direction, component, device_ids, host_ids, by_layer=by_layer)


P = TypeVar("P", bound=Part)


class PartsCopier(Generic[P]):
    """What every copier answers by asking the component's part; see `Copier`."""

    def __init__(self, parts: Iterable[P]) -> None:
        self._parts = tuple(parts)

    def layers(self, component: int) -> tuple[int, ...]:
        return self._parts[component].layers

    def plan(
        self,
        direction: Direction,
        component: int,
        device_ids: PageIds,
        host_ids: PageIds,
        *,
        by_layer: bool = False,
    ) -> list[CopyJob]:
        return self._parts[component].plan(
            direction, component, device_ids, host_ids, by_layer=by_layer
        )


def rising_runs(ids: PageIds) -> Iterator[tuple[int, int]]:
    """Positions `[start, stop)` of ids that follow each other."""
    breaks = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1
    return itertools.pairwise([0, *breaks.tolist(), len(ids)] if len(ids) else [])
