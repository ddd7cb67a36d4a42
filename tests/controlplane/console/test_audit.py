"""The audit trail in the console."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
from django.db import connection
from django.test import Client

from controlplane.console.views.account import audit
from controlplane.events.audit.models import AuditEvent
from controlplane.tenancy.database.ownership import as_owner
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.services import api_key_create, tenant_update
from tests.controlplane.conftest import Party, make_party
from tests.controlplane.console.conftest import browser_of


def numbers(browser: Client, query: str = "") -> list[int]:
    page = browser.get(f"/console/audit{query}").content.decode()
    return [int(seq) for seq in re.findall(r'<tr><td class="number">(\d+)</td>', page)]


def test_filters(acme: Party, globex: Party) -> None:
    browser = browser_of(acme.owner)
    with tenant_scope(acme.tenant.id):
        first = AuditEvent.objects.order_by("seq").first()
        last = AuditEvent.objects.order_by("seq").last()
    assert first is not None and last is not None
    assert numbers(browser)[0] == last.seq
    assert numbers(browser, "?action=api_key.") == [last.seq]
    assert numbers(browser, f"?resource_id={acme.api_key.pk}") == [last.seq]
    assert numbers(browser, f"?resource_id={globex.api_key.pk}") == []
    assert numbers(browser, f"?since={first.occurred_at:%Y-%m-%d}")[-1] == first.seq
    assert numbers(browser, "?until=2001-01-01") == []
    assert numbers(browser, "?until=9999-12-31")[-1] == first.seq
    assert numbers(browser, "?actor=nobody-of-this-name") == []
    assert browser.get("/console/audit?since=soon").status_code == 200
    assert browser.get("/console/audit?before=²&action=%00").status_code == 200


def test_tasks_and_commands_are_told_as_the_platform(acme: Party) -> None:
    names = ("task controlplane.training.tasks.schedules_fire", "__main__.py -A")
    for name in names:
        with (
            tenant_scope(acme.tenant.id),
            patch("controlplane.events.audit.origin._program", return_value=name),
        ):
            api_key_create(name="made by itself")
    browser = browser_of(acme.owner)
    page = browser.get("/console/audit").content.decode()
    who = re.findall(r'<td class="wrap">(.*?)</td>', page.replace("<wbr>", ""), re.DOTALL)[::2]
    assert "the platform" in who[0]
    assert not any(word in each for each in who for word in ("task", "__main__", ".py"))
    assert names[0] in page.replace("<wbr>", "")  # among the details
    with tenant_scope(acme.tenant.id):
        rows = AuditEvent.objects.filter(actor_type="system").order_by("-seq")
        system = list(rows.values_list("seq", flat=True))
    assert numbers(browser, "?actor=The+platform") == system


def test_pages(acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "PAGE", 2)
    with tenant_scope(acme.tenant.id):
        for number in range(4):
            api_key_create(name=f"key {number}")
    browser, query, seen = browser_of(acme.owner), "?action=api_key", []
    while query:
        page = browser.get(f"/console/audit{query}").content.decode()
        seen += numbers(browser, query)
        older = re.search(r'href="(\?[^"]+)">Older', page)
        query = older[1].replace("&amp;", "&") if older else ""
        assert not query or "action=api_key" in query
    assert len(seen) == 5
    assert seen == sorted(seen, reverse=True)


def test_a_sound_chain_is_said_to_hold(acme: Party) -> None:
    page = browser_of(acme.owner).post("/console/audit/verify").content.decode()
    with tenant_scope(acme.tenant.id):
        last = AuditEvent.objects.order_by("seq").last()
    assert last is not None
    assert "The chain is intact" in page
    assert last.hash in page


@pytest.mark.django_db(transaction=True)
def test_a_forged_chain_is_said_to_be_broken() -> None:
    acme = make_party("acme")
    with tenant_scope(acme.tenant.id):
        tenant_update(tenant=acme.tenant, name="Acme Ltd")
    with as_owner(connection), connection.cursor() as cursor:
        cursor.execute("alter table audit_auditevent disable trigger user")
        cursor.execute("select set_config('lorikeet.tenant', %s, false)", (str(acme.tenant.id),))
        cursor.execute("update audit_auditevent set actor_name = 'somebody else' where seq = 2")
        assert cursor.rowcount == 1
        cursor.execute("alter table audit_auditevent enable trigger user")
    page = browser_of(acme.owner).post("/console/audit/verify").content.decode()
    assert "The chain was changed" in page
    assert "Event 2 was changed" in page
