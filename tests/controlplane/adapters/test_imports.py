"""Imports from a server that speaks like the Hub, and from addresses, into the real store."""

from __future__ import annotations

import dataclasses
import datetime as dt
import ipaddress
import logging
import shlex
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import Client
from django.utils import timezone

from controlplane.adapters import fetching, import_sources, ingest, orphaned_objects, tasks
from controlplane.adapters.models import AdapterVersion, BaseModel, DeletedVersion, VersionImport
from controlplane.events.audit.models import AuditEvent
from controlplane.infra import storage
from controlplane.infra.outbound.outbound_policy import OutboundPolicy, hub_endpoint
from controlplane.tenancy.row_lease import LeaseLost
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.usage.limits import quotas
from tests.cli.runner import ROOT
from tests.controlplane.adapters.files import GOOD_CONFIG, GOOD_TENSORS
from tests.controlplane.conftest import Party, as_key, as_user, assert_error
from tests.hub import COMMIT, Hub
from tests.receiver import Behaviour, Receiver, answer, receiving

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
URL = "/api/v1/adapters/invoices/import"
TOKEN = "hf_of-a-tenant"
REPOSITORY = {"repository": "owner/name"}
Status = AdapterVersion.Status


@pytest.fixture(autouse=True)
def _local(settings: Any) -> None:
    settings.OUTBOUND = OutboundPolicy(
        hosts=frozenset({"127.0.0.1"}), allowed=(ipaddress.ip_network("127.0.0.1/32"),)
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = dataclasses.replace(import_sources._BOUNDS, header_s=0.5, idle_s=0.3)
    monkeypatch.setattr(import_sources, "_BOUNDS", bounds)
    monkeypatch.setattr(fetching, "RETRY_AFTER", dt.timedelta())


@pytest.fixture
def hub(settings: Any, base_model: BaseModel) -> Iterator[Hub]:
    with receiving() as receiver:
        made = Hub(receiver, {CONFIG: GOOD_CONFIG, TENSORS: GOOD_TENSORS})
        settings.HUB_ENDPOINT = made.url
        yield made


@pytest.fixture
def other() -> Iterator[Receiver]:
    with receiving() as receiver:
        receiver.behave = answer(200, GOOD_TENSORS)
        yield receiver


def begin(party: Party, **body: Any) -> AdapterVersion:
    answered = as_key(party).post(URL, body or REPOSITORY, format="json")
    assert answered.status_code == 201, answered.content
    assert (answered.json()["status"], answered.json()["source"]) == ("uploading", "import")
    return row(party, answered.json()["number"])


def row(party: Party, number: int = 1) -> AdapterVersion:
    with tenant_scope(party.tenant.id):
        rows = AdapterVersion.objects.select_related("adapter__base_model")
        return rows.get(number=number)


def run(party: Party, number: int = 1) -> AdapterVersion:
    """Do what waits, retries included, and the check."""
    while (done := fetching.import_next()) is not None:
        if done.is_fetched:
            with tenant_scope(done.version.tenant_id):
                ingest.version_ingest(done.version.pk)
    return row(party, number)


def left_over(party: Party) -> list[str]:
    """What is in the tenant's staging areas, also parts."""
    prefix = f"t/{party.tenant.id}/u/"
    parts = [upload["Key"] for upload in storage.unfinished_writes(prefix)]
    return [*storage.keys(prefix), *parts]


def assert_rejected(party: Party, version: AdapterVersion, field: str, *words: str) -> None:
    assert version.status == Status.REJECTED, version.status
    [reason] = version.reasons
    assert reason["field"] == field and all(word in reason["message"] for word in words), reason
    assert TOKEN not in str(reason) and "127.0.0.1" not in str(reason)
    assert left_over(party) == []
    with all_tenants(reason="test"):
        assert not VersionImport.objects.exists()
    assert not list(storage.keys(f"t/{party.tenant.id}/adapters/"))


def cut(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(GOOD_TENSORS)))
    handler.end_headers()
    handler.wfile.write(GOOD_TENSORS[: len(GOOD_TENSORS) // 2])
    handler.close_connection = True


def slow(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(GOOD_TENSORS)))
    handler.end_headers()
    for byte in GOOD_TENSORS:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.02)


def chunked(handler: Any) -> None:
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD_TENSORS), GOOD_TENSORS))


class TestHub:
    def test_a_repository_becomes_a_version(self, hub: Hub, acme: Party) -> None:
        hub.token = TOKEN
        begin(acme, **REPOSITORY, token=TOKEN)
        version = run(acme)
        assert (version.status, version.reasons) == (Status.READY, [])
        assert version.num_bytes == len(GOOD_TENSORS)
        told = as_key(acme).get("/api/v1/adapters/invoices/versions/1").json()
        host = hub.url.removeprefix("http://")
        origin = {**REPOSITORY, "host": host, "revision": "main", "commit": COMMIT}
        assert told["origin"] == origin
        assert hub.paths == [
            "/api/models/owner/name/revision/main",
            f"/owner/name/resolve/{COMMIT}/{CONFIG}",
            f"/owner/name/resolve/{COMMIT}/{TENSORS}",
        ]
        assert set(hub.tokens) == {f"Bearer {TOKEN}"}
        assert left_over(acme) == []

    def test_the_token_is_kept_nowhere(
        self, hub: Hub, acme: Party, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        begin(acme, **REPOSITORY, token=TOKEN)
        with all_tenants(reason="test"):
            [job] = VersionImport.objects.all()
            assert TOKEN.encode() not in bytes(job.sealed)
            run(acme)
            assert not VersionImport.objects.exists()
            assert TOKEN not in str(list(AuditEvent.objects.values()))
        assert TOKEN not in str(row(acme).__dict__) and TOKEN not in caplog.text

    def test_a_redirect_to_another_site_drops_the_token(
        self, hub: Hub, acme: Party, other: Receiver
    ) -> None:
        hub.cdn = f"http://127.0.0.1:{other.port}"
        begin(acme, **REPOSITORY, token=TOKEN)
        assert run(acme).status == Status.READY
        assert set(hub.tokens) == {f"Bearer {TOKEN}"}
        [sent] = other.received
        assert "authorization" not in sent.headers and sent.path == "/blob?Signature=x"

    @pytest.mark.parametrize(
        "to",
        ["http://169.254.169.254/latest/meta-data", "https://10.0.0.7/x", "file:///etc/passwd"],
    )
    def test_a_redirect_to_the_inside_is_refused(self, hub: Hub, acme: Party, to: str) -> None:
        hub.instead[TENSORS] = answer(302, b"", {"Location": to})
        begin(acme)
        version = run(acme)
        assert_rejected(acme, version, TENSORS, "may not be called")
        assert "169.254" not in str(version.reasons) and "10.0.0.7" not in str(version.reasons)

    def test_a_revision_keeps_its_commit_over_retries(self, hub: Hub, acme: Party) -> None:
        hub.instead[TENSORS] = cut
        begin(acme)
        assert fetching.import_next().result == "again"  # type: ignore[union-attr]
        assert row(acme).origin["commit"] == COMMIT
        del hub.instead[TENSORS]
        hub.instead[""] = answer(200, b'{"sha": "' + b"f" * 40 + b'"}')
        assert run(acme).status == Status.READY
        assert row(acme).origin["commit"] == COMMIT

    def test_another_hub_gets_no_token(self, hub: Hub, acme: Party, settings: Any) -> None:
        begin(acme, **REPOSITORY, token=TOKEN)
        settings.HUB_ENDPOINT = "http://127.0.0.1:1"
        assert_rejected(acme, run(acme), "", "switched off")
        assert hub.tokens == []


@pytest.mark.parametrize(
    ("file", "behaviour", "words"),
    [
        ("", answer(404), ("no such repository or revision",)),
        ("", answer(401), ("401", "does not exist, or needs a token")),
        ("", answer(200, b"<html>"), ("commit",)),
        ("", answer(200, b'{"sha": "main"}'), ("commit",)),
        ("", answer(200, b"[" * 100_000), ("commit",)),
        (CONFIG, answer(404), ("no such file",)),
        (CONFIG, answer(403), ("403",)),
        (CONFIG, answer(200, b"x" * (2 << 20)), ("longer than",)),
        (CONFIG, answer(200), ("empty",)),
        (CONFIG, answer(200, b"<html>", {"Content-Type": "text/html; charset=x"}), ("web page",)),
        (TENSORS, answer(200, b"<html>", {"Content-Type": "text/html"}), ("web page",)),
        (TENSORS, answer(200, b"", {"Content-Length": str(3 << 30)}), ("longer than",)),
        (TENSORS, answer(404), ("no such file",)),
        (TENSORS, answer(410), ("410",)),
        (TENSORS, answer(503), ("503",)),
        (TENSORS, answer(200, GOOD_TENSORS, {"Content-Encoding": "gzip"}), ("compressed",)),
        (TENSORS, answer(302, b"", {"Location": TENSORS}), ("302",)),
        (TENSORS, chunked, ("length",)),
        (TENSORS, cut, ("could not be fetched",)),
        (TENSORS, slow, ("in time",)),
        (TENSORS, lambda _: time.sleep(1), ("in time",)),
    ],
)
def test_what_is_wrong_is_the_reason(
    hub: Hub, acme: Party, file: str, behaviour: Behaviour, words: tuple[str, ...]
) -> None:
    hub.instead[file] = behaviour
    begin(acme)
    assert_rejected(acme, run(acme), file, *words)
    with tenant_scope(acme.tenant.id):
        orphaned_objects.versions_clear()
    assert left_over(acme) == []


@pytest.mark.parametrize(
    ("file", "words"),
    [("adapters.safetensors", "lorikeet adapters convert"), ("adapter_model.bin", "pickle")],
)
def test_tensors_of_another_format_are_told(hub: Hub, acme: Party, file: str, words: str) -> None:
    hub.files[file] = hub.files.pop(TENSORS)
    begin(acme)
    assert_rejected(acme, run(acme), file, words)
    assert not any(path.endswith(file) for path in hub.paths)


def test_a_bad_file_is_rejected_by_the_check(hub: Hub, acme: Party) -> None:
    hub.files[TENSORS] = GOOD_TENSORS[:-4]
    begin(acme)
    version = run(acme)
    assert version.status == Status.REJECTED and left_over(acme) == []


class TestAddresses:
    def test_two_addresses_become_a_version(self, hub: Hub, acme: Party, other: Receiver) -> None:
        config = f"{hub.url}/owner/name/resolve/{COMMIT}/{CONFIG}"
        tensors = f"http://127.0.0.1:{other.port}/bucket/x?X-Amz-Signature=secret"
        version = begin(acme, config_url=config, tensors_url=tensors)
        assert version.origin == {"host": f"127.0.0.1:{other.port}"}
        with all_tenants(reason="test"):
            assert b"secret" not in bytes(VersionImport.objects.get().sealed)
        assert run(acme).status == Status.READY
        [sent] = other.received
        assert sent.path == "/bucket/x?X-Amz-Signature=secret"
        with all_tenants(reason="test"):
            assert "Signature" not in str(list(AuditEvent.objects.values()))

    def test_an_expired_address(self, hub: Hub, acme: Party, other: Receiver) -> None:
        other.behave = answer(403, b"<Error>ExpiredToken 10.1.2.3</Error>")
        url = f"http://127.0.0.1:{other.port}/x"
        begin(acme, config_url=url, tensors_url=url)
        assert_rejected(acme, run(acme), CONFIG, "403", "expire")

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "repository"),
            ({"token": "x"}, "repository"),
            ({"config_url": "https://a.example/x"}, "tensors_url"),
            ({"config_url": "https://a.example/x", "repository": "a/b"}, "tensors_url"),
            ({"repository": "../x"}, "repository"),
            ({"repository": "a/b/c"}, "repository"),
            ({"repository": "a/b?x"}, "repository"),
            ({"repository": "a/.."}, "repository"),
            ({"repository": "a/b", "revision": "../../x"}, "revision"),
            ({"repository": "a/b", "revision": "x?y"}, "revision"),
            ({"repository": "a/b", "token": "x\r\nHost: y"}, "token"),
            ({"repository": "a/b", "host": "x"}, "host"),
            (
                {"config_url": "https://169.254.169.254/", "tensors_url": "https://a.example/x"},
                "config_url",
            ),
            (
                {"config_url": "https://a.example/x", "tensors_url": "http://a.example/x"},
                "tensors_url",
            ),
        ],
    )
    def test_a_wrong_body(self, hub: Hub, acme: Party, body: dict[str, str], param: str) -> None:
        assert_error(as_key(acme).post(URL, body, format="json"), 400, param)
        with tenant_scope(acme.tenant.id):
            assert not AdapterVersion.objects.exists()


class TestBounds:
    def test_the_storage_quota_comes_before_the_bytes(self, hub: Hub, acme: Party) -> None:
        with tenant_scope(acme.tenant.id):
            quotas.quota_set(storage_bytes=len(GOOD_TENSORS))
        begin(acme)
        assert_rejected(acme, run(acme), "", "bytes in total")

    def test_imports_count_among_open_uploads(
        self, hub: Hub, acme: Party, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("controlplane.adapters.services.MAX_UNFINISHED", 2)
        begin(acme), begin(acme)
        answered = as_key(acme).post(URL, REPOSITORY, format="json")
        assert assert_error(answered, 429)["code"] == "too_many_uploads"

    def test_a_repeated_call_makes_one_version(self, hub: Hub, acme: Party) -> None:
        client = as_key(acme)
        headers = {"HTTP_IDEMPOTENCY_KEY": "once"}
        first = client.post(URL, REPOSITORY, format="json", **headers)
        again = client.post(URL, REPOSITORY, format="json", **headers)
        assert first.json() == again.json() and again["Idempotent-Replayed"] == "true"
        with tenant_scope(acme.tenant.id):
            assert AdapterVersion.objects.count() == 1

    def test_tenants_take_turns_and_one_runs_at_a_time(
        self, hub: Hub, acme: Party, globex: Party
    ) -> None:
        begin(acme), begin(acme), begin(globex)
        order = []
        while (job := fetching._claim()) is not None:
            order.append(job.tenant_id)
            assert fetching._claim() is None  # the place is taken
            assert fetching.import_next() is None
            with tenant_scope(job.tenant_id):
                VersionImport.objects.filter(pk=job.pk).delete()
        assert order == [acme.tenant.id, globex.tenant.id, acme.tenant.id]

    def test_a_suspended_tenant_waits(self, hub: Hub, acme: Party) -> None:
        begin(acme)
        Tenant.objects.filter(pk=acme.tenant.pk).update(status=Tenant.Status.SUSPENDED)
        assert fetching.next_in_s() is None and fetching.import_next() is None


class TestInterruptions:
    def test_an_import_whose_process_died_goes_on(self, hub: Hub, acme: Party) -> None:
        version = begin(acme)
        assert fetching._claim() is not None  # and dies, with a part in the store
        writer = storage.ObjectWriter(version.staged_tensors_key)
        writer.write(bytes(storage.PART_BYTES))
        assert left_over(acme) and fetching.import_next() is None
        with all_tenants(reason="test"):
            VersionImport.objects.update(lease_until=timezone.now())
        assert fetching.next_in_s() == 0
        assert run(acme).status == Status.READY and left_over(acme) == []

    def test_one_that_dies_again_and_again_is_rejected(self, hub: Hub, acme: Party) -> None:
        begin(acme)
        for _ in range(fetching.MAX_ATTEMPTS):
            assert fetching._claim() is not None
            with all_tenants(reason="test"):
                VersionImport.objects.update(lease_until=timezone.now())
        assert_rejected(acme, run(acme), "", "interrupted")
        assert hub.paths == []

    def test_a_process_that_was_given_up_changes_nothing(self, hub: Hub, acme: Party) -> None:
        version = begin(acme)
        job = fetching._claim()
        assert job is not None
        with tenant_scope(acme.tenant.id):
            VersionImport.objects.update(fence=job.fence + 1)
            assert fetching._execute(version, job) == "lost"
            with pytest.raises(LeaseLost):
                fetching._finish(version, fetching._Lease(job))
        assert row(acme).status == Status.UPLOADING and row(acme).num_bytes == 0

    def test_a_version_that_is_deleted_meanwhile_leaves_nothing(
        self, hub: Hub, acme: Party
    ) -> None:
        version = begin(acme)
        job = fetching._claim()
        assert job is not None
        storage.put_bytes(version.staged_config_key, b"{}")
        answered = as_key(acme).delete("/api/v1/adapters/invoices/versions/1/upload")
        assert answered.status_code == 204
        with tenant_scope(acme.tenant.id):
            assert fetching._execute(version, job) == "lost"
            assert DeletedVersion.objects.count() == 1
        assert left_over(acme) == []

    def test_a_sweep_that_gives_it_up_forgets_the_secrets(self, hub: Hub, acme: Party) -> None:
        version = begin(acme, **REPOSITORY, token=TOKEN)
        with tenant_scope(acme.tenant.id):
            old = timezone.now() - dt.timedelta(days=2)
            AdapterVersion.objects.filter(pk=version.pk).update(created_at=old)
        assert ingest.versions_abandon() == 1
        with all_tenants(reason="test"):
            assert not VersionImport.objects.exists()
        assert row(acme).status == Status.REJECTED

    def test_a_pepper_that_is_gone_is_a_reason(self, hub: Hub, acme: Party, settings: Any) -> None:
        begin(acme)
        settings.API_KEY_PEPPER = "another"
        assert_rejected(acme, run(acme), "", "can no longer be read")

    def test_the_store_being_away_costs_no_attempt(
        self, hub: Hub, acme: Party, settings: Any
    ) -> None:
        begin(acme)
        where, settings.S3_ENDPOINT_URL = settings.S3_ENDPOINT_URL, "http://127.0.0.1:1"
        with pytest.raises(storage.STORAGE_ERRORS):
            fetching.import_next()
        settings.S3_ENDPOINT_URL = where
        with all_tenants(reason="test"):
            assert VersionImport.objects.get().attempts == 0
        assert run(acme).status == Status.READY

    def test_the_task_does_all_of_it(
        self, hub: Hub, acme: Party, settings: Any, django_capture_on_commit_callbacks: Any
    ) -> None:
        settings.CELERY_TASK_ALWAYS_EAGER = True
        begin(acme)
        tasks.adapter_imports_run()
        assert row(acme).status in (Status.UPLOADED, Status.READY)


class TestWho:
    def test_a_viewer_and_strangers_cannot(self, hub: Hub, acme: Party, globex: Party) -> None:
        assert as_user(acme.viewer).post(URL, REPOSITORY, format="json").status_code == 403
        begin(acme)
        assert as_key(globex).get("/api/v1/adapters/invoices/versions/1").status_code == 404
        error = assert_error(
            as_key(acme).post("/api/v1/adapters/invoices/versions/1/complete"), 409
        )
        assert error["code"] == "being_imported"

    def test_without_a_hub_only_addresses(self, hub: Hub, acme: Party, settings: Any) -> None:
        settings.HUB_ENDPOINT = ""
        error = assert_error(as_key(acme).post(URL, REPOSITORY, format="json"), 400, "repository")
        assert "switched off" in error["message"]
        browser = Client()
        browser.force_login(acme.owner)
        assert "Repository" not in browser.get("/console/import").content.decode()

    def test_the_console(self, hub: Hub, acme: Party) -> None:
        browser = Client()
        browser.force_login(acme.owner)
        assert hub.url in browser.get("/console/import").content.decode()
        form = {"name": "invoices", "base_model": "tiny", "token": TOKEN}
        answered = browser.post("/console/import", {**form, "repository": "../x"})
        html = answered.content.decode()
        assert answered.status_code == 422 and "owner/name" in html and TOKEN not in html
        answered = browser.post("/console/import", {**form, **REPOSITORY}, follow=True)
        assert "Being fetched" in answered.content.decode()
        run(acme)
        html = browser.get("/console/adapters/invoices/versions/1").content.decode()
        assert COMMIT in html and "Ready and live" in html


def test_the_setting_of_the_hub() -> None:
    policy = OutboundPolicy()
    assert hub_endpoint(policy, None) == "https://huggingface.co"
    assert hub_endpoint(policy, "https://Hub.example:8443/a/") == "https://hub.example:8443/a"
    assert hub_endpoint(policy, " ") == ""
    for wrong in ("http://hub.example", "https://10.0.0.1", "hub.example"):
        with pytest.raises(ImproperlyConfigured, match="LORIKEET_HUB_ENDPOINT"):
            hub_endpoint(policy, wrong)


def test_the_commands_of_the_documentation(hub: Hub, acme: Party) -> None:
    section = (ROOT / "docs" / "adapters.md").read_text().split("## Imports")[1]
    block = section.split("```sh\n")[1].split("```")[0].replace("\\\n", "")
    first, *lines = block.strip().splitlines()
    base = first.partition("=")[2].partition(";")[0]
    for line in lines:
        words = shlex.split(line.replace("$api", base))
        given = {words[i]: words[i + 1] for i in range(len(words)) if words[i] in ("-X", "-d")}
        method, body = given.get("-X", "GET"), given.get("-d", "").replace("…", "x")
        path = urlsplit(next(word for word in words if word.startswith("http:"))).path
        answered = as_key(acme).generic(method, path, body, content_type="application/json")
        assert answered.status_code == (201 if method == "POST" else 200), answered.content
    hub.token = "hf_x"
    assert len(lines) == 3 and run(acme).status == Status.READY
