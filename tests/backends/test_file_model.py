"""The file backend against a page of code that does the same in memory, step by step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.backends.file_helpers import ROW, got, keys, object_file, object_files, opened, put
from tiered_cache_file import FileBackend, victims

MAX_ROWS = 24


class Model:
    """Numbers with their length in rows, and when each was last used."""

    def __init__(self) -> None:
        self.num_rows: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self._now = 0

    def stamps(self, num: int) -> range:
        self._now += num
        return range(self._now, self._now - num, -1)

    @property
    def total(self) -> int:
        return sum(self.num_rows.values())

    def use(self, numbers: list[int]) -> list[bool]:
        for number, stamp in zip(numbers, self.stamps(len(numbers)), strict=True):
            if number in self.used:
                self.used[number] = stamp
        return [number in self.used for number in numbers]

    def write(self, numbers: list[int], num_rows: int) -> list[str]:
        results: dict[int, str] = {}
        stamps = dict(zip(numbers, self.stamps(len(numbers)), strict=True))
        for number in numbers:
            if self.num_rows.get(number) == num_rows:
                self.used[number] = stamps[number]
                results[number] = "exists"
        for number in numbers:
            if number not in results:
                results[number] = self._write_new(number, num_rows, stamps)
        return [results[number] for number in numbers]

    def _write_new(self, number: int, num_rows: int, stamps: dict[int, int]) -> str:
        self.remove(number)  # of another length
        while self.total + num_rows > MAX_ROWS:
            oldest = min(self.used, key=self.used.__getitem__)
            if self.used[oldest] >= min(stamps.values()):
                return "refused"
            self.remove(oldest)
        self.num_rows[number], self.used[number] = num_rows, stamps[number]
        return "written"

    def remove(self, number: int) -> None:
        self.num_rows.pop(number, None)
        self.used.pop(number, None)


@pytest.mark.parametrize("min_kept", [4, 4096], ids=["listed often", "listed once"])
@pytest.mark.parametrize("seed", range(3))
async def test_it_keeps_what_a_simple_reference_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, min_kept: int
) -> None:
    """Batches, uses, lengths, deletions, removals by others, restarts: the same answers, the same
    objects, the same sums."""
    monkeypatch.setattr(victims, "MIN_KEPT", min_kept)
    chance = random.Random(seed)
    model = Model()
    for _ in range(3):
        async with opened(tmp_path, max_size=MAX_ROWS * ROW) as store:
            for _ in range(50):
                await step(store, model, chance, tmp_path)
                assert len(object_files(tmp_path)) == len(model.used)
                assert store.stats().num_objects == len(model.used)
                assert store.stats().num_bytes == model.total * ROW <= MAX_ROWS * ROW


async def step(store: FileBackend, model: Model, chance: random.Random, root: Path) -> None:
    numbers = chance.sample(range(40), chance.randrange(1, 12))
    match chance.choice(["write", "write", "write", "read", "contains", "delete", "rm"]):
        case "write":
            num_rows = chance.choice([1, 1, 1, 2])
            results = await put(store, *numbers, num_bytes=num_rows * ROW)
            assert results == model.write(numbers, num_rows)
        case "read":
            answers = {True: "read", False: "missing"}
            numbers = [number for number in numbers if model.num_rows.get(number) != 2]
            assert await got(store, *numbers) == [answers[there] for there in model.use(numbers)]
        case "contains":
            assert await store.contains(keys(*numbers)) == model.use(numbers)
        case "delete":
            await store.delete(keys(*numbers[:3]))
            for number in numbers[:3]:
                model.remove(number)
        case "rm":
            for number in numbers[:2]:
                if number in model.used:
                    object_file(root, number).unlink()
                    model.remove(number)
            model.use(numbers[:2])
            assert await got(store, *numbers[:2]) == ["missing"] * len(numbers[:2])
