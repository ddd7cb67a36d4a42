from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("tenants", "0004_operator_idempotency"),
    ]

    operations = [
        migrations.AddField(
            model_name="tenant",
            name="allowed_origins",
            field=models.JSONField(blank=True, default=list),
        ),
    ]
