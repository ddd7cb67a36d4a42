"""The policy gate, its settings, and promotions by it."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("adapters", "0015_version_import"),
    ]

    operations = [
        migrations.AddField(
            model_name="adapter",
            name="gate",
            field=models.JSONField(
                blank=True, db_default=models.Value({}, models.JSONField()), default=dict
            ),
        ),
        migrations.AlterField(
            model_name="adapter",
            name="promotion_policy",
            field=models.CharField(
                choices=[
                    ("hold", "wait until somebody makes it live"),
                    ("immediate", "make it live at once"),
                    ("gate", "compare it with the live one on a suite, and decide by that"),
                ],
                db_default="hold",
                default="hold",
                max_length=16,
            ),
        ),
        migrations.AlterField(
            model_name="promotion",
            name="cause",
            field=models.CharField(
                choices=[
                    ("first", "nothing was live when it became ready"),
                    ("policy", "the adapter's policy is immediate"),
                    ("gate", "it passed the gate"),
                    ("promoted", "somebody made it live"),
                    ("rolled_back", "somebody went back to it"),
                    ("retired", "the live version was retired"),
                    ("deleted", "the live version was deleted"),
                ],
                max_length=16,
            ),
        ),
    ]
