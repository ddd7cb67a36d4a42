"""A dataset grows by versions that share bytes; each can be trained on, and gone back to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.adapters.models import Adapter
from controlplane.errors import ApiError, Conflict, NotFound, PayloadTooLarge
from controlplane.files import services as files
from controlplane.files.models import File, Purpose
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training import tasks
from controlplane.training.datasets import contents, versions
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset, DatasetContent, DatasetVersion, TrainingRun
from controlplane.training.runs import services as run_services
from controlplane.usage.limits import quotas
from tests.controlplane.conftest import Party, as_key, assert_error
from tests.controlplane.console.conftest import browser_of
from tests.controlplane.training.conftest import ROWS
from tests.controlplane.training.test_contents import grow_old, is_there

VERSIONS = "/api/v1/datasets/chats/versions"


def rows(*prompts: str) -> bytes:
    return b"".join(
        json.dumps({"prompt": prompt, "completion": "yes"}).encode() + b"\n" for prompt in prompts
    )


def append(content: bytes) -> Dataset:
    return dataset_services.dataset_upload(name="chats", content=content, appends=True)


def content_of(sha256: str) -> bytes:
    return b"".join(contents.pieces(sha256))


def objects(party: Party) -> dict[str, int]:
    prefix = f"t/{party.tenant.id}/datasets/"
    return {stored.key: stored.num_bytes for stored in storage.objects(prefix)}


def test_appended_rows_share_the_earlier_bytes(in_acme: Party, dataset: Dataset) -> None:
    first, second = rows("one", "two").rstrip(), rows("three")
    append(first)
    now = append(second)
    assert (now.version, now.num_rows) == (3, 11)
    assert content_of(now.sha256) == ROWS + first + b"\n" + second
    assert sorted(objects(in_acme).values()) == sorted(map(len, (ROWS, first, second)))
    assert quotas.used("storage_bytes") == len(ROWS + first + second)
    told = now.versions.order_by("number").values_list("number", "kind", "num_rows", "added_rows")
    assert list(told) == [(1, "upload", 8, 8), (2, "append", 10, 2), (3, "append", 11, 1)]
    grow_old()
    tasks.datasets_sweep()
    assert content_of(versions.version_get(now, 2).sha256) == ROWS + first
    assert content_of(now.sha256) == ROWS + first + b"\n" + second


def test_a_repeated_append_adds_nothing(in_acme: Party, dataset: Dataset) -> None:
    assert append(rows("one")).version == 2
    assert append(rows("one")).version == 2  # its first answer was lost
    assert append(rows("two")).version == 3
    assert append(rows("one")).num_rows == 10


def test_replaced_versions_are_given_up_and_their_room_is_given_back(
    in_acme: Party, dataset: Dataset
) -> None:
    append(rows("one"))
    replaced = dataset_services.dataset_upload(name="chats", content=rows("new", "newer"))
    grow_old()
    tasks.datasets_sweep()
    assert quotas.used("storage_bytes") == replaced.num_bytes == sum(objects(in_acme).values())
    for number in (1, 2):
        with pytest.raises(Conflict) as caught:
            dataset_services.dataset_version_get(f"chats@{number}")
        assert caught.value.code == "rows_gone"
    with pytest.raises(NotFound):
        dataset_services.dataset_version_get("chats@4")
    for wrong in ("chats@", "chats@x", "chats@-1", "chats@1@1", "chats@" + "9" * 5000):
        with pytest.raises(ApiError):
            dataset_services.dataset_version_get(wrong)


def test_a_restore_is_a_version_and_can_be_undone(in_acme: Party, dataset: Dataset) -> None:
    append(rows("bad"))
    restored = versions.version_restore(dataset=dataset, number=1)
    assert (restored.version, restored.num_rows, restored.sha256) == (3, 8, dataset.sha256)
    grow_old()
    tasks.datasets_sweep()
    again = versions.version_restore(dataset=dataset, number=2)
    assert (again.version, content_of(again.sha256)) == (4, ROWS + rows("bad"))
    assert versions.version_restore(dataset=dataset, number=2).version == 4  # it is current
    # What nobody can go back to any more gives its room back.
    dataset_services.dataset_upload(name="chats", content=ROWS * 2)
    grow_old()
    tasks.datasets_sweep()
    assert quotas.used("storage_bytes") == 2 * len(ROWS)


def test_a_run_of_a_version_keeps_its_rows_until_it_has_ended(
    adapter: Adapter, dataset: Dataset
) -> None:
    append(rows("one"))
    append(rows("two"))
    run = run_services.training_run_create(adapter_name=adapter.name, dataset_name="chats@2")
    newest = run_services.training_run_create(adapter_name=adapter.name, dataset_name="chats")
    assert (run.dataset_version, run.num_rows) == (2, 9)
    assert (newest.dataset_version, newest.num_rows) == (3, 10)
    dataset_services.dataset_upload(name="chats", content=rows("new", "newer"))
    TrainingRun.objects.filter(pk=newest.pk).update(status="succeeded")
    grow_old()
    tasks.datasets_sweep()
    assert content_of(run.dataset_sha256) == ROWS + rows("one")
    dataset.delete()
    tasks.datasets_sweep()
    assert content_of(run.dataset_sha256) == ROWS + rows("one")
    TrainingRun.objects.update(status="succeeded")
    tasks.datasets_sweep()
    assert quotas.used("storage_bytes") == 0
    assert not DatasetContent.objects.exists()


def test_other_datasets_keep_the_bytes_that_they_share(in_acme: Party, dataset: Dataset) -> None:
    append(rows("one"))
    dataset_services.dataset_upload(name="other", content=rows("one"))
    dataset.delete()
    grow_old()
    tasks.datasets_sweep()
    assert not is_there(dataset.key)
    assert quotas.used("storage_bytes") == len(rows("one")) == sum(objects(in_acme).values())


def test_a_dataset_grows_to_the_limits_and_no_further(
    in_acme: Party, dataset: Dataset, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.MAX_DATASET_BYTES = len(ROWS) + 1 + len(rows("one"))
    with pytest.raises(PayloadTooLarge):
        append(rows("three"))
    assert append(rows("one")).version == 2
    settings.MAX_DATASET_BYTES = 1 << 20
    monkeypatch.setattr(versions, "MAX_ROWS", 10)
    with pytest.raises(ApiError, match="would have 11 rows; 10 are the limit"):
        append(rows("two", "three"))
    monkeypatch.setattr(versions, "MAX_VERSIONS", 2)
    with pytest.raises(ApiError, match="2 versions"):
        append(rows("two"))


def test_rows_that_the_release_before_stored_become_a_version(
    in_acme: Party, dataset: Dataset
) -> None:
    """While an upgrade rolls, its processes write datasets and know no versions."""
    old = dataset_services.dataset_upload(name="other", content=rows("old"))
    Dataset.objects.filter(pk=dataset.pk).update(sha256=old.sha256, num_rows=1)
    now = append(rows("one"))
    assert (now.version, content_of(now.sha256)) == (3, rows("old") + rows("one"))
    DatasetVersion.objects.all().delete()
    assert append(rows("two")).version == 2


def test_a_file_becomes_a_version_without_its_bytes_passing_through(
    acme: Party, globex: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tenant_scope(acme.tenant.id):
        dataset_services.dataset_upload(name="chats", content=ROWS)
        file = stored_file(rows("one", "two"))
        other = stored_file(b"notes", Purpose.USER_DATA)
    with tenant_scope(globex.tenant.id):
        theirs = stored_file(rows("theirs"))
    monkeypatch.setattr(storage, "read_pieces", None)
    client = as_key(acme)

    def send(**body: Any) -> Any:
        return client.post(VERSIONS, body, content_type="application/json")

    made = send(file=file.public_id, append=True)
    assert made.status_code == 201, made.json()
    assert (made.json()["version"], made.json()["num_rows"]) == (2, 10)
    assert send(file=file.public_id, append=True).json()["version"] == 2
    assert send(file=file.public_id).json()["num_rows"] == 2
    listed = client.get(VERSIONS).json()["data"]
    assert [(each["number"], each["kind"], each["is_stored"]) for each in listed] == [
        (3, "upload", True), (2, "append", False), (1, "upload", False),
    ]  # fmt: skip
    assert_error(send(file="file-nosuch"), 404, param="file")
    assert_error(send(file=theirs.public_id), 404, param="file")
    assert send(file=other.public_id).json()["error"]["code"] == "invalid_file_purpose"


def stored_file(content: bytes, purpose: Purpose = Purpose.FINE_TUNE) -> File:
    file = files.file_begin(max_bytes=len(content))
    writer = files.file_writer(file, max_bytes=len(content))
    writer.write(content)
    return files.file_finish(file, files.FileForm(purpose=purpose, filename="f"), writer)


def test_rows_are_appended_and_restored_by_the_api_and_the_console(acme: Party) -> None:
    client = as_key(acme)
    for number, content in enumerate((rows("one", "two"), rows("three")), start=1):
        sent = client.generic("POST", "/api/v1/datasets?name=chats&append=true", content)
        assert (sent.status_code, sent.json()["version"]) == (201, number)
    wrong = client.generic("POST", "/api/v1/datasets?name=chats&append=yes", rows("four"))
    assert_error(wrong, 400, param="append")
    browser = browser_of(acme.owner)
    page = browser.get("/console/training/datasets/chats").content.decode()
    assert "Version 2" in page and "restore/1" in page
    gone = browser.post("/console/training/datasets/chats/restore/1", follow=True)
    assert "Version 3 has the rows of version 1." in gone.content.decode()
    assert client.get("/api/v1/datasets/chats").json()["num_rows"] == 2
    assert browser.post("/console/training/datasets/chats/restore/9").status_code == 404
    viewer = browser_of(acme.viewer)
    assert viewer.post("/console/training/datasets/chats/restore/2").status_code == 403
    assert "restore/2" not in viewer.get("/console/training/datasets/chats").content.decode()
