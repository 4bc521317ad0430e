"""Which strategies there are, and which one a model gets. Users' own go in front."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered_cache.config.schema import known_strategies, one_of
from tiered_cache.errors import ConfigError, ConfigProblem
from tiered_cache.strategies.mamba import MambaStrategy
from tiered_cache.strategies.mamba_swa import MambaSWAStrategy
from tiered_cache.strategies.plain import PlainStrategy
from tiered_cache.strategies.swa import SWAStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered_cache.config import ModelConfig
    from tiered_cache.strategies.base import StackStrategy

_strategies: Final[list[StackStrategy]] = [
    PlainStrategy(),
    SWAStrategy(),
    MambaStrategy(),
    MambaSWAStrategy(),
]


def register_stack_strategy(strategy: StackStrategy) -> Callable[[], None]:
    """Puts a strategy in front of all others, for this process.

    Register before loading the configuration that names it. One with the name of another hides it.

    Returns:
        A function that takes the strategy out again.
    """
    _strategies.insert(0, strategy)
    known_strategies.add(strategy.name)

    def unregister() -> None:
        _strategies.remove(strategy)
        if strategy.name not in {other.name for other in _strategies}:
            known_strategies.discard(strategy.name)

    return unregister


def select_strategy(model: ModelConfig) -> StackStrategy:
    """The strategy that the model names, else the first one that fits it.

    Raises:
        ConfigError: there is none; says which model, and what there is.
    """
    for strategy in _strategies:
        if model.strategy == strategy.name or (model.strategy is None and strategy.matches(model)):
            return strategy
    names = [strategy.name for strategy in _strategies]
    if model.strategy is not None:
        message, suggestion = f"no strategy {model.strategy!r}", one_of(model.strategy, names)
    else:
        described = ", ".join(sorted(model.model_fields_set))
        message = f"no strategy fits model {model.id or '(no id)'} described by {described}"
        suggestion = f"there are {', '.join(names)}; bring your own with register_stack_strategy"
    raise ConfigError([ConfigProblem(message, "model.strategy", suggestion=suggestion)])
