"""Which server keeps a key, and connections to it.

redis-py opens and keeps the connections; of a Cluster this knows which node serves which slots.
Owns: pools, the slot table, and the words for what can go wrong with a server. Refuses to know:
rows, and the event loop: what may block here is called in threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from redis import ConnectionPool, exceptions
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.crc import key_slot
from redis.retry import Retry

from tiered_cache.errors import BackendError
from tiered_cache_redis.wire import ErrorReply, OutOfStep, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiered_cache_redis.options import RedisOptions
    from tiered_cache_redis.wire import Reply

Address: TypeAlias = tuple[str, int]

ADVICE: Final = {
    "BUSY": "a script keeps it busy: wait, or SCRIPT KILL it",
    "CLUSTERDOWN": "part of the Cluster is down: see CLUSTER INFO",
    "LOADING": "it is reading its data from disk and will answer when it is done",
    "MASTERDOWN": "it is a replica that has lost its primary: point `url` to the primary",
    "MISCONF": 'it cannot save snapshots: free its disk, or turn them off (save "")',
    "MOVED": "it is part of a Cluster: set `cluster: true`",
    "NOAUTH": "it wants a password: write it into `url` (redis://user:password@host)",
    "NOPERM": "its user needs GET, SET, EXISTS, UNLINK, SCAN, STRLEN, PING (in a Cluster also "
    "CLUSTER SLOTS) and the keys `prefix`*",
    "NOREPLICAS": "too few replicas are connected: see min-replicas-to-write",
    "READONLY": "it is a replica: point `url` to the primary",
    "WRONGPASS": "check user and password in `url`",
}
"""What to do about an answer, by its first word."""

CODES: Final = {
    exceptions.BusyLoadingError: "LOADING",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.AuthenticationError: "WRONGPASS",
    exceptions.MasterDownError: "MASTERDOWN",
}
"""The words that redis-py has turned into classes, and taken from the text."""


class Server:
    """One Redis server: lends its connections."""

    def __init__(self, options: RedisOptions, settings: dict[str, Any]) -> None:
        self._stall_timeout = options.stall_timeout
        self._connect_timeout = options.connect_timeout
        self._password: str | None = settings.get("password")
        self.where = settings.get("path") or f"{settings['host']}:{settings['port']}"
        # Unbounded: who may have a connection is decided on the event loop, before a thread is
        # taken. A thread that was given up for hung keeps its own, and nobody waits for that.
        self._pool = ConnectionPool(
            **settings,
            protocol=2,  # 3 may push messages between replies
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=options.connect_timeout,
            socket_timeout=options.stall_timeout,
            max_connections=1 << 16,
        )

    @contextmanager
    def lend(self) -> Iterator[Wire]:
        """A connection for one exchange.

        One that was closed while idle (the server was restarted) is opened anew before it is lent.
        One that breaks in the exchange is closed: nobody gets an answer that was another's.

        Raises:
            BackendError: no connection, or it broke.
        """
        try:
            connection: Any = self._pool.get_connection()
        except (exceptions.RedisError, OSError) as error:
            raise self._not_connected(error) from self._cause(error)
        try:
            # Not public, but as old as redis-py and what its own parsers use.
            wire = Wire(connection._sock)
            yield wire
            wire.ended()
        except BaseException as error:
            connection.disconnect()
            if isinstance(error, (OSError, OutOfStep)):
                raise self._broken(error) from error
            raise
        finally:
            self._pool.release(connection)

    def close(self) -> None:
        self._pool.disconnect()

    def close_idle(self) -> None:
        """It is needed no longer; who still has a connection of it may end in peace."""
        self._pool.disconnect(inuse_connections=False)

    def refused(self, reply: ErrorReply) -> BackendError:
        """It answers, but not as it should."""
        return self._answered(reply.text, reply.code)

    def _answered(self, text: str, code: str) -> BackendError:
        advice = f" ({ADVICE[code]})" if code in ADVICE else ""
        return BackendError(self._redacted(f"redis at {self.where} answers: {text}") + advice)

    def _not_connected(self, error: Exception) -> BackendError:
        text = str(error)
        code = next((code for kind, code in CODES.items() if isinstance(error, kind)), "")
        if code == "WRONGPASS" and not self._password:
            code = "NOAUTH"
        if code:
            return self._answered(text, code)
        if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
            text += (
                f" (`connect_timeout` is {self._connect_timeout:g} s, for its first answers "
                f"`stall_timeout`, {self._stall_timeout:g} s)"
            )
        return BackendError(self._redacted(f"no connection to redis at {self.where}: {text}"))

    def _broken(self, error: Exception) -> BackendError:
        if isinstance(error, TimeoutError):
            return BackendError(
                f"redis at {self.where} made no progress for {self._stall_timeout:g} s "
                "(`stall_timeout`); the connection was closed"
            )
        return BackendError(
            self._redacted(f"the connection to redis at {self.where} broke: {error}")
        )

    def _redacted(self, text: str) -> str:
        """A server that does not know AUTH answers with what it was sent."""
        return text.replace(self._password, "***") if self._password else text

    def _cause(self, error: Exception) -> Exception | None:
        """The error to chain; none when it says the password."""
        return error if self._redacted(str(error)) == str(error) else None


class Servers(ABC):
    """The servers that keep the keys together.

    `in_doubt`: to be refreshed before anything else.
    """

    in_doubt = True

    @abstractmethod
    def of_each(self, names: Sequence[bytes]) -> dict[Server, list[int]]:
        """Which of the names each server keeps, by position, in order.

        Raises:
            BackendError: nobody keeps one of them.
        """

    @abstractmethod
    def all(self) -> list[Server]:
        """Those that keep names."""

    def doubt(self) -> bool:
        """Something went wrong. Whether that may be because who keeps what is not known (any
        more)."""
        return False

    @abstractmethod
    def refresh(self) -> None:
        """Find out that there is a server, and who keeps what. Blocks.

        Raises:
            BackendError: none of them says so.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


class OneServer(Servers):
    """A server of its own."""

    def __init__(self, options: RedisOptions) -> None:
        self._server = Server(options, _settings(options))

    def of_each(self, names: Sequence[bytes]) -> dict[Server, list[int]]:
        return {self._server: list(range(len(names)))}

    def all(self) -> list[Server]:
        return [self._server]

    def refresh(self) -> None:
        with self._server.lend() as wire:
            [reply] = wire.ask([(b"PING",)])
        if isinstance(reply, ErrorReply):
            raise self._server.refused(reply)
        self.in_doubt = False

    def close(self) -> None:
        self._server.close()


class Cluster(Servers):
    """The primaries of a Cluster and their slots. Knows none before the first `refresh`."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._settings = _settings(options)
        self._seed: Address = (self._settings["host"], self._settings["port"])
        self._servers = {self._seed: self._server(self._seed)}
        self._ranges: list[tuple[int, int, Server]] = []
        """First slot, last slot, who serves them. Replaced as a whole, by the thread of a refresh;
        the event loop reads it."""

    def of_each(self, names: Sequence[bytes]) -> dict[Server, list[int]]:
        ranges = self._ranges
        starts = [first for first, _, _ in ranges]
        found: dict[Server, list[int]] = {}
        for position, name in enumerate(names):
            slot = key_slot(name)
            index = bisect_right(starts, slot) - 1
            if index < 0 or slot > ranges[index][1]:
                self.doubt()
                raise BackendError(f"no node of the Cluster serves slot {slot}: see CLUSTER INFO")
            found.setdefault(ranges[index][2], []).append(position)
        return found

    def all(self) -> list[Server]:
        return list(dict.fromkeys(server for _, _, server in self._ranges))

    def doubt(self) -> bool:
        self.in_doubt = True
        return True

    def refresh(self) -> None:
        for (host, _), server in self._servers.items():
            try:
                with server.lend() as wire:
                    [reply] = wire.ask([(b"CLUSTER", b"SLOTS")])
            except BackendError as error:
                failure = error
                continue
            if isinstance(reply, list):
                self._take(reply, host)
                return
            failure = _not_a_cluster(server, reply)
        raise failure

    def _take(self, slots: list[Reply], asked: str) -> None:
        """The table of CLUSTER SLOTS. A node that does not know its own address says nothing: it is
        where it was asked."""
        servers: dict[Address, Server] = {}
        ranges = []
        try:
            for first, last, (host, port, *_), *_ in slots:
                address = (host.decode() if host else asked, port)
                if address not in servers:
                    servers[address] = self._servers.get(address) or self._server(address)
                ranges.append((first, last, servers[address]))
        except (TypeError, ValueError, AttributeError):
            raise BackendError("CLUSTER SLOTS has an answer that is no table of slots") from None
        left = [server for address, server in self._servers.items() if address not in servers]
        servers.setdefault(self._seed, self._servers[self._seed])
        self._servers, self._ranges = servers, sorted(ranges, key=itemgetter(0))
        self.in_doubt = False
        for server in left:
            server.close_idle()

    def _server(self, address: Address) -> Server:
        host, port = address
        return Server(self._options, self._settings | {"host": host, "port": port})

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


def _not_a_cluster(server: Server, reply: Reply) -> BackendError:
    if isinstance(reply, ErrorReply) and "cluster support" not in reply.text:
        return server.refused(reply)
    return BackendError(f"redis at {server.where} is not part of a Cluster: set `cluster: false`")


def _settings(options: RedisOptions) -> dict[str, Any]:
    """What the URL says, for a pool of redis-py."""
    settings: dict[str, Any] = parse_url(  # type: ignore[no-untyped-call]
        options.url.get_secret_value()
    )
    if "path" not in settings:
        settings = {"port": 6379, "socket_keepalive": True} | settings
    return settings
