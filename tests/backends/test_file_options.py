"""Each option of the file backend does something, and a wrong one says what to write."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.backends.file_helpers import ROW, got, kept, keys, object_files, opened, put
from tiered_cache.build import build
from tiered_cache.config import load_config
from tiered_cache.errors import BackendError, ConfigError
from tiered_cache.storage.registry import load_backend
from tiered_cache_file import FileOptions, backend

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("50GiB", 50 << 30),
        ("50GB", 50 * 10**9),
        (" 1.5 MiB ", 3 << 19),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("12345B", 12345),
        (12345, 12345),
    ],
)
def test_sizes_are_written_as_everywhere(text: object, num_bytes: int) -> None:
    """GiB and GB are two units; a number is bytes."""
    options = FileOptions.model_validate({"max_size": text, "reserve": text})
    assert (options.max_size, options.reserve) == (num_bytes, num_bytes)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_size", "50", "is not a size"),
        ("max_size", "50gb", "is not a size"),
        ("max_size", "-1GiB", "is not a size"),
        ("max_size", "1" * 5000 + "B", "is not a size"),
        ("max_size", 0, "greater than 0"),
        ("max_size", -1, "greater than 0"),
        ("max_size", True, "valid integer"),
        ("max_size", 1.5, "valid integer"),
        ("max_size", "9999TiB", "less than or equal"),
        ("reserve", -1, "greater than or equal to 0"),
        ("path", "", "is not a path"),
        ("path", " ", "is not a path"),
        ("path", "a\0b", "is not a path"),
        ("path", 5, "valid string"),
        ("path", "~nobody-of-this-name/x", "names a home directory that is not known"),
        ("direct", "always", "'auto' or 'never'"),
        ("thread", 4, "not permitted"),
    ],
)
def test_what_is_wrong_is_said(option: str, value: object, message: str) -> None:
    """By the model, in words that the configuration passes on."""
    with pytest.raises(ValidationError, match=message):
        FileOptions.model_validate({option: value})


def test_a_wrong_size_tells_what_to_write() -> None:
    """Where a configuration asks for it."""
    with pytest.raises(ValidationError) as caught:
        FileOptions.model_validate({"max_size": "50 gigabytes"})
    (error,) = caught.value.errors()
    assert error["ctx"] == {"suggestion": "write 50GiB, 50GB or a number of bytes"}


def test_defaults_are_for_a_machine_that_does_other_things(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the home directory, of a size that hurts nobody, with space left for others."""
    monkeypatch.setenv("HOME", "/home/somebody")
    assert FileOptions() == FileOptions(
        path="/home/somebody/.cache/tiered-cache", max_size=10 * GIB, reserve=GIB, direct="auto"
    )


async def test_the_home_directory_is_meant_by_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And made, with what is above it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    async with opened(Path("~/a/b")) as store:
        await put(store, 1)
    assert len(object_files(tmp_path / "a" / "b")) == 1


async def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that goes elsewhere takes it along."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    async with opened(Path("kept")) as store:
        await put(store, 1)
        monkeypatch.chdir(tmp_path / "elsewhere")
        await put(store, 2)
        assert await got(store, 1, 2) == ["read", "read"]
    assert len(object_files(tmp_path / "kept")) == 2


async def test_max_size_is_a_bound(tmp_path: Path) -> None:
    """Of all bytes together."""
    async with opened(tmp_path, max_size=3 * ROW + ROW - 1) as store:
        await put(store, 1, 2, 3)
        await put(store, 4, 5)
        stats = store.stats()
        assert (stats.num_objects, stats.num_bytes, stats.max_bytes) == (3, 3 * ROW, 4 * ROW - 1)


class Disk:
    """A file system of so many rows, of which others have taken some."""

    def __init__(self, root: Path, num_rows: int, patch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._num_rows = num_rows
        self.others = 0
        patch.setattr(os, "statvfs", self._statvfs)

    @property
    def free(self) -> int:
        return self._num_rows - self.others - len(object_files(self._root))

    def _statvfs(self, path: str) -> Any:
        return SimpleNamespace(f_bavail=self.free, f_frsize=ROW)


async def test_the_reserve_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache grows up to it. Then the oldest go for what comes, no more of them than must."""
    disk = Disk(tmp_path, 16, monkeypatch)
    async with opened(tmp_path, reserve=10 * ROW) as store:
        assert await put(store, 1, 2, 3, 4) == ["written"] * 4
        assert await put(store, 5, 6, 7, 8) == ["written"] * 4
        assert disk.free == 10
        assert await got(store, 1, 2, 3, 5, 6, 7, 8) == ["read"] * 2 + ["missing"] + ["read"] * 4


async def test_the_reserve_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When others have taken of it: as much goes as would have come, and nothing comes, until it is
    whole again. Reads go on."""
    disk = Disk(tmp_path, 20, monkeypatch)
    async with opened(tmp_path, reserve=10 * ROW) as store:
        for number in range(10):
            await put(store, number)
        disk.others = 4
        assert await put(store, 20, 21) == ["refused", "refused"]
        assert await kept(store, range(30)) == [*range(2, 10)]
        assert await put(store, 20, 21, 22) == ["written", "refused", "refused"]
        assert disk.free == 10
        assert await put(store, 21) == ["written"]
        assert disk.free == 10
        assert await got(store, *range(6, 10), 20, 21) == ["read"] * 6


async def test_nothing_goes_where_it_would_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have filled the disk: the cache alone cannot make room, and keeps what it has."""
    disk = Disk(tmp_path, 20, monkeypatch)
    async with opened(tmp_path, reserve=10 * ROW) as store:
        await put(store, 1, 2, 3)
        disk.others = 17
        assert await put(store, 4) == ["refused"]
        assert await got(store, 1, 2, 3) == ["read"] * 3


async def test_nothing_is_kept_in_the_reserve(tmp_path: Path) -> None:
    """Of the real file system: that is a refusal, which may be tried again."""
    async with opened(tmp_path, reserve="1024TiB") as store:
        assert await put(store, 1, 2) == ["refused", "refused"]
        assert store.stats().num_objects == 0


# --- direct ---------------------------------------------------------------------------------------


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each file that is opened: whether past the page cache."""
    seen: list[bool] = []
    preadv = os.preadv

    def reading(fd: int, *args: Any) -> int:
        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return preadv(fd, *args)

    monkeypatch.setattr(os, "preadv", reading)
    return seen


@pytest.mark.parametrize(
    ("direct", "memory_rows", "num_bytes", "is_direct"),
    [
        ("auto", 1, ROW, True),
        ("auto", 2, ROW, False),
        ("never", 1, ROW, False),
        ("auto", 1, ROW + 512, False),
    ],
)
async def test_direct_reads_are_for_what_no_memory_could_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opens: list[bool],
    direct: str,
    memory_rows: int,
    num_bytes: int,
    is_direct: bool,
) -> None:
    """There is more than the memory has, the rows are of whole blocks, and nobody said `never`."""
    monkeypatch.setattr(backend, "memory_bytes", lambda: memory_rows * num_bytes)
    async with opened(tmp_path, direct=direct) as store:
        await put(store, 1, 2, num_bytes=num_bytes)
        assert await got(store, 1, 2, num_bytes=num_bytes) == ["read", "read"]
    assert opens == [is_direct] * 2


async def test_memory_that_is_not_aligned_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: list[bool]
) -> None:
    """The first such buffer is found out, and nobody asks again."""
    monkeypatch.setattr(backend, "memory_bytes", lambda: 0)
    async with opened(tmp_path) as store:
        await put(store, 1, 2)
        memory = memoryview(bytearray(3 * ROW))
        places = [memory[1 + at * ROW : 1 + (at + 1) * ROW] for at in range(2)]
        results = await store.read(keys(1, 2), places)
        assert [result.value for result in results] == ["read", "read"]
    assert opens == [True, False, False]


async def test_a_file_system_that_cannot_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: list[bool]
) -> None:
    """It says so when a file is opened."""
    monkeypatch.setattr(backend, "memory_bytes", lambda: 0)
    open_, refused = os.open, []

    def refusing(path: str, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(22, "Invalid argument")
        return open_(path, flags, *args)

    monkeypatch.setattr(os, "open", refusing)
    async with opened(tmp_path) as store:
        await put(store, 1, 2)
        assert await got(store, 1, 2) == ["read", "read"]
    assert len(refused) == 1
    assert opens == [False, False]


# --- a directory of one's own ---------------------------------------------------------------------


async def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    """`path: ~` would fill the home directory. Nothing is written there."""
    (tmp_path / "thesis.tex").write_text("…")
    with pytest.raises(BackendError, match="holds something else: give `path` a directory of its"):
        async with opened(tmp_path):
            pass
    assert os.listdir(tmp_path) == ["thesis.tex"]
    async with opened(tmp_path / "tiered-cache") as store:
        assert await put(store, 1) == ["written"]


async def test_a_mount_point_and_a_killed_start_are_not_something_else(tmp_path: Path) -> None:
    """What a file system brings, and half a marker."""
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "FORMAT.0123456789abcdef").write_text("tiered-ca")
    async with opened(tmp_path) as store:
        assert await put(store, 1) == ["written"]


@pytest.mark.parametrize("text", ["tiered-cache file storage, layout 2\n", "", "\udcff" * 1000])
async def test_another_layout_is_refused(tmp_path: Path, text: str) -> None:
    """A later version may keep things otherwise."""
    (tmp_path / "FORMAT").write_text(text, errors="surrogateescape")
    with pytest.raises(BackendError, match=r"FORMAT says .* choose another `path`, or remove"):
        async with opened(tmp_path):
            pass


async def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """Nor is what lies below one."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BackendError, match=r"cannot use .*choose a `path` that is a dir"):
            async with opened(path):
                pass


async def test_who_else_may_write_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory that was made by somebody else, more open than it should be."""
    os.chmod(tmp_path, 0o777)
    async with opened(tmp_path):
        pass
    assert "others may write to" in caplog.text
    caplog.clear()
    os.chmod(tmp_path, 0o750)
    async with opened(tmp_path):
        pass
    assert not caplog.text


def test_a_configuration_with_a_wrong_option_names_its_line(tmp_path: Path) -> None:
    """B101: the backend's own settings are judged where they are written."""
    file = tmp_path / "cache.yaml"
    file.write_text(
        "model: {dtype: float32, num_layers: 2, num_kv_heads: 1, head_dim: 4,\n"
        "  id: m, revision: '1'}\n"
        "device: {tokens: 64}\n"
        "host: {tokens: 64}\n"
        "storage:\n  backend: file\n  options:\n    max_size: 50gigs\n"
    )
    assert load_backend("file").Options is FileOptions
    with pytest.raises(ConfigError, match=r"yaml:8:\d+: storage\.options\.max_size: is not a size"):
        build(load_config(file, environ={}))
