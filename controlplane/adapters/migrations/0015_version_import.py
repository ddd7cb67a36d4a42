"""Imports: where a version comes from, and the work of fetching its files."""

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    dependencies = [
        ("adapters", "0014_inspection"),
        ("database", "0001_walls"),  # its key of adapters
        ("tenants", "0006_key_parents"),
    ]

    operations = [
        migrations.AddField(
            model_name="adapterversion",
            name="origin",
            field=models.JSONField(
                blank=True, db_default=models.Value({}, models.JSONField()), default=dict
            ),
        ),
        migrations.AlterField(
            model_name="adapterversion",
            name="source",
            field=models.CharField(
                choices=[("upload", "Upload"), ("training", "Training"), ("import", "Import")],
                default="upload",
                max_length=16,
            ),
        ),
        migrations.CreateModel(
            name="VersionImport",
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
                ("sealed", models.BinaryField()),
                ("attempts", models.PositiveSmallIntegerField(default=0)),
                ("next_attempt_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("fence", models.PositiveIntegerField(default=0)),
                ("lease_until", models.DateTimeField(null=True)),
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
                        related_name="+",
                        to="adapters.adapterversion",
                    ),
                ),
            ],
            options={"abstract": False},
        ),
        TenantTables("VersionImport"),
    ]
