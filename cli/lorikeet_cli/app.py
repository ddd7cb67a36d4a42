"""The command `lorikeet`: its groups of commands, and how errors become exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from lorikeet_cli import __version__
from lorikeet_cli.commands import (
    accounts,
    adapters,
    datasets,
    keys,
    leaving,
    logs,
    runs,
    schedules,
    tenants,
    usage,
)
from lorikeet_cli.errors import CliError, Interrupted
from lorikeet_cli.output import say

app = typer.Typer(
    name="lorikeet",
    help="Lorikeet's command line: adapters, datasets, training runs, keys and tenants.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 not signed in or forbidden, 4 unreachable.",
)
accounts.add_to(app)
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys.app, name="keys")
app.add_typer(adapters.app, name="adapters")
app.add_typer(datasets.app, name="datasets")
app.add_typer(runs.app, name="runs")
app.add_typer(schedules.app, name="schedules")
leaving.add_to(app)
logs.add_to(app)
usage.add_to(app)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"lorikeet {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say it.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; end the process with the exit code of `lorikeet_cli.errors`."""
    try:
        app()
    except CliError as error:
        say(f"lorikeet: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)
    except OSError as error:
        say(f"lorikeet: {error}")
        sys.exit(CliError.exit_code)
    finally:
        _flush()


def _flush() -> None:
    """Flush the output; ignore it if the reader, such as `head`, has gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
