"""The lock between processes that share a directory, and how much there is in it.

Objects appear and disappear only while the lock is held, and what that changes is written down
before it is given back. So every process knows the sum, and the sum of all keeps to the budget.
Where a process is killed in between, the account names too much and never too little: what comes is
added before, what goes is taken off after. Counting a bucket anew sets it right.

Refuses to know: which objects there are.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_cache.errors import BackendError
from tiered_cache_file.layout import NUM_BUCKETS, PRIVATE_FILE, unusable

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER: Final = struct.Struct("<8s")
MAGIC: Final = b"TCFILES1"
STATE_BYTES: Final = HEADER.size + 2 * NUM_BUCKETS * 8

LIMIT_S: Final = 5.0
"""For the lock. It is held for milliseconds: who holds it for longer is stopped, not busy."""
PAUSE_S: Final = 0.0002
MAX_PAUSE_S: Final = 0.002
"""Between two tries. Not waiting in the kernel, since that has no limit."""
REST_S: Final = 2 * MAX_PAUSE_S
"""Who takes the lock many times in turn leaves it alone for so long now and then."""


class Usage:
    """How many objects of how many bytes are in each bucket, over all scopes."""

    __slots__ = ("_num_bytes", "_num_objects", "changed", "num_bytes", "num_objects")

    def __init__(self, state: bytes) -> None:
        words = np.frombuffer(state, np.int64, offset=HEADER.size).copy()
        self._num_objects, self._num_bytes = words[:NUM_BUCKETS], words[NUM_BUCKETS:]
        self.num_objects, self.num_bytes = int(self._num_objects.sum()), int(self._num_bytes.sum())
        self.changed = False

    def add(self, bucket: int, num_bytes: int, num_objects: int = 1) -> None:
        self._num_objects[bucket] += num_objects
        self._num_bytes[bucket] += num_bytes
        self.num_objects += num_objects
        self.num_bytes += num_bytes
        self.changed = True

    def remove(self, bucket: int, num_bytes: int) -> None:
        self.add(bucket, -num_bytes, -1)

    def num_objects_in(self, bucket: int) -> int:
        return int(self._num_objects[bucket])

    def counted(self, bucket: int, num_bytes: int, num_objects: int) -> None:
        """That is what is there, whatever was written down."""
        more = num_bytes - int(self._num_bytes[bucket]), num_objects - self.num_objects_in(bucket)
        if any(more):
            self.add(bucket, *more)

    def state(self) -> bytes:
        return HEADER.pack(MAGIC) + self._num_objects.tobytes() + self._num_bytes.tobytes()


NOTHING: Final = HEADER.pack(MAGIC) + bytes(STATE_BYTES - HEADER.size)


class Account:
    """One open directory's hold on the lock file. For threads.

    Attributes:
        num_objects, num_bytes: as they were when the lock was last held here.
    """

    def __init__(self, path: str) -> None:
        self.num_objects = self.num_bytes = 0
        self._path = path
        self._thread_lock = threading.Lock()
        """Threads of one process share the file's lock, so they need one of their own."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)

    def close(self) -> None:
        os.close(self._fd)

    @contextmanager
    def held(self, *, new: bool = False) -> Iterator[Usage]:
        """The lock, and the account as it is now. What is changed in it is written down at the end.

        Args:
            new: an account that cannot be read begins anew; all buckets are counted next.

        Raises:
            BackendError: somebody else has the lock for too long, or the file is not what it was.
        """
        if not self._acquire(time.monotonic() + LIMIT_S):
            raise BackendError(
                f"{self._path} has been locked for {LIMIT_S:g} s: a process that shares the "
                "directory is stopped or hangs (`fuser` names it); end it, or use another `path`"
            )
        try:
            yield from self._open(new)
        finally:
            self._release()

    @contextmanager
    def held_if_free(self) -> Iterator[Usage | None]:
        """The same without waiting; None when somebody else has the lock."""
        if not self._acquire(time.monotonic()):
            yield None
            return
        try:
            yield from self._open()
        finally:
            self._release()

    def save(self, usage: Usage) -> None:
        """Write down now what has changed: before objects come that must not be forgotten."""
        if usage.changed:
            if os.pwrite(self._fd, usage.state(), 0) != STATE_BYTES:
                raise OSError(errno.EIO, "short write")
            usage.changed = False

    def _open(self, new: bool = False) -> Iterator[Usage]:
        usage = self._load(new)
        try:
            yield usage
        finally:
            self.num_objects, self.num_bytes = usage.num_objects, usage.num_bytes
            try:
                self.save(usage)
            except OSError:
                pass  # what goes was not taken off: the next count does that

    def _load(self, new: bool) -> Usage:
        try:
            removed = not os.fstat(self._fd).st_nlink
            state = os.pread(self._fd, STATE_BYTES + 1, 0)
            if new and not _is_account(state):
                state = NOTHING
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, state, 0)
        except OSError as error:
            raise unusable(self._path, error) from error
        if removed:
            raise BackendError(
                f"{self._path} was removed while it was in use, and nobody else would see the lock"
            )
        if not _is_account(state):
            raise BackendError(f"{self._path} was overwritten; opened again, it is made anew")
        return Usage(state)

    def _acquire(self, deadline_s: float) -> bool:
        if not self._thread_lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            return False
        locked = False
        pause_s = PAUSE_S
        try:
            while not (locked := self._try_lock()) and time.monotonic() < deadline_s:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            if not locked:
                self._thread_lock.release()
        return locked

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise unusable(self._path, error) from error
        return True

    def _release(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._thread_lock.release()


def _is_account(state: bytes) -> bool:
    return len(state) == STATE_BYTES and state.startswith(MAGIC)
