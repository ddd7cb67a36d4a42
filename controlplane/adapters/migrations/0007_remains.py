from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("adapters", "0006_base_model_shutdown_date"),
    ]

    operations = [
        migrations.AddField(
            model_name="adapterversion",
            name="is_cleared",
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.AddField(
            model_name="adapterversion",
            name="kept_digest",
            field=models.CharField(blank=True, db_default="", default="", max_length=64),
        ),
        migrations.AddIndex(
            model_name="adapterversion",
            index=models.Index(
                condition=models.Q(("is_cleared", False)),
                fields=["status_changed_at"],
                name="versions_uncleared",
            ),
        ),
        migrations.AddIndex(
            model_name="adapterversion",
            index=models.Index(
                condition=models.Q(("kept_digest", ""), _negated=True),
                fields=["tenant", "kept_digest"],
                name="versions_kept",
            ),
        ),
    ]
