"""Names: which file an object is, and that the directory is one of ours.

    FORMAT                                  what this is, for people and for the next version
    lock                                    `account.py`
    tmp/<instance>/                         `temporary.py`
    objects/<scope>/<bucket>/<page key>     all in hexadecimal

A bucket is a checksum of the key, so that directories fill evenly whatever keys look like: of
200,000 objects 800 are in each of the 256.

Refuses to know: what is in the files.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import zlib
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final

import aiofiles
import aiofiles.os

from tiered_cache.errors import BackendError
from tiered_cache.storage import SCOPE_BYTES, ObjectKey

FORMAT: Final = "FORMAT"
FORMAT_LINE: Final = "tiered-cache file storage, layout 1"
FORMAT_TEXT: Final = f"""{FORMAT_LINE}

Kept attention state of language models, for a cache that computes again what is not here. Single
files may be removed at any time. Remove the directory only while nothing has it open.
"""

PRIVATE_DIR: Final = 0o700
PRIVATE_FILE: Final = 0o600
NUM_BUCKETS: Final = 256
BUCKET_NAMES: Final = tuple(f"{bucket:02x}" for bucket in range(NUM_BUCKETS))
KEY_BYTES: Final = 48

NOT_FOREIGN: Final = {"lost+found"}
"""Stands in the root of a file system; the directory may be a mount point."""


class Layout:
    """The paths below one root, which is absolute."""

    __slots__ = ("lock", "objects", "root", "temporary")

    def __init__(self, root: str) -> None:
        self.root = root
        self.lock = f"{root}/lock"
        self.objects = f"{root}/objects"
        self.temporary = f"{root}/tmp"

    def path(self, key: ObjectKey) -> str:
        name = key.hex()
        scope, page_key = name[: 2 * SCOPE_BYTES], name[2 * SCOPE_BYTES :]
        return f"{self.objects}/{scope}/{BUCKET_NAMES[bucket_of(key)]}/{page_key}"

    def scope(self, scope: bytes) -> str:
        return f"{self.objects}/{scope.hex()}"

    def bucket(self, scope: bytes, bucket: int) -> str:
        return f"{self.objects}/{scope.hex()}/{BUCKET_NAMES[bucket]}"

    def make_bucket(self, key: ObjectKey) -> None:
        """The directory that this key's file belongs in."""
        scope = key[:SCOPE_BYTES]
        for path in (self.objects, self.scope(scope), self.bucket(scope, bucket_of(key))):
            make_dir(path)


def make_dir(path: str) -> None:
    """Private, whoever makes it first."""
    try:
        os.mkdir(path, PRIVATE_DIR)
    except FileExistsError:
        pass


def bucket_of(key: bytes) -> int:
    return zlib.crc32(key) % NUM_BUCKETS


def scope_of(name: str) -> bytes | None:
    """The scope that a directory of this name holds; None for what is not ours."""
    return _from_hex(name, SCOPE_BYTES)


def key_of(scope: bytes, bucket: int, name: str) -> ObjectKey | None:
    """The key of the file of this name in this bucket; None for what is not ours."""
    page_key = _from_hex(name, KEY_BYTES - SCOPE_BYTES)
    if page_key is None or bucket_of(scope + page_key) != bucket:
        return None
    return ObjectKey(scope + page_key)


def _from_hex(name: str, num_bytes: int) -> bytes | None:
    try:
        value = bytes.fromhex(name)
    except ValueError:
        return None
    return value if len(value) == num_bytes and value.hex() == name else None


async def prepare(path: str) -> str:
    """Make the directory, or find that it is one of ours; its absolute path, which stays right when
    the process changes its own directory.

    Raises:
        BackendError: it cannot be made or used, or it holds something else.
    """
    # `aiofiles` leaves a file open when it is cancelled while it opens one. All of this is short.
    preparing = asyncio.create_task(_prepare(path))
    try:
        return await asyncio.shield(preparing)
    except asyncio.CancelledError:
        while not preparing.done():
            try:
                await asyncio.wait([preparing])
            except asyncio.CancelledError:
                pass  # the first is raised when it has ended
        preparing.exception()  # nobody else will look
        raise


async def _prepare(path: str) -> str:
    # Its own thread: those of the loop's default executor would stay for good.
    thread = ThreadPoolExecutor(1, "tiered-cache-file-open")
    try:
        root = await aiofiles.os.path.abspath(path, executor=thread)  # type: ignore[call-arg]
        await aiofiles.os.makedirs(root, mode=PRIVATE_DIR, exist_ok=True, executor=thread)
        names = set(await aiofiles.os.listdir(root, executor=thread)) - NOT_FOREIGN
        if FORMAT not in names:
            if any(not name.startswith(FORMAT) for name in names):
                raise BackendError(
                    f"{root} holds something else: give `path` a directory of its own, such as "
                    f"{root}/tiered-cache"
                )
            await _write_format(root, thread)
        async with aiofiles.open(
            f"{root}/{FORMAT}", encoding="utf-8", errors="replace", executor=thread
        ) as file:
            line = (await file.readline()).rstrip("\n")
    except OSError as error:
        raise unusable(path, error) from error
    finally:
        thread.shutdown(wait=False)
    if line != FORMAT_LINE:
        raise BackendError(
            f"{root}/{FORMAT} says {line[:80]!r}, and this version knows only {FORMAT_LINE!r}: "
            "choose another `path`, or remove the directory"
        )
    return root


async def _write_format(root: str, thread: Executor) -> None:
    """Whole or not at all; several processes may do it at once."""
    part = f"{root}/{FORMAT}.{secrets.token_hex(8)}"
    async with aiofiles.open(part, "x", encoding="utf-8", opener=_private, executor=thread) as file:
        await file.write(FORMAT_TEXT)
    await aiofiles.os.replace(part, f"{root}/{FORMAT}", executor=thread)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)


def unusable(root: str, error: OSError) -> BackendError:
    """Why the directory cannot be used, and what to do."""
    hints = {
        errno.EACCES: f"let user {os.geteuid()} write there, or choose another `path`",
        errno.EPERM: f"let user {os.geteuid()} write there, or choose another `path`",
        errno.EROFS: "mount it writable, or choose another `path`",
        errno.ENOSPC: "make space, or choose another `path`",
        errno.EDQUOT: "raise the quota, or choose another `path`",
        errno.ENOTDIR: "choose a `path` that is a directory",
        errno.EEXIST: "choose a `path` that is a directory",
        errno.ENOENT: "it was removed while it was in use; it is made again when it is next opened",
    }
    hint = hints.get(error.errno or 0)
    reason = error.strerror or str(error)
    return BackendError(f"cannot use {root}: {reason}" + (f" ({hint})" if hint else ""))
