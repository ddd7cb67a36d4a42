import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    dependencies = [
        ("adapters", "0011_deleted_versions"),
        ("database", "0001_walls"),  # its key of adapters
        ("tenants", "0006_key_parents"),
    ]

    operations = [
        migrations.CreateModel(
            name="VersionUpload",
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
                ("file", models.CharField(max_length=32)),
                ("num_bytes", models.BigIntegerField()),
                ("part_bytes", models.PositiveIntegerField()),
                ("upload_id", models.TextField(blank=True, default="")),
                ("digests", models.JSONField(default=dict)),
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
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="uploads",
                        to="adapters.adapterversion",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("version", "file"), name="version_upload_once")
                ],
            },
        ),
        TenantTables("VersionUpload"),
    ]
