"""The third tier's contract: what a backend is, and how what it keeps is framed and proved.

A backend imports this package, `tiered_cache.types` and `tiered_cache.errors`, and nothing else of
the library; backends live in packages of their own and are found through entry points.
"""

from __future__ import annotations

from tiered_cache.storage.backend import (
    HEADER_ROOM,
    SCOPE_BYTES,
    BackendContext,
    BackendOptions,
    BackendStats,
    ObjectInfo,
    ObjectKey,
    ReadResult,
    SealingBackend,
    StorageBackend,
    WriteResult,
)

__all__ = [
    "HEADER_ROOM",
    "SCOPE_BYTES",
    "BackendContext",
    "BackendOptions",
    "BackendStats",
    "ObjectInfo",
    "ObjectKey",
    "ReadResult",
    "SealingBackend",
    "StorageBackend",
    "WriteResult",
]
