import django.core.validators
import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables


class Migration(migrations.Migration):
    initial = True

    dependencies = [("adapters", "0001_initial"), ("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="Judge",
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
                ("url", models.CharField(max_length=500)),
                ("model", models.CharField(max_length=200)),
                ("sealed", models.BinaryField(default=b"")),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "name"), name="judge_name_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="Suite",
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
                ("description", models.CharField(blank=True, max_length=500)),
                ("last_number", models.PositiveIntegerField(default=0)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("tenant", "name"), name="suite_name_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="SuiteVersion",
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
                    "suite",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="versions",
                        to="evaluations.suite",
                    ),
                ),
                ("number", models.PositiveIntegerField()),
                ("num_cases", models.PositiveIntegerField()),
                ("num_bytes", models.PositiveIntegerField()),
                ("origin", models.JSONField(default=dict)),
                ("has_requests", models.BooleanField(db_default=False, default=False)),
                (
                    "created_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("suite", "number"), name="suite_version_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="Case",
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
                    "suite_version",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="cases",
                        to="evaluations.suiteversion",
                    ),
                ),
                ("position", models.PositiveIntegerField()),
                ("slice", models.CharField(blank=True, max_length=63)),
                ("messages", models.JSONField()),
                ("expected", models.TextField(blank=True)),
                ("checks", models.JSONField(default=list)),
                ("prompt_sha256", models.CharField(max_length=64)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("suite_version", "position"), name="case_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="Evaluation",
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
                    "suite_version",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="evaluations",
                        to="evaluations.suiteversion",
                    ),
                ),
                ("model", models.CharField(max_length=200)),
                ("served", models.CharField(max_length=1000)),
                (
                    "adapter",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="evaluations",
                        to="adapters.adapter",
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("queued", "Queued"),
                            ("running", "Running"),
                            ("judging", "Judging"),
                            ("succeeded", "Succeeded"),
                            ("failed", "Failed"),
                            ("cancelled", "Cancelled"),
                        ],
                        default="queued",
                        max_length=16,
                    ),
                ),
                ("max_tokens", models.PositiveIntegerField(default=256)),
                ("seed", models.PositiveIntegerField(default=0)),
                ("scored_in", models.UUIDField(null=True)),
                ("error", models.CharField(blank=True, max_length=1000)),
                ("num_done", models.PositiveIntegerField(default=0)),
                ("summary", models.JSONField(default=dict)),
                ("attempts", models.PositiveIntegerField(default=0)),
                ("failures", models.PositiveSmallIntegerField(default=0)),
                ("lease_until", models.DateTimeField(null=True)),
                (
                    "created_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                ("started_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(fields=["tenant", "created_at"], name="evaluations_by_age"),
                    models.Index(
                        condition=models.Q(("status__in", ("queued", "running", "judging"))),
                        fields=["lease_until"],
                        name="evaluations_active",
                    ),
                ]
            },
        ),
        migrations.CreateModel(
            name="Result",
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
                    "evaluation",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="results",
                        to="evaluations.evaluation",
                    ),
                ),
                (
                    "case",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="evaluations.case",
                    ),
                ),
                ("output", models.TextField(blank=True)),
                ("finish_reason", models.CharField(blank=True, max_length=16)),
                ("error", models.CharField(blank=True, max_length=500)),
                ("scores", models.JSONField(default=list)),
                ("score", models.FloatField(null=True)),
                ("logprob", models.FloatField(null=True)),
                ("num_tokens", models.PositiveIntegerField(default=0)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("evaluation", "case"), name="result_once")
                ]
            },
        ),
        migrations.CreateModel(
            name="BatchScores",
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
                        related_name="batch_scores",
                        to="adapters.adapterversion",
                    ),
                ),
                (
                    "suite_version",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="evaluations.suiteversion",
                    ),
                ),
                ("digest", models.CharField(max_length=64)),
                ("live_digest", models.CharField(max_length=64)),
                ("base_revision", models.CharField(max_length=64)),
                ("cases_sha256", models.CharField(max_length=64)),
                ("candidate", models.JSONField()),
                ("live", models.JSONField()),
            ],
        ),
        migrations.CreateModel(
            name="GateDecision",
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
                        related_name="gate",
                        to="adapters.adapterversion",
                    ),
                ),
                ("live_number", models.PositiveIntegerField(null=True)),
                (
                    "suite_version",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="evaluations.suiteversion",
                    ),
                ),
                (
                    "candidate",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="evaluations.evaluation",
                    ),
                ),
                (
                    "live",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="evaluations.evaluation",
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("waiting", "its evaluations run"),
                            ("promote", "it passed"),
                            ("hold", "it could not be shown that it is as good"),
                            ("reject", "it is worse"),
                        ],
                        default="waiting",
                        max_length=16,
                    ),
                ),
                ("policy", models.JSONField(default=dict)),
                ("reasons", models.JSONField(default=list)),
                ("findings", models.JSONField(default=list)),
                ("habits", models.JSONField(default=dict)),
                ("num_leaked", models.PositiveIntegerField(default=0)),
                ("outcome", models.CharField(blank=True, max_length=16)),
                ("decided_at", models.DateTimeField(null=True)),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("status", "waiting")),
                        fields=["created_at"],
                        name="gates_waiting",
                    )
                ]
            },
        ),
        TenantTables(
            "Judge",
            "Suite",
            "SuiteVersion",
            "Case",
            "Evaluation",
            "Result",
            "BatchScores",
            "GateDecision",
        ),
    ]
