"""Answer with one of the operator's pages, or with the question before an action."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.template.response import TemplateResponse


def page(request: HttpRequest, template: str, title: str, **context: Any) -> TemplateResponse:
    """Return a page of the site, with its menu."""
    context = {**admin.site.each_context(request), "title": title, **context}
    return TemplateResponse(request, f"operator/{template}.html", context)


def ask(
    request: HttpRequest,
    *,
    title: str,
    warnings: Sequence[str],
    button: str,
    back: str,
    about: Iterable[tuple[str, str]] = (),
    sent: Sequence[tuple[str, str]] = (),
) -> TemplateResponse:
    """Return the page whose button sends the action to its own address.

    warnings  the effects, a paragraph each
    about     the object: names and values
    sent      fields of the form
    back      the address of the button that cancels
    """
    return page(
        request,
        "ask",
        title,
        warnings=warnings,
        button=button,
        back=back,
        about=list(about),
        sent=sent,
    )


def span(seconds: float) -> str:
    """Format a duration: "8 s", "4 min", "3 h", "2 d"."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(at: dt.datetime) -> str:
    """Format a time in UTC."""
    return f"{at.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
