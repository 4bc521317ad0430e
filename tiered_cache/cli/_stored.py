"""One configuration's storage, opened for a person instead of a cache.

Owns: which scopes belong to the configuration, time limits, and how a backend's trouble looks.
Refuses to know: what is shown or removed.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from tiered_cache.build import size_stack, storage_parts
from tiered_cache.config import load_config
from tiered_cache.errors import BackendError, ConfigError
from tiered_cache.jobs import DaemonExecutor
from tiered_cache.storage import SCOPE_BYTES
from tiered_cache.storage_io import ThreadContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence
    from pathlib import Path

    from tiered_cache.build import Sizing
    from tiered_cache.config import Config, StorageConfig
    from tiered_cache.storage import ObjectInfo, StorageBackend
    from tiered_cache.storage.record import RecordFormat
    from tiered_cache.storage_tier import StorageParts

T = TypeVar("T")

NUM_THREADS: Final = 4
"""As in a cache (design §3)."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The objects of one component, on one rank (None: the same on all ranks)."""

    record: RecordFormat
    rank: int | None

    @property
    def label(self) -> str:
        return self.record.component + ("" if self.rank is None else f", rank {self.rank}")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be opened: the parts, and this configuration's scopes by their bytes."""

    config: Config
    parts: StorageParts
    scopes: dict[bytes, Scope]


def plan_storage(path: Path, world_size: int) -> Plan:
    """Raises:
    ConfigError: the configuration cannot be used, or has no storage.
    """
    config = load_config(path)
    plan = plan_of(config, size_stack(config), world_size)
    if plan is None:
        hint = "write one, or name another file: this one has no third tier"
        raise ConfigError([config.problem("storage", "there is no such section", hint)])
    return plan


def plan_of(config: Config, sizing: Sizing, world_size: int = 1) -> Plan | None:
    """None: the configuration has no storage.

    Raises:
        ConfigError: the backend is not there, or refuses its options.
    """
    scopes: dict[bytes, Scope] = {}
    parts: StorageParts | None = None
    for rank in range(world_size):
        parts = storage_parts(config, sizing, rank=rank, world_size=world_size)
        for record in parts.formats if parts is not None else ():
            is_shared = record.scope in scopes or world_size == 1
            scopes[record.scope] = Scope(record, None if is_shared else rank)
    return None if parts is None else Plan(config, parts, scopes)


class Stored:
    """An open backend, asked with a time limit; whatever it raises is a `BackendError`."""

    def __init__(
        self, backend: StorageBackend, settings: StorageConfig, threads: ThreadContext
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.threads = threads

    async def ask(self, call: Awaitable[T], *, patient: bool = False) -> T:
        """The answer to a call. `patient`: it goes over everything, and may take its time."""
        return await _asked(call, None if patient else self.settings.timeout)

    async def scan(self, scope: bytes | None = None) -> AsyncIterator[Sequence[ObjectInfo]]:
        """All objects (of a scope), in pieces; the backend can scan."""
        pieces = self.backend.scan(scope)
        while (piece := await _asked(anext(pieces, None), None)) is not None:
            yield piece


@asynccontextmanager
async def open_stored(plan: Plan, *, needs_scan: bool = True) -> AsyncIterator[Stored]:
    """Raises:
    ConfigError: the backend cannot do what is asked of it.
    BackendError: it cannot be reached.
    """
    settings = plan.parts.settings
    if needs_scan and not plan.parts.backend.can_scan:
        problem = plan.config.problem(
            "storage.backend", "cannot list what it keeps", "use its own tools; `clear` works"
        )
        raise ConfigError([problem])
    executor = DaemonExecutor("operator", NUM_THREADS)
    threads = ThreadContext(executor, NUM_THREADS)
    try:
        backend = await _asked(
            plan.parts.backend.open(plan.parts.options, threads), settings.timeout
        )
        try:
            yield Stored(backend, settings, threads)
        finally:
            await backend.aclose()
    finally:
        executor.shutdown(wait=False)


async def _asked(call: Awaitable[T], limit_s: float | None) -> T:
    try:
        async with asyncio.timeout(limit_s):
            return await call
    except BackendError:
        raise
    except TimeoutError as error:
        within = "in time" if limit_s is None else f"within {limit_s:g} s"
        raise BackendError(f"storage has not answered {within}") from error
    except Exception as error:  # its text may hold an address with a password
        raise BackendError(f"storage has failed: {type(error).__name__}") from error


def page_key(info: ObjectInfo) -> bytes:
    return bytes(info.key[SCOPE_BYTES:])


def human_age(seconds: float | None) -> str:
    """`3 min`; empty when nobody knows."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} s"
