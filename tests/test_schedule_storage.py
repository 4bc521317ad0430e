"""What the schedules hold of the third tier is held where it should be, and excused where they have
spoilt it themselves: the judge, judged."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.lease_helpers import P, seq
from tests.schedule_storage import Content, Spoilt, ThirdTier
from tests.storage_helpers import three_tiers
from tiered_cache.storage.backend import SCOPE_BYTES, ObjectKey, WriteResult
from tiered_cache.testing.faulty_backend import Call, Fault, flipped

A = seq("A", 3 * P)


class Judged:
    """A third tier of its own beside a cache, and three real rows of one prefix, root first."""

    def __init__(self, third: ThirdTier, rows: dict[ObjectKey, bytes]) -> None:
        self.third = third
        self.rows = rows
        self.keys = list(rows)

    def store(self) -> Content:
        """Attached: its rows are what is kept from now on."""
        self.third.kept = Spoilt()
        content = Content(self.third)
        content.faulty = SimpleNamespace(under_way=[])  # type: ignore[assignment]
        self.third._backends.append(content.faulty)  # type: ignore[arg-type]
        return content

    def write(self, content: Content, page: int, change: Callable[[bytes], bytes] = bytes) -> None:
        row = change(self.rows[self.keys[page]])
        assert content._write(self.keys[page], memoryview(row)) is WriteResult.WRITTEN

    @property
    def faults(self) -> list[str]:
        found: list[str] = self.third.schedule.faults
        return found


@contextlib.asynccontextmanager
async def judged() -> AsyncIterator[Judged]:
    async with three_tiers() as (r, store):
        await r.serve([*A, 1])
        await r.cache.drain()
        formats = r.cache._controller.storage.io.formats  # type: ignore[union-attr]
        schedule: Any = SimpleNamespace(faults=[], page_size=P)
        third = ThirdTier(schedule, None)  # type: ignore[arg-type]
        third._formats = formats
        third.note_published("", np.asarray(A, np.int64).tobytes())
        by_page = {key[SCOPE_BYTES:]: key for key in store.rows}
        keys = [by_page[page] for page in store.pages_of(A)]
        with mock.patch.object(third, "_verdict_on_bytes", return_value=None):  # no oracle's rows
            yield Judged(third, {key: store.rows[key] for key in keys})


async def test_rows_that_are_right_are_no_fault() -> None:
    async with judged() as j:
        content = j.store()
        for page in range(3):
            j.write(content, page)
        assert j.faults == []


async def a_row_is_spoilt(j: Judged) -> None:
    j.write(j.store(), 0, flipped(600))


async def the_page_above_is_missing(j: Judged) -> None:
    j.write(j.store(), 1)


async def the_page_above_is_in_another_store(j: Judged) -> None:
    """Which was attached before, or since: it does not count."""
    first = j.store()
    j.write(first, 0)
    second = j.store()
    j.write(second, 1)


async def nobody_published_it(j: Judged) -> None:
    j.third._pages.clear()
    j.write(j.store(), 0)


async def nobody_doubted_it(j: Judged) -> None:
    content = j.store()
    j.write(content, 0)
    await content.delete(j.keys[:1])


@pytest.mark.parametrize(
    ("mistake", "fault"),
    [
        (a_row_is_spoilt, "a kept row "),
        (the_page_above_is_missing, "what it hangs on is not"),
        (the_page_above_is_in_another_store, "what it hangs on is not"),
        (nobody_published_it, "nobody has published"),
        (nobody_doubted_it, "nobody doubted"),
    ],
)
async def test_a_mistake_is_a_fault(
    mistake: Callable[[Judged], Coroutine[Any, Any, None]], fault: str
) -> None:
    async with judged() as j:
        await mistake(j)
        assert len(j.faults) == 1
        assert fault in j.faults[0]


async def test_what_one_store_may_lack_another_s_rows_do_not_make_good() -> None:
    """Found by schedules: a write that hung came to its end in a store that had been cleared
    meanwhile; another store was attached by then and had the pages above it, and with that the
    excuse was gone."""
    async with judged() as j:
        first = j.store()
        j.write(first, 0)
        await first.clear(j.keys[0][:SCOPE_BYTES])
        second = j.store()
        j.write(second, 0)
        j.write(first, 1)
        assert j.faults == []
        j.write(first, 0)  # is there again, and is no excuse any more
        del first.rows[j.keys[0]]
        j.write(first, 2)
        assert j.faults == []
        del first.rows[j.keys[1]]
        del first.rows[j.keys[2]]
        j.write(first, 1)
        assert len(j.faults) == 1


async def test_a_good_write_does_not_make_a_bad_one_good_that_comes_later() -> None:
    """Found by schedules: a write that was to be spoilt was late, another wrote the same object
    meanwhile, and with that the excuse was gone."""
    async with judged() as j:
        content, key = j.store(), j.keys[0]
        content.store.wrong.add(key)
        late = Call("write", (key,), faults=(Fault("write", keys=[key], change=flipped(600)),))
        content.faulty.under_way.append(late)
        j.write(content, 0)
        del content.rows[key]
        j.write(content, 0, flipped(600))
        assert j.faults == []
        content.faulty.under_way.clear()
        del content.rows[key]
        j.write(content, 0)  # nobody is late any more: from now on it has to be right
        del content.rows[key]
        j.write(content, 0, flipped(600))
        assert len(j.faults) == 1
