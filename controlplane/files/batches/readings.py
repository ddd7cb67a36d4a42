"""Read the numbers of batches and their lines, for the metrics of one process."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Count, F, Min, Sum
from django.utils import timezone
from prometheus_client.core import Metric

from controlplane.files.batches.models import Batch
from controlplane.infra.metrics import gauge
from controlplane.tenancy.scoping import all_tenants


def batches() -> Iterable[Metric]:
    """Return the batches that have not ended, by status, and their lines without a result."""
    with all_tenants(reason="batches of all tenants are counted"):
        found = {
            row["status"]: row
            for row in Batch.objects.filter(status__in=Batch.ACTIVE)
            .values("status")
            .annotate(
                batches=Count("id"),
                left=Sum(F("num_lines") - F("num_completed") - F("num_failed")),
                ends_first=Min("expires_at"),
            )
        }
    counts = [((s.value,), float(found[s]["batches"] if s in found else 0)) for s in Batch.ACTIVE]
    left = sum(max(0, row["left"] or 0) for row in found.values())
    now = timezone.now()
    time_left = min(
        ((row["ends_first"] - now).total_seconds() for row in found.values()), default=86_400.0
    )
    about = "Until the first batch expires; a day if there is none."
    return [
        gauge("lorikeet_batches", "Batches that have not ended.", counts, "status"),
        gauge("lorikeet_batch_lines_left", "Their lines without a result.", [((), left)]),
        gauge("lorikeet_batch_first_expiry_seconds", about, [((), time_left)]),
    ]
