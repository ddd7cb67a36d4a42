"""All changes to service keys. They run inside `all_tenants`; people and commands make them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.errors import Conflict, InvalidRequest, require
from controlplane.events.audit.services import record
from controlplane.infra.ciphers import pepper_id
from controlplane.infra.locks import lock_until_commit
from controlplane.operator.service_keys.models import ServiceKey
from controlplane.operator.service_keys.scopes import Scope
from controlplane.tenants import keys
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.key_services import DEFAULT_GRACE_S, MAX_GRACE_S
from controlplane.tenants.models import User


@transaction.atomic
def service_key_create(
    *,
    name: str,
    scopes: Iterable[str],
    expires_at: dt.datetime | None = None,
    allowed_ips: Iterable[str] = (),
    created_by: User | None = None,
) -> tuple[ServiceKey, str]:
    """Make a key. -> the key and its text, which cannot be read again.

    expires_at  None: never
    created_by  None: a command

    Raises InvalidRequest that names the field.
    """
    name = name.strip()
    if not 1 <= len(name) <= 100:
        raise InvalidRequest("A key's name must have 1 to 100 characters.", param="name")
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidRequest("A key cannot expire in the past.", param="expires_at")
    networks = KeyRules(allowed_ips=tuple(allowed_ips)).checked().allowed_ips
    parts = keys.generate(keys.OPERATORS)
    service_key = ServiceKey.objects.create(
        public_id=parts.public_id,
        name=name,
        secret_hmac=parts.secret_hmac(settings.API_KEY_PEPPER),
        pepper_id=pepper_id(settings.API_KEY_PEPPER),
        last4=parts.text()[-4:],
        scopes=_checked_scopes(scopes),
        allowed_ips=list(networks),
        created_by=created_by,
        expires_at=expires_at,
    )
    record("created", service_key, after=_audit_fields(service_key))
    return service_key, parts.text()


@transaction.atomic
def service_key_ensure(
    *, name: str, scopes: Iterable[str], expires_at: dt.datetime | None, is_rotated: bool
) -> tuple[ServiceKey, str | None, bool]:
    """Find the current key of this name, or make it.

    -> the key; its text if it is new or `is_rotated`, else None; whether it is new. Revoked and
    expired keys do not count.

    Raises InvalidRequest; Conflict if the key has other scopes.
    """
    lock_until_commit(f"service key {name.strip()}")
    is_current = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    rows = ServiceKey.objects.filter(is_current, name=name.strip(), revoked_at=None)
    found = rows.order_by("-created_at").first()
    if found is None:
        return *service_key_create(name=name, scopes=scopes, expires_at=expires_at), True
    if found.scopes != _checked_scopes(scopes):
        raise Conflict(
            f"The service key {name.strip()} has other scopes: {', '.join(found.scopes)}. Revoke "
            "it, or choose another name.",
            param="scopes",
        )
    if is_rotated:
        return *service_key_rotate(public_id=found.public_id), False
    return found, None, False


def service_key_get(*, public_id: str) -> ServiceKey:
    """Return the key. Raises NotFound."""
    service_key = None
    if public_id.isascii() and public_id.isalnum():
        service_key = ServiceKey.objects.filter(public_id=public_id).first()
    return require(service_key, "There is no such service key.")


@transaction.atomic
def service_key_rotate(*, public_id: str, grace_s: int = DEFAULT_GRACE_S) -> tuple[ServiceKey, str]:
    """Give a key a new secret. -> the key and its new text, which cannot be read again.

    The previous secret works for `grace_s` more seconds; any earlier one stops working now.

    Raises InvalidRequest, NotFound; Conflict for a revoked or expired key.
    """
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise InvalidRequest(
            f"The grace period must be 0 to {MAX_GRACE_S} seconds.", param="grace_seconds"
        )
    service_key = _locked(public_id)
    now = timezone.now()
    if service_key.revoked_at is not None:
        raise Conflict("This service key has been revoked: make another one.")
    if service_key.expires_at is not None and service_key.expires_at <= now:
        raise Conflict("This service key has expired. Make another one.")
    parts = keys.renewed(public_id, keys.OPERATORS)
    service_key.old_secret_hmac = bytes(service_key.secret_hmac) if grace_s else None
    service_key.old_secret_until = now + dt.timedelta(seconds=grace_s) if grace_s else None
    service_key.old_pepper_id = service_key.pepper_id if grace_s else ""
    service_key.secret_hmac = parts.secret_hmac(settings.API_KEY_PEPPER)
    service_key.pepper_id = pepper_id(settings.API_KEY_PEPPER)
    service_key.last4 = parts.text()[-4:]
    service_key.save(
        update_fields=[
            "old_secret_hmac",
            "old_secret_until",
            "old_pepper_id",
            "secret_hmac",
            "pepper_id",
            "last4",
        ]
    )
    record("rotated", service_key, after={"grace_s": grace_s})
    return service_key, parts.text()


@transaction.atomic
def service_key_revoke(*, public_id: str) -> ServiceKey:
    """Revoke a key and both its secrets. Doing it again changes nothing. Raises NotFound."""
    service_key = _locked(public_id)
    if service_key.revoked_at is None:
        service_key.revoked_at = timezone.now()
        service_key.save(update_fields=["revoked_at"])
        record("revoked", service_key, after={"revoked_at": service_key.revoked_at})
    return service_key


def _locked(public_id: str) -> ServiceKey:
    """Return the key; other changes of it wait until the transaction ends. Raises NotFound."""
    found = service_key_get(public_id=public_id)
    return ServiceKey.objects.select_for_update().get(pk=found.pk)


def _checked_scopes(scopes: Iterable[str]) -> list[str]:
    """Return the scopes in the order of the enumeration. Raises InvalidRequest."""
    wanted = set(scopes)
    if unknown := sorted(wanted - set(Scope)):
        raise InvalidRequest(f"There is no scope {unknown[0][:100]}.", param="scopes")
    if not wanted:
        raise InvalidRequest("Name at least one scope.", param="scopes")
    return [scope.value for scope in Scope if scope in wanted]


def _audit_fields(service_key: ServiceKey) -> dict[str, Any]:
    return {
        "public_id": service_key.public_id,
        "name": service_key.name,
        "scopes": service_key.scopes,
        "allowed_ips": service_key.allowed_ips,
        "expires_at": service_key.expires_at,
    }
