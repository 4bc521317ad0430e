"""How much memory this process may still take: the container's limit, else the machine's.

Owns: reading the kernel's figures. Refuses to know: who wants the memory and what to do without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")

NO_LIMIT_V1: Final = 1 << 60
"""Version 1 has no word for "no limit": it shows the largest number of pages instead."""


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that can be taken without anything being killed or swapped; None when nobody says.

    The least of what the machine has available and what each control group above this process
    (version 2, or version 1's memory controller) has left. Page cache that can go counts as left.

    Reads a few files under `/proc` and `/sys`: call it where that may block.
    """
    meminfo = _read(proc / "meminfo")
    found = [] if meminfo is None else [machine_available(meminfo)]
    for directory, version in group_directories(_read(proc / "self/cgroup") or "", cgroups):
        names = V2_FILES if version == 2 else V1_FILES
        limit, usage, stat = (_read(directory / name) for name in names)
        if limit is not None and usage is not None:
            found.append(group_available(limit, usage, stat or ""))
    return min((value for value in found if value is not None), default=None)


V2_FILES: Final = ("memory.max", "memory.current", "memory.stat")
V1_FILES: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")


def group_directories(membership: str, cgroups: Path) -> list[tuple[Path, int]]:
    """From the text of `/proc/self/cgroup`: the directories of the process's memory group and the
    groups above it, each with its version.

    A limit anywhere above holds too. In a container the path may be the host's: what does not exist
    under `cgroups` is not read, and the root of the mount is the container's own group.
    """
    directories = []
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root, version = cgroups, 2
        elif "memory" in controllers.split(","):
            root, version = cgroups / "memory", 1
        else:
            continue
        group = root / path.strip("/")
        while group != root:
            directories.append((group, version))
            group = group.parent
        directories.append((root, version))
    return directories


def group_available(limit: str, usage: str, stat: str) -> int | None:
    """What a control group has left, from the texts of its limit, usage and statistics files; None
    without a limit."""
    if limit.strip() == "max" or int(limit) >= NO_LIMIT_V1:
        return None
    counts = _counts(stat)
    # Version 1 counts a group's children only in the figures that begin with `total_`.
    reclaimable = counts.get("total_inactive_file", counts.get("inactive_file", 0))
    return max(0, int(limit) - int(usage) + reclaimable)


def machine_available(meminfo: str) -> int | None:
    """`MemAvailable` of the text of `/proc/meminfo`, in bytes."""
    kib = _counts(meminfo).get("MemAvailable:")
    return None if kib is None else kib * 1024


def _counts(text: str) -> dict[str, int]:
    """Lines that begin with a name and a number."""
    fields = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdigit()}


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
