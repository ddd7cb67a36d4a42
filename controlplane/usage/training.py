"""Usage of trainings: tokens, and seconds of a CPU or a GPU."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

from django.db.models import Count, Q, Sum
from django.db.models.functions import TruncDate
from django.utils import timezone

from controlplane.usage.models import TrainingUsage


def training_usage_add(
    *,
    run_id: uuid.UUID,
    attempt: int,
    adapter: str,
    base_model: str,
    trained_tokens: int,
    device: str,
    is_gpu: bool,
    seconds: float,
) -> None:
    """Write the usage of one attempt at a run; a second call for it changes nothing."""
    row = TrainingUsage(
        run_id=run_id,
        attempt=attempt,
        adapter=adapter,
        base_model=base_model,
        trained_tokens=trained_tokens,
        device=device,
        is_gpu=is_gpu,
        device_ms=round(seconds * 1000),
        occurred_at=timezone.now(),
    )
    TrainingUsage.objects.bulk_create([row], ignore_conflicts=True)


def training_usage_remove(run_id: uuid.UUID, attempt: int) -> int:
    """Remove the usage of an attempt that turns out to be lost. -> its tokens."""
    rows = TrainingUsage.objects.filter(run_id=run_id, attempt=attempt)
    tokens = sum(rows.values_list("trained_tokens", flat=True))
    rows.delete()
    return tokens


def training_usage_by_day(start: dt.date, end: dt.date) -> list[dict[str, Any]]:
    """Return what trainings of the tenant in scope used per day (UTC) and adapter, newest first.

    Includes the day `end`.
    """
    begin = dt.datetime.combine(start, dt.time(), dt.UTC)
    stop = dt.datetime.combine(end, dt.time(), dt.UTC) + dt.timedelta(days=1)
    rows: Any = (
        TrainingUsage.objects.allowed()
        .filter(occurred_at__gte=begin, occurred_at__lt=stop)
        .annotate(date=TruncDate("occurred_at", tzinfo=dt.UTC))
        .values("date", "adapter", "base_model")
        .annotate(
            runs=Count("run_id", distinct=True),
            tokens=Sum("trained_tokens"),
            cpu_ms=Sum("device_ms", filter=Q(is_gpu=False), default=0),
            gpu_ms=Sum("device_ms", filter=Q(is_gpu=True), default=0),
        )
        .order_by("-date", "adapter")
    )
    return [
        {
            **{name: row[name] for name in ("date", "adapter", "base_model", "runs")},
            "trained_tokens": row["tokens"],
            "cpu_seconds": row["cpu_ms"] / 1000,
            "gpu_seconds": row["gpu_ms"] / 1000,
        }
        for row in rows
    ]


def training_usage_forget_names() -> None:
    """Remove the adapters' names from the rows of the tenant in scope."""
    TrainingUsage.objects.exclude(adapter="").update(adapter="")
