"""The life of a version: deprecated, shut down, retired, taken back; downloads; what differs."""

from __future__ import annotations

import datetime as dt
import hashlib
import shlex
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.adapters import (
    ingest,
    orphaned_objects,
    probing,
    promotion,
    resolution,
    retirement,
    services,
    tasks,
)
from controlplane.adapters.models import (
    Adapter,
    AdapterInspection,
    AdapterVersion,
    BaseModel,
    today,
)
from controlplane.aliases.contents import Contents, Part
from controlplane.aliases.resolution import models_list
from controlplane.aliases.services import alias_create
from controlplane.errors import Conflict, NotFound
from controlplane.events.audit.models import AuditEvent
from controlplane.events.audit.services import record
from controlplane.gateway.models import ServedModelSerializer
from controlplane.inference import access
from controlplane.inference.lifetime import lifetime_headers
from controlplane.inference.model_selector import ModelSelector
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth
from controlplane.training.models import Dataset, TrainingRun
from tests.conftest import ROOT
from tests.controlplane.adapters.files import GOOD_CONFIG, GOOD_TENSORS, config_bytes
from tests.controlplane.conftest import Party, as_key, as_user, assert_error

Status = AdapterVersion.Status
DAY = dt.timedelta(days=1)
NAME = "/api/v1/adapters/invoices"


@pytest.fixture
def adapter(acme: Party, base_model: BaseModel) -> Iterator[Adapter]:
    """acme's "invoices" with versions 1, live, and 2, both ready with their files."""
    with tenant_scope(acme.tenant.id):
        publish(acme)
        publish(acme, config_bytes(lora_alpha=16, use_rslora=True))
        yield Adapter.objects.get()


def publish(party: Party, config: bytes = GOOD_CONFIG) -> AdapterVersion:
    stated = {"adapter_config.json": len(config), "adapter_model.safetensors": len(GOOD_TENSORS)}
    version = services.adapter_version_create(name="invoices", files=stated, created_by=party.owner)
    storage.put_bytes(version.staged_config_key, config)
    storage.put_bytes(version.staged_tensors_key, GOOD_TENSORS)
    AdapterVersion.objects.filter(pk=version.pk).update(status=Status.UPLOADED)
    ingest.version_ingest(version.pk)
    version.refresh_from_db()
    assert version.status == Status.READY, version.reasons
    return version


def row(adapter: Adapter, number: int) -> AdapterVersion:
    return AdapterVersion.objects.select_related("adapter").get(adapter=adapter, number=number)


def live(adapter: Adapter) -> int | None:
    adapter.refresh_from_db()
    return adapter.live_version.number if adapter.live_version else None


def resolve(party: Party, name: str) -> access.Caller:
    return access.resolve_now(auth.authenticate(party.header), ModelSelector.model(name))


def set_day(adapter: Adapter, number: int, day: dt.date | None) -> None:
    retirement.version_deprecate(version=row(adapter, number), shutdown_date=day)


class TestDeprecated:
    def test_it_answers_and_says_so(self, adapter: Adapter, acme: Party) -> None:
        assert lifetime_headers(resolve(acme, "invoices").model) == {}
        set_day(adapter, 1, dt.date(2999, 12, 31))
        at = row(adapter, 1).deprecated_at
        assert at is not None
        for name in ("invoices", "invoices@1"):
            assert lifetime_headers(resolve(acme, name).model) == {
                "Deprecation": f"@{int(at.timestamp())}",
                "Sunset": "Tue, 31 Dec 2999 00:00:00 GMT",
            }
        assert lifetime_headers(resolve(acme, "invoices@2").model) == {}

    def test_the_base_models_day_counts_if_it_is_first(self, adapter: Adapter, acme: Party) -> None:
        set_day(adapter, 1, dt.date(2999, 12, 31))
        BaseModel.objects.update(shutdown_date=dt.date(2999, 1, 1))
        headers = lifetime_headers(resolve(acme, "invoices").model)
        assert headers["Sunset"] == "Tue, 01 Jan 2999 00:00:00 GMT"
        assert lifetime_headers(resolve(acme, "tiny").model) == {"Sunset": headers["Sunset"]}

    def test_the_list_of_models_tells_both(self, adapter: Adapter) -> None:
        set_day(adapter, 1, dt.date(2999, 12, 31))
        at = row(adapter, 1).deprecated_at
        assert at is not None
        listed = {
            model.name: [data["deprecated_at"], data["shutdown_date"]]
            for model in resolution.models_list()
            for data in [ServedModelSerializer(model).data]
        }
        since = at.isoformat().replace("+00:00", "Z")
        assert listed == {"tiny": [None, None], "invoices": [since, "2999-12-31"]}

    def test_a_blend_ends_with_the_first_of_its_versions(
        self, adapter: Adapter, acme: Party
    ) -> None:
        names = ((1, 0.5), (2, 0.5))
        parts = [Part(adapter="invoices", version=number, weight=w) for number, w in names]
        alias_create(name="both", contents=Contents(primary=tuple(parts)))
        set_day(adapter, 2, dt.date(2999, 1, 1))
        set_day(adapter, 1, dt.date(2999, 12, 31))
        (listed,) = [model for model in models_list() if model.name == "both"]
        assert listed.deprecated_at == row(adapter, 2).deprecated_at
        assert listed.shutdown_date == dt.date(2999, 1, 1)
        assert "01 Jan 2999" in lifetime_headers(resolve(acme, "both").model)["Sunset"]
        AdapterVersion.objects.filter(number=2).update(shutdown_date=today())
        with pytest.raises(NotFound, match="it has version 2"):
            resolve(acme, "both")

    def test_it_can_be_taken_back(self, adapter: Adapter, acme: Party) -> None:
        set_day(adapter, 1, today())
        retirement.version_undeprecate(version=row(adapter, 1))
        assert lifetime_headers(resolve(acme, "invoices").model) == {}

    def test_a_later_call_keeps_the_time_and_changes_the_day(self, adapter: Adapter) -> None:
        set_day(adapter, 1, None)
        first = row(adapter, 1).deprecated_at
        set_day(adapter, 1, dt.date(2999, 1, 1))
        assert row(adapter, 1).deprecated_at == first
        assert row(adapter, 1).shutdown_date == dt.date(2999, 1, 1)
        events = AuditEvent.objects.filter(action="adapter_version.deprecated").order_by("seq")
        assert [event.after["shutdown_date"] for event in events] == [None, "2999-01-01"]


class TestItsDay:
    def test_before_it_answers(self, adapter: Adapter, acme: Party) -> None:
        set_day(adapter, 1, today() + DAY)
        assert resolve(acme, "invoices").model.parts
        assert retirement.versions_shut_down() == 0

    @pytest.mark.parametrize("name", ["invoices", "invoices@1", "ft:tiny:acme:invoices:1"])
    def test_every_name_of_it_is_refused(self, adapter: Adapter, acme: Party, name: str) -> None:
        set_day(adapter, 1, today())
        with pytest.raises(NotFound, match=f"shut down on {today()}: it is version 1"):
            resolve(acme, name)
        assert resolve(acme, "invoices@2").model.parts
        assert [model.name for model in resolution.models_list()] == ["tiny"]

    def test_the_sweep_retires_it_and_the_one_before_is_live(self, adapter: Adapter) -> None:
        promotion.adapter_version_promote(version=row(adapter, 2))
        set_day(adapter, 2, today())
        tasks.adapter_versions_sweep()
        assert (row(adapter, 2).status, live(adapter)) == (Status.RETIRED, 1)
        assert retirement.versions_shut_down() == 0

    def test_only_ready_versions_have_one(self, adapter: Adapter) -> None:
        retirement.version_retire(version=row(adapter, 2))
        with pytest.raises(Conflict, match="not ready"):
            set_day(adapter, 2, today())


class TestRetired:
    def test_it_is_refused_and_can_be_taken_back(self, adapter: Adapter, acme: Party) -> None:
        retirement.version_retire(version=row(adapter, 1))
        assert live(adapter) is None
        with pytest.raises(NotFound):
            resolve(acme, "invoices@1")
        retirement.version_retire(version=row(adapter, 1))  # again: nothing changes
        retirement.version_unretire(version=row(adapter, 1))
        assert resolve(acme, "invoices@1").model.parts
        assert live(adapter) is None
        actions = AuditEvent.objects.filter(resource_id=str(row(adapter, 1).pk))
        assert list(actions.order_by("seq").values_list("action", flat=True))[-2:] == [
            "adapter_version.retired",
            "adapter_version.unretired",
        ]

    def test_a_day_that_has_come_is_cleared(self, adapter: Adapter, acme: Party) -> None:
        set_day(adapter, 2, today())
        retirement.versions_shut_down()
        retirement.version_unretire(version=row(adapter, 2))
        assert row(adapter, 2).shutdown_date is None
        assert resolve(acme, "invoices@2").model.parts

    def test_not_when_its_files_are_removed(self, adapter: Adapter) -> None:
        retirement.version_retire(version=row(adapter, 2))
        until = retirement.files_until(row(adapter, 2))
        assert until is not None and until - timezone.now() < orphaned_objects.RETIRED_KEPT
        AdapterVersion.objects.filter(number=2).update(status_changed_at=timezone.now() - 3 * DAY)
        assert orphaned_objects.retired_remove() == 1
        assert storage.object_size(row(adapter, 2).tensors_key) is None
        assert retirement.files_until(row(adapter, 2)) is None
        with pytest.raises(Conflict, match="upload them again"):
            retirement.version_unretire(version=row(adapter, 2))

    def test_one_that_is_taken_back_keeps_its_files(
        self, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sweep has found it, and then somebody takes it back."""
        retirement.version_retire(version=row(adapter, 2))
        AdapterVersion.objects.filter(number=2).update(status_changed_at=timezone.now() - 3 * DAY)
        lock = orphaned_objects.tenant_scope

        def late(tenant_id: Any) -> Any:
            monkeypatch.undo()
            retirement.version_unretire(version=row(adapter, 2))
            return lock(tenant_id)

        monkeypatch.setattr(orphaned_objects, "tenant_scope", late)
        orphaned_objects.retired_remove()
        assert (row(adapter, 2).status, row(adapter, 2).removed_at) == (Status.READY, None)
        assert storage.object_size(row(adapter, 2).tensors_key) == len(GOOD_TENSORS)

    def test_a_ready_one_cannot_be_taken_back(self, adapter: Adapter) -> None:
        with pytest.raises(Conflict, match="only a retired version"):
            retirement.version_unretire(version=row(adapter, 1))


class TestFaces:
    def test_the_api(self, adapter: Adapter, acme: Party) -> None:
        client, url = as_key(acme), f"{NAME}/versions/2"
        body = {"shutdown_date": "2999-12-31"}
        made = client.post(f"{url}/deprecate", body, format="json").json()
        assert made["shutdown_date"] == "2999-12-31" and made["deprecated_at"]
        assert_error(
            client.post(f"{url}/deprecate", {"shutdown_date": "soon"}, format="json"),
            400,
            "shutdown_date",
        )
        made = client.post(f"{url}/undeprecate").json()
        assert (made["shutdown_date"], made["deprecated_at"]) == (None, None)
        retired = client.post(f"{url}/retire").json()
        assert retired["status"] == "retired" and retired["files_until"]
        error = assert_error(client.post(f"{url}/deprecate"), 409)
        assert error["code"] == "version_not_ready"
        assert client.post(f"{url}/unretire").json()["status"] == "ready"
        assert assert_error(client.post(f"{url}/unretire"), 409)["code"] == "version_not_retired"

    def test_a_download_is_the_checked_files(self, adapter: Adapter, acme: Party) -> None:
        found = as_key(acme).post(f"{NAME}/versions/1/download").json()
        wanted = {"adapter_config.json": GOOD_CONFIG, "adapter_model.safetensors": GOOD_TENSORS}
        assert found["files"].keys() == wanted.keys()
        for name, content in wanted.items():
            assert found["files"][name]["num_bytes"] == len(content)
            with urllib.request.urlopen(found["files"][name]["url"]) as answer:
                told = answer.headers["Content-Disposition"]
                assert told == f'attachment; filename="invoices-1-{name}"'
                assert hashlib.sha256(answer.read()).digest() == hashlib.sha256(content).digest()
        assert AuditEvent.objects.filter(action="adapter_version.downloaded").count() == 1
        AdapterVersion.objects.filter(number=1).update(removed_at=timezone.now(), status="retired")
        error = assert_error(as_key(acme).post(f"{NAME}/versions/1/download"), 409)
        assert error["code"] == "files_removed"
        AdapterVersion.objects.filter(number=2).update(status="rejected")
        assert_error(as_key(acme).post(f"{NAME}/versions/2/download"), 409)

    def test_a_diff_tells_config_and_provenance(self, adapter: Adapter, acme: Party) -> None:
        dataset = Dataset.objects.create(name="letters", sha256="5" * 64, num_bytes=1, num_rows=1)
        TrainingRun.objects.create(
            adapter=adapter,
            dataset=dataset,
            dataset_sha256="5" * 64,
            version=row(adapter, 2),
            hyperparameters={"epochs": 3},
            progress={"step": 9, "steps": 9, "loss": 0.5, "losses": [[1, 2.0]]},
        )
        found = as_key(acme).get(f"{NAME}/versions/2/diff?with=1").json()
        assert (found["adapter"], found["before"], found["after"]) == ("invoices", 1, 2)
        changes = {
            (change["area"], change["field"]): (change["before"], change["after"])
            for change in found["changes"]
        }
        assert changes["config", "lora_alpha"] == (8, 16)
        assert changes["config", "use_rslora"] == (None, True)
        assert changes["files", "alpha"] == (8.0, 16.0)
        assert changes["provenance", "dataset"] == (None, "letters")
        assert changes["hyperparameters", "epochs"] == (None, 3)
        assert changes["metrics", "loss"] == (None, 0.5)
        assert ("config", "r") not in changes
        assert ("provenance", "created_by") not in changes
        same = as_key(acme).get(f"{NAME}/versions/2/diff?with=2").json()
        assert same["changes"] == []
        for wrong in ("", "?with=x", "?with=-1"):
            assert_error(as_key(acme).get(f"{NAME}/versions/2/diff{wrong}"), 400, "with")
        assert as_key(acme).get(f"{NAME}/versions/2/diff?with=99").status_code == 404

    def test_the_commands_of_the_documentation(self, adapter: Adapter, acme: Party) -> None:
        section = (ROOT / "docs" / "adapters.md").read_text().split("## Life of a version")[1]
        first, *lines = section.split("```sh\n")[1].split("```")[0].strip().splitlines()
        base = first.partition("=")[2].partition(";")[0]
        for line in lines:
            words = shlex.split(line.replace("$api", base))
            given = {words[i]: words[i + 1] for i in range(len(words)) if words[i] in ("-X", "-d")}
            url = urlsplit(next(word for word in words if word.startswith("http")))
            answer = as_key(acme).generic(
                given.get("-X", "GET"),
                f"{url.path}?{url.query}",
                given.get("-d", ""),
                content_type="application/json",
            )
            assert answer.status_code == 200, (line, answer.content)
        assert (row(adapter, 1).status, row(adapter, 1).deprecated_at) == (Status.READY, None)

    def test_the_console(self, adapter: Adapter, acme: Party) -> None:
        browser = Client()
        browser.force_login(acme.owner)
        page = "/console/adapters/invoices/versions/2"
        html = browser.get(page).content.decode()
        assert "Compare with version" in html and "Download adapter_config.json" in html
        answer = browser.post(f"{page}/deprecate", {"shutdown_date": "2999-12-31"}, follow=True)
        assert "refused from 2999-12-31 on." in answer.content.decode()
        assert "Take back the deprecation" in answer.content.decode()
        answer = browser.post(f"{page}/deprecate", {"shutdown_date": "x"}, follow=True)
        assert "Write the day as" in answer.content.decode()
        answer = browser.post(f"{page}/undeprecate", follow=True)
        assert "no longer deprecated" in answer.content.decode()
        answer = browser.post(f"{page}/retire", follow=True)
        assert "Version 2 is retired." in answer.content.decode()
        assert "Make it ready again" in answer.content.decode()
        answer = browser.post(f"{page}/unretire", follow=True)
        assert "Version 2 is ready again." in answer.content.decode()
        html = browser.get(f"{page}/diff?with=1").content.decode()
        assert browser.get(f"{page}/diff?with={'0' * 5000}").status_code == 404
        assert browser.get(f"{page}/diff?with=9999999999").status_code == 404
        assert "lora_alpha" in html and "use_rslora" in html
        assert browser.get(f"{page}/diff?with=99").status_code == 404
        sent = browser.get(f"{page}/download/adapter_config.json")
        assert sent.status_code == 302
        with urllib.request.urlopen(sent["Location"]) as got:
            assert b'"use_rslora"' in got.read()
        assert browser.get(f"{page}/download/passwd").status_code == 404

    def test_others_cannot(self, adapter: Adapter, acme: Party, globex: Party) -> None:
        for action in ("deprecate", "undeprecate", "retire", "unretire", "download"):
            url = f"{NAME}/versions/2/{action}"
            assert as_key(globex).post(url).status_code == 404, action
            assert as_user(acme.viewer).post(url).status_code == 403, action
        assert as_key(globex).get(f"{NAME}/versions/2/diff?with=1").status_code == 404
        assert as_user(acme.viewer).get(f"{NAME}/versions/2/diff?with=1").status_code == 200
        browser = Client()
        browser.force_login(acme.viewer)
        html = browser.get("/console/adapters/invoices/versions/2").content.decode()
        assert "Retire now" not in html and "Download" not in html
        assert row(adapter, 2).status == Status.READY


class TestManyVersions:
    NUM = 2000

    @pytest.fixture(autouse=True)
    def many(self, adapter: Adapter, acme: Party) -> None:
        AdapterVersion.objects.bulk_create(
            AdapterVersion(
                adapter=adapter,
                tenant=acme.tenant,
                number=number,
                status=Status.READY,
                digest=f"{number:064x}",
                created_by=acme.owner,
                report={"ranks": [8], "target_modules": ["q_proj"]},
            )
            for number in range(3, self.NUM + 1)
        )

    def test_pages_cost_the_same_queries_as_with_few(self, adapter: Adapter, acme: Party) -> None:
        browser, client = Client(), as_user(acme.owner)
        browser.force_login(acme.owner)
        urls = {browser: "/console/adapters/invoices", client: f"{NAME}/versions?limit=100"}
        for caller, url in urls.items():
            with CaptureQueriesContext(
                connection,
            ) as queries:
                began = time.perf_counter()
                answer = caller.get(url)
                took = time.perf_counter() - began
            assert answer.status_code == 200
            assert len(queries) < 25, [query["sql"][:100] for query in queries]
            assert len(answer.content) < 200_000
            assert took < 2  # see docs/adapters.md for what it takes on a quiet machine

    def test_all_can_be_paged_through(self, acme: Party) -> None:
        seen, after = [], ""
        while True:
            found = as_key(acme).get(f"{NAME}/versions?limit=100{after}").json()
            seen += [version["number"] for version in found["data"]]
            if not found["has_more"]:
                break
            after = f"&after={found['last_id']}"
        assert sorted(seen) == list(range(1, self.NUM + 1))

    def test_the_page_shows_fifty_and_links_to_older_ones(self, acme: Party) -> None:
        browser = Client()
        browser.force_login(acme.owner)
        html = browser.get("/console/adapters/invoices").content.decode()
        assert "versions/2000" in html and 'versions/1950"' not in html
        assert "?before=1951" in html and "Newest versions" not in html
        html = browser.get("/console/adapters/invoices?before=3").content.decode()
        assert 'versions/2"' in html and "Older versions" not in html
        assert "Newest versions" in html
        assert browser.get("/console/adapters/invoices?before=x").status_code == 200
        assert browser.get(f"/console/adapters/invoices?before={'9' * 40}").status_code == 200


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("action", "first"),
    [
        (retirement.version_deprecate, 1),  # as when all versions are retired, one by one
        (probing.inspection_request, 2),  # as when version 2 is deleted
    ],
)
def test_locks_are_taken_in_one_order(
    acme: Party, base_model: BaseModel, action: Any, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody ends versions while somebody else changes what belongs to one: both get there."""
    monkeypatch.setattr(probing, "is_inspector_alive", lambda: True)
    monkeypatch.setattr(probing, "inspection_send", lambda version: None)
    with tenant_scope(acme.tenant.id):
        made = Adapter.objects.create(name="invoices", base_model=base_model)
        ready = {"adapter": made, "status": Status.READY}
        for number in (1, 2):
            other = AdapterVersion.objects.create(number=number, digest=f"{number:064x}", **ready)
        AdapterInspection.objects.create(version=other)
    outcomes: list[str] = []

    def change() -> None:
        try:
            with tenant_scope(acme.tenant.id):
                action(version=other)
            outcomes.append("changed")
        except AdapterVersion.DoesNotExist:
            outcomes.append("too late")
        except Exception as error:
            outcomes.append(repr(error))
        finally:
            connection.close()

    thread = threading.Thread(target=change)
    with tenant_scope(acme.tenant.id), transaction.atomic():
        promotion.lock(made.pk)
        locked = AdapterVersion.objects.select_for_update().get(number=first)
        record("retired", locked)  # with the trail's lock
        thread.start()
        wait_for_a_lock()
        AdapterVersion.objects.filter(pk=other.pk).delete()
    thread.join(60)
    assert outcomes == ["too late"]


def wait_for_a_lock() -> None:
    """Return when another connection waits for a lock."""
    query = "select count(*) from pg_locks where not granted"
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with connection.cursor() as cursor:
            cursor.execute(query)
            if cursor.fetchone()[0]:
                return
        time.sleep(0.01)
    raise AssertionError("nobody waits")
