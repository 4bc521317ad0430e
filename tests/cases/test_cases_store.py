"""Cases of the way out, device to host: splits under a copy, chunks, refusals, hosts that are too
small, ancestors, order, and how much may be in flight. The numbers are the project's."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from tests.case_helpers import (
    PAGE_SIZES,
    POLICIES,
    Copies,
    Tiers,
    Watch,
    seeded,
    seeded_executors,
    tiers,
    unreachable,
)
from tests.lease_helpers import start, turns
from tiered_cache import LoadFailed
from tiered_cache.transfer import copier
from tiered_cache.transfer.copier import Direction
from tiered_cache.transfer.cpu import CpuCopier


def is_store(job: Any) -> bool:
    return bool(job.direction is Direction.STORE)


async def used(r: Tiers, tokens: list[int], **options: Any) -> None:
    """Serve a prompt as often as the policy wants before it copies."""
    await r.serve(tokens, **options)
    if r.policy == "write_through_selective":
        await r.serve(tokens, **options)


async def make_room(r: Tiers) -> None:
    """Somebody needs the whole device, and gets it."""
    async with r.cache.lease(r.prompt("Y", r.pool.capacity - 1)) as lease:
        lease.allocate(len(lease))
    await r.cache.drain()


# --- splits under a copy --------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moves_at", ["start", "end"])
@pytest.mark.parametrize("cuts", [[2], [1], [3, 1], [1, 3], [2, 3, 1]], ids=str)
async def test_b36_a_node_is_split_while_its_copy_is_pending(
    page_size: int, policy: str, moves_at: Any, cuts: list[int]
) -> None:
    """B36: A's four pages are on their way to the host, others leave A at one page or several: all
    parts of A end up there, and the others' own, in right bytes."""
    copies = Copies(moves_at=moves_at)
    async with tiers(40, 40, page_size=page_size, policy=policy, copies=copies) as r:
        tokens = r.prompt("A", 4)
        forks = [r.fork("A", cut, name) for cut, name in zip(cuts, "BCD", strict=False)]
        early = [await r.lease(fork) for fork in forks]  # they have not seen A
        copies.shut()
        await used(r, tokens)
        needy = None
        if policy == "write_back":
            room = r.pool.free + r.pool.evictable - r.pool.unspent
            needy = start(r.lease(r.prompt("Z", room - 1)))
        await turns()
        assert r.host.in_flight == 4
        for lease in early:
            chunk = lease.allocate(len(lease) - 1)
            await lease.run(r.model, chunk)
            lease.commit(chunk)
            r.cache.check_integrity()
        assert {node.start for node in r.cache.tree.nodes()} >= {cut * page_size for cut in cuts}
        for lease in early:
            lease.close()
        copies.open()
        if needy is not None:
            (await needy).close()
        await r.cache.drain()
        assert r.mirrored(tokens) == 4
        await make_room(r)
        once = policy == "write_through_selective"  # a fork's own page was used only once
        for fork, cut in zip(forks, cuts, strict=True):
            assert r.have(fork[:-1]) == (0, cut if once else cut + 1)
        assert r.have(tokens[:-1]) == (0, 4)
        r.spoil_free_pages()
        assert await r.serve(tokens) == 4 * page_size
        await r.settled()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("moves_at", ["start", "end"])
@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_b37_a_source_is_not_handed_out_while_it_is_read(
    page_size: int, moves_at: Any, cut: int
) -> None:
    """B37, device to host: A is split while the copier reads it, and others want the whole device:
    nobody gets A's pages before the gate opens, and the host gets A's bytes."""
    async with tiers(8, page_size=page_size, copies=Copies(moves_at=moves_at)) as r:
        tokens = r.prompt("A", 4)
        r.copies.shut()
        await r.serve(tokens)
        await turns()
        source = r.pages_on_device(tokens)
        assert len(source) == 4
        async with r.cache.lease(r.fork("A", cut, "X")) as lease:
            await r.compute(lease)
        assert r.pool.free + r.pool.evictable == 4
        whole = start(r.lease(r.prompt("B", 7)))
        await turns()
        assert not whole.done()
        r.spoil_free_pages()
        assert source.isdisjoint(r.cache._parts.allocators[0].free_ids().tolist())
        r.copies.open()
        other = await whole
        await r.compute(other)
        other.close()
        await r.settled()
        assert r.mirrored(tokens) == 4
        assert await r.serve(tokens) == 4 * page_size


# --- chunks, refusals and repairs -----------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("chunk_pages", [0.5, 1, 2.5, 4, 10])
async def test_b40_a_chunked_prompt_is_backed_up_like_a_whole_one(
    page_size: int, policy: str, chunk_pages: float
) -> None:
    """B40: five prompts of ten pages in chunks, the host has room for twelve: after each, all ten
    of it are there, and they survive the device."""
    step = max(1, int(chunk_pages * page_size))
    async with tiers(16, 12, page_size=page_size, policy=policy) as r:
        for name in "ABCDE":
            tokens = r.prompt(name, 10)
            for _ in range(1 + (policy == "write_through_selective")):
                async with r.cache.lease(tokens) as lease:
                    await r.compute(lease, step)
            await r.settled()
            assert r.mirrored(tokens) == 10, name
            r.demote()
            assert await r.serve(tokens) == 10 * page_size
            await r.cache.drain()
            r.demote()  # its rows may go when the next one needs them


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("fails_at", [0, 1, 4, 7])
async def test_b40_what_a_failed_copy_has_left_out_is_repaired_at_the_next_use(
    page_size: int, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B40: the copy of one page fails once; what came before it stays, it is counted, and the next
    request for the prompt makes up for it, and for all behind it."""
    monkeypatch.setattr(copier, "JOB_BYTES", 1)
    async with tiers(16, page_size=page_size) as r:
        tokens, stores = r.prompt("A", 8), iter(range(1000))
        error = OSError("once")
        r.fault = lambda job: error if is_store(job) and next(stores) == fails_at else None
        await r.serve(tokens)
        await r.settled()
        assert r.mirrored(tokens) == fails_at
        assert r.counters.stores_failed == 1
        await r.serve(tokens)
        await r.settled()
        assert r.mirrored(tokens) == 8
        assert r.counters.pages_stored == 8


@pytest.mark.parametrize("page_size", PAGE_SIZES)
async def test_b40_what_a_full_host_has_refused_is_repaired_at_the_next_use(page_size: int) -> None:
    """B40: the host is full of what a load is reading; the store is refused in part and counted;
    later the rest follows."""
    async with tiers(24, 8, page_size=page_size) as r:
        first, second = r.prompt("A", 6), r.prompt("B", 4)
        await r.host_only(first)
        r.copies.shut()
        load = start(r.lease(first))
        await turns()
        await r.serve(second)
        await turns()
        assert r.counters.stores_refused >= 1
        r.copies.open()
        (await load).close()
        await r.settled()
        assert r.mirrored(second) == 2
        r.demote()
        await r.serve(second)
        await r.settled()
        assert r.mirrored(second) == 4


# --- the host's contents --------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_b41_no_host_page_without_its_ancestors(page_size: int, policy: str, seed: int) -> None:
    """B41: random trees, small tiers, random delays and copies that fail: at every event each host
    page has all its ancestors on the host or the device, and in the end every one can be found."""

    async def main() -> None:
        watch = Watch()
        chance = random.Random(seed)
        executors = seeded_executors(
            num_threads=2,
            fault=lambda job: OSError("sometimes") if chance.random() < 0.05 else None,
        )
        options = {**executors, "observers": [watch]}
        copies = executors["copy_executor"]
        async with tiers(
            14, 9, page_size=page_size, policy=policy, options=options, copies=copies
        ) as r:
            watch.tree = r.cache.tree

            async def client(number: int) -> None:
                rng = random.Random(1000 * seed + number)
                for _ in range(60):
                    tokens = random_prompt(rng, page_size)
                    await r.serve(tokens, load_timeout=rng.choice([None, 0.0, 0.05, 0.5]))
                    r.cache.check_integrity()
                    assert watch.faults == []

            await asyncio.gather(*map(client, range(4)))
            await r.cache.drain()
            watch.check()
            assert unreachable(r) == []
            assert r.counters.pages_stored > 20
            assert watch.met["removed host"] > 5

    seeded(main, seed)


def random_prompt(rng: random.Random, page_size: int) -> list[int]:
    """Two stems that fork at each page, up to five pages long."""
    tokens = [rng.randint(0, 1)] * page_size
    for _ in range(rng.randint(0, 4)):
        tokens += [rng.choice([2, 2, 3])] * page_size
    return [*tokens, 9]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("pages", "host_pages", "length"), [(16, 8, 2), (16, 4, 1), (9, 3, 3)])
async def test_b43_a_host_smaller_than_the_device_works(
    page_size: int, policy: str, pages: int, host_pages: int, length: int
) -> None:
    """B43: a hundred distinct prompts; mirrors do not block the host for ever: what comes late is
    still stored, and with write_back both tiers together hold the latest ones."""
    async with tiers(pages, host_pages, page_size=page_size, policy=policy) as r:
        prompts = [r.prompt("A", (n + 1) * length, n * length) for n in range(100)]
        stored = []
        for number, tokens in enumerate(prompts):
            before = r.counters.pages_stored
            await used(r, tokens)
            if number % 4 == 3:
                await r.settled()
            stored.append(r.counters.pages_stored - before)
        assert sum(stored[-20:]) >= host_pages
        whole = [tokens for tokens in prompts if sum(r.have(tokens[:-1])) == length]
        if policy == "write_back":
            assert len(whole) >= (pages - 1) // length + host_pages // length - 1
            assert whole == prompts[-len(whole) :]
        demoted = [tokens for tokens in whole if r.have(tokens[:-1]) == (0, length)]
        for tokens in demoted[-1:] if host_pages > length else []:  # else it may need its own rows
            assert await r.serve(tokens) == length * page_size
        await r.settled()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("pages", "host_pages", "length"), [(16, 4, 1), (16, 8, 2), (12, 64, 2)])
@pytest.mark.parametrize("clients", [1, 4])
async def test_b43_write_back_copies_once_what_the_device_gives_up(
    page_size: int, pages: int, host_pages: int, length: int, clients: int
) -> None:
    """B43: room for one victim's copy is not made of the next one's, or they would take turns."""
    async with tiers(pages, host_pages, page_size=page_size, policy="write_back") as r:

        async def client(first: int) -> None:
            for number in range(first, first + 100 // clients):
                await r.serve(r.prompt("A", (number + 1) * length, number * length))

        await asyncio.gather(*[client(200 * number) for number in range(clients)])
        await r.settled()
        assert 0 < r.counters.pages_stored <= 1.1 * r.counters.pages_evicted


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "num_threads", "steps"),
    [
        ("write_through", 2, 2000),
        ("write_back", 2, 400),
        ("write_through_selective", 2, 400),
        ("write_through", 1, 400),
        ("write_back", 1, 400),
    ],
)
def test_b45_no_order_of_copies_mixes_up_bytes(
    policy: str, num_threads: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B45: two thousand requests over 8 + 8 pages (400 for others of the kind), copies with random
    delays in one thread or two at a time, each reading and writing at its start or its end: no
    model reads a wrong byte."""
    monkeypatch.setattr(CpuCopier, "num_threads", num_threads)
    monkeypatch.setattr(copier, "JOB_BYTES", 1)

    async def main() -> None:
        executors = seeded_executors(num_threads=num_threads, durations=(0.0, 0.0, 0.1, 0.7, 3.0))
        copies = executors["copy_executor"]
        async with tiers(8, 8, policy=policy, options=executors, copies=copies, run_threads=2) as r:

            async def client(number: int) -> None:
                rng = random.Random(number)
                for _ in range(steps // 4):
                    name = rng.choice("AAB")
                    tokens = r.prompt(name, rng.randint(1, 4))
                    if rng.random() < 0.4:
                        tokens = r.fork(name, rng.randint(0, 2), rng.choice("XY"))
                    layerwise = rng.random() < 0.3
                    await serve(r, tokens, layerwise, rng.choice([None, None, None, 0.05, 0.2]))

            await asyncio.gather(*map(client, range(4)))
            await r.cache.drain()
            r.check()
            counters = r.counters
            assert counters.pages_loaded > steps // 50, counters
            assert counters.pages_stored > steps // 20, counters
            assert counters.loads_joined + (steps < 2000) > 0, counters

    seeded(main)


async def serve(r: Tiers, tokens: list[int], layerwise: bool, load_timeout: float | None) -> None:
    async with r.cache.lease(tokens, layerwise=layerwise, load_timeout=load_timeout) as lease:
        with contextlib.suppress(LoadFailed):  # one that was joined and given up by others
            for layer in (0, 1):
                await lease.wait_layer(layer)
        r.oracle.verify(lease, lease.key, 0, lease.prefix_len)
        await r.compute(lease)
    r.cache.check_integrity()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
async def test_b45_pages_are_read_only_when_their_device_is_ready(
    page_size: int, policy: str
) -> None:
    """B45, a device that computes on after the commit: the source changes until `ready` is set, and
    the host has the final bytes."""
    async with tiers(8, page_size=page_size, policy=policy) as r:
        tokens, ready = r.prompt("A", 4), asyncio.Event()
        async with r.cache.lease(tokens) as lease:
            chunk = lease.allocate(len(tokens) - 1)
            await lease.run(lambda _: None, chunk)
            lease.commit(chunk, ready=ready)
            pages = lease.pages["full"][:4].copy()
            r.oracle.spoil("full", pages)
        if policy == "write_through_selective":
            async with r.cache.lease(tokens):
                pass
        room = start(r.lease(r.prompt("B", 7))) if policy == "write_back" else None
        for _ in range(5):
            await turns()
            assert r.host.in_flight == r.counters.pages_stored == 0
            r.oracle.spoil("full", pages)
        r.oracle.write(Slots(pages, page_size), lease.key, 0, 4 * page_size)
        ready.set()
        if room is not None:
            (await room).close()
        await r.settled()
        assert r.mirrored(tokens) == 4


class Slots:
    """Pages as slots."""

    def __init__(self, pages: Any, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size

    def slots(self, component: str = "full", start: int = 0, stop: int | None = None) -> Any:
        size = self.page_size
        return (self.pages[:, None].astype("int64") * size + range(size)).ravel()[start:stop]
