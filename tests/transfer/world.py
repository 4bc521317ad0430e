"""Pools and arenas full of noise, and the byte oracle of a copy between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiered_cache.config import ModelConfig
from tiered_cache.pools.host import HostArena
from tiered_cache.pools.spec import row_layout
from tiered_cache.strategies.plain import PlainStrategy
from tiered_cache.transfer.copier import Direction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiered_cache.pools.device import DevicePools
    from tiered_cache.pools.spec import PoolSpec
    from tiered_cache.transfer.copier import Copier
    from tiered_cache.types import PageIds

NUM_PAGES, NUM_ROWS = 11, 13
STORE, LOAD = Direction.STORE, Direction.LOAD

MHA = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8}
UNEQUAL = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 5}
MLA = {"num_layers": 4, "kv_lora_rank": 24, "qk_rope_head_dim": 9}
INDEXED = {
    **MLA,
    "extra_pools": [{"name": "index", "row_shape": [3], "dtype": "float32", "layers": [0, 1, 3]}],
}

Bytes = np.ndarray
Expected = tuple[list[Bytes], dict[tuple[str, int], Bytes]]


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int32)


def specs_of(shape: dict[str, object], dtype: str, page_size: int = 4) -> tuple[PoolSpec, ...]:
    model = ModelConfig.model_validate({"dtype": dtype, **shape})
    return PlainStrategy().plan(model, page_size).pools


@dataclass
class World:
    """Device pools, an arena for each component, and a copier between them."""

    pools: DevicePools
    arenas: list[HostArena]
    copier: Copier

    @classmethod
    def of(
        cls,
        make: Callable[[DevicePools, list[HostArena]], Copier],
        pools: DevicePools,
        num_rows: int = NUM_ROWS,
        *,
        pinned: bool = False,
    ) -> World:
        components = list(dict.fromkeys(spec.component for spec in pools.specs))
        arenas = [
            HostArena(
                row_layout([spec for spec in pools.specs if spec.component == component]),
                num_rows,
                pinned=pinned,
            )
            for component in components
        ]
        for arena in arenas:
            for chunk in arena.chunks():
                chunk.touch()
        world = cls(pools, arenas, make(pools, arenas))
        world.poison()
        return world

    def poison(self, seed: int = 1) -> None:
        """Noise everywhere, header room and padding included."""
        noise = np.random.default_rng(seed)
        for arena in self.arenas:
            arena.rows[:] = noise.integers(0, 256, arena.rows.shape, np.uint8)
        for spec in self.pools.specs:
            for layer in spec.layers:
                pages = self.device(spec.name, layer)
                with torch.inference_mode():
                    pages.copy_(torch.from_numpy(noise.integers(0, 256, pages.shape, np.uint8)))

    def device(self, pool: str, layer: int) -> torch.Tensor:
        """`[pages, bytes]`, a view."""
        return self.pools.pages(pool, layer).flatten(1).view(torch.uint8)

    def expected(
        self,
        direction: Direction,
        component: int,
        device_ids: Sequence[int],
        host_ids: Sequence[int],
        layers: Sequence[int] | None = None,
    ) -> Expected:
        """What all memory must hold after a copy, slice by slice."""
        rows = [arena.rows.copy() for arena in self.arenas]
        tensors = {
            (spec.name, layer): self.device(spec.name, layer).cpu().numpy().copy()
            for spec in self.pools.specs
            for layer in spec.layers
        }
        for piece in self.arenas[component].layout.slices:
            if layers is not None and piece.layer not in layers:
                continue
            tensor = tensors[piece.pool, piece.layer]
            for page, row in zip(device_ids, host_ids, strict=True):
                place = rows[component][row, piece.offset : piece.offset + piece.num_bytes]
                if direction is STORE:
                    place[:] = tensor[page]
                else:
                    tensor[page] = place
        return rows, tensors

    def zero_padding(self, expected: Expected, component: int, host_ids: Sequence[int]) -> Expected:
        """The same, with the stored rows' header room and padding as zeros."""
        layout = self.arenas[component].layout
        holds_state = np.zeros(layout.stride, bool)
        for piece in layout.slices:
            holds_state[piece.offset : piece.offset + piece.num_bytes] = True
        for row in host_ids:
            expected[0][component][row, ~holds_state] = 0
        return expected

    def check(self, expected: Expected) -> None:
        rows, tensors = expected
        for arena, wanted in zip(self.arenas, rows, strict=True):
            np.testing.assert_array_equal(arena.rows, wanted)
        for (name, layer), wanted in tensors.items():
            np.testing.assert_array_equal(self.device(name, layer).cpu().numpy(), wanted)

    def move(
        self,
        direction: Direction,
        device_ids: PageIds,
        host_ids: PageIds,
        *,
        component: int = 0,
        by_layer: bool = False,
    ) -> None:
        for job in self.copier.plan(direction, component, device_ids, host_ids, by_layer=by_layer):
            self.copier.copy(job)
