"""pytest, for who writes a storage backend: the suite runs without a file of one's own.

    pytest --tiered-backend my_package:MyBackend \
        --tiered-backend-options '{"path": "{tmp}/rows"}' --tiered-backend-claims persists,shared

`{tmp}` becomes a folder that is empty for each test. And the summary names the tests that a backend
is not asked for, because it does not claim what they need.

pytest imports this module wherever this package is installed, so it imports nothing that takes
time before it is needed.
"""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SUITE: Final = "tiered_cache.testing.backends"
REWRITTEN: Final = (
    SUITE,
    "tiered_cache.testing.backend_scene",
    "tiered_cache.testing.components",
    "tiered_cache.testing.component_scene",
)
CLAIMS: Final = ("persists", "shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    pytest.register_assert_rewrite(*REWRITTEN)  # before conftests
    group = parser.getgroup("tiered-cache", "proving a storage backend of tiered-cache")
    group.addoption(
        "--tiered-backend",
        metavar="MODULE:CLASS",
        help="prove this backend; files are collected only if they are named too",
    )
    group.addoption(
        "--tiered-backend-options",
        metavar="JSON",
        default="{}",
        help="its options; {tmp} is a folder that is empty for each test",
    )
    group.addoption(
        "--tiered-backend-claims",
        metavar="CLAIMS",
        default="",
        help="persists (it is there when it is opened again), shared (by two instances at once)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("tiered_backend"):
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args.clear()
        config.args.append(__file__)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if str(module_path) == __file__ and (named := parent.config.getoption("tiered_backend")):
        return NamedBackend.from_parent(parent, path=module_path, nodeid=named)
    return None


class NamedBackend(pytest.Module):
    """Stands in the place of a file with a subclass of `BackendTests`."""

    def _getobj(self) -> types.ModuleType:
        module = types.ModuleType("named_backend")
        module.TestBackend = _suite(self.config)  # type: ignore[attr-defined]
        return module


def _suite(config: pytest.Config) -> type:
    named = config.getoption("tiered_backend")
    text = config.getoption("tiered_backend_options")
    claims = [claim for claim in config.getoption("tiered_backend_claims").split(",") if claim]
    if unknown := [claim for claim in claims if claim not in CLAIMS]:
        raise pytest.Collector.CollectError(
            f"--tiered-backend-claims: {', '.join(unknown)}; there are {', '.join(CLAIMS)}"
        )
    suite: Any = importlib.import_module(SUITE)
    backend = _load(named)

    def options(self: Any) -> Any:
        return backend.Options.model_validate_json(text.replace("{tmp}", str(self.tmp_path)))

    try:
        options(types.SimpleNamespace(tmp_path=""))
    except ValueError as error:
        raise pytest.Collector.CollectError(f"--tiered-backend-options: {error}") from None
    body = {"backend_class": backend, "options": options, "__module__": "named_backend"}
    return type("TestBackend", (suite.BackendTests,), {**body, **dict.fromkeys(claims, True)})


def _load(named: str) -> Any:
    from tiered_cache.storage import StorageBackend

    module, _, name = named.partition(":")
    try:
        backend = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise pytest.Collector.CollectError(f"--tiered-backend: {error}") from None
    if not (isinstance(backend, type) and issubclass(backend, StorageBackend)):
        raise pytest.Collector.CollectError(f"--tiered-backend: {named} is no StorageBackend")
    return backend


def pytest_collection_finish(session: pytest.Session) -> None:
    classes = {item.cls for item in session.items if isinstance(item, pytest.Function)}
    session.config.stash[SUITES] = [cls for cls in classes if hasattr(cls, "left_out")]


SUITES: Final = pytest.StashKey[list[Any]]()
"""Classes of `BackendTests` whose tests are run."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    suites = terminalreporter.config.stash.get(SUITES, [])
    for suite in sorted(suites, key=lambda suite: suite.__qualname__):
        for reason in sorted(set(suite.left_out.values())):
            tests = [test for test, why in suite.left_out.items() if why == reason]
            terminalreporter.write_line(
                f"not asked of {suite.__qualname__}, {reason}: {', '.join(tests)}"
            )
