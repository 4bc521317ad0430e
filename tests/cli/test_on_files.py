"""The operator's commands on a directory of real files, from one process to the next."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiered_cache.cli._stored import open_stored, plan_storage
from tiered_cache.storage import WriteResult

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "model: {{id: some/model, revision: {revision}, dtype: int8, num_layers: 2, num_kv_heads: 1, "
    "head_dim: 64}}\n"
    "device: {{tokens: 512}}\nhost: {{tokens: 1024}}\n"
    "storage: {{backend: file, options: {{path: {path}, max_size: 1GiB}}}}\n"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "objects here"


@pytest.fixture
def write(tmp_path: Path, directory: Path) -> Callable[[str], Path]:
    """The configuration of one revision of the model."""

    def write(revision: str) -> Path:
        path = tmp_path / f"{revision}.yaml"
        path.write_text(SETTINGS.format(revision=revision, path=directory))
        return path

    return write


def in_a_process_of_its_own(*arguments: object) -> tuple[int, str]:
    """Exit code, and what was printed."""
    script = "from tiered_cache.cli.app import main; main()"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def keep(path: Path, num_objects: int) -> None:
    """Sealed rows, as a cache writes them."""
    plan = plan_storage(path, 1)
    (record,) = plan.parts.formats

    async def write() -> None:
        async with open_stored(plan) as stored:
            rows, keys = [], []
            for at in range(num_objects):
                row, page_key = memoryview(bytearray(record.row_bytes)), bytes([at]) * 32
                record.seal(row, page_key)
                rows.append(row)
                keys.append(record.object_key(page_key))
            written = await stored.backend.write(keys, rows)
            assert written == [WriteResult.WRITTEN] * num_objects

    asyncio.run(write())


def objects(directory: Path) -> list[Path]:
    """The files that are objects."""
    return sorted(path for path in (directory / "objects").rglob("*") if path.is_file())


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_from_du_to_clear(run: Any, directory: Path, write: Callable[[str], Path]) -> None:
    """What one process writes another shows; and it is checked and removed."""
    path, old = write("r7"), write("r6")
    keep(path, 3)
    keep(old, 2)
    assert len(objects(directory)) == 5

    code, out = in_a_process_of_its_own("storage", "du", path)
    assert code == 0
    assert any("full 3 24 KiB" in line for line in lines(out))
    assert any("another's 2 16 KiB" in line for line in lines(out))
    assert out.endswith("of the 1 GiB that it may keep.\n")

    code, out, _ = run("storage", "ls", path, "--prefix", "02")
    assert (code, lines(out)[0].partition(" 8 KiB")[0]) == (0, f"{'02' * 20} full")

    assert run("storage", "verify", path) == (0, "3 objects read, 24 KiB: 0 wrong\n", "")
    (scope,) = plan_storage(path, 1).scopes
    own = [str(file) for file in objects(directory) if scope.hex() in str(file)]
    spoiled = Path(next(file for file in own if "0101" in file))
    contents = bytearray(spoiled.read_bytes())
    contents[700] ^= 1
    spoiled.write_bytes(contents)
    code, out, _ = run("storage", "verify", path)
    assert code == 1
    assert f"{'01' * 32}  full: does not match its checksum\n" in out
    code, out, _ = run("storage", "verify", path, "--delete")
    assert (code, out.splitlines()[-1]) == (0, "3 objects read, 24 KiB: 1 wrong (1 removed)")
    assert len(objects(directory)) == 4

    code, out, _ = run("storage", "gc", path, "--yes")
    assert (code, out.splitlines()[-1]) == (0, "Removed: 2 objects, 16 KiB.")
    assert run("storage", "clear", path, "--yes") == (0, "full: 2 objects removed\n", "")
    assert objects(directory) == []


def test_the_doctor_leaves_no_object(
    run: Any, directory: Path, write: Callable[[str], Path]
) -> None:
    """It has written and read real files."""
    code, out, _ = run("doctor", write("r7"))
    assert code == 0
    assert any(line.startswith("storage (file) → host") for line in lines(out))
    assert objects(directory) == []


def test_a_directory_that_cannot_be_used_is_explained(
    run: Any, directory: Path, write: Callable[[str], Path]
) -> None:
    """By the commands with exit code 1, and by the doctor beside the figures of the host."""
    directory.write_text("a file")
    path = write("r7")
    code, out, err = run("storage", "du", path)
    assert (code, out) == (1, "")
    assert err.startswith("storage: ")
    code, out, _ = run("doctor", path)
    assert code == 1
    assert "host → device" in out
    assert "problem: " in out
