"""Backup of windows and states: a path's base first, then what hangs on it (semantics §10.4).

A window is as many objects as it has pages, a state is one, under the key of the page that it ends.
Of what is above it in the path neither needs anything but the base, so each is asked for, held and
written on its own, and one that is refused keeps none of the others. Owns: what is lacking of them.
Refuses to know: how something is written (backup).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiered_cache.backup import WRITE_BYTES, Backups
from tiered_cache.tree.node import BASE
from tiered_cache.types import Boundary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered_cache.storage_io import StorageCall
    from tiered_cache.tree.components.base import TreeComponent
    from tiered_cache.tree.node import Node


class BackupsOfParts(Backups):
    """Backups of a model with components that have tombstones."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._parts = [part for part in self._tree.components if part.has_tombstones]
        self._most = [max(1, WRITE_BYTES // record.row_bytes) for record in self._io.formats]

    # --- queue ------------------------------------------------------------------------------------

    def _ends(self, boundary: Boundary) -> list[Node]:
        ends = super()._ends(boundary)
        below = ends[0].end if ends else 0  # the way to there passes all above it
        node: Node | None = boundary.node
        while node is not None and node.parent is not None and node.end > below:
            if any(True for _ in self._lacking(node)):
                return [node, *ends]
            node = node.parent
        return ends

    def _num_lacking(self, node: Node) -> int:
        num_ids = super()._num_lacking(node)
        above: Node | None = node
        while above is not None and above.parent is not None:
            for component in self._lacking(above):
                num_ids += component.num_ids(above)
            above = above.parent
        return num_ids

    def _lacking(self, node: Node) -> Iterator[TreeComponent]:
        """Of what the host has a part that storage lacks, though it has the base."""
        if node.data[BASE].stored:
            for component in self._parts:
                data = node.data[component.index]
                if data.host_value is not None and not data.stored:
                    yield component

    # --- the way ----------------------------------------------------------------------------------

    async def _write_path(self, boundary: Boundary) -> None:
        await super()._write_path(boundary)
        tried: set[tuple[int, int]] = set()
        while (part := self._next_part(boundary, tried)) is not None:
            tried.add((part[0].index, part[1].depth))
            await self._write_part(*part)

    def _next_part(
        self, boundary: Boundary, tried: set[tuple[int, int]]
    ) -> tuple[TreeComponent, Boundary] | None:
        """The topmost that was not tried: whose, and where it ends. Nodes may have been split since
        the last, but where one ends it still does."""
        path: list[Node] = []
        node = self._tree.cut(boundary)
        while node.parent is not None:
            path.append(node)
            node = node.parent
        size = self._page_size
        for node in reversed(path):
            for component in self._lacking(node):
                end = node.end
                if component.is_per_page:
                    end = min(end, node.start + self._most[component.index] * size)
                if (component.index, end) not in tried:
                    return component, Boundary(node, end)
        return None

    async def _write_part(self, component: TreeComponent, end: Boundary) -> None:
        tree, index = self._tree, component.index
        start = component.part_start(tree.cut(end))
        receipt = tree.inc_host_lock_ref(end, start)
        clears = self._io.num_clears
        call: StorageCall | None = None
        try:
            keys = tree.keys_of(end, start)  # hashed when the base was written, or came
            missing = await self._missing(index, keys, 0)
            self._check(receipt, clears)
            if missing and not self._writes[index]:
                return
            if missing:
                ids = self._rows(index, end, start)[missing]
                call = self._write(index, receipt, start, [keys[at] for at in missing], ids)
        finally:
            if call is None:
                tree.let_go(receipt)
        if call is None:
            self._believe(index, receipt.node, start)
            return
        await call.answered.wait()
        if call.error is not None:
            raise call.error
