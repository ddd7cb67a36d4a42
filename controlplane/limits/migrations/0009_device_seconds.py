"""Tenants have a quota of the seconds that their trainings use of a device."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("limits", "0008_gate"),
    ]

    operations = [
        migrations.AddField(
            model_name="tenantquota",
            name="training_device_seconds",
            field=models.PositiveIntegerField(null=True),
        ),
    ]
