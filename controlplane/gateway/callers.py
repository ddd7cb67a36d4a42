"""Find who calls the gateway, and what they name, in at most one visit to the database.

Keys are kept for a moment, by `controlplane.tenants.auth`; models and limits by
`controlplane.inference.access`. While the database is away they are used for longer.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

import structlog
from django.db import Error as DatabaseError
from django.db import close_old_connections
from django.http import HttpRequest

from controlplane.gateway.cross_origin import check_origin
from controlplane.inference import access
from controlplane.inference.access import Caller
from controlplane.inference.model_selector import ModelSelector
from controlplane.inference.while_away import Kept, ask
from controlplane.infra.circuit import circuit, patience
from controlplane.infra.request_lines import note
from controlplane.tenants import auth
from controlplane.tenants.auth import Permission, Principal, authorize

log = logging.getLogger(__name__)

_TOUCH_DELAY_S = 1.0
_TOUCH_WAIT_S = 3.0

Credentials = tuple[str | None, str]


async def authenticate(
    request: HttpRequest, permission: Permission = Permission.INFER
) -> Principal:
    """Return the caller. Raises ApiError if the key is wrong or lacks the permission."""
    principal = await principal_of(_credentials(request))
    _let_in(request, principal)
    authorize(principal, permission)
    return principal


async def principal_of(credentials: Credentials) -> Principal:
    """Return the caller with an Authorization header from an address. Raises ApiError."""
    principal = auth.cached_principal(*credentials)
    if principal is None:
        principal = await ask(
            lambda: auth.authenticate(*credentials, touches=False), _kept_principal(credentials)
        )
        _touch_beside(principal)
    return principal


def _kept_principal(credentials: Credentials) -> Kept[Principal] | None:
    found = auth.kept_principal(*credentials)
    if found is None:
        return None
    principal, stamp = found
    return Kept(principal, principal.tenant.id, (stamp,))


def _let_in(request: HttpRequest, principal: Principal) -> None:
    """Note the caller on the request. Raises PermissionDenied for a page of another origin."""
    request.principal = principal  # type: ignore[attr-defined]
    note(request, **principal.log_fields)
    check_origin(request, principal.tenant)


def known_tenant(request: HttpRequest) -> uuid.UUID | None:
    """Return the tenant of a key that was let in lately; None of others."""
    kept = auth.kept_principal(*_credentials(request))
    return None if kept is None else kept[0].tenant.id


async def caller_of(request: HttpRequest, selector: ModelSelector) -> Caller:
    """Return the caller with what they named: from memory, or in one visit to the database.

    Raises ApiError; a model of another tenant is NotFound, as one that does not exist.
    """
    credentials = _credentials(request)
    principal = auth.cached_principal(*credentials)
    if principal is None:
        try:
            caller = await ask(
                lambda: _caller_now(request, credentials, selector),
                _kept_caller(_kept_principal(credentials), selector),
            )
            _let_in(request, caller.principal)
            return caller
        finally:
            _touch_beside(getattr(request, "principal", None))
    _let_in(request, principal)
    known = access.known(principal, selector)
    if known is not None:
        return known
    kept = _kept_caller(Kept(principal, principal.tenant.id, ()), selector)
    return await ask(lambda: access.resolve_now(principal, selector), kept)


def _kept_caller(kept: Kept[Principal] | None, selector: ModelSelector) -> Kept[Caller] | None:
    found = None if kept is None else access.kept(kept.answer, selector)
    if kept is None or found is None:
        return None
    caller, stamps = found
    return Kept(caller, kept.tenant_id, (*kept.stamps, *stamps))


def _credentials(request: HttpRequest) -> Credentials:
    """Return the Authorization header and the client's address."""
    return request.headers.get("Authorization"), request.META.get("REMOTE_ADDR") or ""


def _caller_now(request: HttpRequest, credentials: Credentials, selector: ModelSelector) -> Caller:
    principal = auth.authenticate(*credentials, touches=False)
    _let_in(request, principal)
    return access.resolve_now(principal, selector)


#: Callers whose keys' use is to be noted, and the task that notes them together.
_used: list[Principal] = []
_noting: asyncio.Task[None] | None = None


def _touch_beside(principal: Principal | None) -> None:
    """Note that the key was used; the request does not wait for it."""
    global _noting
    if principal is not None and auth.touch_is_due(principal):
        _used.append(principal)
        if _noting is None or _noting.done():
            _noting = asyncio.create_task(_note_soon())


async def _note_soon() -> None:
    structlog.contextvars.clear_contextvars()  # it is for all requests
    await asyncio.sleep(_TOUCH_DELAY_S)  # the answers go first
    await note_used()


async def note_used() -> None:
    """Note whose keys were used so far; a server that ends waits for it."""
    while _used:
        principals = _used.copy()
        _used.clear()
        await asyncio.to_thread(_touch, principals)


def _touch(principals: list[Principal]) -> None:
    try:
        with patience(_TOUCH_WAIT_S):
            auth.touch(principals)
    except DatabaseError as error:
        circuit.note(error)
        log.warning("the last use of %d keys is not noted: %r", len(principals), error)
    finally:
        close_old_connections()
