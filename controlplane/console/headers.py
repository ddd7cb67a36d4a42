"""Security headers of every answer under /console/, and the page shown without Redis."""

from __future__ import annotations

import functools
import logging
from urllib.parse import urlsplit

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from redis.exceptions import RedisError

from controlplane.tenancy.middleware import Middleware

logger = logging.getLogger(__name__)


class ConsoleMiddleware(Middleware):
    """Middleware for security headers: only the console's own scripts and styles, no caching.

    Attempts to sign in are counted in Redis: without it nobody can sign in, and a page says so.
    """

    def finished(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if request.path.startswith("/console/"):
            for name, value in _headers().items():
                response.headers[name] = value
        return response

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if isinstance(exception, RedisError) and request.path.startswith("/console/"):
            logger.error("Redis does not answer: %s", exception)
            return render(request, "signin/unavailable.html", status=503)
        return None


@functools.cache
def _headers() -> dict[str, str]:
    storage = urlsplit(settings.S3_PUBLIC_ENDPOINT_URL)
    policy = {
        "default-src": "'self'",
        # Adapter files go from the browser straight to the object store.
        "connect-src": f"'self' {storage.scheme}://{storage.netloc}",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'self'",
        "frame-ancestors": "'none'",
        "object-src": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "same-origin",
        # Pages have a tenant's data; the back button of a shared computer must not show them.
        "Cache-Control": "no-store",
    }
