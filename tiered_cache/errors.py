"""The one family of errors, grouped by what a caller can do about them.

A miss is not an error, and neither is pressure while there is something shorter to give: see
`Lease.why`. Errors of bad input that Python has a word for stay `ValueError` and `TypeError`
(tokens, limits, lengths), so that they read as they do everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class TieredCacheError(Exception):
    """Base of everything that this library raises on its own account."""


# --- Mend the input -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing wrong in a configuration: where it stands and what to write instead."""

    message: str
    key: str = ""
    file: str | None = None
    line: int | None = None
    column: int | None = None
    suggestion: str | None = None

    def __str__(self) -> str:
        place = ":".join(
            str(part) for part in (self.file, self.line, self.column) if part is not None
        )
        text = ": ".join(part for part in (place, self.key, self.message) if part)
        return f"{text} ({self.suggestion})" if self.suggestion else text


class ConfigError(TieredCacheError):
    """The configuration cannot be used. Lists every problem at once: file, line, key and what to
    write instead."""

    def __init__(self, problems: list[ConfigProblem] | str) -> None:
        self.problems = [ConfigProblem(problems)] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


# --- Ask for less, wait, or let others go ---------------------------------------------------------


MAX_NAMED: Final = 5
"""Holders that a message names; all of them are in `held_by`."""


class CapacityError(TieredCacheError):
    """A tier cannot hold what was asked, now (release the leases in `held_by`) or ever (`held_by`
    is empty).

    Attributes: `needed`, `free`, `evictable` in pages of `component`; `held_by`: the owners of the
    rest.
    """

    def __init__(
        self,
        message: str,
        *,
        component: str,
        needed: int,
        free: int,
        evictable: int,
        held_by: tuple[str, ...] = (),
    ) -> None:
        self.component, self.needed, self.free, self.evictable = component, needed, free, evictable
        self.held_by = held_by
        named = ", ".join(held_by[:MAX_NAMED])
        more = f" and {len(held_by) - MAX_NAMED} more" if len(held_by) > MAX_NAMED else ""
        holders = f"; held by {named}{more}" if held_by else ""
        super().__init__(
            f"{message} (component {component!r}: needed {needed} pages, free {free}, "
            f"evictable {evictable}{holders})"
        )


class AdmissionTimeout(TieredCacheError, TimeoutError):
    """The lease was not admitted within its `timeout`; nothing is held. Retry, or shed the
    request."""


class RanksError(TieredCacheError):
    """Another rank of the model has given up, or ranks cannot talk: what they were doing together
    has ended on all of them. Close the lease, and try again on all."""


# --- Compute again --------------------------------------------------------------------------------


class LoadFailed(TieredCacheError):
    """A layer of a layer-wise load did not arrive; the lease has fallen back, `next_chunk` goes on
    from there."""


class BackendError(TieredCacheError):
    """A storage backend is unwell. Never reaches a request; seen by backend authors and
    operators."""


# --- Mend the program -----------------------------------------------------------------------------


class LockError(TieredCacheError):
    """A receipt was released twice, or is not one of this tree's. Nothing has changed."""


class StaleError(TieredCacheError):
    """What was used belongs to a state that is gone (a `reset()`, an evicted node). Match or lease
    again."""


class WrongThreadError(TieredCacheError):
    """Called from another thread or event loop than the one the cache was opened on."""


class ClosedError(TieredCacheError):
    """The cache or lease is closed (or inherited through a fork). Open a new one."""


class IntegrityError(TieredCacheError):
    """The cache's own records contradict each other: a bug of this library. Never caught inside it;
    please report."""


def stale_prefix(prev_prefix_len: int, held: int) -> StaleError:
    """An insert relies on a prefix that the tree does not hold (any more)."""
    return StaleError(
        f"prev_prefix_len is {prev_prefix_len}, but the tree holds device pages only up to {held}: "
        "keep the prefix locked while it is in use"
    )
