"""The benchmarks run, and drive the cache with the very streams that the limits were set on."""

from __future__ import annotations

import gc
import hashlib
import json
import math
from typing import TYPE_CHECKING

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from benchmarks import (
    copies,
    files,
    lateness,
    lease,
    limits,
    measure,
    redis_store,
    report,
    scaling,
    trace,
    tree,
)
from benchmarks.__main__ import main
from benchmarks.workloads import Chat, Eviction, FanOut, LongContext, Trace, calibrate

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable
    from pathlib import Path

DIGESTS = {
    "chat": "ec749c5792980e52c25d30c7abe9b8f9e85692bc5bc5573103aeeb44b1028cfe",
    "long context": "9b66fd4f199e05c19beae2d3b07b74c06ba689644a26aa10010cdd0cc8420c94",
    "fan out": "280ee00c9a40b1d6e8e37cee403f6afd5440c79f0c0a8abd5e58ac5174f5f25e",
    "eviction": "f232ea5e33d7c1726d1c7847e4401cdaee0dc3db41fc6fa38618320c27d519f1",
}
"""Taken from the generator that the limits and the figures of other caches were measured with."""


def streams(name: str) -> Iterable[array[int]]:
    if name == "chat":
        return (tokens for pair in Chat() for tokens in pair)
    if name == "long context":
        return (LongContext().key(), *LongContext().queries())
    if name == "fan out":
        return (*FanOut().inserts(), *FanOut().lookups())
    return Eviction()


@pytest.mark.parametrize("name", DIGESTS)
def test_a_stream_is_the_one_that_the_limits_were_set_on(name: str) -> None:
    digest = hashlib.sha256()
    for tokens in streams(name):
        digest.update(tokens)
    assert digest.hexdigest() == DIGESTS[name]


def test_equal_block_ids_of_a_trace_are_equal_tokens(tmp_path: Path) -> None:
    first, second = list(Trace(trace_file(tmp_path), block=4, limit=2))
    assert len(first) == 8
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second)


def test_the_unit_is_a_time() -> None:
    assert 0 < calibrate(rounds=50) < 1e4


@pytest.fixture(scope="module")
def tree_rows() -> list[measure.Row]:
    return tree.run(1, quick=True)


def test_the_tree_is_measured_at_every_page_size(tree_rows: list[measure.Row]) -> None:
    assert [(row.line, row.page_size) for row in tree_rows] == [
        (line, page_size) for line in tree.LINES for page_size in tree.PAGE_SIZES
    ]
    assert all(row.figures["median_c"] >= row.figures["without_key_c"] > 0 for row in tree_rows)
    matches = [row.figures["hit_rate"] for row in tree_rows if row.line == "c: match"]
    assert matches == [1.0, 1.0, 1.0]


def test_large_trees_are_measured_free_and_locked() -> None:
    rows = scaling.run(1, quick=True)
    lines = [row.line for row in rows]
    assert lines == [
        "100 leaves",
        "100 leaves, 90 % locked",
        "300 leaves",
        "300 leaves, 90 % locked",
        "300 leaves",
        "300 leaves, lru",
        "300 under one node",
    ]
    assert rows[0].figures["match_x"] == 1.0
    assert all(value > 0 for row in rows for value in row.figures.values())


def test_a_lease_is_measured_against_the_tree_of_its_round() -> None:
    rows = lease.run(1, quick=True, page_sizes=(16,))
    assert [row.line for row in rows] == [
        "a: tree",
        "a: lease",
        "a: tree, two tiers",
        "d: tree, evicting",
        "d: lease, evicting",
        "d: tree, two tiers, evicting",
    ]
    assert all(row.figures["tree_x"] > 0 for row in rows if "lease" in row.line)


def test_copies_are_measured_both_ways_and_leave_torchs_threads_alone() -> None:
    before = torch.get_num_threads()
    rows = copies.run(1, quick=True)
    assert torch.get_num_threads() == before
    assert [row.line for row in rows] == [
        "6 KiB slices, store",
        "6 KiB slices, load",
        "64 KiB slices, store",
        "64 KiB slices, load",
    ]
    assert all(value > 0 for row in rows for value in row.figures.values())
    assert {limit for row in rows for limit in limits.limits_for(row)} == {
        limit for limit in limits.LIMITS if limit.bench == "copies"
    }


def test_files_are_measured_cold_warm_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left where it is run."""
    monkeypatch.chdir(tmp_path)
    rows = files.run(1, quick=True)
    assert [row.line for row in rows] == [
        f"{size} rows, {work}"
        for size in ("256 KiB", "2 MiB")
        for work in ("cold read", "warm read", "write")
    ]
    assert all(value > 0 for row in rows for value in row.figures.values())
    assert {limit for row in rows for limit in limits.limits_for(row)} == {
        limit for limit in limits.LIMITS if limit.bench == "files"
    }
    assert not any(tmp_path.iterdir())


def test_lateness_is_measured_with_and_without_transfers_and_a_model() -> None:
    cores = torch.get_num_threads()
    rows = lateness.run(1, quick=True)
    assert [row.line for row in rows] == [
        "idle",
        "transfers",
        "all tiers",
        "model",
        "model, transfers",
        "model, all tiers",
        "model on one core",
        "model on one core, transfers",
        "model on one core, all tiers",
    ]
    moved = {row.line: row.figures["moved_gb_per_s"] > 0 for row in rows}
    assert moved["transfers"]
    assert moved["all tiers"]
    assert not moved["idle"]
    assert not moved["model"]
    assert {limit for row in rows for limit in limits.limits_for(row)} == {
        limit for limit in limits.LIMITS if limit.bench == "lateness"
    }
    assert torch.get_num_threads() == cores


def test_a_redis_server_is_read_and_written_with_rows_of_three_lengths() -> None:
    rows = redis_store.run(1, quick=True)
    assert [row.line for row in rows] == [
        f"{size} rows, {way}" for size in redis_store.ROW_BYTES for way in ("read", "write")
    ]
    assert all(value > 0 for row in rows for value in row.figures.values())
    assert {limit for row in rows for limit in limits.limits_for(row)} == {
        limit for limit in limits.LIMITS if limit.bench == "redis"
    }


def test_a_replay_hits_what_the_pool_still_holds(tmp_path: Path) -> None:
    path = trace_file(tmp_path)
    rows = trace.run(path, pool_blocks=(100, 2))
    assert [row.line for row in rows] == ["100 blocks", "2 blocks"]
    # six blocks asked for; with room, one of the second request and both of the third are there
    assert rows[0].figures["hit_rate"] == pytest.approx(3 / 6)
    assert rows[1].figures["hit_rate"] == pytest.approx(2 / 6)


def test_a_limit_is_judged_where_it_applies() -> None:
    good = measure.Row("tree", "a: request", {"median_c": 30.0, "hit_rate": 0.99985}, page_size=1)
    slow = measure.Row("tree", "a: request", {"median_c": 30.0, "hit_rate": 0.99985}, page_size=16)
    other = measure.Row(
        "tree", "a: request, whole prompt", {"median_c": 300.0, "hit_rate": math.nan}, page_size=1
    )
    assert report.missed([good, other]) == []
    assert report.missed([slow]) == ["tree, a: request, P=16: median_c ≤ 28"]


def test_every_limit_names_a_figure_that_is_measured(
    tree_rows: list[measure.Row], tmp_path: Path
) -> None:
    """A limit that names no row would hold for ever."""
    rows = [*tree_rows, *lease.run(1, quick=True), *trace.run(trace_file(tmp_path))]
    measured = {limit for row in rows for limit in limits.limits_for(row)}
    assert measured == {
        limit for limit in limits.LIMITS if limit.bench in {"tree", "lease", "trace"}
    }


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    app = Typer()
    app.command()(main)
    out = tmp_path / "figures.json"
    thresholds = gc.get_threshold()
    result = CliRunner().invoke(
        app, ["trace", "--trace", str(trace_file(tmp_path)), "--repeat", "1", "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "hit rate" in result.output
    assert [row["line"] for row in json.loads(out.read_text())["rows"]] == [
        "10,000 blocks",
        "50,000 blocks",
    ]
    assert gc.get_threshold() == thresholds


def test_strict_fails_on_a_missed_limit(tmp_path: Path) -> None:
    app = Typer()
    app.command()(main)
    path = tmp_path / "cold.jsonl"
    path.write_text(json.dumps({"hash_ids": [1]}) + "\n")
    arguments = ["trace", "--trace", str(path), "--repeat", "1"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "--strict"]).exit_code == 1


def trace_file(folder: Path) -> Path:
    """Three requests of two blocks: the second shares one with the first, which comes again."""
    path = folder / "trace.jsonl"
    path.write_text(
        "".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([7, 8], [7, 9], [7, 8]))
    )
    return path
