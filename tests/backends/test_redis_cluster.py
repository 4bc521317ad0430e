"""A real Cluster of two nodes: keys go where their slot is, also when it has moved, is moving, or
its node is gone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
import redis
from redis.crc import key_slot

from tests.backends.redis_helpers import KIB, MISSING, READ, Pages, opened
from tests.backends.redis_server import ValkeyServer, free_port
from tiered_cache.errors import BackendError
from tiered_cache.storage import WriteResult

WRITTEN, REFUSED = WriteResult.WRITTEN, WriteResult.REFUSED

NUM_SLOTS = 16384
HALF = NUM_SLOTS // 2


class Node(ValkeyServer):
    """A server in Cluster mode."""

    def __init__(self) -> None:
        self.bus_port = free_port()
        super().__init__(
            *("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"),
            *("--cluster-port", str(self.bus_port)),
        )


@dataclass
class Nodes:
    """Two primaries: the first has the lower half of the slots."""

    first: Node
    second: Node

    def clients(self) -> list[redis.Redis]:
        return [self.first.client(), self.second.client()]

    def form(self) -> None:
        one, two = self.clients()
        one.execute_command("CLUSTER", "SET-CONFIG-EPOCH", 1)
        two.execute_command("CLUSTER", "SET-CONFIG-EPOCH", 2)
        one.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, HALF - 1)
        two.execute_command("CLUSTER", "ADDSLOTSRANGE", HALF, NUM_SLOTS - 1)
        one.execute_command("CLUSTER", "MEET", "127.0.0.1", self.second.port, self.second.bus_port)
        self.wait_until_well()

    def wait_until_well(self) -> None:
        deadline = time.monotonic() + 15
        for client in self.clients():
            while not {"cluster_state:ok", "cluster_slots_ok:16384"} <= self._info(client):
                assert time.monotonic() < deadline
                time.sleep(0.02)

    @staticmethod
    def _info(client: redis.Redis) -> set[str]:
        with client:
            return {f"{key}:{value}" for key, value in client.cluster("INFO").items()}

    def ids(self) -> list[str]:
        return [bytes(each.execute_command("CLUSTER", "MYID")).decode() for each in self.clients()]

    def upper_half_to(self, taker: Node, giver: Node | None = None) -> None:
        """Without its keys, and without asking the giver if it is not there."""
        upper = HALF, NUM_SLOTS - 1
        for each in (giver, taker):
            if each is not None:
                with suppress(redis.ResponseError):  # it knows already
                    each.client().execute_command("CLUSTER", "DELSLOTSRANGE", *upper)
        taker.client().execute_command("CLUSTER", "ADDSLOTSRANGE", *upper)

    def give(self, slot: int, owner: int) -> None:
        """Its keys stay where they are."""
        owner_id = self.ids()[owner]
        clients = self.clients()
        for client in (clients[owner], clients[1 - owner]):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner_id)


async def answers(call: Awaitable[object]) -> bool:
    try:
        await call
    except BackendError:
        return False
    return True


@pytest.fixture(scope="module")
def formed() -> Iterator[Nodes]:
    with Node() as first, Node() as second:
        nodes = Nodes(first, second)
        nodes.form()
        yield nodes


@pytest.fixture
def nodes(formed: Nodes) -> Nodes:
    for client in formed.clients():
        with client:
            client.flushall()
    return formed


def of_slots(pages: Pages, lower: bool) -> list[int]:
    """Indexes of the pages whose slots are in one half."""
    return [
        index
        for index, name in enumerate(pages.names())
        if (key_slot(name.encode()) < HALF) == lower
    ]


async def test_keys_are_where_their_slots_are_and_answers_where_their_keys(nodes: Nodes) -> None:
    """Through either node; both keep their share; scan and clear see all of it."""
    pages, others = Pages.of(60, 16 * KIB), Pages.of(5, 4 * KIB, "swa")
    async with opened(nodes.second.url, cluster=True, max_batch=64 * KIB) as backend:
        assert await backend.write(pages.keys, pages.rows) == [WRITTEN] * 60
        assert await backend.write(others.keys, others.rows) == [WRITTEN] * 5
    async with opened(nodes.first.url, cluster=True) as backend:
        buffers = pages.buffers()
        assert await backend.read(pages.keys, buffers) == [READ] * 60
        assert buffers == pages.rows
        held = [client.dbsize() for client in nodes.clients()]
        assert sum(held) == 65
        assert min(held) > 10
        gone = random.Random(1).sample(range(60), 20)
        await backend.delete([pages.keys[index] for index in gone])
        there = [index not in gone for index in range(60)]
        assert await backend.contains(pages.keys) == there
        buffers = pages.buffers()
        results = await backend.read(pages.keys, buffers)
        assert results == [READ if here else MISSING for here in there]
        pages.prove(buffers, results)
        infos = [info async for page in backend.scan() for info in page]
        assert len(infos) == 45
        assert await backend.clear(pages.record.scope) == 40
        assert await backend.contains(others.keys) == [True] * 5


async def test_a_slot_that_has_moved_is_found_again(nodes: Nodes) -> None:
    """MOVED: the table is read anew, in the same call."""
    pages = Pages.of(20, 4 * KIB)
    index = of_slots(pages, lower=True)[0]
    slot = key_slot(pages.names()[index].encode())
    async with opened(nodes.first.url, cluster=True) as backend:
        await backend.contains(pages.keys)
        nodes.give(slot, owner=1)
        try:
            assert await backend.write(pages.keys, pages.rows) == [WRITTEN] * 20
            with nodes.second.client() as second:
                assert second.exists(pages.names()[index])
            buffers = pages.buffers()
            assert await backend.read(pages.keys, buffers) == [READ] * 20
            assert buffers == pages.rows
            with nodes.second.client() as second:
                second.delete(pages.names()[index])
        finally:
            nodes.give(slot, owner=0)
        assert await backend.read(pages.keys, buffers) == [
            MISSING if i == index else READ for i in range(20)
        ]


async def test_a_slot_that_is_moving_has_its_pages_missing(nodes: Nodes) -> None:
    """ASK: what is still there is read, what has gone ahead is missing for a while, and nothing is
    written between the two. No error, and the others do not notice."""
    pages = Pages.of(20, 4 * KIB)
    index = of_slots(pages, lower=True)[0]
    slot = key_slot(pages.names()[index].encode())
    first_id, second_id = nodes.ids()
    first, second = nodes.clients()
    async with opened(nodes.first.url, cluster=True) as backend:
        await backend.write(pages.keys, pages.rows)
        second.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", first_id)
        first.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", second_id)
        try:
            assert await backend.read(pages.keys, pages.buffers()) == [READ] * 20
            await backend.delete([pages.keys[index]])
            await backend.delete([pages.keys[index]])
            expected = [i != index for i in range(20)]
            assert await backend.contains(pages.keys) == expected
            results = await backend.write(pages.keys, pages.rows)
            assert results == [WRITTEN if here else REFUSED for here in expected]
            results = await backend.read(pages.keys, pages.buffers())
            assert results == [READ if here else MISSING for here in expected]
        finally:
            for client in (first, second):
                client.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
        assert await backend.write(pages.keys, pages.rows) == [WRITTEN] * 20


async def test_cancelled_calls_mix_nothing_up(nodes: Nodes) -> None:
    """B74, with the nodes of a Cluster."""
    pages = Pages.of(30, 16 * KIB)
    chance = random.Random(3)
    async with opened(nodes.first.url, cluster=True, max_batch=32 * KIB) as backend:
        await backend.write(pages.keys, pages.rows)
        for _ in range(100):
            some = pages.some(chance.sample(range(30), 6))
            buffers = some.buffers()
            call = asyncio.ensure_future(backend.read(some.keys, buffers))
            for _ in range(chance.randrange(8)):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        buffers = pages.buffers()
        assert await backend.read(pages.keys, buffers) == [READ] * 30
        assert buffers == pages.rows
        assert max(each.num_clients() for each in (nodes.first, nodes.second)) <= 8


async def test_a_node_that_is_gone_takes_only_its_own(nodes: Nodes) -> None:
    """Its keys are an error until it is back; those of the other are hits all the time."""
    pages = Pages.of(20, 4 * KIB)
    lower, upper = (pages.some(of_slots(pages, lower)) for lower in (True, False))
    async with opened(nodes.second.url, cluster=True, connect_timeout=1) as backend:
        await backend.write(pages.keys, pages.rows)
        nodes.second.kill()
        for _ in range(2):
            with pytest.raises(BackendError, match="redis at"):
                await backend.read(upper.keys, upper.buffers())
            assert await backend.read(lower.keys, lower.buffers()) == [READ] * len(lower.keys)
        nodes.second.start()
        nodes.wait_until_well()
        assert await backend.read(upper.keys, upper.buffers()) == [MISSING] * len(upper.keys)
        assert await backend.write(pages.keys, pages.rows) == [WRITTEN] * 20


async def test_slots_that_another_node_has_taken_over(nodes: Nodes) -> None:
    """As after the failure of a primary, with a backend that stays open all the time. The node
    that has nothing any more is left in peace."""
    pages = Pages.of(20, 4 * KIB)
    async with opened(nodes.first.url, cluster=True, connect_timeout=1) as backend:
        await backend.write(pages.keys, pages.rows)
        nodes.second.kill()
        nodes.upper_half_to(nodes.first)
        with pytest.raises(BackendError):
            await backend.write(pages.keys, pages.rows)
        assert await backend.write(pages.keys, pages.rows) == [WRITTEN] * 20
        assert nodes.first.client().dbsize() == 20
        nodes.second.start()  # and claims what it had, by its higher epoch
        nodes.wait_until_well()
        assert await backend.write(pages.keys, pages.rows) == [WRITTEN] * 20
        assert nodes.second.num_clients() == 1
        nodes.upper_half_to(nodes.first, nodes.second)
        while not await answers(backend.contains(pages.keys)):
            await asyncio.sleep(0.01)
        while nodes.second.num_clients():
            await asyncio.sleep(0.001)
    nodes.upper_half_to(nodes.second, nodes.first)
    nodes.wait_until_well()


async def test_the_option_has_to_fit_the_server(nodes: Nodes) -> None:
    pages = Pages.of(20, 4 * KIB)
    async with opened(nodes.first.url) as backend:
        with pytest.raises(BackendError, match="set `cluster: true`"):
            await backend.read(pages.keys, pages.buffers())
    with ValkeyServer() as alone, pytest.raises(BackendError, match="set `cluster: false`"):
        async with opened(alone.url, cluster=True):
            pass
    with pytest.raises(BackendError, match="no connection to redis at"):
        async with opened(alone.url, cluster=True):
            pass


async def test_a_cluster_without_all_its_slots_says_which_one_is_missing() -> None:
    """Until somebody serves it: then it is found."""
    with Node() as only:
        with only.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 10)
        async with opened(only.url, cluster=True) as backend:
            pages = Pages.of(20, 4 * KIB)
            for _ in range(2):
                with pytest.raises(BackendError, match=r"no node of the Cluster serves slot \d+"):
                    await backend.contains(pages.keys)
            with only.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 11, NUM_SLOTS - 1)
            while not await answers(backend.contains(pages.keys)):
                await asyncio.sleep(0.01)
