"""Batches: files of requests that are answered with the capacity that others leave."""

from __future__ import annotations

import uuid

from django.db import models

from controlplane.files.models import File
from controlplane.tenancy.public_ids import PublicIdModel, public_id
from controlplane.tenancy.scoping import TenantModel
from controlplane.tenants.models import ApiKey


class Batch(PublicIdModel):
    """One batch.

    validating -> in_progress -> finalizing -> completed | expired | failed, or from the first two
    cancelling -> cancelled; a file that is no batch: validating -> failed.

    Its runner has a lease on the row (`leases`), with `fence` as its fencing token.
    """

    MODEL_FIELD = "model"

    PREFIX = "batch_"

    class Status(models.TextChoices):
        VALIDATING = "validating"
        FAILED = "failed"
        IN_PROGRESS = "in_progress"
        FINALIZING = "finalizing"
        COMPLETED = "completed"
        EXPIRED = "expired"
        CANCELLING = "cancelling"
        CANCELLED = "cancelled"

    #: The states in which work is left.
    ACTIVE = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)

    #: The key that makes the requests and is billed; without it the batch fails.
    api_key = models.ForeignKey(ApiKey, null=True, on_delete=models.SET_NULL, related_name="+")
    #: The pool that answers it and has its replies in Redis: the pool of the process that accepted
    #: it. Empty in old rows: the first pool that takes such a batch up keeps it.
    pool = models.CharField(max_length=63, blank=True, default="", db_default="")
    endpoint = models.CharField(max_length=64)
    # No foreign keys: a batch is shown as it was, also when its files are gone.
    input_file_id = models.UUIDField()
    output_file_id = models.UUIDField(null=True)
    error_file_id = models.UUIDField(null=True)
    metadata = models.JSONField(null=True)
    #: Seconds until its output files expire; None: the default of such files.
    output_expires_s = models.PositiveIntegerField(null=True)
    status = models.CharField(max_length=16, choices=Status, default=Status.VALIDATING)
    #: Its last status, once its files are written.
    ends_as = models.CharField(max_length=16, choices=Status, blank=True)
    #: The one model that its lines name; empty when they name several.
    model = models.CharField(max_length=200, blank=True)
    #: [{"code", "message", "param", "line"}, …]
    errors = models.JSONField(default=list)

    num_lines = models.PositiveIntegerField(default=0)
    num_completed = models.PositiveIntegerField(default=0)
    num_failed = models.PositiveIntegerField(default=0)
    prompt_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0)
    completion_tokens = models.BigIntegerField(default=0)
    thought_tokens = models.BigIntegerField(default=0)

    expires_at = models.DateTimeField()
    in_progress_at = models.DateTimeField(null=True)
    finalizing_at = models.DateTimeField(null=True)
    completed_at = models.DateTimeField(null=True)
    failed_at = models.DateTimeField(null=True)
    expired_at = models.DateTimeField(null=True)
    cancelling_at = models.DateTimeField(null=True)
    cancelled_at = models.DateTimeField(null=True)

    lease_until = models.DateTimeField(null=True)
    fence = models.PositiveIntegerField(default=0)

    class Meta:
        indexes = [
            models.Index(
                fields=["tenant", "id"],
                condition=models.Q(
                    status__in=["validating", "in_progress", "finalizing", "cancelling"]
                ),
                name="batches_active",
            )
        ]

    @property
    def has_ended(self) -> bool:
        return self.status not in self.ACTIVE


class BatchResult(TenantModel):
    """The result of one line, until it is in a file. Unique, so a line is in the files once."""

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="results")
    #: Counts from 1.
    line = models.PositiveIntegerField()
    is_error = models.BooleanField()
    #: Its line in the output or error file.
    output = models.TextField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["batch", "line"], name="batch_line_once"),
        ]

    def __str__(self) -> str:
        return f"{self.batch_id} {self.line}"


def timestamp_field(status: str) -> str:
    """Return the name of the field that says when a batch came to a status."""
    return f"{status}_at"


def file_id(pk: uuid.UUID | None) -> str | None:
    """Return a file's id as clients see it."""
    return None if pk is None else public_id(File.PREFIX, pk)
