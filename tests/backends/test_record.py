"""A row proves what it is: its format, bit for bit, and every way in which it can be wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiered_cache.storage import SCOPE_BYTES
from tiered_cache.storage.record import (
    HEADER,
    MAX_COMPONENT_BYTES,
    PIECE_BYTES,
    Arrival,
    Arrivals,
    Departure,
    Departures,
    RecordFormat,
    fingerprint,
)

GOLDEN: Final = bytes.fromhex((Path(__file__).parent / "golden" / "row-v1.hex").read_text())
"""An object of version 1, written by hand. It never changes: what it says, users have on disk."""

GOLDEN_FINGERPRINT: Final = "4d1d49bf5d60074816f8aa56c14971c1b27188e6de3247a9c979bd0fab6f29f1"
"""SHA-256 of `{"layers":[0,1],"model":"m\\u00e4","page_size":16}`, by hand."""

IDENTITY, PAGE_KEY = bytes(range(0x40, 0x60)), bytes(range(0xA0, 0xC0))
ROW_BYTES, PAYLOAD_END = 768, 640
FORMAT: Final = RecordFormat("full", IDENTITY, ROW_BYTES, PAYLOAD_END)
CORRUPT: Final = "does not match its checksum"


def golden() -> memoryview:
    return memoryview(bytearray(GOLDEN))


def checksummed(row: memoryview) -> memoryview:
    """With the checksum that its bytes have now: as somebody would have written it."""
    row[16:32] = xxhash.xxh3_128_digest(row[32:PAYLOAD_END])
    return row


# --- the format -----------------------------------------------------------------------------------


def test_the_golden_object_is_written_bit_for_bit() -> None:
    """From whatever stood in the header room; payload and padding stay as they are."""
    row = golden()
    row[:512] = random.Random(0).randbytes(512)
    FORMAT.seal(row, PAGE_KEY)
    assert bytes(row) == GOLDEN


def test_the_golden_object_is_read() -> None:
    assert FORMAT.check(golden(), PAGE_KEY) is None


def test_an_object_is_named_by_its_scope_and_its_page() -> None:
    """The scope is the front of the fingerprint, so another model's object is never even found."""
    assert FORMAT.scope == IDENTITY[:SCOPE_BYTES]
    assert FORMAT.object_key(PAGE_KEY) == IDENTITY[:16] + PAGE_KEY


def test_the_checksum_is_the_published_one() -> None:
    """XXH3-128, most significant byte first, as everybody writes it."""
    assert xxhash.xxh3_128(b"").hexdigest() == "99aa06d3014798d86001c324468d497f"
    assert xxhash.xxh3_128(GOLDEN[32:PAYLOAD_END]).hexdigest() == GOLDEN[16:32].hex()


def test_a_fingerprint_is_the_same_for_ever() -> None:
    """In whatever order the facts come, whatever the process."""
    facts = {"model": "mä", "layers": [0, 1], "page_size": 16}
    assert fingerprint(facts).hex() == GOLDEN_FINGERPRINT
    assert fingerprint(dict(reversed(facts.items()))) == fingerprint(facts)


@pytest.mark.parametrize(
    "other",
    [{"model": "M"}, {"page_size": 17}, {"layers": [1, 0]}, {"page_size": "16"}, {"more": None}],
)
def test_every_fact_changes_the_fingerprint_b84(other: Any) -> None:
    facts = {"model": "m", "layers": [0, 1], "page_size": 16}
    assert fingerprint({**facts, **other}) != fingerprint(facts)


@pytest.mark.parametrize(
    ("component", "identity", "row_bytes", "payload_end"),
    [
        ("full", IDENTITY, 768, 511),
        ("full", IDENTITY, 768, 769),
        ("full", IDENTITY[1:], 768, 640),
        ("ä" * (MAX_COMPONENT_BYTES // 2) + "!", IDENTITY, 768, 640),
    ],
)
def test_a_format_that_cannot_be_is_refused(
    component: str, identity: bytes, row_bytes: int, payload_end: int
) -> None:
    with pytest.raises(ValueError):
        RecordFormat(component, identity, row_bytes, payload_end)


def test_a_row_or_key_of_another_length_is_not_sealed() -> None:
    """`struct` would cut and pad silently."""
    for row, key in ((golden()[:-1], PAGE_KEY), (golden(), PAGE_KEY[1:]), (golden(), b"")):
        with pytest.raises(ValueError):
            FORMAT.seal(row, key)


def test_the_longest_component_id_fits() -> None:
    for name in ("", "ä" * (MAX_COMPONENT_BYTES // 2)):
        record, row = RecordFormat(name, IDENTITY, ROW_BYTES, PAYLOAD_END), golden()
        record.seal(row, PAGE_KEY)
        assert record.check(row, PAGE_KEY) is None
        assert FORMAT.check(row, PAGE_KEY) == "is of another component"


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_every_wrong_byte_is_found(bits: int) -> None:
    """In the header as in the payload; only padding means nothing."""
    for at in range(ROW_BYTES):
        row = golden()
        row[at] ^= bits
        assert (FORMAT.check(row, PAGE_KEY) is None) == (at >= PAYLOAD_END), at


def test_a_torn_row_is_found_wherever_it_is_torn() -> None:
    """Zeros, or what stood there before, from any byte on."""
    other = golden()
    other[512:] = bytes(byte ^ 0x33 for byte in other[512:])
    FORMAT.seal(other, bytes(32))
    for at in range(1, PAYLOAD_END):
        for rest in (bytes(ROW_BYTES), other):
            row = golden()
            row[at:] = rest[at:]
            assert FORMAT.check(row, PAGE_KEY) is not None, at


def test_a_row_of_any_other_length_is_found() -> None:
    """Also one that is too short for a header."""
    for length in [*range(ROW_BYTES), ROW_BYTES + 1]:
        row = memoryview(bytearray(GOLDEN[:length].ljust(length, b"\0")))
        assert FORMAT.check(row, PAGE_KEY) == "is of another length"


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (RecordFormat("swa", IDENTITY, ROW_BYTES, PAYLOAD_END), "is of another component"),
        (RecordFormat("full", IDENTITY, ROW_BYTES, 576), "is of another length"),
        (RecordFormat("full", IDENTITY[::-1], ROW_BYTES, 640), "is of another model or layout"),
    ],
)
def test_what_was_written_for_somebody_else_is_said_to_be(
    other: RecordFormat, verdict: str
) -> None:
    """Its own reader takes it; here it has a verdict of its own, though all of it is intact."""
    row = golden()
    other.seal(row, PAGE_KEY)
    assert other.check(row, PAGE_KEY) is None
    assert FORMAT.check(row, PAGE_KEY) == verdict


def test_another_page_is_said_to_be_b74() -> None:
    """An answer that belongs to another question: right bytes under a foreign key."""
    assert FORMAT.check(golden(), PAGE_KEY[::-1]) == "is another page"


@pytest.mark.parametrize(
    ("at", "value", "verdict"),
    [
        (0, b"GIF89a..", "is not a row"),
        (5, b"\n\n", "is not a row"),  # transferred as text
        (8, (2).to_bytes(4, "little"), "is of format 2, not 1"),
        (8, (1).to_bytes(4, "big"), "is of format 16777216, not 1"),
        (12, (0).to_bytes(4, "little"), "is of another length"),
        (96, (641).to_bytes(8, "little"), "is of another length"),
        (104, (2**64 - 1).to_bytes(8, "little"), "is of another length"),
        (112, (3).to_bytes(2, "little"), "is of another component"),
        (112, (0).to_bytes(2, "little"), "is of another component"),
        (112, (0xFFFF).to_bytes(2, "little"), "is of another component"),  # far beyond the row
        (114, b"FULL", "is of another component"),
    ],
)
def test_every_field_has_its_verdict(at: int, value: bytes, verdict: str) -> None:
    """With the checksum that fits, too: nothing is believed because it was written so."""
    row = golden()
    row[at : at + len(value)] = value
    assert FORMAT.check(checksummed(row), PAGE_KEY) == verdict


def test_zeros_and_nothing_are_no_rows() -> None:
    """What a file with a hole reads as, and what a value of length 0 is (B79)."""
    assert FORMAT.check(memoryview(bytes(ROW_BYTES)), PAGE_KEY) == "is not a row"
    assert FORMAT.check(memoryview(b""), PAGE_KEY) == "is of another length"


def test_gaps_and_padding_may_hold_anything() -> None:
    """When it is written; a gap that changes afterwards is a sign of rot like any other."""
    gap, padding = slice(600, 620), slice(PAYLOAD_END, ROW_BYTES)
    for noise in (0x00, 0xFF):
        row = golden()
        for part in (gap, padding):
            row[part] = bytes([noise]) * len(row[part])
        FORMAT.seal(row, PAGE_KEY)
        assert FORMAT.check(row, PAGE_KEY) is None
        row[padding] = bytes(len(row[padding]))
        assert FORMAT.check(row, PAGE_KEY) is None
        row[gap] = b"\x11" * len(row[gap])
        assert FORMAT.check(row, PAGE_KEY) == CORRUPT


# --- arrival in pieces ----------------------------------------------------------------------------


@given(st.lists(st.integers(0, ROW_BYTES + 10)), st.integers(32, PAYLOAD_END - 1))
def test_pieces_come_to_the_same_as_the_whole(stops: list[int], wrong: int) -> None:
    """However it is cut, told twice, or told less than before; and rot is found in any piece."""
    for row, verdict in ((golden(), None), (golden(), CORRUPT)):
        if verdict:
            row[wrong] ^= 0x10
        arrival = Arrival(FORMAT, row, PAGE_KEY)
        for stop in stops:
            arrival.passed(stop)
        assert (arrival.verdict() is None) == (verdict is None)


def test_bytes_are_looked_at_once_when_they_have_come() -> None:
    """What is not there yet is not hashed, so a row may arrive behind its own reader."""
    row = golden()
    row[300:] = bytes(ROW_BYTES - 300)
    arrival = Arrival(FORMAT, row, PAGE_KEY)
    arrival.passed(300)
    row[300:] = GOLDEN[300:]
    assert arrival.verdict() is None


@given(st.lists(st.integers(0, ROW_BYTES + 10)))
def test_a_row_that_is_sealed_in_pieces_is_the_golden_one(stops: list[int]) -> None:
    """However it is cut; before the last byte has gone by it is no object."""
    row = golden()
    row[:512] = random.Random(0).randbytes(512)
    departure = Departure(FORMAT, row, PAGE_KEY)
    for stop in sorted(stops):
        assert FORMAT.check(row, PAGE_KEY) is not None
        departure.seal(min(stop, ROW_BYTES - 1))
    assert FORMAT.check(row, PAGE_KEY) is not None
    departure.seal(ROW_BYTES)
    assert bytes(row) == GOLDEN


def test_who_moves_bytes_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that read, write and hash go on for as long as there are rows: where cores are short
    the event loop would wait for one for milliseconds."""
    given_up: list[int] = []
    monkeypatch.setattr("tiered_cache.storage.record.give_way", lambda: given_up.append(1))
    Departures(FORMAT, [golden()], [PAGE_KEY]).seal(0, ROW_BYTES)
    arrivals = Arrivals(FORMAT, [golden()], [PAGE_KEY])
    for stop in (300, 600, ROW_BYTES):
        arrivals.arrived(0, stop)
    assert len(given_up) == 4
    assert arrivals.verdicts([0]) == [None]


def test_a_large_row_is_checked_in_pieces() -> None:
    """Of several pieces and a rest, with a wrong byte on each side of every seam."""
    size = 3 * PIECE_BYTES + 4096
    record = RecordFormat("full", IDENTITY, size, size - 7)
    row = memoryview(bytearray(random.Random(1).randbytes(size)))
    record.seal(row, PAGE_KEY)
    assert record.check(row, PAGE_KEY) is None
    seams = [32 + PIECE_BYTES * number for number in (1, 2, 3)]
    for at in [*seams, *(seam - 1 for seam in seams), size - 8]:
        row[at] ^= 1
        assert record.check(row, PAGE_KEY) == CORRUPT
        row[at] ^= 1
    row[size - 7] ^= 1
    assert record.check(row, PAGE_KEY) is None


def test_verdicts_are_in_the_order_of_the_rows() -> None:
    """Each row for itself, of those that were read."""
    wrong, key = golden(), PAGE_KEY[::-1]
    wrong[600] ^= 1
    arrivals = Arrivals(FORMAT, [golden(), wrong, golden()], [PAGE_KEY, PAGE_KEY, key])
    arrivals.arrived(1, 400)
    arrivals.arrived(0, ROW_BYTES)
    assert arrivals.verdicts([2, 1, 0]) == ["is another page", CORRUPT, None]
    with pytest.raises(ValueError):
        Arrivals(FORMAT, [golden()], [PAGE_KEY, PAGE_KEY])


def test_the_header_has_no_holes() -> None:
    """Every field is where docs/page-format.md says, on every machine."""
    assert HEADER.size == 114
    assert HEADER.format.startswith("<")
