"""`lorikeet usage`: tokens and requests per day and model."""

from __future__ import annotations

from typing import Annotated

import typer

from lorikeet_cli.output import Column
from lorikeet_cli.session import Session, command

_COLUMNS: list[Column] = [
    ("DATE", "date"),
    ("MODEL", "model"),
    ("REQUESTS", "requests"),
    ("PROMPT TOKENS", "prompt_tokens"),
    ("CACHED", "cached_tokens"),
    ("COMPLETION TOKENS", "completion_tokens"),
]


def add_to(app: typer.Typer) -> None:
    command(app, "usage", for_tenant=False)(usage)


def usage(
    session: Session,
    start: Annotated[str | None, typer.Option("--start", help="As 2026-01-01 (UTC).")] = None,
    end: Annotated[str | None, typer.Option("--end", help="The last day; default today.")] = None,
) -> None:
    """Show requests and tokens per day (UTC) and model; by default of the last 30 days."""
    params = {"start": start, "end": end}
    found = session.client.call("GET", session.own_path("usage"), params=params)
    session.print_list({**found, "has_more": False}, _COLUMNS, "No usage in these days.")
