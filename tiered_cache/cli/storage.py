"""`tiered-cache storage`: what storage keeps, whether it is sound, and how to be rid of it.

These commands open the backend beside whatever serves from it: backends are made for several
processes. What is removed while it is in use is a miss there.
"""

from __future__ import annotations

import asyncio
import heapq
import mmap
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from tiered_cache.cli._stored import Plan, Stored, human_age, open_stored, page_key, plan_storage
from tiered_cache.cli.plan import human_bytes
from tiered_cache.storage import SCOPE_BYTES, ReadResult
from tiered_cache.storage.record import Arrivals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from tiered_cache.cli._stored import Scope
    from tiered_cache.storage import ObjectInfo, ObjectKey

WRONG_REMAINS: Final = 1
NOTHING_DONE: Final = 2

BATCH_BYTES: Final = 8 << 20
"""Read at a time by `verify`."""

DELETE_BATCH: Final = 1_000
"""Keys of one `delete`."""

SHOWN_WRONG: Final = 20
"""Objects that `verify` names; it counts them all."""

SECONDS_PER_DAY: Final = 86_400

app = typer.Typer(no_args_is_help=True, help="Look after what storage keeps.")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")]
WorldSize = Annotated[
    int,
    typer.Option(min=1, help="Ranks that serve with this configuration: all theirs is its own."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without, say what would be done.")]


# --- The commands ---------------------------------------------------------------------------------


@app.command()
def du(config: ConfigPath, world_size: WorldSize = 1) -> None:
    """Show objects and bytes: this configuration's, by component, and others'."""
    plan = plan_storage(config, world_size)
    usage, limit = asyncio.run(_usage(plan))
    console = Console(highlight=False)
    console.print(_usage_table(plan, usage))
    if limit is not None:
        total = sum(used.num_bytes for used in usage.values())
        console.print(f"{total / limit:.0%} of the {human_bytes(limit)} that it may keep.")


@app.command("ls")
def list_objects(
    config: ConfigPath,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    prefix: Annotated[str, typer.Option(help="Only keys that begin so (hexadecimal).")] = "",
    world_size: WorldSize = 1,
) -> None:
    """List this configuration's objects, those used last first: key, component, size, age."""
    plan = plan_storage(config, world_size)
    found, total = asyncio.run(_newest(plan, prefix.lower(), limit))
    for info in found:
        scope = plan.scopes[info.key[:SCOPE_BYTES]]
        age = human_age(info.age_s)
        size = human_bytes(info.num_bytes)
        typer.echo(f"{page_key(info).hex()[:40]}  {scope.label:<12}  {size:>10}  {age}".rstrip())
    if total > len(found):
        typer.echo(f"… and {total - len(found):,} more")


@app.command()
def verify(
    config: ConfigPath,
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is wrong.")] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    world_size: WorldSize = 1,
) -> None:
    """Read all of this configuration's objects, and check that each is what it says.

    Exits with 1 when something wrong remains. The cache itself checks what it reads, so a wrong
    object is a miss there, never a wrong answer.
    """
    plan = plan_storage(config, world_size)
    with _progress_bar("checking", shown=progress) as advance:
        findings = asyncio.run(_verify(plan, advance, delete=delete))
    for text in findings.shown:
        typer.echo(text)
    if len(findings.shown) < findings.num_wrong + findings.num_unread:
        typer.echo("…")
    read = f"{findings.num_read:,} objects read, {human_bytes(findings.num_bytes)}"
    removed = f" ({findings.num_removed:,} removed)" if delete and findings.num_wrong else ""
    unread = f", {findings.num_unread:,} could not be read" if findings.num_unread else ""
    typer.echo(f"{read}: {findings.num_wrong:,} wrong{removed}{unread}")
    if findings.num_remaining:
        raise typer.Exit(WRONG_REMAINS)


@app.command()
def gc(
    config: ConfigPath,
    older_than: Annotated[
        float | None,
        typer.Option(min=0, metavar="DAYS", help="Instead: whatever was not used for so long."),
    ] = None,
    keep: Annotated[
        list[Path] | None,
        typer.Option(metavar="CONFIG", help="Another configuration whose objects stay."),
    ] = None,
    world_size: WorldSize = 1,
    yes: Yes = False,
) -> None:
    """Remove objects that are not this configuration's: other models, old revisions, old formats.

    Without `--yes` nothing is removed.
    """
    plan = plan_storage(config, world_size)
    kept = set(plan.scopes)
    for other in keep or ():
        kept |= plan_storage(other, world_size).scopes.keys()

    def is_garbage(info: ObjectInfo) -> bool:
        if older_than is not None:
            return info.age_s is not None and info.age_s > older_than * SECONDS_PER_DAY
        return info.key[:SCOPE_BYTES] not in kept

    usage, num_ageless = asyncio.run(_collect(plan, is_garbage, delete=yes))
    Console(highlight=False).print(_usage_table(plan, usage, are_all_shown=False))
    if older_than is not None and num_ageless:
        typer.echo(f"Nobody knows the age of {num_ageless:,} objects: they stay.")
    _say_removed(usage.values(), yes=yes)


@app.command()
def clear(config: ConfigPath, world_size: WorldSize = 1, yes: Yes = False) -> None:
    """Remove all of this configuration's objects, and nobody else's.

    Without `--yes` nothing is removed, and the exit code is 2.
    """
    plan = plan_storage(config, world_size)
    if yes:
        removed = asyncio.run(_clear(plan))
        for scope, count in zip(plan.scopes.values(), removed, strict=True):
            typer.echo(f"{scope.label}: {count:,} objects removed")
        return
    if plan.parts.backend.can_scan:
        usage, _ = asyncio.run(_usage(plan))
        _say_removed((usage[scope] for scope in plan.scopes), yes=False)
    else:
        typer.echo("Nothing was removed. Add --yes.")
    raise typer.Exit(NOTHING_DONE)


# --- What they do ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    """Of one scope. `age_s`: of its object used last."""

    num_objects: int = 0
    num_bytes: int = 0
    age_s: float | None = None

    def add(self, info: ObjectInfo) -> None:
        self.num_objects += 1
        self.num_bytes += info.num_bytes
        ages = [age for age in (self.age_s, info.age_s) if age is not None]
        self.age_s = min(ages, default=None)


async def _usage(plan: Plan) -> tuple[dict[bytes, Usage], int | None]:
    """Per scope, this configuration's first (there or not); and the most bytes that may be kept."""
    usage = {scope: Usage() for scope in plan.scopes}
    async with open_stored(plan) as stored:
        async for infos in stored.scan():
            for info in infos:
                usage.setdefault(info.key[:SCOPE_BYTES], Usage()).add(info)
        return usage, stored.backend.stats().max_bytes


async def _own(plan: Plan, stored: Stored) -> AsyncIterator[tuple[Scope, Sequence[ObjectInfo]]]:
    for key, scope in plan.scopes.items():
        async for infos in stored.scan(key):
            yield scope, infos


async def _newest(plan: Plan, prefix: str, limit: int) -> tuple[list[ObjectInfo], int]:
    """The objects used last whose page key begins so, and how many begin so."""
    found: list[ObjectInfo] = []
    total = 0
    async with open_stored(plan) as stored:
        async for _, infos in _own(plan, stored):
            fitting = [info for info in infos if page_key(info).hex().startswith(prefix)]
            total += len(fitting)
            found = heapq.nsmallest(limit, found + fitting, key=_by_age)
    return found, total


def _by_age(info: ObjectInfo) -> tuple[float, bytes]:
    return (float("inf") if info.age_s is None else info.age_s), info.key


@dataclass(slots=True)
class Findings:
    """What `verify` has seen. `num_wrong` counts what was removed, too."""

    num_read: int = 0
    num_bytes: int = 0
    num_wrong: int = 0
    num_unread: int = 0
    num_removed: int = 0
    shown: list[str] = field(default_factory=list)

    @property
    def num_remaining(self) -> int:
        return self.num_wrong - self.num_removed + self.num_unread

    def note(self, scope: Scope, key: bytes, what: str) -> None:
        if len(self.shown) < SHOWN_WRONG:
            self.shown.append(f"{key.hex()}  {scope.label}: {what}")


async def _verify(plan: Plan, advance: Callable[[int, int], None], *, delete: bool) -> Findings:
    findings = Findings()
    async with open_stored(plan) as stored:
        counts: Counter[bytes] = Counter()
        async for scope, infos in _own(plan, stored):
            counts[scope.record.scope] += len(infos)
        advance(0, counts.total())
        largest = max(scope.record.row_bytes for scope in plan.scopes.values())
        # On a memory page: direct file access asks for that.
        memory = memoryview(mmap.mmap(-1, max(BATCH_BYTES, largest)))
        await stored.ask(stored.backend.register_memory(memory), patient=True)
        async for scope, infos in _own(plan, stored):
            step = max(1, BATCH_BYTES // scope.record.row_bytes)
            for start in range(0, len(infos), step):
                keys = [info.key for info in infos[start : start + step]]
                wrong = await _check(stored, scope, keys, memory, findings)
                if delete and wrong:
                    await stored.ask(stored.backend.delete(wrong))
                    findings.num_removed += len(wrong)
                advance(len(keys), counts.total())
    return findings


async def _check(
    stored: Stored, scope: Scope, keys: Sequence[ObjectKey], memory: memoryview, findings: Findings
) -> list[ObjectKey]:
    """Those of the objects that are not what they say they are."""
    record = scope.record
    size = record.row_bytes
    rows = [memory[at * size : (at + 1) * size] for at in range(len(keys))]
    page_keys = [bytes(key[SCOPE_BYTES:]) for key in keys]
    arrivals = Arrivals(record, rows, page_keys)
    results = await stored.ask(stored.backend.read(keys, rows, arrivals.arrived))
    read = [index for index, result in enumerate(results) if result is ReadResult.READ]
    findings.num_read += len(read)
    findings.num_bytes += len(read) * size
    verdicts = dict(zip(read, await stored.threads.run(arrivals.verdicts, read), strict=True))
    wrong = []
    for index, result in enumerate(results):
        if result is ReadResult.FAILED:
            findings.num_unread += 1
            findings.note(scope, page_keys[index], "could not be read")
            continue
        what = "is of another length" if result is ReadResult.CORRUPT else verdicts.get(index)
        if what is not None:
            wrong.append(keys[index])
            findings.num_wrong += 1
            findings.note(scope, page_keys[index], what)
    return wrong  # one that is missing was removed meanwhile


async def _collect(
    plan: Plan, is_garbage: Callable[[ObjectInfo], bool], *, delete: bool
) -> tuple[dict[bytes, Usage], int]:
    """What is garbage, per scope, and gone if `delete`; and how many objects have no known age."""
    usage: dict[bytes, Usage] = {}
    num_ageless = 0
    async with open_stored(plan) as stored:
        async for infos in stored.scan():
            num_ageless += sum(info.age_s is None for info in infos)
            garbage = [info for info in infos if is_garbage(info)]
            for info in garbage:
                usage.setdefault(info.key[:SCOPE_BYTES], Usage()).add(info)
            for start in range(0, len(garbage) if delete else 0, DELETE_BATCH):
                keys = [info.key for info in garbage[start : start + DELETE_BATCH]]
                await stored.ask(stored.backend.delete(keys))
    return usage, num_ageless


async def _clear(plan: Plan) -> list[int]:
    async with open_stored(plan, needs_scan=False) as stored:
        return [
            await stored.ask(stored.backend.clear(scope), patient=True) for scope in plan.scopes
        ]


# --- What they show -------------------------------------------------------------------------------


def _usage_table(plan: Plan, usage: dict[bytes, Usage], *, are_all_shown: bool = True) -> Table:
    title = f"Storage: {plan.parts.settings.backend}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("scope", no_wrap=True)
    table.add_column("whose")
    for heading in ("objects", "size", "last used"):
        table.add_column(heading, justify="right", no_wrap=True)
    for key, used in sorted(usage.items(), key=lambda item: item[0] not in plan.scopes):
        scope = plan.scopes.get(key)
        name = "another's" if scope is None else scope.label
        table.add_row(key.hex(), name, *_cells(used))
    if len(usage) != 1 and are_all_shown:
        table.add_section()
        table.add_row("all", "", *_cells(_total(usage.values())), style="bold")
    return table


def _cells(used: Usage) -> tuple[str, str, str]:
    return f"{used.num_objects:,}", human_bytes(used.num_bytes), human_age(used.age_s)


def _total(usage: Iterable[Usage]) -> Usage:
    total = Usage()
    for used in usage:
        total.num_objects += used.num_objects
        total.num_bytes += used.num_bytes
    return total


def _say_removed(usage: Iterable[Usage], *, yes: bool) -> None:
    total = _total(usage)
    what = f"{total.num_objects:,} objects, {human_bytes(total.num_bytes)}"
    if yes:
        typer.echo(f"Removed: {what}.")
    else:
        typer.echo(f"Would be removed: {what}. Nothing was; add --yes.")


@contextmanager
def _progress_bar(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with how many more are done, of how many."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    is_off = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=is_off) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, advance=done, total=total)
