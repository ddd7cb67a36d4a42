"""Requests and adapters that ended workers: dead letters, and quarantine."""

from __future__ import annotations

from django.db import models

from controlplane.tenancy.scoping import TenantModel


class DeadLetter(TenantModel):
    """A request that ended every worker that ran it."""

    request_id = models.CharField(max_length=64, unique=True)
    model = models.CharField(max_length=200)
    adapter_version_id = models.UUIDField(null=True)
    worker_id = models.CharField(max_length=200, blank=True)
    reason = models.CharField(max_length=500)
    #: The job as it was sent, prompt and all; null once it was put back, or is too old to be.
    job = models.JSONField(null=True)
    requeued_at = models.DateTimeField(null=True, blank=True)
    requeued_as = models.CharField(max_length=64, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "created_at"]),
            # For the page of quarantine: the newest letter of a version.
            models.Index(fields=["adapter_version_id", "id"], name="dead_letters_by_version"),
        ]

    def __str__(self) -> str:
        return self.request_id


class Quarantine(models.Model):
    """An adapter that is not served because workers ended with it; of no tenant.

    Gateways ask Redis; this outlives it.
    """

    pool = models.CharField(max_length=63)
    digest = models.CharField(max_length=64)
    since = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["pool", "digest"], name="quarantine_once")]

    def __str__(self) -> str:
        return self.digest
