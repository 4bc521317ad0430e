"""A prefix cache for the attention state of language models, for async serving loops."""

from tiered_cache.cache import UnifiedRadixCache
from tiered_cache.chunk import Chunk
from tiered_cache.config import Config, load_config
from tiered_cache.engine import CacheRequest
from tiered_cache.errors import (
    AdmissionTimeout,
    BackendError,
    CapacityError,
    ClosedError,
    ConfigError,
    IntegrityError,
    LoadFailed,
    LockError,
    StaleError,
    TieredCacheError,
    WrongThreadError,
)
from tiered_cache.keys import RadixKey
from tiered_cache.lease import Lease
from tiered_cache.observe import Event, EventKind, Observer
from tiered_cache.stats import CacheStats
from tiered_cache.types import (
    Boundary,
    EvictParams,
    EvictResult,
    Hits,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    Namespace,
    Outstanding,
    Tier,
)

__all__ = [
    "AdmissionTimeout",
    "BackendError",
    "Boundary",
    "CacheRequest",
    "CacheStats",
    "CapacityError",
    "Chunk",
    "ClosedError",
    "Config",
    "ConfigError",
    "Event",
    "EventKind",
    "EvictParams",
    "EvictResult",
    "Hits",
    "InsertParams",
    "InsertResult",
    "IntegrityError",
    "Lease",
    "LoadFailed",
    "LockError",
    "MatchPrefixParams",
    "MatchResult",
    "Namespace",
    "Observer",
    "Outstanding",
    "RadixKey",
    "StaleError",
    "Tier",
    "TieredCacheError",
    "UnifiedRadixCache",
    "WrongThreadError",
    "load_config",
]
