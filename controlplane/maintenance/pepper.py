"""What is stored under which pepper, and how to move it to the current one.

API keys move when they are used (`controlplane.tenants.pepper_change`). Second factors and the keys
of stored content can be moved at once. Answers to idempotent writes are deleted after a day.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from allauth.mfa.models import Authenticator
from cryptography.fernet import InvalidToken
from django.conf import settings
from django.db import transaction

from controlplane.console.signin.adapters import SECOND_FACTORS
from controlplane.infra.ciphers import is_under_current_pepper, peppered_cipher
from controlplane.requestlog import sealing
from controlplane.requestlog.models import LogPolicy
from controlplane.service_keys.models import ServiceKey
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants.models import ApiKey
from controlplane.tenants.pepper_change import KeyCounts, key_counts

#: Entries of a second factor's data that are encrypted.
_ENCRYPTED = ("secret", "seed")


@dataclasses.dataclass(slots=True)
class Counts:
    """Encrypted values by the pepper that they are under."""

    current: int = 0
    accepted: int = 0
    #: Under a pepper that is not configured: nobody can read them.
    foreign: int = 0

    def add(self, *, is_current: bool, is_readable: bool) -> None:
        if is_current:
            self.current += 1
        elif is_readable:
            self.accepted += 1
        else:
            self.foreign += 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PepperStatus:
    accepted_peppers: int
    api_keys: KeyCounts
    second_factors: Counts
    content_keys: Counts

    @property
    def needs_accepted(self) -> int:
        """How many values stop working if only the current pepper is left.

        A key that was not used since the platform records peppers may need an accepted one.
        """
        counts = self.api_keys.accepted + self.second_factors.accepted + self.content_keys.accepted
        return counts + (self.api_keys.unknown if self.accepted_peppers else 0)

    @property
    def unreadable(self) -> int:
        """How many values are under a pepper that is not configured."""
        return self.api_keys.foreign + self.second_factors.foreign + self.content_keys.foreign


def pepper_status() -> PepperStatus:
    """Count what is stored under which pepper."""
    cipher = peppered_cipher(SECOND_FACTORS)
    factors, keys = Counts(), Counts()
    for factor in Authenticator.objects.iterator(chunk_size=500):
        for token in _tokens(factor).values():
            factors.add(
                is_current=is_under_current_pepper(SECOND_FACTORS, token),
                is_readable=_can_read(cipher, token),
            )
    with all_tenants(reason="keys of stored content of all tenants are counted"):
        for wrapped in LogPolicy.objects.exclude(wrapped_key=b"").values_list(
            "wrapped_key", flat=True
        ):
            is_current = sealing.is_current(bytes(wrapped))
            is_readable = is_current or _renewed(bytes(wrapped)) is not None
            keys.add(is_current=is_current, is_readable=is_readable)
    return PepperStatus(
        accepted_peppers=len(settings.ACCEPTED_PEPPERS),
        api_keys=key_counts(ApiKey, ServiceKey),
        second_factors=factors,
        content_keys=keys,
    )


def reencrypt() -> None:
    """Move second factors and the keys of stored content to the current pepper. Idempotent."""
    cipher = peppered_cipher(SECOND_FACTORS)
    for primary_key in list(Authenticator.objects.values_list("pk", flat=True)):
        with transaction.atomic():
            factor = Authenticator.objects.select_for_update().filter(pk=primary_key).first()
            if factor is None:
                continue
            for name, token in _tokens(factor).items():
                if not is_under_current_pepper(SECOND_FACTORS, token) and _can_read(cipher, token):
                    factor.data[name] = cipher.rotate(token).decode()
            factor.save(update_fields=["data"])
    with all_tenants(reason="keys of stored content of all tenants move to the current pepper"):
        for policy in LogPolicy.objects.exclude(wrapped_key=b""):
            before = bytes(policy.wrapped_key)
            after = None if sealing.is_current(before) else _renewed(before)
            if after is not None:
                # Unless the tenant has just changed its choice, which makes or destroys a key.
                rows = LogPolicy.objects.filter(pk=policy.pk, wrapped_key=before)
                rows.update(wrapped_key=after)


def _tokens(factor: Authenticator) -> dict[str, bytes]:
    return {name: factor.data[name].encode() for name in _ENCRYPTED if name in factor.data}


def _can_read(cipher: Any, token: bytes) -> bool:
    try:
        cipher.decrypt(token)
    except InvalidToken:
        return False
    return True


def _renewed(wrapped_key: bytes) -> bytes | None:
    try:
        return sealing.renewed_key(wrapped_key)
    except sealing.Unreadable:
        return None
