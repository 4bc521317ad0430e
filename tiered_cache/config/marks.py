"""Where settings were written, so that a mistake found late still names its place."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

KeyPath = tuple[str | int, ...]
"""`model.extra_pools[0].name` as `("model", "extra_pools", 0, "name")`."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place: file (or a variable, or "argument"), line and column counted from 1."""

    file: str | None = None
    line: int | None = None
    column: int | None = None


@dataclass(slots=True)
class Marks:
    """Places of keys and of their values, by path.

    Two configurations that say the same are equal wherever they were written, so places never
    count in a comparison.
    """

    values: dict[KeyPath, Mark] = field(default_factory=dict)
    keys: dict[KeyPath, Mark] = field(default_factory=dict)

    def nearest(self, path: KeyPath, *, at_key: bool = False) -> Mark:
        """The place of a value (or of its key); else of the innermost section that was written."""
        found = self.keys.get(path) if at_key else None
        found = found or self.values.get(path)
        while found is None and path:
            path = path[:-1]
            found = self.keys.get(path) or self.values.get(path)
        return found or Mark()

    def drop(self, path: KeyPath) -> None:
        """Forget a setting, and all inside it, that something else replaces."""
        for places in (self.values, self.keys):
            for old in [old for old in places if old[: len(path)] == path]:
                del places[old]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Marks)

    __hash__ = None  # type: ignore[assignment]  # mutable


def dotted(path: KeyPath) -> str:
    """`("model", "extra_pools", 0, "name")` as `model.extra_pools[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def parse_path(key: str) -> KeyPath:
    return tuple(
        int(part[1:-1]) if part.startswith("[") else part
        for part in re.findall(r"\[\d+\]|[^.\[\]]+", key)
    )
