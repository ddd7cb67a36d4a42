"""What versions leave in the object store is removed, and nothing that anybody may still read."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from django.utils import timezone

from controlplane.adapters import ingest, orphaned_objects, probing, services, tasks
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.errors import InvalidRequest
from controlplane.files import services as file_services
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.datasets import services as dataset_services
from controlplane.usage.limits import quotas
from tests.controlplane.adapters import files
from tests.controlplane.adapters.files import GOOD_CONFIG, GOOD_TENSORS, put
from tests.controlplane.adapters.test_ingest import is_staging_empty, upload, validate
from tests.controlplane.conftest import Party, as_key, assert_error

Status = AdapterVersion.Status

OTHER_CONFIG = files.config_bytes(lora_alpha=3)


@pytest.fixture(autouse=True)
def _scope(acme: Party, base_model: BaseModel) -> Iterator[None]:
    with tenant_scope(acme.tenant.id):
        yield


def age(version: AdapterVersion, **ago: float) -> None:
    then = timezone.now() - dt.timedelta(**ago)
    AdapterVersion.objects.filter(pk=version.pk).update(status_changed_at=then)


def is_there(version: AdapterVersion, digest: str) -> bool:
    kept = AdapterVersion(tenant_id=version.tenant_id, digest=digest)
    return storage.object_size(kept.tensors_key) is not None


def checked_by_one_that_dies(version: AdapterVersion) -> str:
    """Checks the version and puts its bytes under their digest, and no more. -> the digest"""
    AdapterVersion.objects.filter(pk=version.pk).update(status=Status.VALIDATING)
    doomed = AdapterVersion.objects.select_related("adapter__base_model").get(pk=version.pk)
    ingest._check_and_keep(doomed)
    return doomed.digest


@pytest.mark.parametrize("tensors", [GOOD_TENSORS, b"no tensors"], ids=["ready", "rejected"])
def test_what_is_put_after_the_decision_is_removed_by_the_next_sweep(tensors: bytes) -> None:
    """However often: a URL works for a while, and a PUT that was begun with it may take long."""
    version = upload(tensors=tensors)
    urls = services.adapter_version_upload_urls(version=version)
    validate(version)
    assert is_staging_empty(version)
    for _ in range(2):
        assert put(urls["adapter_config.json"], GOOD_CONFIG) == 200
        assert put(urls["adapter_model.safetensors"], tensors) == 200
        tasks.adapter_versions_sweep()
        assert is_staging_empty(version)
    age(version, hours=25)
    tasks.adapter_versions_sweep()
    version.refresh_from_db()
    assert version.is_cleared
    assert put(urls["adapter_config.json"], GOOD_CONFIG) == 200
    tasks.adapter_versions_sweep()
    assert is_staging_empty(version)
    assert version.status == Status.REJECTED or is_there(version, version.digest)


def test_the_sweep_leaves_alone_what_it_does_not_know(globex: Party) -> None:
    version = upload()
    strangers = AdapterVersion(tenant_id=version.tenant_id)
    odd = f"t/{version.tenant_id}/u/readme"
    storage.put_bytes(strangers.staged_config_key, b"{}")
    storage.put_bytes(odd, b"{}")
    tasks.adapter_versions_sweep()
    assert not is_staging_empty(version)
    assert storage.object_size(strangers.staged_config_key) == storage.object_size(odd) == 2


def test_a_retired_versions_files_go_when_nothing_accepted_reads_them() -> None:
    first, second = validate(upload()), validate(upload())
    digest = first.digest
    assert second.digest == digest
    used = quotas.used("storage_bytes")
    services.model_delete("invoices@1")
    age(first, days=3)
    tasks.adapter_versions_sweep()
    assert is_there(second, digest)
    assert quotas.used("storage_bytes") == used // 2
    services.model_delete("invoices@2")
    age(second, days=1)
    tasks.adapter_versions_sweep()
    assert is_there(second, digest)
    age(second, days=3)
    tasks.adapter_versions_sweep()
    assert not is_there(second, digest)
    assert quotas.used("storage_bytes") == 0
    again = validate(upload())
    assert (again.status, is_there(again, digest)) == (Status.READY, True)


class TestQuota:
    STATED: ClassVar = {
        "adapter_config.json": len(GOOD_CONFIG),
        "adapter_model.safetensors": len(GOOD_TENSORS),
    }
    SIZE = len(GOOD_CONFIG) + len(GOOD_TENSORS)

    @pytest.fixture(autouse=True)
    def _room_for_two(self, settings: Any) -> None:
        settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"storage_bytes": 2 * self.SIZE}

    def test_an_adapter_is_refused_before_its_bytes(self, acme: Party) -> None:
        for _ in range(2):
            validate(upload())
        url = "/api/v1/adapters/invoices/versions"
        answer = as_key(acme).post(url, {"files": self.STATED}, format="json")
        error = assert_error(answer, 400)
        assert error["code"] == "storage_limit_exceeded"
        assert f"{2 * self.SIZE} bytes" in error["message"]
        assert AdapterVersion.objects.count() == 2

    def test_a_rejected_version_counts_as_long_as_its_urls_work(self) -> None:
        for _ in range(2):
            version = validate(upload(tensors=b"\0" * len(GOOD_TENSORS)))
            assert version.status == Status.REJECTED
        with pytest.raises(InvalidRequest):
            services.adapter_version_create(name="invoices", files=self.STATED)
        age(version, minutes=services.UPLOAD_EXPIRES_S / 60)
        with pytest.raises(InvalidRequest):
            services.adapter_version_create(name="invoices", files=self.STATED)
        age(version, minutes=31)
        services.adapter_version_create(name="invoices", files=self.STATED)

    def test_files_adapters_and_datasets_have_one_quota(self) -> None:
        rows = b'{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", '
        rows += b'"content": "%s"}]}\n' % (b"b" * self.SIZE)
        dataset_services.dataset_upload(name="chats", content=rows)
        with pytest.raises(InvalidRequest) as caught:
            dataset_services.dataset_upload(name="more", content=rows.replace(b"?", b"!"))
        assert caught.value.code == "storage_limit_exceeded"
        with pytest.raises(InvalidRequest):
            services.adapter_version_create(name="invoices", files=self.STATED)
        with pytest.raises(InvalidRequest):
            file_services.file_begin(max_bytes=self.SIZE)
        file_services.file_begin(max_bytes=10)
        assert quotas.used("storage_bytes") == len(rows) + 10


def test_an_upload_under_way_is_left_alone() -> None:
    stated = {"adapter_config.json": 2, "adapter_model.safetensors": 2}
    version = services.adapter_version_create(name="invoices", files=stated)
    storage.put_bytes(version.staged_config_key, b"{}")
    age(version, hours=25)
    assert orphaned_objects.versions_clear() == 0
    assert storage.object_size(version.staged_config_key) == 2


def test_bytes_of_a_version_that_was_never_decided_are_removed() -> None:
    version = upload()
    digest = checked_by_one_that_dies(version)
    assert is_there(version, digest)
    version.refresh_from_db()
    assert ingest.version_drop(version, "its check ends its process")
    age(version, hours=25)
    tasks.adapter_versions_sweep()
    assert not is_there(version, digest)


@pytest.mark.parametrize("is_ready", [True, False])
def test_bytes_that_another_version_has_too_stay(is_ready: bool) -> None:
    dropped, other = upload(), upload()
    digest = checked_by_one_that_dies(dropped)
    checked_by_one_that_dies(other)
    if is_ready:
        validate(other)
    dropped.refresh_from_db()
    assert ingest.version_drop(dropped, "its check ends its process")
    age(dropped, hours=25)
    assert orphaned_objects.versions_clear() == 1
    assert is_there(other, digest)
    assert validate(other).status == Status.READY


def test_who_comes_too_late_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was paused for days with checked bytes in hand, and the version was given up."""
    version = upload()
    put_there, digests = storage.upload, []

    def upload_late(path: Path, key: str) -> None:
        version.refresh_from_db()
        digests.append(version.kept_digest)
        assert ingest.version_drop(version, "its check took too long")
        age(version, hours=25)
        assert orphaned_objects.versions_clear() == 1
        put_there(path, key)

    monkeypatch.setattr(storage, "upload", upload_late)
    assert validate(version).status == Status.REJECTED
    (digest,) = digests
    assert digest and not is_there(version, digest)


def test_a_file_replaced_between_two_checks_leaves_one_copy() -> None:
    """The first, when it wakes, does not make a version ready whose bytes are gone."""
    version = upload(config=OTHER_CONFIG)
    AdapterVersion.objects.filter(pk=version.pk).update(status=Status.VALIDATING)
    first = AdapterVersion.objects.select_related("adapter__base_model").get(pk=version.pk)
    checked = ingest._check_and_keep(first)
    replaced = files.config_bytes(lora_alpha=5)
    assert len(replaced) == len(OTHER_CONFIG)
    storage.put_bytes(version.staged_config_key, replaced)
    second = checked_by_one_that_dies(version)
    assert second != first.digest
    assert not is_there(version, first.digest)
    facts = ingest._facts(first, checked)
    assert not probing.hold(first, facts) and not ingest.version_accept(first, facts)
    version.refresh_from_db()
    assert version.status == Status.VALIDATING
    validate(version)
    assert (version.status, version.digest) == (Status.READY, second)
    assert is_there(version, second)


def test_a_turn_is_bounded_and_begins_with_what_was_left(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    versions = [validate(upload(tensors=b"no tensors")) for _ in range(3)]
    for version in versions:
        storage.put_bytes(version.staged_config_key, b"late")
        age(version, hours=25)
    monkeypatch.setattr(orphaned_objects, "MAX_PER_TURN", 2)
    there, settings.S3_ENDPOINT_URL = settings.S3_ENDPOINT_URL, "http://127.0.0.1:9"
    with pytest.raises(storage.STORAGE_ERRORS):
        orphaned_objects.versions_clear()
    settings.S3_ENDPOINT_URL = there
    assert [orphaned_objects.versions_clear() for _ in range(3)] == [2, 1, 0]
    assert all(is_staging_empty(version) for version in versions)
