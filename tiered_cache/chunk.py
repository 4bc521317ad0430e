"""Tokens that a lease has handed out to compute in one run.

Owns: what a run is given of a lease, readable from the run's thread. Refuses to know: whether it
has been computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    import numpy.typing as npt

    from tiered_cache.lease import Lease
    from tiered_cache.types import PageIds


class Chunk:
    """Tokens `[start, stop)` of a lease, handed out to compute in one run; their pages are taken.

    While the chunk is being run, the state of `[0, start)` is in the pools at `slots(component, 0,
    start)` and the chunk's own goes to `slots(component, start, stop)`. Readable from the run's
    thread.
    """

    __slots__ = ("lease", "num_cuts", "start", "stop", "tokens")

    def __init__(self, lease: Lease, start: int, stop: int) -> None:
        self.lease = lease
        self.num_cuts = lease.num_cuts  # truncations that it has not missed
        self.start = start
        self.stop = stop
        self.tokens: npt.NDArray[np.int64] = lease.key.span(start, stop)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def lease_id(self) -> int:
        return self.lease.id

    @property
    def pages(self) -> Mapping[str, PageIds]:
        """Per component, the page table of `[0, stop)`: read-only int32, one id per page (−1:
        none)."""
        return self.lease.page_tables(self.stop)

    @property
    def state_slots(self) -> Mapping[str, int]:
        """Per component of states, the slot with the state at `start`, which becomes the one at
        `stop`; while the chunk is being run."""
        return self.lease.state_slots

    def slots(
        self, component: str = "full", start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Device slots of the tokens `[start, stop)` (default: up to the chunk's end), int64."""
        return self.lease.slots(component, start, self.stop if stop is None else stop)

    def __repr__(self) -> str:
        return f"<Chunk [{self.start}:{self.stop}) of lease {self.lease.id}>"


def find_chunks(args: Iterable[Any]) -> list[Chunk]:
    """Chunks among the arguments of a run, and two levels down in lists, tuples and dicts."""
    found: dict[Chunk, None] = {}
    level = list(args)
    for _ in range(3):
        below: list[Any] = []
        for arg in level:
            if isinstance(arg, Chunk):
                found[arg] = None
            elif isinstance(arg, (list, tuple)):
                below += arg
            elif isinstance(arg, dict):
                below += arg.values()
        level = below
    return list(found)
