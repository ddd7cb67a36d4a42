"""Count stored values by their pepper, and move them to the current one.

API keys move when they are used (`controlplane.tenants.pepper_change`). Second factors, the keys of
stored and captured content, webhooks' secrets, those of imports under way and of datasets' sources,
and judges' keys can be moved at once.
Answers to idempotent writes are deleted after a day.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from allauth.mfa.models import Authenticator
from cryptography.fernet import InvalidToken
from django.conf import settings
from django.db import transaction

from controlplane.adapters import import_sources
from controlplane.adapters.models import VersionImport
from controlplane.console.signin.adapters import SECOND_FACTORS
from controlplane.evaluations import judge
from controlplane.evaluations.models import Judge
from controlplane.infra.ciphers import is_under_current_pepper, peppered_cipher
from controlplane.operator.service_keys.models import ServiceKey
from controlplane.requestlog import sealing
from controlplane.requestlog.models import CapturePolicy, LogPolicy
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants.models import ApiKey
from controlplane.tenants.pepper_change import KeyCounts, key_counts
from controlplane.training.datasets import pull_sources
from controlplane.training.models import DatasetSource
from controlplane.webhooks import signing
from controlplane.webhooks.models import WebhookEndpoint

#: Entries of a second factor's data that are encrypted.
_ENCRYPTED = ("secret", "seed")
#: Models with an encrypted key of a tenant.
_WITH_KEYS: tuple[type[LogPolicy | CapturePolicy], ...] = (LogPolicy, CapturePolicy)


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
    webhook_secrets: Counts
    import_secrets: Counts
    judge_keys: Counts
    source_secrets: Counts

    @property
    def needs_accepted(self) -> int:
        """Return the number of values that stop working if only the current pepper is left.

        A key that was not used since the platform records peppers may need an accepted one.
        """
        counts = self.api_keys.accepted + sum(counts.accepted for counts in self._stored)
        return counts + (self.api_keys.unknown if self.accepted_peppers else 0)

    @property
    def unreadable(self) -> int:
        """Return the number of values under a pepper that is not configured."""
        return self.api_keys.foreign + sum(counts.foreign for counts in self._stored)

    @property
    def _stored(self) -> tuple[Counts, ...]:
        return (
            self.second_factors,
            self.content_keys,
            self.webhook_secrets,
            self.import_secrets,
            self.judge_keys,
            self.source_secrets,
        )


def pepper_status() -> PepperStatus:
    """Count stored values by their pepper."""
    cipher = peppered_cipher(SECOND_FACTORS)
    factors, keys = Counts(), Counts()
    for factor in Authenticator.objects.iterator(chunk_size=500):
        for token in _tokens(factor).values():
            factors.add(
                is_current=is_under_current_pepper(SECOND_FACTORS, token),
                is_readable=_can_read(cipher, token),
            )
    with all_tenants(reason="keys of stored content of all tenants are counted"):
        for model in _WITH_KEYS:
            stored = model._default_manager.exclude(wrapped_key=b"")
            for wrapped in stored.values_list("wrapped_key", flat=True):
                is_current = sealing.is_current(bytes(wrapped))
                is_readable = is_current or _renewed(bytes(wrapped)) is not None
                keys.add(is_current=is_current, is_readable=is_readable)
    return PepperStatus(
        accepted_peppers=len(settings.ACCEPTED_PEPPERS),
        api_keys=key_counts(ApiKey, ServiceKey),
        second_factors=factors,
        content_keys=keys,
        webhook_secrets=_webhook_secrets(),
        import_secrets=_sealed_under(VersionImport, import_sources.PURPOSE),
        judge_keys=_judge_keys(),
        source_secrets=_sealed_under(DatasetSource, pull_sources.PURPOSE),
    )


def _judge_keys() -> Counts:
    counts = Counts()
    with all_tenants(reason="judges' keys of all tenants are counted"):
        for sealed in Judge.objects.values_list("sealed", flat=True):
            is_current = judge.is_current(bytes(sealed))
            is_readable = is_current or judge.renewed(bytes(sealed)) is not None
            counts.add(is_current=is_current, is_readable=is_readable)
    return counts


def _webhook_secrets() -> Counts:
    counts = Counts()
    with all_tenants(reason="webhooks' secrets of all tenants are counted"):
        for pair in WebhookEndpoint.objects.values_list("sealed_secret", "old_sealed_secret"):
            for sealed in filter(None, pair):
                is_current = signing.is_current(bytes(sealed))
                is_readable = is_current or _renewed_secret(bytes(sealed)) is not None
                counts.add(is_current=is_current, is_readable=is_readable)
    return counts


def _sealed_under(model: type[VersionImport | DatasetSource], purpose: bytes) -> Counts:
    counts, cipher = Counts(), peppered_cipher(purpose)
    with all_tenants(reason="secrets of imports and sources of all tenants are counted"):
        for sealed in model.objects.values_list("sealed", flat=True):
            counts.add(
                is_current=is_under_current_pepper(purpose, bytes(sealed)),
                is_readable=_can_read(cipher, bytes(sealed)),
            )
    return counts


def reencrypt() -> None:
    """Move all values that can be moved at once to the current pepper. Idempotent."""
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
        for model in _WITH_KEYS:
            stored = model._default_manager.exclude(wrapped_key=b"")
            for primary_key, wrapped in list(stored.values_list("pk", "wrapped_key")):
                before = bytes(wrapped)
                after = None if sealing.is_current(before) else _renewed(before)
                if after is not None:
                    # Unless the tenant has just changed its choice, which makes or destroys a key.
                    rows = model._default_manager.filter(pk=primary_key, wrapped_key=before)
                    rows.update(wrapped_key=after)
    _reencrypt_webhooks()
    _reencrypt_sealed(VersionImport, import_sources.PURPOSE)
    _reencrypt_sealed(DatasetSource, pull_sources.PURPOSE)
    _reencrypt_judges()


def _reencrypt_sealed(model: type[VersionImport | DatasetSource], purpose: bytes) -> None:
    cipher = peppered_cipher(purpose)
    with all_tenants(reason="secrets of imports and sources move to the current pepper"):
        for primary_key, sealed in list(model.objects.values_list("pk", "sealed")):
            before = bytes(sealed)
            if not is_under_current_pepper(purpose, before) and _can_read(cipher, before):
                # Unless the tenant has just set it again.
                rows = model.objects.filter(pk=primary_key, sealed=before)
                rows.update(sealed=cipher.rotate(before))


def _reencrypt_judges() -> None:
    with all_tenants(reason="judges' keys of all tenants move to the current pepper"):
        for found in Judge.objects.all():
            before = bytes(found.sealed)
            after = None if judge.is_current(before) else judge.renewed(before)
            if after is not None:
                # Unless the tenant has just set it again.
                Judge.objects.filter(pk=found.pk, sealed=before).update(sealed=after)


def _reencrypt_webhooks() -> None:
    with all_tenants(reason="webhooks' secrets of all tenants move to the current pepper"):
        for primary_key in list(WebhookEndpoint.objects.values_list("pk", flat=True)):
            for field in ("sealed_secret", "old_sealed_secret"):
                found = WebhookEndpoint.objects.filter(pk=primary_key).values_list(field, flat=True)
                before = found.first()
                if not before or signing.is_current(before):
                    continue
                if (after := _renewed_secret(before)) is not None:
                    # Unless the tenant has just rotated it.
                    rows = WebhookEndpoint.objects.filter(pk=primary_key, **{field: before})
                    rows.update(**{field: after})


def _tokens(factor: Authenticator) -> dict[str, bytes]:
    return {name: factor.data[name].encode() for name in _ENCRYPTED if name in factor.data}


def _can_read(cipher: Any, token: bytes) -> bool:
    try:
        cipher.decrypt(token)
    except InvalidToken:
        return False
    return True


def _renewed_secret(sealed: bytes) -> bytes | None:
    try:
        return signing.renewed(sealed)
    except signing.Unreadable:
        return None


def _renewed(wrapped_key: bytes) -> bytes | None:
    try:
        return sealing.renewed_key(wrapped_key)
    except sealing.Unreadable:
        return None
