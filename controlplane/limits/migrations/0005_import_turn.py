"""Tenants take turns with imports, too."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("limits", "0004_turn_of_probes"),
    ]

    operations = [
        migrations.AlterField(
            model_name="turn",
            name="kind",
            field=models.CharField(
                choices=[
                    ("training", "Training"),
                    ("adapter_check", "Adapter Check"),
                    ("adapter_probe", "Adapter Probe"),
                    ("adapter_import", "Adapter Import"),
                ],
                max_length=16,
            ),
        ),
    ]
