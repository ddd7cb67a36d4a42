import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("adapters", "0001_initial"), ("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="Alias",
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
                ("revision_number", models.PositiveIntegerField(default=1)),
                ("updated_at", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "name"), name="alias_name_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="AliasRevision",
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
                    "alias",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="revisions",
                        to="aliases.alias",
                    ),
                ),
                ("number", models.PositiveIntegerField()),
                (
                    "cause",
                    models.CharField(
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
                ("reason", models.CharField(blank=True, max_length=500)),
                ("actor_type", models.CharField(max_length=16)),
                ("actor_name", models.CharField(blank=True, max_length=320)),
                (
                    "base_model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="adapters.basemodel",
                    ),
                ),
                ("canary_percent", models.PositiveSmallIntegerField(default=0)),
                ("json_schema", models.TextField(blank=True, default="")),
                ("system_prompt", models.TextField(blank=True, default="")),
                ("sampling", models.JSONField(blank=True, default=dict)),
                (
                    "warmth",
                    models.CharField(
                        choices=[
                            ("pinned", "stays on the GPUs"),
                            ("warm", "stays in the memory of the hosts"),
                            ("cold", "is loaded when it is asked for"),
                        ],
                        default="cold",
                        max_length=16,
                    ),
                ),
                (
                    "guard",
                    models.JSONField(
                        blank=True, db_default=models.Value({}, models.JSONField()), default=dict
                    ),
                ),
                ("copied_from", models.PositiveIntegerField(blank=True, null=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("alias", "number"), name="alias_revision_once"),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("canary_percent__gte", 0), ("canary_percent__lte", 100)
                        ),
                        name="alias_percent_in_range",
                    ),
                ]
            },
        ),
        migrations.CreateModel(
            name="AliasPart",
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
                    "revision",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="parts",
                        to="aliases.aliasrevision",
                    ),
                ),
                (
                    "target",
                    models.CharField(
                        choices=[("primary", "Primary"), ("canary", "Canary")], max_length=16
                    ),
                ),
                ("position", models.PositiveSmallIntegerField(default=0)),
                (
                    "adapter",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="adapters.adapter",
                    ),
                ),
                ("adapter_name", models.CharField(max_length=63)),
                (
                    "version",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="adapters.adapterversion",
                    ),
                ),
                ("number", models.PositiveIntegerField(null=True)),
                ("weight", models.FloatField(default=1.0)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("revision", "target", "position"), name="alias_part_once"
                    )
                ]
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
                    "revision",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="counts",
                        to="aliases.aliasrevision",
                    ),
                ),
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
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("revision", "target"), name="target_count_once")
                ]
            },
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
                    "alias",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="ramp",
                        to="aliases.alias",
                    ),
                ),
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
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("state", "running")),
                        fields=["due_at"],
                        name="ramps_running",
                    )
                ]
            },
        ),
        TenantTables("Alias", "AliasRevision", "AliasPart", "TargetCount", "Ramp"),
    ]
