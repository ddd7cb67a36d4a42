import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="DeadLetter",
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
                ("request_id", models.CharField(max_length=64, unique=True)),
                ("model", models.CharField(max_length=200)),
                ("adapter_version_id", models.UUIDField(null=True)),
                ("worker_id", models.CharField(blank=True, max_length=200)),
                ("reason", models.CharField(max_length=500)),
                ("job", models.JSONField(null=True)),
                ("requeued_at", models.DateTimeField(blank=True, null=True)),
                ("requeued_as", models.CharField(blank=True, max_length=64)),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant", "created_at"], name="delivery_de_tenant__0c1c15_idx"
                    ),
                    models.Index(
                        fields=["adapter_version_id", "id"], name="dead_letters_by_version"
                    ),
                ]
            },
        ),
        migrations.CreateModel(
            name="Quarantine",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("pool", models.CharField(max_length=63)),
                ("digest", models.CharField(max_length=64)),
                ("since", models.DateTimeField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("pool", "digest"), name="quarantine_once")
                ]
            },
        ),
        TenantTables("DeadLetter"),
    ]
