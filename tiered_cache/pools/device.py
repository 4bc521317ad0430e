"""The device tier's memory: per pool and layer one tensor, as attention kernels index it.

Owns: the tensors, made here or brought by the user, and the proof that brought ones fit. Refuses to
know: which ids are in use (the allocator), who uses them (leases), and torch's thread count.

A token's rows are found by page id alone: page `p` of a pool is rows `[p × rows_per_page,
(p + 1) × rows_per_page)` of every layer's tensor, and all pools of a component share the ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tiered_cache.errors import ConfigError, ConfigProblem
from tiered_cache.pools.spec import page_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tiered_cache.pools.spec import PoolSpec
    from tiered_cache.types import ComponentId


class DevicePools:
    """All device pools of a model.

    Args:
        specs: the pools; names are unique.
        num_pages: capacity per component. Left out when `tensors` are given: they define it.
        device: where the tensors live ("cpu", "cuda", "cuda:1").
        tensors: the user's own: for each pool name one tensor per layer of its spec, in that order,
            `[pages × rows_per_page, *row_shape]` or `[pages, rows_per_page, *row_shape]`, each page
            contiguous. Pages themselves may be apart (a view into a tensor shared by k and v), in
            the second form; such pools have no row view.

    Raises:
        ConfigError: tensors that do not fit; every problem at once, naming pool and layer.
    """

    def __init__(
        self,
        specs: Sequence[PoolSpec],
        num_pages: Mapping[ComponentId, int] | None = None,
        device: torch.device | str = "cpu",
        tensors: Mapping[str, Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.device = torch.device(device)
        if tensors is not None:
            self._pages = _adopt(self.specs, tensors, self.device)
            self.num_pages = _common_page_counts(self.specs, self._pages)
        elif num_pages is not None:
            self.num_pages = dict(num_pages)
            self._pages = _make(self.specs, self.num_pages, self.device)
        else:
            raise ValueError("either num_pages or tensors")
        self.owned = tensors is None
        """Whether the tensors were made here."""
        self._rows = {
            name: {layer: _row_view(pages) for layer, pages in layers.items()}
            for name, layers in self._pages.items()
        }

    def layer(self, name: str, layer: int) -> torch.Tensor:
        """The rows of one layer, `[pages × rows_per_page, *row_shape]`: a view, row = slot.

        Raises:
            KeyError: no such pool, or the pool has no such layer.
            ValueError: the user's tensor keeps its pages apart; use `pages`.
        """
        rows = self._rows[name][layer]
        if rows is None:
            raise ValueError(
                f"pool {name!r}, layer {layer}: the pages of the tensor given are not adjacent, so "
                f"there is no view of rows; index pages(name, layer)[page id, offset]"
            )
        return rows

    def pages(self, name: str, layer: int) -> torch.Tensor:
        """The pages of one layer, `[pages, rows_per_page, *row_shape]`: a view."""
        return self._pages[name][layer]

    def copy_page(self, component: ComponentId, source: int, target: int) -> None:
        """Have a page be what another is, in all pools and layers of a component; `source` −1:
        zeros. Blocks; on a GPU the copies are queued on the current stream."""
        with torch.inference_mode():
            for spec in self.specs:
                if spec.component == component:
                    for pages in self._pages[spec.name].values():
                        if source < 0:
                            pages[target].zero_()
                        else:
                            pages[target].copy_(pages[source])

    def page_bytes(self, component: ComponentId) -> int:
        """Bytes that one page id of the component stands for, over its pools and layers."""
        return page_bytes(self.specs, component)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{component}: {count} pages" for component, count in self.num_pages.items()
        )
        owner = "" if self.owned else ", user's tensors"
        return (
            f"<DevicePools {[spec.name for spec in self.specs]} on {self.device}, {sizes}{owner}>"
        )


_Layers = dict[int, torch.Tensor]


def _make(
    specs: Sequence[PoolSpec], num_pages: Mapping[ComponentId, int], device: torch.device
) -> dict[str, _Layers]:
    """Zeros, not empty: they commit the memory now, so that a machine too small says so at open and
    not in the middle of a request, and they hold no NaN that a masked kernel could spread.
    """
    # A tensor made in inference mode could be written there only, by whoever comes later.
    with torch.inference_mode(False):
        return {
            spec.name: {
                layer: torch.zeros(
                    (num_pages[spec.component], spec.rows_per_page, *spec.row_shape),
                    dtype=torch_dtype(spec.dtype),
                    device=device,
                )
                for layer in spec.layers
            }
            for spec in specs
        }


def _adopt(
    specs: Sequence[PoolSpec], tensors: Mapping[str, Sequence[torch.Tensor]], device: torch.device
) -> dict[str, _Layers]:
    problems = [
        ConfigProblem(
            f"there is no pool {name!r}",
            key="device_pools",
            suggestion=f"the pools are {', '.join(spec.name for spec in specs)}",
        )
        for name in tensors
        if name not in {spec.name for spec in specs}
    ]
    adopted: dict[str, _Layers] = {}
    for spec in specs:
        given = tensors.get(spec.name)
        if given is None or len(given) != len(spec.layers):
            problems.append(
                ConfigProblem(
                    f"pool {spec.name!r} needs {len(spec.layers)} tensors, one per layer "
                    f"{_ranges(spec.layers)}; {0 if given is None else len(given)} given",
                    key="device_pools",
                )
            )
            continue
        adopted[spec.name] = {}
        for layer, tensor in zip(spec.layers, given, strict=True):
            wrong = list(_misfits(spec, tensor, device))
            problems += [
                ConfigProblem(f"pool {spec.name!r}, layer {layer}: {text}", key="device_pools")
                for text in wrong
            ]
            if not wrong:
                adopted[spec.name][layer] = _as_pages(spec, tensor)
    problems += _shared_memory(adopted)
    if problems:
        raise ConfigError(problems)
    return adopted


def _shared_memory(pools: Mapping[str, _Layers]) -> Iterator[ConfigProblem]:
    """One tensor given for two layers would let each overwrite the other's state."""
    seen: dict[int, str] = {}
    for name, layers in pools.items():
        for layer, tensor in layers.items():
            here = f"pool {name!r}, layer {layer}"
            other = seen.setdefault(tensor.data_ptr(), here)
            if other != here:
                yield ConfigProblem(f"{here}: is the memory of {other}", key="device_pools")


def _misfits(spec: PoolSpec, tensor: torch.Tensor, device: torch.device) -> Iterator[str]:
    """What is wrong with a user's tensor, in words."""
    if tensor.dtype != torch_dtype(spec.dtype):
        yield f"dtype is {tensor.dtype}, the model's is torch.{spec.dtype}"
    # "cuda" stands for the current device; only a number that was written must agree.
    if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
        yield f"is on {tensor.device}, the pools are on {device}"
    rows, row_shape = spec.rows_per_page, spec.row_shape
    shape = tuple(tensor.shape)
    if shape[1:] != row_shape and shape[1:] != (rows, *row_shape):
        dims = ", ".join(map(str, row_shape))
        yield (
            f"shape is {list(shape)}, expected [pages × {rows}, {dims}] or [pages, {rows}, {dims}]"
        )
    elif shape[0] == 0:
        yield "has no pages"
    elif shape[1:] == row_shape and shape[0] % rows:
        yield f"{shape[0]} rows are not a whole number of pages of {rows} rows"
    elif not _pages_contiguous(spec, tensor):
        yield "pages are not contiguous; make the tensor contiguous"


def _pages_contiguous(spec: PoolSpec, tensor: torch.Tensor) -> bool:
    if tuple(tensor.shape[1:]) == spec.row_shape and spec.rows_per_page > 1:
        return tensor.is_contiguous()
    # Apart is fine; overlapping (an expanded tensor) is not.
    apart = tensor.shape[0] == 1 or tensor.stride(0) >= tensor[0].numel()
    return apart and bool(tensor[0].is_contiguous())


def _as_pages(spec: PoolSpec, tensor: torch.Tensor) -> torch.Tensor:
    if tuple(tensor.shape[1:]) == (spec.rows_per_page, *spec.row_shape):
        return tensor
    return torch.unflatten(tensor, 0, (-1, spec.rows_per_page))


def _row_view(pages: torch.Tensor) -> torch.Tensor | None:
    adjacent = pages.shape[0] == 1 or pages.stride(0) == pages[0].numel()
    return pages.flatten(0, 1) if adjacent else None


def _common_page_counts(
    specs: Sequence[PoolSpec], pools: Mapping[str, _Layers]
) -> dict[ComponentId, int]:
    """All pools of a component share its ids, so all tensors must have room for the same ones."""
    counts: dict[ComponentId, int] = {}
    problems: list[ConfigProblem] = []
    for spec in specs:
        for layer in spec.layers:
            found = int(pools[spec.name][layer].shape[0])
            expected = counts.setdefault(spec.component, found)
            if found != expected:
                problems.append(
                    ConfigProblem(
                        f"pool {spec.name!r}, layer {layer}: {found} pages, where other tensors "
                        f"of component {spec.component!r} have {expected}",
                        key="device_pools",
                    )
                )
    if problems:
        raise ConfigError(problems)
    return counts


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a spec's dtype name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _ranges(layers: Sequence[int]) -> str:
    consecutive = list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}–{layers[-1]}" if consecutive and len(layers) > 1 else str(list(layers))
