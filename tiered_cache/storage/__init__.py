"""The third tier's contract: what a backend is, and how what it keeps is framed and proved.

A backend imports this package, `tiered_cache.types` and `tiered_cache.errors`, and nothing else of
the library; backends live in packages of their own and are found through entry points.
"""

from __future__ import annotations

from tiered_cache.storage.backend import (
    SCOPE_BYTES,
    BackendContext,
    BackendOptions,
    BackendStats,
    ObjectInfo,
    ObjectKey,
    ReadResult,
    StorageBackend,
    WriteResult,
)

__all__ = [
    "SCOPE_BYTES",
    "BackendContext",
    "BackendOptions",
    "BackendStats",
    "ObjectInfo",
    "ObjectKey",
    "ReadResult",
    "StorageBackend",
    "WriteResult",
]
