"""What the tests of the file backend set up alike: an open one, keys, rows, and what lies where."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from tiered_cache.storage import ObjectKey
from tiered_cache.testing.backend_scene import ThreadContext
from tiered_cache_file import FileBackend, FileOptions

ROW: Final = 4096
SCOPE: Final = bytes(range(16))
OTHER_SCOPE: Final = bytes(16)


@contextlib.asynccontextmanager
async def opened(
    path: Path, num_threads: int = 4, context: Any = None, **options: Any
) -> AsyncIterator[FileBackend]:
    """A backend, closed in the end; with threads of its own unless it is given some."""
    options.setdefault("reserve", 0)
    async with ThreadContext(num_threads) as own:
        backend = await FileBackend.open(FileOptions(path=str(path), **options), context or own)
        try:
            yield backend
        finally:
            await backend.aclose()


def key(number: int, scope: bytes = SCOPE) -> ObjectKey:
    return ObjectKey(scope + sha256(b"%d" % number).digest())


def keys(*numbers: int, scope: bytes = SCOPE) -> list[ObjectKey]:
    return [key(number, scope) for number in numbers]


def row(number: int, num_bytes: int = ROW) -> memoryview:
    """Bytes that no other number has, read-only: a backend must not write to what it keeps."""
    part = sha256(b"row %d" % number).digest()
    return memoryview((part * (num_bytes // len(part) + 1))[:num_bytes])


def rows(*numbers: int, num_bytes: int = ROW) -> list[memoryview]:
    return [row(number, num_bytes) for number in numbers]


def buffers(num: int, num_bytes: int = ROW) -> list[memoryview]:
    """Places for rows, full of what no row has, on memory pages as the host tier's are."""
    arena = memoryview(mmap.mmap(-1, max(1, num * num_bytes)))
    arena[:] = b"\xee" * len(arena)
    return [arena[start : start + num_bytes] for start in range(0, num * num_bytes, num_bytes)]


async def put(backend: FileBackend, *numbers: int, num_bytes: int = ROW) -> list[str]:
    """Write the rows of these numbers as one batch, the head first."""
    results = await backend.write(keys(*numbers), rows(*numbers, num_bytes=num_bytes))
    return [result.value for result in results]


async def got(backend: FileBackend, *numbers: int, num_bytes: int = ROW) -> list[str]:
    """Read these numbers as one batch; what was read is proved to be right."""
    places = buffers(len(numbers), num_bytes)
    results = await backend.read(keys(*numbers), places)
    for number, place, result in zip(numbers, places, results, strict=True):
        if result.value == "read":
            assert place == row(number, num_bytes), number
    return [result.value for result in results]


async def kept(backend: FileBackend, numbers: Sequence[int]) -> list[int]:
    """Which of these are there, without using them."""
    there = {info.key async for infos in backend.scan() for info in infos}
    return [number for number in numbers if key(number) in there]


def object_files(root: Path) -> list[Path]:
    return files_in(root / "objects")


def object_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in object_files(root))


def temporary_files(root: Path) -> list[Path]:
    """All that is being written, or was when somebody was killed."""
    return [path for path in files_in(root / "tmp") if path.name != "alive"]


def files_in(root: Path) -> list[Path]:
    """At any depth. What goes meanwhile may be missed."""
    return [Path(folder, name) for folder, _, names in os.walk(root) for name in names]


def object_file(root: Path, number: int) -> Path:
    (found,) = (path for path in object_files(root) if path.name == key(number)[16:].hex())
    return found


@contextlib.contextmanager
def counted(monkeypatch: Any, module: Any, *names: str) -> Iterator[dict[str, int]]:
    """How often functions of a module are called."""
    counts = dict.fromkeys(names, 0)

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(module, name, counting(name, getattr(module, name)))
        yield counts
