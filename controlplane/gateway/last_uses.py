"""Note when keys were last used, beside the requests: none waits for it."""

from __future__ import annotations

import asyncio
import logging

import structlog
from django.db import Error as DatabaseError
from django.db import close_old_connections
from django.utils import timezone

from controlplane.infra.circuit import circuit, patience
from controlplane.tenants import auth
from controlplane.tenants.auth import Principal

log = logging.getLogger(__name__)

_DELAY_S = 1.0
_WAIT_S = 3.0

#: Callers whose keys' use is to be noted, and the task that notes them together.
_used: list[Principal] = []
_noting: asyncio.Task[None] | None = None


def note(principal: Principal) -> None:
    """Note that the caller's key was used, soon, if the last note is old enough."""
    global _noting
    if principal.api_key is not None and auth.touch_is_due(principal):
        principal.api_key.last_used_at = timezone.now()  # no more until the row is read again
        _used.append(principal)
        if _noting is None or _noting.done():
            _noting = asyncio.create_task(_write_soon())


async def _write_soon() -> None:
    structlog.contextvars.clear_contextvars()  # it is for all requests
    await asyncio.sleep(_DELAY_S)  # the answers go first
    await write_all()


async def write_all() -> None:
    """Write what was noted so far; a server that ends waits for it."""
    while _used:
        principals = _used.copy()
        _used.clear()
        await asyncio.to_thread(_write, principals)


def _write(principals: list[Principal]) -> None:
    try:
        with patience(_WAIT_S):
            auth.touch(principals)
    except DatabaseError as error:
        circuit.note(error)
        log.warning("the last use of %d keys is not noted: %r", len(principals), error)
    finally:
        close_old_connections()
