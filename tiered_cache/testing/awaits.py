"""Every await of a package, found in its source and cancelled in turn.

`find_awaits` reads the source; `cancel_everywhere` runs a scenario again and again and cancels it
at its first suspension, its second, and so on, on any event loop. A `Coverage` knows which of the
found awaits were met and cancelled, so a test can demand all of them: an await that somebody adds
fails it until a scenario comes there.

Refuses to know: what the scenarios do, and what must hold after them; they say that themselves.
"""

from __future__ import annotations

import ast
import asyncio
import gc
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from tiered_cache.cache import UnifiedRadixCache

T = TypeVar("T")

OUTSIDE: Final = ("cli", "integrations", "testing")
"""Folders of this package that are programs on top of its public interface, as a user's own code
is: they hold nothing but leases in `async with`, and their awaits are the library's."""

LIMIT_S: Final = 20.0
"""For one run of a scenario, which takes milliseconds: only so that a broken one ends."""

MAX_SUSPENSIONS: Final = 1000

Scenario: TypeAlias = "Callable[[], AbstractAsyncContextManager[Coroutine[Any, Any, Any]]]"
"""Makes an async context manager that sets the scene, yields the coroutine to cancel, and, when
that has ended in whatever way, ends what is left and proves what must hold."""


# --- finding --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class AwaitSite:
    """An `await`, `async with` or `async for`.

    Attributes:
        path: below the package.
        source: of the expression or the head of the statement.
    """

    path: str
    line: int
    last_line: int
    qualname: str
    source: str

    @property
    def key(self) -> str:
        """Names it also when lines have moved."""
        return f"{self.path} {self.qualname}: {self.source}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.qualname}: {self.source}"


def find_awaits(package: types.ModuleType, outside: Collection[str] = OUTSIDE) -> list[AwaitSite]:
    """All places of a package at which a coroutine may wait, but those in folders `outside`."""
    root = _root(package)
    sites = []
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(root)
        if below.parts[0] not in outside:
            finder = _Finder(below.as_posix())
            finder.visit(ast.parse(path.read_text(encoding="utf-8")))
            sites += finder.sites
    return sorted(sites)


def _root(package: types.ModuleType) -> Path:
    assert package.__file__ is not None, "a package with files"
    return Path(package.__file__).parent


class _Finder(ast.NodeVisitor):
    """Collects the sites of one file."""

    def __init__(self, path: str) -> None:
        self.sites: list[AwaitSite] = []
        self._path = path
        self._scope: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node, node.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node, node.name, "<locals>")

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._inside(node, node.name, "<locals>")

    def _inside(self, node: ast.AST, *names: str) -> None:
        self._scope += names
        self.generic_visit(node)
        del self._scope[-len(names) :]

    def visit_Await(self, node: ast.Await) -> None:
        self._found(node, node, ast.unparse(node))

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        head = ", ".join(map(ast.unparse, node.items))
        self._found(node, node.items[-1].context_expr, f"async with {head}")

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        head = f"{ast.unparse(node.target)} in {ast.unparse(node.iter)}"
        self._found(node, node.iter, f"async for {head}")

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if node.is_async:
            head = f"{ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            self._found(node, node.iter, f"async for {head}", node.target.lineno)
        else:
            self.generic_visit(node)

    def _found(self, node: Any, last: ast.expr, source: str, line: int | None = None) -> None:
        last_line = last.end_lineno or last.lineno
        scope = self._scope[:-1] if self._scope[-1:] == ["<locals>"] else self._scope
        qualname = ".".join(scope)
        site = AwaitSite(self._path, line or node.lineno, last_line, qualname, source)
        self.sites.append(site)
        self.generic_visit(node)


# --- where a coroutine stands ---------------------------------------------------------------------

FRAMES: Final = (("cr_frame", "cr_await"), ("ag_frame", "ag_await"), ("gi_frame", "gi_yieldfrom"))
"""Of coroutines, asynchronous generators and generators: where each stands, what it waits for."""

WRAPPERS: Final = frozenset(
    {"coroutine_wrapper", "async_generator_asend", "async_generator_athrow", "anext_awaitable"}
)
"""Types that drive one of those and do not say which: of `__await__`, `asend`, `anext`."""


def frames_of(waiting: Any) -> Iterator[types.FrameType]:
    """Where a suspended coroutine stands, outermost frame first."""
    while waiting is not None:
        for frame, waits_for in FRAMES:
            if hasattr(waiting, frame):
                if getattr(waiting, frame) is not None:
                    yield getattr(waiting, frame)
                waiting = getattr(waiting, waits_for)
                break
        else:
            waiting = _driven_by(waiting)


def _driven_by(wrapper: Any) -> Any:
    if type(wrapper).__name__ not in WRAPPERS:
        return None
    inside = WRAPPERS | {"coroutine", "async_generator"}
    held = gc.get_referents(wrapper)
    return next((inner for inner in held if type(inner).__name__ in inside), None)


class Coverage:
    """Which awaits of a package were met.

    Attributes:
        sites: all of them.
        suspended: those at which a driven task has stood.
        cancelled: those through which a `CancelledError` has come from the loop, whoever cancelled.
    """

    def __init__(self, package: types.ModuleType, outside: Collection[str] = OUTSIDE) -> None:
        self.sites = find_awaits(package, outside)
        self.suspended: set[AwaitSite] = set()
        self.cancelled: set[AwaitSite] = set()
        self._root = _root(package)
        self._by_file: dict[str, list[AwaitSite]] = {}
        for site in self.sites:
            self._by_file.setdefault(str(self._root / site.path), []).append(site)

    def owns(self, work: Any) -> bool:
        """Whether a coroutine's function has awaits of the package."""
        code = getattr(work, "cr_code", None)
        return code is not None and code.co_filename in self._by_file

    def standing(self, work: Any) -> list[AwaitSite]:
        """The package's awaits that a suspended coroutine stands in, outermost first."""
        found = []
        for frame in frames_of(work):
            line = frame.f_lineno
            around = [
                site
                for site in self._by_file.get(frame.f_code.co_filename, ())
                if site.line <= line <= site.last_line
            ]
            if around:
                found.append(min(around, key=lambda site: site.last_line - site.line))
        return found

    def gaps(self, never: Mapping[str, str]) -> list[str]:
        """What a test asserts to be empty: awaits that nothing was cancelled in, but those whose
        `key` is in `never`, with the reason; and entries of `never` that are not true."""
        found = []
        for site in self.sites:
            if site in self.cancelled and site.key in never:
                found.append(f"{site} is cancelled by a scenario, and is not expected to be")
            elif site not in self.cancelled and site.key not in never:
                met = "was suspended, not cancelled" if site in self.suspended else "was never met"
                found.append(f"{site} {met}: it lacks a scenario")
        keys = {site.key for site in self.sites}
        return found + [f"there is no such await: {key}" for key in never if key not in keys]


# --- cancelling -----------------------------------------------------------------------------------


def cancel_everywhere(
    scenario: Scenario,
    coverage: Coverage,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    *,
    delay: int = 0,
    times: int = 1,
) -> int:
    """Cancel a scenario's coroutine at each of its suspensions, each time on a new loop.

    Args:
        delay: turns of the loop between the suspension and the cancellation: what is waited for may
            have come meanwhile. 0 cancels before the loop sees what is waited for.
        times: how often; after the first at whatever suspensions follow, in code that cleans up.

    Returns: how many suspensions there are.

    Raises:
        AssertionError: the coroutine went on; or it, or a task that is left, waits for ever.
            And whatever the scenario raises when it looks at what is left. A note says where it was
            cancelled.
    """
    for target in range(MAX_SUSPENSIONS):
        attempt = _Attempt(coverage, target, delay, times)
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(attempt.run(scenario))
        except BaseException as error:
            error.add_note(f"when cancelled at suspension {target}: {attempt.where}")
            raise
        if not attempt.where:
            return target
    raise AssertionError(f"no end after {MAX_SUSPENSIONS} suspensions")


async def assert_nothing_left(cache: UnifiedRadixCache) -> None:
    """When nothing is in flight any more, everything is accounted for and nobody holds anything."""
    if not cache.closed:
        await cache.drain()
    assert cache.outstanding() == [], cache.outstanding()
    cache.check_integrity()
    stats = cache.stats()
    assert stats.num_queued == stats.num_runs == 0, stats
    for name, pool in (*stats.pools.items(), *stats.host.items()):
        assert pool.free + pool.evictable == pool.capacity, f"{name}: {pool}"


class _Attempt:
    """One run of a scenario, cancelled at one suspension.

    Attributes:
        where: the package's awaits that it stood in; empty if it did not come that far.
    """

    def __init__(self, coverage: Coverage, target: int, delay: int, times: int) -> None:
        self.where = ""
        self._coverage = coverage
        self._target = target
        self._delay = delay
        self._times = times
        self._count = 0
        self._num_cancels = 0
        self._victim: asyncio.Task[Any] | None = None

    async def run(self, scenario: Scenario) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._run(scenario)
        except TimeoutError as error:
            raise AssertionError(f"waits for ever: {self._who_waits()}") from error

    async def _run(self, scenario: Scenario) -> None:
        loop = asyncio.get_running_loop()
        failed: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: failed.append(context))
        self._drive_tasks_of_the_package(loop)
        async with scenario() as work:
            driven = Driven(work, self._coverage, self._at_suspension)
            self._victim = loop.create_task(driven, name="victim")
            await asyncio.wait([self._victim])
            self._check_end(self._victim)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:  # what ends by itself may
            await asyncio.wait(left)
        for context in failed:  # in a callback, or a task that nobody looked at
            raise AssertionError(context["message"]) from context.get("exception")

    def _who_waits(self) -> str:
        waiting = []
        for task in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
            if task is not asyncio.current_task():
                where = self._coverage.standing(task.get_coro())
                waiting.append(f"{task.get_name()} at {'; '.join(map(str, where)) or task}")
        return "\n".join(waiting) or "the scenario, after what was cancelled"

    def _drive_tasks_of_the_package(self, loop: asyncio.AbstractEventLoop) -> None:
        make: Any = loop.get_task_factory() or _plain_task
        coverage = self._coverage

        def factory(loop: Any, work: Any, **options: Any) -> Any:
            return make(loop, Driven(work, coverage) if coverage.owns(work) else work, **options)

        loop.set_task_factory(factory)

    def _check_end(self, victim: asyncio.Task[Any]) -> None:
        if victim.cancelled():
            assert self._num_cancels, "it was cancelled by somebody else"
            return
        if (error := victim.exception()) is not None:
            raise error
        assert not self._num_cancels, "it was cancelled and went on"

    def _at_suspension(self, where: list[AwaitSite]) -> None:
        if self._num_cancels:
            self._cancel_now()
        elif self._count == self._target:
            self.where = "; ".join(map(str, where)) or "outside the package"
            self._cancel_later(self._delay)
        self._count += 1

    def _cancel_later(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._cancel_later, turns - 1)
        else:
            self._cancel_now()

    def _cancel_now(self) -> None:
        assert self._victim is not None, "it is running"
        if self._num_cancels < self._times and self._victim.cancel():
            self._num_cancels += 1


def _plain_task(loop: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(work, loop=loop, **options)


class Driven(Coroutine[Any, Any, T]):
    """A coroutine for a task, that tells a coverage where it stands, and `at_suspension` too."""

    def __init__(
        self,
        work: Coroutine[Any, Any, T],
        coverage: Coverage,
        at_suspension: Callable[[list[AwaitSite]], None] = lambda _: None,
    ) -> None:
        self._work = work
        self._coverage = coverage
        self._at_suspension = at_suspension

    def send(self, value: Any) -> Any:
        return self._suspended(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        if isinstance(error[0], asyncio.CancelledError):
            self._coverage.cancelled.update(self._coverage.standing(self._work))
        return self._suspended(self._work.throw(*error))

    def _suspended(self, waited_for: Any) -> Any:
        where = self._coverage.standing(self._work)
        self._coverage.suspended.update(where)
        self._at_suspension(where)
        return waited_for

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)  # a task asks for the frames and names of a coroutine
