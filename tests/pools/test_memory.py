"""What memory is left: the kernel's figures, read right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_cache.pools.memory import (
    available_bytes,
    group_available,
    group_directories,
    machine_available,
)

GIB = 1 << 30
MEMINFO = (
    "MemTotal:       24 kB\nMemFree:  1 kB\nMemAvailable:   16777216 kB\nHugePages_Total:   0\n"
)


def test_the_machine_says_what_is_available() -> None:
    """Not what is free: most of the page cache can go."""
    assert machine_available(MEMINFO) == 16 * GIB
    assert machine_available("MemTotal: 24 kB\n") is None


@pytest.mark.parametrize(
    ("limit", "usage", "stat", "left"),
    [
        ("max\n", "1\n", "", None),
        ("9223372036854771712\n", "1\n", "", None),  # how version 1 writes it
        ("1000\n", "400\n", "anon 300\nfile 100\ninactive_file 70\n", 670),
        ("1000\n", "400\n", "inactive_file 1\ntotal_inactive_file 90\n", 690),
        ("1000\n", "400\n", "", 600),
        ("1000\n", "1200\n", "inactive_file 50\n", 0),
    ],
)
def test_a_group_has_left_what_it_does_not_use_and_can_drop(
    limit: str, usage: str, stat: str, left: int | None
) -> None:
    """Inactive page cache goes before anybody is killed."""
    assert group_available(limit, usage, stat) == left


def test_every_group_above_the_process_counts() -> None:
    """Version 2 has one line; of version 1 only the line of the memory controller matters."""
    root = Path("/cg")
    assert group_directories("0::/a/b\n", root) == [(root / "a/b", 2), (root / "a", 2), (root, 2)]
    mixed = "9:name=systemd:/\n4:cpu,memory:/x\n3:cpuset:/y\n0::/\n"
    assert group_directories(mixed, root) == [
        (root / "memory/x", 1),
        (root / "memory", 1),
        (root, 2),
    ]
    assert group_directories("0::/../other\n", root)[-1] == (root, 2)
    assert group_directories("", root) == []


def machine(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    for path, text in {
        proc / "meminfo": MEMINFO,
        proc / "self/cgroup": membership,
        **{cgroups / name: text for name, text in files.items()},
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


def test_the_least_of_all_limits_holds(tmp_path: Path) -> None:
    """A group above may be tighter than the process's own; without a limit the machine counts."""
    files = {
        "a/b/memory.max": f"{8 * GIB}\n",
        "a/b/memory.current": f"{GIB}\n",
        "a/b/memory.stat": f"inactive_file {GIB // 2}\n",
        "a/memory.max": f"{4 * GIB}\n",
        "a/memory.current": f"{2 * GIB}\n",
    }
    assert available_bytes(*machine(tmp_path / "limited", "0::/a/b\n", files)) == 2 * GIB
    assert available_bytes(*machine(tmp_path / "free", "0::/\n", {})) == 16 * GIB
    assert available_bytes(tmp_path / "nothing", tmp_path / "here") is None


def test_version_1_is_read_too(tmp_path: Path) -> None:
    """In a container the group's path may be the host's, and the mount's root the own group."""
    files = {
        "memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        "memory/memory.usage_in_bytes": f"{GIB}\n",
        "memory/memory.stat": "total_inactive_file 4096\n",
    }
    membership = "4:memory:/docker/0123\n"
    assert available_bytes(*machine(tmp_path, membership, files)) == 2 * GIB + 4096


def test_this_machine_has_memory() -> None:
    """Whatever system this is, the figure is one or there is none."""
    left = available_bytes()
    assert left is None or 0 < left < 1 << 50
