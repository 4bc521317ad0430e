"""Pages that were published before they were written: a GPU computes on after `commit` (§9.4).

A fence stands between the two moments. While it stands nobody copies its pages to the host, they
stay where they are, and whoever matches them is told. Owns: the fences that stand. Refuses to know:
what is computed, and when pages are copied.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiered_cache.types import PageIds


class Fence:
    """`ids`: pages of the first component, sorted. `lifted` is set when they are written, or when
    whoever said so has failed; `passed` then, or when a reset has made them meaningless."""

    __slots__ = ("ids", "lifted", "on_lift", "passed")

    def __init__(self, ids: PageIds, on_lift: Callable[[], None]) -> None:
        self.ids = np.sort(ids)
        self.lifted = asyncio.Event()
        self.passed = asyncio.Event()
        self.on_lift = on_lift


class Fences:
    """All fences of a cache that stand. There are as many as commits under way, so they are looked
    through one by one."""

    __slots__ = ("_changed", "_standing")

    def __init__(self, changed: Callable[[], None]) -> None:
        self._standing: list[Fence] = []
        self._changed = changed

    def raise_over(self, ids: PageIds, on_lift: Callable[[], None]) -> Fence:
        """From now on these pages are not written yet; `on_lift` is called when they are."""
        fence = Fence(ids, on_lift)
        self._standing.append(fence)
        return fence

    def lift(self, fence: Fence) -> None:
        """They are written."""
        if fence in self._standing:
            self._standing.remove(fence)
            fence.lifted.set()
            fence.passed.set()
            fence.on_lift()
            self._changed()

    def over(self, ids: PageIds) -> list[Fence]:
        """The fences over some of these pages."""
        if not self._standing:
            return []
        return [fence for fence in self._standing if np.isin(ids, fence.ids).any()]

    def reset(self) -> None:
        """Nothing is in the tree any more; who waits goes on. The fences go on for their owners."""
        for fence in self._standing:
            fence.ids = fence.ids[:0]
            fence.passed.set()

    def __len__(self) -> int:
        return len(self._standing)


def is_device_event(ready: Any) -> bool:
    """Whether it blocks a thread until a device has come there (`torch.cuda.Event`)."""
    return not inspect.isawaitable(ready) and callable(getattr(ready, "synchronize", None))


def as_awaitable(ready: Any) -> Awaitable[object]:
    """What a caller gave as `ready`, as something to await on the loop.

    An awaitable, or an event with an async `wait` (`asyncio.Event`). A coroutine becomes a task.

    Raises:
        TypeError: neither.
    """
    if inspect.isawaitable(ready):
        return ready
    wait = getattr(ready, "wait", None)
    if inspect.iscoroutinefunction(wait):
        return wait()
    raise TypeError(f"ready must be awaitable or an event, not {type(ready).__name__}")
