"""Runs count the trainers that they lost in a row, and know that a state of them is stored."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("training", "0009_datasets"),
    ]

    operations = [
        migrations.AddField(
            model_name="trainingrun",
            name="num_lost",
            field=models.PositiveSmallIntegerField(db_default=0, default=0),
        ),
        migrations.AddField(
            model_name="trainingrun",
            name="stored_step",
            field=models.PositiveIntegerField(null=True),
        ),
        migrations.AddIndex(
            model_name="trainingrun",
            index=models.Index(
                condition=models.Q(("stored_step__isnull", False)),
                fields=["finished_at"],
                name="training_runs_stored",
            ),
        ),
    ]
