from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("inference", "0006_tier")]

    operations = [
        migrations.AddField(
            model_name="inferencerequest",
            name="drafts",
            field=models.JSONField(null=True),
        ),
    ]
