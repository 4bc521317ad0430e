"""The `tiered-cache` command: which sub-commands there are, and how an error looks.

A command raises the library's errors as they are. Here they become text on standard error, so that
scripts can tell them from a crash: with exit code 2, "the user can mend it", or 1, "it is unwell".
"""

from __future__ import annotations

import sys
from pathlib import Path  # typer reads the annotations
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tiered_cache.cli import storage
from tiered_cache.cli.check import check_config
from tiered_cache.cli.demo import demo
from tiered_cache.cli.doctor import doctor
from tiered_cache.cli.plan import show_plan
from tiered_cache.errors import BackendError, ConfigError

USER_ERROR = 2
"""Exit code for what the user can mend."""

UNWELL = 1
"""Exit code for what is configured well and does not work."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # tracebacks belong to bugs, and then to Python's own printer
    add_completion=False,
    help="A prefix cache for the attention state of language models.",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")]


@app.command()
def check(config: ConfigPath) -> None:
    """Say everything that is wrong with a configuration, or that it is fine."""
    check_config(config, Console())


@app.command()
def plan(config: ConfigPath) -> None:
    """Show what it comes to: bytes per token, page and row; pages and tokens per tier."""
    show_plan(config, Console())


app.command()(doctor)
app.command()(demo)
app.add_typer(storage.app, name="storage")


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except ConfigError as error:
        # `Text`, because a message may hold brackets that rich would take for markup.
        Console(stderr=True, soft_wrap=True).print(Text(str(error)))
        sys.exit(USER_ERROR)
    except BackendError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"storage: {error}"))
        sys.exit(UNWELL)
