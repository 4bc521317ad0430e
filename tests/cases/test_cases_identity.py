"""Cases about whose bytes they are: namespaces, processes, models, chains of keys, names that
collide. All of them with storage, through whole requests."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest

from tests.backends.file_helpers import object_files
from tests.cases.tokens_child import KINDS, TOKENS
from tests.hybrid_helpers import STACKS, hybrid_tiers
from tests.lease_helpers import P, Rig, seq
from tests.storage.identity_child import BASE, IDENTITIES
from tests.storage_helpers import (
    MODEL,
    Store,
    Told,
    keep,
    on_virtual_clock,
    prefetched,
    three_tiers,
    wipe,
)
from tests.tier_helpers import demote
from tiered_cache import Hits, RadixKey, build
from tiered_cache.storage import record
from tiered_cache.storage.backend import KEY_BYTES, SCOPE_BYTES, ObjectKey, ReadResult, WriteResult
from tiered_cache.strategies.base import ComponentSpec, StackPlan
from tiered_cache.strategies.plain import PlainStrategy
from tiered_cache.strategies.registry import register_stack_strategy
from tiered_cache.testing.oracle import path_tokens
from tiered_cache.types import ComponentId, Tier
from tiered_cache_memory import MemoryBackend

A: Final = seq("A", 32)
ROOT: Final = Path(__file__).parents[2]

NAMESPACES: Final[list[dict[str, Any]]] = [
    {},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"extra_key": "a"},
    {"extra_key": "a", "cache_salt": "b"},
]

# --- namespaces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", range(len(NAMESPACES)))
@on_virtual_clock
async def test_b81_no_tier_has_anything_for_another_namespace(owner: int) -> None:
    """B81: the same tokens, kept in one namespace: on the device, on the host and in storage alike
    all of it for this one, with its bytes, and nothing for any other."""
    others = [space for at, space in enumerate(NAMESPACES) if at != owner]
    mine = NAMESPACES[owner]
    async with three_tiers() as (r, store):
        await r.serve(A, **mine)
        await r.cache.drain()
        for hits, leave in (
            (Hits(device=32), lambda: None),
            (Hits(host=32), lambda: demote(r)),
            (Hits(storage=32), lambda: wipe(r)),
        ):
            leave()
            r.spoil_free_pages()
            for space in others:
                async with r.cache.lease([*A, 1], **space) as lease:
                    assert lease.hits == Hits()
                with r.cache.prefetch(A, **space) as handle:
                    assert await handle.wait("wait_complete") == 0
            async with r.cache.lease([*A, 1], **mine) as lease:
                assert lease.hits == hits
                r.oracle.verify(lease, lease.key, 0, 32)
        assert all(store.has(A, **space) == "-" * 8 for space in others)


@on_virtual_clock
async def test_b81_events_of_equal_tokens_differ_by_namespace() -> None:
    """B81: what observers are told of one namespace, in any tier, are the keys of that one and of
    no other; those of the default one are the same whether others are used or not."""
    told = Told()
    async with three_tiers(options={"observers": [told]}) as (r, store):
        told.tree = r.cache.tree
        seen: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        for space in [*NAMESPACES[1:], {}]:
            await r.serve(A, **space)
            await r.cache.drain()
            wanted = set(store.pages_of(A, **space))
            assert len(wanted) == 8
            for tier in Tier:
                assert told.model[tier] - seen[tier] == wanted
                assert not wanted & seen[tier]
                seen[tier] |= wanted
        assert told.faults == []
        names = {key for key in store.rows if key[SCOPE_BYTES:] in set(store.pages_of(A))}
    async with three_tiers() as (r, alone):
        await r.serve(A)
    assert set(alone.rows) == names


# --- processes ------------------------------------------------------------------------------------

PAGES: Final = (
    "3af51e09755dd054014e760f60f7ee7f7fc2fc3b97f84fa8c29ad6e245948acc",
    "b41175f54490135559727fc369b21419f6ec41354d552c01ad0f751383111247",
    "feea34c762cd0e4cece9258310b9ef8c6a9acaa13da91d997939f3a899cbf90d",
)
"""Of `TOKENS`, in the default namespace, written down: what has been kept is found for ever."""


def asked(folder: Path, hash_seed: int, kinds: Sequence[str]) -> list[int]:
    """What a process of its own finds."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "backends"))),
        "PYTHONHASHSEED": str(hash_seed),
    }
    command = [sys.executable, "-m", "tests.cases.tokens_child", str(folder), *kinds]
    done = subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True)
    return list(json.loads(done.stdout))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("writer", ["list", "torch int32"])
def test_b83_what_one_process_writes_all_others_find(writer: str, tmp_path: Path) -> None:
    """B83: one writes a folder of files; two more, with other hash seeds, find all of it, whatever
    kind of input the tokens come in; and the files have the names that they have always had."""
    assert asked(tmp_path, 1, [writer]) == [0]
    written = {path: path.stat().st_ino for path in object_files(tmp_path)}
    assert sorted(path.name for path in written) == sorted(PAGES)
    for hash_seed in (2, 4711):
        assert asked(tmp_path, hash_seed, list(KINDS)) == [len(TOKENS)] * len(KINDS)
    assert {path: path.stat().st_ino for path in object_files(tmp_path)} == written


# --- models ---------------------------------------------------------------------------------------


class Renamed(PlainStrategy):
    """As plain; its component has another id."""

    name = "renamed"

    def matches(self, model: Any) -> bool:
        return False

    def plan(self, model: Any, page_size: int) -> StackPlan:
        plan = super().plan(model, page_size)
        other = ComponentId("other")
        pools = tuple(replace(pool, component=other) for pool in plan.pools)
        return StackPlan((ComponentSpec(other, "full"),), pools)


@pytest.fixture
def renamed() -> Iterator[None]:
    unregister = register_stack_strategy(Renamed())
    yield
    unregister()


DRAFT: Final = {"name": "draft", "num_layers": 1, "row_shape": [8], "dtype": "int8"}

OTHERS: Final[dict[str, dict[str, Any]]] = {
    **{name: {**BASE, **given} for name, given in IDENTITIES.items() if name != "base"},
    # As many bytes of a page, shared otherwise among keys and values; more; another component.
    "split": {"model": {**MODEL, "head_dim": 1, "v_head_dim": 3}},
    "page bytes": {"model": {**MODEL, "head_dim": 3}},
    "extra pool": {"model": {**MODEL, "extra_pools": [DRAFT]}},
    "components": {"model": {**MODEL, "strategy": "renamed"}},
    "format version": {"format": record.FORMAT_VERSION + 1},
}
"""What differs from the identity that has written."""


@asynccontextmanager
async def identified(store: Store, **given: Any) -> AsyncIterator[Rig]:
    """A cache of some identity over what is kept."""
    version = given.pop("format", record.FORMAT_VERSION)
    given.pop("salt", None)
    with (
        mock.patch.object(build, "FORMAT_VERSION", version),
        mock.patch.object(record, "FORMAT_VERSION", version),
    ):
        async with three_tiers(store=store, **given) as (r, _):
            yield r


@pytest.mark.usefixtures("renamed")
@pytest.mark.parametrize(
    "name", ["split", "page bytes", "extra pool", "components", "format version"]
)
@on_virtual_clock
async def test_b84_each_identity_finds_what_is_its_own(name: str) -> None:
    """B84: by the side of those of test_shared_storage: a second cache that differs in one fact
    finds nothing, without any error, and keeps its own beside it; both then find all of it."""
    store = Store()
    for expected in (0, 32):
        for given in ({}, OTHERS[name]):
            async with identified(store, **given) as r:
                async with r.cache.lease([*A, 1]) as lease:
                    assert lease.hits == Hits(storage=expected)
                    r.oracle.verify(lease, lease.key, 0, lease.prefix_len)
                    await r.compute(lease)
                await r.cache.drain()
                assert r.stats.storage is not None
                assert r.stats.storage.counters.calls_failed == 0


@pytest.mark.usefixtures("renamed")
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "salt"])
@on_virtual_clock
async def test_b84_an_object_says_whose_it_is(name: str) -> None:
    """B84: whatever an object is called: one that another identity has written, put where this one
    looks, is a miss and nobody's error; also where the bytes are as many, such as bfloat16 read as
    float16. It is replaced, and the next request hits."""
    writer = OTHERS["dtype"] if name == "same bytes" else {}
    store = Store()
    async with identified(store, **writer) as r:
        await r.serve(A)
        await r.cache.drain()
    (foreign, *_) = store.rows.values()
    store.rows.clear()
    async with identified(store, **OTHERS[name]) as r:
        controller = r.cache._controller
        assert controller.storage is not None
        pages = RadixKey(A).page_keys(r.cache.page_size)
        for page in pages:
            store.rows[controller.storage.io.formats[0].object_key(page)] = foreign
        assert await r.serve([*A, 1]) == 0
        await r.cache.drain()
        assert foreign not in store.rows.values()
        wipe(r)
        assert await r.serve([*A, 1]) == 32


@pytest.mark.parametrize("other", ["swa", "mamba", "mamba_swa", "another window"])
@pytest.mark.parametrize("stack", STACKS)
@on_virtual_clock
async def test_b84_another_window_or_other_components_find_nothing(stack: str, other: str) -> None:
    """B84: rows of as many bytes under the same page keys: a second cache whose window is another,
    or that has other components, finds nothing, not even of the base, without any error; both then
    find what is their own."""
    mine: dict[str, Any] = {"stack": stack, "window": 10}
    others: dict[str, Any] = {**mine, "stack": other}
    if other == "another window":
        others = {**mine, "window": 9}
    is_other = others["stack"] != stack or ("swa" in STACKS[stack] and others != mine)
    store, most = Store(), 0
    for again in (False, True):
        for given in (mine, others):
            async with hybrid_tiers(store=store, **given) as (r, _):
                reused = await r.serve([*A, 1])
                assert (reused > 0) is (again or (given is others and not is_other))
                await r.cache.drain()
                assert r.stats.storage is not None
                assert r.stats.storage.counters.calls_failed == 0
                assert r.stats.storage.counters.objects_corrupt == 0
                r.check()
                most = max(most, reused)
    assert most >= 24


# --- chains ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", [{}, {"cache_salt": "a"}], ids=str)
@pytest.mark.parametrize("attached", ["from the start", "later"])
@on_virtual_clock
async def test_b86_however_a_node_came_its_keys_are_those_of_the_whole(
    attached: str, namespace: dict[str, Any]
) -> None:
    """B86: nodes that were published, prefetched, split, revived by computing them once more, and
    from before there was storage: what hangs below them is kept under the very names that a fresh
    instance gives it, and a prompt that begins in the middle of another meets nothing."""
    tokens = seq("A", 128)
    prompts = [tokens[:64], [*tokens[:24], *seq("B", 24)], [*tokens[:80], *seq("C", 8)], tokens]
    async with three_tiers() as (r, store):
        if attached == "later":
            await r.cache.storage.detach()
            await r.serve(prompts[0], **namespace)
            await r.serve(prompts[1], **namespace)
            assert store.rows == {}
            await r.cache.storage.attach(r.config, backend=store)
        else:
            await r.serve(prompts[0], **namespace)
            await r.cache.drain()
            wipe(r)
            with r.cache.prefetch(tokens[:40], **namespace) as handle:  # a part, then a fork in it
                assert await handle.wait("wait_complete") == 40
            await r.serve(prompts[1], **namespace)
        await r.cache.drain()
        demote(r)
        revived = await r.serve(prompts[2], load_timeout=0, **namespace)
        assert revived == 0
        await r.cache.drain()
        for prompt in (*prompts, *prompts):  # what was there before storage is kept when it is used
            await r.serve(prompt, **namespace)
            await r.cache.drain()
        for node in r.cache.tree.nodes():
            if node.parent is not None:
                whole = RadixKey(np.frombuffer(path_tokens(node), np.int64), **namespace)
                assert r.cache.tree.page_keys(node) == whole.page_keys(P)[node.start // P :]
        assert await r.serve(tokens[64:], **namespace) == 0
        await r.cache.drain()
        wipe(r)
        assert await prefetched(r, tokens[32:]) == 0
    fresh = Store()
    for prompt in (*prompts, tokens[64:]):
        async with three_tiers(store=fresh) as (r, _):
            await r.serve(prompt, **namespace)
    assert set(store.rows) == set(fresh.rows)


# --- names that collide ---------------------------------------------------------------------------


class OneByte(MemoryBackend):
    """Calls objects by the last byte of their keys: 256 names, for all models and namespaces."""

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await super().contains([ObjectKey(key[-1:]) for key in keys])

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await super().delete([ObjectKey(key[-1:]) for key in keys])

    def _read(self, key: ObjectKey, row: memoryview) -> ReadResult:
        return super()._read(ObjectKey(key[-1:]), row)

    def _write(self, key: ObjectKey, row: memoryview) -> WriteResult:
        return super()._write(ObjectKey(key[-1:]), row)


def colliding(tokens: Sequence[int]) -> list[int]:
    """Another prompt, of one page, whose name is that of the first page of `tokens`."""
    wanted = RadixKey(tokens).page_keys(P)[0][-1:]
    for first in range(10_000):
        other = [first, *seq("Z", P - 1)]
        if RadixKey(other).page_keys(P)[0][-1:] == wanted:
            return other
    raise AssertionError("one in 256 collides")


@on_virtual_clock
async def test_b89_a_collision_is_a_miss() -> None:
    """B89: storage has something under the name, and it is another prompt's: nothing of it is
    taken, the request computes, and what was last used is what is kept. The names that are really
    used do not collide: all of a SHA-256."""
    assert KEY_BYTES - SCOPE_BYTES == 32
    mine, store = A[:P], Store(OneByte())
    other = colliding(mine)
    async with three_tiers(store=store) as (r, _):
        await keep(r, mine)
        for round_, (there, missing) in enumerate([(mine, other), (other, mine)] * 2, 1):
            r.spoil_free_pages()
            assert await prefetched(r, there) == P
            wipe(r)
            async with r.cache.lease([*missing, 1]) as lease:
                assert lease.prefix_len == 0
                await r.compute(lease)
            await r.cache.drain()
            wipe(r)
            assert r.stats.storage is not None
            assert r.stats.storage.counters.objects_corrupt == round_
        r.check()


@pytest.mark.parametrize("seed", range(3))
@on_virtual_clock
async def test_b89_nobody_gets_foreign_bytes(seed: int) -> None:
    """B89: thousands of pages of two namespaces and two models under 256 names: whatever is granted
    has its own bytes, in every tier."""
    rng = random.Random(seed)
    store, hits = Store(OneByte()), 0
    prompts = [[*seq(stem, 16), number, *seq("D", 15)] for stem in "AB" for number in range(30)]
    for model in (MODEL, {**MODEL, "revision": "2"}) * 2:
        async with three_tiers(store=store, model=model) as (r, _):
            for _ in range(100):
                salt = rng.choice((None, "a"))
                tokens = rng.choice(prompts)
                async with r.cache.lease([*tokens, 1], cache_salt=salt) as lease:
                    hits += lease.hits.storage
                    r.oracle.verify(lease, lease.key, 0, lease.prefix_len)
                    await r.compute(lease)
                await r.cache.drain()
                if rng.random() < 0.5:
                    wipe(r)
                    r.spoil_free_pages()
            assert r.stats.storage is not None
            assert r.stats.storage.counters.objects_corrupt > 20
            r.check()
    assert hits > 100
