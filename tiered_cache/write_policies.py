"""When the device's pages are copied to the host: at their first use, at their second, or only when
the device gives them up (semantics §7.3, §9.5).

Both kinds answer the same questions, so nobody asks which one there is. Owns: what waits to be
copied. Refuses to know: how (transfers), and who wants the room that it makes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tiered_cache.errors import StaleError
from tiered_cache.tree.node import BASE
from tiered_cache.types import Boundary, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiered_cache.accounts import HostPages, PageAccounts
    from tiered_cache.fences import Fences
    from tiered_cache.stats import Counters
    from tiered_cache.transfers import Transfer, Transfers
    from tiered_cache.tree.node import ComponentData, Node
    from tiered_cache.tree.plans import Piece
    from tiered_cache.tree.radix import RadixTree

MAX_STORES: Final = 4
"""Stores under way at a time. The rest is queued, and pins nothing until it starts."""

STORE_BYTES: Final = 64 << 20
"""What one store copies at most: with `MAX_STORES`, a bound on what copies pin at a time."""

MAX_LOOKS: Final = 16
"""Queued paths that are looked at between two turns of the loop."""

MAX_QUEUED: Final = 4096
"""Paths that wait to be copied. More are skipped and counted, and tried again when next used."""

MAX_ROUNDS: Final = 8
"""Rounds of copying victims before somebody gives up without loss: each frees at least a leaf, and
lets its parent become one."""


class WritePolicy(Protocol):
    """When pages are copied, and what to wait for before unbacked ones are dropped."""

    def note_used(self, boundary: Boundary) -> None:
        """A prefix was published, or granted to a lease."""

    def makes_room(self, num_pages: int) -> bool:
        """Whether so many pages of the device will be free of loss after copies that are under way
        (now, if not before): whoever needs them looks again when something has ended."""

    def look_again(self) -> None:
        """Pages may have become spare."""

    def reset(self) -> None:
        """The tree has forgotten everything."""

    def close(self) -> None:
        """Nothing is to be started any more."""

    @property
    def is_busy(self) -> bool:
        """Whether it will start something without anybody's doing."""


class NoWrites:
    """One tier: nothing is ever copied."""

    is_busy = False

    def note_used(self, boundary: Boundary) -> None: ...
    def look_again(self) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...

    def makes_room(self, num_pages: int) -> bool:
        return False


class Storing(NamedTuple):
    """What both policies copy with."""

    tree: RadixTree
    device: PageAccounts
    host: HostPages
    transfers: Transfers
    fences: Fences
    counters: Counters
    max_pages: int
    """What one store copies at most."""
    rows_are_coming: Callable[[], bool]
    """Whether the host may have more room soon: it holds pages that are being backed up."""
    looked: Callable[[], None]
    """To be called when something that was to be started has been, or could not."""

    def part_of(self, component: int, piece: Piece) -> Piece:
        """As much of a piece, from its root end, as one store copies."""
        assert piece.ids is not None, "a piece to store says where it is"
        if self.tree.components[component].has_tombstones:
            return piece
        ids = piece.ids[: self.max_pages]
        return piece._replace(stop=piece.start + len(ids) * self.tree.page_size, ids=ids)

    def may_store(self, node: Node, component: int, part: Piece) -> bool:
        """Whether its pages are written, and holding them takes nothing that is promised."""
        assert part.ids is not None, "a piece to store says where it is"
        if self.fences.over(part.ids, component):
            return False
        # Of a window, the node alone: it may be longer.
        is_window = self.tree.components[component].is_window
        would_protect = self.tree.would_protect(Boundary(node, part.stop))
        needs = {BASE: would_protect[BASE]}
        if component != BASE:
            needs[component] = len(part.ids) if is_window else would_protect[component]
        return all(pages <= self.device.spare(index) for index, pages in needs.items())

    def store(
        self, node: Node, component: int, part: Piece, on_end: Callable[[Transfer], None]
    ) -> int:
        """Copy of a part on the path to `node` what the host has room for; how many pages that
        are. Where there is a piece per node, all of it or nothing."""
        assert part.ids is not None, "a piece to store says where it is"
        # The node that the device has: what only the host has below it may make room now.
        while node.parent is not None and node.parent.end >= part.stop:
            node = node.parent
        rows = self.host.take_up_to(component, len(part.ids))
        if len(rows) < len(part.ids) and self.tree.components[component].has_tombstones:
            self.host.give_back(self.host.only(component, rows))
            return 0
        if len(rows):
            end = Boundary(node, part.start + len(rows) * self.tree.page_size)
            self.transfers.store(end, part.start, component, part.ids[: len(rows)], rows, on_end)
        return len(rows)


class Turn(Enum):
    """What has become of a queued path when it was looked at."""

    TAKEN = "taken"  # a copy was started, or there was nothing to copy
    AFTER_ANOTHER = "after another"  # a copy above it is under way, and may still fail
    WHO_KNOWS = "who knows"  # it waits for spare pages on either tier, or for a fence


class WriteThrough:
    """Copies what was used `threshold` times, with the ancestors that the host lacks, root first.

    First in, first out. Queued work pins nothing: what is gone when its turn comes is skipped, and
    tried again when it is next used.
    """

    def __init__(self, parts: Storing, threshold: int) -> None:
        self._parts = parts
        self._threshold = threshold
        self._queue: deque[Boundary] = deque()
        self._coming: Counter[Node] = Counter()  # ends of paths that will be copied soon
        self._num_active = 0
        self._is_called = False
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def is_busy(self) -> bool:
        return self._is_called

    def note_used(self, boundary: Boundary) -> None:
        node = boundary.node
        while node.parent is not None and node.parent.end >= boundary.depth:
            node = node.parent  # cut since
        while node.parent is not None and not any(map(_is_to_be_copied, node.data)):
            node = node.parent  # what is above may lack it: storage was believed to have it
        if node.parent is not None:
            if len(self._queue) >= MAX_QUEUED:
                self._parts.counters.stores_skipped += 1
                return
            self._queue.append(boundary)
            self._coming[boundary.node] += 1
            self.look_again()

    def look_again(self) -> None:
        if self._queue and not (self._is_called or self._is_closed):
            self._is_called = True
            self._loop.call_soon(self._start_some)

    def reset(self) -> None:
        self._queue.clear()
        self._coming.clear()

    def close(self) -> None:
        self._is_closed = True  # also for the rest of a path whose first part ends now
        self.reset()

    def makes_room(self, num_pages: int) -> bool:
        if not self._num_active and not self._is_called:
            return False
        # Only for victims whose turn comes: others' copies never end.
        plan = self._parts.tree.plan_room(BASE, num_pages)
        return any(victim.node in self._coming for victim in plan.victims)

    def _start_some(self) -> None:
        self._is_called = False
        self._start_queued()
        self._parts.looked()

    def _start_queued(self) -> None:
        has_moved_on = False
        for _ in range(min(len(self._queue), MAX_LOOKS)):
            if self._num_active >= MAX_STORES:
                return
            boundary = self._queue.popleft()
            self._comes_no_more(boundary)
            try:
                turn = self._start(boundary)
            except StaleError:
                turn = Turn.TAKEN  # evicted meanwhile
            if turn is Turn.TAKEN:
                has_moved_on = True
                continue
            self._queue.append(boundary)
            if turn is Turn.AFTER_ANOTHER:
                self._coming[boundary.node] += 1
        if has_moved_on:
            self.look_again()

    def _comes_no_more(self, boundary: Boundary) -> None:
        """Copied now, or who knows when."""
        self._coming[boundary.node] -= 1
        if self._coming[boundary.node] <= 0:
            del self._coming[boundary.node]

    def _start(self, boundary: Boundary) -> Turn:
        """Start the topmost piece that is missing, if that may be and there is one."""
        parts = self._parts
        component, piece = self._first_piece(boundary)
        if piece is None:
            return Turn.TAKEN
        if piece.ids is None:
            return Turn.AFTER_ANOTHER
        part = parts.part_of(component, piece)
        if not parts.may_store(boundary.node, component, part):
            return Turn.WHO_KNOWS
        num_wanted = (part.stop - part.start) // parts.tree.page_size

        def on_end(store: Transfer) -> None:
            self._num_active -= 1
            # The rest of the path comes next; after a failure it waits for the next use.
            is_current = store.epoch == parts.tree.epoch
            has_room = store.num_pages == num_wanted or parts.rows_are_coming()
            if store.is_complete and has_room and is_current:
                self._queue.appendleft(boundary)
                self._coming[boundary.node] += 1
            self.look_again()

        num_taken = parts.store(boundary.node, component, part, on_end)
        if not num_taken and parts.rows_are_coming():
            return Turn.WHO_KNOWS
        if num_taken < num_wanted:
            parts.counters.stores_refused += 1
        self._num_active += num_taken > 0
        return Turn.TAKEN

    def _first_piece(self, boundary: Boundary) -> tuple[int, Piece | None]:
        """The topmost run of pages that the host lacks, down to the last node that was used often
        enough, of the first component that lacks some."""
        tree = self._parts.tree
        node = tree.cut(boundary)
        while node.parent is not None and node.hit_count < self._threshold:
            node = node.parent
        if node.parent is None:
            return BASE, None
        # A host that is smaller than the device would else copy in circles: what storage has makes
        # room for what it has not (semantics §8.3–4).
        end = Boundary(node, node.end)
        for index in range(len(tree.components)):
            if pieces := tree.plan_transfer(end, index, Tier.HOST, unless_stored=True):
                return index, pieces[0]
        return BASE, None


class WriteBack:
    """Copies what the device is about to give up, in batches, before it is given up."""

    is_busy = False

    def __init__(self, parts: Storing) -> None:
        self._parts = parts
        self._num_active = 0
        self._num_rounds = 0

    def note_used(self, boundary: Boundary) -> None: ...
    def look_again(self) -> None: ...
    def close(self) -> None: ...

    def reset(self) -> None:
        self._num_rounds = 0

    def makes_room(self, num_pages: int) -> bool:
        if self._num_active:
            return True
        if self._num_rounds == MAX_ROUNDS:
            self._num_rounds = 0
            return False
        self._num_rounds += 1
        if self._start_round(num_pages):
            return True
        self._num_rounds = 0
        return False

    def _start_round(self, num_pages: int) -> bool:
        """Copy the unbacked among the next victims, as far as the host has room for them.

        That room is not made of the copies of the others: they would be the next to be copied.
        """
        tree = self._parts.tree
        plan = tree.plan_room(BASE, num_pages)
        held = [tree.inc_host_lock_ref(leaf, leaf.node.start) for leaf in plan.backed]
        self._copy(plan.victims)
        for receipt in held:
            tree.dec_host_lock_ref(receipt)
        return self._num_active > 0

    def _copy(self, victims: Sequence[Boundary]) -> None:
        parts = self._parts
        for victim in victims:
            for index in range(len(parts.tree.components)):
                for piece in parts.tree.plan_transfer(victim, index, Tier.HOST):
                    if piece.ids is None:
                        continue
                    part = parts.part_of(index, piece)
                    if not parts.may_store(victim.node, index, part):
                        continue
                    if not parts.store(victim.node, index, part, self._ended):
                        parts.counters.stores_refused += 1
                        break
                    self._num_active += 1

    def _ended(self, store: Transfer) -> None:
        self._num_active -= 1


def _is_to_be_copied(data: ComponentData) -> bool:
    """Whether the device alone has it, as far as is known."""
    return data.value is not None and data.host_value is None and not data.stored
