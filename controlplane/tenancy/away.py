"""Answers of pages and APIs that need PostgreSQL while it is away."""

from __future__ import annotations

import contextlib
import logging

from django.http import HttpRequest, HttpResponse

from controlplane.infra.circuit import circuit, is_away, patience
from controlplane.infra.web.addresses import database_away
from controlplane.infra.web.threads import QUERY_WAIT_S
from controlplane.tenancy.middleware import Middleware

log = logging.getLogger(__name__)


class DatabaseAwayMiddleware(Middleware):
    """Middleware that bounds waits for PostgreSQL, and answers 503 with Retry-After."""

    def context(self, request: HttpRequest) -> contextlib.AbstractContextManager[None]:
        return patience(QUERY_WAIT_S)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        if not is_away(error):
            return None
        circuit.note(error)
        log.warning("PostgreSQL is away: %s %s gets 503", request.method, request.path)
        return database_away(request)
