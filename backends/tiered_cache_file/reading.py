"""Reads a file into a row, past the page cache where that pays.

A direct read takes a quarter of the processor's time of one through the page cache, and is as fast
while the file is not in there; where it is, a third as fast. So reads are direct when there is more
than the page cache could hold.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from tiered_cache.storage import ReadResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered_cache.storage import ObjectKey
    from tiered_cache_file.layout import Layout

PIECE_BYTES: Final = 512 << 10
"""Read at once, and told of: a checksum over it finds it in the processor's cache."""

ALIGNMENT: Final = 4096
O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Item(NamedTuple):
    """One row of a batch, where it stands there, and the stamp that its file gets by this use."""

    position: int
    key: ObjectKey
    row: memoryview
    stamp: int


class Reader:
    """For any number of threads.

    Args:
        direct_beyond: bytes that a page cache could hold; None: reads are never direct.
    """

    __slots__ = ("_behind", "_direct_beyond", "_layout")

    def __init__(self, layout: Layout, direct_beyond: int | None) -> None:
        self._layout = layout
        self._direct_beyond = direct_beyond if O_DIRECT else None
        self._behind = memoryview(bytearray(1))
        """Takes the byte behind a row, of a file that is longer: no call of its own for that. A
        direct read, whose memory must be aligned, has one."""

    def is_direct(self, num_bytes_kept: int) -> bool:
        """Whether to read past the page cache, when that is how many bytes all objects have."""
        return self._direct_beyond is not None and num_bytes_kept > self._direct_beyond

    def read(self, item: Item, arrived: Callable[[int, int], None], direct: bool) -> ReadResult:
        """
        Raises:
            OSError: it cannot be read.
        """
        position, key, row, stamp = item
        if direct:
            direct = self._direct_beyond is not None and len(row) % ALIGNMENT == 0
        try:
            fd = self._open(self._layout.path(key), direct)
        except (FileNotFoundError, NotADirectoryError):
            return ReadResult.MISSING
        try:
            if not self._fill(fd, row, position, direct, arrived):
                return ReadResult.CORRUPT
            try:
                os.utime(fd, ns=(stamp, stamp))
            except OSError:
                pass  # it was read all the same
        finally:
            os.close(fd)
        return ReadResult.READ

    def _open(self, path: str, direct: bool) -> int:
        if not direct:
            return os.open(path, FLAGS)
        try:
            return os.open(path, FLAGS | O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self._direct_beyond = None  # this file system cannot
        return os.open(path, FLAGS)

    def _fill(
        self,
        fd: int,
        row: memoryview,
        position: int,
        direct: bool,
        arrived: Callable[[int, int], None],
    ) -> bool:
        """Fill the row; False when the file ends before, or goes on behind."""
        start, stop = 0, len(row)
        while start < stop:
            is_last = stop - start <= PIECE_BYTES
            part = row[start : start + PIECE_BYTES] if start or not is_last else row
            try:
                if is_last and not direct:
                    num_read = os.preadv(fd, (part, self._behind), start)
                else:
                    num_read = os.preadv(fd, (part,), start)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                direct, self._direct_beyond = False, None  # this memory is not aligned
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT)
                continue
            if not num_read:
                return False
            start += num_read
            if start > stop:
                return False
            if start == stop and direct and os.lseek(fd, 0, os.SEEK_END) != stop:
                return False
            arrived(position, start)
        return True
