from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("tenants", "0006_key_parents")]

    operations = [
        migrations.AddField(
            model_name="apikey",
            name=name,
            field=models.CharField(blank=True, db_default="", default="", max_length=16),
        )
        for name in ("pepper_id", "old_pepper_id")
    ]
