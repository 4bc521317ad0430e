"""The suite for backends can fail: each mistake is found by the test that is there for it."""

from __future__ import annotations

import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testing import broken_backends
from tests.testing.broken_backends import MISTAKES, Mistake, Seals, Threaded
from tiered_cache.storage import BackendContext, ObjectKey
from tiered_cache.testing.backends import BackendTests
from tiered_cache_memory import Kept, MemoryBackend


class OnKeptRows(BackendTests):
    """Whatever a backend can claim, on rows that outlive it."""

    persists = True
    shared = True
    limit_s = 3.0
    kept: Kept

    async def open(self, context: BackendContext) -> MemoryBackend:
        backend: Any = self.backend_class
        if issubclass(backend, Threaded):
            return backend(context, self.kept)
        opened = await backend.open(backend.Options(), context)
        opened._kept = self.kept
        return opened

    def tamper(self, key: ObjectKey, change: Callable[[bytes], bytes]) -> None:
        self.kept.rows[key] = change(self.kept.rows[key])


class TestThreaded(OnKeptRows):
    """Control: a sound backend that works in threads passes all of them."""

    backend_class = Threaded

    @pytest.fixture(autouse=True)
    def rows(self) -> None:
        self.kept = Kept()


class TestSeals(TestThreaded):
    """Control: one that seals does, too."""

    backend_class = Seals


@pytest.fixture(autouse=True)
def end_what_is_left() -> Iterator[None]:
    yield
    broken_backends.STOPPED.set()
    while broken_backends.LEFT_FDS:
        os.close(broken_backends.LEFT_FDS.pop())


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=[f"{of.backend.__name__}-{at}" for at, of in enumerate(MISTAKES)]
)
def test_a_mistake_is_found(mistake: Mistake, tmp_path: Path) -> None:
    """By the test that is there for it, in words that say what it is."""
    broken_backends.STOPPED.clear()
    suite = type("Suite", (OnKeptRows,), {"backend_class": mistake.backend})()
    suite.tmp_path, suite.kept = tmp_path, Kept()
    try:
        getattr(suite, mistake.test)(*mistake.args)
    except Exception as error:
        said = "".join(traceback.format_exception_only(error)) + _last_line(error)
        assert re.search(mistake.words, said), said
    else:
        pytest.fail(f"{mistake.test} has not found it")


def _last_line(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].line or ""


def test_every_test_finds_a_mistake() -> None:
    """There is none in the suite that cannot fail."""
    tests = {name for name in vars(BackendTests) if name.startswith("test_")}
    found = Counter(mistake.test for mistake in MISTAKES)
    assert tests == set(found), tests ^ set(found)


# --- what is not asked ----------------------------------------------------------------------------


def test_what_a_backend_does_not_claim_is_not_asked() -> None:
    """And is listed, with what it lacks; a subclass that can is asked again."""

    class Little(BackendTests):
        backend_class = MemoryBackend

    class More(Little):
        persists = True

        def tamper(self, key: ObjectKey, change: Callable[[bytes], bytes]) -> None:
            """Could."""

    restart = "test_what_is_kept_is_there_after_a_restart"
    assert Little.left_out[restart] == "needs persists"
    assert Little.left_out["test_two_write_the_same_rows_b78"] == "needs shared"
    assert Little.left_out["test_a_changed_byte_is_found"] == "needs tamper"
    assert "test_a_scan_names_every_object" not in Little.left_out
    assert getattr(Little, restart) is None
    assert getattr(More, restart) is vars(BackendTests)[restart]
    assert set(More.left_out.values()) == {"needs shared"}


def test_hypothesis_is_asked_for_only_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    class Alone(BackendTests):
        backend_class = MemoryBackend

    assert Alone.left_out["test_it_does_what_a_dictionary_does"] == "needs hypothesis"
