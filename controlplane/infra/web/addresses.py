"""Answer requests for unknown addresses and failed requests; suggest the address that was meant."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from django.http import HttpRequest, HttpResponse
from django.urls import Resolver404, resolve
from django.views import defaults

from controlplane.errors import NOTHING_HERE, InternalError, NotFound
from controlplane.infra.circuit import is_away
from controlplane.infra.outages import DatabaseAway

#: Longest address for which another one is suggested.
_MAX_CHARS = 300
#: Beginnings of the addresses of pages, which browsers open and API clients do not.
_PAGES = ("/console", "/admin")
#: Last part of an address that other servers have -> what to use here instead.
_HINTS = {
    "metrics": "Metrics have a port of their own, for operators; GET "
    "/v1/organization/usage/completions has usage, and GET /health says whether requests are "
    "served.",
    "version": "GET /info names the served model, GET /v1/models the names for `model`.",
    "ping": "GET /healthz says whether this process answers, GET /readyz whether it can serve, "
    "GET /health whether requests are served.",
    "openapi.json": "It is at /api/openapi.json.",
    "docs": "They are at /api/docs.",
}
_HINTS["health_generate"] = _HINTS["healthcheck"] = _HINTS["ready"] = _HINTS["ping"]
_HINTS["get_model_info"] = _HINTS["get_server_info"] = _HINTS["server_info"] = _HINTS["version"]
_API_V1 = "/api/v1/"
_JSON_PATHS = ("/api/", "/ops/", "/v1/")
_AWAY_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Not available now</title>
<h1>Not available now</h1>
<p>The database does not answer. Saved data is not lost. Try again in a moment.</p>
</html>
"""


def page_not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer an unknown address; Django's handler404."""
    if is_page(request) and not request.path.startswith(_JSON_PATHS):
        return defaults.page_not_found(request, exception)
    if isinstance(exception, Resolver404):
        return no_such_address(request).response()
    return NotFound(NOTHING_HERE).response()


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer after an unexpected exception, which is already logged; Django's handler500."""
    if is_away(sys.exc_info()[1]):
        return database_away(request)
    if request.path.startswith(_JSON_PATHS):
        return InternalError("The server failed to answer this request.").response()
    return defaults.server_error(request)


def database_away(request: HttpRequest) -> HttpResponse:
    """Answer a request that needs PostgreSQL while it is away."""
    error = DatabaseAway()
    if not is_page(request) or request.path.startswith(_JSON_PATHS):
        return error.response()
    return HttpResponse(_AWAY_PAGE, status=error.status, headers=error.headers())


def is_page(request: HttpRequest) -> bool:
    """Return whether a browser asks for an address that may be a page."""
    if request.path.startswith(_PAGES):
        return True
    return "text/html" in request.headers.get("Accept", "")


def no_such_address(request: HttpRequest) -> NotFound:
    """Return the error for API clients; it suggests the address that they probably meant."""
    path = request.path
    message = f"There is no {request.method} {path[:200]}."
    if meant := suggested_address(path):
        message += f" Did you mean {meant}?"
        if meant.startswith("/v1/") and "/v1" not in path:
            message += " A client's base URL ends in /v1."
        elif meant.startswith("/v1/") and path.count("/v1") > 1:
            message += " A client's base URL ends in one /v1."
    elif hint := _HINTS.get(path.rstrip("/").rpartition("/")[2][:40]):
        message += f" {hint}"
    else:
        message += " The API is at /v1, as in /v1/chat/completions; /api/docs lists all addresses."
    return NotFound(message, code="unknown_url")


def suggested_address(path: str) -> str | None:
    """Return an existing API address from which a likely mistake makes `path`."""
    if len(path) > _MAX_CHARS:
        return None
    plain = re.sub(r"/{2,}", "/", path).rstrip("/")
    for candidate in _candidates(plain):
        if candidate != path and _exists(candidate):
            return candidate
    return None


def _candidates(path: str) -> Iterator[str]:
    yield path
    _, found, tail = path.rpartition("/v1/")
    if found:  # /v1 twice, or behind another provider's prefix
        yield f"/v1/{tail}"
        yield f"{_API_V1}{tail}"
    yield f"/v1{path}"
    yield f"{_API_V1}{path.removeprefix('/api').lstrip('/')}"
    yield f"/{path.rpartition('/')[2]}"  # LoRAX's addresses have one part
    for route in ("chat/completions", "completions", "responses", "models"):
        if path.endswith(f"/{route}"):
            yield f"/v1/{route}"


def _exists(path: str) -> bool:
    if path in ("", "/") or path.startswith(_PAGES):
        return False
    try:
        match = resolve(path)
    except Resolver404:
        return False
    return not match.route.endswith("<path:path>")
