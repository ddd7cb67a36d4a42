import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("adapters", "0001_initial"),
        ("tenants", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="TrainingClient",
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
                ("model_id", models.CharField(max_length=100)),
                ("adapter_name", models.CharField(max_length=63)),
                ("settings", models.JSONField()),
                ("trainer", models.CharField(blank=True, default="", max_length=32)),
                ("state_key", models.CharField(blank=True, default="", max_length=200)),
                ("state_bytes", models.BigIntegerField(default=0)),
                ("is_lost", models.BooleanField(default=False)),
                ("num_usages", models.PositiveIntegerField(default=0)),
                ("used_at", models.DateTimeField(auto_now_add=True)),
                (
                    "base_model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
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
            name="ClientState",
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
                    "kind",
                    models.CharField(
                        choices=[("weights", "Weights"), ("sampler_weights", "Sampler")],
                        max_length=16,
                    ),
                ),
                ("name", models.CharField(max_length=128)),
                ("key", models.CharField(blank=True, default="", max_length=200)),
                ("num_bytes", models.BigIntegerField(default=0)),
                ("expires_at", models.DateTimeField(db_index=True, null=True)),
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
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="adapters.adapterversion",
                    ),
                ),
                (
                    "client",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="states",
                        to="primitives.trainingclient",
                    ),
                ),
            ],
        ),
        migrations.AddIndex(
            model_name="trainingclient",
            index=models.Index(fields=["used_at"], name="training_clients_by_use"),
        ),
        migrations.AddConstraint(
            model_name="trainingclient",
            constraint=models.UniqueConstraint(
                fields=("tenant", "model_id"), name="training_client_once"
            ),
        ),
        migrations.AddConstraint(
            model_name="clientstate",
            constraint=models.UniqueConstraint(
                fields=("client", "kind", "name"), name="training_client_state_once"
            ),
        ),
        TenantTables("TrainingClient", "ClientState"),
    ]
