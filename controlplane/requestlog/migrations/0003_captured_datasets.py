"""Captured requests know the datasets that have their rows."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("requestlog", "0002_captured_requests")]

    operations = [
        migrations.AddField(
            model_name="capturedrequest",
            name="datasets",
            field=models.JSONField(
                blank=True, db_default=models.Value([], models.JSONField()), default=list
            ),
        ),
    ]
