"""All changes to webhooks that callers ask for. They act for the tenant in scope."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Sequence
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from controlplane.errors import Conflict, InvalidRequest, require
from controlplane.events.audit.services import record
from controlplane.events.outbox.models import CHOOSABLE, EventType
from controlplane.events.outbox.services import publish
from controlplane.infra.locks import lock_until_commit
from controlplane.infra.outbound import outbound
from controlplane.infra.outbound.outbound_policy import Refused
from controlplane.tenancy.scoping import current_tenant_id
from controlplane.webhooks import signing, tasks
from controlplane.webhooks.models import WebhookDelivery, WebhookEndpoint

MAX_ENDPOINTS = 20
MAX_DESCRIPTION_CHARS = 200
#: Default time in which the old secret also signs after a rotation.
MAX_OVERLAP = dt.timedelta(days=7)
DEFAULT_OVERLAP = dt.timedelta(days=1)

Status = WebhookDelivery.Status


def webhook_create(
    *, url: str, event_types: Sequence[str], description: str = ""
) -> tuple[WebhookEndpoint, str]:
    """Make a webhook. -> it, and its secret, which is shown only this time.

    Raises InvalidRequest for an address that may not be called, or unknown events, Conflict when
    the tenant has too many.
    """
    fields = {
        "url": _checked_url(url),
        "event_types": _checked_types(event_types),
        "description": _checked_description(description),
    }
    secret = signing.new_secret()
    with transaction.atomic():
        lock_until_commit(f"webhooks {current_tenant_id()}")
        if WebhookEndpoint.objects.count() >= MAX_ENDPOINTS:
            raise Conflict(f"A tenant can have at most {MAX_ENDPOINTS} webhooks: delete one first.")
        endpoint = WebhookEndpoint.objects.create(**fields, sealed_secret=signing.seal(secret))
        record("created", endpoint, after=fields)
    return endpoint, secret


def webhook_get(*, webhook_id: uuid.UUID) -> WebhookEndpoint:
    """Return the webhook. Raises NotFound."""
    found = WebhookEndpoint.objects.filter(pk=webhook_id).first()
    return require(found, "There is no such webhook.")


def webhook_update(*, webhook_id: uuid.UUID, changes: dict[str, Any]) -> WebhookEndpoint:
    """Change url, event_types, description or is_enabled.

    Disabling cancels waiting deliveries; they can be redelivered by hand.
    Raises NotFound, InvalidRequest.
    """
    if "url" in changes:
        changes["url"] = _checked_url(changes["url"])
    if "event_types" in changes:
        changes["event_types"] = _checked_types(changes["event_types"])
    if "description" in changes:
        changes["description"] = _checked_description(changes["description"])
    with transaction.atomic():
        endpoint = _locked(webhook_id)
        before = {name: getattr(endpoint, name) for name in changes}
        if before == changes:
            return endpoint
        if changes.get("url", endpoint.url) != endpoint.url:
            endpoint.failing_since = None  # the failures were another server's
        for name, value in changes.items():
            setattr(endpoint, name, value)
        if "is_enabled" in changes:
            endpoint.failing_since, endpoint.disabled_reason = None, ""
            if not endpoint.is_enabled:
                pending_cancel(endpoint)
        endpoint.save()
        record("changed", endpoint, before=before, after=changes)
    return endpoint


@transaction.atomic
def webhook_delete(*, webhook_id: uuid.UUID) -> None:
    """Delete a webhook with its deliveries. Raises NotFound."""
    endpoint = _locked(webhook_id)
    record("deleted", endpoint, before={"url": endpoint.url, "event_types": endpoint.event_types})
    endpoint.delete()


@transaction.atomic
def webhook_rotate(
    *, webhook_id: uuid.UUID, overlap: dt.timedelta = DEFAULT_OVERLAP
) -> tuple[WebhookEndpoint, str]:
    """Replace the secret; for `overlap` each event is signed with both. -> the new secret, too.

    Raises NotFound, InvalidRequest for another overlap.
    """
    if not dt.timedelta() <= overlap <= MAX_OVERLAP:
        raise InvalidRequest(
            f"An overlap must have 0 to {int(MAX_OVERLAP.total_seconds())} seconds.",
            param="overlap_s",
        )
    endpoint = _locked(webhook_id)
    secret = signing.new_secret()
    endpoint.old_sealed_secret = endpoint.sealed_secret if overlap else None
    endpoint.old_secret_until = timezone.now() + overlap if overlap else None
    endpoint.sealed_secret = signing.seal(secret)
    endpoint.save(update_fields=["old_sealed_secret", "old_secret_until", "sealed_secret"])
    record("rotated", endpoint, after={"overlap_s": overlap.total_seconds()})
    return endpoint, secret


@transaction.atomic
def webhook_test(*, webhook_id: uuid.UUID) -> WebhookDelivery:
    """Send the event `webhook.test` to this webhook alone. Raises NotFound, Conflict."""
    endpoint = _locked(webhook_id)
    if not endpoint.is_enabled:
        raise Conflict("The webhook is disabled: enable it first.")
    waiting = endpoint.deliveries.filter(status=Status.PENDING, event__type=EventType.WEBHOOK_TEST)
    if found := waiting.first():
        return found
    event = publish(EventType.WEBHOOK_TEST, webhook=str(endpoint.pk))
    event.fanned_out_at = timezone.now()
    event.save(update_fields=["fanned_out_at"])
    return WebhookDelivery.objects.create(
        endpoint=endpoint, event=event, next_attempt_at=timezone.now()
    )


@transaction.atomic
def delivery_redeliver(*, webhook_id: uuid.UUID, delivery_id: uuid.UUID) -> WebhookDelivery:
    """Deliver an event again, with the same id; a pending one at once.

    Raises NotFound, Conflict when the webhook is disabled.
    """
    endpoint = _locked(webhook_id)
    delivery = endpoint.deliveries.filter(pk=delivery_id).first()
    delivery = require(delivery, "There is no such delivery.")
    if not endpoint.is_enabled:
        raise Conflict("The webhook is disabled: enable it first.")
    delivery.status, delivery.attempts = Status.PENDING, 0
    delivery.next_attempt_at = timezone.now()
    delivery.save(update_fields=["status", "attempts", "next_attempt_at"])
    record("redelivered", delivery, after={"event": delivery.event.public_id})
    transaction.on_commit(tasks.wake)
    return delivery


def pending_cancel(endpoint: WebhookEndpoint) -> None:
    """Cancel the waiting deliveries of a disabled webhook."""
    waiting = endpoint.deliveries.filter(status=Status.PENDING)
    waiting.update(status=Status.CANCELLED, next_attempt_at=None)


def _locked(webhook_id: uuid.UUID) -> WebhookEndpoint:
    found = WebhookEndpoint.objects.select_for_update().filter(pk=webhook_id).first()
    return require(found, "There is no such webhook.")


def _checked_url(url: str) -> str:
    if not connection.in_atomic_block:
        connection.close()  # others need it while a name server takes seconds
    try:
        return outbound.check(url).url
    except Refused as error:
        raise InvalidRequest(str(error), param="url", code="address_refused") from error


def _checked_types(event_types: Sequence[str]) -> list[str]:
    unknown = [name for name in event_types if name not in CHOOSABLE]
    if unknown or not event_types:
        raise InvalidRequest(
            f"Choose some of: {', '.join(CHOOSABLE)}.", param="event_types", code="unknown_event"
        )
    return [type.value for type in CHOOSABLE if type in event_types]


def _checked_description(text: str) -> str:
    if len(text) > MAX_DESCRIPTION_CHARS:
        raise InvalidRequest(
            f"A description can have at most {MAX_DESCRIPTION_CHARS} characters.",
            param="description",
        )
    return text
