"""The code that the documents show does what they say."""

from __future__ import annotations

import re
import textwrap
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tiered_cache import Chunk, UnifiedRadixCache, load_config

ROOT = Path(__file__).parents[1]


def blocks(page: str, containing: str) -> str:
    """The Python block of a page that contains some words."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (block,) = [block for block in found if containing in block]
    return str(block)


class Model:
    """Says 101, 102, … and then stops; remembers what it was asked to compute."""

    EOS = 104

    def __init__(self) -> None:
        self.computed: list[tuple[int, int]] = []
        self.said = 100

    def forward(self, chunk: Chunk) -> None:
        assert len(chunk.slots("full", 0, chunk.stop)) == chunk.stop
        self.computed.append((chunk.start, chunk.stop))

    def forward_batch(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.forward(chunk)

    def sample(self, logits: None) -> int:
        self.said = 101 if self.said == self.EOS else self.said + 1
        return self.said


def test_the_loop_of_the_readme(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It streams the answer, and the second prompt computes only what the first has not."""
    monkeypatch.chdir(ROOT)
    model, first = Model(), list(range(1000))
    prompts = [first, [*first, 101, 102, 103, *range(50)]]
    names = {"your_model": model, "your_prompts": prompts}
    exec(compile(blocks("README.md", "async def answer"), "README.md", "exec"), names)
    assert capsys.readouterr().out.split() == ["101", "102", "103"] * 2
    # 1000 tokens, three that were generated; the second prompt shares 62 whole pages of 16.
    assert model.computed == [
        (0, 512),
        (512, 1000),
        (1000, 1001),
        (1001, 1002),
        (1002, 1003),
        (992, 1053),
        (1053, 1054),
        (1054, 1055),
        (1055, 1056),
    ]


@pytest.fixture
async def cache() -> AsyncIterator[UnifiedRadixCache]:
    model = {"dtype": "float32", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}
    config = load_config({"model": model, "page_size": 4, "device": {"tokens": 64}, "check": True})
    async with UnifiedRadixCache.open(config) as cache:
        yield cache
        cache.check_integrity()


async def test_the_layer_waits_of_the_serving_page() -> None:
    """The model asks for each layer before it reads it, and a whole load answers at once, too."""

    class Layers:
        num_layers = 2

        def __init__(self) -> None:
            self.read: list[int] = []

        def embed(self, tokens: Any) -> list[int]:
            return [int(token) for token in tokens]

        def layer(self, layer: int, hidden: list[int], chunk: Chunk) -> list[int]:
            self.read.append(layer)
            return hidden

    names: dict[str, Any] = {"model": Layers()}
    exec(blocks("docs/serving.md", "layers.wait"), names)
    shape = {"dtype": "float32", "num_layers": 2, "num_kv_heads": 1, "head_dim": 1}
    tiers = {"device": {"tokens": 32}, "host": {"tokens": 64}}
    config = load_config({"model": shape, "page_size": 4, "check": True, **tiers})
    async with UnifiedRadixCache.open(config) as cache:
        for start, layerwise in ((0, False), (100, False), (0, True), (100, False)):
            async with cache.lease(range(start, start + 30), layerwise=layerwise) as lease:
                while chunk := await lease.next_chunk(64):
                    assert await lease.run(names["forward"], chunk) == chunk.tokens.tolist()
                    lease.commit(chunk)
            await cache.drain()
        assert cache.stats().counters.tokens_hit_host == 2 * 28
        assert names["model"].read == [0, 1] * 4
        cache.check_integrity()


async def test_the_batch_steps_of_the_serving_page(cache: UnifiedRadixCache) -> None:
    """A batch is prefilled and decoded until the pool is full; then the youngest makes room."""
    model, waiting = Model(), list[list[int]]()
    prefilling = [await cache.acquire([n] * 19 + [n + 1]) for n in range(3)]
    names = {"cache": cache, "model": model, "waiting": waiting, "prefilling": prefilling}

    async def step(containing: str, **more: Any) -> None:
        code = textwrap.indent(blocks("docs/serving.md", containing), "    ")
        names.update(more)
        exec(f"async def step():\n{code}", names)
        await names["step"]()  # type: ignore[operator]

    await step("prefilling")
    assert model.computed == [(0, 20)] * 3
    decoding = list(prefilling)
    for token in range(3):
        decoding = [lease for lease in decoding if not lease.closed]
        await step("cache.extend", decoding=decoding, sampled=[token] * len(decoding))
    # 15 of 16 pages hold prompts, and each answer wants one: what the youngest leaves is enough.
    assert [tokens[-2:] for tokens in waiting] == [[3, 0]]
    assert model.computed[3:] == [(20, 21)] * 2 + [(21, 22)] * 2 + [(22, 23)] * 2
    assert [lease.closed for lease in prefilling] == [False, False, True]
    for lease in decoding:
        await lease.aclose()
    assert cache.outstanding() == []
