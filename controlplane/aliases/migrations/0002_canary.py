"""Guards of canaries, what their targets answered, and ramps."""

import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    dependencies = [
        ("aliases", "0001_initial"),
        ("database", "0001_walls"),
        ("tenants", "0008_deletion"),
    ]

    operations = [
        migrations.AddField(
            model_name="aliasrevision",
            name="guard",
            field=models.JSONField(
                blank=True, db_default=models.Value({}, models.JSONField()), default=dict
            ),
        ),
        migrations.AlterField(
            model_name="aliasrevision",
            name="cause",
            field=models.CharField(
                choices=[
                    ("created", "the alias was made"),
                    ("changed", "somebody changed it"),
                    ("ramped", "the canary got another share"),
                    ("canary_promoted", "the canary became the primary"),
                    ("canary_removed", "the canary was taken away"),
                    ("canary_failed", "the canary was worse than the primary"),
                    ("rolled_back", "somebody went back to an earlier revision"),
                ],
                max_length=32,
            ),
        ),
        migrations.CreateModel(
            name="Ramp",
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
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("steps", models.JSONField()),
                (
                    "at_end",
                    models.CharField(
                        choices=[
                            ("promote", "the canary becomes the primary"),
                            ("stay", "the canary stays at its last share"),
                        ],
                        default="promote",
                        max_length=16,
                    ),
                ),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("running", "runs"),
                            ("paused", "is paused"),
                            ("done", "is done"),
                            ("stopped", "was stopped"),
                        ],
                        default="running",
                        max_length=16,
                    ),
                ),
                ("step", models.PositiveSmallIntegerField(default=0)),
                ("revision_number", models.PositiveIntegerField()),
                ("due_at", models.DateTimeField()),
                ("reason", models.CharField(blank=True, default="", max_length=500)),
                ("actor_type", models.CharField(max_length=16)),
                ("actor_name", models.CharField(blank=True, max_length=320)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "alias",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="ramp",
                        to="aliases.alias",
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
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("state", "running")),
                        fields=["due_at"],
                        name="ramps_running",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="TargetCount",
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
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "target",
                    models.CharField(
                        choices=[("primary", "Primary"), ("canary", "Canary")], max_length=16
                    ),
                ),
                ("requests", models.PositiveBigIntegerField(default=0)),
                ("errors", models.PositiveBigIntegerField(default=0)),
                ("checked", models.PositiveBigIntegerField(default=0)),
                ("broken", models.PositiveBigIntegerField(default=0)),
                ("truncated", models.PositiveBigIntegerField(default=0)),
                ("first_token", models.JSONField(default=dict)),
                ("token", models.JSONField(default=dict)),
                ("updated_at", models.DateTimeField(auto_now=True)),
                (
                    "revision",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="counts",
                        to="aliases.aliasrevision",
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
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("revision", "target"), name="target_count_once")
                ],
            },
        ),
        TenantTables("TargetCount", "Ramp"),
    ]
