"""Mails about events: who gets which, and how many."""

from __future__ import annotations

import datetime as dt
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import timezone

from controlplane.events.outbox.models import CHOOSABLE, EventType, OutboxEvent
from controlplane.infra.redis_client import redis_client
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Membership, Role
from controlplane.tenants.services import member_add
from controlplane.webhooks import fan_out, mails, tasks
from controlplane.webhooks.models import EventMail
from tests.controlplane.conftest import PASSWORD, Party
from tests.controlplane.console.conftest import browser_of


@pytest.fixture
def inside(acme: Party) -> Iterator[Party]:
    with tenant_scope(acme.tenant.id):
        for role in (Role.ADMIN, Role.DEVELOPER, Role.BILLING):
            member_add(email=f"{role}@acme.example", role=role, password=PASSWORD)
        yield acme


def tell(type: EventType, **data: Any) -> None:
    OutboxEvent.objects.create(type=type, data=data)
    fan_out.events_fan_out()


def receivers(mailoutbox: list[Any]) -> set[str]:
    mails.mails_send()
    found = {to.partition("@")[0] for mail in mailoutbox for to in mail.to}
    assert all(len(mail.to) == 1 for mail in mailoutbox)  # nobody sees the others
    mailoutbox.clear()
    return found


def test_who_gets_which_without_a_choice(inside: Party, mailoutbox: list[Any]) -> None:
    most = {"owner", "admin", "developer"}
    wanted = dict.fromkeys(CHOOSABLE, most)
    wanted |= {EventType.VERSION_PROMOTED: set(), EventType.TRAINING_RUN_SUCCEEDED: set()}
    wanted |= {EventType.BUDGET_REACHED: {"owner", "admin", "billing"}}
    wanted |= {EventType.WEBHOOK_DISABLED: {"owner"}, EventType.WEBHOOK_TEST: set()}
    assert set(wanted) == set(EventType)
    for type, people in wanted.items():
        tell(type)
        assert receivers(mailoutbox) == people, type


def test_each_person_chooses_on_a_page(inside: Party, mailoutbox: list[Any]) -> None:
    browser = browser_of(inside.viewer)
    page = browser.get("/console/notifications").content.decode()
    assert "checked" not in page
    browser.post("/console/notifications", {"event_types": ["version.promoted"]})
    assert browser.get("/console/notifications").content.decode().count("checked") == 1
    tell(EventType.VERSION_PROMOTED, adapter="invoices", version=2, reason="")
    assert receivers(mailoutbox) == {"viewer"}
    browser_of(inside.owner).post("/console/notifications", {})  # none at all
    tell(EventType.VERSION_REJECTED)
    assert receivers(mailoutbox) == {"admin", "developer"}
    wrong = browser.post("/console/notifications", {"event_types": ["webhook.test"]})
    assert wrong.status_code == 422


def test_what_a_mail_says(inside: Party, mailoutbox: list[Any], settings: Any) -> None:
    inside.tenant.name = "Acme\r\nBcc: all@example.com"
    inside.tenant.save()
    reasons = [{"field": "r", "message": "<too> large"}]
    tell(EventType.VERSION_REJECTED, adapter="invoices", version=3, reasons=reasons)
    tell(EventType.TRAINING_RUN_FAILED, adapter="invoices", error="row 3: a secret")
    mails.mails_send()
    rejected, failed = mailoutbox[0], mailoutbox[-1]
    assert rejected.subject == (
        "[Lorikeet] Acme Bcc: all@example.com: invoices: a version failed its checks"
    )
    assert rejected.body.startswith("In Acme Bcc: all@example.com: a version failed its checks.\n")
    assert {"adapter: invoices", "version: 3", "reasons: r: <too> large"} <= set(
        rejected.body.splitlines()
    )
    assert f"{settings.BASE_URL}/console/notifications" in rejected.body
    assert "a secret" not in failed.body


def test_a_tenant_gets_so_many_a_day(
    inside: Party, mailoutbox: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mails, "MAX_PER_DAY", 4)
    for _ in range(3):
        tell(EventType.VERSION_READY)
    mails.mails_send()
    assert len(mailoutbox) == 4
    EventMail.objects.update(created_at=timezone.now() - dt.timedelta(days=1, minutes=1))
    tell(EventType.VERSION_READY)
    mails.mails_send()
    assert len(mailoutbox) == 7


def test_a_mail_server_that_is_away_loses_none(
    inside: Party, mailoutbox: list[Any], settings: Any
) -> None:
    working = settings.EMAIL_BACKEND
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", 1
    tell(EventType.VERSION_READY)
    with pytest.raises(mails.ServerAway):
        mails.mails_send()
    settings.EMAIL_BACKEND = working
    assert (mails.mails_send(), mails.mails_send()) == (3, 0)
    assert len(mailoutbox) == 3


def test_who_has_left_gets_none(inside: Party, mailoutbox: list[Any]) -> None:
    Membership.objects.filter(role=Role.ADMIN).delete()
    inside.owner.is_active = False
    inside.owner.save()
    tell(EventType.VERSION_READY)
    assert receivers(mailoutbox) == {"developer"}
    tell(EventType.VERSION_READY)
    Membership.objects.filter(role=Role.DEVELOPER).delete()  # before the mail goes
    assert receivers(mailoutbox) == set()
    assert not EventMail.objects.exclude(next_attempt_at=None).exists()


def test_a_mail_server_that_hangs_is_asked_once_in_a_minute(inside: Party, settings: Any) -> None:
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_TIMEOUT = "127.0.0.1", 0.2
    tell(EventType.VERSION_READY)
    with redis_client() as client, socket.create_server(("127.0.0.1", 0)) as server:
        client.delete(tasks._MAILS_KEY)
        settings.EMAIL_PORT = server.getsockname()[1]
        server.setblocking(False)
        tasks.event_mails_send()
        server.accept()[0].close()
        tasks.event_mails_send()  # each turn of the deliveries starts one
        with pytest.raises(BlockingIOError):
            server.accept()
        client.delete(tasks._MAILS_KEY)
        tasks.event_mails_send()
        server.accept()[0].close()
        client.delete(tasks._MAILS_KEY)


def test_a_mail_that_cannot_be_made_holds_up_no_other(inside: Party, mailoutbox: list[Any]) -> None:
    reasons = [{"unheard": "of"}]
    tell(EventType.VERSION_REJECTED, adapter="a", version=1, reasons=reasons)
    tell(EventType.VERSION_REJECTED, adapter="b", version=2, reasons=[])
    assert mails.mails_send() == len(mailoutbox) == 3
    assert all("b:" in mail.subject for mail in mailoutbox)
