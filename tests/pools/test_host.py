"""An arena's rows: one memory in every view, resident chunk by chunk, gone with its last view."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gil import turns_of_others
from tiered_cache.errors import ClosedError
from tiered_cache.pools import host
from tiered_cache.pools.host import HostArena
from tiered_cache.pools.spec import PoolSpec, RowLayout, row_layout
from tiered_cache.types import ComponentId

FULL = ComponentId("full")
K = PoolSpec("k", FULL, (0, 2), (3, 5), "bfloat16", rows_per_page=4)
V = PoolSpec("v", FULL, (0, 2), (7,), "float32", rows_per_page=4)
LAYOUT = row_layout((K, V))


def test_rows_are_one_memory_in_every_view() -> None:
    """numpy, torch, bytes, and each pool's and layer's own elements."""
    arena = HostArena(LAYOUT, 5)
    assert arena.rows.shape == (5, 4096)
    assert arena.num_bytes == 5 * 4096
    arena.row(3)[512:514] = b"\x80\x3f"  # 1.0 in bfloat16
    [k0, v0, k2, v2] = LAYOUT.slices
    assert arena.state(k0, torch.bfloat16).shape == (5, 60)
    assert arena.state(k0, torch.bfloat16)[3, 0] == 1.0
    arena.state(v2, torch.float32)[4, 27] = -2.0
    assert arena.rows[4, v2.offset + 27 * 4 :][:4].view(np.float32).item() == -2.0
    assert arena.state(v0).dtype == torch.uint8
    arena.tensor[1] = 9
    assert bytes(arena.row(1)) == b"\x09" * 4096
    assert not arena.state(k2)[2].any()


def test_rows_begin_on_memory_pages_and_are_zero() -> None:
    """Direct file access asks for the first; nothing of another process shows."""
    arena = HostArena(LAYOUT, 3)
    assert arena.rows.ctypes.data % mmap.PAGESIZE == 0
    assert arena.rows.flags.c_contiguous
    assert not arena.rows.any()
    assert arena.rows.flags.writeable


def test_views_made_in_inference_mode_can_be_written_outside() -> None:
    """Whoever opens the cache decides nothing about who writes into it later."""
    with torch.inference_mode():
        tensor = HostArena(LAYOUT, 3).tensor
    assert not tensor.is_inference()


@pytest.mark.parametrize("page", [-1, 5])
def test_a_row_that_is_not_there_is_refused(page: int) -> None:
    """−1 means "none" elsewhere and would be the last row here."""
    with pytest.raises(IndexError, match=f"row {page} is not in an arena of 5"):
        HostArena(LAYOUT, 5).row(page)
    with pytest.raises(ValueError, match="at least one row"):
        HostArena(LAYOUT, 0)


def test_making_an_arena_takes_no_memory_and_no_time() -> None:
    """Gigabytes of rows: only what is touched is taken."""
    start_s = time.perf_counter()
    try:
        arena = HostArena(LAYOUT, (4 << 30) // LAYOUT.stride)
    except MemoryError:
        pytest.skip("this machine does not promise more memory than it has")
    arena.row(12345)[:4] = b"here"
    assert time.perf_counter() - start_s < 1
    assert repr(arena) == "<HostArena 1048576 rows of 4,096 bytes, 0 touched>"


def test_more_than_there_is_address_space_is_a_memory_error() -> None:
    """Not an error of the operating system that nobody expects."""
    with pytest.raises(MemoryError, match="cannot map 288,230,376,151,711,744 bytes"):
        HostArena(LAYOUT, 1 << 46)


def resident_bytes(address: int, num_bytes: int) -> int:
    """By the kernel's own account (mincore)."""
    pages = num_bytes // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), found) == 0, (
        ctypes.get_errno()
    )
    return sum(flag & 1 for flag in found) * mmap.PAGESIZE


class RefusingLibc:
    """A kernel before Linux 5.14, say."""

    def __init__(self, code: int) -> None:
        self._code = code

    def madvise(self, *_: Any) -> int:
        ctypes.set_errno(self._code)
        return -1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="mincore and MADV are Linux's")
def test_chunks_become_resident_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, each whole rows, with the progress to be seen; rows in use keep their bytes."""
    monkeypatch.setattr(host, "CHUNK_BYTES", 1 << 20)
    arena = HostArena(LAYOUT, 600)
    chunks = arena.chunks()
    assert [chunk.rows for chunk in chunks] == [range(256), range(256, 512), range(512, 600)]
    arena.rows[300] = 7
    seen = []
    for chunk in chunks:
        chunk.touch()
        seen.append(arena.touched_bytes)
        part = arena.rows[chunk.rows.start : chunk.rows.stop]
        assert resident_bytes(part.ctypes.data, part.nbytes) == part.nbytes
    assert seen == [256 * 4096, 512 * 4096, arena.num_bytes]
    assert (arena.rows[300] == 7).all()
    assert repr(arena) == f"<HostArena 600 rows of 4,096 bytes, {arena.num_bytes:,} touched>"


def test_a_kernel_that_cannot_touch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may have been there first: writing would be somebody's wrong bytes."""
    monkeypatch.setattr(host, "_libc", RefusingLibc(errno.EINVAL))
    arena = HostArena(LAYOUT, 600)
    arena.rows[:] = 7
    for chunk in arena.chunks():
        chunk.touch()
    assert (arena.rows == 7).all()


def test_a_row_larger_than_a_chunk_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent state of a large model, say."""
    monkeypatch.setattr(host, "CHUNK_BYTES", 4096)
    arena = HostArena(RowLayout(LAYOUT.slices, stride=8192), 3)
    assert [chunk.rows for chunk in arena.chunks()] == [range(1), range(1, 2), range(2, 3)]


def test_no_memory_for_a_chunk_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, so that the opener can say which tier is too large."""
    monkeypatch.setattr(host, "_libc", RefusingLibc(errno.ENOMEM))
    arena = HostArena(LAYOUT, 2)
    with pytest.raises(MemoryError, match="cannot touch 8,192 bytes: ENOMEM"):
        arena.chunks()[0].touch()
    assert arena.touched_bytes == 0


def test_touching_does_not_stop_python() -> None:
    """It takes 100 ms and more: the GIL is given up, or the loop would stand still."""
    arena = HostArena(LAYOUT, (64 << 20) // LAYOUT.stride)
    [chunk] = arena.chunks()
    assert turns_of_others(chunk.touch) > 100


def test_a_closed_arena_gives_no_views_and_keeps_those_that_are_out() -> None:
    """The mapping goes with its last view: nobody reads what is not there."""
    arena = HostArena(LAYOUT, 4)
    view, row, tensor = arena.rows[1], arena.row(2), arena.tensor
    row[:2] = b"ab"
    mapping = _mapping_of(arena.rows)
    arena.close()
    arena.close()
    assert bytes(row[:2]) == b"ab"
    view[:] = 5
    assert int(tensor[1, 0]) == 5
    for use in (lambda: arena.rows, lambda: arena.row(0), lambda: arena.tensor):
        with pytest.raises(ClosedError):
            use()
    assert repr(arena) == "<HostArena 4 rows of 4,096 bytes, closed>"
    with pytest.raises(BufferError):
        mapping.close()  # still seen by somebody
    del view, row, tensor
    gc.collect()
    mapping.close()  # by nobody


def _mapping_of(array: np.ndarray) -> mmap.mmap:
    base: Any = array
    while not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else base.base
    return base


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_touched_chunks_are_pinned_until_the_arena_is_closed() -> None:
    """CUDA copies from registered memory by itself."""
    arena = HostArena(LAYOUT, 4, pinned=True)
    assert not arena.tensor.is_pinned()
    for chunk in arena.chunks():
        chunk.touch()
    tensor = arena.tensor
    assert tensor.is_pinned()
    arena.close()
    assert not tensor.is_pinned()


class FakeRuntime:
    """Registers ranges as CUDA would."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.code = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.registered[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return self.code


def test_each_chunk_is_registered_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that go to CUDA, without one."""
    runtime = FakeRuntime()
    monkeypatch.setattr(host, "_cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(host, "CHUNK_BYTES", 3 * 4096)
    arena = HostArena(LAYOUT, 7, pinned=True)
    for chunk in arena.chunks():
        chunk.touch()
    address = arena.rows.ctypes.data
    assert runtime.registered == {
        address: 3 * 4096,
        address + 3 * 4096: 3 * 4096,
        address + 6 * 4096: 4096,
    }
    assert arena.chunk_rows == 3
    arena.close()
    assert runtime.registered == {}
