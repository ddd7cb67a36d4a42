"""Resolve what a caller's `model` means, whether they may use it, and which limits apply.

Answers are kept for `CACHE_S`, as `controlplane.tenants.auth` keeps keys: under load most requests
need no query and no thread. They are kept longer for `kept`, while the database is away.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import time
import uuid
from typing import NamedTuple

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
from controlplane.errors import ApiError, InvalidRequest, NotFound, PermissionDenied
from controlplane.inference.model_selector import ModelSelector
from controlplane.infra.threads import query_in_thread
from controlplane.limits.admit import Limits
from controlplane.limits.services import limits_for
from controlplane.tenancy import epochs
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.auth import CACHE_S, Permission, Principal, authorize
from controlplane.tenants.key_rules import allows_model

_CACHE_MAX_MODELS = 10_000
#: How alike two names must be, from 0 to 1, for one to be suggested for the other.
NEAR = 0.75


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What answers: a base model with the weighted sum of `parts`, or alone if there are none."""

    name: str
    models: tuple[ResolvedModel, ...]
    parts: tuple[tuple[AdapterVersion, float], ...]

    @property
    def base_model(self) -> BaseModel:
        return self.models[0].base_model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, what answers, and the limits of that: resolved once for each request."""

    principal: Principal
    model: ServedModel
    limits: Limits


class _Known(NamedTuple):
    """What a name means to a key, and the limits of that, as the database said when asked."""

    model: ResolvedModel
    limits: Limits
    asked: epochs.Stamp

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() < self.asked.at + CACHE_S


#: By key and name; those that were not asked for longest come first.
_known: collections.OrderedDict[tuple[uuid.UUID, str], _Known] = collections.OrderedDict()


async def resolve(principal: Principal, selector: ModelSelector) -> Caller:
    """Return what a caller may use under the names of a request, as of at most `CACHE_S` ago.

    principal  with an API key
    Raises PermissionDenied, NotFound, or InvalidRequest for adapters that do not go together.
    """
    caller = known(principal, selector)
    if caller is None:
        caller = await query_in_thread(lambda: resolve_now(principal, selector))
    return caller


def known(principal: Principal, selector: ModelSelector) -> Caller | None:
    """Do as `resolve`, from memory; None if a name is not fresh there."""
    _check(principal, selector)
    fresh = [entry for entry in _entries(principal, selector) if entry and entry.is_fresh]
    return _caller(principal, selector, fresh) if len(fresh) == len(selector.names) else None


def kept(
    principal: Principal, selector: ModelSelector
) -> tuple[Caller, tuple[epochs.Stamp, ...]] | None:
    """Return what the database last said, and when, for while it is away.

    None if it was not asked lately, did not agree, or a budget's period has ended since: of the
    next one only the database knows what is spent.
    """
    found = [entry for entry in _entries(principal, selector) if entry and entry.asked.is_recent]
    if len(found) < len(selector.names):
        return None
    budgets = [budget for entry in found for budget in entry.limits.budgets]
    if any(budget.ends_at <= time.time() for budget in budgets):
        return None
    try:
        _check(principal, selector)
        return _caller(principal, selector, found), tuple(entry.asked for entry in found)
    except ApiError:
        return None


def _entries(principal: Principal, selector: ModelSelector) -> list[_Known | None]:
    return [_known.get((_key_id(principal), name)) for name in selector.names]


def resolve_now(principal: Principal, selector: ModelSelector) -> Caller:
    """Do as `resolve`, from the database, for code that is in a thread already."""
    _check(principal, selector)
    found = []
    asked = epochs.stamp()  # from before the query, which may take long
    with tenant_scope(principal.tenant.id):
        for name, param in zip(selector.names, selector.params, strict=True):
            try:
                model = model_resolve(name)
            except NotFound as error:
                error.param = param
                error.message += _way_out(principal, name)
                raise
            found.append(_Known(model, _limits(principal, name), asked))
    for name, entry in zip(selector.names, found, strict=True):
        _known.pop((_key_id(principal), name), None)  # so that it comes last
        _known[_key_id(principal), name] = entry
        if len(_known) > _CACHE_MAX_MODELS:
            _known.popitem(last=False)
    return _caller(principal, selector, found)


async def resolve_accepted(
    principal: Principal, selector: ModelSelector, base_model: str
) -> Caller:
    """Return the caller of a request that was accepted when its names meant something, with the
    base model that answers it and none of its adapters.

    Raises NotFound.
    """

    def query() -> Caller:
        model = base_model_resolve(base_model)
        with tenant_scope(principal.tenant.id):
            limits = [_limits(principal, name) for name in selector.names]
        served = ServedModel(name=selector.label, models=(model,), parts=())
        return Caller(principal=principal, model=served, limits=_together(limits))

    return await query_in_thread(query)


def _together(limits: list[Limits]) -> Limits:
    """Join the limits of several models; one that holds for several counts once."""
    policies = {policy.id: policy for each in limits for policy in each.policies}
    budgets = {budget.id: budget for each in limits for budget in each.budgets}
    return Limits(tuple(policies.values()), tuple(budgets.values()))


def may_name(principal: Principal, model_name: str) -> bool:
    if principal.api_key is None:
        return True
    return allows_model(principal.api_key.allowed_models, plain_name(model_name))


def check_named(principal: Principal, name: str, param: str = "model") -> None:
    """Raise PermissionDenied for a model that the key may not name.

    Call it before the model is looked up, so that the answer does not tell whether it exists.
    """
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


def _limits(principal: Principal, name: str) -> Limits:
    return limits_for(principal.api_key, limit_names(plain_name(name)))


def _key_id(principal: Principal) -> uuid.UUID:
    assert principal.api_key is not None
    return principal.api_key.id


def _way_out(principal: Principal, name: str) -> str:
    """Suggest names for one that does not exist, among those that the caller may name."""
    known = [own for own in names_like(name) if may_name(principal, own)]
    near = difflib.get_close_matches(name[:64], [own[:64] for own in known], 3, NEAR)
    longer = [own for own in known if len(name) > 2 and own.startswith(name)]
    shown = list(dict.fromkeys(near + longer))[:3]
    asked = f" Did you mean {' or '.join(f'`{own}`' for own in shown)}?" if shown else ""
    return f"{asked} GET /v1/models lists what this key can name."


def _caller(principal: Principal, selector: ModelSelector, found: list[_Known]) -> Caller:
    model = _served(selector, [known.model for known in found])
    return Caller(
        principal=principal, model=model, limits=_together([known.limits for known in found])
    )


def _served(selector: ModelSelector, models: list[ResolvedModel]) -> ServedModel:
    """Combine the models.

    Raises InvalidRequest if they cannot be combined, NotFound if one has been shut down.
    """
    base_model = models[0].base_model
    parts: list[tuple[AdapterVersion, float]] = []
    for model, weight, param in zip(models, selector.weights, selector.params, strict=True):
        check_serving(model, param=param)
        if model.base_model.pk != base_model.pk:
            raise InvalidRequest(
                f"`{model.name}` is of the base model {model.base_model.name}, not of "
                f"{base_model.name}: all of a blend must have the same base model.",
                param=param,
            )
        if weight is not None and model.version is None:
            raise InvalidRequest(f"`{model.name}` is a base model, not an adapter.", param=param)
        if weight is None and model.version is not None and len(models) > 1:
            raise InvalidRequest(
                "With adapters, model must be their base model or be left out.", param=param
            )
        if model.version is not None:
            if any(model.version.digest == version.digest for version, _ in parts):
                raise InvalidRequest(f"`{model.name}` is in the blend twice.", param=param)
            parts.append((model.version, 1.0 if weight is None else weight))
    return ServedModel(name=selector.label, models=tuple(models), parts=tuple(parts))
