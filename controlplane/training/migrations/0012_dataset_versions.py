"""Datasets have versions, which others' rows are appended to, and sources to pull them from."""

import django.core.validators
import django.db.models.deletion
from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables
from controlplane.tenancy.scoping import tenant_scope


def number(apps: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    """Make the rows of each dataset its first version."""
    datasets = apps.get_model("training", "Dataset").objects
    versions = apps.get_model("training", "DatasetVersion").objects
    # The owner of the tables sees one tenant's rows at a time, as everybody does.
    for tenant_id in list(apps.get_model("tenants", "Tenant").objects.values_list("pk", flat=True)):
        with tenant_scope(tenant_id):
            for dataset in datasets.all():
                versions.create(
                    tenant_id=tenant_id,
                    dataset=dataset,
                    number=1,
                    kind="upload",
                    sha256=dataset.sha256,
                    num_bytes=dataset.num_bytes,
                    num_rows=dataset.num_rows,
                    added_rows=dataset.num_rows,
                    report=dataset.report or None,
                )


class Migration(migrations.Migration):
    dependencies = [
        ("tenants", "0008_deletion"),
        ("training", "0011_schedule_history"),
        ("database", "0001_walls"),
    ]

    operations = [
        migrations.AddField(
            model_name="dataset",
            name="version",
            field=models.PositiveIntegerField(db_default=1, default=1),
        ),
        migrations.AddField(
            model_name="datasetcontent",
            name="added",
            field=models.CharField(blank=True, db_default="", default="", max_length=64),
        ),
        migrations.AddField(
            model_name="datasetcontent",
            name="previous",
            field=models.CharField(blank=True, db_default="", default="", max_length=64),
        ),
        migrations.AddField(
            model_name="trainingrun",
            name="dataset_version",
            field=models.PositiveIntegerField(null=True),
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
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("kind", models.CharField(choices=[("s3", "S3"), ("hub", "Hub")], max_length=8)),
                ("place", models.JSONField()),
                ("sealed", models.BinaryField()),
                ("cron", models.CharField(blank=True, max_length=100)),
                ("timezone", models.CharField(default="UTC", max_length=64)),
                ("next_pull_at", models.DateTimeField(db_index=True, null=True)),
                ("seen", models.JSONField(default=list)),
                ("fence", models.PositiveIntegerField(default=0)),
                ("lease_until", models.DateTimeField(null=True)),
                (
                    "name",
                    models.CharField(
                        max_length=63,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?\\Z",
                                "Use 1 to 63 lower-case letters, digits, dots, dashes or "
                                "underscores; begin and end with a letter or digit.",
                            )
                        ],
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
                    models.UniqueConstraint(fields=("tenant", "name"), name="dataset_source_once")
                ],
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
                ("created_at", models.DateTimeField(auto_now_add=True)),
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
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                (
                    "source",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="pulls",
                        to="training.datasetsource",
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(fields=["source", "created_at"], name="dataset_pulls_of_source")
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
                ("created_at", models.DateTimeField(auto_now_add=True)),
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
                (
                    "dataset",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="versions",
                        to="training.dataset",
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
                    models.UniqueConstraint(
                        fields=("dataset", "number"), name="dataset_version_once"
                    )
                ],
            },
        ),
        TenantTables("DatasetVersion", "DatasetSource", "DatasetPull"),
        migrations.RunPython(number, migrations.RunPython.noop),
    ]
