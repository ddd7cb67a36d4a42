from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("audit", "0001_initial"),
    ]

    operations = [
        migrations.AlterField(
            model_name="auditevent",
            name="actor_type",
            field=models.CharField(
                choices=[
                    ("api_key", "Api Key"),
                    ("service_key", "Service Key"),
                    ("user", "User"),
                    ("anonymous", "Anonymous"),
                    ("system", "System"),
                ],
                max_length=16,
            ),
        ),
    ]
