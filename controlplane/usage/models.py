"""Usage: one append-only row per request, and their totals by hour and by day."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db import models
from django.db.models import Sum
from django.db.models.functions import TruncDate

from controlplane.tenancy.scoping import TenantModel


class UsageRecord(TenantModel):
    """Tokens of one request, counted by the worker; unique per request, so never counted twice.

    The table is partitioned by the month of `occurred_at`: see `usage.retention`. All records of a
    request have the same `occurred_at`, so that its uniqueness needs no index over all months.
    """

    MODEL_FIELD = "model"

    request_id = models.CharField(max_length=64)
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
        constraints = [
            models.UniqueConstraint(fields=["request_id", "occurred_at"], name="usage_record_once"),
        ]

    def __str__(self) -> str:
        return self.request_id


class UsageTotal(TenantModel):
    """Sums of usage records; written in the transaction that writes the records."""

    MODEL_FIELD = "model"

    #: UTC.
    starts_at = models.DateTimeField()
    model = models.CharField(max_length=200)
    api_key_id = models.UUIDField(null=True)
    requests = models.PositiveBigIntegerField()
    prompt_tokens = models.PositiveBigIntegerField()
    cached_tokens = models.PositiveBigIntegerField()
    completion_tokens = models.PositiveBigIntegerField()

    class Meta:
        abstract = True
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "starts_at", "model", "api_key_id"],
                nulls_distinct=False,
                name="%(class)s_once",
            )
        ]

    def __str__(self) -> str:
        return f"{self.starts_at:%Y-%m-%d %H:%M} {self.model}"


class UsageHour(UsageTotal):
    """One hour of a tenant, by model and key."""


class UsageDay(UsageTotal):
    """One day of a tenant, by model and key."""


class TrainingUsage(TenantModel):
    """The use by one attempt at a training run; unique, so never counted twice.

    It has no reference to the run, which may be deleted.
    """

    MODEL_FIELD = "adapter"

    run_id = models.UUIDField()
    attempt = models.PositiveIntegerField()
    adapter = models.CharField(max_length=63, blank=True)
    base_model = models.CharField(max_length=63)
    #: Number of tokens read, repetitions included.
    trained_tokens = models.BigIntegerField()
    #: "cpu", or the GPU's name.
    device = models.CharField(max_length=64)
    is_gpu = models.BooleanField()
    #: Seconds from the start of the trainer to its end.
    device_ms = models.BigIntegerField()
    occurred_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "run_id", "attempt"], name="training_usage_once"
            ),
        ]
        indexes = [models.Index(fields=["tenant", "occurred_at"])]

    def __str__(self) -> str:
        return f"{self.run_id} {self.attempt}"


def usage_by_day(start: dt.date, end: dt.date) -> list[dict[str, Any]]:
    """Return the totals of the tenant in scope per day (UTC) and model, newest first.

    Includes the day `end`.
    """
    begin = dt.datetime.combine(start, dt.time(), dt.UTC)
    stop = dt.datetime.combine(end, dt.time(), dt.UTC) + dt.timedelta(days=1)
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    rows: Any = (
        UsageDay.objects.allowed()
        .filter(starts_at__gte=begin, starts_at__lt=stop)
        .annotate(date=TruncDate("starts_at", tzinfo=dt.UTC))
        .values("date", "model")
        .annotate(**{f"sum_{name}": Sum(name) for name in names})
        .order_by("-date", "model")
    )
    return [
        {"date": row["date"], "model": row["model"], **{n: row[f"sum_{n}"] for n in names}}
        for row in rows
    ]
