"""The backend: calls as exchanges with servers, and answers as results.

Owns: names of keys, batches, and what an answer means for a row. Refuses to know: sockets (`wire`),
and which server keeps what (`servers`).

Each exchange of at most `max_batch` bytes is one job of the cache's io threads, and always runs to
its end: a cancelled call waits for the one under way and starts no other. So no connection is left
with an answer that nobody took, and nothing touches the caller's buffers afterwards.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tiered_cache.errors import BackendError, ClosedError, WrongThreadError
from tiered_cache.storage import (
    SCOPE_BYTES,
    BackendContext,
    BackendStats,
    ObjectInfo,
    ObjectKey,
    ReadResult,
    StorageBackend,
    WriteResult,
)
from tiered_cache.storage.backend import ignore_arrivals
from tiered_cache_redis.options import RedisOptions
from tiered_cache_redis.servers import Cluster, OneServer
from tiered_cache_redis.wire import ErrorReply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from typing import Self

    from tiered_cache_redis.servers import Server, Servers
    from tiered_cache_redis.wire import Reply, Wire

T = TypeVar("T")

MAX_VALUE_BYTES: Final = 512 << 20
"""A longer one makes the server close the connection."""

QUESTIONS: Final = 512
"""Small ones of one exchange: a millisecond or two, here and there."""

SCAN_COUNT: Final = b"512"
"""Names that the server looks at for one step of a scan."""

MAX_TURNS: Final = 2
"""Of asking, where keys of a Cluster have moved: the table is read anew, so once more will do."""


class RedisBackend(StorageBackend):
    """Keeps rows as strings in Redis or Valkey, one server or a Cluster."""

    Options = RedisOptions
    can_scan = True

    def __init__(self, options: RedisOptions, context: BackendContext) -> None:
        self._context = context
        self._prefix = options.prefix
        # What begins in the same way need not be a page.
        self._name = re.compile(re.escape(self._prefix).encode() + rb"[0-9a-f]{32}:[0-9a-f]{64}")
        self._max_batch_bytes = options.max_batch
        self._ttl_s = options.ttl
        self._servers: Servers = Cluster(options) if options.cluster else OneServer(options)
        self._loop = asyncio.get_running_loop()
        self._turns = asyncio.Semaphore(options.connections)
        self._refreshing = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def open(cls, options: RedisOptions, context: BackendContext) -> Self:
        backend = cls(options, context)
        try:
            await backend._ready()
        except BaseException:
            await backend.aclose()
            raise
        return backend

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [count == 1 for count in await self._ask(b"EXISTS", keys)]

    async def read(
        self,
        keys: Sequence[ObjectKey],
        rows: Sequence[memoryview],
        arrived: Callable[[int, int], None] = ignore_arrivals,
    ) -> list[ReadResult]:
        names = self._names(keys)

        def get(batch: Sequence[int], wire: Wire) -> list[ReadResult | ErrorReply]:
            return wire.get(
                [names[index] for index in batch],
                [rows[index] for index in batch],
                lambda position, stop: arrived(batch[position], stop),
            )

        means = {"WRONGTYPE": ReadResult.CORRUPT, "ASK": ReadResult.MISSING}
        sizes = [row.nbytes for row in rows]
        return await self._each(names, sizes, self._max_batch_bytes, get, means)

    async def write(
        self, keys: Sequence[ObjectKey], rows: Sequence[memoryview]
    ) -> list[WriteResult]:
        # Kept already or not, it is written: that takes no question first, mends what is broken,
        # and starts the ttl again.
        names = self._names(keys)
        fitting = [index for index, row in enumerate(rows) if row.nbytes <= MAX_VALUE_BYTES]

        def put(batch: Sequence[int], wire: Wire) -> list[WriteResult | ErrorReply]:
            chosen = [fitting[position] for position in batch]
            return wire.set(
                [names[index] for index in chosen], [rows[index] for index in chosen], self._ttl_s
            )

        means = {"OOM": WriteResult.REFUSED, "ASK": WriteResult.REFUSED}
        written = await self._each(
            [names[index] for index in fitting],
            [rows[index].nbytes for index in fitting],
            self._max_batch_bytes,
            put,
            means,
        )
        results = [WriteResult.REFUSED] * len(rows)
        for index, result in zip(fitting, written, strict=True):
            results[index] = result
        return results

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        await self._ask(b"UNLINK", keys)

    async def clear(self, scope: bytes) -> int:
        num_gone = 0
        async for server, names in self._scan(scope):
            unlink = partial(_ask_all, [(b"UNLINK", name) for name in names])
            for reply in await self._run(server, unlink):
                if isinstance(reply, ErrorReply):
                    raise self._refused(server, reply)
                num_gone += reply
        return num_gone

    async def scan(self, scope: bytes | None = None) -> AsyncIterator[Sequence[ObjectInfo]]:
        async for server, names in self._scan(scope):
            replies = await self._run(server, partial(_ask_all, _questions_about(names)))
            yield [
                ObjectInfo(self._key(name), length, age if isinstance(age, int) else None)
                for name, age, length in zip(names, replies[1:-1:2], replies[2:-1:2], strict=True)
                if isinstance(length, int) and length
            ]

    def stats(self) -> BackendStats:
        """Others write there, too: only the server knows what it keeps."""
        return BackendStats()

    async def aclose(self) -> None:
        self._is_closed = True
        self._servers.close()

    async def _ask(self, command: bytes, keys: Sequence[ObjectKey]) -> list[Reply]:
        """A command of one key for each of them."""
        names = self._names(keys)

        def ask(batch: Sequence[int], wire: Wire) -> list[Reply]:
            return wire.ask([(command, names[index]) for index in batch])

        return await self._each(names, [1] * len(names), QUESTIONS, ask, {"ASK": 0})

    async def _each(
        self,
        names: Sequence[bytes],
        sizes: Sequence[int],
        most: int,
        exchange: Callable[[Sequence[int], Wire], list[Any]],
        means: Mapping[str, Any],
    ) -> list[Any]:
        """`exchange(positions, wire)` with the server of each name, in batches of sizes that come
        to `most`; the answers.

        `means`: what an answer stands for that is an error, by its code. ASK is one for all: the
        slot is on its way to another node. Until it is there, its pages are as good as missing.

        Raises:
            BackendError: any other error.
        """
        answers: list[Any] = [None] * len(names)
        left: Sequence[int] = range(len(names))
        for _ in range(MAX_TURNS):
            await self._ready()
            moved = []
            for server, batch in self._batches(names, sizes, most, left):
                got = await self._run(server, partial(exchange, batch))
                for index, answer in zip(batch, got, strict=True):
                    if not isinstance(answer, ErrorReply):
                        answers[index] = answer
                    elif answer.code in means:
                        answers[index] = means[answer.code]
                    elif answer.code == "MOVED" and self._servers.doubt():
                        moved.append(index)
                    else:
                        raise self._refused(server, answer)
            if not moved:
                return answers
            left = moved
        raise BackendError(
            "the nodes of the Cluster do not agree on who keeps what: see CLUSTER INFO"
        )

    def _batches(
        self, names: Sequence[bytes], sizes: Sequence[int], most: int, indexes: Sequence[int]
    ) -> list[tuple[Server, list[int]]]:
        batches = []
        parts = self._servers.of_each([names[index] for index in indexes])
        for server, part in parts.items():
            batch: list[int] = []
            filled = 0
            for position in part:
                index = indexes[position]
                if not batch or filled + sizes[index] > most:
                    batch, filled = [], 0
                    batches.append((server, batch))
                batch.append(index)
                filled += sizes[index]
        return batches

    async def _scan(self, scope: bytes | None) -> AsyncIterator[tuple[Server, list[bytes]]]:
        """Names of pages, from each server."""
        await self._ready()
        start = re.sub(r"([*?\[\]\\^])", r"\\\1", self._prefix) + (scope or b"").hex()
        for server in self._servers.all():
            cursor = b"0"
            while True:
                page = (b"SCAN", cursor, b"MATCH", start.encode() + b"*", b"COUNT", SCAN_COUNT)
                [reply] = await self._run(server, partial(_ask_all, [page]))
                if isinstance(reply, ErrorReply):
                    raise self._refused(server, reply)
                cursor, names = reply
                if names := [name for name in names if self._name.fullmatch(name)]:
                    yield server, names
                if cursor == b"0":
                    break

    async def _run(self, server: Server, exchange: Callable[[Wire], T]) -> T:
        async with self._turns:
            try:
                return await self._context.run(_with_wire, server, exchange)
            except BackendError:
                self._servers.doubt()
                raise

    async def _ready(self) -> None:
        """It may be used here and now, and it is known who keeps what."""
        if asyncio.get_running_loop() is not self._loop:
            raise WrongThreadError(
                "this RedisBackend was opened on another event loop: open one on each"
            )
        if self._is_closed:
            raise ClosedError("this RedisBackend is closed")
        if self._servers.in_doubt:
            async with self._refreshing:
                if self._servers.in_doubt:  # nobody else has found out meanwhile
                    await self._context.run(self._servers.refresh)

    def _refused(self, server: Server, reply: ErrorReply) -> BackendError:
        self._servers.doubt()
        return server.refused(reply)

    def _names(self, keys: Sequence[ObjectKey]) -> list[bytes]:
        return [
            f"{self._prefix}{key[:SCOPE_BYTES].hex()}:{key[SCOPE_BYTES:].hex()}".encode()
            for key in keys
        ]

    def _key(self, name: bytes) -> ObjectKey:
        digits = name.removeprefix(self._prefix.encode()).replace(b":", b"")
        return ObjectKey(bytes.fromhex(digits.decode()))


def _with_wire(server: Server, exchange: Callable[[Wire], T]) -> T:
    with server.lend() as wire:
        return exchange(wire)


def _ask_all(commands: Sequence[Sequence[bytes]], wire: Wire) -> list[Reply]:
    return wire.ask(commands)


def _questions_about(names: Sequence[bytes]) -> list[Sequence[bytes]]:
    """For each the seconds since it was used and its length, in this order and without counting as
    a use; before and after, a switch for that (servers that do not know it say so, and that is
    all)."""
    questions: list[Sequence[bytes]] = [(b"CLIENT", b"NO-TOUCH", b"ON")]
    for name in names:
        questions += [(b"OBJECT", b"IDLETIME", name), (b"STRLEN", name)]
    return [*questions, (b"CLIENT", b"NO-TOUCH", b"OFF")]
