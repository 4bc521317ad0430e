"""Files that are being written, out of sight until they are whole.

Each open directory has a folder of its own for them, and in it a file that it keeps locked for as
long as it lives. The kernel gives up that lock when the process ends in whichever way, so a folder
whose lock can be had belongs to nobody and is removed. A process id would not do: numbers are used
again, and each container counts its own.

Refuses to know: what is written, and where it goes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from itertools import count
from typing import TYPE_CHECKING, Final

from tiered_cache_file.layout import PRIVATE_DIR, PRIVATE_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

ALIVE: Final = "alive"


class Temporary:
    """This open directory's folder. Make it while the account is held, so that nobody takes it for
    a dead one in between."""

    __slots__ = ("_fd", "_numbers", "_path")

    def __init__(self, parent: str) -> None:
        self._path = f"{parent}/{secrets.token_hex(8)}"
        self._numbers: Iterator[int] = count()
        os.mkdir(self._path, PRIVATE_DIR)
        self._fd = os.open(
            f"{self._path}/{ALIVE}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE
        )
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def new_path(self) -> str:
        """A name that nobody else has. From any thread."""
        return f"{self._path}/{next(self._numbers)}"

    def remove(self) -> None:
        """The folder and all in it. Nothing is being written any more."""
        _remove(self._path)

    def close(self) -> None:
        """Alive no longer."""
        os.close(self._fd)


def sweep(parent: str) -> int:
    """Remove the folders of those that live no longer; how many. While the account is held."""
    dead = [f"{parent}/{name}" for name in os.listdir(parent) if _is_dead(f"{parent}/{name}")]
    for path in dead:
        _remove(path)
    return len(dead)


def _is_dead(path: str) -> bool:
    try:
        fd = os.open(f"{path}/{ALIVE}", os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # killed before it had one
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _remove(path: str) -> None:
    """What cannot be removed is left for the next."""
    try:
        for name in os.listdir(path):
            os.unlink(f"{path}/{name}")
        os.rmdir(path)
    except OSError:
        pass
