import datetime

import django.core.validators
import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("adapters", "0001_initial"), ("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="DatasetContent",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("sha256", models.CharField(max_length=64)),
                ("num_bytes", models.BigIntegerField()),
                ("wanted_at", models.DateTimeField()),
                (
                    "previous",
                    models.CharField(blank=True, db_default="", default="", max_length=64),
                ),
                ("added", models.CharField(blank=True, db_default="", default="", max_length=64)),
                ("has_requests", models.BooleanField(db_default=False, default=False)),
            ],
            options={
                "indexes": [
                    models.Index(fields=["wanted_at"], name="training_da_wanted__dc60d3_idx")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "sha256"), name="dataset_content_once"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Dataset",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "name",
                    models.CharField(
                        max_length=63,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?\\Z",
                                "Use 1 to 63 lower-case letters, digits, dots, dashes or underscores; begin and end with a letter or digit.",
                            )
                        ],
                    ),
                ),
                ("version", models.PositiveIntegerField(db_default=1, default=1)),
                ("sha256", models.CharField(max_length=64)),
                ("num_bytes", models.BigIntegerField()),
                ("num_rows", models.PositiveIntegerField()),
                (
                    "report_status",
                    models.CharField(
                        choices=[("pending", "Pending"), ("ready", "Ready"), ("failed", "Failed")],
                        db_default="pending",
                        default="pending",
                        max_length=16,
                    ),
                ),
                ("report", models.JSONField(default=dict, null=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("report_status", "pending")),
                        fields=["updated_at"],
                        name="datasets_to_report_on",
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "name"), name="dataset_name_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="DatasetVersion",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "dataset",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="versions",
                        to="training.dataset",
                    ),
                ),
                ("number", models.PositiveIntegerField()),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("upload", "Upload"),
                            ("append", "Append"),
                            ("pull", "Pull"),
                            ("restore", "Restore"),
                        ],
                        max_length=16,
                    ),
                ),
                ("sha256", models.CharField(max_length=64)),
                ("num_bytes", models.BigIntegerField()),
                ("num_rows", models.PositiveIntegerField()),
                ("added_rows", models.PositiveIntegerField()),
                ("is_stored", models.BooleanField(default=True)),
                ("report", models.JSONField(null=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("dataset", "number"), name="dataset_version_once"
                    )
                ]
            },
        ),
        migrations.CreateModel(
            name="DatasetSource",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "name",
                    models.CharField(
                        max_length=63,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?\\Z",
                                "Use 1 to 63 lower-case letters, digits, dots, dashes or underscores; begin and end with a letter or digit.",
                            )
                        ],
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[("s3", "S3"), ("hub", "Hub"), ("captured", "Captured")],
                        max_length=8,
                    ),
                ),
                ("place", models.JSONField()),
                ("sealed", models.BinaryField()),
                ("cron", models.CharField(blank=True, max_length=100)),
                ("timezone", models.CharField(default="UTC", max_length=64)),
                ("next_pull_at", models.DateTimeField(db_index=True, null=True)),
                ("seen", models.JSONField(default=list)),
                ("fence", models.PositiveIntegerField(default=0)),
                ("lease_until", models.DateTimeField(null=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "name"), name="dataset_source_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="DatasetPull",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "source",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="pulls",
                        to="training.datasetsource",
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("running", "Running"),
                            ("unchanged", "Unchanged"),
                            ("added", "Added"),
                            ("failed", "Failed"),
                        ],
                        default="running",
                        max_length=16,
                    ),
                ),
                ("version", models.PositiveIntegerField(null=True)),
                ("added_rows", models.PositiveIntegerField(default=0)),
                ("error", models.CharField(blank=True, max_length=2000)),
                ("finished_at", models.DateTimeField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(fields=["source", "created_at"], name="dataset_pulls_of_source")
                ]
            },
        ),
        migrations.CreateModel(
            name="TrainingRun",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "adapter",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="training_runs",
                        to="adapters.adapter",
                    ),
                ),
                (
                    "dataset",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="training.dataset",
                    ),
                ),
                ("dataset_sha256", models.CharField(max_length=64)),
                ("dataset_version", models.PositiveIntegerField(null=True)),
                (
                    "validation_dataset",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="training.dataset",
                    ),
                ),
                (
                    "validation_sha256",
                    models.CharField(blank=True, db_default="", default="", max_length=64),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("queued", "Queued"),
                            ("paused", "Paused"),
                            ("running", "Running"),
                            ("publishing", "Publishing"),
                            ("succeeded", "Succeeded"),
                            ("failed", "Failed"),
                            ("cancelled", "Cancelled"),
                        ],
                        default="queued",
                        max_length=16,
                    ),
                ),
                ("hyperparameters", models.JSONField(default=dict)),
                ("progress", models.JSONField(default=dict)),
                ("error", models.CharField(blank=True, max_length=2000)),
                (
                    "error_code",
                    models.CharField(blank=True, db_default="", default="", max_length=64),
                ),
                (
                    "error_param",
                    models.CharField(blank=True, db_default="", default="", max_length=100),
                ),
                ("cancel_requested", models.BooleanField(default=False)),
                ("pause_requested", models.BooleanField(db_default=False, default=False)),
                ("num_pauses", models.PositiveSmallIntegerField(db_default=0, default=0)),
                ("num_lost", models.PositiveSmallIntegerField(db_default=0, default=0)),
                ("stored_step", models.PositiveIntegerField(null=True)),
                ("stored_bytes", models.PositiveBigIntegerField(db_default=0, default=0)),
                ("attempts", models.PositiveSmallIntegerField(default=0)),
                ("lease_until", models.DateTimeField(db_index=True, null=True)),
                (
                    "version",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="training_runs",
                        to="adapters.adapterversion",
                    ),
                ),
                (
                    "created_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                ("started_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
                ("num_rows", models.PositiveIntegerField(null=True)),
                ("training_file_id", models.UUIDField(null=True)),
                ("validation_file_id", models.UUIDField(null=True)),
                (
                    "warm_start",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="adapters.adapterversion",
                    ),
                ),
                (
                    "warm_start_name",
                    models.CharField(blank=True, db_default="", default="", max_length=80),
                ),
                ("metadata", models.JSONField(null=True)),
                ("trained_tokens", models.BigIntegerField(null=True)),
                ("result_file_id", models.UUIDField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant", "created_at"], name="training_tr_tenant__37b926_idx"
                    ),
                    models.Index(
                        condition=models.Q(
                            ("status__in", ("queued", "paused", "running", "publishing"))
                        ),
                        fields=["tenant", "status"],
                        name="training_runs_active",
                    ),
                    models.Index(
                        condition=models.Q(("stored_step__isnull", False)),
                        fields=["finished_at"],
                        name="training_runs_stored",
                    ),
                ]
            },
        ),
        migrations.CreateModel(
            name="TrainingEvent",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "run",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="events",
                        to="training.trainingrun",
                    ),
                ),
                (
                    "level",
                    models.CharField(
                        choices=[("info", "Info"), ("warn", "Warn"), ("error", "Error")],
                        default="info",
                        max_length=8,
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[("message", "Message"), ("metrics", "Metrics")],
                        default="message",
                        max_length=8,
                    ),
                ),
                ("message", models.CharField(max_length=2000)),
                ("data", models.JSONField(default=dict)),
            ],
            options={
                "indexes": [models.Index(fields=["run", "id"], name="training_events_of_run")]
            },
        ),
        migrations.CreateModel(
            name="TrainingCheckpoint",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="checkpoints",
                        to="training.trainingrun",
                    ),
                ),
                ("step", models.PositiveIntegerField()),
                ("metrics", models.JSONField(default=dict)),
                (
                    "version",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="checkpoint",
                        to="adapters.adapterversion",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("run", "step"), name="training_checkpoint_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="Schedule",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "adapter",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="schedule",
                        to="adapters.adapter",
                    ),
                ),
                (
                    "dataset",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.RESTRICT,
                        related_name="+",
                        to="training.dataset",
                    ),
                ),
                (
                    "validation_dataset",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.RESTRICT,
                        related_name="+",
                        to="training.dataset",
                    ),
                ),
                ("cron", models.CharField(max_length=100)),
                ("timezone", models.CharField(default="UTC", max_length=64)),
                ("hyperparameters", models.JSONField(default=dict)),
                ("is_paused", models.BooleanField(default=False)),
                ("skip_unchanged", models.BooleanField(db_default=True, default=True)),
                ("window", models.CharField(blank=True, db_default="", default="", max_length=11)),
                (
                    "misfire",
                    models.CharField(
                        choices=[
                            ("run_once", "run once as soon as possible"),
                            ("skip", "wait for the next slot"),
                        ],
                        db_default="run_once",
                        default="run_once",
                        max_length=16,
                    ),
                ),
                (
                    "grace",
                    models.DurationField(
                        db_default=datetime.timedelta(seconds=3600),
                        default=datetime.timedelta(seconds=3600),
                    ),
                ),
                ("max_runs_per_day", models.PositiveSmallIntegerField(null=True)),
                ("next_run_at", models.DateTimeField(db_index=True)),
                ("owed_slot", models.DateTimeField(null=True)),
                ("not_before", models.DateTimeField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name="ScheduleRun",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "schedule",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="runs",
                        to="training.schedule",
                    ),
                ),
                ("slot", models.DateTimeField()),
                (
                    "training_run",
                    models.OneToOneField(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="schedule_run",
                        to="training.trainingrun",
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[("ran", "Ran"), ("skipped", "Skipped"), ("missed", "Missed")],
                        db_default="ran",
                        default="ran",
                        max_length=16,
                    ),
                ),
                (
                    "reason",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("unchanged", "nothing is new since the last run that succeeded"),
                            ("runs_per_day", "the schedule's runs of 24 hours were used up"),
                            ("merged", "a later slot ran for it"),
                            ("busy", "the adapter's last run had not ended"),
                            ("quota", "the organization's quota of training runs was used up"),
                            ("window", "its window was closed"),
                            ("base_model", "its base model is switched off or shut down"),
                            ("late", "the platform was down or late"),
                        ],
                        db_default="",
                        default="",
                        max_length=16,
                    ),
                ),
                (
                    "trigger",
                    models.CharField(
                        choices=[("clock", "Clock"), ("manual", "run now")],
                        db_default="clock",
                        default="clock",
                        max_length=16,
                    ),
                ),
                ("rows_before", models.PositiveIntegerField(null=True)),
                ("concluded_at", models.DateTimeField(null=True)),
                ("reported_at", models.DateTimeField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(fields=["tenant", "slot"], name="schedule_runs_by_slot"),
                    models.Index(
                        condition=models.Q(("reported_at", None)),
                        fields=["created_at"],
                        name="schedule_runs_unreported",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("schedule", "slot"), name="schedule_slot_once")
                ],
            },
        ),
        TenantTables(
            "DatasetContent",
            "Dataset",
            "DatasetVersion",
            "DatasetSource",
            "DatasetPull",
            "TrainingRun",
            "TrainingEvent",
            "TrainingCheckpoint",
            "Schedule",
            "ScheduleRun",
        ),
    ]
