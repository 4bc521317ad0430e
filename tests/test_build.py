"""Settings become parts: a budget becomes pages, names become objects, mistakes name their line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tiered_cache import build as parts_of
from tiered_cache.build import build, size_stack
from tiered_cache.config import Config, ModelConfig, load_config
from tiered_cache.config.schema import EvictionPolicyName
from tiered_cache.errors import ConfigError, IntegrityError
from tiered_cache.observe import Observer
from tiered_cache.pools.spec import PoolSpec
from tiered_cache.strategies.base import ComponentSpec, StackPlan
from tiered_cache.strategies.registry import register_stack_strategy
from tiered_cache.tree.policies import RANKS
from tiered_cache.types import ComponentId

MODEL = {"dtype": "float32", "num_layers": 2, "num_kv_heads": 1, "head_dim": 4}
FULL, OTHER = ComponentId("full"), ComponentId("other")
POOL = PoolSpec("k", FULL, (0,), (4,), "float32", 16)
PAGE_BYTES = 2 * 2 * 4 * 4 * 16  # k and v, layers, elements, bytes, tokens


def config(**sections: Any) -> Config:
    return load_config({"model": MODEL, "device": {"tokens": 64}, **sections}, environ={})


def refusal(given: Config, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(given, **options)
    return str(caught.value)


# --- Budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "page_size", "num_pages"),
    [
        ({"tokens": 64}, 16, 4),
        ({"tokens": 79}, 16, 4),
        ({"tokens": 64}, 1, 64),
        ({"size": PAGE_BYTES}, 16, 1),
        ({"size": 3 * PAGE_BYTES - 1}, 16, 2),
        ({"size": "10KiB"}, 16, 10),
        ({"size": "10kB"}, 16, 9),
    ],
)
def test_a_budget_becomes_whole_pages(
    device: dict[str, Any], page_size: int, num_pages: int
) -> None:
    """By tokens or by bytes, all pools counted; never more than was allowed."""
    parts = build(config(device=device, page_size=page_size))
    assert parts.pools.num_pages == {"full": num_pages}
    assert [allocator.capacity for allocator in parts.allocators] == [num_pages]
    assert parts.pools.layer("k", 0).shape[0] == num_pages * page_size
    assert parts.tree.page_size == parts.page_size == page_size


def test_extra_pools_are_inside_the_budget() -> None:
    """They make a page larger, so the same bytes hold fewer."""
    extra = {"name": "draft", "num_layers": 1, "row_shape": [16], "dtype": "float32"}
    given = config(model={**MODEL, "extra_pools": [extra]}, device={"size": 4 * PAGE_BYTES})
    assert size_stack(given).num_pages == {"full": 2}


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (
            "size: 1023",
            r"yaml:3:9: device\.size: is too small for one page \(one page of 16 tokens",
        ),
        ("tokens: 15", r"yaml:3:11: device\.tokens: is too small for one page \(write at least"),
        ("tokens: 99999999999", r"yaml:3:11: device\.tokens: is too large"),
    ],
)
def test_a_budget_that_no_pool_can_have_names_its_line(
    tmp_path: Path, device: str, message: str
) -> None:
    """The mistake shows only when the model is known; its place is known all the same."""
    path = tmp_path / "cache.yaml"
    model = "{dtype: float32, num_layers: 2, num_kv_heads: 1, head_dim: 4}"
    path.write_text(f"model: {model}\ndevice:\n  {device}\n")
    with pytest.raises(ConfigError, match=message):
        build(load_config(path, environ={}))


def test_no_budget_and_no_tensors_is_an_error_of_open_only() -> None:
    """Such a file is fine to check and plan."""
    given = config(device={})
    assert size_stack(given).num_pages is None
    assert "device: has no budget (write size: 8GiB or tokens: 65536" in refusal(given)


@pytest.mark.parametrize(("module", "name"), [(torch, "zeros"), (np, "empty")])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_machine_without_the_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: type[Exception]
) -> None:
    """Pools or lists of page ids; the words of torch and numpy are far from the setting."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error("can't allocate memory")

    monkeypatch.setattr(module, name, refuse)
    assert "device.tokens: the machine refused 4,096 bytes on cpu" in refusal(config())


# --- The host tier ----------------------------------------------------------------------------

ROW_BYTES = 4096  # 512 of header room, 1,024 of state, padding


@pytest.mark.parametrize(
    ("host", "num_pages"),
    [
        ({"tokens": 79}, 4),
        ({"size": ROW_BYTES}, 1),
        ({"size": 3 * ROW_BYTES - 1}, 2),
        ({"size": "1MiB"}, 256),
    ],
)
def test_a_host_budget_becomes_whole_rows(host: dict[str, Any], num_pages: int) -> None:
    """Header room and padding are inside the budget: a row is what a page takes there."""
    sizing = size_stack(config(host=host))
    assert sizing.row_layout(FULL).stride == ROW_BYTES
    assert sizing.host_pages == {"full": num_pages}
    assert sizing.host_bytes == num_pages * ROW_BYTES
    assert sizing.num_pages == {"full": 4}
    assert sizing.device_bytes == 4 * PAGE_BYTES


def test_without_a_host_section_there_are_no_host_pages() -> None:
    """Absent means no second tier."""
    sizing = size_stack(config())
    assert (sizing.host_pages, sizing.host_bytes) == (None, 0)


def test_two_components_share_the_host_by_their_rows(wrong: Wrong) -> None:
    """Each gets the same number of pages, whatever one of its rows takes."""
    large = PoolSpec("l", OTHER, (0, 1), (64,), "float32", 16)  # 8,192 bytes of state
    plan = (ComponentSpec(FULL, "full"), ComponentSpec(OTHER, "full")), (POOL, large)
    wrong.result = StackPlan(*plan)
    given = config(model={**MODEL, "strategy": "wrong"}, host={"size": 5 * (4096 + 12288)})
    sizing = size_stack(given)
    assert sizing.host_pages == {"full": 5, "other": 5}
    assert sizing.host_bytes == 5 * (4096 + 12288)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (
            "size: 4095",
            r"yaml:4:9: host\.size: is too small for one page \(one page of 16 tokens takes 4,096",
        ),
        ("tokens: 15", r"yaml:4:11: host\.tokens: is too small for one page \(write at least"),
        ("tokens: 99999999999", r"yaml:4:11: host\.tokens: is too large \(at most 2,147,483,647"),
        ("size: 1024TiB", r"yaml:4:9: host\.size: is too large \(at most 2,147,483,647 pages"),
    ],
)
def test_a_host_budget_that_no_tier_can_have_names_its_line(
    tmp_path: Path, host: str, message: str
) -> None:
    """As for the device; both tiers are reported at once."""
    path = tmp_path / "cache.yaml"
    model = "{dtype: float32, num_layers: 2, num_kv_heads: 1, head_dim: 4}"
    path.write_text(f"model: {model}\ndevice: {{tokens: 1}}\nhost:\n  {host}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        size_stack(load_config(path, environ={}))
    assert caught.value.problems[0].key == "device.tokens"


@pytest.mark.parametrize(
    ("sections", "available", "message"),
    [
        (
            {"host": {"size": 5 * ROW_BYTES}},
            4 * PAGE_BYTES + 3 * ROW_BYTES,
            "host.size: the host tier takes 20,480 bytes, and the device tier 4,096 beside it; "
            "16,384 are left (write at most size: 12288)",
        ),
        (
            {"host": {"tokens": 80}},
            4 * PAGE_BYTES + 5 * ROW_BYTES - 1,
            "host.tokens: the host tier takes 20,480 bytes, and the device tier 4,096 beside it; "
            "24,575 are left (write at most tokens: 64)",
        ),
        (
            {"host": {"tokens": 80}},
            100,
            "host.tokens: the host tier takes 20,480 bytes, and the device tier 4,096 beside it; "
            "100 are left (write less for the device, or take the host section out)",
        ),
    ],
)
def test_a_host_tier_larger_than_the_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], available: int, message: str
) -> None:
    """Before anything is made: memory that is only promised kills the process when touched."""
    monkeypatch.setattr(parts_of, "available_bytes", lambda: available)
    assert refusal(config(**sections)) == message


def test_a_host_tier_that_just_fits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte; and where nobody says how much is left, nothing is refused."""
    for available in (4 * PAGE_BYTES + 5 * ROW_BYTES, None):
        monkeypatch.setattr(parts_of, "available_bytes", lambda value=available: value)
        build(config(host={"tokens": 80}))
    # The user's own tensors are there already.
    monkeypatch.setattr(parts_of, "available_bytes", lambda: 5 * ROW_BYTES)
    build(config(device={}, host={"tokens": 80}), device_pools=own_tensors(5))


def test_without_a_host_tier_no_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`build` may then be called on the event loop."""

    def never() -> int:
        raise AssertionError("read")

    monkeypatch.setattr(parts_of, "available_bytes", never)
    build(config())


# --- The user's tensors -----------------------------------------------------------------------


def own_tensors(num_pages: int) -> dict[str, list[torch.Tensor]]:
    return {name: [torch.zeros(num_pages * 16, 1, 4) for _ in range(2)] for name in "kv"}


def test_the_users_tensors_define_the_budget() -> None:
    """Pools, allocator and tree follow them."""
    tensors = own_tensors(5)
    parts = build(config(device={}), device_pools=tensors)
    assert parts.allocators[0].capacity == 5
    assert parts.pools.layer("k", 0).data_ptr() == tensors["k"][0].data_ptr()


def test_a_budget_beside_tensors_is_refused() -> None:
    """An option that would be ignored is an error."""
    text = refusal(config(), device_pools=own_tensors(5))
    assert "device.tokens: contradicts device_pools" in text


# --- Choices ----------------------------------------------------------------------------------


def test_the_schema_offers_exactly_the_trees_policies() -> None:
    """Two floors that may not import each other agree on the names."""
    assert set(get_args(EvictionPolicyName)) == set(RANKS)


@pytest.mark.parametrize("policy", get_args(EvictionPolicyName))
def test_the_policy_reaches_the_tree(policy: str) -> None:
    """The leaves of the device are ordered by what the file says."""
    parts = build(config(device={"tokens": 64, "eviction_policy": policy}))
    assert parts.tree.leaves.device.name == policy


def test_check_turns_double_frees_into_errors() -> None:
    """On, a page freed twice is found at once; off, nothing is recorded."""
    allocator = build(config(check=True)).allocators[0]
    ids = allocator.allocate(1)
    assert ids is not None
    allocator.free(ids)
    with pytest.raises(IntegrityError):
        allocator.free(ids)


def test_a_device_that_is_not_there_is_refused() -> None:
    """The number of devices is said."""
    if torch.cuda.is_available():
        assert "CUDA devices" in refusal(config(device={"tokens": 64, "type": "cuda:99"}))
    else:
        text = refusal(config(device={"tokens": 64, "type": "cuda"}))
        assert text == "device.type: this machine has no CUDA device (write cpu)"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pools_on_a_gpu() -> None:
    """`device.type` says where the tensors live."""
    parts = build(config(device={"tokens": 64, "type": "cuda"}))
    assert parts.pools.layer("v", 1).is_cuda


def test_observers_reach_the_tree() -> None:
    """Whoever opens a cache may watch it."""

    class Silent(Observer):
        def on_event(self, event: Any) -> None: ...

    assert build(config(), observers=[Silent()]).tree.observers


# --- Strategies that are wrong ----------------------------------------------------------------


class Wrong:
    """A user's strategy that returns what it is told to."""

    name = "wrong"

    def __init__(self) -> None:
        self.result = StackPlan((), ())

    def matches(self, model: ModelConfig) -> bool:
        return False

    def plan(self, model: ModelConfig, page_size: int) -> StackPlan:
        return self.result


@pytest.fixture
def wrong() -> Iterator[Wrong]:
    strategy = Wrong()
    unregister = register_stack_strategy(strategy)
    yield strategy
    unregister()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (StackPlan((), ()), "needs no component"),
        (StackPlan((ComponentSpec(FULL, "odd"),), (POOL,)), "unknown kind, 'odd'"),
        (StackPlan((ComponentSpec(FULL, "full"),) * 2, (POOL,)), "two components have the id"),
        (StackPlan((ComponentSpec(OTHER, "full"),), (POOL,)), "component 'other' has no pool"),
        (StackPlan((ComponentSpec(OTHER, "full"),), (POOL,)), "pool 'k' names no component"),
        (StackPlan((ComponentSpec(FULL, "full"),), (POOL, POOL)), "there are two pools 'k'"),
    ],
)
def test_a_strategy_that_contradicts_itself_is_refused(
    wrong: Wrong, plan: StackPlan, words: str
) -> None:
    """Third-party declarations are checked before anything is made of them."""
    wrong.result = plan
    assert words in refusal(config(model={**MODEL, "strategy": "wrong"}))


def test_an_extra_pool_may_not_take_a_models_name() -> None:
    """`k` and `v` are taken."""
    extra = {"name": "k", "num_layers": 1, "row_shape": [4], "dtype": "float32"}
    assert "there are two pools 'k' (rename one)" in refusal(
        config(model={**MODEL, "extra_pools": [extra]})
    )
