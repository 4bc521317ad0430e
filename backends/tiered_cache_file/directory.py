"""What threads do with the objects of a directory: read, write, delete, count, evict.

Every method is one job: it blocks, and when it returns nothing of it goes on. Owns the order of
things between processes: a file is written out of sight, and comes into sight whole, under the lock
and in the account, when there is room for it. Refuses to know: event loops, and who waits.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tiered_cache.storage import ObjectInfo, ReadResult, WriteResult
from tiered_cache_file.account import REST_S, Account
from tiered_cache_file.layout import (
    NUM_BUCKETS,
    PRIVATE_FILE,
    Layout,
    bucket_of,
    key_of,
    make_dir,
    scope_of,
    unusable,
)
from tiered_cache_file.temporary import Temporary, sweep
from tiered_cache_file.victims import Clock, Victims

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiered_cache.storage import ObjectKey
    from tiered_cache_file.account import Usage

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 << 10
"""Read at once, and told of: a checksum over it finds it in the processor's cache."""

DIRECT_ALIGNMENT: Final = 4096
O_DIRECT: Final = getattr(os, "O_DIRECT", 0)

NUM_RECOUNTED: Final = 8
"""Buckets that one job counts again, at most: 2 ms each where there are 200,000 objects."""

NUM_TRIMMED: Final = 256
"""Objects that go while the lock is held, when a directory is opened with a smaller budget."""
REST_AFTER_S: Final = 0.02
"""Of a listing; a large one takes a second, and others write meanwhile."""
ANY_AGE: Final = 1 << 63

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
UNWELL: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
)
"""What a write meets when the directory cannot be written to at all."""


class Item(NamedTuple):
    """One row of a batch, where it stands there, and how new its file becomes by this."""

    position: int
    key: ObjectKey
    row: memoryview
    stamp: int


@dataclass(slots=True)
class Writing:
    """A row on its way into sight."""

    item: Item
    temporary: str | None = None
    result: WriteResult | None = None
    error: OSError | None = None


class Directory:
    """An open directory. Made in a thread, too.

    Args:
        direct_beyond: bytes in all, above which reads go past the page cache; None: never.
    """

    def __init__(
        self, root: str, max_size: int, reserve: int, direct_beyond: int | None = None
    ) -> None:
        self._layout = Layout(root)
        self.max_size = max_size
        self._reserve = reserve
        self._direct_beyond = direct_beyond if O_DIRECT else None
        self._victims = Victims()
        self._list_lock = threading.Lock()
        self._num_listings = 0
        self._doubtful: set[int] = set()
        """Buckets that hold less than the account says, perhaps."""
        self._complaints: set[int | None] = set()
        self.clock = Clock()
        try:
            self._open()
        except OSError as error:
            raise unusable(root, error) from error

    def _open(self) -> None:
        layout = self._layout
        if os.stat(layout.root).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            log.warning("others may write to %s, and so replace what is in it", layout.root)
        for path in (layout.objects, layout.temporary):
            make_dir(path)
        self.account = Account(layout.lock)
        try:
            with self.account.held(new=True):
                sweep(layout.temporary)
                self._temporary = Temporary(layout.temporary)
        except BaseException:
            self.account.close()
            raise

    def remove_temporary(self) -> None:
        """Leave nothing behind. Before `close`, when nothing is being written any more."""
        self._temporary.remove()

    def close(self) -> None:
        """Let go of the files; does not block."""
        self._temporary.close()
        self.account.close()

    # --- what is there ----------------------------------------------------------------------------

    def contains(self, keys: Sequence[ObjectKey], stamps: Sequence[int]) -> list[bool]:
        """Which of them have a file. That one is asked for counts as its use: what was promised is
        not what goes next."""
        return [self._touch(key, stamp) for key, stamp in zip(keys, stamps, strict=True)]

    def _touch(self, key: ObjectKey, stamp: int) -> bool:
        path = self._layout.path(key)
        try:
            os.utime(path, ns=(stamp, stamp))
        except FileNotFoundError:
            return False
        except OSError:
            return os.path.exists(path)  # a file system that has become read-only, for instance
        return True

    def scopes(self) -> list[bytes]:
        try:
            names = os.listdir(self._layout.objects)
        except FileNotFoundError:
            return []
        return [scope for name in names if (scope := scope_of(name)) is not None]

    def objects(self, scope: bytes, bucket: int) -> list[ObjectInfo]:
        now_ns = time.time_ns()
        return [
            ObjectInfo(key, num_bytes, max(0, now_ns - stamp) / 1e9)
            for key, num_bytes, stamp in self._entries(scope, bucket)
        ]

    def _entries(self, scope: bytes, bucket: int) -> Iterator[tuple[ObjectKey, int, int]]:
        """Key, bytes and stamp of each object; what else lies there is nobody's business."""
        try:
            listing = os.scandir(self._layout.bucket(scope, bucket))
        except (FileNotFoundError, NotADirectoryError):
            return
        with listing:
            for entry in listing:
                key = key_of(scope, bucket, entry.name)
                if key is None:
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(found.st_mode):
                    yield key, found.st_size, found.st_mtime_ns

    # --- reading ----------------------------------------------------------------------------------

    def read(self, items: Sequence[Item], arrived: Callable[[int, int], None]) -> list[ReadResult]:
        results = [self._read(item, arrived) for item in items]
        missing = {
            bucket_of(item.key)
            for item, result in zip(items, results, strict=True)
            if result is ReadResult.MISSING
        }
        if missing or self._doubtful:
            self._recount(missing)
        return results

    def _read(self, item: Item, arrived: Callable[[int, int], None]) -> ReadResult:
        num_bytes = len(item.row)
        path = self._layout.path(item.key)
        direct = self._reads_direct and num_bytes % DIRECT_ALIGNMENT == 0
        try:
            try:
                fd = self._open_to_read(path, direct)
            except (FileNotFoundError, NotADirectoryError):
                return ReadResult.MISSING
            try:
                # The length. A third of what `fstat` costs, which makes an object of ten fields.
                size = os.lseek(fd, 0, os.SEEK_END)
                if size != num_bytes or not self._fill(fd, item, direct, arrived):
                    return ReadResult.CORRUPT
                try:
                    os.utime(fd, ns=(item.stamp, item.stamp))
                except OSError:
                    pass  # it was read all the same
            finally:
                os.close(fd)
        except OSError as error:
            self._complain("read", error)
            return ReadResult.FAILED
        return ReadResult.READ

    @property
    def _reads_direct(self) -> bool:
        return self._direct_beyond is not None and self.account.num_bytes > self._direct_beyond

    def _open_to_read(self, path: str, direct: bool) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags | O_DIRECT if direct else flags)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
        self._direct_beyond = None  # this file system cannot
        return os.open(path, flags)

    def _fill(self, fd: int, item: Item, direct: bool, arrived: Callable[[int, int], None]) -> bool:
        """Fill the row; False when the file ends before."""
        row, start = item.row, 0
        while start < len(row):
            try:
                num_read = os.preadv(fd, [row[start : start + PIECE_BYTES]], start)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                direct, self._direct_beyond = False, None  # this memory is not aligned
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT)
                continue
            if not num_read:
                return False
            start += num_read
            arrived(item.position, start)
        return True

    # --- writing ----------------------------------------------------------------------------------

    def write(self, items: Sequence[Item]) -> list[WriteResult]:
        """Keep rows. What goes for one has an older stamp, so the tail of a batch never takes the
        place of its head.

        Raises:
            BackendError: the directory cannot be written to.
        """
        rows = [Writing(item) for item in items]
        try:
            for row in rows:
                row.result = self._known(row.item)
            self._write_new([row for row in rows if row.result is None])
            for row in rows:
                if row.error is not None:
                    row.result = self._failed(row.error)
            return [row.result or WriteResult.REFUSED for row in rows]
        finally:
            for row in rows:
                if row.temporary is not None:
                    _remove(row.temporary)

    def _known(self, item: Item) -> WriteResult | None:
        """What is clear without writing it."""
        if len(item.row) > self.max_size:
            return WriteResult.REFUSED
        same = _size(self._layout.path(item.key)) == len(item.row)
        return WriteResult.EXISTS if same and self._touch(item.key, item.stamp) else None

    def _write_new(self, rows: Sequence[Writing]) -> None:
        if not rows:
            return
        space = self._space(sum(len(row.item.row) for row in rows), rows[-1].item.stamp)
        written = []
        for row in rows:
            space -= len(row.item.row)
            if space < 0:
                break
            row.temporary = self._temporary.new_path()
            try:
                _write_file(row.temporary, row.item)
            except OSError as error:
                row.error = error
                if error.errno in FULL:
                    break  # for the others, too
            else:
                written.append(row)
        if written:
            self._land(written)

    def _space(self, num_bytes: int, stamp: int) -> int:
        """How many of so many bytes can be written. Near the reserve, what comes is what goes."""
        try:
            system = os.statvfs(self._layout.root)
        except OSError as error:
            raise unusable(self._layout.root, error) from error
        if system.f_bavail * system.f_frsize - num_bytes >= self._reserve:
            return num_bytes
        freed = 0
        for _ in self._rounds():
            with self.account.held() as usage:
                while freed < num_bytes and (gone := self._evict(usage, stamp)) is not None:
                    freed += gone
            if freed >= num_bytes:
                break
        return freed

    def _land(self, rows: Sequence[Writing]) -> None:
        """Bring what is written into sight, as far as there is room."""
        waiting = list(reversed(rows))
        for _ in self._rounds():
            with self.account.held() as usage:
                counted: list[Writing] = []
                while waiting and self._make_room(usage, waiting[-1].item):
                    row = waiting.pop()
                    usage.add(bucket_of(row.item.key), len(row.item.row))
                    counted.append(row)
                self._place(counted, usage)
            if not waiting:
                break

    def _make_room(self, usage: Usage, item: Item) -> bool:
        while usage.num_bytes + len(item.row) > self.max_size:
            if self._evict(usage, item.stamp) is None:
                return False
        return True

    def _place(self, rows: Sequence[Writing], usage: Usage) -> None:
        try:
            self.account.save(usage)
        except OSError as error:
            for row in rows:
                usage.remove(bucket_of(row.item.key), len(row.item.row))
                row.error = error
            return
        for row in rows:
            try:
                replaced = self._place_one(row)
            except OSError as error:
                row.error = error
                replaced = len(row.item.row)
            if replaced is not None:
                usage.remove(bucket_of(row.item.key), replaced)

    def _place_one(self, row: Writing) -> int | None:
        """The bytes of what was there already, if anything was: it is counted twice now."""
        item = row.item
        path = self._layout.path(item.key)
        size = _size(path)
        if size == len(item.row):  # somebody else was faster
            self._touch(item.key, item.stamp)
            row.result = WriteResult.EXISTS
            return size
        assert row.temporary is not None
        try:
            os.rename(row.temporary, path)
        except FileNotFoundError:
            self._layout.make_bucket(item.key)
            os.rename(row.temporary, path)
        row.temporary = None
        row.result = WriteResult.WRITTEN
        return size

    def _failed(self, error: OSError) -> WriteResult:
        self._complain("write", error)
        if error.errno in FULL:
            return WriteResult.REFUSED
        if error.errno in UNWELL:
            raise unusable(self._layout.root, error) from error
        return WriteResult.FAILED

    def _complain(self, what: str, error: OSError) -> None:
        """Once for each kind of error: the cache counts them."""
        if error.errno not in self._complaints:
            self._complaints.add(error.errno)
            log.warning("cannot %s in %s: %s", what, self._layout.root, error.strerror or error)

    # --- deleting ---------------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """
        Raises:
            BackendError: something is there and cannot be removed.
        """
        try:
            with self.account.held() as usage:
                for key in keys:
                    self._unlink(key, usage)
        except OSError as error:
            raise unusable(self._layout.root, error) from error

    def clear(self, scope: bytes, bucket: int) -> int:
        """Delete all of a bucket in this scope; how many there were."""
        try:
            with self.account.held() as usage:
                keys = [key for key, *_ in self._entries(scope, bucket)]
                num_gone = sum(self._unlink(key, usage) is not None for key in keys)
                _remove_dir(self._layout.bucket(scope, bucket))
                return num_gone
        except OSError as error:
            raise unusable(self._layout.root, error) from error

    def remove_scope(self, scope: bytes) -> None:
        """Its directory, if nothing has come into it again."""
        with self.account.held():
            _remove_dir(self._layout.scope(scope))

    def _unlink(self, key: ObjectKey, usage: Usage, stamp: int | None = None) -> int | None:
        """Remove an object (only if it has this stamp): its bytes, or None when it is not there."""
        path = self._layout.path(key)
        try:
            found = os.stat(path, follow_symlinks=False)
            if stamp is not None and found.st_mtime_ns != stamp:
                return None
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        usage.remove(bucket_of(key), found.st_size)
        return found.st_size

    # --- room -------------------------------------------------------------------------------------

    @property
    def wants_listing(self) -> bool:
        """Whether victims run short. One thread can see to that while the others go on."""
        return self._victims.few

    def list_all(self, seen: int | None = None) -> None:
        """Count everything and remember the oldest. With `seen`: unless somebody has done it since
        there were so many listings."""
        with self._list_lock:
            if seen is not None and seen != self._num_listings:
                return
            stamps, keys = array("q"), []
            busy_since_s = time.monotonic()
            for bucket in range(NUM_BUCKETS):
                with self.account.held() as usage:
                    for key, stamp in self._count(bucket, usage):
                        keys.append(key)
                        stamps.append(stamp)
                if time.monotonic() - busy_since_s > REST_AFTER_S:
                    time.sleep(REST_S)
                    busy_since_s = time.monotonic()
            self.clock.saw(max(stamps, default=0))
            with self.account.held():
                self._victims.listed(stamps, keys)
            self._num_listings += 1

    def _count(self, bucket: int, usage: Usage) -> list[tuple[ObjectKey, int]]:
        found, num_bytes = [], 0
        for scope in self.scopes():
            for key, size, stamp in self._entries(scope, bucket):
                found.append((key, stamp))
                num_bytes += size
        usage.counted(bucket, num_bytes, len(found))
        return found

    def _recount(self, buckets: set[int]) -> None:
        """Something may be gone that nobody has taken off the account: an operator may remove
        files. Does not wait for the lock, since a read is waiting for this."""
        with self.account.held_if_free() as usage:
            self._doubtful |= buckets
            if usage is None:
                return
            for _ in range(min(NUM_RECOUNTED, len(self._doubtful))):
                bucket = self._doubtful.pop()
                if self._num_names(bucket) != usage.num_objects_in(bucket):
                    self._count(bucket, usage)

    def _num_names(self, bucket: int) -> int:
        total = 0
        for scope in self.scopes():
            try:
                total += len(os.listdir(self._layout.bucket(scope, bucket)))
            except (FileNotFoundError, NotADirectoryError):
                pass
        return total

    def trim(self) -> None:
        """Down to the budget, which may have become smaller."""
        while self._trim_some():
            time.sleep(REST_S)

    def _trim_some(self) -> bool:
        """Some at a time, since others wait for the lock; whether there may be more to do."""
        num_gone = 0
        with self.account.held() as usage:
            while num_gone < NUM_TRIMMED:
                if usage.num_bytes <= self.max_size:
                    return False
                if self._evict(usage, ANY_AGE) is None:
                    break
                num_gone += 1
            else:
                return True
        if num_gone:
            self.list_all()
        return num_gone > 0

    def _rounds(self) -> Iterator[None]:
        """Twice, with a listing in between."""
        seen = self._num_listings
        yield
        self.list_all(seen)
        yield

    def _evict(self, usage: Usage, older_than: int) -> int | None:
        """The bytes of the one that had to go; None when there is none, as far as is known."""
        while (victim := self._victims.take(older_than)) is not None:
            try:
                gone = self._unlink(victim.key, usage, victim.stamp)
            except OSError as error:
                self._complain("evict", error)
                continue
            if gone is not None:
                return gone
        return None


def _size(path: str) -> int | None:
    """Of a file; −1 of anything else, None where nothing is."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _write_file(path: str, item: Item) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(path, flags, PRIVATE_FILE)
    try:
        start = 0
        while start < len(item.row):
            start += os.write(fd, item.row[start:])
        os.utime(fd, ns=(item.stamp, item.stamp))
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)  # some file systems say only here that there was no room


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # swept when the directory is next opened


def _remove_dir(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        pass  # not empty, or not there
