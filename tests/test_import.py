"""The package's public names: all there, and not paid for before they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tiered_cache


def test_every_public_name_has_one_home() -> None:
    """What type checkers see, what is listed and what is imported on demand are the same."""
    assert tiered_cache.__file__ is not None
    source = ast.parse(Path(tiered_cache.__file__).read_text())
    seen = {
        (str(node.module).removeprefix("tiered_cache."), alias.name)
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tiered_cache.")
        for alias in node.names
    }
    homes = {(module, name) for module, names in tiered_cache.HOMES.items() for name in names}
    assert homes == seen
    assert sorted(name for _, name in homes) == sorted(tiered_cache.__all__)
    for name in tiered_cache.__all__:
        assert getattr(tiered_cache, name) is not None
    assert set(tiered_cache.__all__) <= set(dir(tiered_cache))


def test_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'tiered_cache' has no attribute 'RadixCache'"):
        tiered_cache.RadixCache  # type: ignore[attr-defined]


def test_who_writes_a_backend_does_not_wait_for_torch() -> None:
    """Nor who has the package installed beside pytest."""
    code = (
        "import sys, tiered_cache.testing.pytest_plugin; first = set(sys.modules);"
        "import tiered_cache_memory, tiered_cache.storage.record, tiered_cache.testing.backends;"
        "print('pydantic' in first, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
