"""The cache as a whole: opening, closing, who may call, and what it leaves alone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import re
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest
import torch

from tests.lease_helpers import P, chunk_of, rig, seq, settings, start, turns
from tiered_cache import ClosedError, Lease, UnifiedRadixCache, WrongThreadError
from tiered_cache.testing.gates import Gate, ManualExecutor

# --- opening and closing --------------------------------------------------------------------------


async def test_open_is_awaited_or_entered() -> None:
    """Either way the cache is ready; leaving the block closes it."""
    cache = await UnifiedRadixCache.open(settings())
    assert repr(cache) == "<UnifiedRadixCache full: 16 of 16 pages free>"
    assert await cache.aclose() == []
    async with UnifiedRadixCache.open(settings()) as other:
        assert repr(other) == "<UnifiedRadixCache full: 16 of 16 pages free>"
    assert repr(other) == "<UnifiedRadixCache full: 16 of 16 pages free, closed>"


async def test_what_is_refused_after_the_close_and_what_is_not() -> None:
    """Looking is allowed, using is not; closing again is harmless."""
    cache = await UnifiedRadixCache.open(settings())
    lease = await cache.acquire(seq("A", 5))
    chunk = await chunk_of(lease)
    await cache.aclose()
    assert lease.closed
    uses: list[Any] = [
        lambda: cache.lease([1]),
        lambda: cache.extend([lease], [1]),
        lambda: cache.explain([1]),
        lambda: lease.commit(chunk),
        lambda: lease.append(1),
        lambda: lease.truncate(1),
        lambda: lease.pending,
        lease.finish,
        lease.suspend,
        cache.reset,
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()
    for work in (cache.drain(), cache.acquire([1]), lease.next_chunk(1), lease.run(int)):
        with pytest.raises(ClosedError):
            await work
    lease.close()
    await lease.aclose()
    assert cache.outstanding() == []
    assert cache.stats().num_leases == 0
    cache.check_integrity()
    assert await cache.aclose() == []


async def test_two_tasks_close_at_once_while_the_opener_works() -> None:
    """Closing is idempotent and may come from any task of the loop."""
    cache = await UnifiedRadixCache.open(settings())
    lease = await cache.acquire(seq("A", 5))
    gate = Gate()
    running = start(lease.run(gate, 7))
    await gate.reached()
    closing = [start(cache.aclose()), start(cache.aclose())]
    await turns()
    assert not any(task.done() for task in closing)
    gate.open()
    assert await asyncio.gather(*closing) == [[], []]
    assert await running == 7
    with pytest.raises(ClosedError):
        lease.finish()


async def test_closing_drops_queued_runs_at_once() -> None:
    """Their callers get an error, although the thread hangs in another one."""
    cache = await UnifiedRadixCache.open(settings())
    one, two = await cache.acquire(seq("A", 9)), await cache.acquire(seq("B", 9))
    gate = Gate()
    ran: list[Any] = []
    hung = start(one.run(gate, await chunk_of(one, 4)))
    await gate.reached()
    follows = start(one.run(ran.append, await chunk_of(one)))
    queued = start(two.run(ran.append, await chunk_of(two)))
    await turns()
    report = await cache.aclose(limit=0)
    await turns()
    if not queued.done():
        gate.open()
    (left,) = report
    with pytest.raises(ClosedError, match="dropped"):
        await queued
    assert (left.kind, left.pages) == ("quarantine", {"full": 3})
    assert cache.stats().pools["full"].quarantined == 3
    gate.open()
    await hung
    with pytest.raises(ClosedError):
        await follows
    assert await cache.aclose() == []
    assert ran == []


async def test_a_hung_run_that_ends_after_the_close_gives_its_pages_back() -> None:
    """Clean-up needs no later call."""
    async with rig() as r:
        lease = await r.lease(seq("A", 9))
        gate = Gate()
        hung = start(lease.run(gate, await chunk_of(lease)))
        await gate.reached()
        assert len(await r.cache.aclose(limit=0)) == 1
        gate.open()
        await hung
        assert r.cache.outstanding() == []
        assert r.pool.free == r.pool.capacity


def test_a_hung_run_does_not_keep_the_program_from_ending() -> None:
    """`asyncio.run` cancels the task that awaits it, and that task gives way; the thread ends when
    it ends, and its pages go home then."""
    gates: list[Gate] = []
    caches: list[UnifiedRadixCache] = []

    async def main() -> None:
        gates.append(Gate())
        caches.append(await UnifiedRadixCache.open(settings()))
        lease = await caches[0].acquire(seq("A", 9))
        hung = start(lease.run(gates[0], await chunk_of(lease)))
        await gates[0].reached()
        hung.cancel()
        await turns()
        assert not hung.done(), "nobody has given up yet"
        assert len(await caches[0].aclose(limit=0)) == 1

    asyncio.run(main())
    assert len(caches[0].outstanding()) == 1
    gates[0].open()
    deadline = time.monotonic() + 30
    while caches[0].outstanding():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- executors ------------------------------------------------------------------------------------


async def test_a_users_executor_is_used_and_not_shut_down() -> None:
    """It is the user's to end."""
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="mine") as executor:
        async with rig(options={"run_executor": executor}) as r:
            lease = await r.lease(seq("A", 5))
            name = await lease.run(lambda: threading.current_thread().name)
            lease.close()
        assert name.startswith("mine")
        assert executor.submit(int).result(10) == 0


async def test_a_users_executor_that_is_shut_down_fails_runs_and_leaks_nothing() -> None:
    """Under queued runs, and before the next one."""
    executor = concurrent.futures.ThreadPoolExecutor(1)
    async with rig(options={"run_executor": executor}) as r:
        one, two = await r.lease(seq("A", 9)), await r.lease(seq("B", 9))
        gate = Gate()
        active = start(one.run(gate, await chunk_of(one)))
        await gate.reached()
        queued = start(two.run(r.model, await chunk_of(two)))
        await turns()
        executor.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(ClosedError, match="dropped"):
            await queued
        with pytest.raises(ClosedError, match="shutdown"):
            await two.run(r.model, await chunk_of(two))
        gate.open()
        await active
        assert r.stats.num_runs == 0
        assert r.stats.counters.runs_failed == 2
        one.close()
        two.close()
        assert r.pool.free == r.pool.capacity


async def test_a_coroutine_function_is_refused() -> None:
    """A thread would make a coroutine that nobody awaits."""

    async def model() -> None: ...

    fn: Any = model
    async with rig() as r, r.cache.lease([1]) as lease:
        with pytest.raises(TypeError, match="plain function"):
            await lease.run(fn)
        assert r.stats.counters.runs == 0


async def test_tensors_of_the_users_hold_the_state() -> None:
    """They define the number of pages, and the bytes are where slots say."""
    tensors: dict[str, list[torch.Tensor]] = {
        name: [torch.zeros(6 * P, 1, 2, dtype=torch.float32) for _ in range(2)] for name in "kv"
    }
    config = settings(device={"type": "cpu"})
    async with UnifiedRadixCache.open(config, device_pools=tensors) as cache:
        lease = await cache.acquire(seq("A", 5), reserve=3)
        assert cache.stats().pools["full"].capacity == 6

        def fill(chunk: Any) -> None:
            tensors["k"][1][lease.device_indices.numel() :][: len(chunk)] = 1.0
            cache.pools.layer("v", 0)[chunk.slots("full", chunk.start)] = 2.0

        chunk = await chunk_of(lease)
        await lease.run(fill, chunk)
        assert bool((tensors["v"][0][chunk.slots()] == 2.0).all())
        assert lease.device_indices.tolist() == chunk.slots().tolist()
        lease.close()


# --- who may call ---------------------------------------------------------------------------------


async def test_nothing_answers_in_another_thread() -> None:
    """Not even what only looks: it would look at a tree in the middle of a change."""
    async with rig() as r, r.cache.lease(seq("A", 5)) as lease:
        cache = r.cache
        uses: list[Any] = [
            cache.stats,
            cache.outstanding,
            cache.check_integrity,
            cache.pretty_print,
            cache.reset,
            lambda: cache.explain([1]),
            lambda: cache.extend([lease], [1]),
            lambda: cache.lease([1]),
            lease.close,
            lease.finish,
            lambda: lease.truncate(1),
            lambda: asyncio.run(cache.aclose()),
            lambda: asyncio.run(cache.drain()),
            lambda: asyncio.run(lease.run(int)),
            lambda: asyncio.run(lease.next_chunk(1)),
        ]

        def elsewhere() -> None:
            for use in uses:
                with pytest.raises(WrongThreadError):
                    use()

        before = cache.stats()
        await asyncio.to_thread(elsewhere)
        assert cache.stats() == before
        assert not lease.closed


def test_another_loop_in_the_same_thread_is_refused() -> None:
    """Its futures and timers would be those of a loop that does not run."""
    loop = asyncio.new_event_loop()
    cache = loop.run_until_complete(_open())
    lease = loop.run_until_complete(cache.acquire(seq("A", 5)))
    for work in (cache.acquire([1]), cache.drain(), cache.aclose(), lease.next_chunk(1)):
        with pytest.raises(WrongThreadError, match="loop"):
            asyncio.run(work)
    with pytest.raises(WrongThreadError, match="not running"):
        cache.reset()
    lease.close()
    assert cache.outstanding() == []
    loop.run_until_complete(cache.aclose())
    loop.close()


async def _open() -> UnifiedRadixCache:
    return await UnifiedRadixCache.open(settings())


def test_a_lease_may_outlive_its_loop() -> None:
    """Closing and forgetting it then is silent and harmless."""

    async def main() -> tuple[UnifiedRadixCache, Lease]:
        cache = await _open()
        lease = await cache.acquire(seq("A", 5))
        await cache.aclose()
        return cache, lease

    cache, lease = asyncio.run(main())
    lease.close()
    del lease
    assert cache.outstanding() == []


def test_forked_and_imported_it_touches_nothing() -> None:
    """In a process of its own: import and open change nothing global, and a child that has
    inherited a cache can neither use nor harm it."""
    script = """
        import asyncio, gc, os, sys, threading, warnings
        import torch
        def state():
            return (
                torch.get_num_threads(), torch.get_num_interop_threads(), gc.get_threshold(),
                gc.isenabled(), gc.get_freeze_count(), type(asyncio.get_event_loop_policy()),
                sum(not t.name.startswith("tiered-cache") for t in threading.enumerate()),
                sys.getswitchinterval(), list(warnings.filters),
            )
        torch.set_num_threads(1)
        import numpy, pydantic, yaml
        asyncio.get_event_loop_policy()
        before = state()
        import tiered_cache
        from tiered_cache import ClosedError, UnifiedRadixCache, load_config
        assert state() == before, (state(), before)
        model = {"dtype": "float32", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}
        config = load_config(
            {"model": model, "page_size": 4, "device": {"tokens": 64}, "check": True}, environ={}
        )

        def child(cache, lease, chunk):
            warnings.simplefilter("error")
            assert state()[:-1] != () and asyncio._get_running_loop() is None
            for use in (
                lambda: cache.lease([1]), lambda: lease.append(1), lambda: lease.commit(chunk),
                lambda: asyncio.run(cache.drain()), lambda: asyncio.run(cache.aclose()),
                cache.reset,
                lambda: asyncio.run(lease.next_chunk(1)),
            ):
                try:
                    use()
                except ClosedError as error:
                    assert "fork" in str(error), error
                else:
                    raise AssertionError(use)
            lease.close()
            assert not lease.closed

        async def main():
            async with UnifiedRadixCache.open(config) as cache:
                assert state() == before, (state(), before)
                async with cache.lease([1, 2, 3, 4, 5], reserve=8) as lease:
                    chunk = await lease.next_chunk(8)
                    pid = os.fork()
                    if pid == 0:
                        code = 1
                        try:
                            asyncio._set_running_loop(None)  # as a spawned helper would see it
                            child(cache, lease, chunk)
                            code = 0
                        except BaseException:
                            import traceback
                            traceback.print_exc()
                        finally:
                            sys.stderr.flush()
                            os._exit(code)
                    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                    await lease.run(id, chunk)
                    lease.commit(chunk)
                    assert lease.committed == 4
            assert cache.outstanding() == []

        asyncio.run(main())
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


# --- what is left behind --------------------------------------------------------------------------


async def test_a_lease_forgotten_in_another_thread_is_cleaned_up_on_the_loop() -> None:
    """A finaliser may run anywhere; the tree is touched in one place only."""
    async with rig() as r:
        box = [await r.lease(seq("A", 9))]
        await r.compute(box[0])

        with pytest.warns(ResourceWarning, match="dropped"):  # noqa: PT031 - in which thread it comes
            await asyncio.to_thread(box.pop)
            while r.cache.outstanding():  # the run's thread may hold its arguments a moment longer
                await asyncio.sleep(0.001)
        await r.cache.drain()
        assert r.cache.outstanding() == []
        assert r.stats.counters.leases_dropped_unclosed == 1
        assert (r.pool.free, r.pool.evictable) == (14, 2)


async def test_a_lease_forgotten_while_its_run_goes_on_is_kept_until_then() -> None:
    """The run holds it; then it goes like any other."""
    async with rig() as r:
        lease = await r.lease(seq("A", 9))
        gate = Gate()
        running = start(lease.run(gate, await chunk_of(lease)))
        await gate.reached()
        del lease
        assert [held.kind for held in r.cache.outstanding()] == ["lease"]
        with pytest.warns(ResourceWarning):  # noqa: PT031 - where it comes is not ours to say
            gate.open()
            await running
            del running
            while r.cache.outstanding():  # the thread may hold its arguments a moment longer
                await asyncio.sleep(0.001)
        assert r.cache.outstanding() == []
        assert r.pool.free == r.pool.capacity


async def test_an_observer_that_raises_is_dropped_and_breaks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others are told all the same."""
    seen: list[Any] = []

    class Bad:
        def on_event(self, event: Any) -> None:
            raise ValueError

    class Good:
        def on_event(self, event: Any) -> None:
            seen.append(event.kind)

    async with rig(options={"observers": [Bad(), Good()]}) as r:
        await r.serve(seq("A", 9))
        assert await r.serve(seq("A", 9)) == 8
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.ERROR
    assert len(seen) > 4


async def test_outstanding_says_what_who_and_how_long() -> None:
    """Oldest first, without any tokens of the prompt."""
    async with rig(options={"run_executor": (executor := ManualExecutor())}) as r:
        one = await r.lease(seq("A", 9))
        two = await r.lease(seq("B", 5))
        run = start(two.run(id, await chunk_of(two)))
        await turns()
        await asyncio.to_thread(executor.jobs[0].start)
        two.close()
        first, second = r.cache.outstanding()
        assert (first.kind, first.owner, first.pages) == ("lease", repr(one), {"full": 0})
        assert (second.kind, second.pages) == ("quarantine", {"full": 2})
        assert first.age_s >= second.age_s >= 0
        assert str(seq("A", 1)[0]) not in first.owner
        r.cache.reset()
        assert [held.kind for held in r.cache.outstanding()] == ["stale lease", "quarantine"]
        await asyncio.to_thread(executor.run_all)
        await run
        one.close()


async def test_priority_is_what_stays_longer() -> None:
    """With the policy `priority`, pressure takes the lowest first, whatever its age."""
    device = {"tokens": 8 * P, "eviction_policy": "priority"}
    async with rig(device=device) as r:
        await r.serve(seq("A", 9), priority=5)
        for name in "BCDEFG":
            await r.serve(seq(name, 9))
        assert r.hit(seq("A", 9)) == 8
        assert r.hit(seq("B", 9)) == 0


async def test_explain_says_how_much_and_why_no_more() -> None:
    """For people who wonder about a miss; it is no use of the prefix."""
    async with rig() as r:
        await r.serve(seq("A", 9))
        for tokens, options, words in (
            (seq("A", 8), {}, "every whole page is cached"),
            (seq("A", 13), {}, r"page \[8, 12\) is not"),
            (seq("A", 9), {"cache_salt": "s"}, "the namespace has no pages at all"),
        ):
            assert re.search(words, r.cache.explain(tokens, **options))
        assert r.stats.counters.leases_granted == 1
        assert "[0:8)" in r.cache.pretty_print()
