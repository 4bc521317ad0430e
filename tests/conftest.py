"""What every test runs under: nothing stays outstanding, and nothing blocks the loop."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from blockbuster import blockbuster_ctx

from tiered_cache.controller import HybridCacheController
from tiered_cache.transfer import copier

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def nothing_outstanding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every cache a test opens is closed, holds nothing, has lost no page and left no thread."""
    opened: list[HybridCacheController] = []
    start = HybridCacheController.start

    async def recording_start(controller: HybridCacheController, *args: Any) -> None:
        opened.append(controller)
        await start(controller, *args)

    monkeypatch.setattr(HybridCacheController, "start", recording_start)
    threads = set(threading.enumerate())
    yield
    for controller in opened:
        assert controller.closed, "the test left a cache open"
        assert controller.outstanding() == []
        controller.check_integrity()
        for pool in controller.stats().pools.values():
            assert pool.protected == pool.private == pool.quarantined == pool.unspent == 0, pool
            assert pool.free + pool.evictable == pool.capacity
        for pool in controller.stats().host.values():
            assert pool.protected == pool.in_flight == pool.quarantined == 0, pool
            assert pool.free + pool.evictable == pool.capacity
    deadline = time.monotonic() + 5
    while left := [
        t for t in set(threading.enumerate()) - threads if t.name.startswith("tiered-cache")
    ]:
        assert time.monotonic() < deadline, f"threads left behind: {left}"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_callback_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What fails where nobody awaits it (a callback of the loop, a forgotten task) fails the
    test."""
    yield
    records = [record for when in ("setup", "call") for record in caplog.get_records(when)]
    failed = [record for record in records if record.name == "asyncio" and record.levelno >= 40]
    assert not failed, "\n".join(record.getMessage() for record in failed)


@pytest.fixture(autouse=True)
def nothing_blocks() -> Iterator[None]:
    """A blocking call on the event loop from inside the library fails the test."""
    with blockbuster_ctx(scanned_modules=["tiered_cache"]) as watched:
        # Jobs that a test starts and ends by hand are waited for on purpose.
        acquire = watched.functions["threading.Lock.acquire"]
        acquire.can_block_in("tiered_cache/testing/gates.py", {"start", "finish"})
        yield


@pytest.fixture
def one_page_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer of n pages is n jobs."""
    monkeypatch.setattr(copier, "JOB_BYTES", 1)
