"""Recognize a key's secret, and move it to a new pepper when it is used and so known."""

from __future__ import annotations

import dataclasses
import hmac
import itertools

from django.conf import settings
from django.db.models import Count, Q
from django.utils import timezone

from controlplane.infra.ciphers import pepper_id, peppers
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants.keys import KeyParts
from controlplane.tenants.models import Credential

#: Takes the place of a key's missing second secret in the comparison.
_NO_HMAC = bytes(32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """The one of a key's two secrets that a caller sent, and its storage."""

    is_old: bool
    is_under_current_pepper: bool


def matching(key: Credential, parts: KeyParts) -> Secret | None:
    """Return which of the key's secrets this is, with the pepper of its storage.

    The previous secret matches during its grace period. None: it is neither.
    """
    until = key.old_secret_until
    is_grace = until is not None and timezone.now() < until
    found = None
    for number, pepper in enumerate(peppers()):
        secret_hmac = parts.secret_hmac(pepper)
        is_old = hmac.compare_digest(bytes(key.old_secret_hmac or _NO_HMAC), secret_hmac)
        if is_old and is_grace:
            found = Secret(is_old=True, is_under_current_pepper=number == 0)
        if hmac.compare_digest(bytes(key.secret_hmac), secret_hmac):
            found = Secret(is_old=False, is_under_current_pepper=number == 0)
    return found


def renew(key: Credential, parts: KeyParts, secret: Secret) -> None:
    """Store the secret's HMAC under the current pepper, unless it already is. Idempotent.

    The row changes only if its secret is still this one, not if somebody rotates the key.
    """
    current = pepper_id(settings.API_KEY_PEPPER)
    prefix = "old_" if secret.is_old else ""
    if secret.is_under_current_pepper and getattr(key, f"{prefix}pepper_id") == current:
        return
    before = bytes(getattr(key, f"{prefix}secret_hmac"))
    after = {
        f"{prefix}secret_hmac": parts.secret_hmac(settings.API_KEY_PEPPER),
        f"{prefix}pepper_id": current,
    }
    with all_tenants(reason="a key that is used moves to the current pepper"):
        is_done = (
            type(key)
            ._default_manager.filter(pk=key.pk, **{f"{prefix}secret_hmac": before})
            .update(**after)
        )
    if is_done:
        for name, value in after.items():
            setattr(key, name, value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyCounts:
    """Secrets of keys that may be used, by the pepper that their HMAC is under."""

    current: int
    accepted: int
    #: Keys not used since the platform records the pepper.
    unknown: int
    #: Keys under a pepper that is not configured: they do not work.
    foreign: int


def key_counts(kind_of_key: type[Credential], *others: type[Credential]) -> KeyCounts:
    """Count the secrets of keys that are neither revoked nor expired, of all tenants."""
    now = timezone.now()
    current, *accepted = map(pepper_id, peppers())
    counts = dict.fromkeys(("current", "accepted", "unknown", "foreign"), 0)
    usable = Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=now))
    kinds = {"current": [current], "accepted": accepted, "unknown": [""]}
    secrets = (("pepper_id", Q()), ("old_pepper_id", Q(old_secret_until__gt=now)))
    with all_tenants(reason="keys of all tenants are counted by their pepper"):
        for model, (field, also) in itertools.product((kind_of_key, *others), secrets):
            rows = model._default_manager.filter(usable, also)
            for found in rows.order_by().values(field).annotate(number=Count("pk")):
                kind = next((kind for kind, ids in kinds.items() if found[field] in ids), "foreign")
                counts[kind] += found["number"]
    return KeyCounts(**counts)
