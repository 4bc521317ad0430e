"""Values between a socket and the caller's buffers, with nothing in between.

redis-py opens connections (addresses, TLS, passwords) and keeps them. Values do not go through its
parser: that would copy each one four times, three of them while holding the GIL, where a `recv`
into the row itself copies once and without it. It makes reads two to three times as fast, and
writes more (the figures are in docs/backends/redis.md).

Owns: requests and replies in RESP2, and that a connection is in step: it either has no reply
outstanding, or is closed. Refuses to know: what keys are, which server this is, and what a refusal
means. All of it blocks: work for threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tiered_cache.storage import ReadResult, WriteResult

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

BUFFER_BYTES: Final = 4096
"""For the lines between values. Small, because what it holds of a value is copied once more."""

STEP_BYTES: Final = 256 << 10
"""Of a value, before `arrived` is called."""

END: Final = b"\r\n"


class OutOfStep(Exception):
    """What came is not the reply that was due. Nothing after it can be trusted."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server's answer to one command: no, because."""

    text: str

    @property
    def code(self) -> str:
        """Its first word: `OOM`, `WRONGTYPE`, `MOVED`."""
        return self.text.partition(" ")[0]


Reply: TypeAlias = Any
"""`int`, `bytes`, `ErrorReply`, None, or a list of such."""


class Wire:
    """One connection for the time of one exchange: commands go out together, replies come back in
    their order.

    Every wait on the socket is bounded by the socket's own timeout, so what is bounded is the time
    without progress, whatever the length of a value.
    """

    __slots__ = ("_buffer", "_socket", "_start", "_stop", "_view")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0  # what has come and was not used

    def ask(self, commands: Sequence[Sequence[bytes]]) -> list[Reply]:
        """Small questions and their answers."""
        self._send(b"".join(map(_packed, commands)))
        return [self._reply() for _ in commands]

    def get(
        self,
        names: Sequence[bytes],
        rows: Sequence[memoryview],
        arrived: Callable[[int, int], None],
    ) -> list[ReadResult | ErrorReply]:
        """GET each name into its row. `arrived(position, stop)` as in `StorageBackend.read`."""
        self._send(b"".join([_packed((b"GET", name)) for name in names]))
        return [self._value(row, position, arrived) for position, row in enumerate(rows)]

    def set(
        self, names: Sequence[bytes], rows: Sequence[memoryview], ttl_s: int | None
    ) -> list[WriteResult | ErrorReply]:
        """SET each name to its row."""
        options = b"" if ttl_s is None else _bulk(b"EX") + _bulk(b"%d" % ttl_s)
        num_parts = 3 if ttl_s is None else 5
        after = b""
        for name, row in zip(names, rows, strict=True):
            self._send(
                b"%b*%d\r\n%b%b$%d\r\n" % (after, num_parts, _bulk(b"SET"), _bulk(name), row.nbytes)
            )
            self._send(row)
            after = END + options
        self._send(after)
        return [self._written() for _ in names]

    def ended(self) -> None:
        """The exchange is over.

        Raises:
            OutOfStep: more has come than was asked for.
        """
        if self._start != self._stop:
            raise OutOfStep("the server sent more than it was asked for")

    def _written(self) -> WriteResult | ErrorReply:
        reply = self._reply()
        if reply == b"OK":
            return WriteResult.WRITTEN
        if isinstance(reply, ErrorReply):
            return reply
        raise OutOfStep("the server did not say whether it has kept a value")

    def _value(
        self, row: memoryview, position: int, arrived: Callable[[int, int], None]
    ) -> ReadResult | ErrorReply:
        line = self._line()
        if line[:1] == b"-":
            return ErrorReply(_text(line[1:]))
        if line[:1] != b"$":
            raise OutOfStep("the server sent something other than a value")
        length = _number(line[1:])
        if length < 0:
            return ReadResult.MISSING
        if length != row.nbytes:
            self._skip(length)
            return ReadResult.CORRUPT
        have, step = self._take(row), STEP_BYTES
        while have < length:
            have += self._receive(row[have:step])
            if have in (step, length):
                arrived(position, have)
                step += STEP_BYTES
        self._end_of_value()
        return ReadResult.READ

    def _reply(self) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(_text(rest))
        if kind == b":":
            return _number(rest)
        if kind == b"*":
            return [self._reply() for _ in range(_number(rest))]
        if kind != b"$":
            raise OutOfStep("the server sent something that is no reply")
        length = _number(rest)
        if length < 0:
            return None
        value = bytearray(length)
        view = memoryview(value)
        have = self._take(view)
        while have < length:
            have += self._receive(view[have:])
        self._end_of_value()
        return bytes(value)

    def _line(self) -> bytes:
        while (end := self._buffer.find(END, self._start, self._stop)) < 0:
            kept = self._stop - self._start
            if kept == BUFFER_BYTES:
                raise OutOfStep("the server sent a line without an end")
            self._buffer[:kept] = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, kept
            self._stop += self._receive(self._view[kept:])
        line = bytes(self._view[self._start : end])
        self._start = end + len(END)
        return line

    def _end_of_value(self) -> None:
        if self._line():
            raise OutOfStep("the server sent a value longer than it said")

    def _take(self, into: memoryview) -> int:
        """Fill from what has come already; how many bytes that were."""
        num = min(len(into), self._stop - self._start)
        into[:num] = self._view[self._start : self._start + num]
        self._start += num
        return num

    def _skip(self, length: int) -> None:
        """A value that nobody wants."""
        waste = memoryview(bytearray(min(length, STEP_BYTES)))
        while length:
            piece = waste[: min(length, len(waste))]
            length -= self._take(piece) or self._receive(piece)
        self._end_of_value()

    def _receive(self, into: memoryview) -> int:
        num = self._socket.recv_into(into)
        if not num:
            raise ConnectionResetError("the server closed the connection")
        return num

    def _send(self, data: bytes | memoryview) -> None:
        # Not sendall: its timeout is for all of the data, however much that is.
        view = memoryview(data)
        sent = 0
        while sent < view.nbytes:
            sent += self._socket.send(view[sent:])


def _packed(command: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(command) + b"".join(map(_bulk, command))


def _bulk(part: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(part), part)


def _number(digits: bytes) -> int:
    try:
        return int(digits)
    except ValueError:
        raise OutOfStep("the server sent a length that is no number") from None


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
