"""A process of its own with a cache on shared storage: serves prompts as one identity, then says
how much of each it found (see test_shared_storage)."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

from tests.lease_helpers import rig, seq
from tests.storage_helpers import MODEL, wipe

P: Final = 4

BASE: Final[dict[str, Any]] = {"model": MODEL, "page_size": P, "salt": None}

IDENTITIES: Final[dict[str, dict[str, Any]]] = {
    "base": {},
    "salt": {"salt": "tenant"},
    "revision": {"model": {**MODEL, "revision": "2"}},
    "id": {"model": {**MODEL, "id": "test/fine-tune"}},
    # As many bytes, read as other numbers.
    "dtype": {"model": {**MODEL, "dtype": "bfloat16"}},
    "same bytes": {"model": {**MODEL, "dtype": "float16"}},
    "layers": {"model": {**MODEL, "num_layers": 1, "head_dim": 4}},
    "heads": {"model": {**MODEL, "num_kv_heads": 2, "head_dim": 1}},
    "page size": {"page_size": 8},
}


async def serve(identity: str, storage: dict[str, Any], names: str) -> dict[str, int]:
    """Ask for a prompt of each name, and publish it; tokens that were reused, by name."""
    settings = {**BASE, **IDENTITIES[identity]}
    salt = settings.pop("salt")
    found = {}
    async with rig(
        64,
        host={"tokens": 256},
        storage={**storage, "prefetch": {"threshold": 0, "policy": "wait_complete"}},
        **settings,
    ) as r:
        await r.cache.drain()
        r.spoil_free_pages()
        for name in names:
            prompt = [*seq(name, 32), 1]
            async with r.cache.lease(prompt, cache_salt=salt) as lease:
                found[name] = lease.prefix_len
                r.oracle.verify(lease, lease.key, 0, lease.prefix_len)
                await r.compute(lease)
            await r.cache.drain()
            wipe(r)
    return found


def main() -> None:
    storage = json.loads(sys.argv[1])
    for line in sys.stdin:
        identity, names = line.rstrip("\n").split(":")
        sys.stdout.write(json.dumps(asyncio.run(serve(identity, storage, names))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
