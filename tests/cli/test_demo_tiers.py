"""What the demo says of three tiers: promised is what is shown, and nothing else passes for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiered_cache.cli import _demo_tiers as tiers
from tiered_cache.cli._demo_restart import Restart, RestartError, restart
from tiered_cache.cli._demo_run import (
    Comparison,
    DemoSize,
    Phase,
    Reference,
    Request,
    base_capacity,
)
from tiered_cache.config import load_config
from tiered_cache.stats import CacheStats, PoolStats, StorageCounters, StorageStats

SIZE = DemoSize(chats=4, turns=2, new_tokens=1, tenants=3, one_by_one=True)


def request(chat: int, turn: int, at: float, **parts: Any) -> Request:
    """A request for 1,000 tokens that was granted at `at` and whose model took `model_s`."""
    model_s = parts.pop("model_s", 0.2)
    made = Request(chat, turn, 1_000, arrived=0.0, granted=at, first_token=at + model_s, **parts)
    made.num_computed = 1_000 - made.num_from_host - made.num_from_storage
    return made


def phase(requests: list[Request]) -> Phase:
    pools = {"full": PoolStats(capacity=96, free=96, evictable=0, protected=0)}
    counters = StorageCounters(objects_written=70, bytes_written=70_000_000, objects_read=65)
    storage = StorageStats(
        True, "closed", "closed", "", 0.0, 0.0, 0, 0, 0, 0, None, None, None, counters
    )
    stats = CacheStats(pools, pools, 0, 0, 0, 0, storage=storage)
    return Phase({(r.chat, r.turn): r for r in requests}, 1.0, stats, 96 * 16)


def story(**first: Any) -> tiers.Story:
    """Every tier was hit, and the restart's first answer is `first`."""
    keys = [(chat, turn) for turn in range(2) for chat in range(4)]
    without = [request(*key, at=0.0, model_s=3.0) for key in keys]
    with_cache = [request(*key, at=float(at), model_s=2.9) for at, key in enumerate(keys)]
    with_cache[1].num_computed = 10  # the rest was on the device
    with_cache[2] = request(2, 0, 2.0, num_from_host=900, load_s=0.01)
    with_cache[3] = request(3, 0, 3.0, num_from_storage=900, load_s=0.01, prefetch_s=0.05)
    again = [
        request(0, 0, 1.0, **{"num_from_storage": 990, "prefetch_s": 0.04, "load_s": 0.01} | first),
        *(request(chat, 0, 1.0 + chat, num_from_host=900) for chat in (1, 2, 3)),
    ]
    requests = {(r.chat, r.turn): r for r in again}
    recomputed = request(0, 0, 9.0, model_s=3.0)
    restarted = Restart(requests, recomputed, Comparison(Reference()), 1.0, 4711, 62, 62_000_000)
    return tiers.Story("Some model", SIZE, phase(without), phase(with_cache), restarted)


def test_what_was_promised_is_so() -> None:
    """The numbers of the first answer after the restart, by hand."""
    told = story()
    assert tiers.all_is_shown(told)
    assert "1 hit the device, 1 the host, 1 storage; 70 pages (70 MB)" in tiers.hits_summary(told)
    said = tiers.restart_summary(told)
    assert "990 of the first prompt's 1,000 tokens from storage: 0.040 s to the host" in said
    assert (
        "15.0 times sooner than computing it in the same process (at least 4 are promised)" in said
    )
    assert "12.0 times with prefetch and load" in said


def test_a_factor_below_the_promised_one_is_said_and_is_no_failure() -> None:
    """Times are the machine's."""
    told = story(model_s=1.0)
    assert tiers.all_is_shown(told)
    assert "3.0 times sooner than computing it" in tiers.restart_summary(told)
    assert "this is LESS" in tiers.restart_summary(told)


def test_a_first_answer_that_is_not_from_storage_breaks_the_promise() -> None:
    told = story(num_from_storage=480)
    assert not tiers.all_is_shown(told)
    assert tiers.restart_summary(told).startswith("NOT FROM STORAGE: after the restart only 480")


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_a_tier_that_was_not_hit_breaks_the_promise(tier: str) -> None:
    told = story()
    for made in told.with_cache.requests.values():
        if getattr(made, tiers.SOURCES[tier][0]):
            made.num_from_host = made.num_from_storage = 0
            made.num_computed = made.prompt_len
    assert not tiers.all_is_shown(told)
    assert tiers.hits_summary(told).startswith(f"NO HIT of {tier}: 70 pages")


def test_times_are_by_where_most_of_a_prompt_was() -> None:
    """A part from elsewhere does not change the row; each row compares the same requests."""
    told = story()
    columns = [list(column.cells) for column in tiers.times_table(told).columns]
    rows = {row[0]: row[1:] for row in zip(*columns, strict=True)}
    assert list(rows) == [
        "without (8)",
        "with: computed (5)",
        "with: device (1)",
        "with: host (1)",
        "with: storage (1)",
        "restart: host (3)",
        "restart: storage (1)",
    ]
    assert rows["with: storage (1)"] == ("0.050", "0.010", "0.200", "0.260", "3.000", "11.5 ×")
    columns = [list(column.cells) for column in tiers.tokens_table(told).columns]
    rows = {row[0]: row[1:] for row in zip(*columns, strict=True)}
    assert rows["turn 1"] == ("990 (1)", "900 (1)", "900 (1)", "1,210 (4)")
    assert rows["after restart"] == ("0 (0)", "2,700 (3)", "990 (1)", "310 (4)")


@pytest.mark.parametrize("num_from_storage", [990, 0])
def test_there_is_a_plot_of_whatever_happened(tmp_path: Path, num_from_storage: int) -> None:
    """Also of a restart that has found nothing, and of a single request."""
    plot = tmp_path / "plot.png"
    told = story(num_from_storage=num_from_storage)
    tiers.plot(told, plot)
    assert plot.read_bytes().startswith(b"\x89PNG")
    alone = {(0, 0): told.without.requests[0, 0]}
    one = tiers.Story(
        "Some model",
        DemoSize(1, 1, 1, one_by_one=True),
        replace(told.without, requests=alone),
        replace(told.with_cache, requests=alone),
        replace(told.again, requests=alone),
    )
    tiers.plot(one, plot)


def test_tokens_are_counted_by_full_attention() -> None:
    """A tier that has fewer pages of a window, or more, holds no fewer tokens for that."""
    pools = {
        name: PoolStats(capacity=capacity, free=0, evictable=0, protected=0)
        for name, capacity in (("full", 96), ("swa", 48))
    }
    assert base_capacity(pools) == 96


def test_tenants_come_back_after_none_one_and_two_others() -> None:
    """With three of them; more of them take turns in the others' places, and one has all chats."""
    size = replace(SIZE, chats=16)
    assert [size.tenant(chat) for chat in range(16)] == [0, 0, 1, 0, 2, 1, 0, 0] * 2
    of_five = replace(size, tenants=5)
    assert {of_five.tenant(chat) for chat in range(16)} == set(range(5))
    assert {replace(size, tenants=1).tenant(chat) for chat in range(16)} == {0}
    assert {replace(size, tenants=2).tenant(chat) for chat in range(16)} == {0, 1}


@pytest.mark.timeout(120)
def test_a_second_process_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    """It says itself what was wrong, on standard error."""
    model = {"dtype": "int8", "num_layers": 1, "num_kv_heads": 1, "head_dim": 4}
    config = load_config({"model": model}, environ={}).model_copy(update={"page_size": 0})
    with pytest.raises(RestartError, match="exit code 1"):
        restart(config, "smollm2-135m", SIZE, Reference(), lambda count: None)
    assert "page_size" in capfd.readouterr().err
