"""Requests that were given up, for people to look at and to try again."""

from __future__ import annotations

from django.db import models

from controlplane.scoping import TenantModel


class DeadLetter(TenantModel):
    """A request that ended every worker that ran it."""

    request_id = models.CharField(max_length=64, unique=True)
    model = models.CharField(max_length=200)
    adapter_version_id = models.UUIDField(null=True)
    worker_id = models.CharField(max_length=200, blank=True)
    reason = models.CharField(max_length=500)
    #: The job as it was sent, prompt and all.
    job = models.JSONField()
    requeued_at = models.DateTimeField(null=True, blank=True)
    requeued_as = models.CharField(max_length=64, blank=True)

    class Meta:
        indexes = [models.Index(fields=["tenant", "created_at"])]

    def __str__(self) -> str:
        return self.request_id
