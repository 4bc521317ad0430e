"""Layer waits: reading the first layers of a prefix while the last are still on their way (§9.9).

Owns: how far each load of a lease has come, and the only part of a lease that other threads may
call. Refuses to know: pages, the tree, who is leasing.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final

from tiered_cache.errors import LoadFailed, StaleError, WrongThreadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tiered_cache.transfer.copier import CopyJob


class LayerProgress:
    """How far one load has come, layer by layer.

    Changed on the loop; read and waited for from any thread. The last layer arrives with the
    load's commit, so whoever has waited for all of them uses what is the tree's.
    """

    def __init__(self, layers: Sequence[int], jobs: Sequence[CopyJob]) -> None:
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._num_arrived = 0
        self._error: Exception | None = None
        self._condition = threading.Condition()
        self._turned = asyncio.Event()
        self._jobs = jobs

    def advance(self, num_layers: int) -> None:
        """So many layers have arrived, the last of all excepted."""
        if self._error is None:  # after a reset, the job that was running then still ends
            self._change(min(num_layers, len(self._place) - 1), None)

    def finish(self) -> None:
        """The load is committed."""
        self._change(len(self._place), None)

    def fail(self, error: Exception) -> None:
        """It will never be."""
        self._change(self._num_arrived, error)
        for job in self._jobs:
            job.issued.set()  # whoever waits to put something behind it looks at the failure

    def _change(self, num_arrived: int, error: Exception | None) -> None:
        with self._condition:
            self._num_arrived, self._error = num_arrived, error
            self._condition.notify_all()
        self._turned.set()
        self._turned = asyncio.Event()

    def _has(self, layer: int) -> bool:
        self.check()
        return self._place.get(layer, -1) < self._num_arrived

    def check(self) -> None:
        """Raise what it has failed with."""
        if self._error is not None:
            raise self._error

    def wait(self, layer: int) -> None:
        """In a worker thread, until the layer has arrived."""
        with self._condition:
            self._condition.wait_for(lambda: self._has(layer))

    async def arrive(self, layer: int) -> None:
        """On the loop, until the layer has arrived."""
        while not self._has(layer):
            await self._turned.wait()

    def enqueue(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for the layer's jobs, without waiting for their bytes."""
        for job in self._jobs:
            if job.layers is None or layer in job.layers:
                job.enqueue(stream)
        with self._condition:
            self._has(layer)


class LayerWaits:
    """The layer waits of one lease. Thread-safe."""

    __slots__ = ("_loads", "_thread")

    def __init__(self, loads: Sequence[LayerProgress], loop_thread: int) -> None:
        self._loads = loads
        self._thread = loop_thread

    def wait(self, layer: int) -> None:
        """Until the state of a layer of the prefix is on the device. For worker threads: inside a
        `run` function, before it reads the layer.

        Raises:
            WrongThreadError: on the loop's thread, which must not block: `await
                lease.wait_layer(layer)` there.
            LoadFailed, StaleError: it will not come.
        """
        if self._loads and threading.get_ident() == self._thread:
            raise WrongThreadError(
                "layers.wait blocks: on the loop use `await lease.wait_layer(layer)`"
            )
        for load in self._loads:
            load.wait(layer)
        self._check()

    def enqueue(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Let what is put on a CUDA stream from now on wait for the layer (`Stream.wait_event`).

        From a worker thread; waits until the copies are issued, not until they have ended.

        Raises:
            As `wait`.
        """
        if self._loads and threading.get_ident() == self._thread:
            raise WrongThreadError("layers.enqueue may block: call it from a worker thread")
        for load in self._loads:
            load.enqueue(layer, stream)
        self._check()

    async def arrive(self, layer: int) -> None:
        """`Lease.wait_layer`."""
        for load in self._loads:
            await load.arrive(layer)
        self._check()

    def _check(self) -> None:
        """While one was waited for, another that had arrived may have failed, and its pages be
        somebody else's."""
        for load in self._loads:
            load.check()


NO_LOADS: Final = LayerWaits((), 0)


def load_failed(error: BaseException | None) -> LoadFailed:
    """What waits raise when a load has not brought all of it."""
    return LoadFailed(
        f"a load from the host did not arrive ({error or 'cancelled'}): ask for the next chunk, "
        "which goes on from what is there"
    )


def stale_load() -> StaleError:
    return StaleError("a reset() came before the load had ended: lease the tokens again")
