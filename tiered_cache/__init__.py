"""A prefix cache for the attention state of language models, for async serving loops.

Public names are imported when they are first used: who writes a storage backend, or only has this
package installed beside pytest, does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
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
        RanksError,
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
    "RanksError",
    "StaleError",
    "Tier",
    "TieredCacheError",
    "UnifiedRadixCache",
    "WrongThreadError",
    "load_config",
]

HOMES: Final = {
    "cache": ("UnifiedRadixCache",),
    "chunk": ("Chunk",),
    "config": ("Config", "load_config"),
    "engine": ("CacheRequest",),
    "errors": (
        "AdmissionTimeout",
        "BackendError",
        "CapacityError",
        "ClosedError",
        "ConfigError",
        "IntegrityError",
        "LoadFailed",
        "LockError",
        "RanksError",
        "StaleError",
        "TieredCacheError",
        "WrongThreadError",
    ),
    "keys": ("RadixKey",),
    "lease": ("Lease",),
    "observe": ("Event", "EventKind", "Observer"),
    "stats": ("CacheStats",),
    "types": (
        "Boundary",
        "EvictParams",
        "EvictResult",
        "Hits",
        "InsertParams",
        "InsertResult",
        "MatchPrefixParams",
        "MatchResult",
        "Namespace",
        "Outstanding",
        "Tier",
    ),
}
"""Which module has which of the names."""


if not TYPE_CHECKING:  # else every name would be right to a type checker

    def __getattr__(name: str) -> Any:
        for module, names in HOMES.items():
            if name in names:
                value = getattr(import_module(f"{__name__}.{module}"), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
