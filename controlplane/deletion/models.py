"""The record of deleted tenants. It is the platform's own, and stays."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q
from django.utils import timezone

from controlplane.tenancy.scoping import new_id

_IS_OPEN = Q(status__in=("scheduled", "running"))


class TenantDeletion(models.Model):
    """One deletion of a tenant: scheduled -> running -> done, or scheduled -> restored."""

    class Status(models.TextChoices):
        SCHEDULED = "scheduled"
        RUNNING = "running"
        DONE = "done"
        RESTORED = "restored"

    #: The states of a tenant that is marked for deletion.
    OPEN = (Status.SCHEDULED, Status.RUNNING)

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    #: No foreign key: the record needs nothing of the tenant.
    tenant_id = models.UUIDField(db_index=True)
    slug = models.CharField(max_length=63)
    status = models.CharField(max_length=16, choices=Status, default=Status.SCHEDULED)
    #: The tenant's status before, which a restored one gets back.
    status_before = models.CharField(max_length=16)
    #: The address of the operator, or the name of a command.
    requested_by = models.CharField(max_length=320)
    requested_at = models.DateTimeField(auto_now_add=True)
    #: Until then it can be undone; at once: never.
    due_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    restored_at = models.DateTimeField(null=True)
    #: The names of the steps that are done.
    steps = models.JSONField(default=list)
    #: Numbers of deleted rows by table, of objects, people and Redis keys.
    counts = models.JSONField(default=dict)
    #: Bytes of the deleted objects.
    num_bytes = models.BigIntegerField(default=0)
    #: The error of the last attempt; empty: none.
    error = models.CharField(max_length=500, blank=True)
    #: Until then the task that works on it counts as alive; when it is done, the time of the next
    #: search for late data.
    lease_until = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["due_at"], condition=_IS_OPEN, name="deletions_open")]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant_id"],
                condition=_IS_OPEN,
                name="deletion_open_once",
            )
        ]

    def __str__(self) -> str:
        return f"{self.slug} {self.status}"

    @property
    def can_be_undone(self) -> bool:
        """Return whether its grace period is not over and no task has begun."""
        # Not by the clock alone: that of another machine may be behind.
        now = max(timezone.now(), self.requested_at)
        return self.status == self.Status.SCHEDULED and now < self.due_at

    def count(self, what: str, number: int) -> None:
        """Add to `counts`; the caller saves."""
        counts: dict[str, Any] = self.counts
        if number:
            counts[what] = counts.get(what, 0) + number
