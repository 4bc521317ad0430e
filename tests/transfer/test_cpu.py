"""The CPU copier moves exactly the named pages' bytes, whatever they mean, and nothing else."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gil import turns_of_others
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
from tiered_cache.pools.host import HostArena
from tiered_cache.pools.spec import HEADER_BYTES, PoolSpec, row_layout
from tiered_cache.strategies.plain import FULL
from tiered_cache.transfer import cpu
from tiered_cache.transfer.copier import JOB_BYTES, Direction
from tiered_cache.transfer.cpu import CpuCopier
from tiered_cache.types import ComponentId, PageIds


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [MHA, UNEQUAL, MLA, INDEXED], ids=str)
def test_only_the_named_pages_change(
    shape: dict[str, object], dtype: str, direction: Direction, by_layer: bool
) -> None:
    """Random pages and rows of a model, noise everywhere: header room, padding, gaps and all other
    pages are as they were; the named ones are equal to the byte, NaNs among them."""
    world = World.of(CpuCopier, DevicePools(specs_of(shape, dtype), {FULL: NUM_PAGES}))
    device_ids, host_ids = ids(7, 2, 3, 10, 0), ids(4, 5, 6, 1, 12)
    expected = world.expected(direction, 0, device_ids.tolist(), host_ids.tolist())
    world.move(direction, device_ids, host_ids, by_layer=by_layer)
    world.check(expected)


@pytest.mark.parametrize("fill", [0xFF, 0x7F])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_nan_payloads_survive_the_round_trip(dtype: str, fill: int) -> None:
    """State that was never computed is carried as it is."""
    world = World.of(CpuCopier, DevicePools(specs_of(MHA, dtype), {FULL: NUM_PAGES}))
    world.device("k", 0)[3] = fill
    world.device("k", 0)[3, ::3] = 0x80
    wanted = world.device("k", 0)[3].clone()
    world.move(STORE, ids(3), ids(5))
    world.device("k", 0)[3] = 0
    world.move(LOAD, ids(3), ids(5))
    assert torch.equal(world.device("k", 0)[3], wanted)


@pytest.mark.parametrize("direction", Direction)
def test_a_job_of_some_layers_leaves_the_others(direction: Direction) -> None:
    """Also when the layers are not neighbours."""
    world = World.of(CpuCopier, DevicePools(specs_of(INDEXED, "bfloat16"), {FULL: NUM_PAGES}))
    [job] = world.copier.plan(direction, 0, ids(1, 9), ids(3, 2))
    for layers in ((0,), (1, 2), (0, 3)):
        job.layers = layers
        world.poison()
        expected = world.expected(direction, 0, [1, 9], [3, 2], layers)
        world.copier.copy(job)
        world.check(expected)


def test_components_have_arenas_and_ids_of_their_own() -> None:
    """A job of one component touches nothing of another."""
    window = ComponentId("swa")
    specs = (
        PoolSpec("k", FULL, (0, 2), (3,), "bfloat16", 4),
        PoolSpec("s", window, (1, 3), (5,), "float32", 2),
    )
    world = World.of(CpuCopier, DevicePools(specs, {FULL: 4, window: 6}))
    assert [world.copier.layers(at) for at in (0, 1)] == [(0, 2), (1, 3)]
    expected = world.expected(STORE, 1, [5, 0], [2, 9])
    world.move(STORE, ids(5, 0), ids(2, 9), component=1)
    world.check(expected)
    with pytest.raises(IntegrityError, match="device"):
        world.move(STORE, ids(5), ids(0), component=0)


def test_tensors_of_the_user_may_keep_their_pages_apart() -> None:
    """One tensor for keys and values, as some engines have it; only its own half is read."""
    [spec_k, spec_v] = (PoolSpec(name, FULL, (0, 1), (2, 3), "bfloat16", 4) for name in "kv")
    both = [torch.zeros(NUM_PAGES, 2, 4, 2, 3, dtype=torch.bfloat16) for _ in range(2)]
    pools = DevicePools(
        (spec_k, spec_v), tensors={"k": [t[:, 0] for t in both], "v": [t[:, 1] for t in both]}
    )
    world = World.of(CpuCopier, pools)
    for direction in Direction:
        expected = world.expected(direction, 0, [9, 1], [0, 3])
        world.move(direction, ids(9, 1), ids(0, 3))
        world.check(expected)


def test_an_arena_may_lie_between_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are seen as one array that spans whatever is between them."""
    memory = np.zeros(1 << 20, np.uint8)
    ends = [torch.from_numpy(memory[start:][: NUM_PAGES * 100]) for start in (0, (1 << 20) - 4096)]
    spec = PoolSpec("k", FULL, (0, 1), (25,), "uint8", 4)
    pools = DevicePools((spec,), tensors={"k": [end.view(-1, 25) for end in ends]})
    monkeypatch.setattr(host, "_map", lambda num_bytes: memory[8192 : 8192 + num_bytes])
    monkeypatch.setattr(HostArena, "chunks", lambda _: [])
    world = World.of(CpuCopier, pools)
    for direction in Direction:
        expected = world.expected(direction, 0, [9, 1, 4], [3, 4, 0])
        world.move(direction, ids(9, 1, 4), ids(3, 4, 0))
        world.check(expected)


@pytest.mark.parametrize("row_shape", [(1,), (3,), (7, 5)])
def test_odd_sizes_and_a_single_page(row_shape: tuple[int, ...]) -> None:
    """Nothing needs to be a multiple of anything."""
    spec = PoolSpec("odd", FULL, (0, 1, 4), row_shape, "uint8", 1)
    memory = torch.zeros(1000, dtype=torch.uint8)
    size = int(np.prod(row_shape))
    tensors = [memory[at : at + size].view(1, *row_shape) for at in (0, 101, 307)]
    world = World.of(CpuCopier, DevicePools((spec,), tensors={"odd": tensors}), num_rows=1)
    for direction in Direction:
        expected = world.expected(direction, 0, [0], [0])
        world.move(direction, ids(0), ids(0))
        world.check(expected)


def test_pools_made_in_inference_mode_are_written_from_any_thread() -> None:
    """Torch refuses that outside of the mode, which is a thread's own; bytes have no mode."""
    specs = specs_of(MHA, "bfloat16")
    with torch.inference_mode():
        tensors = {
            spec.name: [
                torch.zeros(NUM_PAGES * 4, *spec.row_shape, dtype=torch_dtype(spec.dtype))
                for _ in spec.layers
            ]
            for spec in specs
        }
        pools = DevicePools(specs, tensors=tensors)
        world = World.of(CpuCopier, pools)
        expected = world.expected(LOAD, 0, [3], [5])
    thread = threading.Thread(target=world.move, args=(LOAD, ids(3), ids(5)))
    thread.start()
    thread.join()
    world.check(expected)


@pytest.mark.parametrize(
    ("device_ids", "host_ids"),
    [
        (ids(1, -1), ids(0, 1)),
        (ids(1, NUM_PAGES), ids(0, 1)),
        (ids(1, 2), ids(0, -1)),
        (ids(1, 2), ids(0, NUM_ROWS)),
        (ids(1, 2), ids(0)),
        (ids(1), ids(0, 1)),
        (ids(1, 2).astype(np.int64), ids(0, 1)),
    ],
)
@pytest.mark.parametrize("direction", Direction)
def test_what_does_not_exist_is_refused_before_anything_is_written(
    direction: Direction, device_ids: PageIds, host_ids: PageIds
) -> None:
    """By the plan, and again by the copy: an id may have been spoilt in between."""
    world = World.of(CpuCopier, DevicePools(specs_of(MHA, "bfloat16"), {FULL: NUM_PAGES}))
    expected = world.expected(direction, 0, [], [])
    with pytest.raises(IntegrityError, match=r"device|host"):
        world.copier.plan(direction, 0, device_ids, host_ids)
    [job] = world.copier.plan(direction, 0, ids(1, 2), ids(0, 1))
    job.device_ids, job.host_ids = device_ids, host_ids
    with pytest.raises(IntegrityError, match=r"device|host"):
        world.copier.copy(job)
    assert not job.issued.is_set()
    world.check(expected)


@settings(deadline=None)
@given(
    shape=st.sampled_from([MHA, UNEQUAL, MLA, INDEXED]),
    dtype=st.sampled_from(["bfloat16", "float32", "float8_e5m2"]),
    page_size=st.integers(1, 5),
    direction=st.sampled_from(Direction),
    by_layer=st.booleans(),
    pairs=st.lists(
        st.tuples(st.integers(0, NUM_PAGES - 1), st.integers(0, NUM_ROWS - 1)),
        unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
    ),
)
def test_any_pages_of_any_model(
    shape: dict[str, object],
    dtype: str,
    page_size: int,
    direction: Direction,
    by_layer: bool,
    pairs: list[tuple[int, int]],
) -> None:
    """Whatever the order of the ids, in runs or not: the oracle's slice by slice copy agrees."""
    world = World.of(CpuCopier, DevicePools(specs_of(shape, dtype, page_size), {FULL: NUM_PAGES}))
    device_ids, host_ids = ids(*(p for p, _ in pairs)), ids(*(r for _, r in pairs))
    expected = world.expected(direction, 0, device_ids.tolist(), host_ids.tolist())
    world.move(direction, device_ids, host_ids, by_layer=by_layer)
    world.check(expected)


@pytest.mark.parametrize(
    "spec",
    [
        PoolSpec("k", FULL, (0, 1, 2, 3), (8, 128), "bfloat16", 64),
        PoolSpec("k", FULL, tuple(range(60)), (3, 64), "bfloat16", 16),
        PoolSpec("k", FULL, (0, 1), (3, 64), "bfloat16", 16),
    ],
    ids=["128 KiB slices", "6 KiB slices, pages of two blocks", "6 KiB slices, 21 pages a block"],
)
def test_a_round_trip_of_many_jobs(spec: PoolSpec) -> None:
    """More than three jobs' worth, in every way to cut it into calls: every byte comes back."""
    num_pages = 3 * JOB_BYTES // spec.page_bytes + 1
    world = World.of(CpuCopier, DevicePools((spec,), {FULL: num_pages}), num_rows=num_pages)
    chance = np.random.default_rng(3)
    device_ids, host_ids = (chance.permutation(num_pages).astype(np.int32) for _ in range(2))
    host_ids[: num_pages // 2].sort()  # some in line
    wanted = [world.device("k", layer).clone() for layer in spec.layers]
    jobs = world.copier.plan(STORE, 0, device_ids, host_ids)
    assert len(jobs) == 4
    for job in jobs:
        world.copier.copy(job)
    for layer in spec.layers:
        world.device("k", layer)[:] = 0xFF
    for piece in world.arenas[0].layout.slices:
        row = world.arenas[0].rows[host_ids[0], piece.offset : piece.offset + piece.num_bytes]
        wanted_row = wanted[spec.layers.index(piece.layer)][device_ids[0]]
        np.testing.assert_array_equal(row, wanted_row.numpy())
    world.move(LOAD, device_ids, host_ids, by_layer=True)
    for layer in spec.layers:
        assert torch.equal(world.device("k", layer), wanted[layer])


def test_a_job_says_when_its_bytes_are_there() -> None:
    """`issued`, for a reader in another thread; on the CPU there is no event for a stream."""
    world = World.of(CpuCopier, DevicePools(specs_of(MHA, "bfloat16"), {FULL: NUM_PAGES}))
    [job] = world.copier.plan(LOAD, 0, ids(1), ids(2))
    assert not job.issued.is_set()
    world.copier.copy(job)
    assert job.issued.is_set()
    assert job.event is None
    job.enqueue(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", Direction)
def test_python_goes_on_while_bytes_move(direction: Direction) -> None:
    """The GIL is given up: a thread that counts advances during copies of a job's size."""
    spec = PoolSpec("k", FULL, tuple(range(60)), (48, 64), "uint8", 2)  # 6 KiB slices
    num_pages = JOB_BYTES // spec.page_bytes
    world = World.of(CpuCopier, DevicePools((spec,), {FULL: num_pages}), num_rows=num_pages)
    [job] = world.copier.plan(
        direction,
        0,
        np.random.default_rng(1).permutation(num_pages).astype(np.int32),
        np.random.default_rng(2).permutation(num_pages).astype(np.int32),
    )

    def copy() -> None:
        for _ in range(20):
            world.copier.copy(job)

    assert turns_of_others(copy) > 20


@pytest.mark.parametrize("in_line", [False, True])
@pytest.mark.parametrize("direction", Direction)
def test_the_core_is_given_up_between_pieces(
    direction: Direction, in_line: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it waits for one piece and not for a job; and not at every small row."""
    spec = PoolSpec("k", FULL, (0, 1, 2, 3), (16, 64), "uint8", 16)  # pages of 64 KiB
    num_pages = JOB_BYTES // spec.page_bytes
    world = World.of(CpuCopier, DevicePools((spec,), {FULL: num_pages}), num_rows=num_pages)
    chance = np.random.default_rng(1)
    device_ids, host_ids = (chance.permutation(num_pages).astype(np.int32) for _ in range(2))
    if in_line:
        host_ids.sort()
    given_up = []
    monkeypatch.setattr(cpu, "give_way", lambda: given_up.append(None))
    [job] = world.copier.plan(direction, 0, device_ids, host_ids)
    world.copier.copy(job)
    assert len(given_up) == JOB_BYTES // cpu.PIECE_BYTES


def test_an_arena_must_be_laid_out_for_the_pools() -> None:
    """A mistake of whoever wires them is seen at once."""
    pools = DevicePools(specs_of(MHA, "bfloat16"), {FULL: 2})
    arena = HostArena(row_layout(specs_of(MHA, "float32")), 2)
    with pytest.raises(ValueError, match=r"pool 'k', layer 0: a page has 128 bytes"):
        CpuCopier(pools, [arena])
    with pytest.raises(ValueError, match="on meta"):
        CpuCopier(DevicePools(specs_of(MHA, "bfloat16"), {FULL: 2}, device="meta"), [])


def test_a_closed_copier_keeps_no_memory() -> None:
    """And closing twice is closing."""
    world = World.of(CpuCopier, DevicePools(specs_of(MHA, "bfloat16"), {FULL: 2}))
    assert world.arenas[0].layout.slices[0].offset == HEADER_BYTES
    assert repr(world.copier) == "<CpuCopier of 1 components>"
    world.copier.close()
    world.copier.close()
    assert repr(world.copier) == "<CpuCopier of 0 components>"
