"""The redis backend is proven by the suite that every backend is proven by."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.backends.redis_server import ValkeyServer
from tiered_cache.storage import SCOPE_BYTES, ObjectKey
from tiered_cache.testing.backends import BackendTests
from tiered_cache_redis import RedisBackend, RedisOptions


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as started:
        yield started


class TestRedis(BackendTests):
    """On one server for all tests, as the suite allows."""

    backend_class = RedisBackend
    persists = True
    shared = True

    @pytest.fixture(autouse=True)
    def _server(self, server: ValkeyServer) -> None:
        self.server = server

    def options(self) -> RedisOptions:
        return RedisOptions(url=self.server.url)

    def tamper(self, key: ObjectKey, change: Callable[[bytes], bytes]) -> None:
        name = f"tiered-cache:{key[:SCOPE_BYTES].hex()}:{key[SCOPE_BYTES:].hex()}"
        with self.server.client() as other:
            kept = other.get(name)
            assert kept is not None
            other.set(name, change(kept))


class TestRedisInSmallBatches(TestRedis):
    """One connection, and a few rows a round trip; large ones alone."""

    def options(self) -> RedisOptions:
        return RedisOptions(url=self.server.url, connections=1, max_batch="64KiB", ttl=1000)
