"""Rows that are in the object store already become known, so that they count and can be removed."""

from django.apps.registry import Apps
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.utils import timezone

from controlplane.tenancy.scoping import tenant_scope


def make_known(apps: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    tenants = apps.get_model("tenants", "Tenant").objects
    contents = apps.get_model("training", "DatasetContent").objects
    datasets = apps.get_model("training", "Dataset").objects
    runs = apps.get_model("training", "TrainingRun").objects
    # The owner of the tables sees one tenant's rows at a time, as everybody does.
    for tenant_id in list(tenants.values_list("pk", flat=True)):
        with tenant_scope(tenant_id):
            found = dict(datasets.values_list("sha256", "num_bytes"))
            # How long a replaced one is nobody has noted; it goes with the next sweep.
            for sha256 in runs.values_list("dataset_sha256", flat=True).distinct():
                found.setdefault(sha256, 0)
            for sha256, num_bytes in found.items():
                contents.create(
                    tenant_id=tenant_id,
                    sha256=sha256,
                    num_bytes=num_bytes,
                    wanted_at=timezone.now(),
                )


class Migration(migrations.Migration):
    dependencies = [("training", "0004_bounds")]

    operations = [migrations.RunPython(make_known, migrations.RunPython.noop)]
