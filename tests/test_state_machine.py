"""A state machine against a naive model: whatever users do, in whatever order, nothing goes wrong.

The real cache runs on a loop that the machine turns by hand, and model runs are started and ended
by hand, so every interleaving replays from its seed. The naive model is a set: which token prefixes
have been published since the last reset, page by page. After each step

* the library's own checker proves its records, and the byte oracle every page of the tree and of
  every lease; free pages are spoilt, so whatever is freed too early reads wrong;
* everything that the tree holds has been published; while nothing was evicted, everything that was
  published is found;
* nobody waits for a run when there is none, or for admission when nobody holds anything.

Counters prove that the run met what matters (semantics §11): see `FLOORS`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.lease_helpers import P, turns
from tests.lease_helpers import settings as cache_settings
from tiered_cache import (
    AdmissionTimeout,
    CapacityError,
    Chunk,
    Lease,
    MatchPrefixParams,
    RadixKey,
    StaleError,
    UnifiedRadixCache,
)
from tiered_cache.testing.gates import ManualExecutor, ManualJob
from tiered_cache.testing.oracle import ByteOracle, OracleModel, path_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

PAGES: Final = 22
MAX_ACTORS: Final = 6

FLOORS: Final = {
    "splits under lock": 100,
    "joins of equal prompts": 100,
    "cancels with a running model thread": 100,
    "full-pool admissions": 100,
    "resets with leases": 20,
    "runs that failed": 50,
    "evictions": 100,
    "duplicates given back": 50,
    "deferred commits": 20,
    "growth refused": 20,
    "batches": 50,
    "truncations": 50,
    "closes with a run going on": 20,
}
"""How often one CI run must meet each situation."""

MET: Counter[str] = Counter()

prompts = st.tuples(
    st.sampled_from("AAAB"), st.integers(1, 26), st.integers(0, 3), st.sampled_from(["", "", "x"])
)
pick = st.integers(0, 1 << 16)


def tokens_of(prompt: tuple[str, int, int, str]) -> list[int]:
    """Few beginnings and endings, so that prompts are alike and fork inside pages and edges."""
    name, length, tail, _ = prompt
    return [100 * ord(name) + at for at in range(length)] + [7 + tail] * tail


def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


def one_of(actors: list[Actor], which: int) -> Actor:
    return actors[which % len(actors)]


class ModelError(Exception):
    """What a failing run raises."""


class Actor:
    """A request: a lease, or the wait for one, and at most one thing that it awaits."""

    num_runs = 0

    def __init__(self, tokens: list[int], salt: str) -> None:
        self.run_order = 0
        self.tokens = tokens
        self.salt = salt
        self.lease: Lease | None = None
        self.chunk: Chunk | None = None
        self.task: asyncio.Task[Any] | None = None
        self.waits_for = ""
        self.has_waited = False
        self.reused_before = 0
        self.is_cancelled = False
        self.batch: list[Actor] = [self]  # who shares the task

    def await_(self, what: str, task: asyncio.Task[Any], batch: list[Actor] | None = None) -> None:
        self.waits_for = what
        self.has_waited = False
        self.is_cancelled = False
        self.task = task
        self.batch = batch or [self]
        if what == "run":
            Actor.num_runs += 1
            self.run_order = Actor.num_runs

    def cancel(self) -> None:
        assert self.task is not None
        for actor in self.batch:
            actor.is_cancelled = True
        self.task.cancel()


class CacheMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.executor = ManualExecutor()
        self.cache = self.loop.run_until_complete(self._open())
        self.oracle = ByteOracle(self.cache)
        self.model = OracleModel(self.oracle, self.executor.pause)
        self.actors: list[Actor] = []
        self.leaving: list[Actor] = []  # closed, but a run of theirs may go on and publish
        self.published: set[tuple[str, tuple[int, ...]]] = set()
        self.evicted_before = 0
        self.num_bursts = 0
        self.is_ending = False
        self._count_splits()

    async def _open(self) -> UnifiedRadixCache:
        return await UnifiedRadixCache.open(cache_settings(PAGES), run_executor=self.executor)

    def _count_splits(self) -> None:
        split = self.cache.tree._split_node

        def counting(child: Any, depth: int) -> Any:
            MET["splits under lock"] += child.data[0].lock_ref > 0
            return split(child, depth)

        self.cache.tree._split_node = counting  # type: ignore[method-assign]

    # --- driving ----------------------------------------------------------------------------------

    def act(self, action: Callable[[], object]) -> None:
        """Do something on the loop, let it go round, and take in what has come of it."""

        async def doing() -> None:
            action()
            await turns(6)
            self._take_in()

        self.loop.run_until_complete(doing())

    def _take_in(self) -> None:
        for actor in (*self.actors, *self.leaving):
            task = actor.task
            if task is None:
                continue
            if not task.done():
                actor.has_waited = True
                continue
            actor.task = None
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, (ModelError, CapacityError, StaleError)):
                raise error
            assert not task.cancelled() or actor.is_cancelled or self.is_ending
            if task.cancelled() or error is not None:
                self._failed(actor)
            else:
                self._succeeded(actor, task.result())
        for actor in self.leaving:
            self._note_published(actor)
        self.leaving = [actor for actor in self.leaving if actor.task is not None]

    def _failed(self, actor: Actor) -> None:
        if actor.waits_for == "admission":
            self.actors.remove(actor)
        elif actor.waits_for == "run":
            actor.chunk = None

    def _succeeded(self, actor: Actor, result: Any) -> None:
        if actor.waits_for == "admission":
            MET["full-pool admissions"] += actor.has_waited
            actor.lease = result
            if actor.is_cancelled:  # the cancellation came when it was granted already
                self._leave(actor)
        elif actor.waits_for == "chunk":
            assert actor.lease is not None
            actor.chunk = result
            if actor.has_waited:
                MET["joins of equal prompts"] += actor.lease.hits.total > actor.reused_before

    def _leave(self, actor: Actor) -> None:
        assert actor.lease is not None
        self._note_published(actor)
        MET["closes with a run going on"] += actor.waits_for == "run" and actor.task is not None
        actor.lease.close()
        self.actors.remove(actor)
        if actor.task is not None:
            if actor.waits_for != "run":
                actor.cancel()
            self.leaving.append(actor)

    def _note_published(self, actor: Actor) -> None:
        if actor.lease is not None and not self._is_stale(actor):
            for stop in range(P, actor.lease.committed + 1, P):
                self.published.add((actor.salt, tuple(actor.tokens[:stop])))

    def _is_stale(self, actor: Actor) -> bool:
        return actor.lease is not None and actor.lease.epoch != self.cache._controller.epoch

    def idle(self, *, chunk: bool | None = None) -> list[Actor]:
        """Actors that hold a lease and await nothing, with or without a chunk in hand."""
        return [
            actor
            for actor in self.actors
            if actor.lease is not None
            and actor.task is None
            and (chunk is None or (actor.chunk is not None) == chunk)
        ]

    def computed(self) -> list[Actor]:
        """Those whose chunk has been computed and not been committed."""
        return [
            actor
            for actor in self.idle(chunk=True)
            if actor.lease and actor.chunk and actor.chunk.stop <= actor.lease.computed
        ]

    def fresh(self) -> list[Actor]:
        """Those with a chunk to compute."""
        return [actor for actor in self.idle(chunk=True) if actor not in self.computed()]

    def ready_to_ask(self) -> list[Actor]:
        return self.idle(chunk=False) + self.computed()

    def in_a_run(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.task and actor.waits_for == "run"]

    def awaiting(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.task and not actor.is_cancelled]

    def _usable(self, actor: Actor) -> bool:
        """Whether the lease can be used; one from before a reset must say so, and is closed."""
        assert actor.lease is not None
        if not self._is_stale(actor):
            return True
        with pytest.raises(StaleError):
            actor.lease.finish()
        self._leave(actor)
        return False

    # --- what users do ----------------------------------------------------------------------------

    @precondition(lambda self: len(self.actors) < MAX_ACTORS)
    @rule(prompt=prompts, reserve=st.sampled_from([0, 0, 3, 9]))
    def arrive(self, prompt: tuple[str, int, int, str], reserve: int) -> None:
        self._arrive(tokens_of(prompt), prompt[3], reserve)

    @precondition(lambda self: self.idle() and len(self.actors) < MAX_ACTORS)
    @rule(which=pick, cut=st.integers(1, 20), tail=st.integers(1, 3))
    def arrive_alike(self, which: int, cut: int, tail: int) -> None:
        """A prompt that leaves another request's path somewhere."""
        others = self.idle()
        most = max(actor.lease.committed for actor in others if actor.lease)
        others = [actor for actor in others if actor.lease and actor.lease.committed == most]
        other = one_of(others, which)
        self._arrive([*other.tokens[: 1 + cut % (most + 1)], *[9] * tail], other.salt, 0)

    def _arrive(self, tokens: list[int], salt: str, reserve: int) -> Actor:
        actor = Actor(list(tokens), salt)
        self.actors.append(actor)

        def acquire() -> None:
            work = self.cache.acquire(tokens, cache_salt=salt, reserve=reserve)
            actor.await_("admission", spawn(work))

        self.act(acquire)
        return actor

    @precondition(lambda self: len(self.actors) < MAX_ACTORS - 1)
    @rule(length=st.integers(6, 14), tail=st.integers(0, 2), max_tokens=st.sampled_from([4, 100]))
    def burst(self, length: int, tail: int, max_tokens: int) -> None:
        """Two new prompts that begin alike: the second asks while the first is being computed."""
        self.num_bursts += 1
        tokens = [10_000 * self.num_bursts + at for at in range(length)]
        first = self._arrive(tokens, "", 0)
        second = self._arrive(tokens + [5] * tail, "", 0)
        for actor in (first, second):
            if actor in self.idle():
                self.act(lambda actor=actor: self._ask(actor, max_tokens))
            if actor is first and actor in self.fresh():
                self._start_run(actor, "commits")

    @precondition(lambda self: self.ready_to_ask())
    @rule(which=pick, max_tokens=st.sampled_from([3, 4, 9, 100, 100]))
    def ask_for_a_chunk(self, which: int, max_tokens: int) -> None:
        actor = one_of(self.ready_to_ask(), which)
        self.act(lambda: self._ask(actor, max_tokens))

    def _ask(self, actor: Actor, max_tokens: int) -> None:
        assert actor.lease is not None
        if self._usable(actor):
            actor.chunk = None
            actor.reused_before = actor.lease.hits.total
            work = self._checked_chunk(actor, actor.lease, max_tokens)
            actor.await_("chunk", spawn(work))

    @staticmethod
    async def _checked_chunk(actor: Actor, lease: Lease, max_tokens: int) -> Chunk | None:
        chunk = await lease.next_chunk(max_tokens)
        if chunk is None:
            assert lease.computed == len(lease)
            return None
        assert chunk.start == lease.computed < chunk.stop <= chunk.start + max_tokens
        assert chunk.tokens.tolist() == actor.tokens[chunk.start : chunk.stop]
        if chunk.stop < len(lease) and chunk.stop % P:
            assert chunk.stop // P == chunk.start // P, "cut inside a page although it reaches one"
        return chunk

    @precondition(lambda self: self.fresh())
    @rule(which=pick, how=st.sampled_from(["commits", "commits", "returns", "returns", "fails"]))
    def run(self, which: int, how: str) -> None:
        self._start_run(one_of(self.fresh(), which), how)

    def _start_run(self, actor: Actor, how: str) -> None:
        def start() -> None:
            assert actor.lease is not None
            assert actor.chunk is not None
            if self._usable(actor):
                MET["runs that failed"] += how == "fails"
                actor.await_("run", spawn(self._run(actor.lease, actor.chunk, how)))
                if how == "commits":
                    actor.chunk = None

        self.act(start)

    async def _run(self, lease: Lease, chunk: Chunk, how: str) -> None:
        await lease.run(self._explode if how == "fails" else self.model, chunk)
        if how == "commits" and not lease.closed:
            lease.commit(chunk)

    @rule(prompt=prompts, max_tokens=st.sampled_from([8, 100]))
    def serve(self, prompt: tuple[str, int, int, str], max_tokens: int) -> None:
        """A whole request, if there is room at once; others are at whatever they are at."""
        actor = Actor(tokens_of(prompt), prompt[3])
        work = self.cache.acquire(actor.tokens, cache_salt=actor.salt, timeout=0)
        try:
            lease = actor.lease = self.loop.run_until_complete(work)
        except AdmissionTimeout:
            return
        while not self.executor.jobs:
            chunk = self.loop.run_until_complete(lease.next_chunk(max_tokens))
            if chunk is None:
                break
            running = self.loop.create_task(lease.run(self.model, chunk))
            self.act(lambda: None)
            self.executor.run_all()
            self.loop.run_until_complete(running)
            self.act(lambda chunk=chunk: lease.commit(chunk))
            self._note_published(actor)
        self.act(lease.close)

    def _explode(self, *_: Any) -> None:
        self.executor.pause()
        raise ModelError

    @precondition(lambda self: len(self.fresh()) > 1)
    @rule()
    def run_a_batch(self) -> None:
        ready = [actor for actor in self.fresh() if not self._is_stale(actor)]
        if not ready:
            return
        MET["batches"] += 1

        def start() -> None:
            leases = [actor.lease for actor in ready if actor.lease is not None]
            chunks = [actor.chunk for actor in ready if actor.chunk is not None]
            work = spawn(self.cache.run(leases, self.model, chunks))
            for actor in ready:
                actor.await_("run", work, ready)

        self.act(start)

    @precondition(lambda self: self.executor.queued)
    @rule(which=pick)
    def a_run_starts(self, which: int) -> None:
        queued = self.executor.queued
        job = queued[which % len(queued)]
        self.act(lambda: None)
        if job in self.executor.jobs:
            job.start()

    @precondition(lambda self: self.executor.running)
    @rule(which=pick)
    def a_run_ends(self, which: int) -> None:
        self._finish(self.executor.running[which % len(self.executor.running)])

    @precondition(lambda self: self.executor.jobs)
    @rule(count=st.integers(1, 3))
    def the_oldest_runs_end(self, count: int) -> None:
        for job in self.executor.jobs[:count]:
            if job in self.executor.jobs and (job.is_running or job.start()):
                self._finish(job)

    def _finish(self, job: ManualJob) -> None:
        free = self.cache._parts.allocators[0].free_ids()
        self.oracle.spoil("full", free)
        job.finish()
        self.oracle.verify_spoilt("full", free)
        self.act(lambda: None)

    @precondition(lambda self: self.computed())
    @rule(which=pick)
    def commit(self, which: int) -> None:
        actor = one_of(self.computed(), which)

        def commit() -> None:
            assert actor.lease is not None
            assert actor.chunk is not None
            if self._usable(actor):
                actor.lease.commit(actor.chunk)
                actor.chunk = None

        self.act(commit)

    @precondition(lambda self: self.fresh() and not self.executor.jobs)
    @rule(which=pick)
    def commit_late(self, which: int) -> None:
        """A chunk is computed, and the next one is being computed when it is committed."""
        actor = one_of(self.fresh(), which)
        self._start_run(actor, "returns")
        for job in tuple(self.executor.jobs):
            job.start()
            self._finish(job)
        if actor in self.computed():
            self.act(lambda: self._ask(actor, 4))
        if actor in self.fresh():
            self._start_run(actor, "returns")
            self.commit_while_a_run_goes_on(which=self.in_a_run().index(actor))

    @precondition(lambda self: self.in_a_run())
    @rule(which=pick)
    def commit_while_a_run_goes_on(self, which: int) -> None:
        actor = one_of(self.in_a_run(), which)
        lease = actor.lease
        if lease is None or self._is_stale(actor):
            return

        def finish() -> None:
            before = lease.committed
            lease.finish()
            assert lease.committed == before
            MET["deferred commits"] += lease.computed // P * P > before

        self.act(finish)

    @precondition(lambda self: self.idle(chunk=False))
    @rule(which=pick, token=st.integers(50, 52))
    def append(self, which: int, token: int) -> None:
        actor = one_of(self.idle(chunk=False), which)

        def append() -> None:
            lease = actor.lease
            assert lease is not None
            if not self._usable(actor):
                return
            room = lease.room
            try:
                chunk = lease.append(token)
            except CapacityError:
                assert room == 0
                MET["growth refused"] += 1
                return
            actor.tokens.append(token)
            if chunk.start == lease.computed:
                actor.chunk = chunk

        self.act(append)

    @precondition(lambda self: self.idle(chunk=False))
    @rule(count=st.integers(1, 3))
    def extend(self, count: int) -> None:
        fit = [a for a in self.idle(chunk=False) if not self._is_stale(a)][:count]
        if not fit:
            return

        def extend() -> None:
            leases = [actor.lease for actor in fit if actor.lease is not None]
            lengths = [len(lease) for lease in leases]
            victims = self.cache.extend(leases, [60] * len(leases))
            if victims:
                assert [len(lease) for lease in leases] == lengths
                MET["growth refused"] += 1
                for actor in [actor for actor in fit if actor.lease in victims]:
                    self._leave(actor)
                staying = [lease for lease in leases if lease not in victims]
                assert self.cache.extend(staying, [60] * len(staying)) == []
            for actor in fit:
                if actor in self.actors:
                    actor.tokens.append(60)

        self.act(extend)

    @precondition(lambda self: self.idle())
    @rule(which=pick, back=st.integers(1, 6))
    def truncate(self, which: int, back: int) -> None:
        actor = one_of(self.idle(), which)

        def truncate() -> None:
            lease = actor.lease
            assert lease is not None
            if not self._usable(actor):
                return
            length = len(lease) - back
            if length < max(1, lease.committed):
                with pytest.raises(ValueError, match="cannot truncate"):
                    lease.truncate(length)
                return
            lease.truncate(length)
            MET["truncations"] += 1
            del actor.tokens[length:]
            if actor.chunk is not None and actor.chunk.stop > length:
                actor.chunk = None

        self.act(truncate)

    @precondition(lambda self: self.idle())
    @rule(which=pick, how=st.sampled_from(["close", "finish", "suspend"]))
    def leave(self, which: int, how: str) -> None:
        actor = one_of(self.idle(), which)

        def end() -> None:
            lease = actor.lease
            assert lease is not None
            if not self._usable(actor):
                return
            if how == "suspend":
                committed = lease.computed // P * P
                for stop in range(P, committed + 1, P):
                    self.published.add((actor.salt, tuple(actor.tokens[:stop])))
                lease.suspend()
            elif how == "finish":
                lease.finish()
            self._leave(actor)

        self.act(end)

    @precondition(lambda self: any(actor.lease for actor in self.awaiting()))
    @rule(which=pick, sure=st.booleans())
    def leave_in_the_middle(self, which: int, sure: bool) -> None:
        """A lease is closed by somebody else while its own task awaits a chunk or a run."""
        if sure:
            actor = one_of([actor for actor in self.awaiting() if actor.lease], which)
            self.act(lambda: self._leave(actor))

    @precondition(lambda self: self.awaiting())
    @rule(which=pick, sure=st.integers(0, 2))
    def cancel(self, which: int, sure: int) -> None:
        actor = one_of(self.awaiting(), which)
        if not sure:
            self.act(actor.cancel)

    @precondition(lambda self: self.executor.jobs and self.in_a_run())
    @rule(sure=st.booleans())
    def cancel_while_the_model_runs(self, sure: bool) -> None:
        if not sure:
            return
        job = self.executor.jobs[0]
        if job.is_queued:
            job.start()
        oldest = min(self.in_a_run(), key=lambda actor: actor.run_order)  # jobs are in order, too
        if not oldest.is_cancelled and job.is_running:
            MET["cancels with a running model thread"] += 1
            self.act(oldest.cancel)

    @rule(sure=st.integers(0, 11))
    def reset(self, sure: int) -> None:
        if sure:
            return

        def reset() -> None:
            for actor in self.actors:
                self._note_published(actor)
            MET["resets with leases"] += any(actor.lease for actor in self.actors)
            self.cache.reset()
            pool = self.cache.stats().pools["full"]
            assert pool.free + pool.quarantined == pool.capacity
            self.published.clear()
            self.evicted_before = self.cache.stats().counters.pages_evicted

        self.act(reset)

    @rule(prompt=prompts)
    def look(self, prompt: tuple[str, int, int, str]) -> None:
        """What is found has been published; all of it is found while nothing was evicted."""
        salt, tokens = prompt[3], tokens_of(prompt)

        def look() -> None:
            match = self.cache.tree.match_prefix(
                MatchPrefixParams(RadixKey(tokens, cache_salt=salt))
            )
            wanted = 0
            while (salt, tuple(tokens[: wanted + P])) in self.published and wanted + P <= len(
                tokens
            ):
                wanted += P
            if self.cache.stats().counters.pages_evicted == self.evicted_before:
                assert match.device_length == wanted
            assert match.device_length <= wanted

        self.act(look)

    # --- what must hold after each step -----------------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        self.loop.run_until_complete(self._prove())

    async def _prove(self) -> None:
        for actor in (*self.actors, *self.leaving):
            self._note_published(actor)
        self.cache.check_integrity()
        self.oracle.spoil("full", self.cache._parts.allocators[0].free_ids())
        self.oracle.verify_tree()
        assert self.model.faults == []
        for node in self.cache.tree.nodes():
            tokens = tuple(memoryview(path_tokens(node)).cast("q").tolist())
            assert (node.namespace.cache_salt, tokens) in self.published
        for actor in self.actors:
            lease = actor.lease
            if lease is not None and not self._is_stale(actor):
                assert lease.tokens.tolist() == actor.tokens
                self.oracle.verify(lease, lease.key, 0, lease.computed)
        waiting = {actor.waits_for for actor in self.actors if actor.task is not None}
        if not self.executor.jobs:
            assert "chunk" not in waiting, "waits for a run, and there is none"
            assert "run" not in waiting
        if waiting == {"admission"} and not any(actor.lease for actor in self.actors):
            assert self.executor.jobs, "waits for admission, and nobody holds anything"

    def teardown(self) -> None:
        tasks = {actor.task for actor in (*self.actors, *self.leaving) if actor.task is not None}
        self.is_ending = True

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self.act(cancel)
        for _ in range(3):  # a run that ends may let another start
            self.executor.run_all()
            self.act(lambda: None)
        counters = self.loop.run_until_complete(self._end())
        MET["evictions"] += counters.pages_evicted
        MET["duplicates given back"] += counters.pages_duplicate
        self.loop.close()

    async def _end(self) -> Any:
        for actor in self.actors:
            assert actor.task is None
            if actor.lease is not None:
                actor.lease.close()
        await self.cache.drain()
        pool = self.cache.stats().pools["full"]
        assert pool.free + pool.evictable == pool.capacity
        assert self.cache.outstanding() == []
        self.oracle.verify_tree()
        assert await self.cache.aclose() == []
        return self.cache.stats().counters


def _settings(examples: int, *, derandomize: bool) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=60,
        derandomize=derandomize,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.timeout(600)
def test_whatever_users_do() -> None:
    """Hundreds of schedules of sixty steps, the same ones every time, and they meet the floors."""
    MET.clear()
    run_state_machine_as_test(CacheMachine, settings=_settings(900, derandomize=True))
    missed = {what: MET[what] for what, floor in FLOORS.items() if MET[what] < floor}
    assert not missed, f"the schedules do not go there often enough any more: {missed}"


@pytest.mark.soak
def test_whatever_users_do_for_long() -> None:
    """New schedules for `SOAK_MINUTES` (30)."""
    end = time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "30"))
    rounds = 0
    while time.monotonic() < end:
        machine = seed(time.time_ns())(CacheMachine)
        run_state_machine_as_test(machine, settings=_settings(200, derandomize=False))
        rounds += 1
        sys.stderr.write(f"{rounds * 200} schedules, {dict(MET)}\n")
