"""A backend is found by its name, wherever it is installed; what cannot be used is named."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from tiered_cache.config import schema
from tiered_cache.errors import BackendError
from tiered_cache.storage import registry
from tiered_cache.storage.registry import GROUP, backend_names, load_backend
from tiered_cache_memory import MemoryBackend


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """What other packages have in their entry points; the test fills it."""
    points: list[EntryPoint] = []

    def entry_points(**wanted: Any) -> EntryPoints:
        return EntryPoints(points).select(**wanted)

    for module in (registry, schema):
        monkeypatch.setattr(module, "entry_points", entry_points)
    return points


def test_the_shipped_backends_are_found_by_name() -> None:
    """Through the same entry points as anybody's."""
    assert {"memory", "file", "redis"} <= set(backend_names())
    assert load_backend("memory") is MemoryBackend


def test_names_are_listed_without_loading_anything(installed: list[EntryPoint]) -> None:
    """Once each, in order; a broken package is not in the way of the others."""
    installed += [
        EntryPoint("s3", "no_such_package:S3Backend", GROUP),
        EntryPoint("memory", "tiered_cache_memory:MemoryBackend", GROUP),
        EntryPoint("s3", "another:S3Backend", GROUP),
        EntryPoint("memory", "json:dumps", "some.other.group"),
    ]
    assert backend_names() == ["memory", "s3"]
    assert load_backend("memory") is MemoryBackend


def test_a_name_that_nobody_has_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match="memroy"):
        load_backend("memroy")


@pytest.mark.parametrize("value", ["no_such_package:S3Backend", "json:S3Backend"])
def test_what_cannot_be_imported_is_a_backend_error(
    installed: list[EntryPoint], value: str
) -> None:
    """Whatever is missing, the package, a library of its own or the class: the message says it."""
    installed.append(EntryPoint("s3", value, GROUP))
    with pytest.raises(BackendError, match="'s3' cannot be imported"):
        load_backend("s3")


@pytest.mark.parametrize("value", ["json:dumps", "pathlib:Path", "tiered_cache_memory:Kept"])
def test_what_is_no_backend_is_a_backend_error(installed: list[EntryPoint], value: str) -> None:
    installed.append(EntryPoint("s3", value, GROUP))
    with pytest.raises(BackendError, match=f"'s3' is {value}, which is not a StorageBackend"):
        load_backend("s3")


def test_a_backend_that_is_not_named_is_not_imported() -> None:
    """Nobody pays for a client library that he does not use."""
    code = (
        "import sys; from tiered_cache.storage.registry import *; load_backend('memory');"
        "print([m for m in sys.modules if m.startswith(('redis', 'tiered_cache_'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['tiered_cache_memory']"
