"""What was used: one append-only row per request, from the worker's terminal record."""

from __future__ import annotations

from django.db import models

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
