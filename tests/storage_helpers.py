"""Three tiers over a backend that a test can spoil, stop and look into."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final
from unittest import mock

from tests.lease_helpers import P, Rig, rig
from tiered_cache import RadixKey, build
from tiered_cache.config import schema
from tiered_cache.observe import Event, EventKind
from tiered_cache.storage.backend import SCOPE_BYTES, ObjectKey, StorageBackend
from tiered_cache.testing.faulty_backend import Fault, FaultyBackend
from tiered_cache.testing.loop import DeterministicLoop, SeededExecutor
from tiered_cache.types import Tier
from tiered_cache_memory import MemoryBackend

MODEL: Final = {
    "id": "test/model",
    "revision": "1",
    "dtype": "float32",
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 2,
}


class Store(FaultyBackend):
    """A backend in memory, with faults; its content outlives caches."""

    page_size = P

    def __init__(self, kept: MemoryBackend | None = None) -> None:
        self.kept = kept or MemoryBackend()
        super().__init__(self.kept)

    @property
    def rows(self) -> dict[ObjectKey, bytes]:
        return self.kept._kept.rows

    def pages_of(self, tokens: Any, **namespace: Any) -> list[bytes]:
        """Page keys of all whole pages of a prompt."""
        return RadixKey(tokens, **namespace).page_keys(self.page_size)

    def key_of(self, tokens: Any, page: int) -> ObjectKey:
        """The object of one page, which is kept."""
        wanted = self.pages_of(tokens)[page]
        return next(key for key in self.rows if key[SCOPE_BYTES:] == wanted)

    def has(self, tokens: Any, **namespace: Any) -> str:
        """Which whole pages of a prompt are kept: S or -, root first."""
        there = {key[SCOPE_BYTES:] for key in self.rows}
        return "".join("S" if key in there else "-" for key in self.pages_of(tokens, **namespace))

    def fault(self, *args: Any, **fault: Any) -> Fault:
        made = Fault(*args, **fault)
        self.faults.append(made)
        return made


@contextlib.asynccontextmanager
async def three_tiers(
    pages: int = 64,
    rows: int = 64,
    *,
    store: Store | None = None,
    host: Any = None,
    storage: Any = None,
    options: Any = None,
    is_owned: bool = False,
    **sections: Any,
) -> AsyncIterator[tuple[Rig, Store]]:
    """A cache of three tiers that is checked when it is left, and what it keeps. `is_owned`: it
    opens and closes the store itself."""
    store = store or Store()
    store.page_size = page_size = sections.get("page_size", P)
    section = {"backend": "memory", "prefetch": {"threshold": 0}, **(storage or {})}
    given = {"storage_backend": None if is_owned else store, **(options or {})}
    loop = asyncio.get_running_loop()
    if isinstance(loop, DeterministicLoop):  # only what a test delays takes time
        names = ("run_executor", "copy_executor", "io_executor")
        given = {name: SeededExecutor(loop, durations=(0.0,)) for name in names} | given
    made = rig(
        pages,
        host={"tokens": rows * page_size, **(host or {})},
        storage=section,
        options=given,
        **{"model": MODEL, **sections},
    )
    with opens(store.opened_as()) if is_owned else contextlib.nullcontext():
        async with made as r:
            await r.cache.drain()
            yield r, store
    assert store.violations == []


def on_virtual_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the deterministic loop, where seconds pass when nobody has anything to do. Its
    argument `seed`, if it has one, is the loop's."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        with (  # what is looked up on disk elsewhere, and would be here on the loop's own thread
            mock.patch.object(schema, "installed_backends", return_value=["memory"]),
            opens(MemoryBackend),
        ):
            DeterministicLoop(arguments.get("seed", 0)).run(test(**arguments))

    return run


def opens(backend: type[StorageBackend]) -> contextlib.AbstractContextManager[Any]:
    """Whatever a configuration names, this is what is opened."""
    return mock.patch.object(build, "load_backend", return_value=backend)


def wipe(r: Rig) -> None:
    """Have device and host give up what nobody holds; storage keeps it."""
    controller = r.cache._controller
    assert controller.host_pages is not None, "there is a host tier"
    everything = [1 << 20] * len(controller.tree.components)
    controller.accounts.evict(everything)
    controller.host_pages.evict(everything)


async def keep(r: Rig, *prompts: Any) -> None:
    """Prompts that only storage has."""
    for tokens in prompts:
        await r.serve(tokens)
        await r.cache.drain()
    wipe(r)


async def prefetched(r: Rig, tokens: Any, **options: Any) -> int:
    """How much of a prompt device and host have after a prefetch."""
    with r.cache.prefetch(tokens) as handle:
        return await handle.wait(**options)


class Told:
    """An observer that keeps a model of all tiers by page keys, from events alone.

    Attributes:
        tree: of the cache that it observes; set it when that is open.
        met: how often what was told.
    """

    def __init__(self) -> None:
        self.tree: Any = None
        self.model: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.faults: list[str] = []
        self.met: Counter[str] = Counter()

    def on_event(self, event: Event) -> None:
        if event.kind is EventKind.CLEARED:
            self.model |= {Tier.DEVICE: set(), Tier.HOST: set()}
        elif event.kind is EventKind.FORGOTTEN:
            self.model[event.tier] = set()
        if event.node is None:
            self.met[event.kind.value] += 1
            return
        self.met[f"{event.kind.value} {event.tier.value}"] += 1
        keys, has = set(self.tree.page_keys(event.node)), self.model[event.tier]
        if event.kind is EventKind.STORED:
            if event.tier is not Tier.STORAGE and keys & has:
                self.faults.append(f"{event.node!r} was stored on the {event.tier.value} twice")
            has |= keys
        else:
            if not keys <= has:
                self.faults.append(f"{event.node!r} was removed from {event.tier.value} unstored")
            has -= keys
