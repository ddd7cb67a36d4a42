"""Files for training know their rows, so that nobody has to read them again to count."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("files", "0004_result_files")]

    operations = [
        migrations.AddField(
            model_name="file",
            name="num_rows",
            field=models.PositiveIntegerField(null=True),
        ),
    ]
