"""What can be set: what is wrong is said at once, and what is secret is never said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import ValidationError

from tests.backends.redis_helpers import opened
from tests.backends.redis_server import ValkeyServer
from tiered_cache.errors import BackendError
from tiered_cache_redis import RedisOptions

SECRET = "s3cr3t-of-the-tests"


def problems(error: ValidationError) -> list[tuple[str, str]]:
    return [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost:6379/",
        "redis://:pass@10.0.0.1:6379/3",
        "redis://user:p%40ss%2F@[::1]:6379/0",
        "rediss://host:6380?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=no",
        "unix:///run/redis.sock",
        "unix://user:pass@/run/redis.sock?db=2",
    ],
)
def test_urls_that_will_do(url: str) -> None:
    assert RedisOptions(url=url).url.get_secret_value() == url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "has an unknown scheme"),
        ("localhost:6379", "has an unknown scheme"),
        (f"http://:{SECRET}@host", "has an unknown scheme"),
        ("redis://", "names no host"),
        ("unix://", "names no socket"),
        (f"redis://:{SECRET}/x@host:6379", "is not a URL"),
        (f"redis://:1/{SECRET}@host:6379", "names no host"),
        (f"redis://host/{SECRET}", "has a path that is no database"),
        (f"redis://:a#{SECRET}@host", "is not a URL"),
        (f"redis://host#{SECRET}", "has a part after #"),
        (f"redis://host?{SECRET}=1", "has 1 unknown name(s) behind the question mark"),
        ("redis://host?socket_timeout=9&db=1", "has 1 unknown name(s) behind the question mark"),
        (f"redis://host?db={SECRET}", "has a db that is no number"),
        (f"redis://[{SECRET}", "is not a URL"),
    ],
)
def test_urls_that_will_not(url: str, message: str) -> None:
    """And which piece of one is a password, nobody knows: none is repeated."""
    with pytest.raises(ValidationError) as raised:
        RedisOptions(url=url)
    assert problems(raised.value) == [("url", message)]
    assert SECRET not in str(raised.value)
    assert SECRET not in repr(raised.value)
    [details] = raised.value.errors()
    assert details["ctx"]["suggestion"]
    assert SECRET not in str(details["ctx"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_batch": "8 MB/s"}, "is not a size"),
        ({"max_batch": "8Mib"}, "is not a size"),
        ({"max_batch": 0}, "Input should be greater than or equal to 1"),
        ({"max_batch": "2GiB"}, "Input should be less than or equal to 1073741824"),
        ({"max_batch": True}, "Input should be a valid integer"),
        ({"connections": 0}, "Input should be greater than or equal to 1"),
        ({"connections": 2.0}, "Input should be a valid integer"),
        ({"ttl": 0}, "Input should be greater than or equal to 1"),
        ({"ttl": "1h"}, "Input should be a valid integer"),
        ({"connect_timeout": 0}, "Input should be greater than 0"),
        ({"stall_timeout": float("inf")}, "Input should be a finite number"),
        ({"stall_timeout": "1"}, "Input should be a valid number"),
        ({"cluster": "yes"}, "Input should be a valid boolean"),
        ({"prefix": "{tag}"}, "String should match pattern '^[!-z|~]*$'"),
        ({"prefix": "a b"}, "String should match pattern '^[!-z|~]*$'"),
        ({"prefix": "x" * 129}, "String should have at most 128 characters"),
        ({"password": SECRET}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_will_not_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        RedisOptions(url="redis://h", **given)
    assert problems(raised.value) == [(next(iter(given)), message)]
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("url", ["unix:///run/s", "redis://h/1", "redis://h?db=1"])
def test_a_cluster_has_hosts_and_one_database(url: str) -> None:
    RedisOptions(url=url)
    with pytest.raises(ValidationError, match=r"is a socket|names a database"):
        RedisOptions(url=url, cluster=True)
    assert RedisOptions(url="redis://h/0", cluster=True).cluster


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [(1, 1), ("512", None), ("7B", 7), ("4MiB", 4 << 20), (" 4 MB ", 4_000_000), ("64kB", 64_000)],
)
def test_sizes(size: object, num_bytes: int | None) -> None:
    if num_bytes is None:
        with pytest.raises(ValidationError):
            RedisOptions(url="redis://h", max_batch=size)
    else:
        assert RedisOptions(url="redis://h", max_batch=size).max_batch == num_bytes


async def test_a_wrong_password_is_an_error_that_does_not_say_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor does anything else: not the options, not the backend, not what is logged."""
    caplog.set_level(logging.DEBUG)
    with ValkeyServer("--requirepass", SECRET) as server:
        right = f"redis://:{SECRET}@127.0.0.1:{server.port}"
        async with opened(right) as backend:
            options = RedisOptions(url=right)
            for thing in (backend, backend.__dict__, backend._servers.all(), options):
                assert SECRET not in repr(thing)
            assert SECRET not in str(options.model_dump())
        wrong = f"redis://:not-{SECRET}@127.0.0.1:{server.port}"
        for url, what in (
            (wrong, "check user and password in `url`"),
            (server.url, "wants a password"),
        ):
            with pytest.raises(BackendError, match=what) as raised:
                async with opened(url):
                    pass
            assert SECRET not in everything_said(raised.value)
    assert SECRET not in caplog.text


async def test_a_server_that_repeats_what_it_was_sent_is_not_repeated() -> None:
    """Where AUTH has been renamed, its arguments come back in the error."""
    with ValkeyServer("--rename-command", "AUTH", "SESAME") as server:
        with pytest.raises(BackendError, match=r"unknown command.*\*\*\*") as raised:
            async with opened(f"redis://:{SECRET}@127.0.0.1:{server.port}"):
                pass
        assert SECRET not in everything_said(raised.value)


def everything_said(error: BaseException | None) -> str:
    """By an error and by those that it names as its causes."""
    text = ""
    while error is not None:
        text += f"{error!s} {error!r}\n"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text
