"""Read the numbers of events, deliveries and failing webhooks, for the metrics."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Count, Q
from django.utils import timezone
from prometheus_client.core import Metric

from controlplane.events.outbox.models import OutboxEvent
from controlplane.infra.metrics import gauge
from controlplane.tenancy.scoping import all_tenants
from controlplane.webhooks.models import WebhookDelivery, WebhookEndpoint


def webhooks() -> Iterable[Metric]:
    """Return the numbers of waiting events and deliveries, and of failing webhooks."""
    with all_tenants(reason="webhooks of all tenants are counted"):
        new = OutboxEvent.objects.filter(fanned_out_at=None).count()
        pending = WebhookDelivery.objects.filter(status=WebhookDelivery.Status.PENDING)
        waiting = pending.aggregate(
            due=Count("pk", filter=Q(next_attempt_at__lte=timezone.now())), all=Count("pk")
        )
        failing = WebhookEndpoint.objects.filter(is_enabled=True).exclude(failing_since=None)
        failing_count = failing.count()
    yield gauge(
        "lorikeet_webhook_deliveries",
        "Deliveries that wait: due ones, and repetitions of failed ones.",
        [(("due",), waiting["due"]), (("later",), waiting["all"] - waiting["due"])],
        "state",
    )
    yield gauge("lorikeet_outbox_events", "Events without deliveries yet.", [((), new)])
    yield gauge(
        "lorikeet_webhooks_failing", "Webhooks whose last call failed.", [((), failing_count)]
    )
