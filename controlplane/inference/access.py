"""What a caller's `model` means, whether they may use it, and what bounds them there.

Answers are kept for `CACHE_S`, as `controlplane.tenants.auth` keeps keys: under load most requests
need no query and no thread.
"""

from __future__ import annotations

import dataclasses
import difflib
import time
import uuid
from typing import TypeVar

from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.adapters.names import plain_name
from controlplane.adapters.resolution import (
    ResolvedModel,
    base_model_resolve,
    check_serving,
    limit_names,
    model_resolve,
    names_like,
)
from controlplane.errors import InvalidRequest, NotFound, PermissionDenied
from controlplane.inference.model_selector import ModelSelector
from controlplane.infra.threads import query_in_thread
from controlplane.limits.admit import Limits
from controlplane.limits.services import limits_for
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.auth import CACHE_S, Permission, Principal, authorize
from controlplane.tenants.key_rules import allows_model

_CACHE_MAX_MODELS = 10_000
#: How alike two names are, from 0 to 1, of which one may be meant for the other.
NEAR = 0.75

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What answers: a base model with the adapters' weighted sum, or () for it alone."""

    name: str
    models: tuple[ResolvedModel, ...]
    parts: tuple[tuple[AdapterVersion, float], ...]

    @property
    def base_model(self) -> BaseModel:
        return self.models[0].base_model


_models: dict[tuple[uuid.UUID, str], tuple[ResolvedModel, float]] = {}
_limits: dict[tuple[uuid.UUID, str], tuple[Limits, float]] = {}  # by key and model


async def model_of(principal: Principal, selector: ModelSelector) -> ServedModel:
    """What a request names as its model, for a caller that is known.

    Raises PermissionDenied, NotFound, or InvalidRequest for adapters that do not go together.
    """
    _check(principal, selector)
    found = [_cached_model(principal, name) for name in selector.names]
    if None in found:
        return await query_in_thread(lambda: _load_model(principal, selector))
    return _served(selector, [model for model in found if model is not None])


def model_now(principal: Principal, selector: ModelSelector) -> ServedModel:
    """`model_of`, for code that is in a thread already and may query."""
    _check(principal, selector)
    return _load_model(principal, selector)


async def model_under_way(selector: ModelSelector, base_model: str) -> ServedModel:
    """What answers a request that was let in when its name meant something, less its adapters.

    Raises NotFound.
    """
    model = await query_in_thread(lambda: base_model_resolve(base_model))
    return ServedModel(name=selector.label, models=(model,), parts=())


async def limits_of(principal: Principal, selector: ModelSelector) -> Limits:
    """What bounds the caller's use of all that the request names, as of at most `CACHE_S` ago."""
    assert principal.api_key is not None
    now = time.monotonic()
    known = [_limits.get((principal.api_key.id, name), (None, 0.0)) for name in selector.names]
    fresh = [limits for limits, until in known if limits is not None and until > now]
    if len(fresh) < len(selector.names):

        def query() -> list[Limits]:
            with tenant_scope(principal.tenant.id):
                return [_load_limits(principal, name) for name in selector.names]

        fresh = await query_in_thread(query)
    return _together(fresh)


def _together(limits: list[Limits]) -> Limits:
    """All of them at once; what bounds several models counts once."""
    policies = {policy.id: policy for each in limits for policy in each.policies}
    budgets = {budget.id: budget for each in limits for budget in each.budgets}
    return Limits(tuple(policies.values()), tuple(budgets.values()))


def may_name(principal: Principal, model_name: str) -> bool:
    if principal.api_key is None:
        return True
    return allows_model(principal.api_key.allowed_models, plain_name(model_name))


def check_named(principal: Principal, name: str, param: str = "model") -> None:
    """Raise PermissionDenied for a model that the key may not name. To be asked before the model
    is looked up, so that the answer says nothing of what there is."""
    if not may_name(principal, name):
        raise PermissionDenied(
            f"This API key may not use the model `{name[:200]}`.",
            param=param,
            code="model_not_allowed",
        )


def _check(principal: Principal, selector: ModelSelector) -> None:
    authorize(principal, Permission.INFER)
    for name, param in zip(selector.names, selector.params, strict=True):
        check_named(principal, name, param)


def _load_model(principal: Principal, selector: ModelSelector) -> ServedModel:
    found = []
    until = time.monotonic() + CACHE_S  # from the question on: the answer may take its time
    with tenant_scope(principal.tenant.id):
        for name, param in zip(selector.names, selector.params, strict=True):
            try:
                found.append(model_resolve(name))
            except NotFound as error:
                error.param = param
                error.message += _way_out(principal, name)
                raise
            _load_limits(principal, name)  # while a connection is at hand
    if len(_models) >= _CACHE_MAX_MODELS:
        _models.clear()
    for model in found:
        _models[principal.tenant.id, model.name] = (model, until)
    return _served(selector, found)


def _way_out(principal: Principal, name: str) -> str:
    """What to say to somebody who named a model that there is not: of their own names alone."""
    known = [own for own in names_like(name) if may_name(principal, own)]
    near = difflib.get_close_matches(name[:64], [own[:64] for own in known], 3, NEAR)
    longer = [own for own in known if len(name) > 2 and own.startswith(name)]
    shown = list(dict.fromkeys(near + longer))[:3]
    asked = f" Did you mean {' or '.join(f'`{own}`' for own in shown)}?" if shown else ""
    return f"{asked} GET /v1/models lists what this key can name."


def _cached_model(principal: Principal, name: str) -> ResolvedModel | None:
    model, until = _models.get((principal.tenant.id, name), (None, 0.0))
    return model if until > time.monotonic() else None


def _served(selector: ModelSelector, models: list[ResolvedModel]) -> ServedModel:
    """The models together.

    Raises InvalidRequest when they cannot be applied at once, NotFound when they are shut down.
    """
    base_model = models[0].base_model
    parts: list[tuple[AdapterVersion, float]] = []
    for model, weight, param in zip(models, selector.weights, selector.params, strict=True):
        check_serving(model, param=param)
        if model.base_model.pk != base_model.pk:
            raise InvalidRequest(
                f"`{model.name}` is of the base model {model.base_model.name}, not of "
                f"{base_model.name}: a blend has one base.",
                param=param,
            )
        if weight is not None and model.version is None:
            raise InvalidRequest(f"`{model.name}` is a base model, not an adapter.", param=param)
        if weight is None and model.version is not None and len(models) > 1:
            raise InvalidRequest(
                "With adapters, model is their base model or is left out.", param=param
            )
        if model.version is not None:
            if any(model.version.digest == version.digest for version, _ in parts):
                raise InvalidRequest(f"`{model.name}` is in the blend twice.", param=param)
            parts.append((model.version, 1.0 if weight is None else weight))
    return ServedModel(name=selector.label, models=tuple(models), parts=tuple(parts))


def _load_limits(principal: Principal, model_name: str) -> Limits:
    assert principal.api_key is not None
    until = time.monotonic() + CACHE_S
    limits = limits_for(principal.api_key, limit_names(plain_name(model_name)))
    if len(_limits) >= _CACHE_MAX_MODELS:
        _limits.clear()
    _limits[principal.api_key.id, model_name] = (limits, until)
    return limits
