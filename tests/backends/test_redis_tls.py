"""TLS: rows are the same through it, and a server that cannot prove who it is gets none."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.backends.redis_helpers import KIB, MIB, READ, Pages, opened
from tests.backends.redis_server import ValkeyServer
from tiered_cache.errors import BackendError
from tiered_cache.storage import WriteResult


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as started:
        yield started


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `localhost`, signed by itself; the key beside it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-out", path]
    subprocess.run([*command, "-keyout", path.with_suffix(".key")], check=True, capture_output=True)
    return path


@dataclass
class Terminator:
    """Where TLS ends, and how many connections have come so far."""

    port: int
    connected: int = 0


@asynccontextmanager
async def tls_in_front_of(server: ValkeyServer, certificate: Path) -> AsyncIterator[Terminator]:
    """The servers that tests can have speak plain TCP only."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
            target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        terminator.connected += 1
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pass_on(reader, to_writer), pass_on(to_reader, writer))
        for each in (to_writer, writer):
            with suppress(OSError):
                await each.wait_closed()

    serving = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    terminator = Terminator(serving.sockets[0].getsockname()[1])
    async with serving:
        yield terminator
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await task


async def test_rows_come_back_through_tls(server: ValkeyServer, certificate: Path) -> None:
    async with tls_in_front_of(server, certificate) as terminator:
        url = f"rediss://localhost:{terminator.port}/2?ssl_ca_certs={certificate}"
        async with opened(url, connections=2) as backend:
            for row_bytes in (4 * KIB, 64 * KIB, 2 * MIB):
                pages = Pages.of(6, row_bytes)
                assert await backend.write(pages.keys, pages.rows) == [WriteResult.WRITTEN] * 6
                many = [pages.buffers() for _ in range(3)]
                results = await asyncio.gather(*(backend.read(pages.keys, each) for each in many))
                assert results == [[READ] * 6] * 3
                assert all(each == pages.rows for each in many)
            assert await backend.clear(pages.record.scope) == 6
        assert terminator.connected <= 2  # they are kept
    with server.client(db=2) as other:
        assert other.dbsize() == 0


async def test_an_unknown_certificate_is_refused(server: ValkeyServer, certificate: Path) -> None:
    """Unless one says that one does not care."""
    async with tls_in_front_of(server, certificate) as terminator:
        url = f"rediss://localhost:{terminator.port}"
        with pytest.raises(BackendError, match="CERTIFICATE_VERIFY_FAILED"):
            async with opened(url):
                pass
        async with opened(f"{url}?ssl_cert_reqs=none") as backend:
            assert await backend.contains([]) == []
