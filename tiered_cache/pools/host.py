"""The host tier's memory: per component one arena of rows, `[num_pages, stride]` bytes.

Owns: the mapping, its views, and making it resident (and pinned) chunk by chunk. Refuses to know:
which rows are in use (the allocator), what moves through them, and on which thread it is touched.

A mapping of its own rather than a tensor: making it is O(1) however large it is, rows lie on memory
pages (direct file access asks for that), and its views as numpy, torch and bytes are one memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tiered_cache.errors import ClosedError

if TYPE_CHECKING:
    from tiered_cache.pools.spec import RowLayout, RowSlice

CHUNK_BYTES: Final = 256 << 20
"""What one call of `Chunk.touch` makes resident, about: 40 ms of a thread, 130 at worst."""

MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; Python has no name for it. As if each memory page were written; contents stay."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostArena:
    """The rows of one component.

    Made at once, but not resident: `chunks()` says what is left to touch. An arena that is not
    touched works too, and pays a page fault at every first use of a memory page.

    Args:
        layout: of the component's row.
        num_pages: rows that there are.
        pinned: register chunks with CUDA as they are touched, so that the device copies from them
            and to them by itself.

    Raises:
        MemoryError: the machine has not that much address space to give.
    """

    def __init__(self, layout: RowLayout, num_pages: int, *, pinned: bool = False) -> None:
        if num_pages < 1:
            raise ValueError(f"an arena needs at least one row, not {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        self.pinned = pinned
        self._registered: list[int] = []
        self._touched: list[int] = []
        self._rows: npt.NDArray[np.uint8] | None = _map(num_pages * layout.stride).reshape(
            num_pages, layout.stride
        )

    @property
    def num_bytes(self) -> int:
        """Of all rows, header room and padding included."""
        return self.num_pages * self.layout.stride

    @property
    def touched_bytes(self) -> int:
        """How much of `num_bytes` is resident, for progress."""
        return sum(self._touched)

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """`[num_pages, stride]`, writable. The mapping lives as long as a view of it.

        Raises:
            ClosedError: the arena is closed.
        """
        if self._rows is None:
            raise ClosedError("the arena is closed")
        return self._rows

    @property
    def tensor(self) -> torch.Tensor:
        """The same as a torch tensor."""
        # A tensor made in inference mode could be written there only, by whoever comes later.
        with torch.inference_mode(False):
            return torch.from_numpy(self.rows)

    def row(self, page: int) -> memoryview:
        """The bytes of one row, writable."""
        if not 0 <= page < self.num_pages:
            raise IndexError(f"row {page} is not in an arena of {self.num_pages}")
        return memoryview(self.rows[page])

    def state(self, piece: RowSlice, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """One pool's rows of one layer, `[num_pages, elements]`: a strided view of the arena, of
        elements of `dtype`."""
        return self.tensor[:, piece.offset : piece.offset + piece.num_bytes].view(dtype)

    @property
    def chunk_rows(self) -> int:
        """Rows in a chunk (fewer in the last). A device copy must stay within one chunk: each is
        registered by itself."""
        return max(1, CHUNK_BYTES // self.layout.stride)

    def chunks(self) -> list[Chunk]:
        """What to touch, in order: `[chunk.touch() for chunk in arena.chunks()]`, in a thread."""
        step = self.chunk_rows
        return [
            Chunk(self, range(start, min(start + step, self.num_pages)))
            for start in range(0, self.num_pages, step)
        ]

    def touch(self, chunk: range) -> None:
        """See `Chunk.touch`."""
        part = self.rows[chunk.start : chunk.stop]
        _make_resident(part)
        if self.pinned:
            address = part.ctypes.data
            torch.cuda.check_error(_cudart().cudaHostRegister(address, part.nbytes, 0))
            self._registered.append(address)
        self._touched.append(part.nbytes)

    def close(self) -> None:
        """Unpin, and let the memory go: now, or with the last view that somebody still has.

        A mapping cannot be taken away from under a view, so nobody reads what is not there. No copy
        of the device may be running, nor a touch. Idempotent.
        """
        while self._registered:
            torch.cuda.check_error(_cudart().cudaHostUnregister(self._registered.pop()))
        self._rows = None

    def __repr__(self) -> str:
        state = "closed" if self._rows is None else f"{self.touched_bytes:,} touched"
        return (
            f"<HostArena {self.num_pages} rows of {self.layout.stride:,} bytes, {state}"
            f"{', pinned' if self.pinned else ''}>"
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of an arena that become resident together."""

    arena: HostArena
    rows: range

    def touch(self) -> None:
        """Make the rows resident (and pin them). For a thread: takes 40 to 130 ms, without the GIL.

        Once per chunk; what the rows hold stays.

        Raises:
            MemoryError: there is no memory for them.
            RuntimeError: CUDA refuses to register them.
        """
        self.arena.touch(self.rows)


def _map(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeros, on a memory page of their own."""
    try:
        # Private: Python's default would make shared memory, which a container may limit apart.
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot map {num_bytes:,} bytes for the host tier: {error}") from error
    try:
        # Halves the time of touching (78 → 39 ms a chunk); a scattered copy gains 1 to 3 %.
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        pass  # a kernel without huge pages: nothing but time is lost
    return np.frombuffer(mapping, np.uint8)


def _make_resident(part: npt.NDArray[np.uint8]) -> None:
    # Through ctypes: `mmap.madvise` keeps the GIL, 100 ms and more for a chunk.
    if not _libc.madvise(part.ctypes.data, part.nbytes, MADV_POPULATE_WRITE):
        return
    code = ctypes.get_errno()
    # A kernel before 5.14 does not know how. Writing would do it, but a copy may have been there
    # first: the rows become resident as they are used (and, pinned, by the registration).
    if code != errno.EINVAL:
        raise MemoryError(f"cannot touch {part.nbytes:,} bytes: {errno.errorcode.get(code, code)}")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
