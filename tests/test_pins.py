"""Pins: a hold on a prefix without a request (semantics §6.6)."""

from __future__ import annotations

import gc

import pytest

from tests.lease_helpers import rig, seq, turns
from tests.storage_helpers import MODEL, three_tiers, wipe
from tests.tier_helpers import demote, on_tier, store, tiers, until
from tiered_cache import CapacityError, ConfigError, RadixKey, Tier, load_config

A = seq("A", 32)


async def test_a_pin_keeps_a_prefix_on_the_host() -> None:
    """Whatever else wants the room, until it is closed."""
    async with tiers(rows=32) as (r, copies):
        await store(r, copies, A)
        with r.cache.pin(A, None) as pin:
            assert pin.tokens == 32
            assert r.host.protected == 8
            assert [(item.kind, item.pages) for item in r.cache.outstanding()] == [
                ("pin", {"full": 8})
            ]
            await store(r, copies, *[seq(name, 32) for name in "BCDE"])
            assert on_tier(r, A) == "HHHHHHHH"
        assert pin.closed
        assert r.host.protected == 0
        pin.close()


async def test_a_pin_on_the_device_counts_as_held() -> None:
    """Admission does not promise what it keeps."""
    async with rig(16, device={"tokens": 64, "max_pinned": 0.5}) as r:
        await r.serve(A)
        with r.cache.pin(A, None, tier=Tier.DEVICE):
            assert r.pool.protected == 8
            assert r.counters.pages_evicted == 0
            await r.serve(seq("B", 32))
            assert r.hit(A) == 32
            with pytest.raises(CapacityError):
                r.cache.allocate(9)
        assert r.pool.protected == 0


async def test_pins_have_their_share() -> None:
    """A quarter of the tier by default; what is more is refused, and nothing changes."""
    async with tiers(rows=32) as (r, copies):
        await store(r, copies, A, seq("B", 32))
        with r.cache.pin(A, None):
            with pytest.raises(CapacityError, match="0 are left of what pins may hold"):
                r.cache.pin(seq("B", 32), None)
            assert r.host.protected == 8
        r.cache.pin(seq("B", 32), None).close()
    async with rig(16, device={"tokens": 64, "max_pinned": 0.0}) as r:
        await r.serve(A)
        with pytest.raises(CapacityError):
            r.cache.pin(A, 1.0)


async def test_what_is_not_cached_is_no_error() -> None:
    async with rig() as r:
        with r.cache.pin(A, None) as pin:
            assert pin.tokens == 0


async def test_a_pin_ends_at_its_time() -> None:
    """On the loop's clock."""
    async with rig(16, device={"tokens": 64, "max_pinned": 1.0}) as r:
        await r.serve(A)
        pin = r.cache.pin(A, 0.02)
        assert r.pool.protected == 8
        await until(lambda: pin.closed)
        assert r.pool.protected == 0


async def test_reset_and_close_end_pins() -> None:
    async with rig(16, device={"tokens": 64, "max_pinned": 1.0}) as r:
        await r.serve(A)
        first = r.cache.pin(A, None)
        r.cache.reset()
        assert first.closed
        await r.serve(A)
        second = r.cache.pin(A, None)
    assert second.closed
    for pin in (first, second):
        pin.close()


async def test_a_pin_that_nobody_keeps() -> None:
    """§6.6: it ends with its time, the cache or a reset, and not before."""
    async with rig(16, device={"tokens": 64, "max_pinned": 1.0}) as r:
        await r.serve(A)
        r.cache.pin(A, 0.02)
        assert r.pool.protected == 8
        await until(lambda: not r.pool.protected)
        r.cache.pin(A, None)
        gc.collect()
        await turns()
        assert [item.kind for item in r.cache.outstanding()] == ["pin"]
        r.cache.reset()
        assert r.cache.outstanding() == []


async def test_a_pin_holds_what_a_prefetch_has_brought() -> None:
    """It keeps it on the host when the handle is closed."""
    async with three_tiers(rows=64) as (r, _):
        await r.serve(A)
        await r.cache.drain()
        wipe(r)
        with r.cache.prefetch(RadixKey(A)) as handle:
            assert await handle.wait() == 32
            pin = r.cache.pin(RadixKey(A), 60.0)
        wipe(r)
        assert on_tier(r, A) == "HHHHHHHH"
        pin.close()
        wipe(r)
        assert on_tier(r, A) == "--------"


async def test_arguments() -> None:
    async with rig() as r:
        with pytest.raises(ValueError, match="host"):
            r.cache.pin(A, None, tier=Tier.HOST)
        with pytest.raises(TypeError, match="Tier"):
            r.cache.pin(A, None, tier="host")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="ttl"):
            r.cache.pin(A, -1.0)
        with pytest.raises(ValueError, match="namespace"):
            r.cache.pin(RadixKey(A), None, cache_salt="x")


@pytest.mark.parametrize("share", [-0.1, 1.1, True])
def test_a_share_is_from_0_to_1(share: float) -> None:
    with pytest.raises(ConfigError, match="max_pinned"):
        load_config({"model": MODEL, "device": {"tokens": 64, "max_pinned": share}}, environ={})


async def test_demotion_leaves_a_host_pin_alone() -> None:
    async with tiers(rows=32) as (r, copies):
        await r.serve(A)
        await copies.all()
        with r.cache.pin(A, None):
            demote(r)
            assert on_tier(r, A) == "HHHHHHHH"
