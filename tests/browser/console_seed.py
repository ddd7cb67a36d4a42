"""`python -m tests.browser.console_seed`: what a busy tenant has, with long words.

Prints the pages that show it, one a line.
"""

from __future__ import annotations

import datetime as dt
import os
import sys

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

import django

django.setup()

from django.utils import timezone  # noqa: E402

from controlplane.adapters.models import AdapterVersion  # noqa: E402
from controlplane.evaluations import suites  # noqa: E402
from controlplane.evaluations.models import Case, Evaluation, GateDecision, Result  # noqa: E402
from controlplane.requestlog.inference_request import InferenceRequest  # noqa: E402
from controlplane.tenancy.scoping import tenant_scope  # noqa: E402
from controlplane.tenants.models import Tenant  # noqa: E402
from controlplane.training.datasets.services import dataset_upload  # noqa: E402
from controlplane.training.models import ScheduleRun, TrainingRun  # noqa: E402
from controlplane.training.schedules.services import schedule_set  # noqa: E402
from controlplane.usage.models import UsageRecord  # noqa: E402
from tests.controlplane.console.test_doctor import inspected  # noqa: E402

LONG = "The invoice of the fourth of May names twelve chairs and a total that is wrong. " * 12
UNBROKEN = "https://example.com/" + "a1b2c3" * 60
ROW = b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'


def seed() -> list[str]:
    with tenant_scope(Tenant.objects.get(slug="walk").id):
        first = inspected()
        adapter = first.adapter
        second = AdapterVersion.objects.create(
            adapter=adapter,
            number=2,
            status="ready",
            digest="e" * 64,
            report={"note": LONG[:300], "path": UNBROKEN},
        )
        AdapterVersion.objects.create(
            adapter=adapter,
            number=3,
            status="rejected",
            reasons=[{"field": f"base_model.{UNBROKEN}.lora_A.weight", "message": LONG}],
        )
        compared = _evaluate(second)
        run = _train(adapter.name, second)
        request_id = _ask(adapter.name, first)
        base = f"adapters/{adapter.name}"
        return [
            base,
            *(f"{base}/versions/{number}" for number in (1, 2, 3)),
            *(f"{base}/versions/1/doctor", f"{base}/versions/2/diff?with=1", f"{base}/schedule"),
            *("suites/letters", compared, "training/datasets/letters"),
            *(f"training/runs/{run}", f"requests/{request_id}"),
        ]


def _evaluate(version: AdapterVersion) -> str:
    """Compare two evaluations with long answers. -> the comparison's page."""
    cases = [
        {
            "messages": [{"role": "user", "content": LONG}],
            "expected": text,
            "checks": [{"type": "exact"}],
        }
        for text in (LONG, UNBROKEN, "short")
    ]
    suite = suites.suite_version_create(
        name="letters", cases=cases, origin={"kind": "api"}, description=LONG[:400]
    )
    made = []
    for number, model in enumerate(("invoices@1", "invoices@2")):
        evaluation = Evaluation.objects.create(
            suite_version=suite,
            model=model,
            served=model,
            status="succeeded",
            num_done=3,
            summary={"score": 0.123456789 + number / 10, "logprob": -1.23456789},
            finished_at=timezone.now(),
        )
        for case in Case.objects.filter(suite_version=suite):
            output = f"{model} says: {case.expected}"
            score = float(number == 0)
            Result.objects.create(
                evaluation=evaluation, case=case, output=output, scores=[score], score=score
            )
        made.append(evaluation)
    Evaluation.objects.create(
        suite_version=suite, model="invoices", served="x", status="failed", error=LONG[:900]
    )
    before, after = made
    GateDecision.objects.create(
        version=version,
        live_number=1,
        suite_version=suite,
        live=before,
        candidate=after,
        status="reject",
        reasons=[LONG[:300]],
        outcome="held",
        decided_at=timezone.now(),
    )
    return f"evaluations/compare?before={before.id}&after={after.id}"


def _train(name: str, version: AdapterVersion) -> str:
    """Set a schedule that ran. -> its run's id"""
    dataset = dataset_upload(name="letters", content=ROW * 20)
    schedule = schedule_set(adapter=version.adapter, dataset_name="letters", cron_line="0 3 * * *")
    run = TrainingRun.objects.create(
        adapter=version.adapter,
        dataset=dataset,
        dataset_sha256=dataset.sha256,
        status="failed",
        error=f"line 3: {UNBROKEN}",
        hyperparameters={"rank": 8, "learning_rate": 0.0002},
        progress={"step": 3, "steps": 9, "loss": 1.23456789, "tokens_per_s": 1234.56789},
        version=version,
        created_by=None,
    )
    slot = timezone.now() - dt.timedelta(hours=3)
    ScheduleRun.objects.create(schedule=schedule, slot=slot, training_run=run, rows_before=12)
    return str(run.id)


def _ask(model: str, version: AdapterVersion) -> str:
    """Write a request with its usage. -> its id"""
    now = timezone.now()
    common = {
        **{"request_id": "req_walk", "model": model, "base_model": version.adapter.base_model.name},
        **{"prompt_tokens": 12, "completion_tokens": 34, "finish_reason": "stop"},
    }
    InferenceRequest.objects.create(
        **common,
        adapter_version_id=version.pk,
        digests=[version.digest],
        sampling={"temperature": 0.123456789},
        accepted_at=now,
        worker_id="gpu-1",
        queue_ms=19.125938415527344,
        load_ms=0.33211708068847656,
        first_token_ms=30.75408935546875,
        total_ms=2065.87815284729,
    )
    UsageRecord.objects.create(**common, occurred_at=now)
    return "req_walk"


if __name__ == "__main__":
    sys.stdout.write("\n".join(seed()) + "\n")
