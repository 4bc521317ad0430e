"""The contract of a storage backend: a place that keeps rows by key (design §7).

It answers per key, in the order of the keys; what an answer means is judged above it. A key that is
not there is a result. An exception says that the backend is unwell: `BackendError`, or whatever it
meets; the wrappers map it. The proof comes with it: `tiered_cache.testing.backends.BackendTests`.

Buffers are the caller's. A backend touches them from the call until the call has ended, by return,
by exception or by cancellation, and not a moment longer (semantics §9.3): work that it has given to
a thread it awaits to its end. `BackendContext.run` does that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, NewType, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import Self

T = TypeVar("T")

ObjectKey = NewType("ObjectKey", bytes)
"""Names one object: 48 bytes, of which the first `SCOPE_BYTES` are the scope (one component of one
model in one format, on one rank) and the rest is the page key. Opaque to a backend, which may use
the scope to keep apart what is cleared apart. Never a path: write it in hexadecimal."""

SCOPE_BYTES: Final = 16
KEY_BYTES: Final = SCOPE_BYTES + 32


class ReadResult(Enum):
    """What has become of one row that was to be read."""

    READ = "read"  # all of it is in the buffer
    MISSING = "missing"
    CORRUPT = "corrupt"  # something is kept under the key, but not a row of this length
    FAILED = "failed"  # this one could not be read; the backend itself is well


class WriteResult(Enum):
    """What has become of one row that was to be kept."""

    WRITTEN = "written"
    EXISTS = "exists"  # kept already, and left as it is
    REFUSED = "refused"  # no room, for now: try again later
    FAILED = "failed"  # this one could not be written; the backend itself is well


@dataclass(frozen=True, slots=True)
class BackendStats:
    """What a backend knows about itself without asking anybody. None: it does not know."""

    num_objects: int | None = None
    num_bytes: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a scan. `age_s`: seconds since it was last used, where that is known."""

    key: ObjectKey
    num_bytes: int
    age_s: float | None = None


class BackendOptions(BaseModel):
    """Base of a backend's own settings, the `options:` of a configuration: frozen, strict, and an
    unknown key is an error. Errors do not show values: a password may be among them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class BackendContext(Protocol):
    """What a backend is given when it is opened."""

    @property
    def num_threads(self) -> int:
        """How many calls of `run` can work at the same time."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """`fn(*args)` in one of the cache's threads. Ends when the thread has: cancelled, it waits
        for that, and then raises `CancelledError`. A call that is still queued then never runs."""


HEADER_ROOM: Final = 512
"""A row begins with so many bytes that are the library's own: they say what it is."""


def ignore_arrivals(index: int, stop: int) -> None:
    """For who does not want to know."""


def sealed_already(index: int, stop: int) -> None:
    """For rows that have their header."""


class StorageBackend(ABC):
    """A place that keeps rows. Made by `open`, ready from then on, ended by `aclose`.

    All methods are called on one event loop, many of them at the same time; none may block it.
    """

    Options: ClassVar[type[BackendOptions]] = BackendOptions
    can_scan: ClassVar[bool] = False
    """Whether `scan` works."""

    @classmethod
    @abstractmethod
    async def open(cls, options: Any, context: BackendContext) -> Self:
        """Connect. `options` is an instance of `cls.Options`.

        Raises:
            BackendError: not now; the cache goes on without and tries again.
        """

    @abstractmethod
    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which of them are kept, as far as that can be said without reading them."""

    @abstractmethod
    async def read(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        arrived: Callable[[int, int], None] = ignore_arrivals,
    ) -> list[ReadResult]:
        """Fill each buffer with the row of its key. A buffer whose row is not `READ` may hold
        anything.

        `arrived(index, stop)`: may be called, from any thread, when bytes `[0, stop)` of
        `rows[index]` have just been written by that thread: the checksum is then computed while
        they are in the processor's cache. Steps of 256 or 512 KiB are good ones. Never needed.
        """

    @abstractmethod
    async def write(
        self, keys: Sequence[ObjectKey], rows: Sequence[memoryview]
    ) -> list[WriteResult]:
        """Keep each row under its key. A reader sees an old row, or the new one, or none; never a
        part of one. A key that is kept already holds the same state: it may be left as it is, or
        written again."""

    @abstractmethod
    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Keep them no longer. A key that is not there is fine."""

    @abstractmethod
    async def clear(self, scope: bytes) -> int:
        """Delete all objects of a scope and nothing else; how many there were."""

    def scan(self, scope: bytes | None = None) -> AsyncIterator[Sequence[ObjectInfo]]:
        """All objects (of a scope), in pieces, in no order. What is written or deleted meanwhile
        may be missed. For operators; not every backend can."""
        raise NotImplementedError(f"{type(self).__name__} cannot scan")

    async def register_memory(self, view: memoryview) -> None:  # noqa: B027 - few need it
        """All buffers of `read` and `write` will be inside `view`: for what must know beforehand
        (RDMA)."""

    @abstractmethod
    def stats(self) -> BackendStats:
        """What it knows about itself, at once."""

    @abstractmethod
    async def aclose(self) -> None:
        """Let everything go. No other call is under way, and none comes after it. Idempotent."""


class SealingBackend(StorageBackend):
    """One that is given rows without their header, and has each sealed on its way: the checksum is
    then computed while the bytes are in the processor's cache, instead of in a pass of its own
    before. For what writes by threads of its own or of the cache; never needed."""

    @abstractmethod
    async def write(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        seal: Callable[[int, int], None] = sealed_already,
    ) -> list[WriteResult]:
        """As `StorageBackend.write`.

        `seal(index, stop)`: to be called for each row that is to be kept, by the thread that has
        just written its bytes `[0, stop)` somewhere, or is about to; as often as wanted, with
        rising `stop`, at last with the length of the row. Only then the first `HEADER_ROOM` bytes
        of the row are what they have to be, so they are written last, or again; the bytes behind
        them never change. Steps of 256 or 512 KiB are good ones.
        """
