"""Check what a caller may grant to keys and to people: nobody grants more than they have.

Permissions restrict every caller. A key may be restricted further: by its lists of models and
addresses, its expiry, and the limits and budgets of it or of a key that it comes from. All are
compared except limits, which apply to every descendant of the limited key anyway.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections.abc import Iterable

from controlplane.errors import Conflict, PermissionDenied
from controlplane.infra.hooks import Hook
from controlplane.tenants import auth
from controlplane.tenants.auth import Principal
from controlplane.tenants.key_rules import (
    KeyRules,
    covers_addresses,
    covers_expiry,
    covers_models,
)
from controlplane.tenants.models import ApiKey

#: The most keys that a key may come from: every request looks up the limits of each.
MAX_ANCESTORS = 8
#: Returns which of the given keys have limits of their own.
limited_keys = Hook[[Iterable[uuid.UUID]], set[uuid.UUID]]()


def rules_of(api_key: ApiKey) -> KeyRules:
    return KeyRules(
        scopes=tuple(api_key.scopes),
        allowed_models=tuple(api_key.allowed_models),
        allowed_ips=tuple(api_key.allowed_ips),
    )


def as_it_is_now(by: Principal) -> Principal:
    """Return the caller with their key read from the database again.

    Raises AuthenticationFailed for a key that has ended since.
    """
    if by.api_key is None:
        return by
    rows = ApiKey.objects.select_related("tenant", "owner__user", "service_account")
    return auth.standing_principal(rows.get(pk=by.api_key.pk))


def check_rules(by: Principal, rules: KeyRules, expires_at: dt.datetime | None) -> None:
    """Return if the caller may give a key these rules. Raises PermissionDenied with the field."""
    try:
        auth.authorize_grant(by, rules.scopes)
    except PermissionDenied as error:
        error.param = "scopes"
        raise
    own = by.api_key
    if own is None:
        return
    if not covers_models(own.allowed_models, rules.allowed_models):
        _refuse("allowed_models", "the models that it may use itself")
    if not covers_addresses(own.allowed_ips, rules.allowed_ips):
        _refuse("allowed_ips", "the addresses that it may be used from itself")
    if not covers_expiry(own.expires_at, expires_at):
        _refuse("expires_at", "the time until it expires itself")


def check_holds(by: Principal, api_key: ApiKey) -> None:
    """Return if the caller has all that a key has: who rotates a key reads its secret.

    All stored scopes count, also those that the owner's role does not allow today: the role may
    change. Raises PermissionDenied.
    """
    check_rules(by, rules_of(api_key), api_key.expires_at)
    if by.api_key is not None:
        bounding = _limited_keys(by.api_key)
        if not bounding <= set(api_key.line):
            raise PermissionDenied("This API key has limits that the other key does not have.")


def check_unbound(by: Principal) -> None:
    """Return if the caller may give roles to people: only an unrestricted key may, because people
    have no such restrictions. Raises PermissionDenied."""
    own = by.api_key
    if own is None:
        return
    is_bound = own.allowed_models or own.allowed_ips or own.expires_at is not None
    if is_bound or _limited_keys(own):
        raise PermissionDenied(
            "A key with models, addresses, an expiry or limits of its own cannot give people "
            "roles: people have no such restrictions."
        )


def check_limits_of(by: Principal, api_key: ApiKey | None) -> None:
    """Return if the caller may set limits of a key; None: the tenant's, or a model's.

    Raises PermissionDenied for the caller's own key or its ancestors, and for a restricted key if
    the other key does not descend from it.
    """
    own = by.api_key
    if own is not None and api_key is not None and api_key.pk in own.line:
        raise PermissionDenied(
            "An API key cannot change its own limits or those of a key that it comes from."
        )
    _check_descends(by, api_key, "set limits of")


def check_ends(by: Principal, api_key: ApiKey) -> None:
    """Return if the caller may revoke a key. Raises PermissionDenied.

    Revoking grants nothing, so an unrestricted key may revoke one that can do more: a scanner for
    leaked keys needs only the permission to revoke them.
    """
    if by.api_key is not None and by.api_key.pk != api_key.pk:
        _check_descends(by, api_key, "revoke")


def _check_descends(by: Principal, api_key: ApiKey | None, verb: str) -> None:
    own = by.api_key
    if own is None or (api_key is not None and own.pk in api_key.line):
        return
    if own.allowed_models or own.allowed_ips or _limited_keys(own):
        raise PermissionDenied(
            f"An API key with models, addresses or limits of its own can {verb} only keys that it "
            "made."
        )


def inherited(by: Principal, rules: KeyRules) -> KeyRules:
    """Return a new key's default rules: the models and addresses of the key that makes it."""
    own = by.api_key
    if own is None:
        return rules
    return dataclasses.replace(
        rules,
        allowed_models=tuple(own.allowed_models),
        allowed_ips=tuple(own.allowed_ips),
    )


def ancestors_for(by: Principal | None) -> list[str]:
    """Return the ancestors of a key that the caller makes. Raises Conflict for too many."""
    if by is None or by.api_key is None:
        return []
    line = [str(one) for one in by.api_key.line]
    if len(line) > MAX_ANCESTORS:
        raise Conflict(
            f"A key can have at most {MAX_ANCESTORS} ancestors. Make this one with an earlier key."
        )
    return line


def _limited_keys(api_key: ApiKey) -> set[uuid.UUID]:
    """Return the key and its ancestors, as far as they have their own limits."""
    return set().union(*limited_keys(api_key.line))


def _refuse(field: str, what: str) -> None:
    raise PermissionDenied(f"An API key can give another key at most {what}.", param=field)
