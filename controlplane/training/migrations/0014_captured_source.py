"""Datasets may be pulled from the tenant's captured requests."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("training", "0013_checkpoints")]

    operations = [
        migrations.AlterField(
            model_name="datasetsource",
            name="kind",
            field=models.CharField(
                choices=[("s3", "S3"), ("hub", "Hub"), ("captured", "Captured")], max_length=8
            ),
        ),
    ]
