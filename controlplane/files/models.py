"""A tenant's files, and the uploads that files are assembled from.

The bytes are in the object store under the row's id. A row is made before its bytes and deleted
after them, so every object in the store has a row.
"""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now
from django.utils import timezone

from controlplane.tenancy.public_ids import PublicIdModel


class Purpose(models.TextChoices):
    """What a file is for; the names are OpenAI's."""

    FINE_TUNE = "fine-tune"
    BATCH = "batch"
    USER_DATA = "user_data"
    ASSISTANTS = "assistants"
    VISION = "vision"
    EVALS = "evals"
    #: Made by the platform, never by a client.
    BATCH_OUTPUT = "batch_output"
    #: The metrics of a fine-tuning job; also the platform's.
    FINE_TUNE_RESULTS = "fine-tune-results"


#: Of files that the platform makes.
MADE = (Purpose.BATCH_OUTPUT, Purpose.FINE_TUNE_RESULTS)


class File(PublicIdModel):
    """One file: uploading -> ready -> deleting, each by compare-and-set. Its bytes never change."""

    PREFIX = "file-"

    class Status(models.TextChoices):
        UPLOADING = "uploading"
        READY = "ready"
        DELETING = "deleting"

    purpose = models.CharField(max_length=20, choices=Purpose, blank=True)
    filename = models.CharField(max_length=255, blank=True)
    status = models.CharField(max_length=16, choices=Status, default=Status.UPLOADING)
    #: While it is uploaded: the most that it may have.
    num_bytes = models.BigIntegerField()
    sha256 = models.CharField(max_length=64, blank=True)
    #: Rows of a file for training; null for others.
    num_rows = models.PositiveIntegerField(null=True)
    expires_at = models.DateTimeField(null=True, db_index=True)
    #: While it is uploaded: the writer's last heartbeat.
    alive_at = models.DateTimeField(default=timezone.now, db_default=Now())

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "status", "id"]),
            # For the sweep.
            models.Index(
                fields=["created_at"], condition=~models.Q(status="ready"), name="files_unready"
            ),
        ]

    @property
    def key(self) -> str:
        """S3 key of the bytes."""
        return f"t/{self.tenant_id}/files/{self.pk.hex}"


class Upload(PublicIdModel):
    """A file uploaded in parts: pending -> assembling -> completed, or cancelled, or expired."""

    PREFIX = "upload_"

    class Status(models.TextChoices):
        PENDING = "pending"
        ASSEMBLING = "assembling"  # clients see it as pending
        COMPLETED = "completed"
        CANCELLED = "cancelled"
        EXPIRED = "expired"

    purpose = models.CharField(max_length=20, choices=Purpose)
    filename = models.CharField(max_length=255)
    mime_type = models.CharField(max_length=255)
    num_bytes = models.BigIntegerField()
    status = models.CharField(max_length=16, choices=Status, default=Status.PENDING)
    #: The upload's expiry. The file's, counted from its creation, is `file_expires_s`.
    expires_at = models.DateTimeField(db_index=True)
    file_expires_s = models.PositiveIntegerField(null=True)
    #: The file that it became or is being assembled into: the fencing token of the assembler.
    file = models.ForeignKey(File, null=True, on_delete=models.SET_NULL, related_name="+")

    class Meta:
        indexes = [models.Index(fields=["tenant", "status"])]


class UploadPart(PublicIdModel):
    """Some of an upload's bytes; the request that completes the upload gives the order."""

    PREFIX = "part_"

    upload = models.ForeignKey(Upload, on_delete=models.CASCADE, related_name="parts")
    is_ready = models.BooleanField(default=False)
    #: While its bytes arrive: the most that it may have.
    num_bytes = models.BigIntegerField()
    #: While they arrive: the writer's last heartbeat. None: abandoned.
    alive_at = models.DateTimeField(null=True, default=timezone.now, db_default=Now())

    class Meta:
        indexes = [
            # For the sweep.
            models.Index(
                fields=["created_at"],
                condition=models.Q(is_ready=False),
                name="files_parts_unready",
            ),
        ]

    @property
    def key(self) -> str:
        """S3 key of the bytes."""
        return f"t/{self.tenant_id}/uploads/{self.upload_id.hex}/{self.pk.hex}"
