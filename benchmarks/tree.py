"""The tree's own cost: workloads a-d at page sizes 1, 16 and 64, with key construction in and out.

One request is: key from `array('q')`, match and read the page ids, lock, allocate, insert, unlock;
on (d) making room as well. A match is the key and the look-up, where it says so with its page ids.
"""

from __future__ import annotations

import gc
from time import perf_counter
from typing import TYPE_CHECKING, Final

from benchmarks.measure import Laps, Row, timed_row
from benchmarks.rig import Rig
from benchmarks.workloads import Chat, Eviction, FanOut, LongContext
from tiered_cache.keys import RadixKey
from tiered_cache.types import InsertParams, MatchPrefixParams

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from benchmarks.measure import Run

PAGE_SIZES: Final = (1, 16, 64)
LINES: Final = (
    "a: request",
    "a: request, whole prompt",
    "b: match and ids",
    "c: match",
    "c: match and ids",
    "c: insert",
    "d: request, evicting",
)


def run(
    repeat: int = 5, *, quick: bool = False, page_sizes: tuple[int, ...] = PAGE_SIZES
) -> list[Row]:
    """Every workload `repeat` times in turn, so that a slow minute hits all of them and not one."""
    works = workloads(quick=quick)
    runs: dict[tuple[str, int], list[Run]] = {}
    for _ in range(repeat):
        for page_size in page_sizes:
            for work in works:
                gc.collect()  # earlier runs' trees: nothing else collects them under `server_gc`
                for line, laps in work(page_size).items():
                    runs.setdefault((line, page_size), []).append(laps.summary())
    return [
        timed_row("tree", line, page_size, runs[line, page_size])
        for line in LINES
        for page_size in page_sizes
    ]


def workloads(*, quick: bool = False) -> tuple[Callable[[int], dict[str, Laps]], ...]:
    """The work of a-d, each a function of the page size; `quick` makes them small."""
    chat = Chat(conversations=5, turns=3, new=128) if quick else Chat()
    long_context = LongContext(length=4096, queries=5) if quick else LongContext()
    fan_out = FanOut(keys=50) if quick else FanOut()
    eviction = Eviction(requests=50) if quick else Eviction()
    pool = 20_000 if quick else Eviction.POOL_TOKENS
    return (
        lambda page_size: chat_requests(chat, page_size),
        lambda page_size: chat_prompts(chat, page_size),
        lambda page_size: long_matches(long_context, page_size),
        lambda page_size: fan_out_calls(fan_out, page_size),
        lambda page_size: evicting_requests(eviction, page_size, pool),
    )


def chat_requests(chat: Chat, page_size: int) -> dict[str, Laps]:
    """(a) The history is matched, then the same key grows by the new turn and is published."""
    rig = Rig(chat.num_tokens, page_size)
    laps = Laps()
    for history, prompt in chat:
        rig.request(history, prompt[len(history) :], laps)
    return {"a: request": laps}


def chat_prompts(chat: Chat, page_size: int) -> dict[str, Laps]:
    """(a) as a serving loop has it: the prompt arrives whole, its history is hit."""
    rig = Rig(chat.num_tokens, page_size)
    laps = Laps()
    for _, prompt in chat:
        rig.request(prompt, None, laps)
    return {"a: request, whole prompt": laps}


def long_matches(long_context: LongContext, page_size: int) -> dict[str, Laps]:
    """(b) One path of one node, which every look-up leaves near its end."""
    rig = Rig(long_context.num_tokens, page_size)
    rig.insert(RadixKey(long_context.key()))
    alone, with_ids = Laps(), Laps()
    for query in long_context.queries():
        _match(rig, query, alone, with_ids)
    return {"b: match and ids": with_ids}


def fan_out_calls(fan_out: FanOut, page_size: int) -> dict[str, Laps]:
    """(c) Inserts under one node of very many children, then look-ups of all of them."""
    rig = Rig(fan_out.num_tokens + 2 * fan_out.shared.size, page_size)
    inserts, matches, with_ids = Laps(), Laps(), Laps()
    for tokens in fan_out.inserts():
        # Only the tree's insert is timed: pages come beforehand, as they do for any caller.
        pages = (rig.take(len(tokens) // page_size),)
        start_s = perf_counter()
        key = RadixKey(tokens)
        key_s = perf_counter()
        result = rig.tree.insert(InsertParams(key, pages))
        inserts.add(perf_counter() - start_s, key_s - start_s)
        rig.allocator.free(result.duplicates[0])
    for tokens in fan_out.lookups():
        _match(rig, tokens, matches, with_ids)
    return {"c: match": matches, "c: match and ids": with_ids, "c: insert": inserts}


def evicting_requests(eviction: Eviction, page_size: int, pool_tokens: int) -> dict[str, Laps]:
    """(d) Requests in a pool that is always full."""
    rig = Rig(pool_tokens, page_size)
    laps = Laps()
    for tokens in eviction:
        rig.request(tokens, None, laps)
    return {"d: request, evicting": laps}


def _match(rig: Rig, tokens: array[int], alone: Laps, with_ids: Laps) -> None:
    """One look-up, noted twice: up to its result, and up to the page ids."""
    start_s = perf_counter()
    key = RadixKey(tokens)
    key_s = perf_counter()
    match = rig.tree.match_prefix(MatchPrefixParams(key))
    match_s = perf_counter()
    held = match.pages[0]
    ids_s = perf_counter()
    if len(held) * rig.page_size != match.device_length:
        raise AssertionError("a match has one page id per page")
    asked, hit = len(tokens), match.device_length
    alone.add(match_s - start_s, key_s - start_s, asked, hit)
    with_ids.add(ids_s - start_s, key_s - start_s, asked, hit)
