"""Breaks a copy of the library, one mutant at a time, and runs the test that should notice.

Every mutant gets a process of its own, forked from one that has imported the heavy parts (torch,
numpy, pytest), so a mutant costs what its test costs. The copy is what is imported: the working
tree and an editable install stay out of the way, which is proven for every run.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.mutants.model import REPO, Mutant

COPIED: Final = ("tiered_cache", "tests", "configs", "examples")
HEAVY: Final = ("torch", "numpy", "pydantic", "sortedcontainers")
MAX_TEST_S: Final = 3.0
HANG_S: Final = 20.0
"""A test that has not ended by then hangs because of the mutant: it has noticed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant. `ok`: it was killed, by a test that passes without it and is short
    enough."""

    mutant: Mutant
    verdict: str
    seconds: float
    log: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict in {"killed", "killed (hangs)"}


@dataclass(frozen=True, slots=True)
class Run:
    """One pytest session in a child: its exit code (None: it hung), each test's seconds, what it
    wrote."""

    code: int | None
    durations: dict[str, float]
    log: str


def run_mutants(mutants: Sequence[Mutant]) -> Iterator[Outcome]:
    """Prove the tests on the untouched copy, then try the mutants one by one.

    Raises:
        ValueError: a stale mutant. RuntimeError: a killing test that fails, is missing or is too
            slow without any mutant.
    """
    for mutant in mutants:
        mutant.apply((REPO / mutant.file).read_text())
    for name in HEAVY:
        importlib.import_module(name)
    with _copy() as root:
        _check_untouched(root, mutants)
        for mutant in mutants:
            yield _try(root, mutant)


def _check_untouched(root: Path, mutants: Sequence[Mutant]) -> None:
    tests = sorted({mutant.test for mutant in mutants})
    run = _pytest(root, tests, limit_s=10 * HANG_S, write_bytecode=True)
    if run.code != 0:
        raise RuntimeError(f"the tests fail without any mutant (exit code {run.code}):\n{run.log}")
    slow = {test: round(spent, 1) for test, spent in run.durations.items() if spent > MAX_TEST_S}
    if slow:
        raise RuntimeError(f"a killing test takes at most {MAX_TEST_S} s: {slow}")


def _try(root: Path, mutant: Mutant) -> Outcome:
    path = root / mutant.file
    source, times = path.read_text(), path.stat()
    start = time.monotonic()
    path.write_text(mutant.apply(source))
    # Bytecode of the untouched file must not pass for that of this one: another time of change.
    os.utime(path, (times.st_atime, times.st_mtime + 3600))
    try:
        run = _pytest(root, [mutant.test], limit_s=HANG_S)
    finally:
        path.write_text(source)
        os.utime(path, (times.st_atime, times.st_mtime))
    verdict = {0: "SURVIVED", 1: "killed", None: "killed (hangs)"}.get(
        run.code, f"BROKEN (pytest exit code {run.code})"
    )
    return Outcome(mutant, verdict, time.monotonic() - start, run.log)


@contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        root = Path(name).resolve()
        for part in COPIED:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPO / part, root / part, ignore=ignore)
        shutil.copy(REPO / "pyproject.toml", root)
        yield root


# --- one pytest session in a child ----------------------------------------------------------------


def _pytest(
    root: Path, tests: Sequence[str], limit_s: float, *, write_bytecode: bool = False
) -> Run:
    assert threading.active_count() == 1, "forking needs a process of one thread"
    log, report = root / "log.txt", root / "report.json"
    report.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _session(root, tests, log, report, write_bytecode)
    code = _wait(child, limit_s)
    text = log.read_text(errors="replace")
    if code is None:
        return Run(None, {}, text)
    told: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    if told.get("imported") != str(root / "tiered_cache" / "__init__.py"):
        raise RuntimeError(f"the copy was not what was imported, but {told}:\n{text}")
    return Run(code, told["durations"], text)


def _wait(child: int, limit_s: float) -> int | None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)  # with whatever the test has started
    os.waitpid(child, 0)
    return None


def _session(
    root: Path, tests: Sequence[str], log: Path, report: Path, write_bytecode: bool
) -> None:
    """Run in the child, and end it."""
    code = 70
    try:
        os.setsid()
        os.chdir(root)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ["PYTHONPATH"] = str(root)  # for what the tests start
        sys.dont_write_bytecode = not write_bytecode  # only ever that of untouched files
        os.environ["PYTHONDONTWRITEBYTECODE"] = "" if write_bytecode else "1"
        sys.path[:] = [str(root), *(p for p in sys.path if p and Path(p).resolve() != REPO)]
        for name in [name for name in sys.modules if name.split(".")[0] in COPIED]:
            del sys.modules[name]
        witness = _Witness()
        arguments = [*tests, "-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(root)]
        code = int(pytest.main(arguments, plugins=[witness]))
        imported = getattr(sys.modules.get("tiered_cache"), "__file__", None)
        report.write_text(json.dumps({"imported": imported, "durations": witness.durations}))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Witness:
    """Notes how long each test took."""

    def __init__(self) -> None:
        self.durations: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.durations[report.nodeid] = report.duration
