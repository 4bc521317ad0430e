"""The worked example of docs/page-format.md is what the library does, byte by byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
import yaml

from tiered_cache import UnifiedRadixCache, load_config
from tiered_cache.build import size_stack
from tiered_cache.keys import RadixKey
from tiered_cache.pools.spec import HEADER_BYTES
from tiered_cache.storage.record import FORMAT_VERSION, MAGIC, PAYLOAD_START, RecordFormat
from tiered_cache.types import ComponentId, MatchPrefixParams

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "page-format.md").read_text()
FULL = ComponentId("full")


@pytest.fixture(scope="module")
def config() -> Any:
    (example,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    return load_config({**yaml.safe_load(example), "check": True}, environ={})


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_table_is_the_layout(config: Any) -> None:
    """Header, slices with their gap, padding: each starts where the one before it ends."""
    layout = size_stack(config).row_layout(FULL)
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\| [\d,]+ \|.*$", TEXT, re.MULTILINE)
    ]
    at = 0
    for start, _, _, _, size in rows:
        assert number(start) == at
        at += number(size or "0")
    assert at == layout.stride == 12_288
    sizes = {kind: number(size) for _, kind, _, _, size in rows if size and kind != "slice"}
    assert sizes["header room"] == HEADER_BYTES
    assert sizes["gap"] + sizes["padding"] == layout.padding_bytes
    slices = [
        (int(layer), pool, number(start), number(size))
        for start, kind, layer, pool, size in rows
        if kind == "slice"
    ]
    assert slices == [(s.layer, s.pool, s.offset, s.num_bytes) for s in layout.slices]


def test_the_prose_has_the_same_numbers(config: Any) -> None:
    layout = size_stack(config).row_layout(FULL)
    assert f"the state {layout.payload_bytes:,} bytes" in " ".join(TEXT.split())
    assert f"so {1 - layout.payload_bytes / layout.stride:.0%}".replace("%", " %") in TEXT


def test_the_header_is_where_the_table_says() -> None:
    """The golden object, taken apart by the page's own figures."""
    golden = bytes.fromhex((ROOT / "tests/backends/golden/row-v1.hex").read_text())
    rows = re.findall(r"^\| (\d+):(\d*) \| ([^|]+) \|", TEXT, re.MULTILINE)
    fields = {name: golden[int(start) : int(stop or 118)] for start, stop, name in rows}
    numbers = {name: int.from_bytes(value, "little") for name, value in fields.items()}
    assert [int(start) for start, _, _ in rows[1:]] == [int(stop) for _, stop, _ in rows[:-1]]
    assert fields["magic"] == MAGIC == b"TCROW\r\n\x1a"
    assert numbers["format version"] == FORMAT_VERSION
    assert numbers["payload start"] == PAYLOAD_START == HEADER_BYTES
    assert (numbers["payload end"], numbers["row length"]) == (640, len(golden))
    assert fields["checksum"] == xxhash.xxh3_128_digest(golden[32:640])
    assert numbers["length of the component's id"] == 4
    assert fields["the component's id, UTF-8"] == b"full"
    record = RecordFormat("full", fields["fingerprint"], len(golden), 640)
    assert record.check(memoryview(golden), fields["page key"]) is None


def test_every_verdict_is_in_the_page() -> None:
    """In the words that an operator sees."""
    source = (ROOT / "tiered_cache" / "storage" / "record.py").read_text()
    verdicts = set(re.findall(r'return f?"(is [^"{]+|does [^"{]+)', source))
    assert len(verdicts) == 7
    for verdict in verdicts:
        assert f"\n| {verdict.strip()}" in TEXT, verdict


async def test_a_key_lies_where_the_example_says(config: Any) -> None:
    """Written on the device by a request, stored, and read from the row."""
    (offset,) = re.findall(r"4,672 \+ 5 × 128 = ([\d,]+)", TEXT)
    page_size, prompt = 16, list(range(40))
    async with UnifiedRadixCache.open(config) as cache:
        async with cache.lease(prompt) as lease:
            chunk = await lease.next_chunk(64)
            assert chunk is not None
            slot = int(lease.slots("full", page_size + 5, page_size + 6)[0])
            key = torch.arange(64, dtype=torch.bfloat16)[None]
            cache.pools.layer("k", 1)[slot] = key
            lease.commit(chunk)
        await cache.drain()
        match = cache.tree.match_prefix(MatchPrefixParams(RadixKey(prompt)))
        row = int(match.best_node.data[0].host_value[1])  # of the prompt's second page
        found = cache.arenas[0].rows[row, number(offset) : number(offset) + 128]
        assert torch.equal(torch.from_numpy(found.copy()).view(torch.bfloat16), key[0])
