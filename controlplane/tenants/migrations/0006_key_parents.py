import django.db.models.deletion
from django.db import migrations, models

from controlplane.tenancy.database.operations import TenantReference


class Migration(migrations.Migration):
    """Of the keys that are there nobody knows which made which: they come from none."""

    dependencies = [
        ("tenants", "0005_allowed_origins"),
        ("database", "0001_walls"),
    ]

    operations = [
        migrations.AddField(
            model_name="apikey",
            name="ancestors",
            field=models.JSONField(blank=True, default=list),
        ),
        migrations.AddField(
            model_name="apikey",
            name="parent",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="children",
                to="tenants.apikey",
            ),
        ),
        TenantReference("ApiKey", "parent"),
    ]
