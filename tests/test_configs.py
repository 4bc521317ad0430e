"""Every configuration that is shipped loads, and comes to what its comments say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_cache.build import size_stack
from tiered_cache.cli.check import warnings
from tiered_cache.config import load_config
from tiered_cache.types import ComponentId

FULL = ComponentId("full")
CONFIGS = Path(__file__).parents[1] / "configs"
BYTES_PER_TOKEN = {
    "device_only.yaml": 131_072,
    "demo.yaml": 46_080,
    "host.yaml": 46_080,
    "mla.yaml": 71_424,
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_it_loads_without_a_warning(path: Path) -> None:
    """A file to copy from has nothing to complain about."""
    config = load_config(path, environ={})
    sizing = size_stack(config)
    assert sizing.num_pages is not None
    assert list(warnings(config, sizing)) == []
    total = sum(pool.page_bytes for pool in sizing.stack.pools)
    assert total / config.page_size == BYTES_PER_TOKEN[path.name]


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
