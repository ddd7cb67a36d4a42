import django.db.models.deletion
import django.db.models.functions.datetime
import django.utils.timezone
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="File",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "purpose",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("fine-tune", "Fine Tune"),
                            ("batch", "Batch"),
                            ("user_data", "User Data"),
                            ("assistants", "Assistants"),
                            ("vision", "Vision"),
                            ("evals", "Evals"),
                            ("batch_output", "Batch Output"),
                            ("fine-tune-results", "Fine Tune Results"),
                        ],
                        max_length=20,
                    ),
                ),
                ("filename", models.CharField(blank=True, max_length=255)),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("uploading", "Uploading"),
                            ("ready", "Ready"),
                            ("deleting", "Deleting"),
                        ],
                        default="uploading",
                        max_length=16,
                    ),
                ),
                ("num_bytes", models.BigIntegerField()),
                ("sha256", models.CharField(blank=True, max_length=64)),
                ("num_rows", models.PositiveIntegerField(null=True)),
                ("expires_at", models.DateTimeField(db_index=True, null=True)),
                (
                    "alive_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        default=django.utils.timezone.now,
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant", "status", "id"], name="files_file_tenant__124da0_idx"
                    ),
                    models.Index(
                        condition=models.Q(("status", "ready"), _negated=True),
                        fields=["created_at"],
                        name="files_unready",
                    ),
                ]
            },
        ),
        migrations.CreateModel(
            name="Upload",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "purpose",
                    models.CharField(
                        choices=[
                            ("fine-tune", "Fine Tune"),
                            ("batch", "Batch"),
                            ("user_data", "User Data"),
                            ("assistants", "Assistants"),
                            ("vision", "Vision"),
                            ("evals", "Evals"),
                            ("batch_output", "Batch Output"),
                            ("fine-tune-results", "Fine Tune Results"),
                        ],
                        max_length=20,
                    ),
                ),
                ("filename", models.CharField(max_length=255)),
                ("mime_type", models.CharField(max_length=255)),
                ("num_bytes", models.BigIntegerField()),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("pending", "Pending"),
                            ("assembling", "Assembling"),
                            ("completed", "Completed"),
                            ("cancelled", "Cancelled"),
                            ("expired", "Expired"),
                        ],
                        default="pending",
                        max_length=16,
                    ),
                ),
                ("expires_at", models.DateTimeField(db_index=True)),
                ("file_expires_s", models.PositiveIntegerField(null=True)),
                (
                    "file",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="files.file",
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(fields=["tenant", "status"], name="files_uploa_tenant__99977f_idx")
                ]
            },
        ),
        migrations.CreateModel(
            name="UploadPart",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=controlplane.tenancy.scoping.new_id,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "tenant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "upload",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="parts",
                        to="files.upload",
                    ),
                ),
                ("is_ready", models.BooleanField(default=False)),
                ("num_bytes", models.BigIntegerField()),
                (
                    "alive_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        default=django.utils.timezone.now,
                        null=True,
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("is_ready", False)),
                        fields=["created_at"],
                        name="files_parts_unready",
                    )
                ]
            },
        ),
        TenantTables("File", "Upload", "UploadPart"),
    ]
