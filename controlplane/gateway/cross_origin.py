"""CORS for the gateway: each tenant says which browser pages may read its answers.

A preflight has no key, so its tenant is unknown: all are answered alike, and reveal no origins or
tenants. It permits nothing by itself: the gateway accepts keys only, no cookies. The request has a
key, and its tenant's `allowed_origins` decide: a page of another origin is refused before anything
is done for it. An answer that comes before the tenant is known (a wrong key, a body that is too
long) says nothing of any tenant, and every page may read it.
"""

from __future__ import annotations

import re
from typing import Any

from django.http import HttpRequest

from controlplane.errors import PermissionDenied
from controlplane.gateway.body_limit import Event, Send
from controlplane.tenants.models import Tenant

#: Where a request's scope has its `CrossOrigin`, if it has an Origin.
SCOPE_KEY = "lorikeet.cross_origin"

_METHODS = b"GET, HEAD, POST, DELETE"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{0,4000}")
#: How long a browser may remember a preflight: as long as any does.
_PREFLIGHT_S = b"7200"


class CrossOrigin:
    """One request with an Origin header, and what its answer says to the browser."""

    def __init__(self, headers: dict[bytes, bytes]) -> None:
        self.origin = headers[b"origin"].decode("latin-1")
        #: Browsers set it on requests of pages to other hosts, and pages cannot change it.
        site = headers.get(b"sec-fetch-site", b"").strip().lower()
        self._is_pages = site in (b"cross-site", b"same-site")
        #: Whether the caller's tenant allows the origin; None before it is known.
        self._is_allowed: bool | None = None

    def check(self, tenant: Tenant) -> None:
        """Raise PermissionDenied for a page that may not read the answer."""
        self._is_allowed = self.origin in tenant.allowed_origins
        if self._is_pages and not self._is_allowed:
            raise PermissionDenied(
                "Your organization does not allow pages of this origin: an owner adds it in the "
                "console, under Settings, or by PATCH /api/v1/tenant (allowed_origins).",
                code="origin_not_allowed",
            )

    def telling(self, send: Send) -> Send:
        """Return `send` with the headers that the browser looks for."""

        async def tell(message: Event) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], *self._headers(message["status"])]
                message = {**message, "headers": headers}
            await send(message)

        return tell

    def _headers(self, status: int) -> list[tuple[bytes, bytes]]:
        headers = [(b"vary", b"Origin")]
        if self._is_allowed:
            headers.append((b"access-control-allow-origin", self.origin.encode("latin-1")))
        elif self._is_allowed is None and status != 403:  # which tells of the key's tenant
            headers.append((b"access-control-allow-origin", b"*"))
        if len(headers) > 1:
            headers.append((b"access-control-expose-headers", b"*"))
        return headers


def check_origin(request: HttpRequest, tenant: Tenant) -> None:
    """Check the request's origin, once the caller is known. Raises PermissionDenied."""
    cross_origin = getattr(request, "scope", {}).get(SCOPE_KEY)
    if cross_origin is not None:
        cross_origin.check(tenant)


def is_preflight(scope: dict[str, Any], headers: dict[bytes, bytes]) -> bool:
    is_asked = b"origin" in headers and b"access-control-request-method" in headers
    return is_asked and scope["method"] == "OPTIONS"


async def answer_preflight(headers: dict[bytes, bytes], send: Send) -> None:
    """Answer a preflight; the answer is the same for all."""
    asked = headers.get(b"access-control-request-headers", b"")
    if not _HEADER_NAMES.fullmatch(asked):
        asked = b""
    answer = [
        (b"access-control-allow-origin", b"*"),
        (b"access-control-allow-methods", _METHODS),
        # The headers that were asked for: `*` would leave Authorization out.
        (b"access-control-allow-headers", asked or b"Authorization, Content-Type"),
        (b"access-control-max-age", _PREFLIGHT_S),
        (b"vary", b"Access-Control-Request-Headers"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": answer})
    await send({"type": "http.response.body"})
