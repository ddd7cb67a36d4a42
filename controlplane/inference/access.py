"""Resolve what a caller's `model` means, whether they may use it, and which limits apply.

Answers are fresh for `CACHE_S`, as keys are in `controlplane.tenants.auth`: under load most
requests need no query and no thread. They are kept longer for while the database is away.
"""

from __future__ import annotations

import dataclasses
import difflib
import time
import uuid
from collections.abc import Iterable
from typing import NamedTuple

from contract.messages.sampling import MAX_ADAPTERS
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.adapters.resolution import (
    ResolvedModel,
    base_model_resolve,
    check_serving,
    imported_name,
    limit_names,
    model_resolve,
    plain_name,
)
from controlplane.aliases.models import AliasPart
from controlplane.aliases.resolution import AliasPlan, alias_resolve, names_like
from controlplane.errors import ApiError, InvalidRequest, NotFound
from controlplane.inference.alias_defaults import AliasDefaults, defaults_of, known_defaults
from controlplane.inference.model_selector import ModelSelector
from controlplane.infra.web.threads import query_in_thread
from controlplane.tenancy import epochs
from controlplane.tenancy.lookup import Lookup
from controlplane.tenancy.model_scope import allows_model, refusal
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.auth import CACHE_S, Permission, Principal, authorize
from controlplane.usage.limits.admit import NO_LIMITS, Limits
from controlplane.usage.limits.services import limits_for

Target = AliasPart.Target
#: How alike two names must be, from 0 to 1, for one to be suggested for the other.
NEAR = 0.75
_LISTED = "GET /v1/models lists what this key can name."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that answers: a base with the weighted sum of `parts`, or alone without parts.

    The last three are set for a request whose model is an alias.
    """

    name: str
    models: tuple[ResolvedModel, ...]
    parts: tuple[tuple[AdapterVersion, float], ...]
    alias: AliasPlan | None = None
    target: Target | None = None
    defaults: AliasDefaults | None = None

    @property
    def base_model(self) -> BaseModel:
        return self.models[0].base_model

    @property
    def labels(self) -> list[str]:
        """Return those of a classifier, also where it is part of a blend; else none."""
        found = (version.report.get("labels") for version, _ in self.parts)
        return next(filter(None, found), [])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, what answers, and the limits of that: resolved once for each request."""

    principal: Principal
    model: ServedModel
    limits: Limits


class _Known(NamedTuple):
    """The model that a name stands for with a key, and its limits, as the database had them.

    model, limits  for an alias, those of its primary
    """

    model: ResolvedModel
    limits: Limits
    alias: AliasPlan | None = None
    canary_limits: Limits = NO_LIMITS


#: By key (see `_key_id`) and name.
_names_known: Lookup[tuple[uuid.UUID, str], _Known] = Lookup(fresh_s=CACHE_S, max_entries=10_000)


async def resolve(principal: Principal, selector: ModelSelector) -> Caller:
    """Return what a caller may use under the names of a request, as of at most `CACHE_S` ago.

    Uses what the database said before, while it is away. Raises PermissionDenied, NotFound, or
    InvalidRequest for adapters that do not go together.
    """
    _check(principal, selector)
    return await _names_known.find(
        _keys(principal, selector),
        lambda found: _remembered(principal, selector, found),
        lambda: resolve_now(principal, selector),
    )


def known(principal: Principal, selector: ModelSelector) -> Caller | None:
    """Do as `resolve`, from memory; None if a name is not fresh there."""
    _check(principal, selector)
    fresh = _names_known.fresh(*_keys(principal, selector))
    return None if fresh is None else _remembered(principal, selector, fresh)


def _remembered(
    principal: Principal, selector: ModelSelector, found: list[_Known]
) -> Caller | None:
    """Return the caller, unless an alias's defaults are not in memory, or a budget's period has
    ended since: of the next one only the database knows what is spent.
    """
    limits = [each for entry in found for each in (entry.limits, entry.canary_limits)]
    if any(budget.ends_at <= time.time() for each in limits for budget in each.budgets):
        return None
    plan, defaults = found[0].alias, None
    if plan is not None and (defaults := known_defaults(plan)) is None:
        return None
    return _caller(principal, selector, found, defaults)


def resolve_now(principal: Principal, selector: ModelSelector) -> Caller:
    """Do as `resolve`, from the database, for code that is in a thread already."""
    _check(principal, selector)
    found = []
    asked = epochs.stamp()  # from before the query, which may take long
    with tenant_scope(principal.tenant.id):
        for name, param in zip(selector.names, selector.params, strict=True):
            try:
                found.append(_ask(principal, name))
            except NotFound as error:
                error.param = param
                error.message += _way_out(principal, name)
                raise
            except ApiError as error:
                error.param = param
                raise
        plan = found[0].alias
        defaults = None if plan is None else defaults_of(plan)
    for key, entry in zip(_keys(principal, selector), found, strict=True):
        _names_known.put(key, entry, asked, principal.tenant.id)
    return _caller(principal, selector, found, defaults)


def _ask(principal: Principal, name: str) -> _Known:
    """Look a name up: an alias comes before an adapter, an adapter before a base model."""
    if "/" in name:
        name = imported_name(name)
        check_named(principal, name)
    plan = alias_resolve(name)
    if plan is None:
        return _Known(model_resolve(name), _limits(principal, limit_names(plain_name(name))))
    return _Known(
        plan.primary,
        _limits(principal, plan.primary_names),
        alias=plan,
        canary_limits=_limits(principal, plan.canary_names) if plan.canary else NO_LIMITS,
    )


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
            limits = [_limits(principal, _names(name)) for name in selector.names]
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
        raise refusal(name, param)


def _check(principal: Principal, selector: ModelSelector) -> None:
    authorize(principal, Permission.INFER)
    for name, param in zip(selector.names, selector.params, strict=True):
        check_named(principal, name, param)


def _limits(principal: Principal, names: Iterable[str]) -> Limits:
    return limits_for(principal.api_key, names)


def _names(name: str) -> Iterable[str]:
    """Return the names in limits for a request that was accepted; of an alias all that answer."""
    try:
        name = imported_name(name) if "/" in name else name
        plan = alias_resolve(name)
    except (NotFound, InvalidRequest):
        plan = None
    if plan is None:
        return limit_names(plain_name(name))
    return plan.primary_names | plan.canary_names


def _keys(principal: Principal, selector: ModelSelector) -> list[tuple[uuid.UUID, str]]:
    return [(_key_id(principal), name) for name in selector.names]


def _key_id(principal: Principal) -> uuid.UUID:
    """Return the id of the key, or of the tenant: names and limits are the same for its people."""
    return principal.tenant.id if principal.api_key is None else principal.api_key.id


def _way_out(principal: Principal, name: str) -> str:
    """Suggest names for one that does not exist, among those that the caller may name."""
    known = [own for own in names_like(name) if may_name(principal, own)]
    near = difflib.get_close_matches(name[:64], [own[:64] for own in known], 3, NEAR)
    longer = [own for own in known if len(name) > 2 and own.startswith(name)]
    shown = list(dict.fromkeys(near + longer))[:3]
    asked = f" Did you mean {' or '.join(f'`{own}`' for own in shown)}?" if shown else ""
    return asked if principal.api_key is None else f"{asked} {_LISTED}"


def _caller(
    principal: Principal,
    selector: ModelSelector,
    found: list[_Known],
    defaults: AliasDefaults | None,
) -> Caller:
    first = found[0]
    if first.alias is None or len(found) > 1 or selector.weights[0] is not None:
        # In a blend of the client's own, an alias means its primary.
        model = _served(selector, [known.model for known in found])
        limits = _together([known.limits for known in found])
        return Caller(principal=principal, model=model, limits=limits)
    target = first.alias.target(selector.sticky or f"key {_key_id(principal)}")
    is_canary = target == Target.CANARY
    chosen = first.alias.canary if is_canary else first.alias.primary
    assert chosen is not None
    model = dataclasses.replace(
        _served(selector, [chosen]),
        alias=first.alias,
        target=target,
        defaults=None if defaults is None or defaults.is_empty else defaults,
    )
    limits = first.canary_limits if is_canary else first.limits
    return Caller(principal=principal, model=model, limits=limits)


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
        if weight is not None and model.is_base:
            raise InvalidRequest(f"`{model.name}` is a base model, not an adapter.", param=param)
        if weight is None and not model.is_base and len(models) > 1:
            raise InvalidRequest(
                "With adapters, model must be their base model or be left out.", param=param
            )
        for version, share in model.parts:
            if any(version.digest == other.digest for other, _ in parts):
                raise InvalidRequest(f"`{model.name}` is in the blend twice.", param=param)
            parts.append((version, share if weight is None else share * weight))
    if len(parts) > MAX_ADAPTERS:
        raise InvalidRequest(
            f"With what its aliases mean, the blend has more than {MAX_ADAPTERS} adapters.",
            param=selector.params[-1],
        )
    return ServedModel(name=selector.label, models=tuple(models), parts=tuple(parts))
