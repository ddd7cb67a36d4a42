"""Aliases, their immutable revisions, and the versions that these name."""

import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("adapters", "0011_deleted_versions"),
        ("database", "0001_walls"),
        ("tenants", "0008_deletion"),
    ]

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
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
            ],
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
                ("created_at", models.DateTimeField(auto_now_add=True)),
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
                            ("rolled_back", "somebody went back to an earlier revision"),
                        ],
                        max_length=32,
                    ),
                ),
                ("reason", models.CharField(blank=True, max_length=500)),
                ("actor_type", models.CharField(max_length=16)),
                ("actor_name", models.CharField(blank=True, max_length=320)),
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
                ("copied_from", models.PositiveIntegerField(blank=True, null=True)),
                (
                    "alias",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="revisions",
                        to="aliases.alias",
                    ),
                ),
                (
                    "base_model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="adapters.basemodel",
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
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "target",
                    models.CharField(
                        choices=[("primary", "Primary"), ("canary", "Canary")], max_length=16
                    ),
                ),
                ("position", models.PositiveSmallIntegerField(default=0)),
                ("adapter_name", models.CharField(max_length=63)),
                ("number", models.PositiveIntegerField(null=True)),
                ("weight", models.FloatField(default=1.0)),
                (
                    "adapter",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="adapters.adapter",
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
                (
                    "version",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="adapters.adapterversion",
                    ),
                ),
                (
                    "revision",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="parts",
                        to="aliases.aliasrevision",
                    ),
                ),
            ],
        ),
        migrations.AddConstraint(
            model_name="alias",
            constraint=models.UniqueConstraint(fields=("tenant", "name"), name="alias_name_once"),
        ),
        migrations.AddConstraint(
            model_name="aliasrevision",
            constraint=models.UniqueConstraint(
                fields=("alias", "number"), name="alias_revision_once"
            ),
        ),
        migrations.AddConstraint(
            model_name="aliasrevision",
            constraint=models.CheckConstraint(
                condition=models.Q(("canary_percent__gte", 0), ("canary_percent__lte", 100)),
                name="alias_percent_in_range",
            ),
        ),
        migrations.AddConstraint(
            model_name="aliaspart",
            constraint=models.UniqueConstraint(
                fields=("revision", "target", "position"), name="alias_part_once"
            ),
        ),
        TenantTables("Alias", "AliasRevision", "AliasPart"),
    ]
