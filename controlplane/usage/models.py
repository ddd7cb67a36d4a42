"""What was used: one append-only row per request, from the worker's terminal record."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db import models
from django.db.models import Count, Sum
from django.db.models.functions import TruncDate

from controlplane.scoping import TenantModel


class UsageRecord(TenantModel):
    """Tokens of one request, counted by the worker; unique by request, so never counted twice."""

    request_id = models.CharField(max_length=64, unique=True)
    api_key_id = models.UUIDField(null=True)
    model = models.CharField(max_length=200)
    base_model = models.CharField(max_length=63)
    adapter_version_id = models.UUIDField(null=True)
    prompt_tokens = models.PositiveIntegerField()
    cached_tokens = models.PositiveIntegerField(default=0)
    completion_tokens = models.PositiveIntegerField()
    finish_reason = models.CharField(max_length=32)
    occurred_at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["tenant", "occurred_at"])]

    def __str__(self) -> str:
        return self.request_id


def usage_by_day(start: dt.date, end: dt.date) -> list[dict[str, Any]]:
    """Totals of the tenant in scope for each day (UTC) and model, newest first; `end` included."""
    begin = dt.datetime.combine(start, dt.time(), dt.UTC)
    stop = dt.datetime.combine(end, dt.time(), dt.UTC) + dt.timedelta(days=1)
    rows: Any = (
        UsageRecord.objects.filter(occurred_at__gte=begin, occurred_at__lt=stop)
        .annotate(date=TruncDate("occurred_at", tzinfo=dt.UTC))
        .values("date", "model")
        .annotate(
            requests=Count("id"),
            prompt_tokens=Sum("prompt_tokens"),
            cached_tokens=Sum("cached_tokens"),
            completion_tokens=Sum("completion_tokens"),
        )
        .order_by("-date", "model")
    )
    return list(rows)
