"""Nobody hands on more than they have: what a caller may give to a key, and to people.

A person, and a key that nothing bounds, has what their permissions say. A key has less: the models
and addresses on its lists, the time until it expires, and the limits and budgets that are set for
it or for a key that it comes from. Each is compared; a limit is not, for it holds for every key
that descends from the limited one.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections.abc import Callable, Iterable

from controlplane.errors import Conflict, PermissionDenied
from controlplane.tenants import auth
from controlplane.tenants.auth import Principal
from controlplane.tenants.key_rules import (
    KeyRules,
    covers_addresses,
    covers_expiry,
    covers_models,
)
from controlplane.tenants.models import ApiKey

#: Keys that a key may come from: each of them is asked for limits by every request.
MAX_ANCESTORS = 8
#: Each says which of some keys have limits of its kind. Apps with limits of keys add to it.
LIMITED: list[Callable[[Iterable[uuid.UUID]], set[uuid.UUID]]] = []


def rules_of(api_key: ApiKey) -> KeyRules:
    return KeyRules(
        scopes=tuple(api_key.scopes),
        allowed_models=tuple(api_key.allowed_models),
        allowed_ips=tuple(api_key.allowed_ips),
    )


def as_it_is_now(by: Principal) -> Principal:
    """The caller with their key as it stands in the database, not as it was when they called.

    Raises AuthenticationFailed for a key that has ended meanwhile.
    """
    if by.api_key is None:
        return by
    rows = ApiKey.objects.select_related("tenant", "owner__user", "service_account")
    return auth.standing_principal(rows.get(pk=by.api_key.pk))


def check_rules(by: Principal, rules: KeyRules, expires_at: dt.datetime | None) -> None:
    """Return if the caller may let a key do this. Raises PermissionDenied that names the field."""
    try:
        auth.authorize_grant(by, rules.scopes)
    except PermissionDenied as error:
        error.param = "scopes"
        raise
    own = by.api_key
    if own is None:
        return
    if not covers_models(own.allowed_models, rules.allowed_models):
        _refuse("allowed_models", "for the models that it may use itself")
    if not covers_addresses(own.allowed_ips, rules.allowed_ips):
        _refuse("allowed_ips", "for the addresses that it may come from itself")
    if not covers_expiry(own.expires_at, expires_at):
        _refuse("expires_at", "until it expires itself")


def check_holds(by: Principal, api_key: ApiKey) -> None:
    """Return if the caller has all that a key has: whoever rotates it reads its secret.

    Counted are the scopes that are stored: a larger role of its owner would make them count.
    Raises PermissionDenied.
    """
    check_rules(by, rules_of(api_key), api_key.expires_at)
    if by.api_key is not None:
        bounding = _limited_keys(by.api_key)
        if not bounding <= set(api_key.line):
            raise PermissionDenied("This API key has limits that the other key does not have.")


def check_unbound(by: Principal) -> None:
    """Return if the caller may bring people in, who have no bounds. Raises PermissionDenied."""
    own = by.api_key
    if own is None:
        return
    is_bound = own.allowed_models or own.allowed_ips or own.expires_at is not None
    if is_bound or _limited_keys(own):
        raise PermissionDenied(
            "A key with models, addresses, an expiry or limits of its own gives nobody a role: "
            "people have no such bounds."
        )


def check_limits_of(by: Principal, api_key: ApiKey | None) -> None:
    """Return if the caller may set limits of a key; None: the tenant's, or a model's.

    Raises PermissionDenied for a key's own, and for those that a bound key did not make.
    """
    own = by.api_key
    if own is not None and api_key is not None and api_key.pk in own.line:
        raise PermissionDenied(
            "An API key changes neither its own limits nor those of a key that it comes from."
        )
    _check_reaches(by, api_key, "sets limits of")


def check_ends(by: Principal, api_key: ApiKey) -> None:
    """Return if the caller may revoke a key. Raises PermissionDenied.

    Nothing is handed on by it, so a key that nothing bounds may end one that can do more: who
    looks for leaked keys needs no more than the right to end them.
    """
    if by.api_key is not None and by.api_key.pk != api_key.pk:
        _check_reaches(by, api_key, "revokes")


def _check_reaches(by: Principal, api_key: ApiKey | None, does: str) -> None:
    own = by.api_key
    if own is None or (api_key is not None and own.pk in api_key.line):
        return
    if own.allowed_models or own.allowed_ips or _limited_keys(own):
        raise PermissionDenied(
            f"An API key with models, addresses or limits of its own {does} nothing but the keys "
            "that it made."
        )


def inherited(by: Principal, rules: KeyRules) -> KeyRules:
    """What a new key gets where its maker says nothing: the maker's own models and addresses."""
    own = by.api_key
    if own is None:
        return rules
    return dataclasses.replace(
        rules,
        allowed_models=tuple(own.allowed_models),
        allowed_ips=tuple(own.allowed_ips),
    )


def ancestors_for(by: Principal | None) -> list[str]:
    """Of a key that the caller makes. Raises Conflict where the line would be too long."""
    if by is None or by.api_key is None:
        return []
    line = [str(one) for one in by.api_key.line]
    if len(line) > MAX_ANCESTORS:
        raise Conflict(
            f"A key comes from at most {MAX_ANCESTORS} others: make this one with an earlier key."
        )
    return line


def _limited_keys(api_key: ApiKey) -> set[uuid.UUID]:
    """Those of its line that have limits of their own."""
    return {key_id for limited in LIMITED for key_id in limited(api_key.line)}


def _refuse(field: str, how_far: str) -> None:
    raise PermissionDenied(f"An API key gives another at most {how_far}.", param=field)
