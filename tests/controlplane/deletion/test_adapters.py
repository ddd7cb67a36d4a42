"""Versions, adapters and datasets are deleted for good, and nothing that anybody still uses."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.conf import settings
from django.utils import timezone

from contract.messages import protocol
from contract.queue.deleted_adapters import gone_key
from controlplane.adapters import deletion, services, tasks
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel, DeletedVersion
from controlplane.adapters.resolution import model_resolve
from controlplane.errors import NotFound
from controlplane.events.audit.models import AuditEvent
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import key_services
from controlplane.tenants.key_rules import KeyRules
from controlplane.training.datasets import contents
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset, Schedule, TrainingRun, dataset_key
from controlplane.training.runs import services as run_services
from controlplane.training.schedules import services as schedule_services
from controlplane.usage.limits import quotas
from tests.controlplane.adapters.files import GOOD_CONFIG, put
from tests.controlplane.adapters.test_ingest import upload, validate
from tests.controlplane.adapters.test_orphaned_objects import is_there
from tests.controlplane.conftest import Party, as_key, as_user, assert_error
from tests.controlplane.training.conftest import ROWS

WORKER = "deletion-worker"
URL = "/api/v1/adapters/invoices"


@pytest.fixture(autouse=True)
def _scope(acme: Party, base_model: BaseModel) -> Iterator[None]:
    with tenant_scope(acme.tenant.id):
        yield


@pytest.fixture
def orders() -> Iterator[redis.Redis]:
    """A registered worker's Redis."""
    client = redis.Redis.from_url(settings.REDIS_URL, protocol=2)
    control = protocol.control_key(settings.POOL, WORKER)
    client.zadd(protocol.workers_key(settings.POOL), {WORKER: time.time()})
    yield client
    client.zrem(protocol.workers_key(settings.POOL), WORKER)
    client.delete(control, gone_key(settings.POOL))
    client.close()


def forgotten(client: Any) -> list[str | None]:
    """The digests that the worker was told to drop."""
    entries = client.xrange(protocol.control_key(settings.POOL, WORKER))
    orders = [protocol.ControlMessage.decode(fields[b"m"]) for _, fields in entries]
    return [order.digest for order in orders if order.action == protocol.Control.FORGET]


def settle() -> None:
    """Time passes, until no gateway knows what was deleted; then the task runs."""
    DeletedVersion.objects.update(created_at=timezone.now() - deletion.SETTLED * 2)
    tasks.deleted_versions_remove()


def actions() -> set[str]:
    return set(AuditEvent.objects.values_list("action", flat=True))


class TestVersion:
    def test_it_is_gone_for_requests_at_once_and_its_bytes_soon(
        self, acme: Party, orders: redis.Redis
    ) -> None:
        version = validate(upload())
        digest = version.digest
        used = quotas.used("storage_bytes")
        assert as_key(acme).delete(f"{URL}/versions/1").status_code == 204
        for name in ("invoices", "invoices@1"):
            with pytest.raises(NotFound):
                model_resolve(name)
        assert_error(as_key(acme).get(f"{URL}/versions/1"), 404)
        tasks.deleted_versions_remove()  # a gateway may still have it in its cache
        assert is_there(version, digest)
        assert quotas.used("storage_bytes") == used > 0
        settle()
        assert not is_there(version, digest)
        assert quotas.used("storage_bytes") == 0
        assert forgotten(orders) == [digest]
        assert orders.zscore(gone_key(settings.POOL), digest)
        assert "adapter_version.deleted" in actions()

    def test_accepted_requests_keep_its_bytes(self, acme: Party, orders: redis.Redis) -> None:
        version = validate(upload())
        job = protocol.job_key(settings.POOL, "req_1")
        item = f"req_1 16 {'0' * 64},{version.digest}"
        orders.hset(job, mapping={"state": "running", "item": item})
        try:
            as_key(acme).delete(f"{URL}/versions/1")
            settle()
            assert is_there(version, version.digest)
            assert forgotten(orders) == []
            orders.hset(job, "state", "done")
            settle()
            assert not is_there(version, version.digest)
        finally:
            orders.delete(job)

    def test_its_number_is_never_used_again_and_the_one_before_is_live_again(
        self, acme: Party
    ) -> None:
        validate(upload())
        Adapter.objects.update(promotion_policy=Adapter.PromotionPolicy.IMMEDIATE)
        for _ in range(2):
            validate(upload())
        client = as_key(acme)
        assert client.delete(f"{URL}/versions/3").status_code == 204
        adapter = Adapter.objects.select_related("live_version").get()
        assert adapter.live_version is not None
        assert adapter.live_version.number == 2
        assert upload().number == 4
        assert client.delete(f"{URL}/versions/4").status_code == 409  # it waits for its check
        settle()
        assert is_there(adapter.live_version, adapter.live_version.digest)

    def test_bytes_that_others_have_stay(
        self, acme: Party, globex: Party, orders: redis.Redis
    ) -> None:
        first, second = validate(upload()), validate(upload())
        with tenant_scope(globex.tenant.id):
            theirs = validate(upload())
        assert first.digest == second.digest == theirs.digest
        as_key(acme).delete(f"{URL}/versions/1")
        settle()
        assert is_there(second, second.digest)
        as_key(acme).delete(f"{URL}/versions/2")
        settle()
        assert not is_there(second, second.digest)
        assert is_there(theirs, theirs.digest)
        assert forgotten(orders) == []  # they serve the same bytes to the other tenant
        assert as_key(globex).delete(f"{URL}/versions/1").status_code == 204
        settle_all()
        assert not is_there(theirs, theirs.digest)
        assert forgotten(orders) == [theirs.digest]

    def test_what_is_uploaded_to_a_deleted_version_is_removed(self, acme: Party) -> None:
        stated = {"adapter_config.json": len(GOOD_CONFIG), "adapter_model.safetensors": 8}
        version = services.adapter_version_create(name="invoices", files=stated)
        urls = services.adapter_version_upload_urls(version=version)
        assert as_key(acme).delete(f"{URL}/versions/1").status_code == 204
        settle()
        assert put(urls["adapter_config.json"], GOOD_CONFIG) == 200
        tasks.adapter_versions_sweep()
        assert storage.object_size(version.staged_config_key) is None
        DeletedVersion.objects.update(created_at=timezone.now() - dt.timedelta(days=2))
        tasks.adapter_versions_sweep()
        assert not DeletedVersion.objects.exists()

    def test_others_cannot(self, acme: Party, globex: Party) -> None:
        validate(upload())
        for url in (f"{URL}/versions/1", URL):
            assert_error(as_key(globex).delete(url), 404)
            assert_error(as_user(acme.viewer).delete(url), 403)
        assert AdapterVersion.objects.count() == 1


def settle_all() -> None:
    from controlplane.tenancy.scoping import all_tenants

    with all_tenants(reason="test"):
        DeletedVersion.objects.update(created_at=timezone.now() - deletion.SETTLED * 2)
    tasks.deleted_versions_remove()


def schedule_of(dataset: str = "chats") -> Schedule:
    adapter = Adapter.objects.get(name="invoices")
    return schedule_services.schedule_set(
        adapter=adapter, dataset_name=dataset, cron_line="30 2 * * *"
    )


class TestAdapter:
    def test_it_goes_with_its_versions_and_runs(self, acme: Party) -> None:
        first, second = validate(upload()), validate(upload())
        dataset_services.dataset_upload(name="chats", content=ROWS)
        run = run_services.training_run_create(adapter_name="invoices", dataset_name="chats")
        run_services.training_run_cancel(run=run)
        assert as_key(acme).delete(URL).status_code == 204
        assert not Adapter.objects.exists()
        assert not AdapterVersion.objects.exists()
        assert not TrainingRun.objects.exists()
        settle()
        assert not is_there(first, first.digest)
        assert {"adapter.deleted", "adapter_version.deleted"} <= actions()
        again = validate(upload())
        assert (again.number, second.number) == (1, 2)

    def test_what_uses_it_is_named_or_ended(self, acme: Party) -> None:
        validate(upload())
        dataset_services.dataset_upload(name="chats", content=ROWS)
        schedule_of()
        run = run_services.training_run_create(adapter_name="invoices", dataset_name="chats")
        error = assert_error(as_key(acme).delete(URL), 409)
        assert error["code"] == "in_use"
        assert "the schedule of invoices" in error["message"]
        assert str(run.pk) in error["message"]
        assert_error(as_key(acme).delete(f"{URL}?force=1"), 400, "force")
        rules = KeyRules(scopes=("read", "adapters:write"))
        _, narrow = key_services.api_key_create(name="narrow", rules=rules)
        client = as_key(acme)
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {narrow}")
        assert_error(client.delete(f"{URL}?force=true"), 403)
        assert Schedule.objects.exists()
        assert as_key(acme).delete(f"{URL}?force=true").status_code == 204
        assert not Schedule.objects.exists()
        assert not TrainingRun.objects.exists()
        assert {"training_run.ended", "schedule.deleted"} <= actions()

    def test_a_run_that_publishes_is_not_interrupted(self, acme: Party) -> None:
        dataset_services.dataset_upload(name="chats", content=ROWS)
        run = run_services.training_run_create(adapter_name="invoices", dataset_name="chats")
        TrainingRun.objects.filter(pk=run.pk).update(status=TrainingRun.Status.PUBLISHING)
        schedule_of()
        assert_error(as_key(acme).delete(f"{URL}?force=true"), 409)
        assert Schedule.objects.exists()


class TestDataset:
    def test_it_is_deleted_and_ended_runs_stay(self, acme: Party) -> None:
        dataset = dataset_services.dataset_upload(name="chats", content=ROWS)
        run = run_services.training_run_create(adapter_name="invoices", dataset_name="chats")
        run_services.training_run_cancel(run=run)
        assert as_key(acme).delete("/api/v1/datasets/chats").status_code == 204
        assert "dataset.deleted" in actions()
        shown = as_key(acme).get(f"/api/v1/training-runs/{run.pk}").json()
        assert (shown["dataset"], shown["dataset_sha256"]) == (None, dataset.sha256)
        key = dataset_key(acme.tenant.id, dataset.sha256)
        assert storage.object_size(key) == len(ROWS)
        contents.DatasetContent.objects.update(wanted_at=timezone.now() - contents.KEPT * 2)
        contents.contents_sweep()
        assert storage.object_size(key) is None
        assert quotas.used("storage_bytes") == 0

    def test_what_uses_it_is_named_or_ended(self, acme: Party) -> None:
        dataset_services.dataset_upload(name="chats", content=ROWS)
        run = run_services.training_run_create(adapter_name="invoices", dataset_name="chats")
        schedule_of()
        url = "/api/v1/datasets/chats"
        error = assert_error(as_key(acme).delete(url), 409)
        assert "the schedule of invoices" in error["message"]
        assert str(run.pk) in error["message"]
        assert as_key(acme).delete(f"{url}?force=true").status_code == 204
        assert not Schedule.objects.exists()
        run.refresh_from_db()
        assert (run.status, run.dataset) == (TrainingRun.Status.CANCELLED, None)

    def test_others_cannot(self, acme: Party, globex: Party) -> None:
        dataset_services.dataset_upload(name="chats", content=ROWS)
        assert_error(as_key(globex).delete("/api/v1/datasets/chats"), 404)
        assert_error(as_user(acme.viewer).delete("/api/v1/datasets/chats"), 403)
        assert Dataset.objects.exists()
