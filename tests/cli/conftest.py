"""How the tests of the command run it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tiered_cache.cli import app

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the console script's entry point; (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tiered-cache", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            app.main()
        printed = capsys.readouterr()
        return int(caught.value.code or 0), printed.out, printed.err

    return run
