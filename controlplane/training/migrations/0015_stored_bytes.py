"""A run's saved state in the object store counts in its tenant's storage."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("training", "0014_captured_source")]

    operations = [
        migrations.AddField(
            model_name="trainingrun",
            name="stored_bytes",
            field=models.PositiveBigIntegerField(db_default=0, default=0),
        ),
    ]
