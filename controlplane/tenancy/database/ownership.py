"""Run migrations as the owner of the tables; everything else runs as a role that owns nothing.

DATABASE_URL        the application's role: no superuser, owns nothing, cannot bypass policies
DATABASE_OWNER_URL  the owner, only for `manage.py migrate`; if not set, both are one role
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django.apps import apps
from django.conf import settings
from django.db.backends.base.base import BaseDatabaseWrapper

from controlplane.tenancy.scope import OPERATOR_ROLE


@contextlib.contextmanager
def as_owner(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Connect as the owner of the tables until the block ends."""
    before = dict(connection.settings_dict)
    owner = settings.DATABASE_OWNER
    connection.close()
    connection.settings_dict.update(
        {name: owner[name] for name in ("USER", "PASSWORD", "HOST", "PORT")}
    )
    # The pool has connections of the application's role.
    options = {name: value for name, value in before["OPTIONS"].items() if name != "pool"}
    connection.settings_dict["OPTIONS"] = options
    try:
        yield
    finally:
        connection.close()
        connection.settings_dict.update(
            {name: before[name] for name in ("USER", "PASSWORD", "HOST", "PORT", "OPTIONS")}
        )


def grant_rights(connection: BaseDatabaseWrapper) -> None:
    """Grant the application's role and the operator's role their rights on every existing table.

    They may read and write rows; in the table of an `append_only` model only read and add them.
    """
    with connection.cursor() as cursor:
        cursor.execute("select current_user")
        (owner,) = cursor.fetchone()
        names = {settings.DATABASE_APPLICATION_ROLE, OPERATOR_ROLE} - {owner}
        roles = ", ".join(f'"{name}"' for name in sorted(names))
        cursor.execute(f"grant usage on schema public to {roles}")
        cursor.execute(
            f"grant select, insert, update, delete on all tables in schema public to {roles}"
        )
        cursor.execute(f"grant usage, select on all sequences in schema public to {roles}")
        cursor.execute(f"grant execute on all functions in schema public to {roles}")
        for model in apps.get_models():
            if getattr(model, "append_only", False):
                table = model._meta.db_table
                cursor.execute(f'revoke update, delete, truncate on "{table}" from {roles}')
