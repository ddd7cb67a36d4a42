"""Events reach real servers: signed, repeated, and fair between tenants."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import threading
import time
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone
from openai import OpenAI

from controlplane.events.audit.models import AuditEvent
from controlplane.events.outbox.models import EventType, OutboxEvent
from controlplane.infra.outbound.outbound_policy import OutboundPolicy
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.webhooks import delivery, fan_out, services, tasks
from controlplane.webhooks.models import EventMail, WebhookDelivery, WebhookEndpoint
from tests.conftest import ROOT
from tests.controlplane.conftest import Party
from tests.controlplane.webhooks.conftest import Hook, happen, make_hook, turn
from tests.receiver import Received, Receiver, answer, receiving

Status = WebhookDelivery.Status


def documented() -> Any:
    """The example of docs/webhooks.md that verifies a signature."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/webhooks.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    return names["is_from_lorikeet"]


def verify(sent: Received, secret: str) -> bool:
    """As the OpenAI SDK, which knows Standard Webhooks, and as our documentation says."""
    try:
        OpenAI(api_key="x").webhooks.verify_signature(sent.body, sent.headers, secret=secret)
        by_sdk = True
    except ValueError:
        by_sdk = False
    assert documented()(sent.headers, sent.body, secret) == by_sdk
    return by_sdk


def let_time_pass(hook: Hook, **changes: Any) -> None:
    """Make what is to be repeated due now."""
    with tenant_scope(hook.endpoint.tenant_id):
        pending = WebhookDelivery.objects.filter(endpoint=hook.endpoint, status=Status.PENDING)
        pending.update(next_attempt_at=timezone.now(), **changes)


def test_an_event_arrives_signed(acme: Party, hook: Hook) -> None:
    (event,) = happen(acme)
    turn()
    (sent,) = hook.received
    assert (sent.method, sent.path) == ("POST", "/hook")
    assert sent.headers["content-type"] == "application/json"
    assert sent.headers["webhook-id"] == event.public_id
    body = json.loads(sent.body)
    assert body.pop("timestamp").endswith("Z")
    assert body == {
        "id": event.public_id,
        "object": "event",
        "type": "version.ready",
        "created_at": int(event.created_at.timestamp()),
        "data": {"version": 1},
    }
    assert verify(sent, hook.secret)
    assert not verify(dataclasses.replace(sent, body=sent.body + b" "), hook.secret)
    old = {**sent.headers, "webhook-timestamp": "1700000000"}
    assert not verify(dataclasses.replace(sent, headers=old), hook.secret)
    (row,) = hook.deliveries()
    assert (row.status, row.attempts, row.response_status) == (Status.SUCCEEDED, 1, 200)
    assert row.took_ms is not None and row.next_attempt_at is None
    turn()
    assert len(hook.received) == 1


def test_only_chosen_events_of_the_own_tenant_arrive(
    acme: Party, globex: Party, hook: Hook
) -> None:
    chosen = {"event_types": ["version.promoted"]}
    with tenant_scope(acme.tenant.id):
        services.webhook_update(webhook_id=hook.endpoint.pk, changes=chosen)
    happen(acme)
    with tenant_scope(globex.tenant.id):
        OutboxEvent.objects.create(type=EventType.VERSION_PROMOTED)
    turn()
    assert hook.received == []


def test_while_a_secret_is_replaced_both_sign(acme: Party, hook: Hook) -> None:
    with tenant_scope(acme.tenant.id):
        _, second = services.webhook_rotate(webhook_id=hook.endpoint.pk)
    happen(acme)
    turn()
    assert verify(hook.received[0], hook.secret) and verify(hook.received[0], second)
    over = timezone.now() - dt.timedelta(seconds=1)
    with tenant_scope(acme.tenant.id):
        WebhookEndpoint.objects.update(old_secret_until=over)
    happen(acme)
    turn()
    assert verify(hook.received[1], second) and not verify(hook.received[1], hook.secret)
    with tenant_scope(acme.tenant.id):
        _, third = services.webhook_rotate(webhook_id=hook.endpoint.pk, overlap=dt.timedelta())
    happen(acme)
    turn()
    assert verify(hook.received[2], third) and not verify(hook.received[2], second)


def test_a_failure_is_repeated_later_and_later_with_the_same_id(acme: Party, hook: Hook) -> None:
    hook.receiver.behave = answer(500)
    happen(acme)
    turn()
    for number, pause_s in enumerate(delivery.RETRIES_S, 1):
        (row,) = hook.deliveries()
        assert (row.status, row.attempts, row.response_status) == (Status.PENDING, number, 500)
        assert row.next_attempt_at is not None and row.attempted_at is not None
        waits_s = (row.next_attempt_at - row.attempted_at).total_seconds()
        assert 0.8 * pause_s <= waits_s <= 1.2 * pause_s
        turn()
        assert len(hook.received) == number  # not before its time
        let_time_pass(hook)
        turn()
    assert len(hook.received) == delivery.MAX_ATTEMPTS == 9
    assert 24 * 3600 < sum(delivery.RETRIES_S) < 3 * 24 * 3600
    (row,) = hook.deliveries()
    assert (row.status, row.next_attempt_at, row.error) == (Status.FAILED, None, "It answered 500.")
    assert {sent.headers["webhook-id"] for sent in hook.received} == {row.event.public_id}
    assert len({sent.body for sent in hook.received}) == 1
    assert hook.refresh().is_enabled and hook.endpoint.failing_since  # only for seconds


@pytest.mark.parametrize(
    ("behave", "error"),
    [
        (answer(301, b"", {"Location": "/elsewhere"}), "It answered 301."),
        (lambda handler: handler.connection.close(), "The connection failed."),
    ],
)
def test_what_counts_as_a_failure(acme: Party, hook: Hook, behave: Any, error: str) -> None:
    hook.receiver.behave = behave
    happen(acme)
    turn()
    (row,) = hook.deliveries()
    assert (row.status, row.error, len(hook.received)) == (Status.PENDING, error, 1)
    hook.receiver.behave = answer(204)
    let_time_pass(hook)
    turn()
    assert hook.deliveries()[0].status == Status.SUCCEEDED
    assert hook.refresh().failing_since is None


def test_an_address_that_moves_inside_is_not_called(acme: Party, hook: Hook, settings: Any) -> None:
    happen(acme)
    settings.OUTBOUND = OutboundPolicy(hosts=frozenset({"127.0.0.1"}))
    turn()
    (row,) = hook.deliveries()
    assert (row.status, row.error) == (Status.PENDING, "The host has no public address.")
    assert hook.received == []


def exhaust(party: Party, hook: Hook) -> None:
    happen(party)
    turn()
    let_time_pass(hook, attempts=delivery.MAX_ATTEMPTS - 1)
    turn()


def test_after_days_of_failure_it_is_disabled_and_the_owners_hear(acme: Party, hook: Hook) -> None:
    hook.receiver.behave = answer(503)
    exhaust(acme, hook)
    assert hook.refresh().is_enabled
    since = timezone.now() - delivery.DISABLED_AFTER
    with tenant_scope(acme.tenant.id):
        WebhookEndpoint.objects.update(failing_since=since)
    waits = happen(acme)
    exhaust(acme, hook)
    assert not hook.refresh().is_enabled and "failed for 2 days" in hook.endpoint.disabled_reason
    states = {row.status for row in hook.deliveries()}
    assert waits and states <= {Status.FAILED, Status.CANCELLED}
    fan_out.events_fan_out()
    with tenant_scope(acme.tenant.id):
        mails = EventMail.objects.filter(event__type=EventType.WEBHOOK_DISABLED)
        assert [mail.user for mail in mails.select_related("user")] == [acme.owner]
        assert AuditEvent.objects.filter(action="webhook_endpoint.disabled").count() == 1
    called = len(hook.received)
    happen(acme)
    turn()
    assert len(hook.received) == called
    with tenant_scope(acme.tenant.id):
        services.webhook_update(webhook_id=hook.endpoint.pk, changes={"is_enabled": True})
        missed = (
            WebhookDelivery.objects.filter(status=Status.FAILED).select_related("event").first()
        )
        assert missed is not None
        services.delivery_redeliver(webhook_id=hook.endpoint.pk, delivery_id=missed.pk)
    hook.receiver.behave = answer(200)
    turn()
    assert hook.received[-1].headers["webhook-id"] == missed.event.public_id


def test_another_address_begins_anew(acme: Party, hook: Hook) -> None:
    hook.receiver.behave = answer(503)
    happen(acme)
    turn()
    assert hook.refresh().failing_since
    url = hook.endpoint.url
    with tenant_scope(acme.tenant.id):
        services.webhook_update(webhook_id=hook.endpoint.pk, changes={"url": url})
        assert hook.refresh().failing_since
        services.webhook_update(webhook_id=hook.endpoint.pk, changes={"url": f"{url}/2"})
    assert hook.refresh().failing_since is None


def test_gone_for_good_disables_at_once(acme: Party, hook: Hook) -> None:
    hook.receiver.behave = answer(410)
    happen(acme, 3)
    turn()
    assert not hook.refresh().is_enabled and len(hook.received) == 1
    assert {row.status for row in hook.deliveries()} == {Status.CANCELLED}


def test_a_process_that_dies_loses_no_event(acme: Party, hook: Hook) -> None:
    happen(acme)
    fan_out.events_fan_out()
    assert len(delivery._claim([])) == 1  # and it dies
    assert delivery._claim([]) == []  # another one leaves the webhook alone meanwhile
    let_time_pass(hook)
    turn()
    assert hook.received == []
    with tenant_scope(acme.tenant.id):
        WebhookEndpoint.objects.update(lease_until=timezone.now() - dt.timedelta(seconds=1))
    turn()
    (row,) = hook.deliveries()
    assert (row.status, row.attempts, len(hook.received)) == (Status.SUCCEEDED, 2, 1)


class Slow:
    """Answers after `pause_s`, and notes how many calls it has at a time."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s, self.now, self.most = pause_s, 0, 0
        self.ended_at: list[float] = []
        self._lock = threading.Lock()

    def __call__(self, handler: Any) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.pause_s)
        with self._lock:
            self.now -= 1
            self.ended_at.append(time.monotonic())
        answer(200)(handler)


def test_a_slow_webhook_delays_nobody_else(acme: Party, globex: Party, receiver: Receiver) -> None:
    slow = Slow(0.6)
    with receiving() as theirs:
        theirs.behave = slow
        for number in range(4):
            make_hook(globex, theirs, f"/{number}")
        happen(globex, 5)  # 20 deliveries, of which two are made at a time
        hook = make_hook(acme, receiver)
        happen(acme, 5)
        arrived: list[float] = []
        receiver.behave = lambda handler: arrived.append(time.monotonic()) or answer(200)(handler)
        fan_out.events_fan_out()
        began_at = time.monotonic()
        assert delivery.deliver_due(0.9)  # there is more to do
    assert len(hook.received) == 5
    assert slow.most == delivery.MAX_OF_TENANT
    # The first of acme's does not wait for any of globex's.
    assert arrived[0] < min(slow.ended_at)
    assert time.monotonic() - began_at < 5  # what had begun is waited for, and nothing else
    assert len(theirs.received) < 20


@pytest.mark.django_db(transaction=True)
def test_an_event_does_not_wait_for_others_last_calls(
    acme: Party, globex: Party, hook: Hook
) -> None:
    """It comes while the turn waits for the slow call with which it ends."""
    came: list[int] = []

    def slow(handler: Any) -> None:
        happen(acme)
        connection.close()  # of this thread
        for _ in range(50):
            if hook.received:
                break
            time.sleep(0.05)
        came.append(len(hook.received))
        answer(200)(handler)

    with receiving() as theirs:
        theirs.behave = slow
        make_hook(globex, theirs)
        happen(globex, 2)
        assert tasks.turn(0.1)  # globex's second one begins no more
    assert came == [1]


def test_an_event_that_cannot_be_handled_holds_up_no_other(
    acme: Party, globex: Party, hook: Hook
) -> None:
    with tenant_scope(globex.tenant.id):
        OutboxEvent.objects.create(type="of.tomorrow")
    happen(acme)
    assert (fan_out.events_fan_out(), fan_out.events_fan_out()) == (1, 0)
    assert len(hook.deliveries()) == 1


def test_one_webhook_is_called_once_at_a_time(acme: Party, hook: Hook) -> None:
    slow = hook.receiver.behave = Slow(0.05)
    happen(acme, 6)
    turn()
    assert (len(hook.received), slow.most) == (6, 1)
    versions = [json.loads(sent.body)["data"]["version"] for sent in hook.received]
    assert versions == [1, 2, 3, 4, 5, 6]


def test_events_are_fanned_out_once_and_a_full_webhook_gets_no_more(
    acme: Party, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "MAX_PENDING", 2)
    happen(acme, 5)
    assert (fan_out.events_fan_out(), fan_out.events_fan_out()) == (5, 0)
    assert len(hook.deliveries()) == 2


def test_a_tenant_with_many_events_delays_no_other(
    acme: Party, globex: Party, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "_OF_TENANT", 3)
    happen(globex, 9)
    happen(acme)
    assert fan_out.events_fan_out() == 4
    assert len(hook.deliveries()) == 1


def test_old_events_are_forgotten_with_their_deliveries(acme: Party, hook: Hook) -> None:
    old, _ = happen(acme, 2)
    turn()
    with tenant_scope(acme.tenant.id):
        past = timezone.now() - fan_out.KEPT - dt.timedelta(hours=1)
        OutboxEvent.objects.filter(pk=old.pk).update(created_at=past)
    fan_out.events_forget()
    assert len(hook.deliveries()) == 1
    with all_tenants(reason="test"):
        assert OutboxEvent.objects.count() == 1
