"""Every configuration that is shipped loads, and comes to what its comments say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_cache.build import size_stack
from tiered_cache.cli.check import warnings
from tiered_cache.config import load_config

CONFIGS = Path(__file__).parents[1] / "configs"
BYTES_PER_TOKEN = {"device_only.yaml": 131_072, "demo.yaml": 46_080, "mla.yaml": 71_424}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_it_loads_without_a_warning(path: Path) -> None:
    """A file to copy from has nothing to complain about."""
    config = load_config(path, environ={})
    sizing = size_stack(config)
    assert sizing.num_pages is not None
    assert list(warnings(config, sizing)) == []
    total = sum(pool.page_bytes for pool in sizing.stack.pools)
    assert total / config.page_size == BYTES_PER_TOKEN[path.name]
