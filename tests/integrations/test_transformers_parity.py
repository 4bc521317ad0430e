"""State that went through the pools gives the same logits, bit for bit, as state that never did.

Same run, same chunks: the reference computes exactly what the leases compute, with a transformers
cache of its own. Pools are full of NaN before, so a row read before it was written shows. The
controls prove that the comparison sees one wrong byte, on either tier in memory; of a wrong byte in
storage nothing must be seen, because it is never used.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.backends.file_helpers import object_files
from tests.integrations.helpers import PAGE_SIZE, NeverSerialised, poison, random_tokens, settings
from tests.integrations.restored_child import model_of
from tiered_cache import UnifiedRadixCache
from tiered_cache.integrations.transformers import TransformersRunner
from tiered_cache.keys import RadixKey
from tiered_cache.types import Hits, MatchPrefixParams

DTYPES = [torch.float32, torch.bfloat16]
MODELS = ["llama", "qwen3", "deepseek_v3", "smollm2"]

pytestmark = pytest.mark.timeout(180)  # the first test of a fresh machine converts SmolLM2

CASES = [(name, dtype) for name in MODELS for dtype in DTYPES]
CASE_IDS = [f"{name}-{str(dtype).removeprefix('torch.')}" for name, dtype in CASES]


@pytest.fixture(params=CASES, ids=CASE_IDS)
def model(request: pytest.FixtureRequest) -> Any:
    """Made outside the event loop: loading reads files."""
    return model_of(*request.param)


async def compute(lease: Any, runner: Any, reference: NeverSerialised, max_tokens: int) -> None:
    """The rest of the prompt on both sides, compared after every chunk."""
    while (chunk := await lease.next_chunk(max_tokens)) is not None:
        logits = await lease.run(runner, chunk)
        lease.commit(chunk)
        assert torch.equal(logits, reference.forward(chunk.tokens, chunk.start))


async def test_attached_state_gives_the_logits_of_the_never_serialised_cache(model: Any) -> None:
    """A first lease computes and publishes; others branch off at any page and go on."""
    prompt, answer = random_tokens(83), random_tokens(14, seed=1)
    async with UnifiedRadixCache.open(settings(model)) as cache:
        poison(cache.pools)
        runner = TransformersRunner(model, cache.pools)
        reference = NeverSerialised(model)
        async with cache.lease(prompt, reserve=len(answer)) as lease:
            assert lease.prefix_len == 0
            await compute(lease, runner, reference, 40)
            for token in answer:
                chunk = lease.append(token)
                logits = await lease.run(runner, chunk)
                assert torch.equal(logits, reference.forward([token], chunk.start))
            lease.finish()

        known = prompt + answer
        for boundary in (
            PAGE_SIZE,
            3 * PAGE_SIZE,
            5 * PAGE_SIZE,
            len(known) // PAGE_SIZE * PAGE_SIZE,
        ):
            longer = known[:boundary] + random_tokens(37, seed=boundary)
            async with cache.lease(longer, reserve=2) as lease:
                assert lease.prefix_len == boundary
                branch = reference.branch(boundary)
                await compute(lease, runner, branch, 24)
                chunk = lease.append(7)
                logits = await lease.run(runner, chunk)
                assert torch.equal(logits, branch.forward([7], chunk.start))
        cache.check_integrity()
        assert cache.outstanding() == []


async def test_one_flipped_byte_shows(model: Any) -> None:
    """The control: with one wrong byte in the pools the comparison above fails."""
    prompt = random_tokens(4 * PAGE_SIZE)
    longer = [*prompt, 11, 12, 13]
    async with UnifiedRadixCache.open(settings(model)) as cache:
        runner = TransformersRunner(model, cache.pools)
        reference = NeverSerialised(model)
        async with cache.lease(prompt) as lease:
            await compute(lease, runner, reference, 512)

        async def logits_of_longer() -> torch.Tensor:
            async with cache.lease(longer) as lease:
                assert lease.prefix_len == len(prompt)
                chunk = await lease.next_chunk(512)
                flip_one_byte(cache.pools, int(chunk.slots("full", 5, 6)[0]))
                return await lease.run(runner, chunk)

        expected = reference.forward([11, 12, 13], len(prompt))
        assert not torch.equal(await logits_of_longer(), expected)
        assert torch.equal(await logits_of_longer(), expected), "flipped back, it is right again"


def flip_one_byte(pools: Any, slot: int) -> None:
    """Flips the top bit of the mantissa of one number of the first layer: a small, finite error."""
    pool = pools.layer(pools.specs[0].name, 0)
    element = pool[slot].reshape(-1).view(torch.uint8)
    element[pool.element_size() - 2] ^= 0x40


# --- Two tiers ------------------------------------------------------------------------------------


TWO_TIERS = {"host": {"tokens": 4096}}


async def only_on_the_host(cache: UnifiedRadixCache, prompt: list[int], filler: int) -> None:
    """Let somebody else take the whole device; then everything that is not the host copy of
    `prompt` is NaN, on both tiers."""
    await cache.drain()
    num_tokens = cache.stats().pools["full"].capacity * cache.page_size
    async with cache.lease([1] * num_tokens, cache_salt=f"filler {filler}") as lease:
        lease.commit(lease.allocate(num_tokens))
    await cache.drain()
    match = cache.tree.match_prefix(MatchPrefixParams(RadixKey(prompt)))
    assert match.device_length == 0
    assert match.host_hit_length == len(prompt) // PAGE_SIZE * PAGE_SIZE
    poison(cache.pools)
    (arena,) = cache.arenas
    node, kept = match.best_node, []
    while node is not cache.tree.root:
        kept.append(node.data[0].host_value)
        node = node.parent
    others = np.setdiff1d(np.arange(arena.num_pages), np.concatenate(kept))
    arena.rows[others] = 0xFF  # a NaN in every type of state


async def computed(cache: Any, runner: Any, prompt: list[int]) -> NeverSerialised:
    """A request whose state goes to the host; returns the reference at its end."""
    reference = NeverSerialised(runner.model)
    async with cache.lease(prompt) as lease:
        await compute(lease, runner, reference, 40)
    return reference


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
async def test_state_that_was_on_the_host_gives_the_same_logits(
    model: Any, layerwise: bool
) -> None:
    """Device → host → device: evicted, everything else made NaN, loaded, and computed on from."""
    prompt = random_tokens(6 * PAGE_SIZE)
    async with UnifiedRadixCache.open(settings(model, 12 * PAGE_SIZE, **TWO_TIERS)) as cache:
        runner = TransformersRunner(model, cache.pools)
        reference = await computed(cache, runner, prompt)
        for boundary in (PAGE_SIZE, 4 * PAGE_SIZE, 6 * PAGE_SIZE):
            await only_on_the_host(cache, prompt, filler=boundary)
            longer = prompt[:boundary] + random_tokens(37, seed=boundary)
            async with cache.lease(longer, reserve=2, layerwise=layerwise) as lease:
                assert lease.hits == Hits(host=boundary)
                branch = reference.branch(boundary)
                await compute(lease, runner, branch, 24)
                chunk = lease.append(7)
                logits = await lease.run(runner, chunk)
                assert torch.equal(logits, branch.forward([7], chunk.start))
            cache.check_integrity()
        await cache.drain()
        counters = cache.stats().counters
        assert counters.tokens_hit_host == 11 * PAGE_SIZE
        assert counters.loads_failed == 0
        assert cache.outstanding() == []


async def test_one_byte_flipped_on_the_host_shows(model: Any) -> None:
    """The control: with one wrong byte in a row the comparison above fails."""
    prompt = random_tokens(4 * PAGE_SIZE)
    async with UnifiedRadixCache.open(settings(model, 12 * PAGE_SIZE, **TWO_TIERS)) as cache:
        runner = TransformersRunner(model, cache.pools)
        reference = await computed(cache, runner, prompt)
        expected = reference.forward([11, 12, 13], len(prompt))
        (arena,) = cache.arenas

        async def logits_after_loading(filler: int) -> torch.Tensor:
            await only_on_the_host(cache, prompt, filler)
            match = cache.tree.match_prefix(MatchPrefixParams(RadixKey(prompt)))
            row = int(match.best_node.data[0].host_value[0])
            piece = arena.layout.slices[0]
            # As above: the top bit of a mantissa, of the page's first token.
            arena.rows[row, piece.offset + model.dtype.itemsize - 2] ^= 0x40
            async with cache.lease([*prompt, 11, 12, 13]) as lease:
                assert lease.hits == Hits(host=len(prompt))
                return await lease.run(runner, await lease.next_chunk(512))

        assert not torch.equal(await logits_after_loading(1), expected)
        assert torch.equal(await logits_after_loading(2), expected), "flipped back, it is right"


# --- Three tiers, and a second process ------------------------------------------------------------


NUM_PAGES = 6


@pytest.fixture(scope="module")
def another_process() -> Iterator[Callable[..., dict[str, Any]]]:
    """What a second process makes of a prompt, with nothing but storage to know it from."""
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.restored_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "backends")))},
    )

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(question) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        assert answer, "the second process has ended: see its standard error"
        return dict(json.loads(answer))

    with child:  # the end of its input ends it
        yield ask


def three_tiers(path: Path) -> dict[str, Any]:
    """A file for every page. Storage is asked for any number of them, and waited for."""
    options = {"path": str(path), "max_size": "1GiB", "reserve": 0}
    prefetch = {"threshold": 0, "policy": "wait_complete"}
    storage = {"backend": "file", "options": options, "prefetch": prefetch, "required": True}
    return {"tokens": 12 * PAGE_SIZE, "host": {"tokens": 1024}, "storage": storage}


async def kept(model: Any, tiers: dict[str, Any], prompt: list[int]) -> tuple[NeverSerialised, int]:
    """Compute a prompt here, and leave its state in storage; the reference at its end, and the
    bytes of a row."""
    config = await asyncio.to_thread(settings, model, **tiers)
    async with UnifiedRadixCache.open(config) as cache:
        reference = await computed(cache, TransformersRunner(model, cache.pools), prompt)
        await cache.drain()
        (arena,), storage = cache.arenas, cache.stats().storage
        assert storage is not None
        assert storage.counters.objects_written == NUM_PAGES
        assert storage.counters.bytes_written == NUM_PAGES * arena.rows.shape[1]
        return reference, arena.rows.shape[1]


def check_chunks(
    answer: dict[str, Any], prompt: list[int], reference: NeverSerialised
) -> NeverSerialised:
    """From where the other process went on, the same chunks give the same bits here; returns the
    reference that has computed them."""
    start = sum(answer["hits"])
    branch = reference.branch(start)
    for begin, stop, logits in answer["chunks"]:
        assert begin == start
        start = stop
        assert branch.forward(prompt[begin:stop], begin).numpy().tobytes().hex() == logits
    assert start == len(prompt)
    return branch


def question(case: tuple[str, torch.dtype], tiers: Any, prompt: list[int], **more: Any) -> Any:
    name, dtype = case
    words = {"model": name, "dtype": str(dtype).removeprefix("torch."), "layerwise": False}
    return {**words, "tiers": tiers, "prompt": prompt, "max_tokens": 24, **more}


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
async def test_another_process_restores_state_that_gives_the_same_logits(
    case: Any, tmp_path: Path, another_process: Any
) -> None:
    """Device → host → file → host → device: a second process, whose memory is full of NaN, reads
    the rows that it needs and not one more, and goes on from there."""
    model, tiers = await asyncio.to_thread(model_of, *case), three_tiers(tmp_path)
    prompt = random_tokens(NUM_PAGES * PAGE_SIZE)
    reference, row_bytes = await kept(model, tiers, prompt)
    for num_pages, layerwise in ((1, False), (4, True), (NUM_PAGES, False)):
        boundary = num_pages * PAGE_SIZE
        longer = prompt[:boundary] + random_tokens(37, seed=boundary)
        answer = another_process(question(case, tiers, longer, layerwise=layerwise))
        assert answer["hits"] == [0, 0, boundary]
        assert answer["objects_read"] == num_pages
        assert answer["bytes_read"] == num_pages * row_bytes
        check_chunks(answer, longer, reference)


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
async def test_one_byte_flipped_in_storage_is_never_used(
    case: Any, tmp_path: Path, another_process: Any
) -> None:
    """The control: a row with one wrong byte is a miss. What it held is computed, as if it had
    never been there, and written anew, so that the next process has it all."""
    model, tiers = await asyncio.to_thread(model_of, *case), three_tiers(tmp_path)
    prompt = random_tokens(NUM_PAGES * PAGE_SIZE)
    longer = prompt + random_tokens(5, seed=1)
    reference, _ = await kept(model, tiers, prompt)
    flip_one_stored_byte(tmp_path, RadixKey(prompt).page_keys(PAGE_SIZE)[-1])
    answer = another_process(question(case, tiers, longer))
    assert answer["hits"] == [0, 0, (NUM_PAGES - 1) * PAGE_SIZE]
    assert answer["objects_corrupt"] == 1
    assert answer["objects_written"] == 1
    reference = check_chunks(answer, longer, reference)
    answer = another_process(question(case, tiers, longer))
    assert answer["hits"] == [0, 0, NUM_PAGES * PAGE_SIZE]
    assert answer["objects_corrupt"] == 0
    check_chunks(answer, longer, reference)


def flip_one_stored_byte(root: Path, page_key: bytes) -> None:
    """Flips a bit in the middle of the state of one page."""
    (path,) = (path for path in object_files(root) if path.name == page_key.hex())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)
