"""What can be set, and what a URL must be. Owns: names, defaults, checks. Refuses to know: sockets.

A URL may hold a password, so nothing here repeats what it was given (neither does pydantic:
`hide_input_in_errors`), and the URL is kept as a `SecretStr`.
"""

from __future__ import annotations

import re
from typing import Annotated, Final
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from tiered_cache.storage import BackendOptions

SCHEMES: Final = ("redis", "rediss", "unix")

IN_A_URL: Final = (
    "db",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
)
"""What may stand behind the `?`: where and whom, but not how. Time limits and such are options
here, and one of the URL would silently win."""

UNITS: Final = {"B": 1, "kB": 10**3, "KiB": 1 << 10, "MB": 10**6, "MiB": 1 << 20, "GiB": 1 << 30}


def _size(value: object) -> object:
    """`8MiB` in bytes. What is not text is left for the schema to judge."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]{1,15})\s*([kKMG]?i?B)\s*", value)
    if match is None or match[2] not in UNITS:
        raise PydanticCustomError(
            "size", "is not a size", {"suggestion": "write 8MiB, 8MB or a number of bytes"}
        )
    return int(match[1]) * UNITS[match[2]]


def _usable(url: SecretStr) -> SecretStr:
    """A URL that can be understood.

    redis-py would take some others for something else: what follows an unescaped `/` in a password
    for a port or a database, and a misspelt option for none.
    """
    try:
        parts = urlsplit(url.get_secret_value())
        parts.port  # noqa: B018 - raises when it is none, and repeats a part of the password
        query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    except ValueError:
        raise _bad_url(
            "is not a URL",
            "write redis://host:6379, and special characters of a password as %XX (/ is %2F)",
        ) from None
    if parts.scheme not in SCHEMES:
        raise _bad_url(
            "has an unknown scheme", "begin with redis://, rediss:// (TLS) or unix:// (a socket)"
        )
    if parts.scheme == "unix" and not parts.path:
        raise _bad_url("names no socket", "write unix:///run/redis/redis.sock")
    if parts.scheme != "unix" and not parts.hostname:
        raise _bad_url("names no host", "write redis://host:6379")
    if parts.scheme != "unix" and not re.fullmatch(r"/?|/[0-9]+", parts.path):
        raise _bad_url("has a path that is no database", "write redis://host:6379/0")
    if parts.fragment:
        raise _bad_url("has a part after #", "write # in a password as %23")
    if unknown := sorted(set(query).difference(IN_A_URL)):
        # The name of one might be a piece of a password with a question mark in it.
        raise _bad_url(
            f"has {len(unknown)} unknown name(s) behind the question mark",
            f"take out all but {', '.join(IN_A_URL)}; set time limits and connections "
            "beside the URL; write ? in a password as %3F",
        )
    if not re.fullmatch(r"[0-9]*", query.get("db", "")):
        raise _bad_url("has a db that is no number", "write ?db=0")
    return url


def _bad_url(message: str, suggestion: str) -> PydanticCustomError:
    return PydanticCustomError("url", message, {"suggestion": suggestion})


SizeBytes = Annotated[int, BeforeValidator(_size), Field(ge=1, le=1 << 30)]
Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


class RedisOptions(BackendOptions):
    """The `options:` of `backend: redis`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    url: Annotated[SecretStr, AfterValidator(_usable)]
    """Where, and as whom: `redis://user:password@host:6379/0`; `rediss://` with TLS;
    `unix:///path`. For a Cluster, any node of it."""
    cluster: bool = False
    """The server is a part of a Cluster."""
    ttl: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Seconds after which the server forgets a page, from when it was last written. None: when it
    needs the room."""
    connections: Annotated[int, Field(ge=1, le=1024)] = 4
    """Exchanges at the same time, and connections kept open to each server. Who comes when all are
    taken waits. More than the cache has io threads are of no use."""
    connect_timeout: Seconds = 2.0
    """For a connection to come about."""
    stall_timeout: Seconds = 2.0
    """Time without progress (not: time for a value) after which a server counts as hung."""
    max_batch: SizeBytes = 8 << 20
    """Bytes of one round trip. A cancelled call ends with the round trip under way."""
    prefix: Annotated[str, Field(pattern=r"^[!-z|~]*$", max_length=128)] = "tiered-cache:"
    """Of all names in the server. Without braces, which would put all pages on one node of a
    Cluster."""

    @model_validator(mode="after")
    def _a_cluster_has_hosts(self) -> RedisOptions:
        url = urlsplit(self.url.get_secret_value())
        if self.cluster and url.scheme == "unix":
            raise _bad_url("is a socket", "for a Cluster, write redis:// and the host of a node")
        database = dict(parse_qsl(url.query)).get("db") or url.path.strip("/")
        if self.cluster and int(database or 0):
            raise _bad_url("names a database", "a Cluster has only database 0: take it out")
        return self
