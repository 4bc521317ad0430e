"""Objects as files: look, list, touch, remove. Holds no lock and keeps no account.

Whatever lies there that is not named like an object, or is no plain file, is nobody's business.
"""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING, NamedTuple

from tiered_cache.storage import ObjectInfo
from tiered_cache_file.layout import key_of, scope_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tiered_cache.storage import ObjectKey
    from tiered_cache_file.layout import Layout


class Found(NamedTuple):
    """`stamp`: when it was last used, the modification time in ns."""

    key: ObjectKey
    num_bytes: int
    stamp: int


class Objects:
    """The files below a layout's objects directory."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def touch(self, path: str, stamp: int) -> bool:
        """It is used now. False: there is none."""
        try:
            os.utime(path, ns=(stamp, stamp), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a file system that has become read-only, for instance
            return os.path.exists(path)
        return True

    def num_bytes(self, path: str) -> int | None:
        """None: there is none."""
        if not os.access(path, os.F_OK):  # mostly; and an exception costs more
            return None
        found = self._stat(path)
        return None if found is None else found.st_size

    def unlink(self, key: ObjectKey, stamp: int | None = None) -> int | None:
        """Remove it (if it still has this stamp): how many bytes it had. None: nothing was."""
        path = self.layout.path(key)
        found = self._stat(path)
        if found is None or stamp not in (None, found.st_mtime_ns):
            return None
        try:
            os.unlink(path)
        except FileNotFoundError:
            return None
        return found.st_size

    def _stat(self, path: str) -> os.stat_result | None:
        try:
            found = os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    # --- lists ------------------------------------------------------------------------------------

    def scopes(self) -> list[bytes]:
        try:
            names = os.listdir(self.layout.objects)
        except FileNotFoundError:
            return []
        return [scope for name in names if (scope := scope_of(name)) is not None]

    def in_bucket(self, scopes: Iterable[bytes], bucket: int) -> Iterator[Found]:
        for scope in scopes:
            try:
                listing = os.scandir(self.layout.bucket(scope, bucket))
            except (FileNotFoundError, NotADirectoryError):
                continue
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
                        yield Found(key, found.st_size, found.st_mtime_ns)

    def num_names(self, scopes: Iterable[bytes], bucket: int) -> int:
        """At least as many as there are objects; much cheaper than looking at each."""
        total = 0
        for scope in scopes:
            try:
                total += len(os.listdir(self.layout.bucket(scope, bucket)))
            except (FileNotFoundError, NotADirectoryError):
                pass
        return total

    def infos(self, scope: bytes, bucket: int) -> list[ObjectInfo]:
        now_ns = time.time_ns()
        return [
            ObjectInfo(found.key, found.num_bytes, max(0, now_ns - found.stamp) / 1e9)
            for found in self.in_bucket([scope], bucket)
        ]
