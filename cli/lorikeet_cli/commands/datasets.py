"""`lorikeet datasets`: chats to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lorikeet_cli.dataset_conversion import convert_file
from lorikeet_cli.dataset_uploads import upload_rows
from lorikeet_cli.errors import CliError
from lorikeet_cli.output import Column, moment, num_bytes
from lorikeet_cli.session import LimitOption, Session, command, completer
from lorikeet_cli.uploads import Source

app = typer.Typer(help="Chats to train on.", no_args_is_help=True)

_COLUMNS: list[Column] = [
    ("NAME", "name"),
    ("ROWS", "num_rows"),
    ("SIZE", num_bytes("num_bytes")),
    ("VERSION", "version"),
    ("SHA-256", lambda row: row["sha256"][:12]),
    ("UPDATED", moment("updated_at")),
]
_VERSION_COLUMNS: list[Column] = [
    ("VERSION", "number"),
    ("KIND", "kind"),
    ("ROWS", "num_rows"),
    ("ADDED", "added_rows"),
    ("SIZE", num_bytes("num_bytes")),
    ("STORED", "is_stored"),
    ("MADE", moment("created_at")),
]
_SOURCE_COLUMNS: list[Column] = [
    ("DATASET", "dataset"),
    ("KIND", "kind"),
    ("PLACE", lambda row: ", ".join(str(part) for part in row["place"].values() if part)),
    ("CRON", "cron"),
    ("NEXT", moment("next_pull_at")),
    ("PULLING", "is_pulling"),
    ("LAST", lambda row: (row["last_pull"] or {}).get("status", "")),
    ("ERROR", lambda row: (row["last_pull"] or {}).get("error", "")),
]
_PULL_COLUMNS: list[Column] = [
    ("BEGUN", moment("created_at")),
    ("STATUS", "status"),
    ("VERSION", "version"),
    ("ADDED", "added_rows"),
    ("ERROR", "error"),
]
_CONVERTED_COLUMNS: list[Column] = [
    ("FILE", "file"),
    ("ROWS", "num_rows"),
    ("CONVERTED", "converted"),
]
_NAME = Annotated[str, typer.Argument(autocompletion=completer("datasets"))]


@command(app, "list")
def list_(session: Session, limit: LimitOption = 20) -> None:
    """List the datasets, newest first."""
    empty = "No datasets. `lorikeet datasets upload FILE` makes one."
    session.print_list(session.items("datasets", limit=limit), _COLUMNS, empty)


@command(app, "get")
def get(
    session: Session,
    name: _NAME,
) -> None:
    """Show a dataset."""
    session.print_one(session.get("datasets", name), _COLUMNS)


@command(app, "upload")
def upload(
    session: Session,
    file: Annotated[Path, typer.Argument(help='JSONL; each line {"messages": […]}.')],
    name: Annotated[
        str | None, typer.Option("--name", help="The dataset. Default: the file's name.")
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Append the rows to the dataset's own.")
    ] = False,
) -> None:
    """Upload chats, up to 2 GiB: the next version of the dataset, whole or not at all."""
    dataset = upload_rows(session, name or file.stem, Source.of(file), appends=append)
    session.print_one(dataset, _COLUMNS)


@command(app, "convert", for_tenant=False)
def convert(
    session: Session,
    file: Annotated[Path, typer.Argument(help="JSONL, or JSON with an array of rows.")],
    new_file: Annotated[Path, typer.Argument(help="The JSONL file to write; it must be new.")],
) -> None:
    """Convert rows of another format (ShareGPT, Alpaca, Vertex AI, …), all of them or none.

    Rows that would lose something are refused by their lines. Nothing is uploaded.
    """
    session.print_one(convert_file(file, new_file), _CONVERTED_COLUMNS)


@command(app, "versions")
def versions(session: Session, name: _NAME, limit: LimitOption = 20) -> None:
    """List a dataset's versions, newest first; train on one as `name@3`."""
    found = session.client.pages(session.own_path("datasets", name, "versions"), limit=limit)
    session.print_list(found, _VERSION_COLUMNS, "No versions.")


@command(app, "restore")
def restore(
    session: Session,
    name: _NAME,
    version: Annotated[int, typer.Argument(help="Its number in `lorikeet datasets versions`.")],
) -> None:
    """Make an earlier version's rows the current ones again, as the next version."""
    path = session.own_path("datasets", name, "restore")
    session.print_one(session.client.call("POST", path, body={"version": version}), _COLUMNS)


@command(app, "source")
def source(session: Session, name: _NAME) -> None:
    """Show where a dataset is pulled from, and how the last pull ended."""
    found = session.client.call("GET", session.own_path("datasets", name, "source"))
    session.print_one(found, _SOURCE_COLUMNS)


@command(app, "set-source")
def set_source(
    session: Session,
    name: _NAME,
    file: Annotated[Path, typer.Argument(help="JSON, as PUT /api/v1/datasets/NAME/source has it.")],
) -> None:
    """Set where a dataset is pulled from, by a file, so that no key is on a command line."""
    try:
        body = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CliError(f"Cannot read {file} as JSON.") from error
    path = session.own_path("datasets", name, "source")
    session.print_one(session.client.call("PUT", path, body=body), _SOURCE_COLUMNS)


@command(app, "pull")
def pull(session: Session, name: _NAME) -> None:
    """Pull now: what is new at the source becomes a version."""
    path = session.own_path("datasets", name, "pulls")
    session.print_one(session.client.call("POST", path), _SOURCE_COLUMNS)


@command(app, "pulls")
def pulls(session: Session, name: _NAME, limit: LimitOption = 20) -> None:
    """List the pulls of a dataset, newest first, with their errors."""
    found = session.client.pages(session.own_path("datasets", name, "pulls"), limit=limit)
    session.print_list(found, _PULL_COLUMNS, "No pulls yet.")
