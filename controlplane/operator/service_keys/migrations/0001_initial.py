import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

import controlplane.tenancy.scoping
from controlplane.tenancy.scope import OPERATOR_ROLE

#: No tenant's scope sees a row or makes one: only statements inside `all_tenants` do.
PROTECT = f"""
alter table service_keys_servicekey enable row level security;
alter table service_keys_servicekey force row level security;
create policy operator_all on service_keys_servicekey
    for all to {OPERATOR_ROLE} using (true) with check (true);
"""
EXPOSE = """
drop policy operator_all on service_keys_servicekey;
alter table service_keys_servicekey no force row level security;
alter table service_keys_servicekey disable row level security;
"""


class Migration(migrations.Migration):
    initial = True

    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="ServiceKey",
            fields=[
                ("public_id", models.CharField(max_length=32, unique=True)),
                ("name", models.CharField(max_length=100)),
                ("secret_hmac", models.BinaryField(max_length=32)),
                ("last4", models.CharField(max_length=4)),
                ("old_secret_hmac", models.BinaryField(max_length=32, null=True)),
                ("old_secret_until", models.DateTimeField(blank=True, null=True)),
                (
                    "pepper_id",
                    models.CharField(blank=True, db_default="", default="", max_length=16),
                ),
                (
                    "old_pepper_id",
                    models.CharField(blank=True, db_default="", default="", max_length=16),
                ),
                ("allowed_ips", models.JSONField(blank=True, default=list)),
                (
                    "created_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                ("expires_at", models.DateTimeField(blank=True, null=True)),
                ("revoked_at", models.DateTimeField(blank=True, null=True)),
                ("last_used_at", models.DateTimeField(blank=True, null=True)),
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
                ("scopes", models.JSONField()),
            ],
        ),
        migrations.RunSQL(PROTECT, EXPOSE),
    ]
