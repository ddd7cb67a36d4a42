"""Tell whether a request comes from a known caller, before its body has arrived."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user
from django.core.handlers.asgi import ASGIRequest

from controlplane.errors import ApiError
from controlplane.gateway import callers
from controlplane.infra.threads import query_in_thread


async def is_known(scope: dict[str, Any]) -> bool:
    """Return whether the request has a valid key, or the session of a signed-in person.

    A key has to be allowed from the address that the request comes from.
    """
    request = ASGIRequest(scope, None)  # type: ignore[arg-type]  # its body is not read
    header = request.headers.get("Authorization")
    address = request.META.get("REMOTE_ADDR") or ""

    def has_session() -> bool:
        engine = import_module(settings.SESSION_ENGINE)
        cookie = request.COOKIES.get(settings.SESSION_COOKIE_NAME)
        request.session = engine.SessionStore(cookie)
        return bool(get_user(request).is_authenticated)

    try:
        if header is None:
            return await query_in_thread(has_session)
        await callers.principal_of((header, address))
    except ApiError:
        return False
    return True
