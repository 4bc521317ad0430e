"""The token streams that benchmarks drive the cache with, and the unit of their times.

Owns: four seeded workloads (a-d), the reader of `hash_ids` traces, and `calibrate`. Refuses to
know: the cache.

Streams are fixed by their seeds: a test holds a digest of each, so that figures of two versions are
about the same work. Keys come as `array('q')`, a type that a caller may well have and that the
cache has to convert.
"""

from __future__ import annotations

import json
import time
from array import array
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEED: Final = 20240607
VOCABULARY: Final = 128_000

Tokens = npt.NDArray[np.int64]


class Chat:
    """(a) Conversations over one system prompt; turn t of each comes before turn t + 1 of any.

    Yields (history, whole prompt): what the turn before left in the cache, and that plus the new
    tokens.
    """

    def __init__(
        self, conversations: int = 200, turns: int = 10, new: int = 512, system: int = 1024
    ) -> None:
        random = np.random.default_rng(SEED)
        self.system: Tokens = random.integers(0, VOCABULARY, system)
        self.turns: Tokens = random.integers(0, VOCABULARY, (conversations, turns * new))
        self.num_turns, self.new = turns, new

    @property
    def num_tokens(self) -> int:
        """Distinct tokens: a pool of this size never evicts."""
        return self.system.size + self.turns.size

    def __iter__(self) -> Iterator[tuple[array[int], array[int]]]:
        for turn in range(1, self.num_turns + 1):
            for conversation in self.turns:
                prompt = np.concatenate((self.system, conversation[: turn * self.new]))
                yield as_array(prompt[: -self.new]), as_array(prompt)


class LongContext:
    """(b) One long key that is cached, and look-ups whose last tokens differ from it."""

    def __init__(self, length: int = 131_072, queries: int = 200, tail: int = 1024) -> None:
        random = np.random.default_rng(SEED + 1)
        self.base: Tokens = random.integers(0, VOCABULARY, length)
        self.tails: Tokens = random.integers(0, VOCABULARY, (queries, tail))

    @property
    def num_tokens(self) -> int:
        return self.base.size

    def key(self) -> array[int]:
        return as_array(self.base)

    def queries(self) -> Iterator[array[int]]:
        head = self.base[: -self.tails.shape[1]]
        for tail in self.tails:
            yield as_array(np.concatenate((head, tail)))


class FanOut:
    """(c) Many short keys under one shared prefix; then each is looked up once, in random order."""

    def __init__(self, keys: int = 10_000, shared: int = 128, tail: int = 128) -> None:
        random = np.random.default_rng(SEED + 2)
        self.shared: Tokens = random.integers(0, VOCABULARY, shared)
        self.tails: Tokens = random.integers(0, VOCABULARY, (keys, tail))
        self.order = random.permutation(keys)

    @property
    def num_tokens(self) -> int:
        return self.shared.size + self.tails.size

    def inserts(self) -> Iterator[array[int]]:
        for tail in self.tails:
            yield as_array(np.concatenate((self.shared, tail)))

    def lookups(self) -> Iterator[array[int]]:
        for at in self.order:
            yield as_array(np.concatenate((self.shared, self.tails[at])))


class Eviction:
    """(d) Prompts of one of many prefixes (Zipf) plus a fresh tail, for a pool that holds few."""

    POOL_TOKENS: Final = 200_000

    def __init__(
        self,
        requests: int = 5000,
        prefixes: int = 500,
        prefix: int = 512,
        tail: int = 512,
        skew: float = 1.0,
    ) -> None:
        random = np.random.default_rng(SEED + 3)
        self.prefixes: Tokens = random.integers(0, VOCABULARY, (prefixes, prefix))
        weights = 1.0 / np.arange(1, prefixes + 1) ** skew
        self.picks = random.choice(prefixes, size=requests, p=weights / weights.sum())
        self.tails: Tokens = random.integers(0, VOCABULARY, (requests, tail))

    def __iter__(self) -> Iterator[array[int]]:
        for pick, tail in zip(self.picks, self.tails, strict=True):
            yield as_array(np.concatenate((self.prefixes[pick], tail)))


class Trace:
    """A recorded trace: JSON lines with `hash_ids`; an equal id is an equal block of the prompt.

    Block id h becomes tokens `[h * block, (h + 1) * block)`, so equal prefixes of ids are equal
    prefixes of tokens.
    """

    def __init__(self, path: Path, block: int = 16, limit: int | None = None) -> None:
        with path.open(encoding="utf-8") as lines:
            rows = [json.loads(line)["hash_ids"] for line in lines]
        self.rows: list[list[int]] = rows[:limit]
        self.block = block

    def __iter__(self) -> Iterator[array[int]]:
        offsets = np.arange(self.block, dtype=np.int64)
        for ids in self.rows:
            starts = np.asarray(ids, dtype=np.int64) * self.block
            yield as_array((starts[:, None] + offsets).reshape(-1))


def as_array(tokens: Tokens) -> array[int]:
    """The tokens as a caller of the cache may have them."""
    return array("q", tokens.tobytes())


def calibrate(rounds: int = 5000) -> float:
    """The unit `c`, in µs: the median time of a fixed mix of what a radix tree in Python does.

    A slice and a dict look-up, a comparison of 4 KiB, a walk over 20 small objects, a small numpy
    concatenate. Machines differ and drift by the minute: quote a time as a multiple of this, taken
    in the same run.
    """
    key = bytes(range(256)) * 64
    edge = key[:4096]
    table = {key[start : start + 64]: start for start in range(0, 4096, 64)}
    parts = [np.arange(64, dtype=np.int32) for _ in range(4)]
    leaf = None
    for _ in range(20):
        leaf = _Link(leaf)
    times = []
    for stamp in range(rounds):
        start_s = time.perf_counter()
        table.get(key[64:128])
        key.startswith(edge, 0)
        link = leaf
        while link is not None:
            link.stamp = stamp
            link.lock += 1
            link = link.parent
        np.concatenate(parts)
        times.append(time.perf_counter() - start_s)
    return sorted(times)[rounds // 2] * 1e6


class _Link:
    """A node as small as one can be: what `calibrate` walks over."""

    __slots__ = ("lock", "parent", "stamp")

    def __init__(self, parent: _Link | None) -> None:
        self.parent = parent
        self.stamp = 0
        self.lock = 0
