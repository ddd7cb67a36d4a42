"""One row of each kind that is of a model, all of the model `ledger` or its alias `ledger-prod`."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from typing import Any

from django.utils import timezone

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.aliases import ramps
from controlplane.aliases import services as aliases
from controlplane.aliases.contents import Contents, Part
from controlplane.evaluations import suites
from controlplane.evaluations.models import Evaluation, GateDecision, Suite, SuiteVersion
from controlplane.files.batches.models import Batch
from controlplane.files.models import File, Purpose
from controlplane.requestlog import sealing
from controlplane.requestlog import services as request_log
from controlplane.requestlog.capture import capture_policy_set
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import CapturedRequest
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.models import Dataset, Schedule, ScheduleRun, TrainingRun
from controlplane.usage.limits.services import rate_limit_set
from controlplane.usage.models import UsageRecord
from controlplane.usage.services import usage_records_create
from controlplane.usage.training import training_usage_add
from tests.controlplane.conftest import Party

NAME, ALIAS = "ledger", "ledger-prod"


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What addresses name, by the beginning of the address and the name of its parameter."""

    ids: dict[str, str]
    input_file: str


def make_world(party: Party, base_model: BaseModel) -> World:
    with tenant_scope(party.tenant.id):
        adapter = Adapter.objects.create(name=NAME, base_model=base_model)
        ready = {"adapter": adapter, "status": AdapterVersion.Status.READY}
        first, second = (
            AdapterVersion.objects.create(number=number, digest=str(number) * 64, **ready)
            for number in (1, 2)
        )
        adapter.live_version = first
        adapter.save()
        contents = Contents(primary=(Part(adapter=NAME),), canary=(Part(adapter=NAME, version=2),))
        alias = aliases.alias_create(name=ALIAS, contents=contents)
        ramps.ramp_start(alias=alias, steps=ramps.DEFAULT_STEPS)
        run, results = _trained(adapter)
        evaluation = _evaluated(second)
        request_id = _asked(party)
        batch, batch_files = _batched()
        limit = rate_limit_set(model=NAME, max_waiting=1)
    named = {
        "/api/v1/adapters/{name}": NAME,
        "/api/v1/aliases/{name}": ALIAS,
        "/api/v1/training-runs/{run_id}": str(run.pk),
        "/api/v1/evaluations/{evaluation_id}": str(evaluation.pk),
        "/api/v1/requests/{request_id}": request_id,
        "/api/v1/captured-requests/{request_id}": request_id,
        "/api/v1/limits/{limit_id}": str(limit.pk),
        "/v1/models/{name}": NAME,
        "/v1/batches/{batch_id}": batch.public_id,
        "/v1/files/{file_id}": results.public_id,
        "/v1/fine_tuning/jobs/{job_id}": run.public_id,
    }
    return World(ids=named, input_file=batch_files[0].public_id)


def _file(purpose: Purpose, name: str) -> File:
    return File.objects.create(
        purpose=purpose, filename=name, status=File.Status.READY, num_bytes=1, sha256="0" * 64
    )


def _trained(adapter: Adapter) -> tuple[TrainingRun, File]:
    """A run with its metrics, by a schedule, and what it used."""
    results = _file(Purpose.FINE_TUNE_RESULTS, f"{NAME}.csv")
    dataset = Dataset.objects.create(name="rows", sha256="0" * 64, num_bytes=1, num_rows=9)
    run = TrainingRun.objects.create(
        adapter=adapter, dataset=dataset, dataset_sha256="0" * 64, result_file_id=results.pk
    )
    now = timezone.now()
    schedule = Schedule.objects.create(
        adapter=adapter, dataset=dataset, cron="0 3 * * *", next_run_at=now + dt.timedelta(days=1)
    )
    ScheduleRun.objects.create(schedule=schedule, slot=now, training_run=run)
    training_usage_add(
        run_id=run.pk,
        attempt=1,
        adapter=NAME,
        base_model="tiny",
        trained_tokens=1,
        device="cpu",
        is_gpu=False,
        seconds=1,
    )
    return run, results


def _evaluated(version: AdapterVersion) -> Evaluation:
    case = {"messages": [{"role": "user", "content": "x"}], "expected": "y"}
    suite_version: SuiteVersion = suites.suite_version_create(name="cases", cases=[case], origin={})
    evaluation = Evaluation.objects.create(
        suite_version=suite_version,
        model=f"{NAME}@{version.number}",
        served=f"{NAME}@{version.number}",
        status=Evaluation.Status.SUCCEEDED,
    )
    GateDecision.objects.create(version=version, suite_version=suite_version, candidate=evaluation)
    Adapter.objects.filter(pk=version.adapter_id).update(gate={"suite": Suite.objects.get().name})
    return evaluation


def _asked(party: Party) -> str:
    """A request that is logged, with its words, captured and billed."""
    request_id, common = f"req_{uuid.uuid4().hex}", {"model": NAME, "base_model": "tiny"}
    InferenceRequest.objects.create(
        request_id=request_id,
        worker_id="w",
        finish_reason="stop",
        accepted_at=timezone.now(),
        **common,
    )
    usage = UsageRecord(
        tenant_id=party.tenant.id,
        request_id=request_id,
        prompt_tokens=1,
        completion_tokens=1,
        finish_reason="stop",
        occurred_at=timezone.now(),
        **common,
    )
    usage_records_create([usage])
    request_log.log_policy_set(content="all", content_days=30, metadata_days=90)
    words = request_log.Words(
        tenant_id=party.tenant.id,
        request_id=request_id,
        store=None,
        prompt={"messages": [{"role": "user", "content": "x"}]},
        outputs=["a"],
        finish_reason="stop",
        is_truncated=False,
    )
    assert request_log.contents_keep([words]) == 1
    captured_make(request_id, NAME)
    return request_id


def captured_make(request_id: str, model: str) -> None:
    policy = capture_policy_set(share=1, shares={NAME: 0.5}, days=1, max_rows=9, max_bytes=1 << 20)
    content: dict[str, Any] = {
        "request_id": request_id,
        "messages": [{"role": "user", "content": f"asked {model}"}],
        "tools": [],
        "output": f"answer of {model}",
    }
    sealed = sealing.seal(content, bytes(policy.wrapped_key))
    CapturedRequest.objects.create(
        request_id=request_id, model=model, sealed=sealed, num_bytes=len(sealed)
    )


def _batched() -> tuple[Batch, list[File]]:
    files = [
        _file(Purpose.BATCH, "lines.jsonl"),
        _file(Purpose.BATCH_OUTPUT, f"{NAME}-output.jsonl"),
        _file(Purpose.BATCH_OUTPUT, f"{NAME}-errors.jsonl"),
    ]
    batch = Batch.objects.create(
        endpoint="/v1/chat/completions",
        model=NAME,
        status=Batch.Status.COMPLETED,
        input_file_id=files[0].pk,
        output_file_id=files[1].pk,
        error_file_id=files[2].pk,
        expires_at=timezone.now(),
    )
    return batch, files
