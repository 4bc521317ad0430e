"""Copies between device pools in CPU memory and host rows: numpy, one thread, few calls.

Owns: how bytes get from scattered tensors into rows and back at the speed of memory. Refuses to
know: element types (bytes are moved, so a NaN keeps its payload) and who asks.

A row is page first, the pools are layer first, and a job touches thousands of places. What decides
the speed, measured (`python -m benchmarks copies`):

* Few calls. numpy gives up the GIL for each, and a thread that computes in Python may keep it for 5
  ms before the next one can start. So one call moves whole pages over all layers: the tensors'
  layers are seen as one array of slices (`_Layers`), which an array of numbers indexes.
* One pass. Rows that stand in line are a strided array, and one assignment scatters it. The way
  back needs a temporary (numpy gathers into one), so it goes in blocks that stay in the L2 cache;
  slices of 32 KiB are worth a call each, which needs none.
* A core that is given up now and then (`give_way`): where cores are short the event loop waits for
  one, at the worst until a thread's time slice is over (3 ms on Linux). Threads that merely rank
  lower (`nice`) are left beside a busy model, where they get next to nothing.
* numpy rather than torch: `index_select(out=…)` and `index_copy_` take 1.4 to 2 times as long, and
  use threads of their own that spin for each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tiered_cache.jobs import give_way
from tiered_cache.transfer.copier import CopyJob, Direction
from tiered_cache.transfer.parts import Part, PartsCopier, rising_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from tiered_cache.pools.device import DevicePools
    from tiered_cache.pools.host import HostArena
    from tiered_cache.transfer.parts import Member
    from tiered_cache.types import PageIds

BLOCK_BYTES: Final = 256 << 10
"""What is gathered at a time. The temporary must stay in the L2 cache until it is written: blocks
of 8 MiB cost a quarter more."""

PIECE_BYTES: Final = 2 << 20
"""What is copied, at most, before others get the core: half a millisecond. Each piece may have to
wait for the GIL, too, so they are not smaller."""

DIRECT_BYTES: Final = 32 << 10
"""Slices of this length are stored one by one: a fifth faster, at half a microsecond each."""


class CpuCopier(PartsCopier["_GroupedPart"]):
    """A `Copier` between tensors in CPU memory and arenas.

    Args:
        pools: the device pools; the tensors may be the user's, with their pages apart.
        arenas: one per component, in the order of the components' dense indexes.

    Raises:
        ValueError: the pools are not in CPU memory, or an arena's rows are not laid out for them.
    """

    num_threads = 1
    staging_bytes = 0

    def __init__(self, pools: DevicePools, arenas: Sequence[HostArena]) -> None:
        if pools.device.type != "cpu":
            raise ValueError(f"the pools are on {pools.device}: this copier moves CPU memory")
        super().__init__(_GroupedPart(pools, arena) for arena in arenas)

    def copy(self, job: CopyJob) -> None:
        part = self._parts[job.component]
        part.check(job.device_ids, job.host_ids)
        move = _store if job.direction is Direction.STORE else _load
        groups = part.groups(job.layers)
        runs = list(rising_runs(job.host_ids))
        for group in groups:
            places = group.device.places(job.device_ids)
            num_moved, most = 0, group.rows_at_a_time
            for start, stop in _cut(runs, most):
                first = int(job.host_ids[start])
                rows = group.host[first : first + stop - start]
                move(group.device.slices, places[start:stop], rows)
                num_moved += stop - start
                if num_moved >= most:
                    num_moved = 0
                    give_way()
        job.issued.set()

    def close(self) -> None:
        self._parts = ()

    def __repr__(self) -> str:
        return f"<CpuCopier of {len(self._parts)} components>"


def _cut(runs: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """The same, none longer than so many rows."""
    for first, last in runs:
        for start in range(first, last, most):
            yield start, min(start + most, last)


Bytes = npt.NDArray[np.uint8]
Indexes = npt.NDArray[np.int64]


def _load(slices: Bytes, places: Indexes, rows: Bytes) -> None:
    # numpy asks whether the two overlap. Where the arena lies between the tensors it cannot tell,
    # and makes a temporary: slower, and as right.
    slices[places] = rows


def _store(slices: Bytes, places: Indexes, rows: Bytes) -> None:
    """One by one, or in blocks: of several rows, or of some slices of one."""
    num_rows, num_slices, slice_bytes = rows.shape
    if slice_bytes >= DIRECT_BYTES:
        for row, row_places in zip(rows, places.tolist(), strict=True):
            for target, place in zip(row, row_places, strict=True):
                target[:] = slices[place]
        return
    row_step = max(1, BLOCK_BYTES // (num_slices * slice_bytes))
    slice_step = num_slices if row_step > 1 else max(1, BLOCK_BYTES // slice_bytes)
    for row in range(0, num_rows, row_step):
        for first in range(0, num_slices, slice_step):
            block = np.s_[row : row + row_step, first : first + slice_step]
            rows[block] = slices[places[block]]


class _GroupedPart(Part):
    """A part, and for each choice of layers how to reach their slices."""

    def __init__(self, pools: DevicePools, arena: HostArena) -> None:
        super().__init__(pools, arena)
        # As many as there are ways to cut layers into jobs: for n layers about n·log n.
        self._groups: dict[tuple[int, ...] | None, list[_Group]] = {}
        self.groups(None)

    def groups(self, layers: tuple[int, ...] | None) -> list[_Group]:
        """All slices of these layers, in as few groups as can be."""
        found = self._groups.get(layers)
        if found is None:
            found = [_group(self.arena, members) for members in _regular(self.chosen(layers))]
            self._groups[layers] = found
        return found


@dataclass(frozen=True, slots=True)
class _Group:
    """Slices of one length, evenly spaced in the row; `host`: `[rows, slices, bytes]`, strided."""

    host: Bytes
    device: _Layers

    @property
    def rows_at_a_time(self) -> int:
        """As many as make a piece."""
        _, num_slices, slice_bytes = self.host.shape
        return int(max(1, PIECE_BYTES // (num_slices * slice_bytes)))


class _Layers:
    """The slices of several tensors as one array: `slices[i]` are the bytes at `base + i × unit`.

    The array spans everything between the tensors, most of which is somebody else's or nothing at
    all, and its entries overlap. Only entries that `places` gives may be used.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], slice_bytes: int) -> None:
        self._tensors = tensors  # keeps the memory
        starts = [tensor.data_ptr() for tensor in tensors]
        steps = [tensor.stride(0) * tensor.element_size() for tensor in tensors]
        base = min(starts)
        unit = math.gcd(*(start - base for start in starts), *steps) or 1
        last = max(
            start + step * (tensor.shape[0] - 1)
            for start, step, tensor in zip(starts, steps, tensors, strict=True)
        )
        self._first = np.array([(start - base) // unit for start in starts], np.int64)
        self._step = np.array([step // unit for step in steps], np.int64)
        self.slices = np.asarray(
            _Memory(base, shape=((last - base) // unit + 1, slice_bytes), strides=(unit, 1))
        )

    def places(self, pages: PageIds) -> Indexes:
        """Where these pages are in `slices`, for each tensor: `[pages, tensors]`."""
        places: Indexes = pages.astype(np.int64)[:, None] * self._step + self._first
        return places


class _Memory:
    """Tells numpy of bytes at an address."""

    def __init__(self, address: int, shape: tuple[int, int], strides: tuple[int, int]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }


def _regular(members: Sequence[Member]) -> list[list[Member]]:
    """Cut into lists of slices of one length with one distance between them in the row.

    Usually as many as there are lengths: every layer has the same pools.
    """
    by_length: dict[int, list[Member]] = {}
    for member in members:
        by_length.setdefault(member[0].num_bytes, []).append(member)
    lists: list[list[Member]] = []
    for same in by_length.values():
        current: list[Member] = []
        for member in same:
            if len(current) > 1 and (
                member[0].offset - current[-1][0].offset
                != current[1][0].offset - current[0][0].offset
            ):
                lists.append(current)
                current = []
            current.append(member)
        lists.append(current)
    return lists


def _group(arena: HostArena, members: Sequence[Member]) -> _Group:
    offset, num_bytes = members[0][0].offset, members[0][0].num_bytes
    step = members[1][0].offset - offset if len(members) > 1 else num_bytes
    host = np.lib.stride_tricks.as_strided(
        arena.rows[:, offset:],
        shape=(arena.num_pages, len(members), num_bytes),
        strides=(arena.layout.stride, step, 1),
    )
    return _Group(host, _Layers([tensor for _, tensor in members], num_bytes))
