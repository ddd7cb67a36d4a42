import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="RateLimit",
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
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                ("model", models.CharField(blank=True, default="", max_length=200)),
                (
                    "requests_per_minute",
                    models.PositiveIntegerField(
                        blank=True,
                        null=True,
                        validators=[django.core.validators.MinValueValidator(1)],
                    ),
                ),
                (
                    "tokens_per_minute",
                    models.PositiveIntegerField(
                        blank=True,
                        null=True,
                        validators=[django.core.validators.MinValueValidator(1)],
                    ),
                ),
                (
                    "max_concurrent",
                    models.PositiveIntegerField(
                        blank=True,
                        null=True,
                        validators=[django.core.validators.MinValueValidator(1)],
                    ),
                ),
                (
                    "max_waiting",
                    models.PositiveIntegerField(
                        blank=True,
                        null=True,
                        validators=[django.core.validators.MinValueValidator(1)],
                    ),
                ),
                ("updated_at", models.DateTimeField(auto_now=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "api_key", "model"),
                        name="rate_limit_once",
                        nulls_distinct=False,
                    )
                ]
            },
        ),
        migrations.CreateModel(
            name="Budget",
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
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.apikey",
                    ),
                ),
                (
                    "period",
                    models.CharField(
                        choices=[("day", "Day"), ("month", "Month")], default="month", max_length=8
                    ),
                ),
                ("hard_limit", models.PositiveBigIntegerField(blank=True, null=True)),
                ("soft_limit", models.PositiveBigIntegerField(blank=True, null=True)),
                ("soft_told_for", models.DateTimeField(blank=True, editable=False, null=True)),
                ("hard_told_for", models.DateTimeField(blank=True, editable=False, null=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "api_key", "period"),
                        name="budget_once",
                        nulls_distinct=False,
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("hard_limit__isnull", False),
                            ("soft_limit__isnull", False),
                            _connector="OR",
                        ),
                        name="budget_limits_something",
                    ),
                ]
            },
        ),
        migrations.CreateModel(
            name="TenantQuota",
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
                ("storage_bytes", models.PositiveBigIntegerField(null=True)),
                ("training_runs", models.PositiveIntegerField(null=True)),
                ("training_at_once", models.PositiveIntegerField(null=True)),
                ("training_steps", models.PositiveIntegerField(null=True)),
                ("training_tokens", models.PositiveBigIntegerField(null=True)),
                ("training_samples", models.PositiveIntegerField(null=True)),
                ("grader_calls", models.PositiveIntegerField(null=True)),
                ("grading_seconds", models.PositiveIntegerField(null=True)),
                ("training_device_seconds", models.PositiveIntegerField(null=True)),
                ("adapter_checks", models.PositiveIntegerField(null=True)),
                ("updated_at", models.DateTimeField(auto_now=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("tenant",), name="tenant_quota_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="Turn",
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
                    "kind",
                    models.CharField(
                        choices=[
                            ("training", "Training"),
                            ("adapter_check", "Adapter Check"),
                            ("adapter_probe", "Adapter Probe"),
                            ("adapter_import", "Adapter Import"),
                            ("evaluation", "Evaluation"),
                        ],
                        max_length=16,
                    ),
                ),
                ("served_at", models.DateTimeField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "kind"), name="turn_once")
                ]
            },
        ),
        TenantTables("RateLimit", "Budget", "TenantQuota", "Turn"),
    ]
