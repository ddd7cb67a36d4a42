"""A version between the check of its files and its probe: what it waits for, and how it ends."""

from __future__ import annotations

import datetime as dt
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from contract.messages.protocol import Heartbeat
from controlplane.adapters import ingest, probing, promotion
from controlplane.adapters.models import (
    Adapter,
    AdapterInspection,
    AdapterVersion,
    BaseModel,
    Promotion,
)
from controlplane.adapters.resolution import adapter_ref
from controlplane.aliases import services
from controlplane.aliases.contents import Contents, Part, contents_of
from controlplane.evaluations.inspections import execution, sweep
from controlplane.events.audit.models import AuditEvent
from controlplane.events.outbox.models import EventType, OutboxEvent
from controlplane.infra import storage
from controlplane.infra.health import liveness
from controlplane.queue.workers import WorkerStatus
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.datasets.services import dataset_upload
from controlplane.training.models import TrainingRun
from controlplane.training.runs.services import training_run_create
from tests.controlplane.adapters.test_ingest import upload, validate
from tests.controlplane.adapters.test_retirement import wait_for_a_lock
from tests.controlplane.conftest import Party, as_key, assert_error
from tests.controlplane.training.conftest import ROWS

ROOT = Path(__file__).parents[4]
Status = AdapterVersion.Status
Probe = AdapterInspection.Status

AGREED: dict[str, Any] = {"probe": {"workers": ["w-1"], "dtype": "float32"}, "compared": []}


@pytest.fixture
def scope(acme: Party, base_model: BaseModel) -> Iterator[None]:
    with tenant_scope(acme.tenant.id):
        yield


@pytest.fixture
def inspector() -> Iterator[None]:
    """An inspector has shown itself; its queue is not read."""
    liveness.hide("inspector")
    liveness.show_alive("inspector")
    yield
    liveness.hide("inspector")


@pytest.fixture
def finding(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Let the child and the worker find this, or raise it."""

    def set_finding(found: object) -> None:
        def find(inspection: AdapterInspection) -> dict[str, Any]:
            if isinstance(found, Exception):
                raise found
            return found if isinstance(found, dict) else dict(AGREED)

        monkeypatch.setattr(execution, "_found", find)

    return set_finding


def probe_of(version: AdapterVersion) -> AdapterInspection:
    return AdapterInspection.objects.get(version=version)


def is_stored(version: AdapterVersion) -> bool:
    kept = AdapterVersion(tenant_id=version.tenant_id, digest=version.kept_digest)
    return storage.object_size(kept.tensors_key) is not None


@pytest.mark.usefixtures("scope")
def test_without_an_inspector_a_version_goes_on_at_once() -> None:
    version = validate(upload())
    assert version.status == Status.READY
    assert (probe_of(version).status, probe_of(version).why) == (
        Probe.NOT_RUN,
        probing.NO_INSPECTOR,
    )


@pytest.mark.usefixtures("scope", "inspector")
def test_off_means_no_inspection(settings: Any) -> None:
    settings.PROBE = "off"
    version = validate(upload())
    assert version.status == Status.READY
    assert not AdapterInspection.objects.exists()


@pytest.mark.usefixtures("scope", "inspector")
def test_a_version_waits_until_a_worker_agrees(finding: Callable[[object], None]) -> None:
    version = validate(upload())
    assert (version.status, version.digest) == (Status.VALIDATING, "")
    assert Adapter.objects.get().live_version is None
    validate(version)  # the sweep takes it for lost; it is not checked again
    assert version.status == Status.VALIDATING
    finding("agrees")
    assert execution.inspect_next()
    version.refresh_from_db()
    assert (version.status, version.max_rank) == (Status.READY, 4)
    assert version.report["num_tensors"] == 12
    assert Adapter.objects.get().live_version == version
    assert (probe_of(version).status, probe_of(version).is_held) == (Probe.AGREED, False)
    assert not execution.inspect_next()


@pytest.mark.usefixtures("scope", "inspector")
def test_a_mismatch_rejects_and_says_why(finding: Callable[[object], None], acme: Party) -> None:
    version = validate(upload())
    finding(execution.Mismatch("prompt 1, position 3: other", **AGREED))
    execution.inspect_next()
    version.refresh_from_db()
    assert version.status == Status.REJECTED
    assert "prompt 1, position 3" in version.reasons[0]["message"]
    assert Adapter.objects.get().live_version is None
    seen = as_key(acme).get("/api/v1/adapters/invoices/versions/1").json()
    assert (seen["status"], seen["probe"]["status"]) == ("rejected", "mismatch")
    # Its bytes go with the sweep, a day later.
    assert is_stored(version)
    old = timezone.now() - dt.timedelta(days=2)
    AdapterVersion.objects.update(status_changed_at=old)
    ingest.orphaned_objects.versions_clear()
    assert not is_stored(version)


@pytest.mark.usefixtures("scope", "inspector")
def test_a_probe_that_cannot_run_lets_the_version_go_on(
    finding: Callable[[object], None],
) -> None:
    version = validate(upload())
    finding(execution.NotRun("No worker answered."))
    execution.inspect_next()
    version.refresh_from_db()
    assert version.status == Status.READY
    inspection = probe_of(version)
    assert (inspection.status, inspection.why) == (Probe.NOT_RUN, "No worker answered.")
    assert not execution.inspect_next()  # not at once again
    AdapterInspection.objects.update(lease_until=timezone.now())
    finding("agrees")
    assert execution.inspect_next()
    assert probe_of(version).status == Probe.AGREED


@pytest.mark.parametrize(
    ("found", "ended"),
    [
        ("agrees", "succeeded"),
        (execution.Mismatch("other", **AGREED), "failed"),
        (execution.NotRun("No worker answered."), "succeeded"),
    ],
)
@pytest.mark.usefixtures("scope", "inspector")
def test_the_run_that_trained_a_version_ends_with_its_probe(
    finding: Callable[[object], None], found: object, ended: str
) -> None:
    """Without a tick: its lease is not over."""
    version = validate(upload())
    dataset_upload(name="chats", content=ROWS)
    run = training_run_create(
        adapter_name="invoices", dataset_name="chats", hyperparameters={"max_steps": 2}
    )
    lease_until = timezone.now() + dt.timedelta(minutes=1)
    TrainingRun.objects.filter(pk=run.pk).update(
        status="publishing", version=version, attempts=1, lease_until=lease_until
    )
    finding(found)
    execution.inspect_next()
    run.refresh_from_db()
    assert run.status == ended


@pytest.mark.usefixtures("scope", "inspector")
def test_require_waits_for_ever(finding: Callable[[object], None], settings: Any) -> None:
    settings.PROBE = "require"
    version = validate(upload())
    finding(execution.NotRun("No worker answered."))
    execution.inspect_next()
    AdapterInspection.objects.update(lease_until=timezone.now())
    sweep.held_release()
    assert validate(version).status == Status.VALIDATING
    finding("agrees")
    execution.inspect_next()
    assert validate(version).status == Status.READY


@pytest.mark.usefixtures("scope", "inspector")
def test_what_was_to_wait_goes_on_when_nothing_is_required_any_more(settings: Any) -> None:
    settings.PROBE = "require"
    version = validate(upload())
    settings.PROBE = "off"
    assert validate(version).status == Status.READY  # as the sweep for lost checks does


@pytest.mark.usefixtures("scope", "inspector")
def test_a_check_that_was_too_slow_does_not_reject_what_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sweep took it for lost: another process has checked it, and cleared its staged files."""
    version, check = upload(), ingest._check_and_keep

    def late(checked: AdapterVersion) -> Any:
        monkeypatch.undo()
        assert validate(version).status == Status.VALIDATING
        return check(checked)

    monkeypatch.setattr(ingest, "_check_and_keep", late)
    assert validate(version).status == Status.VALIDATING, version.reasons
    assert probe_of(version).is_held


@pytest.mark.usefixtures("scope", "inspector")
def test_the_wait_has_an_end_when_the_inspector_dies(finding: Callable[[object], None]) -> None:
    """It had taken the version; its late result still counts, and its lease ends."""
    version = validate(upload())
    taken = execution._claim()
    assert taken is not None and execution._claim() is None
    AdapterInspection.objects.update(held_until=timezone.now())
    sweep.held_release()
    version.refresh_from_db()
    assert version.status == Status.READY
    assert (probe_of(version).status, probe_of(version).why) == (Probe.NOT_RUN, probing.TOO_LATE)
    AdapterInspection.objects.update(lease_until=timezone.now())
    again = execution._claim()
    assert again is not None and again.attempts == taken.attempts + 1
    finding(execution.Mismatch("late"))
    execution._inspect(taken)  # it wakes, and changes nothing
    assert probe_of(version).status == Probe.NOT_RUN


@pytest.mark.usefixtures("scope")
def test_a_late_mismatch_rejects_what_is_not_live(finding: Callable[[object], None]) -> None:
    first, second = validate(upload()), validate(upload())
    assert (first.status, second.status) == (Status.READY, Status.READY)
    finding(execution.Mismatch("other numbers"))
    assert execution.inspect_next() and execution.inspect_next()
    first.refresh_from_db()
    second.refresh_from_db()
    assert (first.status, second.status) == (Status.READY, Status.REJECTED)
    assert Adapter.objects.get().live_version == first
    assert probe_of(first).status == probe_of(second).status == Probe.MISMATCH
    event = AuditEvent.objects.get(action__endswith="probe_mismatch")
    assert event.resource_id == str(first.pk)
    told = OutboxEvent.objects.get(type=EventType.VERSION_REJECTED)
    assert told.data["version"] == second.number
    # The rejected one's bytes are those of the live one: they stay.
    old = timezone.now() - dt.timedelta(days=2)
    AdapterVersion.objects.update(status_changed_at=old)
    ingest.orphaned_objects.versions_clear()
    assert storage.object_size(first.tensors_key) is not None


@pytest.mark.usefixtures("scope")
def test_a_late_mismatch_leaves_what_an_alias_names(finding: Callable[[object], None]) -> None:
    live, primary, canary, former = (validate(upload()) for _ in range(4))
    blend = (Part(adapter="invoices"), Part(adapter="invoices", version=2, weight=0.5))
    contents = Contents(primary=blend, canary=(Part(adapter="invoices", version=4),))
    alias = services.alias_create(name="prod", contents=contents)
    third = (Part(adapter="invoices", version=3),)
    services.alias_change(alias=alias, changes={"canary": third})
    finding(execution.Mismatch("other numbers"))
    used_before = execution.PROBES.labels("mismatch_live")._value.get()
    while execution.inspect_next():
        pass
    for version in (live, primary, canary, former):
        version.refresh_from_db()
    assert [v.status for v in (live, primary, canary)] == [Status.READY] * 3
    assert former.status == Status.REJECTED  # an earlier revision's alone
    assert execution.PROBES.labels("mismatch_live")._value.get() == used_before + 3
    events = AuditEvent.objects.filter(action__endswith="probe_mismatch")
    told = {event.resource_id: event.after for event in events}
    assert {pk: (after["is_live"], after["aliases"]) for pk, after in told.items()} == {
        str(live.pk): (True, []),
        str(primary.pk): (False, ["prod"]),
        str(canary.pk): (False, ["prod"]),
    }
    assert contents_of(services.revision_get(alias=alias)).canary == third


@pytest.mark.usefixtures("scope", "inspector")
def test_a_rejected_version_cannot_be_promoted_in_between(
    finding: Callable[[object], None],
) -> None:
    version = validate(upload())
    finding(execution.Mismatch("other numbers"))
    execution.inspect_next()
    version.refresh_from_db()
    with pytest.raises(Exception, match="only a ready version"):
        promotion.adapter_version_promote(version=version)
    assert not Promotion.objects.exists()


@pytest.mark.usefixtures("inspector")
def test_tenants_take_turns(
    acme: Party, globex: Party, base_model: BaseModel, finding: Callable[[object], None]
) -> None:
    finding("agrees")
    for party, number in ((acme, 3), (globex, 1)):
        with tenant_scope(party.tenant.id):
            for _ in range(number):
                validate(upload())
    order = []
    while (taken := execution._claim()) is not None:
        order.append(taken.tenant_id)
    assert order[:2] == [acme.tenant.id, globex.tenant.id]


@pytest.mark.django_db(transaction=True)
def test_two_inspectors_do_not_take_the_same(acme: Party, base_model: BaseModel) -> None:
    with tenant_scope(acme.tenant.id):
        validate(upload())
    taken: list[Any] = []

    def claim() -> None:
        taken.append(execution._claim())
        connection.close()

    thread = threading.Thread(target=claim)
    with transaction.atomic():
        first = execution._claim()
        thread.start()
        wait_for_a_lock()
    thread.join(60)
    assert first is not None and taken == [None]


@pytest.mark.usefixtures("scope")
def test_what_somebody_waits_for_comes_first(
    request: pytest.FixtureRequest, finding: Callable[[object], None]
) -> None:
    finding("agrees")
    left, asked = validate(upload()), validate(upload())
    request.getfixturevalue("inspector")
    probing.inspection_request(asked)
    held = validate(upload())
    order = []
    while (taken := execution._claim()) is not None:
        order.append(taken.version_id)
    assert order == [held.pk, asked.pk, left.pk]


@pytest.mark.usefixtures("scope", "inspector")
def test_the_api_shows_and_repeats_an_inspection(
    acme: Party, finding: Callable[[object], None]
) -> None:
    version, client = validate(upload()), as_key(acme)
    path = "/api/v1/adapters/invoices/versions/1/doctor"
    assert_error(client.post(path), 409)
    finding("agrees")
    execution.inspect_next()
    AdapterInspection.objects.update(
        doctor={"summary": {"rank": 4}, "findings": [], "modules": [{"module": "m"}]}
    )
    seen = client.get(path).json()
    assert seen["probe"]["status"] == "agreed"
    assert (seen["summary"], seen["modules"]) == ({"rank": 4}, [{"module": "m"}])
    assert seen["device_bytes"] == 4 * version.__class__.objects.get().report["num_parameters"]
    assert client.post(path).status_code == 202
    assert probe_of(version).status == Probe.WAITING
    assert execution.inspect_next()
    AdapterInspection.objects.all().delete()
    never = client.get(path).json()
    assert (never["probe"]["status"], never["modules"]) == ("not_run", [])


@pytest.mark.usefixtures("scope", "inspector")
def test_the_probe_decides_for_each_version_whether_its_copy_answers(
    acme: Party, finding: Callable[[object], None], settings: Any
) -> None:
    """And people may have the original all the same; the limit is the operator's."""
    path, client = "/api/v1/adapters/invoices/versions", as_key(acme)

    def served(number: int) -> bool:
        version = AdapterVersion.objects.get(number=number)
        is_in_fp8: bool = adapter_ref(version).in_fp8
        assert client.get(f"{path}/{number}").json()["is_in_fp8"] is is_in_fp8
        return is_in_fp8

    def keep(number: int, keeps_original: bool) -> Any:
        given = {"keeps_original": keeps_original}
        answer = client.patch(f"{path}/{number}", given, content_type="application/json")
        assert answer.status_code == 200
        return answer.json()

    for nats in (None, 0.01, 0.2):
        probe = AGREED["probe"] | ({} if nats is None else {"copy_nats": nats})
        finding({**AGREED, "probe": probe})
        validate(upload())
        execution.inspect_next()
    settings.COPY_MAX_NATS = 0.05
    assert [served(number) for number in (1, 2, 3)] == [False, True, False]
    settings.COPY_MAX_NATS = 0.5
    assert [served(number) for number in (1, 2, 3)] == [False, True, True]
    assert keep(2, True)["copy_nats"] == keep(2, True)["copy_nats"] == 0.01
    assert [served(number) for number in (1, 2, 3)] == [False, False, True]
    assert AuditEvent.objects.filter(action__endswith="precision_set").count() == 1
    keep(2, False)
    assert served(2)


@pytest.mark.usefixtures("scope", "inspector")
def test_copies_are_compared_when_workers_begin_to_have_them(
    finding: Callable[[object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and only if all workers of the base keep adapters in FP8."""
    version = validate(upload())
    finding("agrees")
    execution.inspect_next()

    def sweep_with(*adapters: str) -> str:
        beats = (
            Heartbeat(
                worker_id="w", boot_id="b", pool="p", base_revision="r", device="cpu",
                base_model=version.adapter.base_model.name, precision={"adapters": each},
            )
            for each in adapters
        )  # fmt: skip
        statuses = [WorkerStatus(heartbeat=beat, silent_s=0.0) for beat in beats]
        monkeypatch.setattr(sweep, "workers", lambda: statuses)
        sweep.copies_measure()
        return probe_of(version).status

    assert sweep_with("fp8", "bfloat16") == sweep_with() == Probe.AGREED
    assert sweep_with("fp8", "fp8") == Probe.WAITING
    finding({**AGREED, "probe": {"copy_nats": 0.01}})
    assert execution.inspect_next()
    assert sweep_with("fp8") == Probe.AGREED
    assert not execution.inspect_next()


@pytest.mark.usefixtures("scope", "inspector")
def test_the_commands_of_the_documentation(acme: Party, finding: Callable[[object], None]) -> None:
    finding("agrees")
    for _ in range(2):
        validate(upload())
        execution.inspect_next()
    section = (ROOT / "docs" / "adapters.md").read_text().partition("## Doctor and probe")[2]
    _, *lines = section.split("```sh\n")[1].split("```")[0].strip().splitlines()
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line, comments=True)
        method = words[words.index("-X") + 1] if "-X" in words else "GET"
        [path] = [word.removeprefix("$api") for word in words if word.startswith("$api")]
        answer = as_key(acme).generic(method, f"/api/v1/adapters/invoices{path}")
        assert answer.status_code in (200, 202), (line, answer.content)


def test_another_tenant_finds_nothing(
    acme: Party, globex: Party, base_model: BaseModel, inspector: None
) -> None:
    with tenant_scope(acme.tenant.id):
        validate(upload())
    assert_error(as_key(globex).get("/api/v1/adapters/invoices/versions/1/doctor"), 404)
