"""Stored content, refusals and the log policy; `inference_request` has the log lines."""

from __future__ import annotations

from django.db import models

from controlplane.tenancy.scoping import TenantModel


class LogPolicy(TenantModel):
    """What a tenant wants stored, and for how long; without a policy no content is stored."""

    class Content(models.TextChoices):
        """Which prompts and answers are stored: none, those of requests with `store`, or all."""

        OFF = "off"
        ON_REQUEST = "on_request"
        ALL = "all"

    content = models.CharField(max_length=16, choices=Content, default=Content.OFF)
    content_days = models.PositiveSmallIntegerField(default=30)
    metadata_days = models.PositiveSmallIntegerField(default=90)
    #: The key that encrypts the content, itself encrypted. Without it nobody can read the content.
    wrapped_key = models.BinaryField(default=bytes, max_length=200)
    key_made_at = models.DateTimeField(null=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant"], name="log_policy_once")]

    def __str__(self) -> str:
        return self.content


class RequestContent(TenantModel):
    """Prompt and answers of one request, encrypted with the tenant's key."""

    request_id = models.CharField(max_length=64, unique=True)
    sealed = models.BinaryField()
    num_bytes = models.PositiveIntegerField()

    class Meta:
        indexes = [models.Index(fields=["tenant", "created_at"])]

    def __str__(self) -> str:
        return self.request_id


class RefusalHour(TenantModel):
    """How many requests of one hour (UTC) were refused at admission, and why."""

    starts_at = models.DateTimeField()
    endpoint = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField()
    code = models.CharField(max_length=64)
    requests = models.PositiveBigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "starts_at", "endpoint", "status", "code"],
                name="refusal_hour_once",
            )
        ]

    def __str__(self) -> str:
        return f"{self.starts_at:%Y-%m-%d %H:%M} {self.status} {self.code}"
