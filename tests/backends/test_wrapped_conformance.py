"""What stands around a backend is a backend: the suite sees no difference, and neither do they."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiered_cache.stats import StorageCounters
from tiered_cache.storage import BackendContext, StorageBackend
from tiered_cache.storage.wrappers import Counted, Limited, Sealed
from tiered_cache.testing.backends import BackendTests
from tiered_cache.testing.faulty_backend import FaultyBackend
from tiered_cache_memory import Kept, MemoryBackend


class TestWrapped(BackendTests):
    """Counted, limited, and one that could fail and is not told to. It finds its callers right."""

    backend_class = MemoryBackend
    persists = True
    shared = True

    @pytest.fixture(autouse=True)
    def callers_keep_to_the_contract(self) -> Iterator[None]:
        self.kept = Kept()
        self.opened: list[FaultyBackend] = []
        yield
        for faulty in self.opened:
            assert faulty.violations == []
            assert faulty.under_way == []

    async def open(self, context: BackendContext) -> StorageBackend:
        faulty = FaultyBackend(MemoryBackend(kept=self.kept))
        self.opened.append(faulty)
        return Counted(Limited(Sealed(faulty, context), 4, lambda _: None), StorageCounters())
