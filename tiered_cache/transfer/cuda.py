"""Copies between device pools in GPU memory and pinned host rows: streams, staging, one kernel per
slice.

Owns: the streams and the staging buffers. Refuses to know: element types (bytes are moved, as the
widest integers that fit) and who asks.

A job of whole pages crosses the bus as whole rows, one copy for each run of rows that stand in
line, into (or out of) a staging buffer on the device; there, one kernel per slice moves it to the
pages of its layer's tensor. Rows are large and in line, and slices are neither: thousands of small
copies over the bus would be bound by their number.

Torch's primitives, each chosen because it makes no temporary, which would be device memory that
nobody counts:

* `copy_(non_blocking=True)` between contiguous bytes of one type is one `cudaMemcpyAsync`. (Of a
  strided host view torch would make a contiguous copy first.)
* `index_copy_` into a preallocated view scatters, and `index_select(out=…)` gathers into one; both
  take strided tensors. Assignment by `tensor[ids]` allocates its result, or goes through
  `index_put_`. (With `torch.use_deterministic_algorithms` torch does that for `index_copy_` too.)
* `torch.cuda.Event.synchronize` waits without the GIL; `Stream.wait_event` lets a reader's stream
  wait for a job that is still on its way.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tiered_cache.transfer.copier import CopyJob, Direction
from tiered_cache.transfer.parts import Part, PartsCopier, rising_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiered_cache.pools.device import DevicePools
    from tiered_cache.pools.host import HostArena
    from tiered_cache.pools.spec import RowSlice
    from tiered_cache.types import PageIds

NUM_LANES: Final = 2
"""While the kernels of one job run, and its thread wakes up, the bytes of the next one cross."""

STAGING_BYTES: Final = 8 << 20
"""Staging of a lane, unless a single row is larger. A job that does not fit goes in parts."""


class CudaCopier(PartsCopier["_StagedPart"]):
    """A `Copier` between tensors on one GPU and arenas, which should be pinned.

    From and to rows that are not pinned (yet) it works too, but slowly: CUDA copies them by way of
    a buffer of its own.

    A `STORE` of whole pages zeroes header room and padding, because whole rows cross the bus: so a
    header does not outlive the state that it spoke of.

    What must be ordered before a job (the kernel that wrote the pages to store, the last reader of
    the pages to load into) must have ended on the device before `copy` is called: the copier's
    streams wait for nobody else's.

    Args:
        pools: the device pools; the tensors may be the user's, with their pages apart.
        arenas: one per component, in the order of the components' dense indexes.

    Raises:
        ValueError: the pools are not on a GPU, or an arena's rows are not laid out for them.
    """

    num_threads = NUM_LANES

    def __init__(self, pools: DevicePools, arenas: Sequence[HostArena]) -> None:
        if pools.device.type != "cuda":
            raise ValueError(f"the pools are on {pools.device}: this copier moves GPU memory")
        super().__init__(_StagedPart(pools, arena) for arena in arenas)
        self._device = self._parts[0].members[0][1].device
        row_bytes = max(part.arena.layout.stride for part in self._parts)
        num_bytes = max(STAGING_BYTES, row_bytes)
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        with torch.inference_mode(False), torch.cuda.device(self._device):
            # The tensors may have been filled a moment ago, on this thread's stream.
            made = torch.cuda.current_stream()
            for _ in range(NUM_LANES):
                lane = _Lane(
                    torch.cuda.Stream(),  # type: ignore[no-untyped-call]
                    torch.zeros(num_bytes, dtype=torch.uint8, device=self._device),
                )
                lane.stream.wait_stream(made)
                self._lanes.put(lane)
        self.staging_bytes = NUM_LANES * num_bytes

    def copy(self, job: CopyJob) -> None:
        part = self._parts[job.component]
        part.check(job.device_ids, job.host_ids)
        lane = self._lanes.get()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(lane.stream):
                # Blocking: without it CUDA spins on a core until the event is there.
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                try:
                    # The mode is a thread's own, and tensors made in it are written only there.
                    with torch.inference_mode():
                        part.issue(job, lane.staging)
                    event.record()
                    job.event = event
                    job.issued.set()
                    event.synchronize()
                except BaseException:
                    lane.stream.synchronize()  # nobody touches the buffers any more
                    raise
        finally:
            self._lanes.put(lane)

    def close(self) -> None:
        self._parts = ()
        self._lanes = queue.SimpleQueue()
        self.staging_bytes = 0

    def __repr__(self) -> str:
        return (
            f"<CudaCopier of {len(self._parts)} components on {self._device}, "
            f"{self.staging_bytes:,} bytes of staging>"
        )


@dataclass(frozen=True, slots=True)
class _Lane:
    """What one job at a time has to itself."""

    stream: torch.cuda.Stream
    staging: torch.Tensor


class _StagedPart(Part):
    """A part, with views of its tensors and rows as the copies take them."""

    def __init__(self, pools: DevicePools, arena: HostArena) -> None:
        super().__init__(pools, arena)
        self._rows = arena.tensor
        self._states = {
            (piece.pool, piece.layer): _words(pages, piece) for piece, pages in self.members
        }

    def issue(self, job: CopyJob, staging: torch.Tensor) -> None:
        """Put all of a job on the current stream."""
        stride = self.arena.layout.stride
        step = len(staging) // stride
        rows = staging[: step * stride].view(step, stride)
        pieces = [piece for piece, _ in self.chosen(job.layers)]
        # One small copy for all parts of the job. From memory that is not pinned it has been read
        # when the call returns, so nobody needs to keep it.
        pages = torch.from_numpy(job.device_ids.astype(np.int64)).to(staging.device)
        for start in range(0, job.num_pages, step):
            # The stream keeps the order: a part is gone from staging before the next one enters.
            ids = job.host_ids[start : start + step]
            here, staged = pages[start : start + step], rows[: len(ids)]
            if job.direction is Direction.LOAD:
                for on_host, on_device in self._transfers(ids, staged, pieces):
                    on_device.copy_(on_host, non_blocking=True)
                for state, place in self._places(staged, pieces):
                    state.index_copy_(0, here, place)
            else:
                staged.zero_()
                for state, place in self._places(staged, pieces):
                    torch.index_select(state, 0, here, out=place)
                for on_host, on_device in self._transfers(ids, staged, pieces):
                    on_host.copy_(on_device, non_blocking=True)

    def _transfers(
        self, ids: PageIds, staged: torch.Tensor, pieces: Sequence[RowSlice]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What crosses the bus: contiguous bytes of the arena, and where they are in staging.

        Whole rows for whole pages; for some layers, the bytes from the first to the last of layers
        that stand in line.
        """
        if len(pieces) == len(self.members):
            for start, stop in self._runs(ids):
                first = int(ids[start])
                yield self._rows[first : first + stop - start], staged[start:stop]
            return
        spans = self._spans(pieces)
        for at, row in enumerate(ids.tolist()):
            for begin, end in spans:
                yield self._rows[row, begin:end], staged[at, begin:end]

    def _runs(self, ids: PageIds) -> Iterator[tuple[int, int]]:
        """Rows in line, cut where chunks meet: each chunk is registered with CUDA by itself."""
        step = self.arena.chunk_rows
        for start, stop in rising_runs(ids):
            while start < stop:
                row = int(ids[start])
                end = min(stop, start + step - row % step)
                yield start, end
                start = end

    def _spans(self, pieces: Sequence[RowSlice]) -> list[tuple[int, int]]:
        """The bytes `[begin, end)` of a row that hold these slices, and nothing of others."""
        chosen = set(pieces)
        spans: list[tuple[int, int]] = []
        in_line = False
        for piece, _ in self.members:
            if piece in chosen:
                begin = spans.pop()[0] if in_line else piece.offset
                spans.append((begin, piece.offset + piece.num_bytes))
            in_line = piece in chosen
        return spans

    def _places(
        self, staged: torch.Tensor, pieces: Sequence[RowSlice]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each slice's tensor `[pages, words]`, and its place in staged rows, `[rows, words]`."""
        for piece in pieces:
            state = self._states[piece.pool, piece.layer]
            place = staged[:, piece.offset : piece.offset + piece.num_bytes]
            yield state, place.view(state.dtype)


WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _words(pages: torch.Tensor, piece: RowSlice) -> torch.Tensor:
    """A tensor's pages as rows of the widest integers that it can be seen as: `[pages, words]`."""
    flat = pages.flatten(1).view(torch.uint8)
    distances = (piece.num_bytes, flat.storage_offset(), flat.stride(0))
    widest = next(
        dtype for dtype in WORDS if not any(distance % dtype.itemsize for distance in distances)
    )
    return flat.view(widest)
