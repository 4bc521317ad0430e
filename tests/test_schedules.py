"""Thousands of schedules of two and three tiers, all different, and what they must have met
(`schedules`)."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Final

import pytest

from tests.schedules import Played, play

PER_CI_RUN: Final = 3_050
"""A few more than the 3,000 that must differ: two may come out alike."""

PER_SOAK: Final = 100_000

PER_PIECE: Final = 20
PER_PROCESSES: Final = 4_000

MOST_FOUND: Final = 10
"""Of more there is no need: a run that finds so many ends."""

FLOORS: Final = {
    # Two that want the same.
    "loads_joined": 500,
    "splits with a transfer pending": 500,
    "transfers that brought what was there": 60,
    "rematches": 1_000,
    # Reserve: no room.
    "stores_refused": 200,
    "stores put off": 200,
    # Move: the copier raises.
    "copies that failed at the first job": 200,
    "copies that failed at a later job": 200,
    "stores that arrived in part": 200,
    "loads that arrived in part": 50,
    "load_timeouts": 100,
    "copies that hang": 200,
    # Commit: the target is gone.
    "resets with transfers in flight": 100,
    "transfers that a reset came before": 200,
    # Somebody ends in the middle.
    "cancelled with transfers under way": 500,
    "closed with everything under way": 100,
    # Layer by layer.
    "layer-wise loads": 500,
    "runs that a load has failed under": 50,
    # What the tiers do for each other.
    "demotions": 2_000,
    "mirror reclaims": 500,
    "write_back rounds": 1_000,
    "tokens_hit_host": 10_000,
    # What requests do.
    "fences": 2_000,
    "fences that failed": 100,
    "runs queued behind their own": 500,
    "truncations": 1_000,
    "growth refused": 200,
    "batches": 1_000,
    "requests of an engine": 1_000,
    "loads by an engine": 200,
    # Windows and states.
    "tombstones matched below": 500,
    "windows given up behind": 800,
    "fences over windows and states": 1_500,
    "given up under a fence": 500,
    "states kept": 120,
    "states_skipped": 600,
    "states_taken_over": 15,
    "failed runs that void a state taken over": 1,
    "states restored after a failed run": 180,
    "failed runs that went back to a state": 250,
    "loads of a window": 90,
    "loads of a state": 30,
    "truncations of what was computed": 60,
    "found what was published to": 600,
    # Storage: what comes from there.
    "tokens_hit_storage": 2_000,
    "reads that brought something": 700,
    "reads that brought a part": 30,
    "prefetches_joined": 250,
    "prefetches_refused": 120,
    "prefetches_timed_out": 1_000,
    "detached prefetches": 500,
    "prefetches left to their time": 400,
    "read by another cache": 300,
    # Windows, states and a user's own from there.
    "reads that brought a window": 145,
    "reads that brought a state": 50,
    "reads that brought a sink": 26,
    "loads of a sink": 30,
    "tombstones that storage alone made good": 42,
    "prefetches that fell back to another boundary": 28,
    # What goes there.
    "backups_failed": 800,
    "backups_refused": 50,
    "backups_skipped": 150,
    "storage: objects_existing": 40,
    "storage: objects_deleted": 60,
    "splits while a backup is under way": 50,
    # What is wrong with it.
    "storage: calls_timed_out": 800,
    "storage: objects_corrupt": 100,
    "storage: objects_missing": 40,
    "storage calls that raise": 500,
    "contains with a lie": 500,
    "read with a lie": 25,
    "write with a lie": 100,
    "objects spoilt behind the cache's back": 500,
    # Who ends, or comes, in the middle of it.
    "reads given up under way": 200,
    "cancelled with storage calls under way": 150,
    "resets with storage calls in flight": 60,
    "detaches with storage calls under way": 60,
    "attaches": 500,
    "other stores": 50,
    "clears": 100,
    "restarts": 800,
    "restarts with storage calls under way": 10,
    # What the proofs could prove.
    "found what was published": 5_000,
}
"""How often one CI run must meet each situation."""


def play_some(seeds: range) -> list[Played | str]:
    """In a process of its own; what is found, in words, names its seed."""
    logging.disable(logging.CRITICAL)  # copies that fail are told of; thousands do
    played: list[Played | str] = []
    for seed in seeds:
        try:
            played.append(play(seed))
        except BaseException as error:
            played.append("".join(traceback.format_exception(error)))
    return played


def play_all(seeds: range) -> Iterator[Played | str]:
    """On all processors there are for it. Processes play some thousand and end: what the oracle
    remembers, and the classes that each schedule makes, would take gigabytes."""
    for at in range(0, len(seeds), PER_PROCESSES):
        yield from _play_all(seeds[at : at + PER_PROCESSES])


def _play_all(seeds: range) -> Iterator[Played | str]:
    pieces = [seeds[at : at + PER_PIECE] for at in range(0, len(seeds), PER_PIECE)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as processes:
        try:
            for played in processes.map(play_some, pieces):
                yield from played
        finally:
            processes.shutdown(cancel_futures=True)


def play_and_count(seeds: range) -> tuple[set[str], Counter[str]]:
    digests: set[str] = set()
    met: Counter[str] = Counter()
    began = told = time.monotonic()
    found: list[str] = []
    for count, played in enumerate(play_all(seeds), 1):
        if isinstance(played, str):
            sys.stderr.write(played)
            found.append(played)
            assert len(found) < MOST_FOUND, "\n".join(found)
            continue
        digests.add(played.digest)
        met.update(played.met)
        if time.monotonic() > told + 60:
            told = time.monotonic()
            sys.stderr.write(f"{count} schedules, {count / (told - began):.1f} a second\n")
    assert not found, "\n".join(found)
    return digests, met


def missed(met: Counter[str]) -> dict[str, int]:
    met["transfers that a reset came before"] = (
        met["loads that a reset came before"] + met["stores that a reset came before"]
    )
    return {what: met[what] for what, floor in FLOORS.items() if met[what] < floor}


@pytest.mark.timeout(600)
def test_thousands_of_schedules() -> None:
    """The same ones every time, no two alike, and they go where it is difficult."""
    digests, met = play_and_count(range(PER_CI_RUN))
    assert len(digests) >= 3_000
    assert not missed(met), f"the schedules do not go there often enough any more: {missed(met)}"
    assert met["background_failures"] == met["leases_dropped_unclosed"] == 0


def test_a_schedule_replays_from_its_seed() -> None:
    """To the last callback; the last three have windows and states, and the last of them storage
    and a component of a user's own."""
    for seed in (*range(5), 130, 546, 385):
        assert play(seed) == play(seed)


@pytest.mark.soak
def test_a_hundred_thousand_schedules() -> None:
    """New ones every time: from a seed that the clock gives."""
    first = time.time_ns() // 1_000_000
    sys.stderr.write(f"seeds from {first}\n")
    digests, met = play_and_count(range(first, first + PER_SOAK))
    assert len(digests) >= PER_SOAK * 0.99
    assert not missed(met)
