"""A process of its own with a cache over a folder of files: asks for one prompt in every kind of
input that it is told, and says what storage had of it (see test_cases_identity)."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

import numpy as np
import torch

from tests.lease_helpers import rig
from tests.storage_helpers import MODEL, wipe

TOKENS: Final = [7, 300, 70_000, 2**31 - 1, *range(1000, 1008)]
"""Three pages, of token ids that take one to four bytes."""

KINDS: Final[dict[str, Any]] = {
    "list": list,
    "numpy int64": lambda tokens: np.array(tokens, np.int64),
    "numpy int32": lambda tokens: np.array(tokens, np.int32),
    "torch int64": lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    "torch int32": lambda tokens: torch.tensor(tokens, dtype=torch.int32),
}


async def ask(folder: str, kinds: list[str]) -> list[int]:
    """Tokens that storage had of the prompt, kind by kind; what it had not is computed and kept."""
    found = []
    files = {"path": folder, "max_size": "64MiB", "reserve": 0}
    prefetch = {"threshold": 0, "policy": "wait_complete"}
    storage = {"backend": "file", "options": files, "prefetch": prefetch}
    async with rig(16, model=MODEL, host={"tokens": 64}, storage=storage) as r:
        await r.cache.drain()
        for kind in kinds:
            r.spoil_free_pages()
            async with r.cache.lease(KINDS[kind]([*TOKENS, 1])) as lease:
                found.append(lease.hits.storage)
                r.oracle.verify(lease, lease.key, 0, lease.prefix_len)
                await r.compute(lease)
            await r.cache.drain()
            wipe(r)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(ask(sys.argv[1], sys.argv[2:]))))
