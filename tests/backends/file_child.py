"""A process that writes to a directory until it is killed, and says what it has been promised.

For each line "ROOT MAX_SIZE SEED NUM_ROWS" on its input it forks a writer and waits for that. The
writer prints "ready PID" when it has opened the directory, then the number of each row whose
writing was confirmed; at last the one that waits prints "ended". So a kill costs no start of an
interpreter. It loads the backend and the contract, and no torch.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
if "tiered_cache" not in sys.modules:  # as in the test that looks here for names
    package = types.ModuleType("tiered_cache")  # its own names would load the library, and torch
    package.__path__ = [str(ROOT / "tiered_cache")]
    sys.modules["tiered_cache"] = package

from tiered_cache.storage.record import RecordFormat, fingerprint  # noqa: E402
from tiered_cache.testing.backend_scene import ThreadContext  # noqa: E402
from tiered_cache_file import FileBackend, FileOptions  # noqa: E402

ROW_BYTES = 64 << 10
BATCH = 8


def record() -> RecordFormat:
    return RecordFormat("full", fingerprint({"of": "a killed process"}), ROW_BYTES, ROW_BYTES)


def page_key(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def sealed(number: int) -> memoryview:
    """The row of this number, as the cache would store it."""
    content = memoryview(bytearray(random.Random(-number).randbytes(ROW_BYTES)))
    record().seal(content, page_key(number))
    return content


async def write(root: str, max_size: int, seed: int, num_rows: int) -> None:
    async with ThreadContext(2) as context:
        options = FileOptions(path=root, max_size=max_size, reserve=0)
        backend = await FileBackend.open(options, context)
        say(f"ready {os.getpid()}")
        first = seed * 1_000_000
        for start in range(first, first + num_rows, BATCH):
            numbers = range(start, min(start + BATCH, first + num_rows))
            results = await backend.write(
                [record().object_key(page_key(number)) for number in numbers],
                [sealed(number) for number in numbers],
            )
            for number, result in zip(numbers, results, strict=True):
                if result.value in ("written", "exists"):
                    say(str(number))
        await backend.aclose()


def say(line: str) -> None:
    """At once, and whole: what is shorter than a pipe's buffer is written in one piece."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    assert "torch" not in sys.modules
    for line in sys.stdin:
        root, *numbers = line.split()
        writer = os.fork()
        if not writer:
            status = 1
            try:
                asyncio.run(write(root, *map(int, numbers)))
                status = 0
            finally:
                os._exit(status)
        os.waitpid(writer, 0)
        say("ended")


if __name__ == "__main__":
    main()
