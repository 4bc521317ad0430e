"""Windows and states in storage: what is kept of them, and which prefix comes back (semantics
§10.4–5)."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.hybrid_helpers import GRID, STACKS, P, hybrid_tiers
from tests.lease_helpers import Rig, seq
from tests.storage_helpers import Store, keep, prefetched, wipe

A: Final = seq("A", 48)

each_stack = pytest.mark.parametrize("stack", STACKS)


def objects(r: Rig, store: Store, component: str, tokens: Any) -> list[Any]:
    """Per page of a prompt, the object that storage would keep of a component."""
    storage = r.cache._controller.storage
    assert storage is not None
    record = next(made for made in storage.io.formats if str(made.component) == component)
    return [record.object_key(key) for key in store.pages_of(tokens)]


def kept(r: Rig, store: Store, component: str, tokens: Any) -> str:
    """Which pages of a prompt storage has of a component: S or -, root first."""
    wanted = objects(r, store, component, tokens)
    return "".join("S" if key in store.rows else "-" for key in wanted)


def lose(r: Rig, store: Store, component: str, tokens: Any, *pages: int) -> None:
    """Storage has these pages of a component no more."""
    wanted = objects(r, store, component, tokens)
    for page in pages:
        del store.rows[wanted[page]]


@each_stack
async def test_what_storage_has_is_served(stack: str) -> None:
    """With device and host wiped, the prefix that was there before is there again, byte for
    byte."""
    async with hybrid_tiers(stack) as (r, store):
        await keep(r, A)
        assert r.stats.num_nodes == 0
        assert kept(r, store, "full", A) == "S" * 12
        r.spoil_free_pages()
        reused = await r.serve([*A, 1])
        assert reused >= 48 - GRID
        assert r.counters.tokens_hit_storage == reused
        await r.cache.drain()
        r.check()
