"""How a row becomes an object that proves what it is: header, checksum, fingerprint.

A storage object *is* a row (semantics §1.4, §10.2–3): the header stands in the row's header room,
so nothing is moved or copied. Owns: the header's format, and the verdict on what was read. Refuses
to know: where objects are kept, and what becomes of those that are wrong.

Hashing is work for threads: 0.1 ms per MiB, without the GIL.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any, Final

import xxhash

from tiered_cache.jobs import give_way
from tiered_cache.storage.backend import HEADER_ROOM, KEY_BYTES, SCOPE_BYTES, ObjectKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT_VERSION: Final = 1
"""Raised with every change of header or row. Part of the fingerprint, and so of an object's name:
what an older version has kept is a miss, and never misread. See docs/page-format.md."""

MAGIC: Final = b"TCROW\r\n\x1a"
"""The line end breaks when somebody transfers an object as text."""

HEADER: Final = struct.Struct("<8sII16s32s32sQQH")
"""Magic, version, where the payload begins, checksum, fingerprint, page key, where the payload
ends, length of the row, length of the component's id (which follows; then zeros)."""

AFTER_KEY_BYTES: Final = 18
"""Of the header, what follows the page key."""

CHECKSUM_BYTES: Final = 16
CHECKSUM: Final = slice(16, 16 + CHECKSUM_BYTES)
PAYLOAD_START: Final = HEADER_ROOM
CHECKED_FROM: Final = CHECKSUM.stop
"""The checksum covers everything from here to the payload's end, gaps between slices included. What
stands before it has one right value."""

IDENTITY_BYTES: Final = 32
PAGE_KEY_BYTES: Final = KEY_BYTES - SCOPE_BYTES
MAX_COMPONENT_BYTES: Final = 256
PIECE_BYTES: Final = 256 << 10
"""Checked in pieces that are still in the processor's cache (reference §2)."""

AT_ONCE_BYTES: Final = 2 * PIECE_BYTES
"""What comes in one piece of no more is checked in one."""


def fingerprint(facts: Mapping[str, Any]) -> bytes:
    """32 bytes that differ when any fact does. Facts are what JSON can say."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()


class RecordFormat:
    """Frames and checks the rows of one component.

    Args:
        component: its id.
        identity: the fingerprint of everything that gives the bytes their meaning, with the
            component.
        row_bytes, payload_end: of a row, and where in it the last slice ends.
    """

    __slots__ = ("_after", "_before", "component", "identity", "payload_end", "row_bytes", "scope")

    def __init__(self, component: str, identity: bytes, row_bytes: int, payload_end: int) -> None:
        if not PAYLOAD_START <= payload_end <= row_bytes:
            raise ValueError(f"a payload of [{PAYLOAD_START}:{payload_end}) in {row_bytes} bytes")
        if len(component.encode()) > MAX_COMPONENT_BYTES:
            raise ValueError(f"component id of more than {MAX_COMPONENT_BYTES} bytes")
        if len(identity) != IDENTITY_BYTES:
            raise ValueError(f"an identity of {len(identity)} bytes, not {IDENTITY_BYTES}")
        self.component = component
        self.identity = identity
        self.row_bytes = row_bytes
        self.payload_end = payload_end
        self.scope = identity[:SCOPE_BYTES]
        name = component.encode()
        header = HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            PAYLOAD_START,
            bytes(CHECKSUM_BYTES),
            identity,
            bytes(PAGE_KEY_BYTES),
            payload_end,
            row_bytes,
            len(name),
        )
        self._before, self._after = header[: CHECKSUM.start], header[-AFTER_KEY_BYTES:] + name

    def header(self, page_key: bytes, checksum: bytes) -> bytes:
        """What a row begins with; zeros follow, up to the payload."""
        return b"".join((self._before, checksum, self.identity, page_key, self._after))

    def object_key(self, page_key: bytes) -> ObjectKey:
        return ObjectKey(self.scope + page_key)

    def seal(self, row: memoryview, page_key: bytes) -> None:
        """Write the header into a row: from now on it is an object."""
        Departure(self, row, page_key).seal(len(row))

    def check(self, row: memoryview, page_key: bytes) -> str | None:
        """What is wrong with a row that was read, in words; None when it is what it says it is."""
        return Arrival(self, row, page_key).verdict()


class _Passage:
    """A row whose bytes pass by, in order, by one thread at a time: its checksum is computed piece
    by piece."""

    __slots__ = ("_checksum", "_format", "_hash", "_page_key", "_row", "_upto")

    def __init__(self, record: RecordFormat, row: memoryview, page_key: bytes) -> None:
        self._format = record
        self._row = row
        self._page_key = page_key
        self._checksum = b""
        self._hash: xxhash.xxh3_128 | None = None
        self._upto = CHECKED_FROM

    def passed(self, stop: int) -> None:
        """Bytes `[0, stop)` have. Whoever moves them gives way then, as it computes without end."""
        self._count(stop)
        give_way()

    def _count(self, stop: int) -> None:
        end = self._format.payload_end
        if self._hash is None:
            if stop >= end and end <= AT_ONCE_BYTES:
                self._checksum = xxhash.xxh3_128_digest(self._row[CHECKED_FROM:end])
                self._upto = end
                return
            self._hash = xxhash.xxh3_128()
        stop = min(stop, end)
        while self._upto < stop:
            upto = min(stop, self._upto + PIECE_BYTES)
            self._hash.update(self._row[self._upto : upto])
            self._upto = upto

    @property
    def is_whole(self) -> bool:
        """Whether all that is checked has."""
        return self._upto == self._format.payload_end

    def checksum(self) -> bytes:
        """Of the row as it is, all of which is there."""
        if not self._checksum:
            self._count(self._format.payload_end)
            if self._hash is not None:
                self._checksum = self._hash.digest()
        return self._checksum


class Departure(_Passage):
    """A row that is being written: it gets its header."""

    __slots__ = ()

    def __init__(self, record: RecordFormat, row: memoryview, page_key: bytes) -> None:
        if len(row) != record.row_bytes or len(page_key) != PAGE_KEY_BYTES:
            raise ValueError(f"a row of {len(row)} bytes under a key of {len(page_key)}")
        super().__init__(record, row, page_key)

    def seal(self, stop: int) -> None:
        """Bytes `[0, stop)` are on their way. With the last of them the header is whole: the row is
        an object."""
        if self._upto == CHECKED_FROM:
            header = self._format.header(self._page_key, bytes(CHECKSUM_BYTES))
            self._row[:PAYLOAD_START] = header.ljust(PAYLOAD_START, b"\0")
        self.passed(stop)
        if stop >= self._format.row_bytes:
            self._row[CHECKSUM] = self.checksum()


class Arrival(_Passage):
    """A row that is being read: it is judged."""

    __slots__ = ()

    def verdict(self) -> str | None:
        """All bytes are there: what is wrong with them, or None."""
        record = self._format
        if len(self._row) != record.row_bytes:
            return "is of another length"
        header = record.header(self._page_key, self.checksum())
        if self._row[: len(header)] == header:
            return None
        magic, version, start, checksum, identity, page_key, end, length, name_bytes = (
            HEADER.unpack_from(self._row)
        )
        if magic != MAGIC:
            return "is not a row"
        if version != FORMAT_VERSION:
            return f"is of format {version}, not {FORMAT_VERSION}"
        if (start, end, length) != (PAYLOAD_START, record.payload_end, record.row_bytes):
            return "is of another length"  # and its checksum is one of other bytes
        if checksum != self.checksum():
            return "does not match its checksum"
        # Written so: what follows is no accident on the way.
        if identity != record.identity:
            return "is of another model or layout"
        if page_key != self._page_key:
            return "is another page"
        if self._row[HEADER.size : HEADER.size + name_bytes] != record.component.encode():
            return "is of another component"
        return None


class Departures:
    """The rows of one write, in the order of their keys."""

    __slots__ = ("_rows",)

    def __init__(
        self, record: RecordFormat, rows: Sequence[memoryview], page_keys: Sequence[bytes]
    ) -> None:
        self._rows = [Departure(record, *of) for of in zip(rows, page_keys, strict=True)]

    def seal(self, index: int, stop: int) -> None:
        """As a backend asks for it (`SealingBackend.write`)."""
        self._rows[index].seal(stop)


class Arrivals:
    """The rows of one read, in the order of their keys. Whoever brings a row's last byte judges it,
    while others bring theirs."""

    __slots__ = ("_rows", "_verdicts")

    def __init__(
        self, record: RecordFormat, rows: Sequence[memoryview], page_keys: Sequence[bytes]
    ) -> None:
        self._rows = [Arrival(record, *of) for of in zip(rows, page_keys, strict=True)]
        self._verdicts: dict[int, str | None] = {}

    def arrived(self, index: int, stop: int) -> None:
        """As a backend tells it (`StorageBackend.read`)."""
        row = self._rows[index]
        row.passed(stop)
        if row.is_whole:
            self._verdicts[index] = row.verdict()

    def are_judged(self, indexes: Sequence[int]) -> bool:
        """Whether `verdicts` has nothing to compute: else it is work for a thread."""
        return all(index in self._verdicts for index in indexes)

    def verdicts(self, indexes: Sequence[int]) -> list[str | None]:
        """What is wrong with these rows, all of which have arrived."""
        for index in indexes:
            if index not in self._verdicts:
                self._verdicts[index] = self._rows[index].verdict()
        return [self._verdicts[index] for index in indexes]
