"""Reports on datasets: made once after an upload, by the inspector's Celery worker.

The control plane has no tokenizer, and the trainer is busy for hours; the inspector has both the
base models and time. A child without secrets counts. Until then a report is `pending`.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from celery import signature
from django.conf import settings
from django.utils import timezone
from kombu.exceptions import OperationalError

from contract.training.dataset_report import MAX_ANSWER_BYTES, MAX_BASES, ReportJob
from controlplane.adapters.base_model_folder import local_base_model
from controlplane.adapters.models import BaseModel
from controlplane.infra import storage
from controlplane.infra.temp_folders import scratch_folder
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.auth import Permission, Principal
from controlplane.training.datasets import contents
from controlplane.training.last_lines import last_lines
from controlplane.training.models import Dataset, DatasetVersion, TrainingRun

log = logging.getLogger(__name__)

#: The name of the task that makes reports; its module imports this one.
REPORT_TASK = "controlplane.training.tasks.dataset_report"
TIMEOUT_S = 900.0
_MEMORY_BYTES = 3 << 30
#: Bytes above which only every second row is counted in tokens, above twice as many only
#: every third, …, which bounds the time.
COUNTED_BYTES = 256 << 20
#: Number of messages sent again in one sweep.
MAX_PER_TURN = 20
#: Time after which a pending report is asked for again.
RESEND = dt.timedelta(minutes=30)
#: Number of runs from which the speed of a base model is estimated.
_NUM_RUNS = 20

Pending = Dataset.ReportStatus.PENDING


def report_send(dataset: Dataset) -> None:
    """Queue a pending report. If that fails, a later sweep does it."""
    try:
        signature(REPORT_TASK).delay(str(dataset.tenant_id))
    except OperationalError:
        log.warning("a dataset's report could not be queued yet")


def reports_sweep() -> None:
    """Queue pending reports again, whose messages may be lost."""
    with all_tenants(reason="find pending reports of all tenants"):
        old = Dataset.objects.filter(report_status=Pending, updated_at__lt=timezone.now() - RESEND)
        due = list(old.order_by("updated_at")[:MAX_PER_TURN])
    for dataset in due:
        report_send(dataset)


def report_next() -> bool:
    """Make a pending report: the oldest of any one tenant. -> False if there is none.

    Two inspectors may make the same one, with the same outcome.
    """
    with all_tenants(reason="the next report is chosen among all tenants"):
        pending = Dataset.objects.filter(report_status=Pending)
        tenants = list(pending.order_by("tenant_id").values_list("tenant_id", flat=True).distinct())
    if not tenants:
        return False
    with tenant_scope(random.choice(tenants)):  # so that one tenant's many delay no other
        pending = Dataset.objects.filter(report_status=Pending)
        dataset = pending.order_by("updated_at").first()
        if dataset is not None:
            _make(dataset)
    return True


def _make(dataset: Dataset) -> None:
    try:
        told = _report(dataset)
        status = Dataset.ReportStatus.READY
    except storage.ObjectMissing:
        return  # it was replaced just now
    except _Failed as error:
        told, status = {"error": str(error)}, Dataset.ReportStatus.FAILED
    # Only if the rows are still these.
    rows = Dataset.objects.filter(
        pk=dataset.pk, version=dataset.version, sha256=dataset.sha256, report_status=Pending
    )
    if rows.update(report_status=status, report=told):
        dataset.versions.filter(number=dataset.version).update(report=told)
    extra = {"dataset_id": str(dataset.pk), "status": status.value}
    log.info("a dataset was reported on", extra=extra)


class _Failed(Exception):
    """A report could not be made; the message is for the tenant."""


def _report(dataset: Dataset) -> dict[str, Any]:
    bases: dict[str, Path] = {}
    for base_model in BaseModel.objects.filter(is_active=True).order_by("name"):
        found = local_base_model(base_model.name)
        if found is not None and found.revision == base_model.revision and len(bases) < MAX_BASES:
            bases[base_model.name] = found.path.resolve()
    with scratch_folder("report-") as folder:
        rows = folder / "dataset.jsonl"
        with rows.open("wb") as file:
            file.writelines(contents.pieces(dataset.sha256))
        job = ReportJob(
            rows=rows,
            bases=bases,
            memory_bytes=_MEMORY_BYTES,
            num_earlier_rows=_num_earlier_rows(dataset),
            counted_every=-(-dataset.num_bytes // COUNTED_BYTES) or 1,
        )
        return _child(job, folder) | {"made_at": timezone.now().isoformat()}


def _num_earlier_rows(dataset: Dataset) -> int:
    """Return the number of rows before others were added; 0: all are new."""
    version = dataset.versions.filter(number=dataset.version).first()
    return 0 if version is None else version.num_rows - version.added_rows


def _child(job: ReportJob, folder: Path) -> dict[str, Any]:
    job_path, out_path, stderr_path = (folder / name for name in ("job.json", "out", "stderr.log"))
    job.write(job_path)
    with out_path.open("wb") as out, stderr_path.open("wb") as stderr:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "worker.dataset_report", str(job_path)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=stderr,
                env=dict(settings.TRAINER_ENVIRONMENT),
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _Failed(f"The report took longer than {TIMEOUT_S:g} s.") from None
    with out_path.open("rb") as file:
        answer = file.read(MAX_ANSWER_BYTES + 1)
    if ended.returncode != 0 or len(answer) > MAX_ANSWER_BYTES:
        told = {"exit_code": ended.returncode, "last_lines": last_lines(stderr_path)}
        log.warning("a dataset's report failed", extra=told)
        raise _Failed("The report could not be made: upload the rows again, or tell the operator.")
    report: dict[str, Any] = json.loads(answer)
    return report


def report_of(
    dataset: Dataset, version: DatasetVersion | None = None, *, by: Principal | None = None
) -> dict[str, Any]:
    """Return a dataset's present report, with the time of an epoch on each base.

    version  an earlier one; None: the current one
    by       the reader; None: one who may not read captured requests
    """
    rows, status = version or dataset, dataset.report_status
    if version is not None and version.number != dataset.version:
        is_made = version.report is not None and "error" not in version.report
        status = "ready" if is_made else "failed"
    told = rows.report or {}
    may_read = by is not None and Permission.REQUESTS_CONTENT in by.permissions
    if not may_read and contents.has_requests(rows.sha256):
        told = _without_lines(told)
    error = "" if told else "The next version came before the report was made."
    bases = {
        name: {**counts, **_estimate(name, counts["tokens"])}
        for name, counts in told.get("bases", {}).items()
    }
    return {
        "object": "dataset_report",
        "dataset": dataset.name,
        "version": dataset.version if version is None else version.number,
        "sha256": rows.sha256,
        "status": status,
        "num_rows": rows.num_rows,
        "num_bytes": rows.num_bytes,
        "duplicates": told.get("duplicates"),
        "added": told.get("added"),
        "arguments": told.get("arguments"),
        "counted_every": told.get("counted_every", 1),
        "bases": bases,
        "error": told.get("error", error if status == "failed" else ""),
        "made_at": told.get("made_at"),
    }


def _without_lines(told: dict[str, Any]) -> dict[str, Any]:
    """Return a report with counts only, because texts about lines may quote them."""
    return {
        name: _without_lines(value) if isinstance(value, dict) else [] if name == "lines" else value
        for name, value in told.items()
    }


def _estimate(base_model: str, tokens: int) -> dict[str, Any]:
    """Return the time of an epoch at the speed of the last runs; None: there were none.

    The speed is the machine's, so runs of all tenants count; nothing else of them is shown.
    """
    with all_tenants(reason="the speed of recent runs of a base model"):
        runs = TrainingRun.objects.filter(
            adapter__base_model__name=base_model, status=TrainingRun.Status.SUCCEEDED
        ).order_by("-finished_at")
        found = list(runs.values_list("progress__tokens_per_s", flat=True)[:_NUM_RUNS])
    speeds = [float(speed) for speed in found if speed]
    if not speeds:
        return {"tokens_per_s": None, "epoch_s": None}
    speed = statistics.median(speeds)
    return {"tokens_per_s": round(speed, 1), "epoch_s": round(tokens / speed, 1)}
