"""`lorikeet datasets`: chats to train on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from lorikeet_cli import progress
from lorikeet_cli.errors import CliError, Interrupted
from lorikeet_cli.output import Column, moment, num_bytes
from lorikeet_cli.session import LimitOption, Session, command, completer
from lorikeet_cli.uploads import Source

app = typer.Typer(help="Chats to train on.", no_args_is_help=True)

_COLUMNS: list[Column] = [
    ("NAME", "name"),
    ("ROWS", "num_rows"),
    ("SIZE", num_bytes("num_bytes")),
    ("SHA-256", lambda row: row["sha256"][:12]),
    ("UPDATED", moment("updated_at")),
]


@command(app, "list")
def list_(session: Session, limit: LimitOption = 20) -> None:
    """List the datasets, newest first."""
    empty = "No datasets. `lorikeet datasets upload FILE` makes one."
    session.print_list(session.items("datasets", limit=limit), _COLUMNS, empty)


@command(app, "get")
def get(
    session: Session,
    name: Annotated[str, typer.Argument(autocompletion=completer("datasets"))],
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
) -> None:
    """Upload chats. A dataset of this name is replaced for later runs, whole or not at all."""
    source = Source.of(file)
    with progress.bar(file.name, total=source.num_bytes, is_bytes=True) as bar:

        def content() -> Iterator[bytes]:
            return source.pieces(bar.show)

        try:
            dataset = session.client.call(
                "POST",
                session.tenant_path("datasets"),
                params={"name": name or file.stem},
                content=content,
                headers={
                    "Content-Length": str(source.num_bytes),
                    "Content-Type": "application/jsonl",
                },
            )
        except KeyboardInterrupt:
            raise Interrupted("Interrupted: the dataset is as it was. Run it again.") from None
    if dataset["sha256"] != source.sha256:
        raise CliError(f"{file} was damaged on its way: the digests differ. Upload it again.")
    session.print_one(dataset, _COLUMNS)
