"""Known names of base models; when a version is deprecated and shut down."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("adapters", "0012_version_uploads"),
    ]

    operations = [
        migrations.AddField(
            model_name="basemodel",
            name="known_names",
            field=models.JSONField(
                blank=True, db_default=models.Value([], models.JSONField()), default=list
            ),
        ),
        migrations.AddField(
            model_name="adapterversion",
            name="accepts_base_mismatch",
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.AddField(
            model_name="adapterversion",
            name="deprecated_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="adapterversion",
            name="shutdown_date",
            field=models.DateField(blank=True, null=True),
        ),
        migrations.AddIndex(
            model_name="adapterversion",
            index=models.Index(
                condition=models.Q(("shutdown_date__isnull", False), ("status", "ready")),
                fields=["shutdown_date"],
                name="versions_to_retire",
            ),
        ),
    ]
