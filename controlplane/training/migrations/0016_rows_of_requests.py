"""Contents know whether they have words of captured requests."""

from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from controlplane.tenancy.scoping import tenant_scope


def mark(apps: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    """Mark all contents of datasets that captured requests were put into."""
    contents = apps.get_model("training", "DatasetContent").objects
    captured = apps.get_model("requestlog", "CapturedRequest").objects
    sources = apps.get_model("training", "DatasetSource").objects
    # The owner of the tables sees one tenant's rows at a time, as everybody does.
    for tenant_id in list(apps.get_model("tenants", "Tenant").objects.values_list("pk", flat=True)):
        with tenant_scope(tenant_id):
            names = set(sources.filter(kind="captured").values_list("name", flat=True))
            noted = captured.exclude(datasets=[]).values_list("datasets", flat=True)
            ids = {each for datasets in noted.iterator() for each in datasets}
            for dataset in apps.get_model("training", "Dataset").objects.all():
                if dataset.name in names or str(dataset.pk) in ids:
                    found = {dataset.sha256, *dataset.versions.values_list("sha256", flat=True)}
                    contents.filter(sha256__in=found).update(has_requests=True)


class Migration(migrations.Migration):
    dependencies = [("training", "0015_stored_bytes"), ("requestlog", "0003_captured_datasets")]

    operations = [
        migrations.AddField(
            model_name="datasetcontent",
            name="has_requests",
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.RunPython(mark, migrations.RunPython.noop),
    ]
