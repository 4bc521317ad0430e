"""Where coroutines wait: every await of a package, found in its source, and where a task stands."""

from __future__ import annotations

import gc
import types
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

FRAMES: Final = (("cr_frame", "cr_await"), ("ag_frame", "ag_await"), ("gi_frame", "gi_yieldfrom"))
"""Attributes of coroutines, asynchronous generators and generators: where each stands, and what it
waits for."""


def frames_of(waiting: Any) -> Iterator[types.FrameType]:
    """Where a suspended coroutine stands, outermost frame first."""
    while waiting is not None:
        for frame, waits_for in FRAMES:
            if hasattr(waiting, frame):
                if getattr(waiting, frame) is not None:
                    yield getattr(waiting, frame)
                waiting = getattr(waiting, waits_for)
                break
        else:
            waiting = _inside(waiting)


def _inside(awaitable: Any) -> Any:
    """What wrappers without attributes drive: of `__await__`, `asend`, `anext`."""
    kinds = (types.CoroutineType, types.AsyncGeneratorType)
    if type(awaitable).__name__ not in WRAPPERS:
        return None
    return next((held for held in gc.get_referents(awaitable) if isinstance(held, kinds)), None)


WRAPPERS: Final = frozenset(
    {"coroutine_wrapper", "async_generator_asend", "async_generator_athrow", "anext_awaitable"}
)
