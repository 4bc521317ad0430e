"""Settings: YAML, environment and arguments become one frozen `Config`, or a list of what is wrong.

Owns: the schema, the order default < file < environment < argument, and where each setting was
written, so that a mistake found later (a pool too small for one page) still names file and line.
Refuses to know: which parts the settings choose (`build`), and anything about memory or models.

Strict throughout: an unknown or duplicate key is an error, and all errors are reported at once.
"""

from tiered_cache.config.hf import model_from_hf
from tiered_cache.config.load import load_config
from tiered_cache.config.schema import (
    BackupConfig,
    BreakerConfig,
    Config,
    DeviceConfig,
    ExtraPool,
    HostConfig,
    LayerState,
    ModelConfig,
    PrefetchConfig,
    StorageConfig,
)

__all__ = [
    "BackupConfig",
    "BreakerConfig",
    "Config",
    "DeviceConfig",
    "ExtraPool",
    "HostConfig",
    "LayerState",
    "ModelConfig",
    "PrefetchConfig",
    "StorageConfig",
    "load_config",
    "model_from_hf",
]
