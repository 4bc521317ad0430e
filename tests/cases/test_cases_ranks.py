"""Cases about several ranks of one model: what one of them has, waits for, fails at or gives up is
the same on all. Seconds are those of the virtual clock."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Coroutine, Sequence
from typing import Any, Final, NamedTuple

import pytest

from tests.hybrid_helpers import STACKS, hybrid_tiers, objects, usable
from tests.lease_helpers import Rig, seq, start
from tests.rank_helpers import Barrier, some_ranks
from tests.storage_helpers import Store, keep, on_virtual_clock, wipe
from tests.tier_helpers import on_tier
from tiered_cache import AdmissionTimeout, BackendError, RadixKey
from tiered_cache.cache import LeaseContext
from tiered_cache.errors import RanksError, StaleError
from tiered_cache.prefetch import PrefetchHandle
from tiered_cache.storage.backend import ReadResult
from tiered_cache.testing.faulty_backend import CallGate
from tiered_cache.tree.components.base import Eviction
from tiered_cache.types import MatchPrefixParams, Tier

A: Final = seq("A", 32)

LIMITED: Final = {"prefetch": {"threshold": 0, "policy": "timeout", "timeout_base": 1.0}}
PATIENT: Final = {"prefetch": {"threshold": 0, "policy": "wait_complete"}}


def now() -> float:
    return asyncio.get_running_loop().time()


class Served(NamedTuple):
    """What a rank did for a request; equal on all."""

    prefix_len: int
    chunks: tuple[tuple[int, int], ...]
    num_pages: tuple[int, ...]


class Outcome(NamedTuple):
    """How a request ended, and how long its grant took."""

    how: Served | type[BaseException]
    grant_s: float


def request(
    r: Rig, tokens: Sequence[int], max_tokens: int = 1 << 20, pause: Any = None, **options: Any
) -> Coroutine[Any, Any, Outcome]:
    """A request on one rank, which comes and goes at its own pace; all ask in the same order."""
    return follow(r, r.cache.lease(tokens, **options), max_tokens, pause)


async def follow(r: Rig, context: LeaseContext, max_tokens: int, pause: Any) -> Outcome:
    granted = began = 0.0
    try:
        if pause is not None:
            await asyncio.sleep(pause())
        began = now()
        async with context as lease:
            granted = now() - began
            prefix_len, chunks, lengths = lease.prefix_len, [], [lease.table.num_pages]
            while chunk := await lease.next_chunk(max_tokens):
                chunks.append((chunk.start, chunk.stop))
                lengths.append(lease.table.num_pages)
                await lease.run(r.model, chunk)
                if pause is not None:
                    await asyncio.sleep(pause())
                lease.commit(chunk)
            return Outcome(Served(prefix_len, tuple(chunks), tuple(lengths)), granted)
    except (RanksError, AdmissionTimeout, StaleError, asyncio.CancelledError) as error:
        return Outcome(type(error), granted or now() - began)


async def on_all(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    return list(await asyncio.gather(*work))


async def drained(rigs: Sequence[Rig]) -> None:
    """All at once: what one waits for, others have to answer."""
    await on_all(*[r.cache.drain() for r in rigs])


async def at_rest(rigs: Sequence[Rig], barrier: Barrier) -> None:
    """Nothing is held anywhere, and nobody waits for an answer."""
    await drained(rigs)
    for r in rigs:
        assert r.host.in_flight == r.host.quarantined == r.host.protected == 0, r.host
        assert r.pool.free + r.pool.evictable == r.pool.capacity
        assert r.cache.outstanding() == []
        assert r.counters.background_failures == 0
        r.check()
    assert barrier.open == {}


async def keep_on(rigs: Sequence[Rig], *prompts: Any) -> None:
    """Prompts that only storage has, on all."""
    await on_all(*[keep(r, *prompts) for r in rigs])


# --- B90: all ask, or none hangs ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@on_virtual_clock
async def test_b90_a_backend_that_is_fifty_times_slower(seed: int) -> None:
    """B90: a thousand requests, eight at a time, at each rank's own pace. All agree on the same
    tags, get the same, and no grant takes longer than rank 0's limit and the messages."""
    rng = random.Random(seed)
    stores = [Store(), Store()]
    for store, seconds in zip(stores, (0.01, 0.5), strict=True):
        store.fault("contains", delay=seconds)
        store.fault("read", delay=seconds)
    prefixes = [seq(name, 40) for name in "ABCDEFGH"]
    sections = {"pages": 96, "rows": 48, "stores": stores, "storage": LIMITED}
    async with some_ranks(**sections) as (rigs, barrier):
        barrier.delay = lambda: rng.choice((0.0, 0.0, 0.001, 0.005))
        outcomes: list[list[Outcome]] = []

        def pause() -> float:
            return rng.choice((0.0, 0.0, 0.01))

        for number in range(125):
            prompts = [
                [*rng.choice(prefixes)[: rng.randrange(4, 41)], 10 * number + at] for at in range(8)
            ]
            both = await on_all(
                *[on_all(*[request(r, tokens, 16, pause) for tokens in prompts]) for r in rigs]
            )
            outcomes += [list(pair) for pair in zip(*both, strict=True)]
            if number % 5 == 0:
                for r in rigs:
                    wipe(r)
        assert len(outcomes) == 1000
        for one, other in outcomes:
            assert one.how == other.how
            assert isinstance(one.how, Served)
        longest = max(outcome.grant_s for pair in outcomes for outcome in pair)
        assert longest < 1.0 + 0.25 + 0.2, "the limit, and messages"
        assert sum(pair[0].how.prefix_len for pair in outcomes) > 5_000
        assert rigs[0].counters.prefetches_timed_out > 0
        assert rigs[1].counters.prefetches_timed_out == 0, "time is judged on rank 0"
        for r in rigs:
            assert r.counters.pages_prefetched > 100
        await at_rest(rigs, barrier)
        barrier.check()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", range(12))
@on_virtual_clock
async def test_b90_one_rank_gives_up_at_any_moment(num_ranks: int, seed: int) -> None:
    """B90: requests that hardly fit beside each other, of which one rank cancels some, whenever it
    may be. Those end on all ranks, and soon; the others get the same on all. No answer is missing,
    so nobody needs the barrier's own limit."""
    rng = random.Random(seed)
    stores = [Store() for _ in range(num_ranks)]
    sections: Any = {"pages": 24, "rows": 48, "stores": stores, "storage": PATIENT}
    async with some_ranks(num_ranks, **sections) as (rigs, barrier):
        await keep_on(rigs, A, seq("B", 32))
        for store in stores:
            store.fault("contains", delay=rng.choice((0.0, 0.01, 0.1)))
            store.fault("read", delay=rng.choice((0.0, 0.01, 0.1)))
        barrier.delay = lambda: rng.choice((0.0, 0.001, 0.01))

        def pause() -> float:
            return rng.choice((0.0, 0.01, 0.05))

        prompts = [[*seq(rng.choice("AB"), rng.randrange(8, 33)), at] for at in range(10)]
        tasks = [[start(request(r, tokens, 8, pause)) for tokens in prompts] for r in rigs]
        given_up = rng.sample(range(10), 4)
        for at in given_up:
            victim = tasks[rng.randrange(num_ranks)][at]
            asyncio.get_running_loop().call_later(rng.uniform(0.06, 0.6), victim.cancel)
        async with asyncio.timeout(20):
            outcomes = await on_all(*[on_all(*of_rank) for of_rank in tasks])
        for at, of_all in enumerate(zip(*outcomes, strict=True)):
            hows = {outcome.how for outcome in of_all}
            if at not in given_up:
                assert len(hows) == 1
                assert isinstance(of_all[0].how, Served)
        await at_rest(rigs, barrier)
        barrier.check()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("operation", ["contains", "read"])
@pytest.mark.parametrize("how", ["closed", "ended", "cancelled", "reset"])
@on_virtual_clock
async def test_b90_a_prefetch_that_is_given_up_on_one_rank(
    who: int, operation: Any, how: str
) -> None:
    """B90: while its storage is asked, or is read. The other ends with what it has; when rank 0
    gives up it does so at once, whatever its own storage does."""
    stores = [Store(), Store()]
    async with some_ranks(stores=stores, storage=PATIENT) as (rigs, barrier):
        await keep_on(rigs, A)
        gates = [CallGate() for _ in rigs]
        for store, gate in zip(stores, gates, strict=True):
            store.fault(operation, gate=gate, times=1)
        handles = [r.cache.prefetch(A) for r in rigs]
        waiting = [start(handle.wait()) for handle in handles]
        await on_all(*[gate.reached() for gate in gates])
        if how == "closed":
            handles[who].close()
        elif how == "ended":
            assert handles[who].done_now() == 0
        elif how == "reset":
            rigs[who].cache.reset()
        else:
            (call,) = rigs[who].cache._controller.storage.prefetches  # type: ignore[union-attr]
            assert call.task is not None
            call.task.cancel()
        if who == 1:
            gates[0].open()
        async with asyncio.timeout(1):
            results = await on_all(*waiting)
        assert results[who] == 0
        for handle in handles:
            handle.close()
        for gate in gates:
            gate.open()
        await at_rest(rigs, barrier)
        barrier.check()
        assert await on_all(*[request(r, [*A, 1]) for r in rigs])


@on_virtual_clock
async def test_b90_time_is_judged_on_rank_0() -> None:
    """B90: rank 1's storage hangs. When rank 0 waits no longer, neither does the other, and both
    compute what did not come in time to both."""
    stores = [Store(), Store()]
    async with some_ranks(stores=stores, storage=LIMITED) as (rigs, barrier):
        await keep_on(rigs, A)
        gate = CallGate()
        stores[1].fault("read", gate=gate, stubborn=True)
        one, other = await on_all(*[request(r, [*A, 1]) for r in rigs])
        assert one.how == other.how == Served(0, ((0, 33),), (0, 9))
        assert 1.0 <= max(one.grant_s, other.grant_s) < 1.1
        assert [r.counters.prefetches_timed_out for r in rigs] == [1, 0]
        gate.open()
        await at_rest(rigs, barrier)
        barrier.check()


@on_virtual_clock
async def test_b90_a_rank_that_fails() -> None:
    """B90: its model raises; the others are told when they ask for the next chunk."""
    async with some_ranks(3) as (rigs, barrier):

        def fails(*_: Any) -> None:
            raise KeyError("model")

        async def fail(r: Rig) -> None:
            async with r.cache.lease(A) as lease:
                await lease.run(fails, await lease.next_chunk(8))

        failed = start(fail(rigs[1]))
        outcomes = await on_all(*[request(r, A, 8) for r in (rigs[0], rigs[2])])
        assert [outcome.how for outcome in outcomes] == [RanksError, RanksError]
        with pytest.raises(KeyError):
            await failed
        await at_rest(rigs, barrier)
        barrier.check()


@on_virtual_clock
async def test_b90_a_rank_that_never_asks() -> None:
    """B90: after the barrier's limit that is an error."""
    async with some_ranks(barrier=Barrier(2, agree_timeout=5.0)) as (rigs, barrier):
        outcome = await request(rigs[0], A)
        assert outcome.how is RanksError
        assert 5.0 <= outcome.grant_s < 20
        await rigs[0].cache.drain()
        assert barrier.agreed == {}


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("ends", [False, True])
@on_virtual_clock
async def test_b90_one_rank_has_no_room(who: int, ends: bool) -> None:
    """B90: all wait until it has, or until rank 0's limit; whoever comes later waits behind."""
    async with some_ranks() as (rigs, barrier):
        lent = rigs[who].cache._controller
        taken = lent.accounts.take(60)  # by somebody who is no lease

        def give_back() -> None:
            lent.accounts.give_back(taken)
            lent.calmed()

        requests = [request(r, A, timeout=0.5) for r in rigs]
        later = [request(r, [*A, 1]) for r in rigs]
        asyncio.get_running_loop().call_later(0.25 if ends else 0.75, give_back)
        outcomes, behind = await on_all(on_all(*requests), on_all(*later))
        hows = [outcome.how for outcome in outcomes]
        if ends:
            assert hows[0] == hows[1]
            assert isinstance(hows[0], Served)
        else:
            assert hows == [AdmissionTimeout, AdmissionTimeout]
            assert all(0.5 <= outcome.grant_s < 0.51 for outcome in outcomes)
        assert behind[0].how == behind[1].how
        assert isinstance(behind[0].how, Served)
        await at_rest(rigs, barrier)
        barrier.check()


@on_virtual_clock
async def test_b90_requests_in_another_order() -> None:
    """B90: the n-th request of each rank is the same, or an error on all."""
    async with some_ranks() as (rigs, barrier):
        one, other = await on_all(request(rigs[0], A), request(rigs[1], seq("B", 32)))
        assert one.how is other.how is RanksError
        await at_rest(rigs, barrier)


# --- B91: what one has, all have ------------------------------------------------------------------


@on_virtual_clock
async def test_b91_storage_has_more_on_one_rank() -> None:
    """B91: eight pages here, five there: five come to both, the rest of the host stays free, and
    both compute from there."""
    stores = [Store(), Store()]
    async with some_ranks(stores=stores, storage=PATIENT) as (rigs, barrier):
        await keep_on(rigs, A)
        for page in range(5, 8):
            del stores[1].rows[stores[1].key_of(A, page)]
        handles = [r.cache.prefetch(A) for r in rigs]
        assert await on_all(*[handle.wait() for handle in handles]) == [20, 20]
        for r, handle in zip(rigs, handles, strict=True):
            assert on_tier(r, A) == "HHHHH---"
            assert r.host.in_flight == 0
            assert r.host.free == r.host.capacity - 5
            handle.close()
        one, other = await on_all(*[request(r, [*A, 1]) for r in rigs])
        assert one.how == other.how == Served(20, ((20, 33),), (5, 9))
        await at_rest(rigs, barrier)
        barrier.check()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("result", [ReadResult.MISSING, ReadResult.CORRUPT, "broken"])
@on_virtual_clock
async def test_b91_a_read_that_falls_short_on_one_rank(who: int, result: Any) -> None:
    """B91: it said to have what does not come; both hold, and say, the same."""
    stores = [Store(), Store()]
    async with some_ranks(stores=stores, storage=PATIENT) as (rigs, barrier):
        await keep_on(rigs, A)
        if result == "broken":
            stores[who].fault("read", error=BackendError("gone"))
        else:
            stores[who].fault("read", keys=[stores[who].pages_of(A)[3]], result=result)
        there = 0 if result == "broken" else 12
        handles = [r.cache.prefetch(A) for r in rigs]
        assert await on_all(*[handle.wait() for handle in handles]) == [there, there]
        one, other = await on_all(*[request(r, [*A, 1]) for r in rigs])
        for handle in handles:
            handle.close()
        assert one.how == other.how
        assert isinstance(one.how, Served)
        assert one.how.prefix_len == there
        await at_rest(rigs, barrier)
        barrier.check()


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("how", ["it lacks them", "they do not come"])
@on_virtual_clock
async def test_b91_windows_and_states_that_storage_has_on_one_rank(
    stack: str, seed: int, how: str
) -> None:
    """B91: what all ranks bring ends at a boundary that each of them can have: {512, 1024} and
    {512, 768} is 512, though it is the longest of neither. Where a read shows that there is less,
    all say the same."""
    rng = random.Random(f"{stack} {seed}")
    tokens = seq("A", 64)
    stores = [Store(), Store()]
    tiers = functools.partial(hybrid_tiers, stack)
    async with some_ranks(stores=stores, storage=PATIENT, tiers=tiers) as (rigs, _):
        for stop in range(16, 65, 8):
            await on_all(*[r.serve(tokens[:stop]) for r in rigs])
            await on_all(*[r.cache.drain() for r in rigs])
        for r in rigs:
            wipe(r)
        common = set(range(65))
        for r, store in zip(rigs, stores, strict=True):
            gone = []
            for name in STACKS[stack][1:]:
                for page in rng.sample(range(6, 16), 3):
                    gone.append(objects(r, store, name, tokens)[page])
            rows = dict(store.rows)
            for key in gone:
                store.rows.pop(key, None)
            common &= {
                stop for stop in range(65) if usable(r, store, stack, tokens, limit=stop) == stop
            }
            if how == "they do not come":
                store.rows.update(rows)
                store.fault("read", keys=gone, result=ReadResult.MISSING)
        handles = [r.cache.prefetch(tokens) for r in rigs]
        one, other = await on_all(*[handle.wait() for handle in handles])
        assert one == other
        if how == "it lacks them":
            assert one == max(common)
        for r in rigs:
            match = r.cache.tree.match_prefix(MatchPrefixParams(RadixKey(tokens), one))
            assert match.best_length == one
            r.check()
        for handle in handles:
            handle.close()
        await on_all(*[r.cache.drain() for r in rigs])
        for r in rigs:
            assert all(pool.protected == 0 for pool in r.stats.host.values())
            assert r.cache.outstanding() == []


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("seed", range(6))
@on_virtual_clock
async def test_b91_windows_and_states_that_device_and_host_have_on_one_rank(
    stack: str, seed: int
) -> None:
    """B91: leases begin where each rank can, on device or host, though that is the longest of
    none."""
    rng = random.Random(f"{stack} {seed}")
    tokens = seq("A", 64)
    stores = [Store(), Store()]
    tiers = functools.partial(hybrid_tiers, stack)
    async with some_ranks(stores=stores, storage=PATIENT, tiers=tiers) as (rigs, _):
        for stop in range(8, 65, 8):
            await on_all(*[r.serve(tokens[:stop]) for r in rigs])
            await on_all(*[r.cache.drain() for r in rigs])
        common = set(range(64))
        for r, store in zip(rigs, stores, strict=True):
            store.rows.clear()
            for name in STACKS[stack][1:]:
                lost = [node for node in r.cache.tree.nodes() if rng.random() < 0.4]
                give_up(r, name, lost, on_host=True)
                give_up(r, name, lost if rng.random() < 0.5 else lost[::2], on_host=False)
            common &= {
                stop
                for stop in range(64)
                if r.cache.tree.match_prefix(MatchPrefixParams(RadixKey(tokens), stop)).best_length
                == stop
            }
        leases = await on_all(*[r.lease(tokens) for r in rigs])
        assert [lease.prefix_len for lease in leases] == [max(common)] * 2
        for r, lease in zip(rigs, leases, strict=True):
            r.check()
            lease.close()
        await on_all(*[r.cache.drain() for r in rigs])
        assert [r.cache.outstanding() for r in rigs] == [[], []]


def give_up(r: Rig, name: str, nodes: list[Any], *, on_host: bool) -> None:
    """Tombstones of a component at these nodes, on one tier, as an eviction leaves them."""
    tree, controller = r.cache.tree, r.cache._controller
    (component,) = [each for each in tree.components if each.id == name]
    tier = Tier.HOST if on_host else Tier.DEVICE
    eviction = Eviction(tier, len(tree.components))
    for node in nodes:
        data = node.data[component.index]
        if (data.host_value if on_host else data.value) is not None:
            component.evict_component(node, tier, eviction)
    assert controller.host_pages is not None
    given_up = eviction.result()
    controller.host_pages.give_back(given_up.host)
    controller.accounts.give_back(given_up.device)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", ["fails", "hangs"])
@on_virtual_clock
async def test_b91_a_load_that_falls_short_on_one_rank(who: int, how: str) -> None:
    """B91: what has come to the host does not come to one device: both go on from what both have.
    How long that may take is judged on rank 0."""
    async with some_ranks(storage=PATIENT) as (rigs, barrier):
        await keep_on(rigs, A)
        host = rigs[who].cache._parts.host
        assert host is not None
        copy, calls = host.copier.copy, []

        def broken(job: Any) -> None:
            calls.append(job)
            if len(calls) == 1:
                raise OSError("no copy")
            copy(job)

        executor = rigs[who].cache._controller._executors.copy
        if how == "fails":
            host.copier.copy = broken  # type: ignore[method-assign]
        else:
            executor._durations = (5.0,)  # type: ignore[attr-defined]
        one, other = await on_all(*[request(r, [*A, 1], load_timeout=1.0) for r in rigs])
        assert one.how == other.how == Served(0, ((0, 33),), (0, 9))
        if how == "hangs":
            assert 1.0 <= max(one.grant_s, other.grant_s) < 1.2
        await at_rest(rigs, barrier)
        barrier.check()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", range(3))
@on_virtual_clock
async def test_b91_five_hundred_random_steps(num_ranks: int, seed: int) -> None:
    """B91: ranks lose what they have on any tier, each for itself, answer late, give up requests
    and forget everything; grants, chunks and the lengths of page tables are equal on all, and all
    content is true."""
    rng = random.Random(seed)
    stores = [Store() for _ in range(num_ranks)]
    for store in stores:
        for operation in ("contains", "read", "write"):
            store.fault(operation, delay=rng.choice((0.0, 0.005, 0.05)))  # type: ignore[arg-type]
    storage = {"prefetch": {"threshold": 0, "policy": "timeout", "timeout_base": 0.1}}
    sections: Any = {"pages": 40, "rows": 40, "stores": stores, "storage": storage}
    async with some_ranks(num_ranks, **sections) as (rigs, barrier):
        barrier.delay = lambda: rng.choice((0.0, 0.001, 0.01))
        running: list[tuple[list[asyncio.Task[Outcome]], set[str]]] = []
        compared = []

        def pause() -> float:
            return rng.choice((0.0, 0.0, 0.005, 0.02))

        async def compare_oldest() -> None:
            tasks, disturbed = running.pop(0)
            of_all = await on_all(*tasks)
            if not disturbed:
                assert len({outcome.how for outcome in of_all}) == 1, of_all
                assert of_all[0].how is AdmissionTimeout or isinstance(of_all[0].how, Served)
                compared.append(of_all[0].how)

        async def prefetch(handle: PrefetchHandle) -> None:
            await asyncio.sleep(pause())
            with handle:
                await handle.wait()
                await asyncio.sleep(pause())

        async def later(action: Any) -> None:
            await asyncio.sleep(pause())
            action()

        others: set[asyncio.Task[None]] = set()
        resets: set[asyncio.Task[None]] = set()
        for _ in range(500):
            what, who = rng.random(), rng.randrange(num_ranks)
            tokens = [*seq(rng.choice("ABCD"), rng.randrange(4, 41)), rng.randrange(5)]
            controller, store = rigs[who].cache._controller, stores[who]
            if what < 0.6:
                options = {
                    "timeout": rng.choice((None, None, 0.3)),
                    "load_timeout": rng.choice((None, None, 0.0, 0.01)),
                    "layerwise": rng.random() < 0.2,
                }
                max_tokens = rng.choice((6, 16, 64))
                tasks = [start(request(r, tokens, max_tokens, pause, **options)) for r in rigs]
                running.append(
                    (tasks, {"reset"} if any(not task.done() for task in resets) else set())
                )
            elif what < 0.7:
                others |= {start(prefetch(r.cache.prefetch(tokens))) for r in rigs}
            elif what < 0.76:
                wipe(rigs[who])
            elif what < 0.83:
                controller.accounts.evict([rng.randrange(8)])
            elif what < 0.9:
                for key in rng.sample(sorted(store.rows), len(store.rows) // 4):
                    del store.rows[key]
            elif what < 0.93 and running:
                tasks, disturbed = rng.choice(running)
                disturbed.add("cancelled")
                asyncio.get_running_loop().call_later(0.03, tasks[who].cancel)  # it has asked
            elif what < 0.94:
                for _tasks, disturbed in running:
                    disturbed.add("reset")
                resets |= {start(later(r.cache.reset)) for r in rigs}
            else:
                await asyncio.sleep(rng.choice((0.001, 0.05, 0.2)))
            if len(running) > 6:
                async with asyncio.timeout(20):
                    await compare_oldest()
        async with asyncio.timeout(20):
            while running:
                await compare_oldest()
            await on_all(*others, *resets)  # type: ignore[arg-type]
        await at_rest(rigs, barrier)
        barrier.check()
        reused = [how.prefix_len for how in compared if isinstance(how, Served)]
        assert len(reused) > 150
        assert sum(length > 0 for length in reused) > 50
