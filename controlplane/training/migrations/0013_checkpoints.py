"""Adapters on the way of a training are kept as versions."""

import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    dependencies = [
        ("adapters", "0017_checkpoints"),
        ("tenants", "0008_deletion"),
        ("training", "0012_dataset_versions"),
        ("database", "0001_walls"),
    ]

    operations = [
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
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("step", models.PositiveIntegerField()),
                ("metrics", models.JSONField(default=dict)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="checkpoints",
                        to="training.trainingrun",
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
                        related_name="checkpoint",
                        to="adapters.adapterversion",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("run", "step"), name="training_checkpoint_once")
                ],
            },
        ),
        TenantTables("TrainingCheckpoint"),
    ]
