"""The audit trail: complete, without secrets, and not to be changed unnoticed."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import ProgrammingError, connection, transaction

from controlplane.adapters.services import adapter_create, base_model_add
from controlplane.events.audit.models import AuditEvent
from controlplane.events.audit.services import Head, record, verify
from controlplane.tenancy.database.ownership import as_owner
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants import keys, services
from controlplane.tenants.models import ApiKey, Role
from tests.controlplane.conftest import (
    PASSWORD,
    TINY_CONFIG,
    Party,
    as_user,
    make_operator,
    make_party,
)


def trail(party: Party) -> list[AuditEvent]:
    with tenant_scope(party.tenant.id):
        return list(AuditEvent.objects.order_by("seq"))


def actions(party: Party) -> list[str]:
    return [event.action for event in trail(party)]


def test_changes_are_in_the_trail_in_order(acme: Party) -> None:
    assert actions(acme) == [
        "tenant.created",
        *["user.created", "membership.created"] * 2,
        "api_key.created",
    ]
    assert [event.seq for event in trail(acme)] == [1, 2, 3, 4, 5, 6]


def test_a_change_says_who_from_where_and_what(acme: Party) -> None:
    answer = as_user(acme.owner).post(
        "/api/v1/keys", {"name": "ci"}, format="json", headers={"X-Request-Id": "trace-1"}
    )
    assert answer.status_code == 201
    event = trail(acme)[-1]
    assert (event.action, event.resource_type) == ("api_key.created", "api_key")
    assert event.resource_id == answer.json()["id"]
    assert event.before is None and event.after["name"] == "ci"
    assert (event.actor_type, event.actor_id) == ("user", str(acme.owner.pk))
    assert (event.actor_name, event.ip) == (acme.owner.email, "127.0.0.1")
    assert event.request_id == "trace-1"


def test_before_and_after_of_a_role(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        services.member_add(email=acme.viewer.email, role=Role.ADMIN)
        services.member_add(email=acme.viewer.email, role=Role.ADMIN)  # changes nothing
    *_, created, changed = trail(acme)
    assert (created.action, changed.action) == ("api_key.created", "membership.changed")
    assert changed.before == {"role": "viewer"}
    assert changed.after == {"user": acme.viewer.email, "role": "admin"}


def test_what_is_no_tenants_is_in_the_platforms_trail(acme: Party) -> None:
    base_model_add(name="tiny", revision="0" * 64, config=TINY_CONFIG)
    with all_tenants(reason="test"):
        (event,) = AuditEvent.objects.filter(tenant_id__isnull=True)
    assert (event.action, event.actor_type) == ("base_model.created", "system")
    assert "base_model.created" not in actions(acme)
    assert verify(None) == (Head(1, event.hash), [])


def test_a_tenant_sees_its_own_trail_only(acme: Party, globex: Party) -> None:
    assert {event.tenant_id for event in trail(globex)} == {globex.tenant.id}


def test_no_secret_is_in_the_trail(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        services.user_password_set(user=acme.owner, password="another long passphrase")
    with all_tenants(reason="test"), connection.cursor() as cursor:
        cursor.execute("select row_to_json(e)::text from audit_auditevent e")
        text = " ".join(row[0] for row in cursor.fetchall())
    parts = keys.parse(acme.key_text)
    assert parts is not None and parts.public_id in text
    assert bytes(acme.api_key.secret_hmac).hex() not in text
    for secret in (acme.key_text, parts.secret, PASSWORD, "another long passphrase"):
        assert secret not in text


@pytest.mark.parametrize("name", ["secret", "password", "secret_hmac", "token_hash", "Token"])
def test_a_field_that_may_hold_a_secret_is_refused(acme: Party, name: str) -> None:
    with pytest.raises(ValueError, match="secret"):
        record("changed", acme.api_key, after={"nested": {name: "x"}})


def test_a_change_that_is_undone_leaves_nothing(acme: Party) -> None:
    before = actions(acme)
    with tenant_scope(acme.tenant.id), pytest.raises(RuntimeError), transaction.atomic():
        services.api_key_create(name="undone")
        raise RuntimeError
    assert actions(acme) == before
    assert verify(acme.tenant.id)[1] == []


@pytest.mark.django_db(transaction=True)
def test_an_event_needs_the_transaction_of_its_change() -> None:
    acme = make_party("acme")
    with pytest.raises(transaction.TransactionManagementError):
        record("changed", acme.api_key)


CHANGES = (
    "update audit_auditevent set action = 'x'",
    "delete from audit_auditevent",
    "truncate audit_auditevent",
)


@pytest.mark.parametrize("statement", CHANGES)
def test_the_application_may_only_add(acme: Party, statement: str) -> None:
    with (
        all_tenants(reason="test"),
        pytest.raises(ProgrammingError, match="permission denied"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("statement", CHANGES)
def test_not_even_the_owner_may_change_it(statement: str) -> None:
    acme = make_party("acme")
    with (
        as_owner(connection),
        tenant_scope(acme.tenant.id),
        pytest.raises(ProgrammingError, match="append-only"),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)


@contextlib.contextmanager
def forger() -> Iterator[Callable[[str], Any]]:
    """Whoever owns the tables can switch the triggers off: the chain must show what they did."""
    with as_owner(connection), all_tenants(reason="test"), connection.cursor() as cursor:
        cursor.execute("alter table audit_auditevent disable trigger user")
        cursor.execute("grant update, delete on audit_auditevent to lorikeet_operator")
        yield cursor.execute
        cursor.execute("revoke update, delete on audit_auditevent from lorikeet_operator")
        cursor.execute("alter table audit_auditevent enable trigger user")


FORGERIES = {
    "changed": "update audit_auditevent set actor_name = 'mallory' where seq = 3",
    "emptied": "update audit_auditevent set after = null where seq = 3",
    "missing": "delete from audit_auditevent where seq = 3",
    "first missing": "delete from audit_auditevent where seq = 1",
    "reordered": "update audit_auditevent set seq = case seq when 3 then 4 else 3 end "
    "where seq in (3, 4)",
    "closed up": "with gone as (delete from audit_auditevent where seq = 3) "
    "update audit_auditevent set seq = seq - 1 where seq > 3",
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", FORGERIES)
def test_verification_finds_what_was_forged(name: str) -> None:
    make_party("acme")
    call_command("verify_audit", stdout=io.StringIO())
    with forger() as execute:
        execute("alter table audit_auditevent drop constraint audit_seq_once")
        execute(FORGERIES[name])
    out = io.StringIO()
    try:
        with pytest.raises(CommandError, match="tampered"):
            call_command("verify_audit", stdout=out)
    finally:
        with forger() as execute:
            execute("delete from audit_auditevent")
            execute(
                "alter table audit_auditevent add constraint audit_seq_once "
                "unique nulls not distinct (tenant_id, seq)"
            )
    (faults,) = json.loads(out.getvalue())["faults"].values()
    assert faults


@pytest.mark.django_db(transaction=True)
def test_a_trail_cut_short_is_found_by_its_known_end(tmp_path: Path) -> None:
    make_party("acme")
    heads = tmp_path / "heads.json"
    call_command("verify_audit", heads=heads, stdout=io.StringIO())
    make_party("globex")
    call_command("verify_audit", heads=heads, stdout=io.StringIO())
    with forger() as execute:
        execute("delete from audit_auditevent where seq = 6")
    call_command("verify_audit", stdout=io.StringIO())  # what is left is a chain
    with pytest.raises(CommandError, match="2 audit trails"):
        call_command("verify_audit", heads=heads, stdout=io.StringIO())
    with forger() as execute:
        execute("delete from audit_auditevent")
    with pytest.raises(CommandError, match="2 audit trails"):
        call_command("verify_audit", heads=heads, stdout=io.StringIO())


@pytest.mark.django_db(transaction=True)
def test_changes_at_the_same_moment_make_one_chain() -> None:
    acme = make_party("acme")
    start = threading.Barrier(4)

    def act(number: int) -> None:
        try:
            start.wait()
            for round_number in range(5):
                with tenant_scope(acme.tenant.id):
                    services.api_key_create(name=f"{number} {round_number}")
        finally:
            connection.close()

    threads = [threading.Thread(target=act, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    head, faults = verify(acme.tenant.id)
    assert (head.seq, faults) == (6 + 20, [])
    with tenant_scope(acme.tenant.id):
        assert ApiKey.objects.count() == 1 + 20


def test_operators_changes_are_theirs(acme: Party) -> None:
    operator = make_operator("op@example.com")
    client = as_user(operator)
    answer = client.post(
        "/admin/tenants/tenant/", {"action": "suspend", "_selected_action": [acme.tenant.pk]}
    )
    assert answer.status_code == 302
    event = trail(acme)[-1]
    assert (event.action, event.before, event.after) == (
        "tenant.status_set",
        {"status": "active"},
        {"status": "suspended"},
    )
    assert event.actor_name == "op@example.com"


def test_adapters_are_in_the_trail(acme: Party) -> None:
    base_model_add(name="tiny", revision="0" * 64, config=TINY_CONFIG)
    with tenant_scope(acme.tenant.id):
        adapter_create(name="invoices", description="reads them")
    event = trail(acme)[-1]
    assert event.action == "adapter.created"
    assert event.after == {
        "name": "invoices",
        "base_model": "tiny",
        "description": "reads them",
        "promotion_policy": "hold",
    }
