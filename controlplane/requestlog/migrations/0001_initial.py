import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="LogPolicy",
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
                    "content",
                    models.CharField(
                        choices=[("off", "Off"), ("on_request", "On Request"), ("all", "All")],
                        default="off",
                        max_length=16,
                    ),
                ),
                ("content_days", models.PositiveSmallIntegerField(default=30)),
                ("metadata_days", models.PositiveSmallIntegerField(default=90)),
                ("wrapped_key", models.BinaryField(default=bytes, max_length=200)),
                ("key_made_at", models.DateTimeField(null=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("tenant",), name="log_policy_once")]
            },
        ),
        migrations.CreateModel(
            name="RequestContent",
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
                ("request_id", models.CharField(max_length=64, unique=True)),
                ("sealed", models.BinaryField()),
                ("num_bytes", models.PositiveIntegerField()),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant", "created_at"], name="requestlog__tenant__b58c40_idx"
                    )
                ]
            },
        ),
        migrations.CreateModel(
            name="RefusalHour",
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
                ("starts_at", models.DateTimeField()),
                ("endpoint", models.CharField(max_length=64)),
                ("status", models.PositiveSmallIntegerField()),
                ("code", models.CharField(max_length=64)),
                ("requests", models.PositiveBigIntegerField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "starts_at", "endpoint", "status", "code"),
                        name="refusal_hour_once",
                    )
                ]
            },
        ),
        migrations.CreateModel(
            name="CapturePolicy",
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
                ("share", models.FloatField(default=0)),
                ("shares", models.JSONField(default=dict)),
                ("days", models.PositiveSmallIntegerField(default=30)),
                ("max_rows", models.PositiveIntegerField(default=10000)),
                ("max_bytes", models.PositiveBigIntegerField(default=67108864)),
                ("wrapped_key", models.BinaryField(default=bytes, max_length=200)),
                ("updated_at", models.DateTimeField(auto_now=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("tenant",), name="capture_policy_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="CapturedRequest",
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
                ("request_id", models.CharField(max_length=64, unique=True)),
                ("model", models.CharField(max_length=200)),
                ("sealed", models.BinaryField()),
                ("sealed_answer", models.BinaryField(default=bytes)),
                ("num_bytes", models.PositiveIntegerField()),
                (
                    "rating",
                    models.CharField(
                        blank=True,
                        choices=[("good", "Good"), ("bad", "Bad")],
                        default="",
                        max_length=8,
                    ),
                ),
                (
                    "datasets",
                    models.JSONField(
                        blank=True, db_default=models.Value([], models.JSONField()), default=list
                    ),
                ),
                ("is_rated", models.BooleanField(default=False)),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant", "is_rated", "created_at"], name="captured_make_room"
                    ),
                    models.Index(fields=["tenant", "created_at"], name="captured_by_age"),
                ]
            },
        ),
        migrations.CreateModel(
            name="Feedback",
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
                ("request_id", models.CharField(max_length=64)),
                ("model", models.CharField(max_length=200)),
                (
                    "rating",
                    models.CharField(
                        blank=True, choices=[("good", "Good"), ("bad", "Bad")], max_length=8
                    ),
                ),
                ("updated_at", models.DateTimeField(auto_now=True)),
            ],
            options={
                "indexes": [models.Index(fields=["tenant", "created_at"], name="feedback_by_age")],
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "request_id"), name="feedback_once")
                ],
            },
        ),
        TenantTables(
            "LogPolicy",
            "RequestContent",
            "RefusalHour",
            "CapturePolicy",
            "CapturedRequest",
            "Feedback",
        ),
    ]
