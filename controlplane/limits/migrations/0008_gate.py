"""Tenants take turns with evaluations, too."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("limits", "0005_import_turn"),
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
                    ("evaluation", "Evaluation"),
                ],
                max_length=16,
            ),
        ),
    ]
