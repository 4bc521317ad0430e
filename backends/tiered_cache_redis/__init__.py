"""The redis backend: rows in Redis or Valkey, shared by all processes that know the server.

`options` says what can be set, `backend` what calls mean, `servers` who keeps what, and `wire`
moves the bytes. docs/backends/redis.md is the page for users.
"""

from __future__ import annotations

try:
    import redis as _redis  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the redis backend needs redis-py: pip install 'tiered-cache[redis]'"
    ) from error

from tiered_cache_redis.backend import RedisBackend
from tiered_cache_redis.options import RedisOptions

__all__ = ["RedisBackend", "RedisOptions"]
