"""The runs of models: in which order they start, what they touch, how they end (semantics §11.4).

Owns: the runs under way. Refuses to know: what is computed, and whose pages a lease's are.
"""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tiered_cache.errors import StaleError
from tiered_cache.jobs import run_to_end, submit

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Sequence

    from tiered_cache.chunk import Chunk
    from tiered_cache.claims import Claims
    from tiered_cache.lease import Lease
    from tiered_cache.lease_parts import StateCopy
    from tiered_cache.stats import Counters

T = TypeVar("T")


class Run:
    """A run under way: waiting for the one before it, queued, or active."""

    __slots__ = ("ended", "is_prepared", "job", "leases")

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = leases
        self.ended = asyncio.Event()
        self.is_prepared = False
        self.job: concurrent.futures.Future[Any] | None = None


class Runs:
    """All runs of a cache.

    Args:
        executor: where they compute.
        claims: what others wait for instead of computing it, too (None: nobody does).
        given_up: done when the cache is closed and waits no longer.
        ended: called when a run has ended.
        copy_states: copies states of the device; called in a run's thread, before it.
    """

    def __init__(
        self,
        executor: concurrent.futures.Executor,
        claims: Claims | None,
        counters: Counters,
        given_up: asyncio.Future[None],
        ended: Callable[[], None],
        copy_states: Callable[[Sequence[StateCopy]], None] | None = None,
    ) -> None:
        self._executor = executor
        self._claims = claims
        self._counters = counters
        self._given_up = given_up
        self._ended = ended
        self._copy_states = copy_states
        self._loop = asyncio.get_running_loop()
        self._runs: list[Run] = []

    async def run(
        self, leases: Sequence[Lease], chunks: Sequence[Chunk], fn: Callable[..., T], args: Any
    ) -> T:
        """`fn(*args)` in the run executor, over `chunks` of `leases`; back when nobody runs it any
        more.

        Raises:
            StaleError, ValueError: a chunk that cannot be computed now. Nothing has run.
        """
        if inspect.iscoroutinefunction(fn):
            raise TypeError("run computes in a thread and takes a plain function, not a coroutine")
        if not callable(fn):
            raise TypeError(f"run takes a function and its arguments, not {type(fn).__name__}")
        self._check_chunks(leases, chunks)
        claims = []
        if self._claims is not None:
            claims = [
                self._claims.make(chunk.lease_id, chunk.lease.key, chunk.start, chunk.stop)
                for chunk in chunks
            ]
        for lease in leases:
            lease.begin_run(chunks)
        run = Run(leases)
        ahead = self._runs_ahead(chunks)
        self._runs.append(run)
        self._counters.runs += 1
        is_computed = False
        try:
            for other in ahead:
                await other.ended.wait()
            if ahead:
                self._check_still_follows(leases, chunks)
            run.is_prepared = True
            copies = [copy for lease in leases for copy in lease.prepare_run(chunks)]
            if copies:
                fn = partial(self._after_copies, copies, fn)
            job = submit(self._executor, fn, *args)
            run.job = job
            result = await run_to_end(job, self._given_up)
            is_computed = True
        except asyncio.CancelledError:
            self._counters.runs_cancelled += 1
            raise
        except BaseException:
            self._counters.runs_failed += 1
            raise
        finally:
            if self._claims is not None:
                self._claims.end(claims)
            if run.job is None or run.job.done():
                self._end_run(run, chunks, is_computed)
            else:  # given up by `aclose`; its pages stay quarantined until the thread has ended
                run.job.add_done_callback(lambda _: self._end_later(run, chunks))
        return result

    def _after_copies(self, copies: Sequence[StateCopy], fn: Callable[..., T], *args: Any) -> T:
        assert self._copy_states is not None, "a model with states brings it"
        self._copy_states(copies)
        return fn(*args)

    def _end_run(self, run: Run, chunks: Sequence[Chunk], is_computed: bool) -> None:
        self._runs.remove(run)
        touched = None
        if run.is_prepared:
            touched = run.job is not None and not run.job.cancelled()
        for lease in run.leases:
            lease.end_run(chunks, computed=is_computed, touched=touched)
        run.ended.set()
        self._ended()

    def _end_later(self, run: Run, chunks: Sequence[Chunk]) -> None:
        """In the run's thread, which has outlived the cache."""
        try:
            self._loop.call_soon_threadsafe(self._end_run, run, chunks, False)
        except RuntimeError:  # the loop is closed: nobody else is there any more
            self._end_run(run, chunks, is_computed=False)

    def _runs_ahead(self, chunks: Sequence[Chunk]) -> list[Run]:
        """Runs that compute what these chunks build on.

        A run starts only after them: there may be several threads, and a run that fails must not be
        followed by one that reads what was never written.
        """
        builds_on = {chunk.lease for chunk in chunks if chunk.start > chunk.lease.computed}
        return [run for run in self._runs if not builds_on.isdisjoint(run.leases)]

    @staticmethod
    def _check_still_follows(leases: Sequence[Lease], chunks: Sequence[Chunk]) -> None:
        ends = {}
        for lease in leases:
            lease.check()
            ends[lease] = lease.computed
        for chunk in chunks:
            if chunk.start > ends[chunk.lease]:
                raise StaleError(
                    f"{chunk!r} follows a run that came to nothing: ask for the next chunk"
                )
            ends[chunk.lease] = max(ends[chunk.lease], chunk.stop)

    @staticmethod
    def _check_chunks(leases: Sequence[Lease], chunks: Sequence[Chunk]) -> None:
        ends = {}  # by lease, not by its id: that is unique within its cache only
        for lease in leases:
            ends[lease] = lease.frontier
        for chunk in chunks:
            if chunk.lease not in ends:
                raise ValueError(f"{chunk!r} is not of a lease that runs")
            chunk.lease.check_chunk(chunk, ends[chunk.lease])
            ends[chunk.lease] = max(ends[chunk.lease], chunk.stop)

    def cancel_queued(self) -> None:
        """Those that have not begun never do."""
        for run in self._runs:
            if run.job is not None:
                run.job.cancel()

    def __len__(self) -> int:
        """Runs that are active or queued."""
        return len(self._runs)
