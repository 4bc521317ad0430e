"""The demo keeps its state in a place of its own: nobody's storage is read, filled or cleared."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.backends.redis_server import ValkeyServer, binary
from tiered_cache import Config, UnifiedRadixCache, load_config
from tiered_cache.cli._demo_storage import DEVICE_TOKENS, HOST_TOKENS, NoStorageError, place
from tiered_cache.cli.app import main
from tiered_cache.config.schema import ModelConfig
from tiered_cache.types import Hits

MODEL = ModelConfig(
    id="demo/model", revision="1", dtype="int8", num_layers=1, num_kv_heads=1, head_dim=4
)
PROMPT = list(range(40))
CONFIGS = Path(__file__).parents[2] / "configs"


def settings(backend: str, **options: Any) -> Config:
    """The demo's own model, as a user would serve it."""
    tiers = {"device": {"size": "1MiB"}, "host": {"size": "8MiB"}}
    storage = {"backend": backend, "options": options, "prefetch": {"threshold": 16}}
    model = MODEL.model_dump(exclude_none=True)
    return load_config({"model": model, **tiers, "storage": storage}, environ={})


def serve(config: Config) -> Hits:
    """What a cache finds of a prompt; afterwards storage has it."""

    async def serve() -> Hits:
        async with UnifiedRadixCache.open(config) as cache:
            async with cache.lease([*PROMPT, 1]) as lease:
                lease.commit(lease.allocate(41 - lease.prefix_len))
                hits = lease.hits
            await cache.drain()
        return hits

    return asyncio.run(serve())


def check_is_its_own(users: Config) -> None:
    """Two processes of the demo share it; the user's cache has what it had, and no more."""
    assert serve(users) == Hits()
    with place(users, MODEL, start_server=False) as own:
        assert own.config.storage is not None
        assert own.config.storage.required
        assert serve(own.config) == Hits()
        assert serve(own.config) == Hits(storage=32)
        assert serve(users) == Hits(storage=32)
    assert serve(users) == Hits(storage=32)
    with place(users, MODEL, start_server=False) as own:
        assert serve(own.config) == Hits()


def test_files_are_beside_the_users_own_and_go_in_the_end(tmp_path: Path) -> None:
    """On the same disk, so that it is as fast; never in the directory that is named."""
    users = settings("file", path=str(tmp_path / "cache"), reserve=0)
    check_is_its_own(users)
    with place(users, MODEL, start_server=False) as own:
        assert own.config.storage is not None
        path = Path(own.config.storage.options["path"])
        assert path.parent == tmp_path
        assert any(str(path) in note for note in own.notes)
        assert own.config.storage.options["reserve"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """Then they are where temporary files are."""
    users = settings("file", path=str(tmp_path / "no" / "cache"))
    with place(users, MODEL, start_server=False) as own:
        assert own.config.storage is not None
        assert Path(own.config.storage.options["path"]).is_dir()
    assert list(tmp_path.iterdir()) == []


def test_in_a_server_only_the_demos_own_is_cleared() -> None:
    """Of an earlier demo that was killed, too."""
    with ValkeyServer() as server, server.client() as client:
        client.set("somebody", "else's")
        users = settings("redis", url=server.url)
        with place(users, MODEL, start_server=False) as own:
            serve(own.config)
            names = client.keys()
            killed = {name: client.get(name) for name in names}
        assert client.keys() == [b"somebody"]
        client.mset(killed)
        check_is_its_own(users)
        assert client.get("somebody") == b"else's"


def test_a_server_of_its_own_ends_with_it() -> None:
    """It listens on a socket file that only this user can open, and on no port."""
    binary()
    users = settings("redis", url="redis://localhost:1")
    with place(users, MODEL, start_server=True) as own:
        assert own.config.storage is not None
        socket = Path(own.config.storage.options["url"].removeprefix("unix://"))
        assert socket.is_socket()
        assert socket.stat().st_mode & 0o077 == 0
        assert serve(own.config) == Hits()
        assert serve(own.config) == Hits(storage=32)
    assert not socket.parent.exists()


def test_a_server_that_is_not_there_is_said_with_what_to_start() -> None:
    users = settings("redis", url="redis://:hunter2@127.0.0.1:1")
    with pytest.raises(NoStorageError) as caught, place(users, MODEL, start_server=False):
        pass
    assert "no connection to redis at 127.0.0.1:1" in str(caught.value)
    assert "valkey-server" in str(caught.value)
    assert "--start-server" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_what_ends_with_the_process_cannot_be_restarted_from() -> None:
    with (
        pytest.raises(NoStorageError, match="such as file or redis"),
        place(settings("memory"), MODEL, start_server=False),
    ):
        pass


def test_a_server_is_started_for_redis_alone(tmp_path: Path) -> None:
    with (
        pytest.raises(NoStorageError, match=r"storage\.backend is file"),
        place(settings("file", path=str(tmp_path)), MODEL, start_server=True),
    ):
        pass


def test_start_server_without_storage_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before the model is loaded."""
    command = ["tiered-cache", "demo", "--start-server", f"--config={CONFIGS / 'host.yaml'}"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "needs a --config with storage" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["file.yaml", "redis.yaml"])
def test_the_shipped_configurations_are_taken(name: str, tmp_path: Path) -> None:
    """Their sizes and, where it is another, their model are left aside, and that is said."""
    given = load_config(CONFIGS / name, environ={})
    assert given.storage is not None
    with ValkeyServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        where = {"url": server.url} if name == "redis.yaml" else {}
        options = {**given.storage.options, **where}
        storage = given.storage.model_copy(update={"options": options})
        given = given.model_copy(update={"storage": storage})
        with place(given, MODEL, start_server=False) as own:
            assert own.config.device.tokens == DEVICE_TOKENS
            assert own.config.host is not None
            assert own.config.host.tokens == HOST_TOKENS
            assert own.config.model.id == "demo/model"
            assert "the configuration's model is left aside" in own.notes[0]
            assert serve(own.config) == Hits()
            assert serve(own.config) == Hits(storage=32)
