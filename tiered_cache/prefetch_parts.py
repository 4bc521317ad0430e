"""Prefetch of windows and states: not every page that storage has of a prefix ends one (semantics
§10.5).

The base is asked for beyond what device and host have, the other components also inside of it: a
tombstone is restorable alone. From what is there, on any tier, the components say where a prefix
may end; the deepest such boundary is the goal. Its base is read from the root, then its windows and
its state; what does not come, or has no room, makes the next boundary the goal. Owns: what is known
of a prefix by page, and the goal. Refuses to know: how something is read (prefetch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiered_cache.prefetch import PROBE_PAGES, Prefetch, Prefetches
from tiered_cache.storage.backend import ReadResult
from tiered_cache.tree.node import BASE
from tiered_cache.types import Tier

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Sequence

    from tiered_cache.ranks import Operation
    from tiered_cache.storage_io import StorageCall
    from tiered_cache.tree.components.base import Flags, TreeComponent
    from tiered_cache.tree.locks import Receipt


class Parts:
    """What a prefetch knows of its prefix.

    Attributes:
        stored: by component, which pages storage says to have that device and host lacked.
        most: tokens; there was no room for a longer prefix.
        common: boundaries that all ranks can have; None: there are no others.
        goal: tokens; the boundary that it goes for.
        ground: holds what is there of what the goal needs, until the rest has come; then of the
            boundary that a lease of this very prompt can use, of which a token is always computed.
    """

    __slots__ = ("common", "goal", "ground", "most", "stored")

    def __init__(self, num_components: int, length: int, page_size: int) -> None:
        self.stored = [np.zeros(length // page_size, np.bool_) for _ in range(num_components)]
        self.most = length
        self.common: Collection[int] | None = None
        self.goal = length
        self.ground: Receipt | None = None


class PrefetchesOfParts(Prefetches):
    """Prefetches of a model with components that have tombstones."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for component, allocator in zip(self._tree.components, self._host.allocators, strict=True):
            if component.has_tombstones:  # the least is what one boundary needs
                depth = allocator.capacity * self._page_size
                least = len(component.pages_needed(depth))
                self._quotas[component.index] = max(self._quotas[component.index], least)

    # --- what is there ----------------------------------------------------------------------------

    async def _find(self, prefetch: Prefetch) -> Sequence[bytes]:
        tree, size = self._tree, self._page_size
        parts = prefetch.parts = Parts(len(tree.components), prefetch.length, size)
        hit = self._hold(prefetch)
        if not self.is_worth(prefetch.length - hit):
            prefetch.note("less than the threshold is missing")
            return ()
        keys = await self._hash(prefetch)
        there = tree.base_boundary(prefetch.key, prefetch.length).depth
        believed = min(tree.stored_length(prefetch.key, there), prefetch.length)
        found = await self._probe(prefetch, there, keys)
        if found < believed:
            self._host.take_back(tree.forget_stored(prefetch.key, found))
        parts.stored[BASE][there // size : found // size] = True
        for component in tree.components:
            if component.has_tombstones:
                await self._probe_part(prefetch, component, hit, keys[: found // size])
        deepest = max(self._boundaries(prefetch, parts.stored))
        if deepest <= hit:
            prefetch.note("storage has no more of it that can be used")
        elif not self.is_worth(deepest - hit):
            prefetch.note("storage has less than the threshold more that can be used")
        else:
            prefetch.found = deepest
        return keys

    async def _probe_part(
        self, prefetch: Prefetch, component: TreeComponent, hit: int, keys: Sequence[bytes]
    ) -> None:
        """Ask for what a boundary beyond `hit` could need of a component, and no tier has."""
        size, index, stored = self._page_size, component.index, prefetch.parts.stored
        first = component.pages_needed(hit + size).start
        there = self._tree.presence(prefetch.key, len(keys) * size)[index]
        wanted = [page for page in range(first, len(keys)) if not there[page]]
        for at in range(0, len(wanted), PROBE_PAGES):
            asked = wanted[at : at + PROBE_PAGES]
            answers = await self._io.contains(index, [keys[page] for page in asked])
            for page, is_there in zip(asked, answers, strict=True):
                stored[index][page] = is_there and not self._io.is_wrong(index, keys[page])
            lost = [page for page in asked if not stored[index][page]]
            self._tree.disbelieve(prefetch.key, index, lost)

    def _boundaries(self, prefetch: Prefetch, stored: Sequence[Flags] | None = None) -> list[int]:
        """Where a prefix may end (0 always may), with what is on device and host and, if given,
        with what storage has."""
        there = self._tree.presence(prefetch.key, prefetch.length)
        legal = np.ones(prefetch.length // self._page_size, np.bool_)
        for component in self._tree.components:
            flags = there[component.index]
            if stored is not None:
                flags |= stored[component.index]
            legal &= component.restorable(flags)
        return [0, *((np.flatnonzero(legal) + 1) * self._page_size).tolist()]

    # --- other ranks ------------------------------------------------------------------------------

    async def _agree_on_goal(self, prefetch: Prefetch, joint: Operation) -> None:
        parts = prefetch.parts
        parts.common = await joint.agree(
            self._boundaries(prefetch, parts.stored if prefetch.found else None)
        )

    async def _agree_on_result(self, prefetch: Prefetch, joint: Operation) -> None:
        offers = [depth for depth in self._boundaries(prefetch) if depth <= prefetch.reached]
        prefetch.reached = max(await joint.agree(offers))
        if prefetch.receipt is not None:
            self._hold(prefetch, prefetch.reached)

    # --- the way ----------------------------------------------------------------------------------

    def _hold(self, prefetch: Prefetch, limit: int | None = None) -> int:
        """And what there is up to the goal: the best boundary may end above it, until all has come,
        and what is missing may be above what the host has."""
        hit, parts, tree = super()._hold(prefetch, limit), prefetch.parts, self._tree
        ground, boundary = parts.ground, tree.known_boundary(prefetch.key, parts.goal)
        needed = [component.pages_needed(parts.goal) for component in tree.components]
        starts = [pages.start * self._page_size for pages in needed]
        parts.ground = tree.hold_each(boundary, Tier.HOST, starts)
        if ground is not None:
            tree.let_go(ground)
        return hit

    def _let_go_of_ground(self, prefetch: Prefetch) -> None:
        if prefetch.parts is not None and prefetch.parts.ground is not None:
            ground, prefetch.parts.ground = prefetch.parts.ground, None
            self._tree.let_go(ground)

    def stop(self, prefetch: Prefetch, why: str) -> None:
        super().stop(prefetch, why)
        self._let_go_of_ground(prefetch)

    def _let_go(self, prefetch: Prefetch) -> None:
        self._let_go_of_ground(prefetch)
        super()._let_go(prefetch)

    def _ended(self, prefetch: Prefetch, task: asyncio.Task[None]) -> None:
        super()._ended(prefetch, task)
        if prefetch.parts is not None and prefetch.parts.goal > prefetch.reached:
            self._let_go_of_ground(prefetch)  # what was to come has not

    async def _bring(self, prefetch: Prefetch, keys: Sequence[bytes]) -> None:
        if not prefetch.found:
            self._let_go_of_ground(prefetch)
            return
        parts = prefetch.parts
        # For what begins with this prompt, and for this very prompt.
        for most in (prefetch.length, prefetch.key.num_tokens - 1):
            parts.most = min(parts.most, most)
            while await self._bring_some(prefetch, keys):
                pass

    async def _bring_some(self, prefetch: Prefetch, keys: Sequence[bytes]) -> bool:
        parts, size = prefetch.parts, self._page_size
        before, parts.goal = parts.goal, self._goal(prefetch)
        self._hold(prefetch)
        if parts.goal < before:
            self._count_again(prefetch)
        step = self._next_step(prefetch)
        if step is None:
            return False
        component, first, count = step
        index = component.index
        other = self._reading.get((index, keys[first]))
        if other is not None:
            await self._join(other)
            return True
        if index == BASE:
            lacking = np.flatnonzero(~self._tree.presence(prefetch.key, parts.goal)[BASE])
            room = max(0, self._room(index, len(lacking)))
            if room < len(lacking):  # then a shorter prefix that has room, and nothing in vain
                self._counters.prefetches_refused += not room
                prefetch.note("refused: other prefetches have all that they may of the host")
                parts.most = int(lacking[room]) * size
                return True
        wanted = self._unread(index, keys[first : first + count])
        ids = self._take_rows(prefetch, index, len(wanted))
        if len(ids) < len(wanted) and index != BASE:
            self._host.give_back(self._host.only(index, ids))
            parts.stored[index][:] = False  # what has no room is as good as not there
            return True
        if len(ids) < len(wanted):
            parts.most = (first + len(ids)) * size
        if not len(ids):
            return True
        await self._read(prefetch, index, first * size, wanted[: len(ids)], ids)
        return True

    def _goal(self, prefetch: Prefetch) -> int:
        """The deepest boundary that can be had."""
        parts = prefetch.parts
        return max(
            depth
            for depth in self._boundaries(prefetch, parts.stored)
            if depth <= parts.most and (parts.common is None or depth in parts.common or not depth)
        )

    def _count_again(self, prefetch: Prefetch) -> None:
        """What was brought for a boundary that does not come is not held any more: the next one is
        to have the room."""
        goal = prefetch.parts.goal
        there = self._tree.presence(prefetch.key, goal)
        for component in self._tree.components:
            needed = component.pages_needed(goal) if goal else range(0)
            count = int(np.count_nonzero(there[component.index][needed.start : needed.stop]))
            prefetch.brought[component.index] = min(prefetch.brought[component.index], count)
        self._hooks.changed()

    def _next_step(self, prefetch: Prefetch) -> tuple[TreeComponent, int, int] | None:
        """What the goal lacks: the first component, its first page, how many follow each other."""
        goal = prefetch.parts.goal
        if not goal:
            return None
        there = self._tree.presence(prefetch.key, goal)
        for component in self._tree.components:
            needed = component.pages_needed(goal)
            lacking = np.flatnonzero(~there[component.index][needed.start : needed.stop])
            if len(lacking):
                breaks = np.flatnonzero(np.diff(lacking) != 1)
                count = int(breaks[0]) + 1 if len(breaks) else len(lacking)
                return component, needed.start + int(lacking[0]), count
        return None

    def _note_wrong(
        self, prefetch: Prefetch, start: int, page_keys: Sequence[bytes], call: StorageCall
    ) -> None:
        super()._note_wrong(prefetch, start, page_keys, call)
        for page, result in enumerate(call.results, start // self._page_size):
            if result is not ReadResult.READ:
                prefetch.parts.stored[call.component][page] = False
        if call.component != BASE:
            results = enumerate(call.results, start // self._page_size)
            wrong = [page for page, result in results if result is not ReadResult.READ]
            self._tree.disbelieve(prefetch.key, call.component, wrong)
