"""A tenant's files, and the uploads that files are put together from.

The bytes lie in the object store under the row's id. A row is there before its bytes and goes
after them, so nothing in the store is without a row that leads to it.
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


class File(PublicIdModel):
    """One file: uploading -> ready -> deleting, each by compare-and-set. Its bytes never change."""

    PREFIX = "file-"

    class Status(models.TextChoices):
        UPLOADING = "uploading"
        READY = "ready"
        DELETING = "deleting"

    purpose = models.CharField(max_length=16, choices=Purpose, blank=True)
    filename = models.CharField(max_length=255, blank=True)
    status = models.CharField(max_length=16, choices=Status, default=Status.UPLOADING)
    #: While it is uploaded, what it may become.
    num_bytes = models.BigIntegerField()
    sha256 = models.CharField(max_length=64, blank=True)
    expires_at = models.DateTimeField(null=True, db_index=True)
    #: While it is uploaded: when whoever writes it last said that it does.
    alive_at = models.DateTimeField(default=timezone.now, db_default=Now())

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "status", "id"]),
            # What the sweep looks for.
            models.Index(
                fields=["created_at"], condition=~models.Q(status="ready"), name="files_unready"
            ),
        ]

    @property
    def key(self) -> str:
        """S3 key of the bytes."""
        return f"t/{self.tenant_id}/files/{self.pk.hex}"


class Upload(PublicIdModel):
    """A file that comes in parts: pending -> assembling -> completed, or cancelled, or expired."""

    PREFIX = "upload_"

    class Status(models.TextChoices):
        PENDING = "pending"
        ASSEMBLING = "assembling"  # clients see it as pending
        COMPLETED = "completed"
        CANCELLED = "cancelled"
        EXPIRED = "expired"

    purpose = models.CharField(max_length=16, choices=Purpose)
    filename = models.CharField(max_length=255)
    mime_type = models.CharField(max_length=255)
    num_bytes = models.BigIntegerField()
    status = models.CharField(max_length=16, choices=Status, default=Status.PENDING)
    #: Of the upload; what the client wants of the file is `file_expires_s`, from its creation on.
    expires_at = models.DateTimeField(db_index=True)
    file_expires_s = models.PositiveIntegerField(null=True)
    #: What it became or, while it is assembled, may become: the fence of whoever assembles it.
    file = models.ForeignKey(File, null=True, on_delete=models.SET_NULL, related_name="+")

    class Meta:
        indexes = [models.Index(fields=["tenant", "status"])]


class UploadPart(PublicIdModel):
    """Some of an upload's bytes; which part comes where is said at the end."""

    PREFIX = "part_"

    upload = models.ForeignKey(Upload, on_delete=models.CASCADE, related_name="parts")
    is_ready = models.BooleanField(default=False)
    #: While its bytes come, what they may be.
    num_bytes = models.BigIntegerField()
    #: While they come: when whoever writes them last said that it does. None: given up.
    alive_at = models.DateTimeField(null=True, default=timezone.now, db_default=Now())

    class Meta:
        indexes = [
            # What the sweep looks for.
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
