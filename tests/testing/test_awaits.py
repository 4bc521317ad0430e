"""Awaits are found in a source, met where a coroutine stands, and what goes wrong there is seen."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import pytest
import uvloop

import tiered_cache
from tests.lease_helpers import rig, seq, turns
from tiered_cache.testing.awaits import (
    AwaitSite,
    Coverage,
    assert_nothing_left,
    cancel_everywhere,
    find_awaits,
    frames_of,
)
from tiered_cache.testing.loop import DeterministicLoop

SOURCE: Final = '''
import asyncio
import contextlib

class Door:
    """await nothing here"""

    def __init__(self):
        self.bell = asyncio.Event()
        self.is_held = False

    async def enter(self):
        await (
            self.bell
            .wait()
        )
        self.is_held = True

    async def leave(self):
        self.is_held = False
        await asyncio.sleep(0)

    def __await__(self):
        return self.enter().__await__()

    async def numbers(self):
        for number in range(2):
            await asyncio.sleep(0)
            yield number

async def many(door):
    async def inner():
        await door
    await inner()
    async for number in door.numbers():
        assert number < 2
    assert [n async for n in door.numbers()] == [0, 1]
    assert await anext(door.numbers(), None) == 0
    async with contextlib.aclosing(
        door.numbers()
    ) as numbers, asyncio.timeout(5):
        assert await anext(numbers) == 0

async def background():
    await asyncio.sleep(0)
'''

FOUND: Final = [
    "Door.enter: await self.bell.wait()",
    "Door.leave: await asyncio.sleep(0)",
    "Door.numbers: await asyncio.sleep(0)",
    "many.<locals>.inner: await door",
    "many: await inner()",
    "many: async for number in door.numbers()",
    "many: async for n in door.numbers()",
    "many: await anext(door.numbers(), None)",
    "many: async with contextlib.aclosing(door.numbers()) as numbers, asyncio.timeout(5)",
    "many: await anext(numbers)",
    "background: await asyncio.sleep(0)",
]

LOOPS: Final[list[Callable[[], asyncio.AbstractEventLoop]]] = [
    asyncio.new_event_loop,
    uvloop.new_event_loop,
    DeterministicLoop,
]

all_loops = pytest.mark.parametrize("new_loop", LOOPS, ids=["asyncio", "uvloop", "seeded"])

Victim = Callable[[Any], Coroutine[Any, Any, Any]]
"""Of a door."""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[types.ModuleType]:
    """A package with one module, `house.door`, and one folder that is outside."""
    for path, text in {
        "__init__.py": "",
        "door.py": SOURCE,
        "cli/app.py": "async def f():\n    await g()\n",
    }.items():
        (tmp_path / "house" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "house" / path).write_text(text)
    yield load("house", tmp_path / "house" / "__init__.py")
    for name in ("house", "house.door"):
        sys.modules.pop(name, None)


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def door_module(house: types.ModuleType) -> Any:
    return load("house.door", Path(str(house.__file__)).parent / "door.py")


def scene(
    house: types.ModuleType, victim: Victim, prove: Callable[[Any], object] = lambda _: None
) -> Callable[[], AbstractAsyncContextManager[Coroutine[Any, Any, Any]]]:
    """A victim at a door whose bell rings after three turns."""
    module = door_module(house)

    @contextlib.asynccontextmanager
    async def scenario() -> AsyncIterator[Coroutine[Any, Any, Any]]:
        door = module.Door()

        def ring(in_turns: int) -> None:
            if in_turns:
                asyncio.get_running_loop().call_soon(ring, in_turns - 1)
            else:
                door.bell.set()

        ring(3)
        yield victim(door)
        await turns(5)
        prove(door)

    return scenario


def nobody_holds(door: Any) -> None:
    assert not door.is_held


# --- finding --------------------------------------------------------------------------------------


def test_all_kinds_of_awaits_are_found_and_nothing_else(house: types.ModuleType) -> None:
    """By their lines and names; not in text, not in folders that are outside."""
    sites = find_awaits(house)
    assert [f"{site.qualname}: {site.source}" for site in sites] == FOUND
    assert {site.path for site in sites} == {"door.py"}
    lines = SOURCE.splitlines()
    assert all(("await" in lines[s.line - 1]) or ("async" in lines[s.line - 1]) for s in sites)
    assert [s.path for s in find_awaits(house, outside=())].count("cli/app.py") == 1


def test_each_await_of_the_library_has_a_name_and_a_line_of_its_own() -> None:
    """Otherwise one would stand for another."""
    sites = find_awaits(tiered_cache)
    assert len({(site.path, site.line) for site in sites}) == len(sites) > 20
    assert len({site.key for site in sites}) == len(sites)


@all_loops
def test_a_coroutine_is_seen_through_wrappers_and_generators(
    house: types.ModuleType, new_loop: Any
) -> None:
    """`__await__`, `async for`, comprehensions, `anext`, context managers: all are met."""
    coverage = Coverage(house)
    scenario = scene(house, lambda door: sys.modules["house.door"].many(door))
    assert cancel_everywhere(scenario, coverage, new_loop) == 7
    missed = set(FOUND) - sources(coverage.cancelled)
    # Closing a generator that stands at a `yield` does not suspend.
    assert missed == {FOUND[1], FOUND[8], FOUND[10]}


def test_frames_of_what_does_not_wait() -> None:
    """A finished coroutine stands nowhere, a new one at its beginning."""

    async def work() -> None:
        await turns(1)

    coroutine = work()
    assert [frame.f_code.co_name for frame in frames_of(coroutine)] == ["work"]
    coroutine.close()
    assert list(frames_of(coroutine)) == []
    assert list(frames_of(None)) == []


# --- cancelling -----------------------------------------------------------------------------------


@all_loops
def test_a_hold_that_a_cancellation_leaves_is_found(house: types.ModuleType, new_loop: Any) -> None:
    """With the place where it was cancelled; one that is released is fine."""

    async def leaks(door: Any) -> None:
        await door.enter()
        await door.leave()
        door.is_held = True
        await turns(1)
        door.is_held = False

    async def releases(door: Any) -> None:
        await door.enter()
        try:
            await turns(1)
        finally:
            await door.leave()

    with pytest.raises(AssertionError) as error:
        cancel_everywhere(scene(house, leaks, nobody_holds), Coverage(house), new_loop)
    assert error.value.__notes__ == ["when cancelled at suspension 2: outside the package"]
    for delay, times in [(0, 1), (0, 3), (1, 1), (4, 1)]:
        scenario = scene(house, releases, nobody_holds)
        options = {"delay": delay, "times": times}
        assert cancel_everywhere(scenario, Coverage(house), new_loop, **options) == 3


@all_loops
def test_a_cancellation_that_is_swallowed_is_found(house: types.ModuleType, new_loop: Any) -> None:
    """Whoever cancels a task expects it to end."""

    async def goes_on(door: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await door.enter()
        await turns(1)

    with pytest.raises(AssertionError, match="went on") as error:
        cancel_everywhere(scene(house, goes_on), Coverage(house), new_loop)
    assert "door.py:13 Door.enter: await self.bell.wait()" in error.value.__notes__[0]


def test_a_victim_that_waits_for_ever_is_found(house: types.ModuleType) -> None:
    """After a limit that is virtual here; with the place where it waits."""

    async def waits(door: Any) -> None:
        try:
            await door.enter()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="waits for ever"):
        cancel_everywhere(scene(house, waits), Coverage(house), DeterministicLoop)


def test_a_task_that_is_left_is_found(house: types.ModuleType) -> None:
    """One that ends by itself is waited for."""
    kept = []

    async def leaves(door: Any) -> None:
        kept.append(asyncio.create_task(door.bell.wait()))
        await door.enter()
        door.bell.clear()
        kept.append(asyncio.create_task(door.bell.wait(), name="left behind"))
        await turns(1)

    with pytest.raises(AssertionError, match="left behind"):
        cancel_everywhere(scene(house, leaves), Coverage(house), DeterministicLoop)


def test_what_the_victim_raises_is_raised(house: types.ModuleType) -> None:
    """A failure that has nothing to do with cancelling is no proof of anything."""

    async def fails(door: Any) -> None:
        await door.enter()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cancel_everywhere(scene(house, fails), Coverage(house), DeterministicLoop)


def test_a_second_cancellation_comes_where_the_first_is_cleaned_up(house: types.ModuleType) -> None:
    """So awaits in `finally` are cancelled too."""

    async def cleans_up(door: Any) -> None:
        try:
            await door.enter()
        except asyncio.CancelledError:
            await door.leave()
            raise

    once, twice = Coverage(house), Coverage(house)
    cancel_everywhere(scene(house, cleans_up), once, DeterministicLoop)
    cancel_everywhere(scene(house, cleans_up), twice, DeterministicLoop, times=2)
    assert sources(once.suspended) == sources(twice.suspended) == {FOUND[0], FOUND[1]}
    assert sources(once.cancelled) == {FOUND[0]}
    assert sources(twice.cancelled) == {FOUND[0], FOUND[1]}


def test_tasks_of_the_package_are_watched_too(house: types.ModuleType) -> None:
    """Whoever cancels them: what came through their awaits counts."""

    async def starts(door: Any) -> None:
        module = sys.modules["house.door"]
        task = asyncio.create_task(module.background())
        await asyncio.sleep(0)
        task.cancel()
        await door.enter()

    coverage = Coverage(house)
    cancel_everywhere(scene(house, starts), coverage, asyncio.new_event_loop)
    assert sources(coverage.cancelled) == {FOUND[0], FOUND[-1]}


def sources(sites: set[AwaitSite]) -> set[str]:
    return {f"{site.qualname}: {site.source}" for site in sites}


# --- gaps -----------------------------------------------------------------------------------------


def test_gaps_say_what_lacks_a_scenario_and_what_is_wrongly_excused(
    house: types.ModuleType,
) -> None:
    """Each by its place; an excuse is for an await that is there and is never cancelled."""
    coverage = Coverage(house)
    met, cancelled, *others = coverage.sites
    coverage.suspended |= {met, cancelled}
    coverage.cancelled.add(cancelled)
    excuses = {site.key: "a reason" for site in others[1:]}
    assert coverage.gaps(excuses) == [
        f"{met} was suspended, not cancelled: it lacks a scenario",
        f"{others[0]} was never met: it lacks a scenario",
    ]
    assert str(met) == "door.py:13 Door.enter: await self.bell.wait()"
    excuses |= {site.key: "a reason" for site in (met, cancelled, others[0])}
    assert coverage.gaps({**excuses, "door.py gone: await gone()": "moved"}) == [
        f"{cancelled} is cancelled by a scenario, and is not expected to be",
        "there is no such await: door.py gone: await gone()",
    ]


async def test_nothing_left_sees_a_lease() -> None:
    """And is content without it, also when the cache is closed."""
    async with rig() as r:
        lease = await r.lease(seq("A", 9))
        with pytest.raises(AssertionError, match="Lease 1"):
            await assert_nothing_left(r.cache)
        lease.close()
        await assert_nothing_left(r.cache)
    await assert_nothing_left(r.cache)
