"""A model gets the strategy that it names, else the first that fits; users' own stand in front."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiered_cache.build import size_stack
from tiered_cache.config import ModelConfig, load_config
from tiered_cache.errors import ConfigError
from tiered_cache.pools.spec import PoolSpec
from tiered_cache.strategies.base import ComponentSpec, StackPlan
from tiered_cache.strategies.plain import PlainStrategy
from tiered_cache.strategies.registry import register_stack_strategy, select_strategy
from tiered_cache.types import ComponentId

MODEL = {"dtype": "float32", "num_layers": 2, "num_kv_heads": 1, "head_dim": 4}


class Halved:
    """A user's strategy: a single pool, half as wide."""

    name = "halved"

    def matches(self, model: ModelConfig) -> bool:
        return model.head_dim == 8

    def plan(self, model: ModelConfig, page_size: int) -> StackPlan:
        full = ComponentId("full")
        layers = tuple(range(model.num_layers))
        pool = PoolSpec("kv", full, layers, (4,), model.dtype, page_size)
        return StackPlan((ComponentSpec(full, "full"),), (pool,))


@pytest.fixture
def halved() -> Iterator[Halved]:
    strategy = Halved()
    unregister = register_stack_strategy(strategy)
    yield strategy
    unregister()


def test_plain_is_built_in_by_name_and_by_fit() -> None:
    """A configuration need not name it."""
    assert isinstance(select_strategy(ModelConfig(**MODEL)), PlainStrategy)
    assert isinstance(select_strategy(ModelConfig(strategy="plain", **MODEL)), PlainStrategy)


def test_a_users_strategy_is_asked_first(halved: Halved) -> None:
    """It takes what it matches and leaves the rest; a name overrides both."""
    assert select_strategy(ModelConfig(**{**MODEL, "head_dim": 8})) is halved
    assert isinstance(select_strategy(ModelConfig(**MODEL)), PlainStrategy)
    assert select_strategy(ModelConfig(strategy="halved", **MODEL)) is halved


def test_a_users_strategy_works_from_a_configuration(halved: Halved) -> None:
    """Named there, it need not be described by the keys of built-in attention."""
    model = {"strategy": "halved", "dtype": "float32", "num_layers": 2}
    sizing = size_stack(load_config({"model": model, "device": {"size": "1KiB"}}, environ={}))
    assert [pool.name for pool in sizing.stack.pools] == ["kv"]
    assert sizing.num_pages == {"full": 2}


def test_taking_a_strategy_out_forgets_its_name() -> None:
    """Registrations do not outlive their owner."""
    register_stack_strategy(Halved())()
    with pytest.raises(ValueError, match="no such strategy"):
        ModelConfig(strategy="halved", **MODEL)


def test_a_strategy_that_nobody_has_is_named(halved: Halved) -> None:
    """The error offers what there is."""
    model = ModelConfig(strategy="halved", **MODEL).model_copy(update={"strategy": "halfed"})
    with pytest.raises(ConfigError, match=r"no strategy 'halfed'.*did you mean halved"):
        select_strategy(model)


def test_a_model_that_nothing_fits_is_described() -> None:
    """No name and no match: the error says which model, and how to bring a strategy."""
    model = ModelConfig.model_construct(
        {"dtype", "num_layers"}, id="odd/model", strategy=None, dtype="float32", num_layers=2
    )
    with pytest.raises(
        ConfigError, match=r"odd/model .*dtype, num_layers.*register_stack_strategy"
    ):
        select_strategy(model)
