"""The history of what was live, and each adapter's policy.

Until now every version became live when it was ready: existing adapters keep that policy, and get
the history that it made.
"""

import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables

HISTORY = """
alter table adapters_adapterversion no force row level security;
insert into adapters_promotion (id, tenant_id, created_at, adapter_id, version_id, number,
    previous_number, cause, reason, actor_type, actor_name)
select gen_random_uuid(), tenant_id, coalesce(ready_at, created_at), adapter_id, id, number,
    lag(number) over newest,
    case when lag(number) over newest is null then 'first' else 'policy' end,
    '', 'system', 'migration'
from adapters_adapterversion where status = 'ready'
window newest as (partition by adapter_id order by number);
set constraints all immediate;
set constraints all deferred;
alter table adapters_adapterversion force row level security;
"""


def policy(default):
    return models.CharField(
        choices=[
            ("hold", "wait until somebody makes it live"),
            ("immediate", "make it live at once"),
        ],
        db_default=default,
        default=default,
        max_length=16,
    )


class Migration(migrations.Migration):
    dependencies = [
        ("adapters", "0008_bounds"),
        ("database", "0001_walls"),  # its key of adapters and tenants
        ("tenants", "0004_operator_idempotency"),
    ]

    operations = [
        migrations.AddField(
            model_name="adapter",
            name="promotion_policy",
            field=policy("immediate"),
        ),
        migrations.AlterField(
            model_name="adapter",
            name="promotion_policy",
            field=policy("hold"),
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
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("number", models.PositiveIntegerField(null=True)),
                ("previous_number", models.PositiveIntegerField(null=True)),
                (
                    "cause",
                    models.CharField(
                        choices=[
                            ("first", "nothing was live when it became ready"),
                            ("policy", "the adapter's policy is immediate"),
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
                (
                    "adapter",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="promotions",
                        to="adapters.adapter",
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
                (
                    "version",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="adapters.adapterversion",
                    ),
                ),
            ],
        ),
        migrations.AddIndex(
            model_name="promotion",
            index=models.Index(
                fields=["tenant", "adapter", "-created_at"], name="promotions_of_adapter"
            ),
        ),
        migrations.RunSQL(HISTORY, migrations.RunSQL.noop),
        TenantTables("Promotion"),
    ]
