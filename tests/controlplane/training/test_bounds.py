"""One tenant's trainings keep no other's waiting: bounds at admission, turns when one is begun."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from contract.training.job import Hyperparameters
from controlplane.adapters.models import BaseModel
from controlplane.errors import ApiError, InvalidRequest, RateLimited
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.training.datasets import dataset_checks, row_check
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Schedule, TrainingRun
from controlplane.training.runs import (
    execution,
    picking,
    running,
    sending,
)
from controlplane.training.runs import (
    services as run_services,
)
from controlplane.training.schedules import schedules
from controlplane.training.schedules import services as schedule_services
from controlplane.usage.limits import quotas
from tests.controlplane.conftest import Party, as_key, assert_error
from tests.controlplane.training.conftest import FAST, ROWS

RUNS = "/api/v1/training-runs"
BODY = {"adapter": "greeter", "dataset": "chats", "hyperparameters": FAST}


def queue_run(party: Party, **hyperparameters: Any) -> TrainingRun:
    with tenant_scope(party.tenant.id):
        return run_services.training_run_create(
            adapter_name="greeter", dataset_name="chats", hyperparameters=FAST | hyperparameters
        )


@pytest.fixture
def parties(acme: Party, globex: Party, tiny_base: BaseModel) -> tuple[Party, Party]:
    """Acme and globex, each with a dataset."""
    for party in (acme, globex):
        with tenant_scope(party.tenant.id):
            dataset_services.dataset_upload(name="chats", content=ROWS)
    return acme, globex


def begin(run: TrainingRun) -> bool:
    with tenant_scope(run.tenant_id):
        return picking.run_claim(run.pk) is not None


def end(run: TrainingRun) -> None:
    with all_tenants(reason="test"):
        TrainingRun.objects.filter(pk=run.pk).update(status="succeeded")


class TestAdmission:
    def test_runs_beyond_the_quota_are_refused_with_the_limit_and_a_time(
        self, parties: tuple[Party, Party], settings: Any
    ) -> None:
        settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"training_runs": 2}
        acme, globex = parties
        answers = [as_key(acme).post(RUNS, BODY, format="json") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [201, 201, 429]
        error = assert_error(answers[2], 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_training_runs")
        assert "may have 2 training runs" in error["message"]
        assert int(answers[2]["Retry-After"]) >= 30
        assert as_key(globex).post(RUNS, BODY, format="json").status_code == 201
        with tenant_scope(acme.tenant.id):
            TrainingRun.objects.filter(pk=answers[0].json()["id"]).update(status="failed")
        assert as_key(acme).post(RUNS, BODY, format="json").status_code == 201

    def test_who_comes_back_is_told_by_the_trainers_own_estimate(
        self, parties: tuple[Party, Party], settings: Any
    ) -> None:
        settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"training_runs": 1}
        run = queue_run(parties[0])
        with tenant_scope(run.tenant_id):
            TrainingRun.objects.update(status="running", progress={"step": 1, "eta_s": 777.0})
        answer = as_key(parties[0]).post(RUNS, BODY, format="json")
        assert answer["Retry-After"] == "777"

    @pytest.mark.django_db(transaction=True)
    def test_100_requests_at_once_do_not_pass_the_bound(
        self, parties: tuple[Party, Party], settings: Any
    ) -> None:
        settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"training_runs": 7}
        barrier, outcomes = threading.Barrier(100), []

        def create() -> None:
            try:
                barrier.wait(60)
                queue_run(parties[0])
                outcomes.append("made")
            except Exception as error:
                outcomes.append(getattr(error, "code", None) or repr(error))
            finally:
                connection.close()

        threads = [threading.Thread(target=create) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["made"] * 7 + ["too_many_training_runs"] * 93
        with tenant_scope(parties[0].tenant.id):
            assert TrainingRun.objects.count() == 7

    @pytest.mark.parametrize(
        ("hyperparameters", "param"),
        [
            ({"max_steps": 1_000_000}, "hyperparameters.max_steps"),
            ({"max_steps": 20_000, "batch_size": 256, "max_length": 32_768}, "hyperparameters"),
        ],
    )
    def test_a_run_that_would_be_too_long_is_refused(
        self, parties: tuple[Party, Party], hyperparameters: dict[str, int], param: str
    ) -> None:
        body = BODY | {"hyperparameters": hyperparameters}
        error = assert_error(as_key(parties[0]).post(RUNS, body, format="json"), 400, param)
        assert error["code"] == "training_too_long"

    def test_too_many_epochs_are_too_many_steps(
        self, parties: tuple[Party, Party], settings: Any
    ) -> None:
        settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"training_steps": 100}
        body = BODY | {"hyperparameters": {"epochs": 26, "batch_size": 2}}
        answer = as_key(parties[0]).post(RUNS, body, format="json")
        error = assert_error(answer, 400, "hyperparameters.epochs")
        assert "104 steps" in error["message"] and "100" in error["message"]

    def test_a_schedule_waits_for_room_and_is_not_lost(
        self, parties: tuple[Party, Party], settings: Any
    ) -> None:
        settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"training_runs": 1}
        acme, _ = parties
        for party in parties:
            with tenant_scope(party.tenant.id):
                run = run_services.training_run_create(adapter_name="nightly", dataset_name="chats")
                schedule_services.schedule_set(
                    adapter=run.adapter, dataset_name="chats", cron_line="0 * * * *"
                )
                TrainingRun.objects.update(status="succeeded")
                Schedule.objects.update(next_run_at=timezone.now(), skip_unchanged=False)
        full = queue_run(acme)
        assert schedules.schedules_fire() == 1
        with all_tenants(reason="test"):
            assert TrainingRun.objects.filter(adapter__name="nightly", status="queued").count() == 1
        end(full)
        assert schedules.schedules_fire() == 1

    @pytest.mark.django_db(transaction=True)
    def test_a_schedule_whose_dataset_has_grown_fails_and_says_so(
        self, parties: tuple[Party, Party], settings: Any
    ) -> None:
        run = queue_run(parties[0], max_steps=50)
        settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"training_steps": 49}
        execution.training_next()
        with tenant_scope(run.tenant_id):
            run.refresh_from_db()
        assert (run.status, "50 steps" in run.error) == ("failed", True)


class TestSize:
    @pytest.mark.django_db(transaction=True)
    def test_steps_are_counted_as_the_trainer_counts_them(
        self, parties: tuple[Party, Party]
    ) -> None:
        wanted = {"rank": 4, "epochs": 2.5, "batch_size": 3, "max_length": 64}
        with tenant_scope(parties[0].tenant.id):
            run = run_services.training_run_create(
                adapter_name="greeter", dataset_name="chats", hyperparameters=wanted
            )
            assert execution.training_run_execute(run.pk)
            run.refresh_from_db()
        assert run.status == "succeeded", run.error
        assert run.progress["steps"] == Hyperparameters.from_dict(wanted).num_steps(8) == 8


class TestTurns:
    def test_tenants_take_turns_however_much_one_has_queued(
        self, parties: tuple[Party, Party]
    ) -> None:
        acme, globex = parties
        first, *others = [queue_run(acme) for _ in range(5)]
        assert picking.next_run() == first
        assert begin(first)
        end(first)
        late = queue_run(globex)
        assert picking.next_run() == late
        assert begin(late)
        end(late)
        assert picking.next_run() == others[0]

    def test_a_tenant_trains_one_at_a_time_unless_its_operator_says_otherwise(
        self, parties: tuple[Party, Party]
    ) -> None:
        acme, globex = parties
        first, second = queue_run(acme), queue_run(acme)
        assert begin(first)
        assert picking.next_run() is None
        assert not begin(second)
        other = queue_run(globex)
        assert picking.next_run() == other
        assert begin(other)
        with tenant_scope(acme.tenant.id):
            quotas.quota_set(training_at_once=2)
        assert picking.next_run() == second
        assert begin(second)

    def test_a_suspended_tenants_runs_wait(self, parties: tuple[Party, Party]) -> None:
        run = queue_run(parties[0])
        Tenant.objects.filter(pk=run.tenant_id).update(status="suspended")
        assert picking.next_run() is None

    @pytest.mark.django_db(transaction=True)
    def test_ten_trainers_at_once_begin_one_run_of_a_tenant(
        self, parties: tuple[Party, Party]
    ) -> None:
        runs = [queue_run(parties[0]) for _ in range(10)]
        barrier, begun = threading.Barrier(10), []

        def claim(run: TrainingRun) -> None:
            try:
                barrier.wait(60)
                begun.append(begin(run))
            finally:
                connection.close()

        threads = [threading.Thread(target=claim, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(begun) == [False] * 9 + [True]

    @pytest.mark.django_db(transaction=True)
    def test_the_end_of_a_run_sends_for_the_next(
        self, parties: tuple[Party, Party], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was sent for it came while its tenant had one running, and found nothing to do."""
        first, second = queue_run(parties[0]), queue_run(parties[0])
        sent: list[TrainingRun] = []
        monkeypatch.setattr(sending, "run_send", sent.append)

        def fail(self: Any) -> None:
            execution.training_next()  # the message for the second
            raise InvalidRequest("enough")

        monkeypatch.setattr(running.RunningRun, "_train", fail)
        execution.training_next()
        with tenant_scope(first.tenant_id):
            statuses = dict(TrainingRun.objects.values_list("pk", "status"))
        assert statuses == {first.pk: "failed", second.pk: "queued"}
        assert sent == [second]


def test_a_tenants_datasets_are_checked_a_few_at_a_time(
    parties: tuple[Party, Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    acme, globex = parties
    outcomes: list[Any] = []
    lint = row_check.chat_rows.lint

    def nested(content: bytes) -> Any:
        """Each check begins another, so that all of them are under way."""
        for party in (acme, globex) if len(outcomes) == 0 else (acme,):
            outcomes.append(party)
            with tenant_scope(party.tenant.id):
                try:
                    dataset_services.dataset_upload(name="more", content=ROWS)
                except ApiError as error:
                    outcomes.append(error)
        return lint(content)

    monkeypatch.setattr(row_check.chat_rows, "lint", nested)
    with tenant_scope(acme.tenant.id):
        dataset_services.dataset_upload(name="more", content=ROWS)
    errors = [error for error in outcomes if isinstance(error, RateLimited)]
    assert errors and {error.code for error in errors} == {"too_many_dataset_checks"}
    assert errors[0].retry_after_s == 5
    assert not dataset_checks._now
