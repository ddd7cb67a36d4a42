"""A tenant is deleted for good: everything, whenever the task is killed, and nobody else's."""

from __future__ import annotations

import datetime as dt
import hashlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.apps import apps
from django.conf import settings
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from contract.messages import protocol
from contract.queue import fair_queue
from contract.queue.deleted_adapters import gone_key
from controlplane.adapters import services as adapters
from controlplane.adapters import uploads
from controlplane.adapters.models import AdapterVersion, BaseModel, DeletedVersion, VersionImport
from controlplane.aliases import ramps
from controlplane.aliases import services as aliases
from controlplane.aliases.contents import Contents, Part
from controlplane.aliases.models import TargetCount
from controlplane.deletion import execution, steps, tasks
from controlplane.deletion.models import TenantDeletion
from controlplane.deletion.traces import tenant_traces
from controlplane.evaluations import suites
from controlplane.evaluations.models import BatchScores, Evaluation, GateDecision, Judge, Result
from controlplane.events.audit import services as audit
from controlplane.events.audit.models import AuditEvent
from controlplane.events.outbox.models import OutboxEvent
from controlplane.files import services as files
from controlplane.files.batches.models import Batch, BatchResult
from controlplane.files.models import File, Purpose, UploadPart
from controlplane.infra import storage
from controlplane.queue.models import DeadLetter
from controlplane.requestlog.capture import capture_policy_set
from controlplane.requestlog.models import CapturedRequest, Feedback, RefusalHour
from controlplane.tenancy.scoping import TenantModel, all_tenants, tenant_scope
from controlplane.tenants import auth, people, services
from controlplane.tenants.models import IdempotencyRecord, Membership, Role, Tenant, User
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import (
    DatasetPull,
    DatasetSource,
    Schedule,
    ScheduleRun,
    TrainingCheckpoint,
    TrainingRun,
)
from controlplane.training.primitives import calls
from controlplane.training.primitives.models import ClientState, TrainingClient
from controlplane.training.runs import services as run_services
from controlplane.training.schedules import services as schedule_services
from controlplane.usage.limits.models import TenantQuota, Turn
from controlplane.usage.limits.services import budget_set, rate_limit_set
from controlplane.usage.models import TrainingUsage, UsageDay
from controlplane.usage.services import usage_settle
from controlplane.usage.totals import usage_drift
from controlplane.usage.training import training_usage_add
from controlplane.webhooks.models import EventMail, MailChoice, WebhookDelivery, WebhookEndpoint
from tests.controlplane.adapters.test_ingest import upload, validate
from tests.controlplane.conftest import (
    Party,
    as_key,
    as_user,
    assert_error,
    make_operator,
)
from tests.controlplane.management.test_openapi import _owner
from tests.controlplane.training.conftest import ROWS

NOW = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC)


@pytest.fixture
def operator(db: None) -> User:
    return make_operator("ops@lorikeet.example")


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    made = redis.Redis.from_url(settings.REDIS_URL, protocol=2)
    made.delete(gone_key(settings.POOL))
    yield made
    made.delete(gone_key(settings.POOL))
    made.close()


def done_record(party: Party, request_id: str, model: str) -> protocol.DoneRecord:
    return protocol.DoneRecord(
        request_id=request_id,
        tenant_id=str(party.tenant.pk),
        api_key_id=str(party.api_key.pk),
        worker_id="w",
        lease=1,
        model=model,
        base_model="tiny",
        adapter_version_id=None,
        digests=(),
        finish_reason="stop",
        error_code=None,
        prompt_tokens=10,
        cached_tokens=0,
        completion_tokens=5,
        created_at=NOW.timestamp(),
        queue_ms=0.0,
        load_ms=0.0,
        first_token_ms=1.0,
        total_ms=2.0,
    )


def furnish(party: Party, base_model: BaseModel, client: redis.Redis) -> None:
    """Give a tenant something of everything: a row in each table, objects, keys in Redis."""
    tenant_id = party.tenant.pk
    with tenant_scope(tenant_id):
        validate(upload())
        answered = Contents(
            primary=(Part(adapter="invoices", version=1),),
            canary=(Part(adapter="invoices", version=1, weight=0.5),),
        )
        alias = aliases.alias_create(name="prod", contents=answered)
        ramps.ramp_start(alias=alias, steps=ramps.DEFAULT_STEPS)
        TargetCount.objects.create(revision=aliases.revision_get(alias=alias), target="canary")
        version = upload()
        DeletedVersion.objects.create(version_id=uuid.uuid4(), digest="e" * 64)
        dataset = dataset_services.dataset_upload(name="chats", content=ROWS)
        source = DatasetSource.objects.create(name="chats", kind="hub", place={}, sealed=b"x")
        DatasetPull.objects.create(source=source)
        run = run_services.training_run_create(adapter_name="invoices", dataset_name="chats")
        schedule = schedule_services.schedule_set(
            adapter=run.adapter, dataset_name=dataset.name, cron_line="30 2 * * *"
        )
        ScheduleRun.objects.create(schedule=schedule, slot=NOW, training_run=run)
        TrainingCheckpoint.objects.create(run=run, step=1, version=version)
        _furnish_training_usage(run)
        _furnish_primitives(base_model)
        Turn.objects.create(kind=Turn.Kind.TRAINING, served_at=NOW)
        TenantQuota.objects.create(storage_bytes=10**9)
        rate_limit_set(max_waiting=5)
        budget_set(hard_limit=10**6)
        people.invite_create(by=_owner(party), email="new@example.com", role=Role.VIEWER)
        people.service_account_create(by=_owner(party), name="ci", role=Role.DEVELOPER)
        _furnish_files(party)
        names = {f"req_{tenant_id.hex}": "prod", f"req_b{tenant_id.hex}": "tiny"}
        usage_settle([done_record(party, name, model) for name, model in names.items()])
        RefusalHour.objects.create(
            starts_at=NOW, endpoint="/v1/models", status=429, code="x", requests=1
        )
        capture_policy_set(share=1, shares={}, days=1, max_rows=9, max_bytes=1 << 20)
        CapturedRequest.objects.create(
            request_id=f"req_{tenant_id.hex}", model="prod", sealed=b"x", num_bytes=1
        )
        Feedback.objects.create(request_id=f"req_{tenant_id.hex}", model="prod", rating="good")
        DeadLetter.objects.create(request_id=f"dead_{tenant_id.hex}", model="invoices", reason="x")
        IdempotencyRecord.objects.create(
            caller="key", route="x", key_sha256="0" * 64, body_sha256="0" * 64, expires_at=NOW
        )
        storage.put_bytes(version.staged_config_key, b"{}")
        stated = {"adapter_config.json": 2, "adapter_model.safetensors": 9}
        sent = adapters.adapter_version_create(name="invoices", files=stated, is_multipart=True)
        digests = {"1": hashlib.sha256(b"{}").hexdigest()}
        uploads.parts_sign(version=sent, file="adapter_config.json", digests=digests)
        VersionImport.objects.create(version=sent, sealed=b"x")
        _furnish_webhooks(party)
        _furnish_evaluations(run)
    tenant, pool = str(tenant_id), settings.POOL
    client.hset(fair_queue.limit_key(pool, tenant, "policy"), "r", 1)
    client.hset(fair_queue.budget_key(pool, tenant, "budget", "1"), "spent", 1)
    client.zadd(f"{fair_queue.queue_key(pool, 'tiny')}:i:vt", {tenant: 1})
    client.hset(
        protocol.job_key(pool, f"req_{tenant}"), mapping={"tenant": tenant, "state": "done"}
    )
    client.xadd(protocol.dead_letter_key(pool), {"m": f'{{"tenant_id": "{tenant}"}}'})


def _furnish_evaluations(run: TrainingRun) -> None:
    messages = [{"role": "user", "content": "x"}]
    made = suites.suite_version_create(
        name="held-out", cases=[{"messages": messages, "expected": "y"}], origin={}
    )
    evaluation = Evaluation.objects.create(
        suite_version=made, model="invoices@1", served="invoices@1", adapter=run.adapter
    )
    Result.objects.create(evaluation=evaluation, case=made.cases.get())
    version = run.adapter.versions.get(number=1)
    GateDecision.objects.create(version=version, suite_version=made, candidate=evaluation)
    BatchScores.objects.create(
        version=version, suite_version=made, candidate=[[-1.0, 1]], live=[[-2.0, 1]]
    )
    Judge.objects.create(name="strict", url="https://example.com/v1", model="m")


def _furnish_training_usage(run: TrainingRun) -> None:
    training_usage_add(
        run_id=run.pk,
        attempt=1,
        adapter="invoices",
        base_model="tiny",
        trained_tokens=1000,
        device="cpu",
        is_gpu=False,
        seconds=2.0,
    )


def _furnish_primitives(base_model: BaseModel) -> None:
    client = TrainingClient.objects.create(
        model_id="tks-1:train:0", base_model=base_model, adapter_name="invoices", settings={}
    )
    ClientState.objects.create(client=client, kind=ClientState.Kind.WEIGHTS, name="after")
    for number in range(2):
        call = calls.Call(
            id=f"tks-1:train:0:{number}",
            tenant_id=client.tenant_id,
            base_id=base_model.pk,
            client_id=client.pk,
            kind="forward",
            body=b"x",
        )
        calls.enqueue(call)
    calls.finish(call, calls.Result({}))


def _furnish_webhooks(party: Party) -> None:
    endpoint = WebhookEndpoint.objects.create(url="https://example.com/", sealed_secret=b"x")
    event = OutboxEvent.objects.latest("pk")  # of the version that passed
    WebhookDelivery.objects.create(endpoint=endpoint, event=event)
    EventMail.objects.create(event=event, user=party.owner)
    MailChoice.objects.create(membership=Membership.objects.get(user=party.owner))


def _furnish_files(party: Party) -> None:
    file = File.objects.create(purpose=Purpose.BATCH, status="ready", num_bytes=3)
    storage.put_bytes(file.key, b"{}\n")
    form = files.FileForm(purpose=Purpose.USER_DATA, filename="x", expires_s=None)
    sent = files.upload_create(form=form, num_bytes=3, mime_type="text/plain")
    part = UploadPart.objects.create(upload=sent, num_bytes=3)
    storage.put_bytes(part.key, b"abc")
    writer = storage.ObjectWriter(f"t/{party.tenant.pk}/files/unfinished")
    writer.write(bytes(storage.PART_BYTES + 1))
    batch = Batch.objects.create(
        api_key=party.api_key, endpoint="/v1/completions", input_file_id=file.pk, expires_at=NOW
    )
    Batch.objects.filter(pk=batch.pk).update(status=Batch.Status.COMPLETED)
    BatchResult.objects.create(batch=batch, line=1, is_error=False, output="{}")


def rows_of(party: Party) -> dict[str, int]:
    with tenant_scope(party.tenant.pk):
        models = [model for model in apps.get_models() if issubclass(model, TenantModel)]
        return {model.__name__: model.objects.count() for model in models}


@pytest.fixture
def furnished(
    acme: Party, globex: Party, base_model: BaseModel, client: redis.Redis
) -> Iterator[Party]:
    for party in (acme, globex):
        furnish(party, base_model, client)
        with tenant_scope(party.tenant.pk):
            _request_words(party, base_model)
    assert [name for name, number in rows_of(acme).items() if not number] == []
    yield acme
    with all_tenants(reason="test"):
        TrainingRun.objects.update(status=TrainingRun.Status.CANCELLED)
    for party in (acme, globex):
        storage.delete(list(storage.keys(f"t/{party.tenant.pk}/")))
        storage.abort_parts(f"t/{party.tenant.pk}/")
        for key in client.scan_iter(match=f"*{party.tenant.pk}*"):
            client.delete(key)
    client.delete(protocol.dead_letter_key(settings.POOL))
    client.delete(f"{fair_queue.queue_key(settings.POOL, 'tiny')}:i:vt")


def _request_words(party: Party, base_model: BaseModel) -> None:
    from controlplane.requestlog import services as request_log

    request_log.log_policy_set(content="all", content_days=30, metadata_days=90)
    words = request_log.Words(
        tenant_id=party.tenant.id,
        request_id=f"req_{party.tenant.pk.hex}",
        store=None,
        prompt={"text": "p"},
        outputs=["a"],
        finish_reason="stop",
        is_truncated=False,
    )
    assert request_log.contents_keep([words]) == 1


def delete(party: Party, operator: User, **body: Any) -> Any:
    url = f"/ops/v1/tenants/{party.tenant.slug}"
    body = {"confirm": party.tenant.slug, "grace_days": 0} | body
    return as_user(operator).delete(url, body, format="json")


def assert_gone(party: Party) -> None:
    found = tenant_traces(party.tenant.pk)
    assert found.is_clean, found
    assert set(found.kept) == {"audit_auditevent", "usage_trainingusage", "usage_usageday"}
    tenant = Tenant.objects.get(pk=party.tenant.pk)
    assert (tenant.status, tenant.slug) == ("deleted", f"deleted-{tenant.pk.hex}")


class TestAll:
    def test_nothing_is_left_but_the_record_and_the_totals(
        self, furnished: Party, globex: Party, operator: User, client: redis.Redis
    ) -> None:
        theirs, their_traces = rows_of(globex), tenant_traces(globex.tenant.pk)
        (live,) = self._digests(furnished)
        assert delete(furnished, operator).status_code == 202
        tasks.tenants_delete()
        assert_gone(furnished)
        assert rows_of(globex) == theirs
        assert tenant_traces(globex.tenant.pk) == their_traces
        assert auth.authenticate(globex.header).tenant == globex.tenant
        assert client.zscore(gone_key(settings.POOL), live) is None  # globex has the same bytes
        assert client.zscore(gone_key(settings.POOL), "e" * 64)
        self._check_record(as_user(operator).get("/ops/v1/deletions").json()["data"][0])
        assert not User.objects.filter(email__endswith="@acme.example").exists()
        assert User.objects.filter(email__endswith="@globex.example").count() == 2

    @staticmethod
    def _digests(party: Party) -> list[str]:
        with tenant_scope(party.tenant.pk):
            ready = AdapterVersion.objects.exclude(digest="")
            return list(ready.values_list("digest", flat=True))

    @staticmethod
    def _check_record(record: dict[str, Any]) -> None:
        assert (record["status"], record["tenant"]) == ("done", "acme")
        assert record["requested_by"] == "ops@lorikeet.example"
        assert record["finished_at"]
        assert record["steps"] == list(steps.STEPS)
        counts = record["counts"]
        assert counts["objects"] >= 5
        assert counts["people"] == counts["tenants_membership"] == 2
        assert counts["adapters_adapterversion"] == 3
        assert record["num_bytes"] > len(ROWS)

    def test_the_totals_have_no_names(self, furnished: Party, operator: User) -> None:
        delete(furnished, operator)
        tasks.tenants_delete()
        with tenant_scope(furnished.tenant.pk):
            (day,) = UsageDay.objects.all()
            (trained,) = TrainingUsage.objects.all()
        assert (trained.adapter, trained.trained_tokens) == ("", 1000)
        assert (day.model, day.api_key_id) == ("tiny", None)
        assert (day.requests, day.prompt_tokens, day.completion_tokens) == (2, 20, 10)
        assert usage_drift() == []

    def test_the_trail_is_whole_and_says_who(self, furnished: Party, operator: User) -> None:
        delete(furnished, operator)
        tasks.tenants_delete()
        for chain in (furnished.tenant.pk, None):
            assert audit.verify(chain)[1] == []
        with all_tenants(reason="test"):
            own = AuditEvent.objects.filter(tenant=None, resource_type="tenant_deletion")
            found = list(own.order_by("seq").values_list("action", "actor_name"))
            assert AuditEvent.objects.filter(
                tenant_id=furnished.tenant.pk, action="tenant.deleted"
            ).exists()
        assert found[0] == ("tenant_deletion.scheduled", "ops@lorikeet.example")
        assert found[1][0] == "tenant_deletion.finished"

    def test_people_of_other_tenants_stay(
        self, furnished: Party, globex: Party, operator: User
    ) -> None:
        with tenant_scope(furnished.tenant.pk):
            services.member_add(email=globex.owner.email, role=Role.ADMIN)
            services.member_add(email=operator.email, role=Role.ADMIN)
        delete(furnished, operator)
        tasks.tenants_delete()
        assert User.objects.filter(pk__in=[globex.owner.pk, operator.pk]).count() == 2

    def test_what_comes_late_is_removed_too(self, furnished: Party, operator: User) -> None:
        delete(furnished, operator)
        tasks.tenants_delete()
        storage.put_bytes(f"t/{furnished.tenant.pk}/u/late", b"late")
        usage_settle([done_record(furnished, "req_late", "invoices")])
        assert not tenant_traces(furnished.tenant.pk).is_clean
        tasks.tenants_delete()
        assert_gone(furnished)
        with tenant_scope(furnished.tenant.pk):
            assert sum(UsageDay.objects.values_list("requests", flat=True)) == 3

    def test_the_command_shows_what_is_left(
        self, furnished: Party, operator: User, capsys: pytest.CaptureFixture[str]
    ) -> None:
        call_command("tenant_traces", "acme")
        assert '"files_file": ' in capsys.readouterr().out
        delete(furnished, operator)
        tasks.tenants_delete()
        call_command("tenant_traces", "acme")
        assert '"objects": 0' in capsys.readouterr().out
        storage.put_bytes(f"t/{furnished.tenant.pk}/u/late", b"late")
        with pytest.raises(CommandError):
            call_command("tenant_traces", str(furnished.tenant.pk))
        with pytest.raises(CommandError):
            call_command("tenant_traces", "nobody")


class Killed(BaseException):
    """As `kill -9`: nothing after it runs."""


class TestInterrupted:
    def test_it_goes_on_where_it_was_killed(
        self, furnished: Party, operator: User, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before each step, and after it, before anybody noted that it is done."""
        delete(furnished, operator)
        for name, step in list(steps.STEPS.items()):
            for is_done in (False, True):
                with monkeypatch.context() as patch:
                    patch.setitem(steps.STEPS, name, _dies(step if is_done else None))
                    with pytest.raises(Killed):
                        tasks.tenants_delete()
                tasks.tenants_delete()  # the killed one's lease holds
                assert name not in TenantDeletion.objects.get().steps
                assert TenantDeletion.objects.get().status == "running"
                TenantDeletion.objects.update(lease_until=timezone.now())
        tasks.tenants_delete()
        assert TenantDeletion.objects.get().status == "done"
        assert_gone(furnished)

    def test_killed_between_two_pieces(
        self, furnished: Party, operator: User, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each time a little further, at every place where a step could stop."""
        delete(furnished, operator)
        monkeypatch.setattr(steps, "_OBJECTS", 2)
        for number in range(1, 100, 2):
            if TenantDeletion.objects.get().status == "done":
                break
            with monkeypatch.context() as patch:
                patch.setattr(steps, "run_step", _dies_after(number))
                try:
                    tasks.tenants_delete()
                except Killed:
                    TenantDeletion.objects.update(lease_until=timezone.now())
        assert TenantDeletion.objects.get().status == "done"
        assert TenantDeletion.objects.get().counts["objects"] >= 5
        assert_gone(furnished)

    def test_a_store_that_is_away_is_waited_for(
        self, furnished: Party, operator: User, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        delete(furnished, operator)
        with monkeypatch.context() as patch:
            patch.setitem(steps.STEPS, "objects", _away)
            tasks.tenants_delete()
        (record,) = as_user(operator).get("/ops/v1/deletions").json()["data"]
        assert (record["status"], "away" in record["error"]) == ("running", True)
        tasks.tenants_delete()
        assert TenantDeletion.objects.get().status == "done"
        assert TenantDeletion.objects.get().error == ""

    def test_running_work_is_waited_for(self, furnished: Party, operator: User) -> None:
        with tenant_scope(furnished.tenant.pk):
            run = TrainingRun.objects.get()
            TrainingRun.objects.update(status=TrainingRun.Status.PUBLISHING)
            delete(furnished, operator)
            tasks.tenants_delete()
            assert TenantDeletion.objects.get().steps == []
            assert not Schedule.objects.exists()
            assert TrainingRun.objects.filter(pk=run.pk).exists()
            TrainingRun.objects.update(status=TrainingRun.Status.SUCCEEDED)
        tasks.tenants_delete()
        assert_gone(furnished)

    def test_work_that_never_ends_is_not_waited_for_for_ever(
        self, furnished: Party, operator: User
    ) -> None:
        with tenant_scope(furnished.tenant.pk):
            TrainingRun.objects.update(status=TrainingRun.Status.PUBLISHING)
        delete(furnished, operator)
        tasks.tenants_delete()
        TenantDeletion.objects.update(started_at=timezone.now() - steps.PATIENCE)
        tasks.tenants_delete()
        assert_gone(furnished)


def _dies(step: steps.Step | None) -> steps.Step:
    def run(deletion: TenantDeletion, beat: Callable[[], None]) -> None:
        if step is not None:
            step(deletion, beat)
        raise Killed

    return run


def _dies_after(pieces: int) -> Callable[..., None]:
    original = steps.run_step
    left = [pieces]

    def run_step(name: str, deletion: TenantDeletion, beat: Callable[[], None]) -> None:
        def dying() -> None:
            beat()
            left[0] -= 1
            if left[0] <= 0:
                raise Killed

        original(name, deletion, dying)

    return run_step


def _away(deletion: TenantDeletion, beat: Callable[[], None]) -> None:
    raise ConnectionError("the store is away")


class TestGrace:
    def test_it_is_suspended_at_once_and_can_be_restored(
        self, acme: Party, operator: User, settings: Any
    ) -> None:
        settings.TENANT_DELETION_GRACE_DAYS = 7
        url = "/ops/v1/tenants/acme"
        answer = as_user(operator).delete(url, {"confirm": "acme"}, format="json").json()
        assert answer["status"] == "scheduled"
        due = dt.datetime.fromisoformat(answer["due_at"]) - timezone.now()
        assert dt.timedelta(days=6.9) < due < dt.timedelta(days=7)
        assert as_key(acme).get("/api/v1/adapters").status_code == 403
        assert as_user(acme.owner).get("/api/v1/adapters").status_code == 403
        tasks.tenants_delete()
        assert rows_of(acme)["Membership"] == 2
        patch = as_user(operator).patch(url, {"status": "active"}, format="json")
        assert_error(patch, 409)
        assert_error(as_user(operator).delete(url, {"confirm": "acme"}, format="json"), 409)
        auth._keys.forget(*auth._keys.keys())
        assert as_user(operator).post(f"{url}/restore").json()["status"] == "active"
        assert as_key(acme).get("/api/v1/adapters").status_code == 200
        execution.tenants_delete(timezone.now() + dt.timedelta(days=30))
        assert rows_of(acme)["Membership"] == 2
        (record,) = as_user(operator).get("/ops/v1/deletions").json()["data"]
        assert (record["status"], record["finished_at"]) == ("restored", None)

    def test_a_suspended_tenant_is_suspended_again(self, acme: Party, operator: User) -> None:
        services.tenant_status_set(tenant=acme.tenant, status="suspended")
        delete(acme, operator, grace_days=1)
        restored = as_user(operator).post("/ops/v1/tenants/acme/restore").json()
        assert restored["status"] == "suspended"

    @pytest.mark.parametrize("days", [0, 1])
    def test_nobody_can_restore_what_is_due_before_its_task_begins(
        self, acme: Party, operator: User, days: int
    ) -> None:
        delete(acme, operator, grace_days=days)
        if days:
            TenantDeletion.objects.update(due_at=timezone.now())
        page = f"/admin/deletion/tenantdeletion/tenant/{acme.tenant.pk}/"
        answer = as_user(operator).post("/ops/v1/tenants/acme/restore")
        assert_error(answer, 409)
        assert answer.json()["error"]["code"] == "grace_period_over"
        staff = Client()
        staff.force_login(operator)
        shown = staff.get(page).content.decode()
        assert "Restore it" not in shown and "this cannot be undone" in shown
        assert staff.post(page, {"restore": "1"}).status_code == 409
        deletion = TenantDeletion.objects.get()
        assert deletion.status == "scheduled"
        deletion.requested_at = deletion.due_at = timezone.now() + dt.timedelta(seconds=30)
        assert not deletion.can_be_undone, "on a machine whose clock is behind"
        tasks.tenants_delete()
        assert TenantDeletion.objects.get().status == "done"

    def test_after_the_grace_nobody_can_restore(self, acme: Party, operator: User) -> None:
        delete(acme, operator)
        execution._claim(TenantDeletion.objects.get().pk)
        assert_error(as_user(operator).post("/ops/v1/tenants/acme/restore"), 409)
        TenantDeletion.objects.update(lease_until=None)
        tasks.tenants_delete()
        assert_error(as_user(operator).post("/ops/v1/tenants/acme/restore"), 404)
        assert as_user(operator).get("/ops/v1/tenants").json()["data"] == []

    def test_the_slug_is_asked_for_again_and_free_afterwards(
        self, acme: Party, operator: User
    ) -> None:
        assert_error(delete(acme, operator, confirm="acne"), 400, "confirm")
        assert_error(as_user(operator).delete("/ops/v1/tenants/acme"), 400, "confirm")
        delete(acme, operator)
        tasks.tenants_delete()
        again = services.tenant_create(slug="acme", name="Acme")
        assert again.pk != acme.tenant.pk

    def test_only_operators_delete_tenants(self, acme: Party, globex: Party) -> None:
        body = {"confirm": "acme"}
        for client in (as_user(globex.owner), as_user(acme.owner)):
            assert_error(client.delete("/ops/v1/tenants/acme", body, format="json"), 403)
        assert_error(as_key(globex).delete("/ops/v1/tenants/acme", body, format="json"), 401)
        assert not TenantDeletion.objects.exists()
