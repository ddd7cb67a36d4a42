from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("limits", "0003_budget_events")]

    operations = [
        migrations.AlterField(
            model_name="turn",
            name="kind",
            field=models.CharField(
                choices=[
                    ("training", "Training"),
                    ("adapter_check", "Adapter Check"),
                    ("adapter_probe", "Adapter Probe"),
                ],
                max_length=16,
            ),
        ),
    ]
