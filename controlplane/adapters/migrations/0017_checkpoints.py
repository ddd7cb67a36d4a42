"""Versions may be checkpoints of trainings."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("adapters", "0016_gate")]

    operations = [
        migrations.AlterField(
            model_name="adapterversion",
            name="source",
            field=models.CharField(
                choices=[
                    ("upload", "Upload"),
                    ("training", "Training"),
                    ("import", "Import"),
                    ("checkpoint", "Checkpoint"),
                ],
                default="upload",
                max_length=16,
            ),
        ),
    ]
