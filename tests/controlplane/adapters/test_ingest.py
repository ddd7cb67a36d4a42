"""From uploaded files to ready or rejected, against the real object store."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import pytest

from controlplane import storage
from controlplane.adapters import services, tasks
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.scoping import tenant_scope
from tests.controlplane.adapters import files
from tests.controlplane.conftest import Party
from worker.protocol import adapter_digest

GOOD_CONFIG, GOOD_TENSORS = files.config_bytes(), files.pack(files.tensors())
Status = AdapterVersion.Status


def put(url: str, data: bytes) -> int:
    request = urllib.request.Request(url, data=data, method="PUT")
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


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
    tasks.adapter_version_validate(str(version.tenant_id), str(version.pk))
    version.refresh_from_db()
    return version


@pytest.fixture
def scope(acme: Party, base_model: BaseModel) -> Any:
    with tenant_scope(acme.tenant.id):
        yield


def test_good_adapter_becomes_ready_and_live(scope: None) -> None:
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
    assert storage.object_size(version.staged_config_key) is None
    assert storage.object_size(version.staged_tensors_key) is None
