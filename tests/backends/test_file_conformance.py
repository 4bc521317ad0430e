"""The file backend is proven by the suite, with all that a backend can claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tiered_cache.storage import ObjectKey
from tiered_cache.testing.backends import BackendTests
from tiered_cache_file import FileBackend, FileOptions, backend
from tiered_cache_file.layout import Layout


class TestFile(BackendTests):
    """As it is shipped."""

    backend_class = FileBackend
    persists = True
    shared = True

    def options(self) -> FileOptions:
        return FileOptions(path=str(self.tmp_path / "kept"), reserve=0)

    def tamper(self, key: ObjectKey, change: Callable[[bytes], bytes]) -> None:
        path = Path(Layout(self.options().path).path(key))
        path.write_bytes(change(path.read_bytes()))


class TestFileDirect(TestFile):
    """Past the page cache, where the file system can: there is more than any memory holds."""

    @pytest.fixture(autouse=True)
    def no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "memory_bytes", lambda: -1)
