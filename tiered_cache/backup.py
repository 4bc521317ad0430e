"""Backup: from the host to storage, in the background (semantics §10.4, §10.9).

One path at a time, first come first served, from the root: a page is written after the pages above
it are. So at any instant what storage has can be reached, and nobody waits for a page key that
another writes. Owns: what waits to be written. Refuses to know: how calls end (storage_io), and why
somebody's pages are on the host.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiered_cache.errors import BackendError, StaleError
from tiered_cache.keys import HASH_PAGES, TOKEN_BYTES, hash_pages
from tiered_cache.storage.backend import WriteResult
from tiered_cache.storage.health import HealthState
from tiered_cache.tree.components.base import join
from tiered_cache.tree.node import BASE
from tiered_cache.types import Boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from tiered_cache.accounts import HostPages
    from tiered_cache.stats import Counters
    from tiered_cache.storage_io import StorageCall, StorageIO
    from tiered_cache.tree.locks import Receipt
    from tiered_cache.tree.node import Node
    from tiered_cache.tree.radix import RadixTree
    from tiered_cache.types import PageIds

WRITE_BYTES: Final = 32 << 20
"""What one call writes at most, and so what a backup keeps on the host at a time."""


class Backups:
    """What is on the host and not in storage, on its way there.

    Args:
        max_pending: pages that wait; more are skipped and counted, and tried again when next used.
        writes: by component; False: another rank does, here it is only found out what it has
            written.
    """

    def __init__(
        self,
        tree: RadixTree,
        host: HostPages,
        io: StorageIO,
        counters: Counters,
        max_pending: int,
        writes: Sequence[bool],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        changed: Callable[[], None],
    ) -> None:
        self._tree = tree
        self._page_size = tree.page_size
        self._host = host
        self._io = io
        self._counters = counters
        self._max_pending = max_pending
        self._writes = writes
        self._spawn = spawn
        self._changed = changed
        self._queue: deque[Boundary] = deque()
        self._queued: dict[Node, int] = {}  # ends of queued paths: pages counted for each
        self._used: set[Node] = set()  # those of them that somebody has used
        self._num_pending = 0
        self._worker: asyncio.Task[None] | None = None
        self._is_closed = False
        self._may_begin_again = False

    # --- queue ------------------------------------------------------------------------------------

    def note(self, boundary: Boundary) -> None:
        """A prefix was used, or has come to the host: keep what storage lacks of it."""
        for end in reversed(self._ends(boundary)):
            self._enqueue(end)
            if end in self._queued:
                self._used.add(end)

    def _ends(self, boundary: Boundary) -> list[Node]:
        """Where paths end that storage lacks something of, the deepest first."""
        ends: list[Node] = []
        is_end = True  # of what the host has and storage lacks
        node: Node | None = boundary.node
        while node is not None and node.parent is not None:
            data = node.data[BASE]
            if data.stored:
                is_end = True  # what is above may still be missing: it was refused, say
            elif is_end and data.host_value is not None:
                ends.append(node)
                is_end = False
            node = node.parent
        return ends

    def _enqueue(self, node: Node) -> None:
        if node in self._queued or self._is_closed:
            return
        num_pages = self._num_lacking(node)
        is_down = self._io.writes.state is HealthState.OPEN and not self._io.writes.is_due
        if is_down or (self._queue and self._num_pending + num_pages > self._max_pending):
            self._counters.backups_skipped += 1
            return
        self._queue.append(Boundary(node, node.end))
        self._queued[node] = num_pages
        self._num_pending += num_pages
        if self._worker is None:
            self._worker = self._spawn(self._work(), "backup")
            self._worker.add_done_callback(self._worker_ended)

    def _num_lacking(self, node: Node) -> int:
        """Pages to be written on the way to `node`, without those that are counted already."""
        num_pages, above = 0, node
        while above.parent is not None and not above.data[BASE].stored:
            if above in self._queued:
                break
            num_pages += (above.end - above.start) // self._page_size
            above = above.parent
        return num_pages

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        if self._worker is worker:
            self._worker = None
            self._forget_queue()  # only when it was cancelled, or has failed
            self._changed()

    def _forget_queue(self) -> None:
        self._queue.clear()
        self._queued.clear()
        self._used.clear()
        self._num_pending = 0

    def _next(self) -> tuple[Boundary, bool]:
        """The path whose turn it is, and whether somebody has used it."""
        boundary = self._queue.popleft()
        self._num_pending -= self._queued.pop(boundary.node)
        is_used = boundary.node in self._used
        self._used.discard(boundary.node)
        return boundary, is_used

    # --- the way ----------------------------------------------------------------------------------

    async def _work(self) -> None:
        while self._queue:
            boundary, self._may_begin_again = self._next()
            try:
                await self._write_path(boundary)
            except StaleError:
                pass  # evicted meanwhile, a reset, or storage was cleared
            except BackendError:
                self._counters.backups_failed += 1
            self._changed()
        self._worker = None  # in this very step: whoever comes now needs another
        self._changed()

    async def _write_path(self, boundary: Boundary) -> None:
        is_first = True
        while await self._write_some(boundary, is_first=is_first):
            is_first = False

    async def _write_some(self, boundary: Boundary, *, is_first: bool) -> bool:
        """The topmost pages of a path that storage lacks; whether there may be more.

        At first storage is asked for the whole path: being asked for is being used, and what is
        used last goes last, so that no page outlives those above it.
        """
        tree = self._tree
        part = self._first_part(boundary)
        if part is None:
            return False
        start, end = part
        receipt = tree.inc_host_lock_ref(end, start)
        clears = self._io.num_clears
        call: StorageCall | None = None
        try:
            above = 0 if is_first else start
            keys = await self._page_keys(end, above)
            first = (start - above) // self._page_size
            missing = await self._missing(BASE, keys, first)
            self._check(receipt, clears)
            if missing and missing[0] < first:  # it was believed to be there
                lost = tree.forget_path_stored(end, above + missing[0] * self._page_size)
                self._host.take_back(lost)
                # It begins with it now, once for each use: a store that is full, and gives up the
                # one for the other, is to come to rest.
                may, self._may_begin_again = self._may_begin_again, False
                return may
            if missing and not self._writes[BASE]:
                return False
            if missing:
                ids = self._rows(BASE, end, start)[[at - first for at in missing]]
                call = self._write(BASE, receipt, start, [keys[at] for at in missing], ids)
        finally:
            if call is None:
                self._tree.let_go(receipt)
        if call is None:
            self._believe(BASE, receipt.node, start)
            return True
        await call.answered.wait()
        if call.error is not None:
            raise call.error
        return call.num_good == len(call.ids)

    def _first_part(self, boundary: Boundary) -> tuple[int, Boundary] | None:
        """Consecutive pages on the host that are not stored, the first that are missing: where they
        start, and where they end."""
        tree, size = self._tree, self._page_size
        most = max(1, WRITE_BYTES // self._io.formats[BASE].row_bytes) * size
        path: list[Node] = []
        node = tree.cut(boundary)
        while node.parent is not None and not node.data[BASE].stored:
            path.append(node)
            node = node.parent
        if not path:
            return None
        start, end = path[-1].start, None
        for node in reversed(path):
            if node.data[BASE].host_value is None or node.start - start >= most:
                break
            end = Boundary(node, min(node.end, start + most))
        return (start, end) if end is not None else None

    async def _page_keys(self, end: Boundary, start: int) -> list[bytes]:
        tree = self._tree
        unhashed = tree.unhashed(end)
        if unhashed is not None:
            units = np.frombuffer(unhashed.data, dtype=np.int64)
            previous, keys = unhashed.previous, list[bytes]()
            overlap = int(unhashed.is_bigram)
            count = (len(unhashed.data) // TOKEN_BYTES - overlap) // self._page_size
            for first in range(0, count, HASH_PAGES):
                last = min(count, first + HASH_PAGES)
                some = units[first * self._page_size : last * self._page_size + overlap]
                keys += hash_pages(some, self._page_size, previous, is_bigram=unhashed.is_bigram)
                previous = keys[-1]
                await asyncio.sleep(0)
            tree.remember_page_keys(end, unhashed.start, keys)
        return tree.keys_of(end, start)

    async def _missing(self, component: int, keys: Sequence[bytes], first: int) -> list[int]:
        """Which of these pages storage lacks; what it has wrong, from `first` on, is deleted first,
        for some keep what they have."""
        there = await self._io.contains(component, keys)
        wrong = [key for key in keys[first:] if self._io.is_suspect(component, key)]
        if wrong and self._writes[component]:
            await self._io.delete(component, wrong)
        return [
            at
            for at, (key, is_there) in enumerate(zip(keys, there, strict=True))
            if not is_there or self._io.is_suspect(component, key)
        ]

    def _rows(self, component: int, end: Boundary, start: int) -> PageIds:
        """The host's pages of `[start, end)`, all of which are there; of a component with states
        the one at the end."""
        is_per_page = self._tree.components[component].is_per_page
        node: Node | None = self._tree.cut(end)
        parts = []
        while node is not None and node.end > start:
            value = node.data[component].host_value
            if value is None:
                raise StaleError("the host has lost what it held")
            if not is_per_page:
                return value
            parts.append(value[max(0, start - node.start) // self._page_size :])
            node = node.parent
        return join(parts[::-1])

    def _check(self, receipt: Receipt, clears: int) -> None:
        if receipt.epoch != self._tree.epoch:
            raise StaleError("the cache was reset")
        if clears != self._io.num_clears:
            raise StaleError("storage was cleared")

    def _write(
        self, component: int, receipt: Receipt, start: int, page_keys: Sequence[bytes], ids: PageIds
    ) -> StorageCall:
        """The rows stay where they are until the call has really ended."""

        def on_end(call: StorageCall) -> None:
            if call.epoch != self._tree.epoch:
                self._host.give_back_stale(self._host.only(component, call.ids))
                return
            self._host.returned(component, call.ids)
            self._count(call, page_keys)
            is_there = call.clears == self._io.num_clears
            if is_there and call.results and call.num_good == len(ids):
                self._believe(component, receipt.node, start)
            self._tree.let_go(receipt)
            self._changed()

        call = self._io.write(component, page_keys, ids, self._tree.epoch, on_end)
        self._host.lend(component, ids)
        return call

    def _count(self, call: StorageCall, page_keys: Sequence[bytes]) -> None:
        counters = self._counters
        for key, result in zip(page_keys, call.results, strict=False):
            if result in (WriteResult.WRITTEN, WriteResult.EXISTS):
                self._io.clear_suspect(call.component, key)
                counters.pages_backed_up += result is WriteResult.WRITTEN
            else:
                counters.backups_refused += 1

    def _believe(self, component: int, node: Node, start: int) -> None:
        """Storage has the pages from `start` to the end of `node`; what hangs on any of them can
        follow, also what has waited since storage lost them."""
        self._tree.believe_span_stored(node, start, component)
        if component != BASE:
            return
        above: Node | None = node
        while above is not None and above.end > start:
            for child in above.children.values():
                data = child.data[BASE]
                if data.host_value is not None and not data.stored:
                    self._enqueue(child)
            above = above.parent

    # --- life cycle -------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether host pages are held that will be spare soon, or not needed."""
        return self._worker is not None

    def reset(self) -> None:
        """The tree has forgotten everything."""
        self._forget_queue()

    def close(self) -> None:
        """Nothing more is written."""
        self._is_closed = True
        self._forget_queue()
        if self._worker is not None:
            self._worker.cancel()

    @property
    def num_pending(self) -> int:
        """Pages that wait to be written."""
        return self._num_pending
