"""Other members of the kinds of fault that the numbered cases are of. Each docstring names the case
whose kind it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.hybrid_helpers import STACKS, hybrid_tiers
from tests.lease_helpers import P, Rig, rig, seq, settings, start, turns
from tests.storage_helpers import MODEL, keep, on_virtual_clock, prefetched, three_tiers, wipe
from tests.tier_helpers import demote, on_tier
from tiered_cache import (
    ClosedError,
    ConfigError,
    EvictParams,
    Hits,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    StaleError,
    WrongThreadError,
)
from tiered_cache.storage.backend import ReadResult
from tiered_cache.testing.faulty_backend import CallGate
from tiered_cache.types import Tier

A: Final = seq("A", 32)

WAITS: Final = {"prefetch": {"threshold": 0, "policy": "wait_complete"}}


def at_rest(r: Rig) -> None:
    """Nothing of the host is held, and all is accounted for."""
    for pool in r.stats.host.values():
        assert pool.in_flight == pool.quarantined == pool.protected == 0, pool
        assert pool.free + pool.evictable == pool.capacity
    assert r.cache.outstanding() == []
    assert r.counters.background_failures == 0
    r.check()


# --- identity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["shorter", "others", "longer"])
@pytest.mark.parametrize("at", ["contains", "read"])
@on_virtual_clock
async def test_a_key_that_its_owner_changes_while_it_is_fetched(at: Any, change: str) -> None:
    """B89: what storage has of a prompt is published under that prompt, whatever becomes of the key
    object that was given: an engine has one for each request, and cuts it when drafts are
    rejected."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        gate = CallGate()
        store.fault(at, gate=gate, at="inside", times=1)
        key = RadixKey(A)
        with r.cache.prefetch(key) as handle:
            await gate.reached()
            if change == "longer":
                key.append(7)
            else:
                key.truncate(8)
            if change == "others":
                key.extend(seq("Z", 24))
            gate.open()
            assert await handle.wait("wait_complete") == 32
            assert on_tier(r, A) == "H" * 8
            assert on_tier(r, seq("A", 8) + seq("Z", 24)) == "HH------"
        at_rest(r)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "bfloat16"}, "model"),
        ({"num_kv_heads": 2, "head_dim": 1}, "model"),
        ({"num_layers": 1, "head_dim": 4}, "model"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "model"),
        ({"id": "another/model"}, "model.id"),
        ({"revision": "2"}, "model.revision"),
        ({"page_size": 8}, "page_size"),
    ],
)
@on_virtual_clock
async def test_storage_of_another_model_is_not_attached(change: dict[str, Any], named: str) -> None:
    """B84: a configuration of other state, though its rows are as long, is refused: rows would be
    kept under the other's name, and it would read them as its own. Nothing has changed then."""
    model = {**MODEL, "dtype": "float16"}
    async with three_tiers(model=model) as (r, store):
        await r.serve(A)
        await r.cache.drain()
        await r.cache.storage.detach()
        kept = dict(store.rows)
        page_size = change.get("page_size", P)
        other = {key: value for key, value in change.items() if key != "page_size"}
        sections = {"host": {"tokens": 256}, "storage": {"backend": "memory", **WAITS}}
        config = settings(64, model={**model, **other}, page_size=page_size, **sections)
        with pytest.raises(ConfigError) as caught:
            await r.cache.storage.attach(config, backend=store)
        assert [problem.key for problem in caught.value.problems] == [named]
        assert not r.cache.storage
        await r.serve([*A, 1])
        await r.cache.drain()
        assert store.rows == kept
        await r.cache.storage.attach(r.config, backend=store)
        wipe(r)
        assert await r.serve([*A, 1]) == 32


async def test_a_cache_that_was_opened_without_names_gets_them_with_its_storage() -> None:
    """B84: id and revision are needed beside storage only, and so may come with it."""
    nameless = {key: value for key, value in MODEL.items() if key not in ("id", "revision")}
    async with three_tiers() as (r, store):
        await keep(r, A)
        config = r.config
    async with rig(64, model=nameless, host={"tokens": 256}) as plain:
        await plain.cache.storage.attach(config, backend=store)
        assert await plain.serve([*A, 1]) == 32
        await plain.cache.drain()
        await plain.cache.storage.detach()


@pytest.mark.parametrize("salt", ["\0", "a\0b", "é", "e\u0301", " ", "x" * 10_000, "\ufeff", "💥"])
@on_virtual_clock
async def test_any_text_is_a_namespace_of_its_own(salt: str) -> None:
    """B81: also one that looks like another, or like nothing; as either of its two parts."""
    others = {"a", "a\0", "b", "é", "e\u0301", "\0\0"} - {salt}
    async with three_tiers() as (r, store):
        await r.serve(A)
        await r.serve(A, cache_salt=salt)
        await r.serve(A, extra_key=salt)
        await r.cache.drain()
        assert len(store.rows) == 3 * 8
        wipe(r)
        for other in others:
            assert await r.serve([*A, 1], cache_salt=other) == 0
            assert await r.serve([*A, 1], extra_key=other) == 0
            wipe(r)
        assert await r.serve([*A, 1], cache_salt=salt, extra_key=salt) == 0
        for namespace in ({}, {"cache_salt": salt}, {"extra_key": salt}):
            wipe(r)
            assert await r.serve([*A, 1], **namespace) == 32
        await r.cache.drain()
        at_rest(r)


@on_virtual_clock
async def test_pairs_in_storage_are_nobody_elses_tokens() -> None:
    """B81, B86: pages of a bigram key go to storage and come back under keys of their own; the same
    tokens, as tokens, find none of them."""
    async with three_tiers() as (r, store):
        tokens = seq("A", 33)
        pairs = RadixKey(tokens, is_bigram=True)
        pages = r.cache.allocate(8)
        assert r.cache.insert(InsertParams(pairs, tuple(pages))).length == 32
        await r.cache.drain()
        assert {key[-32:] for key in store.rows} == set(pairs.page_keys(P))
        r.cache.reset()
        assert await prefetched(r, tokens) == 0
        assert await prefetched(r, RadixKey(tokens, is_bigram=True)) == 32
        assert await r.cache.load_back(RadixKey(tokens, is_bigram=True)) == 32
        assert r.hit(tokens) == 0
        assert await r.serve([*tokens, 1]) == 0
        await r.cache.drain()
        assert len(store.rows) == 16
        r.cache.reset()


# --- write through, load back ---------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["cleared", "refused", "detached"])
@on_virtual_clock
async def test_a_prefix_that_comes_from_the_host_is_used(lost: str) -> None:
    """B40: what storage lacks is tried again on next use. A prompt whose prefix the host alone has
    uses it, though it publishes nothing itself."""
    async with three_tiers(storage=WAITS) as (r, store):
        if lost == "refused":
            refuses = store.fault("write", error=OSError("no"), times=1)
            await r.serve(A)
            await r.cache.drain()
            assert refuses.num_met == 1
        else:
            await r.serve(A)
            await r.cache.drain()
            if lost == "cleared":
                await r.cache.storage.clear()
            else:
                await r.cache.storage.detach()
                store.rows.clear()
                await r.cache.storage.attach(r.config, backend=store)
        assert store.has(A) == "-" * 8
        demote(r)
        async with r.cache.lease([*A, 1]) as lease:
            assert lease.hits == Hits(host=32)
        await r.cache.drain()
        assert store.has(A) == "S" * 8
        wipe(r)
        r.spoil_free_pages()
        assert await r.serve([*A, 1]) == 32
        await r.cache.drain()
        at_rest(r)


@pytest.mark.parametrize("stack", STACKS)
@on_virtual_clock
async def test_what_was_suspended_goes_on_from_storage(stack: str) -> None:
    """B93, B26: a request that was suspended in its answer, and whose state has left device and
    host meanwhile, goes on from what storage has of it, generated tokens included."""
    prompt, answer = seq("A", 30), seq("B", 17)
    async with hybrid_tiers(stack) as (r, _):
        async with r.cache.lease(prompt, reserve=20) as lease:
            await r.compute(lease)
            for token in answer:
                await lease.run(r.model, lease.append(token))
            lease.suspend()
        await r.cache.drain()
        wipe(r)
        assert r.stats.num_nodes == 0
        r.spoil_free_pages()
        async with r.cache.lease([*prompt, *answer], reserve=5) as lease:
            assert lease.prefix_len > len(prompt) - P
            assert lease.hits.storage == lease.prefix_len
            await r.compute(lease)
            await lease.run(r.model, lease.append(1))
        await r.cache.drain()
        at_rest(r)


@on_virtual_clock
async def test_a_prefix_that_was_loaded_is_not_truncated() -> None:
    """B06: it is the tree's, and others may be reading it; what follows it may be taken back, up to
    its very end."""
    async with three_tiers() as (r, _):
        await keep(r, A)
        async with r.cache.lease([*A, 1], reserve=4) as lease:
            assert lease.hits == Hits(storage=32)
            for length in (0, 16, 31):
                with pytest.raises(ValueError, match="committed"):
                    lease.truncate(length)
            lease.truncate(32)
            assert await lease.next_chunk(8) is None
            await lease.run(r.model, lease.append(5))
            lease.finish()
        await r.cache.drain()
        at_rest(r)


# --- prefetch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
@on_virtual_clock
async def test_prompts_around_one_page(page_size: int, pages: int, beyond: int) -> None:
    """B08, B23: storage keeps whole pages; a prefetch brings all of them, a lease uses those in
    front of the last token."""
    num_tokens = max(1, page_size * pages + beyond)
    tokens = seq("A", num_tokens)
    async with three_tiers(page_size=page_size) as (r, store):
        await keep(r, tokens)
        whole = num_tokens // page_size
        assert store.has(tokens) == "S" * whole
        assert await prefetched(r, tokens) == whole * page_size
        wipe(r)
        async with r.cache.lease(tokens) as lease:
            reused = (num_tokens - 1) // page_size * page_size
            assert (lease.prefix_len, lease.hits) == (reused, Hits(storage=reused))
            await r.compute(lease)
        await r.cache.drain()
        at_rest(r)


@pytest.mark.parametrize("rows", [1, 2, 3])
@on_virtual_clock
async def test_a_host_of_a_few_rows_before_a_long_prompt(rows: int) -> None:
    """B43, B63: all of a prompt of eight pages comes to storage through it, in as many uses as it
    takes; as much as the host may have of storage comes back."""
    async with three_tiers(16, rows) as (r, store):
        await keep(r, A)
        for _ in range(8):
            await r.serve([*A, 1])
            await r.cache.drain()
            at_rest(r)
        assert store.has(A) == "S" * 8
        wipe(r)
        assert await prefetched(r, A, policy="wait_complete") == max(1, rows // 2) * P
        at_rest(r)


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("at", ["contains", "read"])
@on_virtual_clock
async def test_a_detach_with_prefetches_under_way(at: Any, stubborn: bool) -> None:
    """B98: a lease, a handle and one that nobody waits for end with nothing, at once; the backend
    is closed under no call; a store that is attached then serves."""
    async with three_tiers(storage=WAITS) as (r, store):
        await keep(r, A)
        gate = CallGate()
        store.fault(at, gate=gate, at="inside", times=1, stubborn=stubborn)
        waiting = start(r.lease([*A, 1]))
        handle = r.cache.prefetch(A)
        waiter = start(handle.wait())
        r.cache.prefetch(A, detach=True)
        await gate.reached()
        detaching = start(r.cache.storage.detach())
        lease = await waiting
        assert lease.prefix_len == await waiter == 0
        assert "detached" in lease.why
        handle.close()
        await r.compute(lease)
        lease.close()
        assert not r.cache.storage
        gate.open()
        await detaching
        await r.cache.drain()
        wipe(r)
        await r.cache.storage.attach(r.config, backend=store)
        assert await r.serve([*A, 1]) == 32
        await r.cache.drain()
        at_rest(r)


@on_virtual_clock
async def test_no_time_at_all() -> None:
    """B55: with `timeout=0` a lease takes what is here, the host's copy included, and waits for
    nothing of storage; with `load_timeout=0` what storage has comes to the host, and is the next
    one's."""
    async with three_tiers() as (r, store):
        await r.serve(A)
        await r.cache.drain()
        demote(r)
        async with r.cache.lease([*A, 1], timeout=0) as lease:
            assert lease.hits == Hits(host=32)
        wipe(r)
        store.fault("read", delay=1.0)
        async with r.cache.lease([*A, 1], timeout=0) as lease:
            assert lease.prefix_len == 0
            assert "storage" in lease.why
        await r.cache.drain()
        wipe(r)
        async with r.cache.lease([*A, 1], load_timeout=0) as lease:
            assert lease.prefix_len == 0
            assert "load_timeout" in lease.why
        async with r.cache.lease([*A, 1], timeout=0) as lease:
            assert lease.hits == Hits(host=32)
        await r.cache.drain()
        at_rest(r)


@on_virtual_clock
async def test_a_prompt_that_is_on_its_way_down_is_not_fetched() -> None:
    """B37: the rows that are being written are the host's, and cannot be given up; whoever asks for
    them gets them, and reads nothing."""
    async with three_tiers() as (r, store):
        gate = CallGate()
        store.fault("write", gate=gate, at="inside", times=1)
        await r.serve(A)
        await gate.reached()
        wipe(r)
        assert on_tier(r, A) == "H" * 8
        assert await prefetched(r, A) == 32
        assert store.num_calls["read"] == 0
        gate.open()
        await r.cache.drain()
        wipe(r)
        assert await prefetched(r, A) == 32
        at_rest(r)


@pytest.mark.parametrize("how", ["reset", "close", "clear", "detach"])
@pytest.mark.parametrize("at", ["contains", "read", "load"])
@on_virtual_clock
async def test_whatever_ends_while_three_leases_wait(at: Any, how: str) -> None:
    """B93, B98: they end, each as it should: with less, with what has come, or with an error that
    says that the cache is closed."""
    async with three_tiers(storage=WAITS) as (r, store):
        await keep(r, A)
        gate = CallGate()
        if at == "load":
            assert await prefetched(r, A) == 32
        else:
            store.fault(at, gate=gate, at="inside", times=1, stubborn=True)
        limits: list[dict[str, float]] = [{}, {"load_timeout": 5.0}, {"timeout": 5.0}]
        work = [start(r.lease([*A, number], **limit)) for number, limit in enumerate(limits)]
        if at == "load":
            await asyncio.sleep(0)
        else:
            await gate.reached()
        ending: Any = None
        if how == "reset":
            r.cache.reset()
        elif how == "close":
            await r.cache.aclose(1.0)
        else:
            ending = start(getattr(r.cache.storage, how)())
        await turns(40)
        gate.open()
        ended = await asyncio.gather(*work, return_exceptions=True)
        for lease in ended:
            if isinstance(lease, BaseException):
                assert how == "close"
                assert isinstance(lease, ClosedError)
                continue
            assert lease.prefix_len in (0, 16, 32)
            await r.compute(lease)
            lease.close()
        if how == "close":
            assert all(isinstance(error, ClosedError) for error in ended)
            return
        if ending is not None:
            await ending
        await r.cache.drain()
        if how != "reset":
            wipe(r)
        at_rest(r)


@on_virtual_clock
async def test_an_engines_request_from_before_a_reset_is_stale() -> None:
    """B93: it is told so when it would go on, and not that its pages are somebody else's; it ends
    without a word, and its pages go home."""
    async with three_tiers() as (r, _):
        request = r.cache.begin_req(A)
        request.table.write(0, r.cache.allocate(8))
        request.computed = 32
        r.cache.reset()
        with pytest.raises(StaleError, match="reset"):
            r.cache.cache_unfinished_req(request)
        r.cache.cache_finished_req(request)
        assert r.pool.free == r.pool.capacity
        assert r.stats.num_nodes == 0
        at_rest(r)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 1.5, True, "3"])
@pytest.mark.parametrize("name", ["num_tokens", "num_pages"])
@on_virtual_clock
async def test_what_is_no_amount_is_not_evicted(name: str, bad: Any) -> None:
    """B12, B101: less than nothing, or a part of a page, is an error of whoever asked, on either
    tier, and nothing goes."""
    params = EvictParams(**{name: bad if name == "num_tokens" else {"full": bad}})
    async with three_tiers() as (r, _):
        await r.serve(A)
        await r.cache.drain()
        for evict in (r.cache.evict, r.cache.evict_host):
            with pytest.raises((TypeError, ValueError)):
                await evict(params)
        assert on_tier(r, A) == "B" * 8


@on_virtual_clock
async def test_a_limit_is_a_whole_number_and_stays_a_plain_one() -> None:
    """B08, B101: a fraction is refused; numpy's integers are taken at their value, and no boundary
    is made of them."""
    async with three_tiers() as (r, _):
        await r.serve(A)
        await r.cache.drain()
        for bad in (1.5, True, "3"):
            with pytest.raises(TypeError, match="limit must be a whole number"):
                r.cache.match_prefix(MatchPrefixParams(RadixKey(A), bad))  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="limit must be a whole number"):
                await r.cache.load_back(RadixKey(A), bad)  # type: ignore[arg-type]
        match = r.cache.match_prefix(MatchPrefixParams(RadixKey(A), np.int8(12)))  # type: ignore[arg-type]
        assert (match.device_length, type(match.device_length)) == (12, int)
        receipt = r.cache.inc_lock_ref(match.device_boundary)
        assert r.cache.protected_size() == 3
        assert r.cache.protected_size(tier=Tier.HOST) == 0
        r.cache.dec_lock_ref(receipt)
        for limit, length in ((0, 0), (10**30, 32)):
            assert await r.cache.load_back(RadixKey(A), limit) == length


async def test_a_handle_and_a_pin_answer_in_the_cache_s_thread_alone() -> None:
    """B94: what holds something is closed where the tree is, and not in the middle of a change."""
    async with three_tiers() as (r, _):
        await keep(r, A)
        with r.cache.prefetch(A) as handle:
            assert await handle.wait("wait_complete") == 32
            with r.cache.pin(A, None) as pin:

                def elsewhere() -> None:
                    for use in (handle.close, handle.done_now, pin.close):
                        with pytest.raises(WrongThreadError):
                            use()
                    with pytest.raises(WrongThreadError):
                        _ = handle.tokens

                await asyncio.to_thread(elsewhere)
                assert handle.tokens == pin.tokens == 32
                assert not pin.closed
        at_rest(r)


@pytest.mark.parametrize("bad", [-1, float("nan"), "3", True])
@on_virtual_clock
async def test_a_wait_is_as_long_as_some_seconds(bad: Any) -> None:
    """B55, B101: what is no time limit is refused, and ends nothing; without end is one."""
    async with three_tiers(storage=WAITS) as (r, store):
        await keep(r, A)
        store.fault("read", delay=2.0)
        with r.cache.prefetch(A) as handle:
            with pytest.raises((TypeError, ValueError), match="timeout"):
                await handle.wait(timeout=bad)
            with pytest.raises(ValueError, match="policy"):
                await handle.wait("")
            assert not handle.is_done
            assert await handle.wait(timeout=10**400) == 32


@on_virtual_clock
async def test_a_cache_that_is_off_is_used_like_any_other() -> None:
    """B101: `mode: off` is for comparing: all that a program does with its cache works, nothing
    matches, and nothing is kept, by whichever way it comes."""
    async with three_tiers(mode="off") as (r, store):
        for detach in (False, True):
            with r.cache.prefetch(A, detach=detach) as handle:
                if not detach:
                    assert await handle.wait("wait_complete", 1.0) == handle.done_now() == 0
                    assert handle.is_done
                    assert "off" in handle.why
        with pytest.raises(ClosedError):
            await handle.wait()
        for tier in (None, Tier.HOST, Tier.DEVICE):
            with r.cache.pin(A, 1.0, tier=tier) as pin:
                assert pin.tokens == 0
        key, pages = RadixKey(A), tuple(r.cache.allocate(8))
        for params in (InsertParams(key, pages), InsertParams(key, pages, prev_prefix_len=16)):
            result = r.cache.insert(params)
            assert (result.length, [len(ids) for ids in result.duplicates]) == (0, [0])
            assert r.cache.match_prefix(MatchPrefixParams(key)).best_length == 0
        r.cache.free(pages)
        request = r.cache.begin_req(A)
        assert request.computed == 0
        r.cache.cache_finished_req(request)
        assert await r.serve(A) == await r.serve(A) == 0
        assert r.stats.num_nodes == 0
        assert r.pool.free == r.pool.capacity
        assert store.num_calls.total() == 0


# --- files ----------------------------------------------------------------------------------------

OF_A_FILE: Final[dict[str, Any]] = {
    "another page's": lambda path, other: path.write_bytes(other.read_bytes()),
    "a link to another page's": lambda path, other: (path.unlink(), path.symlink_to(other)),
    "one file with another page's": lambda path, other: (path.unlink(), path.hardlink_to(other)),
    "empty": lambda path, other: path.write_bytes(b""),
    "cut": lambda path, other: path.write_bytes(path.read_bytes()[:1000]),
    "longer": lambda path, other: path.write_bytes(path.read_bytes() + bytes(4096)),
}


def spoil_third_page(root: Path, how: str) -> None:
    """Of A; with the sixth, where another one is needed."""
    keys = [key.hex() for key in RadixKey(A).page_keys(P)]
    paths = [path for path in root.rglob("*") if path.is_file()]
    OF_A_FILE[how](*(next(path for path in paths if keys[page] in path.name) for page in (2, 5)))


@pytest.mark.parametrize("how", OF_A_FILE)
async def test_a_file_that_is_not_the_page_s_is_written_again(how: str, tmp_path: Path) -> None:
    """B64: also one that cannot be read at all: two pages are a hit, the next request is computed,
    and after that all of it is there again."""
    options = {"path": str(tmp_path), "reserve": 0, "max_size": "64MiB"}
    storage = {"backend": "file", "options": options, **WAITS}
    async with rig(64, model=MODEL, host={"tokens": 256}, storage=storage) as r:
        await r.serve(A)
        await r.cache.drain()
        wipe(r)
        spoil_third_page(tmp_path, how)
        r.spoil_free_pages()
        assert await r.serve([*A, 1]) == 8
        await r.cache.drain()
        wipe(r)
        r.spoil_free_pages()
        assert await r.serve([*A, 1]) == 32
        await r.cache.drain()
        at_rest(r)


@on_virtual_clock
async def test_what_cannot_be_read_once_is_asked_for_again() -> None:
    """B64, §10.7: it may have been the disk's bad moment; nothing is written again for it, if
    nobody had to compute it."""
    async with three_tiers() as (r, store):
        await keep(r, A)
        written = store.num_calls["write"]
        store.fault("read", keys=[store.pages_of(A)[2]], result=ReadResult.FAILED, times=1)
        assert await prefetched(r, A) == 8
        assert await prefetched(r, A) == 32
        await r.serve([*A, 1])
        await r.cache.drain()
        assert store.num_calls["write"] == written
        at_rest(r)
