"""The redis backend on a real server: what it keeps, under which names, and what it says of it."""

from __future__ import annotations

import asyncio
import mmap
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.redis_helpers import CORRUPT, KIB, MIB, MISSING, READ, IoThreads, Pages, opened
from tests.backends.redis_proxy import Proxy
from tests.backends.redis_server import ValkeyServer
from tiered_cache.errors import ClosedError, WrongThreadError
from tiered_cache.storage import BackendStats, ObjectKey, WriteResult
from tiered_cache_redis import RedisBackend, RedisOptions

WRITTEN, REFUSED = WriteResult.WRITTEN, WriteResult.REFUSED


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as started:
        yield started


@pytest.mark.parametrize("row_bytes", [4 * KIB, 64 * KIB, 256 * KIB + 4096, 2 * MIB])
async def test_rows_come_back_as_they_were(server: ValkeyServer, row_bytes: int) -> None:
    """Also to somebody who has never written: another process sees the same server."""
    pages = Pages.of(7, row_bytes)
    async with opened(server.url) as backend:
        assert await backend.write(pages.keys, pages.rows) == [WRITTEN] * 7
    async with opened(server.url) as backend:
        buffers = pages.buffers()
        assert await backend.read(pages.keys, buffers) == [READ] * 7
        assert buffers == pages.rows
        assert await backend.read([], []) == []
        assert await backend.write([], []) == []


async def test_what_is_missing_shifts_nothing(server: ValkeyServer) -> None:
    """B72: answers and buffers stand where their keys do."""
    pages = Pages.of(5)
    async with opened(server.url) as backend:
        await backend.write(pages.keys, pages.rows)
        assert await backend.contains(pages.keys) == [True] * 5
        await backend.delete([pages.keys[2]])
        assert await backend.contains(pages.keys) == [True, True, False, True, True]
        buffers = pages.buffers()
        assert await backend.read(pages.keys, buffers) == [READ, READ, MISSING, READ, READ]
        assert [verdict is None for verdict in pages.verdicts(buffers)] == [1, 1, 0, 1, 1]
        await backend.delete(pages.keys)  # what is not there is fine
        assert await backend.contains(pages.keys) == [False] * 5


@pytest.mark.parametrize("row_bytes", [4 * KIB, 300 * KIB])
async def test_a_value_of_another_length_is_corrupt_and_its_neighbours_are_not(
    server: ValkeyServer, row_bytes: int
) -> None:
    """B79: empty, cut short, too long, or not even a string. Writing mends each."""
    pages = Pages.of(6, row_bytes)
    pages.put(server.client())
    with server.client() as other:
        empty, short, long, a_list, *_ = pages.names()
        other.set(empty, b"")
        other.set(short, bytes(pages.rows[1])[:-1])
        other.set(long, bytes(pages.rows[2]) * 3)
        other.delete(a_list)
        other.rpush(a_list, b"x")
    async with opened(server.url) as backend:
        for _ in range(2):  # and the connection stays in step
            buffers = pages.buffers()
            assert await backend.read(pages.keys, buffers) == [CORRUPT] * 4 + [READ] * 2
            assert buffers[4:] == pages.rows[4:]
        assert await backend.write(pages.keys, pages.rows) == [WRITTEN] * 6
        assert await backend.read(pages.keys, buffers) == [READ] * 6
        assert buffers == pages.rows


async def test_flipped_bytes_pass_the_backend_and_not_the_record(server: ValkeyServer) -> None:
    """The right length with wrong bytes is what checksums are for."""
    pages = Pages.of(3)
    pages.put(server.client())
    server.client().setrange(pages.names()[1], 5000, b"!")
    async with opened(server.url) as backend:
        buffers = pages.buffers()
        assert await backend.read(pages.keys, buffers) == [READ] * 3
        assert pages.verdicts(buffers) == [None, "does not match its checksum", None]


async def test_arrivals_are_told_while_they_are_hot(server: ValkeyServer) -> None:
    """In steps of 256 KiB, by the thread that has just written them, each after its bytes."""
    pages = Pages.of(3, 700 * KIB)
    pages.put(server.client())
    buffers = pages.buffers()
    told: list[tuple[int, int]] = []

    def arrived(index: int, stop: int) -> None:
        assert threading.current_thread().name.startswith("tiered-cache-backend-test")
        assert buffers[index][:stop] == pages.rows[index][:stop]
        told.append((index, stop))

    async with opened(server.url, max_batch=1400 * KIB) as backend:  # two of them
        await backend.read(pages.keys, buffers, arrived)
    steps = [256 * KIB, 512 * KIB, 700 * KIB]
    assert told == [(index, stop) for index in range(3) for stop in steps]


async def test_an_exception_of_the_listener_comes_out_and_spoils_nothing(
    server: ValkeyServer,
) -> None:
    """The connection under way is given up: half an answer is still on it."""
    pages = Pages.of(4)
    pages.put(server.client())

    def arrived(index: int, stop: int) -> None:
        if index == 1:
            raise RuntimeError("of the listener")

    async with opened(server.url, connections=1) as backend:
        buffers = pages.buffers()
        with pytest.raises(RuntimeError, match="of the listener"):
            await backend.read(pages.keys, buffers, arrived)
        assert await backend.read(pages.keys, buffers) == [READ] * 4
        assert buffers == pages.rows


async def test_two_writers_of_the_same_pages_both_succeed(server: ValkeyServer) -> None:
    """B78: they write the same bytes."""
    pages = Pages.of(34)
    async with opened(server.url) as one, opened(server.url) as two:
        both = await asyncio.gather(*(each.write(pages.keys, pages.rows) for each in (one, two)))
        assert both == [[WRITTEN] * 34] * 2
        buffers = pages.buffers()
        assert await one.read(pages.keys, buffers) == [READ] * 34
        assert buffers == pages.rows


async def test_clear_takes_one_scope_and_nothing_else(server: ValkeyServer) -> None:
    """Other scopes, other prefixes and what merely looks similar stay."""
    full, swa = Pages.of(1200, 4 * KIB), Pages.of(3, 4 * KIB, "swa")
    scope = full.record.scope
    foreign = [
        "another:program",
        f"tiered-cache:{scope.hex()}:not-a-page",
        f"tiered-cache:{scope.hex()}",
        f"x:{full.names()[0]}",
        full.names("tiered-cacheX")[0],
    ]
    with server.client() as other:
        other.mset(dict.fromkeys(foreign, b"mine"))
    async with opened(server.url) as backend:
        await backend.write(full.keys, full.rows)
        await backend.write(swa.keys, swa.rows)
        assert await backend.clear(scope) == 1200
        assert await backend.clear(scope) == 0
        assert await backend.contains(swa.keys) == [True] * 3
    with server.client() as other:
        assert other.dbsize() == len(foreign) + 3


@pytest.mark.parametrize("prefix", ["", "a*b:", "[x]?", "back\\slash^"])
async def test_a_prefix_is_text_and_no_pattern(server: ValkeyServer, prefix: str) -> None:
    pages = Pages.of(4, 4 * KIB)
    others = pages.names("aXXb:") + pages.names("xy")
    with server.client() as other:
        other.mset(dict.fromkeys(others, b"mine"))
        async with opened(server.url, prefix=prefix) as backend:
            await backend.write(pages.keys, pages.rows)
            assert other.exists(*pages.names(prefix)) == 4
            assert {info.key async for page in backend.scan() for info in page} == set(pages.keys)
            assert await backend.clear(pages.record.scope) == 4
        assert other.dbsize() == len(others)


async def test_a_scan_shows_sizes_and_ages_and_is_not_a_use(server: ValkeyServer) -> None:
    """Else looking at a cache would make all of it equally young."""
    full, swa = Pages.of(700, 4 * KIB), Pages.of(2, 8 * KIB, "swa")
    with server.client() as other:
        async with opened(server.url) as backend:
            await backend.write(full.keys, full.rows)
            await backend.write(swa.keys, swa.rows)
            everything = [info async for page in backend.scan() for info in page]
            assert {info.key: info.num_bytes for info in everything} == dict.fromkeys(
                full.keys, 4 * KIB
            ) | dict.fromkeys(swa.keys, 8 * KIB)
            # The server counts whole seconds.
            while other.object("idletime", swa.names()[0]) < 1:
                await asyncio.sleep(0.05)
            for _ in range(2):
                ages = [i.age_s async for page in backend.scan(swa.record.scope) for i in page]
                assert all(age is not None and age >= 1 for age in ages)
                assert len(ages) == 2
            other.config_set("maxmemory-policy", "allkeys-lfu")  # keeps no ages
            infos = [i async for page in backend.scan(swa.record.scope) for i in page]
            assert [info.age_s for info in infos] == [None] * 2


async def test_it_does_not_guess_what_the_server_holds(server: ValkeyServer) -> None:
    async with opened(server.url) as backend:
        assert backend.stats() == BackendStats(None, None, None)


async def test_a_row_that_no_value_can_hold_is_refused(server: ValkeyServer) -> None:
    """Sent, it would cost the connection. The others of its call are written."""
    giant = memoryview(mmap.mmap(-1, (512 << 20) + 1))  # never touched
    pages = Pages.of(2)
    key = ObjectKey(bytes(48))
    async with opened(server.url) as backend:
        results = await backend.write(
            [pages.keys[0], key, pages.keys[1]], [pages.rows[0], giant, pages.rows[1]]
        )
        assert results == [WRITTEN, REFUSED, WRITTEN]
        assert await backend.contains([*pages.keys, key]) == [True, True, False]


# --- Options: each changes something that can be seen --------------------------------------------


async def test_ttl_is_when_a_page_is_forgotten(server: ValkeyServer) -> None:
    """Counted from the last time it was written; without, never."""
    pages = Pages.of(2)
    name = pages.names()[0]
    with server.client() as other:
        async with opened(server.url) as backend:
            await backend.write(pages.keys, pages.rows)
            assert other.ttl(name) == -1
        async with opened(server.url, ttl=100) as backend:
            await backend.write(pages.keys, pages.rows)
            assert [99_000 < other.pttl(name) <= 100_000 for name in pages.names()] == [True] * 2
            other.pexpire(name, 5_000)
            await backend.write(pages.keys, pages.rows)
            assert other.pttl(name) > 99_000
            other.pexpire(name, 1)
            while other.exists(name):
                await asyncio.sleep(0.001)
            assert await backend.read(pages.keys, pages.buffers()) == [MISSING, READ]


async def test_max_batch_bounds_a_round_trip(server: ValkeyServer) -> None:
    """Also for rows that are larger than that: these go alone."""
    pages = Pages.of(9, 256 * KIB)
    for max_batch, num_trips in ((512 * KIB, 5), ("2MiB", 2), (1, 9)):
        threads = IoThreads()
        async with opened(server.url, context=threads, max_batch=max_batch) as backend:
            before = threads.num_runs
            await backend.write(pages.keys, pages.rows)
            assert threads.num_runs - before == num_trips
            await backend.read(pages.keys, pages.buffers())
            assert threads.num_runs - before == 2 * num_trips


@pytest.mark.parametrize(("connections", "num_threads", "most"), [(2, 8, 2), (8, 3, 3)])
async def test_connections_bounds_how_many_there_are(
    server: ValkeyServer, connections: int, num_threads: int, most: int
) -> None:
    """B76: who comes when all are taken waits, and all succeed."""
    pages = Pages.of(4)
    pages.put(server.client())
    async with opened(server.url, num_threads=num_threads, connections=connections) as backend:
        buffers = [pages.buffers() for _ in range(100)]
        results = await asyncio.gather(*(backend.read(pages.keys, each) for each in buffers))
        assert results == [[READ] * 4] * 100
        assert all(each == pages.rows for each in buffers)
        assert server.num_clients() == most
    while server.num_clients():  # closed, and the server has noticed
        await asyncio.sleep(0.001)


async def test_a_database_and_a_user_come_from_the_url(server: ValkeyServer) -> None:
    """The user of the documentation may do all that is needed."""
    pages = Pages.of(2)
    text = (Path(__file__).parents[2] / "docs" / "backends" / "redis.md").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("ACL SETUSER cache")]
    with server.client() as other:
        other.execute_command(*line.replace(">password", ">p@ss/word").split())
    url = f"redis://cache:p%40ss%2Fword@127.0.0.1:{server.port}/3"
    async with opened(url) as backend:
        await backend.write(pages.keys, pages.rows)
        assert await backend.read(pages.keys, pages.buffers()) == [READ] * 2
        [infos] = [page async for page in backend.scan()]
        assert all(info.age_s is not None for info in infos)
        assert len(infos) == 2
        assert await backend.clear(pages.record.scope) == 2
        await backend.write(pages.keys, pages.rows)
    with server.client(db=3) as other:
        assert other.dbsize() == 2


async def test_a_unix_socket_will_do(server: ValkeyServer) -> None:
    pages = Pages.of(3, MIB)
    async with opened(f"unix://{server.socket}?db=1") as backend:
        await backend.write(pages.keys, pages.rows)
        buffers = pages.buffers()
        assert await backend.read(pages.keys, buffers) == [READ] * 3
        assert buffers == pages.rows
    with server.client(db=1) as other:
        assert other.dbsize() == 3


# --- Where it may be used -------------------------------------------------------------------------


def test_another_event_loop_needs_another_backend(server: ValkeyServer) -> None:
    """B76: a fresh one works, the old one says what is wrong, and neither hangs."""
    pages = Pages.of(2)
    pages.put(server.client())
    left: list[RedisBackend] = []

    async def first() -> None:
        backend = await RedisBackend.open(RedisOptions(url=server.url), IoThreads())
        left.append(backend)
        assert await backend.read(pages.keys, pages.buffers()) == [READ] * 2

    async def second() -> None:
        for use in (left[0].contains(pages.keys), left[0].clear(pages.record.scope)):
            with pytest.raises(WrongThreadError, match="another event loop"):
                await use
        async with opened(server.url) as backend:
            assert await backend.read(pages.keys, pages.buffers()) == [READ] * 2
        await left[0].aclose()

    asyncio.run(first())
    asyncio.run(second())
    left[0]._context.executor.shutdown()


async def test_closed_is_closed(server: ValkeyServer) -> None:
    async with opened(server.url) as backend:
        await backend.aclose()
        await backend.aclose()
        with pytest.raises(ClosedError):
            await backend.contains([ObjectKey(bytes(48))])


async def test_a_connection_that_broke_while_idle_is_nobodys_error(server: ValkeyServer) -> None:
    """A firewall or a time limit of the server has closed it: the next call opens another one."""
    pages = Pages.of(2)
    with Proxy(server.port) as proxy:
        async with opened(proxy.url, connections=1) as backend:
            await backend.write(pages.keys, pages.rows)
            assert proxy.connected == 1
            proxy.cut()
            assert await backend.read(pages.keys, pages.buffers()) == [READ] * 2
            assert proxy.connected == 2


def test_without_redis_py_it_says_what_to_install() -> None:
    """The import of the plug-in is where it shows; nothing else of the library needs it."""
    code = "import sys; sys.modules['redis'] = None; import tiered_cache; import tiered_cache_redis"
    paths = [path for path in sys.path if path]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}; {code}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 1
    assert "ImportError" in run.stderr
    assert "pip install 'tiered-cache[redis]'" in run.stderr
