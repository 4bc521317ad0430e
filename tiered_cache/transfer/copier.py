"""The contract of a copier, which moves pages between device pools and host rows, and its jobs.

Owns: what a job names, how a transfer is cut into jobs, and what a job must name to be legal.
Refuses to know: why pages move, who holds them, on which loop or thread it is decided (the
controller), and how bytes get from here to there (`cpu`, `cuda`).

Components go by their dense index; layers by the model's numbers, of which a component has some.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from tiered_cache.errors import IntegrityError

if TYPE_CHECKING:
    import torch

    from tiered_cache.pools.spec import RowLayout
    from tiered_cache.types import PageIds

JOB_BYTES: Final = 8 << 20
"""What one job moves at most, unless a single page (by layer: a single slice of one) is larger.

A cancelled transfer waits for the running job, and a load for the store in front of it: about a
millisecond at the speed of memory.
"""


class Direction(Enum):
    """Which way the bytes go."""

    STORE = "store"
    """Device → host."""
    LOAD = "load"
    """Host → device."""


@dataclass(slots=True, eq=False)
class CopyJob:
    """Page `device_ids[i]` and row `host_ids[i]` of one component, one way, for every `i`.

    `layers`: None for all layers of the component. `num_bytes`: state moved. The arrays are views
    of the planner's caller's: they must not change before the job has ended.

    A reader that need not wait for the bytes (a kernel on another stream) calls `enqueue`. `issued`
    is set by `Copier.copy` once all of the job has been handed to the device, and `event`, on CUDA,
    before that; on the CPU there is no event, and `issued` means that the bytes are there.
    A job that failed, or was cancelled in the queue, is never issued: whoever gives it up notes
    the failure first, then sets `issued` itself to let the readers go, and they look at the note.
    """

    direction: Direction
    component: int
    device_ids: PageIds
    host_ids: PageIds
    layers: tuple[int, ...] | None
    num_bytes: int
    issued: threading.Event = field(default_factory=threading.Event)
    event: torch.cuda.Event | None = None

    @property
    def num_pages(self) -> int:
        return len(self.device_ids)

    def enqueue(self, stream: torch.cuda.Stream) -> None:
        """Let what is put on `stream` from now on wait for this job (`Stream.wait_event`).

        Waits in the calling thread until the job is issued, not until its bytes have arrived. Call
        it from a worker thread: the loop must not wait.
        """
        self.issued.wait()
        if self.event is not None:
            stream.wait_event(self.event)

    def __repr__(self) -> str:
        layers = "" if self.layers is None else f", layers {self.layers}"
        return (
            f"<CopyJob {self.direction.value} of {self.num_pages} pages of component "
            f"{self.component}{layers}, {self.num_bytes:,} bytes>"
        )


class Copier(Protocol):
    """Moves pages between the device pools and the host arenas that it was made for.

    `plan` and `layers` are for the loop and cost what they return; `copy` is for a copy thread.
    """

    @property
    def num_threads(self) -> int:
        """How many jobs it can run at a time (threads of the copy executor): 1 on the CPU, where a
        second would compete for the same memory. With more, jobs may end out of order.
        """

    @property
    def staging_bytes(self) -> int:
        """Device memory that it holds for itself; 0 on the CPU."""

    def layers(self, component: int) -> tuple[int, ...]:
        """The model's layers that the component has, in the order in which they are loaded."""

    def plan(
        self,
        direction: Direction,
        component: int,
        device_ids: PageIds,
        host_ids: PageIds,
        *,
        by_layer: bool = False,
    ) -> list[CopyJob]:
        """Cut a transfer into jobs of at most `JOB_BYTES`; none for no pages.

        Without `by_layer` every job moves whole pages (`layers` is None), and the jobs are in page
        order: when the first n have ended, their pages are the first of the transfer. With it they
        are in layer order, a layer's jobs (several when its pages do not fit into one; shared with
        the layers beside it while all of them fit) in page order.

        Raises:
            IntegrityError: ids and rows differ in number, or one of them is out of range.
        """

    def copy(self, job: CopyJob) -> None:
        """Move the bytes, in a copy thread. Blocks, without the GIL while bytes move.

        When it returns, the bytes are where they belong for everybody; when it returns or raises,
        nobody touches the buffers any more. Pages, rows and layers that are not named keep their
        bytes; header room and padding of rows that are stored keep theirs, or become zeros.

        Raises:
            IntegrityError: as `plan`; nothing has been written.
        """

    def close(self) -> None:
        """Let go of staging and streams. No job may be running. Idempotent."""


def check_ids(device_ids: PageIds, host_ids: PageIds, num_pages: int, num_rows: int) -> None:
    """Refuse a transfer that would touch what does not exist.

    Raises:
        IntegrityError: saying which id, of which side.
    """
    if len(device_ids) != len(host_ids):
        raise IntegrityError(f"{len(device_ids)} device pages for {len(host_ids)} host rows")
    for ids, what, capacity in ((device_ids, "device", num_pages), (host_ids, "host", num_rows)):
        if ids.dtype != np.int32 or ids.ndim != 1:
            raise IntegrityError(f"{what} ids are {ids.dtype} of shape {ids.shape}, not int32")
        # Seen as unsigned, a negative id is a huge one: one pass for both ends.
        if len(ids) and int(ids.view(np.uint32).max()) >= capacity:
            wrong = ids[(ids < 0) | (ids >= capacity)]
            raise IntegrityError(f"{what} ids {wrong[:8].tolist()} are not in [0, {capacity})")


def cut(
    layout: RowLayout,
    direction: Direction,
    component: int,
    device_ids: PageIds,
    host_ids: PageIds,
    *,
    by_layer: bool = False,
) -> list[CopyJob]:
    """The jobs that `Copier.plan` describes, for checked ids."""
    groups = _layer_groups(layout, len(device_ids)) if by_layer else [None]
    jobs = []
    for group in groups:
        page_bytes = layout.payload_bytes if group is None else _bytes_of(layout, group)
        step = max(1, JOB_BYTES // page_bytes)
        for start in range(0, len(device_ids), step):
            ids, rows = device_ids[start : start + step], host_ids[start : start + step]
            num_bytes = page_bytes * len(ids)
            jobs.append(CopyJob(direction, component, ids, rows, group, num_bytes))
    return jobs


def layers_of(layout: RowLayout) -> tuple[int, ...]:
    """The layers that a row holds, in its order."""
    return tuple(dict.fromkeys(piece.layer for piece in layout.slices))


def _layer_groups(layout: RowLayout, num_pages: int) -> list[tuple[int, ...]]:
    """Consecutive layers whose pages fit into one job together; a layer that does not fit stands
    alone."""
    groups: list[tuple[int, ...]] = []
    room = 0
    for layer in layers_of(layout):
        needed = _bytes_of(layout, (layer,)) * num_pages
        if groups and needed <= room:
            groups[-1] += (layer,)
        else:
            groups.append((layer,))
            room = JOB_BYTES
        room -= needed
    return groups


def _bytes_of(layout: RowLayout, layers: tuple[int, ...]) -> int:
    return sum(piece.num_bytes for piece in layout.slices if piece.layer in layers)
