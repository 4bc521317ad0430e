"""The byte oracle: what every row of every pool must hold, and a stand-in for a model that knows.

A row's bytes follow from the namespace, all tokens up to the row's end, the pool and the layer. So
a page that was freed too early, handed out twice, written by a run that had been given up, or
matched under a foreign prefix reads wrong, whatever the counters say.

Owns: the bytes, and the look at pools through page tables. Refuses to know: how pages are managed.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from tiered_cache.keys import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from tiered_cache.cache import UnifiedRadixCache
    from tiered_cache.chunk import Chunk
    from tiered_cache.keys import RadixKey
    from tiered_cache.pools.spec import PoolSpec
    from tiered_cache.tree.node import Node
    from tiered_cache.types import Namespace, PageIds

Rows = npt.NDArray[np.uint8]

SPOILT: Final = 0xA5
"""What `spoil` fills pages with; no row of the oracle is made of it alone."""


class OracleError(AssertionError):
    """Bytes are not what they must be."""


class HasSlots(Protocol):
    """What says where the state of tokens is."""

    def slots(
        self, component: str = "full", start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int64]: ...


class Holder(HasSlots, Protocol):
    """A lease or a chunk."""

    @property
    def state_slots(self) -> Mapping[str, int]: ...


class ByteOracle:
    """Writes and proves the bytes of a cache's device pools (on the CPU).

    Methods that take a lease or chunk may be called from a run's thread.
    """

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._tree = cache.tree
        self._page_size = cache.page_size
        self._specs: tuple[PoolSpec, ...] = cache.pools.specs
        self._bytes: dict[tuple[str, int], Rows] = {
            (spec.name, layer): _as_bytes(cache.pools.pages(spec.name, layer))
            for spec in self._specs
            for layer in spec.layers
        }
        self._host_bytes: dict[tuple[str, int], Rows] = {}
        for arena in cache.arenas:
            for piece in arena.layout.slices:
                shape = (arena.num_pages, *self._bytes[piece.pool, piece.layer].shape[1:])
                raw = arena.rows[:, piece.offset : piece.offset + piece.num_bytes]
                strides = (raw.strides[0], shape[2], 1)
                self._host_bytes[piece.pool, piece.layer] = as_strided(raw, shape, strides)

    def write(
        self, holder: Holder, key: RadixKey, start: int, stop: int, layer: int | None = None
    ) -> None:
        """Write the state of the tokens `[start, stop)` of `key` to the holder's slots; of one
        layer, or of all."""
        for rows, pages, offsets, wanted in self._spans(holder, key, start, stop, layer):
            rows[pages, offsets] = wanted
        for row, content in self._states(holder, key, stop, layer):
            row[:] = content

    def verify(
        self, holder: Holder, key: RadixKey, start: int, stop: int, layer: int | None = None
    ) -> None:
        """Prove the state of the tokens `[start, stop)` of `key` at the holder's slots, as far as
        what follows needs it; of one layer, or of all.

        Raises:
            OracleError: naming the pages that are wrong.
        """
        for rows, pages, offsets, wanted in self._spans(
            holder, key, start, stop, layer, only_needed=True
        ):
            wrong = (rows[pages, offsets] != wanted).any(axis=1)
            if wrong.any():
                bad = sorted(set(pages[wrong].tolist()))
                raise OracleError(f"wrong bytes of {key!r} in [{start}, {stop}), pages {bad}")
        for row, content in self._states(holder, key, stop, layer):
            if (row != content).any():
                raise OracleError(f"wrong state of {key!r} at {stop}")

    def verify_tree(self, unwritten: Mapping[str, Collection[int]] | None = None) -> int:
        """Prove every page that the tree has, on either tier; returns how many there are.

        `unwritten`: per component, device pages to pass over, because a fence stands over them.

        Raises:
            OracleError: naming the first node that is wrong.
        """
        count = 0
        for node in self._tree.nodes():
            tokens = path_tokens(node)
            for component, data in zip(self._tree.components, node.data, strict=True):
                passed_over = tuple((unwritten or {}).get(str(component.id), ()))
                for ids, memory, tier in (
                    (data.value, self._bytes, "device"),
                    (data.host_value, self._host_bytes, "host"),
                ):
                    if ids is None:
                        continue
                    start = node.end - len(ids) * self._page_size  # a state ends the last page
                    holder = _NodeSlots(ids, start, self._page_size)
                    for rows, pages, offsets, wanted in self._spans_of(
                        holder, node.namespace, tokens, start, node.end, str(component.id), memory
                    ):
                        wrong = (rows[pages, offsets] != wanted).any(axis=1)
                        if passed_over and tier == "device":
                            wrong &= ~np.isin(pages, passed_over)
                        if wrong.any():
                            raise OracleError(
                                f"wrong bytes on the {tier} in {node!r}, pages {ids.tolist()}"
                            )
                    count += len(ids)
        return count

    def spoil(self, component: str, pages: PageIds, *, on_host: bool = False) -> None:
        """Overwrite pages that nobody may be using."""
        memory = self._host_bytes if on_host else self._bytes
        for spec in self._specs:
            if spec.component == component:
                for layer in spec.layers:
                    memory[spec.name, layer][pages] = SPOILT

    def verify_spoilt(self, component: str, pages: PageIds, *, on_host: bool = False) -> None:
        """Prove that nobody has written to pages since they were spoilt.

        Raises:
            OracleError: naming the pages.
        """
        memory = self._host_bytes if on_host else self._bytes
        for spec in self._specs:
            if spec.component == component:
                for layer in spec.layers:
                    touched = (memory[spec.name, layer][pages] != SPOILT).any(axis=(1, 2))
                    if touched.any():
                        bad = pages[touched].tolist()
                        raise OracleError(f"somebody wrote to pages {bad}, which are free")

    def _spans(
        self,
        holder: Holder,
        key: RadixKey,
        start: int,
        stop: int,
        layer: int | None = None,
        *,
        only_needed: bool = False,
    ) -> Iterator[tuple[Rows, Any, Any, Rows]]:
        for component in self._tree.components:
            if component.is_per_page:
                first, last = start, stop
                if only_needed:
                    size, pages = self._page_size, component.pages_to_go_on(stop)
                    first = max(start, pages.start * size)
                    if pages.stop < stop // size:  # else what follows them is needed, too
                        last = pages.stop * size
                name, namespace = str(component.id), key.namespace
                yield from self._spans_of(
                    holder, namespace, key.data, first, last, name, self._bytes, layer
                )

    def _states(
        self, holder: Holder, key: RadixKey, depth: int, only: int | None
    ) -> Iterator[tuple[Rows, Rows]]:
        """Per pool and layer of states: the row that the holder works with, and what it must be
        where `depth` tokens are computed."""
        for component in self._tree.components:
            if component.is_per_page:
                continue
            slot = holder.state_slots[str(component.id)]
            for spec in self._specs:
                if spec.component != component.id:
                    continue
                for layer in spec.layers:
                    if only is not None and layer != only:
                        continue
                    row = self._bytes[spec.name, layer][slot, 0]
                    content = bytes(len(row))
                    if depth:
                        digests = _digests(key.namespace, key.data[: depth * TOKEN_BYTES])
                        label = f"{component.id}/{spec.name}/{layer}".encode()
                        content = _row(digests[depth - 1], label, len(row))
                    yield row, np.frombuffer(content, np.uint8)

    def _spans_of(
        self,
        holder: HasSlots,
        namespace: Namespace,
        tokens: bytes,
        start: int,
        stop: int,
        component: str,
        memory: Mapping[tuple[str, int], Rows],
        only: int | None = None,
    ) -> Iterator[tuple[Rows, Any, Any, Rows]]:
        """Per pool and layer: its bytes, page ids, row offsets, and what must stand there."""
        if start >= stop:
            return
        digests = _digests(namespace, tokens[: stop * TOKEN_BYTES])
        slots = holder.slots(component, start, stop)
        for spec in self._specs:
            if spec.component != component:
                continue
            # A row stands for one token or several; it is complete at its last one.
            per_row = self._page_size // spec.rows_per_page
            first = -(start + 1) % per_row
            ends = slots[first::per_row]
            if not len(ends):
                continue
            pages, offsets = ends // self._page_size, ends % self._page_size // per_row
            for layer in spec.layers:
                if only is not None and layer != only:
                    continue
                rows = memory[spec.name, layer]
                label = f"{component}/{spec.name}/{layer}".encode()
                wanted = b"".join(
                    _row(digests[at], label, rows.shape[2])
                    for at in range(start + first, stop, per_row)
                )
                yield rows, pages, offsets, np.frombuffer(wanted, np.uint8).reshape(len(ends), -1)


class OracleModel:
    """A model to give to `run`: `await lease.run(model, chunk)`, or several chunks, or a list.

    In the run's thread it proves the bytes of `[0, chunk.start)`, then writes those of the chunk,
    and returns the chunk's end. Do not append to a lease while its chunk is being run: the model
    reads the lease's tokens.

    Args:
        oracle: of the cache whose chunks come.
        pause: called in the thread when the first half of each chunk is written: a gate, say.

    Attributes:
        faults: what it found wrong, also in runs whose caller has gone.
    """

    def __init__(self, oracle: ByteOracle, pause: Callable[[], object] | None = None) -> None:
        self.oracle = oracle
        self.faults: list[str] = []
        self._pause = pause

    def __call__(self, *chunks: Chunk | list[Chunk]) -> list[int]:
        ends = []
        for item in chunks:
            for chunk in item if isinstance(item, list) else [item]:
                self._compute(chunk)
                ends.append(chunk.stop)
        return ends

    def _compute(self, chunk: Chunk) -> None:
        key, half = chunk.lease.key, (chunk.start + chunk.stop) // 2
        try:
            self.oracle.verify(chunk, key, 0, chunk.start)
            self.oracle.write(chunk, key, chunk.start, half)
            if self._pause is not None:
                self._pause()
                self.oracle.verify(chunk, key, 0, half)
            self.oracle.write(chunk, key, half, chunk.stop)
        except BaseException as error:
            self.faults.append(f"{chunk!r}: {error!r}")
            raise


class _NodeSlots:
    """The slots of a node's own pages."""

    def __init__(self, pages: PageIds, start: int, page_size: int) -> None:
        self._slots = (pages.astype(np.int64)[:, None] * page_size + np.arange(page_size)).ravel()
        self._start = start

    def slots(
        self, component: str = "full", start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        return self._slots[start - self._start : None if stop is None else stop - self._start]


def path_tokens(node: Node) -> bytes:
    """The tokens from the root to a node's end, as `RadixKey.data` has them (no bigram keys)."""
    parts = []
    current: Node | None = node
    while current is not None:
        parts.append(current.key)
        current = current.parent
    return b"".join(reversed(parts))


def _as_bytes(pages: torch.Tensor) -> Rows:
    """`[pages, rows per page, *row shape]` as bytes `[pages, rows per page, row bytes]`, a view."""
    raw: Rows = pages.view(torch.uint8).numpy()
    return raw.reshape(pages.shape[0], pages.shape[1], -1)


@lru_cache(maxsize=1 << 14)
def _digests(namespace: Namespace, tokens: bytes) -> tuple[bytes, ...]:
    """Per token, a digest of the namespace and all tokens up to it."""
    state = hashlib.blake2b(repr(namespace).encode(), digest_size=16)
    digests = []
    for at in range(0, len(tokens), TOKEN_BYTES):
        state.update(tokens[at : at + TOKEN_BYTES])
        digests.append(state.digest())
    return tuple(digests)


@lru_cache(maxsize=1 << 16)
def _row(digest: bytes, label: bytes, num_bytes: int) -> bytes:
    return hashlib.shake_128(digest + label).digest(num_bytes)
