"""A run from the queue to a live version: real trainer, real database, real object store."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from django.db import OperationalError, connection
from django.db.models import RestrictedError
from django.utils import timezone

from contract.process import child_environment
from contract.training.daily_window import DailyWindow
from controlplane.adapters import services as adapter_services
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.adapters.promotion import promotion_policy_set
from controlplane.adapters.resolution import model_resolve
from controlplane.infra import storage
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.training import tasks
from controlplane.training.models import Dataset, Schedule, TrainingRun
from controlplane.training.runs import (
    endings,
    execution,
    lease,
    lost_runs,
    picking,
    publishing,
    running,
)
from controlplane.training.runs import (
    services as run_services,
)
from controlplane.training.schedules import services as schedule_services
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import FAST, use_quick_trainer

pytestmark = pytest.mark.django_db(transaction=True)
PAST = dt.timedelta(seconds=-1)


def make_run(**hyperparameters: Any) -> TrainingRun:
    return run_services.training_run_create(
        adapter_name="greeter", dataset_name="chats", hyperparameters=FAST | hyperparameters
    )


def execute(run: TrainingRun) -> TrainingRun:
    execution.training_run_execute(run.pk)
    run.refresh_from_db()
    return run


def expire_lease(run: TrainingRun, **change: Any) -> None:
    TrainingRun.objects.filter(pk=run.pk).update(lease_until=timezone.now() + PAST, **change)


@pytest.mark.long
def test_a_due_schedule_trains_once_and_its_version_goes_live(
    in_acme: Party,
    adapter: Adapter,
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = schedule_services.schedule_set(
        adapter=adapter, dataset_name="chats", cron_line="0 3 * * *", hyperparameters=FAST
    )
    Schedule.objects.filter(pk=schedule.pk).update(next_run_at=timezone.now() + PAST)
    tasks.schedules_fire()
    run = TrainingRun.objects.get()
    tasks.training_run_execute(str(in_acme.tenant.id), str(run.pk))

    run.refresh_from_db()
    assert (run.status, run.error, run.attempts, run.lease_until) == ("succeeded", "", 1, None)
    version = run.version
    assert version is not None
    assert (version.number, version.status, version.source) == (1, "ready", "training")
    assert model_resolve("greeter").version == version
    assert storage.object_size(version.config_key)
    assert storage.object_size(version.tensors_key) == version.num_bytes
    assert started_before_finished(run)
    assert (run.progress["step"], run.progress["eta_s"]) == (2, 0)

    before = run.finished_at
    run = execute(run)  # delivered again
    assert (run.attempts, run.finished_at) == (1, before)
    assert AdapterVersion.objects.count() == 1
    adapter.refresh_from_db()
    assert adapter.live_version == version

    promotion_policy_set(adapter=adapter, policy="immediate")
    use_quick_trainer(tmp_path, monkeypatch)
    run = execute(make_run(seed=2))  # the next run makes the next version, and it goes live
    assert run.version is not None
    assert run.version.number == 2
    adapter.refresh_from_db()
    assert adapter.live_version == run.version


def test_outside_the_window_a_run_waits_and_it_begins_when_the_window_opens(
    adapter: Adapter, dataset: Dataset, settings: Any
) -> None:
    now = timezone.now()
    begin, end = now + dt.timedelta(hours=1), now + dt.timedelta(hours=2)
    settings.TRAINING_WINDOW = DailyWindow.parse(f"{begin:%H:%M}-{end:%H:%M}")
    run = make_run()
    assert execution.training_run_execute(run.pk) is False
    execution.training_next()
    with redis.Redis.from_url(settings.CELERY_BROKER_URL) as broker:
        broker.delete("train")  # what was sent for it is lost
        lost_runs.training_runs_reconcile()
        run.refresh_from_db()
        assert (run.status, run.attempts, broker.llen("train")) == ("queued", 0, 0)

        settings.TRAINING_WINDOW = DailyWindow.parse(f"{now:%H:%M}-{end:%H:%M}")
        assert picking.runs_that_may_begin().get() == run
        lost_runs.training_runs_reconcile()
        lost_runs.training_runs_reconcile()
        [message] = broker.lrange("train", 0, -1)
        assert str(run.pk) in message.decode()


def started_before_finished(run: TrainingRun) -> bool:
    assert run.started_at is not None
    assert run.finished_at is not None
    return run.started_at < run.finished_at


@pytest.mark.usefixtures("any_trainer")
def test_delivered_twice_at_once_a_run_trains_once(
    adapter: Adapter, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while as many versions as may wait for their files do."""
    monkeypatch.setattr(adapter_services, "MAX_UNFINISHED", 0)
    run = make_run()
    threads = [background(run, lambda: execution.training_run_execute(run.pk)) for _ in range(4)]
    for thread in threads:
        thread.join()
    run.refresh_from_db()
    assert (run.status, run.attempts) == ("succeeded", 1)
    assert AdapterVersion.objects.count() == 1


def background(run: TrainingRun, action: Callable[[], None]) -> threading.Thread:
    def work() -> None:
        try:
            with tenant_scope(run.tenant_id):
                action()
        finally:
            connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def wait_for(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def progress_of(run: TrainingRun) -> dict[str, Any]:
    run.refresh_from_db()
    return run.progress


def is_begun(run: TrainingRun, attempt: int) -> bool:
    return progress_of(run).get("step", 0) > 0 and run.attempts == attempt


def trainers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end while it is looked at
            if "worker.train" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.fixture
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TICK_S", 0.05)


@pytest.fixture
def quick_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RETRY_S", 0.05)


@pytest.fixture
def endless(adapter: Adapter, dataset: Dataset, quick_ticks: None) -> TrainingRun:
    return make_run(max_steps=20_000)  # as many as a tenant may ask for


def check_that_it_has_no_secret(environ: bytes) -> None:
    """A trainer reads what tenants sent: it has no use for the database's or the store's."""
    secrets = {"DATABASE_URL", "REDIS_URL", "LORIKEET_KEY_PEPPER", "S3_SECRET_ACCESS_KEY"}
    assert secrets <= set(os.environ)
    names = {entry.partition(b"=")[0].decode() for entry in environ.split(b"\0") if entry}
    allowed = (*child_environment.PREFIXES, *child_environment.VARIABLES)
    assert "PATH" in names and all(name.startswith(allowed) for name in names), names
    assert not any(os.environ[name].encode() in environ for name in secrets)


@pytest.mark.usefixtures("real_trainer")
def test_progress_is_kept_and_a_cancel_kills_the_trainer(endless: TrainingRun) -> None:
    """Meanwhile the trainer has no secret of ours."""
    thread = background(endless, lambda: execution.training_run_execute(endless.pk))
    wait_for(lambda: progress_of(endless).get("step", 0) > 0)
    assert endless.progress["steps"] == 20_000
    assert endless.progress.keys() == {
        *("step", "steps", "loss", "losses", "learning_rate", "tokens_per_s", "eta_s"),
        *("rows", "examples", "truncated_rows", "dropped_rows", "validation_rows", "leaked_rows"),
        *("trained_tokens", "memory_bytes"),
    }
    (trainer,) = trainers()
    environ = Path(f"/proc/{trainer.pid}/environ").read_bytes()
    run_services.training_run_cancel(run=endless)
    thread.join(60)
    assert not thread.is_alive()
    endless.refresh_from_db()
    assert (endless.status, endless.error) == ("cancelled", "")
    assert not trainers()
    assert not AdapterVersion.objects.exists()
    check_that_it_has_no_secret(environ)


@pytest.mark.usefixtures("any_trainer")
def test_a_killed_trainer_is_tried_again_and_given_up_in_the_end(
    endless: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "MAX_LOST", 2)
    for attempt, status in ((1, "queued"), (2, "failed")):
        thread = background(endless, lambda: execution.training_run_execute(endless.pk))
        wait_for(lambda attempt=attempt: is_begun(endless, attempt))
        os.kill(trainers()[0].pid, signal.SIGKILL)
        thread.join(60)
        endless.refresh_from_db()
        assert (endless.attempts, endless.status) == (attempt, status)
    assert "lost 2 times" in endless.error


@pytest.mark.usefixtures("any_trainer")
def test_a_run_taken_over_by_another_trainer_is_left_alone(endless: TrainingRun) -> None:
    """The first trainer was given up for lost, and comes back."""
    thread = background(endless, lambda: execution.training_run_execute(endless.pk))
    wait_for(lambda: progress_of(endless).get("step", 0) > 0)
    TrainingRun.objects.filter(pk=endless.pk).update(attempts=2, progress={"step": -1})
    thread.join(60)
    assert not trainers()
    endless.refresh_from_db()
    assert (endless.status, endless.attempts, endless.progress) == ("running", 2, {"step": -1})


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        pytest.param(
            {"target_modules": ["c_attn"]},
            "'c_attn' is not one of down_proj",
            marks=pytest.mark.long,
        ),
        ({"max_length": 8, "truncate": True}, "no row has an answer within max_length=8"),
    ],
)
def test_a_failed_training_says_why(
    adapter: Adapter, dataset: Dataset, hyperparameters: dict[str, Any], message: str
) -> None:
    run = execute(make_run(**hyperparameters))
    assert run.status == "failed"
    assert message in run.error
    assert not AdapterVersion.objects.exists()


def test_a_crashed_trainers_last_lines_are_in_the_log_and_the_run(
    adapter: Adapter,
    dataset: Dataset,
    base_models_dir: Path,
    tmp_path: Path,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has them whole, under the run's id; the tenant sees no folder of the machine."""
    shutil.copytree(base_models_dir, tmp_path / "bases")
    [tokenizer] = (tmp_path / "bases").rglob("tokenizer.json")
    tokenizer.write_text("{}")
    settings.BASE_MODEL_DIR = tmp_path / "bases"
    run = execute(make_run())
    assert run.status == "failed"
    assert "exit code 1" in run.error.splitlines()[0] and 'File "codec.py", line' in run.error
    assert len(run.error) <= 2000
    assert "/" not in run.error.replace(' / "', "")  # no folder; Python joins paths by " / "
    [line] = [record for record in caplog.records if record.getMessage() == "training failed"]
    assert line.exit_code == 1  # type: ignore[attr-defined]
    assert "Traceback (most recent call last):" in line.last_lines  # type: ignore[attr-defined]


def test_a_trainer_without_the_right_base_model_says_so(
    adapter: Adapter, dataset: Dataset, settings: Any, tmp_path: Path
) -> None:
    BaseModel.objects.update(revision="1" * 64)
    assert "another revision of tiny-llama" in execute(make_run()).error
    settings.BASE_MODEL_DIR = tmp_path
    assert "does not have the model tiny-llama" in execute(make_run()).error


def test_rows_that_are_gone_fail_the_run(adapter: Adapter, dataset: Dataset) -> None:
    storage.delete([dataset.key])
    run = execute(make_run())
    assert (run.status, "dataset is gone" in run.error) == ("failed", True)


@pytest.mark.usefixtures("any_trainer")
def test_an_adapter_that_the_checks_refuse_fails_the_run_with_their_reasons(
    adapter: Adapter, dataset: Dataset
) -> None:
    BaseModel.objects.update(max_rank=2)
    run = execute(make_run())
    assert run.status == "failed"
    assert "the trained adapter was rejected" in run.error.lower()
    assert "r: it is 4" in run.error
    assert run.version is not None
    assert run.version.status == "rejected"
    adapter.refresh_from_db()
    assert adapter.live_version is None


def test_a_run_whose_trainer_vanished_is_queued_again(adapter: Adapter, dataset: Dataset) -> None:
    run = make_run()
    TrainingRun.objects.update(status="running", attempts=1, lease_until=timezone.now())
    lost_runs.training_runs_reconcile()
    run.refresh_from_db()
    assert (run.status, run.attempts, run.num_lost) == ("queued", 1, 1)
    assert run.lease_until is None


def test_a_run_that_was_being_cancelled_when_its_trainer_vanished_is_cancelled(
    adapter: Adapter, dataset: Dataset
) -> None:
    run = make_run()
    expire_lease(run, status="running", attempts=1, cancel_requested=True)
    lost_runs.training_runs_reconcile()
    run.refresh_from_db()
    assert run.status == "cancelled"


def test_a_lease_that_is_not_over_is_left_alone(adapter: Adapter, dataset: Dataset) -> None:
    run = make_run()
    later = timezone.now() + dt.timedelta(seconds=30)
    TrainingRun.objects.update(status="running", attempts=1, lease_until=later)
    lost_runs.training_runs_reconcile()
    run.refresh_from_db()
    assert (run.status, run.lease_until) == ("running", later)


def publishing_run(adapter: Adapter, status: str) -> TrainingRun:
    """A run whose trainer was lost when its version had come as far as `status`."""
    run = make_run()
    version = adapter_services.adapter_version_create(
        name=adapter.name,
        files={"adapter_config.json": 2, "adapter_model.safetensors": 8},
        source=AdapterVersion.Source.TRAINING,
    )
    AdapterVersion.objects.filter(pk=version.pk).update(status=status)
    expire_lease(run, status="publishing", attempts=1, version=version)
    return run


@pytest.mark.parametrize(
    ("version_status", "status"),
    [("ready", "succeeded"), ("retired", "succeeded"), ("rejected", "failed")],
)
def test_a_run_lost_while_publishing_ends_as_its_version_did(
    adapter: Adapter, dataset: Dataset, version_status: str, status: str
) -> None:
    run = publishing_run(adapter, version_status)
    lost_runs.training_runs_reconcile()
    run.refresh_from_db()
    assert run.status == status
    assert AdapterVersion.objects.count() == 1


@pytest.mark.long
def test_a_run_lost_before_its_versions_files_were_there_is_trained_again(
    adapter: Adapter, dataset: Dataset
) -> None:
    run = publishing_run(adapter, "uploading")
    lost_runs.training_runs_reconcile()
    run.refresh_from_db()
    assert (run.status, run.attempts) == ("queued", 1)
    lost = AdapterVersion.objects.get()
    assert lost.status == "rejected"
    assert "the trainer was lost" in lost.reasons[0]["message"]
    run = execute(run)
    assert run.version is not None
    assert (run.status, run.version.number) == ("succeeded", 2)


def test_a_run_is_not_trained_again_for_ever(adapter: Adapter, dataset: Dataset) -> None:
    run = publishing_run(adapter, "uploading")
    TrainingRun.objects.update(num_lost=endings.MAX_LOST - 1)
    lost_runs.training_runs_reconcile()
    run.refresh_from_db()
    assert (run.status, "lost 6 times" in run.error) == ("failed", True)


@pytest.mark.usefixtures("any_trainer")
def test_a_trainer_that_wakes_after_its_run_was_given_back_publishes_nothing(
    adapter: Adapter, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = storage.upload

    def lose_it(path: Path, key: str) -> None:
        TrainingRun.objects.filter(status="publishing").update(lease_until=timezone.now() + PAST)
        lost_runs.training_runs_reconcile()
        upload(path, key)

    monkeypatch.setattr(storage, "upload", lose_it)
    run = execute(make_run())
    version = AdapterVersion.objects.get()
    assert (run.status, version.status) == ("queued", "rejected")
    assert storage.object_size(version.staged_tensors_key) is None


@pytest.mark.long
def test_commits_whose_answers_are_lost_cost_no_training(
    adapter: Adapter, dataset: Dataset, quick_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def lose_the_first_answer(step: str) -> None:
        real = getattr(publishing, step)

        def lost_once(*args: Any) -> Any:
            calls[step] += 1
            answer = real(*args)
            if calls[step] == 1:
                raise OperationalError("the connection was lost")
            return answer

        monkeypatch.setattr(publishing, step, lost_once)

    lose_the_first_answer("version_of")
    lose_the_first_answer("run_conclude")
    run = execute(make_run())
    assert (run.status, run.attempts) == ("succeeded", 1)
    assert AdapterVersion.objects.get().status == "ready"
    assert calls.keys() == {"version_of", "run_conclude"}


@pytest.mark.long
def test_a_restart_of_the_database_costs_no_training(
    endless: TrainingRun, quick_waits: None
) -> None:
    thread = background(endless, lambda: execution.training_run_execute(endless.pk))
    wait_for(lambda: is_begun(endless, 1))
    with connection.cursor() as cursor:
        cursor.execute(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity"
            " where pid <> pg_backend_pid() and datname = current_database()"
            " and usename = current_user"
        )
        assert cursor.fetchone()[0] >= 1
    before = progress_of(endless)["step"]
    wait_for(lambda: progress_of(endless)["step"] > before + 1)
    assert (endless.status, endless.attempts) == ("running", 1)
    run_services.training_run_cancel(run=endless)
    thread.join(60)
    endless.refresh_from_db()
    assert endless.status == "cancelled"


@pytest.mark.usefixtures("any_trainer")
def test_a_store_that_is_away_is_waited_for(
    adapter: Adapter, dataset: Dataset, quick_waits: None, settings: Any
) -> None:
    there = settings.S3_ENDPOINT_URL
    settings.S3_ENDPOINT_URL = "http://127.0.0.1:9"
    run = make_run()
    thread = background(run, lambda: execution.training_run_execute(run.pk))
    wait_for(lambda: is_running(run))
    begun = run.lease_until
    assert begun is not None
    wait_for(lambda: is_running(run) and run.lease_until > begun)
    settings.S3_ENDPOINT_URL = there
    thread.join(60)
    run.refresh_from_db()
    assert (run.status, run.attempts) == ("succeeded", 1)


def test_a_run_that_waits_for_the_store_can_be_cancelled(
    adapter: Adapter, dataset: Dataset, quick_waits: None, settings: Any
) -> None:
    settings.S3_ENDPOINT_URL = "http://127.0.0.1:9"
    run = make_run()
    thread = background(run, lambda: execution.training_run_execute(run.pk))
    wait_for(lambda: is_running(run))
    run_services.training_run_cancel(run=run)
    thread.join(60)
    run.refresh_from_db()
    assert run.status == "cancelled"


def is_running(run: TrainingRun) -> bool:
    run.refresh_from_db()
    return run.status == "running"


def test_one_lost_run_that_cannot_be_taken_care_of_keeps_no_other_from_it(
    adapter: Adapter, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_run(), make_run()
    expire_lease(first, status="running", attempts=1)
    expire_lease(second, status="running", attempts=1)
    real = lost_runs._reconcile

    def reconcile(run: TrainingRun) -> None:
        if run.pk == first.pk:
            raise ValueError("a fault of ours")
        real(run)

    monkeypatch.setattr(lost_runs, "_reconcile", reconcile)
    lost_runs.training_runs_reconcile()
    second.refresh_from_db()
    assert second.status == "queued"


def test_a_run_lost_before_its_versions_check_waits_for_the_check(
    adapter: Adapter, dataset: Dataset
) -> None:
    run = publishing_run(adapter, "uploaded")
    lost_runs.training_runs_reconcile()
    run.refresh_from_db()
    assert run.status == "publishing"
    AdapterVersion.objects.update(status="ready")
    expire_lease(run)
    lost_runs.training_runs_reconcile()
    run.refresh_from_db()
    assert run.status == "succeeded"


def test_an_unknown_run_does_nothing(in_acme: Party) -> None:
    execution.training_run_execute(uuid.uuid4())


def test_another_tenants_run_does_nothing(
    adapter: Adapter, dataset: Dataset, globex: Party
) -> None:
    run = make_run()
    with tenant_scope(globex.tenant.id):
        assert not execution.training_run_execute(run.pk)
    run.refresh_from_db()
    assert run.status == "queued"


def test_a_tenant_goes_with_all_it_has(in_acme: Party, adapter: Adapter, dataset: Dataset) -> None:
    schedule_services.schedule_set(adapter=adapter, dataset_name="chats", cron_line="0 3 * * *")
    make_run()
    with pytest.raises(RestrictedError):
        dataset.delete()
    in_acme.tenant.delete()
    with all_tenants(reason="test"):
        assert not TrainingRun.objects.exists()
        assert not Dataset.objects.exists()
