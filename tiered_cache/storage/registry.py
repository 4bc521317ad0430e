"""Which backends there are: what is installed says so, through an entry point.

A package with

    [project.entry-points."tiered_cache.backends"]
    s3 = "tiered_cache_s3:S3Backend"

can be named in `storage.backend`. Owns: finding and loading. Refuses to know: any backend.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from tiered_cache.config.schema import BACKEND_GROUP, installed_backends
from tiered_cache.errors import BackendError
from tiered_cache.storage.backend import StorageBackend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = BACKEND_GROUP

backend_names = installed_backends


def load_backend(name: str) -> type[StorageBackend]:
    """The class behind a name.

    Raises:
        LookupError: no such backend is installed.
        BackendError: it is, but cannot be imported (what it needs is missing), or is not one.
    """
    found: list[EntryPoint] = list(entry_points(group=GROUP, name=name))
    if not found:
        raise LookupError(name)
    point = found[0]
    try:
        backend = point.load()
    except Exception as error:  # somebody else's module: whatever stops it
        raise BackendError(f"backend {name!r} cannot be imported: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, StorageBackend)):
        raise BackendError(f"backend {name!r} is {point.value}, which is not a StorageBackend")
    return backend


def install_hint(name: str) -> str:
    """What to do when a backend that is installed cannot be imported."""
    dist = next(iter(entry_points(group=GROUP, name=name))).dist
    if dist is None:
        return "install what it needs"
    if name in (dist.metadata.get_all("Provides-Extra") or ()):
        return f"python -m pip install '{dist.name}[{name}]'"
    return f"install what {dist.name} needs"
