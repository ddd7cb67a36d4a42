"""`lorikeet runs`: training runs, and their live progress."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from lorikeet_cli import progress
from lorikeet_cli.errors import CliError, Interrupted, UsageError
from lorikeet_cli.output import Column, moment, shown
from lorikeet_cli.session import LimitOption, Session, command, completer

app = typer.Typer(help="Training runs.", no_args_is_help=True)

#: Seconds between two requests for a run's state.
WATCH_INTERVAL_S = 1.0
_ENDED = ("succeeded", "failed", "cancelled")
_COLUMNS: list[Column] = [
    ("ID", "id"),
    ("ADAPTER", "adapter"),
    ("DATASET", "dataset"),
    ("STATUS", "status"),
    ("STEP", lambda row: _step(row)),
    ("LOSS", lambda row: row["progress"].get("loss")),
    ("VERSION", "version"),
    ("MADE", moment("created_at")),
]
_MORE: list[Column] = [
    ("STARTED", moment("started_at")),
    ("FINISHED", moment("finished_at")),
    ("ATTEMPTS", "attempts"),
    ("HYPERPARAMETERS", "hyperparameters"),
    ("REWARD", lambda row: row["progress"].get("reward")),
    ("KL", lambda row: row["progress"].get("kl")),
    ("REWARD MARGIN", lambda row: row["progress"].get("reward_margin")),
    ("ERROR", "error"),
]
_RunId = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="As in `runs list`.",
        autocompletion=completer("training-runs", field="id"),
    ),
]


@command(app, "list")
def list_(
    session: Session,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter", help="Only this adapter's.", autocompletion=completer("adapters")
        ),
    ] = None,
    limit: LimitOption = 20,
) -> None:
    """List the runs, newest first."""
    found = session.items("training-runs", limit=limit, adapter=adapter)
    session.print_list(found, _COLUMNS, "No runs. `lorikeet runs start` starts one.")


@command(app, "get")
def get(session: Session, run_id: _RunId) -> None:
    """Show a run."""
    session.print_one(session.get("training-runs", run_id), [*_COLUMNS, *_MORE])


@command(app, "start")
def start(
    session: Session,
    adapter: Annotated[
        str, typer.Argument(help="Made if it is new.", autocompletion=completer("adapters"))
    ],
    dataset: Annotated[
        str, typer.Argument(help="What to train on.", autocompletion=completer("datasets"))
    ],
    hyperparameter: Annotated[
        list[str] | None,
        typer.Option("--set", help="As rank=8, max_steps=200; repeatable.", metavar="NAME=VALUE"),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            help="For a new adapter, if there are several.",
            autocompletion=completer("base-models"),
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Wait until it ends; the exit code is its outcome.")
    ] = False,
) -> None:
    """Train an adapter on a dataset; the result is the adapter's next version."""
    body: dict[str, Any] = {"adapter": adapter, "dataset": dataset}
    if hyperparameter:
        body["hyperparameters"] = read_settings(hyperparameter)
    if base_model:
        body["base_model"] = base_model
    run = session.send("POST", "training-runs", body=body)
    if watch:
        _watch(session, run)
    else:
        session.print_one(run, _COLUMNS)


@command(app, "cancel")
def cancel(session: Session, run_id: _RunId) -> None:
    """Cancel a run that waits or trains; it ends within seconds."""
    session.print_one(session.send("POST", "training-runs", run_id, "cancel"), _COLUMNS)


@command(app, "watch")
def watch(session: Session, run_id: _RunId) -> None:
    """Show a run's progress until it ends. The exit code is 0 only if it succeeded."""
    _watch(session, session.get("training-runs", run_id))


def _watch(session: Session, run: dict[str, Any]) -> None:
    run_id = run["id"]
    status = None
    try:
        with progress.bar(shown(f"{run['adapter']} on {run['dataset']}"), total=None) as bar:
            while True:
                if run["status"] != status and not progress.is_shown():
                    session.say(f"{run_id} is {run['status']}")
                status = run["status"]
                at = run["progress"]
                loss = f"loss {shown(at['loss'])}" if "loss" in at else ""
                bar.show(at.get("step") or 0, at.get("steps"), f"{shown(status)} {loss}")
                if status in _ENDED:
                    break
                time.sleep(WATCH_INTERVAL_S)
                run = session.get("training-runs", run_id)
    except KeyboardInterrupt:
        raise Interrupted(
            f"Interrupted: the run continues. See it again with `lorikeet runs watch {run_id}`, "
            f"or end it with `lorikeet runs cancel {run_id}`."
        ) from None
    session.print_one(run, [*_COLUMNS, *_MORE])
    if run["status"] == "failed":
        raise CliError(f"The run failed: {run['error']}")
    if run["status"] == "cancelled":
        raise CliError("The run was cancelled.")


def read_settings(given: list[str]) -> dict[str, Any]:
    """Return NAME=VALUE pairs; values are parsed as JSON where possible. Raises UsageError."""
    found: dict[str, Any] = {}
    for each in given:
        name, is_pair, text = each.partition("=")
        if not is_pair or not name:
            raise UsageError(f"--set takes NAME=VALUE, such as rank=8, not {each!r}.")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def _step(row: Any) -> str:
    step, steps = row["progress"].get("step"), row["progress"].get("steps")
    return "-" if step is None else f"{step}/{steps}"
