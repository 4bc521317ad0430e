"""What a real server does when it is unwell, and what the backend makes of it: errors in bounded
time, no half row, and hits again as soon as the server is back."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.backends.redis_helpers import CORRUPT, KIB, MIB, MISSING, READ, IoThreads, Pages, opened
from tests.backends.redis_proxy import Proxy
from tests.backends.redis_server import ValkeyServer, free_port
from tiered_cache.errors import BackendError
from tiered_cache.storage import ObjectKey, ReadResult, WriteResult
from tiered_cache_redis.wire import ErrorReply, Wire

WRITTEN, REFUSED = WriteResult.WRITTEN, WriteResult.REFUSED


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as started:
        yield started


@pytest.fixture
def proxy(server: ValkeyServer) -> Iterator[Proxy]:
    with Proxy(server.port) as between:
        yield between


async def test_nobody_there_is_an_error_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(
        BackendError, match=r"no connection to redis at 127\.0\.0\.1:\d+: .*refused"
    ):
        async with opened(f"redis://127.0.0.1:{free_port()}"):
            pass
    assert time.monotonic() - started < 1  # and not after ten hidden retries


async def test_a_connection_that_does_not_come_about_ends_by_its_limit() -> None:
    """A listener whose queue is full does not answer at all, like a host behind a firewall."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listening.getsockname())
        started = time.monotonic()
        port = listening.getsockname()[1]
        with pytest.raises(BackendError, match=r"`connect_timeout` is 0\.2 s"):
            async with opened(f"redis://127.0.0.1:{port}", connect_timeout=0.2, stall_timeout=9):
                pass
        assert 0.15 < time.monotonic() - started < 2
        for each in waiting:
            each.close()


async def test_there_are_no_hidden_retries(server: ValkeyServer, proxy: Proxy) -> None:
    """One call, one try, whatever has gone wrong: who waits for it has better things to do."""
    pages = Pages.of(2)
    async with opened(proxy.url, connections=1) as backend:
        proxy.cut_after(1)
        with pytest.raises(BackendError):
            await backend.read(pages.keys, pages.buffers())
        assert proxy.connected == 1
        server.kill()
        for connected in (2, 3, 4):
            with pytest.raises(BackendError):
                await backend.read(pages.keys, pages.buffers())
            assert proxy.connected == connected


class Impostor:
    """Something that answers to the greetings of a client, and then as it was told to."""

    def __init__(self, greeting: bytes, answer: bytes) -> None:
        self._greeting, self._answer = greeting, answer

    def __enter__(self) -> str:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return f"redis://127.0.0.1:{self._listening.getsockname()[1]}"

    def __exit__(self, *exc: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                with client, suppress(OSError):
                    while asked := client.recv(10_000):
                        gets = asked.count(b"GET\r\n")
                        client.sendall(self._answer * gets if gets else self._greeting)


async def test_what_is_no_redis_is_said_to_be_none() -> None:
    with (
        Impostor(b"HTTP/1.1 400 Bad Request\r\n\r\n", b"") as url,
        pytest.raises(BackendError, match="no connection to redis"),
    ):
        async with opened(url):
            pass


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"+OK\r\n", "something other than a value"),
        (b"$5\r\nabcdefg\r\n", "a value longer than it said"),
        (b"$4\r\nabcd\r\n+OK\r\n", "more than it was asked for"),
        (b"!what\r\n", "something other than a value"),
    ],
)
async def test_an_answer_that_is_none_ends_the_connection(answer: bytes, said: str) -> None:
    """What comes after it would be taken for the answer to something else."""
    key = ObjectKey(bytes(48))
    with Impostor(b"+PONG\r\n", answer) as url:
        async with opened(url, connections=1) as backend:
            for _ in range(3):
                with pytest.raises(BackendError, match=said):
                    await backend.read([key], [memoryview(bytearray(4 + answer.startswith(b"$5")))])


async def test_killed_in_a_batch_and_started_again_empty(
    server: ValkeyServer, proxy: Proxy
) -> None:
    """B76: an error, then misses, then hits; nothing of ours is restarted."""
    pages = Pages.of(16, MIB)
    async with opened(proxy.url) as backend:
        await backend.write(pages.keys, pages.rows)
        proxy.delay_s = 0.005
        buffers = pages.buffers()
        reading = asyncio.ensure_future(backend.read(pages.keys, buffers))
        seen = proxy.answered
        while proxy.answered < seen + 2 * MIB:
            await asyncio.sleep(0.001)
        server.kill()
        with pytest.raises(BackendError, match=r"the connection to redis at .* broke: .*closed"):
            await reading
        proxy.delay_s = 0.0
        for use in (backend.read(pages.keys, buffers), backend.write(pages.keys, pages.rows)):
            with pytest.raises(BackendError):
                await use
        server.start()
        assert await backend.read(pages.keys, buffers) == [MISSING] * 16
        assert await backend.write(pages.keys, pages.rows) == [WRITTEN] * 16
        assert await backend.read(pages.keys, buffers) == [READ] * 16
        assert buffers == pages.rows


async def test_killed_while_it_is_written_to(server: ValkeyServer) -> None:
    pages = Pages.of(32, 2 * MIB)
    threads = IoThreads()
    async with opened(server.url, context=threads) as backend:
        writing = asyncio.ensure_future(backend.write(pages.keys, pages.rows))
        before = threads.num_runs
        while threads.num_runs < before + 3:
            await asyncio.sleep(0)
        server.kill()
        with pytest.raises(BackendError, match="redis at"):
            await writing
        server.start()
        assert await backend.contains(pages.keys) == [False] * 32


async def test_frozen_and_thawed(server: ValkeyServer) -> None:
    """SIGSTOP: every call ends by `stall_timeout`. SIGCONT: the next ones hit, and none of them
    gets an answer that was meant for those before."""
    pages = Pages.of(8)
    async with opened(server.url, stall_timeout=0.5) as backend:
        await backend.write(pages.keys, pages.rows)
        server.freeze()
        started = time.monotonic()
        results = await asyncio.gather(
            *(backend.read(pages.keys, pages.buffers()) for _ in range(4)),
            backend.write(pages.keys, pages.rows),
            return_exceptions=True,
        )
        assert time.monotonic() - started < 3
        assert [type(result) for result in results] == [BackendError] * 5
        assert any("made no progress for 0.5 s" in str(result) for result in results)
        server.thaw()
        for _ in range(10):
            buffers = pages.buffers()
            assert await backend.read(pages.keys, buffers) == [READ] * 8
            assert buffers == pages.rows


async def test_out_of_memory_refuses_writes_and_reads_go_on(server: ValkeyServer) -> None:
    """And the first write that fits is taken again. No error: the backend is well."""
    pages = Pages.of(10, 256 * KIB)
    other = server.client()
    async with opened(server.url) as backend:
        assert await backend.write(pages.keys[:4], pages.rows[:4]) == [WRITTEN] * 4
        other.config_set("maxmemory", 1)
        assert await backend.write(pages.keys, pages.rows) == [REFUSED] * 10
        buffers = pages.buffers()
        assert await backend.read(pages.keys, buffers) == [READ] * 4 + [MISSING] * 6
        assert buffers[:4] == pages.rows[:4]
        other.config_set("maxmemory", other.info("memory")["used_memory"] + MIB)
        results = await backend.write(pages.keys, pages.rows)
        assert {WRITTEN, REFUSED} == set(results)
        buffers = pages.buffers()
        results = await backend.read(pages.keys, buffers)
        pages.prove(buffers, results)
        other.config_set("maxmemory-policy", "allkeys-lru")
        assert await backend.write(pages.keys, pages.rows) == [WRITTEN] * 10
        results = await backend.read(pages.keys, buffers)
        assert MISSING in results  # it has made room
        pages.prove(buffers, results)


@pytest.mark.parametrize("cut_at", [0, 1, 5, 40 * KIB, 64 * KIB + 7, 64 * KIB + 11, 200 * KIB])
async def test_cut_anywhere_in_the_answers(server: ValkeyServer, proxy: Proxy, cut_at: int) -> None:
    """Before the first byte, in a length, in a value, between two: an error, and the next call is
    right."""
    pages = Pages.of(4)
    pages.put(server.client())
    async with opened(proxy.url, connections=1) as backend:
        buffers = pages.buffers()
        await backend.read(pages.keys, buffers)
        proxy.cut_after(cut_at + 1)
        with pytest.raises(BackendError, match="broke"):
            await backend.read(pages.keys, pages.buffers())
        buffers = pages.buffers()
        assert await backend.read(pages.keys, buffers) == [READ] * 4
        assert buffers == pages.rows


async def test_a_large_value_through_a_slow_link_is_not_a_stall(
    server: ValkeyServer, proxy: Proxy
) -> None:
    """B75: eight at once, each for much longer than `stall_timeout`. A real stall ends in time, and
    what comes late finds nobody."""
    pages = Pages.of(1, 2 * MIB)
    pages.put(server.client())
    async with opened(proxy.url, num_threads=8, connections=8, stall_timeout=0.5) as backend:
        proxy.delay_s = 0.04
        buffers = [pages.buffers() for _ in range(8)]
        started = time.monotonic()
        results = await asyncio.gather(*(backend.read(pages.keys, each) for each in buffers))
        assert time.monotonic() - started > 1
        assert results == [[READ]] * 8
        assert all(each == pages.rows for each in buffers)
        stalled_at = proxy.answered + MIB
        reading = asyncio.ensure_future(backend.read(pages.keys, buffers[0]))
        while proxy.answered < stalled_at:
            await asyncio.sleep(0.001)
        proxy.flow.clear()
        started = time.monotonic()
        with pytest.raises(BackendError, match=r"no progress for 0\.5 s"):
            await reading
        assert time.monotonic() - started < 2
        poisoned = memoryview(bytearray(b"\xa5" * (2 * MIB)))
        buffers[0][0][:] = poisoned
        proxy.delay_s = 0.0
        proxy.flow.set()
        assert await backend.read(pages.keys, buffers[1]) == [READ]
        assert buffers[0][0] == poisoned


async def test_one_hung_call_holds_up_nobody_else(server: ValkeyServer, proxy: Proxy) -> None:
    """B100: the others have connections of their own; the hung one ends by its limit."""
    pages = Pages.of(4)
    pages.put(server.client())
    async with opened(proxy.url, stall_timeout=1) as backend:
        await asyncio.gather(*(backend.read(pages.keys, pages.buffers()) for _ in range(4)))
        proxy.flow.clear()
        hung = asyncio.ensure_future(backend.read(pages.keys, pages.buffers()))
        while not hung.done():
            await asyncio.sleep(0.01)
        with pytest.raises(BackendError, match="no progress"):
            await hung
        proxy.flow.set()
        assert await backend.read(pages.keys, pages.buffers()) == [READ] * 4


async def test_a_foreign_client_changes_values_while_they_are_read(server: ValkeyServer) -> None:
    """Deleted, cut short, overwritten in any order: whatever is said to be read and proves itself
    is right, and nothing but results comes out."""
    pages = Pages.of(8, 128 * KIB)
    pages.put(server.client())
    going_on = threading.Event()

    def vandal() -> None:
        with server.client() as other:
            names = pages.names()
            while not going_on.is_set():
                for index, name in enumerate(names):
                    change = index % 4
                    if change == 0:
                        other.delete(name)
                    elif change == 1:
                        other.set(name, bytes(pages.rows[index])[:1000])
                    elif change == 2:
                        other.setrange(name, 600, b"!!!!")
                    other.set(name, bytes(pages.rows[index]))

    thread = threading.Thread(target=vandal)
    thread.start()
    seen: set[tuple[ReadResult, bool]] = set()
    async with opened(server.url) as backend:
        for _ in range(100):
            buffers = pages.buffers()
            results = await backend.read(pages.keys, buffers)
            proofs = [verdict is None for verdict in pages.verdicts(buffers)]
            seen |= set(zip(results, proofs, strict=True))
            assert all(proofs[index] for index in (3, 7) if results[index] is READ)
    going_on.set()
    thread.join()
    assert (READ, True) in seen
    assert seen <= {(READ, True), (READ, False), (MISSING, False), (CORRUPT, False)}


async def test_a_replica_says_where_to_go(server: ValkeyServer) -> None:
    """Its writes are an error: there is something for the operator to do."""
    pages = Pages.of(2)
    with ValkeyServer("--replicaof", "127.0.0.1", str(server.port)) as replica:
        async with opened(replica.url) as backend:
            with pytest.raises(BackendError, match=r"it is a replica: point `url` to the primary"):
                await backend.write(pages.keys, pages.rows)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("LOADING the dataset is in memory soon", "reading its data from disk"),
        ("NOREPLICAS Not enough good replicas to write.", "min-replicas-to-write"),
        ("MISCONF cannot persist", "free its disk"),
        ("BUSY script", "SCRIPT KILL"),
        ("SOMETHING new", "answers: SOMETHING new$"),
    ],
)
async def test_refusals_say_what_to_do(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, text: str, advice: str
) -> None:
    """One key's refusal is enough; the answers to the others are taken, and the connection is
    kept."""
    pages = Pages.of(3)
    pages.put(server.client())
    async with opened(server.url, connections=1) as backend:
        value, at = Wire._value, [1]

        def refusing(self: Wire, *of: object) -> object:
            got, at[0] = value(self, *of), at[0] - 1  # type: ignore[arg-type]
            return got if at[0] else ErrorReply(text)

        monkeypatch.setattr(Wire, "_value", refusing)
        with pytest.raises(BackendError, match=advice):
            await backend.read(pages.keys, pages.buffers())
        assert await backend.read(pages.keys, pages.buffers()) == [READ] * 3
        assert server.num_clients() == 1


async def test_a_user_who_may_not(server: ValkeyServer) -> None:
    with server.client() as other:
        other.acl_setuser(
            "weak",
            enabled=True,
            nopass=True,
            keys=["*"],
            commands=["+get"],
            categories=["+@connection"],
        )
    pages = Pages.of(1)
    async with opened(f"redis://weak:x@127.0.0.1:{server.port}") as backend:
        with pytest.raises(BackendError, match="its user needs GET, SET"):
            await backend.write(pages.keys, pages.rows)
        assert await backend.read(pages.keys, pages.buffers()) == [MISSING]


async def test_a_server_that_takes_nobody_else_in(server: ValkeyServer) -> None:
    """Too many clients there, not here."""
    async with opened(server.url, connections=4) as backend:
        with server.client() as other:
            other.config_set("maxclients", 2)
            pages = Pages.of(2)
            both = await asyncio.gather(
                *(backend.read(pages.keys, pages.buffers()) for _ in range(4)),
                return_exceptions=True,
            )
            assert [MISSING] * 2 in both
            errors = [str(each) for each in both if isinstance(each, BackendError)]
            assert len(errors) + both.count([MISSING] * 2) == 4
            assert all("max number of clients reached" in error for error in errors)
