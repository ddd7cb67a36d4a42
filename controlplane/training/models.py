"""Retraining: a tenant's datasets, the runs over them, and the schedules that start runs."""

from __future__ import annotations

import uuid

from django.db import models

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.tenancy.scoping import TenantModel
from controlplane.tenants.models import User, slug_validator


def dataset_key(tenant_id: uuid.UUID, sha256: str) -> str:
    """Return the S3 key of a dataset's rows."""
    return f"t/{tenant_id}/datasets/{sha256}.jsonl"


class DatasetContent(TenantModel):
    """Rows in the object store: a dataset's current ones, or older ones that a run still needs.

    It is made before its bytes and deleted after them: see `training.contents`.
    """

    sha256 = models.CharField(max_length=64)
    num_bytes = models.BigIntegerField()
    #: When an upload last needed it; set before the bytes are uploaded.
    wanted_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "sha256"], name="dataset_content_once"),
        ]
        indexes = [models.Index(fields=["wanted_at"])]

    def __str__(self) -> str:
        return self.sha256


class Dataset(TenantModel):
    """A JSONL file of chats. An upload under an existing name replaces it for later runs."""

    name = models.CharField(max_length=63, validators=[slug_validator])
    sha256 = models.CharField(max_length=64)
    num_bytes = models.BigIntegerField()
    num_rows = models.PositiveIntegerField()
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "name"], name="dataset_name_once"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> str:
        """S3 key of the rows."""
        return dataset_key(self.tenant_id, self.sha256)


class TrainingRun(TenantModel):
    """One fine-tuning of an adapter.

    queued -> running -> publishing -> succeeded | failed | cancelled, each by compare-and-set.

    The trainer that moved a run to `running` owns it as long as `attempts` keeps its value: the
    writes of a trainer that was considered lost and comes back are refused.
    """

    class Status(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        PUBLISHING = "publishing"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELLED = "cancelled"

    #: The statuses of runs that have not ended.
    ACTIVE = (Status.QUEUED, Status.RUNNING, Status.PUBLISHING)

    adapter = models.ForeignKey(Adapter, on_delete=models.CASCADE, related_name="training_runs")
    #: None: it was deleted, after the run had ended.
    dataset = models.ForeignKey(Dataset, null=True, on_delete=models.SET_NULL, related_name="+")
    #: The dataset's content when the run was made; a later upload does not change a run.
    dataset_sha256 = models.CharField(max_length=64)
    status = models.CharField(max_length=16, choices=Status, default=Status.QUEUED)
    hyperparameters = models.JSONField(default=dict)
    #: The last progress line of the trainer: step, steps, loss, learning_rate, tokens_per_s, eta_s;
    #: and losses, the `LossCurve` so far.
    progress = models.JSONField(default=dict)
    error = models.CharField(max_length=2000, blank=True)
    cancel_requested = models.BooleanField(default=False)
    #: How often it was started.
    attempts = models.PositiveSmallIntegerField(default=0)
    #: After this time an active run counts as lost: its message, or its trainer.
    lease_until = models.DateTimeField(null=True, db_index=True)
    version = models.ForeignKey(
        AdapterVersion, null=True, on_delete=models.SET_NULL, related_name="training_runs"
    )
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "created_at"]),
            # Active runs: counted at admission, and searched for the next one.
            models.Index(
                fields=["tenant", "status"],
                condition=models.Q(status__in=("queued", "running", "publishing")),
                name="training_runs_active",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id} {self.status}"

    @property
    def dataset_key(self) -> str:
        """S3 key of the rows it trains on."""
        return dataset_key(self.tenant_id, self.dataset_sha256)


class Schedule(TenantModel):
    """The times of an adapter's retraining: a cron line in a time zone."""

    adapter = models.OneToOneField(Adapter, on_delete=models.CASCADE, related_name="schedule")
    dataset = models.ForeignKey(Dataset, on_delete=models.RESTRICT, related_name="+")
    cron = models.CharField(max_length=100)
    timezone = models.CharField(max_length=64, default="UTC")
    hyperparameters = models.JSONField(default=dict)
    is_paused = models.BooleanField(default=False)
    #: The next slot, UTC; `schedules_fire` advances it under a row lock.
    next_run_at = models.DateTimeField(db_index=True)

    def __str__(self) -> str:
        return f"{self.cron} {self.timezone}"


class ScheduleRun(TenantModel):
    """A fired slot of a schedule; unique, so a slot fires only once."""

    schedule = models.ForeignKey(Schedule, on_delete=models.CASCADE, related_name="runs")
    slot = models.DateTimeField()
    training_run = models.OneToOneField(TrainingRun, on_delete=models.CASCADE, related_name="+")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["schedule", "slot"], name="schedule_slot_once"),
        ]

    def __str__(self) -> str:
        return f"{self.schedule_id} {self.slot}"
