"""Checkpoints of a job: adapters on its way that become versions, and answer as any other."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from controlplane.adapters import deletion as adapter_deletion
from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.evaluations.leakage import prompt_digest, trained_digests
from controlplane.files.models import File
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.models import TrainingCheckpoint, TrainingEvent, TrainingRun
from controlplane.training.runs import execution
from controlplane.training.runs.kept import kept_adapters
from controlplane.usage.limits import quotas
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import ROWS
from tests.controlplane.training.test_execution import execute, make_run
from tests.controlplane.training.test_fine_tuning import (
    QUICK,
    checkpoints,
    make_file,
    make_job,
    metrics,
)

pytestmark = pytest.mark.django_db(transaction=True)
KEEPING = QUICK | {"checkpoints": 2, "max_steps": 6}


@pytest.fixture
def file(in_acme: Party, tiny_base: BaseModel) -> File:
    return make_file(ROWS)


def row_digest(number: int) -> str:
    return prompt_digest([{"role": "user", "content": f"hello {number}"}])


def test_a_jobs_checkpoints_are_models_with_the_losses_of_their_steps(
    in_acme: Party, file: File, globex: Party
) -> None:
    before = quotas.used("storage_bytes")
    run = make_job(in_acme, file, suffix="greeter", hyperparameters=KEEPING)
    assert checkpoints(run) == []
    execution.training_run_execute(run.pk)
    result, second, first = checkpoints(run)
    assert [each["step_number"] for each in (first, second, result)] == [2, 4, 6]
    assert [each["fine_tuned_model_checkpoint"] for each in (first, second, result)] == [
        *("greeter@1", "greeter@2", "greeter@3"),
    ]
    losses = {step["step"]: step["train_loss"] for step in metrics(run)}
    for each in (first, second):
        step = each["step_number"]
        assert each["metrics"] == {"step": step, "train_loss": losses[step]}
        assert each["fine_tuning_job_id"] == run.public_id
    # Only the result became live; each has bytes of its own, which count.
    adapter = Adapter.objects.select_related("live_version").get()
    assert adapter.live_version is not None and adapter.live_version.number == 3
    versions = list(AdapterVersion.objects.order_by("number"))
    assert [version.source for version in versions] == ["checkpoint", "checkpoint", "training"]
    assert len({version.digest for version in versions}) == 3
    stored = sum(version.num_bytes + version.config_num_bytes for version in versions)
    assert quotas.used("storage_bytes") >= before + stored
    with tenant_scope(globex.tenant.id):
        assert not TrainingCheckpoint.objects.exists()
    # What its run was trained on is known to a gate.
    digests = {row_digest(1), "0" * 64}
    assert trained_digests(versions[0].pk, digests) == {row_digest(1)}
    # It is a start as any version is, can be made live, and goes with its version.
    named = {name: value for name, value in QUICK.items() if name not in ("rank", "alpha")}
    further = make_job(in_acme, file, model="greeter@1", hyperparameters=named)
    assert further.warm_start_name == "greeter@1"
    TrainingRun.objects.filter(pk=further.pk).delete()
    promotion.adapter_version_promote(version=versions[0])
    adapter_deletion.version_delete(version=versions[1])
    assert [each["step_number"] for each in checkpoints(run)] == [6, 2]


def test_those_that_have_no_room_are_told_and_the_job_goes_on(
    in_acme: Party, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The result's room is not checked here: it needs the same as each of the others.
    real = quotas.check

    def full(quota: str, more: int = 1, **kwargs: Any) -> None:
        is_kept = TrainingRun.objects.filter(status="running").exists()
        real(quota, 1 << 60 if quota == "storage_bytes" and is_kept else more, **kwargs)

    monkeypatch.setattr(quotas, "check", full)
    run = make_job(in_acme, file, suffix="other", hyperparameters=KEEPING)
    execution.training_run_execute(run.pk)
    warnings = run.events.filter(level=TrainingEvent.Level.WARN).values_list("message", flat=True)
    assert [told[:40] for told in warnings] == [
        "The checkpoint after step 2 was not kept",
        "The checkpoint after step 4 was not kept",
    ]
    assert not Adapter.objects.filter(name="other", versions__source="checkpoint").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_lost_between_two_uploads_a_run_has_each_step_once(
    adapter: Adapter, dataset: Any, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """Also on another machine, where a folder that was not sent yet is made again."""
    run = make_run(**KEEPING)
    with monkeypatch.context() as patch:

        def lost(**kwargs: Any) -> None:
            raise KeyboardInterrupt("the process is killed")

        patch.setattr(kept_adapters.KeptAdapters, "publish_if_due", lambda self: None)
        patch.setattr(kept_adapters.adapter_services, "adapter_version_upload_files", lost)
        execution.training_run_execute(run.pk)
    (kept,) = TrainingCheckpoint.objects.select_related("version")
    assert (kept.step, kept.version.status) == (2, "uploading")
    shutil.rmtree(settings.WORK_DIR / "runs")
    TrainingRun.objects.filter(pk=run.pk).update(status="queued", lease_until=None)
    run = execute(run)
    assert run.status == "succeeded"
    steps = TrainingCheckpoint.objects.filter(version__status="ready").order_by("step")
    assert list(steps.values_list("step", "version__number")) == [(2, 1), (4, 2)]
    for kept in steps.select_related("version"):
        assert storage.object_size(kept.version.tensors_key) == kept.version.num_bytes
