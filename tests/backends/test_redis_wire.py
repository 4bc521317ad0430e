"""Replies in any pieces, and what is not a reply: a connection is in step or at its end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_cache.storage import ReadResult, WriteResult
from tiered_cache_redis.wire import STEP_BYTES, ErrorReply, OutOfStep, Wire

READ, MISSING, CORRUPT = ReadResult.READ, ReadResult.MISSING, ReadResult.CORRUPT


class Pieces:
    """A socket whose bytes come in given pieces, and then no more."""

    def __init__(self, data: bytes, lengths: Sequence[int]) -> None:
        self.data, self.lengths, self.sent = data, list(lengths), b""

    def recv_into(self, into: memoryview) -> int:
        most = self.lengths.pop() if self.lengths else len(into)
        num = min(most, len(into), len(self.data))
        into[:num], self.data = self.data[:num], self.data[num:]
        return num

    def send(self, data: memoryview) -> int:
        most = self.lengths.pop() if self.lengths else len(data)
        self.sent += data[:most]
        return min(most, len(data))


def wire_of(data: bytes, lengths: Sequence[int] = ()) -> tuple[Wire, Pieces]:
    pieces = Pieces(data, lengths)
    return Wire(pieces), pieces  # type: ignore[arg-type]


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class Row:
    """What a server may hold for a row of `size`, and what that is read as."""

    def __init__(self, size: int, kind: str) -> None:
        self.buffer = memoryview(bytearray(size))
        self.value = bytes((size + index) % 251 for index in range(size))
        self.reply, self.result = {
            "there": (bulk(self.value), READ),
            "missing": (b"$-1\r\n", MISSING),
            "empty": (bulk(b""), CORRUPT if size else READ),
            "short": (bulk(self.value[:-1]), CORRUPT),
            "long": (bulk(self.value * 3), CORRUPT),
            "error": (b"-WRONGTYPE no string\r\n", ErrorReply("WRONGTYPE no string")),
        }[kind]


rows = st.builds(
    Row,
    st.sampled_from([1, 2, 100, 4095, 4096, 4097, 70_000]),
    st.sampled_from(["there", "missing", "empty", "short", "long", "error"]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(rows, max_size=8), st.lists(st.integers(1, 5000), max_size=60))
def test_values_do_not_depend_on_how_their_bytes_come(given: list[Row], lengths: list[int]) -> None:
    """Whatever the pieces: each row has its own bytes, and nothing is left over."""
    wire, _ = wire_of(b"".join(row.reply for row in given), lengths)
    got = wire.get([b"k"] * len(given), [row.buffer for row in given], lambda *_: None)
    wire.ended()
    assert got == [row.result for row in given]
    assert all(row.buffer == row.value for row in given if row.result is READ)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=9000), max_size=5), st.lists(st.integers(1, 3000), max_size=40))
def test_requests_do_not_depend_on_how_their_bytes_go(
    values: list[bytes], lengths: list[int]
) -> None:
    names = [b"name-%d" % index for index in range(len(values))]
    for ttl, options, parts in ((None, b"", 3), (9, bulk(b"EX") + bulk(b"9"), 5)):
        wire, pieces = wire_of(b"+OK\r\n" * len(values), lengths)
        assert wire.set(names, list(map(memoryview, values)), ttl) == [WriteResult.WRITTEN] * len(
            values
        )
        assert pieces.sent == b"".join(
            b"*%d\r\n" % parts + bulk(b"SET") + bulk(name) + bulk(value) + options
            for name, value in zip(names, values, strict=True)
        )


def test_small_answers_of_every_kind() -> None:
    wire, pieces = wire_of(
        b"+PONG\r\n:42\r\n$3\r\na\r\n\r\n$-1\r\n*2\r\n*1\r\n:1\r\n$1\r\nx\r\n-E f\r\n"
    )
    answers = wire.ask([(b"A", b"b\r\n")] * 6)
    assert answers == [b"PONG", 42, b"a\r\n", None, [[1], b"x"], ErrorReply("E f")]
    assert answers[-1].code == "E"
    assert pieces.sent == (b"*2\r\n" + bulk(b"A") + bulk(b"b\r\n")) * 6


@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n",  # not a value
        b"*1\r\n$4\r\naaaa\r\n",
        b"$x\r\n",
        b"$4\r\naaaaaa\r\n",  # longer than it said
        b"$3\r\naaaaa\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$" + b"1" * 5000,
        b"$4\r\naaaa\r\n$4\r\nbbbb\r\n",  # nobody asked for the second
    ],
)
def test_what_is_not_the_reply_that_is_due_is_not_taken_for_it(answer: bytes) -> None:
    wire, _ = wire_of(answer)
    with pytest.raises(OutOfStep):
        wire.get([b"k"], [memoryview(bytearray(4))], lambda *_: None)
        wire.ended()


@pytest.mark.parametrize("answer", [b"", b"$4\r\naa", b"$4\r\naaaa", b"$9\r\naaaa", b"-ER"])
def test_the_end_in_the_middle_of_an_answer_is_an_error(answer: bytes) -> None:
    wire, _ = wire_of(answer)
    with pytest.raises(ConnectionResetError):
        wire.get([b"k"], [memoryview(bytearray(4))], lambda *_: None)


def test_an_answer_that_does_not_say_ok_is_no_success() -> None:
    wire, _ = wire_of(b"$-1\r\n")
    with pytest.raises(OutOfStep):
        wire.set([b"k"], [memoryview(b"v")], None)


@pytest.mark.parametrize("length", [1, STEP_BYTES, STEP_BYTES + 1, 3 * STEP_BYTES])
def test_no_step_is_longer_than_the_processors_cache_likes(length: int) -> None:
    told: list[int] = []
    wire, _ = wire_of(bulk(b"v" * length))
    wire.get([b"k"], [memoryview(bytearray(length))], lambda _, stop: told.append(stop))
    assert all(now - before <= STEP_BYTES for before, now in zip([0, *told], told, strict=False))
    assert length == 1 or told[-1] == length


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_time_limit_is_for_standing_still(pair: tuple[socket.socket, socket.socket]) -> None:
    """B75: a value may take as long as it likes while it comes, and may go as slowly."""
    ours, theirs = pair
    ours.settimeout(0.5)
    value = bytes(600_000)
    stop = threading.Event()

    def slow_server() -> None:
        for start in range(0, len(value), 100_000):
            stop.wait(0.1)
            piece = value[start : start + 100_000]
            theirs.sendall((b"" if start else b"$600000\r\n") + piece)
        theirs.sendall(b"\r\n")
        left = 4_000_000
        while left > 0:  # our value, slowly
            stop.wait(0.03)
            left -= len(theirs.recv(200_000))
        theirs.sendall(b"+OK\r\n")

    thread = threading.Thread(target=slow_server)
    thread.start()
    row = memoryview(bytearray(len(value)))
    assert Wire(ours).get([b"k"], [row], lambda *_: None) == [READ]  # 0.6 s
    assert Wire(ours).set([b"k"], [memoryview(bytes(4_000_000))], None) == [WriteResult.WRITTEN]
    thread.join()
    with pytest.raises(TimeoutError):
        Wire(ours).get([b"k"], [row], lambda *_: None)
