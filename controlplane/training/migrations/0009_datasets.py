"""Datasets are reported on, and schedules and waiting runs of before keep cutting long rows.

New ones have to ask for that.
"""

from collections.abc import Callable
from typing import Any

import django.db.models.deletion
from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from controlplane.tenancy.database.operations import TenantReference
from controlplane.tenancy.scoping import tenant_scope

ACTIVE = ("queued", "paused", "running", "publishing")


def _change(apps: Apps, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the hyperparameters of all schedules and active runs."""
    schedules = apps.get_model("training", "Schedule").objects
    runs = apps.get_model("training", "TrainingRun").objects
    # The owner of the tables sees one tenant's rows at a time, as everybody does.
    for tenant_id in list(apps.get_model("tenants", "Tenant").objects.values_list("pk", flat=True)):
        with tenant_scope(tenant_id):
            for row in [*schedules.all(), *runs.filter(status__in=ACTIVE)]:
                change(row.hyperparameters)
                row.save(update_fields=["hyperparameters"])


def ask(apps: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    _change(apps, lambda hyperparameters: hyperparameters.setdefault("truncate", True))


def forget(apps: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    """The release before does not know the word."""
    _change(apps, lambda hyperparameters: hyperparameters.pop("truncate", None))


class Migration(migrations.Migration):
    dependencies = [("training", "0008_fine_tuning_jobs"), ("database", "0001_walls")]

    operations = [
        migrations.AddField(
            model_name="dataset",
            name="report",
            field=models.JSONField(default=dict, null=True),
        ),
        migrations.AddField(
            model_name="dataset",
            name="report_status",
            field=models.CharField(
                choices=[("pending", "Pending"), ("ready", "Ready"), ("failed", "Failed")],
                db_default="pending",
                default="pending",
                max_length=16,
            ),
        ),
        migrations.AddIndex(
            model_name="dataset",
            index=models.Index(
                condition=models.Q(("report_status", "pending")),
                fields=["updated_at"],
                name="datasets_to_report_on",
            ),
        ),
        migrations.AddField(
            model_name="trainingrun",
            name="validation_dataset",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to="training.dataset",
            ),
        ),
        migrations.AddField(
            model_name="schedule",
            name="validation_dataset",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.RESTRICT,
                related_name="+",
                to="training.dataset",
            ),
        ),
        TenantReference("TrainingRun", "validation_dataset"),
        TenantReference("Schedule", "validation_dataset"),
        # The last: PostgreSQL changes no table with rows that were changed in the transaction.
        migrations.RunPython(ask, forget),
    ]
