"""`lorikeet schedules`: when an adapter is trained again."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lorikeet_cli import output
from lorikeet_cli.commands.adapters import Name
from lorikeet_cli.commands.runs import read_settings
from lorikeet_cli.output import Column, moment
from lorikeet_cli.session import LimitOption, Session, command, completer

app = typer.Typer(help="When to train an adapter again.", no_args_is_help=True)

_COLUMNS: list[Column] = [
    ("ADAPTER", "adapter"),
    ("DATASET", "dataset"),
    ("CRON", "cron"),
    ("TIME ZONE", "timezone"),
    ("PAUSED", "is_paused"),
    ("NEXT RUN (UTC)", moment("next_run_at")),
    ("WINDOW", "window"),
    ("IF LATE", "misfire"),
    ("HYPERPARAMETERS", "hyperparameters"),
]
_RUN_COLUMNS: list[Column] = [
    ("SLOT (UTC)", moment("slot")),
    ("STATE", "state"),
    ("WHY", "why"),
    ("BY", "trigger"),
    ("RUN", "training_run"),
    ("ROWS", "num_rows"),
]


@command(app, "get")
def get(session: Session, adapter: Name) -> None:
    """Show an adapter's schedule."""
    session.print_one(session.get("adapters", adapter, "schedule"), _COLUMNS)


@command(app, "set")
def set_(
    session: Session,
    adapter: Name,
    dataset: Annotated[
        str,
        typer.Option("--dataset", help="To train on.", autocompletion=completer("datasets")),
    ],
    cron: Annotated[str, typer.Option("--cron", help="'30 2 * * *' is every night at 2:30.")],
    timezone: Annotated[
        str | None, typer.Option("--timezone", help="As Europe/Berlin; at first UTC.")
    ] = None,
    hyperparameter: Annotated[
        list[str] | None,
        typer.Option("--set", help="As rank=8, max_steps=200; repeatable.", metavar="NAME=VALUE"),
    ] = None,
    paused: Annotated[
        bool | None,
        typer.Option("--paused/--resumed", help="Keep it, but start nothing; or start."),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            help="skip_unchanged=false, window=22:00-06:00, misfire=skip, grace_s=600 or "
            "max_runs_per_day=2; repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = None,
) -> None:
    """Train an adapter again by a cron line; options that are left out do not change."""
    body: dict[str, Any] = {"dataset": dataset, "cron": cron, **read_settings(rule or [])}
    given = {"timezone": timezone, "is_paused": paused}
    body |= {name: value for name, value in given.items() if value is not None}
    if hyperparameter:
        body["hyperparameters"] = read_settings(hyperparameter)
    session.print_one(session.send("PUT", "adapters", adapter, "schedule", body=body), _COLUMNS)


@command(app, "run")
def run(session: Session, adapter: Name) -> None:
    """Start the schedule's training now; its next time does not change."""
    session.print_one(session.send("POST", "adapters", adapter, "schedule", "run"), _RUN_COLUMNS)


@command(app, "history")
def history(session: Session, adapter: Name, limit: LimitOption = 20) -> None:
    """List the schedule's past times: ran, skipped or missed, and why."""
    found = session.items("adapters", adapter, "schedule", "runs", limit=limit)
    session.print_list(found, _RUN_COLUMNS, empty="The schedule has had no time yet.")


@command(app, "delete")
def delete(session: Session, adapter: Name) -> None:
    """Delete an adapter's schedule. Runs that have started continue."""
    session.send("DELETE", "adapters", adapter, "schedule")
    if session.is_json:
        output.print_json({"object": "schedule", "adapter": adapter, "deleted": True})
    else:
        session.say(f"{adapter} is no longer trained by a schedule.")
