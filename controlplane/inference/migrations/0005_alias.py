"""Of requests to an alias: the revision and the target that answered."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("inference", "0004_what_was_asked"),
        ("tenants", "0008_deletion"),
    ]

    operations = [
        migrations.AddField(
            model_name="inferencerequest",
            name="alias_revision_id",
            field=models.UUIDField(null=True),
        ),
        migrations.AddField(
            model_name="inferencerequest",
            name="alias_target",
            field=models.CharField(blank=True, db_default="", default="", max_length=16),
        ),
    ]
