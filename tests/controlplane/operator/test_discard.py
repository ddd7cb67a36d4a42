"""DELETE /ops/v1/dead-letters/{id}: a letter and its prompt go for good, by person or by key."""

from __future__ import annotations

import pytest

from controlplane.events.audit.models import AuditEvent
from controlplane.operator.service_keys.scopes import Scope
from controlplane.queue.models import DeadLetter
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from tests.controlplane.conftest import Party, as_user, assert_error, make_operator
from tests.controlplane.operator.service_keys import as_service_key

pytestmark = pytest.mark.django_db


def letters_of(party: Party, number: int) -> list[DeadLetter]:
    ids = [f"req_{party.tenant.slug}_{i}" for i in range(number)]
    job = {"prompt": "a secret"}
    with tenant_scope(party.tenant.id):
        return [
            DeadLetter.objects.create(request_id=one, model="m", reason="given up", job=job)
            for one in ids
        ]


def test_a_letter_is_discarded_once_and_remembered(acme: Party, globex: Party) -> None:
    client = as_user(make_operator("ops@lorikeet.example"))
    (gone, kept), (others,) = letters_of(acme, 2), letters_of(globex, 1)
    url = f"/ops/v1/dead-letters/{gone.pk}"
    assert client.delete(url).status_code == 204
    assert_error(client.delete(url), 404)
    assert_error(client.post(f"{url}/requeue"), 404)
    listed = [row["id"] for row in client.get("/ops/v1/dead-letters").json()["data"]]
    assert sorted(listed) == sorted([str(kept.pk), str(others.pk)])
    with all_tenants(reason="test"):
        [event] = AuditEvent.objects.filter(action="dead_letter.discarded")
    assert (event.tenant_id, event.actor_name) == (acme.tenant.id, "ops@lorikeet.example")
    assert event.before == {"request_id": "req_acme_0", "model": "m", "reason": "given up"}


def test_a_key_that_only_reads_the_pool_discards_nothing(acme: Party) -> None:
    [letter] = letters_of(acme, 1)
    url = f"/ops/v1/dead-letters/{letter.pk}"
    reader = as_service_key(Scope.POOL_READ)
    assert_error(reader.delete(url), 403)
    assert [row["id"] for row in reader.get("/ops/v1/dead-letters").json()["data"]] == [
        str(letter.pk)
    ]
    writer = as_service_key(Scope.POOL_WRITE)
    assert writer.delete(url).status_code == 204
