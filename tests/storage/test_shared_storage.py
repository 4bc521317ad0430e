"""Processes that share one storage find what is theirs, and nothing of anybody else's (B81, B83,
B84)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.backends.redis_server import ValkeyServer
from tests.storage.identity_child import IDENTITIES

ROOT = Path(__file__).parents[2]


@contextmanager
def process(storage: dict[str, Any], hash_seed: int) -> Iterator[Any]:
    """A process that answers what it found of prompts, as one identity after the other."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "backends"))),
        "PYTHONHASHSEED": str(hash_seed),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.identity_child", json.dumps(storage)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environ,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:

        def ask(identity: str, names: str) -> dict[str, int]:
            child.stdin.write(f"{identity}:{names}\n")  # type: ignore[union-attr]
            child.stdin.flush()  # type: ignore[union-attr]
            answer = child.stdout.readline()  # type: ignore[union-attr]
            assert answer, "the process has died"
            return dict(json.loads(answer))

        try:
            yield ask
        finally:
            child.stdin.close()


@contextmanager
def shared(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    if kind == "file":
        options = {"path": str(folder / "cache"), "max_size": "64MiB", "reserve": 0}
        yield {"backend": "file", "options": options}
        return
    with ValkeyServer() as server:
        yield {"backend": "redis", "options": {"url": server.url}}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["file", "redis"])
def test_only_legal_hits(kind: str, tmp_path: Path) -> None:
    """Two processes at once, with other hash seeds; each identity finds exactly what the same
    identity has written, in whichever process, and its bytes are right."""
    with (
        shared(kind, tmp_path) as storage,
        process(storage, 1) as one,
        process(storage, 2) as other,
    ):
        assert one("base", "A") == {"A": 0}
        assert other("base", "AB") == {"A": 32, "B": 0}
        for identity in IDENTITIES:
            if identity != "base":
                assert one(identity, "AB") == {"A": 0, "B": 0}, identity
        for identity in IDENTITIES:
            assert other(identity, "AB") == {"A": 32, "B": 32}, identity
