"""The batch that trained a version scores the gate's expected answers."""

import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    dependencies = [
        ("adapters", "0017_checkpoints"),
        ("evaluations", "0001_initial"),
        ("tenants", "0008_deletion"),
        ("database", "0001_walls"),
    ]

    operations = [
        migrations.AddField(
            model_name="evaluation",
            name="scored_in",
            field=models.UUIDField(null=True),
        ),
        migrations.CreateModel(
            name="BatchScores",
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
                ("digest", models.CharField(max_length=64)),
                ("live_digest", models.CharField(max_length=64)),
                ("base_revision", models.CharField(max_length=64)),
                ("cases_sha256", models.CharField(max_length=64)),
                ("candidate", models.JSONField()),
                ("live", models.JSONField()),
                (
                    "suite_version",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="evaluations.suiteversion",
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
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="batch_scores",
                        to="adapters.adapterversion",
                    ),
                ),
            ],
            options={
                "abstract": False,
            },
        ),
        TenantTables("BatchScores"),
    ]
