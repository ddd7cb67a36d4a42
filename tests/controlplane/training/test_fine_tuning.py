"""Jobs with the real trainer, on a base that is small: what a run tells, costs, and leaves."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from controlplane.adapters import services as adapter_services
from controlplane.adapters.models import BaseModel
from controlplane.errors import InvalidRequest
from controlplane.files import contents as file_contents
from controlplane.files import services as files
from controlplane.files.models import File, Purpose
from controlplane.gateway.fine_tuning import services as fine_tuning
from controlplane.gateway.fine_tuning.answers import (
    FineTuningCheckpointSerializer,
    FineTuningJobSerializer,
)
from controlplane.gateway.fine_tuning.checkpoints import job_checkpoints
from controlplane.gateway.fine_tuning.services import JobForm, auto_epochs
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth
from controlplane.tenants.auth import Principal
from controlplane.training.datasets import contents
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import DatasetContent, TrainingEvent, TrainingRun, dataset_key
from controlplane.training.runs import (
    endings,
    events,
    execution,
    lost_runs,
    pausing,
    running,
)
from controlplane.training.runs import (
    services as run_services,
)
from controlplane.usage.models import TrainingUsage
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import FAST, ROWS
from tests.tiny_base import TINY_NAME

pytestmark = pytest.mark.django_db(transaction=True)
QUICK = {"rank": 4, "alpha": 8, "max_steps": 4, "batch_size": 4, "max_length": 64}
#: So many steps that nobody waits for their end.
ENDLESS = QUICK | {"max_steps": 20_000, "batch_size": 1, "max_length": 32}


@pytest.fixture
def file(in_acme: Party, tiny_base: BaseModel) -> File:
    return make_file(ROWS)


def make_file(rows: bytes) -> File:
    row = files.file_begin(max_bytes=len(rows))
    writer = files.file_writer(row, max_bytes=len(rows))
    writer.write(rows)
    form = files.FileForm(purpose=Purpose.FINE_TUNE, filename="chats.jsonl")
    return files.file_finish(row, form, writer)


def make_job(party: Party, file: File, **fields: Any) -> TrainingRun:
    principal: Principal = auth.authenticate(party.header, "127.0.0.1")
    defaults = {"model": TINY_NAME, "training_file": file.public_id, "hyperparameters": QUICK}
    return fine_tuning.job_create(principal=principal, form=JobForm(**(defaults | fields)))


def execute(run: TrainingRun) -> TrainingRun:
    execution.training_run_execute(run.pk)
    return fine_tuning.job_get(run.public_id)


def shown(run: TrainingRun) -> dict[str, Any]:
    fields: dict[str, Any] = FineTuningJobSerializer(fine_tuning.job_get(run.public_id)).data
    return fields


def checkpoints(run: TrainingRun) -> list[dict[str, Any]]:
    found = job_checkpoints(fine_tuning.job_get(run.public_id))
    return [FineTuningCheckpointSerializer(checkpoint).data for checkpoint in found]


def messages(run: TrainingRun) -> list[str]:
    rows = run.events.filter(kind=TrainingEvent.Kind.MESSAGE).order_by("pk")
    return list(rows.values_list("message", flat=True))


def metrics(run: TrainingRun) -> list[dict[str, Any]]:
    rows = run.events.filter(kind=TrainingEvent.Kind.METRICS).order_by("pk")
    return list(rows.values_list("data", flat=True))


def in_background(run: TrainingRun, work: Callable[[], object]) -> threading.Thread:
    def inside() -> None:
        try:
            with tenant_scope(run.tenant_id):
                work()
        finally:
            connection.close()

    thread = threading.Thread(target=inside)
    thread.start()
    return thread


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def has_stepped(run: TrainingRun) -> bool:
    return TrainingRun.objects.filter(pk=run.pk, progress__step__gte=1).exists()


@pytest.fixture
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(running, "TICK_S", 0.1)
    yield


def test_a_job_tells_of_each_step_and_makes_a_model_that_another_begins_from(
    in_acme: Party, file: File
) -> None:
    run = execute(make_job(in_acme, file, suffix="greeter", metadata={"a": "b"}))
    job = shown(run)
    assert (job["status"], job["error"]) == ("succeeded", None)
    assert job["fine_tuned_model"] == "greeter@1"
    assert job["finished_at"] >= job["created_at"]
    assert job["trained_tokens"] > 0
    assert messages(run) == [
        f"Created fine-tuning job: {run.public_id}",
        f"Validated training file: {file.public_id}",
        "Files validated, moving job to queued state",
        "Fine-tuning job started",
        "New fine-tuned model created: greeter@1",
        "The job has successfully completed",
    ]
    steps = metrics(run)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert {step["total_steps"] for step in steps} == {4}
    for step in steps:
        assert step["train_loss"] > 0 and step["tokens_per_s"] > 0 and step["memory_bytes"] > 0
        assert step["learning_rate"] >= 0 and step["eta_s"] >= 0
    assert steps[-1]["trained_tokens"] == job["trained_tokens"]

    (result,) = File.objects.filter(purpose=Purpose.FINE_TUNE_RESULTS)
    assert job["result_files"] == [result.public_id]
    text = b"".join(file_contents.pieces(result)).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["step"], row["train_loss"]) for row in rows] == [
        (str(step["step"]), str(step["train_loss"])) for step in steps
    ]
    checkpoint = checkpoints(run)[0]
    assert checkpoint["fine_tuned_model_checkpoint"] == "greeter@1"
    assert (checkpoint["step_number"], checkpoint["metrics"]["step"]) == (4, 4)

    (used,) = TrainingUsage.objects.all()
    assert (used.run_id, used.attempt, used.adapter) == (run.pk, 1, "greeter")
    assert (used.trained_tokens, used.base_model) == (job["trained_tokens"], TINY_NAME)
    assert used.device_ms > 0
    assert used.is_gpu == (used.device != "cpu")

    further = make_job(in_acme, file, model="greeter@1", hyperparameters=_without_shape())
    assert further.hyperparameters.items() >= {"rank": 4, "alpha": 8}.items()
    further = execute(further)
    job = shown(further)
    assert (job["model"], job["fine_tuned_model"]) == ("greeter@1", "greeter@2")
    # Trained rows are known to it from its first step on.
    assert metrics(further)[0]["train_loss"] < steps[0]["train_loss"]


def _without_shape() -> dict[str, Any]:
    return {name: value for name, value in QUICK.items() if name not in ("rank", "alpha")}


def test_paused_while_it_trains_a_job_waits_and_begins_again(
    in_acme: Party, file: File, quick_ticks: None
) -> None:
    run = make_job(in_acme, file, suffix="greeter", hyperparameters=ENDLESS)
    thread = in_background(run, lambda: execution.training_run_execute(run.pk))
    wait_until(lambda: has_stepped(run))
    assert pausing.training_run_pause(run=run).pause_requested
    thread.join(60)
    run.refresh_from_db()
    assert (run.status, run.lease_until, run.num_pauses) == ("paused", None, 1)
    paid = TrainingUsage.objects.get()
    assert paid.trained_tokens > 0  # what was trained until then is billed
    lost_runs.training_runs_reconcile()
    execution.training_next()
    run.refresh_from_db()
    assert (run.status, run.attempts) == ("paused", 1)
    assert DatasetContent.objects.filter(sha256=file.sha256).exists()

    TrainingRun.objects.filter(pk=run.pk).update(hyperparameters=QUICK)
    pausing.training_run_resume(run=run)
    run = execute(run)
    assert (run.status, run.attempts) == ("succeeded", 2)
    assert [step["step"] for step in metrics(run)] == [
        1,
        2,
        3,
        4,
    ]
    assert sum(TrainingUsage.objects.values_list("trained_tokens", flat=True)) == run.trained_tokens
    told = messages(run)
    assert "The job was paused; resumed, it continues from here" in told
    assert told.count("Fine-tuning job started") == 2


def test_resumed_before_it_stopped_a_job_is_queued_again(
    in_acme: Party, file: File, quick_ticks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_job(in_acme, file, suffix="greeter", hyperparameters=ENDLESS)
    abandon = endings.run_abandon

    def after_resuming(*args: Any) -> None:
        pausing.training_run_resume(run=run)
        abandon(*args)

    monkeypatch.setattr(running, "run_abandon", after_resuming)
    thread = in_background(run, lambda: execution.training_run_execute(run.pk))
    wait_until(lambda: has_stepped(run))
    pausing.training_run_pause(run=run)
    thread.join(60)
    run.refresh_from_db()
    assert (run.status, run.num_pauses, run.pause_requested) == ("queued", 1, False)


def test_cancelled_while_it_trains_a_job_bills_what_it_did(
    in_acme: Party, file: File, quick_ticks: None
) -> None:
    run = make_job(in_acme, file, suffix="greeter", hyperparameters=ENDLESS)
    thread = in_background(run, lambda: execution.training_run_execute(run.pk))
    wait_until(lambda: has_stepped(run))
    run_services.training_run_cancel(run=run)
    thread.join(60)
    job = shown(run)
    assert (job["status"], job["fine_tuned_model"], job["result_files"]) == ("cancelled", None, [])
    assert job["trained_tokens"] == TrainingUsage.objects.get().trained_tokens > 0
    assert messages(run)[-1] == "The job was cancelled"


def test_a_lost_attempt_is_billed_to_nobody(in_acme: Party, file: File) -> None:
    run = make_job(in_acme, file, suffix="greeter")
    TrainingRun.objects.filter(pk=run.pk).update(status="running", attempts=1)
    run.refresh_from_db()
    endings.run_give_back(run)
    run.refresh_from_db()
    assert run.status == "queued"
    assert messages(run)[-1] == "The trainer was lost; the job is queued again"
    assert not TrainingUsage.objects.exists()


def test_an_adapter_that_is_lost_before_it_is_stored_is_billed_once(
    in_acme: Party, file: File
) -> None:
    run = make_job(in_acme, file, suffix="greeter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_services, "adapter_version_upload_files", lost)
        run = execute(run)
    assert (run.status, TrainingUsage.objects.count()) == ("publishing", 1)
    lost_runs.training_runs_reconcile()
    run.refresh_from_db()
    assert (run.status, run.trained_tokens, TrainingUsage.objects.count()) == ("queued", 0, 0)
    run = execute(run)
    assert run.trained_tokens == TrainingUsage.objects.get().trained_tokens > 0


def lost(**_: Any) -> None:
    raise RuntimeError("the trainer's process is killed")


def test_a_paused_jobs_lost_trainer_does_not_start_it_again(in_acme: Party, file: File) -> None:
    run = make_job(in_acme, file, suffix="greeter")
    TrainingRun.objects.filter(pk=run.pk).update(status="running", attempts=1)
    run.refresh_from_db()
    pausing.training_run_pause(run=run)
    endings.run_give_back(run)
    run.refresh_from_db()
    assert (run.status, run.pause_requested) == ("paused", False)


def test_what_the_trainer_refuses_fails_the_job_and_names_the_field(
    in_acme: Party, file: File
) -> None:
    odd = QUICK | {"target_modules": ["nonsense"]}
    job = shown(execute(make_job(in_acme, file, suffix="greeter", hyperparameters=odd)))
    assert (job["status"], job["fine_tuned_model"]) == ("failed", None)
    assert (job["error"]["code"], job["error"]["param"]) == (
        "invalid_job",
        "lorikeet.target_modules",
    )
    assert "nonsense" in job["error"]["message"]


def test_rows_that_do_not_fit_fail_the_job_at_its_file(in_acme: Party, file: File) -> None:
    short = QUICK | {"max_length": 8}
    job = shown(execute(make_job(in_acme, file, suffix="greeter", hyperparameters=short)))
    assert (job["status"], job["error"]["param"]) == ("failed", "training_file")
    assert "max_length" in job["error"]["message"]


def test_a_job_is_validated_with_its_file_and_keeps_the_best_state(
    in_acme: Party, file: File
) -> None:
    others = make_file(ROWS.replace(b"world", b"moon"))
    hyperparameters = QUICK | {"eval_steps": 2}
    fields = {"suffix": "greeter", "hyperparameters": hyperparameters}
    run = make_job(in_acme, file, validation_file=others.public_id, **fields)
    assert running._salt(run) == file.pk.hex
    run = execute(run)
    job = shown(run)
    assert (job["status"], job["validation_file"]) == ("succeeded", others.public_id)
    assert job["lorikeet"]["progress"]["validation_rows"] == 8
    valid = {step["step"]: step["valid_loss"] for step in metrics(run) if "valid_loss" in step}
    assert set(valid) == {2, 4}
    checkpoint = checkpoints(run)[0]
    best = min(valid.values())
    assert checkpoint["metrics"]["full_valid_loss"] == best == valid[checkpoint["step_number"]]
    (result,) = File.objects.filter(purpose=Purpose.FINE_TUNE_RESULTS)
    text = b"".join(file_contents.pieces(result)).decode()
    losses = [row["valid_loss"] for row in csv.DictReader(io.StringIO(text))]
    assert losses == ["", str(valid[2]), "", str(valid[4])]


@pytest.mark.parametrize(
    ("hyperparameters", "is_validated", "rows", "param"),
    [
        ({"validation_share": 0.5}, True, ROWS, "validation_file"),
        ({"eval_steps": 2}, False, ROWS, "lorikeet.eval_steps"),
        ({}, False, ROWS.splitlines()[0], "training_file"),
    ],
)
def test_what_cannot_be_validated_or_trained_is_refused(
    in_acme: Party,
    file: File,
    hyperparameters: dict[str, Any],
    is_validated: bool,
    rows: bytes,
    param: str,
) -> None:
    fields: dict[str, Any] = {"hyperparameters": QUICK | hyperparameters}
    if is_validated:
        fields["validation_file"] = file.public_id
    with pytest.raises(InvalidRequest) as caught:
        make_job(in_acme, make_file(rows), **fields)
    assert caught.value.param == param


def test_a_version_that_the_trainer_cannot_go_on_with_is_refused_by_field(
    in_acme: Party, file: File
) -> None:
    run = execute(make_job(in_acme, file, suffix="greeter"))
    assert run.version is not None
    other = QUICK | {"rank": 8}
    with pytest.raises(InvalidRequest) as caught:
        make_job(in_acme, file, model="greeter@1", hyperparameters=other)
    assert caught.value.param == "lorikeet.rank"
    config = json.loads(storage.read_bytes(run.version.config_key, max_bytes=65536))
    for field, value in (("use_dora", True), ("target_parameters", ["experts.down_proj"])):
        changed = json.dumps({**config, field: value}).encode()
        storage.put_bytes(run.version.config_key, changed)
        type(run.version).objects.update(config_num_bytes=len(changed))
        with pytest.raises(InvalidRequest, match=field) as caught:
            make_job(in_acme, file, model="greeter@1", hyperparameters={})
        assert (caught.value.param, caught.value.code) == ("model", "warm_start_unsupported")


def test_a_jobs_rows_are_its_tenants_own_and_go_when_it_has_ended(
    in_acme: Party, file: File, globex: Party
) -> None:
    run = make_job(in_acme, file, suffix="greeter")
    key = dataset_key(in_acme.tenant.id, file.sha256)
    assert run.dataset_sha256 == file.sha256 and storage.object_size(key) == len(ROWS)
    assert contents.num_bytes() == len(ROWS)  # it counts in the tenant's storage
    assert storage.object_size(dataset_key(globex.tenant.id, file.sha256)) is None
    with tenant_scope(globex.tenant.id):
        assert not DatasetContent.objects.exists() and not TrainingEvent.objects.exists()
    old = DatasetContent.objects.get().wanted_at - contents.KEPT * 2
    DatasetContent.objects.update(wanted_at=old)
    pausing.training_run_pause(run=run)
    assert contents.contents_sweep() == 0  # a job that waits still needs them
    run_services.training_run_cancel(run=run)
    assert contents.contents_sweep() == 1
    assert storage.object_size(key) is None


def test_the_metrics_of_a_long_run_are_bounded(in_acme: Party, file: File) -> None:
    run = make_job(in_acme, file, suffix="greeter")
    kept = events.StepMetrics(run)
    for step in range(1, 20_001):
        kept.note({"event": "progress", "step": step, "steps": 20_000, "loss": 1.0})
    for _ in range(2):
        kept.note({"event": "progress", "step": 1, "steps": 1, "loss": 1.0})
    kept.write()
    kept.write()
    found = [data["step"] for data in metrics(run)]
    assert (found[0], found[-1], len(found)) == (1, 20_000, events.MAX_METRICS + 1)
    TrainingRun.objects.filter(pk=run.pk).update(finished_at=run.created_at - events.KEPT * 2)
    TrainingEvent.objects.update(created_at=run.created_at - events.KEPT * 2)
    assert events.events_sweep() == len(found)
    assert messages(run)


@pytest.mark.parametrize(
    ("rows", "epochs"), [(1, 25), (10, 10), (34, 3), (5000, 3), (10_000, 2), (100_000, 1)]
)
def test_automatic_epochs(rows: int, epochs: int) -> None:
    assert auto_epochs(rows) == epochs


def test_steps_that_are_null_are_steps_that_nobody_gave(in_acme: Party, tiny_base: Any) -> None:
    given = {name: value for name, value in QUICK.items() if name != "max_steps"}
    run = make_job(in_acme, make_file(ROWS), hyperparameters=given | {"max_steps": None})
    assert run.hyperparameters["epochs"] == auto_epochs(8) > 1


def test_only_a_job_gets_a_result_file(in_acme: Party, tiny_base: BaseModel) -> None:
    dataset_services.dataset_upload(name="chats", content=ROWS)
    run = run_services.training_run_create(
        adapter_name="greeter", dataset_name="chats", hyperparameters=FAST
    )
    execution.training_run_execute(run.pk)
    job = shown(run)
    assert (job["status"], job["training_file"], job["result_files"]) == ("succeeded", None, [])
    assert job["lorikeet"]["dataset"] == "chats"
    assert metrics(run)
