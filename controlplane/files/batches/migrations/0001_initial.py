import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="Batch",
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
                    "api_key",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                ("pool", models.CharField(blank=True, db_default="", default="", max_length=63)),
                ("endpoint", models.CharField(max_length=64)),
                ("input_file_id", models.UUIDField()),
                ("output_file_id", models.UUIDField(null=True)),
                ("error_file_id", models.UUIDField(null=True)),
                ("metadata", models.JSONField(null=True)),
                ("output_expires_s", models.PositiveIntegerField(null=True)),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("validating", "Validating"),
                            ("failed", "Failed"),
                            ("in_progress", "In Progress"),
                            ("finalizing", "Finalizing"),
                            ("completed", "Completed"),
                            ("expired", "Expired"),
                            ("cancelling", "Cancelling"),
                            ("cancelled", "Cancelled"),
                        ],
                        default="validating",
                        max_length=16,
                    ),
                ),
                (
                    "ends_as",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("validating", "Validating"),
                            ("failed", "Failed"),
                            ("in_progress", "In Progress"),
                            ("finalizing", "Finalizing"),
                            ("completed", "Completed"),
                            ("expired", "Expired"),
                            ("cancelling", "Cancelling"),
                            ("cancelled", "Cancelled"),
                        ],
                        max_length=16,
                    ),
                ),
                ("model", models.CharField(blank=True, max_length=200)),
                ("errors", models.JSONField(default=list)),
                ("num_lines", models.PositiveIntegerField(default=0)),
                ("num_completed", models.PositiveIntegerField(default=0)),
                ("num_failed", models.PositiveIntegerField(default=0)),
                ("prompt_tokens", models.BigIntegerField(default=0)),
                ("cached_tokens", models.BigIntegerField(default=0)),
                ("completion_tokens", models.BigIntegerField(default=0)),
                ("thought_tokens", models.BigIntegerField(default=0)),
                ("expires_at", models.DateTimeField()),
                ("in_progress_at", models.DateTimeField(null=True)),
                ("finalizing_at", models.DateTimeField(null=True)),
                ("completed_at", models.DateTimeField(null=True)),
                ("failed_at", models.DateTimeField(null=True)),
                ("expired_at", models.DateTimeField(null=True)),
                ("cancelling_at", models.DateTimeField(null=True)),
                ("cancelled_at", models.DateTimeField(null=True)),
                ("lease_until", models.DateTimeField(null=True)),
                ("fence", models.PositiveIntegerField(default=0)),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(
                            (
                                "status__in",
                                ["validating", "in_progress", "finalizing", "cancelling"],
                            )
                        ),
                        fields=["tenant", "id"],
                        name="batches_active",
                    )
                ]
            },
        ),
        migrations.CreateModel(
            name="BatchResult",
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
                    "batch",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="results",
                        to="batches.batch",
                    ),
                ),
                ("line", models.PositiveIntegerField()),
                ("is_error", models.BooleanField()),
                ("output", models.TextField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("batch", "line"), name="batch_line_once")
                ]
            },
        ),
        TenantTables("Batch", "BatchResult"),
    ]
