"""The morning: what a night's schedules changed, for the tenant's own people alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from django.utils import timezone

from controlplane.evaluations.models import Evaluation, GateDecision, SuiteVersion
from controlplane.evaluations.morning import report, telling
from controlplane.events.outbox.models import OutboxEvent
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.auth import Principal
from controlplane.tenants.models import Role
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Schedule, ScheduleRun, TrainingRun
from controlplane.training.runs import services as run_services
from controlplane.training.schedules import history, schedules
from controlplane.training.schedules import services as schedule_services
from controlplane.webhooks import fan_out, mails
from tests.controlplane.conftest import Party, as_key, as_user, assert_error
from tests.controlplane.console.conftest import browser_of
from tests.controlplane.training.conftest import ROWS

Night = Callable[[], ScheduleRun]
MORNING = "/api/v1/morning"
HOUR = dt.timedelta(hours=1)
#: Times that have a year in their own zone and none in another.
EDGES = ("9998-12-31T23:59:59-23:59", "0002-01-01T00:00:00+23:59", "0001-01-01T00:00:00+23:59")


def test_the_morning_tells_what_changed(night: Night, scope: Party) -> None:
    row = night()
    told = as_key(scope).get(MORNING).json()
    assert (told["object"], told["num_more"], told["counts"]) == ("morning", 0, {"succeeded": 2})
    [entry] = told["data"]
    assert (entry["adapter"], entry["version"]) == ("invoices", 3)
    assert entry["slot"]["id"] == str(row.pk)
    assert (entry["num_rows"], entry["rows_added"]) == (10, 3)
    assert entry["losses"] == [[1, 3.0], [2, 2.0], [3, 1.5]]
    assert entry["validation_losses"] == [[2, 2.5], [3, 1.75]]
    assert (entry["best_loss"], entry["best_loss_before"]) == (1.75, 2.0)
    # Version 3 is worse than version 2, which went live.
    assert (entry["gate"]["status"], entry["gate"]["live_version"]) == ("reject", 2)
    assert "It is worse" in entry["gate"]["reasons"][0]
    compared = entry["comparison"]
    assert len(compared["changed"]) == 20
    assert compared["num_worse"] > compared["num_better"]
    whole = compared["differences"][0]
    assert whole["interval"]["low"] < whole["interval"]["mean"] < 0
    assert as_key(scope).get(f"{MORNING}?adapter=invoices").json()["data"] == told["data"]
    before = (timezone.now() - 2 * 24 * HOUR).isoformat()
    assert as_key(scope).get(MORNING, {"until": before}).json()["data"] == []
    for wrong in ("soon", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "\x00", *EDGES):
        assert_error(as_key(scope).get(MORNING, {"until": wrong}), 400, "until")


def test_the_page_shows_it_to_a_viewer(night: Night, scope: Party) -> None:
    night()
    page = browser_of(scope.viewer).get("/console/morning").content.decode()
    for text in (
        "10, 3 added",
        "-0.2500 against the run before",
        '<polyline class="curve beside"',
        "It is worse: the mean score",
        "95 %",
        "What is 2?",
        "It is 2.",
        "version 3",
    ):
        assert text in page, text
    assert page.count("<dt>Asked</dt><dd>What is ") == 20
    later = (timezone.now() + HOUR).isoformat()
    assert (
        "10, 3 added"
        in browser_of(scope.viewer).get("/console/morning", {"until": later}).content.decode()
    )
    edges = [urlencode({"until": edge}) for edge in EDGES]
    for odd in ("until=x&adapter=nope", "until=%00&adapter=%00", "until=9999-12-31", *edges):
        assert browser_of(scope.viewer).get(f"/console/morning?{odd}").status_code == 200


def reader(party: Party) -> Principal:
    return Principal(tenant=party.tenant, role=Role.VIEWER, user=party.viewer)


def test_words_of_requests_are_for_who_may_read_them(night: Night, scope: Party) -> None:
    night()
    SuiteVersion.objects.update(has_requests=True)
    for user, is_shown in ((scope.viewer, False), (scope.owner, True)):
        page = browser_of(user).get("/console/morning").content.decode()
        [entry] = as_user(user).get(MORNING).json()["data"]
        assert ("What is 2?" in page, bool(entry["comparison"]["changed"])) == (is_shown, is_shown)
        assert "It is worse: the mean score" in page and entry["comparison"]["num_worse"]


def test_nothing_of_a_night_crosses_tenants(night: Night, scope: Party, globex: Party) -> None:
    night()
    with tenant_scope(globex.tenant.id):
        assert report.morning_of(by=reader(globex)).entries == ()
    told = as_key(globex).get(MORNING)
    assert told.json()["data"] == [] and b"invoices" not in told.content
    assert_error(as_key(globex).get(f"{MORNING}?adapter=invoices"), 404)
    page = browser_of(globex.owner).get("/console/morning?adapter=invoices").content
    assert b"It is worse" not in page and b"What is 2?" not in page
    for path in ("schedule/runs", "schedule"):
        assert_error(as_key(globex).get(f"/api/v1/adapters/invoices/{path}"), 404)
    assert_error(as_key(globex).post("/api/v1/adapters/invoices/schedule/run"), 404)
    history.slots_conclude()
    telling.mornings_tell(timezone.now() + 13 * HOUR)
    with tenant_scope(globex.tenant.id):
        assert not OutboxEvent.objects.exists()


def test_what_was_deleted_is_no_longer_shown(night: Night, scope: Party) -> None:
    night()
    Evaluation.objects.all().delete()
    entry = as_key(scope).get(MORNING).json()["data"][0]
    assert (entry["gate"]["status"], entry["comparison"]) == ("reject", None)
    GateDecision.objects.all().delete()
    assert as_key(scope).get(MORNING).json()["data"][0]["gate"] is None
    schedule_services.schedule_delete(adapter=Schedule.objects.get().adapter)
    assert as_key(scope).get(MORNING).json()["data"] == []


def test_answers_are_compared_of_the_first_entries(
    night: Night, scope: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    night()
    monkeypatch.setattr(report, "MAX_COMPARED", 0)
    assert as_key(scope).get(MORNING).json()["data"][0]["comparison"] is None
    assert (
        "Its differences and answers"
        in browser_of(scope.viewer).get("/console/morning").content.decode()
    )
    monkeypatch.setattr(report, "MAX_ENTRIES", 0)
    told = as_key(scope).get(MORNING).json()
    assert (told["data"], told["num_more"]) == ([], 1)


def events() -> list[dict[str, Any]]:
    return list(OutboxEvent.objects.filter(type="morning.ready").values_list("data", flat=True))


def test_a_night_is_one_event_without_words(
    night: Night, scope: Party, mailoutbox: list[Any], settings: Any
) -> None:
    night()
    now = timezone.now()
    Schedule.objects.update(next_run_at=now + 20 * HOUR)
    assert telling.mornings_tell(now) == 0  # nobody has noted that the runs ended
    assert history.slots_conclude() == 2
    GateDecision.objects.filter(status="reject").update(status="waiting")
    assert telling.mornings_tell(now) == 0
    GateDecision.objects.filter(status="waiting").update(status="reject")
    assert telling.mornings_tell(now) == 1
    assert telling.mornings_tell(now + HOUR) == 0
    [event] = events()
    numbers = {name: event[name] for name in ("succeeded", "failed", "promoted", "held")}
    assert numbers == {"succeeded": 2, "failed": 0, "promoted": 1, "held": 1}
    assert event["rows_added"] == 3
    page = event["page"].removeprefix(settings.BASE_URL)
    assert page.startswith("/console/morning?until=")
    assert "10, 3 added" in browser_of(scope.viewer).get(page).content.decode()
    OutboxEvent.objects.exclude(type="morning.ready").delete()
    fan_out.events_fan_out()
    mails.mails_send()
    [mail] = mailoutbox
    assert mail.to == [scope.owner.email]
    assert event["page"] in mail.body
    for words in ("What is", "It is", "hello", "world"):
        assert words not in mail.body and words not in str(event)


def test_a_night_waits_for_slots_that_are_near_and_not_for_ever(night: Night) -> None:
    night()
    now = timezone.now()
    history.slots_conclude()
    Schedule.objects.update(next_run_at=now + 2 * HOUR)
    assert telling.mornings_tell(now) == 0
    Schedule.objects.update(next_run_at=now + 14 * HOUR)
    assert telling.mornings_tell(now + 12 * HOUR) == 1
    # A new run that goes on keeps nobody for more than twelve hours.
    ScheduleRun.objects.update(reported_at=None, created_at=now)
    TrainingRun.objects.update(status="running")
    first, _ = ScheduleRun.objects.all()
    ScheduleRun.objects.filter(pk=first.pk).update(concluded_at=None)
    assert telling.mornings_tell(now + HOUR) == 0
    assert telling.mornings_tell(now + 12 * HOUR) == 1
    assert list(ScheduleRun.objects.filter(reported_at=None)) == [first]


def test_a_night_of_nothing_new_is_not_told(scope: Party, gated: Any) -> None:
    dataset_services.dataset_upload(name="chats", content=ROWS)
    schedule = schedule_services.schedule_set(
        adapter=gated, dataset_name="chats", cron_line="0 2 * * *"
    )
    run = schedules.schedule_run_now(schedule).training_run
    assert run is not None
    TrainingRun.objects.update(status="succeeded")
    ScheduleRun.objects.all().delete()
    assert schedules.schedules_fire(schedule.next_run_at) == 0
    assert telling.mornings_tell(timezone.now() + 13 * HOUR) == 0
    [entry] = report.morning_of(schedule.next_run_at, by=reader(scope)).entries
    assert (entry.row.state, entry.row.reason, entry.run) == ("skipped", "unchanged", None)
    page = browser_of(scope.owner).get("/console/adapters/invoices/schedule").content.decode()
    assert "nothing is new since the last run that succeeded" in page


def test_failed_and_missed_come_first(night: Night, scope: Party) -> None:
    night()
    other = run_services.training_run_create(
        adapter_name="other", dataset_name="chats", base_model_name="tiny"
    )
    TrainingRun.objects.filter(pk=other.pk).update(status="succeeded", num_rows=1)
    schedule = schedule_services.schedule_set(
        adapter=other.adapter, dataset_name="chats", cron_line="0 2 * * *"
    )
    row = schedules.schedule_run_now(schedule)
    TrainingRun.objects.filter(pk=row.training_run_id).update(status="failed", error="line 3")
    history.slots_conclude()
    assert [entry.adapter for entry in report.morning_of(by=reader(scope)).entries] == [
        "other",
        "invoices",
    ]
    page = browser_of(scope.owner).get("/console/morning").content.decode()
    assert page.index("line 3") < page.index("It is worse")
    Schedule.objects.update(next_run_at=timezone.now() + 20 * HOUR)
    assert telling.mornings_tell() == 1
    [event] = events()
    assert (event["failed"], event["failed_adapters"]) == (1, ["other"])
    assert "line 3" not in str(event)


def test_a_schedule_is_run_and_its_history_read_over_http(night: Night, scope: Party) -> None:
    night()
    url = "/api/v1/adapters/invoices/schedule"
    rows = as_key(scope).get(f"{url}/runs").json()["data"]
    assert [(row["state"], row["trigger"], row["num_rows"]) for row in rows] == [
        ("succeeded", "clock", 10),
        ("succeeded", "manual", 7),
    ]
    body = {"dataset": "chats", "cron": "0 2 * * *", "window": "22:00-06:00", "grace_s": 600}
    told = as_key(scope).put(url, body, format="json").json()
    assert (told["window"], told["grace_s"], told["misfire"]) == ("22:00-06:00", 600, "run_once")
    assert told["skip_unchanged"] is True
    for field, value in (("window", "x"), ("grace_s", 1), ("max_runs_per_day", 0)):
        answer = as_key(scope).put(url, {**body, field: value}, format="json")
        assert_error(answer, 400, field)
    assert_error(as_user(scope.viewer).post(f"{url}/run"), 403)
    made = as_key(scope).post(f"{url}/run")
    assert (made.status_code, made.json()["trigger"]) == (201, "manual")
    assert assert_error(as_key(scope).post(f"{url}/run"), 409)["code"] == "run_active"
    browser = browser_of(scope.owner)
    page = browser.post("/console/adapters/invoices/schedule/run", follow=True).content.decode()
    assert "A training run of the adapter has not ended: wait, or cancel it." in page
    assert "somebody ran it" in page
    TrainingRun.objects.filter(status="queued").update(status="failed")
    answer = browser.post("/console/adapters/invoices/schedule/run")
    assert answer.url.startswith("/console/training/runs/")
    form = {"dataset": "chats", "cron": "0 3 * * *", "timezone": "UTC", "window": "01:00-05:00"}
    assert browser.post("/console/adapters/invoices/schedule", form).status_code == 302
    schedule = Schedule.objects.get()
    assert (schedule.window, schedule.skip_unchanged) == ("01:00-05:00", False)
    wrong = browser.post("/console/adapters/invoices/schedule", {**form, "window": "1-5"})
    assert (wrong.status_code, b'id="id_window_error"' in wrong.content) == (422, True)
