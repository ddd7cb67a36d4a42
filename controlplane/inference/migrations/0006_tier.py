from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("inference", "0005_alias")]

    operations = [
        migrations.AddField(
            model_name="inferencerequest",
            name="tier",
            field=models.CharField(blank=True, db_default="", default="", max_length=8),
        ),
    ]
