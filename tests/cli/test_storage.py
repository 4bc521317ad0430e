"""Operators see what storage keeps, prove it, and remove what they mean to remove and nothing
else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tiered_cache.build import StorageParts, size_stack, storage_parts
from tiered_cache.cli import storage
from tiered_cache.config import load_config
from tiered_cache.errors import BackendError
from tiered_cache.storage import ObjectInfo, ObjectKey, ReadResult
from tiered_cache.storage.record import RecordFormat
from tiered_cache.testing.faulty_backend import Fault, FaultyBackend
from tiered_cache_memory import Kept, MemoryBackend

MODEL = "model: {id: some/model, revision: %s, dtype: int8, num_layers: 2, %s}\n"
HEADS = "num_kv_heads: 1, head_dim: 4"
LATENT = "kv_lora_rank: 24, qk_rope_head_dim: 8"
REST = "device: {tokens: 64}\nhost: {tokens: 64}\nstorage: {backend: memory, timeout: 5}\n"
ROW = 4096


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """What all memory backends of a test keep together, as storage does."""
    kept = Kept()

    async def open_shared(options: Any, context: Any) -> MemoryBackend:
        return MemoryBackend(options.max_size, kept)

    monkeypatch.setattr(MemoryBackend, "open", open_shared)
    return kept


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A configuration of one revision, of keys and values or of latents."""

    def write(revision: str = "r7", *, heads: str = HEADS, rest: str = REST) -> Path:
        path = tmp_path / f"{revision}.yaml"
        path.write_text(MODEL % (revision, heads) + rest)
        return path

    return write


def parts_of(path: Path, **ranks: int) -> StorageParts:
    config = load_config(path, environ={})
    parts = storage_parts(config, size_stack(config), **ranks)
    assert parts is not None
    return parts


def keep(kept: Kept, path: Path, keys: Sequence[int], **ranks: int) -> list[ObjectKey]:
    """Sealed rows under page keys that begin with these bytes; their object keys."""
    (record,) = parts_of(path, **ranks).formats
    return [keep_row(kept, record, bytes([key]) * 32) for key in keys]


def keep_row(kept: Kept, record: RecordFormat, page_key: bytes) -> ObjectKey:
    row = bytearray(record.row_bytes)
    row[512 : record.payload_end] = page_key[:1] * (record.payload_end - 512)
    record.seal(memoryview(row), page_key)
    asyncio.run(MemoryBackend(None, kept).write([record.object_key(page_key)], [memoryview(row)]))
    return record.object_key(page_key)


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


# --- du, ls -------------------------------------------------------------------------------------


def test_du_shows_whose_the_bytes_are(run: Any, kept: Kept, write: Callable[..., Path]) -> None:
    """This configuration's scopes first, empty or not, then others', then all of it."""
    path, other = write("r7"), write("r8")
    assert any(line.endswith("full 0 0 B") for line in lines(run("storage", "du", path)[1]))
    keep(kept, path, range(3))
    keep(kept, other, range(5))
    code, out, err = run("storage", "du", path)
    assert (code, err) == (0, "")
    own, theirs = (parts_of(of).formats[0].scope.hex() for of in (path, other))
    shown = lines(out)
    assert shown[0] == "Storage: memory"
    assert f"{own} full 3 12 KiB" in shown
    assert f"{theirs} another's 5 20 KiB" in shown
    assert "all 8 32 KiB" in shown
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_du_knows_the_ranks(run: Any, kept: Kept, write: Callable[..., Path]) -> None:
    """With two ranks, each one's share is this configuration's; latents are the same on both."""
    path = write()
    for rank in (0, 1):
        keep(kept, path, [rank], rank=rank, world_size=2)
    assert "another's" in run("storage", "du", path)[1]
    out = run("storage", "du", path, "--world-size", 2)[1]
    assert "another's" not in out
    assert "full, rank 0" in out
    assert "full, rank 1" in out
    out = run("storage", "du", write("mla", heads=LATENT), "--world-size", 2)[1]
    assert "rank" not in out


def test_du_says_how_much_of_its_limit_storage_takes(
    run: Any, kept: Kept, write: Callable[..., Path]
) -> None:
    """Where the backend knows one."""
    rest = REST.replace("memory,", "memory, options: {max_size: 16384},")
    path = write(rest=rest)
    keep(kept, path, range(2))
    assert run("storage", "du", path)[1].endswith("50% of the 16 KiB that it may keep.\n")


def test_ls_shows_the_objects_used_last_first(
    run: Any, kept: Kept, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Key, component, size and age; as many as asked for, and how many more there are."""
    path = write()
    keys = keep(kept, path, [1, 2, 3, 0xAB])
    keep(kept, write("r8"), [9])
    ages = dict(zip(keys, (90.0, 7200.0, 3.0, None), strict=True))

    async def scan(self: Any, scope: bytes | None = None) -> AsyncIterator[list[ObjectInfo]]:
        for key, row in kept.rows.items():
            if key.startswith(scope or b""):
                yield [ObjectInfo(key, len(row), ages.get(key))]

    monkeypatch.setattr(MemoryBackend, "scan", scan)
    code, out, err = run("storage", "ls", path, "--limit", 3)
    assert (code, err) == (0, "")
    assert lines(out) == [
        f"{'03' * 20} full 4 KiB 3 s",
        f"{'01' * 20} full 4 KiB 2 min",
        f"{'02' * 20} full 4 KiB 2 h",
        "… and 1 more",
    ]
    assert lines(run("storage", "ls", path, "--prefix", "AB")[1]) == [f"{'ab' * 20} full 4 KiB"]
    assert run("storage", "ls", path, "--prefix", "ff")[1] == ""


# --- verify -------------------------------------------------------------------------------------


def test_verify_finds_all_well(run: Any, kept: Kept, write: Callable[..., Path]) -> None:
    """Others' objects are not its business."""
    path = write()
    keep(kept, path, range(5))
    kept.rows[ObjectKey(bytes(48))] = b"junk"
    assert run("storage", "verify", path) == (0, "5 objects read, 20 KiB: 0 wrong\n", "")


def test_verify_reads_in_batches(
    run: Any, kept: Kept, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a bounded size, each row at its own place."""
    monkeypatch.setattr(storage, "BATCH_BYTES", 2 * ROW)
    path = write()
    sizes = []
    read = MemoryBackend.read

    async def noting(self: Any, keys: Any, rows: Any, arrived: Any = None) -> Any:
        sizes.append(len(keys))
        return await read(self, keys, rows, arrived)

    monkeypatch.setattr(MemoryBackend, "read", noting)
    keep(kept, path, range(5))
    assert run("storage", "verify", path, "--no-progress")[:2] == (
        0,
        "5 objects read, 20 KiB: 0 wrong\n",
    )
    assert sizes == [2, 2, 1]


def spoil(kept: Kept, path: Path) -> list[ObjectKey]:
    """Four objects: fine, a bit flipped, cut short, another page's; a fifth of another layout."""
    fine, flipped_one, short, other = keep(kept, path, [1, 2, 3, 4])
    row = bytearray(kept.rows[flipped_one])
    row[600] ^= 1
    kept.rows[flipped_one] = bytes(row)
    kept.rows[short] = kept.rows[short][:-1]
    kept.rows[other] = kept.rows[fine]
    return [fine, flipped_one, short, other]


def test_verify_names_what_is_wrong_and_exits_with_1(
    run: Any, kept: Kept, write: Callable[..., Path]
) -> None:
    """By page key, with what is wrong; nothing is removed unless asked for."""
    path = write()
    keys = spoil(kept, path)
    code, out, _ = run("storage", "verify", path)
    assert code == 1
    assert lines(out) == [
        f"{'02' * 32} full: does not match its checksum",
        f"{'03' * 32} full: is of another length",
        f"{'04' * 32} full: is another page",
        "3 objects read, 12 KiB: 3 wrong",
    ]
    assert list(kept.rows) == keys


def test_verify_removes_what_is_wrong_and_nothing_else(
    run: Any, kept: Kept, write: Callable[..., Path]
) -> None:
    """Then all is well, and the exit code says so."""
    path = write()
    fine, *_ = spoil(kept, path)
    code, out, _ = run("storage", "verify", path, "--delete")
    assert code == 0
    assert lines(out)[-1] == "3 objects read, 12 KiB: 3 wrong (3 removed)"
    assert list(kept.rows) == [fine]
    assert run("storage", "verify", path)[0] == 0


def test_verify_shows_the_first_of_many(
    run: Any, kept: Kept, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk gone bad does not fill the screen."""
    monkeypatch.setattr(storage, "SHOWN_WRONG", 2)
    path = write()
    spoil(kept, path)
    assert lines(run("storage", "verify", path)[1])[2:] == ["…", "3 objects read, 12 KiB: 3 wrong"]


class Broken(MemoryBackend):
    """Opens, and then does as a test says."""

    faults: tuple[Fault, ...] = ()
    kept = Kept()

    @classmethod
    async def open(cls, options: Any, context: Any) -> Any:
        return FaultyBackend(MemoryBackend(None, cls.kept), *cls.faults)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts it in the place of the memory backend."""

    def broken(kept: Kept, *faults: Fault) -> None:
        monkeypatch.setattr(Broken, "faults", faults)
        monkeypatch.setattr(Broken, "kept", kept)
        monkeypatch.setattr("tiered_cache.build.load_backend", lambda name: Broken)

    return broken


def test_what_cannot_be_read_is_neither_well_nor_removed(
    run: Any, kept: Kept, write: Callable[..., Path], broken: Callable[..., None]
) -> None:
    """It may be read tomorrow."""
    path = write()
    keys = keep(kept, path, [1, 2])
    broken(kept, Fault("read", keys=[keys[0]], result=ReadResult.FAILED))
    code, out, _ = run("storage", "verify", path, "--delete")
    assert code == 1
    assert lines(out) == [
        f"{'01' * 32} full: could not be read",
        "1 objects read, 4 KiB: 0 wrong, 1 could not be read",
    ]
    assert list(kept.rows) == keys


def test_an_object_that_goes_meanwhile_is_none_that_is_wrong(
    run: Any, kept: Kept, write: Callable[..., Path], broken: Callable[..., None]
) -> None:
    """Storage evicts while it is verified."""
    path = write()
    keys = keep(kept, path, [1, 2])
    broken(kept, Fault("read", keys=[keys[0]], result=ReadResult.MISSING))
    assert run("storage", "verify", path)[:2] == (0, "1 objects read, 4 KiB: 0 wrong\n")


# --- gc, clear ----------------------------------------------------------------------------------


def test_gc_shows_and_with_yes_removes_what_is_anothers(
    run: Any, kept: Kept, write: Callable[..., Path]
) -> None:
    """Old revisions, other models; by default it only looks."""
    path, old, friend = write("r7"), write("r6"), write("friend")
    own = keep(kept, path, [1, 2])
    gone = keep(kept, old, [1, 2, 3])
    theirs = keep(kept, friend, [1])
    code, out, _ = run("storage", "gc", path)
    assert code == 0
    assert out.endswith("Would be removed: 4 objects, 16 KiB. Nothing was; add --yes.\n")
    assert list(kept.rows) == own + gone + theirs
    code, out, _ = run("storage", "gc", path, "--keep", friend, "--yes")
    assert (code, lines(out)[-1]) == (0, "Removed: 3 objects, 12 KiB.")
    assert parts_of(old).formats[0].scope.hex() in out
    assert parts_of(friend).formats[0].scope.hex() not in out
    assert list(kept.rows) == own + theirs


def test_gc_keeps_all_ranks_of_its_configuration(
    run: Any, kept: Kept, write: Callable[..., Path]
) -> None:
    """One rank's share is not garbage to another."""
    path = write()
    for rank in (0, 1):
        keep(kept, path, [rank], rank=rank, world_size=2)
    run("storage", "gc", path, "--world-size", 2, "--yes")
    assert len(kept.rows) == 2


def test_gc_by_age_looks_at_all_objects(
    run: Any, kept: Kept, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This configuration's too; what has no known age stays."""
    path = write()
    old, young, ageless = keep(kept, path, [1, 2, 3])
    (foreign,) = keep(kept, write("r8"), [1])
    ages = {old: 86_400 * 8.0, young: 86_400 * 6.0, foreign: 86_400 * 6.0}

    async def scan(self: Any, scope: bytes | None = None) -> AsyncIterator[list[ObjectInfo]]:
        yield [ObjectInfo(key, len(row), ages.get(key)) for key, row in kept.rows.items()]

    monkeypatch.setattr(MemoryBackend, "scan", scan)
    code, out, _ = run("storage", "gc", path, "--older-than", 7, "--yes")
    assert code == 0
    assert lines(out)[-2:] == [
        "Nobody knows the age of 1 objects: they stay.",
        "Removed: 1 objects, 4 KiB.",
    ]
    assert list(kept.rows) == [young, ageless, foreign]


def test_clear_removes_this_configurations_objects_only(
    run: Any, kept: Kept, write: Callable[..., Path]
) -> None:
    """And only when it is meant."""
    path = write()
    own = keep(kept, path, [1, 2])
    theirs = keep(kept, write("r8"), [1])
    code, out, _ = run("storage", "clear", path)
    assert (code, out) == (2, "Would be removed: 2 objects, 8 KiB. Nothing was; add --yes.\n")
    assert list(kept.rows) == own + theirs
    assert run("storage", "clear", path, "--yes") == (0, "full: 2 objects removed\n", "")
    assert list(kept.rows) == theirs


# --- What cannot be done --------------------------------------------------------------------------

COMMANDS = ("du", "ls", "verify", "gc", "clear")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_configuration_without_storage_is_explained(
    run: Any, write: Callable[..., Path], command: str
) -> None:
    """There is nothing to look after."""
    path = write(rest="")
    code, out, err = run("storage", command, path)
    assert (code, out) == (2, "")
    assert "storage: there is no such section (write one" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_backend_that_cannot_list_says_so(
    run: Any, kept: Kept, write: Callable[..., Path], command: str, monkeypatch: Any
) -> None:
    """`clear` needs no list; the others end at the backend's line."""
    monkeypatch.setattr(MemoryBackend, "can_scan", False)
    path = write()
    keep(kept, path, [1])
    code, out, err = run("storage", command, path)
    if command == "clear":
        assert (code, out) == (2, "Nothing was removed. Add --yes.\n")
        assert run("storage", command, path, "--yes")[1] == "full: 1 objects removed\n"
    else:
        assert (code, out) == (2, "")
        assert f"{path}:4:20: storage.backend: cannot list what it keeps (" in err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BackendError("nobody listens at host:6379"), "storage: nobody listens at host:6379\n"),
        (OSError("redis://user:secret@host"), "storage: storage has failed: OSError\n"),
    ],
)
def test_a_backend_that_is_unwell_ends_with_1(
    run: Any,
    kept: Kept,
    write: Callable[..., Path],
    broken: Callable[..., None],
    error: Exception,
    words: str,
) -> None:
    """In its own words when it has some; of other errors only the kind, for they may hold
    secrets."""
    path = write()
    keep(kept, path, [1])
    broken(kept, Fault("read", error=error))
    assert run("storage", "verify", path) == (1, "", words)


def test_a_backend_that_does_not_answer_ends_with_1(
    run: Any, kept: Kept, write: Callable[..., Path], broken: Callable[..., None]
) -> None:
    """After the configuration's own limit."""
    path = write(rest=REST.replace("timeout: 5", "timeout: 0.05"))
    keep(kept, path, [1])
    broken(kept, Fault("read", delay=60))
    assert run("storage", "verify", path) == (
        1,
        "",
        "storage: storage has not answered within 0.05 s\n",
    )
