"""Events of the gate."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("outbox", "0001_initial"),
    ]

    operations = [
        migrations.AlterField(
            model_name="outboxevent",
            name="type",
            field=models.CharField(
                choices=[
                    ("version.ready", "a version passed its checks"),
                    ("version.rejected", "a version failed its checks"),
                    ("version.promoted", "a version went live"),
                    ("version.rolled_back", "an earlier version went live again"),
                    ("version.gated", "the gate decided about a version"),
                    ("training_run.succeeded", "a training run made a version"),
                    ("training_run.failed", "a training run failed"),
                    ("budget.reached", "a budget's limit is reached"),
                    ("webhook.test", "somebody tries a webhook"),
                    ("webhook.disabled", "a webhook failed for too long"),
                ],
                max_length=32,
            ),
        ),
    ]
