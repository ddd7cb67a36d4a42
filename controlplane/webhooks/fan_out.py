"""Make each event's deliveries and mails, once."""

from __future__ import annotations

import datetime as dt
import logging

from django.db import OperationalError, transaction
from django.db.models import Window
from django.db.models.functions import RowNumber
from django.utils import timezone

from controlplane.events.outbox.models import OutboxEvent
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.webhooks import mails
from controlplane.webhooks.models import WebhookDelivery, WebhookEndpoint

log = logging.getLogger(__name__)

#: Most deliveries that wait for a webhook; it does not get later events.
MAX_PENDING = 1000
#: Time for which events, their deliveries and mails are kept.
KEPT = dt.timedelta(days=30)
_EVENTS = 200
_OF_TENANT = 20
_ROWS = 1000


def events_fan_out() -> int:
    """Handle new events of all tenants, oldest first, some of each tenant. -> their number."""
    place = Window(RowNumber(), partition_by="tenant_id", order_by=("created_at", "pk"))
    with all_tenants(reason="find new events of all tenants"):
        waiting = OutboxEvent.objects.filter(fanned_out_at=None).annotate(place=place)
        some = waiting.filter(place__lte=_OF_TENANT).order_by("created_at", "pk")
        found = list(some[:_EVENTS])
    handled = 0
    for event in found:
        try:
            with tenant_scope(event.tenant_id):
                _fan_out(event)
        except OperationalError:
            raise  # the database is away
        except Exception:  # such as a type of a newer release; others do not wait
            log.exception("an event is left", extra={"event_id": event.public_id})
            continue
        handled += 1
    return handled


@transaction.atomic
def _fan_out(event: OutboxEvent) -> None:
    now = timezone.now()
    mine = OutboxEvent.objects.filter(pk=event.pk, fanned_out_at=None)
    if not mine.update(fanned_out_at=now):
        return  # another process was faster
    wanted = {"is_enabled": True, "event_types__contains": [event.type]}
    # Locked against disabling, in one order, so that two of these cannot deadlock.
    for endpoint in WebhookEndpoint.objects.filter(**wanted).order_by("pk").select_for_update():
        pending = endpoint.deliveries.filter(status=WebhookDelivery.Status.PENDING).count()
        if pending >= MAX_PENDING:
            log.warning(
                "an event is not for a webhook that is full", extra=_fields(event, endpoint)
            )
            continue
        WebhookDelivery.objects.create(endpoint=endpoint, event=event, next_attempt_at=now)
    mails.mails_make(event, now)


def _fields(event: OutboxEvent, endpoint: WebhookEndpoint) -> dict[str, str]:
    return {"event_id": event.public_id, "webhook_id": str(endpoint.pk)}


def events_forget() -> int:
    """Delete old events of all tenants, with their deliveries and mails. -> the number of rows."""
    deleted = 0
    with all_tenants(reason="old events of all tenants are deleted"):
        old = OutboxEvent.objects.filter(created_at__lt=timezone.now() - KEPT)
        while keys := list(old.values_list("pk", flat=True)[:_ROWS]):
            deleted += OutboxEvent.objects.filter(pk__in=keys).delete()[0]
    return deleted
