"""Whether a request is of somebody known, before its body is there and a view looks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user
from django.core.handlers.asgi import ASGIRequest
from django.db import DatabaseError

from controlplane.errors import ApiError
from controlplane.infra.threads import query_in_thread
from controlplane.tenants import auth


async def is_known(scope: dict[str, Any]) -> bool:
    """Whether the request has a key or a session that opens something, from where it comes."""
    request = ASGIRequest(scope, None)  # type: ignore[arg-type]  # nobody reads its body
    header = request.headers.get("Authorization")
    address = request.META.get("REMOTE_ADDR") or ""

    def has_key() -> bool:
        auth.authenticate(header, address, touches=False)
        return True

    def has_session() -> bool:
        engine = import_module(settings.SESSION_ENGINE)
        cookie = request.COOKIES.get(settings.SESSION_COOKIE_NAME)
        request.session = engine.SessionStore(cookie)
        return bool(get_user(request).is_authenticated)

    try:
        return await query_in_thread(has_session if header is None else has_key)
    except (ApiError, DatabaseError):
        return False
