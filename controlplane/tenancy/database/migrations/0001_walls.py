from django.db import migrations

from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    """Protect the tables of earlier migrations; later ones protect their own tables."""

    initial = True

    dependencies = [
        ("tenants", "0002_keys_and_people"),
        ("adapters", "0004_version_status_changed_at"),
        ("inference", "0002_initial"),
        ("delivery", "0001_initial"),
        ("limits", "0001_initial"),
        ("training", "0003_dataset_restrict"),
        ("usage", "0001_initial"),
    ]

    operations = [
        TenantTables(
            "tenants.Membership",
            "tenants.ServiceAccount",
            "tenants.Invite",
            "tenants.ApiKey",
            "tenants.IdempotencyRecord",
            "adapters.Adapter",
            "adapters.AdapterVersion",
            "inference.InferenceRequest",
            "delivery.DeadLetter",
            "limits.RateLimit",
            "limits.Budget",
            "training.Dataset",
            "training.TrainingRun",
            "training.Schedule",
            "training.ScheduleRun",
            "usage.UsageRecord",
        )
    ]
