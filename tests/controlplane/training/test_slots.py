"""What becomes of each slot: its rules, its history, what is told; over clocks that change, with
two beats, and whatever statement a tick dies at."""

from __future__ import annotations

import datetime as dt
import threading
import zoneinfo
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.db import Error, connection

from controlplane.adapters.models import Adapter
from controlplane.errors import Conflict, InvalidRequest
from controlplane.events.outbox.models import OutboxEvent
from controlplane.infra.metrics import SCHEDULE_SLOTS
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset, Schedule, ScheduleRun, TrainingRun
from controlplane.training.runs import sending
from controlplane.training.runs import services as run_services
from controlplane.training.schedules import history, schedule_rules, schedules
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import FAST, ROWS
from tests.controlplane.training.test_schedules import finish_runs, schedule_set, states

MINUTE, HOUR = dt.timedelta(minutes=1), dt.timedelta(hours=1)
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


@pytest.fixture
def made(adapter: Adapter, dataset: Dataset) -> Callable[..., Schedule]:
    """A function that sets the adapter's schedule, by its rules."""

    def make(**fields: Any) -> Schedule:
        return schedule_set(adapter=adapter, **fields)

    return make


def missed_events() -> list[dict[str, Any]]:
    return list(
        OutboxEvent.objects.filter(type="schedule.missed")
        .order_by("created_at")
        .values_list("data", flat=True)
    )


def test_a_slot_is_skipped_when_nothing_is_new(made: Callable[..., Schedule]) -> None:
    schedule = made(skip_unchanged=True, hyperparameters=FAST)
    slot = schedule.next_run_at
    assert schedules.schedules_fire(slot) == 1
    TrainingRun.objects.update(status="failed")  # nothing was made of these rows
    assert schedules.schedules_fire(slot + HOUR) == 1
    finish_runs()
    assert schedules.schedules_fire(slot + 2 * HOUR) == 0
    dataset_services.dataset_upload(name="chats", content=ROWS + ROWS)
    assert schedules.schedules_fire(slot + 3 * HOUR) == 1
    assert ScheduleRun.objects.latest("slot").rows_before == 8
    finish_runs()
    assert schedules.schedules_fire(slot + 4 * HOUR) == 0
    made(skip_unchanged=True, hyperparameters={**FAST, "rank": 2})
    assert schedules.schedules_fire(slot + 5 * HOUR) == 1
    skipped = ("skipped", "unchanged")
    ran = ("succeeded", "")
    assert states() == [ran, ran, skipped, ran, skipped, ("queued", "")]
    assert not missed_events()


def test_late_slots_run_once_or_not_at_all(made: Callable[..., Schedule]) -> None:
    schedule = made(misfire="skip")
    slot = schedule.next_run_at
    assert schedules.schedules_fire(slot + 59 * MINUTE) == 1  # on time
    finish_runs()
    assert schedules.schedules_fire(slot + 3 * HOUR) == 1
    late, merged = ("missed", "late"), ("skipped", "merged")
    assert states() == [("succeeded", ""), late, merged, ("queued", "")]
    [event] = missed_events()
    assert (event["adapter"], event["slots"], event["runs_later"]) == ("greeter", 1, False)
    finish_runs()
    made(misfire="skip", grace_s=60, cron_line="30 0 * * *")
    night = Schedule.objects.get().next_run_at
    assert schedules.schedules_fire(night + 2 * MINUTE) == 0
    assert ScheduleRun.objects.get(slot=night).reason == "late"
    assert Schedule.objects.get().next_run_at == night + 24 * HOUR
    made(misfire="run_once", grace_s=60, cron_line="30 0 * * *")
    Schedule.objects.update(next_run_at=night + 24 * HOUR)
    assert schedules.schedules_fire(night + 30 * HOUR) == 1
    assert ScheduleRun.objects.get(slot=night + 24 * HOUR).state == "queued"


def test_a_slot_that_is_kept_is_missed_once_and_made_up_for(made: Callable[..., Schedule]) -> None:
    schedule = made()
    slot = schedule.next_run_at
    assert schedules.schedules_fire(slot) == 1  # and its run goes on
    assert schedules.schedules_fire(slot + 1.5 * HOUR) == 0
    assert not missed_events()
    for _ in range(3):
        assert schedules.schedules_fire(slot + 2 * HOUR + MINUTE) == 0
    assert states() == [("queued", ""), ("missed", "busy")]
    assert [event["reason"] for event in missed_events()] == [
        "the adapter's last run had not ended"
    ]
    finish_runs()
    # Within the grace of slot 2: that one runs, and stands for what was owed.
    assert schedules.schedules_fire(slot + 2 * HOUR + 2 * MINUTE) == 1
    finish_runs()
    assert Schedule.objects.get().owed_slot is None
    assert schedules.schedules_fire(slot + 2 * HOUR + 3 * MINUTE) == 0
    assert states() == [("succeeded", ""), ("missed", "busy"), ("succeeded", "")]


def test_an_owed_slot_runs_alone_as_soon_as_it_may(made: Callable[..., Schedule]) -> None:
    schedule = made(cron_line="0 3 * * *", grace_s=600)
    slot = schedule.next_run_at
    blocker = run_services.training_run_create(adapter_name="greeter", dataset_name="chats")
    assert schedules.schedules_fire(slot + 20 * MINUTE) == 0
    assert states() == [("missed", "busy")]
    TrainingRun.objects.filter(pk=blocker.pk).update(status="succeeded")
    assert schedules.schedules_fire(slot + 30 * MINUTE) == 1
    assert states() == [("queued", "")]
    finish_runs()
    assert schedules.schedules_fire(slot + 40 * MINUTE) == 0
    assert len(missed_events()) == 1


def test_runs_begin_in_the_window_alone(made: Callable[..., Schedule]) -> None:
    schedule = made(
        cron_line="0 20 * * *", window="22:00-06:00", grace_s=7200, timezone_name="Asia/Kolkata"
    )
    slot = schedule.next_run_at
    for minutes in (0, 60, 119):
        assert schedules.schedules_fire(slot + minutes * MINUTE) == 0
    assert schedules.schedules_fire(slot + 120 * MINUTE) == 1
    # No trainer took it before the window closed: it is cancelled, and owed.
    assert schedules.windows_close(slot + 9 * HOUR) == 0
    assert schedules.windows_close(slot + 10 * HOUR) == 1
    assert schedules.windows_close(slot + 10 * HOUR) == 0
    assert states() == [("missed", "window")]
    assert TrainingRun.objects.get().status == "cancelled"
    # The next slot and the owed one are one run.
    assert schedules.schedules_fire(slot + 11 * HOUR) == 0
    assert schedules.schedules_fire(slot + 26 * HOUR) == 1
    TrainingRun.objects.update(attempts=1)  # it has begun: it may go on
    assert schedules.windows_close(slot + 34 * HOUR) == 0


def test_a_day_has_its_number_of_runs(made: Callable[..., Schedule]) -> None:
    slot = made(max_runs_per_day=2).next_run_at
    for hours in range(4):
        schedules.schedules_fire(slot + hours * HOUR)
        finish_runs()
    day = ("skipped", "runs_per_day")
    assert states() == [("succeeded", ""), ("succeeded", ""), day, day]


def test_a_full_quota_lets_slots_wait(made: Callable[..., Schedule], settings: Any) -> None:
    slot = made(misfire="skip").next_run_at
    settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"training_runs": 0}
    assert schedules.schedules_fire(slot) == 0
    assert schedules.schedules_fire(slot + 1.5 * HOUR) == 0
    assert states() == [("missed", "quota")]


def test_a_run_now_is_in_the_history_and_changes_no_slot(made: Callable[..., Schedule]) -> None:
    schedule = made(skip_unchanged=True, window="00:00-00:01")
    row = schedules.schedule_run_now(schedule)
    assert (row.trigger, row.state) == ("manual", "queued")
    with pytest.raises(Conflict):
        schedules.schedule_run_now(schedule)
    assert Schedule.objects.get().next_run_at == schedule.next_run_at
    assert schedules.windows_close(schedule.next_run_at + 5 * MINUTE) == 0


def test_ended_runs_are_counted_once(made: Callable[..., Schedule]) -> None:
    def counted() -> dict[str, float]:
        return {
            name: SCHEDULE_SLOTS.labels(name)._value.get()
            for name in ("ran", "succeeded", "failed")
        }

    schedule = made()
    assert schedules.schedules_fire(schedule.next_run_at) == 1
    assert history.slots_conclude() == 0
    before = counted()
    TrainingRun.objects.update(status="failed")
    assert history.slots_conclude() == 1
    assert history.slots_conclude() == 0
    after = counted()
    assert after["failed"] - before["failed"] == 1
    assert after["succeeded"] == before["succeeded"]
    assert ScheduleRun.objects.get().concluded_at is not None


def test_the_history_is_bounded(
    made: Callable[..., Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = made()
    slot = schedule.next_run_at
    rows = [
        ScheduleRun(schedule=schedule, slot=slot + n * HOUR, status="skipped", concluded_at=slot)
        for n in range(10)
    ]
    ScheduleRun.objects.bulk_create(rows)
    monkeypatch.setattr(history, "MAX_OF_SCHEDULE", 6)
    assert history.history_sweep(slot) == 4
    oldest = ScheduleRun.objects.earliest("slot").slot
    assert oldest == slot + 4 * HOUR
    assert history.history_sweep(oldest + history.KEPT + MINUTE) == 1
    # An outage of two years leaves its newest slots.
    assert schedules.schedules_fire(slot + dt.timedelta(days=730)) == 1
    assert ScheduleRun.objects.count() == 5 + schedules.MAX_SLOTS


@pytest.mark.parametrize(
    ("rules", "param"),
    [
        ({"misfire": "later"}, "misfire"),
        ({"grace_s": 59}, "grace_s"),
        ({"grace_s": True}, "grace_s"),
        ({"grace_s": 604_801}, "grace_s"),
        ({"window": "22-06"}, "window"),
        ({"window": "22:00-06:00 UTC"}, "window"),
        ({"window": "06:00-06:00"}, "window"),
        ({"max_runs_per_day": 0}, "max_runs_per_day"),
        ({"skip_unchanged": "no"}, "skip_unchanged"),
        ({"what": 1}, "what"),
    ],
)
def test_wrong_rules_name_their_field(rules: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        schedule_rules.rules_checked(rules, "Europe/Berlin")
    assert caught.value.param == param


def expected_slots(begin: dt.datetime, end: dt.datetime, kind: str) -> list[dt.datetime]:
    """Debian's rule, minute by minute: `night` is 30 2 * * *, `hourly` is 0 * * * *."""
    found, moment, done = [], begin, set()
    while moment <= end:
        local, before = moment.astimezone(BERLIN), (moment - MINUTE).astimezone(BERLIN)
        if kind == "hourly":
            is_slot = local.minute == 0
        else:
            # Its time, or the first minute after a gap that has its time; on a day once.
            skipped = before.replace(tzinfo=None) + MINUTE
            at = dt.time(2, 30)
            has_passed = before.time() < at < local.time() and local.date() == before.date()
            is_slot = local.time() == at or (has_passed and skipped != local.replace(tzinfo=None))
            is_slot = is_slot and local.date() not in done
        if is_slot:
            done.add(local.date())
            found.append(moment)
        moment += MINUTE
    return found


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("sunday", ["2027-03-28", "2027-10-31"])
def test_each_slot_fires_once_in_weeks_whose_clocks_change_with_two_beats(
    sunday: str, made: Callable[..., Schedule], adapter: Adapter, dataset: Dataset
) -> None:
    """Two beats tick at once, every 20 minutes of the night and seldom by day."""
    other = run_services.training_run_create(adapter_name="second", dataset_name="chats").adapter
    finish_runs()
    kinds = {
        "night": made(cron_line="30 2 * * *", timezone_name="Europe/Berlin"),
        "hourly": schedule_set(
            adapter=other, cron_line="0 * * * *", timezone_name="Europe/Berlin", grace_s=86_400
        ),
    }
    middle = dt.datetime.fromisoformat(sunday).replace(tzinfo=dt.UTC)
    begin, end = middle - 3 * 24 * HOUR, middle + 4 * 24 * HOUR
    for schedule in kinds.values():
        first = schedules.cron.next_slot(schedule.cron, schedule.timezone, begin)
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at=first)
    steps, moment = [], begin
    while moment <= end:
        steps.append(moment)
        near = abs(moment - middle - 2 * HOUR) < 4 * HOUR
        moment += (20 if near else 7 * 60) * MINUTE
    barrier = threading.Barrier(2, action=finish_runs_of(adapter.tenant_id))
    fired: list[int] = []

    def beat() -> None:
        try:
            for step in steps:
                barrier.wait(60)
                fired.append(schedules.schedules_fire(step))
        finally:
            connection.close()

    beats = [threading.Thread(target=beat) for _ in range(2)]
    for each in beats:
        each.start()
    for each in beats:
        each.join()
    assert len(fired) == 2 * len(steps)
    assert sum(fired) == TrainingRun.objects.count() - 1
    for kind, schedule in kinds.items():
        found = list(schedule.runs.order_by("slot").values_list("slot", flat=True))
        assert found == expected_slots(begin + MINUTE, steps[-1], kind), kind
    runs = ScheduleRun.objects.exclude(training_run=None)
    assert runs.count() == sum(fired)
    assert kinds["night"].runs.filter(status="ran").count() >= 7


def finish_runs_of(tenant_id: Any) -> Callable[[], None]:
    def finish() -> None:
        with tenant_scope(tenant_id):
            finish_runs()

    return finish


class Crash:
    """Has PostgreSQL end the connection before its n-th statement, as a killed process does."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            pid = connection.connection.info.backend_pid
            own = connection.connection.info
            with psycopg.connect(own.dsn, password=own.password, autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s, 5000)", [pid])
        return execute(sql, params, many, context)


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    connection.close()


@pytest.mark.django_db(transaction=True)
def test_a_tick_that_dies_at_any_statement_leaves_each_slot_once(
    made: Callable[..., Schedule], forgotten: None
) -> None:
    schedule = made(grace_s=60)
    now, num_crashes = schedule.next_run_at + 5 * HOUR + MINUTE / 2, 0
    for at in range(1, 100):
        crash = Crash(at)
        try:
            with connection.execute_wrapper(crash):
                schedules.schedules_fire(now)
        except Error:
            pass
        if crash.left > 0:
            break  # it had fewer statements: it is through
        num_crashes += 1
        connection.close()
        rows = ScheduleRun.objects.count()
        assert rows in (0, 6), at  # all or nothing
        if rows:
            break
    assert num_crashes > 10
    assert schedules.schedules_fire(now) == (0 if ScheduleRun.objects.exists() else 1)
    assert [state for state, _ in states()] == ["missed"] * 5 + ["queued"]
    assert TrainingRun.objects.count() == 1
    assert len(missed_events()) == 1
    assert Schedule.objects.get().next_run_at == schedule.next_run_at + 6 * HOUR


@pytest.mark.django_db(transaction=True)
def test_a_tick_that_dies_before_it_sends_the_run_makes_no_second(
    made: Callable[..., Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = made().next_run_at

    def die(run: TrainingRun) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(sending, "run_send", die)
        with pytest.raises(SystemExit):
            schedules.schedules_fire(slot)
    assert schedules.schedules_fire(slot + MINUTE) == 0
    run = TrainingRun.objects.get()
    assert (run.status, ScheduleRun.objects.get().training_run) == ("queued", run)
    sent: list[TrainingRun] = []
    monkeypatch.setattr(sending, "num_waiting", lambda: 0)
    monkeypatch.setattr(sending, "_send", sent.append)
    sending.runs_send()  # as the next tick does
    assert sent == [run]


def test_rules_are_of_one_tenant(made: Callable[..., Schedule], globex: Party) -> None:
    schedule = made()
    schedules.schedules_fire(schedule.next_run_at)
    with tenant_scope(globex.tenant.id):
        assert not ScheduleRun.objects.exists()
