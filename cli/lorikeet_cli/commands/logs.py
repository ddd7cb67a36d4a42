"""`lorikeet logs`: the tenant's request log, and what comes next in it."""

from __future__ import annotations

import datetime as dt
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from lorikeet_cli import output
from lorikeet_cli.commands.keys import seconds_of
from lorikeet_cli.errors import Unreachable
from lorikeet_cli.output import Column, Form, moment
from lorikeet_cli.session import LimitOption, Session, command

#: Seconds between two requests for new lines, and the most lines of one request.
FOLLOW_INTERVAL_S = 2.0
MAX_NEW = 1000
PAGE = 100
#: Lines that were printed are remembered, because lines of one moment come in any order.
MAX_SHOWN = 5000
#: How long the server may be unreachable before following ends, in seconds.
MAX_AWAY_S = 300.0

_COLUMNS: list[Column] = [
    ("ID", "id"),
    ("TIME (UTC)", moment("accepted_at")),
    ("STATUS", "status"),
    ("MODEL", "model"),
    ("ENDPOINT", "endpoint"),
    ("PROMPT", "prompt_tokens"),
    ("ANSWER", "completion_tokens"),
    ("QUEUE MS", lambda row: round(row["queue_ms"])),
    ("TOTAL MS", lambda row: round(row["total_ms"])),
    ("END", lambda row: row["error_code"] or row["finish_reason"]),
]
#: A line is printed before the next is known, so columns cannot fit the widest.
_WIDTHS = (37, 19, 6, 24, 22, 6, 6, 8, 8, 0)


def add_to(app: typer.Typer) -> None:
    command(app, "logs", for_tenant=False)(logs)


def logs(
    session: Session,
    model: Annotated[str | None, typer.Option("--model", help="Only of this model.")] = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", help="As /v1/chat/completions.")
    ] = None,
    finish_reason: Annotated[
        str | None, typer.Option("--finish-reason", help="stop, length, cancelled, error, ….")
    ] = None,
    error_code: Annotated[
        str | None, typer.Option("--error-code", help="Only those that failed with it.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="As 2h, 7d, or 2026-01-31T12:00:00Z.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then print lines as they come.")
    ] = False,
    limit: LimitOption = 20,
) -> None:
    """Show the requests that have ended, newest last.

    With --output json and --follow each request is one line of JSON.
    """
    filters = {
        "model": model,
        "endpoint": endpoint,
        "finish_reason": finish_reason,
        "error_code": error_code,
        "accepted_after": _moment(since) if since else None,
    }
    if follow:
        _follow(session, filters, limit)
        return
    found = _page(session, filters, limit)
    if session.is_json:
        output.print_json(found)
        return
    session.print_list({**found, "data": found["data"][::-1]}, _COLUMNS, "No requests in the log.")


def _page(session: Session, filters: dict[str, Any], limit: int) -> dict[str, Any]:
    return session.client.pages(session.own_path("requests"), params=filters, limit=limit)


def _follow(session: Session, filters: dict[str, Any], limit: int) -> None:
    try:
        # Fetch before anything is printed: the first request imports modules, and a Ctrl-C while
        # one of them makes a dataclass can end Python by the signal instead of exit code 0, even
        # where the exception is caught.
        first = _page(session, filters, max(limit, PAGE))["data"]
        if session.form is Form.TABLE:
            _print_line([title for title, _ in _COLUMNS])
        for row in _lines(session, filters, limit, first):
            if session.is_json:
                output.print_json_line(row)
            elif session.form is Form.ID:
                _print_line([row["id"]])
            else:
                _print_line(output.cells(row, _COLUMNS))
    except KeyboardInterrupt:
        return  # Ctrl-C is the usual end of following


def _lines(
    session: Session, filters: dict[str, Any], limit: int, first: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the newest `limit` lines, oldest first, then new ones as they are written.

    first  the newest page, newest first
    """
    shown = OrderedDict.fromkeys(row["cursor"] for row in reversed(first))
    # Skip older lines that a later page may contain. Cursors are in order of time.
    floor = first[-1]["cursor"] if first else ""
    yield from reversed(first[:limit])
    answered_at = time.monotonic()
    while True:
        time.sleep(FOLLOW_INTERVAL_S)
        try:
            new = _new(session, filters, shown, floor)
        except Unreachable as error:
            if time.monotonic() - answered_at > MAX_AWAY_S:
                raise
            output.say(f"lorikeet: {error} Still trying.")
            continue
        answered_at = time.monotonic()
        for row in reversed(new):
            shown[row["cursor"]] = None
            yield row
        while len(shown) > MAX_SHOWN:
            floor = max(floor, shown.popitem(last=False)[0])


def _new(
    session: Session, filters: dict[str, Any], shown: OrderedDict[str, None], floor: str
) -> list[dict[str, Any]]:
    """Return the lines that were not shown, newest first."""
    new: list[dict[str, Any]] = []
    after, has_more = None, True
    while has_more and len(new) < MAX_NEW:
        params = {**filters, "limit": PAGE, "after": after}
        page = session.client.call("GET", session.own_path("requests"), params=params)
        found = [each for each in page["data"] if each["cursor"] not in shown]
        found = [each for each in found if each["cursor"] > floor]
        new += found
        has_more = page["has_more"] and len(found) == len(page["data"])
        after = page["last_id"]
    if len(new) >= MAX_NEW:
        output.say(f"lorikeet: more than {MAX_NEW} requests at once; older ones are left out.")
    return new


def _print_line(cells: list[str]) -> None:
    padded = (cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False))
    print(" ".join(padded).rstrip(), flush=True)


def _moment(text: str) -> str:
    if not text[-1:].isalpha() or "T" in text or "-" in text:
        return text  # the server explains what is wrong with it
    return (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds_of(text))).isoformat()
