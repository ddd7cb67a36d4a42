"""What a tenant may have at a time: set by operators, seen by the tenant, held under a lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from controlplane.adapters import services, tasks
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.errors import RateLimited
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import User
from tests.controlplane.adapters.test_ingest import upload
from tests.controlplane.conftest import Party, as_key, as_user, assert_error, make_operator

STATED = {"adapter_config.json": 10, "adapter_model.safetensors": 90}


@pytest.fixture
def operator(db: None) -> User:
    return make_operator("ops@lorikeet.example")


@pytest.fixture
def scope(acme: Party, base_model: BaseModel) -> Iterator[None]:
    with tenant_scope(acme.tenant.id):
        yield


class TestSetting:
    def test_an_operator_sets_it_and_the_tenant_sees_it(
        self, operator: User, acme: Party, globex: Party, settings: Any
    ) -> None:
        url = "/ops/v1/tenants/acme/quota"
        usual = settings.TENANT_QUOTAS["training_runs"]
        answer = as_user(operator).put(url, {"training_runs": 3}, format="json")
        assert answer.json()["training_runs"] == {"limit": 3, "used": 0}
        assert as_key(acme).get("/api/v1/quota").json()["training_runs"]["limit"] == 3
        assert as_key(globex).get("/api/v1/quota").json()["training_runs"]["limit"] == usual
        assert as_user(operator).get(url).json() == as_key(acme).get("/api/v1/quota").json()
        as_user(operator).put(url, {"storage_bytes": 1 << 30}, format="json")
        assert as_key(acme).get("/api/v1/quota").json()["training_runs"]["limit"] == 3
        as_user(operator).put(url, {"training_runs": None}, format="json")
        assert as_key(acme).get("/api/v1/quota").json()["training_runs"]["limit"] == usual

    @pytest.mark.parametrize(
        "body", [{"training_runs": -1}, {"training_runs": "many"}, {"unknown": 1}]
    )
    def test_what_cannot_be_a_quota_is_refused(
        self, operator: User, acme: Party, body: dict[str, Any]
    ) -> None:
        answer = as_user(operator).put("/ops/v1/tenants/acme/quota", body, format="json")
        assert_error(answer, 400, *body)

    def test_a_tenant_cannot_set_its_own(self, acme: Party) -> None:
        body = {"training_runs": 1000}
        assert as_key(acme).put("/api/v1/quota", body, format="json").status_code == 405
        answer = as_user(acme.owner).put("/ops/v1/tenants/acme/quota", body, format="json")
        assert answer.status_code == 403


class TestAdapterChecks:
    def test_versions_beyond_the_quota_wait_outside(
        self, acme: Party, globex: Party, base_model: BaseModel, settings: Any
    ) -> None:
        settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"adapter_checks": 2}
        with tenant_scope(acme.tenant.id):
            for _ in range(2):
                upload()
            with pytest.raises(RateLimited) as caught:
                upload()
            third = AdapterVersion.objects.get(number=3)
        assert caught.value.code == "too_many_adapter_checks"
        assert "2 adapter versions" in str(caught.value)
        url = "/api/v1/adapters/invoices/versions/3/complete"
        answer = as_key(acme).post(url)
        assert_error(answer, 429)
        assert int(answer["Retry-After"]) >= 1
        with tenant_scope(globex.tenant.id):
            upload()
        tasks.adapter_version_validate(str(acme.tenant.id), str(third.pk))
        assert as_key(acme).post(url).status_code == 202

    @pytest.mark.django_db(transaction=True)
    def test_completions_at_once_do_not_pass_the_bound(self, scope: None, settings: Any) -> None:
        versions = [
            services.adapter_version_create(name="invoices", files=STATED) for _ in range(40)
        ]
        settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"adapter_checks": 5}
        outcomes = at_once(versions, services._set_uploaded)
        assert sorted(outcomes) == ["made"] * 5 + ["too_many_adapter_checks"] * 35

    def test_tenants_take_turns(self, acme: Party, globex: Party, base_model: BaseModel) -> None:
        with tenant_scope(acme.tenant.id):
            ours = [upload() for _ in range(3)]
        tasks.adapter_version_validate(str(acme.tenant.id), str(ours[0].pk))
        with tenant_scope(globex.tenant.id):
            theirs = upload()
        # The messages come in the order in which they were sent; acme's second is the next.
        tasks.adapter_version_validate(str(acme.tenant.id), str(ours[1].pk))
        with tenant_scope(globex.tenant.id):
            assert AdapterVersion.objects.get(pk=theirs.pk).status == "ready"
        tasks.adapter_version_validate(str(acme.tenant.id), str(ours[2].pk))
        tasks.adapter_version_validate(str(globex.tenant.id), str(theirs.pk))
        with tenant_scope(acme.tenant.id):
            assert set(AdapterVersion.objects.values_list("status", flat=True)) == {"ready"}

    def test_a_check_that_the_store_cut_short_is_made_again(
        self, acme: Party, base_model: BaseModel, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: list[Any] = []
        again = tasks.adapter_version_validate_again
        monkeypatch.setattr(again, "apply_async", lambda ids, countdown: sent.append(ids))
        with tenant_scope(acme.tenant.id):
            version = upload()
        there, settings.S3_ENDPOINT_URL = settings.S3_ENDPOINT_URL, "http://127.0.0.1:9"
        tasks.adapter_version_validate(str(acme.tenant.id), str(version.pk))
        settings.S3_ENDPOINT_URL = there
        assert sent == [(str(acme.tenant.id), str(version.pk))]
        again(*sent[0])
        with tenant_scope(acme.tenant.id):
            version.refresh_from_db()
        assert version.status == "ready"


class TestStorage:
    @pytest.mark.django_db(transaction=True)
    def test_100_uploads_at_once_do_not_pass_the_bound(self, scope: None, settings: Any) -> None:
        settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"storage_bytes": 1299}
        outcomes = at_once(
            range(100),
            lambda _: services.adapter_version_create(name="invoices", files=STATED),
        )
        assert sorted(outcomes) == ["made"] * 12 + ["storage_limit_exceeded"] * 88


def at_once(items: Any, work: Any) -> list[str]:
    """What becomes of each, all in the same moment and in the scope of the caller."""
    from controlplane.tenancy.scoping import current_tenant_id

    items, tenant_id = list(items), current_tenant_id()
    barrier, outcomes = threading.Barrier(len(items)), []

    def run(item: Any) -> None:
        try:
            with tenant_scope(tenant_id):
                barrier.wait(60)
                work(item)
            outcomes.append("made")
        except Exception as error:
            outcomes.append(getattr(error, "code", None) or repr(error))
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
