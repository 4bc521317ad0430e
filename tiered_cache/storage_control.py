"""The storage tier as an operator sees it: attach, detach, clear, health, while requests go on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tiered_cache.build import foreign_state, size_stack, storage_parts
from tiered_cache.config import Config
from tiered_cache.errors import ConfigError
from tiered_cache.jobs import run_to_end, submit
from tiered_cache.types import seconds

if TYPE_CHECKING:
    from tiered_cache.build import Parts
    from tiered_cache.controller import HybridCacheController
    from tiered_cache.stats import StorageStats
    from tiered_cache.storage.backend import StorageBackend
    from tiered_cache.storage_tier import StorageParts, StorageTier


class StorageControl:
    """`cache.storage`. Falsy while there is no storage tier."""

    __slots__ = ("_controller", "_parts")

    def __init__(self, controller: HybridCacheController, parts: Parts) -> None:
        self._controller = controller
        self._parts = parts

    def __bool__(self) -> bool:
        return self._controller.storage is not None

    async def attach(self, config: Config, *, backend: StorageBackend | None = None) -> None:
        """Have the storage tier of another configuration, which describes the same model, from now
        on. What is cached already is kept there when it is next used.

        Args:
            config: of it the `model`, `page_size` and `storage` sections count.
            backend: your own, open already, instead of the one that the configuration names.

        Raises:
            ConfigError: it cannot be used, or describes another model than the cache was opened
                for. ValueError: no host tier, or there is a storage tier already. BackendError: it
                is required, and not there.
        """
        controller = self._controller
        controller.check()
        if not isinstance(config, Config):
            raise TypeError(
                f"attach takes a Config, not {type(config).__name__}: attach(load_config(…))"
            )
        ranks = controller.ranks

        def make() -> StorageParts | None:  # imports the backend
            if problems := foreign_state(config, self._parts):
                raise ConfigError(problems)
            sizing = size_stack(config)
            return storage_parts(config, sizing, rank=ranks.rank, world_size=ranks.world_size)

        parts = await run_to_end(submit(controller.io_executor, make))
        controller.check()
        if parts is None:
            raise ValueError("the configuration has no `storage` section")
        if backend is not None:
            parts = replace(parts, given=backend)
        await controller.attach(parts)

    async def detach(self, limit: float | None = 10.0) -> None:
        """Have no storage tier any more. What is being written may end within `limit` seconds;
        what waits is not written."""
        self._controller.check()
        await self._controller.detach(seconds("limit", limit))

    async def clear(self) -> int:
        """Delete all that storage has of this model in this format, and nothing else; how many
        objects that were.

        Raises:
            BackendError: not all of it, or not now. ValueError: there is no storage tier.
        """
        self._controller.check()
        return await self._tier.clear()

    def health(self) -> StorageStats:
        """How it is: connected or not, the state of either direction, why, how much."""
        self._controller.check_thread()
        return self._tier.stats()

    @property
    def _tier(self) -> StorageTier:
        if self._controller.storage is None:
            raise ValueError("there is no storage tier: attach one")
        return self._controller.storage

    def __repr__(self) -> str:
        if not self:
            return "<storage: none>"
        health = self.health()
        return f"<storage: reads {health.reads}, writes {health.writes}>"
