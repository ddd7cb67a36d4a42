"""Rows are pulled from a real bucket, and a Hub of ours: what is new becomes a version."""

from __future__ import annotations

import dataclasses
import datetime as dt
import ipaddress
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import timezone

from controlplane.infra import storage
from controlplane.infra.outbound.outbound_policy import OutboundPolicy
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.training import tasks
from controlplane.training.datasets import (
    pull_sources,
    pulls,
    sources,
)
from controlplane.training.datasets import (
    services as dataset_services,
)
from controlplane.training.models import Dataset, DatasetPull, DatasetSource, DatasetVersion
from tests.controlplane.conftest import Party, as_key, assert_error
from tests.controlplane.training.test_versions import content_of, rows
from tests.hub import COMMIT, Hub
from tests.receiver import answer, receiving

pytestmark = pytest.mark.django_db(transaction=True)
SOURCE = "/api/v1/datasets/pulled/source"
PULLS = "/api/v1/datasets/pulled/pulls"


class Bucket:
    """A folder of a real store's bucket that the tenant has the keys of.

    The bucket is the platform's: another one would take disk of the store that all tests share.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._root = f"rows-of-others/{uuid.uuid4().hex}/"

    def put(self, key: str, content: bytes) -> None:
        storage.put_bytes(self._root + key, content)

    def delete(self, key: str) -> None:
        storage.delete([self._root + key])

    def clear(self) -> None:
        storage.delete(list(storage.keys(self._root)))

    def source(self, *, prefix: str = "", **more: Any) -> dict[str, Any]:
        return {
            "kind": "s3",
            "endpoint": self.settings.S3_ENDPOINT_URL,
            "bucket": self.settings.S3_BUCKET,
            "prefix": self._root + prefix,
            "access_key_id": self.settings.S3_ACCESS_KEY_ID,
            "secret_access_key": self.settings.S3_SECRET_ACCESS_KEY,
            **more,
        }


@pytest.fixture(autouse=True)
def _local(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.OUTBOUND = OutboundPolicy(
        hosts=frozenset({"127.0.0.1", "localhost"}), allowed=(ipaddress.ip_network("127.0.0.0/8"),)
    )
    monkeypatch.setattr(pulls, "_RETRY_AFTER", dt.timedelta(0))


@pytest.fixture
def bucket(settings: Any) -> Iterator[Bucket]:
    made = Bucket(settings)
    yield made
    made.clear()


@pytest.fixture
def hub(settings: Any) -> Iterator[Hub]:
    with receiving() as receiver:
        found = Hub(receiver, {})
        settings.HUB_ENDPOINT = found.url
        yield found


def set_source(party: Party, body: dict[str, Any]) -> dict[str, Any]:
    sent = as_key(party).put(SOURCE, body, content_type="application/json")
    assert sent.status_code == 200, sent.json()
    told: dict[str, Any] = sent.json()
    return told


def pull(party: Party) -> dict[str, Any]:
    """Pull through the API and the task. -> the pull."""
    asked = as_key(party).post(PULLS)
    assert (asked.status_code, asked.json()["is_pulling"]) == (202, True)
    tasks.dataset_pulls_run()
    assert not as_key(party).get(SOURCE).json()["is_pulling"]
    told: dict[str, Any] = as_key(party).get(PULLS).json()["data"][0]
    return told


def pulled(party: Party) -> Dataset:
    with tenant_scope(party.tenant.id):
        return dataset_services.dataset_get(name="pulled")


def content(party: Party) -> bytes:
    with tenant_scope(party.tenant.id):
        return content_of(dataset_services.dataset_get(name="pulled").sha256)


def test_new_objects_of_a_bucket_are_appended(acme: Party, bucket: Bucket) -> None:
    bucket.put("nights/1.jsonl", rows("one", "two").rstrip())
    bucket.put("nights/2 ü.jsonl", rows("three"))
    bucket.put("nights/readme.txt", b"no rows")
    bucket.put("other/1.jsonl", rows("other"))
    set_source(acme, bucket.source(prefix="nights/"))
    told = pull(acme)
    assert (told["status"], told["version"], told["added_rows"]) == ("added", 1, 3)
    assert content(acme) == rows("one", "two", "three")

    assert pull(acme)["status"] == "unchanged"
    assert pulled(acme).version == 1

    bucket.put("nights/3.jsonl", rows("four"))
    told = pull(acme)
    assert (told["status"], told["version"], told["added_rows"]) == ("added", 2, 1)
    assert content(acme) == rows("one", "two", "three", "four")

    bucket.delete("nights/1.jsonl")
    assert pull(acme)["status"] == "unchanged"  # what is gone there stays here


def test_what_was_written_behind_an_object_is_appended(acme: Party, bucket: Bucket) -> None:
    bucket.put("all.jsonl", rows("one"))
    set_source(acme, bucket.source(prefix="all.jsonl"))
    pull(acme)
    bucket.put("all.jsonl", rows("one", "two"))
    told = pull(acme)
    assert (told["version"], told["added_rows"]) == (2, 1)
    with tenant_scope(acme.tenant.id):
        assert DatasetVersion.objects.get(number=2).num_rows == 2
    assert content(acme) == rows("one", "two")


def test_a_rewritten_object_replaces_the_rows_and_that_can_be_undone(
    acme: Party, bucket: Bucket
) -> None:
    bucket.put("a.jsonl", rows("one"))
    bucket.put("b.jsonl", rows("two"))
    set_source(acme, bucket.source())
    pull(acme)
    bucket.put("a.jsonl", rows("eins"))
    told = pull(acme)
    assert (told["version"], told["added_rows"]) == (2, 2)
    assert content(acme) == rows("eins", "two")
    back = as_key(acme).post(
        "/api/v1/datasets/pulled/restore", {"version": 1}, content_type="application/json"
    )
    assert (back.status_code, back.json()["version"]) == (200, 3)
    assert content(acme) == rows("one", "two")
    assert pull(acme)["status"] == "unchanged"  # it does not come back by itself


def test_a_last_row_that_was_written_on_is_no_appended_row(acme: Party, bucket: Bucket) -> None:
    bucket.put("a.jsonl", rows("one").rstrip())
    set_source(acme, bucket.source())
    pull(acme)
    bucket.put("a.jsonl", rows("one").rstrip() + b"  ")
    assert pull(acme)["added_rows"] == 1
    assert content(acme) == rows("one").rstrip() + b"  \n"


def test_a_hubs_dataset_is_pulled_file_by_file(acme: Party, hub: Hub) -> None:
    hub.token = "hf_secret"
    hub.files = {"data/1.jsonl": rows("one"), "README.md": b"#"}
    set_source(
        acme, {"kind": "hub", "repository": "owner/name", "prefix": "data/", "token": "hf_secret"}
    )
    assert pull(acme)["added_rows"] == 1
    hub.files["data/2.jsonl"] = rows("two")
    assert pull(acme)["added_rows"] == 1
    assert content(acme) == rows("one", "two")
    assert f"/datasets/owner/name/resolve/{COMMIT}/data/2.jsonl" in hub.paths
    assert hub.paths.count(f"/datasets/owner/name/resolve/{COMMIT}/data/1.jsonl") == 1


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.jsonl": b'{"prompt": "p"}\n'}, "a.jsonl: line 1: completion must be a string"),
        ({"a.jsonl": rows("one") + b"no JSON\n"}, "a.jsonl: line 2 is not JSON"),
        ({"a.jsonl": b"\n \n"}, "The objects have no rows"),
        ({"readme.md": b"x"}, "no object whose name ends in .jsonl"),
    ],
)
def test_what_is_wrong_with_the_rows_is_told_and_changes_nothing(
    acme: Party, hub: Hub, files: dict[str, bytes], words: str
) -> None:
    hub.files = files
    set_source(acme, {"kind": "hub", "repository": "owner/name"})
    told = pull(acme)
    assert told["status"] == "failed" and words in told["error"]
    with tenant_scope(acme.tenant.id):
        assert not Dataset.objects.exists()


def test_wrong_keys_are_told_and_no_secret_is(
    acme: Party, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.put("a.jsonl", rows("one"))
    told = set_source(acme, bucket.source(secret_access_key="wrong-secret"))
    assert "secret" not in json.dumps(told) and bucket.settings.S3_ACCESS_KEY_ID not in str(told)
    told = pull(acme)
    assert told["error"] == "The answer for the bucket was 403: check the credentials."
    with tenant_scope(acme.tenant.id):
        source = sources.source_get(name="pulled")
        assert b"wrong-secret" not in bytes(source.sealed)
        events = json.dumps(as_key(acme).get("/api/v1/audit-events").json())
    assert "wrong-secret" not in events + caplog.text and "Signature" not in caplog.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kind": "s3", "bucket": "rows"}, "endpoint"),
        ({"kind": "s3", "endpoint": "https://s3.example.com/x", "bucket": "rows"}, "endpoint"),
        ({"kind": "s3", "endpoint": "http://169.254.169.254", "bucket": "rows"}, "endpoint"),
        ({"kind": "s3", "endpoint": "http://10.0.0.1", "bucket": "rows"}, "endpoint"),
        ({"kind": "s3", "endpoint": "http://127.0.0.1", "bucket": "../x"}, "bucket"),
        ({"kind": "s3", "endpoint": "http://127.0.0.1", "bucket": "rows", "token": "x"}, "token"),
        ({"kind": "hub", "repository": "../x"}, "repository"),
        ({"kind": "hub", "repository": "owner/name", "cron": "* * *"}, "cron"),
        ({"kind": "hub", "repository": "owner/name", "timezone": "Mars"}, "timezone"),
        ({"kind": "ftp"}, "kind"),
        (
            {
                "kind": "s3",
                "endpoint": "http://127.0.0.1",
                "bucket": "rows",
                "access_key_id": "a",
            },
            "access_key_id",
        ),
    ],
)
def test_a_wrong_source_is_refused(acme: Party, hub: Hub, body: dict[str, Any], param: str) -> None:
    sent = as_key(acme).put(SOURCE, body, content_type="application/json")
    assert_error(sent, 400, param=param)


def test_the_platforms_own_store_is_refused(acme: Party, bucket: Bucket, settings: Any) -> None:
    port = int(settings.S3_ENDPOINT_URL.rpartition(":")[2])
    settings.OUTBOUND = dataclasses.replace(
        settings.OUTBOUND, own=frozenset({("127.0.0.1", port), ("localhost", port)})
    )
    sent = as_key(acme).put(SOURCE, bucket.source(), content_type="application/json")
    assert_error(sent, 400, param="endpoint")


def test_a_place_that_was_denied_since_is_not_called(
    acme: Party, bucket: Bucket, settings: Any
) -> None:
    set_source(acme, bucket.source())
    settings.OUTBOUND = OutboundPolicy()
    told = pull(acme)
    assert told["status"] == "failed" and "https" in told["error"]


def test_a_hostile_list_is_refused(acme: Party, hub: Hub) -> None:
    bomb = b'<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a "aaaa">]><ListBucketResult/>'
    for body in (bomb, b"<a>", b"\xff", b"<Contents><Key>a</Key></Contents>" * 2):
        hub.receiver.behave = answer(200, body)
        source = {"kind": "s3", "endpoint": hub.url, "bucket": "rows"}
        set_source(acme, source)
        assert "did not answer with a list" in pull(acme)["error"]
    hub.receiver.behave = answer(302, b"", {"Location": "http://169.254.169.254/"})
    assert "was 302" in pull(acme)["error"]  # nothing is followed with signed addresses


def test_a_failure_that_may_pass_is_tried_again_and_not_for_ever(acme: Party, hub: Hub) -> None:
    hub.files = {"a.jsonl": rows("one")}
    hub.instead["a.jsonl"] = answer(503)
    set_source(acme, {"kind": "hub", "repository": "owner/name"})
    as_key(acme).post(PULLS)
    for _ in range(5):
        pulls.pull_next()
    told = as_key(acme).get(PULLS).json()["data"]
    assert [each["status"] for each in told] == ["failed"] * pulls.MAX_FAILURES
    del hub.instead["a.jsonl"]
    assert pull(acme)["status"] == "added"


def test_a_cron_line_pulls_by_the_schedules_tick(
    acme: Party, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(sources, "pulls_send", lambda: sent.append(1))
    hub.files = {"a.jsonl": rows("one")}
    told = set_source(acme, {"kind": "hub", "repository": "owner/name", "cron": "30 2 * * *"})
    slot = dt.datetime.fromisoformat(told["next_pull_at"])
    assert slot > timezone.now() and (slot.hour, slot.minute) == (2, 30)
    tasks.schedules_fire()
    assert not sent and not pulls.pull_next()
    with tenant_scope(acme.tenant.id):
        DatasetSource.objects.update(next_pull_at=timezone.now())
    tasks.schedules_fire()
    assert sent
    assert pulls.pull_next() and not pulls.pull_next()
    again = as_key(acme).get(SOURCE).json()
    assert again["next_pull_at"] == told["next_pull_at"]
    assert again["last_pull"]["status"] == "added"
    with all_tenants(reason="a test suspends a tenant"):
        DatasetSource.objects.update(next_pull_at=timezone.now())
        Tenant.objects.filter(pk=acme.tenant.pk).update(status=Tenant.Status.SUSPENDED)
    assert not pulls.pull_next()


def test_a_pull_whose_process_died_is_done_again(acme: Party, hub: Hub) -> None:
    hub.files = {"a.jsonl": rows("one")}
    set_source(acme, {"kind": "hub", "repository": "owner/name"})
    as_key(acme).post(PULLS)
    assert pulls._claim() is not None
    with tenant_scope(acme.tenant.id):
        source = DatasetSource.objects.get()
        DatasetPull.objects.create(source=source)
        assert not pulls.pull_next()  # its lease lasts
        DatasetSource.objects.update(lease_until=timezone.now())
    assert pulls.pull_next()
    told = as_key(acme).get(PULLS).json()["data"]
    assert [each["status"] for each in told] == ["added", "failed"]
    assert told[1]["error"] == "It was interrupted."


def test_a_source_that_is_set_or_deleted_ends_the_pull_that_is_under_way(
    acme: Party, hub: Hub
) -> None:
    hub.files = {"a.jsonl": rows("one")}
    body = {"kind": "hub", "repository": "owner/name"}
    set_source(acme, body)
    for end in (
        lambda: set_source(acme, body | {"prefix": "b"}),
        lambda: as_key(acme).delete(SOURCE),
    ):
        as_key(acme).post(PULLS)

        def behave(handler: Any, end: Any = end) -> None:
            if "resolve" in handler.path:
                end()
            hub._answer(handler)

        hub.receiver.behave = behave
        assert pulls.pull_next()
        with tenant_scope(acme.tenant.id):
            assert not Dataset.objects.exists()
        hub.receiver.behave = hub._answer
        set_source(acme, body)


def test_bounds(acme: Party, hub: Hub, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"a.jsonl": rows("one"), "b.jsonl": rows("two")}
    set_source(acme, {"kind": "hub", "repository": "owner/name"})
    settings.MAX_DATASET_BYTES = len(rows("one")) + 3
    assert "bytes" in pull(acme)["error"]
    settings.MAX_DATASET_BYTES = 1 << 20
    monkeypatch.setattr(pull_sources, "MAX_OBJECTS", 1)
    assert "more than 1 objects" in pull(acme)["error"]
    monkeypatch.setattr(pull_sources, "MAX_OBJECTS", 2)
    monkeypatch.setattr(pulls, "MAX_PULLS", 2)
    pull(acme)
    assert len(as_key(acme).get(PULLS).json()["data"]) == 2
    monkeypatch.setattr(sources, "MAX_SOURCES", 1)
    with tenant_scope(acme.tenant.id), pytest.raises(Exception, match="at most 1 sources"):
        sources.source_set(name="more", kind="hub", place={"repository": "a/b"}, secrets={})


def test_nobody_else_sees_or_pulls_it(acme: Party, globex: Party, hub: Hub) -> None:
    hub.files = {"a.jsonl": rows("one")}
    set_source(acme, {"kind": "hub", "repository": "owner/name"})
    other = as_key(globex)
    for call in (other.get(SOURCE), other.delete(SOURCE), other.get(PULLS), other.post(PULLS)):
        assert call.status_code == 404
    pull(acme)
    with tenant_scope(globex.tenant.id):
        assert not Dataset.objects.exists() and not DatasetPull.objects.exists()
    deleted = as_key(acme).delete("/api/v1/datasets/pulled")
    assert deleted.status_code == 204
    assert as_key(acme).get(SOURCE).status_code == 404


def test_pulled_rows_go_behind_those_that_are_there(acme: Party, hub: Hub) -> None:
    with tenant_scope(acme.tenant.id):
        dataset_services.dataset_upload(name="pulled", content=rows("mine"))
    hub.files = {"a.jsonl": rows("one")}
    set_source(acme, {"kind": "hub", "repository": "owner/name"})
    assert pull(acme)["version"] == 2
    assert content(acme) == rows("mine", "one")
