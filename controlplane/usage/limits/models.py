"""Limits of a tenant's use of the platform.

`controlplane.usage.limits.admit` enforces those of requests, `controlplane.usage.limits.quotas`
those of work and storage; `controlplane.usage.limits.turns` decides which tenant's work comes next.
"""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q

from controlplane.tenancy.scoping import TenantModel

_AT_LEAST_ONE = [MinValueValidator(1)]


class RateLimit(TenantModel):
    """Limits that apply together: of the tenant, of one key (`api_key`), or of one `model` name.

    A field that is null does not limit. All that match a request apply: the tenant's, the key's and
    the model's.
    """

    MODEL_FIELD = "model"

    #: The fields with limits.
    RATES = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "max_waiting")

    api_key = models.ForeignKey(
        "tenants.ApiKey", null=True, blank=True, on_delete=models.CASCADE, related_name="+"
    )
    #: An adapter with all its versions, one version (`invoices@3`), or a base model; empty: all.
    model = models.CharField(max_length=200, blank=True, default="")
    requests_per_minute = models.PositiveIntegerField(
        null=True, blank=True, validators=_AT_LEAST_ONE
    )
    tokens_per_minute = models.PositiveIntegerField(null=True, blank=True, validators=_AT_LEAST_ONE)
    max_concurrent = models.PositiveIntegerField(null=True, blank=True, validators=_AT_LEAST_ONE)
    #: Requests that may wait for a worker.
    max_waiting = models.PositiveIntegerField(null=True, blank=True, validators=_AT_LEAST_ONE)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "api_key", "model"],
                nulls_distinct=False,
                name="rate_limit_once",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.scope} {self.model}".strip()

    @property
    def scope(self) -> str:
        if self.api_key_id is not None:
            return "key"
        return "model" if self.model else "tenant"


class Budget(TenantModel):
    """Tokens that the tenant, or one of its keys, may use in a period (UTC).

    Above `hard_limit` requests are refused, so all are if it is 0; above `soft_limit` responses
    have a warning header.
    """

    class Period(models.TextChoices):
        DAY = "day"
        MONTH = "month"

    api_key = models.ForeignKey(
        "tenants.ApiKey", null=True, blank=True, on_delete=models.CASCADE, related_name="+"
    )
    period = models.CharField(max_length=8, choices=Period, default=Period.MONTH)
    hard_limit = models.PositiveBigIntegerField(null=True, blank=True)
    soft_limit = models.PositiveBigIntegerField(null=True, blank=True)
    #: Start of the period for which the event was published.
    soft_told_for = models.DateTimeField(null=True, blank=True, editable=False)
    hard_told_for = models.DateTimeField(null=True, blank=True, editable=False)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "api_key", "period"], nulls_distinct=False, name="budget_once"
            ),
            models.CheckConstraint(
                condition=Q(hard_limit__isnull=False) | Q(soft_limit__isnull=False),
                name="budget_limits_something",
            ),
        ]

    def __str__(self) -> str:
        tokens = self.soft_limit if self.hard_limit is None else self.hard_limit
        return f"{tokens} tokens a {self.period}"

    def clean(self) -> None:
        hard, soft = self.hard_limit, self.soft_limit
        if hard is None and soft is None:
            raise ValidationError(
                {"hard_limit": "Set a hard limit or a soft limit: a budget needs one."}
            )
        if hard is not None and soft is not None and soft > hard:
            raise ValidationError({"soft_limit": "The soft limit is above the hard one: lower it."})


class TenantQuota(TenantModel):
    """An operator's quotas of a tenant; for a null field the settings' value applies."""

    #: The quota fields; `settings.TENANT_QUOTAS` has the same names.
    NAMES = (
        "storage_bytes",
        "training_runs",
        "training_at_once",
        "training_steps",
        "training_tokens",
        "training_device_seconds",
        "training_samples",
        "grader_calls",
        "grading_seconds",
        "adapter_checks",
    )

    #: Bytes of files, adapters and datasets together.
    storage_bytes = models.PositiveBigIntegerField(null=True)
    #: Number of runs that wait or run.
    training_runs = models.PositiveIntegerField(null=True)
    #: Number of runs that run at the same time.
    training_at_once = models.PositiveIntegerField(null=True)
    #: Number of steps, and of tokens, of one run.
    training_steps = models.PositiveIntegerField(null=True)
    training_tokens = models.PositiveBigIntegerField(null=True)
    #: Seconds of a GPU, or of a trainer without one, in 24 hours.
    training_device_seconds = models.PositiveIntegerField(null=True)
    #: Number of answers that one run by reinforcement samples, of calls of models that grade them,
    #: and of seconds that grading takes.
    training_samples = models.PositiveIntegerField(null=True)
    grader_calls = models.PositiveIntegerField(null=True)
    grading_seconds = models.PositiveIntegerField(null=True)
    #: Number of adapter versions that wait for their check.
    adapter_checks = models.PositiveIntegerField(null=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant"], name="tenant_quota_once")]

    def __str__(self) -> str:
        return f"quota of {self.tenant_id}"


class Turn(TenantModel):
    """The time when a tenant's work of one kind last started; the longest ago comes first."""

    class Kind(models.TextChoices):
        TRAINING = "training"
        ADAPTER_CHECK = "adapter_check"
        ADAPTER_PROBE = "adapter_probe"
        ADAPTER_IMPORT = "adapter_import"
        EVALUATION = "evaluation"

    kind = models.CharField(max_length=16, choices=Kind)
    served_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "kind"], name="turn_once")]

    def __str__(self) -> str:
        return f"{self.kind} of {self.tenant_id}"
