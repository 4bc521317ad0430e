"""`pytest --tiered-backend` proves somebody's backend with pytest alone and no file of his own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tiered_cache.testing import pytest_plugin
from tiered_cache.testing.backends import BackendTests

ROOT = Path(__file__).parents[2]
PLUGIN = "tiered_cache.testing.pytest_plugin"

BROKEN = """
from tiered_cache.storage import ReadResult
from tiered_cache_memory import MemoryBackend

class Broken(MemoryBackend):
    async def read(self, keys, rows, arrived=None):
        return [result for result in await super().read(keys, rows) if result is ReadResult.READ]
"""

pytestmark = pytest.mark.timeout(180)


def run(folder: Path, *args: str, code: int) -> str:
    """pytest in a folder, with no plugin but ours."""
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "backends", ROOT / "examples")))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-p", PLUGIN, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_pytest_finds_the_plugin() -> None:
    """Wherever this package is installed; its tests stand in the suite that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"tiered_cache": PLUGIN}
    assert pytest_plugin.__name__ == PLUGIN
    assert BackendTests.__module__ == pytest_plugin.SUITE


def test_the_example_is_proven_from_the_command_line(tmp_path: Path) -> None:
    """With a folder of its own for each test; what it does not claim is said."""
    (tmp_path / "test_other.py").write_text("def test_other(): raise AssertionError")
    said = run(
        tmp_path,
        "--tiered-backend=custom_backend:SqliteBackend",
        '--tiered-backend-options={"path": "{tmp}/rows.db"}',
        "--tiered-backend-claims=persists,shared",
        code=0,
    )
    assert "custom_backend:SqliteBackend ...." in said
    assert "not asked of TestBackend, needs can_scan: test_a_scan_names_every_object" in said
    assert "needs persists" not in said
    assert "test_other" not in said


def test_a_broken_backend_is_found_out(tmp_path: Path) -> None:
    """In the words of the suite, and it goes together with files and `-k`."""
    (tmp_path / "mine.py").write_text(BROKEN)
    (tmp_path / "test_other.py").write_text("def test_b72_too(): pass")
    said = run(tmp_path, "--tiered-backend=mine:Broken", "-k", "b72", "test_other.py", "-v", code=1)
    assert "AssertionError: 3 answers to 5 keys" in said or "4 answers to 5 keys" in said
    assert "needs shared: test_two_write_the_same_rows_b78" in said
    assert "test_b72_too PASSED" in said
    assert "2 failed, 1 passed" in said


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("nowhere:X", "--tiered-backend: No module named 'nowhere'"),
        ("tiered_cache_memory:X", "has no attribute 'X'"),
        ("tiered_cache_memory", "has no attribute ''"),
        ("tiered_cache_memory:Kept", "tiered_cache_memory:Kept is no StorageBackend"),
    ],
)
def test_what_is_no_backend_is_said_in_a_line(named: str, words: str) -> None:
    """An error of collection shows its message and no traceback."""
    with pytest.raises(pytest.Collector.CollectError, match=re.escape(words)):
        pytest_plugin._load(named)


def test_wrong_options_are_named_without_their_values(tmp_path: Path) -> None:
    """A password may be among them."""
    said = run(
        tmp_path,
        "--tiered-backend=custom_backend:SqliteBackend",
        '--tiered-backend-options={"pth": "hunter2"}',
        code=2,
    )
    assert "Extra inputs are not permitted" in said
    assert "hunter2" not in said
    assert "pytest_plugin.py" not in said, "a message, not a traceback"
    said = run(tmp_path, "--tiered-backend=x:Y", "--tiered-backend-claims=perists", code=2)
    assert "perists; there are persists, shared" in said


def test_without_the_option_it_does_nothing(tmp_path: Path) -> None:
    """Other people's tests run as if it were not there, and nothing of us is imported."""
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other():\n"
        "    loaded = [name for name in sys.modules if name.startswith('tiered_cache')]\n"
        f"    assert loaded == ['tiered_cache', 'tiered_cache.testing', '{PLUGIN}']\n"
        "    assert 'torch' not in sys.modules\n"
    )
    assert "1 passed" in run(tmp_path, code=0)
