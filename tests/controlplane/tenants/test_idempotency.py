"""Idempotency-Key: a write that is sent twice is made once."""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import pytest
from django.db import connection, connections
from django.utils import timezone

from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants import idempotency
from controlplane.tenants.models import ApiKey, IdempotencyRecord, ServiceAccount
from tests.controlplane.conftest import Party, as_user, assert_error, make_party

KEYS, ACCOUNTS = "/api/v1/keys", "/api/v1/service-accounts"


def post(party: Party, url: str, body: Any, key: str) -> Any:
    return as_user(party.owner).post(url, body, format="json", headers={"Idempotency-Key": key})


def num_keys(party: Party) -> int:
    with tenant_scope(party.tenant.id):
        return ApiKey.objects.count()


def test_second_request_gets_the_first_answer(acme: Party) -> None:
    first, second = (post(acme, KEYS, {"name": "ci"}, "k-1") for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.content == first.content
    assert second["Content-Type"] == first["Content-Type"]
    assert (first.has_header("Idempotent-Replayed"), second["Idempotent-Replayed"]) == (
        False,
        "true",
    )
    assert num_keys(acme) == 2


def test_kept_answer_holds_no_readable_secret(acme: Party) -> None:
    secret = post(acme, KEYS, {"name": "ci"}, "k-1").json()["key"]
    with all_tenants(reason="test"), connection.cursor() as cursor:
        cursor.execute("select encode(answer, 'escape') from tenants_idempotencyrecord")
        (kept,) = cursor.fetchone()
    assert kept
    assert secret not in kept
    assert "k-1" not in kept


def test_another_body_is_an_error_and_another_key_another_write(acme: Party) -> None:
    post(acme, KEYS, {"name": "ci"}, "k-1")
    error = assert_error(post(acme, KEYS, {"name": "cd"}, "k-1"), 400, "Idempotency-Key")
    assert error["code"] == "idempotency_key_reused"
    assert post(acme, KEYS, {"name": "ci"}, "k-2").status_code == 201
    assert num_keys(acme) == 3


def test_keys_of_two_callers_have_nothing_to_do_with_each_other(acme: Party, globex: Party) -> None:
    for party in (acme, globex):
        answer = post(party, KEYS, {"name": party.tenant.slug}, "same")
        assert answer.json()["name"] == party.tenant.slug


def test_an_error_is_not_kept_and_changes_nothing(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        taken = ServiceAccount.objects.create(name="ci")
    assert_error(post(acme, ACCOUNTS, {"name": "ci"}, "k"), 409, "name")
    with tenant_scope(acme.tenant.id):
        taken.delete()
    assert post(acme, ACCOUNTS, {"name": "ci"}, "k").status_code == 201


def test_a_crash_leaves_neither_change_nor_record(
    acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: Any, response: Any) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(idempotency.Attempt, "end", crash)
    with pytest.raises(RuntimeError):
        post(acme, KEYS, {"name": "ci"}, "k")
    monkeypatch.undo()
    assert num_keys(acme) == 1
    assert post(acme, KEYS, {"name": "ci"}, "k").status_code == 201


@pytest.mark.parametrize("key", ["", "x" * 256, "grüße"])
def test_bad_keys_are_refused(acme: Party, key: str) -> None:
    assert_error(post(acme, KEYS, {"name": "ci"}, key), 400, "Idempotency-Key")


def test_old_records_are_forgotten(acme: Party) -> None:
    post(acme, KEYS, {"name": "ci"}, "k")
    with all_tenants(reason="test"):
        IdempotencyRecord.objects.update(expires_at=timezone.now() - dt.timedelta(seconds=1))
        assert post(acme, KEYS, {"name": "ci"}, "k").status_code == 201
        assert num_keys(acme) == 3
        IdempotencyRecord.objects.update(expires_at=timezone.now() - dt.timedelta(seconds=1))
        idempotency.expire()
        assert not IdempotencyRecord.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_two_at_once_make_one() -> None:
    acme = make_party("acme")
    answers: list[bytes] = []
    start = threading.Barrier(4)

    def send() -> None:
        try:
            start.wait(10)
            answers.append(post(acme, KEYS, {"name": "ci"}, "k").content)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 4
    assert len(set(answers)) == 1
    assert num_keys(acme) == 2
