"""Retraining: a tenant's datasets, the runs over them, and the schedules that start runs."""

from __future__ import annotations

import datetime as dt
import uuid

from django.db import models

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.tenancy.public_ids import PublicIdModel
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
    #: Bytes of its own object; 0: it has none, because it is made of two others.
    num_bytes = models.BigIntegerField()
    #: Time when an upload last needed it; set before the bytes are uploaded.
    wanted_at = models.DateTimeField()
    #: Digests of the parts of rows with appended ones: of the earlier rows, which may be made of
    #: two parts, too, and of the added rows, which have an object. Else both empty.
    previous = models.CharField(max_length=64, blank=True, default="", db_default="")
    added = models.CharField(max_length=64, blank=True, default="", db_default="")
    #: True if it has words of captured requests: reading them needs `requests:content`.
    has_requests = models.BooleanField(default=False, db_default=False)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "sha256"], name="dataset_content_once"),
        ]
        indexes = [models.Index(fields=["wanted_at"])]

    def __str__(self) -> str:
        return self.sha256


class Dataset(TenantModel):
    """Chats as JSONL, in versions that never change; its fields are those of the current one."""

    class ReportStatus(models.TextChoices):
        PENDING = "pending"
        READY = "ready"
        FAILED = "failed"

    name = models.CharField(max_length=63, validators=[slug_validator])
    #: The current version's number.
    version = models.PositiveIntegerField(default=1, db_default=1)
    sha256 = models.CharField(max_length=64)
    num_bytes = models.BigIntegerField()
    num_rows = models.PositiveIntegerField()
    report_status = models.CharField(
        max_length=16, choices=ReportStatus, default=ReportStatus.PENDING, db_default="pending"
    )
    #: The result of `worker.dataset_report`, and `made_at`; or `error`. None as {}: rows that a
    #: process of the release before writes.
    report = models.JSONField(null=True, default=dict)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "name"], name="dataset_name_once"),
        ]
        indexes = [
            models.Index(
                fields=["updated_at"],
                condition=models.Q(report_status="pending"),
                name="datasets_to_report_on",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> str:
        """Return the S3 key of the rows if nothing was appended; see `contents.pieces`."""
        return dataset_key(self.tenant_id, self.sha256)


class DatasetVersion(TenantModel):
    """A dataset's rows as they were from one change to the next: see `training.versions`."""

    class Kind(models.TextChoices):
        UPLOAD = "upload"  # replaced all rows
        APPEND = "append"
        PULL = "pull"
        RESTORE = "restore"  # has an earlier version's rows

    dataset = models.ForeignKey(Dataset, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    kind = models.CharField(max_length=16, choices=Kind)
    sha256 = models.CharField(max_length=64)
    num_bytes = models.BigIntegerField()
    num_rows = models.PositiveIntegerField()
    #: Number of rows that the version before does not have; all, unless they were appended.
    added_rows = models.PositiveIntegerField()
    #: False: its rows were replaced, and are removed when no run reads them.
    is_stored = models.BooleanField(default=True)
    #: The dataset's report when the version was current; null: it ended before the report.
    report = models.JSONField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["dataset", "number"], name="dataset_version_once"),
        ]

    def __str__(self) -> str:
        return f"{self.dataset.name}@{self.number}"


class DatasetSource(TenantModel):
    """The source of a dataset's rows, and the times of pulls: see `training.pulls`."""

    class Kind(models.TextChoices):
        S3 = "s3"
        HUB = "hub"
        CAPTURED = "captured"

    #: The dataset's name; the first pull makes the dataset.
    name = models.CharField(max_length=63, validators=[slug_validator])
    kind = models.CharField(max_length=8, choices=Kind)
    #: The public part: endpoint, region, bucket, prefix; or repository, revision, prefix.
    place = models.JSONField()
    #: The credentials, encrypted.
    sealed = models.BinaryField()
    #: Empty: it is pulled on request.
    cron = models.CharField(max_length=100, blank=True)
    timezone = models.CharField(max_length=64, default="UTC")
    #: Time of the next pull, UTC; null: none is planned.
    next_pull_at = models.DateTimeField(null=True, db_index=True)
    #: The objects that the current rows have, in their order: [name, tag, sha256, bytes].
    seen = models.JSONField(default=list)
    # A process that pulls has the lease: `tenancy.row_lease`.
    fence = models.PositiveIntegerField(default=0)
    lease_until = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "name"], name="dataset_source_once"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class DatasetPull(TenantModel):
    """One pull, with its result; the last ones of each source are kept."""

    class Status(models.TextChoices):
        RUNNING = "running"
        UNCHANGED = "unchanged"
        ADDED = "added"
        FAILED = "failed"

    source = models.ForeignKey(DatasetSource, on_delete=models.CASCADE, related_name="pulls")
    status = models.CharField(max_length=16, choices=Status, default=Status.RUNNING)
    #: The version that it made.
    version = models.PositiveIntegerField(null=True)
    added_rows = models.PositiveIntegerField(default=0)
    error = models.CharField(max_length=2000, blank=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["source", "created_at"], name="dataset_pulls_of_source")]

    def __str__(self) -> str:
        return f"{self.source_id} {self.status}"


class TrainingRun(PublicIdModel):
    """One fine-tuning of an adapter.

    queued -> running -> publishing -> succeeded | failed | cancelled, each by compare-and-set.

    The trainer that moved a run to `running` owns it as long as `attempts` keeps its value: the
    writes of a trainer that was considered lost and comes back are refused.
    """

    #: Prefix of its id in /v1/fine_tuning/jobs; /api/v1 has the plain UUID.
    PREFIX = "ftjob-"
    MODEL_FIELD = "adapter__name"

    class Status(models.TextChoices):
        QUEUED = "queued"
        PAUSED = "paused"
        RUNNING = "running"
        PUBLISHING = "publishing"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELLED = "cancelled"

    #: The statuses of runs that have not ended.
    ACTIVE = (Status.QUEUED, Status.PAUSED, Status.RUNNING, Status.PUBLISHING)

    adapter = models.ForeignKey(Adapter, on_delete=models.CASCADE, related_name="training_runs")
    #: None: it was deleted, after the run had ended; or the rows are a file's.
    dataset = models.ForeignKey(Dataset, null=True, on_delete=models.SET_NULL, related_name="+")
    #: The dataset's content when the run was made; a later upload does not change a run.
    dataset_sha256 = models.CharField(max_length=64)
    #: Null: the rows are a file's.
    dataset_version = models.PositiveIntegerField(null=True)
    #: The rows to validate with; None: a file's, a share of the dataset's, or none. As with the
    #: dataset, those of when the run was made.
    validation_dataset = models.ForeignKey(
        Dataset, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    validation_sha256 = models.CharField(max_length=64, blank=True, default="", db_default="")
    status = models.CharField(max_length=16, choices=Status, default=Status.QUEUED)
    hyperparameters = models.JSONField(default=dict)
    #: The last progress line of the trainer: step, steps, loss, learning_rate, tokens_per_s, eta_s;
    #: and losses, the `LossCurve` so far, validation_losses, best_step, best_loss; and rows,
    #: truncated_rows and the like, as `worker.train` counts them at its start.
    progress = models.JSONField(default=dict)
    error = models.CharField(max_length=2000, blank=True)
    #: The kind of error, and the field of the request that has it, where known.
    error_code = models.CharField(max_length=64, blank=True, default="", db_default="")
    error_param = models.CharField(max_length=100, blank=True, default="", db_default="")
    cancel_requested = models.BooleanField(default=False)
    #: A running one becomes `paused` within seconds.
    pause_requested = models.BooleanField(default=False, db_default=False)
    #: Number of pauses while it ran: attempts that were not lost.
    num_pauses = models.PositiveSmallIntegerField(default=0, db_default=0)
    #: Number of attempts in a row whose trainer was lost before a new state was saved.
    num_lost = models.PositiveSmallIntegerField(default=0, db_default=0)
    #: The step of the newest state that was sent to the object store; null: none is there.
    stored_step = models.PositiveIntegerField(null=True)
    #: The bytes of that state, which count in the tenant's storage.
    stored_bytes = models.PositiveBigIntegerField(default=0, db_default=0)
    #: Number of starts.
    attempts = models.PositiveSmallIntegerField(default=0)
    #: After this time an active run counts as lost: its message, or its trainer.
    lease_until = models.DateTimeField(null=True, db_index=True)
    version = models.ForeignKey(
        AdapterVersion, null=True, on_delete=models.SET_NULL, related_name="training_runs"
    )
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    #: Number of rows that it trains on; null in old runs.
    num_rows = models.PositiveIntegerField(null=True)
    # Files of /v1/files whose rows it has. No foreign keys: a job is shown as it was.
    training_file_id = models.UUIDField(null=True)
    validation_file_id = models.UUIDField(null=True)
    #: The version whose tensors it begins from. None with a name: it was deleted.
    warm_start = models.ForeignKey(
        AdapterVersion, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    #: As in `model` of a request: `name@n`; empty: it begins from PEFT's initial adapter.
    warm_start_name = models.CharField(max_length=80, blank=True, default="", db_default="")
    metadata = models.JSONField(null=True)
    #: Number of tokens read, repetitions included; null until it has ended.
    trained_tokens = models.BigIntegerField(null=True)
    #: The CSV of its metrics, a file of /v1/files.
    result_file_id = models.UUIDField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["tenant", "created_at"]),
            # Active runs: counted at admission, and searched for the next one.
            models.Index(
                fields=["tenant", "status"],
                condition=models.Q(status__in=("queued", "paused", "running", "publishing")),
                name="training_runs_active",
            ),
            models.Index(
                fields=["finished_at"],
                condition=models.Q(stored_step__isnull=False),
                name="training_runs_stored",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.adapter.name}, {self.created_at:%Y-%m-%d %H:%M}"


class TrainingEvent(PublicIdModel):
    """Something that happened to a run, or a step's metrics: see `training.events`."""

    PREFIX = "ftevent-"
    MODEL_FIELD = "run__adapter__name"

    class Level(models.TextChoices):
        INFO = "info"
        WARN = "warn"
        ERROR = "error"

    class Kind(models.TextChoices):
        MESSAGE = "message"
        METRICS = "metrics"

    run = models.ForeignKey(
        TrainingRun, on_delete=models.CASCADE, related_name="events", db_index=False
    )
    level = models.CharField(max_length=8, choices=Level, default=Level.INFO)
    kind = models.CharField(max_length=8, choices=Kind, default=Kind.MESSAGE)
    message = models.CharField(max_length=2000)
    data = models.JSONField(default=dict)

    class Meta:
        indexes = [models.Index(fields=["run", "id"], name="training_events_of_run")]


class TrainingCheckpoint(TenantModel):
    """The adapter after a step of a run, kept as a version: see `training.kept_adapters`.

    It is deleted with its version or its run; at most `checkpoints` of a run's hyperparameters.
    """

    MODEL_FIELD = "run__adapter__name"
    run = models.ForeignKey(TrainingRun, on_delete=models.CASCADE, related_name="checkpoints")
    step = models.PositiveIntegerField()
    #: train_loss, and full_valid_loss if the step was validated.
    metrics = models.JSONField(default=dict)
    version = models.OneToOneField(
        AdapterVersion, on_delete=models.CASCADE, related_name="checkpoint"
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "step"], name="training_checkpoint_once"),
        ]

    def __str__(self) -> str:
        return f"{self.run_id} after step {self.step}"


class Schedule(TenantModel):
    """The times of an adapter's retraining: a cron line in a time zone, and its rules."""

    class Misfire(models.TextChoices):
        """The rule for slots that could not run within the grace period."""

        RUN_ONCE = "run_once", "run once as soon as possible"
        SKIP = "skip", "wait for the next slot"

    MODEL_FIELD = "adapter__name"
    adapter = models.OneToOneField(Adapter, on_delete=models.CASCADE, related_name="schedule")
    dataset = models.ForeignKey(Dataset, on_delete=models.RESTRICT, related_name="+")
    validation_dataset = models.ForeignKey(
        Dataset, null=True, on_delete=models.RESTRICT, related_name="+"
    )
    cron = models.CharField(max_length=100)
    timezone = models.CharField(max_length=64, default="UTC")
    hyperparameters = models.JSONField(default=dict)
    is_paused = models.BooleanField(default=False)
    #: True if slots are skipped when nothing is new since the adapter's last run.
    skip_unchanged = models.BooleanField(default=True, db_default=True)
    #: The hours of the day in which its runs may begin, `22:00-06:00` in its time zone; "": all.
    window = models.CharField(max_length=11, blank=True, default="", db_default="")
    misfire = models.CharField(
        max_length=16, choices=Misfire, default=Misfire.RUN_ONCE, db_default="run_once"
    )
    #: Time by which a slot may be late.
    grace = models.DurationField(default=dt.timedelta(hours=1), db_default=dt.timedelta(hours=1))
    #: Slots that run in 24 hours at most; None: all.
    max_runs_per_day = models.PositiveSmallIntegerField(null=True)
    #: The next slot, UTC; `schedules_fire` advances it under a row lock.
    next_run_at = models.DateTimeField(db_index=True)
    #: A missed slot that is to run as soon as possible.
    owed_slot = models.DateTimeField(null=True)
    #: End of the time in which its window is closed.
    not_before = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.adapter.name}, {self.cron} {self.timezone}"


class ScheduleRun(TenantModel):
    """The outcome of one slot of a schedule; unique, so a slot fires only once.

    `training.history` bounds their number.
    """

    class Status(models.TextChoices):
        RAN = "ran"
        SKIPPED = "skipped"
        MISSED = "missed"

    class Reason(models.TextChoices):
        UNCHANGED = "unchanged", "nothing is new since the last run that succeeded"
        DAY = "runs_per_day", "the schedule's runs of 24 hours were used up"
        MERGED = "merged", "a later slot ran for it"
        BUSY = "busy", "the adapter's last run had not ended"
        QUOTA = "quota", "the organization's quota of training runs was used up"
        WINDOW = "window", "its window was closed"
        BASE_MODEL = "base_model", "its base model is switched off or shut down"
        LATE = "late", "the platform was down or late"

    class Trigger(models.TextChoices):
        CLOCK = "clock"
        MANUAL = "manual", "run now"

    MODEL_FIELD = "schedule__adapter__name"
    schedule = models.ForeignKey(Schedule, on_delete=models.CASCADE, related_name="runs")
    slot = models.DateTimeField()
    training_run = models.OneToOneField(
        TrainingRun, null=True, on_delete=models.CASCADE, related_name="schedule_run"
    )
    status = models.CharField(max_length=16, choices=Status, default=Status.RAN, db_default="ran")
    reason = models.CharField(max_length=16, choices=Reason, blank=True, default="", db_default="")
    trigger = models.CharField(
        max_length=16, choices=Trigger, default=Trigger.CLOCK, db_default="clock"
    )
    #: Number of the dataset's rows at the adapter's run before; None: it had none.
    rows_before = models.PositiveIntegerField(null=True)
    #: Time when it was finished: its run ended.
    concluded_at = models.DateTimeField(null=True)
    #: Time of the morning's event that includes it.
    reported_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["schedule", "slot"], name="schedule_slot_once"),
        ]
        indexes = [
            models.Index(fields=["tenant", "slot"], name="schedule_runs_by_slot"),
            models.Index(
                fields=["created_at"],
                condition=models.Q(reported_at=None),
                name="schedule_runs_unreported",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.schedule_id} {self.slot}"

    @property
    def state(self) -> str:
        """Return the state to show: the status, or that of the run that it started."""
        run = self.training_run
        return run.status if self.status == self.Status.RAN and run is not None else self.status

    @property
    def why(self) -> str:
        """Return the reason in words; "" if there is none."""
        return str(self.Reason(self.reason).label) if self.reason else ""
