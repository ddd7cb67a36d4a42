"""Suites know whether their cases have words of requests."""

from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from controlplane.tenancy.scoping import tenant_scope


def mark(apps: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    """Mark versions made from requests, or from datasets with captured ones.

    And all to which a case was added: that may be a request's.
    """
    versions = apps.get_model("evaluations", "SuiteVersion").objects
    datasets = apps.get_model("training", "Dataset").objects
    contents = apps.get_model("training", "DatasetContent").objects
    for tenant_id in list(apps.get_model("tenants", "Tenant").objects.values_list("pk", flat=True)):
        with tenant_scope(tenant_id):
            kept = set(contents.filter(has_requests=True).values_list("sha256", flat=True))
            names = {dataset.name for dataset in datasets.all() if dataset.sha256 in kept}
            for version in versions.all():
                origin = version.origin
                name = str(origin.get("dataset", "")).partition("@")[0]
                if origin.get("kind") in ("requests", "case added") or name in names:
                    versions.filter(pk=version.pk).update(has_requests=True)


class Migration(migrations.Migration):
    dependencies = [
        ("evaluations", "0002_batch_scores"),
        ("training", "0016_rows_of_requests"),
    ]

    operations = [
        migrations.AddField(
            model_name="suiteversion",
            name="has_requests",
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.RunPython(mark, migrations.RunPython.noop),
    ]
