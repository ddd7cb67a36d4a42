import django.db.models.deletion
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.database.operations import TenantTables

#: Holds for everybody, the tables' owner included: only dropping the triggers gets past them.
REFUSE_CHANGE = """
create function audit_refuse_change() returns trigger language plpgsql as $$
begin
    raise exception 'the audit trail is append-only' using errcode = 'insufficient_privilege';
end $$;
create trigger audit_no_change before update or delete on audit_auditevent
    for each row execute function audit_refuse_change();
create trigger audit_no_truncate before truncate on audit_auditevent
    for each statement execute function audit_refuse_change();
"""
ALLOW_CHANGE = """
drop trigger audit_no_truncate on audit_auditevent;
drop trigger audit_no_change on audit_auditevent;
drop function audit_refuse_change();
"""


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="AuditEvent",
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
                        db_constraint=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to="tenants.tenant",
                    ),
                ),
                ("seq", models.PositiveBigIntegerField()),
                ("occurred_at", models.DateTimeField()),
                (
                    "actor_type",
                    models.CharField(
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
                ("actor_id", models.CharField(max_length=200)),
                ("actor_name", models.CharField(blank=True, max_length=320)),
                ("action", models.CharField(max_length=64)),
                ("resource_type", models.CharField(max_length=64)),
                ("resource_id", models.CharField(max_length=64)),
                ("before", models.JSONField(null=True)),
                ("after", models.JSONField(null=True)),
                ("ip", models.GenericIPAddressField(null=True)),
                ("request_id", models.CharField(blank=True, max_length=64)),
                ("prev_hash", models.CharField(blank=True, max_length=64)),
                ("hash", models.CharField(max_length=64)),
            ],
            options={
                "indexes": [
                    models.Index(fields=["tenant", "action"], name="audit_audit_tenant__3e5f7e_idx")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "seq"), name="audit_seq_once", nulls_distinct=False
                    )
                ],
            },
        ),
        TenantTables("AuditEvent"),
        migrations.RunSQL(REFUSE_CHANGE, ALLOW_CHANGE),
    ]
