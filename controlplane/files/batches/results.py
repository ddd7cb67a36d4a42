"""Write a batch's results and states, each write under the runner's lease."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.db.models import F
from django.utils import timezone

from controlplane.events.audit.services import record
from controlplane.files.batches.leases import Lease
from controlplane.files.batches.lines import LineFault
from controlplane.files.batches.models import Batch, BatchResult, timestamp_field
from controlplane.files.batches.validation import Found, RefusedLine
from controlplane.files.models import File
from controlplane.files.services import file_publish
from controlplane.infra.metrics import BATCH_LINES, BATCHES_ENDED
from controlplane.tenancy.scoping import tenant_scope

Status = Batch.Status


#: The sums of a batch, which its results have, too.
_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "thought_tokens")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one line."""

    line: int
    is_error: bool
    output: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    thought_tokens: int = 0


def begin_validation(lease: Lease) -> None:
    """Delete the results of an earlier, interrupted pass."""
    with lease.held() as batch:
        batch.results.all().delete()
        batch.num_failed = 0
        batch.save(update_fields=["num_failed"])


def keep_refusals(lease: Lease, refusals: list[RefusedLine]) -> None:
    keep(lease, [Result(line=line, is_error=True, output=out) for line, out in refusals])


def keep(lease: Lease, found: list[Result]) -> None:
    """Write and count results; a repetition changes nothing. Raises LeaseLost."""
    with lease.held() as batch:
        # Those were kept already if the connection was lost after the commit.
        kept = set(
            batch.results.filter(line__in=[result.line for result in found]).values_list(
                "line", flat=True
            )
        )
        found = [result for result in found if result.line not in kept]
        BatchResult.objects.bulk_create(
            BatchResult(
                batch=batch,
                line=result.line,
                is_error=result.is_error,
                output=result.output,
            )
            for result in found
        )
        num_failed = sum(result.is_error for result in found)
        Batch.objects.filter(pk=batch.pk).update(
            num_failed=F("num_failed") + num_failed,
            num_completed=F("num_completed") + len(found) - num_failed,
            **{name: F(name) + sum(getattr(result, name) for result in found) for name in _COUNTS},
        )
    BATCH_LINES.labels("failed").inc(num_failed)
    BATCH_LINES.labels("completed").inc(len(found) - num_failed)


def end_validation(lease: Lease, found: Found) -> None:
    """Begin a batch whose file is good; fail one whose file has faults."""
    with lease.held() as batch:
        if batch.status != Status.VALIDATING:
            return  # it was cancelled during the check
        if found.faults:
            batch.results.all().delete()
            batch.status, batch.failed_at = Status.FAILED, timezone.now()
            batch.errors, batch.num_failed = found.faults, 0
            batch.save()
            BATCHES_ENDED.labels(batch.status).inc()
            record("failed", batch, after={"status": batch.status, "num_lines": found.num_lines})
            return
        batch.status, batch.in_progress_at = Status.IN_PROGRESS, timezone.now()
        batch.num_lines = found.num_lines
        batch.model = found.models.copy().pop()[:200] if len(found.models) == 1 else ""
        batch.save()


def done_lines(lease: Lease) -> set[int]:
    """Return the lines that have a result."""
    with tenant_scope(lease.tenant_id):
        rows = BatchResult.objects.filter(batch_id=lease.row_id)
        return set(rows.values_list("line", flat=True))


def stop(lease: Lease, ends_as: str, fault: LineFault | None = None) -> None:
    """Stop answering lines; the results so far go into files."""
    with lease.held() as batch:
        if batch.status not in (Status.VALIDATING, Status.IN_PROGRESS):
            return  # it is cancelled, or stopped already
        batch.status, batch.ends_as = Status.FINALIZING, ends_as
        batch.finalizing_at = timezone.now()
        if fault is not None:
            batch.errors = [*batch.errors, fault.told(None)]
        batch.save()


def end(lease: Lease, files: dict[str, File]) -> None:
    """End the batch: publish its files and delete its results.

    files  by the name of the batch's field
    """
    with lease.held() as batch:
        for field, file in files.items():
            file_publish(file)
            setattr(batch, field, file.pk)
        if batch.in_progress_at is None:
            batch.num_failed = 0  # it counts only the checked part, which has no files
        batch.status = batch.ends_as
        setattr(batch, timestamp_field(batch.status), timezone.now())
        batch.lease_until = None
        batch.save()
        batch.results.all().delete()
        told: dict[str, Any] = {
            name: getattr(batch, name)
            for name in ("status", "num_lines", "num_completed", "num_failed")
        }
        record("ended", batch, after=told)
    BATCHES_ENDED.labels(batch.status).inc()
