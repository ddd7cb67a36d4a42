"""Multipart uploads through the API, against the real object store."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import os
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.adapters import ingest, services, tasks, uploads
from controlplane.adapters.models import AdapterVersion, BaseModel, DeletedVersion, VersionUpload
from controlplane.infra import storage
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.usage.limits import quotas
from tests.controlplane.adapters import files
from tests.controlplane.adapters.wide import CONFIG_BYTES, wide_base, wide_tensors
from tests.controlplane.conftest import Party, as_key, as_user, assert_error

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
VERSIONS = "/api/v1/adapters/invoices/versions"
#: The least that S3 takes, but for the last part.
PART = 5 << 20
Status = AdapterVersion.Status


FILES = {CONFIG: CONFIG_BYTES, TENSORS: wide_tensors()}
LAST = 3


@pytest.fixture(autouse=True)
def _wide_base(base_model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 * PART < len(FILES[TENSORS]) < 3 * PART
    monkeypatch.setattr(uploads, "MIN_PART_BYTES", PART)
    BaseModel.objects.update(config=wide_base())


def begin(client: APIClient, given: dict[str, bytes] = FILES) -> Any:
    sizes = {file: len(data) for file, data in given.items()}
    answer = client.post(VERSIONS, {"files": sizes, "multipart": True}, format="json")
    assert answer.status_code == 201, answer.content
    return answer.json()


def part_of(data: bytes, number: int, size: int = PART) -> bytes:
    return data[(number - 1) * size : number * size]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sign(client: APIClient, file: str, parts: Any, number: int = 1) -> Any:
    body = {"file": file, "parts": parts}
    return client.post(f"{VERSIONS}/{number}/parts", body, format="json")


def put(signed: dict[str, Any], data: bytes, **headers: str) -> int:
    return files.put(signed["url"], data, {**signed["headers"], **headers})


def send(client: APIClient, file: str, *numbers: int, version: int = 1) -> list[dict[str, Any]]:
    """Send these parts of a file, or all. -> what the API signed."""
    data = FILES[file]
    numbers = numbers or tuple(range(1, -(-len(data) // PART) + 1))
    digests = {str(number): sha256(part_of(data, number)) for number in numbers}
    answer = sign(client, file, digests, version)
    assert answer.status_code == 200, answer.content
    signed: list[dict[str, Any]] = answer.json()["data"]
    assert [each["number"] for each in signed] == list(numbers)
    for each in signed:
        assert put(each, part_of(data, each["number"])) == 200
    return signed


def state(client: APIClient, number: int = 1) -> Any:
    answer = client.get(f"{VERSIONS}/{number}/upload")
    assert answer.status_code == 200, answer.content
    return answer.json()


def version_of(party: Party, number: int = 1) -> AdapterVersion:
    with tenant_scope(party.tenant.id):
        return AdapterVersion.objects.select_related("adapter").get(number=number)


def checked(party: Party) -> AdapterVersion:
    with tenant_scope(party.tenant.id):
        ingest.version_ingest(version_of(party).pk)
    return version_of(party)


def left_of(version: AdapterVersion) -> list[str]:
    """What the store has in the version's staging area, whole or unfinished."""
    prefix = version.staging_prefix
    unfinished = [upload["Key"] for upload in storage.unfinished_writes(prefix)]
    return [*storage.keys(prefix), *unfinished]


def test_parts_in_any_order_make_the_version(acme: Party) -> None:
    client = as_key(acme)
    made = begin(client)
    assert (made["status"], made["uploads"]) == ("uploading", {})
    file = made["upload"]["files"][TENSORS]
    assert (file["part_bytes"], file["num_parts"], file["parts"]) == (PART, LAST, [])
    send(client, TENSORS, *range(LAST, 0, -1))
    send(client, CONFIG)
    assert client.post(f"{VERSIONS}/1/complete").json()["status"] == "uploaded"
    version = checked(acme)
    assert version.status == Status.READY, version.reasons
    assert storage.read_bytes(version.tensors_key, max_bytes=10**8) == FILES[TENSORS]
    assert left_of(version) == []
    with tenant_scope(acme.tenant.id):
        assert not VersionUpload.objects.exists()
        whole = services.adapter_version_create(
            name="invoices", files={file: len(data) for file, data in FILES.items()}
        )
        for file, url in services.adapter_version_upload_urls(version=whole).items():
            assert put({"url": url, "headers": {}}, FILES[file]) == 200
        services.adapter_version_complete(version=whole)
        ingest.version_ingest(whole.pk)
    assert version_of(acme, 2).digest == version.digest
    assert state(client)["files"] == {}


def test_what_arrived_is_told_and_the_rest_is_asked_for(acme: Party) -> None:
    client = as_key(acme)
    begin(client)
    send(client, CONFIG)
    send(client, TENSORS, 1)
    assert sign(client, TENSORS, {"2": sha256(part_of(FILES[TENSORS], 2))}).status_code == 200
    found = state(client)
    parts = found["files"][TENSORS]["parts"]
    assert [(part["number"], part["is_uploaded"]) for part in parts] == [
        (1, True),
        (2, False),
    ]
    assert parts[0]["sha256"] == sha256(part_of(FILES[TENSORS], 1))
    expires = dt.datetime.fromisoformat(found["expires_at"])
    assert dt.timedelta(hours=23) < expires - timezone.now() < dt.timedelta(hours=25)
    answer = client.post(f"{VERSIONS}/1/complete")
    error = assert_error(answer, 409, TENSORS)
    assert error["code"] == "parts_missing"
    assert f"of its {LAST} parts 2 are missing: 2, 3." in error["message"]
    send(client, TENSORS, 2, 3)
    assert client.post(f"{VERSIONS}/1/complete").status_code == 202
    assert client.post(f"{VERSIONS}/1/complete").status_code == 202, "its answer may be lost"
    assert checked(acme).status == Status.READY


def test_the_store_takes_only_the_stated_bytes(acme: Party) -> None:
    client = as_key(acme)
    begin(client)
    data = part_of(FILES[TENSORS], 1)
    [signed] = sign(client, TENSORS, {"1": sha256(data)}).json()["data"]
    assert signed["headers"]["Content-Length"] == str(len(data))
    other = bytes(len(data))
    assert put(signed, other) >= 400
    for length in (len(data) - 1, len(data) + 1):
        body = (data + b"x")[:length]
        assert put(signed, body, **{"Content-Length": str(length)}) == 403
    of_other = base64.b64encode(hashlib.sha256(other).digest()).decode()
    assert put(signed, other, **{"x-amz-checksum-sha256": of_other}) == 403
    next_part = {**signed, "url": signed["url"].replace("partNumber=1", "partNumber=2")}
    assert put(next_part, data) == 403
    assert not state(client)["files"][TENSORS]["parts"][0]["is_uploaded"]
    assert put(signed, data) == 200
    assert put(signed, data) == 200, "a part can come again"
    assert state(client)["files"][TENSORS]["parts"][0]["is_uploaded"]


BAD_PARTS: dict[str, tuple[str, Any, int, str]] = {
    "no file": ("adapter_model.bin", {"1": "0" * 64}, 404, "file"),
    "none": (TENSORS, {}, 400, "parts"),
    "too many": (TENSORS, {str(n): "0" * 64 for n in range(1, 102)}, 400, "parts"),
    "zero": (TENSORS, {"0": "0" * 64}, 400, "parts.0"),
    "beyond": (TENSORS, {str(LAST + 1): "0" * 64}, 400, f"parts.{LAST + 1}"),
    "padded": (TENSORS, {"01": "0" * 64}, 400, "parts.01"),
    "negative": (TENSORS, {"-1": "0" * 64}, 400, "parts.-1"),
    "word": (TENSORS, {"one": "0" * 64}, 400, "parts.one"),
    "digits of elsewhere": (TENSORS, {"١": "0" * 64}, 400, "parts.١"),
    "long number": (TENSORS, {"1" * 5000: "0" * 64}, 400, "parts." + "1" * 20),
    "short digest": (TENSORS, {"1": "0" * 63}, 400, "parts.1"),
    "upper case": (TENSORS, {"1": "A" * 64}, 400, "parts.1"),
    "no list": (TENSORS, ["0" * 64], 400, "parts"),
}


@pytest.mark.parametrize(("file", "parts", "status", "param"), BAD_PARTS.values(), ids=BAD_PARTS)
def test_bad_parts_are_named(acme: Party, file: str, parts: Any, status: int, param: str) -> None:
    client = as_key(acme)
    begin(client)
    assert_error(sign(client, file, parts), status, param)
    with tenant_scope(acme.tenant.id):
        assert {upload.upload_id for upload in VersionUpload.objects.all()} == {""}


def test_a_file_that_changed_is_another_upload(acme: Party) -> None:
    client = as_key(acme)
    begin(client)
    send(client, TENSORS, 1)
    error = assert_error(sign(client, TENSORS, {"1": "0" * 64}), 409, "parts.1")
    assert error["code"] == "part_changed"
    assert_error(sign(client, TENSORS, {"2": "0" * 64, "1": "0" * 64}), 409, "parts.1")
    assert [part["number"] for part in state(client)["files"][TENSORS]["parts"]] == [1]


def test_bytes_that_the_store_did_not_check_are_rejected(acme: Party) -> None:
    client = as_key(acme)
    begin(client)
    for file in FILES:
        send(client, file)
    assert client.post(f"{VERSIONS}/1/complete").status_code == 202
    version = version_of(acme)
    damaged = bytearray(FILES[TENSORS])
    damaged[-1] ^= 1
    storage.put_bytes(version.staged_tensors_key, bytes(damaged))
    version = checked(acme)
    assert version.status == Status.REJECTED
    reason = {"field": TENSORS, "message": f"part {LAST} was damaged on its way"}
    assert version.reasons == [reason]


def test_old_clients_get_one_url_for_each_file(acme: Party) -> None:
    client = as_key(acme)
    sizes = {file: len(data) for file, data in FILES.items()}
    made = client.post(VERSIONS, {"files": sizes}, format="json").json()
    assert (set(made["uploads"]), made["upload"]) == (set(FILES), None)
    assert_error(sign(client, TENSORS, {"1": "0" * 64}), 404, "file")
    assert state(client)["files"] == {}


class TestEnd:
    """However an upload ends, nothing of it stays in the store."""

    def begun(self, party: Party) -> AdapterVersion:
        client = as_key(party)
        begin(client)
        send(client, TENSORS, 1, 2)
        send(client, CONFIG)
        version = version_of(party)
        assert len(left_of(version)) == 2
        return version

    def test_aborted(self, acme: Party) -> None:
        version, client = self.begun(acme), as_key(acme)
        assert client.delete(f"{VERSIONS}/1/upload").status_code == 204
        assert client.get(f"{VERSIONS}/1").status_code == 404
        assert_error(sign(client, TENSORS, {"3": "0" * 64}), 404)
        self.settle()
        assert left_of(version) == []
        assert begin(client)["number"] == 2

    def test_its_adapter_is_deleted(self, acme: Party) -> None:
        version = self.begun(acme)
        assert as_key(acme).delete("/api/v1/adapters/invoices").status_code == 204
        self.settle()
        assert left_of(version) == []

    def test_abandoned(self, acme: Party) -> None:
        version = self.begun(acme)
        assert storage.abort_old_parts(before=timezone.now() + dt.timedelta(hours=1)) == 0
        tasks.adapter_versions_sweep()
        assert len(left_of(version)) == 2, "it has a day"
        with all_tenants(reason="test"):
            AdapterVersion.objects.update(created_at=timezone.now() - dt.timedelta(hours=25))
        tasks.adapter_versions_sweep()
        assert left_of(version) == []
        assert version_of(acme).status == Status.REJECTED
        assert_error(sign(as_key(acme), TENSORS, {"3": sha256(b"")}), 409)

    def test_a_part_that_came_after_it(self, acme: Party) -> None:
        version = self.begun(acme)
        as_key(acme).delete(f"{VERSIONS}/1/upload")
        self.settle()
        storage.multipart_begin(version.staged_tensors_key)
        tasks.adapter_versions_sweep()
        assert left_of(version) == []

    def test_complete(self, acme: Party) -> None:
        client = as_key(acme)
        begin(client)
        for file in FILES:
            signed = send(client, file)
        client.post(f"{VERSIONS}/1/complete")
        error = assert_error(client.delete(f"{VERSIONS}/1/upload"), 409)
        assert error["code"] == "upload_ended"
        assert_error(sign(client, CONFIG, {"1": sha256(FILES[CONFIG])}), 409)
        assert put(signed[0], part_of(FILES[TENSORS], 1)) == 404, "its URLs are of no use"
        assert left_of(checked(acme)) == []

    def test_sent_again_and_again(self, acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
        version = self.begun(acme)
        tasks.adapter_versions_sweep()
        assert version_of(acme).status == Status.UPLOADING
        monkeypatch.setattr(uploads, "MAX_COPIES", 0)
        client = as_key(acme)
        send(client, TENSORS, 1)
        tasks.adapter_versions_sweep()
        assert "too often" in version_of(acme).reasons[0]["message"]
        assert left_of(version) == []

    @staticmethod
    def settle() -> None:
        with all_tenants(reason="test"):
            then = timezone.now() - dt.timedelta(minutes=1)
            DeletedVersion.objects.update(created_at=then)
        tasks.deleted_versions_remove()


def test_an_upload_that_the_store_lost_begins_again(acme: Party) -> None:
    client = as_key(acme)
    begin(client)
    send(client, CONFIG)
    send(client, TENSORS)
    assert storage.abort_parts(version_of(acme).staged_tensors_key) == 1
    error = assert_error(client.post(f"{VERSIONS}/1/complete"), 409, TENSORS)
    assert error["code"] == "parts_missing"
    parts = state(client)["files"][TENSORS]["parts"]
    assert {part["is_uploaded"] for part in parts} == {False}
    send(client, TENSORS)
    assert client.post(f"{VERSIONS}/1/complete").status_code == 202
    assert checked(acme).status == Status.READY


def test_a_completion_that_was_cut_off_continues(acme: Party) -> None:
    """The store has assembled a file, and the process died before it was noted."""
    client = as_key(acme)
    begin(client)
    for file in FILES:
        send(client, file)
    with tenant_scope(acme.tenant.id):
        uploads._assemble(VersionUpload.objects.get(file=TENSORS))
    parts = state(client)["files"][TENSORS]["parts"]
    assert {part["is_uploaded"] for part in parts} == {True}
    assert client.post(f"{VERSIONS}/1/complete").status_code == 202
    assert checked(acme).status == Status.READY


def test_the_quota_counts_before_any_byte(acme: Party, settings: Any) -> None:
    size = sum(map(len, FILES.values()))
    settings.TENANT_QUOTAS = {**settings.TENANT_QUOTAS, "storage_bytes": 2 * size - 1}
    client = as_key(acme)
    begin(client)
    with tenant_scope(acme.tenant.id):
        assert quotas.used("storage_bytes") == size
    sizes = {file: len(data) for file, data in FILES.items()}
    answer = client.post(VERSIONS, {"files": sizes, "multipart": True}, format="json")
    assert assert_error(answer, 400)["code"] == "storage_limit_exceeded"
    assert client.delete(f"{VERSIONS}/1/upload").status_code == 204
    TestEnd.settle()
    assert begin(client)["number"] == 2


def test_others_cannot(acme: Party, globex: Party) -> None:
    begin(as_key(acme))
    parts = {"1": "0" * 64}
    for client in (as_key(globex), as_user(globex.owner)):
        assert_error(client.post(f"{VERSIONS}/1/parts"), 404)
        assert_error(sign(client, TENSORS, parts), 404)
        assert_error(client.get(f"{VERSIONS}/1/upload"), 404)
        assert_error(client.delete(f"{VERSIONS}/1/upload"), 404)
    viewer = as_user(acme.viewer)
    assert_error(sign(viewer, TENSORS, parts), 403)
    assert_error(viewer.delete(f"{VERSIONS}/1/upload"), 403)
    assert viewer.get(f"{VERSIONS}/1/upload").status_code == 200


def test_a_store_that_is_away_is_told(acme: Party, settings: Any) -> None:
    client = as_key(acme)
    begin(client)
    send(client, TENSORS, 1)
    there, settings.S3_ENDPOINT_URL = settings.S3_ENDPOINT_URL, "http://127.0.0.1:9"
    assert_error(client.get(f"{VERSIONS}/1/upload"), 503)
    assert_error(sign(client, CONFIG, {"1": sha256(FILES[CONFIG])}), 503)
    settings.S3_ENDPOINT_URL = there
    send(client, CONFIG)
    settings.S3_ENDPOINT_URL = "http://127.0.0.1:9"
    assert_error(client.post(f"{VERSIONS}/1/complete"), 503)


@pytest.mark.parametrize(
    ("num_bytes", "part_bytes", "num_parts"),
    [
        (1, 8 << 20, 1),
        (8 << 20, 8 << 20, 1),
        ((8 << 20) + 1, 8 << 20, 2),
        (services.MAX_TENSORS_BYTES, 8 << 20, 256),
        (8000 << 20, 8 << 20, 1000),
        ((8000 << 20) + 1, 9 << 20, 889),
        (64000 << 20, 64 << 20, 1000),
    ],
)
def test_parts_are_whole_mebibytes_and_at_most_a_thousand(
    num_bytes: int, part_bytes: int, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    upload = VersionUpload(num_bytes=num_bytes, part_bytes=uploads.part_bytes_for(num_bytes))
    assert (upload.part_bytes, upload.num_parts) == (part_bytes, num_parts)
    lengths = [upload.length_of(number) for number in range(1, num_parts + 1)]
    assert sum(lengths) == num_bytes and min(lengths) > 0 and set(lengths[:-1]) <= {part_bytes}


def test_parts_of_the_real_length(acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    data = os.urandom((8 << 20) + 5)
    client = as_key(acme)
    begin(client, {CONFIG: FILES[CONFIG], TENSORS: data})
    send(client, CONFIG)
    for number in (2, 1):
        part = part_of(data, number, 8 << 20)
        [signed] = sign(client, TENSORS, {str(number): sha256(part)}).json()["data"]
        assert put(signed, part) == 200
    assert client.post(f"{VERSIONS}/1/complete").status_code == 202
    version = version_of(acme)
    found = b"".join(storage.read_pieces(version.staged_tensors_key, max_bytes=len(data) + 1))
    assert found == data
    assert "part" not in str(checked(acme).reasons)
    assert left_of(version) == []
