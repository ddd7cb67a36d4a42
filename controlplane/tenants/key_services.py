"""All changes to API keys. They run in the scope of the key's tenant."""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.errors import Conflict, InvalidRequest, NotFound, require
from controlplane.events.audit.services import record
from controlplane.infra.ciphers import pepper_id
from controlplane.infra.locks import lock_until_commit
from controlplane.tenancy.scoping import current_tenant_id
from controlplane.tenants import auth, key_grants, keys
from controlplane.tenants.auth import Principal
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import ApiKey, Membership, ServiceAccount

log = logging.getLogger(__name__)

#: Default time in which both secrets of a rotated key work.
DEFAULT_GRACE_S, MAX_GRACE_S = 24 * 3600, 30 * 24 * 3600


@transaction.atomic
def api_key_create(
    *,
    name: str,
    by: Principal | None = None,
    expires_at: dt.datetime | None = None,
    environment: str = "live",
    rules: KeyRules | None = None,
    owner: Membership | ServiceAccount | None = None,
) -> tuple[ApiKey, str]:
    """Make a key of the tenant in scope. -> the key and its text, which cannot be read again.

    by  the maker, who can grant no more than they have; None: the operator

    Raises InvalidRequest that names the field, PermissionDenied; Conflict for a key with too many
    ancestors.
    """
    _lock_keys()
    rules = rules or KeyRules()
    if by is not None:
        by = key_grants.as_it_is_now(by)
        key_grants.check_rules(by, rules.checked(), expires_at)
    fields = _checked_fields(name, expires_at, rules)
    if environment not in keys.ENVIRONMENTS:
        raise InvalidRequest("The environment must be live or test.", param="environment")
    parts = keys.generate(environment)
    api_key = ApiKey.objects.create(
        public_id=parts.public_id,
        environment=environment,
        secret_hmac=parts.secret_hmac(settings.API_KEY_PEPPER),
        pepper_id=pepper_id(settings.API_KEY_PEPPER),
        last4=parts.text()[-4:],
        created_by=by.user if by else None,
        parent_id=by.api_key.pk if by and by.api_key else None,
        ancestors=key_grants.ancestors_for(by),
        owner=owner if isinstance(owner, Membership) else None,
        service_account=owner if isinstance(owner, ServiceAccount) else None,
        **fields,
    )
    record("created", api_key, after=_audit_fields(api_key))
    return api_key, parts.text()


@transaction.atomic
def operator_key_ensure(*, name: str, is_rotated: bool) -> tuple[ApiKey, str | None, bool]:
    """Find the key of this name that the operator made for the tenant in scope, or make it.

    -> the key; its text if it is new or `is_rotated`, else None; whether it is new. Revoked and
    expired keys do not count. Raises InvalidRequest.
    """
    lock_until_commit(f"operator's key {current_tenant_id()} {name.strip()}")
    is_current = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    rows = ApiKey.objects.filter(is_current, owner=None, service_account=None, revoked_at=None)
    found = rows.filter(name=name.strip()).order_by("-created_at").first()
    if found is None:
        return *api_key_create(name=name), True
    if is_rotated:
        return *api_key_rotate(public_id=found.public_id), False
    return found, None, False


def api_key_get(*, public_id: str) -> ApiKey:
    """Return the key. Raises NotFound."""
    if not (public_id.isascii() and public_id.isalnum()):
        raise NotFound("There is no such key.")
    rows = ApiKey.objects.select_related("owner__user", "service_account", "parent")
    return require(rows.filter(public_id=public_id).first(), "There is no such key.")


@transaction.atomic
def api_key_update(
    *, public_id: str, changes: Mapping[str, Any], by: Principal | None = None
) -> ApiKey:
    """Change a key's rules; all processes apply them within a second. Its secret stays.

    An earlier expiry also applies to the keys that it made.

    changes  new values of `name`, `expires_at` and the fields of KeyRules; the others stay
    by       who changes it: they need all that the key has and gets; None: the operator

    Raises InvalidRequest, NotFound, PermissionDenied; Conflict for a revoked key.
    """
    api_key = _locked(public_id)
    wanted = {"name": api_key.name, "expires_at": api_key.expires_at, **changes}
    name, expires_at = wanted.pop("name"), wanted.pop("expires_at")
    rules = dataclasses.replace(key_grants.rules_of(api_key), **wanted)
    if by is not None:
        by = key_grants.as_it_is_now(by)
        key_grants.check_holds(by, api_key)
        key_grants.check_rules(by, rules.checked(), expires_at)
    is_later = expires_at is not None and expires_at != api_key.expires_at
    fields = _checked_fields(name, expires_at if is_later else None, rules)
    before = _audit_fields(api_key)
    _save(api_key, **{**fields, "expires_at": expires_at})
    record("changed", api_key, before=before, after=_audit_fields(api_key))
    if expires_at is not None and expires_at != before["expires_at"]:
        _end_descendants_by(api_key, expires_at)
    return api_key_get(public_id=public_id)


@transaction.atomic
def api_key_rotate(
    *, public_id: str, grace_s: int = DEFAULT_GRACE_S, by: Principal | None = None
) -> tuple[ApiKey, str]:
    """Give a key a new secret. -> the key and its new text, which cannot be read again.

    The previous secret works for `grace_s` more seconds; any earlier one stops working now.

    by  who reads the new secret, and so needs all that the key has; None: the operator

    Raises InvalidRequest, NotFound, PermissionDenied; Conflict for a revoked or expired key.
    """
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise InvalidRequest(
            f"The grace period must be 0 to {MAX_GRACE_S} seconds.", param="grace_seconds"
        )
    api_key = _locked(public_id)
    if by is not None:
        key_grants.check_holds(key_grants.as_it_is_now(by), api_key)
    now = timezone.now()
    if api_key.expires_at is not None and api_key.expires_at <= now:
        raise Conflict("This key has expired. Make another one.")
    parts = keys.renewed(public_id, api_key.environment)
    _save(
        api_key,
        old_secret_hmac=bytes(api_key.secret_hmac) if grace_s else None,
        old_secret_until=now + dt.timedelta(seconds=grace_s) if grace_s else None,
        old_pepper_id=api_key.pepper_id if grace_s else "",
        secret_hmac=parts.secret_hmac(settings.API_KEY_PEPPER),
        pepper_id=pepper_id(settings.API_KEY_PEPPER),
        last4=parts.text()[-4:],
    )
    record("rotated", api_key, after={"grace_s": grace_s})
    return api_key_get(public_id=public_id), parts.text()


@transaction.atomic
def api_key_revoke(
    *, public_id: str, with_children: bool = True, by: Principal | None = None
) -> ApiKey:
    """Revoke a key and both its secrets. A repeated call changes nothing.

    with_children  also end its descendants: a thief of the key may have made some
    by             None: the operator, or a consequence of another change

    Raises NotFound, PermissionDenied.
    """
    _lock_keys()  # so that none of them can make a key
    api_key = api_key_get(public_id=public_id)
    if by is not None:
        key_grants.check_ends(key_grants.as_it_is_now(by), api_key)
    ended = [api_key]
    if with_children:
        ended += ApiKey.made_by(api_key.pk).order_by("created_at")
    now = timezone.now()
    for one in ended:
        if one.revoked_at is None:
            _save(one, revoked_at=now)
            because = {} if one is api_key else {"with": api_key.public_id}
            record("revoked", one, after={"revoked_at": now, **because})
            log.info("key revoked", extra={"key": one.public_id, **because})
    return api_key


def _end_descendants_by(api_key: ApiKey, expires_at: dt.datetime) -> None:
    """Let the keys that this key made expire no later than its new, earlier expiry."""
    is_later = Q(expires_at=None) | Q(expires_at__gt=expires_at)
    for one in ApiKey.made_by(api_key.pk).filter(is_later, revoked_at=None):
        before = {"expires_at": one.expires_at}
        _save(one, expires_at=expires_at)
        after = {"expires_at": expires_at, "with": api_key.public_id}
        record("changed", one, before=before, after=after)


def _audit_fields(api_key: ApiKey) -> dict[str, Any]:
    """Return the fields of a key that the audit trail records."""
    return {
        "public_id": api_key.public_id,
        "name": api_key.name,
        "environment": api_key.environment,
        "scopes": api_key.scopes,
        "allowed_models": api_key.allowed_models,
        "allowed_ips": api_key.allowed_ips,
        "expires_at": api_key.expires_at,
        "owner": api_key.owner_id,
        "service_account": api_key.service_account_id,
        "parent": api_key.parent_id,
    }


def _checked_fields(name: str, expires_at: dt.datetime | None, rules: KeyRules) -> dict[str, Any]:
    name = name.strip()
    if not 1 <= len(name) <= 100:
        raise InvalidRequest("A key's name must have 1 to 100 characters.", param="name")
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidRequest("A key cannot expire in the past.", param="expires_at")
    lists = {field: list(items) for field, items in dataclasses.asdict(rules.checked()).items()}
    return {"name": name, "expires_at": expires_at, **lists}


def _locked(public_id: str) -> ApiKey:
    """Return the key, locked. Raises NotFound, Conflict for a revoked one."""
    _lock_keys()
    api_key = api_key_get(public_id=public_id)
    if api_key.revoked_at is not None:
        raise Conflict("This key has been revoked.")
    return api_key


def _lock_keys() -> None:
    """Allow one change at a time to a tenant's keys: the rules of one key depend on others."""
    lock_until_commit(f"keys {current_tenant_id()}")


def _save(api_key: ApiKey, **fields: Any) -> None:
    for field, value in fields.items():
        setattr(api_key, field, value)
    api_key.save(update_fields=list(fields))
    # Clear now for reads in this process, and after the commit for all others.
    auth.forget_key(api_key.public_id)
    transaction.on_commit(lambda: auth.forget_key(api_key.public_id))
