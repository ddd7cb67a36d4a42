from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("training", "0005_dataset_contents")]

    operations = [
        migrations.AlterField(
            model_name="trainingrun",
            name="error",
            field=models.CharField(blank=True, max_length=2000),
        ),
    ]
