"""A pool's numbers follow from its spec, and a row's layout from the pools of its component."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_cache.config.schema import Dtype
from tiered_cache.pools.device import torch_dtype
from tiered_cache.pools.spec import DTYPE_BYTES, HEADER_BYTES, PoolSpec, row_layout
from tiered_cache.types import ComponentId

FULL = ComponentId("full")


def spec(name: str = "k", **changes: Any) -> PoolSpec:
    settings: dict[str, Any] = {
        "component": FULL,
        "layers": (0, 1),
        "row_shape": (3, 5),
        "dtype": "bfloat16",
        "rows_per_page": 4,
    }
    return PoolSpec(name, **{**settings, **changes})


def test_bytes_of_a_row_a_slice_and_a_page() -> None:
    """Elements × size; × rows; × layers."""
    pool = spec()
    assert (pool.row_bytes, pool.slice_bytes, pool.page_bytes) == (30, 120, 240)


def test_every_dtype_has_the_size_that_torch_gives_it() -> None:
    """The table of sizes, the schema's choices and torch agree."""
    assert set(DTYPE_BYTES) == set(Dtype.__args__)  # type: ignore[attr-defined]
    for name, size in DTYPE_BYTES.items():
        assert torch_dtype(name).itemsize == size


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ()},
        {"layers": (1, 1)},
        {"layers": (-1,)},
        {"row_shape": ()},
        {"row_shape": (3, 0)},
        {"rows_per_page": 0},
        {"dtype": "complex64"},
    ],
)
def test_a_spec_that_no_pool_can_have_is_refused(changes: dict[str, Any]) -> None:
    """Nonsense stops where it is written, not where it is used."""
    with pytest.raises(ValueError, match="pool 'k'"):
        spec(**changes)


def test_a_row_by_hand() -> None:
    """Layer 0 of each pool, then layer 1; slices at multiples of 64 behind 512; stride of 4096."""
    layout = row_layout([spec("k"), spec("v", layers=(1,), dtype="float32")])
    assert [(s.layer, s.pool, s.offset, s.num_bytes) for s in layout.slices] == [
        (0, "k", 512, 120),
        (1, "k", 640, 120),
        (1, "v", 768, 240),
    ]
    assert (layout.stride, layout.payload_bytes, layout.padding_bytes) == (4096, 480, 3104)


def test_a_row_that_just_fits_is_not_padded() -> None:
    """Padding goes to the next multiple, and not beyond."""
    exact = spec(layers=(0,), row_shape=(3584,), dtype="uint8", rows_per_page=1)
    assert (row_layout([exact]).stride, row_layout([exact]).padding_bytes) == (4096, 0)
    longer = spec(layers=(0,), row_shape=(3585,), dtype="uint8", rows_per_page=1)
    assert (row_layout([longer]).stride, row_layout([longer]).padding_bytes) == (8192, 4095)


def test_a_row_belongs_to_one_component() -> None:
    """Components have ids of their own, so their pages never share a row."""
    with pytest.raises(ValueError, match="exactly one component"):
        row_layout([spec("k"), spec("s", component=ComponentId("swa"))])
    with pytest.raises(ValueError, match="exactly one component"):
        row_layout([])


POOLS = st.lists(
    st.builds(
        spec,
        layers=st.sets(st.integers(0, 9), min_size=1).map(lambda s: tuple(sorted(s))),
        row_shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        rows_per_page=st.integers(1, 64),
    ),
    min_size=1,
    max_size=4,
)


@given(POOLS)
def test_a_row_holds_every_slice_once_aligned_and_apart(pools: list[PoolSpec]) -> None:
    """For any pools: all bytes are there, in layer order, aligned, without overlap."""
    layout = row_layout(pools)
    assert layout.payload_bytes == sum(pool.page_bytes for pool in pools)
    assert [s.layer for s in layout.slices] == sorted(s.layer for s in layout.slices)
    end = HEADER_BYTES
    for piece in layout.slices:
        assert piece.offset % 64 == 0
        assert end <= piece.offset < end + 64
        end = piece.offset + piece.num_bytes
    assert layout.stride % 4096 == 0
    assert end <= layout.stride < end + 4096
