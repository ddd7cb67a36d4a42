"""Schedules have rules, and a history of their slots."""

import datetime

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("tenants", "0008_deletion"),
        ("training", "0010_saved_states"),
    ]

    operations = [
        migrations.AddField(
            model_name="schedule",
            name="grace",
            field=models.DurationField(
                db_default=datetime.timedelta(seconds=3600),
                default=datetime.timedelta(seconds=3600),
            ),
        ),
        migrations.AddField(
            model_name="schedule",
            name="max_runs_per_day",
            field=models.PositiveSmallIntegerField(null=True),
        ),
        migrations.AddField(
            model_name="schedule",
            name="misfire",
            field=models.CharField(
                choices=[
                    ("run_once", "run once as soon as possible"),
                    ("skip", "wait for the next slot"),
                ],
                db_default="run_once",
                default="run_once",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="schedule",
            name="not_before",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="schedule",
            name="owed_slot",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="schedule",
            name="skip_unchanged",
            field=models.BooleanField(db_default=True, default=True),
        ),
        migrations.AddField(
            model_name="schedule",
            name="window",
            field=models.CharField(blank=True, db_default="", default="", max_length=11),
        ),
        migrations.AddField(
            model_name="schedulerun",
            name="concluded_at",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="schedulerun",
            name="reason",
            field=models.CharField(
                blank=True,
                choices=[
                    ("unchanged", "nothing is new since the last run that succeeded"),
                    ("runs_per_day", "the schedule's runs of 24 hours were used up"),
                    ("merged", "a later slot ran for it"),
                    ("busy", "the adapter's last run had not ended"),
                    ("quota", "the organization's quota of training runs was used up"),
                    ("window", "its window was closed"),
                    ("base_model", "its base model is switched off or shut down"),
                    ("late", "the platform was down or late"),
                ],
                db_default="",
                default="",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="schedulerun",
            name="reported_at",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="schedulerun",
            name="rows_before",
            field=models.PositiveIntegerField(null=True),
        ),
        migrations.AddField(
            model_name="schedulerun",
            name="status",
            field=models.CharField(
                choices=[("ran", "Ran"), ("skipped", "Skipped"), ("missed", "Missed")],
                db_default="ran",
                default="ran",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="schedulerun",
            name="trigger",
            field=models.CharField(
                choices=[("clock", "Clock"), ("manual", "run now")],
                db_default="clock",
                default="clock",
                max_length=16,
            ),
        ),
        migrations.AlterField(
            model_name="schedulerun",
            name="training_run",
            field=models.OneToOneField(
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="schedule_run",
                to="training.trainingrun",
            ),
        ),
        migrations.AddIndex(
            model_name="schedulerun",
            index=models.Index(fields=["tenant", "slot"], name="schedule_runs_by_slot"),
        ),
        migrations.AddIndex(
            model_name="schedulerun",
            index=models.Index(
                condition=models.Q(("reported_at", None)),
                fields=["created_at"],
                name="schedule_runs_unreported",
            ),
        ),
    ]
