import django.core.validators
import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="BaseModel",
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
                    "name",
                    models.CharField(
                        max_length=63,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?\\Z",
                                "Use 1 to 63 lower-case letters, digits, dots, dashes or underscores; begin and end with a letter or digit.",
                            )
                        ],
                    ),
                ),
                ("revision", models.CharField(max_length=64)),
                ("config", models.JSONField()),
                ("context_length", models.PositiveIntegerField()),
                ("max_rank", models.PositiveIntegerField(default=256)),
                (
                    "known_names",
                    models.JSONField(
                        blank=True, db_default=models.Value([], models.JSONField()), default=list
                    ),
                ),
                ("is_active", models.BooleanField(default=True)),
                (
                    "shutdown_date",
                    models.DateField(
                        blank=True,
                        help_text="From the beginning of this day (UTC) requests for it, and for every adapter of it, are refused, and no training begins. Clients see it in their list of models.",
                        null=True,
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name="DeletedVersion",
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
                ("version_id", models.UUIDField()),
                ("digest", models.CharField(blank=True, max_length=64)),
                ("num_bytes", models.BigIntegerField(default=0)),
                ("removed_at", models.DateTimeField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant", "version_id"], name="adapters_de_tenant__5266a7_idx"
                    ),
                    models.Index(fields=["created_at"], name="deleted_versions"),
                ]
            },
        ),
        migrations.CreateModel(
            name="Adapter",
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
                    "name",
                    models.CharField(
                        max_length=63,
                        validators=[
                            django.core.validators.RegexValidator(
                                "\\A[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?\\Z",
                                "Use 1 to 63 lower-case letters, digits, dots, dashes or underscores; begin and end with a letter or digit.",
                            )
                        ],
                    ),
                ),
                (
                    "base_model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="adapters.basemodel",
                    ),
                ),
                ("description", models.CharField(blank=True, max_length=500)),
                (
                    "promotion_policy",
                    models.CharField(
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
                (
                    "gate",
                    models.JSONField(
                        blank=True, db_default=models.Value({}, models.JSONField()), default=dict
                    ),
                ),
                ("last_deleted", models.PositiveIntegerField(db_default=0, default=0)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "name"), name="adapter_name_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="AdapterVersion",
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
                    "adapter",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="versions",
                        to="adapters.adapter",
                    ),
                ),
                ("number", models.PositiveIntegerField()),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("uploading", "Uploading"),
                            ("uploaded", "Uploaded"),
                            ("validating", "Validating"),
                            ("ready", "Ready"),
                            ("rejected", "Rejected"),
                            ("retired", "Retired"),
                        ],
                        default="uploading",
                        max_length=16,
                    ),
                ),
                (
                    "source",
                    models.CharField(
                        choices=[
                            ("upload", "Upload"),
                            ("training", "Training"),
                            ("import", "Import"),
                            ("checkpoint", "Checkpoint"),
                        ],
                        default="upload",
                        max_length=16,
                    ),
                ),
                ("digest", models.CharField(blank=True, max_length=64)),
                (
                    "origin",
                    models.JSONField(
                        blank=True, db_default=models.Value({}, models.JSONField()), default=dict
                    ),
                ),
                (
                    "kept_digest",
                    models.CharField(blank=True, db_default="", default="", max_length=64),
                ),
                ("is_cleared", models.BooleanField(db_default=False, default=False)),
                ("removed_at", models.DateTimeField(blank=True, null=True)),
                ("num_bytes", models.BigIntegerField(default=0)),
                ("config_num_bytes", models.PositiveIntegerField(default=0)),
                ("accepts_base_mismatch", models.BooleanField(db_default=False, default=False)),
                ("keeps_original", models.BooleanField(db_default=False, default=False)),
                ("copy_nats", models.FloatField(blank=True, null=True)),
                ("deprecated_at", models.DateTimeField(blank=True, null=True)),
                ("shutdown_date", models.DateField(blank=True, null=True)),
                ("max_rank", models.PositiveIntegerField(default=0)),
                ("reasons", models.JSONField(default=list)),
                ("report", models.JSONField(default=dict)),
                (
                    "created_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                ("ready_at", models.DateTimeField(blank=True, null=True)),
                ("status_changed_at", models.DateTimeField(default=django.utils.timezone.now)),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant", "adapter", "number"],
                        name="adapters_ad_tenant__fc18cb_idx",
                    ),
                    models.Index(
                        fields=["digest"],
                        name="versions_by_digest",
                        opclasses=["varchar_pattern_ops"],
                    ),
                    models.Index(
                        condition=models.Q(("is_cleared", False)),
                        fields=["status_changed_at"],
                        name="versions_uncleared",
                    ),
                    models.Index(
                        condition=models.Q(("status__in", ("uploaded", "validating"))),
                        fields=["tenant", "created_at"],
                        name="versions_checking",
                    ),
                    models.Index(
                        condition=models.Q(("removed_at", None), ("status", "retired")),
                        fields=["status_changed_at"],
                        name="versions_to_remove",
                    ),
                    models.Index(
                        condition=models.Q(("kept_digest", ""), _negated=True),
                        fields=["tenant", "kept_digest"],
                        name="versions_kept",
                    ),
                    models.Index(
                        condition=models.Q(("shutdown_date__isnull", False), ("status", "ready")),
                        fields=["shutdown_date"],
                        name="versions_to_retire",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("adapter", "number"), name="version_number_once"
                    )
                ],
            },
        ),
        migrations.AddField(
            model_name="adapter",
            name="live_version",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to="adapters.adapterversion",
            ),
        ),
        migrations.CreateModel(
            name="Promotion",
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
                    "adapter",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="promotions",
                        to="adapters.adapter",
                    ),
                ),
                (
                    "version",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="adapters.adapterversion",
                    ),
                ),
                ("number", models.PositiveIntegerField(null=True)),
                ("previous_number", models.PositiveIntegerField(null=True)),
                (
                    "cause",
                    models.CharField(
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
                ("reason", models.CharField(blank=True, max_length=500)),
                ("actor_type", models.CharField(max_length=16)),
                ("actor_name", models.CharField(blank=True, max_length=320)),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["tenant", "adapter", "-created_at"], name="promotions_of_adapter"
                    )
                ]
            },
        ),
        migrations.CreateModel(
            name="VersionUpload",
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
                    "version",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="uploads",
                        to="adapters.adapterversion",
                    ),
                ),
                ("file", models.CharField(max_length=32)),
                ("num_bytes", models.BigIntegerField()),
                ("part_bytes", models.PositiveIntegerField()),
                ("upload_id", models.TextField(blank=True, default="")),
                ("digests", models.JSONField(default=dict)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("version", "file"), name="version_upload_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="AdapterInspection",
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
                    "version",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="inspection",
                        to="adapters.adapterversion",
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("waiting", "its turn has not come yet"),
                            ("agreed", "a worker computes what PEFT computes"),
                            ("mismatch", "a worker computes something else"),
                            ("not_run", "no worker was asked"),
                        ],
                        default="waiting",
                        max_length=16,
                    ),
                ),
                ("why", models.CharField(blank=True, max_length=500)),
                ("is_held", models.BooleanField(default=False)),
                ("held_until", models.DateTimeField(null=True)),
                ("facts", models.JSONField(default=dict)),
                ("probe", models.JSONField(default=dict)),
                ("compared", models.JSONField(default=list)),
                ("doctor", models.JSONField(default=dict)),
                ("attempts", models.PositiveIntegerField(default=0)),
                ("lease_until", models.DateTimeField(null=True)),
                ("inspected_at", models.DateTimeField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("status__in", ("waiting", "not_run"))),
                        fields=["lease_until"],
                        name="inspections_open",
                    )
                ]
            },
        ),
        migrations.CreateModel(
            name="VersionImport",
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
                    "version",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="adapters.adapterversion",
                    ),
                ),
                ("sealed", models.BinaryField()),
                ("attempts", models.PositiveSmallIntegerField(default=0)),
                ("next_attempt_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("fence", models.PositiveIntegerField(default=0)),
                ("lease_until", models.DateTimeField(null=True)),
            ],
        ),
        TenantTables(
            "Adapter",
            "Promotion",
            "AdapterVersion",
            "VersionUpload",
            "AdapterInspection",
            "VersionImport",
            "DeletedVersion",
        ),
    ]
