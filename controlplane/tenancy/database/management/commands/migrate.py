"""Run Django's migrate as the owner of the tables, then grant the application its rights."""

from __future__ import annotations

from typing import Any

from django.core.management.commands import migrate
from django.db import connections

from controlplane.tenancy.database.ownership import as_owner, grant_rights


class Command(migrate.Command):
    def handle(self, *args: Any, **options: Any) -> None:
        connection = connections[options["database"]]
        with as_owner(connection):
            super().handle(*args, **options)
            if not (options["plan"] or options["check_unapplied"]):
                grant_rights(connection)
