import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="InferenceRequest",
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
                ("api_key_id", models.UUIDField(null=True)),
                ("model", models.CharField(max_length=200)),
                ("base_model", models.CharField(max_length=63)),
                ("adapter_version_id", models.UUIDField(null=True)),
                ("alias_revision_id", models.UUIDField(null=True)),
                (
                    "alias_target",
                    models.CharField(blank=True, db_default="", default="", max_length=16),
                ),
                ("worker_id", models.CharField(max_length=100)),
                ("stream", models.BooleanField(default=False)),
                ("finish_reason", models.CharField(max_length=32)),
                ("error_code", models.CharField(blank=True, max_length=64)),
                ("endpoint", models.CharField(blank=True, default="", max_length=64)),
                ("is_batch", models.BooleanField(default=False)),
                ("digests", models.JSONField(blank=True, default=list)),
                ("weights", models.JSONField(null=True)),
                ("sampling", models.JSONField(null=True)),
                ("attempts", models.PositiveIntegerField(null=True)),
                ("prompt_tokens", models.PositiveIntegerField(default=0)),
                ("cached_tokens", models.PositiveIntegerField(default=0)),
                ("completion_tokens", models.PositiveIntegerField(default=0)),
                ("accepted_at", models.DateTimeField()),
                ("queue_ms", models.FloatField(default=0)),
                ("load_ms", models.FloatField(default=0)),
                ("first_token_ms", models.FloatField(null=True)),
                ("total_ms", models.FloatField(default=0)),
                ("tier", models.CharField(blank=True, db_default="", default="", max_length=8)),
                ("drafts", models.JSONField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant", "accepted_at"], name="inference_i_tenant__55bbcf_idx"
                    )
                ]
            },
        ),
        TenantTables("InferenceRequest"),
    ]
