"""What a pool holds, in numbers: shapes, bytes, and the layout of a row.

Owns: `PoolSpec`, and the arithmetic that follows from it. Refuses to know: tensors (torch is not
imported here, so `tiered-cache plan` sizes any model on any machine), tiers, the tree.

All sizes are per rank: a spec states the shapes that one process holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiered_cache.types import ComponentId

Sharding = Literal["per_rank", "replicated"]

DTYPE_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Element types that state can have, by torch's name, with their size."""

HEADER_BYTES: Final = 512
"""Room in front of a page record, for the header of a storage object."""

SLICE_ALIGNMENT_BYTES: Final = 64
"""Every slice of a row starts at a multiple of this: a cache line, and the widest vector load."""

STRIDE_ALIGNMENT_BYTES: Final = 4096
"""Rows start at a multiple of this: a memory page, and what direct file access asks for."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One kind of state of one component: per layer `rows_per_page` rows of `row_shape` for a page.

    `layers` are the model's layer numbers that have this state. `sharding` says whether ranks hold
    different bytes (`per_rank`) or the same ones (`replicated`: written to storage by one rank).

    Raises:
        ValueError: a shape, a layer list or a dtype that no pool can have.
    """

    name: str
    component: ComponentId
    layers: tuple[int, ...]
    row_shape: tuple[int, ...]
    dtype: str
    rows_per_page: int
    sharding: Sharding = "per_rank"

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise ValueError(
                f"pool {self.name!r}: layers {self.layers} must be distinct, not empty"
            )
        if not self.row_shape or min(self.row_shape) < 1:
            raise ValueError(f"pool {self.name!r}: row shape {self.row_shape} must be positive")
        if self.rows_per_page < 1:
            raise ValueError(f"pool {self.name!r}: {self.rows_per_page} rows per page, at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"pool {self.name!r}: dtype {self.dtype!r} is not known")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one layer."""
        return math.prod(self.row_shape) * DTYPE_BYTES[self.dtype]

    @property
    def slice_bytes(self) -> int:
        """Bytes of one page in one layer: what a copier moves in one piece."""
        return self.row_bytes * self.rows_per_page

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.slice_bytes * len(self.layers)


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Where one pool's rows of one layer stand in a row: bytes `[offset, offset + num_bytes)`."""

    layer: int
    pool: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How a component's page lies in a row (semantics §1.4): header room, slices, padding."""

    slices: tuple[RowSlice, ...]
    stride: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of state; the rest of the stride is header room and padding."""
        return sum(piece.num_bytes for piece in self.slices)

    @property
    def padding_bytes(self) -> int:
        """Bytes that hold nothing, gaps between slices included; header room does not count."""
        return self.stride - HEADER_BYTES - self.payload_bytes


def row_layout(specs: Iterable[PoolSpec]) -> RowLayout:
    """The row of one component: for each layer in order, for each pool that has it, its slice.

    Layer first, so that a layer-wise load reads a row front to back.
    """
    pools = tuple(specs)
    if len({spec.component for spec in pools}) != 1:
        raise ValueError("a row holds the pools of exactly one component")
    offset = HEADER_BYTES
    slices: list[RowSlice] = []
    for layer in sorted({layer for spec in pools for layer in spec.layers}):
        for spec in pools:
            if layer in spec.layers:
                offset = round_up(offset, SLICE_ALIGNMENT_BYTES)
                slices.append(RowSlice(layer, spec.name, offset, spec.slice_bytes))
                offset += spec.slice_bytes
    return RowLayout(tuple(slices), stride=round_up(offset, STRIDE_ALIGNMENT_BYTES))


def page_bytes(specs: Iterable[PoolSpec], component: ComponentId) -> int:
    """Bytes that one page id of a component stands for on the device: all its pools, all layers."""
    return sum(spec.page_bytes for spec in specs if spec.component == component)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
