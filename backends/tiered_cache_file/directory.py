"""What threads do with the objects of a directory.

Every method is one job: it blocks, and when it returns nothing of it goes on. Owns the order of
things: a row is written out of sight, and comes into sight whole, under the lock and counted, when
there is room for it. Refuses to know: event loops, and who waits.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tiered_cache.storage import HEADER_ROOM, ReadResult, WriteResult
from tiered_cache_file.layout import PRIVATE_FILE, Layout, bucket_of, make_dir, unusable
from tiered_cache_file.objects import Objects
from tiered_cache_file.reading import Reader
from tiered_cache_file.room import Room
from tiered_cache_file.temporary import Temporary, sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiered_cache.storage import ObjectKey
    from tiered_cache_file.account import Usage
    from tiered_cache_file.reading import Item

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 << 10
"""Written at once, and sealed while it is in the processor's cache."""

SMALL_BYTES: Final = 64 << 10
"""A row of no more is sealed first: writing its header twice would cost more."""

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
UNWELL: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
)
"""What a write meets when the directory cannot be written to at all."""


@dataclass(slots=True)
class Writing:
    """A row on its way into sight. Without a result in the end: there was no room. `path`: where
    it goes."""

    item: Item
    path: str = ""
    temporary: str | None = None
    result: WriteResult | None = None
    error: OSError | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.item.row)

    @property
    def is_open(self) -> bool:
        return self.result is None and self.error is None

    @property
    def is_written(self) -> bool:
        """Out of sight, as yet."""
        return self.temporary is not None and self.is_open


class Directory:
    """An open directory. Made in a thread, too.

    Raises:
        BackendError: it cannot be used.
    """

    def __init__(
        self, root: str, max_size: int, reserve: int, direct_beyond: int | None = None
    ) -> None:
        self._root = root
        self._reserve = reserve
        self._complaints: set[tuple[str, int | None]] = set()
        layout = Layout(root)
        self.objects = Objects(layout)
        self._reader = Reader(layout, direct_beyond)
        try:
            if os.stat(root).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                log.warning("others may write to %s, and so replace what is in it", root)
            for path in (layout.objects, layout.temporary):
                make_dir(path)
            self.room = Room(self.objects, max_size, self._complain)
            try:
                with self.room.account.held(new=True):
                    sweep(layout.temporary)
                    self._temporary = Temporary(layout.temporary)
            except BaseException:
                self.room.account.close()
                raise
        except OSError as error:
            raise unusable(root, error) from error

    def remove_temporary(self) -> None:
        """Leave nothing behind. Before `close`, when nothing is being written any more."""
        self._temporary.remove()

    def close(self) -> None:
        """Let go of the files; does not block."""
        self._temporary.close()
        self.room.account.close()

    def contains(self, keys: Sequence[ObjectKey], stamps: Sequence[int]) -> list[bool]:
        """Which of them have a file. Being asked for is a use: what was promised is not what goes
        next."""
        path = self.objects.layout.path
        return [
            self.objects.touch(path(key), stamp) for key, stamp in zip(keys, stamps, strict=True)
        ]

    def read(self, items: Sequence[Item], arrived: Callable[[int, int], None]) -> list[ReadResult]:
        direct = self._reader.is_direct(self.room.account.num_bytes)
        results = [self._read(item, arrived, direct) for item in items]
        missing = {
            bucket_of(item.key)
            for item, result in zip(items, results, strict=True)
            if result is ReadResult.MISSING
        }
        self.room.recount(missing)
        return results

    def _read(self, item: Item, arrived: Callable[[int, int], None], direct: bool) -> ReadResult:
        try:
            return self._reader.read(item, arrived, direct)
        except OSError as error:
            self._complain("read", error)
            return ReadResult.FAILED

    # --- writing ----------------------------------------------------------------------------------

    def write(self, rows: Sequence[Writing], seal: Callable[[int, int], None]) -> list[WriteResult]:
        """`fill` and `land` in one.

        Raises:
            BackendError: the directory cannot be written to.
        """
        self.fill(rows, seal)
        return self.land(rows)

    def fill(self, rows: Sequence[Writing], seal: Callable[[int, int], None]) -> None:
        """Write rows out of sight, as far as there is space. Many threads can, each some rows of a
        batch; `land` must follow, in any case."""
        new: list[Writing] = []
        for row in rows:
            row.path = self.objects.layout.path(row.item.key)
            if row.num_bytes > self.room.max_size:
                row.result = WriteResult.REFUSED
            elif not self._is_there(row):
                new.append(row)
        if new:
            self._fill(new, self._space(new), seal)

    def land(self, rows: Sequence[Writing]) -> list[WriteResult]:
        """Bring a batch into sight, the first rows of it where there is not room for all. By one
        thread and under one lock: several would wait for one another.

        Raises:
            BackendError: the directory cannot be written to.
        """
        new: dict[ObjectKey, Writing] = {}  # a key may come twice
        try:
            for row in rows:
                if row.result is None:
                    new.setdefault(row.item.key, row)
            self._land([row for row in new.values() if row.is_written])
            for row in new.values():
                if row.error is not None:
                    row.result = self._failed(row.error)
            for row in rows:
                first = new.get(row.item.key, row)
                if row is not first:
                    again = first.result is WriteResult.WRITTEN
                    row.result = WriteResult.EXISTS if again else first.result
            return [row.result or WriteResult.REFUSED for row in rows]
        finally:
            for row in rows:
                if row.temporary is not None:
                    _remove(row.temporary)
                    row.temporary = None

    def _is_there(self, row: Writing) -> bool:
        """Then it is used, and that is all."""
        if self.objects.num_bytes(row.path) != row.num_bytes:
            return False
        if not self.objects.touch(row.path, row.item.stamp):
            return False
        row.result = WriteResult.EXISTS
        return True

    def _space(self, rows: Sequence[Writing]) -> int:
        """How many bytes can be written without touching the reserve, if need be after others have
        gone. No more goes than would come, and nothing when all of it would not be enough."""
        wanted = sum(row.num_bytes for row in rows)
        lacking = wanted - self._beyond_reserve()
        if 0 < lacking <= self.room.account.num_bytes:
            self.room.shrink(min(lacking, wanted))
        return self._beyond_reserve() if lacking > 0 else wanted

    def _beyond_reserve(self) -> int:
        try:
            system = os.statvfs(self._root)
        except OSError as error:
            raise unusable(self._root, error) from error
        return system.f_bavail * system.f_frsize - self._reserve

    def _fill(self, rows: Sequence[Writing], space: int, seal: Callable[[int, int], None]) -> None:
        for row in rows:
            space -= row.num_bytes
            if space < 0:
                break
            row.temporary = self._temporary.new_path()
            try:
                _write_file(row.temporary, row.item, seal)
            except OSError as error:
                row.error = error
                if error.errno in FULL:
                    break  # for the others, too

    def _land(self, rows: Sequence[Writing]) -> None:
        """Bring them into sight, as far as there is room."""
        if not rows:
            return
        waiting = list(reversed(rows))
        for _ in self.room.rounds():
            with self.room.account.held() as usage:
                counted = []
                while waiting and self._admit(usage, waiting[-1]):
                    counted.append(waiting.pop())
                self._place(usage, [row for row in counted if row.is_open])
            if not waiting:
                break

    def _admit(self, usage: Usage, row: Writing) -> bool:
        """Count it, if need be after others have gone. False: there is no room."""
        there = self.objects.num_bytes(row.path)
        if there == row.num_bytes:  # somebody else was faster
            self.objects.touch(row.path, row.item.stamp)
            row.result = WriteResult.EXISTS
            return True
        if there is not None:
            try:
                self.room.remove(usage, row.item.key)
            except OSError as error:
                row.error = error
                return True
        if not self.room.make(usage, row.num_bytes):
            return False
        usage.add(bucket_of(row.item.key), row.num_bytes)
        return True

    def _place(self, usage: Usage, rows: Sequence[Writing]) -> None:
        """They are counted, and the account says so before any of them is there: whoever is killed
        in between leaves it too high, and never too low."""
        try:
            self.room.account.save(usage)
        except OSError as error:
            for row in rows:
                row.error = error
        for row in rows:
            if row.is_open:
                self._rename(row)
            if row.error is not None:
                usage.remove(bucket_of(row.item.key), row.num_bytes)

    def _rename(self, row: Writing) -> None:
        assert row.temporary is not None
        try:
            try:
                os.rename(row.temporary, row.path)
            except FileNotFoundError:
                self.objects.layout.make_bucket(row.item.key)
                os.rename(row.temporary, row.path)
        except OSError as error:
            row.error = error
        else:
            row.temporary = None
            row.result = WriteResult.WRITTEN

    def _failed(self, error: OSError) -> WriteResult:
        self._complain("write", error)
        if error.errno in FULL:
            return WriteResult.REFUSED
        if error.errno in UNWELL:
            raise unusable(self._root, error) from error
        return WriteResult.FAILED

    def _complain(self, what: str, error: OSError) -> None:
        """Once for each kind of error: the cache counts them."""
        if (what, error.errno) not in self._complaints:
            self._complaints.add((what, error.errno))
            log.warning("cannot %s in %s: %s", what, self._root, error.strerror or error)

    # --- deleting ---------------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """
        Raises:
            BackendError: one is there and cannot be removed.
        """
        with self._deleting() as usage:
            for key in keys:
                self.room.remove(usage, key)

    def clear(self, scope: bytes, bucket: int) -> int:
        """Delete all that a scope has in this bucket; how many there were."""
        with self._deleting() as usage:
            keys = [found.key for found in self.objects.in_bucket([scope], bucket)]
            num_gone = sum(self.room.remove(usage, key) is not None for key in keys)
            _remove_dir(self.objects.layout.bucket(scope, bucket))
            return num_gone

    def remove_scope(self, scope: bytes) -> None:
        """Its directory, if nothing has come into it again."""
        with self._deleting():
            _remove_dir(self.objects.layout.scope(scope))

    @contextmanager
    def _deleting(self) -> Iterator[Usage]:
        try:
            with self.room.account.held() as usage:
                yield usage
        except OSError as error:
            raise unusable(self._root, error) from error


def _write_file(path: str, item: Item, seal: Callable[[int, int], None]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(path, flags, PRIVATE_FILE)
    try:
        if len(item.row) > SMALL_BYTES:
            _write_pieces(fd, item, seal)
        else:
            seal(item.position, len(item.row))
            _write_all(fd, item.row)
        os.utime(fd, ns=(item.stamp, item.stamp))
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)  # some file systems say only here that there was no room


def _write_pieces(fd: int, item: Item, seal: Callable[[int, int], None]) -> None:
    """The header again in the end: only then is it known."""
    for start in range(0, len(item.row), PIECE_BYTES):
        piece = item.row[start : start + PIECE_BYTES]
        _write_all(fd, piece)
        seal(item.position, start + len(piece))
    if os.pwrite(fd, item.row[:HEADER_ROOM], 0) != HEADER_ROOM:
        raise OSError(errno.EIO, "short write")


def _write_all(fd: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(fd, piece) :]


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
