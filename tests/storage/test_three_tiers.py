"""A prefix goes down to storage, survives there, and comes back with its bytes."""

from __future__ import annotations

from tests.lease_helpers import seq, start, turns
from tests.storage_helpers import Store, keep, prefetched, three_tiers, wipe
from tiered_cache import Hits


async def test_a_prompt_is_kept_and_comes_back() -> None:
    """Published, it goes to the host and to storage by itself; a later lease gets it from there,
    and says so."""
    tokens = seq("A", 40)
    async with three_tiers() as (r, store):
        await r.serve(tokens)
        await r.cache.drain()
        assert store.has(tokens) == "S" * 10
        wipe(r)
        assert r.hit(tokens) == 0
        async with r.cache.lease([*tokens, 1]) as lease:
            assert lease.prefix_len == 40
            assert lease.hits == Hits(storage=40)
            r.oracle.verify(lease, lease.key, 0, 40)
        assert r.counters.tokens_hit_storage == 40


async def test_another_process_finds_it() -> None:
    """A cache that is opened later on the same storage has what the first one has kept."""
    tokens, store = seq("A", 40), Store()
    async with three_tiers(store=store) as (r, _):
        await r.serve(tokens)
    async with three_tiers(store=store) as (r, _):
        r.spoil_free_pages()
        assert await r.serve([*tokens, 1]) == 40


async def test_prefetch_brings_it_to_the_host() -> None:
    """Ahead of the lease, which then has only to load it."""
    tokens = seq("A", 40)
    async with three_tiers() as (r, _):
        await keep(r, tokens)
        with r.cache.prefetch(tokens) as handle:
            assert await handle.wait() == 40
            assert r.host.protected == 10, "a result is held until it is taken"
            assert r.pool.free == r.pool.capacity, "and holds nothing on the device"
        assert r.host.protected == 0
        assert r.host.evictable == 10
        async with r.cache.lease([*tokens, 1]) as lease:
            assert lease.hits == Hits(host=40)


async def test_what_others_compute_meanwhile_is_not_storages() -> None:
    """Storage was asked and had nothing. What another lease has left on the host by the time of the
    grant is the host's, not what a prefetch brought."""
    tokens = seq("A", 40)
    async with three_tiers(pages=11) as (r, store):
        first = await r.lease(tokens)
        second, third = (start(r.lease(wanted)) for wanted in (seq("B", 40), [*tokens, 1]))
        await turns()
        await r.compute(first)
        await r.cache.drain()  # on the host, too: the device needs its pages for the second
        await first.aclose()
        await r.compute(await second)
        await second.result().aclose()
        lease = await third
        assert lease.hits == Hits(host=40)
        await lease.aclose()
        assert r.counters.tokens_hit_storage == 0
        assert store.has(tokens) == "S" * 10


async def test_namespaces_do_not_meet_in_storage() -> None:
    """B81: what one tenant has kept is nobody else's, in any tier."""
    tokens = seq("A", 40)
    async with three_tiers() as (r, store):
        await r.serve(tokens, cache_salt="a")
        await r.cache.drain()
        assert store.has(tokens, cache_salt="a") == "S" * 10
        assert store.has(tokens) == store.has(tokens, cache_salt="b") == "-" * 10
        wipe(r)
        assert await r.serve([*tokens, 1]) == 0
        assert await r.serve([*tokens, 1], cache_salt="b") == 0
        assert await r.serve([*tokens, 1], cache_salt="a") == 40


async def test_what_is_there_is_not_written_again() -> None:
    """A second cache that computes the same only asks."""
    tokens, store = seq("A", 40), Store()
    async with three_tiers(store=store) as (r, _):
        await r.serve(tokens)
    async with three_tiers(store=store, storage={"prefetch": {"threshold": 1000}}) as (r, _):
        assert await r.serve(tokens) == 0
        await r.cache.drain()
        assert r.stats.storage is not None
        assert r.stats.storage.counters.objects_written == 0
        assert await prefetched(r, tokens) == 40
