from django.db import migrations, models

import controlplane.tenancy.scoping


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="TenantDeletion",
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
                ("tenant_id", models.UUIDField(db_index=True)),
                ("slug", models.CharField(max_length=63)),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("scheduled", "Scheduled"),
                            ("running", "Running"),
                            ("done", "Done"),
                            ("restored", "Restored"),
                        ],
                        default="scheduled",
                        max_length=16,
                    ),
                ),
                ("status_before", models.CharField(max_length=16)),
                ("requested_by", models.CharField(max_length=320)),
                ("requested_at", models.DateTimeField(auto_now_add=True)),
                ("due_at", models.DateTimeField()),
                ("started_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
                ("restored_at", models.DateTimeField(null=True)),
                ("steps", models.JSONField(default=list)),
                ("counts", models.JSONField(default=dict)),
                ("num_bytes", models.BigIntegerField(default=0)),
                ("error", models.CharField(blank=True, max_length=500)),
                ("lease_until", models.DateTimeField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("status__in", ("scheduled", "running"))),
                        fields=["due_at"],
                        name="deletions_open",
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("status__in", ("scheduled", "running"))),
                        fields=("tenant_id",),
                        name="deletion_open_once",
                    )
                ],
            },
        )
    ]
