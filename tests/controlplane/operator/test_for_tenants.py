"""/ops/v1/tenants/{slug}/…: the tenant's own calls, by an operator, in that tenant alone."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import models

from controlplane.adapters.models import Adapter, BaseModel
from controlplane.deletion.tenants import tenant_delete
from controlplane.events.audit.models import AuditEvent
from controlplane.infra import storage
from controlplane.tenancy.scoping import TenantManager, all_tenants, tenant_scope
from controlplane.tenants import auth, services
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.training.models import Dataset, TrainingRun
from tests.controlplane.aliases.conftest import add as add_version
from tests.controlplane.conftest import Party, as_key, as_user, assert_error, make_operator
from tests.controlplane.operator.service_keys import as_service_key, with_key

ROWS = (
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 2
)
ACME = "/ops/v1/tenants/acme"


def upload(client: Any, slug: str = "acme", **more: Any) -> Any:
    url = f"/ops/v1/tenants/{slug}/datasets?name=rows"
    return client.post(url, ROWS, content_type="application/jsonl", **more)


def events(tenant: Tenant | None) -> list[tuple[str, str, str]]:
    with all_tenants(reason="test"):
        rows = AuditEvent.objects.filter(tenant=tenant).order_by("seq")
        return list(rows.values_list("action", "actor_type", "actor_name"))


def test_everything_that_provisioning_needs(
    acme: Party, base_model: BaseModel, django_capture_on_commit_callbacks: Any
) -> None:
    client = as_service_key()
    assert client.post(f"{ACME}/adapters", {"name": "invoices"}, format="json").status_code == 201
    files = {"adapter_config.json": 2, "adapter_model.safetensors": 3}
    version = client.post(f"{ACME}/adapters/invoices/versions", {"files": files}, format="json")
    assert set(version.json()["uploads"]) == set(files)
    complete = client.post(f"{ACME}/adapters/invoices/versions/1/complete")
    assert_error(complete, 409, "adapter_config.json")  # nothing is uploaded
    assert upload(client).json()["num_rows"] == 2
    body = {"dataset": "rows", "cron": "0 3 * * *"}
    schedule = client.put(f"{ACME}/adapters/invoices/schedule", body, format="json")
    assert schedule.status_code == 200
    assert client.get(f"{ACME}/adapters/invoices/schedule").json()["cron"] == "0 3 * * *"
    run = client.post(
        f"{ACME}/training-runs", {"adapter": "invoices", "dataset": "rows"}, format="json"
    ).json()
    assert client.get(f"{ACME}/training-runs/{run['id']}").json()["status"] == "queued"
    assert len(client.get(f"{ACME}/training-runs").json()["data"]) == 1
    assert client.post(f"{ACME}/training-runs/{run['id']}/cancel").json()["status"] == "cancelled"
    # The tenant sees it all.
    theirs = as_key(acme)
    assert theirs.get("/api/v1/adapters/invoices").status_code == 200
    assert theirs.get("/api/v1/datasets/rows").status_code == 200


@pytest.fixture
def releases(acme: Party, base_model: BaseModel) -> Adapter:
    """Acme's invoices with three ready versions, of which the first is live."""
    with tenant_scope(acme.tenant.id):
        adapter = Adapter.objects.create(name="invoices", base_model=base_model)
        for _ in range(3):
            add_version(adapter)
    return adapter


def test_releases_as_the_tenants_own(acme: Party, releases: Adapter) -> None:
    client, adapter = as_service_key("adapters:write"), f"{ACME}/adapters/invoices"

    def post(path: str, **body: Any) -> Any:
        answer = client.post(f"{ACME}/{path}", body, format="json")
        assert answer.status_code in (200, 201), answer.content
        return answer.json()

    assert post("adapters/invoices/versions/2/promote", reason="better")["live_version"] == 2
    assert post("adapters/invoices/rollback")["live_version"] == 1
    rows = client.get(f"{adapter}/history").json()["data"]
    assert [row["cause"] for row in rows] == ["rolled_back", "promoted", "first"]
    version = "adapters/invoices/versions/3"
    assert post(f"{version}/deprecate", shutdown_date="2999-12-31")["deprecated_at"]
    assert post(f"{version}/undeprecate")["deprecated_at"] is None
    assert post(f"{version}/retire")["status"] == "retired"
    assert post(f"{version}/unretire")["status"] == "ready"
    assert len(client.get(f"{adapter}/residency").json()["versions"]) == 3
    assert client.get(f"{ACME}/{version}/doctor").json()["number"] == 3
    assert_error(client.post(f"{ACME}/{version}/doctor"), 503)  # nobody inspects
    assert_error(client.post(f"{ACME}/{version}/download"), 404)

    canary = {"canary": {"adapter": "invoices", "version": 2}, "canary_percent": 10}
    post("aliases", name="prod", primary={"adapter": "invoices"}, **canary)
    prod = f"{ACME}/aliases/prod"
    assert client.patch(prod, {"warmth": "warm"}, format="json").json()["revision"] == 2
    assert post("aliases/prod/ramp", percent=20)["canary_percent"] == 20
    assert client.get(f"{prod}/canary").json()["canary_percent"] == 20
    ramp = client.put(f"{prod}/timetable", {"steps": [{"percent": 30}]}, format="json")
    assert ramp.json()["state"] == "running"
    assert post("aliases/prod/timetable/pause")["state"] == "paused"
    assert post("aliases/prod/timetable/resume")["state"] == "running"
    assert client.delete(f"{prod}/timetable").json()["state"] == "stopped"
    assert post("aliases/prod/promote-canary")["canary"] == []
    assert post("aliases/prod/rollback")["canary_percent"] == 30
    rows = client.get(f"{prod}/revisions").json()["data"]
    assert {row["actor_name"] for row in rows} == {"script"}
    assert client.get(f"{prod}/revisions/1").json()["canary_percent"] == 10
    assert client.get(f"{ACME}/aliases").json()["data"][0]["name"] == "prod"
    assert client.delete(prod).status_code == 204
    told = [actor for action, _, actor in events(None) if action == "tenant.acted_for"]
    assert len(told) > 10 and set(told) == {"script"}


def test_releases_need_the_adapters_scope_and_the_tenant(
    acme: Party, globex: Party, releases: Adapter
) -> None:
    body = {"name": "prod", "primary": {"adapter": "invoices"}, "system_prompt": "Be kind."}
    other = as_service_key("keys:write")
    able, reader = as_service_key("adapters:write"), as_service_key("tenants:read")
    assert able.post(f"{ACME}/aliases", body, format="json").status_code == 201
    calls = (
        ("get", "adapters/invoices/history"),
        ("get", "adapters/invoices/residency"),
        ("get", "aliases/prod/revisions"),
        ("post", "adapters/invoices/rollback"),
        ("post", "adapters/invoices/versions/2/promote"),
        ("post", "adapters/invoices/versions/2/retire"),
        ("post", "aliases/prod/rollback"),
        ("delete", "aliases/prod"),
    )
    for method, path in calls:
        assert_error(getattr(able, method)(f"/ops/v1/tenants/globex/{path}"), 404)
        answer = getattr(reader, method)(f"{ACME}/{path}")
        assert answer.status_code == (200 if method == "get" else 403), path
        assert_error(getattr(other, method)(f"{ACME}/{path}"), 403)
    assert b"Be kind." not in reader.get(f"{ACME}/aliases").content
    for path in ("aliases/prod", "aliases/prod/revisions/1"):
        assert able.get(f"{ACME}/{path}").json()["system_prompt"] == "Be kind."
        assert_error(reader.get(f"{ACME}/{path}"), 403)


def test_a_key_that_it_makes_opens_and_is_rotated_and_revoked(acme: Party) -> None:
    client = as_service_key("keys:write")
    made = client.post(f"{ACME}/keys", {"name": "app"}, format="json").json()
    principal = auth.authenticate(f"Bearer {made['key']}")
    assert (principal.tenant, principal.role) == (acme.tenant, auth.OWNERLESS_KEY_ROLE)
    url = f"{ACME}/keys/{made['public_id']}"
    again = client.post(f"{url}/rotate", {"grace_seconds": 0}, format="json").json()
    assert auth.authenticate(f"Bearer {again['key']}").tenant == acme.tenant
    assert client.post(f"{url}/revoke", {}, format="json").status_code == 200
    assert_error(with_key(again["key"]).get("/api/v1/tenant"), 401)


def test_no_key_gets_more_than_a_developers_scopes(acme: Party) -> None:
    client = as_service_key("keys:write")
    for scope in ("tenant:manage", "members:manage", "limits:manage", "requests:content"):
        body = {"name": "app", "scopes": [scope]}
        assert_error(client.post(f"{ACME}/keys", body, format="json"), 403, "scopes")
    with tenant_scope(acme.tenant.id):
        admins, _ = services.api_key_create(
            name="theirs", rules=KeyRules(scopes=("limits:manage",))
        )
        assert ApiKey.objects.count() == 2
    assert_error(client.post(f"{ACME}/keys/{admins.public_id}/rotate"), 403, "scopes")


def test_both_trails_name_the_operator(acme: Party, base_model: BaseModel) -> None:
    script, person = as_service_key("adapters:write"), make_operator("ops@lorikeet.example")
    before = len(events(acme.tenant))
    script.post(f"{ACME}/adapters", {"name": "one"}, format="json")
    as_user(person).post(f"{ACME}/adapters", {"name": "two"}, format="json")
    assert events(acme.tenant)[before:] == [
        ("adapter.created", "service_key", "script"),
        ("adapter.created", "user", person.email),
    ]
    assert events(None)[-2:] == [
        ("tenant.acted_for", "service_key", "script"),
        ("tenant.acted_for", "user", person.email),
    ]
    with all_tenants(reason="test"):
        event = AuditEvent.objects.filter(action="tenant.acted_for").earliest("seq")
    assert (event.resource_id, event.after) == ("acme", {"call": f"POST {ACME}/adapters"})
    # The tenant reads its own: who of the platform did it.
    shown = as_user(acme.owner).get("/api/v1/audit-events?action=adapter.created").json()["data"]
    assert [row["actor_name"] for row in shown] == [person.email, "script"]


def test_what_fails_or_only_reads_is_not_in_the_platforms_trail(acme: Party) -> None:
    client = as_service_key()
    before = events(None)
    client.get(f"{ACME}/adapters")
    assert_error(client.post(f"{ACME}/adapters", {"name": "/"}, format="json"), 400, "name")
    assert events(None) == before


class TestTheTenantOfTheAddressAlone:
    def test_nothing_of_another_tenant_is_there(
        self, acme: Party, globex: Party, base_model: BaseModel
    ) -> None:
        client = as_service_key()
        client.post(f"{ACME}/adapters", {"name": "invoices"}, format="json")
        upload(client)
        body = {"adapter": "invoices", "dataset": "rows"}
        run = client.post(f"{ACME}/training-runs", body, format="json").json()["id"]
        theirs = "/ops/v1/tenants/globex"
        for method, url in (
            ("get", "adapters/invoices"),
            ("get", "adapters/invoices/versions"),
            ("get", "adapters/invoices/schedule"),
            ("get", "datasets/rows"),
            ("get", f"training-runs/{run}"),
            ("post", f"training-runs/{run}/cancel"),
            ("get", f"keys/{acme.api_key.public_id}"),
            ("post", f"keys/{acme.api_key.public_id}/rotate"),
            ("post", f"keys/{acme.api_key.public_id}/revoke"),
        ):
            assert_error(getattr(client, method)(f"{theirs}/{url}"), 404)
        for url in ("adapters", "datasets", "training-runs"):
            assert client.get(f"{theirs}/{url}").json()["data"] == []
        keys = client.get(f"{theirs}/keys").json()["data"]
        assert [key["public_id"] for key in keys] == [globex.api_key.public_id]
        with all_tenants(reason="test"):
            assert TrainingRun.objects.get().cancel_requested is False
            assert ApiKey.objects.filter(revoked_at=None).count() == 2

    def test_the_database_holds_it_there_though_the_code_forgets(
        self, acme: Party, globex: Party, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TenantManager, "get_queryset", models.Manager.get_queryset)
        client = as_service_key("keys:write")
        keys = client.get("/ops/v1/tenants/globex/keys").json()["data"]
        assert [key["public_id"] for key in keys] == [globex.api_key.public_id]
        url = f"/ops/v1/tenants/globex/keys/{acme.api_key.public_id}"
        assert_error(client.get(url), 404)
        assert_error(client.post(f"{url}/revoke"), 404)

    @pytest.mark.parametrize("slug", ["nobody", "ACME", "acme%00", "..", "*", "%2e%2e"])
    def test_there_is_no_such_tenant(self, acme: Party, slug: str) -> None:
        client = as_service_key()
        assert client.get(f"/ops/v1/tenants/{slug}/keys").status_code == 404
        assert upload(client, slug).status_code == 404

    def test_no_body_or_query_names_another_tenant(
        self, acme: Party, globex: Party, base_model: BaseModel
    ) -> None:
        client = as_service_key()
        body = {"name": "invoices", "tenant": str(globex.tenant.id), "slug": "globex"}
        assert client.post(f"{ACME}/adapters", body, format="json").status_code == 400
        url = f"{ACME}/adapters?tenant=globex&slug=globex"
        assert client.post(url, {"name": "invoices"}, format="json").status_code == 201
        with all_tenants(reason="test"):
            assert Adapter.objects.get().tenant == acme.tenant

    def test_an_idempotency_key_counts_in_its_tenant(
        self, acme: Party, globex: Party, base_model: BaseModel
    ) -> None:
        client, other = as_service_key(), as_service_key()
        body, key = {"name": "invoices"}, {"HTTP_IDEMPOTENCY_KEY": "one"}
        made = client.post(f"{ACME}/adapters", body, format="json", **key)
        again = client.post(f"{ACME}/adapters", body, format="json", **key)
        assert again.content == made.content
        assert again.headers["Idempotent-Replayed"] == "true"
        theirs = client.post("/ops/v1/tenants/globex/adapters", body, format="json", **key)
        assert theirs.json()["id"] != made.json()["id"]
        assert_error(other.post(f"{ACME}/adapters", body, format="json", **key), 409, "name")
        told = [action for action, *_ in events(None)]
        assert told.count("tenant.acted_for") == 2


def test_a_dataset_is_stored_under_its_tenant(acme: Party) -> None:
    upload(as_service_key("datasets:write"), HTTP_IDEMPOTENCY_KEY="one")
    with tenant_scope(acme.tenant.id):
        dataset = Dataset.objects.get()
    assert storage.object_size(dataset.key) == len(ROWS)
    assert str(acme.tenant.id) in dataset.key


def test_nothing_is_added_to_a_tenant_that_is_being_deleted(
    acme: Party, base_model: BaseModel
) -> None:
    tenant_delete(tenant=acme.tenant, confirm="acme")
    client = as_service_key()
    assert client.get(f"{ACME}/keys").status_code == 200
    for answer in (
        client.post(f"{ACME}/keys", {"name": "app"}, format="json"),
        client.post(f"{ACME}/adapters", {"name": "invoices"}, format="json"),
        client.put(f"{ACME}/limits", {"requests_per_minute": 1}, format="json"),
        client.put(f"{ACME}/quota", {"training_runs": 1}, format="json"),
        client.patch(ACME, {"name": "Acme"}, format="json"),
        client.put(ACME, {"name": "acme", "keys": [{"name": "app"}]}, format="json"),
        upload(client),
    ):
        assert assert_error(answer, 409)["code"] == "tenant_being_deleted"
    with all_tenants(reason="test"):
        assert not ApiKey.objects.filter(name="app").exists()


def test_a_suspended_tenant_can_be_prepared(acme: Party, base_model: BaseModel) -> None:
    client = as_service_key()
    client.patch(ACME, {"status": "suspended"}, format="json")
    made = client.post(f"{ACME}/adapters", {"name": "invoices"}, format="json")
    assert made.status_code == 201


def test_force_needs_the_scope_of_what_it_ends(acme: Party, base_model: BaseModel) -> None:
    client = as_service_key()
    client.post(f"{ACME}/adapters", {"name": "invoices"}, format="json")
    upload(client)
    body = {"dataset": "rows", "cron": "0 3 * * *"}
    client.put(f"{ACME}/adapters/invoices/schedule", body, format="json")
    for scope, url in (
        ("adapters:write", "adapters/invoices"),
        ("datasets:write", "datasets/rows"),
    ):
        refused = as_service_key(scope).delete(f"{ACME}/{url}?force=true")
        assert_error(refused, 403, "force")
        assert_error(as_service_key(scope).delete(f"{ACME}/{url}"), 409)
    able = as_service_key("adapters:write", "training:write")
    assert able.delete(f"{ACME}/adapters/invoices?force=true").status_code == 204
    with tenant_scope(acme.tenant.id):
        assert not Adapter.objects.exists()
