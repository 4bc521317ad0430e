"""The CUDA copier moves exactly the named pages' bytes, through bounded staging.

Each test runs on a GPU, where there is one, and on an imitation: the same torch calls on CPU
tensors, with streams and events that only keep count. The imitation proves what is copied where,
not that CUDA does it in order.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.transfer.world import (
    INDEXED,
    LOAD,
    MHA,
    MLA,
    NUM_PAGES,
    NUM_ROWS,
    STORE,
    UNEQUAL,
    World,
    ids,
    specs_of,
)
from tiered_cache.errors import IntegrityError
from tiered_cache.pools import host
from tiered_cache.pools.device import DevicePools, torch_dtype
from tiered_cache.pools.spec import HEADER_BYTES, PoolSpec, RowSlice
from tiered_cache.strategies.plain import FULL
from tiered_cache.transfer import cuda
from tiered_cache.transfer.copier import JOB_BYTES, Direction
from tiered_cache.transfer.cuda import NUM_LANES, STAGING_BYTES, CudaCopier

if TYPE_CHECKING:
    from tiered_cache.types import PageIds

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class FakeStream:
    """Does everything at once."""

    synchronized = 0

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None:
        FakeStream.synchronized += 1


class FakeEvent:
    """Recorded when the work before it has been done."""

    def __init__(self, blocking: bool = False) -> None:
        assert blocking, "a waiting thread must not spin"
        self.calls: list[str] = []

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


@pytest.fixture(
    params=["imitation", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])], autouse=True
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "imitation":
        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
        FakeStream.synchronized = 0
        return "cpu"
    return "cuda"


def pools_on(device: str, *args: Any, **options: Any) -> DevicePools:
    pools = DevicePools(*args, device=device, **options)
    pools.device = torch.device("cuda")
    return pools


def world_on(device: str, *args: Any, num_rows: int = NUM_ROWS, **options: Any) -> World:
    pools = pools_on(device, *args, **options)
    return World.of(CudaCopier, pools, num_rows, pinned=device == "cuda")


def after(world: World, direction: Direction, device_ids: list[int], host_ids: list[int]) -> Any:
    """Whole pages are stored as whole rows, with zeros in header room and padding."""
    expected = world.expected(direction, 0, device_ids, host_ids)
    return expected if direction is LOAD else world.zero_padding(expected, 0, host_ids)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [MHA, UNEQUAL, MLA, INDEXED], ids=str)
def test_only_the_named_pages_change(
    device: str, shape: dict[str, object], dtype: str, direction: Direction
) -> None:
    """Random pages and rows, some in line, noise everywhere: NaNs and all, byte for byte."""
    world = world_on(device, specs_of(shape, dtype), {FULL: NUM_PAGES})
    expected = after(world, direction, [7, 2, 3, 10, 0], [4, 5, 6, 1, 12])
    world.move(direction, ids(7, 2, 3, 10, 0), ids(4, 5, 6, 1, 12))
    world.check(expected)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 3), (0, 1, 3)])
def test_a_job_of_some_layers_leaves_the_others(
    device: str, direction: Direction, layers: tuple[int, ...]
) -> None:
    """The row's other layers, its header room and its end are not even carried over the bus."""
    world = world_on(device, specs_of(INDEXED, "bfloat16"), {FULL: NUM_PAGES})
    [job] = world.copier.plan(direction, 0, ids(1, 9), ids(3, 2))
    job.layers = layers
    expected = world.expected(direction, 0, [1, 9], [3, 2], layers)
    world.copier.copy(job)
    if direction is STORE:  # padding between slices that were carried may be zero now
        between = np.ones(world.arenas[0].layout.stride, bool)
        between[:HEADER_BYTES] = False
        for piece in world.arenas[0].layout.slices:
            between[piece.offset : piece.offset + piece.num_bytes] = False
        expected[0][0][:, between] = world.arenas[0].rows[:, between]
    world.check(expected)


@pytest.mark.parametrize("direction", Direction)
def test_a_job_goes_through_staging_in_parts(
    device: str, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the staging is, and however the rows are registered."""
    monkeypatch.setattr(cuda, "STAGING_BYTES", 3 * 4096)
    monkeypatch.setattr(host, "CHUNK_BYTES", 2 * 4096)
    world = world_on(device, specs_of(MHA, "bfloat16"), {FULL: NUM_PAGES})
    device_ids, host_ids = list(range(9, -1, -1)), [0, 1, 2, 3, 4, 5, 6, 9, 8, 7]
    expected = after(world, direction, device_ids, host_ids)
    world.move(direction, ids(*device_ids), ids(*host_ids))
    world.check(expected)
    assert world.copier.staging_bytes == NUM_LANES * 3 * 4096


def test_bytes_cross_the_bus_in_runs_of_rows_cut_at_chunks(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy for rows in line; none across two registrations."""
    monkeypatch.setattr(host, "CHUNK_BYTES", 4 * 4096)
    world = world_on(device, specs_of(MHA, "bfloat16"), {FULL: NUM_PAGES})
    part = world.copier._parts[0]  # type: ignore[attr-defined]
    assert list(part._runs(ids(1, 2, 3, 4, 5, 9, 8))) == [(0, 3), (3, 5), (5, 6), (6, 7)]
    staged = torch.zeros(7, 4096, dtype=torch.uint8, device=device)
    pieces = [piece for piece, _ in part.members]
    moves = list(part._transfers(ids(1, 2, 3, 4, 5, 9, 8), staged, pieces))
    assert [len(on_host) for on_host, _ in moves] == [3, 2, 1, 1]
    assert all(a.is_contiguous() and b.is_contiguous() for a, b in moves)
    assert all(a.shape == b.shape for a, b in moves)


def test_slices_move_as_the_widest_integers_that_fit(device: str) -> None:
    """Kernels move a word per thread."""
    widths = {
        shape: cuda._words(
            torch.zeros(4, 1, shape, dtype=torch.uint8, device=device), RowSlice(0, "x", 512, shape)
        ).dtype
        for shape in (64, 12, 6, 7)
    }
    assert list(widths.values()) == [torch.int64, torch.int32, torch.int16, torch.uint8]
    apart = torch.zeros(100, dtype=torch.uint8, device=device)
    odd = torch.as_strided(apart, (3, 1, 8), (18, 8, 1), 2)
    assert cuda._words(odd, RowSlice(0, "x", 512, 8)).dtype == torch.int16


def test_a_round_trip_of_many_jobs(device: str) -> None:
    """More than two lanes' worth, from as many threads as there are lanes."""
    spec = PoolSpec("k", FULL, (0, 1, 2, 3), (8, 128), "bfloat16", 64)
    num_pages = 3 * JOB_BYTES // spec.page_bytes + 1
    world = world_on(device, (spec,), {FULL: num_pages}, num_rows=num_pages)
    chance = np.random.default_rng(3)
    device_ids, host_ids = (chance.permutation(num_pages).astype(np.int32) for _ in range(2))
    wanted = [world.device("k", layer).clone() for layer in spec.layers]
    in_threads(world, STORE, device_ids, host_ids)
    for layer in spec.layers:
        world.device("k", layer).fill_(0xFF)
    in_threads(world, LOAD, device_ids, host_ids, by_layer=True)
    for layer in spec.layers:
        assert torch.equal(world.device("k", layer), wanted[layer])


def in_threads(
    world: World, direction: Direction, device_ids: PageIds, host_ids: PageIds, **options: Any
) -> None:
    jobs = world.copier.plan(direction, 0, device_ids, host_ids, **options)
    assert len(jobs) > NUM_LANES

    def work(mine: list[Any]) -> None:
        for job in mine:
            world.copier.copy(job)

    threads = [threading.Thread(target=work, args=(jobs[at::3],)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(job.issued.is_set() for job in jobs)


@pytest.mark.parametrize("fill", [0xFF, 0x7F])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e5m2"])
def test_nan_payloads_survive_the_round_trip(device: str, dtype: str, fill: int) -> None:
    """State that was never computed is carried as it is."""
    world = world_on(device, specs_of(MHA, dtype), {FULL: NUM_PAGES})
    world.device("k", 0)[3] = fill
    wanted = world.device("k", 0)[3].clone()
    world.move(STORE, ids(3), ids(5))
    world.device("k", 0)[3] = 0
    world.move(LOAD, ids(3), ids(5))
    assert torch.equal(world.device("k", 0)[3], wanted)


def test_tensors_of_the_user_may_keep_their_pages_apart(device: str) -> None:
    """One tensor for keys and values, as some engines have it; only its own half is touched."""
    specs = tuple(PoolSpec(name, FULL, (0, 1), (2, 3), "bfloat16", 4) for name in "kv")
    both = [torch.zeros(NUM_PAGES, 2, 4, 2, 3, dtype=torch.bfloat16, device=device) for _ in "01"]
    tensors = {"k": [t[:, 0] for t in both], "v": [t[:, 1] for t in both]}
    world = world_on(device, specs, tensors=tensors)
    for direction in Direction:
        expected = after(world, direction, [9, 1], [0, 3])
        world.move(direction, ids(9, 1), ids(0, 3))
        world.check(expected)


def test_pools_made_in_inference_mode_are_written_from_any_thread(device: str) -> None:
    """The copier enters the mode, which is a thread's own."""
    specs = specs_of(MHA, "bfloat16")
    with torch.inference_mode():
        tensors = {
            spec.name: [
                torch.zeros(
                    NUM_PAGES * 4, *spec.row_shape, dtype=torch_dtype(spec.dtype), device=device
                )
                for _ in spec.layers
            ]
            for spec in specs
        }
    world = world_on(device, specs, tensors=tensors)
    expected = world.expected(LOAD, 0, [3], [5])
    thread = threading.Thread(target=world.move, args=(LOAD, ids(3), ids(5)))
    thread.start()
    thread.join()
    world.check(expected)


def test_what_does_not_exist_is_refused_before_anything_is_written(device: str) -> None:
    """By the plan, and again by the copy: a kernel would fail later, and take the context along."""
    world = world_on(device, specs_of(MHA, "bfloat16"), {FULL: NUM_PAGES})
    expected = world.expected(LOAD, 0, [], [])
    [job] = world.copier.plan(LOAD, 0, ids(1, 2), ids(0, 1))
    for wrong in (ids(1, -1), ids(1, NUM_PAGES), ids(1)):
        with pytest.raises(IntegrityError):
            world.copier.plan(LOAD, 0, wrong, ids(0, 1))
        job.device_ids = wrong
        with pytest.raises(IntegrityError):
            world.copier.copy(job)
    assert not job.issued.is_set()
    world.check(expected)


def test_a_job_that_fails_is_quiet_and_was_never_issued(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been put on the stream ends first, and the lane serves the next job."""
    world = world_on(device, specs_of(MHA, "bfloat16"), {FULL: NUM_PAGES})
    for _ in range(NUM_LANES + 1):
        [job] = world.copier.plan(LOAD, 0, ids(1, 2), ids(0, 1))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "index_copy_", _fail)
            with pytest.raises(RuntimeError, match="no kernel"):
                world.copier.copy(job)
        assert not job.issued.is_set()
        assert job.event is None
    if device == "cpu":
        assert FakeStream.synchronized == NUM_LANES + 1
    expected = world.expected(LOAD, 0, [1, 2], [0, 1])
    world.copier.copy(job)
    world.check(expected)


def _fail(*_: Any) -> None:
    raise RuntimeError("no kernel")


def test_a_reader_may_wait_for_the_event_instead_of_the_bytes(device: str) -> None:
    """The event is there before `issued` says so, and the copy has awaited it when it returns."""
    world = world_on(device, specs_of(MHA, "bfloat16"), {FULL: NUM_PAGES})
    [job] = world.copier.plan(LOAD, 0, ids(1), ids(2))
    world.copier.copy(job)
    assert job.issued.is_set()
    event: Any = job.event
    if device == "cpu":
        assert event.calls == ["record", "synchronize"]
    else:
        assert event.query()


def test_another_stream_reads_a_layer_as_soon_as_it_is_there(device: str) -> None:
    """`enqueue` holds the reader's stream, not its thread, until the layer's bytes have come."""
    if device == "cpu":
        pytest.skip("the imitation has no streams to wait on")
    spec = PoolSpec("k", FULL, tuple(range(16)), (8, 128), "bfloat16", 64)
    num_pages = 64
    world = world_on(device, (spec,), {FULL: num_pages}, num_rows=num_pages)
    device_ids = np.random.default_rng(1).permutation(num_pages).astype(np.int32)
    host_ids = np.arange(num_pages, dtype=np.int32)
    expected = world.expected(LOAD, 0, device_ids.tolist(), host_ids.tolist())
    jobs = world.copier.plan(LOAD, 0, device_ids, host_ids, by_layer=True)
    thread = threading.Thread(target=lambda: [world.copier.copy(job) for job in jobs])
    reader = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    seen: dict[int, torch.Tensor] = {}
    thread.start()
    with torch.cuda.stream(reader):
        for layer in spec.layers:
            for job in jobs:
                if job.layers is None or layer in job.layers:
                    job.enqueue(reader)
            seen[layer] = world.device("k", layer).clone()
    reader.synchronize()
    thread.join()
    for layer, copy in seen.items():
        np.testing.assert_array_equal(copy.cpu().numpy(), expected[1]["k", layer])


def test_staging_is_bounded_and_goes_with_the_copier(device: str) -> None:
    """Two lanes, however many components and pages; a row always fits."""
    world = world_on(device, specs_of(MHA, "bfloat16"), {FULL: NUM_PAGES})
    assert world.copier.num_threads == NUM_LANES
    assert world.copier.staging_bytes == NUM_LANES * STAGING_BYTES
    assert world.copier.layers(0) == (0, 1, 2)
    assert "16,777,216 bytes of staging" in repr(world.copier)
    world.copier.close()
    world.copier.close()
    assert world.copier.staging_bytes == 0
    large = PoolSpec("s", FULL, (0,), (STAGING_BYTES,), "uint8", 1)
    world = world_on(device, (large,), {FULL: 1}, num_rows=1)
    assert world.copier.staging_bytes == NUM_LANES * world.arenas[0].layout.stride


def test_pools_in_cpu_memory_are_for_the_other_copier() -> None:
    """Said at once, not by the first copy."""
    with pytest.raises(ValueError, match="on cpu"):
        CudaCopier(DevicePools(specs_of(MHA, "bfloat16"), {FULL: 2}), [])
