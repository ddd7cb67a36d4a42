"""A process that was asleep, and tenants that are suspended."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from controlplane.events.outbox.models import EventType, OutboxEvent
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.webhooks import delivery, fan_out, mails
from controlplane.webhooks.delivery import Outcome
from controlplane.webhooks.models import WebhookDelivery, WebhookEndpoint
from tests.controlplane.conftest import Party
from tests.controlplane.webhooks.conftest import Hook, happen

Status = WebhookDelivery.Status


@pytest.mark.parametrize(("status", "after"), [(500, Status.PENDING), (200, Status.SUCCEEDED)])
def test_who_slept_leaves_anothers_lease(acme: Party, hook: Hook, status: int, after: str) -> None:
    happen(acme)
    fan_out.events_fan_out()
    (asleep,) = delivery._claim([])
    with tenant_scope(acme.tenant.id):
        past = timezone.now() - dt.timedelta(seconds=1)
        WebhookEndpoint.objects.update(lease_until=past)
        WebhookDelivery.objects.update(next_attempt_at=past)
        (other,) = delivery._claim([])
        delivery._conclude(asleep, Outcome(status, "" if status == 200 else "x", 70_000))
        assert WebhookEndpoint.objects.get().lease_until == other.lease_until
        assert delivery._claim([]) == [], "the other one still calls it"
        row = WebhookDelivery.objects.get()
        assert (row.status, row.attempts) == (after, 2)
        delivery._conclude(other, Outcome(200, "", 5))
        assert WebhookEndpoint.objects.get().lease_until is None
        assert WebhookDelivery.objects.get().status == Status.SUCCEEDED


def test_members_of_a_suspended_tenant_get_no_mail(acme: Party, mailoutbox: list[Any]) -> None:
    with tenant_scope(acme.tenant.id):
        OutboxEvent.objects.create(type=EventType.VERSION_REJECTED, data={})
        fan_out.events_fan_out()
    rows = Tenant.objects.filter(pk=acme.tenant.pk)
    rows.update(status=Tenant.Status.SUSPENDED)
    assert (mails.mails_send(), mailoutbox) == (0, [])
    rows.update(status=Tenant.Status.ACTIVE)
    assert mails.mails_send() == len(mailoutbox) > 0
