"""Who is asking and what their `model` means, in at most one visit to the database.

Answers are kept for `CACHE_S`, as `controlplane.tenants.auth` keeps keys: under load most requests
need no query and no thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseError
from django.db import close_old_connections
from django.http import HttpRequest

from controlplane.adapters.services import ResolvedModel, model_resolve, models_list
from controlplane.errors import PermissionDenied, Unavailable
from controlplane.limits.admit import Limits
from controlplane.limits.services import limits_for
from controlplane.scoping import tenant_scope
from controlplane.tenants import auth
from controlplane.tenants.auth import CACHE_S, Permission, Principal, authorize
from controlplane.tenants.key_rules import allows_model

_CACHE_MAX_MODELS = 10_000

_T = TypeVar("_T")
_models: dict[tuple[uuid.UUID, str], tuple[ResolvedModel, float]] = {}
_limits: dict[tuple[uuid.UUID, str], tuple[Limits, float]] = {}  # by key and model


async def authenticate(
    request: HttpRequest, permission: Permission = Permission.INFER
) -> Principal:
    """The caller, who may do this. Raises ApiError when there is none or they may not."""
    credentials = _credentials(request)
    principal = auth.cached_principal(*credentials)
    if principal is None:
        principal = await in_thread(lambda: auth.authenticate(*credentials))
    authorize(principal, permission)
    return principal


async def admit(request: HttpRequest, model_name: str) -> tuple[Principal, ResolvedModel]:
    """The caller and the model they named.

    Raises ApiError; NotFound for a model that does not exist as for one of another tenant.
    """
    credentials = _credentials(request)
    principal = auth.cached_principal(*credentials)
    if principal is not None:
        _check(principal, model_name)
        model, until = _models.get((principal.tenant.id, model_name), (None, 0.0))
        if model is not None and until > time.monotonic():
            return principal, model
    return await in_thread(lambda: _admit(credentials, model_name))


async def limits_of(principal: Principal, model_name: str) -> Limits:
    """What bounds the caller's use of the model, as of at most `CACHE_S` ago."""
    assert principal.api_key is not None
    limits, until = _limits.get((principal.api_key.id, model_name), (None, 0.0))
    if limits is not None and until > time.monotonic():
        return limits

    def query() -> Limits:
        with tenant_scope(principal.tenant.id):
            return _load_limits(principal, model_name)

    return await in_thread(query)


async def models(request: HttpRequest) -> list[ResolvedModel]:
    """What the caller can name as a model."""
    principal = await authenticate(request)

    def query() -> list[ResolvedModel]:
        with tenant_scope(principal.tenant.id):
            return [model for model in models_list() if _may_name(principal, model.name)]

    return await in_thread(query)


def _credentials(request: HttpRequest) -> tuple[str | None, str]:
    """The Authorization header and the address it came from."""
    return request.headers.get("Authorization"), request.META.get("REMOTE_ADDR") or ""


def _may_name(principal: Principal, model_name: str) -> bool:
    return principal.api_key is None or allows_model(principal.api_key.allowed_models, model_name)


def _check(principal: Principal, model_name: str) -> None:
    """Before the model is looked up, so that the answer says nothing of what there is."""
    authorize(principal, Permission.INFER)
    if not _may_name(principal, model_name):
        raise PermissionDenied(
            f"This API key may not use the model `{model_name[:200]}`.",
            param="model",
            code="model_not_allowed",
        )


def _admit(credentials: tuple[str | None, str], model_name: str) -> tuple[Principal, ResolvedModel]:
    principal = auth.authenticate(*credentials)
    _check(principal, model_name)
    with tenant_scope(principal.tenant.id):
        model = model_resolve(model_name)
        _load_limits(principal, model_name)  # while a connection is at hand
    if len(_models) >= _CACHE_MAX_MODELS:
        _models.clear()
    _models[principal.tenant.id, model_name] = (model, time.monotonic() + CACHE_S)
    return principal, model


def _load_limits(principal: Principal, model_name: str) -> Limits:
    assert principal.api_key is not None
    limits = limits_for(principal.api_key.id, model_name)
    if len(_limits) >= _CACHE_MAX_MODELS:
        _limits.clear()
    _limits[principal.api_key.id, model_name] = (limits, time.monotonic() + CACHE_S)
    return limits


async def in_thread(query: Callable[[], _T]) -> _T:
    """Run a query and give its connection back at once: what follows may take minutes."""

    def run() -> _T:
        try:
            return query()
        except DatabaseError as error:
            raise Unavailable("The database does not answer.", retry_after_s=2) from error
        finally:
            close_old_connections()

    return await sync_to_async(run)()
