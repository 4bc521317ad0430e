"""A transfer is cut into jobs that are short, in order, and together exactly the transfer."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_cache.errors import IntegrityError
from tiered_cache.pools.spec import PoolSpec, RowLayout, row_layout
from tiered_cache.transfer.copier import JOB_BYTES, CopyJob, Direction, check_ids, cut, layers_of
from tiered_cache.types import ComponentId, PageIds

FULL = ComponentId("full")
MIB = 1 << 20


def layout_of(num_layers: int, slice_bytes: int, first: int = 0) -> RowLayout:
    layers = tuple(range(first, first + num_layers))
    return row_layout([PoolSpec("k", FULL, layers, (slice_bytes,), "uint8", 1)])


def count(num_pages: int) -> PageIds:
    return np.arange(num_pages, dtype=np.int32)


def jobs_of(layout: RowLayout, num_pages: int, *, by_layer: bool = False) -> list[CopyJob]:
    pages = count(num_pages)
    return cut(layout, Direction.LOAD, 3, pages, pages[::-1].copy(), by_layer=by_layer)


def test_whole_pages_in_page_order() -> None:
    """As many as fit into 8 MiB, from the first id on."""
    jobs = jobs_of(layout_of(4, MIB // 2), 10)
    assert [job.device_ids.tolist() for job in jobs] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [job.host_ids.tolist() for job in jobs] == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
    assert [job.num_bytes for job in jobs] == [8 * MIB, 8 * MIB, 4 * MIB]
    assert all(job.layers is None and job.component == 3 for job in jobs)
    assert repr(jobs[2]) == "<CopyJob load of 2 pages of component 3, 4,194,304 bytes>"


def test_a_page_that_is_larger_is_a_job() -> None:
    """A page is not split: what has arrived is counted in pages."""
    assert [job.num_pages for job in jobs_of(layout_of(10, MIB), 3)] == [1, 1, 1]


def test_by_layer_small_loads_are_one_job() -> None:
    """There is nothing to read early in 8 MiB."""
    [job] = jobs_of(layout_of(4, 1024, first=7), 5, by_layer=True)
    assert job.layers == (7, 8, 9, 10)
    assert repr(job).startswith("<CopyJob load of 5 pages of component 3, layers (7, 8, 9, 10),")


def test_by_layer_layers_share_a_job_while_they_fit() -> None:
    """Few jobs, and the first layers first."""
    jobs = jobs_of(layout_of(5, MIB), 4, by_layer=True)  # 4 MiB a layer
    assert [job.layers for job in jobs] == [(0, 1), (2, 3), (4,)]
    assert all(job.num_pages == 4 for job in jobs)


def test_by_layer_a_layer_that_does_not_fit_is_cut_in_pages() -> None:
    """The first layer's pages, then the second's; a layer beside a large one is not lost."""
    jobs = jobs_of(layout_of(2, 3 * MIB), 3, by_layer=True)  # 9 MiB a layer
    assert [(job.layers, job.device_ids.tolist()) for job in jobs] == [
        ((0,), [0, 1]),
        ((0,), [2]),
        ((1,), [0, 1]),
        ((1,), [2]),
    ]


@given(
    lengths=st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=8),
    sparse=st.sets(st.integers(0, 7)),
    num_pages=st.integers(0, 40),
    by_layer=st.booleans(),
)
def test_jobs_are_the_transfer_exactly(
    lengths: list[int], sparse: set[int], num_pages: int, by_layer: bool
) -> None:
    """Every slice of every page once, in the promised order, none too large that could be less."""
    specs = [
        PoolSpec(f"pool {layer}", FULL, (layer,), (length,), "uint8", 1)
        for layer, length in enumerate(lengths)
    ]
    extra = tuple(layer for layer in sorted(sparse) if layer < len(lengths))
    if extra:
        specs.append(PoolSpec("extra", FULL, extra, (1000,), "uint8", 1))
    layout = row_layout(specs)
    jobs = jobs_of(layout, num_pages, by_layer=by_layer)
    moved = [
        (layer, page)
        for job in jobs
        for layer in (layers_of(layout) if job.layers is None else job.layers)
        for page in job.device_ids.tolist()
    ]
    assert sorted(moved) == [
        (layer, page) for layer in range(len(lengths)) for page in range(num_pages)
    ]
    assert sum(job.num_bytes for job in jobs) == layout.payload_bytes * num_pages
    for job in jobs:
        alone = job.num_pages == 1 and (job.layers is None or len(job.layers) == 1)
        assert job.num_bytes <= JOB_BYTES or alone
    if by_layer:
        firsts = [job.layers[0] for job in jobs if job.layers is not None]
        assert firsts == sorted(firsts)
        assert len(firsts) == len(jobs)
    else:
        assert [p for job in jobs for p in job.device_ids.tolist()] == list(range(num_pages))


@pytest.mark.parametrize(
    ("device_ids", "host_ids", "message"),
    [
        ([0, -1], [0, 1], r"device ids \[-1\] are not in \[0, 4\)"),
        ([0, 4], [0, 1], r"device ids \[4\] are not in \[0, 4\)"),
        ([0, 1], [5, -7], r"host ids \[-7\] are not in \[0, 6\)"),
        ([0, 1], [6, 6], r"host ids \[6, 6\] are not in \[0, 6\)"),
        ([0, 1], [0], "2 device pages for 1 host rows"),
    ],
)
def test_ids_that_do_not_exist_are_named(
    device_ids: list[int], host_ids: list[int], message: str
) -> None:
    """Of which side, and what would have been legal."""
    with pytest.raises(IntegrityError, match=message):
        check_ids(np.array(device_ids, np.int32), np.array(host_ids, np.int32), 4, 6)


def test_legal_ids_pass() -> None:
    """None at all, the first, the last; other types of numbers never do."""
    check_ids(count(0), count(0), 4, 6)
    check_ids(np.array([0, 3], np.int32), np.array([5, 0], np.int32), 4, 6)
    with pytest.raises(IntegrityError, match="device ids are int64"):
        check_ids(np.array([0]), count(1), 4, 6)
    with pytest.raises(IntegrityError, match=r"host ids are int32 of shape \(1, 1\)"):
        check_ids(count(1), count(1)[:, None], 4, 6)


def test_a_reader_waits_until_the_job_is_issued() -> None:
    """Then its stream waits for the event, if there is one."""

    class Stream:
        waited: object = None

        def wait_event(self, event: object) -> None:
            self.waited = event

    [job] = jobs_of(layout_of(1, 100), 1)
    stream = Stream()
    reader = threading.Thread(target=job.enqueue, args=(stream,))
    reader.start()
    reader.join(0.05)
    assert reader.is_alive()
    job.event = "event"  # type: ignore[assignment]
    job.issued.set()
    reader.join()
    assert stream.waited == "event"
