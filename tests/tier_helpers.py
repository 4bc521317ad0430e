"""Two tiers whose copies a test starts, ends and spoils by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from tests.lease_helpers import P, Rig, rig, turns
from tiered_cache import Lease
from tiered_cache.observe import Event, EventKind
from tiered_cache.testing.gates import ManualExecutor, ManualJob
from tiered_cache.transfer.copier import CopyJob, Direction
from tiered_cache.transfers import Transfer

LIMIT_S: Final = 5.0
"""Only a hang reaches it."""


MAX_ROUNDS: Final = 500


class Copies(ManualExecutor):
    """A copy executor: each job stops in front of its bytes until it is finished.

    Attributes:
        moved: the jobs whose bytes have been moved, in order.
        fails: says which jobs fail, before they have moved a byte.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[CopyJob] = []
        self.fails: Callable[[CopyJob], bool] = lambda job: False

    def attach(self, copier: Any) -> None:
        """Have a copier's jobs come by here."""
        copy = copier.copy

        def paused_copy(job: CopyJob) -> None:
            self.pause()
            if self.fails(job):
                raise OSError("a bad row")
            copy(job)
            self.moved.append(job)

        copier.copy = paused_copy

    @property
    def directions(self) -> str:
        """What has moved, a letter per job: S for stores, L for loads."""
        return "".join("S" if job.direction is Direction.STORE else "L" for job in self.moved)

    def start(self) -> ManualJob:
        """Start the oldest job that is queued; its bytes stay where they are."""
        for job in tuple(self.queued):
            if job.start():
                return job
        raise AssertionError("nothing is queued")

    async def one(self) -> None:
        """The oldest job that is queued, to its end."""
        self.start().finish()
        await turns()

    async def all(self) -> None:
        """Until nobody copies anything any more."""
        await turns()
        for _ in range(MAX_ROUNDS):
            if not self.jobs:
                return
            self.run_all()
            await turns()
        raise AssertionError("somebody copies for ever")

    def end(self) -> None:
        """Let what runs end."""
        for job in tuple(self.jobs):
            if job.is_running:
                job.finish()


@contextlib.asynccontextmanager
async def tiers(
    pages: int = 16, rows: int = 64, *, options: Any = None, model: Any = None, **host: Any
) -> AsyncIterator[tuple[Rig, Copies]]:
    """A cache of two tiers that is checked when it is left, and its copies."""
    copies = Copies()
    given = {"copy_executor": copies, **(options or {})}
    sections = {} if model is None else {"model": model}
    async with rig(pages, host={"tokens": rows * P, **host}, options=given, **sections) as r:
        copies.attach(r.cache._parts.host.copier)  # type: ignore[union-attr]
        await r.cache.drain()  # its memory has been touched
        r.at_exit(copies.end)
        yield r, copies


def demote(r: Rig, num_pages: int = 1 << 20) -> None:
    """Have the device give up what nobody holds."""
    r.cache._controller.accounts.evict([num_pages])


async def store(r: Rig, copies: Copies, *prompts: Sequence[int]) -> None:
    """Prompts that only the host has."""
    for tokens in prompts:
        await r.serve(tokens)
        await copies.all()
    demote(r)


def transfers(r: Rig) -> list[Transfer]:
    """What is under way, oldest first."""
    assert r.cache._controller.transfers is not None, "there are two tiers"
    return list(r.cache._controller.transfers)


def on_tier(r: Rig, tokens: Sequence[int]) -> str:
    """Where each whole page of a prompt is: D, H, B (both) or -, root first."""
    places = {(True, True): "B", (True, False): "D", (False, True): "H", (False, False): "-"}
    found = ""
    node, depth = r.cache.tree.root, 0
    data = b"".join(int(token).to_bytes(8, "little") for token in tokens)
    while depth + P <= len(tokens):
        page = data[depth * 8 : (depth + P) * 8]
        child = next((c for c in node.children.values() if c.key.startswith(page)), None)
        if child is None:
            return found + "-" * ((len(tokens) - depth) // P)
        part = child.data[0]
        place = places[part.value is not None, part.host_value is not None]
        while depth < child.end and depth + P <= len(tokens):
            if not child.key.startswith(data[child.start * 8 : (depth + P) * 8]):
                return found + "-" * ((len(tokens) - depth) // P)
            found += place
            depth += P
        node = child
    return found


async def soon(work: asyncio.Task[Lease]) -> Lease:
    """A lease that nothing keeps from being granted any more."""
    async with asyncio.timeout(2.0):
        return await work


async def until(is_true: Callable[[], bool]) -> None:
    """Let the loop and other threads go on until it is so."""
    async with asyncio.timeout(LIMIT_S):
        while not is_true():
            await asyncio.sleep(0.001)


class Log:
    """An observer that writes down residencies: `+host`, `-device`, by node end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_event(self, event: Event) -> None:
        if event.node is not None:
            sign = "+" if event.kind is EventKind.STORED else "-"
            self.lines.append(f"{sign}{event.tier.value} {event.node.end}")
