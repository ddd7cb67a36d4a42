"""From uploaded files to ready or rejected, against the real object store."""

from __future__ import annotations

import datetime as dt
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from contract.messages.protocol import adapter_digest
from controlplane.adapters import ingest, services, tasks
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.adapters import files
from tests.controlplane.adapters.files import GOOD_CONFIG, GOOD_TENSORS, put
from tests.controlplane.conftest import TINY_CONFIG, Party, make_party

Status = AdapterVersion.Status


def upload(
    config: bytes = GOOD_CONFIG, tensors: bytes = GOOD_TENSORS, name: str = "invoices"
) -> AdapterVersion:
    """An uploaded version of the tenant in scope, its files PUT as a client does."""
    stated = {"adapter_config.json": len(config), "adapter_model.safetensors": len(tensors)}
    version = services.adapter_version_create(name=name, files=stated)
    urls = services.adapter_version_upload_urls(version=version)
    assert put(urls["adapter_config.json"], config) == 200
    assert put(urls["adapter_model.safetensors"], tensors) == 200
    return services.adapter_version_complete(version=version)


def validate(version: AdapterVersion) -> AdapterVersion:
    ingest.version_ingest(version.pk)
    version.refresh_from_db()
    return version


def is_staging_empty(version: AdapterVersion) -> bool:
    keys = (version.staged_config_key, version.staged_tensors_key)
    return all(storage.object_size(key) is None for key in keys)


@pytest.fixture
def scope(acme: Party, base_model: BaseModel) -> Iterator[None]:
    with tenant_scope(acme.tenant.id):
        yield


@pytest.mark.usefixtures("scope")
class TestDecision:
    def test_good_adapter_becomes_ready_and_live(self) -> None:
        version = upload()
        assert version.status == Status.UPLOADED
        validate(version)
        assert (version.status, version.reasons) == (Status.READY, [])
        assert version.digest == adapter_digest(files.config(), [GOOD_TENSORS], "0" * 64)
        assert version.report["target_modules"] == ["down_proj", "q_proj", "v_proj"]
        assert version.max_rank == 4
        assert Adapter.objects.get().live_version == version
        assert storage.read_bytes(version.config_key, max_bytes=10**6) == GOOD_CONFIG
        assert storage.read_bytes(version.tensors_key, max_bytes=10**6) == GOOD_TENSORS
        assert is_staging_empty(version)

    BAD = {
        "rank too high": (files.config_bytes(r=1000), GOOD_TENSORS, "r"),
        "whole modules": (
            files.config_bytes(modules_to_save=["score"]),
            GOOD_TENSORS,
            "modules_to_save",
        ),
        "config not json": (b"{r: 4}", GOOD_TENSORS, "adapter_config.json"),
        "pickle": (GOOD_CONFIG, b"\x80\x02}q\x00.", "adapter_model.safetensors"),
        "truncated": (GOOD_CONFIG, GOOD_TENSORS[:-1], "adapter_model.safetensors"),
        "one byte": (GOOD_CONFIG, b"x", "adapter_model.safetensors"),
        "lying header": (
            GOOD_CONFIG,
            struct.pack("<Q", 1 << 40) + GOOD_TENSORS[8:],
            "adapter_model.safetensors",
        ),
        "nul in a name": (
            GOOD_CONFIG,
            files.pack({"\0": ("F32", (1,), bytes(4))}),
            "\\x00",
        ),
        "nan": (
            GOOD_CONFIG,
            GOOD_TENSORS[:-4] + struct.pack("<f", float("nan")),
            "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight",
        ),
    }

    @pytest.mark.parametrize(("config", "tensors", "field"), BAD.values(), ids=BAD)
    def test_bad_adapter_is_rejected_and_forgotten(
        self, config: bytes, tensors: bytes, field: str
    ) -> None:
        version = validate(upload(config, tensors))
        assert version.status == Status.REJECTED
        assert field in [reason["field"] for reason in version.reasons]
        assert version.digest == ""
        assert Adapter.objects.get().live_version is None
        assert is_staging_empty(version)

    def test_rejected_version_leaves_the_live_one(self) -> None:
        first = validate(upload())
        validate(upload(tensors=b"\x80\x02."))
        assert Adapter.objects.get().live_version == first

    def test_same_files_twice_have_one_digest(self) -> None:
        first, second = validate(upload()), validate(upload())
        assert first.digest == second.digest

    def test_a_second_version_is_ready_and_waits(self) -> None:
        first, second = validate(upload()), validate(upload())
        assert second.status == Status.READY
        assert Adapter.objects.get().live_version == first

    @pytest.mark.parametrize("policy", Adapter.PromotionPolicy.values)
    def test_newest_ready_version_stays_live(self, policy: str) -> None:
        services.adapter_create(name="invoices")
        Adapter.objects.update(promotion_policy=policy)  # `gate` comes with a suite
        first, second = upload(), upload()
        for version in (second, first):
            ingest.version_ingest(version.pk)
            version.refresh_from_db()
        assert first.status == Status.READY
        assert Adapter.objects.get().live_version == second

    def test_another_revision_of_the_base_gives_another_digest(self) -> None:
        first = validate(upload())
        BaseModel.objects.update(revision="f" * 64)
        assert validate(upload()).digest != first.digest


@pytest.mark.usefixtures("scope")
class TestCrashes:
    def test_running_again_changes_nothing(self) -> None:
        version = validate(upload())
        before = AdapterVersion.objects.values().get()
        validate(version)
        assert AdapterVersion.objects.values().get() == before

    def test_a_run_cut_short_is_taken_up(self) -> None:
        version = upload()
        AdapterVersion.objects.update(status=Status.VALIDATING)
        assert validate(version).status == Status.READY

    def test_a_run_cut_short_after_the_decision_clears_up(self) -> None:
        version = validate(upload())
        storage.put_bytes(version.staged_config_key, GOOD_CONFIG)
        validate(version)
        assert is_staging_empty(version)

    def test_version_that_was_not_completed_is_left_alone(self) -> None:
        stated = {"adapter_config.json": 2, "adapter_model.safetensors": 2}
        version = services.adapter_version_create(name="invoices", files=stated)
        assert validate(version).status == Status.UPLOADING

    def test_lost_file_is_rejected(self) -> None:
        version = upload()
        storage.delete([version.staged_tensors_key])
        validate(version)
        assert (version.status, len(version.reasons)) == (Status.REJECTED, 1)

    def test_file_replaced_after_completion_is_checked_as_it_is(self) -> None:
        """The client's URL still works: what counts is what is kept."""
        version = upload()
        storage.put_bytes(version.staged_tensors_key, GOOD_TENSORS + b"more")
        validate(version)
        assert version.status == Status.REJECTED
        assert storage.object_size(version.tensors_key) is None

    def test_no_scratch_file_is_left(self, settings: Any, tmp_path: Path) -> None:
        settings.WORK_DIR = tmp_path
        validate(upload())
        validate(upload(tensors=GOOD_TENSORS[:-4] + struct.pack("<f", float("inf"))))
        assert os.listdir(tmp_path) == []


class TestSweep:
    @staticmethod
    def age(version: AdapterVersion, **ago: Any) -> None:
        then = timezone.now() - dt.timedelta(**ago)
        AdapterVersion.objects.filter(pk=version.pk).update(created_at=then, status_changed_at=then)

    @pytest.mark.parametrize("status", [Status.UPLOADED, Status.VALIDATING])
    def test_lost_check_is_given_once(self, scope: None, status: str) -> None:
        version = upload()
        AdapterVersion.objects.update(status=status)
        assert ingest.versions_overdue() == []
        self.age(version, minutes=11)
        assert ingest.versions_overdue() == [version]
        assert ingest.versions_overdue() == []

    def test_finished_version_is_left_alone(self, scope: None) -> None:
        version = validate(upload())
        self.age(version, days=2)
        tasks.adapter_versions_sweep()
        version.refresh_from_db()
        assert version.status == Status.READY

    def test_unfinished_upload_ends_after_a_day(self, scope: None) -> None:
        stated = {"adapter_config.json": 2, "adapter_model.safetensors": 2}
        old = services.adapter_version_create(name="invoices", files=stated)
        new = services.adapter_version_create(name="invoices", files=stated)
        storage.put_bytes(old.staged_config_key, b"{}")
        self.age(old, hours=25)
        self.age(new, hours=23)
        tasks.adapter_versions_sweep()
        old.refresh_from_db()
        new.refresh_from_db()
        assert (old.status, new.status) == (Status.REJECTED, Status.UPLOADING)
        assert is_staging_empty(old)

    @pytest.mark.parametrize("status", [Status.UPLOADED, Status.VALIDATING])
    def test_a_check_that_ends_its_process_every_time_ends_after_a_day(
        self, scope: None, status: str
    ) -> None:
        stuck, busy = upload(), upload()
        AdapterVersion.objects.update(status=status)
        self.age(stuck, hours=49)
        self.age(busy, hours=47)
        tasks.adapter_versions_sweep()
        stuck.refresh_from_db()
        busy.refresh_from_db()
        assert (stuck.status, busy.status) == (Status.REJECTED, status)
        assert "could not be checked" in stuck.reasons[0]["message"]
        assert is_staging_empty(stuck)
        assert not is_staging_empty(busy)

    def test_an_unfinished_upload_whose_files_cannot_be_removed_waits(
        self, scope: None, settings: Any
    ) -> None:
        there = settings.S3_ENDPOINT_URL
        version = services.adapter_version_create(
            name="invoices", files={"adapter_config.json": 2, "adapter_model.safetensors": 2}
        )
        storage.put_bytes(version.staged_config_key, b"{}")
        self.age(version, hours=25)
        settings.S3_ENDPOINT_URL = "http://127.0.0.1:9"
        with pytest.raises(storage.STORAGE_ERRORS):
            tasks.adapter_versions_sweep()
        settings.S3_ENDPOINT_URL = there
        tasks.adapter_versions_sweep()
        version.refresh_from_db()
        assert version.status == Status.REJECTED
        assert is_staging_empty(version)


def test_task_sees_its_tenant_only(acme: Party, globex: Party, base_model: BaseModel) -> None:
    with tenant_scope(acme.tenant.id):
        version = upload()
    with tenant_scope(globex.tenant.id):
        ingest.version_ingest(version.pk)
    with tenant_scope(acme.tenant.id):
        version.refresh_from_db()
    assert version.status == Status.UPLOADED


def test_publishing_local_files(acme: Party, base_model: BaseModel, tmp_path: Path) -> None:
    config_path, tensors_path = tmp_path / "c", tmp_path / "t"
    config_path.write_bytes(GOOD_CONFIG)

    def publish(tensors: bytes) -> AdapterVersion:
        tensors_path.write_bytes(tensors)
        version = services.adapter_version_create(
            name="nightly",
            files={
                "adapter_config.json": len(GOOD_CONFIG),
                "adapter_model.safetensors": len(tensors),
            },
            created_by=None,
            source=AdapterVersion.Source.TRAINING,
        )
        return services.adapter_version_upload_files(
            version=version, config_path=config_path, tensors_path=tensors_path
        )

    with tenant_scope(acme.tenant.id):
        adapter = services.adapter_create(name="nightly")
        version = publish(GOOD_TENSORS)
        assert (version.number, version.status, version.source) == (1, "ready", "training")
        adapter.refresh_from_db()
        assert adapter.live_version == version
        worse = publish(b"\x80\x02.")
    assert (worse.number, worse.status) == (2, "rejected")


@pytest.mark.django_db(transaction=True)
def test_versions_made_at_once_get_different_numbers() -> None:
    acme = make_party("acme")
    BaseModel.objects.create(name="tiny", revision="0" * 64, config=TINY_CONFIG, context_length=128)
    barrier, numbers, errors = threading.Barrier(8), [], []

    def create() -> None:
        try:
            with tenant_scope(acme.tenant.id):
                barrier.wait()
                stated = {"adapter_config.json": 2, "adapter_model.safetensors": 2}
                version = services.adapter_version_create(name="invoices", files=stated)
            numbers.append(version.number)
        except Exception as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sorted(numbers), errors) == ([1, 2, 3, 4, 5, 6, 7, 8], [])
