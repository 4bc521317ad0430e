"""Every configuration that is shipped loads, and comes to what its comments say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_cache.build import size_stack, storage_parts
from tiered_cache.cli.check import warnings
from tiered_cache.config import StorageConfig, load_config
from tiered_cache.storage.registry import load_backend
from tiered_cache.types import ComponentId

FULL = ComponentId("full")
CONFIGS = Path(__file__).parents[1] / "configs"
SWA, MAMBA = ComponentId("swa"), ComponentId("mamba")
BYTES_PER_TOKEN = {
    "device_only.yaml": 131_072,
    "demo.yaml": 46_080,
    "file.yaml": 46_080,
    "gemma.yaml": 6_144,
    "host.yaml": 46_080,
    "mamba.yaml": 24_576,
    "mamba_swa.yaml": 3_840,
    "mamba2.yaml": 1 / 64,
    "mistral.yaml": 1 / 16,
    "mla.yaml": 71_424,
    "redis.yaml": 131_072,
    "swa.yaml": 3_072,
}
"""Of the first component."""

BYTES_PER_ID = {
    ("gemma.yaml", SWA): 16 * 30_720,
    ("swa.yaml", SWA): 16 * 15_360,
    ("mamba.yaml", MAMBA): 77_856_768,
    ("mamba2.yaml", MAMBA): 102_334_464,
    ("mistral.yaml", SWA): 16 * 131_072,
    ("mamba_swa.yaml", SWA): 32 * 17_920,
    ("mamba_swa.yaml", MAMBA): 7_372_800,
}
"""Of all other components."""


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_it_loads_without_a_warning(path: Path) -> None:
    """A file to copy from has nothing to complain about."""
    config = load_config(path, environ={})
    sizing = size_stack(config)
    assert sizing.num_pages is not None
    assert list(warnings(config, sizing)) == []
    first, *others = (part.id for part in sizing.stack.components)
    assert sizing.page_bytes(first) / config.page_size == BYTES_PER_TOKEN[path.name]
    for component in others:
        assert sizing.page_bytes(component) == BYTES_PER_ID[path.name, component]
    assert (storage_parts(config, sizing) is None) == (config.storage is None)


@pytest.mark.parametrize("name", ["file", "redis"])
def test_a_backends_file_shows_all_its_options_with_their_defaults(name: str) -> None:
    """A file to copy from: what is not said here does not exist. The time to live is an example,
    because there is none by default."""
    config = load_config(CONFIGS / f"{name}.yaml", environ={})
    assert config.storage is not None
    options = load_backend(name).Options
    assert set(config.storage.options) == set(options.model_fields)
    given = options.model_validate(config.storage.options)
    defaults = options.model_validate(
        {key: config.storage.options[key] for key in ("url", "ttl") if key in options.model_fields}
    )
    assert given == defaults


def test_the_file_backends_file_shows_all_of_storage() -> None:
    """Every key, with its default."""
    storage = load_config(CONFIGS / "file.yaml", environ={}).storage
    assert storage is not None
    assert storage.model_fields_set == set(StorageConfig.model_fields)
    assert storage == StorageConfig(backend="file", options=storage.options)
    for section in (storage.prefetch, storage.backup, storage.breaker):
        assert section.model_fields_set == set(type(section).model_fields)


def test_the_host_tier_holds_the_demos_chats_and_the_device_does_not() -> None:
    """Counted with the model's tokenizer, in whole pages: the longest chat needs 1,152 tokens, the
    system prompts of two tenants 1,024 each, all 8 chats 2,944."""
    config = load_config(CONFIGS / "host.yaml", environ={})
    sizing = size_stack(config)
    assert sizing.num_pages is not None
    assert sizing.host_pages is not None
    device_tokens = sizing.num_pages[FULL] * config.page_size
    assert 1_152 < device_tokens < 2 * 1_024
    assert sizing.host_pages[FULL] * config.page_size > 2_944
    assert config.model == load_config(CONFIGS / "demo.yaml", environ={}).model
