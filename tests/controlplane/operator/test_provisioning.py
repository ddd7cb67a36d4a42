"""PUT /ops/v1/tenants/{slug}: one document, all or nothing, and nothing twice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.core import mail
from django.db import connections
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.adapters.models import Adapter, BaseModel
from controlplane.errors import InvalidRequest
from controlplane.events.audit.models import AuditEvent
from controlplane.events.audit.services import verify
from controlplane.operator.service_keys.scopes import Scope
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants import auth, people, services
from controlplane.tenants.models import ApiKey, Invite, Tenant, User
from controlplane.training.models import Dataset, Schedule
from controlplane.usage.limits.models import RateLimit, TenantQuota
from tests.controlplane.conftest import PASSWORD, TINY_CONFIG, Party, assert_error
from tests.controlplane.operator.service_keys import as_service_key

pytestmark = pytest.mark.django_db
URL = "/ops/v1/tenants/initech"
DOCUMENT: dict[str, Any] = {
    "name": "Initech",
    "status": "active",
    "owner": {"email": "Peter@initech.example"},
    "keys": [
        {"name": "app", "role": "developer", "allowed_ips": ["192.0.2.7"]},
        {"name": "board", "scopes": ["read", "usage:read"], "expires_at": "2099-01-01T00:00:00Z"},
    ],
    "limits": {"requests_per_minute": 60},
    "quota": {"training_runs": 3},
    "adapters": [{"name": "invoices", "base_model": "tiny"}, {"name": "letters"}],
}


def put(client: APIClient, document: Any, query: str = "", **more: Any) -> Any:
    return client.put(URL + query, document, format="json", **more)


def results(answer: Any) -> dict[str, str]:
    return {part["path"]: part["result"] for part in answer.json()["parts"]}


def test_a_document_makes_a_tenant_once(
    base_model: BaseModel, django_capture_on_commit_callbacks: Any
) -> None:
    client = as_service_key()
    with django_capture_on_commit_callbacks(execute=True):
        made = put(client, DOCUMENT)
    assert made.status_code == 201, made.content
    assert set(results(made).values()) == {"created"}
    assert set(results(made)) == {
        *("tenant", "owner", "keys[0]", "keys[1]"),
        *("limits", "quota", "adapters[0]", "adapters[1]"),
    }
    (letter,) = mail.outbox
    owner, app, board = made.json()["secrets"]
    assert letter.to == ["peter@initech.example"]
    assert owner["url"] in letter.body
    assert auth.authenticate(f"Bearer {app['key']}", "192.0.2.7").tenant.slug == "initech"
    assert auth.authenticate(f"Bearer {board['key']}").permissions == {"read", "usage:read"}
    again = put(client, DOCUMENT)
    assert again.status_code == 200
    assert set(results(again).values()) == {"unchanged"}
    assert again.json()["secrets"] == []
    assert len(mail.outbox) == 1


def state() -> dict[str, Any]:
    """Everything that a document can change, and how long the trails are."""
    with all_tenants(reason="test"):
        return {
            model.__name__: list(model._default_manager.order_by("pk").values())
            for model in (
                *(Tenant, ApiKey, Invite, RateLimit, TenantQuota, Adapter, Schedule, AuditEvent),
                User,
            )
        }


def tenant_of(slug: str = "initech") -> Tenant:
    return Tenant.objects.get(slug=slug)


def with_rows(name: str = "rows") -> None:
    with tenant_scope(tenant_of().id):
        Dataset.objects.create(name=name, sha256="0" * 64, num_bytes=1, num_rows=1)


class TestAgain:
    def test_the_same_document_changes_nothing(self, base_model: BaseModel) -> None:
        client = as_service_key()
        put(client, {"name": "Initech", "adapters": [{"name": "invoices"}]})
        with_rows()
        document = {**DOCUMENT, "schedules": [nightly()]}
        put(client, document)
        before = state()
        assert set(results(put(client, document)).values()) == {"unchanged"}
        assert state() == before

    def test_what_is_left_out_stays(self, base_model: BaseModel) -> None:
        client = as_service_key()
        put(client, DOCUMENT)
        before = state()
        assert results(put(client, {"name": "Initech"})) == {"tenant": "unchanged"}
        empty = {"name": "Initech", "keys": [], "adapters": [], "limits": {}, "quota": {}}
        put(client, empty)
        assert state() == before
        limits = {"name": "Initech", "limits": {"max_waiting": 5}}
        assert results(put(client, limits))["limits"] == "changed"
        with tenant_scope(tenant_of().id):
            row = RateLimit.objects.get()
        assert (row.requests_per_minute, row.max_waiting) == (60, 5)
        cleared = {"name": "Initech", "limits": {"requests_per_minute": None}}
        put(client, cleared)
        with tenant_scope(tenant_of().id):
            row = RateLimit.objects.get()
        assert (row.requests_per_minute, row.max_waiting) == (None, 5)

    def test_what_differs_is_changed_and_told(self, base_model: BaseModel) -> None:
        client = as_service_key()
        put(client, {"name": "Initech", "adapters": [{"name": "invoices"}]})
        with_rows()
        put(client, {**DOCUMENT, "schedules": [nightly()]})
        answer = put(
            client,
            {
                "name": "Initech Inc.",
                "status": "suspended",
                "keys": [{"name": "app", "role": "viewer"}, {"name": "board"}],
                "schedules": [{**nightly(), "cron": "0 4 * * *"}],
                "adapters": [{"name": "invoices"}, {"name": "memos"}],
            },
        )
        assert results(answer) == {
            "tenant": "changed",
            "keys[0]": "changed",
            "keys[1]": "unchanged",
            "adapters[0]": "unchanged",
            "adapters[1]": "created",
            "schedules[0]": "changed",
        }
        assert answer.json()["tenant"]["status"] == "suspended"
        assert answer.json()["secrets"] == []
        with tenant_scope(tenant_of().id):
            app, board = ApiKey.objects.order_by("created_at")
            schedule = Schedule.objects.get()
        assert app.scopes == ["read", "usage:read", "requests:read"]
        assert app.allowed_ips == ["192.0.2.7/32"]  # left out
        assert board.scopes == ["read", "usage:read"]
        assert (schedule.cron, schedule.timezone) == ("0 4 * * *", "Europe/Berlin")
        with all_tenants(reason="test"):
            told = AuditEvent.objects.filter(action="tenant.provisioned").latest("seq")
        assert told.tenant is None
        assert told.after == {
            "tenant": "changed initech",
            "keys[0]": "changed app",
            "adapters[1]": "created memos",
            "schedules[0]": "changed invoices",
        }
        for tenant_id in (None, tenant_of().id):
            assert verify(tenant_id)[1] == []

    def test_a_revoked_key_is_made_again(self, base_model: BaseModel) -> None:
        client, document = as_service_key(), {"name": "Initech", "keys": [{"name": "app"}]}
        first = put(client, document).json()["secrets"][0]
        client.post(f"{URL}/keys/{first['public_id']}/revoke")
        second = put(client, document)
        assert results(second)["keys[0]"] == "created"
        assert second.json()["secrets"][0]["key"] != first["key"]

    def test_the_answer_with_the_secrets_can_be_read_again(self, base_model: BaseModel) -> None:
        client = as_service_key()
        first, second = (put(client, DOCUMENT, HTTP_IDEMPOTENCY_KEY="one") for _ in range(2))
        assert len(first.json()["secrets"]) == 3
        assert first.content == second.content
        other = put(client, {"name": "Other"}, HTTP_IDEMPOTENCY_KEY="one")
        assert_error(other, 400, "Idempotency-Key")


def nightly() -> dict[str, Any]:
    return {
        **{"adapter": "invoices", "dataset": "rows", "cron": "0 3 * * *"},
        **{"timezone": "Europe/Berlin", "hyperparameters": {"rank": 4}},
    }


class TestOwner:
    DOCUMENT = {"name": "Initech", "owner": {"email": "peter@initech.example"}}

    def invite(self) -> Invite:
        with all_tenants(reason="test"):
            return Invite.objects.get()

    def change(self, **fields: Any) -> None:
        with all_tenants(reason="test"):
            Invite.objects.update(**fields)

    def test_an_invite_that_expired_is_renewed(self) -> None:
        client = as_service_key()
        put(client, self.DOCUMENT)
        self.change(expires_at=timezone.now())
        assert results(put(client, self.DOCUMENT))["owner"] == "created"

    @pytest.mark.parametrize("how", ["accepted_at", "revoked_at"])
    def test_who_was_removed_is_not_invited_again(self, how: str) -> None:
        client = as_service_key()
        put(client, self.DOCUMENT)
        self.change(**{how: timezone.now(), "expires_at": timezone.now()})
        assert results(put(client, self.DOCUMENT))["owner"] == "unchanged"
        assert self.invite()

    def test_a_member_is_not_invited(self, acme: Party) -> None:
        document = {"name": "Acme", "owner": {"email": acme.viewer.email.upper()}}
        answer = as_service_key().put("/ops/v1/tenants/acme", document, format="json")
        assert results(answer) == {"tenant": "unchanged", "owner": "unchanged"}

    def test_the_invite_makes_an_owner(self) -> None:
        answer = put(as_service_key(), self.DOCUMENT)
        token = answer.json()["secrets"][0]["url"].rpartition("/invites/")[2].strip("/")
        user = services.user_create(email="peter@initech.example", password=PASSWORD)
        member = people.invite_accept(token=token, user=user)
        assert (member.tenant.slug, member.role) == ("initech", "owner")


class TestNothingHappens:
    @pytest.mark.parametrize(
        ("document", "status", "param"),
        [
            ({}, 400, "name"),
            ({"name": ""}, 400, "name"),
            ({"name": "x", "nmae": "y"}, 400, "nmae"),
            ({"name": "x", "status": "gone"}, 400, "status"),
            ({"name": "x", "owner": {"email": "peter"}}, 400, "owner.email"),
            ({"name": "x", "owner": "peter@x.example"}, 400, "owner"),
            ({"name": "x", "keys": [{"name": "a"}, {}]}, 400, "keys[1].name"),
            ({"name": "x", "keys": [{"name": "a"}, {"name": "a"}]}, 400, "keys[1].name"),
            ({"name": "x", "keys": [{"name": "a", "scopes": ["x"]}]}, 400, "keys[0].scopes[0]"),
            (
                {"name": "x", "keys": [{"name": "a", "scopes": ["keys:manage"]}]},
                400,
                "keys[0].scopes",
            ),
            (
                {"name": "x", "keys": [{"name": "a", "scopes": ["read"], "role": "viewer"}]},
                400,
                "keys[0].role",
            ),
            ({"name": "x", "keys": [{"name": "a", "role": "owner"}]}, 400, "keys[0].role"),
            (
                {"name": "x", "keys": [{"name": "a", "expires_at": "2001-01-01T00:00Z"}]},
                400,
                "keys[0].expires_at",
            ),
            (
                {"name": "x", "keys": [{"name": "a", "allowed_ips": ["x"]}]},
                400,
                "keys[0].allowed_ips",
            ),
            ({"name": "x", "keys": [{"name": f"k{n}"} for n in range(101)]}, 400, "keys"),
            ({"name": "x", "adapters": [{"name": f"a{n}"} for n in range(201)]}, 400, "adapters"),
            ({"name": "x", "adapters": [{"name": "a"}, {"name": "A b"}]}, 400, "adapters[1].name"),
            (
                {"name": "x", "adapters": [{"name": "a", "base_model": "none"}]},
                400,
                "adapters[0].base_model",
            ),
            ({"name": "x", "limits": {"max_waiting": 0}}, 400, "limits.max_waiting"),
            ({"name": "x", "limits": {"per_day": 1}}, 400, "limits.per_day"),
            ({"name": "x", "quota": {"training_runs": -1}}, 400, "quota.training_runs"),
            ({"name": "x", "schedules": [{"adapter": "a"}]}, 400, "schedules[0].dataset"),
            (
                {"name": "x", "schedules": [{"adapter": "a", "dataset": "d", "cron": "x"}]},
                400,
                "schedules[0].adapter",
            ),
        ],
    )
    def test_an_error_names_the_field_and_leaves_nothing(
        self, base_model: BaseModel, document: Any, status: int, param: str
    ) -> None:
        client = as_service_key()
        before = state()
        assert_error(put(client, document), status, param)
        assert state() == before

    @pytest.mark.parametrize(
        ("field", "value", "param"),
        [
            ("dataset", "none", "schedules[0].dataset"),
            ("cron", "x", "schedules[0].cron"),
            ("timezone", "Moon", "schedules[0].timezone"),
            ("hyperparameters", {"rank": 0}, "schedules[0].hyperparameters.rank"),
        ],
    )
    def test_the_last_part_undoes_the_first(
        self, base_model: BaseModel, field: str, value: Any, param: str
    ) -> None:
        client = as_service_key()
        put(client, {"name": "Initech"})
        with_rows()
        before = state()
        document = {**DOCUMENT, "name": "New", "schedules": [{**nightly(), field: value}]}
        assert_error(put(client, document), 400, param)
        assert state() == before

    def test_a_dry_run_tells_and_leaves_nothing(
        self, base_model: BaseModel, django_capture_on_commit_callbacks: Any
    ) -> None:
        client = as_service_key()
        before = state()
        with django_capture_on_commit_callbacks(execute=True):
            answer = put(client, DOCUMENT, "?dry_run=true")
        assert (answer.status_code, answer.json()["tenant"]) == (200, None)
        assert set(results(answer).values()) == {"created"}
        assert answer.json()["secrets"] == []
        assert state() == before
        assert mail.outbox == []
        put(client, DOCUMENT)
        renamed = put(client, {**DOCUMENT, "name": "New"}, "?dry_run=true")
        assert results(renamed)["tenant"] == "changed"
        assert renamed.json()["tenant"]["name"] == "Initech"
        assert_error(put(client, DOCUMENT, "?dry_run=yes"), 400, "dry_run")

    def test_an_adapter_keeps_its_base(self, base_model: BaseModel) -> None:
        client = as_service_key()
        put(client, DOCUMENT)
        other = {"name": "Initech", "adapters": [{"name": "invoices", "base_model": "other"}]}
        assert_error(put(client, other), 409, "adapters[0].base_model")

    @pytest.mark.parametrize("slug", ["A", "-a", "a b", "x" * 64, "a%00", "%ff"])
    def test_a_bad_slug_is_refused(self, slug: str) -> None:
        answer = as_service_key().put(f"/ops/v1/tenants/{slug}", {"name": "x"}, format="json")
        assert_error(answer, 400, "slug")

    @pytest.mark.parametrize(
        ("part", "scope"),
        [("keys", "keys:write"), ("adapters", "adapters:write"), ("schedules", "training:write")],
    )
    def test_each_part_needs_its_scope(self, base_model: BaseModel, part: str, scope: str) -> None:
        others = set(Scope) - {scope}
        document = {"name": "Initech", part: []}
        refused = assert_error(put(as_service_key(*others), document), 403, part)
        assert refused["code"] == "insufficient_scope"
        assert not Tenant.objects.exists()
        assert put(as_service_key("tenants:write", scope), document).status_code == 201
        assert put(as_service_key(scope), document).status_code == 403


@pytest.mark.django_db(transaction=True)
def test_two_at_once_make_one_of_each() -> None:
    BaseModel.objects.create(
        name="tiny", revision="0" * 64, config=TINY_CONFIG, context_length=128, max_rank=256
    )
    client = as_service_key()
    headers = client._credentials
    barrier = threading.Barrier(4)

    def send(_: int) -> Any:
        mine = APIClient()
        mine.credentials(**headers)
        barrier.wait()
        try:
            return put(mine, DOCUMENT)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(send, range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 201]
    assert len(mail.outbox) == 1
    secrets = [secret for answer in answers for secret in answer.json()["secrets"]]
    assert len(secrets) == 3
    found = state()
    assert {name: len(rows) for name, rows in found.items() if name != "AuditEvent"} == {
        **{"Tenant": 1, "ApiKey": 2, "Invite": 1, "RateLimit": 1, "TenantQuota": 1},
        **{"Adapter": 2, "Schedule": 0, "User": 0},
    }
    told = [row["action"] for row in found["AuditEvent"]]
    assert told.count("tenant.provisioned") == 1
    assert told.count("api_key.created") == 2


@pytest.mark.django_db(transaction=True)
def test_documents_and_the_tenants_own_changes_do_not_lock_each_other_out() -> None:
    """A document holds the keys' lock, the tenant's row and the trail's end, in that order."""
    client = as_service_key()
    put(client, {"name": "Initech"})
    tenant = tenant_of()
    stop, failures = threading.Event(), []

    def own_changes() -> None:
        try:
            number = 0
            while not stop.is_set():
                number += 1
                with tenant_scope(tenant.id):
                    services.api_key_create(name=f"own {number}")
        except Exception as error:
            failures.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=own_changes)
    thread.start()
    try:
        for number in range(10):
            keys = [{"name": f"{number} {index}"} for index in range(5)]
            answer = put(client, {"name": f"Initech {number}", "keys": keys})
            assert answer.status_code == 200, answer.content
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert verify(tenant.id)[1] == []


@pytest.mark.parametrize("status", ["deleting", "deleted"])
def test_a_document_deletes_no_tenant(acme: Party, status: str) -> None:
    client = as_service_key()
    for method in (client.put, client.patch):
        answer = method("/ops/v1/tenants/acme", {"name": "A", "status": status}, format="json")
        assert_error(answer, 400, "status")
    with pytest.raises(InvalidRequest):
        services.tenant_status_set(tenant=acme.tenant, status=status)
    assert Tenant.objects.get().status == "active"
