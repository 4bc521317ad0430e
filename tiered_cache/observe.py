"""The one observer seam: a sync callback at every commit beat.

Metrics, KV events, tracing and tests hang here. An observer is told after the fact, on the loop's
thread, between two consistent states; it must not call back into the cache. An observer that raises
is dropped with a log line: what looks on never breaks what it looks at.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from tiered_cache.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiered_cache.tree.node import Node

log = logging.getLogger(__name__)


class EventKind(Enum):
    """What has happened."""

    STORED = "stored"  # a tier has gained a component's part of a node
    REMOVED = "removed"  # a tier has lost it
    CLEARED = "cleared"  # reset(): all tiers above storage are empty
    FORGOTTEN = "forgotten"  # storage was cleared or detached: it may have nothing of what was told
    GRANTED = "granted"  # a lease was admitted
    REMATCHED = "rematched"  # a lease goes on from what another has published
    COMMITTED = "committed"  # a lease has published tokens
    LOADED = "loaded"  # a load has lengthened a lease's prefix
    RELEASED = "released"  # a lease has ended
    HEALTH = "health"  # storage has become well or unwell; `detail` says how


@dataclass(slots=True)
class Event:
    """One event. `component`, `tier` and `node` for STORED and REMOVED; `lease_id` and `tokens` for
    a lease's own. Of storage they tell what the tree has come to believe (semantics §8.4); when it
    evicts a node it tells nothing, for storage keeps it, and STORED once more when it is back.

    `node` is valid during the call only; its page keys come from `RadixTree.page_keys(node)`.
    """

    kind: EventKind
    component: str = ""
    tier: Tier = Tier.DEVICE
    node: Node | None = None
    lease_id: int = -1
    tokens: int = 0
    detail: str = ""


class Observer(Protocol):
    """Something that wants to know."""

    def on_event(self, event: Event) -> None:
        """Take note. Called synchronously; must be quick and must not raise."""


class Observers:
    """Several observers as one. Hot paths look at `listening` before they make an event."""

    __slots__ = ("listening",)

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self.listening = list(observers)

    def on_event(self, event: Event) -> None:
        for observer in tuple(self.listening):
            try:
                observer.on_event(event)
            except Exception:
                log.exception("observer %r raised and is dropped", observer)
                self.listening.remove(observer)
