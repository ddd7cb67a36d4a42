"""A webhook of acme's at a real server on this machine."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.events.outbox.models import CHOOSABLE, EventType, OutboxEvent
from controlplane.infra.outbound.outbound_policy import OutboundPolicy
from controlplane.tenancy.scoping import tenant_scope
from controlplane.webhooks import delivery, fan_out, services
from controlplane.webhooks.models import WebhookDelivery, WebhookEndpoint
from tests.controlplane.conftest import Party
from tests.receiver import Received, Receiver, receiving


@pytest.fixture(autouse=True)
def _local_receivers(settings: Any) -> None:
    settings.OUTBOUND = OutboundPolicy(
        hosts=frozenset({"127.0.0.1"}), allowed=(ipaddress.ip_network("127.0.0.0/8"),)
    )


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@dataclasses.dataclass
class Hook:
    receiver: Receiver
    endpoint: WebhookEndpoint
    secret: str

    @property
    def received(self) -> list[Received]:
        return self.receiver.received

    def deliveries(self) -> list[WebhookDelivery]:
        with tenant_scope(self.endpoint.tenant_id):
            rows = WebhookDelivery.objects.filter(endpoint=self.endpoint)
            return list(rows.select_related("event").order_by("pk"))

    def refresh(self) -> WebhookEndpoint:
        with tenant_scope(self.endpoint.tenant_id):
            self.endpoint.refresh_from_db()
        return self.endpoint


def url_of(receiver: Receiver, path: str = "/hook") -> str:
    return f"http://127.0.0.1:{receiver.port}{path}"


def make_hook(party: Party, receiver: Receiver, path: str = "/hook") -> Hook:
    with tenant_scope(party.tenant.id):
        endpoint, secret = services.webhook_create(
            url=url_of(receiver, path), event_types=[type.value for type in CHOOSABLE]
        )
    return Hook(receiver, endpoint, secret)


@pytest.fixture
def hook(acme: Party, receiver: Receiver) -> Hook:
    return make_hook(acme, receiver)


def happen(party: Party, number: int = 1) -> list[OutboxEvent]:
    """Events of the party, as services store them."""
    with tenant_scope(party.tenant.id):
        return [
            OutboxEvent.objects.create(type=EventType.VERSION_READY, data={"version": version})
            for version in range(1, number + 1)
        ]


def turn(for_s: float = 5.0) -> None:
    fan_out.events_fan_out()
    delivery.deliver_due(for_s)
