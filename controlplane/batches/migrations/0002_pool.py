from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("batches", "0001_initial"),
    ]

    operations = [
        # With a default of the database's: a process from before it goes on taking batches in.
        migrations.AddField(
            model_name="batch",
            name="pool",
            field=models.CharField(blank=True, db_default="", default="", max_length=63),
        ),
    ]
