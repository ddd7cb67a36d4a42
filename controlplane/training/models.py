"""Retraining: a tenant's datasets, the runs over them, and the schedules that start runs."""

from __future__ import annotations

from django.db import models

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.scoping import TenantModel
from controlplane.tenants.models import User, slug_validator


class Dataset(TenantModel):
    """A JSONL file of chats. Uploading under an existing name replaces what later runs read."""

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
        return f"t/{self.tenant_id}/datasets/{self.sha256}.jsonl"


class TrainingRun(TenantModel):
    """One fine-tuning of an adapter.

    queued -> running -> publishing -> succeeded | failed | cancelled, each by compare-and-set.
    """

    class Status(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        PUBLISHING = "publishing"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELLED = "cancelled"

    adapter = models.ForeignKey(Adapter, on_delete=models.CASCADE, related_name="training_runs")
    dataset = models.ForeignKey(Dataset, on_delete=models.PROTECT, related_name="+")
    #: The dataset's content when the run was made; a later upload does not change a run.
    dataset_sha256 = models.CharField(max_length=64)
    status = models.CharField(max_length=16, choices=Status, default=Status.QUEUED)
    hyperparameters = models.JSONField(default=dict)
    #: The last progress line of the trainer: step, steps, loss, learning_rate, tokens_per_s, eta_s.
    progress = models.JSONField(default=dict)
    error = models.CharField(max_length=1000, blank=True)
    cancel_requested = models.BooleanField(default=False)
    version = models.ForeignKey(
        AdapterVersion, null=True, on_delete=models.SET_NULL, related_name="training_runs"
    )
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["tenant", "created_at"])]

    def __str__(self) -> str:
        return f"{self.id} {self.status}"


class Schedule(TenantModel):
    """When an adapter is retrained: a cron line in a time zone."""

    adapter = models.OneToOneField(Adapter, on_delete=models.CASCADE, related_name="schedule")
    dataset = models.ForeignKey(Dataset, on_delete=models.PROTECT, related_name="+")
    cron = models.CharField(max_length=100)
    timezone = models.CharField(max_length=64, default="UTC")
    hyperparameters = models.JSONField(default=dict)
    is_paused = models.BooleanField(default=False)
    #: The next slot, UTC; `schedules_fire` moves it on with compare-and-set.
    next_run_at = models.DateTimeField(db_index=True)

    def __str__(self) -> str:
        return f"{self.cron} {self.timezone}"


class ScheduleRun(TenantModel):
    """That a schedule's slot was fired; unique, so a slot fires once."""

    schedule = models.ForeignKey(Schedule, on_delete=models.CASCADE, related_name="runs")
    slot = models.DateTimeField()
    training_run = models.OneToOneField(TrainingRun, on_delete=models.CASCADE, related_name="+")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["schedule", "slot"], name="schedule_slot_once"),
        ]

    def __str__(self) -> str:
        return f"{self.schedule_id} {self.slot}"
