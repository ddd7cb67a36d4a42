import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="OutboxEvent",
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
                    "type",
                    models.CharField(
                        choices=[
                            ("version.ready", "a version passed its checks"),
                            ("version.rejected", "a version failed its checks"),
                            ("version.promoted", "a version went live"),
                            ("version.rolled_back", "an earlier version went live again"),
                            ("version.gated", "the gate decided about a version"),
                            ("training_run.succeeded", "a training run made a version"),
                            ("training_run.failed", "a training run failed"),
                            ("schedule.missed", "a schedule's slot was missed"),
                            ("morning.ready", "what changed last night can be read"),
                            ("budget.reached", "a budget's limit is reached"),
                            ("webhook.test", "somebody tries a webhook"),
                            ("webhook.disabled", "a webhook failed for too long"),
                        ],
                        max_length=32,
                    ),
                ),
                ("data", models.JSONField(default=dict)),
                ("fanned_out_at", models.DateTimeField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("fanned_out_at", None)),
                        fields=["created_at"],
                        name="outbox_to_fan_out",
                    ),
                    models.Index(fields=["created_at"], name="outbox_by_age"),
                ]
            },
        ),
        TenantTables("OutboxEvent"),
    ]
