"""What is kept of requests beside the log line of each (`requestlog.inference_request`)."""

from __future__ import annotations

from django.db import models

from controlplane.tenancy.scoping import TenantModel


class LogPolicy(TenantModel):
    """What a tenant wants kept, and for how long; a tenant without one keeps no words."""

    class Content(models.TextChoices):
        """Whose prompts and answers are stored: nobody's, of requests that say so, or all."""

        OFF = "off"
        ON_REQUEST = "on_request"
        ALL = "all"

    content = models.CharField(max_length=16, choices=Content, default=Content.OFF)
    content_days = models.PositiveSmallIntegerField(default=30)
    metadata_days = models.PositiveSmallIntegerField(default=90)
    #: The key that seals the words, itself sealed. Without it what is stored is noise.
    wrapped_key = models.BinaryField(default=bytes, max_length=200)
    key_made_at = models.DateTimeField(null=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant"], name="log_policy_once")]

    def __str__(self) -> str:
        return self.content


class RequestContent(TenantModel):
    """The words of one request, sealed under the tenant's key."""

    request_id = models.CharField(max_length=64, unique=True)
    sealed = models.BinaryField()
    num_bytes = models.PositiveIntegerField()

    class Meta:
        indexes = [models.Index(fields=["tenant", "created_at"])]

    def __str__(self) -> str:
        return self.request_id


class RefusalHour(TenantModel):
    """How many requests of one hour (UTC) were refused before they began, and why."""

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
