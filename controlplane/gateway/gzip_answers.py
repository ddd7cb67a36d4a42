"""Compress long answers for clients that accept gzip: only JSON, and none to a session's cookie.

Streams are not compressed, since a compressor would hold tokens back. Pages are not either: if
a secret (a CSRF token) is compressed with text of an attacker, the length reveals the secret.
"""

from __future__ import annotations

import re

from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.middleware.gzip import GZipMiddleware

#: A shorter answer fits one packet either way.
MIN_BYTES = 1400
_JSON = re.compile(r"application/(?:[\w.-]+\+)?json\b", re.ASCII | re.IGNORECASE)
#: Django's middleware takes this for a wish.
_REFUSED = re.compile(r"\bgzip\s*;\s*q=0(?:\.0*)?\s*(?:,|$)", re.IGNORECASE)
_gzip = GZipMiddleware(lambda request: HttpResponse())


class GzipHandler(ASGIHandler):
    """Django's handler with compressed answers. As a middleware it would cost a thread's switch."""

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        response: HttpResponseBase = await super().get_response_async(request)  # type: ignore[misc]
        if (
            not isinstance(response, HttpResponse)
            or not _JSON.match(response.headers.get("Content-Type", ""))
            or len(response.content) < MIN_BYTES
            or "Cookie" in request.headers
            or _REFUSED.search(request.headers.get("Accept-Encoding", ""))
        ):
            return response
        return _gzip.process_response(request, response)
