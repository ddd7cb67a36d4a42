"""Move API keys to a new pepper when they are used: only then their secret is known."""

from __future__ import annotations

import dataclasses

from django.conf import settings
from django.db.models import Count, Q
from django.utils import timezone

from controlplane.infra.ciphers import pepper_id, peppers
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants.keys import KeyParts
from controlplane.tenants.models import ApiKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Which of a key's two secrets a caller sent, and how it is stored."""

    is_old: bool
    is_under_current_pepper: bool


def renew(api_key: ApiKey, parts: KeyParts, secret: Secret) -> None:
    """Store the secret's HMAC under the current pepper, unless it already is. Idempotent.

    The row changes only if its secret is still this one: somebody may rotate the key meanwhile.
    """
    current = pepper_id(settings.API_KEY_PEPPER)
    prefix = "old_" if secret.is_old else ""
    if secret.is_under_current_pepper and getattr(api_key, f"{prefix}pepper_id") == current:
        return
    before = bytes(getattr(api_key, f"{prefix}secret_hmac"))
    after = {
        f"{prefix}secret_hmac": parts.secret_hmac(settings.API_KEY_PEPPER),
        f"{prefix}pepper_id": current,
    }
    with all_tenants(reason="a key that is used moves to the current pepper"):
        is_done = ApiKey.objects.filter(pk=api_key.pk, **{f"{prefix}secret_hmac": before}).update(
            **after
        )
    if is_done:
        for name, value in after.items():
            setattr(api_key, name, value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyCounts:
    """Secrets of keys that may be used, by the pepper that their HMAC is under."""

    current: int
    accepted: int
    #: Not used since the platform records the pepper.
    unknown: int
    #: Under a pepper that is not configured: these keys do not work.
    foreign: int


def key_counts() -> KeyCounts:
    """Count the secrets of keys of all tenants that are neither revoked nor expired."""
    now = timezone.now()
    current, *accepted = map(pepper_id, peppers())
    counts = dict.fromkeys(("current", "accepted", "unknown", "foreign"), 0)
    usable = Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=now))
    kinds = {"current": [current], "accepted": accepted, "unknown": [""]}
    with all_tenants(reason="keys of all tenants are counted by their pepper"):
        for field, also in (("pepper_id", Q()), ("old_pepper_id", Q(old_secret_until__gt=now))):
            rows = ApiKey.objects.filter(usable, also)
            for found in rows.order_by().values(field).annotate(number=Count("pk")):
                kind = next((kind for kind, ids in kinds.items() if found[field] in ids), "foreign")
                counts[kind] += found["number"]
    return KeyCounts(**counts)
