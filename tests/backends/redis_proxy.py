"""A TCP proxy that is in the way: it delays, cuts connections in the middle, and stalls."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

CHUNK_BYTES = 1 << 16


class Proxy:
    """Passes bytes between clients and one port of the loopback. A context manager.

    Attributes may be set at any time, and hold for the answers of the server:
    `chunk_bytes`: passed on at a time. `delay_s`: before each of them. `flow`: cleared, nothing is
    passed on. `answered`: bytes of answers passed on so far; `connected`: connections so far.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.port = int(self._listening.getsockname()[1])
        self.chunk_bytes = CHUNK_BYTES
        self.delay_s = 0.0
        self.flow = threading.Event()
        self.flow.set()
        self.answered = 0
        self.connected = 0
        self._cut_at: int | None = None
        self._hold_at: int | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def cut_after(self, num_bytes: int) -> None:
        """End all connections when so many more bytes of answers have been passed on."""
        self._cut_at = self.answered + num_bytes

    def hold_after(self, num_bytes: int) -> None:
        """Clear `flow` when exactly so many more bytes of answers have been passed on."""
        self._hold_at = self.answered + num_bytes

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.flow.set()
        self.cut()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _start(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.connected += 1
            try:
                server = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            open_ends = [2]
            self._start(self._pass_on, client, server, False, open_ends)
            self._start(self._pass_on, server, client, True, open_ends)

    def _pass_on(
        self, source: socket.socket, target: socket.socket, answers: bool, open_ends: list[int]
    ) -> None:
        with suppress(OSError):
            while data := source.recv(self.chunk_bytes if answers else CHUNK_BYTES):
                if answers:
                    self._hold_back(data, target)
                else:
                    target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._sockets -= {source, target}
            open_ends[0] -= 1
            last = not open_ends[0]
        if last:
            source.close()
            target.close()

    def _hold_back(self, data: bytes, target: socket.socket) -> None:
        time.sleep(self.delay_s)
        self.flow.wait()
        if self._hold_at is not None and self.answered + len(data) >= self._hold_at:
            num, self._hold_at = self._hold_at - self.answered, None
            target.sendall(data[:num])
            data = data[num:]
            self.flow.clear()
            self.answered += num
            self.flow.wait()
        if self._cut_at is not None and self.answered + len(data) >= self._cut_at:
            data, cut = data[: self._cut_at - self.answered], True
            self._cut_at = None
        else:
            cut = False
        target.sendall(data)
        self.answered += len(data)
        if cut:
            self.cut()
