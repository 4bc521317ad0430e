"""Several components share a budget by ratio, and nothing is outside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tiered_cache import build as parts_of
from tiered_cache.build import Sizing, build, record_facts, size_stack
from tiered_cache.cli.check import warnings
from tiered_cache.config import Config, load_config
from tiered_cache.errors import ConfigError
from tiered_cache.pools.spec import PoolSpec
from tiered_cache.strategies.base import ComponentSpec, StackPlan
from tiered_cache.strategies.registry import register_stack_strategy
from tiered_cache.types import ComponentId

FULL, SWA, MAMBA = ComponentId("full"), ComponentId("swa"), ComponentId("mamba")
MODEL: dict[str, Any] = {
    "dtype": "float32",
    "num_layers": 3,
    "num_kv_heads": 1,
    "head_dim": 4,
    "layer_types": ["full_attention", "sliding_attention", "linear_attention"],
    "sliding_window": 20,
    "states": [{"name": "conv", "row_shape": [512], "dtype": "float32"}],
}
PAGE = 2 * 16 * 16
"""Bytes of a page of `full` or of `swa`: keys and values, 16 bytes per token."""
STATE = 2048
ROW = 4096
"""Of each component, on the host."""


def config(**sections: Any) -> Config:
    return load_config({"model": MODEL, "device": {"tokens": 160}, **sections}, environ={})


def sizing(**sections: Any) -> Sizing:
    return size_stack(config(**sections))


def problems(**sections: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        sizing(**sections)
    return {problem.key: str(problem) for problem in caught.value.problems}


# --- Shares -------------------------------------------------------------------------------------


def test_by_default_half_as_many_pages_of_a_window_and_a_state_for_every_tenth() -> None:
    """`tokens` are the first component's."""
    assert sizing(device={"tokens": 320}).num_pages == {FULL: 20, SWA: 10, MAMBA: 2}


def test_by_default_states_take_no_more_bytes_than_the_first_component() -> None:
    """One can be as large as thousands of tokens."""
    states = [{"name": "conv", "row_shape": [16 * 512], "dtype": "float32"}]  # 64 pages
    found = sizing(model={**MODEL, "states": states}, device={"tokens": 16 * 640})
    assert found.num_pages == {FULL: 640, SWA: 320, MAMBA: 10}
    assert found.page_bytes(MAMBA) * 10 == found.page_bytes(FULL) * 640


@pytest.mark.parametrize(
    ("ratio", "pages", "ids"),
    [
        ({"swa": 0.29}, 100, {FULL: 100, SWA: 29, MAMBA: 10}),
        ({"swa": 1, "mamba": 0.5}, 10, {FULL: 10, SWA: 10, MAMBA: 5}),
        ({"swa": 2.5, "mamba": 1e-9}, 10, {FULL: 10, SWA: 25, MAMBA: 1}),
        ({"mamba": 0.3}, 1, {FULL: 1, SWA: 1, MAMBA: 1}),
    ],
)
def test_ids_per_page_of_the_first_component(
    ratio: dict[str, float], pages: int, ids: dict[str, int]
) -> None:
    """Rounded down, and at least one; what is not said stays at its default."""
    assert sizing(device={"tokens": pages * 16, "ratio": ratio}).num_pages == ids


@pytest.mark.parametrize("ratio", [{}, {"swa": 0.3, "mamba": 0.07}, {"swa": 3.0}])
def test_bytes_buy_as_many_pages_as_fit(ratio: dict[str, float]) -> None:
    """All components are inside the budget, and one page more is not."""
    for size in (*range(4 * PAGE + STATE, 9000, 173), 1_000_000, 123_456_789):
        found = sizing(device={"size": size, "ratio": ratio})
        assert found.num_pages is not None
        assert found.device_bytes <= size
        more = sizing(device={"tokens": (found.num_pages[FULL] + 1) * 16, "ratio": ratio})
        assert more.device_bytes > size


def test_the_host_shares_its_rows_by_its_own_ratio() -> None:
    """The device's says nothing about it; header room and padding count."""
    host = {"size": 100 * ROW, "ratio": {"swa": 0.5, "mamba": 0.5}}
    found = sizing(device={"tokens": 160, "ratio": {"swa": 1}}, host=host)
    assert found.num_pages == {FULL: 10, SWA: 10, MAMBA: 1}
    assert found.host_pages == {FULL: 50, SWA: 25, MAMBA: 25}
    assert found.host_bytes == 100 * ROW
    assert sizing(host={"tokens": 320}).host_pages == {FULL: 20, SWA: 10, MAMBA: 2}


def test_a_budget_for_less_than_one_id_of_each_is_refused() -> None:
    """Says what the least is."""
    least = 2 * PAGE + STATE
    found = problems(device={"size": least - 1}, host={"size": 3 * ROW - 1})
    assert found == {
        "device.size": "device.size: is too small for one page (one page of 16 tokens, with one id "
        f"of swa and mamba beside it, takes {least:,} bytes: write more)",
        "host.size": "host.size: is too small for one page (one page of 16 tokens, with one id of "
        "swa and mamba beside it, takes 12,288 bytes: write more)",
    }
    assert sizing(device={"size": least}).num_pages == {FULL: 1, SWA: 1, MAMBA: 1}


def test_ids_of_any_component_are_counted_in_int32() -> None:
    """A ratio above one makes more of them than of the first's pages."""
    found = problems(device={"tokens": 16 * 3_000_000, "ratio": {"swa": 1000}})
    assert "at most 2,147,483,647 pages" in found["device.tokens"]


# --- Mistakes -----------------------------------------------------------------------------------


def test_a_ratio_for_no_component_names_its_line(tmp_path: Path) -> None:
    """All of them at once, with what there is; an id with a dot is found, too."""
    path = tmp_path / "cache.yaml"
    path.write_text(
        "model: {dtype: float32, num_layers: 3, num_kv_heads: 1, head_dim: 4, sliding_window: 8,\n"
        "  layer_types: [full_attention, sliding_attention, sliding_attention]}\n"
        "device: {tokens: 64, ratio: {full: 1, swaa: 1}}\n"
        "host:\n  tokens: 64\n  ratio:\n    swa: 1\n    swa.512: 0.5\n"
    )
    with pytest.raises(ConfigError) as caught:
        size_stack(load_config(path, environ={}))
    assert [str(problem).removeprefix(str(path)) for problem in caught.value.problems] == [
        ":3:36: device.ratio.full: is what the others are counted by: its ratio is 1 (take it out)",
        ":3:45: device.ratio.swaa: there is no such component (did you mean swa? It is swa)",
        ":8:14: host.ratio.swa.512: there is no such component (did you mean swa? It is swa)",
    ]


def test_a_ratio_where_there_is_one_component() -> None:
    """Nobody shares with it."""
    plain = {key: MODEL[key] for key in ("dtype", "num_layers", "num_kv_heads", "head_dim")}
    found = problems(model=plain, device={"tokens": 64, "ratio": {"swa": 0.5}})
    assert found["device.ratio.swa"].endswith("(full is the only one: take it out)")


def test_a_host_that_does_not_fit_is_told_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all components counted."""
    monkeypatch.setattr(parts_of, "available_bytes", lambda: 20 * ROW)
    with pytest.raises(ConfigError, match=r"write at most tokens: 176\b"):  # 11 + 5 + 1 rows
        build(config(host={"tokens": 1600}))
    assert sizing().device_bytes < 3 * ROW
    assert sizing(host={"tokens": 176}).host_bytes == 17 * ROW


class NoWindow:
    """A user's strategy that forgets the window."""

    name = "no_window"

    def matches(self, model: Any) -> bool:
        return False

    def plan(self, model: Any, page_size: int) -> StackPlan:
        pool = PoolSpec("k", SWA, (0,), (4,), "float32", page_size)
        return StackPlan((ComponentSpec(SWA, "swa"),), (pool,))


def test_a_component_that_lacks_what_its_kind_needs_is_refused() -> None:
    """Before anything is made of it."""
    unregister = register_stack_strategy(NoWindow())
    try:
        found = problems(model={"strategy": "no_window", "dtype": "float32", "num_layers": 1})
    finally:
        unregister()
    assert found == {"model.strategy": "model.strategy: component 'swa': has no window"}


def test_a_state_may_not_take_an_attention_pools_name() -> None:
    """`k` and `v` are taken."""
    states = [{"name": "k", "row_shape": [4], "dtype": "float32"}]
    found = problems(model={**MODEL, "states": states})
    assert found == {"model.states": "model.states: there are two pools 'k' (rename one)"}


def test_components_with_too_few_ids_are_warned_of() -> None:
    """A window that does not fit admits no longer request; one state can never be kept."""
    found = list(warnings(config(), sizing()))
    assert len(found) == 1
    assert found[0].startswith("device holds a single id of mamba: nothing of it can be kept;")
    given = config(device={"tokens": 320, "ratio": {"swa": 0.1}}, host={"tokens": 160})
    found = list(warnings(given, size_stack(given)))
    swa, host, states = (text for text in found if "wastes less" not in text)
    assert swa.startswith(
        "device holds 32 tokens of swa, less than its window (20) and a page: no longer request"
    )
    assert host.startswith("host holds 160 tokens, fewer than the device (320)")
    assert states.startswith("host holds fewer ids of mamba (1) than the device (2)")


# --- Parts --------------------------------------------------------------------------------------


def test_the_parts_are_made_in_dense_order() -> None:
    """Allocators, arenas and pools of each component, with its own number of ids."""
    parts = build(config(device={"tokens": 320}, host={"tokens": 640}))
    assert [component.id for component in parts.components] == [FULL, SWA, MAMBA]
    assert [allocator.capacity for allocator in parts.allocators] == [20, 10, 2]
    assert [arena.num_pages for arena in parts.arenas] == [40, 20, 4]
    assert parts.pools.layer("k", 0).shape == (320, 1, 4)
    assert parts.pools.layer("swa.k", 1).shape == (160, 1, 4)
    assert parts.pools.layer("conv", 2).shape == (2, 512)
    assert parts.pools.pages("conv", 2).shape == (2, 1, 512)
    assert parts.host is not None
    parts.host.close()


def test_the_users_tensors_define_the_ids_of_each_component() -> None:
    """A state's tensor has one row per slot."""
    tensors = {
        **{name: [torch.zeros(5 * 16, 1, 4)] for name in ("k", "v")},
        **{name: [torch.zeros(3, 16, 1, 4)] for name in ("swa.k", "swa.v")},
        "conv": [torch.zeros(2, 512)],
    }
    parts = build(config(device={}), device_pools=tensors)
    assert parts.pools.num_pages == {FULL: 5, SWA: 3, MAMBA: 2}


def test_a_window_is_a_fact_about_the_bytes() -> None:
    """Another one is another state, though the rows are as long."""
    given = config()

    def facts(window: int) -> dict[str, Any]:
        found = sizing(model={**MODEL, "sliding_window": window})
        return record_facts(given.model, found, SWA, rank=0, world_size=1)

    assert facts(20) == facts(20)
    assert facts(20) != facts(21)
    assert facts(20)["components"] == [
        {"id": "full", "kind": "full"},
        {"id": "swa", "kind": "swa", "window": 20},
        {"id": "mamba", "kind": "mamba"},
    ]
