"""The reference backend is proven by the suite, with all that a backend can claim."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tiered_cache.storage import BackendContext, ObjectKey, WriteResult
from tiered_cache.testing.backends import BackendTests, Objects, ThreadContext, on_a_loop
from tiered_cache_memory import Kept, MemoryBackend, MemoryOptions


class TestMemory(BackendTests):
    """As it is shipped."""

    backend_class = MemoryBackend


class TestMemoryThatIsKept(BackendTests):
    """Several instances on the same rows, at once and one after the other."""

    backend_class = MemoryBackend
    persists = True
    shared = True

    @pytest.fixture(autouse=True)
    def rows(self) -> None:
        self.kept = Kept()

    async def open(self, context: BackendContext) -> MemoryBackend:
        return MemoryBackend(kept=self.kept)

    def tamper(self, key: ObjectKey, change: Callable[[bytes], bytes]) -> None:
        self.kept.rows[key] = change(self.kept.rows[key])

    @on_a_loop
    async def test_a_row_that_would_exceed_the_size_is_refused(self) -> None:
        """For now: there is room when another goes. Instances on the same rows count together."""
        objects = Objects()
        keys = [objects.key(number) for number in range(3)]
        rows = [objects.make(memoryview(bytearray(4096)), number) for number in range(3)]
        for _ in range(2):
            backend = MemoryBackend(max_size=2 * 4096 + 4095, kept=self.kept)
            assert await backend.write(keys, rows) == [
                WriteResult.WRITTEN,
                WriteResult.WRITTEN,
                WriteResult.REFUSED,
            ]
            assert await MemoryBackend(8192, self.kept).write(keys[2:], rows[2:]) == [
                WriteResult.REFUSED
            ]
            stats = backend.stats()
            assert (stats.num_objects, stats.num_bytes, stats.max_bytes) == (2, 8192, 12287)
            await backend.delete(keys)
            assert backend.stats().num_bytes == 0

    @on_a_loop
    async def test_it_is_opened_with_its_options(self) -> None:
        """The size of a configuration reaches it; what it keeps goes with it."""
        async with ThreadContext() as context:
            backend = await MemoryBackend.open(MemoryOptions(max_size=5), context)
            assert backend.stats().max_bytes == 5
            await backend.aclose()
            assert self.kept.rows == {}
