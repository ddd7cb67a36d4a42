"""`lorikeet keys`: a tenant's API keys."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Any

import typer

from lorikeet_cli.errors import UsageError
from lorikeet_cli.output import Column, Form, moment
from lorikeet_cli.session import LimitOption, Session, command, completer

app = typer.Typer(help="API keys.", no_args_is_help=True)

_COLUMNS: list[Column] = [
    ("ID", "public_id"),
    ("NAME", "name"),
    ("ENDS IN", "last4"),
    ("STATE", lambda row: _state(row)),
    ("EXPIRES", moment("expires_at")),
    ("LAST USED", moment("last_used_at")),
]
_MORE: list[Column] = [
    ("SCOPES", "scopes"),
    ("MODELS", lambda row: row["allowed_models"] or "all"),
    ("ADDRESSES", lambda row: row["allowed_ips"] or "all"),
]
_PublicId = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="As in `keys list`.", autocompletion=completer("keys", field="public_id")
    ),
]
_DURATION = re.compile(r"(\d{1,6})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@command(app, "list")
def list_(session: Session, limit: LimitOption = 20) -> None:
    """List the keys, newest first. Their secrets cannot be read."""
    session.print_list(session.items("keys", limit=limit), _COLUMNS, "No keys.")


@command(app, "create")
def create(
    session: Session,
    name: Annotated[str, typer.Argument(help="Who will use it.")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="What it may do; repeatable. Default: a developer's."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="What it may use; repeatable. Default: all models."),
    ] = None,
    ip: Annotated[
        list[str] | None,
        typer.Option("--ip", help="Addresses or networks it works from; repeatable."),
    ] = None,
    expires_in: Annotated[str | None, typer.Option("--expires-in", help="As 90d, 12h.")] = None,
    environment: Annotated[
        str | None, typer.Option("--environment", help="live or test: part of the key's text.")
    ] = None,
    service_account: Annotated[
        str | None, typer.Option("--service-account", help="The account that will own it (id).")
    ] = None,
) -> None:
    """Make a key. Its text is shown once."""
    given = {
        "scopes": scope,
        "allowed_models": model,
        "allowed_ips": ip,
        "environment": environment,
        "service_account": service_account,
    }
    body: dict[str, Any] = {"name": name, **{each: given[each] for each in given if given[each]}}
    if expires_in is not None:
        lifetime = dt.timedelta(seconds=seconds_of(expires_in))
        body["expires_at"] = (dt.datetime.now(dt.UTC) + lifetime).isoformat()
    _print_secret(session, session.send("POST", "keys", body=body))


@command(app, "rotate")
def rotate(
    session: Session,
    public_id: _PublicId,
    grace: Annotated[
        str | None, typer.Option("--grace", help="How long the old secret works. Default: 1d.")
    ] = None,
) -> None:
    """Give a key a new secret, which is shown once."""
    body = {} if grace is None else {"grace_seconds": seconds_of(grace)}
    _print_secret(session, session.send("POST", "keys", public_id, "rotate", body=body))


@command(app, "revoke")
def revoke(
    session: Session,
    public_id: _PublicId,
    keep_children: Annotated[
        bool, typer.Option("--keep-children", help="Leave the keys that it made.")
    ] = False,
) -> None:
    """Revoke a key for ever, and the keys that it made."""
    body = {"children": not keep_children}
    key = session.send("POST", "keys", public_id, "revoke", body=body)
    session.print_one(key, _COLUMNS)


def _print_secret(session: Session, key: dict[str, Any]) -> None:
    session.print_one(key, [*_COLUMNS, *_MORE, ("KEY", "key")])
    if session.form is not Form.JSON:
        session.say("The key is shown only this time.")


def _state(row: Any) -> str:
    if row["revoked_at"]:
        return "revoked"
    expires_at = row["expires_at"]
    is_over = expires_at and dt.datetime.fromisoformat(expires_at) <= dt.datetime.now(dt.UTC)
    return "expired" if is_over else "active"


def seconds_of(text: str) -> int:
    """Return a duration as 90d, 12h, 30m, 45s. Raises UsageError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a duration. Write it as 90d, 12h, 30m or 45s.")
    return int(match[1]) * _SECONDS[match[2]]
