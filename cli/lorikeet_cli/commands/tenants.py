"""`lorikeet tenants`: an operator's commands."""

from __future__ import annotations

import datetime as dt
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from lorikeet_cli import output
from lorikeet_cli.errors import CliError, UsageError
from lorikeet_cli.output import Column, moment
from lorikeet_cli.session import LimitOption, Session, command

app = typer.Typer(help="Tenants. Needs an operator's key.", no_args_is_help=True)

MAX_DOCUMENT_BYTES = 256 * 1024
_COLUMNS: list[Column] = [
    ("SLUG", "slug"),
    ("NAME", "name"),
    ("STATUS", "status"),
    ("MADE", moment("created_at")),
]
_Slug = Annotated[str, typer.Argument(help="The tenant's slug.")]


@command(app, "list", for_tenant=False)
def list_(session: Session, limit: LimitOption = 20) -> None:
    """List the tenants, newest first."""
    found = session.client.pages(session.operator_path("tenants"), limit=limit)
    session.print_list(found, _COLUMNS, "No tenants. `lorikeet tenants apply -f FILE` makes one.")


@command(app, "get", for_tenant=False)
def get(session: Session, slug: _Slug) -> None:
    """Show a tenant."""
    session.print_one(session.client.call("GET", session.operator_path("tenants", slug)), _COLUMNS)


@command(app, "suspend", for_tenant=False)
def suspend(session: Session, slug: _Slug) -> None:
    """Refuse a tenant's keys and people until it is resumed. Nothing is deleted."""
    _set_status(session, slug, "suspended")


@command(app, "resume", for_tenant=False)
def resume(session: Session, slug: _Slug) -> None:
    """End a tenant's suspension."""
    _set_status(session, slug, "active")


def _set_status(session: Session, slug: str, status: str) -> None:
    path = session.operator_path("tenants", slug)
    session.print_one(session.client.call("PATCH", path, body={"status": status}), _COLUMNS)


@command(app, "apply", for_tenant=False)
def apply(
    session: Session,
    file: Annotated[Path, typer.Option("--file", "-f", help="A .json or .toml document.")],
    slug: Annotated[
        str | None, typer.Argument(help="The tenant; without it the document's `slug`.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")
    ] = False,
) -> None:
    """Make a tenant be as a document says: made, changed or left, however often you do it."""
    document = read_document(file)
    named = document.pop("slug", None)
    if slug is None and named is None:
        raise UsageError(f"{file} has no `slug`. Add it, or name the tenant as an argument.")
    if None not in (slug, named) and slug != named:
        raise UsageError(f"{file} describes the tenant {named}, not {slug}.")
    path = session.operator_path("tenants", str(slug or named))
    params = {"dry_run": "true"} if dry_run else None
    answer = session.client.call("PUT", path, params=params, body=document)
    if session.is_json:
        output.print_json(answer)
    else:
        _print_changes(answer, is_dry=dry_run)


def read_document(path: Path) -> dict[str, Any]:
    """Read a document of JSON or TOML, as its name's end says. Raises CliError."""
    kind = path.suffix.lower()
    if kind not in (".json", ".toml"):
        raise UsageError(f"{path}: the file's name must end in .json or .toml.")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise CliError(f"Cannot read {path}: {error.strerror}.") from error
    if len(data) > MAX_DOCUMENT_BYTES:
        raise CliError(f"{path} is larger than {MAX_DOCUMENT_BYTES >> 10} KiB.")
    try:
        text = data.decode()
        document = json.loads(text) if kind == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CliError(f"{path} is not valid {kind[1:].upper()}: {error}") from error
    if not isinstance(document, dict):
        raise CliError(f"{path} has to be an object: {{…}}.")
    plain: dict[str, Any] = _plain(document)
    return plain


def _plain(value: Any) -> Any:
    """Return a value of TOML as JSON has it: times as text."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return value


def _print_changes(answer: dict[str, Any], *, is_dry: bool) -> None:
    """Print a line for each part of the document, and the secrets, which are shown once."""
    columns: list[Column] = [("PART", "path"), ("NAME", "name"), ("RESULT", "result")]
    output.print_table(answer["parts"], columns)
    if is_dry:
        output.say("Nothing was changed.")
    for secret in answer["secrets"]:
        print()
        output.print_fields(secret, [(name.upper().replace("_", " "), name) for name in secret])
    if answer["secrets"]:
        output.say("Keys and addresses are shown only this time.")
